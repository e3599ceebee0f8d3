"""The EAGLE-3 head as a drafter in PyTorch: three feature levels go in, its own lm_head or the target's scores
what comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eyas.drafters.torch_head import HeadDrafter
from eyas.heads.config import Eagle3Config
from eyas.heads.eagle3 import Eagle3Head, head_from_arrays

if TYPE_CHECKING:
    from eyas.checkpoints.eagle3 import Eagle3Checkpoint


class Eagle3Drafter(HeadDrafter):
    """See ``HeadDrafter``.

    Args:
        lm_head: [V, H] the target's output projection, for a head without one.
    """

    head: Eagle3Head

    def __init__(
        self, head: Eagle3Head, embedding: Tensor, lm_head: Tensor, d2t: Tensor | None = None, name: str = "eagle3"
    ) -> None:
        super().__init__(head, embedding, d2t, name)
        self.lm_head = self.target_rows(lm_head, d2t) if head.lm_head is None else head.lm_head.weight.detach()

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Eagle3Checkpoint,
        embedding: Tensor,
        lm_head: Tensor,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        name: str = "eagle3",
    ) -> Eagle3Drafter:
        """Load a head onto ``device`` in ``dtype``, by default those of the target's lm_head."""
        head = head_from_arrays(checkpoint.config, checkpoint.tensors, device or lm_head.device, dtype or lm_head.dtype)
        d2t = None if checkpoint.d2t is None else torch.tensor(checkpoint.d2t)
        return cls(head, embedding, lm_head, d2t, name)

    @property
    def feature_levels(self) -> int:
        return Eagle3Config.FEATURE_LEVELS

    def logits(self, outputs: Tensor) -> Tensor:
        return self.head.logits(outputs, self.lm_head)
