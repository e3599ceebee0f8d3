"""How training computes: the number format it multiplies in, and what it does with numbers near zero."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 products run in hardware there."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported())
    return False


@contextmanager
def denormals_flushed() -> Iterator[None]:
    """Take float32 numbers below 1.2e-38 for zero in this thread and in those that it starts meanwhile.

    The gradients of attention's keys and queries hold many: a probability of 1e-30 times a gradient of 1e-9. A
    processor multiplies them up to twenty times as slowly as others, which was a quarter of a training step. PyTorch's
    worker threads inherit the setting of the one that starts them, so it must come before the first product.
    """
    before = float(torch.tensor(1e-38) * 0.1) == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
