"""The suffix index against searching the text, the n-gram drafter, and its nodes joined to a head's tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.calibration import Calibration, LevelMap
from eyas.costs import CostTable
from eyas.drafters.base import Drafter
from eyas.drafters.grafted import GraftedDrafter
from eyas.drafters.ngram import NgramDrafter, NgramSession, SuffixIndex
from eyas.errors import InvalidInputError
from eyas.generate import Session, Step, generate
from eyas.policies import Candidates, DynamicPolicy, StaticPolicy, TreePolicy, grow_tree
from eyas.policies.base import Children
from eyas.policies.budgeted import BudgetedPolicy
from eyas.policies.merge import graft
from eyas.policies.trace import PolicyTrace
from eyas.sampling import SamplingParams
from eyas.stopping import StopParams
from eyas.tree import DraftTree, Ints
from support.drafters import Script, ScriptedDrafter, anti_oracle, dial, oracle
from support.tiny import TableTarget

Path = tuple[int, ...]
texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def by_search(text: list[int], suffix: list[int], longest: int) -> tuple[int, dict[int, int]]:
    """The longest suffix of ``suffix`` that is followed by something in ``text``, and by what how often."""
    for length in range(min(longest, len(suffix)), 0, -1):
        tail = suffix[-length:]
        found = [text[start + length] for start in range(len(text) - length) if text[start : start + length] == tail]
        if found:
            return length, dict(Counter(found))
    return 0, {}


@given(texts, st.integers(1, 6))
def test_the_index_finds_what_a_search_finds(text: list[int], longest: int) -> None:
    index = SuffixIndex(longest)
    for token in text:
        index.append(token)
    length, followers = index.followers(index.end)
    assert (length, followers) == by_search(text, text, longest)
    # The latest comes first.
    last_seen = {
        token: max(i for i in range(length, len(text)) if text[i] == token and text[i - length : i] == text[-length:])
        for token in followers
    }
    assert list(followers) == sorted(followers, key=lambda token: -last_seen[token])


@given(texts, st.lists(st.integers(0, 3), max_size=6), st.integers(1, 6))
def test_supposed_tokens_are_looked_up_but_not_counted(text: list[int], supposed: list[int], longest: int) -> None:
    index = SuffixIndex(longest)
    for token in text:
        index.append(token)
    position = index.end
    for token in supposed:
        position = index.step(position, token)
    assert index.followers(position) == by_search(text, text + supposed, longest)
    assert index.followers(index.end) == by_search(text, text, longest)


def session_over(text: list[int], **settings: object) -> NgramSession:
    session = NgramDrafter(**settings).new_session()  # type: ignore[arg-type]
    session.commit(text)
    return session


def paths(nodes: DraftTree | Candidates) -> dict[Path, float]:
    """Tokens below the root -> log path value."""
    found: dict[int, Path] = {0: ()}
    for node in range(1, len(nodes)):
        found[node] = (*found[int(nodes.parents[node])], int(nodes.tokens[node]))
    assert len(set(found.values())) == len(found), "a node is there twice"
    return {path: float(nodes.log_values[node]) for node, path in found.items() if node}


def test_a_repetition_is_continued() -> None:
    session = session_over([1, 2, 3, 4, 5, 6, 9, 1, 2, 3], hit_rates=(0.5, 0.6, 0.7), longest=3)
    chain = session.propose(3, StaticPolicy.chain(3), 9)
    assert chain.tokens.tolist() == [3, 4, 5, 6]
    assert np.exp(chain.log_values).tolist() == pytest.approx([1.0, 0.7, 0.49, 0.343])
    assert session.lookup(3, 3, 9).tokens.tolist() == [3, 4, 5, 6]
    assert session.lookup(3, 9, 2).tokens.tolist() == [3, 4, 5]
    assert session.lookup(3, 9, 9, floor=0.4).tokens.tolist() == [3, 4, 5]


def test_followers_share_the_hit_rate_by_count() -> None:
    session = session_over([7, 1, 7, 2, 7, 1, 7], hit_rates=(0.6,), longest=1)
    tree = session.propose(7, DynamicPolicy(1, 3, 3), 9)
    assert paths(tree) == pytest.approx({(1,): np.log(0.4), (2,): np.log(0.2)})


@given(texts, st.integers(1, 6), st.integers(1, 8))
def test_lookup_is_the_best_of_what_a_wide_policy_grows(text: list[int], longest: int, budget: int) -> None:
    session = session_over(text, longest=longest)
    root = text[-1]
    best = session.lookup(root, budget, 3, topk=4, floor=1e-9)
    wide = session.propose(root, DynamicPolicy(3, 64, 400), 3)
    values = sorted(paths(wide).values(), reverse=True)[:budget]
    assert sorted(paths(best).values(), reverse=True) == pytest.approx(values, abs=1e-4)
    assert paths(best).items() <= {path: pytest.approx(value, abs=1e-4) for path, value in paths(wide).items()}.items()


def test_nothing_like_it_before_means_nothing_proposed() -> None:
    session = session_over([1, 2, 3, 4])
    assert len(session.propose(4, DynamicPolicy(3, 3, 9), 9)) == 1
    assert len(session.lookup(4, 9, 9)) == 1
    assert len(NgramDrafter().new_session().propose(4, DynamicPolicy(), 9)) == 1  # a prompt of one token
    assert len(session_over([1, 1, 1]).propose(1, DynamicPolicy(), 0)) == 1


def test_truncation_forgets() -> None:
    session = session_over([1, 2, 3, 9, 9, 1, 2, 3])
    session.truncate(3)
    assert session.length == 3
    session.commit([1, 2])
    assert session.lookup(2, 1, 9).tokens.tolist() == [2, 3]
    assert len(session_over([1, 2, 3]).lookup(3, 1, 9)) == 1


def test_hit_rates_learn_from_the_answer_and_not_from_the_prompt() -> None:
    session = session_over([1, 2] * 20, hit_rates=(0.5,), longest=1, prior_weight=2.0)
    assert session.hit_rate(1) == 0.5
    session.propose(2, DynamicPolicy(1, 1, 1), 9)
    session.commit([1, 2])  # two hits
    assert session.hit_rate(1) == pytest.approx((2 * 0.5 + 2) / 4)
    session.commit([7])  # a miss; then a token without a match
    session.commit([8])
    assert session.hit_rate(1) == pytest.approx((2 * 0.5 + 2) / 5)


def test_a_wrong_root_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="root is token 5, but the last committed one is 2"):
        session_over([1, 2]).propose(5, DynamicPolicy(), 9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"longest": 0}, "at least 1 token"),
        ({"hit_rates": ()}, "above 0"),
        ({"hit_rates": (0.5, 1.5)}, "at most at 1"),
        ({"prior_weight": 0.0}, "weight above 0"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        NgramDrafter(**settings)  # type: ignore[arg-type]


# --- one tree ---


def scored(seed: int, k: int) -> Callable[[Candidates, Ints], Children]:
    """Children with random tokens and confidences, decided by the node's index."""

    def score(candidates: Candidates, expanded: Ints) -> Children:
        tokens, logs = [], []
        for node in expanded.tolist():
            rng = np.random.default_rng([seed, node])
            tokens.append(rng.permutation(6)[:k])
            logs.append(np.log(np.sort(rng.dirichlet(np.ones(k)))[::-1]))
        return Children(np.array(tokens, np.int64), np.array(logs, np.float32))

    return score


def head_candidates(seed: int, k: int, steps: int) -> Candidates:
    trace = PolicyTrace(DynamicPolicy(steps, k, 99))
    grow_tree(5, trace, steps, scored(seed, k))
    assert trace.candidates is not None
    return trace.candidates


@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 3), texts, st.integers(1, 8))
def test_a_graft_is_the_union_at_the_better_price(seed: int, k: int, steps: int, text: list[int], budget: int) -> None:
    head = head_candidates(seed, k, steps)
    tree = session_over([*text, 5]).lookup(5, budget, 5, floor=1e-6)
    union = graft(head, tree)
    joined = union.candidates

    ours, theirs = paths(head), paths(tree)
    assert paths(joined).keys() == ours.keys() | theirs.keys()

    def own(values: dict[Path, float], path: Path) -> float:
        """log confidence given the parent; -inf where this proposer does not know the node."""
        return values[path] - (values[path[:-1]] if len(path) > 1 else 0.0) if path in values else -np.inf

    for path, value in paths(joined).items():
        steps_ = [path[: depth + 1] for depth in range(len(path))]
        assert value == pytest.approx(sum(max(own(ours, p), own(theirs, p)) for p in steps_), abs=1e-4)
    # The candidates' own contract: levels, ranks, values.
    assert joined.tokens[union.own].tolist() == head.tokens.tolist()
    assert joined.tokens[union.grafted].tolist() == tree.tokens.tolist()
    for depth in range(joined.depth + 1):
        level = slice(*joined.levels[depth : depth + 2])
        assert all(
            len(path) == depth for node, path in enumerate(((), *paths(joined))) if level.start <= node < level.stop
        )
    assert len({*zip(joined.parents.tolist(), joined.ranks.tolist(), strict=True)}) == len(joined)
    assert (joined.log_values[1:] <= joined.log_values[joined.parents[1:]]).all()
    selected = DynamicPolicy(9, 4, 7).select(joined)
    assert set(joined.parents[selected].tolist()) <= {0, *selected.tolist()}


def test_grafting_nothing_changes_nothing() -> None:
    head = head_candidates(3, 3, 2)
    union = graft(head, DraftTree.root_only(5))
    for name in ("tokens", "parents", "log_probs", "log_values", "ranks"):
        assert getattr(union.candidates, name).tolist() == getattr(head, name).tolist()
    assert union.candidates.levels == head.levels


COSTS = CostTable((1, 8, 32), (10.0, 11.0, 30.0), (1, 8), (0.5, 0.8), first_ms=0.5)
MODEST = Calibration((LevelMap((-9.0, -2.0, -0.01), (-9.5, -3.0, -0.6)), LevelMap((-4.0, -0.01), (-5.0, -0.8))))
"""Of a head that promises too much."""

POLICIES: list[TreePolicy] = [
    DynamicPolicy(3, 3, 8),
    DynamicPolicy(3, 3, 8, rerank=False),
    StaticPolicy.chain(3),
    StaticPolicy.from_paths([[0], [1], [0, 1], [1, 0]]),
    BudgetedPolicy(COSTS, ((0.5, 0.2, 0.1),), 4, 3, 12),
    BudgetedPolicy(COSTS, ((0.5, 0.2, 0.1),), 4, 3, 12, rate=0.15),
    BudgetedPolicy(COSTS, ((0.01,),), 4, 3, 12),  # never drafts by itself
    BudgetedPolicy(COSTS, ((0.5, 0.2, 0.1),), 4, 3, 12, MODEST, rate=0.15),
    DynamicPolicy(3, 3, 8, calibration=MODEST),
]


def looping_target() -> TableTarget:
    """Its greedy text repeats itself before long."""
    return TableTarget(8, seed=11, max_positions=120, memory=2)


def answer(target: TableTarget, drafter: Drafter | None, policy: TreePolicy, **params: float) -> list[Step]:
    session = Session(target, drafter)
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return list(generate(session, [1, 2, 3, 1], policy=policy, params=sampling, stop=StopParams(max_tokens=60)))


def tokens(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


@pytest.mark.parametrize("policy", POLICIES)
def test_ngram_answers_stay_the_same(policy: TreePolicy) -> None:
    target = looping_target()
    steps = answer(target, NgramDrafter(), policy)
    assert tokens(steps) == tokens(answer(target, None, policy))
    if getattr(policy, "drafts", True):
        assert steps[-1].stats.accepted_tokens > 10  # it did guess
    assert len(tokens(answer(target, NgramDrafter(), policy, temperature=1.0))) == 60


@pytest.mark.parametrize("script", [oracle, anti_oracle, dial(0.5)])
@pytest.mark.parametrize("policy", POLICIES)
def test_grafted_answers_stay_the_same(policy: TreePolicy, script: Script) -> None:
    target = looping_target()
    drafter = GraftedDrafter(ScriptedDrafter(target.ranking, script, first_token=1))
    steps = answer(target, drafter, policy)
    assert tokens(steps) == tokens(answer(target, None, policy))
    for step in steps[1:]:
        assert step.cycle is not None
        trace, tree = step.cycle.trace, step.cycle.tree
        assert tree.num_draft_tokens <= policy.num_draft_tokens
        assert len(paths(tree)) == tree.num_draft_tokens  # no node twice
        if trace.candidates is not None:  # what is drawn is what was verified
            kept = [node for node in trace.kept.tolist() if np.isfinite(trace.candidates.log_values[node])]
            assert trace.candidates.tokens[kept].tolist() == tree.tokens[1:].tolist()
            assert set(trace.expanded) <= set(trace.candidates.parents.tolist())


def test_the_index_helps_a_head_that_is_never_right() -> None:
    target = looping_target()
    head = ScriptedDrafter(target.ranking, anti_oracle, first_token=1)
    policy = DynamicPolicy(3, 3, 8)
    alone, grafted = answer(target, head, policy), answer(target, GraftedDrafter(head), policy)
    assert alone[-1].stats.accepted_tokens == 0
    assert grafted[-1].stats.accepted_tokens > 10


def test_a_calibration_of_the_head_leaves_hit_rates_alone() -> None:
    """Under a policy that corrects the head's word, a grafted node is worth its hit rate, as far as the maps reach."""
    target = looping_target()
    head = ScriptedDrafter(target.ranking, anti_oracle, first_token=1)
    ngram = NgramDrafter(hit_rates=(0.3, 0.4, 0.5))
    policy = BudgetedPolicy(COSTS, ((0.5, 0.2, 0.1),), 4, 3, 12, MODEST, rate=0.15)
    text = [1, 2, 3, 4, 1, 2, 5, 3, 4, 1, 2]
    alone, grafted = ngram.new_session(), GraftedDrafter(head, ngram).new_session()
    alone.commit(text[1:])
    grafted.commit(text[1:], None)
    guesses = paths(alone.lookup(text[-1], 12, 12))
    trace = PolicyTrace(policy)
    grafted.propose(text[-1], trace, 12)
    assert trace.candidates is not None
    worth = trace.candidates.acceptance_by(MODEST)
    own = {(token,) for token in head.proposals(text)[:3]}
    firsts = [path for path in guesses if len(path) == 1 and path not in own]
    assert firsts
    for path in firsts:
        (node,) = np.flatnonzero((trace.candidates.parents == 0) & (trace.candidates.tokens == path[0]))
        assert worth[node] == pytest.approx(np.exp(guesses[path]), rel=1e-5)


@given(st.lists(st.floats(-8.0, 0.0), min_size=1, max_size=8))
def test_promises_are_the_inverse_of_the_map(logs: list[float]) -> None:
    level = MODEST.levels[0]
    accepted = np.array(logs)
    reachable = np.minimum(accepted, level.observed[-1])
    np.testing.assert_allclose(level(np.array([level.inverse(each) for each in logs])), reachable, atol=1e-6)
    for flat in (
        LevelMap((-3.0, -2.0, -1.0), (-1.0, -0.5, -0.5)),
        LevelMap((-4.0, -3.0, -2.0, -1.0), (-2.0, -2.0, -0.5, -0.5)),
    ):
        inverted = np.array([flat.inverse(each) for each in logs])
        np.testing.assert_allclose(flat(inverted), np.minimum(accepted, -0.5), atol=1e-6)


def test_promised_values_never_grow_along_a_path() -> None:
    steep = Calibration((LevelMap((-4.0, -0.1), (-5.0, -0.2)), LevelMap((-4.0, -0.1), (-9.0, -5.0))))
    tree = DraftTree(np.arange(4), np.array([-1, 0, 1, 2]), np.log(np.array([1.0, 0.5, 0.3, 0.2], np.float32)))
    values = steep.promised(tree).log_values
    assert (np.diff(values) <= 0).all()
    assert values[0] == 0.0
    assert Calibration().promised(tree) is tree


def test_two_turns_share_a_session() -> None:
    target = looping_target()
    policy = DynamicPolicy(3, 3, 8)
    session = Session(target, GraftedDrafter(ScriptedDrafter(target.ranking, dial(0.5), first_token=1)))
    stop = StopParams(max_tokens=20)
    first = tokens(list(generate(session, [1, 2, 3], policy=policy, stop=stop)))
    turn = [1, 2, 3, *first[:9], 4, 5]
    second = tokens(list(generate(session, turn, policy=policy, stop=stop)))
    assert second == tokens(list(generate(Session(target), turn, stop=stop)))


def test_a_grafted_drafter_is_named_and_checked() -> None:
    target = looping_target()
    head = ScriptedDrafter(target.ranking, oracle, first_token=1, feature_levels=1)
    drafter = GraftedDrafter(head)
    assert drafter.name == "scripted+ngram"
    assert drafter.feature_levels == 1
    with pytest.raises(InvalidInputError, match="at least 1, got 0 and 12"):
        GraftedDrafter(head, budget=0)
