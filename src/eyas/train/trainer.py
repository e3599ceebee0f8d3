"""Training an EAGLE-1/2 head on stored answers: plain or unrolled over several of its own steps.

Everything random is a function of (seed, epoch) or (seed, step), so a checkpoint holds no generator state and a
resumed run continues to the bit.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eyas.checkpoints.eagle import save_eagle
from eyas.drafters.eagle import EagleDrafter
from eyas.errors import CheckpointError, InvalidInputError
from eyas.heads.config import EagleConfig
from eyas.heads.eagle import EagleHead, draft_rows, initialise
from eyas.heads.layers import HeadCache, head_arrays
from eyas.policies.dynamic import DynamicPolicy
from eyas.train.batches import Batch, choose_draft_vocabulary, coverage, epoch_rows, make_batch
from eyas.train.evaluate import simulate
from eyas.train.losses import distillation_loss, regression_loss, teacher_probabilities, weighted_mean
from eyas.train.store import Document, FeatureStore
from eyas.tree import Ints

HELD_OUT_EVERY = 40
"""Every so manieth prompt is held out: by its index, so that a growing store keeps the split."""


@dataclass(frozen=True)
class TrainSettings:
    """How a head is trained.

    Attributes:
        steps: optimiser steps.
        rows, row_size: a batch is ``rows`` rows of ``row_size`` pairs.
        learning_rate, warmup, final_lr_share: linear warmup over ``warmup`` steps, then a cosine down to this share.
        weight_decay, beta2, clip: of AdamW, and the largest gradient norm.
        noise: features get uniform noise of -noise..noise (EAGLE: 0.1 at H = 4096), scaled by their deviation.
        regression_weight, distillation_weight: of the two losses (EAGLE-1: 1.0 and 0.1).
        unroll: steps of its own that the head learns to take (1: plain EAGLE; HASS: 3 to 4).
        unroll_after: optimiser steps before which it only learns the first (unrolling a head that knows nothing is
            dear and teaches little).
        unroll_decay: weight of unrolled step j is ``unroll_decay ** (j - 1)``.
        detach: no gradient from a step into the features that earlier steps made.
        prompt_weight: of rows that predict a prompt's token.
        ema: decay of the averaged weights that are evaluated and saved; 0 for none.
        seed: of start values, order and noise.
        evaluate_every, evaluate_documents: steps between held-out measurements, and documents walked in each.
        checkpoint_seconds: between checkpoints of the whole state.
    """

    steps: int = 2000
    rows: int = 4
    row_size: int = 512
    learning_rate: float = 1e-3
    warmup: int = 50
    final_lr_share: float = 0.05
    weight_decay: float = 0.01
    beta2: float = 0.95
    clip: float = 0.5
    noise: float = 0.1
    regression_weight: float = 1.0
    distillation_weight: float = 0.1
    unroll: int = 1
    unroll_after: int = 0
    unroll_decay: float = 0.8
    detach: bool = False
    prompt_weight: float = 0.0
    ema: float = 0.0
    seed: int = 0
    evaluate_every: int = 200
    evaluate_documents: int = 24
    checkpoint_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("steps", "rows", "row_size", "unroll", "evaluate_every"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.learning_rate <= 0 or not 0 <= self.ema < 1:
            raise InvalidInputError(f"learning_rate must be above 0 and ema in 0..1, got {self}")


@dataclass(frozen=True)
class TargetWeights:
    """What training needs of the target: its two big matrices [V, H], float32."""

    embedding: Tensor
    lm_head: Tensor


EpochPlan = tuple[list[tuple[int, int]], list[list[int]]]
"""Places (store, document) of the training documents, and the rows of an epoch as indices into them."""


class UnrollCache(HeadCache):
    """Keys and values of all unrolled steps side by side, kept as autograd values instead of written in place."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self._past: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        past = self._past[layer]
        if past is not None:
            keys, values = torch.cat((past[0], keys), dim=2), torch.cat((past[1], values), dim=2)
        self._past[layer] = (keys, values)
        return keys, values


@dataclass(frozen=True)
class BatchLoss:
    """One batch's outcome.

    Attributes:
        loss: scalar to minimise.
        regression, distillation: its parts, mean over rows and steps.
        agreement: share of rows, per unrolled step, where the head's first choice is the target's.
        weight: rows counted.
    """

    loss: Tensor
    regression: float
    distillation: float
    agreement: tuple[float, ...]
    weight: float


def batch_loss(
    head: EagleHead,
    batch: Batch,
    embedding: Tensor,
    draft_lm_head: Tensor,
    settings: TrainSettings,
    noise: Tensor | None = None,
) -> BatchLoss:
    """The loss of a batch; a function of its arguments alone.

    Args:
        embedding: [V, H] of the target.
        draft_lm_head: [draft vocab, H], the rows of the target's lm_head that are scored, in the dtype to multiply in.
        noise: [B, S, H], added to the true features.
    """
    embeds = embedding[batch.tokens]  # [B, S, H]
    features = batch.features if noise is None else batch.features + noise
    cache = UnrollCache(head.config.num_layers) if settings.unroll > 1 else None
    total = features.new_zeros(())
    regression_sum = distillation_sum = step_weight_sum = 0.0
    agreement = []
    rows = batch.weights > 0  # [B, S]
    true = batch.targets[rows]  # [n, H]
    teacher = teacher_probabilities(true, draft_lm_head)  # [n, draft vocab]
    for step in range(1, settings.unroll + 1):
        predicted = head(embeds, features, batch.positions, batch.step_mask(step), cache)  # [B, S, H]
        weights = batch.weights[rows] * (batch.positions[rows] >= step - 1)
        student = predicted[rows]  # [n, H]
        distillation, same = distillation_loss(student, draft_lm_head, teacher, weights)
        regression = weighted_mean(regression_loss(student, true), weights)
        step_weight = settings.unroll_decay ** (step - 1)
        total = total + step_weight * (
            settings.regression_weight * regression + settings.distillation_weight * distillation
        )
        step_weight_sum += step_weight
        regression_sum += float(regression.detach())
        distillation_sum += float(distillation.detach())
        agreement.append(float(weighted_mean(same.float(), weights)))
        # The prediction of pair t - 1 stands in for the true feature t.
        features = torch.cat((features[:, :1], predicted[:, :-1]), dim=1)
        if settings.detach:
            features = features.detach()
    return BatchLoss(
        total / step_weight_sum,
        regression_sum / settings.unroll,
        distillation_sum / settings.unroll,
        tuple(agreement),
        float(rows.sum()),
    )


def learning_rate(settings: TrainSettings, step: int) -> float:
    """Of step 0, 1, ...: linear warmup, cosine decay to ``final_lr_share``."""
    if step < settings.warmup:
        return settings.learning_rate * (step + 1) / settings.warmup
    progress = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    share = settings.final_lr_share
    return settings.learning_rate * (share + (1 - share) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


@dataclass
class TrainState:
    """Where a run stands; what a checkpoint holds besides weights and optimiser.

    Attributes:
        step: optimiser steps done.
        epoch, position: batches of this epoch done.
        documents: documents of each store that this epoch is made of (a store may grow meanwhile).
        best: largest held-out acceptance length so far.
        tokens: pairs trained on.
    """

    step: int = 0
    epoch: int = 0
    position: int = 0
    documents: tuple[int, ...] = ()
    best: float = 0.0
    tokens: int = 0


class Trainer:
    """A training run in directory ``out``: ``state.pt`` (checkpoint), ``metrics.jsonl``, and ``head/``, the best head.

    Args:
        stores: directories of answered prompts. They may grow while training runs: each epoch takes what is there.
        target: the target's embedding and lm_head.
        config: shape of the head.
        out: the run's directory; a run found there is continued.
        fingerprint: recorded with the head.
    """

    def __init__(
        self,
        stores: Sequence[Path],
        target: TargetWeights,
        config: EagleConfig,
        settings: TrainSettings,
        out: Path,
        *,
        device: str = "cpu",
        metadata: dict[str, str] | None = None,
    ) -> None:
        self.settings = settings
        self.out = out
        self.device = torch.device(device)
        self.metadata = metadata or {}
        self._paths = list(stores)
        self._stores = self._open_stores()
        for store in self._stores:
            if store.hidden_size != config.hidden_size:
                raise InvalidInputError(
                    f"{store.path} holds features of a model of hidden size {store.hidden_size}, the head's is "
                    f"{config.hidden_size}"
                )
        if not any(len(store) for store in self._stores):
            raise InvalidInputError(f"no answers yet in {', '.join(map(str, stores))}")
        self.embedding = target.embedding.to(self.device)
        out.mkdir(parents=True, exist_ok=True)
        self.state = TrainState()
        self._plan: EpochPlan | None = None
        checkpoint = self._load_checkpoint(config)
        if checkpoint is not None:
            self.d2t: Ints | None = checkpoint["d2t"]
        elif config.draft_vocab_size is not None:
            self.d2t = choose_draft_vocabulary(self._training_documents(), config.vocab_size, config.draft_vocab_size)
        else:
            self.d2t = None
        self.lm_head = target.lm_head.to(self.device)
        self._autocast = has_fast_bfloat16(self.device)
        d2t = None if self.d2t is None else torch.from_numpy(self.d2t).to(self.device)
        scored = draft_rows(self.lm_head, d2t).contiguous()
        self.draft_lm_head = scored.bfloat16() if self._autocast else scored
        self.head = EagleHead(config)
        initialise(self.head, torch.Generator().manual_seed(settings.seed))
        self.head.to(self.device)
        self.average = {name: tensor.detach().clone() for name, tensor in self.head.state_dict().items()}
        self.optimizer = torch.optim.AdamW(
            self.head.parameters(),
            lr=settings.learning_rate,
            betas=(0.9, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        if checkpoint is not None:
            self.head.load_state_dict(checkpoint["head"])
            self.average = checkpoint["average"]
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            self.state = TrainState(**checkpoint["state"])
        self._noise_scale = self._feature_deviation() * settings.noise

    def run(self, progress: Callable[[dict[str, Any]], None] = lambda _: None) -> TrainState:
        """Train to ``settings.steps``; ``progress`` gets each line of metrics as it is written."""
        held_out = [document for document in self.held_out_documents() if document.greedy]
        saved = time.monotonic()
        while self.state.step < self.settings.steps:
            started = time.perf_counter()
            pairs, measured = self._step()
            metrics: dict[str, Any] = {
                "step": self.state.step,
                "epoch": self.state.epoch,
                "loss": float(measured.loss.detach()),
                "regression": measured.regression,
                "distillation": measured.distillation,
                "agreement": measured.agreement,
                "learning_rate": learning_rate(self.settings, self.state.step - 1),
                "tokens": self.state.tokens,
                "tokens_per_second": pairs / (time.perf_counter() - started),
            }
            if not math.isfinite(metrics["loss"]):
                raise InvalidInputError(
                    f"the loss became {metrics['loss']} at step {self.state.step}: try a smaller learning rate"
                )
            last = self.state.step == self.settings.steps
            if held_out and (last or self.state.step % self.settings.evaluate_every == 0):
                metrics.update(self.evaluate(held_out))
                if metrics["held_out_acceptance_length"] > self.state.best:
                    self.state.best = metrics["held_out_acceptance_length"]
                    self.save_head(self.out / "head", metrics)
            if last and (not held_out or not (self.out / "head").exists()):
                # Too little data to hold any out, or a head that is never right: it is saved all the same.
                self.save_head(self.out / "head", metrics)
            with (self.out / "metrics.jsonl").open("a") as log:
                log.write(json.dumps(metrics) + "\n")
            progress(metrics)
            if last or time.monotonic() - saved > self.settings.checkpoint_seconds:
                self.save_checkpoint()
                saved = time.monotonic()
        return self.state

    def evaluate(self, documents: Sequence[Document]) -> dict[str, float]:
        """Held-out measures of the averaged head: simulated acceptance length, agreement, distillation loss."""
        head = self.averaged_head()
        greedy = [document for document in documents if document.greedy][: self.settings.evaluate_documents]
        d2t = None if self.d2t is None else torch.from_numpy(self.d2t)
        drafter = EagleDrafter(head, self.embedding, self.lm_head, d2t)
        acceptance = simulate(drafter, DynamicPolicy(), greedy)
        row_size = self.settings.row_size
        rows = epoch_rows(np.array([len(d) for d in greedy]), row_size, 0, 0)
        batch = make_batch([[greedy[i] for i in row] for row in rows], row_size).to(self.device)
        with torch.no_grad():
            loss = batch_loss(head, batch, self.embedding, self.draft_lm_head, replace(self.settings, unroll=3))
        return {
            "held_out_acceptance_length": acceptance.length,
            "held_out_agreement": loss.agreement[0],
            "held_out_agreement_2": loss.agreement[1],
            "held_out_agreement_3": loss.agreement[2],
            "held_out_distillation": loss.distillation,
        }

    def averaged_head(self) -> EagleHead:
        """The head that is evaluated and saved: averaged weights if ``ema``, else the current ones."""
        head = EagleHead(self.head.config)
        head.load_state_dict(self.average if self.settings.ema > 0 else self.head.state_dict())
        return head.to(self.device).requires_grad_(False).eval()

    def save_head(self, path: Path, metrics: dict[str, Any]) -> None:
        facts = {**self.metadata, "settings": json.dumps(asdict(self.settings)), "metrics": json.dumps(metrics)}
        save_eagle(path, self.head.config, head_arrays(self.averaged_head()), d2t=self.d2t, metadata=facts)

    def save_checkpoint(self) -> None:
        """The whole state, in one file, replaced in one step."""
        temporary = self.out / "state.pt.tmp"
        torch.save(
            {
                "config": asdict(self.head.config),
                "settings": asdict(self.settings),
                "d2t": self.d2t,
                "head": self.head.state_dict(),
                "average": self.average,
                "optimizer": self.optimizer.state_dict(),
                "state": asdict(self.state),
            },
            temporary,
        )
        os.replace(temporary, self.out / "state.pt")

    def draft_coverage(self) -> float:
        """Share of held-out answer tokens that the draft vocabulary holds."""
        return 1.0 if self.d2t is None else coverage(self.held_out_documents(), self.d2t)

    def held_out_documents(self) -> list[Document]:
        return [store[i] for store in self._stores for i in np.flatnonzero(_held_out(store)).tolist()]

    def _training_documents(self) -> list[Document]:
        return [store[i] for store in self._stores for i in np.flatnonzero(~_held_out(store)).tolist()]

    def _step(self) -> tuple[int, BatchLoss]:
        settings, state = self.settings, self.state
        documents = self._next_documents()
        batch = make_batch(documents, settings.row_size, settings.prompt_weight).to(self.device)
        noise = None
        if self._noise_scale > 0:
            # On the host, so that a run is the same on every device.
            generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + state.step)
            uniform = torch.rand(batch.features.shape, generator=generator).to(self.device)
            noise = (2 * uniform - 1) * self._noise_scale
        recipe = settings if state.step >= settings.unroll_after else replace(settings, unroll=1)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(settings, state.step)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            measured = batch_loss(self.head, batch, self.embedding, self.draft_lm_head, recipe, noise)
        measured.loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), settings.clip)
        self.optimizer.step()
        state.step += 1
        if settings.ema > 0:
            decay = min(settings.ema, state.step / (state.step + 10))  # the start is soon forgotten
            for name, tensor in self.head.state_dict().items():
                self.average[name].lerp_(tensor, 1 - decay)
        pairs = int((batch.documents >= 0).sum())
        state.tokens += pairs
        return pairs, measured

    def _next_documents(self) -> list[list[Document]]:
        """The rows of the next batch, opening the next epoch where one ends."""
        state = self.state
        if state.position == 0 or not state.documents:
            self._stores = self._open_stores()
            state.documents = tuple(len(store) for store in self._stores)
            self._plan = None
        if self._plan is None:
            self._plan = self._plan_epoch()
        places, rows = self._plan
        start = state.position * self.settings.rows
        chosen = rows[start : start + self.settings.rows]
        state.position += 1
        if state.position * self.settings.rows >= len(rows):
            state.epoch, state.position = state.epoch + 1, 0
        return [[self._stores[places[i][0]][places[i][1]] for i in row] for row in chosen]

    def _plan_epoch(self) -> EpochPlan:
        places: list[tuple[int, int]] = []
        lengths: list[int] = []
        for number, (store, count) in enumerate(zip(self._stores, self.state.documents, strict=True)):
            usable = np.flatnonzero(~_held_out(store)[:count] & (store.lengths()[:count] > 2))
            places += [(number, int(i)) for i in usable]
            lengths += store.lengths()[usable].tolist()
        rows = epoch_rows(np.array(lengths, np.int64), self.settings.row_size, self.settings.seed, self.state.epoch)
        return places, rows

    def _open_stores(self) -> list[FeatureStore]:
        return [FeatureStore(path, levels=1) for path in self._paths]

    def _feature_deviation(self) -> float:
        """Standard deviation of the features, from the first documents."""
        sample = torch.cat([store[0].features.float() for store in self._stores if len(store)])
        return float(sample.std())

    def _load_checkpoint(self, config: EagleConfig) -> dict[str, Any] | None:
        file = self.out / "state.pt"
        if not file.exists():
            return None
        checkpoint: dict[str, Any] = torch.load(file, map_location=self.device, weights_only=False)
        if checkpoint["config"] != asdict(config):
            raise CheckpointError(
                f"{self.out} holds a run of another head, {checkpoint['config']}; asked for {asdict(config)}"
            )
        return checkpoint


def _held_out(store: FeatureStore) -> np.ndarray[Any, np.dtype[np.bool_]]:
    held_out: np.ndarray[Any, np.dtype[np.bool_]] = store.prompt_indices() % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    return held_out


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 products run in hardware there."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported())
    return False
