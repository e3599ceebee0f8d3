"""The files of a draft head: ``config.json`` beside ``model.safetensors`` or ``pytorch_model.bin``.

Nothing here knows what a head consists of. Reading safetensors needs no PyTorch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from eyas.checkpoints.hf import SafetensorsFile, open_file, read_json
from eyas.checkpoints.weights import RawTensor
from eyas.errors import CheckpointError
from eyas.files import replace_file

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
"""Looked for in this order."""

BLOCK, BLOCKS = 4096, 256
"""Bytes and number of the blocks a fingerprint looks at."""


@dataclass(frozen=True)
class StoredHead:
    """What the files of a head say.

    Attributes:
        folder: the directory.
        settings: ``config.json``.
        tensors: by name, as stored.
        metadata: the free text entries of the safetensors header.
    """

    folder: Path
    settings: Mapping[str, Any]
    tensors: Mapping[str, RawTensor]
    metadata: Mapping[str, str] = field(default_factory=dict)


def head_fingerprint(folder: Path) -> str:
    """16 hex digits that tell heads apart: the config, and blocks from all over the weight file."""
    digest = hashlib.sha256()
    for file in (folder / "config.json", *(folder / name for name in WEIGHT_FILES)):
        if not file.is_file():
            continue
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            for start in range(0, size, max(BLOCK, size // BLOCKS)):
                stream.seek(start)
                digest.update(stream.read(BLOCK))
    return digest.hexdigest()[:16]


def read_head(path: str | Path) -> StoredHead:
    """All that directory ``path`` holds.

    Raises:
        CheckpointError: a missing or damaged file.
    """
    folder = Path(path)
    settings = _read_settings(folder)
    file = open_file(_weight_file(folder))
    metadata = file.metadata if isinstance(file, SafetensorsFile) else {}
    return StoredHead(folder, settings, {name: file.raw(name) for name in file}, metadata)


def tensor_names(path: str | Path) -> set[str]:
    """Names of a head's tensors; a safetensors file is not read for that. Raises as ``read_head``."""
    folder = Path(path)
    _read_settings(folder)
    return set(open_file(_weight_file(folder)))


def head_metadata(path: str | Path) -> dict[str, str]:
    """The free text entries of a head's safetensors header, without reading its tensors; a .bin has none. Raises as
    ``read_head``."""
    file = _weight_file(Path(path))
    return SafetensorsFile(file).metadata if file.suffix == ".safetensors" else {}


def write_head(
    path: str | Path, settings: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]
) -> None:
    """Write a head into directory ``path`` (made if absent; other files there stay).

    Each file is replaced in one step, so a reader or a crash meets the old one or the new one, never a part.

    Args:
        arrays: float32, int64, bool, or bfloat16 as uint16 (see ``eyas.checkpoints.weights.to_bfloat16``).
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / WEIGHT_FILES[0], _safetensors(arrays, {"format": "pt", **metadata}))
    replace_file(folder / "config.json", [json.dumps(settings, indent=2).encode() + b"\n"])


def _read_settings(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a directory; a draft head is a local directory with config.json and {WEIGHT_FILES[0]}"
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json, which a draft head needs")
    return read_json(folder / "config.json")


def _weight_file(folder: Path) -> Path:
    file = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    if file is None:
        raise CheckpointError(f"{folder} holds no weights; expected {' or '.join(WEIGHT_FILES)} beside config.json")
    return file


def _safetensors(arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> Iterator[bytes]:
    """The bytes of a safetensors file: length of the header, header, arrays (uint16 stands for bfloat16)."""
    types = {"uint16": "BF16", "float32": "F32", "int64": "I64", "bool": "BOOL"}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    order = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))  # wide types first keeps all aligned
    offset = 0
    for name in order:
        array = arrays[name]
        end = offset + array.nbytes
        header[name] = {
            "dtype": types[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        yield arrays[name].tobytes()
