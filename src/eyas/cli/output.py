"""What commands print for scripts."""

from __future__ import annotations

import json
import sys
from typing import Any


def print_json(value: Any) -> None:
    """Print a value as one line of JSON, with escapes for what standard output's encoding cannot spell.

    Raises:
        ValueError: NaN or infinity in it, for which JSON has no number.
    """
    narrow = not (sys.stdout.encoding or "").lower().startswith("utf")
    print(json.dumps(value, ensure_ascii=narrow, allow_nan=False))
