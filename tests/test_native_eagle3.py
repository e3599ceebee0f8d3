"""The EAGLE-3 head on the native engine against its twin in PyTorch."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from eyas import native

if not native.available():
    pytest.skip(native.reason(), allow_module_level=True)

import torch

from eyas.checkpoints.eagle3 import Eagle3Checkpoint
from eyas.costs import CostTable
from eyas.drafters.eagle3 import Eagle3Drafter
from eyas.drafters.native_eagle import NativeEagleDrafter
from eyas.draws import Draws, draw
from eyas.errors import InvalidInputError
from eyas.heads.config import Eagle3Config
from eyas.policies import DynamicPolicy, StaticPolicy, TreePolicy
from eyas.policies.budgeted import BudgetedPolicy
from eyas.policies.trace import PolicyTrace
from eyas.sampling import SamplingParams
from eyas.targets.native import NativeTarget
from eyas.tree import Floats
from support.decoder import tiny_config, tiny_weights

H, V, DRAFT = 48, 101, 37
CONFIG = Eagle3Config(
    hidden_size=H,
    intermediate_size=40,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=10,
    vocab_size=V,
    rms_norm_eps=1e-5,
    draft_vocab_size=DRAFT,
)
HEADS: dict[str, Eagle3Config] = {
    "plain": CONFIG,
    "biases": replace(CONFIG, qkv_bias=True),
    "whole vocabulary": replace(CONFIG, draft_vocab_size=None),
    "target's lm_head": replace(CONFIG, target_lm_head=True),
    "target's lm_head, whole vocabulary": replace(CONFIG, target_lm_head=True, draft_vocab_size=None),
    "three layers": replace(CONFIG, num_layers=3),
    "scaled rope": replace(CONFIG, rope_theta=1e6, rope_scaling={"rope_type": "linear", "factor": 4.0}),
}
POLICIES: list[TreePolicy] = [
    DynamicPolicy(num_steps=4, topk=4, num_draft_tokens=12),
    StaticPolicy.eagle1(),
    StaticPolicy.chain(5),
]
MODEL = tiny_config(num_hidden_layers=6, tie_word_embeddings=False)


def checkpoint(config: Eagle3Config = CONFIG) -> Eagle3Checkpoint:
    rng = np.random.default_rng(0)
    tensors = {
        name: (rng.standard_normal(shape) * 0.15 + ("norm" in name)).astype(np.float32)
        for name, shape in config.tensor_shapes().items()
    }
    chosen = np.sort(rng.choice(V, DRAFT, replace=False))
    d2t = None if config.draft_vocab_size is None else chosen - np.arange(DRAFT)
    return Eagle3Checkpoint("tiny head", config, tensors, d2t=d2t)


def load_target(dtype: str = "float32", **options: Any) -> NativeTarget:
    return NativeTarget.from_weights(MODEL, tiny_weights(MODEL), dtype=dtype, threads=2, feature_levels=3, **options)


def pairs(count: int, seed: int = 0) -> tuple[list[int], Floats]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, V, count).tolist(), (rng.standard_normal((count, 3 * H)) * 2).astype(np.float32)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", HEADS)
def test_trees_are_those_of_the_twin(name: str, policy: TreePolicy) -> None:
    read = checkpoint(HEADS[name])
    drafter = NativeEagleDrafter(read, load_target())
    assert drafter.feature_levels == 3
    assert drafter.core.draft_vocab == read.config.scored_tokens
    big = (torch.tensor(tiny_weights(MODEL)[f"{name}.weight"]) for name in ("model.embed_tokens", "lm_head"))
    ours, twin = drafter.new_session(), Eagle3Drafter.from_checkpoint(read, *big).new_session()
    for cycle, count in enumerate((30, 1, 5, 2, 70)):
        tokens, features = pairs(count, seed=cycle)
        ours.commit(tokens, features)
        twin.commit(tokens, torch.tensor(features))
        records = PolicyTrace(policy), PolicyTrace(policy)
        tree, wanted = ours.propose(tokens[-1], records[0], 10), twin.propose(tokens[-1], records[1], 10)
        assert records[0].candidates.tokens.tolist() == records[1].candidates.tokens.tolist()
        np.testing.assert_allclose(
            records[0].candidates.log_probs, records[1].candidates.log_probs, atol=2e-3, rtol=1e-3
        )
        assert tree.tokens.tolist() == wanted.tokens.tolist()
        assert tree.parents.tolist() == wanted.parents.tolist()
        assert len(tree) > 1


def test_committing_in_parts_or_at_once_gives_the_same_bits() -> None:
    drafter = NativeEagleDrafter(checkpoint(), load_target())
    tokens, features = pairs(300)
    one, many = drafter.new_session(), drafter.new_session()
    one.commit(tokens, features)
    records = [PolicyTrace(POLICIES[0]) for _ in range(3)]
    start = 0
    for count in (100, 1, 3, 64, 132):
        many.commit(tokens[start : start + count], features[start : start + count])
        start += count
        many.propose(tokens[start - 1], records[1], 5)  # guesses that must leave no trace
    one.propose(tokens[-1], records[0], 5)
    one.propose(tokens[-1], records[2], 5)  # from the tip alone
    for record in records[1:]:
        assert np.array_equal(records[0].candidates.tokens, record.candidates.tokens)
        assert np.array_equal(records[0].candidates.log_probs, record.candidates.log_probs)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "q4"])
def test_packed_types_stay_near_float32(dtype: str, tied: bool) -> None:
    tokens, features = pairs(20)
    features[:, 5] *= 300  # inner layers have such numbers
    chances = []
    for kind in ("float32", dtype):
        read = checkpoint(replace(CONFIG, target_lm_head=tied))
        session = NativeEagleDrafter(read, load_target(kind)).new_session()
        session.commit(tokens, features)
        record = PolicyTrace(DynamicPolicy(num_steps=1, topk=DRAFT, num_draft_tokens=5))
        session.propose(tokens[-1], record, 1)
        order = np.argsort(record.candidates.tokens[1:])
        chances.append(np.exp(record.candidates.log_probs[1:][order]))
    assert np.abs(chances[0] - chances[1]).sum() < 0.1
    assert chances[1].sum() == pytest.approx(1, abs=1e-5)


class Given:
    """Hands out given numbers for random ones."""

    def __init__(self, numbers: Floats) -> None:
        self._numbers = iter(numbers.tolist())

    def random(self) -> float:
        return next(self._numbers)


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, target_lm_head=True, draft_vocab_size=None)])
@pytest.mark.parametrize("temperature", [0.05, 1.0, 3.0])
def test_draws_are_those_of_the_reference(config: Eagle3Config, temperature: float) -> None:
    """The same uniform numbers lead to the same tokens, by weights that are exponentials of the raw scores."""
    session = NativeEagleDrafter(checkpoint(config), load_target()).core.new_session()
    tokens, features = pairs(9)
    session.commit(np.array(tokens), features, 0)
    rng = np.random.default_rng(4)
    for k in (1, 3, 40) * 5:
        uniforms = rng.random((1, k))
        places, weights, likeliest = session.score_tip(k, uniforms, temperature)
        drawn = [place for place in places[0].tolist() if place >= 0]
        assert drawn == draw(weights[0], k, Given(uniforms[0]))  # type: ignore[arg-type]
        raw = session.score_tip(0)[0].astype(np.float64)
        np.testing.assert_allclose(weights[0], np.exp((raw - raw.max()) / temperature), atol=2e-6)
        assert likeliest[0, 0] == pytest.approx(1 / np.exp(raw - raw.max()).sum(), rel=1e-4)


def test_drawn_trees_hold_distinct_siblings_of_the_draft_vocabulary() -> None:
    read = checkpoint()
    drafter = NativeEagleDrafter(read, load_target("bfloat16"))
    session = drafter.new_session()
    tokens, features = pairs(9)
    session.commit(tokens, features)
    known = set(read.token_ids.tolist())
    shapes = set()
    for seed, params in product(
        range(6),
        (
            SamplingParams(temperature=1.0),
            SamplingParams(temperature=1.0, top_p=0.7),
            SamplingParams(temperature=1e-320),
        ),
    ):
        draws = Draws(params, np.random.default_rng(seed))
        tree = session.propose_drawn(tokens[-1], POLICIES[0], 4, draws)
        for node, children in enumerate(tree.children):
            if children:
                proposal, drawn = tree.proposals[node], tree.tokens[children].tolist()
                assert len(set(drawn)) == len(drawn) and set(drawn) <= known
                assert drawn == [token for token in proposal.tokens if token in drawn]  # in the order of the draws
                assert [read.token_ids[place] for place in proposal.places] == list(proposal.tokens)
        shapes.add(tuple(tree.tokens.tolist()))
    assert len(shapes) > 6  # seeds matter


class ByHand(DynamicPolicy):
    """A policy that the engine does not know, and so asks level by level."""


class BudgetedByHand(BudgetedPolicy):
    pass


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, target_lm_head=True, draft_vocab_size=None)])
@pytest.mark.parametrize("known", [0, 9])
def test_a_tree_drawn_in_one_call_is_that_drawn_level_by_level(config: Eagle3Config, known: int) -> None:
    costs = CostTable((1, 4, 16), (10.0, 10.5, 14.0), (1, 4), (0.3, 0.5), first_ms=0.5)
    acceptance = ((0.5, 0.2, 0.1),) * 3
    pairs_of_policies = [
        (DynamicPolicy(4, 3, 10), ByHand(4, 3, 10)),
        (DynamicPolicy(3, 40, 30), ByHand(3, 40, 30)),
        (BudgetedPolicy(costs, acceptance, 3, 3, 9), BudgetedByHand(costs, acceptance, 3, 3, 9)),
    ]
    for seed, (policy, by_hand), temperature in product(range(4), pairs_of_policies, (0.3, 1.0)):
        trees = []
        for each in (policy, by_hand):
            session = NativeEagleDrafter(checkpoint(config), load_target()).new_session()
            tokens, features = pairs(9)
            session.commit(tokens, features)
            if known:  # the tip is scored again
                session.propose(tokens[-1], policy, 1)
            draws = Draws(SamplingParams(temperature=temperature), np.random.default_rng(seed))
            trees.append(session.propose_drawn(tokens[-1], each, 4, draws))
        one, other = trees
        assert one.num_draft_tokens > 0
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.parents.tolist() == other.parents.tolist()
        assert one.log_values.tolist() == other.log_values.tolist()
        assert one.proposals.keys() == other.proposals.keys()
        for node, proposal in one.proposals.items():
            assert list(proposal.tokens) == list(other.proposals[node].tokens)
            assert list(proposal.places) == list(other.proposals[node].places)
            assert np.array_equal(proposal.weights, other.proposals[node].weights)


def test_nothing_is_drawn_where_no_draft_pays() -> None:
    dear = CostTable((1, 4), (1.0, 40.0), (1, 4), (9.0, 9.0), first_ms=9.0)
    session = NativeEagleDrafter(checkpoint(), load_target()).new_session()
    tokens, features = pairs(9)
    session.commit(tokens, features)
    draws = Draws(SamplingParams(temperature=1.0), np.random.default_rng(0))
    tree = session.propose_drawn(tokens[-1], BudgetedPolicy(dear, ((0.1, 0.1),), 3, 2, 9), 4, draws)
    assert tree.num_draft_tokens == 0
    assert session.propose_drawn(tokens[-1], DynamicPolicy(3, 2, 4), 4, draws).num_draft_tokens > 0  # the pairs wait


def test_misfits_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"reads 3 feature level\(s\), the target was loaded to give 1"):
        NativeEagleDrafter(checkpoint(), NativeTarget.from_weights(MODEL, tiny_weights(MODEL), dtype="float32"))
    tokens, features = pairs(3)
    with pytest.raises(InvalidInputError, match=r"features of shape \(3, 144\)"):
        NativeEagleDrafter(checkpoint(), load_target()).new_session().commit(tokens, features[:, :H])
    broken = checkpoint()
    tensors = {name: tensor for name, tensor in broken.tensors.items() if name != "norm.weight"}
    with pytest.raises(InvalidInputError, match=r"tiny head: weight 'norm.weight' is missing"):
        NativeEagleDrafter(replace(broken, tensors=tensors), load_target())
