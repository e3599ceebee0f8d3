"""Where commands write, and what they print for scripts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from eyas.errors import InvalidInputError


def print_json(value: Any) -> None:
    """Print a value as one line of JSON, with escapes for what standard output's encoding cannot spell.

    Raises:
        ValueError: NaN or infinity in it, for which JSON has no number.
    """
    narrow = not (sys.stdout.encoding or "").lower().startswith("utf")
    print(json.dumps(value, ensure_ascii=narrow, allow_nan=False))


def check_writable(out: Path | None) -> None:
    """Refuse a place that cannot be written before the work is done, not after."""
    if out is None:
        return
    if out.is_dir() or not out.parent.is_dir():
        raise InvalidInputError(f"cannot write {out}: {'a directory' if out.is_dir() else 'no such directory'}")


def check_directory(out: Path) -> None:
    """Refuse a directory to be that cannot be one before the work is done, not after."""
    if out.exists() and not out.is_dir():
        raise InvalidInputError(f"{out} is a file; --out is a directory here, choose another name")
