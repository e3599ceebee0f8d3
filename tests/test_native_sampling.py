"""The engine's own verification of sampled answers against ``eyas.verify``, which is held to exact arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from eyas import native

if not native.available():
    pytest.skip(native.reason(), allow_module_level=True)

from eyas.draws import draw
from eyas.errors import InvalidInputError
from eyas.generate import Session, generate
from eyas.sampling import SamplingParams, warp
from eyas.stopping import StopParams
from eyas.targets.native import NativeOutput, NativeTarget
from eyas.tree import DraftTree, Proposal
from eyas.verify import BLOCK, Acceptance, verify_sampling
from support.decoder import random_tree, tiny_config, tiny_weights

SOME = np.array([3, 90, 17, 4, 55, 62, 8, 71], np.int64)
Trees = Callable[[np.random.Generator, int], DraftTree]


def target(vocab: int) -> NativeTarget:
    config = tiny_config(vocab_size=vocab)
    return NativeTarget.from_weights(config, tiny_weights(config), dtype="float32", threads=2)


def chosen(rng: np.random.Generator, vocab: int) -> DraftTree:
    tree = random_tree(rng, 9, vocab)
    tree.tokens[1:] %= 7  # few enough for equal siblings, and some are likely
    return tree


def drawn(token_ids: np.ndarray | None, zeros: bool = False) -> Trees:
    """A root and its first two children have drawn ones, of which not all are in the tree."""

    def grow(rng: np.random.Generator, vocab: int) -> DraftTree:
        tokens, parents, proposals = [1], [-1], {}
        for node in range(3):
            weights = rng.exponential(size=vocab if token_ids is None else len(token_ids)).astype(np.float32) ** 3
            if zeros:
                weights[rng.random(len(weights)) < 0.6] = 0
                weights[rng.integers(len(weights))] = 1
            places = draw(weights, 4, rng)
            found = places if token_ids is None else token_ids[places].tolist()
            proposals[node] = Proposal(weights, token_ids, found, places)
            tokens += found[:3]
            parents += [node] * len(found[:3])
            if len(tokens) <= node + 1:
                break
        return DraftTree(np.array(tokens), np.array(parents), np.zeros(len(tokens), np.float32), proposals)

    return grow


TREES: dict[str, Trees] = {
    "root only": lambda rng, vocab: DraftTree.root_only(5),
    "chosen": chosen,
    "drawn": drawn(None),
    "drawn from some tokens": drawn(SOME),
    "drawn from few": drawn(SOME, zeros=True),
}


def output(model: NativeTarget, tree: DraftTree, rng: np.random.Generator) -> NativeOutput:
    """Made-up logits, under which draft tokens are often right."""
    logits = rng.normal(size=(len(tree), model.info.vocab_size)).astype(np.float32)
    logits[tree.parents[1:], tree.tokens[1:]] += 3
    return NativeOutput(model.core, logits, logits.argmax(axis=1), np.zeros((len(tree), 1), np.float32))


def wanted(found: NativeOutput, tree: DraftTree, temperature: float, rng: np.random.Generator) -> Acceptance:
    return verify_sampling(tree, lambda node: warp(found.row(node), SamplingParams(temperature=temperature)), rng)


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 1.6])
@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("vocab", [101, 2 * BLOCK + 7])
def test_the_same_draws_give_the_same_answer(vocab: int, kind: str, temperature: float) -> None:
    model = target(vocab)
    paths = set()
    for seed in range(60):
        tree = TREES[kind](np.random.default_rng(seed), vocab)
        found = output(model, tree, np.random.default_rng(seed + 100))
        ours, theirs = np.random.default_rng(seed), np.random.default_rng(seed)
        acceptance = wanted(found, tree, temperature, theirs)
        assert found.verify_sampled(tree, temperature, ours) == acceptance
        assert ours.random() == theirs.random()  # so many draws, not one more
        paths.add((acceptance.path, acceptance.recovered))
    assert len(paths) > 1 or kind == "root only"


def test_a_token_that_the_model_rules_out_is_never_drawn() -> None:
    model = target(101)
    tree = DraftTree.root_only(5)
    logits = np.full((1, 101), -np.inf, np.float32)
    logits[0, [7, 60]] = 2.0
    found = NativeOutput(model.core, logits, np.array([7]), np.zeros((1, 1), np.float32))
    rng = np.random.default_rng(0)
    drawn_tokens = [found.verify_sampled(tree, 1.0, rng).next_token for _ in range(400)]
    assert set(drawn_tokens) == {7, 60}
    assert abs(drawn_tokens.count(7) - 200) < 60


def test_answers_follow_the_seed_and_not_the_way() -> None:
    """Verified natively, or in Python because a harmless processor stands between: the same answer."""
    model = target(101)
    plain = SamplingParams(temperature=3.0, seed=4)
    handled = replace(plain, processors=(lambda prefix, logits: logits,))
    answers = [
        [
            token
            for step in generate(Session(model), [3, 5, 8], params=params, stop=StopParams(max_tokens=60))
            for token in step.tokens
        ]
        for params in (plain, handled)
    ]
    assert answers[0] == answers[1] and len(set(answers[0])) > 1


def test_bad_input_is_refused() -> None:
    model = target(101)
    tree = DraftTree.chain([5, 6])
    rng = np.random.default_rng(0)
    found = output(model, tree, rng)
    with pytest.raises(ValueError, match="a row of logits and a parent per token"):
        found.verify_sampled(DraftTree.chain([5, 6, 7]), 1.0, rng)
    with pytest.raises(ValueError, match="temperature above 0"):
        found.verify_sampled(tree, 0.0, rng)
    misfit = Proposal(np.ones(4, np.float32), None, [6], [4])
    with pytest.raises(ValueError, match="do not fit its weights"):
        found.verify_sampled(replace(tree, proposals={0: misfit}), 1.0, rng)
    (without,) = model.verify([(model.new_cache(), DraftTree.chain([5, 6]))], logits=False)
    assert isinstance(without, NativeOutput)
    with pytest.raises(InvalidInputError, match="kept no logits"):
        without.verify_sampled(tree, 1.0, rng)
