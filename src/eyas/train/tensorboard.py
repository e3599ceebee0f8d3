"""Metrics for TensorBoard (``pip install 'eyas[tensorboard]'``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.errors import InvalidInputError


class TensorBoardLog:
    """Writes the lines of ``metrics.jsonl`` as scalars, each at its step.

    Args:
        folder: where TensorBoard looks.

    Raises:
        InvalidInputError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InvalidInputError(
                "--tensorboard needs TensorBoard: pip install 'eyas[tensorboard]'; metrics.jsonl is written anyway"
            ) from None
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Numbers as they are, lists as ``name/1``, ``name/2``, ...; what is no number is left out."""
        for name, value in metrics.items():
            if name == "step":
                continue
            several = value if isinstance(value, list | tuple) else None
            numbers = {f"{name}/{i}": each for i, each in enumerate(several, 1)} if several else {name: value}
            for key, number in numbers.items():
                if isinstance(number, int | float):
                    self._writer.add_scalar(key, number, metrics["step"])

    def close(self) -> None:
        """Write out what is pending."""
        self._writer.close()
