"""The EAGLE-1/2 head as a drafter in PyTorch: the target's own lm_head scores the predicted features."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eyas.drafters.torch_head import HeadDrafter
from eyas.heads.eagle import EagleHead, head_from_arrays

if TYPE_CHECKING:
    from eyas.checkpoints.eagle import EagleCheckpoint


class EagleDrafter(HeadDrafter):
    """See ``HeadDrafter``.

    Args:
        lm_head: [V, H] the target's output projection.
    """

    def __init__(
        self, head: EagleHead, embedding: Tensor, lm_head: Tensor, d2t: Tensor | None = None, name: str = "eagle"
    ) -> None:
        super().__init__(head, embedding, d2t, name)
        self.lm_head = self.target_rows(lm_head, d2t)

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: EagleCheckpoint,
        embedding: Tensor,
        lm_head: Tensor,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        name: str = "eagle",
    ) -> EagleDrafter:
        """Load a head onto ``device`` in ``dtype``, by default those of the target's lm_head."""
        head = head_from_arrays(checkpoint.config, checkpoint.tensors, device or lm_head.device, dtype or lm_head.dtype)
        d2t = None if checkpoint.d2t is None else torch.tensor(checkpoint.d2t)
        return cls(head, embedding, lm_head, d2t, name)

    @property
    def feature_levels(self) -> int:
        return 1

    def logits(self, outputs: Tensor) -> Tensor:
        return outputs @ self.lm_head.T
