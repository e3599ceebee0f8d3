"""Training an EAGLE-3 head: its steps are those of drafting, documents stay apart, one conversation is learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.checkpoints.eagle3 import load_eagle3
from eyas.errors import CheckpointError
from eyas.heads.config import Eagle3Config
from eyas.heads.eagle3 import Eagle3Head, initialise
from eyas.heads.layers import HeadCache
from eyas.train.batches import Batch, make_batch
from eyas.train.checkpoint import begun_run
from eyas.train.recipes.base import unroll
from eyas.train.recipes.eagle3 import Eagle3Recipe
from eyas.train.settings import TrainSettings
from eyas.train.store import Document, FeatureStore, StoreWriter
from eyas.train.trainer import TargetWeights, Trainer

VOCAB, HIDDEN = 24, 16
CONFIG = Eagle3Config(
    hidden_size=HIDDEN,
    intermediate_size=32,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    vocab_size=VOCAB,
)
UNROLLED = TrainSettings(noise=0.0, unroll=3)


def weights() -> TargetWeights:
    generator = torch.Generator().manual_seed(0)
    embedding, lm_head = (torch.randn(VOCAB, HIDDEN, generator=generator) for _ in range(2))
    return TargetWeights(embedding, lm_head, torch.ones(HIDDEN))


def document(length: int, seed: int = 0, index: int = 0) -> Document:
    """A greedy answer with four levels: the last one says the next token, the others are other numbers."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randn(length, 4 * HIDDEN, generator=generator).bfloat16()
    final = levels[:, -HIDDEN:]
    following = (final.float() @ weights().lm_head.T).argmax(-1).numpy()
    ids = np.concatenate([[seed % VOCAB], following[:-1]]).astype(np.int64)
    return Document(ids, np.arange(length) >= 3, levels, final, int(following[-1]), index, True)


def inner(item: Document) -> Document:
    """As a store opened for EAGLE-3 gives it."""
    return replace(item, features=item.features[:, : 3 * HIDDEN])


def head(seed: int = 0, config: Eagle3Config = CONFIG) -> Eagle3Head:
    made = Eagle3Head(config)
    initialise(made, weights().lm_head, weights().norm, torch.Generator().manual_seed(seed))
    with torch.no_grad():  # attention that matters, or masks could not be tested
        for name in ("q_proj", "k_proj", "o_proj"):
            getattr(made.midlayer.self_attn, name).weight.mul_(60)
    return made


def loss_of(rows: Sequence[Sequence[Document]], row_size: int, settings: TrainSettings = UNROLLED) -> float:
    target = weights()
    batch = make_batch(rows, row_size)
    return float(Eagle3Recipe().loss(head(), batch, target.embedding, target.lm_head, settings).loss.detach())


def write_store(path: Path, documents: Sequence[Document], levels: int = 4) -> Path:
    target = {"name": "toy", "feature_levels": levels}
    writer = StoreWriter(path, target=target, feature_size=levels * HIDDEN, settings={}, shard_documents=4)
    for item in documents:
        writer.add(item)
    writer.flush()
    return path


def test_a_store_gives_the_inner_levels_and_the_final_one(tmp_path: Path) -> None:
    item = document(6)
    read = FeatureStore(write_store(tmp_path / "four", [item]), levels=3)[0]
    assert torch.equal(read.features, item.features[:, : 3 * HIDDEN])
    assert torch.equal(read.final, item.features[:, 3 * HIDDEN :])
    one = replace(item, features=item.final)
    with pytest.raises(CheckpointError, match="an EAGLE-3 head learns from 4"):
        Trainer([write_store(tmp_path / "one", [one], levels=1)], weights(), CONFIG, UNROLLED, tmp_path / "run")


def test_unrolled_steps_compute_what_drafting_computes() -> None:
    """Step j of pair t equals a draft chain of j - 1 self-fed pairs after the true pairs up to t - j + 1."""
    model, target, item = head(), weights(), inner(document(8, 3))
    batch = make_batch([[item]], 7)
    with torch.no_grad():
        fused = model.fuse(batch.features)
        embeds = target.embedding[batch.tokens]
        steps = [step.outputs for step in unroll(model, batch, embeds, fused, UNROLLED)]
        for t in range(2, 7):
            for j in range(1, 4):
                cache, last_true = HeadCache(1), t - j + 1
                part = slice(0, last_true + 1)
                out = model(embeds[:, part], fused[:, part], batch.positions[:, part], cache=cache)[:, -1:]
                for at in range(last_true + 1, t + 1):
                    out = model(embeds[:, at : at + 1], out, batch.positions[:, at : at + 1], cache=cache)
                row = int((batch.weights[0, :t] > 0).sum())
                torch.testing.assert_close(steps[j - 1][row], out[0, 0], rtol=1e-4, atol=1e-4)


def test_the_loss_does_not_depend_on_how_documents_lie() -> None:
    documents = [inner(document(5 + i, seed=i + 1)) for i in range(4)]
    packed = loss_of([documents], 40)
    assert loss_of([[d] for d in documents], 12) == pytest.approx(packed, abs=1e-5)
    assert loss_of([[d] for d in documents], 48) == pytest.approx(packed, abs=1e-5)  # padded x4
    assert loss_of([documents[2:], documents[:2]], 40) == pytest.approx(packed, abs=1e-5)
    assert loss_of([documents, documents], 40) == pytest.approx(packed, abs=1e-5)  # a repeat


def test_packed_documents_never_see_each_other() -> None:
    batch = make_batch([[inner(document(6, 1)), inner(document(7, 2))]], 16)
    features = batch.features.clone().requires_grad_()
    changed = Batch(**{**vars(batch), "features": features, "weights": batch.weights * (batch.documents == 1)})
    target = weights()
    Eagle3Recipe().loss(head(), changed, target.embedding, target.lm_head, UNROLLED).loss.backward()  # type: ignore[no-untyped-call]
    assert features.grad is not None
    assert (features.grad[0, :5] == 0).all()
    assert (features.grad[0, 5:11] != 0).any()


@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_is_the_weighted_cross_entropy_to_the_target_by_hand(tied: bool) -> None:
    target, item = weights(), inner(document(9, 4))
    model = head(config=replace(CONFIG, target_lm_head=tied))
    batch = make_batch([[item]], 8)
    measured = Eagle3Recipe().loss(model, batch, target.embedding, target.lm_head, UNROLLED)
    with torch.no_grad():
        wanted, shares = 0.0, 0.0
        rows = batch.weights > 0
        teacher = (batch.targets[rows] @ target.lm_head.T).softmax(-1)
        embeds, fused = target.embedding[batch.tokens], model.fuse(batch.features)
        for j, step in enumerate(unroll(model, batch, embeds, fused, UNROLLED)):
            losses = -(teacher * model.logits(step.outputs, target.lm_head).log_softmax(-1)).sum(-1)
            usable = (batch.positions[rows] >= j).float()
            wanted += 0.8**j * float((losses * usable).sum() / usable.sum())
            shares += 0.8**j
    assert float(measured.loss.detach()) == pytest.approx(wanted / shares, rel=1e-4)
    assert measured.regression == 0.0
    measured.loss.backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("draft_vocab_size", [None, 20])
def test_one_conversation_is_learned_saved_and_resumed(
    tmp_path: Path, draft_vocab_size: int | None, tied: bool
) -> None:
    store = write_store(tmp_path / "store", [document(40, seed=5)])
    config = replace(CONFIG, draft_vocab_size=draft_vocab_size, target_lm_head=tied)
    settings = TrainSettings(
        steps=120, rows=1, row_size=48, learning_rate=1e-2, warmup=5, unroll=3, noise=0.0, evaluate_every=1000
    )
    trainer = Trainer([store], weights(), config, replace(settings, steps=60), tmp_path / "run")
    losses: list[float] = []
    trainer.run(lambda metrics: losses.append(metrics["loss"]))
    trainer = Trainer([store], weights(), config, settings, tmp_path / "run")
    assert trainer.state.step == 60
    agreements: list[Sequence[float]] = []
    trainer.run(lambda metrics: (losses.append(metrics["loss"]), agreements.append(metrics["agreement"])))
    assert losses[-1] < 0.6 * losses[0]
    assert min(agreements[-1]) > 0.9
    items = [FeatureStore(store, levels=3)[0]]
    measured = trainer.evaluate(items)
    assert measured["held_out_acceptance_length"] > 3
    read = load_eagle3(tmp_path / "run" / "head")
    assert read.config == config
    assert (read.d2t is None) == (draft_vocab_size is None)


def test_a_run_keeps_its_lm_head(tmp_path: Path) -> None:
    """Also one from before heads could do without."""
    store, out = write_store(tmp_path / "store", [document(40, seed=5)]), tmp_path / "run"
    assert begun_run(out) is None
    Trainer([store], weights(), CONFIG, UNROLLED, out).save_checkpoint()
    state = torch.load(out / "state.pt", weights_only=False)
    del state["config"]["target_lm_head"]
    torch.save(state, out / "state.pt")
    begun = begun_run(out)
    assert begun is not None and not begun.target_lm_head
    Trainer([store], weights(), CONFIG, UNROLLED, out)
    tied = replace(CONFIG, target_lm_head=True)
    with pytest.raises(CheckpointError, match="another head: target_lm_head is False there, asked for is True"):
        Trainer([store], weights(), tied, UNROLLED, out)
    Trainer([store], weights(), tied, UNROLLED, tmp_path / "tied").save_checkpoint()
    begun = begun_run(tmp_path / "tied")
    assert begun is not None and begun.target_lm_head
    (out / "state.pt").write_bytes((out / "state.pt").read_bytes()[:200])
    with pytest.raises(CheckpointError, match=r"state\.pt cannot be read"):
        begun_run(out)
