"""The EAGLE head on the native engine against its twin in PyTorch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eyas import native

if not native.available():
    pytest.skip(native.reason(), allow_module_level=True)

import torch

from eyas.checkpoints.eagle import EagleCheckpoint
from eyas.drafters.eagle import EagleDrafter
from eyas.drafters.native_eagle import NativeEagleDrafter, NativeEagleSession
from eyas.drafters.torch_head import HeadSession
from eyas.errors import InvalidInputError, UnsupportedModelError
from eyas.heads.config import EagleConfig
from eyas.policies import DynamicPolicy, StaticPolicy, TreePolicy
from eyas.policies.base import Candidates
from eyas.policies.trace import PolicyTrace
from eyas.targets.native import NativeTarget
from eyas.tree import DraftTree, Floats, Ints
from support.decoder import tiny_config, tiny_weights

H, V = 48, 101
CONFIG = EagleConfig(
    hidden_size=H,
    intermediate_size=40,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=10,
    vocab_size=V,
    rms_norm_eps=1e-5,
)
HEADS: dict[str, EagleConfig] = {
    "plain": CONFIG,
    "biases": replace(CONFIG, fc_bias=True, qkv_bias=True),
    "two layers": replace(CONFIG, num_layers=2),
    "scaled rope": replace(CONFIG, rope_theta=1e6, rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "llama3 rope": replace(
        CONFIG,
        rope_theta=1e6,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "yarn rope": replace(
        CONFIG,
        rope_theta=1e6,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        max_position_embeddings=64,
    ),
}
POLICIES: list[TreePolicy] = [
    DynamicPolicy(num_steps=4, topk=4, num_draft_tokens=12),
    DynamicPolicy(num_steps=3, topk=2, num_draft_tokens=40),
    StaticPolicy.eagle1(),
    StaticPolicy.chain(5),
]


def checkpoint(config: EagleConfig = CONFIG, d2t: Ints | None = None) -> EagleCheckpoint:
    rng = np.random.default_rng(0)
    tensors = {
        name: (rng.standard_normal(shape) * 0.15 + ("layernorm" in name)).astype(np.float32)
        for name, shape in config.tensor_shapes().items()
    }
    return EagleCheckpoint("tiny head", config, tensors, d2t=d2t)


def load_target(dtype: str = "float32", **options: Any) -> NativeTarget:
    config = tiny_config(tie_word_embeddings=False)
    return NativeTarget.from_weights(config, tiny_weights(config), dtype=dtype, threads=2, **options)


def pair(config: EagleConfig = CONFIG, d2t: Ints | None = None) -> tuple[NativeEagleDrafter, EagleDrafter]:
    """The same head twice."""
    weights = tiny_weights(tiny_config(tie_word_embeddings=False))
    read = checkpoint(config, d2t)
    twin = EagleDrafter.from_checkpoint(
        read, torch.tensor(weights["model.embed_tokens.weight"]), torch.tensor(weights["lm_head.weight"])
    )
    return NativeEagleDrafter(read, load_target()), twin


def pairs(count: int, seed: int = 0) -> tuple[list[int], Floats]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, V, count).tolist(), (rng.standard_normal((count, H)) * 2).astype(np.float32)


def assert_same_trees(
    ours: NativeEagleSession, twin: HeadSession, root: int, policy: TreePolicy, max_depth: int = 10
) -> DraftTree:
    records = PolicyTrace(policy), PolicyTrace(policy)
    tree = ours.propose(root, records[0], max_depth)
    wanted = twin.propose(root, records[1], max_depth)
    assert records[0].candidates.tokens.tolist() == records[1].candidates.tokens.tolist()
    np.testing.assert_allclose(records[0].candidates.log_probs, records[1].candidates.log_probs, atol=2e-3, rtol=1e-3)
    assert tree.tokens.tolist() == wanted.tokens.tolist()
    assert tree.parents.tolist() == wanted.parents.tolist()
    return tree


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", HEADS)
def test_trees_are_those_of_the_twin(name: str, policy: TreePolicy) -> None:
    drafter, twin_drafter = pair(HEADS[name])
    ours, twin = drafter.new_session(), twin_drafter.new_session()
    at = 0
    for cycle, count in enumerate((30, 1, 5, 2, 70)):
        tokens, features = pairs(count, seed=cycle)
        ours.commit(tokens, features)
        twin.commit(tokens, torch.tensor(features))
        at += count
        assert ours.length == at
        tree = assert_same_trees(ours, twin, tokens[-1], policy)
        assert len(tree) > 1
        assert ours.length == at


def test_a_draft_vocabulary_scores_its_rows_only() -> None:
    chosen = np.sort(np.random.default_rng(3).choice(V, 37, replace=False))
    drafter, twin_drafter = pair(replace(CONFIG, draft_vocab_size=37), chosen - np.arange(37))
    assert drafter.core.draft_vocab == 37
    ours, twin = drafter.new_session(), twin_drafter.new_session()
    tokens, features = pairs(12)
    ours.commit(tokens, features)
    twin.commit(tokens, torch.tensor(features))
    tree = assert_same_trees(ours, twin, tokens[-1], POLICIES[0])
    assert set(tree.tokens[1:].tolist()) <= set(chosen.tolist())


def test_a_vocabulary_smaller_than_topk_is_filled_up() -> None:
    drafter, _ = pair(replace(CONFIG, draft_vocab_size=3), np.array([4, 8, 9]))
    session = drafter.new_session()
    tokens, features = pairs(4)
    session.commit(tokens, features)
    record = PolicyTrace(DynamicPolicy(num_steps=1, topk=5, num_draft_tokens=3))
    tree = session.propose(tokens[-1], record, 4)
    assert sorted(tree.tokens[1:].tolist()) == [4, 9, 11]
    assert np.isneginf(record.candidates.log_probs[4:]).all()


def test_committing_in_parts_or_at_once_gives_the_same_bits() -> None:
    drafter, _ = pair()
    tokens, features = pairs(300)
    one, many = drafter.new_session(), drafter.new_session()
    one.commit(tokens, features)
    records = PolicyTrace(POLICIES[0]), PolicyTrace(POLICIES[0])
    start = 0
    for count in (100, 1, 3, 64, 132):
        many.commit(tokens[start : start + count], features[start : start + count])
        start += count
        many.propose(tokens[start - 1], records[1], 5)  # guesses that must leave no trace
    one.propose(tokens[-1], records[0], 5)
    assert np.array_equal(records[0].candidates.tokens, records[1].candidates.tokens)
    assert np.array_equal(records[0].candidates.log_probs, records[1].candidates.log_probs)


def test_proposing_twice_gives_the_same_tree() -> None:
    drafter, _ = pair()
    session = drafter.new_session()
    tokens, features = pairs(9)
    session.commit(tokens, features)
    first = session.propose(tokens[-1], POLICIES[0], 5)
    second = session.propose(tokens[-1], POLICIES[0], 5)
    assert np.array_equal(first.tokens, second.tokens) and np.array_equal(first.log_values, second.log_values)
    assert session.propose(tokens[-1], POLICIES[0], 0).num_draft_tokens == 0
    assert session.propose(tokens[-1], POLICIES[0], 2).depths.max() == 2


def test_truncate_forgets_pairs_run_and_waiting() -> None:
    drafter, twin_drafter = pair()
    ours, twin = drafter.new_session(), twin_drafter.new_session()
    tokens, features = pairs(20)
    for session, given in ((ours, features), (twin, torch.tensor(features))):
        session.commit(tokens, given)
        session.truncate(25)
        assert session.length == 20
        session.truncate(15)  # all waiting
        session.propose(tokens[14], POLICIES[0], 3)
        session.truncate(10)  # all run: the tip is gone
        assert session.length == 10
        assert session.propose(tokens[9], POLICIES[0], 3).num_draft_tokens == 0
        session.commit(tokens[10:13], given[10:13])
    assert_same_trees(ours, twin, tokens[12], POLICIES[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "q4"])
def test_packed_types_stay_near_float32(dtype: str) -> None:
    chosen = np.arange(0, V, 2)
    read = checkpoint(replace(CONFIG, draft_vocab_size=len(chosen)), chosen - np.arange(len(chosen)))
    tokens, features = pairs(20)
    logs = []
    for kind in ("float32", dtype):
        session = NativeEagleDrafter(read, load_target(kind)).new_session()
        session.commit(tokens, features)
        record = PolicyTrace(DynamicPolicy(num_steps=1, topk=len(chosen), num_draft_tokens=5))
        session.propose(tokens[-1], record, 1)
        order = np.argsort(record.candidates.tokens[1:])
        logs.append(np.exp(record.candidates.log_probs[1:][order]))
    assert np.abs(logs[0] - logs[1]).sum() < 0.1
    assert logs[1].sum() == pytest.approx(1, abs=1e-5)


def test_a_head_is_int8_beside_a_packed_target_unless_asked_otherwise() -> None:
    def size(target: str, dtype: str) -> int:
        return NativeEagleDrafter(checkpoint(), load_target(target), dtype=dtype).weight_bytes

    for target in ("bfloat16", "int8", "q4"):
        assert size(target, "auto") == size(target, "int8") < size(target, "bfloat16")
    assert size("float32", "auto") == size("float32", "float32")


def test_misfits_are_refused() -> None:
    drafter, _ = pair()
    session = drafter.new_session()
    tokens, features = pairs(3)
    with pytest.raises(InvalidInputError, match="need features of shape"):
        session.commit(tokens, features[:2])
    session.commit(tokens, features)
    with pytest.raises(InvalidInputError, match="the tree's root"):
        session.propose((tokens[-1] + 1) % V, POLICIES[0], 3)
    with pytest.raises(UnsupportedModelError, match="gelu"):
        NativeEagleDrafter(checkpoint(replace(CONFIG, hidden_act="gelu")), load_target())
    with pytest.raises(InvalidInputError, match="hidden and vocabulary sizes"):
        NativeEagleDrafter(checkpoint(replace(CONFIG, vocab_size=V + 1)), load_target())
    broken = checkpoint()
    tensors = {name: tensor for name, tensor in broken.tensors.items() if name != "fc.weight"}
    with pytest.raises(InvalidInputError, match=r"tiny head: weight 'fc.weight' is missing"):
        NativeEagleDrafter(replace(broken, tensors=tensors), load_target())


class Refusing:
    """A policy that never drafts."""

    num_steps, topk, num_draft_tokens = 3, 2, 4

    def expand(self, candidates: Candidates) -> Ints:
        return np.zeros(0, np.int64)

    def select(self, candidates: Candidates) -> Ints:
        return np.zeros(0, np.int64)


def test_a_cycle_that_drafts_nothing_runs_no_head() -> None:
    drafter, _ = pair()
    tokens, features = pairs(9)
    lazy, eager = drafter.new_session(), drafter.new_session()
    for start, end in ((0, 4), (4, 7), (7, 9)):
        lazy.commit(tokens[start:end], features[start:end])
        assert lazy.propose(tokens[end - 1], Refusing(), max_depth=3).num_draft_tokens == 0
        assert lazy._core.length == 0
        assert lazy.length == end
    eager.commit(tokens, features)
    trees = [session.propose(tokens[-1], POLICIES[0], max_depth=3) for session in (lazy, eager)]
    assert trees[0].tokens.tolist() == trees[1].tokens.tolist()
    assert trees[0].log_values.tolist() == trees[1].log_values.tolist()
    assert lazy._core.length == 9
