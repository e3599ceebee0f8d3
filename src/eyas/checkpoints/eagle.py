"""EAGLE-1/2 heads on disk, in the layout of the published ones.

``fc.weight``, ``fc.bias``?, ``layers.N.*``: no final norm, no lm_head, no input norm in the first layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from eyas.checkpoints.head_files import StoredHead, read_head, write_head
from eyas.checkpoints.head_layout import (
    HeadCheckpoint,
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
from eyas.heads.config import EagleConfig
from eyas.tree import Floats, Ints

KIND = "EAGLE-1/2"


@dataclass(frozen=True)
class EagleCheckpoint(HeadCheckpoint[EagleConfig]):
    """An EAGLE-1/2 head as read."""


def load_eagle(path: str | Path) -> EagleCheckpoint:
    """Read the head in directory ``path``. Raises as ``parse_eagle``, and CheckpointError for files that are missing
    or damaged."""
    return parse_eagle(read_head(path))


def parse_eagle(stored: StoredHead) -> EagleCheckpoint:
    """Make sense of a head's files.

    A bias that the file holds is used. One that is missing while the config asks for it (for ``fc`` a config that
    says nothing asks for it, as in the published code) is an error: what the head was trained with cannot be known.

    Raises:
        CheckpointError: tensors that are missing, unknown, misshaped or not finite.
    """
    path = stored.folder
    if any(name.startswith("midlayer.") for name in stored.tensors):
        raise CheckpointError(f"{path} holds an EAGLE-3 head (midlayer.* tensors), not an {KIND} head")
    config = _with_bias(read_config(EagleConfig, stored), stored)
    named = own_tensors(config, stored)
    shapes = config.tensor_shapes()
    if config.draft_vocab_size is not None:
        shapes["d2t"] = (config.draft_vocab_size,)
    check_shapes(shapes, {name: tensor.shape for name, tensor in named.items()}, KIND, str(path))
    d2t = named.pop("d2t", None)
    return EagleCheckpoint(
        name=str(path),
        config=config,
        tensors=weights(named, path),
        dtype=stored_type(named["fc.weight"], path),
        d2t=None if d2t is None else check_offsets(integers(d2t, "d2t", path), config.vocab_size, path),
        metadata=stored.metadata,
    )


def save_eagle(
    path: str | Path,
    config: EagleConfig,
    tensors: Mapping[str, Floats],
    *,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    d2t: Ints | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a head into directory ``path`` (see ``write_head``).

    Args:
        path: the directory.
        config: the head's shape.
        tensors: float32 arrays, exactly the names of ``config.tensor_shapes()``.
        dtype: what to store.
        d2t: [draft_vocab_size] int64 offsets; required with a draft vocabulary.
        metadata: free text entries for the safetensors header.

    Raises:
        CheckpointError: tensors that do not fit the config or are not finite.
    """
    entries = head_entries(config, tensors, d2t, dtype, KIND)
    settings = settings_of(config, "LlamaForCausalLMEagle", dtype) | {"bias": config.fc_bias}
    write_head(path, settings, entries, metadata or {})


def _with_bias(config: EagleConfig, stored: StoredHead) -> EagleConfig:
    asked, has = stored.settings.get("bias"), "fc.bias" in stored.tensors
    if not has and asked is not False:
        says = "asks for one" if asked else "says nothing, which means it has one"
        raise CheckpointError(
            f"{stored.folder} has no fc.bias, but its config.json {says}; if the head was trained without, "
            'put "bias": false into config.json'
        )
    return replace(config, fc_bias=has)
