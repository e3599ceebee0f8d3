"""What a head is trained on: come close to the target's next feature, and to its next-token distribution.

Both are taken per row, so that a caller can weigh and mask rows; a masked row contributes exactly nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def regression_loss(predicted: Tensor, true: Tensor) -> Tensor:
    """Smooth-L1 distance of predicted and true features [n, H], averaged over H: [n] float32."""
    return F.smooth_l1_loss(predicted.float(), true.float(), reduction="none").mean(dim=-1)


def distillation_loss(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Cross-entropy of the student's distribution under the teacher's, both from logits [n, V]: [n] float32.

    Its minimum over the student is the teacher's entropy, not 0.
    """
    teacher = teacher_logits.float().softmax(dim=-1)
    return -(teacher * student_logits.float().log_softmax(dim=-1)).sum(dim=-1)


def weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    """Mean of losses [n] under weights [n]; 0 where no row has weight (a batch of prompts only)."""
    total = weights.sum()
    return (losses * weights).sum() / total.clamp(min=torch.finfo(total.dtype).tiny)
