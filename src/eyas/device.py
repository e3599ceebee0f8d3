"""The devices that PyTorch can use here."""

from __future__ import annotations

import torch

from eyas.errors import InvalidInputError


def usable_device(name: str) -> torch.device:
    """The device called ``name`` ("cpu", "cuda", "cuda:1", ...).

    Raises:
        InvalidInputError: there is none of that name, or PyTorch cannot use it.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InvalidInputError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return device
