"""EAGLE-3 heads on disk, in the layout of the published ones.

``fc.weight``, ``midlayer.*``, ``norm.weight``, ``lm_head.weight``; with a draft vocabulary also its two maps, ``d2t``
(int64 offsets, target id = draft id + d2t[draft id]) and ``t2d`` (bool, which target tokens are in it).

Ours alone are heads without ``lm_head.weight``, which the target's own lm_head scores: ``"target_lm_head": true`` in
``config.json``. Where nothing is said there, the weight's absence says it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from eyas.checkpoints.head_files import StoredHead, read_head, write_head
from eyas.checkpoints.head_layout import (
    HeadCheckpoint,
    bools,
    check_offsets,
    check_shapes,
    head_entries,
    integers,
    own_tensors,
    read_config,
    settings_of,
    stored_type,
    weights,
)
from eyas.errors import CheckpointError
from eyas.heads.config import Eagle3Config
from eyas.tree import Bools, Floats, Ints

KIND = "EAGLE-3"

TARGET_LM_HEAD = "target_lm_head"
"""The entry of ``config.json`` that no published head has."""


@dataclass(frozen=True)
class Eagle3Checkpoint(HeadCheckpoint[Eagle3Config]):
    """An EAGLE-3 head as read."""


def load_eagle3(path: str | Path) -> Eagle3Checkpoint:
    """Read the head in directory ``path``. Raises as ``parse_eagle3``, and CheckpointError for files that are missing
    or damaged."""
    return parse_eagle3(read_head(path))


def parse_eagle3(stored: StoredHead) -> Eagle3Checkpoint:
    """Make sense of a head's files.

    Raises:
        CheckpointError: tensors that are missing, unknown, misshaped or not finite; maps that contradict each other; a
            head narrower or wider than its target, which would need an embedding of its own.
    """
    path = stored.folder
    config = _with_lm_head(read_config(Eagle3Config, stored), stored)
    target_hidden = stored.settings.get("target_hidden_size") or config.hidden_size
    if target_hidden != config.hidden_size:
        raise CheckpointError(
            f"{path} has hidden_size {config.hidden_size} for a target with {target_hidden} (target_hidden_size); only "
            "heads as wide as their target can read its embedding"
        )
    named = own_tensors(config, stored)
    shapes = config.tensor_shapes() | _map_shapes(config)
    d2t, t2d = named.get("d2t"), named.get("t2d")
    if config.draft_vocab_size is None and d2t is not None and not integers(d2t, "d2t", path).any():
        for name in ("d2t", "t2d"):  # maps of the whole vocabulary onto itself say nothing
            named.pop(name, None)
    check_shapes(shapes, {name: tensor.shape for name, tensor in named.items()}, KIND, str(path))
    offsets = None
    if config.draft_vocab_size is not None:
        assert d2t is not None
        assert t2d is not None
        offsets = check_offsets(integers(d2t, "d2t", path), config.vocab_size, path)
        if not np.array_equal(bools(t2d, "t2d", path), _contained(offsets, config.vocab_size)):
            raise CheckpointError(f"{path}: t2d and d2t name different draft vocabularies")
    return Eagle3Checkpoint(
        name=str(path),
        config=config,
        tensors=weights({name: named[name] for name in config.tensor_shapes()}, path),
        dtype=stored_type(named["fc.weight"], path),
        d2t=offsets,
        metadata=stored.metadata,
    )


def save_eagle3(
    path: str | Path,
    config: Eagle3Config,
    tensors: Mapping[str, Floats],
    *,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    d2t: Ints | None = None,
    metadata: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write a head into directory ``path``; arguments and errors as ``eyas.checkpoints.eagle.save_eagle``.

    ``settings`` are added to ``config.json``, or replace what would stand there.
    """
    entries = head_entries(config, tensors, d2t, dtype, KIND)
    if d2t is not None:
        entries["t2d"] = _contained(d2t, config.vocab_size)
    usual = settings_of(config, "LlamaForCausalLMEagle3", dtype)
    usual["draft_vocab_size"] = config.scored_tokens  # the published code reads it of every head
    usual[TARGET_LM_HEAD] = config.target_lm_head
    write_head(path, usual | dict(settings or {}), entries, metadata or {})


def _with_lm_head(config: Eagle3Config, stored: StoredHead) -> Eagle3Config:
    says = stored.settings.get(TARGET_LM_HEAD, "lm_head.weight" not in stored.tensors)
    if not isinstance(says, bool):
        raise CheckpointError(f"{stored.folder / 'config.json'}: {TARGET_LM_HEAD} is true or false, got {says!r}")
    return replace(config, target_lm_head=says)


def _map_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    if config.draft_vocab_size is None:
        return {}
    return {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}


def _contained(d2t: Ints, vocab_size: int) -> Bools:
    """[V]: which target tokens are in the draft vocabulary."""
    contained = np.zeros(vocab_size, bool)
    contained[np.arange(len(d2t)) + d2t] = True
    return contained
