"""Drafting with an EAGLE head: every number a session produces is recomputed the slow way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eyas.checkpoints.eagle import EagleCheckpoint, load_eagle, save_eagle
from eyas.drafters import torch_head
from eyas.drafters.eagle import EagleDrafter
from eyas.drafters.torch_head import HeadSession
from eyas.errors import InvalidInputError
from eyas.heads.config import EagleConfig
from eyas.heads.eagle import EagleHead
from eyas.heads.layers import HeadCache, causal_mask, head_arrays
from eyas.policies import DynamicPolicy, StaticPolicy, TreePolicy
from eyas.policies.base import Candidates
from eyas.policies.trace import PolicyTrace
from eyas.tree import DraftTree

H, V = 16, 40
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
CONFIG = EagleConfig(
    hidden_size=H,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    vocab_size=V,
    rope_theta=1e4,
    fc_bias=True,
    qkv_bias=True,
)
DYNAMIC = DynamicPolicy(num_steps=4, topk=4, num_draft_tokens=12)
POLICIES: list[TreePolicy] = [
    DYNAMIC,
    DynamicPolicy(num_steps=3, topk=2, num_draft_tokens=40),
    StaticPolicy.eagle1(),
    StaticPolicy.chain(5),
]


def make_drafter(
    config: EagleConfig = CONFIG, d2t: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> EagleDrafter:
    generator = torch.Generator().manual_seed(0)
    head = EagleHead(config)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.normal_(1.0 if "layernorm" in name else 0.0, 0.2, generator=generator)
    embedding = torch.randn(V, H, generator=generator)
    lm_head = torch.randn(V, H, generator=generator) * 0.4
    return EagleDrafter(head.to(dtype), embedding, lm_head, d2t)


def context(rows: int, seed: int = 1) -> tuple[list[int], Tensor]:
    """Tokens and the features before them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(V, (rows,), generator=generator).tolist(), torch.randn(rows, H, generator=generator)


@torch.no_grad()
def outputs(drafter: EagleDrafter, tokens: list[int], features: Tensor, path: list[int]) -> Tensor:
    """[n + len(path), H] from scratch: true features first, then one own output after the other, no cache."""
    tokens = [*tokens, *path]
    for stop in range(len(features), len(tokens) + 1):
        embeds = drafter.embedding[torch.tensor(tokens[:stop])]
        out = drafter.head(embeds[None], features[None, :stop], torch.arange(stop)[None])[0]
        features = torch.cat((features, out[-1:]))
    return out


def path_of(candidates: Candidates, node: int) -> list[int]:
    path: list[int] = []
    while node > 0:
        path.append(int(candidates.tokens[node]))
        node = int(candidates.parents[node])
    return path[::-1]


def assert_recomputed(drafter: EagleDrafter, candidates: Candidates, tokens: list[int], features: Tensor) -> None:
    """Each candidate's confidence is what its parent's own path gives, and siblings are the most confident tokens."""
    assert len(candidates) > 1
    for parent in sorted(set(candidates.parents[1:].tolist())):
        hidden = outputs(drafter, tokens, features, path_of(candidates, parent))[-1]
        expected = torch.log_softmax(drafter.lm_head @ hidden, -1)
        ids = torch.arange(V) if drafter.token_ids is None else drafter.token_ids
        children = np.flatnonzero(candidates.parents == parent)
        best, rows = expected.topk(len(children))
        assert candidates.tokens[children].tolist() == ids[rows].tolist()
        np.testing.assert_allclose(candidates.log_probs[children], best.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_layers": 2, "fc_bias": False, "qkv_bias": False},
        {"rope_theta": 1e6, "rope_scaling": LLAMA3, "head_dim": 10},
        {"rope_theta": 1e6, "rope_scaling": YARN, "max_position_embeddings": 64},
    ],
)
def test_every_node_equals_its_own_path_from_scratch(policy: TreePolicy, changes: dict[str, Any]) -> None:
    drafter = make_drafter(replace(CONFIG, **changes))
    tokens, features = context(9)
    session = drafter.new_session()
    session.commit(tokens, features)
    recorder = PolicyTrace(policy)
    tree = session.propose(tokens[-1], recorder, max_depth=99)
    assert recorder.candidates.depth == policy.num_steps
    assert tree.tokens[0] == tokens[-1]
    assert 0 < tree.num_draft_tokens <= policy.num_draft_tokens
    assert_recomputed(drafter, recorder.candidates, tokens, features)


def same_state(one: HeadSession, other: HeadSession) -> None:
    """Both hold the same keys and values, and draw the same tree."""
    assert one.length == other.length
    for mine, theirs in zip(
        one._cache._keys + one._cache._values, other._cache._keys + other._cache._values, strict=True
    ):
        assert mine is not None
        assert theirs is not None
        rows = one._cache.length
        assert other._cache.length == rows
        torch.testing.assert_close(mine[:, :, :rows], theirs[:, :, :rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_after_each_cycle_the_state_is_that_of_a_fresh_session(num_layers: int) -> None:
    """Guesses leave no trace: nothing, something, or the deepest path of the tree accepted."""
    drafter = make_drafter(replace(CONFIG, num_layers=num_layers))
    tokens, features = context(5)
    session = drafter.new_session()
    session.commit(tokens, features)
    for cycle in range(8):
        recorder = PolicyTrace(DYNAMIC)
        tree = session.propose(tokens[-1], recorder, max_depth=99)
        assert_recomputed(drafter, recorder.candidates, tokens, features)
        fresh = drafter.new_session()
        fresh.commit(tokens, features)
        assert_same_tree(fresh.propose(tokens[-1], DYNAMIC, 99), tree)
        same_state(session, fresh)

        deepest = tree.path_to(int(tree.depths.argmax()))
        accepted = deepest[1 : 1 + (99 if cycle % 3 == 0 else cycle % 3)]
        block = [*tree.tokens[accepted].tolist(), cycle]
        true = context(len(block), seed=100 + cycle)[1]  # the target's features are not what the head guessed
        session.commit(block, true)
        tokens, features = tokens + block, torch.cat((features, true))
        assert session.length == len(tokens)


def assert_same_tree(one: DraftTree, other: DraftTree) -> None:
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.parents.tolist() == other.parents.tolist()
    np.testing.assert_allclose(one.log_values, other.log_values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN])
def test_training_and_drafting_compute_the_same(scaling: dict[str, Any] | None) -> None:
    """One pass with a mask, as in training, against pair after pair through a cache, as in drafting."""
    head = make_drafter(replace(CONFIG, rope_theta=1e6, rope_scaling=scaling, head_dim=10)).head
    generator = torch.Generator().manual_seed(4)
    embeds, features = torch.randn(1, 24, H, generator=generator), torch.randn(1, 24, H, generator=generator)
    positions = torch.arange(24)[None]
    trained = head(embeds, features, positions, mask=causal_mask(24, 0, embeds.device)).detach()
    torch.testing.assert_close(head(embeds, features, positions), trained, rtol=1e-5, atol=1e-5)
    cache = HeadCache(1)
    with torch.inference_mode():
        for t in range(24):
            drafted = head(embeds[:, t : t + 1], features[:, t : t + 1], positions[:, t : t + 1], cache=cache)
            torch.testing.assert_close(drafted, trained[:, t : t + 1], rtol=1e-5, atol=1e-5)


def test_pieces_of_any_size_make_the_same_state(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make_drafter()
    tokens, features = context(23)
    whole = drafter.new_session()
    whole.commit(tokens, features)
    tree = whole.propose(tokens[-1], DYNAMIC, 99)
    monkeypatch.setattr(torch_head, "CHUNK", 5)
    pieces = drafter.new_session()
    for start, stop in ((0, 1), (1, 3), (3, 14), (14, 23)):
        pieces.commit(tokens[start:stop], features[start:stop])
    assert_same_tree(pieces.propose(tokens[-1], DYNAMIC, 99), tree)
    same_state(pieces, whole)


@pytest.mark.parametrize("ran", [0, 4, 9])
@pytest.mark.parametrize("length", [0, 3, 4, 6, 9, 12])
def test_truncate(ran: int, length: int) -> None:
    """Cut among pairs the head has run over, among waiting ones, or not at all; then go on differently."""
    drafter = make_drafter()
    tokens, features = context(9)
    session = drafter.new_session()
    session.commit(tokens[:ran], features[:ran])
    if ran:
        session.propose(tokens[ran - 1], DYNAMIC, 99)
    session.commit(tokens[ran:], features[ran:])
    session.truncate(length)
    kept = min(length, 9)
    assert session.length == kept
    more, true = context(2, seed=7)
    session.commit(more, true)
    fresh = drafter.new_session()
    fresh.commit([*tokens[:kept], *more], torch.cat((features[:kept], true)))
    assert_same_tree(session.propose(more[-1], DYNAMIC, 99), fresh.propose(more[-1], DYNAMIC, 99))
    same_state(session, fresh)


def test_without_a_pair_to_start_from_the_tree_is_the_root() -> None:
    drafter = make_drafter()
    tokens, features = context(5)
    session = drafter.new_session()
    assert len(session.propose(3, DYNAMIC, 99)) == 1
    session.commit(tokens, features)
    session.propose(tokens[-1], DYNAMIC, 99)
    session.truncate(3)
    tree = session.propose(tokens[2], DYNAMIC, 99)
    assert tree.tokens.tolist() == [tokens[2]]
    assert session.length == 3


def test_proposing_twice_gives_the_same_tree() -> None:
    drafter = make_drafter()
    tokens, features = context(6)
    session = drafter.new_session()
    session.commit(tokens, features)
    first = session.propose(tokens[-1], DYNAMIC, 99)
    assert_same_tree(session.propose(tokens[-1], DYNAMIC, 99), first)


@pytest.mark.parametrize("max_depth", [0, 1, 3])
def test_depth_is_bounded(max_depth: int) -> None:
    drafter = make_drafter()
    tokens, features = context(6)
    session = drafter.new_session()
    session.commit(tokens, features)
    assert session.propose(tokens[-1], DYNAMIC, max_depth).depths.max() == max_depth


def test_sessions_do_not_touch_each_other() -> None:
    drafter = make_drafter()
    contexts = [context(4 + i, seed=20 + i) for i in range(3)]
    alone = []
    for tokens, features in contexts:
        session = drafter.new_session()
        session.commit(tokens, features)
        alone.append(session.propose(tokens[-1], DYNAMIC, 99))
    sessions = [drafter.new_session() for _ in contexts]
    for session, (tokens, features) in zip(sessions, contexts, strict=True):
        session.commit(tokens, features)
    for session, (tokens, _), tree in zip(sessions, contexts, alone, strict=True):
        assert_same_tree(session.propose(tokens[-1], DYNAMIC, 99), tree)


def test_draft_vocabulary_proposes_target_ids() -> None:
    ids = torch.tensor([2, 3, 11, 17, 30, 39])
    drafter = make_drafter(replace(CONFIG, draft_vocab_size=6), d2t=ids - torch.arange(6))
    tokens, features = context(7)
    session = drafter.new_session()
    session.commit(tokens, features)
    recorder = PolicyTrace(DYNAMIC)
    session.propose(tokens[-1], recorder, 99)
    assert set(recorder.candidates.tokens[1:].tolist()) <= set(ids.tolist())
    assert_recomputed(drafter, recorder.candidates, tokens, features)


@pytest.mark.parametrize("policy", [DynamicPolicy(3, 4, 30), StaticPolicy.eagle1()])
def test_fewer_draft_tokens_than_topk(policy: TreePolicy) -> None:
    drafter = make_drafter(replace(CONFIG, draft_vocab_size=2), d2t=torch.tensor([5, 8]))
    tokens, features = context(7)
    session = drafter.new_session()
    session.commit(tokens, features)
    tree = session.propose(tokens[-1], policy, 99)
    assert set(tree.tokens[1:].tolist()) == {5, 9}
    assert np.isfinite(tree.log_values).all()
    for children in tree.children:
        assert len(set(tree.tokens[children].tolist())) == len(children)


def test_features_may_be_arrays_and_their_buffer_may_be_reused() -> None:
    drafter = make_drafter()
    tokens, features = context(6)
    plain = drafter.new_session()
    plain.commit(tokens, features)
    tree = plain.propose(tokens[-1], DYNAMIC, 99)
    for buffer in (features.numpy().copy(), features.clone()):
        session = drafter.new_session()
        session.commit(tokens, buffer)
        buffer[:] = 7.0
        assert_same_tree(session.propose(tokens[-1], DYNAMIC, 99), tree)
    fixed = features.numpy().copy()
    fixed.flags.writeable = False
    session = drafter.new_session()
    session.commit(tokens, fixed)
    assert_same_tree(session.propose(tokens[-1], DYNAMIC, 99), tree)


def test_half_precision_confidences_are_float32_and_near() -> None:
    tokens, features = context(8)
    recorders = []
    for dtype in (torch.float32, torch.bfloat16):
        session = make_drafter(dtype=dtype).new_session()
        session.commit(tokens, features)
        recorders.append(PolicyTrace(DYNAMIC))
        session.propose(tokens[-1], recorders[-1], 1)
    full, half = (recorder.candidates for recorder in recorders)
    assert half.log_probs.dtype == np.float32
    assert full.tokens[1] == half.tokens[1]
    np.testing.assert_allclose(half.log_probs[1:], full.log_probs[1:], atol=0.1)


def test_from_a_checkpoint(tmp_path: Any) -> None:
    drafter = make_drafter()
    save_eagle(tmp_path, CONFIG, head_arrays(drafter.head), dtype="float32")
    checkpoint = load_eagle(tmp_path)
    loaded = EagleDrafter.from_checkpoint(checkpoint, drafter.embedding, drafter.lm_head, name="mine")
    assert (loaded.name, loaded.feature_levels) == ("mine", 1)
    tokens, features = context(6)
    trees = []
    for one in (drafter, loaded):
        session = one.new_session()
        session.commit(tokens, features)
        trees.append(session.propose(tokens[-1], DYNAMIC, 99))
    assert_same_tree(*trees)
    small = EagleDrafter.from_checkpoint(checkpoint, drafter.embedding, drafter.lm_head, dtype=torch.bfloat16)
    assert small.embedding.dtype == small.lm_head.dtype == small.head.fc.weight.dtype == torch.bfloat16


def test_a_draft_vocabulary_from_a_checkpoint() -> None:
    drafter = make_drafter()
    config = replace(CONFIG, draft_vocab_size=3)
    checkpoint = EagleCheckpoint("memory", config, head_arrays(drafter.head), d2t=np.array([1, 1, 30]))
    loaded = EagleDrafter.from_checkpoint(checkpoint, drafter.embedding, drafter.lm_head)
    assert torch.equal(loaded.lm_head, drafter.lm_head[[1, 2, 32]])


def test_misuse_is_refused() -> None:
    drafter = make_drafter()
    tokens, features = context(4)
    session = drafter.new_session()
    with pytest.raises(InvalidInputError, match=r"features of shape \(4, 16\), got \(3, 16\)"):
        session.commit(tokens, features[:3])
    with pytest.raises(InvalidInputError, match=r"got \(4, 48\)"):
        session.commit(tokens, torch.zeros(4, 48))
    assert session.length == 0
    session.commit(tokens, features)
    with pytest.raises(InvalidInputError, match="last committed"):
        session.propose((tokens[-1] + 1) % V, DYNAMIC, 99)
    with pytest.raises(InvalidInputError, match=r"embedding has shape \(40, 8\).*\(40, 16\)"):
        EagleDrafter(drafter.head, torch.zeros(V, 8), drafter.lm_head)
    with pytest.raises(InvalidInputError, match="lm_head has shape"):
        EagleDrafter(drafter.head, drafter.embedding, torch.zeros(V + 1, H))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_same_trees_on_an_accelerator() -> None:
    host = make_drafter()
    device = EagleDrafter(make_drafter().head.cuda(), host.embedding, host.lm_head)
    tokens, features = context(8)
    trees = []
    for drafter in (host, device):
        session = drafter.new_session()
        session.commit(tokens, features)
        trees.append(session.propose(tokens[-1], DYNAMIC, 99))
    assert_same_tree(*trees)


class Refusing:
    """A policy that never drafts."""

    num_steps, topk, num_draft_tokens = 3, 2, 4

    def expand(self, candidates: Candidates) -> np.ndarray:
        return np.zeros(0, np.int64)

    def select(self, candidates: Candidates) -> np.ndarray:
        return np.zeros(0, np.int64)


def test_a_cycle_that_drafts_nothing_runs_no_head(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make_drafter()
    tokens, features = context(9)
    lazy, eager = drafter.new_session(), drafter.new_session()
    with monkeypatch.context() as patch:
        patch.setattr(drafter.head, "forward", None)  # calling it would fail
        for end in (4, 7, 9):
            start = 0 if end == 4 else (4 if end == 7 else 7)
            lazy.commit(tokens[start:end], features[start:end])
            assert lazy.propose(tokens[end - 1], Refusing(), max_depth=3).num_draft_tokens == 0
    eager.commit(tokens, features)
    trees = [session.propose(tokens[-1], DYNAMIC, max_depth=3) for session in (lazy, eager)]
    assert trees[0].tokens.tolist() == trees[1].tokens.tolist()
    same_state(lazy, eager)
