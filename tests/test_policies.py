"""Tree policies against slow, plain restatements of what they promise, on random tables of confidences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.errors import InvalidInputError
from eyas.policies import POLICIES, Candidates, DynamicPolicy, StaticPolicy, TreePolicy, grow_tree, make_policy
from eyas.policies.base import Children
from eyas.policies.static import EAGLE1_TEMPLATE
from eyas.policies.trace import PolicyTrace
from eyas.tree import DraftTree, Floats, Ints

ROOT = 1000
Path = tuple[int, ...]

STYLES: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    # Confidences of k children, in any order.
    "smooth": lambda rng, k: rng.dirichlet(np.ones(k)) * rng.uniform(0.5, 1.0),
    "ties": lambda rng, k: rng.choice([1.0, 0.5, 0.25, 0.125], k),
    "certain": lambda rng, k: np.r_[1.0, np.full(k - 1, 1e-9)],
    "all certain": lambda rng, k: np.ones(k),
    # So close to 1 that float32 path values do not move.
    "rounding": lambda rng, k: np.r_[1.0 - 1e-8, 1.0 - 3e-8, rng.uniform(0, 1e-3, k)][:k],
    "padded": lambda rng, k: np.r_[rng.uniform(0.1, 1.0, k - k // 2), np.zeros(k // 2)],
}


@dataclass(frozen=True)
class Table:
    """A drafter: confidences drawn from the seed and the node's path alone; tokens name ranks, so paths name nodes."""

    style: str
    seed: int
    k: int

    def log_probs(self, path: Path) -> Floats:
        """[k] float32, non-increasing."""
        confidence = np.sort(STYLES[self.style](np.random.default_rng([self.seed, *path]), self.k))[::-1]
        with np.errstate(divide="ignore"):
            return np.log(confidence).astype(np.float32)

    def score(self, candidates: Candidates, expanded: Ints) -> Children:
        rows = [self.log_probs(path_of(candidates, node)) for node in expanded.tolist()]
        return Children(np.tile(np.arange(self.k), (len(rows), 1)), np.array(rows))


def path_of(nodes: Candidates | DraftTree, node: int) -> Path:
    """Tokens below the root down to a node."""
    path: list[int] = []
    while node > 0:
        path.append(int(nodes.tokens[node]))
        node = int(nodes.parents[node])
    return tuple(path[::-1])


def paths(tree: DraftTree) -> list[Path]:
    """Every draft token of a tree by its path, in node order."""
    return [path_of(tree, node) for node in range(1, len(tree))]


def is_closed(kept: set[Path]) -> bool:
    return all(len(path) == 1 or path[:-1] in kept for path in kept)


def eagle2_by_hand(table: Table, steps: int, m: int, *, value: bool = True) -> tuple[dict[Path, np.float32], set[Path]]:
    """EAGLE-2 restated over paths: (path value of every generated node in order, expanded nodes)."""
    values: dict[Path, np.float32] = {(): np.float32(0)}
    own: dict[Path, np.float32] = {(): np.float32(0)}
    expanded: list[Path] = []
    level: list[Path] = [()]
    for _ in range(steps):
        by = values if value else own
        best = set(sorted(level, key=lambda path: -by[path])[: table.k])  # sorted is stable: earlier wins a tie
        chosen = [path for path in level if path in best]
        expanded += chosen
        level = []
        for parent in chosen:
            for rank, log_prob in enumerate(table.log_probs(parent)):
                child = (*parent, rank)
                values[child] = np.float32(values[parent] + log_prob)
                own[child] = log_prob
                level.append(child)
    del values[()]
    return values, set(expanded)


tables = st.builds(Table, st.sampled_from(list(STYLES)), st.integers(0, 2**31), st.integers(1, 5))
steps = st.integers(1, 5)
budgets = st.integers(1, 40)


@given(tables, steps, budgets)
def test_dynamic_keeps_the_m_most_valuable_nodes(table: Table, num_steps: int, m: int) -> None:
    trace = PolicyTrace(DynamicPolicy(num_steps, table.k, m))
    tree = grow_tree(ROOT, trace, num_steps, table.score)
    values, expanded = eagle2_by_hand(table, num_steps, m)

    generated = list(values)
    best = sorted(generated, key=lambda path: (-values[path], len(path), generated.index(path)))[:m]
    alive = {path for path in best if np.isfinite(values[path])}
    assert set(paths(tree)) == alive
    assert len(paths(tree)) == len(alive)
    assert is_closed(alive)
    assert tree.tokens[0] == ROOT
    assert [values[path] for path in paths(tree)] == tree.log_values[1:].tolist()

    assert trace.candidates is not None
    assert [path_of(trace.candidates, node) for node in range(1, len(trace.candidates))] == generated
    assert {path_of(trace.candidates, node) for node in trace.expanded} == expanded
    assert {path_of(trace.candidates, node) for node in trace.kept.tolist()} == set(best)


@given(tables, steps, budgets, st.booleans(), st.booleans())
def test_ablations_stay_closed_and_within_budget(
    table: Table, num_steps: int, m: int, value: bool, rerank: bool
) -> None:
    trace = PolicyTrace(DynamicPolicy(num_steps, table.k, m, value=value, rerank=rerank))
    tree = grow_tree(ROOT, trace, num_steps, table.score)
    _, expanded = eagle2_by_hand(table, num_steps, m, value=value)
    assert trace.candidates is not None
    assert {path_of(trace.candidates, node) for node in trace.expanded} == expanded
    assert is_closed(set(paths(tree)))
    assert tree.num_draft_tokens <= m
    assert max(tree.depths) <= num_steps


def table_score(table: dict[Path, list[float]]) -> Callable[[Candidates, Ints], Children]:
    """A drafter written down as path -> confidences; unnamed paths have even children."""

    def score(candidates: Candidates, expanded: Ints) -> Children:
        k = len(next(iter(table.values())))
        rows = [table.get(path_of(candidates, node), [1 / k] * k) for node in expanded.tolist()]
        return Children(np.tile(np.arange(k), (len(rows), 1)), np.log(np.array(rows, np.float32)))

    return score


CONFIDENT_LATE = {
    (): [0.6, 0.4],
    (0,): [0.5, 0.5],  # V .30 .30
    (1,): [0.9, 0.1],  # V .36 .04
    (0, 0): [0.5, 0.5],  # V .15 .15
    (0, 1): [0.7, 0.3],  # V .21 .09
    (1, 0): [0.99, 0.01],  # V .356 .004
}


def test_the_two_stages_by_hand() -> None:
    score = table_score(CONFIDENT_LATE)

    def grown(**switches: bool) -> tuple[set[Path], set[Path]]:
        trace = PolicyTrace(DynamicPolicy(num_steps=3, topk=2, num_draft_tokens=5, **switches))
        tree = grow_tree(ROOT, trace, 3, score)
        assert trace.candidates is not None
        return {path_of(trace.candidates, node) for node in trace.expanded}, set(paths(tree))

    # Level 2 holds .30 .30 .36 .04: the last .30 loses the tie for the second place.
    assert grown() == ({(), (0,), (1,), (1, 0), (0, 0)}, {(0,), (1,), (1, 0), (1, 0, 0), (0, 0)})
    # Without reranking the budget goes level by level, each level's best first.
    assert grown(rerank=False) == ({(), (0,), (1,), (1, 0), (0, 0)}, {(0,), (1,), (1, 0), (0, 0), (1, 0, 0)})
    # By own confidence level 2 holds .5 .5 .9 .1.
    assert grown(value=False)[0] == {(), (0,), (1,), (1, 0), (0, 0)}


def test_value_and_confidence_disagree() -> None:
    # By value the children of 0 win (.54 .36 against .09); by confidence the sure child of the unlikely 1 is expanded.
    table = {(): [0.9, 0.1], (0,): [0.6, 0.4], (1,): [0.95, 0.05]}

    def expanded(value: bool) -> set[Path]:
        trace = PolicyTrace(DynamicPolicy(num_steps=3, topk=2, num_draft_tokens=4, value=value))
        grow_tree(ROOT, trace, 3, table_score(table))
        assert trace.candidates is not None
        return {path_of(trace.candidates, node) for node in trace.expanded}

    assert expanded(value=True) == {(), (0,), (1,), (0, 0), (0, 1)}
    assert expanded(value=False) == {(), (0,), (1,), (0, 0), (1, 0)}


def test_without_reranking_the_last_level_keeps_its_best() -> None:
    table = {(): [0.55, 0.45], (0,): [0.5, 0.5], (1,): [0.9, 0.1]}
    tree = grow_tree(ROOT, DynamicPolicy(2, 2, 3, rerank=False), 2, table_score(table))
    assert set(paths(tree)) == {(0,), (1,), (1, 0)}  # V .405 before .275


def test_a_child_that_ties_its_parent_never_comes_without_it() -> None:
    # Every confidence is 1: all nodes tie, the shallower ones win.
    tree = grow_tree(ROOT, DynamicPolicy(3, 2, 5), 3, Table("all certain", 0, 2).score)
    assert paths(tree) == [(0,), (1,), (0, 0), (0, 1), (1, 0)]


@given(tables, steps, st.integers(1, 8))
def test_a_chain_is_a_dynamic_tree_of_width_one(table: Table, num_steps: int, budget: int) -> None:
    score = Table(table.style, table.seed, 1).score
    chain = make_policy("chain", num_steps=num_steps, topk=7, num_draft_tokens=budget)
    dynamic = DynamicPolicy(num_steps, 1, budget)
    ours, theirs = grow_tree(ROOT, chain, num_steps, score), grow_tree(ROOT, dynamic, num_steps, score)
    assert ours.is_chain()
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    assert ours.parents.tolist() == theirs.parents.tolist()
    assert ours.log_values.tolist() == theirs.log_values.tolist()


EVERY_POLICY: list[TreePolicy] = [
    *(make_policy(name, num_steps=4, topk=3, num_draft_tokens=9) for name in POLICIES),
    DynamicPolicy(4, 3, 9, value=False, rerank=False),
    StaticPolicy.eagle1(),
]


@pytest.mark.parametrize("max_depth", range(7))
@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_no_tree_is_deeper_than_allowed(policy: TreePolicy, max_depth: int) -> None:
    passes: list[int] = []
    table = Table("smooth", 7, policy.topk)

    def score(candidates: Candidates, expanded: Ints) -> Children:
        passes.append(len(expanded))
        return table.score(candidates, expanded)

    tree = grow_tree(ROOT, policy, max_depth, score)
    assert len(passes) == min(max_depth, policy.num_steps)
    assert max(tree.depths) <= max_depth
    assert tree.num_draft_tokens <= policy.num_draft_tokens
    assert max_depth > 0 or len(tree) == 1


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_guesses_of_confidence_zero_are_dropped(policy: TreePolicy) -> None:
    """A drafter that knows one continuation pads the rest: only that one is verified."""

    def score(candidates: Candidates, expanded: Ints) -> Children:
        log_probs = np.full((len(expanded), policy.topk), -np.inf, np.float32)
        log_probs[:, 0] = np.log(np.float32(0.5))
        return Children(np.tile(np.arange(policy.topk), (len(expanded), 1)), log_probs)

    tree = grow_tree(ROOT, policy, 3, score)
    assert paths(tree) == [(0,), (0, 0), (0, 0, 0)]

    nothing = grow_tree(ROOT, policy, 3, lambda _, expanded: Children(*empty_handed(len(expanded), policy.topk)))
    assert len(nothing) == 1


def empty_handed(n: int, k: int) -> tuple[Ints, Floats]:
    return np.zeros((n, k), np.int64), np.full((n, k), -np.inf, np.float32)


def test_eagle1_is_the_published_tree() -> None:
    policy = StaticPolicy.eagle1()
    assert policy.num_draft_tokens == len(set(policy.template)) == 25
    assert set(policy.template) == set(EAGLE1_TEMPLATE)
    assert is_closed(set(policy.template))
    widths = [sum(len(path) == depth for path in policy.template) for depth in range(1, 6)]
    assert widths == [4, 8, 8, 3, 2]
    assert (policy.num_steps, policy.topk) == (5, 4)


@pytest.mark.parametrize("budget", range(1, 30))
def test_eagle1_cut_to_any_budget_is_closed(budget: int) -> None:
    template = StaticPolicy.eagle1(budget).template
    assert len(template) == min(budget, 25)
    assert is_closed(set(template))
    assert set(template) <= set(StaticPolicy.eagle1(budget + 1).template)


@st.composite
def templates(draw: st.DrawFn) -> list[Path]:
    known: list[Path] = [()]
    for _ in range(draw(st.integers(1, 20))):
        known.append((*draw(st.sampled_from(known)), draw(st.integers(0, 3))))
    unique = list(dict.fromkeys(known))[1:]
    return draw(st.permutations(unique))


@given(templates(), tables)
def test_a_static_tree_is_its_template_in_every_context(template: list[Path], table: Table) -> None:
    policy = StaticPolicy.from_paths(template)
    table = Table("all certain" if table.style == "padded" else table.style, table.seed, policy.topk)
    passes: list[Path] = []

    def score(candidates: Candidates, expanded: Ints) -> Children:
        passes.extend(path_of(candidates, node) for node in expanded.tolist())
        return table.score(candidates, expanded)

    tree = grow_tree(ROOT, policy, 99, score)
    alive = [path for path in template if np.isfinite(value_of(table, path))]
    assert sorted(paths(tree)) == sorted(alive)
    assert sorted(passes) == sorted({path[:-1] for path in template})  # only inner nodes cost drafter work
    for path, log_value in zip(paths(tree), tree.log_values[1:].tolist(), strict=True):
        assert log_value == pytest.approx(value_of(table, path), abs=1e-5)


def value_of(table: Table, path: Path) -> float:
    return sum(float(table.log_probs(path[:depth])[rank]) for depth, rank in enumerate(path))


def test_templates_as_a_user_writes_them() -> None:
    assert StaticPolicy.from_paths([[0], [1], [0, 0]]).template == ((0,), (1,), (0, 0))
    assert StaticPolicy.from_paths([[0, 0], [0]]).num_steps == 2  # any order
    sparse = StaticPolicy.from_paths([[2], [2, 1]])
    assert (sparse.topk, sparse.num_steps, sparse.num_draft_tokens) == (3, 2, 2)
    assert StaticPolicy.from_paths(np.array([[0], [1]])).num_draft_tokens == 2


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "at least one node"),
        ([[0], [1, 0]], r"node \[1, 0\] but not its parent \[1\]; add the parent"),
        ([[0, 0]], r"but not its parent \[0\]"),
        ([[0], [0]], "names a node twice"),
        ([[]], "non-empty lists of ranks >= 0, got \\[\\]"),
        ([[0], [-1]], r">= 0, got \[-1\]"),
        ([0, 1], "list of lists of ranks"),
        ([["a"]], "list of lists of ranks"),
        (["01"], "list of lists of ranks"),
        ([[0.5]], "list of lists of ranks"),
        (7, "list of lists of ranks"),
    ],
)
def test_templates_that_cannot_work(paths: object, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        StaticPolicy.from_paths(paths)  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", ["num_steps", "topk", "num_draft_tokens"])
@pytest.mark.parametrize("name", POLICIES)
def test_settings_below_one_are_refused(name: str, setting: str) -> None:
    settings = {"num_steps": 4, "topk": 3, "num_draft_tokens": 9} | {setting: 0}
    with pytest.raises(InvalidInputError, match=f"{setting} must be at least 1, got 0"):
        make_policy(name, **settings)


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInputError, match="unknown policy 'beam'; choose one of dynamic, static, chain"):
        make_policy("beam", num_steps=4, topk=3, num_draft_tokens=9)


@pytest.mark.parametrize("budget", [0, -1])
def test_fixed_trees_without_nodes_are_refused(budget: int) -> None:
    for build in (StaticPolicy.eagle1, StaticPolicy.chain):
        with pytest.raises(InvalidInputError, match="at least one node"):
            build(budget)


def test_make_policy_shares_one_budget() -> None:
    made = {name: make_policy(name, num_steps=4, topk=3, num_draft_tokens=6) for name in POLICIES}
    assert made["dynamic"] == DynamicPolicy(4, 3, 6)
    assert made["static"].num_draft_tokens == 6
    assert (made["chain"].num_steps, made["chain"].topk, made["chain"].num_draft_tokens) == (4, 1, 4)
    assert make_policy("chain", num_steps=9, topk=3, num_draft_tokens=6).num_steps == 6


def test_a_trace_changes_nothing() -> None:
    table = Table("smooth", 3, 3)
    policy = DynamicPolicy(4, 3, 9)
    trace = PolicyTrace(policy)
    assert (trace.num_steps, trace.topk, trace.num_draft_tokens) == (4, 3, 9)
    watched, plain = grow_tree(ROOT, trace, 4, table.score), grow_tree(ROOT, policy, 4, table.score)
    assert paths(watched) == paths(plain)
    assert trace.seconds > 0
    assert trace.candidates is not None
    assert trace.kept.tolist() == policy.select(trace.candidates).tolist() != []
