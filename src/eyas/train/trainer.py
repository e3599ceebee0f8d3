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
from eyas.train.batches import choose_draft_vocabulary, coverage, make_batch
from eyas.train.checkpoint import read_checkpoint, write_checkpoint
from eyas.train.epochs import Epochs, EpochState, epoch_rows
from eyas.train.evaluate import MakeDrafter, forecast, simulate
from eyas.train.optimizer import HeadOptimizer
from eyas.train.precision import has_fast_bfloat16
from eyas.train.processes import Processes
from eyas.train.recipes import recipe_for
from eyas.train.recipes.base import BatchLoss
from eyas.train.settings import TrainSettings, rate_share
from eyas.train.start import check_start, start_weights
from eyas.train.store import Document, writing
from eyas.tree import Ints

FORECAST_DOCUMENTS = 16
"""Held-out answers that a head's forecast is made of: some two thousand tokens, more than a tuning records."""

ALONE = Processes()


@dataclass(frozen=True)
class TargetWeights:
    """What training needs of the target, float32: its two big matrices [V, H], and its final norm's weight [H]."""

    embedding: Tensor
    lm_head: Tensor
    norm: Tensor


@dataclass
class TrainState(EpochState):
    """Where a run stands; what a checkpoint holds besides weights and optimiser.

    Attributes:
        step: optimiser steps done.
        best: largest held-out acceptance length so far.
        tokens: pairs trained on.
    """

    step: int = 0
    best: float = 0.0
    tokens: int = 0


class Trainer:
    """A training run in directory ``out``: ``state.pt`` (checkpoint), ``metrics.jsonl``, and ``head/``, the best head.

    Args:
        stores: directories of answered prompts. They may grow while training runs: each epoch takes what is there.
        target: the target's embedding, lm_head and final norm.
        config: shape of the head.
        out: the run's directory; a run found there is continued.
        metadata: recorded with the head.
        processes: those that train together. The first writes; the others need not see ``out``, only the stores.
        start: a head whose weights a new run begins with; it may be smaller (see ``eyas.train.start``).
        make_drafter: what tries heads out; None for the recipe's, in PyTorch.
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
        self.device = processes.device
        self.recipe = recipe_for(config)
        self.out = out
        self.metadata = metadata or {}
        self._make_drafter = make_drafter or self._torch_drafter
        levels = self.recipe.feature_levels
        self.epochs = Epochs(stores, settings, processes, hidden_size=config.hidden_size, levels=levels)
        if processes.first:
            out.mkdir(parents=True, exist_ok=True)
        checkpoint = processes.from_first(lambda: read_checkpoint(out, config, settings.optimizer))
        self.d2t: Ints | None = self._draft_vocabulary(config, start) if checkpoint is None else checkpoint["d2t"]
        self.embedding = target.embedding.to(self.device)
        self.lm_head = target.lm_head.to(self.device)
        d2t = None if self.d2t is None else torch.from_numpy(self.d2t).to(self.device)
        scored = draft_rows(self.lm_head, d2t).contiguous()
        self._autocast = has_fast_bfloat16(self.device)
        self.draft_lm_head = scored.bfloat16() if self._autocast else scored
        self.head = self._new_head(config, scored, target.norm, start)
        self.average = {name: tensor.detach().clone() for name, tensor in self.head.state_dict().items()}
        self.optimizer = HeadOptimizer(self.head, settings)
        self.state = TrainState()
        if checkpoint is not None:
            self._resume(checkpoint)
        self._noise_scale = processes.from_first(self.epochs.feature_deviation) * settings.noise

    def _draft_vocabulary(self, config: HeadConfig, start: HeadCheckpoint[Any] | None) -> Ints | None:
        """The d2t offsets of a new run's head; None where it scores every token."""
        size = config.draft_vocab_size
        if start is not None and start.config.draft_vocab_size == size:
            return start.d2t  # chosen from answers that may be more than these
        if size is None:
            return None
        return self.processes.from_first(
            lambda: choose_draft_vocabulary(self.epochs.training(), config.vocab_size, size)
        )

    def _new_head(
        self, config: HeadConfig, scored: Tensor, norm: Tensor, start: HeadCheckpoint[Any] | None
    ) -> DraftHead:
        """A head with random weights, or those of ``start``; ``scored`` [draft vocab, H] are rows of the lm_head."""
        head: DraftHead = self.recipe.new_head(config)
        self.recipe.initialise(head, scored.cpu(), norm, torch.Generator().manual_seed(self.settings.seed))
        if start is not None:
            head.load_state_dict(start_weights(start, head.state_dict()))
        return head.to(self.device)

    def _resume(self, checkpoint: Mapping[str, Any]) -> None:
        self.head.load_state_dict(checkpoint["head"])
        self.average = {name: tensor.to(self.device) for name, tensor in checkpoint["average"].items()}
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.state = TrainState(**checkpoint["state"])

    def run(self, progress: Callable[[dict[str, Any]], None] = lambda _: None) -> TrainState:
        """Train to ``settings.steps``; ``progress`` gets each line of metrics as the first process writes it."""
        candidates = self.epochs.held_out() if self.processes.first else []
        held_out = [document for document in candidates if document.greedy]
        if self.state.best > 0 and held_out:
            self.state.best = self._measure_saved(held_out)
        saved = time.monotonic()
        while self.state.step < self.settings.steps:
            metrics = self._measured_step()
            if not self.processes.first:
                continue
            last = self.state.step == self.settings.steps
            if held_out and (last or self.state.step % self.settings.evaluate_every == 0):
                self._judge(metrics, held_out)
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

    def _measured_step(self) -> dict[str, Any]:
        """One step, and its metrics.

        Raises:
            InvalidInputError: the loss is no longer a number.
        """
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
        return metrics

    def _judge(self, metrics: dict[str, Any], held_out: Sequence[Document]) -> None:
        """Add held-out measures to the metrics, and save a head that is better than all before it."""
        metrics.update(self.evaluate(held_out))
        if metrics["held_out_acceptance_length"] > self.state.best:
            self.state.best = metrics["held_out_acceptance_length"]
            self.save_head(self.out / "head", metrics)
            self.save_forecast(self.out / "head", held_out)

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
        return 1.0 if self.d2t is None else coverage(self.epochs.held_out(), self.d2t)

    def _step(self) -> tuple[int, BatchLoss]:
        """One step of the optimiser: pairs and outcome of the whole batch."""
        settings, state = self.settings, self.state
        rows = self.epochs.next_rows(state)
        share = self.processes.share(len(rows))
        batch = make_batch(rows[share], settings.row_size, settings.prompt_weight).to(self.device)
        if self.processes.idle(len(rows)):
            batch = batch.silenced()
        noise = self._noise((len(rows), *batch.features.shape[1:]), share) if self._noise_scale > 0 else None
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
            self._move_average()
        pairs, measured = self._add_up(int((batch.documents >= 0).sum()), measured)
        state.tokens += pairs
        return pairs, measured

    def _noise(self, shape: Sequence[int], share: slice) -> Tensor:
        """What is added to this process's share of the features [B, S, F] of a batch."""
        # Of the whole batch and on the host: the same for any number of processes, on every device.
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + self.state.step)
        uniform = torch.rand(*shape, generator=generator)[share].to(self.device)
        return (2 * uniform - 1) * self._noise_scale

    def _move_average(self) -> None:
        step = self.state.step
        decay = min(self.settings.ema, step / (step + 10))  # the start is soon forgotten
        for name, tensor in self.head.state_dict().items():
            self.average[name].lerp_(tensor, 1 - decay)

    def _add_up(self, pairs: int, part: BatchLoss) -> tuple[int, BatchLoss]:
        """Pairs and outcome of the whole batch, from those of this process."""
        own = [pairs, float(part.loss.detach()), part.regression, part.distillation, part.weight, *part.agreement]
        pairs_, loss, regression, distillation, weight, *agreement = self.processes.sum_numbers(own)
        whole = BatchLoss(torch.tensor(loss), regression, distillation, tuple(agreement), weight)
        return int(pairs_), whole
