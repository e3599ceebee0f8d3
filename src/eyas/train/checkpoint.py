"""The checkpoint of a training run: one file, replaced in one step, that says what the run is and where it stands."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.errors import CheckpointError
from eyas.heads.config import HeadConfig
from eyas.train.store import writing

FILE = "state.pt"
PARTS = frozenset({"config", "settings", "d2t", "head", "average", "optimizer", "state"})
"""What every checkpoint holds."""


@dataclass(frozen=True)
class BegunRun:
    """What a run keeps when it goes on, whatever is asked for later.

    Attributes:
        target_lm_head: the target's lm_head scores.
        optimizer: see ``TrainSettings``.
        init_from: the head whose weights it began with, as it was named.
    """

    target_lm_head: bool
    optimizer: str
    init_from: str | None = None


def begun_run(out: Path) -> BegunRun | None:
    """What the run in ``out`` keeps; None where none has begun. Raises as ``read_checkpoint``."""
    checkpoint = _load(out, mmap=True)
    if checkpoint is None:
        return None
    return BegunRun(
        checkpoint["config"].get("target_lm_head", False),
        _optimizer(checkpoint),
        checkpoint.get("metadata", {}).get("init_from"),
    )


def read_checkpoint(out: Path, config: HeadConfig, optimizer: str) -> dict[str, Any] | None:
    """The checkpoint in ``out``; None where there is none.

    Raises:
        CheckpointError: it is damaged, of another head than ``config``, or was made by another optimiser.
    """
    checkpoint = _load(out)
    if checkpoint is None:
        return None
    if faults := differing(checkpoint["config"], config):
        raise CheckpointError(f"{out} holds a run of another head: {faults}")
    if _optimizer(checkpoint) != optimizer:
        raise CheckpointError(
            f"{out} holds a run of {_optimizer(checkpoint)}, asked for is {optimizer}; a run keeps its optimiser: "
            "leave --optimizer out, or begin a new run from its head (--init-from)"
        )
    return checkpoint


def _load(out: Path, mmap: bool = False) -> dict[str, Any] | None:
    file = out / FILE
    if not file.exists():
        return None
    try:
        checkpoint: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False, mmap=mmap)
    except Exception as error:  # a damaged pickle can fail in any way
        reason = str(error).partition("\n")[0] or repr(error)
        raise CheckpointError(f"{file} cannot be read: {reason}; begin a new run in another directory") from None
    missing = PARTS - checkpoint.keys() if isinstance(checkpoint, dict) else PARTS
    if missing:
        raise CheckpointError(
            f"{file} is no checkpoint of a run, it lacks {', '.join(sorted(missing))}; begin a new run in another "
            "directory"
        )
    return checkpoint


def write_checkpoint(out: Path, state: Mapping[str, Any]) -> None:
    """Replace the checkpoint in ``out``; OSError where the disk is full."""
    temporary = out / f"{FILE}.tmp"
    with writing(out / FILE):
        try:
            torch.save(dict(state), temporary)
        except RuntimeError as error:  # how torch reports a full disk
            raise OSError(error) from None
        os.replace(temporary, out / FILE)


def _optimizer(checkpoint: Mapping[str, Any]) -> str:
    optimizer: str = checkpoint["settings"].get("optimizer", "adamw")  # older runs knew no other
    return optimizer


def differing(stored: Mapping[str, Any], config: HeadConfig, free: Collection[str] = ()) -> str:
    """The fields of a head's config, as stored, that differ from the asked one's, and how; empty where none does.

    Args:
        free: fields that may differ.
    """
    asked = asdict(config)
    if ("fc_bias" in stored) != ("fc_bias" in asked):
        return "its kind (--kind) is the other one"
    has = {"target_lm_head": False} | dict(stored)  # an older checkpoint had the default
    return "; ".join(
        f"{name} is {has.get(name)!r} there, asked for is {wanted!r}"
        for name, wanted in asked.items()
        if has.get(name) != wanted and name not in free
    )
