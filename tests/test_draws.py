"""Drawn draft tokens: the draws are what they should be, and verifying them is lossless, by exact enumeration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.draws import SHARPENING, Draws, confidences, draw
from eyas.generate import Session, generate
from eyas.policies import Candidates, DynamicPolicy, StaticPolicy, TreePolicy, grow_tree
from eyas.policies.base import Children
from eyas.sampling import SamplingParams, warp
from eyas.stopping import StopParams
from eyas.targets.base import Features
from eyas.tree import DraftTree, Floats, Ints, Proposal
from eyas.verify import Acceptance, verify_sampling
from support.exhaustive import Rng, distribution
from support.tiny import TableTarget

Words = tuple[int, ...]
TARGET = [(7, 4, 3, 2), (1, 9, 1, 5), (0, 6, 8, 2), (5, 0, 0, 11), (16, 0, 0, 0), (4, 4, 4, 4)]
DRAFT = [(4, 4, 4, 4), (8, 2, 2, 4), (0, 0, 8, 8), (2, 12, 1, 1), (16, 0, 0, 0), (1, 1, 1, 13)]


def table(rows: Sequence[Sequence[int]], prefix: Words) -> Floats:
    """A distribution per prefix, in sixteenths, so that sums and products are exact."""
    code = sum((token + 1) * 5**place for place, token in enumerate(prefix))
    return np.roll(np.array(rows[code % len(rows)], np.float32) / 16, code // len(rows))


class Drafter:
    """Draws from a table of distributions, over all tokens or some of them; confidences are those of real draws."""

    def __init__(self, rng: Rng, topk: int, token_ids: Ints | None = None) -> None:
        self.rng, self.topk, self.token_ids = rng, topk, token_ids

    def score(self, candidates: Candidates, expanded: Ints) -> Children:
        n = len(expanded)
        tokens, log_probs = np.zeros((n, self.topk), np.int64), np.full((n, self.topk), -np.inf, np.float32)
        proposals = []
        for row, node in enumerate(expanded.tolist()):
            weights = table(DRAFT, path_of(candidates, node))
            weights = weights if self.token_ids is None else weights[self.token_ids]
            places = draw(weights, self.topk, self.rng)  # type: ignore[arg-type]
            drawn = places if self.token_ids is None else self.token_ids[places].tolist()
            tokens[row, : len(places)] = drawn
            log_probs[row, : len(places)] = np.log(confidences(float(weights.max()), len(places)))
            proposals.append(Proposal(weights, self.token_ids, drawn, places))
        return Children(tokens, log_probs, tuple(proposals))


def path_of(candidates: Candidates, node: int) -> Words:
    path: list[int] = []
    while node > 0:
        path.insert(0, int(candidates.tokens[node]))
        node = int(candidates.parents[node])
    return tuple(path)


def committed(tree: DraftTree, acceptance: Acceptance) -> Words:
    return (*tree.tokens[list(acceptance.path[1:])].tolist(), acceptance.next_token)


def cycle(policy: TreePolicy, token_ids: Ints | None) -> Callable[[Rng], Words]:
    """Draw a tree, verify it: the block that is committed."""

    def run(rng: Rng) -> Words:
        tree = grow_tree(0, policy, policy.num_steps, Drafter(rng, policy.topk, token_ids).score)
        contexts = [tuple(tree.tokens[tree.path_to(node)[1:]].tolist()) for node in range(len(tree))]
        return committed(tree, verify_sampling(tree, lambda node: table(TARGET, contexts[node]), rng))  # type: ignore[arg-type]

    return run


def exact(sequence: Words) -> Fraction:
    chance = Fraction(1)
    for length, token in enumerate(sequence):
        chance *= Fraction(float(table(TARGET, sequence[:length])[token]))
    return chance


def assert_lossless(run: Callable[[Rng], Words], depth: int) -> None:
    """Blocks, continued by plain decoding, have the target's joint distribution: for each sequence, the blocks that
    begin with it and the shorter ones that go on so add up to its probability."""
    blocks = distribution(run)
    sequences = {block[:length] for block in blocks for length in range(1, len(block) + 1)}
    sequences |= {(*sequence[:-1], token) for sequence in sequences for token in range(4)}
    assert max(map(len, sequences)) == depth + 1  # deep trees were accepted to the end
    for sequence in sequences:
        reached = sum((chance for block, chance in blocks.items() if block[: len(sequence)] == sequence), Fraction(0))
        for length in range(1, len(sequence)):
            shorter = blocks.get(sequence[:length], Fraction(0))
            if shorter:
                reached += shorter * exact(sequence) / exact(sequence[:length])
        assert reached == exact(sequence), sequence


SOME = np.array([0, 2, 3])
POLICIES: list[TreePolicy] = [
    StaticPolicy.chain(1),
    StaticPolicy.chain(3),
    StaticPolicy(((0,), (1,), (2,))),
    StaticPolicy(((0,), (1,), (2,), (3,))),  # more children than some distributions have tokens
    StaticPolicy(((0,), (1,), (1, 0))),
    StaticPolicy(((1,),)),  # the first draw is not verified
    DynamicPolicy(2, 2, 3),
    DynamicPolicy(2, 2, 2, value=False),
    DynamicPolicy(2, 2, 4, rerank=False),
]


@pytest.mark.parametrize("token_ids", [None, SOME], ids=["all tokens", "some tokens"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_every_tree_of_drawn_tokens_is_lossless(policy: TreePolicy, token_ids: Ints | None) -> None:
    assert_lossless(cycle(policy, token_ids), min(policy.num_steps, 3))


def test_draws_without_replacement_have_their_exact_probabilities() -> None:
    weights = np.array([1, 0, 4, 3], np.float32) / 8
    found = distribution(lambda rng: tuple(draw(weights, 3, rng)))  # type: ignore[arg-type]
    wanted = {}
    for order in permutations((0, 2, 3)):
        chance, left = Fraction(1), Fraction(1)
        for place in order:
            mass = Fraction(float(weights[place]))
            chance, left = chance * mass / left, left - mass
        wanted[order] = chance
    assert found == wanted
    assert all(len(draw(weights, 9, np.random.default_rng(seed))) == 3 for seed in range(9))  # no more tokens than that


def test_a_draft_that_is_the_target_is_always_accepted() -> None:
    weights = np.array([0.3, 0.2, 0.4, 0.1], np.float32)
    rng = np.random.default_rng(0)
    for _ in range(50):
        places = draw(weights, 2, rng)
        tree = DraftTree(
            np.array([0, *places]),
            np.array([-1, 0, 0]),
            np.zeros(3, np.float32),
            {0: Proposal(weights, None, places, places)},
        )
        assert verify_sampling(tree, lambda _: weights.copy(), rng).path == (0, 1)


class Guessing:
    """A session that draws from a flatter distribution than the target's, over some of its tokens."""

    def __init__(self, target: TableTarget) -> None:
        self.target, self.tokens = target, [0]  # the prompt's only token comes in no pair

    @property
    def length(self) -> int:
        return len(self.tokens) - 1

    def commit(self, tokens: Sequence[int], features: Features) -> None:
        self.tokens += tokens

    def truncate(self, length: int) -> None:
        del self.tokens[length + 1 :]

    def propose(self, root: int, policy: TreePolicy, max_depth: int) -> DraftTree:
        raise AssertionError("sampled answers draw")

    def propose_drawn(self, root: int, policy: TreePolicy, max_depth: int, draws: Draws) -> DraftTree:
        def score(candidates: Candidates, expanded: Ints) -> Children:
            contexts = [[*self.tokens, *path_of(candidates, node)] for node in expanded.tolist()]
            logits = np.array([self.target.logits(context)[SOME] / 2 for context in contexts])
            return draws.children(logits, SOME, policy.topk)

        return grow_tree(root, policy, max_depth, score)


class Guesser:
    name, feature_levels = "guesser", 0

    def __init__(self, target: TableTarget) -> None:
        self.target = target

    def new_session(self) -> Guessing:
        return Guessing(self.target)


def test_sampled_answers_keep_their_distribution_through_the_whole_loop() -> None:
    target = TableTarget(4, seed=5, spread=1.5)
    params = SamplingParams(temperature=0.8)
    rng = np.random.default_rng(1)
    counts: Counter[Words] = Counter()
    accepted, runs = 0, 3000
    for _ in range(runs):
        steps = list(
            generate(
                Session(target, Guesser(target)),
                [0],
                policy=DynamicPolicy(2, 2, 3),
                params=params,
                stop=StopParams(max_tokens=3),
                rng=rng,
            )
        )
        counts[tuple(token for step in steps for token in step.tokens)] += 1
        accepted += steps[-1].stats.accepted_tokens
    assert accepted > runs / 2
    deviation = 0.0
    for words in product(range(4), repeat=3):
        chance = 1.0
        for length, token in enumerate(words):
            chance *= float(warp(target.logits([0, *words[:length]]), params)[token])
        deviation += (counts[words] - runs * chance) ** 2 / (runs * chance)
    assert deviation < 120  # chi-square of 63 degrees of freedom: beyond it once in 60,000


@given(seed=st.integers(0, 2**32), temperature=st.sampled_from([0.3, 1.0, 2.0]), top_p=st.sampled_from([0.5, 0.9, 1.0]))
def test_children_are_distinct_tokens_of_the_warped_distribution(seed: int, temperature: float, top_p: float) -> None:
    rng = np.random.default_rng(seed)
    params = SamplingParams(temperature=temperature, top_p=top_p)
    logits = (rng.standard_normal((3, 20)) * 4).astype(np.float32)
    token_ids = np.sort(rng.choice(100, 20, replace=False))
    children = Draws(params, rng).children(logits, token_ids, 4)
    for row, proposal in enumerate(children.proposals):
        weights = warp(logits[row], replace(params, temperature=SHARPENING * temperature))
        np.testing.assert_array_equal(proposal.weights, weights)
        found = len(proposal.places)
        assert found == min(4, np.count_nonzero(weights)) == len(set(proposal.places))
        assert (weights[proposal.places] > 0).all()
        assert children.tokens[row, :found].tolist() == token_ids[proposal.places].tolist() == proposal.tokens
        assert (np.diff(children.log_probs[row, :found]) <= 0).all()
        assert np.isneginf(children.log_probs[row, found:]).all()


def test_confidences_do_not_know_the_tokens_and_never_rise() -> None:
    for likeliest in np.linspace(0.001, 1, 50):
        values = confidences(float(likeliest), 8)
        assert (np.diff(values) <= 0).all() and sum(values) <= 1 and min(values) > 0
