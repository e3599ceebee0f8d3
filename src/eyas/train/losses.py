"""What a head is trained on: come close to the target's next feature, and to its next-token distribution.

Rows are weighed, and a row without weight contributes exactly nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 256
"""Rows whose logits exist at one time."""


def regression_loss(predicted: Tensor, true: Tensor) -> Tensor:
    """Smooth-L1 distance of predicted and true features [n, H], averaged over H: [n] float32."""
    return F.smooth_l1_loss(predicted.float(), true.float(), reduction="none").mean(dim=-1)


def weighted_mean(losses: Tensor, weights: Tensor, total: Tensor | None = None) -> Tensor:
    """Mean of losses [n] under weights [n]; 0 where no row has weight (a batch of prompts only).

    Args:
        total: what the weights of the whole batch add up to, where these are only some of its rows: the means of all
            parts then add up to that of the batch.
    """
    return (losses * weights).sum() / _divisor(weights, total)


@torch.no_grad()
def teacher_probabilities(features: Tensor, lm_head: Tensor, hard: Tensor | None = None) -> Tensor:
    """What the student's distribution should be: the target's over the scored tokens, or nearer to its first choice.

    Args:
        features: [n, H] true.
        lm_head: [V, H].
        hard: [n] share that goes to the first choice alone, None for 0. A greedy answer accepts nothing else.

    Returns:
        [n, V] in the dtype of ``lm_head``.
    """
    probabilities = features.new_empty((len(features), len(lm_head)), dtype=lm_head.dtype)
    room = _Room(len(features), lm_head)
    for rows in _chunks(len(features)):
        logits, wanted, _, product = room.of(rows)
        _logits(features[rows], lm_head, product, logits)
        torch.softmax(logits, dim=-1, out=wanted)
        if hard is not None:
            share = hard[rows, None]
            wanted *= 1 - share
            wanted.scatter_add_(1, logits.max(dim=-1, keepdim=True).indices, share)
        probabilities[rows] = wanted
    return probabilities


def distillation_loss(
    features: Tensor, lm_head: Tensor, teacher: Tensor, weights: Tensor, total: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weighted mean cross-entropy of the student's distribution under the teacher's; its minimum is the entropy.

    The logits and their gradient never exist as a whole: they are made, used and dropped in chunks of rows, and the
    gradients of ``features`` and ``lm_head`` come out of the same sweep.

    Args:
        features: [n, H], predicted.
        lm_head: [V, H] scores them; gets a gradient where it asks for one (EAGLE-3's own).
        teacher: [n, V] probabilities.
        weights: [n] float32.
        total: see ``weighted_mean``.

    Returns:
        The loss, a float32 scalar; and [n] bool, whether student and teacher have the same first choice.
    """
    shares = weights / _divisor(weights, total)
    loss, same = _Distillation.apply(features, lm_head, teacher, shares)  # type: ignore[no-untyped-call]
    return loss, same


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, lm_head: Tensor, teacher: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        wants_features, wants_head = ctx.needs_input_grad[:2]
        feature_gradient = torch.empty_like(features) if wants_features else None
        head_gradient = torch.zeros_like(lm_head, dtype=torch.float32) if wants_head else None
        same = torch.empty(len(features), dtype=torch.bool, device=features.device)
        loss = torch.zeros((), device=features.device)
        room = _Room(len(features), lm_head)
        for rows in _chunks(len(features)):
            logits, wanted, student, product = room.of(rows)
            share = shares[rows, None]
            _logits(features[rows], lm_head, product, logits)
            wanted.copy_(teacher[rows])
            top, best = logits.max(dim=-1, keepdim=True)
            same[rows] = wanted.gather(1, best)[:, 0] == wanted.amax(dim=-1)
            torch.softmax(logits, dim=-1, out=student)
            log_total = top - student.gather(1, best).log()
            student -= wanted
            loss += ((log_total - wanted.mul_(logits).sum(dim=-1, keepdim=True)) * share).sum()
            product.copy_(student)
            if feature_gradient is not None:
                feature_gradient[rows] = (product @ lm_head) * share
            if head_gradient is not None:
                head_gradient += product.T @ (features[rows] * share).to(lm_head.dtype)
        ctx.gradients = feature_gradient, head_gradient
        ctx.mark_non_differentiable(same)
        return loss, same

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        by_features, by_head = (None if g is None else (g * upstream[0]).to(g.dtype) for g in ctx.gradients)
        return by_features, by_head, None, None


class _Room:
    """Where a chunk's numbers are worked out, [CHUNK, V] each: three in float32, one in the dtype of lm_head. The same
    for all chunks, because fresh memory costs more than what is computed there."""

    def __init__(self, rows: int, lm_head: Tensor) -> None:
        shape = min(rows, CHUNK), len(lm_head)
        self._wide = [lm_head.new_empty(shape, dtype=torch.float32) for _ in range(3)]
        self._product = lm_head.new_empty(shape)

    def of(self, rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As many rows of each."""
        count = rows.stop - rows.start
        first, second, third = (wide[:count] for wide in self._wide)
        return first, second, third, self._product[:count]


def _logits(features: Tensor, lm_head: Tensor, product: Tensor, logits: Tensor) -> None:
    """features [n, H], lm_head [V, H] -> ``logits`` [n, V] float32, multiplied in the dtype of lm_head, in ``product``
    [n, V]."""
    torch.mm(features.to(lm_head.dtype), lm_head.T, out=product)
    logits.copy_(product)


def _chunks(rows: int) -> list[slice]:
    return [slice(start, min(start + CHUNK, rows)) for start in range(0, rows, CHUNK)]


def _divisor(weights: Tensor, total: Tensor | None) -> Tensor:
    total = weights.sum() if total is None else total
    return total.clamp(min=torch.finfo(total.dtype).tiny)
