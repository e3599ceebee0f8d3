"""The files of a draft head: ``config.json`` beside ``model.safetensors`` or ``pytorch_model.bin``.

Nothing here knows what a head consists of. Reading safetensors needs no PyTorch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from eyas.errors import CheckpointError
from eyas.files import replace_file
from eyas.tree import Bools, Floats, Ints

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")

BLOCK, BLOCKS = 4096, 256
"""Bytes and number of the blocks a fingerprint looks at."""
"""Looked for in this order."""

StoredType = Literal["bfloat16", "float16", "float32", "float64"]

_FLOATS: dict[str, StoredType] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
_INTEGERS = {"I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}


@dataclass(frozen=True)
class StoredTensor:
    """One stored tensor; ``type`` as safetensors spells it."""

    type: str
    shape: tuple[int, ...]
    data: bytes | bytearray

    def dtype(self, where: str | Path) -> StoredType:
        if self.type not in _FLOATS:
            raise CheckpointError(
                f"{where}: weights must be floating point (bfloat16, float16, float32), got {self.type}"
            )
        return _FLOATS[self.type]

    def float32(self, name: str, where: str | Path) -> Floats:
        dtype = self.dtype(where)
        if dtype == "bfloat16":
            wide = (np.frombuffer(self.data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            wide = np.frombuffer(self.data, dtype).astype(np.float32)
        if not np.isfinite(wide).all():
            raise CheckpointError(f"{where}: {name} has values that are not finite")
        return wide.reshape(self.shape)

    def integers(self, name: str, where: str | Path) -> Ints:
        if self.type not in _INTEGERS:
            raise CheckpointError(f"{where}: {name} must hold whole numbers, got {self.type}")
        return np.frombuffer(self.data, _INTEGERS[self.type]).astype(np.int64).reshape(self.shape)

    def bools(self, name: str, where: str | Path) -> Bools:
        if self.type != "BOOL":
            raise CheckpointError(f"{where}: {name} must hold true and false, got {self.type}")
        return np.frombuffer(self.data, np.bool_).reshape(self.shape)


@dataclass(frozen=True)
class StoredHead:
    """What the files of a head say.

    Attributes:
        folder: the directory.
        settings: ``config.json``.
        tensors: by name.
        metadata: the free text entries of the safetensors header.
    """

    folder: Path
    settings: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
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
    file = _weight_file(folder)
    tensors, metadata = _read_safetensors(file) if file.suffix == ".safetensors" else (_read_bin(file), {})
    return StoredHead(folder, settings, tensors, metadata)


def tensor_names(path: str | Path) -> set[str]:
    """Names of a head's tensors; a safetensors file is not read for that. Raises as ``read_head``."""
    folder = Path(path)
    _read_settings(folder)
    file = _weight_file(folder)
    if file.suffix != ".safetensors":
        return set(_read_bin(file))
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as opened:
            return set(opened.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None


def head_metadata(path: str | Path) -> dict[str, str]:
    """The free text entries of a head's safetensors header, without reading its tensors; a .bin has none. Raises as
    ``read_head``."""
    from eyas.checkpoints.hf import SafetensorsFile

    file = _weight_file(Path(path))
    return SafetensorsFile(file).metadata if file.suffix == ".safetensors" else {}


def write_head(
    path: str | Path, settings: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]
) -> None:
    """Write a head into directory ``path`` (made if absent; other files there stay).

    Each file is replaced in one step, so a reader or a crash meets the old one or the new one, never a part.

    Args:
        arrays: float32, int64, bool, or bfloat16 as uint16 (see ``to_bfloat16``).
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
    return _read_json(folder / "config.json")


def _weight_file(folder: Path) -> Path:
    file = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    if file is None:
        raise CheckpointError(f"{folder} holds no weights; expected {' or '.join(WEIGHT_FILES)} beside config.json")
    return file


def _read_json(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} has no config.json, which a draft head needs") from None
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    if not isinstance(settings, dict):
        raise CheckpointError(f"{file} must hold a JSON object")
    return settings


def _read_safetensors(file: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    from eyas.checkpoints.hf import SafetensorsFile

    opened = SafetensorsFile(file)
    raws = {name: opened.raw(name) for name in opened}
    tensors = {name: StoredTensor(raw.type, raw.shape, raw.data.tobytes()) for name, raw in raws.items()}
    return tensors, opened.metadata


def _read_bin(file: Path) -> dict[str, StoredTensor]:
    """A pickled state dict, with the loader that runs no code."""
    try:
        import torch
    except ImportError:
        raise CheckpointError(
            f"reading {file} needs PyTorch (pip install 'eyas[torch]'); a model.safetensors would not"
        ) from None
    types = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}
    types |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL"}
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can fail in any way
        raise CheckpointError(f"{file} cannot be read: {str(error).partition(chr(10))[0] or repr(error)}") from None
    if not isinstance(state, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
        raise CheckpointError(f"{file} must hold a state dict: names and tensors")
    return {
        str(name): StoredTensor(
            types.get(tensor.dtype, str(tensor.dtype)),
            tuple(tensor.shape),
            tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, tensor in state.items()
    }


def to_bfloat16(array: Floats) -> NDArray[np.uint16]:
    """The upper halves of finite float32 numbers, rounded to nearest, ties to even."""
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


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
