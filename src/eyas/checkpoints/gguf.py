"""Reading GGUF: header, hyperparameters, and weights under their Hugging Face names.

The header is parsed here rather than by the ``gguf`` package, whose reader makes a numpy array of every vocabulary
entry and so takes seconds for files that map in milliseconds. Formats that we do not dequantise ourselves still go
through that package. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3).
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from eyas.checkpoints.weights import BLOCK_SIZES, MAX_COUNT, Bytes, RawTensor, Weights, release_pages
from eyas.errors import CheckpointError, UnsupportedModelError

T = TypeVar("T")

ARCHITECTURES = ("llama", "qwen2", "qwen3")

CONTROL, USER_DEFINED = 3, 4
"""Kinds in ``tokenizer.ggml.token_type`` that are matched whole: special tokens, and other added ones."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

_TENSOR_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 20: "IQ4_NL", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    30: "BF16",
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies. ``shape`` has the slowest axis first, as numpy and torch write it."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GGUFFile:
    """A memory-mapped GGUF file: ``metadata`` by key and ``tensors`` by GGUF name.

    Raises CheckpointError, naming the file and the byte offset, for anything that is not a whole GGUF file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise CheckpointError(f"{self.path}: cannot be opened as GGUF: {error}") from None
        self.size = len(self._map)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        _Header(self).read()

    def get(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """Metadata ``key``, ``default`` if absent, CheckpointError if it is there and not a ``kind`` (an int will do
        where a float is wanted, a bool never where a number is)."""
        value = self.metadata.get(key)
        if value is None:
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise CheckpointError(f"{self.path}: metadata {key} should be a {kind.__name__}, found {value!r:.60}")
        return value

    def token_id(self, name: str) -> int | None:
        """The id in ``tokenizer.ggml.<name>_token_id``, checked to lie in the vocabulary."""
        index = self.get(f"tokenizer.ggml.{name}_token_id", int)
        size = len(self.strings("tokenizer.ggml.tokens"))
        if index is not None and not 0 <= index < size:
            raise CheckpointError(f"{self.path}: {name} token id {index} is outside the vocabulary of {size}")
        return index

    def strings(self, key: str) -> list[str]:
        """A list of strings that must be there."""
        value = self.metadata.get(key)
        if not isinstance(value, list) or not value or not isinstance(value[0], str):
            raise CheckpointError(f"{self.path}: metadata {key} should be a list of strings, found {value!r:.60}")
        return value

    def blocks(self, name: str) -> Bytes:
        """[rows, bytes per row] uint8: the stored bytes of a tensor, read-only, not copied."""
        info = self.tensors[name]
        rows = int(np.prod(info.shape[:-1], dtype=np.int64))
        return np.frombuffer(self._map, np.uint8, info.nbytes, info.offset).reshape(rows, -1)

    def release(self) -> None:
        release_pages(self._map)


class _Header:
    """A cursor over the header; every read is checked against the end of the file."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.data = file._map
        self.at = 0
        self.what = "header"

    def fail(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: {self.what} at byte {self.at}: {problem}")

    def take(self, count: int) -> int:
        """Step over ``count`` bytes; the offset where they start."""
        start = self.at
        if count > self.file.size - start:
            raise self.fail(f"needs {count} bytes, but the file ends at byte {self.file.size}: truncated or damaged")
        self.at = start + count
        return start

    def scalar(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        length = self.scalar("Q")
        start = self.take(length)
        return self.data[start : start + length].decode("utf-8", "replace")

    def strings(self, count: int) -> list[str]:
        """``count`` strings in a row: the vocabulary, so the checks are inlined."""
        data, size, at = self.data, self.file.size, self.at
        unpack = struct.Struct("<Q").unpack_from
        out: list[str] = []
        for _ in range(count):
            end = at + 8
            if end > size or (end := end + unpack(data, at)[0]) > size:
                self.at = at
                raise self.fail(f"string number {len(out)} of {count} runs past the end of the file (byte {size})")
            out.append(data[at + 8 : end].decode("utf-8", "replace"))
            at = end
        self.at = at
        return out

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return _plain(self.scalar(_SCALARS[kind]), kind)
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.scalar("I"), self.scalar("Q")
            if count > self.file.size:
                raise self.fail(f"an array of {count} items cannot fit into {self.file.size} bytes")
            if inner == _STRING:
                return self.strings(count)
            if inner in _SCALARS:
                dtype = np.dtype(_SCALARS[inner]).newbyteorder("<")
                array: NDArray[Any] = np.frombuffer(self.data, dtype, count, self.take(count * dtype.itemsize))
                return array.tolist()
        raise self.fail(f"unknown value type {kind}")

    def read(self) -> None:
        if self.data[:4] != b"GGUF":
            raise self.fail(f"not a GGUF file (it starts with {self.data[:4]!r} where b'GGUF' is due)")
        self.take(4)
        version = self.scalar("I")
        if version not in (2, 3):
            raise self.fail(f"GGUF version {version} is not known; versions 2 and 3, little-endian, are")
        num_tensors, num_values = self.scalar("Q"), self.scalar("Q")
        metadata = self.file.metadata
        for index in range(num_values):
            self.what = f"metadata entry {index} of {num_values}"
            key = self.string()
            self.what = f"metadata {key!r}"
            metadata[key] = self.value(self.scalar("I"))
        infos = [self.tensor_info(index, num_tensors) for index in range(num_tensors)]
        self.what = "tensor data"
        align = metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align <= 0:
            raise self.fail(f"general.alignment is {align!r}, not a positive number")
        base = -(-self.at // align) * align
        for name, kind, shape, offset in infos:
            self.file.tensors[name] = self.placed(name, kind, shape, base + offset)

    def tensor_info(self, index: int, count: int) -> tuple[str, int, tuple[int, ...], int]:
        self.what = f"tensor entry {index} of {count}"
        name = self.string()
        self.what = f"tensor {name!r}"
        num_dims = self.scalar("I")
        if not 1 <= num_dims <= 4:
            raise self.fail(f"{num_dims} dimensions; 1 to 4 are possible")
        shape = tuple(self.scalar("Q") for _ in range(num_dims))[::-1]  # stored fastest axis first
        return name, self.scalar("I"), shape, self.scalar("Q")

    def placed(self, name: str, kind: int, shape: tuple[int, ...], offset: int) -> TensorInfo:
        """The tensor's extent, checked to lie inside the file."""
        self.what, self.at = f"tensor {name!r}", offset
        if name in self.file.tensors:
            raise self.fail("occurs twice")
        if kind not in _TENSOR_TYPES:
            raise UnsupportedModelError(
                f"{self.file.path}: tensor {name!r} has GGML type {kind}, which Eyas cannot read"
            )
        values, size = BLOCK_SIZES[_TENSOR_TYPES[kind]]
        total = 1
        for extent in shape:
            total *= extent  # Python integers: a damaged shape cannot overflow
        if total <= 0 or shape[-1] % values:
            raise self.fail(f"shape {shape} does not divide into blocks of {values} {_TENSOR_TYPES[kind]} values")
        nbytes = total // values * size
        if offset + nbytes > self.file.size:
            raise self.fail(f"needs {nbytes} bytes, but the file ends at byte {self.file.size}: truncated or damaged")
        return TensorInfo(name, _TENSOR_TYPES[kind], shape, offset, nbytes)


def _plain(value: Any, kind: int) -> Any:
    """float32 metadata as the shortest decimal that means it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if kind == 6 else value


# --- hyperparameters -------------------------------------------------------------------------------------------


def read_config(file: GGUFFile) -> dict[str, Any]:
    """The metadata as a Hugging Face style config.

    Raises:
        UnsupportedModelError: an architecture or feature outside dense llama, qwen2 and qwen3.
        CheckpointError: a required entry is missing or not a number.
    """
    meta = file.metadata
    arch = meta.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: GGUF architecture {arch!r} is not supported; {', '.join(ARCHITECTURES)} are "
            "(Llama, SmolLM and Mistral files are all 'llama')"
        )
    if meta.get(f"{arch}.expert_count"):
        raise UnsupportedModelError(f"{file.path}: mixture-of-experts models are not supported, dense ones are")

    def number(key: str, default: float | None = None) -> float:
        value = file.get(f"{arch}.{key}", float, default)
        if value is None or not 0 < value < float("inf"):
            raise CheckpointError(f"{file.path}: metadata {arch}.{key} should be a positive number, found {value!r}")
        return value

    def count(key: str, default: int | None = None) -> int:
        value = file.get(f"{arch}.{key}", int, default)
        if value is None or not 0 < value <= MAX_COUNT:
            raise CheckpointError(f"{file.path}: metadata {arch}.{key} should be a positive integer, found {value!r}")
        return value

    if count("block_count") > len(file.tensors):
        raise CheckpointError(f"{file.path}: {count('block_count')} layers in only {len(file.tensors)} tensors")
    hidden, heads = count("embedding_length"), count("attention.head_count")
    head_dim = count("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if count(key, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{file.path}: {arch}.{key} is {count(key)}, the head size is {head_dim}; they must be equal"
            )
    if head_dim % 2:
        raise UnsupportedModelError(f"{file.path}: heads of odd size {head_dim} cannot be rotated")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path}: tensor 'token_embd.weight' is missing")
    window = file.get(f"{arch}.attention.sliding_window", int)
    theta = number("rope.freq_base", 10000.0)
    positions = count("context_length")
    config = {
        "architectures": [f"{arch.capitalize()}ForCausalLM"],
        "model_type": arch,
        "hidden_size": hidden,
        "intermediate_size": count("feed_forward_length"),
        "num_hidden_layers": count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": positions,
        "hidden_act": "silu",
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, arch, head_dim, theta, positions),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id", int),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id", int),
    }
    if window and arch == "llama":  # only Mistral has one, and its window is part of what it computes
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    return config


def _rope_scaling(file: GGUFFile, arch: str, head_dim: int, theta: float, positions: int) -> dict[str, Any] | None:
    at = f"{arch}.rope.scaling"
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, head_dim, theta)
    kind = file.get(f"{at}.type", str, "none")
    factor = file.get(f"{at}.factor", float, 1.0) or 1.0
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = file.get(f"{at}.original_context_length", int, int(positions / factor))
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if (value := file.get(f"{at}.{theirs}", float)) is not None:
                scaling[ours] = value
        return scaling
    raise UnsupportedModelError(f"{file.path}: RoPE scaling {kind!r} is not supported; none, linear, yarn, llama3 are")


def _llama3_scaling(file: GGUFFile, head_dim: int, theta: float) -> dict[str, Any]:
    """Llama 3's settings, recovered from the divisors of each frequency, which is all that a GGUF file keeps.

    Between 1 (fast frequencies) and ``factor`` (slow ones) the inverse divisor is a straight line in the frequency
    f: with smooth s = (L f / 2 pi - low) / (high - low), 1 / divisor = (1 - s) / factor + s. L, low and high only
    enter as ratios, so L = 8192 fixes the scale and the line gives low and high.
    """
    info = file.tensors["rope_freqs.weight"]
    divisors = RawTensor(info.type, info.shape, file.blocks(info.name)).float32().astype(np.float64)  # [head_dim / 2]
    foreign = UnsupportedModelError(f"{file.path}: the frequency divisors in 'rope_freqs.weight' are not Llama 3's")
    if divisors.shape == (head_dim // 2,) and not (np.isfinite(divisors).all() and divisors.min() > 0.5):
        raise foreign
    if divisors.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{file.path}: tensor 'rope_freqs.weight' has shape {divisors.shape}, not ({head_dim // 2},)"
        )
    turns = 8192 / (2 * np.pi) * theta ** (-np.arange(0, head_dim, 2) / head_dim)  # [head_dim / 2] L f / 2 pi
    factor = float(divisors.max())
    low, high = 1.0, 4.0  # as published; kept where fewer than two frequencies lie on the line
    ramp = (divisors > 1 + 1e-4) & (divisors < factor * (1 - 1e-4))
    if ramp.sum() >= 2:
        smooth = (1 / divisors[ramp] - 1 / factor) / (1 - 1 / factor)
        slope, start = np.polyfit(turns[ramp], smooth, 1)
        low, high = float(np.round(-start / slope, 3)), float(np.round((1 - start) / slope, 3))
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    if not np.allclose(1 / ((1 - smooth) / factor + smooth), divisors, rtol=1e-3):
        raise foreign
    return {
        "rope_type": "llama3",
        "factor": float(np.round(factor, 4)),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": 8192,
    }


# --- weights ---------------------------------------------------------------------------------------------------

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_DERIVED = {"rope_freqs.weight"}  # read into rope_scaling
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hf_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor, None if there is none."""
    if name in _TOP:
        return _TOP[name]
    match = _BLOCK_NAME.fullmatch(name)
    if match and match[2] in _LAYER:
        return f"model.layers.{int(match[1])}.{_LAYER[match[2]]}.{match[3]}"
    return None


def rope_row_order(rows: int, heads: int) -> NDArray[np.int64]:
    """[rows] int64: ``stored[order]`` are q or k rows as Hugging Face has them.

    llama.cpp rotates neighbouring pairs, transformers the two halves of a head, so its converter interleaves each
    head's halves (llama only; qwen's rotation is the same in both).
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).ravel()


class GGUFWeights(Weights):
    """The file's tensors under Hugging Face names; ``weights[name]`` is dequantised float32, read on each call.

    Raises CheckpointError at once if a tensor is missing, unknown or of another shape than the config says.
    """

    def __init__(self, file: GGUFFile, config: dict[str, Any]) -> None:
        self._file = file
        self._config = config
        names = {name: hf_name(name) for name in file.tensors if name not in _DERIVED}
        if unknown := sorted(name for name, ours in names.items() if ours is None):
            raise CheckpointError(f"{file.path}: tensors that {config['model_type']} does not have: {_some(unknown)}")
        self._stored = {ours: name for name, ours in names.items() if ours is not None}
        expected = expected_shapes(config)
        if missing := sorted(expected.keys() - self._stored.keys()):
            raise CheckpointError(f"{file.path}: tensors are missing: {_some(missing)}")
        if surplus := sorted(self._stored.keys() - expected.keys()):
            raise CheckpointError(f"{file.path}: tensors that {config['model_type']} does not have: {_some(surplus)}")
        for name, shape in expected.items():
            if self.shape(name) != shape:
                info = file.tensors[self._stored[name]]
                raise CheckpointError(
                    f"{file.path}: tensor {info.name!r} at byte {info.offset} has shape {info.shape}, "
                    f"the metadata calls for {shape}"
                )

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.float32(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._stored[name]].shape

    def type(self, name: str) -> str:
        return self._file.tensors[self._stored[name]].type

    def release(self) -> None:
        self._file.release()

    @cached_property
    def _rotated(self) -> dict[str, int]:
        """Suffixes of the permuted tensors -> their number of heads."""
        if self._config["model_type"] not in ("llama", "mistral"):
            return {}
        return {
            "self_attn.q_proj": self._config["num_attention_heads"],
            "self_attn.k_proj": self._config["num_key_value_heads"],
        }

    def raw(self, name: str) -> RawTensor:
        """Stored blocks; llama's q and k rows are put back into Hugging Face order (a copy). Blocks never cross rows,
        so nothing is requantised."""
        stored = self._stored[name]
        data, shape = self._file.blocks(stored), self.shape(name)
        if heads := self._rotated.get(".".join(name.split(".")[-3:-1])):
            order = rope_row_order(shape[0], heads)
            data = data[order] if len(shape) > 1 else data.reshape(shape[0], -1)[order].reshape(1, -1)
        return RawTensor(self.type(name), shape, data)


def expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a dense llama, mistral, qwen2 or qwen3 model, by its config."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]
    qwen2, qwen3 = config["model_type"] == "qwen2", config["model_type"] == "qwen3"
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        linear = {
            "self_attn.q_proj": (q_rows, hidden),
            "self_attn.k_proj": (kv_rows, hidden),
            "self_attn.v_proj": (kv_rows, hidden),
            "self_attn.o_proj": (hidden, q_rows),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for name, shape in linear.items():
            shapes[f"{at}{name}.weight"] = shape
            if name.startswith("mlp"):
                biased = config["mlp_bias"]
            else:
                biased = config["attention_bias"] and not (qwen2 and name.endswith("o_proj"))
            if biased:
                shapes[f"{at}{name}.bias"] = shape[:1]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}{norm}.weight"] = (hidden,)
        if qwen3:
            shapes |= {f"{at}self_attn.{norm}.weight": (config["head_dim"],) for norm in ("q_norm", "k_norm")}
    return shapes


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
