"""Both verifiers are lossless: shown by exact enumeration over small vocabularies, and once more by draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import product

import numpy as np
import pytest

from eyas.policies import Candidates, DynamicPolicy, grow_tree
from eyas.policies.base import Children
from eyas.sampling import SamplingParams, warp
from eyas.tree import DraftTree, Floats, Ints
from eyas.verify import BLOCK, Acceptance, Mass, verify_greedy, verify_known, verify_sampling
from support.exhaustive import Rng, distribution, outcomes
from support.tiny import TableTarget

VOCAB = 4
Words = tuple[int, ...]
Distribution = Callable[[Words], Floats]  # prefix below the root -> probabilities

# Sixteenths, so that sums are exact in any precision; tokens of no mass and of all mass among them.
WEIGHTS = [(7, 4, 3, 2), (1, 9, 1, 5), (0, 6, 8, 2), (5, 0, 0, 11), (16, 0, 0, 0), (4, 4, 4, 4), (2, 3, 10, 1)]


@cache
def sixteenths(prefix: Words) -> Floats:
    """A fixed distribution per prefix, all tokens getting their turn at every weight."""
    code = sum((token + 1) * 7**place for place, token in enumerate(prefix))
    return np.roll(np.array(WEIGHTS[code % len(WEIGHTS)], np.float32) / 16, code // len(WEIGHTS))


Subtree = tuple[tuple[int, "Subtree"], ...]
"""The children of a node in order: (token, its own children)."""


def forests(nodes: int, *, distinct: bool, used: frozenset[int] = frozenset()) -> Iterator[Subtree]:
    """All ordered forests of so many nodes; ``distinct``: no two siblings alike."""
    if nodes == 0:
        yield ()
        return
    for token in range(VOCAB):
        if distinct and token in used:
            continue
        for below in range(nodes):
            for children in forests(below, distinct=distinct):
                for siblings in forests(nodes - 1 - below, distinct=distinct, used=used | {token}):
                    yield ((token, children), *siblings)


def flatten(forest: Subtree) -> DraftTree:
    """Level by level, as policies build it."""
    tokens, parents = [0], [-1]
    level = [(0, forest)]
    while level:
        below = []
        for parent, children in level:
            for token, subtree in children:
                below.append((len(tokens), subtree))
                tokens.append(token)
                parents.append(parent)
        level = below
    return DraftTree(np.array(tokens), np.array(parents), np.zeros(len(tokens), np.float32))


def words(tree: DraftTree, node: int) -> Words:
    """The tokens below the root down to a node."""
    return tuple(tree.tokens[tree.path_to(node)[1:]].tolist())


def block(tree: DraftTree, acceptance: Acceptance) -> Words:
    """What a cycle commits."""
    return (*words(tree, acceptance.path[-1]), acceptance.next_token)


def verifier(tree: DraftTree, target: Distribution) -> Callable[[Rng], Acceptance]:
    contexts = [words(tree, node) for node in range(len(tree))]
    return lambda rng: verify_sampling(tree, lambda node: target(contexts[node]).copy(), rng)


@cache
def exact(target: Distribution, prefix: Words) -> Fraction:
    """The target's own joint probability of a sequence."""
    if not prefix:
        return Fraction(1)
    weights = [Fraction(float(weight)) for weight in target(prefix[:-1])]
    return exact(target, prefix[:-1]) * weights[prefix[-1]] / sum(weights)


def assert_lossless(tree: DraftTree, target: Distribution) -> dict[Acceptance, Fraction]:
    """The committed block, continued by plain decoding, has exactly the target's joint distribution.

    Blocks are a node's words and one token more. So it is enough that the continued block begins with each such
    sequence as often as the target says: whatever comes later is drawn plainly anyway.
    """
    chances = distribution(verifier(tree, target))
    begins: dict[Words, Fraction] = {}  # blocks that reach at least so far
    ends: dict[Words, Fraction] = {}
    for acceptance, chance in chances.items():
        committed = block(tree, acceptance)
        ends[committed] = ends.get(committed, Fraction(0)) + chance
        for length in range(len(committed) + 1):
            begins[committed[:length]] = begins.get(committed[:length], Fraction(0)) + chance
    for context in {words(tree, node) for node in range(len(tree))}:
        for token in range(VOCAB):
            sequence = (*context, token)
            reached = begins.get(sequence, Fraction(0))
            for length in range(1, len(sequence)):  # shorter blocks go on plainly
                shorter = ends.get(sequence[:length], Fraction(0))
                if shorter:
                    reached += shorter * exact(target, sequence) / exact(target, sequence[:length])
            assert reached == exact(target, sequence), (tree, sequence)
    return chances


SIZES = [1, 2, 3, 4, 5, pytest.param(6, marks=pytest.mark.slow)]
COUNTS = {1: 1, 2: 4, 3: 28, 4: 232, 5: 2104, 6: 20224}


@pytest.mark.parametrize("nodes", SIZES)
def test_sampling_is_exact_on_every_tree(nodes: int) -> None:
    count = 0
    for forest in forests(nodes - 1, distinct=True):
        assert_lossless(flatten(forest), sixteenths)
        count += 1
    assert count == COUNTS[nodes]  # shapes x orders x labels, none forgotten


@pytest.mark.parametrize("nodes", [3, 4])
def test_sampling_is_exact_with_repeated_siblings(nodes: int) -> None:
    for forest in forests(nodes - 1, distinct=False):
        assert_lossless(flatten(forest), sixteenths)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_acceptance_is_as_likely_as_one_level_allows(nodes: int) -> None:
    """A node that is reached goes on to a child with the total mass of its distinct children; which child is that
    child's own mass. Nothing that reads one level at a time can accept more often."""
    for forest in forests(nodes - 1, distinct=True):
        tree = flatten(forest)
        chances = assert_lossless(tree, sixteenths)
        for node in range(len(tree)):
            reached = sum(chance for acceptance, chance in chances.items() if node in acceptance.path)
            assert reached == exact(sixteenths, words(tree, node))


#         root
#       /   |   \
#      1    2    0
#     / \        |
#    3   0       1
BUSHY: Subtree = ((1, ((3, ()), (0, ()))), (2, ()), (0, ((1, ()),)))


@pytest.mark.parametrize("shift", range(8))
def test_bonus_and_recovered_tokens_given_how_the_cycle_went(shift: int) -> None:
    """At each reached node: the bonus token follows p, the next token follows p, and after the rejection of all
    children the recovered token follows p without them."""
    tree = flatten(BUSHY)

    def target(prefix: Words) -> Floats:
        return sixteenths((shift % VOCAB, *prefix) if shift < VOCAB else (shift % VOCAB, 3, *prefix))

    chances = assert_lossless(tree, target)
    for node in range(len(tree)):
        context = words(tree, node)
        p = [exact(target, (*context, token)) for token in range(VOCAB)]  # joint with the context
        children = {int(tree.tokens[child]): child for child in tree.children[node]}
        for token in range(VOCAB):
            ended = sum(c for a, c in chances.items() if a.path[-1] == node and a.next_token == token)
            if token in children:
                went_on = sum(c for a, c in chances.items() if children[token] in a.path)
                assert (ended, went_on) == (0, p[token])
            else:
                # Not normalised, this says it all: p itself for a leaf, p without the children for the others.
                assert ended == p[token]
    for acceptance in chances:
        assert acceptance.recovered == bool(tree.children[acceptance.path[-1]])


def test_each_distinct_sibling_is_tried_once() -> None:
    forest: Subtree = ((2, ()), (2, ((1, ()),)), (0, ()), (2, ()), (0, ()))
    tree = flatten(forest)
    even = np.full(VOCAB, 0.25, np.float32)

    def run(rng: Rng) -> tuple[Acceptance, int]:
        return verify_sampling(tree, lambda node: even.copy(), rng), rng.draws

    # Token 2 accepted: one draw for it, one for the bonus; token 0: one draw more; none: two trials and the recovery.
    draws = {(acceptance.path, draws) for (acceptance, draws), _ in outcomes(run)}
    assert draws == {((0, 1), 2), ((0, 3), 3), ((0,), 3)}


def test_a_child_of_all_the_mass_is_always_accepted_and_one_of_none_never() -> None:
    certain = np.array([0, 0, 1, 0], np.float32)
    tree = flatten(((1, ()), (2, ()), (3, ())))
    for acceptance, _ in outcomes(verifier(tree, lambda prefix: certain)):
        assert acceptance == Acceptance((0, 2), 2, recovered=False)
    extremes = [0.0, 0.5, np.nextafter(1.0, 0.0)]
    for draws in product(extremes, repeat=3):
        acceptance = verify_sampling(tree, lambda node: certain.copy(), Fixed(draws))
        assert acceptance.path == (0, 2)


class Fixed:
    """A generator with the given draws."""

    def __init__(self, draws: Sequence[float]) -> None:
        self._draws = list(draws)

    def random(self) -> float:
        return float(self._draws.pop(0))


class Forbidden:
    """A generator that nobody may touch."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError("greedy decoding drew a random number")


@pytest.mark.parametrize("scale", [1.0, 1e-30, 3.7, 1e30])
@pytest.mark.parametrize(
    "weights", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0.25, 0, 0.75), (0, 0.5, 0.5), (0.1, 0.2, 0.7), (1e-20, 1, 1e-20)]
)
def test_a_token_without_mass_is_never_drawn(weights: tuple[float, ...], scale: float) -> None:
    scaled = np.array(weights, np.float64) * scale
    for draw in (0.0, 1e-300, 0.1, 0.25, 0.5, 0.7, 0.9999999, np.nextafter(1.0, 0.0)):
        assert weights[Mass(scaled).sample(Fixed([draw]))] > 0


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_draw_has_exactly_the_given_distribution(weights: tuple[int, ...]) -> None:
    drawn = distribution(lambda rng: Mass(np.array(weights, np.float32)).sample(rng))
    assert drawn == {token: Fraction(weight, 16) for token, weight in enumerate(weights) if weight}


@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, 5 * BLOCK, 5 * BLOCK + 3])
def test_a_large_vocabulary_is_searched_as_a_small_one(size: int) -> None:
    rng = np.random.default_rng(size)
    weights = rng.random(size)
    weights[rng.random(size) < 0.5] = 0.0
    weights[BLOCK : 2 * BLOCK] = 0.0  # a block without any mass
    ends = np.cumsum(weights)
    # In the middle of each token's share of the mass, where rounding cannot lead astray.
    for token in np.flatnonzero(weights)[::7].tolist():
        mark = (ends[token] - weights[token] / 2) / ends[-1]
        assert Mass(weights).sample(Fixed([mark])) == token
    for draw in (0.0, np.nextafter(1.0, 0.0), *(ends[BLOCK - 1 :: BLOCK] / ends[-1]).clip(max=np.nextafter(1.0, 0.0))):
        assert weights[Mass(weights).sample(Fixed([draw]))] > 0


def follow(tree: DraftTree, *choices: int) -> Acceptance:
    """The target says these, one after the other."""
    said = iter(choices)
    return verify_greedy(tree, lambda node: next(said))


def test_greedy_by_hand() -> None:
    tree = flatten(BUSHY)  # nodes: 1:1 2:2 3:0 | 4:3 5:0 (below 1) 6:1 (below 3)
    assert follow(tree, 3) == Acceptance((0,), 3, recovered=True)  # no such child
    assert follow(tree, 2, 1) == Acceptance((0, 2), 1, recovered=False)  # a leaf: bonus
    assert follow(tree, 1, 0, 2) == Acceptance((0, 1, 5), 2, recovered=False)  # second sibling
    assert follow(tree, 0, 1, 3) == Acceptance((0, 3, 6), 3, recovered=False)  # third sibling
    assert follow(tree, 1, 2) == Acceptance((0, 1), 2, recovered=True)
    assert verify_greedy(DraftTree.root_only(1), lambda node: 3) == Acceptance((0,), 3, recovered=False)


def test_a_known_answer_is_followed_by_depth() -> None:
    tree = flatten(BUSHY)
    for rest in product(range(4), repeat=3):
        assert verify_known(tree, rest) == verify_known(tree, (*rest, 9)) == follow(tree, *rest)
    assert verify_known(DraftTree.root_only(1), [3]) == Acceptance((0,), 3, recovered=False)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_greedy_commits_what_the_target_says_and_as_much_as_the_tree_holds(nodes: int) -> None:
    for forest in forests(nodes - 1, distinct=False):
        tree = flatten(forest)
        contexts = [words(tree, node) for node in range(len(tree))]
        says = [int(sixteenths(context).argmax()) for context in contexts]
        acceptance = verify_greedy(tree, says.__getitem__)
        committed = block(tree, acceptance)
        for length, token in enumerate(committed):
            assert token == sixteenths(committed[:length]).argmax()
        # One level further would have been accepted had it been there (under whichever of two equal siblings is
        # first: the other's children are out of reach).
        end = acceptance.path[-1]
        assert all(tree.tokens[child] != acceptance.next_token for child in tree.children[end])


# --- larger trees, processed distributions, drafters near and far ----------------------------------------------

DRAFTERS: dict[str, Callable[[Floats], Floats]] = {
    "equal": lambda p: p,
    "anti": lambda p: p.max() + 1e-3 - p,
    "flat": lambda p: np.ones_like(p),
}


def drafted(target: TableTarget, params: SamplingParams, drafter: str, policy: DynamicPolicy) -> DraftTree:
    """A tree below token 0 by a drafter whose confidences are a function of the target's probabilities."""

    def score(candidates: Candidates, expanded: Ints) -> Children:
        rows = []
        for node in expanded.tolist():
            path: list[int] = []
            while node > 0:
                path.append(int(candidates.tokens[node]))
                node = int(candidates.parents[node])
            confidence = DRAFTERS[drafter](warp(target.logits([0, *path[::-1]]), params))
            rows.append(confidence / confidence.sum())
        table = np.array(rows)
        best = np.argsort(-table, axis=1, kind="stable")[:, : policy.topk]
        return Children(best, np.log(np.take_along_axis(table, best, axis=1)))

    return grow_tree(0, policy, policy.num_steps, score)


CASES = [(drafter, temperature) for drafter in DRAFTERS for temperature in (0.7, 1.0, 1.5)]
POLICY = DynamicPolicy(num_steps=3, topk=3, num_draft_tokens=12)


def wide(temperature: float, drafter: str) -> tuple[DraftTree, Distribution]:
    """A vocabulary of 8, three tokens below the root."""
    target = TableTarget(8, seed=11, spread=1.5)
    params = SamplingParams(temperature=temperature)
    rows: dict[Words, Floats] = {}

    def probabilities(prefix: Words) -> Floats:
        if prefix not in rows:
            rows[prefix] = warp(target.logits([0, *prefix]), params)
        return rows[prefix]

    return drafted(target, params, drafter, POLICY), probabilities


def joint_of(target: Distribution) -> Floats:
    """[8, 8, 8] float64: the exact joint of three tokens."""
    joint = np.zeros((8, 8, 8))
    for first, second in product(range(8), repeat=2):
        p1, p2, p3 = (target(prefix).astype(np.float64) for prefix in ((), (first,), (first, second)))
        joint[first, second] = p1[first] / p1.sum() * p2[second] / p2.sum() * p3 / p3.sum()
    return joint


@pytest.mark.parametrize(("drafter", "temperature"), CASES)
def test_three_tokens_have_the_exact_joint(drafter: str, temperature: float) -> None:
    tree, target = wide(temperature, drafter)
    assert max(tree.depths) > 1
    joint = np.zeros((8, 8, 8))
    for acceptance, chance in distribution(verifier(tree, target)).items():
        committed = block(tree, acceptance)[:3]
        rest = np.array(float(chance))
        for length in range(len(committed), 3):  # what the block leaves open is decoded plainly
            prefixes = [(*committed, *more) for more in product(range(8), repeat=length - len(committed))]
            rows = np.array([target(prefix).astype(np.float64) for prefix in prefixes])
            rest = rest[..., None] * (rows / rows.sum(axis=1, keepdims=True)).reshape(*rest.shape, 8)
        joint[committed] += rest
    assert np.abs(joint - joint_of(target)).sum() / 2 < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "temperature"), [("equal", 0.7), ("anti", 1.0), ("flat", 1.5)])
def test_two_hundred_thousand_draws(drafter: str, temperature: float) -> None:
    draws = 200_000
    tree, target = wide(temperature, drafter)
    contexts = [words(tree, node) for node in range(len(tree))]
    rng = np.random.default_rng([draws, round(10 * temperature), list(DRAFTERS).index(drafter)])

    blocks: dict[Words, int] = {}
    for _ in range(draws):
        acceptance = verify_sampling(tree, lambda node: target(contexts[node]).copy(), rng)
        committed = block(tree, acceptance)[:3]
        blocks[committed] = blocks.get(committed, 0) + 1
    counts = np.zeros((8, 8, 8))
    for length in (1, 2):  # short blocks are continued plainly, all of a kind at once
        for committed in [committed for committed in blocks if len(committed) == length]:
            p = target(committed).astype(np.float64)
            for token, count in enumerate(rng.multinomial(blocks.pop(committed), p / p.sum()).tolist()):
                longer = (*committed, token)
                blocks[longer] = blocks.get(longer, 0) + count
    for committed, count in blocks.items():
        counts[committed] += count
    assert counts.sum() == draws
    joint = joint_of(target)
    distance = [total_variation(counts.sum(axis=axes), joint.sum(axis=axes)) for axes in ((1, 2), (2,), ())]
    assert distance[0] < 0.01
    assert distance[1] < 0.01
    # 512 cells make noise of their own: plain draws from the exact joint lie this far from it.
    noise = [total_variation(rng.multinomial(draws, joint.ravel()), joint.ravel()) for _ in range(200)]
    assert distance[2] < max(0.01, np.mean(noise) + 5 * np.std(noise))


def total_variation(counts: Floats, joint: Floats) -> float:
    return float(np.abs(counts / counts.sum() - joint).sum() / 2)
