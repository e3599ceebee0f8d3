"""How a head is trained, whatever its kind."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eyas.errors import InvalidInputError

OPTIMIZERS = ("adamw", "muon")

SEEDS = 2**40
"""Seeds are below this: each step's own, a million times as large, must fit into 64 bits."""


@dataclass(frozen=True)
class TrainSettings:
    """How a head is trained.

    Attributes:
        steps: optimiser steps.
        rows, row_size: a batch is ``rows`` rows of ``row_size`` pairs.
        optimizer: "adamw", or "muon" for all matrices but an lm_head, with AdamW for the rest.
        learning_rate, matrix_learning_rate: the highest ones of AdamW and of Muon.
        warmup, final_lr_share: linear warmup over ``warmup`` steps, then a cosine down to this share.
        weight_decay, beta2, clip: of both, of AdamW, and the largest gradient norm.
        noise: features get uniform noise of -noise..noise (EAGLE: 0.1 at H = 4096), scaled by their deviation.
        regression_weight, distillation_weight: of the two losses of an EAGLE-1/2 head (EAGLE-1: 1.0 and 0.1).
        hard_share: of what a greedy answer teaches about the next token, the share of the target's first choice alone;
            the rest is the target's distribution, which is all that sampled answers teach.
        unroll: steps of its own that the head learns to take (1: plain EAGLE; HASS: 3 to 4; EAGLE-3: 4 or more).
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
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    matrix_learning_rate: float = 0.05
    warmup: int = 50
    final_lr_share: float = 0.05
    weight_decay: float = 0.01
    beta2: float = 0.95
    clip: float = 0.5
    noise: float = 0.1
    regression_weight: float = 1.0
    distillation_weight: float = 0.1
    hard_share: float = 0.0
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
        if self.optimizer not in OPTIMIZERS:
            raise InvalidInputError(f"optimizer {self.optimizer!r} is unknown; known: {', '.join(OPTIMIZERS)}")
        for name in ("learning_rate", "matrix_learning_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidInputError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("warmup", "noise", "regression_weight", "distillation_weight", "unroll_after", "unroll_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidInputError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not 0 <= self.hard_share <= 1:
            raise InvalidInputError(f"hard_share must be from 0 to 1, got {self.hard_share}")
        if not 0 <= self.ema < 1:
            raise InvalidInputError(f"ema must be at least 0 and below 1, got {self.ema}")
        if not 0 <= self.seed < SEEDS:
            raise InvalidInputError(f"seed must be at least 0 and below {SEEDS}, got {self.seed}")


def rate_share(settings: TrainSettings, step: int) -> float:
    """Share of the highest learning rates in step 0, 1, ...: linear warmup, cosine decay to ``final_lr_share``."""
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    progress = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    share = settings.final_lr_share
    return share + (1 - share) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
