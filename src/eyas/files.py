"""Files that are replaced whole or not at all: a reader, or a crash, meets the old one or the new one, never a part."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4


def replace_file(file: Path, parts: Iterable[bytes]) -> None:
    """Write beside ``file`` and rename over it once all is on the disk; OSError where that fails, and nothing is left
    behind."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}.{uuid4().hex[:8]}.tmp")
    try:
        with unfinished.open("wb") as handle:
            for part in parts:
                handle.write(part)
            handle.flush()
            os.fsync(handle.fileno())
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
