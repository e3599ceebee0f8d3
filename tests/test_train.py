"""Training a head: losses by hand, masks, packing, resuming to the bit, and overfitting one conversation."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eyas.checkpoints.eagle import load_eagle
from eyas.drafters.eagle import EagleDrafter
from eyas.errors import CheckpointError, InvalidInputError
from eyas.forecast import read_forecast
from eyas.heads.config import Eagle3Config, EagleConfig
from eyas.heads.eagle import EagleHead, initialise
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.layers import DraftHead, HeadCache
from eyas.policies.dynamic import DynamicPolicy
from eyas.train.batches import Batch, Places, choose_draft_vocabulary, coverage, epoch_rows, make_batch, pack
from eyas.train.checkpoint import begun_run
from eyas.train.evaluate import forecast, simulate
from eyas.train.losses import distillation_loss, regression_loss, teacher_probabilities, weighted_mean
from eyas.train.optimizer import HeadOptimizer
from eyas.train.recipes.base import unroll
from eyas.train.recipes.eagle import EagleRecipe
from eyas.train.settings import TrainSettings, rate_share
from eyas.train.store import Document, StoreWriter
from eyas.train.trainer import HELD_OUT_EVERY, TargetWeights, Trainer

VOCAB, HIDDEN = 24, 16
CONFIG = EagleConfig(
    hidden_size=HIDDEN,
    intermediate_size=32,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    vocab_size=VOCAB,
)
PLAIN = TrainSettings(noise=0.0, regression_weight=1.0, distillation_weight=0.1)


def weights(seed: int = 0) -> TargetWeights:
    generator = torch.Generator().manual_seed(seed)
    embedding, lm_head = (torch.randn(VOCAB, HIDDEN, generator=generator) for _ in range(2))
    return TargetWeights(embedding, lm_head, torch.ones(HIDDEN))


def document(length: int, seed: int = 0, prompt: int = 3, index: int = 0) -> Document:
    """A greedy answer: every answer token is the argmax of the lm_head over the feature before it."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(length, HIDDEN, generator=generator).bfloat16()
    following = (features.float() @ weights().lm_head.T).argmax(-1).numpy()
    ids = np.concatenate([[seed % VOCAB], following[:-1]]).astype(np.int64)
    answer = np.arange(length) >= prompt
    return Document(ids, answer, features, features, int(following[-1]), index, True)


def head(seed: int = 0) -> EagleHead:
    made = EagleHead(CONFIG)
    initialise(made, torch.Generator().manual_seed(seed))
    with torch.no_grad():  # attention that matters, or masks could not be tested
        for name in ("q_proj", "k_proj", "o_proj"):
            getattr(made.layers[0].self_attn, name).weight.mul_(60)
    return made


def loss_of(rows: Sequence[Sequence[Document]], row_size: int, settings: TrainSettings = PLAIN) -> float:
    batch = make_batch(rows, row_size, settings.prompt_weight)
    target = weights()
    return float(EagleRecipe().loss(head(), batch, target.embedding, target.lm_head, settings).loss.detach())


def write_store(path: Path, documents: Sequence[Document]) -> Path:
    writer = StoreWriter(path, target={"name": "toy"}, feature_size=HIDDEN, settings={}, shard_documents=4)
    for item in documents:
        writer.add(item)
    writer.flush()
    return path


# Losses


def test_losses_by_hand() -> None:
    predicted, true = torch.tensor([[0.5, 3.0]]), torch.tensor([[0.0, 0.0]])
    assert float(regression_loss(predicted, true)) == pytest.approx((0.5 * 0.25 + 2.5) / 2)
    features, one = torch.tensor([[math.log(3.0), 0.0]]), torch.ones(1)
    teacher = teacher_probabilities(features, torch.eye(2))
    torch.testing.assert_close(teacher, torch.tensor([[0.75, 0.25]]))
    loss, same = distillation_loss(torch.tensor([[0.0, 1.0]]), torch.eye(2), teacher, one)
    assert float(loss) == pytest.approx(math.log(1 + math.e) - 0.25)
    assert same.tolist() == [False]
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    loss, same = distillation_loss(features, torch.eye(2), teacher, one)
    assert float(loss) == pytest.approx(entropy)
    assert same.tolist() == [True]
    assert float(weighted_mean(torch.tensor([2.0, 8.0]), torch.tensor([3.0, 1.0]))) == 3.5
    assert float(weighted_mean(torch.tensor([2.0]), torch.tensor([0.0]))) == 0.0


def test_a_hard_share_moves_the_teacher_to_its_first_choice() -> None:
    features = torch.tensor([[math.log(3.0), 0.0], [0.0, math.log(3.0)], [0.0, math.log(3.0)]])
    teacher = teacher_probabilities(features, torch.eye(2), torch.tensor([0.4, 0.4, 0.0]))
    torch.testing.assert_close(teacher, torch.tensor([[0.85, 0.15], [0.15, 0.85], [0.25, 0.75]]))


def test_greedy_answers_alone_have_a_hard_share() -> None:
    hard = replace(PLAIN, hard_share=1.0, regression_weight=0.0, distillation_weight=1.0)
    soft = replace(hard, hard_share=0.0)
    greedy = document(8, 1)
    sampled = replace(greedy, greedy=False)
    assert loss_of([[sampled]], 8, hard) == loss_of([[sampled]], 8, soft) == loss_of([[greedy]], 8, soft)
    batch, target = make_batch([[greedy]], 8), weights()
    with torch.no_grad():
        outputs = next(iter(unroll(head(), batch, target.embedding[batch.tokens], batch.features, hard))).outputs
    wanted = (batch.targets[batch.weights > 0] @ target.lm_head.T).argmax(dim=-1)
    likelihood = torch.log_softmax(outputs @ target.lm_head.T, dim=-1).gather(1, wanted[:, None])
    assert loss_of([[greedy]], 8, hard) == pytest.approx(-float(likelihood.mean()), rel=1e-5)


def test_a_masked_row_gives_no_gradient() -> None:
    student = torch.zeros(2, 4, requires_grad=True)
    teacher = torch.randn(2, 4).softmax(-1)
    distillation_loss(student, torch.eye(4), teacher, torch.tensor([0.0, 1.0]))[0].backward()  # type: ignore[no-untyped-call]
    assert student.grad is not None
    assert (student.grad[0] == 0).all()
    assert (student.grad[1] != 0).all()


def test_distillation_in_chunks_is_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Value and both gradients against PyTorch's own, over several chunks and a scaled loss."""
    monkeypatch.setattr("eyas.train.losses.CHUNK", 4)
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(10, 6, generator=generator, requires_grad=True)
    lm_head = torch.randn(9, 6, generator=generator, requires_grad=True)
    teacher = torch.randn(10, 9, generator=generator).softmax(-1)
    chances = torch.rand(10, generator=generator)
    logits = features @ lm_head.T
    wanted = (torch.nn.functional.cross_entropy(logits, teacher, reduction="none") * chances).sum() / chances.sum()
    (3 * wanted).backward()
    expected = [features.grad, lm_head.grad]
    features.grad = lm_head.grad = None
    loss, same = distillation_loss(features, lm_head, teacher, chances)
    (3 * loss).backward()
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close([features.grad, lm_head.grad], expected)
    assert same.tolist() == (logits.argmax(-1) == teacher.argmax(-1)).tolist()


# Batches


def test_six_tokens_by_hand() -> None:
    """Prompt a b, answer c d e f, of which f was never taken in. Pair t predicts the token t + 2."""
    features = torch.arange(5.0)[:, None].expand(5, HIDDEN).bfloat16()
    six = Document(np.array([10, 11, 12, 13, 14]), np.array([0, 0, 1, 1, 1], bool), features, features, 15, 0, True)
    batch = make_batch([[six]], 6, prompt_weight=0.25)
    assert batch.tokens[0].tolist() == [11, 12, 13, 14, 0, 0]
    assert batch.features[0, :, 0].tolist() == [0, 1, 2, 3, 0, 0]
    assert batch.targets[0, :, 0].tolist() == [1, 2, 3, 4, 0, 0]
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 0, 0]
    assert batch.documents[0].tolist() == [0, 0, 0, 0, -1, -1]
    # Pair 0 predicts c, the answer's first token; pair 3 predicts f.
    assert batch.weights[0].tolist() == [1, 1, 1, 1, 0, 0]
    two_turns = replace(six, answer=np.array([0, 0, 1, 0, 1], bool))
    assert make_batch([[two_turns]], 6, prompt_weight=0.25).weights[0].tolist() == [1, 0.25, 1, 1, 0, 0]


def visible(batch: Batch, step: int) -> list[str]:
    """Rows of the mask as strings: # seen, . not."""
    every = Places(torch.arange(batch.tokens.shape[1])[None], torch.ones_like(batch.tokens, dtype=torch.bool))
    mask = batch.step_mask(step, every if step > 1 else None)[0, 0]
    return ["".join("#" if value == 0 else "." for value in row) for row in mask.tolist()]


def test_step_masks_by_hand() -> None:
    batch = make_batch([[document(4, 1), document(3, 2)]], 6)  # 3 pairs, 2 pairs, 1 unused
    assert visible(batch, 1) == ["#.....", "##....", "###...", "...#..", "...##.", ".....#"]
    assert visible(batch, 2) == [
        "#.....|#.....".replace("|", ""),  # no true pair before a document's first: itself, weight 0
        "#.....|.#....".replace("|", ""),
        "##....|..#...".replace("|", ""),
        "...#..|...#..".replace("|", ""),
        "...#..|....#.".replace("|", ""),
        ".....#|.....#".replace("|", ""),
    ]
    third = visible(batch, 3)
    assert third[2] == "#.....|.#....|..#...".replace("|", "")


def test_steps_after_the_first_are_taken_where_they_teach() -> None:
    long_prompt, short_prompt = document(8, 1, prompt=6), document(5, 2, prompt=4)  # 7 pairs, 4 pairs
    batch = make_batch([[long_prompt], [short_prompt]], 7)
    assert (batch.weights > 0).int().tolist() == [[0, 0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0, 0]]
    two, three = batch.taught(2), batch.taught(3)
    assert [row[use].tolist() for row, use in zip(two.index, two.used, strict=True)] == [[4, 5, 6], [2, 3]]
    assert [row[use].tolist() for row, use in zip(three.index, three.used, strict=True)] == [[3, 4, 5, 6], [1, 2, 3]]
    assert three.index.shape == (2, 4)
    # Pair 5 in step 3: the true pairs 0..3, its predecessor's step 2, its own step 3; no filled-up place.
    rows = ["".join("#" if value == 0 else "." for value in row) for row in batch.step_mask(3, three)[0, 0].tolist()]
    assert rows[2] == "####...|.#..|..#.".replace("|", "")
    second = batch.step_mask(3, three)[1, 0]
    assert (second[:3, [10, 14]] == -torch.inf).all()


def test_packing() -> None:
    assert pack([3, 4, 2, 9, 1], 6) == [[0, 2, 4], [1], [3]]
    rows = epoch_rows(np.array([5, 9, 3, 7, 4, 6]), 12, seed=1, epoch=0)
    assert sorted(i for row in rows for i in row) == list(range(6))
    assert rows == epoch_rows(np.array([5, 9, 3, 7, 4, 6]), 12, seed=1, epoch=0)
    assert any(rows != epoch_rows(np.array([5, 9, 3, 7, 4, 6]), 12, seed=1, epoch=e) for e in range(1, 5))


@pytest.mark.parametrize("steps", [1, 3])
def test_the_loss_does_not_depend_on_how_documents_lie(steps: int) -> None:
    settings = replace(PLAIN, unroll=steps)
    documents = [document(5 + i, seed=i + 1) for i in range(4)]
    packed = loss_of([documents], 40, settings)
    assert loss_of([[d] for d in documents], 12, settings) == pytest.approx(packed, abs=1e-5)
    assert loss_of([[d] for d in documents], 48, settings) == pytest.approx(packed, abs=1e-5)  # padded x4
    assert loss_of([documents[2:], documents[:2]], 40, settings) == pytest.approx(packed, abs=1e-5)
    assert loss_of([documents, documents], 40, settings) == pytest.approx(packed, abs=1e-5)  # a repeat


def test_weighted_mean_of_batches_is_the_loss_of_all() -> None:
    """Batch 1 against batch 4."""
    documents = [document(5 + i, seed=i + 1) for i in range(4)]
    target = weights()
    alone = [
        EagleRecipe().loss(head(), make_batch([[d]], 12), target.embedding, target.lm_head, PLAIN) for d in documents
    ]
    mean = sum(float(one.loss.detach()) * one.weight for one in alone) / sum(one.weight for one in alone)
    assert loss_of([[d] for d in documents], 12) == pytest.approx(mean, abs=1e-5)


@pytest.mark.parametrize("steps", [1, 3])
def test_packed_documents_never_see_each_other(steps: int) -> None:
    first, second = document(6, 1), document(7, 2)
    batch = make_batch([[first, second]], 16)
    features = batch.features.clone().requires_grad_()
    only_second = batch.weights * (batch.documents == 1)
    target = weights()
    changed = Batch(**{**vars(batch), "features": features, "weights": only_second})
    EagleRecipe().loss(head(), changed, target.embedding, target.lm_head, replace(PLAIN, unroll=steps)).loss.backward()  # type: ignore[no-untyped-call]
    assert features.grad is not None
    assert (features.grad[0, :5] == 0).all()
    assert (features.grad[0, 5:11] != 0).any()


@pytest.mark.parametrize("prompt", [3, 6])
def test_unrolled_steps_compute_what_drafting_computes(prompt: int) -> None:
    """Step j of pair t equals a draft chain of j - 1 self-fed pairs after the true pairs up to t - j + 1."""
    model, target, item = head(), weights(), document(8, 3, prompt=prompt)
    batch = make_batch([[item]], 7)
    outputs: list[torch.Tensor] = []

    class Recorder(EagleHead):
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            out = super().forward(*args, **kwargs)
            outputs.append(out[0].detach())
            return out

    recorder = Recorder(CONFIG)
    recorder.load_state_dict(model.state_dict())
    EagleRecipe().loss(recorder, batch, target.embedding, target.lm_head, replace(PLAIN, unroll=3))
    embeds, features = target.embedding[batch.tokens], batch.features
    places = batch.taught(3).index[0].tolist()
    for t in range(prompt - 1, 7):
        cache = HeadCache(1)
        start = t - 1  # true pairs 0..t-2, then pairs t-1 and t fed with the head's own outputs
        with torch.no_grad():
            feature = model(embeds[:, :start], features[:, :start], torch.arange(start)[None], cache=cache)[:, -1:]
            for pair in (t - 1, t):
                feature = model(embeds[:, pair : pair + 1], feature, torch.tensor([[pair]]), cache=cache)
        torch.testing.assert_close(outputs[2][places.index(t)], feature[0, 0], atol=1e-5, rtol=0)


# Draft vocabulary


def test_draft_vocabulary() -> None:
    features = torch.zeros(4, HIDDEN).bfloat16()
    item = Document(np.array([9, 9, 20, 7]), np.array([0, 0, 1, 1], bool), features, features, 20, 0, True)
    d2t = choose_draft_vocabulary([item], VOCAB, 4)
    assert (np.arange(4) + d2t).tolist() == [0, 7, 9, 20]
    assert coverage([item], d2t) == 1.0
    assert coverage([replace(item, last=23)], d2t) == pytest.approx(2 / 3)
    with pytest.raises(InvalidInputError, match="1 to 24"):
        choose_draft_vocabulary([item], VOCAB, 25)


# Runs

SHORT = TrainSettings(
    steps=8, rows=2, row_size=24, warmup=2, ema=0.9, unroll=2, evaluate_every=4, evaluate_documents=2,
    learning_rate=3e-3,
)  # fmt: skip


def corpus() -> list[Document]:
    held_out = [HELD_OUT_EVERY - 1, 2 * HELD_OUT_EVERY - 1]
    return [document(6 + i % 9, seed=i, index=i) for i in range(14)] + [
        document(12, seed=50 + i, index=i) for i in held_out
    ]


def final_weights(out: Path) -> dict[str, torch.Tensor]:
    saved = torch.load(out / "state.pt", weights_only=False)
    return {**saved["head"], **{f"average.{name}": tensor for name, tensor in saved["average"].items()}}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_killed_run_resumes_to_the_bit(tmp_path: Path, optimizer: str) -> None:
    store = write_store(tmp_path / "store", corpus())
    config = replace(CONFIG, draft_vocab_size=16)
    short = replace(SHORT, optimizer=optimizer)
    Trainer([store], weights(), config, short, tmp_path / "whole").run()
    last = json.loads((tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["learning_rate"] == pytest.approx(3e-3 * rate_share(short, 7))
    highest = short.matrix_learning_rate if optimizer == "muon" else 0
    assert last.get("matrix_learning_rate", 0) == pytest.approx(highest * rate_share(short, 7))

    def stop(metrics: dict[str, Any]) -> None:
        if metrics["step"] == 6:
            raise KeyboardInterrupt

    often = replace(short, checkpoint_seconds=0.0)
    with pytest.raises(KeyboardInterrupt):  # steps 1 to 5 are in the checkpoint, step 6 is lost
        Trainer([store], weights(), config, often, tmp_path / "killed").run(stop)
    resumed = Trainer([store], weights(), config, often, tmp_path / "killed")
    assert resumed.state.step == 5
    resumed.run()
    whole, killed = final_weights(tmp_path / "whole"), final_weights(tmp_path / "killed")
    assert whole.keys() == killed.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, killed[name]), name


def test_a_run_keeps_its_optimizer(tmp_path: Path) -> None:
    """Also one from before there was a choice, whose checkpoint holds an AdamW's bare state."""
    store, out = write_store(tmp_path / "store", corpus()), tmp_path / "run"
    Trainer([store], weights(), CONFIG, replace(SHORT, steps=4), out).run()
    state = torch.load(out / "state.pt", weights_only=False)
    state["optimizer"] = state["optimizer"]["adamw"]
    del state["settings"]["optimizer"], state["settings"]["matrix_learning_rate"]
    torch.save(state, out / "state.pt")
    begun = begun_run(out)
    assert begun is not None and begun.optimizer == "adamw"
    with pytest.raises(CheckpointError, match="holds a run of adamw, asked for is muon"):
        Trainer([store], weights(), CONFIG, replace(SHORT, optimizer="muon"), out)
    resumed = Trainer([store], weights(), CONFIG, SHORT, out)
    moments = resumed.optimizer.state_dict()["adamw"]["state"]
    assert torch.equal(moments[0]["exp_avg"], state["optimizer"]["state"][0]["exp_avg"])
    assert resumed.run().step == 8
    with pytest.raises(InvalidInputError, match="'sgd' is unknown; known: adamw, muon"):
        replace(SHORT, optimizer="sgd")


@pytest.mark.parametrize("kind", ["eagle", "own", "target"])
def test_muon_moves_matrices_and_adamw_the_rest(kind: str) -> None:
    made: DraftHead = EagleHead(CONFIG)
    if kind != "eagle":
        shape = {name: value for name, value in vars(CONFIG).items() if name != "fc_bias"}
        made = Eagle3Head(Eagle3Config(**shape, target_lm_head=kind == "target"))
    before = {name: parameter.detach().clone() for name, parameter in made.named_parameters()}
    settings = replace(PLAIN, optimizer="muon", matrix_learning_rate=0.1, learning_rate=0.003, weight_decay=0.0)
    optimizer = HeadOptimizer(made, settings)
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step(0.5)
    adam = []
    for name, parameter in made.named_parameters():
        change = parameter.detach() - before[name]
        if parameter.ndim == 2 and name != "lm_head.weight":
            sizes = torch.linalg.svdvals(change)  # of a nearly orthogonal matrix, times the rate
            rate = 0.05 * max(1, change.shape[0] / change.shape[1]) ** 0.5
            assert sizes.min() > 0.4 * rate and sizes.max() < 1.4 * rate, name
        else:
            adam.append(name)
            torch.testing.assert_close(change.abs(), torch.full_like(change, 0.0015), rtol=1e-3, atol=0)
    assert ("lm_head.weight" in adam) == (kind == "own")
    assert {name for name in adam if name != "lm_head.weight"} == {name for name in before if "norm" in name}


def test_a_run_writes_metrics_and_a_loadable_head(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", corpus())
    config = replace(CONFIG, draft_vocab_size=16)
    trainer = Trainer([store], weights(), config, SHORT, tmp_path / "run", metadata={"target": "toy"})
    state = trainer.run()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))
    measured = [line["held_out_acceptance_length"] for line in lines if "held_out_acceptance_length" in line]
    assert len(measured) == 2
    assert state.best == max(measured) >= 1.0
    loaded = load_eagle(tmp_path / "run" / "head")
    assert loaded.config == config
    assert loaded.metadata["target"] == "toy"
    np.testing.assert_array_equal(loaded.d2t, trainer.d2t)
    assert read_forecast(tmp_path / "run" / "head", greedy=True) is not None
    trainer.save_head(tmp_path / "run" / "head", {})
    assert read_forecast(tmp_path / "run" / "head", greedy=True) is None  # it was of the weights before


def test_held_out_documents_are_not_trained_on(tmp_path: Path) -> None:
    trainer = Trainer([write_store(tmp_path / "s", corpus())], weights(), CONFIG, SHORT, tmp_path / "run")
    held_out = {d.prompt_index for d in trainer.held_out_documents()}
    assert held_out == {HELD_OUT_EVERY - 1, 2 * HELD_OUT_EVERY - 1}
    seen: set[int] = set()
    for _ in range(12):
        seen |= {d.prompt_index for row in trainer._next_documents() for d in row}
    assert seen == set(range(14))


def test_a_growing_store_joins_with_the_next_epoch(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", corpus()[:4])
    trainer = Trainer([store], weights(), CONFIG, replace(SHORT, rows=1), tmp_path / "run")
    trainer._next_documents()
    write_store(tmp_path / "s", corpus()[4:])
    epoch: set[int] = set()
    while trainer.state.epoch < 2:
        first = trainer.state.epoch == 1
        rows = trainer._next_documents()
        if first:
            epoch |= {d.prompt_index for row in rows for d in row}
    assert epoch == set(range(14))


def test_the_best_head_is_measured_again_where_a_store_has_grown(tmp_path: Path) -> None:
    """Or heads measured on easier documents would never be beaten."""
    store, run = write_store(tmp_path / "s", corpus()), tmp_path / "run"
    first = Trainer([store], weights(), CONFIG, replace(SHORT, steps=4, evaluate_every=4), run)
    first.run()
    state = torch.load(run / "state.pt", weights_only=False)
    state["state"]["best"] = 99.0  # as measured on documents that are no longer the ones
    torch.save(state, run / "state.pt")
    resumed = Trainer([store], weights(), CONFIG, replace(SHORT, steps=8, evaluate_every=4), run)
    lines = [line for line in (run / "metrics.jsonl").read_text().splitlines() if "held_out_acc" in line]
    found: list[dict[str, Any]] = []
    resumed.run(found.append)
    measured = [json.loads(line)["held_out_acceptance_length"] for line in lines]
    measured += [m["held_out_acceptance_length"] for m in found if "held_out_acceptance_length" in m]
    assert len(measured) == 2 and resumed.state.best == max(measured)


def test_learning_rate_warms_up_and_decays() -> None:
    settings = TrainSettings(steps=110, warmup=10, final_lr_share=0.1)
    assert rate_share(settings, 0) == pytest.approx(0.1)
    assert rate_share(settings, 10) == pytest.approx(1.0)
    assert rate_share(settings, 60) == pytest.approx(0.55)
    assert rate_share(settings, 110) == pytest.approx(0.1)


def test_overfitting_one_conversation_accepts_nearly_everything() -> None:
    """tau > 0.9 * (num_steps + 1) on the conversation itself."""
    item, target = document(60, seed=7), weights()
    model = EagleHead(CONFIG)
    initialise(model, torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    settings = replace(PLAIN, unroll=3, distillation_weight=1.0)
    batch = make_batch([[item]], 59)
    for _ in range(400):
        optimizer.zero_grad()
        EagleRecipe().loss(model, batch, target.embedding, target.lm_head, settings).loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    drafter = EagleDrafter(model.requires_grad_(False), target.embedding, target.lm_head)
    policy = DynamicPolicy(num_steps=3, topk=4, num_draft_tokens=10)
    assert simulate(drafter, policy, [item]).length > 0.9 * 4
    worth = forecast(drafter, [item])
    assert all(worth.acceptance[level][0] > 0.8 for level in range(3))  # as many as it was taught
    assert len(worth.acceptance) == 6 and len(worth.acceptance[0]) == 8
    assert worth.calibration.levels[0].observed[-1] > np.log(0.9)


def test_simulation_counts_like_decoding() -> None:
    """An untrained head that is never right: one token per cycle, the answer's first token not counted."""
    item, target = document(12, seed=4, prompt=5), weights()
    drafter = EagleDrafter(head(), target.embedding, -target.lm_head)
    result = simulate(drafter, DynamicPolicy(num_steps=2, topk=1, num_draft_tokens=2), [item])
    assert result.tokens == 12 - 5  # ids 6..11 and `last`
    assert result.cycles <= result.tokens
    worth = forecast(drafter, [item])
    assert worth.acceptance[0][0] < 0.1
    assert worth.drawn == ()
    assert len(worth.hit_rates) == 12
    with pytest.raises(InvalidInputError, match="greedy"):
        simulate(drafter, DynamicPolicy(), [replace(item, greedy=False)])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", math.nan),
        ("matrix_learning_rate", math.nan),
        ("matrix_learning_rate", math.inf),
        ("noise", -0.1),
        ("warmup", -1),
        ("ema", 1.0),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_impossible_settings_are_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidInputError, match=f"^{name} must be"):
        replace(SHORT, **{name: value})  # type: ignore[arg-type]


def test_wrong_runs_are_refused(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", corpus()[:2])
    small = EagleConfig(8, 8, 1, 1, 8, VOCAB)
    with pytest.raises(InvalidInputError, match="hidden size 16, the head's is 8"):
        Trainer([store], weights(), small, SHORT, tmp_path / "a")
    with pytest.raises(InvalidInputError, match="no answers yet"):
        Trainer([write_store(tmp_path / "empty", [])], weights(), CONFIG, SHORT, tmp_path / "b")
    with pytest.raises(InvalidInputError, match="steps"):
        replace(SHORT, steps=0)
    trainer = Trainer([store], weights(), CONFIG, SHORT, tmp_path / "c")
    trainer.save_checkpoint()
    with pytest.raises(CheckpointError, match="another head: intermediate_size is 32 there"):
        Trainer([store], weights(), replace(CONFIG, intermediate_size=16), SHORT, tmp_path / "c")
