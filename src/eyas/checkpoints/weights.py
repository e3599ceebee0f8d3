"""What every weight file looks like from outside: named arrays, read lazily, and the bytes they are stored as."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.errors import UnsupportedModelError
from eyas.tree import Floats

Bytes = NDArray[np.uint8]

MAX_COUNT = 2**31 - 1
"""Of layers, heads, rows, positions: what engines count in 32 bits."""

BLOCK_SIZES: dict[str, tuple[int, int]] = {
    # type: (values per block, bytes per block)
    "F64": (1, 8),
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "I64": (1, 8),
    "I32": (1, 4),
    "I16": (1, 2),
    "U16": (1, 2),
    "I8": (1, 1),
    "U8": (1, 1),
    "BOOL": (1, 1),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
}

_PLAIN: dict[str, type[np.generic]] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,  # numpy has no bfloat16: the 16 bits as they are
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "U16": np.uint16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


@dataclass(frozen=True)
class RawTensor:
    """One tensor exactly as stored.

    Attributes:
        type: a key of ``BLOCK_SIZES``: "F32", "BF16", "Q4_1", ...
        shape: logical shape, e.g. (out_features, in_features).
        data: [rows, bytes per row] uint8, rows = the product of all but the last axis (1 for vectors).
    """

    type: str
    shape: tuple[int, ...]
    data: Bytes

    def array(self) -> NDArray[Any]:
        """The values in their stored type (bfloat16 as uint16), without a copy; quantised blocks as [rows, bytes]."""
        plain = _PLAIN.get(self.type)
        return self.data if plain is None else self.data.view(plain).reshape(self.shape)

    def float32(self) -> Floats:
        """The values as float32, dequantised where needed; ``shape`` as it is."""
        if self.type == "F32":
            return self.data.view(np.float32).reshape(self.shape)
        if self.type == "BF16":
            return (self.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(self.shape)
        if self.type in _PLAIN:
            with np.errstate(over="ignore", invalid="ignore"):
                return self.array().astype(np.float32)
        return dequantise(self.type, self.data).reshape(self.shape)


class Weights(Mapping[str, NDArray[Any]], ABC):
    """Tensors of a checkpoint under their Hugging Face names; nothing is read before it is asked for.

    ``weights[name]`` gives an array ready for arithmetic where numpy has the type (GGUF: always float32;
    safetensors: as stored, bfloat16 as uint16). ``weights.float32(name)`` is float32 from any file.
    """

    @abstractmethod
    def raw(self, name: str) -> RawTensor:
        """The stored bytes. KeyError for an unknown name, CheckpointError for damage."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape, without reading the values."""

    @abstractmethod
    def type(self, name: str) -> str:
        """Storage type, without reading the values: "F32", "BF16", "Q4_1", ..."""

    @abstractmethod
    def release(self) -> None:
        """Give back the memory that reading has filled. Arrays handed out stay valid, and later reads work: what is
        needed again comes from the file."""

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        try:
            self.type(name)  # Mapping's own test would read the values
        except KeyError:
            return False
        return True

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.raw(name).array()

    def float32(self, name: str) -> Floats:
        """[*shape] float32; a read-only view of the file where that is what is stored."""
        return self.raw(name).float32()

    def nbytes(self, name: str) -> int:
        """Bytes the tensor takes in the file."""
        values, size = BLOCK_SIZES[self.type(name)]
        return int(np.prod(self.shape(name), dtype=np.int64)) // values * size


def to_bfloat16(array: Floats) -> NDArray[np.uint16]:
    """The upper halves of finite float32 numbers, rounded to nearest, ties to even, as every converter does."""
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def release_pages(map_: mmap.mmap) -> None:
    """Drop a read-only file mapping's pages from this process; they come back when touched."""
    if hasattr(mmap, "MADV_DONTNEED"):
        map_.madvise(mmap.MADV_DONTNEED)


def _scales(blocks: Bytes, start: int) -> Floats:
    """[n, 1] float32 from the half-precision number at byte ``start`` of each block."""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes, out: Floats) -> None:
    """Byte j of a block holds value j in its low half and value j + 16 in its high half."""
    np.bitwise_and(packed, 15, out=out[:, :16], casting="unsafe", dtype=np.uint8)
    np.right_shift(packed, 4, out=out[:, 16:], casting="unsafe", dtype=np.uint8)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= 8
    out *= _scales(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 4:], out)
    out *= _scales(blocks, 0)
    out += _scales(blocks, 2)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _scales(blocks, 0), out=out)


_OURS: dict[str, Callable[[Bytes, Floats], None]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}

_CHUNK = 4096  # blocks: 512 KiB of float32, which stays in the second-level cache between the steps


def dequantise(type_name: str, data: Bytes) -> Floats:
    """Blocks to numbers: ``data`` [rows, bytes per row] uint8 -> [rows, values per row] float32.

    The three common types are done here, the others by the ``gguf`` package. Scales that are not finite give what they
    give, without a warning.
    """
    values, size = BLOCK_SIZES[type_name]
    blocks = np.ascontiguousarray(data).reshape(-1, size)  # [n, bytes per block]
    with np.errstate(over="ignore", invalid="ignore"):
        return _values(type_name, blocks, values).reshape(len(data), -1)


def _values(type_name: str, blocks: Bytes, values: int) -> Floats:
    if (ours := _OURS.get(type_name)) is not None:
        out = np.empty((len(blocks), values), np.float32)
        for start in range(0, len(blocks), _CHUNK):
            ours(blocks[start : start + _CHUNK], out[start : start + _CHUNK])
        return out
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        return dequantize(blocks, GGMLQuantizationType[type_name])
    except (KeyError, NotImplementedError):
        raise UnsupportedModelError(
            f"weights of type {type_name} cannot be read; float types, Q4_0, Q4_1, Q5, Q8_0 and K-quants can"
        ) from None
