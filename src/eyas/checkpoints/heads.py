"""A draft head of whatever kind: which one a directory holds, its tensors tell."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from eyas.checkpoints.eagle import EagleCheckpoint, parse_eagle
from eyas.checkpoints.eagle3 import Eagle3Checkpoint, parse_eagle3
from eyas.checkpoints.head_files import read_head, tensor_names
from eyas.heads.config import Eagle3Config


def load_head(path: str | Path) -> EagleCheckpoint | Eagle3Checkpoint:
    """Read the head in directory ``path``; CheckpointError where that fails."""
    stored = read_head(path)
    return parse_eagle3(stored) if _is_eagle3(stored.tensors) else parse_eagle(stored)


def head_feature_levels(path: str | Path) -> int:
    """Feature levels that the head in ``path`` reads of its target; CheckpointError where there is no head."""
    return Eagle3Config.FEATURE_LEVELS if _is_eagle3(tensor_names(path)) else 1


def _is_eagle3(names: Iterable[str]) -> bool:
    return any(name.startswith("midlayer.") for name in names)
