"""Muon (Jordan 2024): momentum of a matrix, made orthogonal before it is followed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from eyas.train.precision import has_fast_bfloat16

QUINTIC = 3.4445, -4.7750, 2.0315
"""Coefficients a, b, c of one step, a*s + b*s^3 + c*s^5 for every singular value s: steep at zero, so that five steps
bring small ones up to about one (Jordan 2024)."""

STEPS = 5
SMALLEST_NORM = 1e-7


class Muon(Optimizer):
    """Nesterov momentum whose direction is made orthogonal, with decoupled weight decay; for matrices [m, n] alone.

    The rule and the state are those of ``torch.optim.Muon`` with ``adjust_lr_fn="original"``, which multiplies in
    bfloat16 wherever it runs: on a processor without such instructions that took two fifths of a training step.

    Args:
        lr: step length; a tall matrix moves by sqrt(m / n) times it.
        momentum: share of the old direction that is kept.
        weight_decay: share of the weights, times ``lr``, that each step takes away.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Follow the gradients once."""
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix)
                direction = state["momentum_buffer"]
                direction.lerp_(matrix.grad, 1 - momentum)
                update = orthogonalised(matrix.grad.lerp(direction, momentum))  # [m, n]
                matrix.mul_(1 - rate * group["weight_decay"])
                rows, columns = matrix.shape
                matrix.add_(update, alpha=-rate * math.sqrt(max(1, rows / columns)))


def orthogonalised(matrix: Tensor) -> Tensor:
    """[m, n] with every singular value brought near one (0.7 to 1.2), its singular vectors kept.

    Multiplied in bfloat16 where hardware does so, else in float32.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if tall else matrix  # [s, l], s <= l
    factor = wide.bfloat16() if has_fast_bfloat16(matrix.device) else wide.float()
    factor = factor / factor.norm().clamp(min=SMALLEST_NORM)  # singular values of at most one
    a, b, c = QUINTIC
    for _ in range(STEPS):
        gram = factor @ factor.T  # [s, s]
        factor = torch.addmm(factor, torch.addmm(gram, gram, gram, beta=b, alpha=c), factor, beta=a)
    return factor.T if tall else factor
