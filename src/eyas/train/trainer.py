"""Training a draft head on stored answers; what a batch teaches is the recipe's business (``eyas.train.recipes``).

Everything random is a function of (seed, epoch) or (seed, step), so a checkpoint holds no generator state and a
resumed run continues to the bit.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eyas.calibration import CALIBRATION
from eyas.checkpoints.head_layout import HeadCheckpoint
from eyas.checkpoints.heads import load_head
from eyas.drafters.base import Drafter
from eyas.errors import InvalidInputError
from eyas.forecast import FORECAST
from eyas.heads.config import HeadConfig
from eyas.heads.layers import DraftHead, draft_rows
from eyas.policies.dynamic import DynamicPolicy
from eyas.train.batches import choose_draft_vocabulary, coverage, epoch_rows, make_batch
from eyas.train.checkpoint import read_checkpoint, write_checkpoint
from eyas.train.evaluate import MakeDrafter, forecast, simulate
from eyas.train.optimizer import HeadOptimizer
from eyas.train.precision import has_fast_bfloat16
from eyas.train.processes import Processes
from eyas.train.recipes import recipe_for
from eyas.train.recipes.base import BatchLoss
from eyas.train.settings import TrainSettings, rate_share
from eyas.train.start import check_start, start_weights
from eyas.train.store import Document, FeatureStore, writing
from eyas.tree import Ints

HELD_OUT_EVERY = 40
"""Every so manieth prompt is held out: by its index, so that a growing store keeps the split."""

FORECAST_DOCUMENTS = 16
"""Held-out answers that a head's forecast is made of: some two thousand tokens, more than a tuning records."""

ALONE = Processes()


@dataclass(frozen=True)
class TargetWeights:
    """What training needs of the target, float32: its two big matrices [V, H], and its final norm's weight [H]."""

    embedding: Tensor
    lm_head: Tensor
    norm: Tensor


EpochPlan = tuple[list[tuple[int, int]], list[list[int]]]
"""Places (store, document) of the training documents, and the rows of an epoch as indices into them."""


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
        metadata: recorded with the head.
        start: a head whose weights a new run begins with; it may be smaller (see ``eyas.train.start``).
        make_drafter: what tries heads out; None for the recipe's, in PyTorch.
        processes: those that train together. The first writes; the others need not see ``out``, only the stores.
    """

    def __init__(
        self,
        stores: Sequence[Path],
        target: TargetWeights,
        config: HeadConfig,
        settings: TrainSettings,
        out: Path,
        *,
        metadata: dict[str, str] | None = None,
        processes: Processes = ALONE,
        start: HeadCheckpoint[Any] | None = None,
        make_drafter: MakeDrafter | None = None,
    ) -> None:
        if settings.rows < processes.count:
            raise InvalidInputError(
                f"a batch of {settings.rows} rows cannot be shared by {processes.count} processes; --rows "
                f"{processes.count} gives each one row, and makes the batch larger"
            )
        if start is not None:
            check_start(start, config)
        self.settings = settings
        self.processes = processes
        self.recipe = recipe_for(config)
        self.out = out
        self.device = processes.device
        self.metadata = metadata or {}
        self._make_drafter = make_drafter or self._torch_drafter
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
        if processes.first:
            out.mkdir(parents=True, exist_ok=True)
        self.state = TrainState()
        self._plan: EpochPlan | None = None
        checkpoint = processes.from_first(lambda: read_checkpoint(out, config, settings.optimizer))
        self.d2t: Ints | None = None
        if checkpoint is not None:
            self.d2t = checkpoint["d2t"]
        elif start is not None and start.config.draft_vocab_size == config.draft_vocab_size:
            self.d2t = start.d2t  # chosen from answers that may be more than these
        elif (size := config.draft_vocab_size) is not None:
            self.d2t = processes.from_first(
                lambda: choose_draft_vocabulary(self._training_documents(), config.vocab_size, size)
            )
        self.lm_head = target.lm_head.to(self.device)
        self._autocast = has_fast_bfloat16(self.device)
        d2t = None if self.d2t is None else torch.from_numpy(self.d2t).to(self.device)
        scored = draft_rows(self.lm_head, d2t).contiguous()
        self.draft_lm_head = scored.bfloat16() if self._autocast else scored
        self.head: DraftHead = self.recipe.new_head(config)
        self.recipe.initialise(self.head, scored.cpu(), target.norm, torch.Generator().manual_seed(settings.seed))
        if start is not None:
            self.head.load_state_dict(start_weights(start, self.head.state_dict()))
        self.head.to(self.device)
        self.average = {name: tensor.detach().clone() for name, tensor in self.head.state_dict().items()}
        self.optimizer = HeadOptimizer(self.head, settings)
        if checkpoint is not None:
            self.head.load_state_dict(checkpoint["head"])
            self.average = {name: tensor.to(self.device) for name, tensor in checkpoint["average"].items()}
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            self.state = TrainState(**checkpoint["state"])
        self._noise_scale = processes.from_first(self._feature_deviation) * settings.noise

    def run(self, progress: Callable[[dict[str, Any]], None] = lambda _: None) -> TrainState:
        """Train to ``settings.steps``; ``progress`` gets each line of metrics as the first process writes it."""
        candidates = self.held_out_documents() if self.processes.first else []
        held_out = [document for document in candidates if document.greedy]
        if self.state.best > 0 and held_out:
            self.state.best = self._measure_saved(held_out)
        saved = time.monotonic()
        while self.state.step < self.settings.steps:
            started = time.perf_counter()
            share = rate_share(self.settings, self.state.step)
            pairs, measured = self._step()
            metrics: dict[str, Any] = {
                "step": self.state.step,
                "epoch": self.state.epoch,
                "loss": float(measured.loss.detach()),
                "regression": measured.regression,
                "distillation": measured.distillation,
                "agreement": measured.agreement,
                "learning_rate": share * self.settings.learning_rate,
                "tokens": self.state.tokens,
                "tokens_per_second": pairs / (time.perf_counter() - started),
            }
            if self.settings.optimizer == "muon":
                metrics["matrix_learning_rate"] = share * self.settings.matrix_learning_rate
            if not math.isfinite(metrics["loss"]):
                raise InvalidInputError(
                    f"the loss became {metrics['loss']} at step {self.state.step}: try a smaller learning rate"
                )
            if not self.processes.first:
                continue
            last = self.state.step == self.settings.steps
            if held_out and (last or self.state.step % self.settings.evaluate_every == 0):
                metrics.update(self.evaluate(held_out))
                if metrics["held_out_acceptance_length"] > self.state.best:
                    self.state.best = metrics["held_out_acceptance_length"]
                    self.save_head(self.out / "head", metrics)
                    self.save_forecast(self.out / "head", held_out)
            if last and (not held_out or not (self.out / "head").exists()):
                # Too little data to hold any out, or a head that is never right: it is saved all the same.
                self.save_head(self.out / "head", metrics)
            with writing(self.out / "metrics.jsonl"), (self.out / "metrics.jsonl").open("a") as log:
                log.write(json.dumps(metrics) + "\n")
            progress(metrics)
            if last or time.monotonic() - saved > self.settings.checkpoint_seconds:
                self.save_checkpoint()
                saved = time.monotonic()
        self.processes.wait()
        return self.state

    def evaluate(self, documents: Sequence[Document]) -> dict[str, float]:
        """Held-out measures of the averaged head: simulated acceptance length, agreement, distillation loss."""
        head = self.averaged_head()
        greedy = [document for document in documents if document.greedy][: self.settings.evaluate_documents]
        acceptance_length = self._acceptance_length(head, greedy)
        row_size = self.settings.row_size
        rows = epoch_rows(np.array([len(d) for d in greedy]), row_size, 0, 0)
        batch = make_batch([[greedy[i] for i in row] for row in rows], row_size).to(self.device)
        with torch.no_grad():
            loss = self.recipe.loss(
                head, batch, self.embedding, self.draft_lm_head, replace(self.settings, unroll=3, hard_share=0.0)
            )
        return {
            "held_out_acceptance_length": acceptance_length,
            "held_out_agreement": loss.agreement[0],
            "held_out_agreement_2": loss.agreement[1],
            "held_out_agreement_3": loss.agreement[2],
            "held_out_distillation": loss.distillation,
        }

    def _acceptance_length(self, head: DraftHead, greedy: Sequence[Document]) -> float:
        return simulate(self._make_drafter(head, self.d2t), DynamicPolicy(), greedy).length

    def _measure_saved(self, held_out: Sequence[Document]) -> float:
        """The best head's acceptance length on the documents that are held out now: the stores may have grown since it
        was saved. 0 where it is gone."""
        if not (self.out / "head").exists():
            return 0.0
        saved = load_head(self.out / "head")
        check_start(saved, self.head.config)
        head = self._frozen(start_weights(saved, self.head.state_dict()))
        return self._acceptance_length(head, held_out[: self.settings.evaluate_documents])

    def _torch_drafter(self, head: DraftHead, d2t: Ints | None) -> Drafter:
        offsets = None if d2t is None else torch.from_numpy(d2t)
        return self.recipe.drafter(head, self.embedding, self.lm_head, offsets)

    def averaged_head(self) -> DraftHead:
        """The head that is evaluated and saved: averaged weights if ``ema``, else the current ones."""
        return self._frozen(self.average if self.settings.ema > 0 else self.head.state_dict())

    def _frozen(self, weights: Mapping[str, Tensor]) -> DraftHead:
        head: DraftHead = self.recipe.new_head(self.head.config)
        head.load_state_dict(weights)
        return head.to(self.device).requires_grad_(False).eval()

    def save_head(self, path: Path, metrics: dict[str, Any]) -> None:
        for sidecar in (CALIBRATION, FORECAST):
            sidecar.remove(path)  # of the weights that are now replaced
        facts = {**self.metadata, "settings": json.dumps(asdict(self.settings)), "metrics": json.dumps(metrics)}
        self.recipe.save(path, self.averaged_head(), self.d2t, facts)

    def save_forecast(self, path: Path, documents: Sequence[Document]) -> None:
        """Store with the head in ``path`` what the averaged head's guesses are worth on some greedy documents."""
        drafter = self._make_drafter(self.averaged_head(), self.d2t)
        found = forecast(drafter, documents[:FORECAST_DOCUMENTS])
        FORECAST.write(path, found.as_dict(), greedy=True)

    def save_checkpoint(self) -> None:
        """The whole state, in one file."""
        state = {
            "config": asdict(self.head.config),
            "settings": asdict(self.settings),
            "metadata": self.metadata,
            "d2t": self.d2t,
            "head": self.head.state_dict(),
            "average": self.average,
            "optimizer": self.optimizer.state_dict(),
            "state": asdict(self.state),
        }
        write_checkpoint(self.out, state)

    def draft_coverage(self) -> float:
        """Share of held-out answer tokens that the draft vocabulary holds."""
        return 1.0 if self.d2t is None else coverage(self.held_out_documents(), self.d2t)

    def held_out_documents(self) -> list[Document]:
        return [store[i] for store in self._stores for i in np.flatnonzero(_held_out(store)).tolist()]

    def _training_documents(self) -> list[Document]:
        return [store[i] for store in self._stores for i in np.flatnonzero(~_held_out(store)).tolist()]

    def _step(self) -> tuple[int, BatchLoss]:
        settings, state = self.settings, self.state
        rows = self._next_documents()
        share = self.processes.share(len(rows))
        batch = make_batch(rows[share], settings.row_size, settings.prompt_weight).to(self.device)
        if self.processes.idle(len(rows)):
            batch = batch.silenced()
        noise = None
        if self._noise_scale > 0:
            # Of the whole batch and on the host: the same for any number of processes, on every device.
            generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + state.step)
            shape = len(rows), *batch.features.shape[1:]
            uniform = torch.rand(shape, generator=generator)[share].to(self.device)
            noise = (2 * uniform - 1) * self._noise_scale
        now = settings if state.step >= settings.unroll_after else replace(settings, unroll=1)
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            measured = self.recipe.loss(
                self.head, batch, self.embedding, self.draft_lm_head, now, noise, self.processes.sum
            )
        measured.loss.backward()  # type: ignore[no-untyped-call]
        self.processes.sum_gradients(self.head.parameters())
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), settings.clip)
        self.optimizer.step(rate_share(settings, state.step))
        state.step += 1
        if settings.ema > 0:
            decay = min(settings.ema, state.step / (state.step + 10))  # the start is soon forgotten
            for name, tensor in self.head.state_dict().items():
                self.average[name].lerp_(tensor, 1 - decay)
        pairs, measured = self._add_up(int((batch.documents >= 0).sum()), measured)
        state.tokens += pairs
        return pairs, measured

    def _add_up(self, pairs: int, part: BatchLoss) -> tuple[int, BatchLoss]:
        """Pairs and outcome of the whole batch."""
        own = [pairs, float(part.loss.detach()), part.regression, part.distillation, part.weight, *part.agreement]
        pairs_, loss, regression, distillation, weight, *agreement = self.processes.sum_numbers(own)
        whole = BatchLoss(torch.tensor(loss), regression, distillation, tuple(agreement), weight)
        return int(pairs_), whole

    def _next_documents(self) -> list[list[Document]]:
        """The rows of the next batch, opening the next epoch where one ends."""
        state = self.state
        if state.position == 0 or not state.documents:
            self._stores = self._open_stores()
            state.documents = self.processes.least([len(store) for store in self._stores])
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
        return [FeatureStore(path, levels=self.recipe.feature_levels) for path in self._paths]

    def _feature_deviation(self) -> float:
        """Standard deviation of the features, from the first documents."""
        sample = torch.cat([store[0].features.float() for store in self._stores if len(store)])
        return float(sample.std())


def _held_out(store: FeatureStore) -> np.ndarray[Any, np.dtype[np.bool_]]:
    held_out: np.ndarray[Any, np.dtype[np.bool_]] = store.prompt_indices() % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    return held_out
