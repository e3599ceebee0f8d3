"""Which number format training multiplies in."""

from __future__ import annotations

import torch


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 products run in hardware there."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported())
    return False
