"""EAGLE-1/2 heads on disk, in the layout of the published ones: ``config.json`` beside ``model.safetensors`` or
``pytorch_model.bin``.

Reading safetensors needs no PyTorch. Arrays come out as float32 whatever they are stored as (widening bfloat16 or
float16 loses nothing). Names and shapes must be exactly those that the config calls for; only two kinds of surplus
tensor are tolerated and ignored: ``embed_tokens.weight``, because the target's own embedding is used (its shape is
still checked), and the ``rotary_emb.inv_freq`` that old files carry, because the config decides.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from eyas.errors import CheckpointError, InvalidInputError
from eyas.heads.config import EagleConfig
from eyas.targets.base import TargetInfo
from eyas.tree import Floats, Ints

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
"""Looked for in this order."""

StoredType = Literal["bfloat16", "float16", "float32", "float64"]

_FLOATS: dict[str, StoredType] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


@dataclass(frozen=True)
class EagleCheckpoint:
    """A head as read.

    Attributes:
        name: the path as given, for messages and reports.
        config: its shape.
        tensors: exactly the names of ``config.tensor_shapes()``, float32.
        dtype: what ``fc.weight`` is stored as.
        d2t: [draft_vocab_size] int64 offsets, target id = draft id + d2t[draft id]; None without a draft vocabulary.
        metadata: the free text entries of the safetensors header.
    """

    name: str
    config: EagleConfig
    tensors: Mapping[str, Floats]
    dtype: StoredType = "float32"
    d2t: Ints | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


def load_eagle(path: str | Path) -> EagleCheckpoint:
    """Read the head in directory ``path``.

    A bias that the file holds is used. One that is missing while the config asks for it (for ``fc`` a config that
    says nothing asks for it, as in the published code) is an error: what the head was trained with cannot be known.

    Raises:
        CheckpointError: a missing or damaged file; tensors that are missing, unknown, misshaped or not finite.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(
            f"{path} is not a directory; a draft head is a local directory with config.json and {WEIGHT_FILES[0]}"
        )
    settings = _read_json(folder / "config.json")
    file = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    if file is None:
        raise CheckpointError(f"{path} holds no weights; expected {' or '.join(WEIGHT_FILES)} beside config.json")
    stored, metadata = _read_safetensors(file) if file.suffix == ".safetensors" else (_read_bin(file), {})
    if any(name.startswith("midlayer.") for name in stored):
        raise CheckpointError(f"{path} holds an EAGLE-3 head (midlayer.* tensors), not an EAGLE-1/2 head")

    config = _with_biases(_config(settings, folder), settings, stored, folder)
    _check_embedding(config, stored, folder)
    named = {name: tensor for name, tensor in stored.items() if not _ignored(name)}
    shapes = config.tensor_shapes()
    if config.draft_vocab_size is not None:
        shapes["d2t"] = (config.draft_vocab_size,)
    _check_shapes(shapes, {name: tensor.shape for name, tensor in named.items()}, str(path))

    d2t = named.pop("d2t", None)
    return EagleCheckpoint(
        name=str(path),
        config=config,
        tensors={name: tensor.float32(name, path) for name, tensor in named.items()},
        dtype=named["fc.weight"].dtype(path),
        d2t=None if d2t is None else _offsets(d2t.array(), config.vocab_size, path),
        metadata=metadata,
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
    """Write a head into directory ``path`` (made if absent; other files there stay).

    Each file is replaced in one step, so a reader or a crash meets the old one or the new one, never a part.

    Args:
        path: the directory.
        config: the head's shape.
        tensors: float32 arrays, exactly the names of ``config.tensor_shapes()``.
        dtype: what to store; bfloat16 rounds to nearest, ties to even.
        d2t: [draft_vocab_size] int64 offsets; required with a draft vocabulary.
        metadata: free text entries for the safetensors header.

    Raises:
        CheckpointError: tensors that do not fit the config or are not finite.
    """
    shapes, given = config.tensor_shapes(), {name: array.shape for name, array in tensors.items()}
    if config.draft_vocab_size is not None:
        shapes["d2t"] = (config.draft_vocab_size,)
    if d2t is not None:
        given["d2t"] = d2t.shape
    _check_shapes(shapes, given, "the head to be saved")
    entries: dict[str, NDArray[Any]] = {}
    for name, array in tensors.items():
        if not np.isfinite(array).all():
            raise CheckpointError(f"the head to be saved has values in {name} that are not finite")
        wide = np.ascontiguousarray(array, np.float32)
        entries[name] = wide if dtype == "float32" else _to_bfloat16(wide)
    if d2t is not None:
        entries["d2t"] = _offsets(d2t, config.vocab_size, "the head to be saved")

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / WEIGHT_FILES[0], _safetensors(entries, {"format": "pt", **(metadata or {})}))
    _replace(folder / "config.json", [json.dumps(_settings(config, dtype), indent=2).encode() + b"\n"])


def check_fits(checkpoint: EagleCheckpoint, target: TargetInfo) -> None:
    """Refuse a head that was made for another target.

    Raises:
        CheckpointError: hidden size or vocabulary differ; names both models and both numbers.
    """
    config = checkpoint.config
    for what, ours, theirs in (
        ("hidden size", config.hidden_size, target.hidden_size),
        ("vocabulary", config.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            raise CheckpointError(
                f"draft head {checkpoint.name} was made for a target with {what} {ours}, but target {target.name} has "
                f"{theirs}; use a head trained for this target"
            )


# Config


def _config(settings: Mapping[str, Any], folder: Path) -> EagleConfig:
    """``config.json`` without its biases; defaults are those of the published code."""
    missing = [
        name
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        if settings.get(name) is None
    ]
    if missing:
        raise CheckpointError(f"{folder / 'config.json'} does not say {', '.join(missing)}")

    def get(name: str, default: Any) -> Any:
        value = settings.get(name)
        return default if value is None else value

    # transformers 5 writes base and scaling into one entry.
    rope = get("rope_parameters", {})
    scaling = get("rope_scaling", rope)
    if not isinstance(rope, dict) or not isinstance(scaling, dict):
        raise CheckpointError(f"{folder / 'config.json'}: rope_scaling must be an object, got {scaling!r}")
    scaling = {name: value for name, value in scaling.items() if name != "rope_theta"}
    if scaling in ({"rope_type": "default"}, {"type": "default"}):
        scaling = {}
    heads, vocab = settings["num_attention_heads"], settings["vocab_size"]
    draft_vocab = settings.get("draft_vocab_size")
    try:
        return EagleConfig(
            hidden_size=settings["hidden_size"],
            intermediate_size=settings["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=get("num_key_value_heads", heads),
            head_dim=get("head_dim", settings["hidden_size"] // heads),
            vocab_size=vocab,
            num_layers=get("num_hidden_layers", 1),
            rms_norm_eps=get("rms_norm_eps", 1e-6),
            rope_theta=float(get("rope_theta", rope.get("rope_theta", 10000.0))),
            rope_scaling=scaling or None,
            max_position_embeddings=get("max_position_embeddings", 2048),
            draft_vocab_size=None if draft_vocab == vocab else draft_vocab,
            hidden_act=get("hidden_act", "silu"),
        )
    except (InvalidInputError, TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from None


def _with_biases(
    config: EagleConfig, settings: Mapping[str, Any], stored: Mapping[str, _Tensor], folder: Path
) -> EagleConfig:
    fc_bias = "fc.bias" in stored
    if not fc_bias and settings.get("bias") is not False:
        says = "asks for one" if settings.get("bias") else "says nothing, which means it has one"
        raise CheckpointError(
            f"{folder} has no fc.bias, but its config.json {says}; if the head was trained without, "
            'put "bias": false into config.json'
        )
    qkv_bias = bool(settings.get("qkv_bias")) or any(name.endswith("_proj.bias") for name in stored)
    return replace(config, fc_bias=fc_bias, qkv_bias=qkv_bias)


def _settings(config: EagleConfig, dtype: str) -> dict[str, Any]:
    """The other way round: ``config.json`` as the published heads have it."""
    settings: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else dict(config.rope_scaling),
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "bias": config.fc_bias,
        "qkv_bias": config.qkv_bias,
        "torch_dtype": dtype,
    }
    if config.draft_vocab_size is not None:
        settings["draft_vocab_size"] = config.draft_vocab_size
    return settings


# Checks


def _ignored(name: str) -> bool:
    return name == "embed_tokens.weight" or name.endswith("rotary_emb.inv_freq")


def _check_embedding(config: EagleConfig, stored: Mapping[str, _Tensor], folder: Path) -> None:
    shape = (config.vocab_size, config.hidden_size)
    if "embed_tokens.weight" in stored and stored["embed_tokens.weight"].shape != shape:
        raise CheckpointError(
            f"{folder}: embed_tokens.weight has shape {stored['embed_tokens.weight'].shape}, but config.json says "
            f"vocab_size, hidden_size = {shape}"
        )


def _check_shapes(expected: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Exactly the expected names, each in its shape; the error lists every difference."""
    faults = []
    if missing := [name for name in expected if name not in given]:
        faults.append(f"missing: {_listed(missing)}")
    if surplus := [name for name in given if name not in expected]:
        faults.append(f"unknown: {_listed(surplus)}")
    for name, shape in expected.items():
        if name in given and given[name] != shape:
            faults.append(f"{name} has shape {given[name]}, the config asks for {shape}")
    if faults:
        raise CheckpointError(f"{where} does not fit its config as an EAGLE-1/2 head; {'; '.join(faults)}")


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _offsets(array: NDArray[Any], vocab_size: int, where: str | Path) -> Ints:
    """``d2t`` as int64, every draft token another target token."""
    if not np.issubdtype(array.dtype, np.integer):
        raise CheckpointError(f"{where}: d2t must hold whole numbers, got {array.dtype}")
    offsets = array.astype(np.int64)
    targets = np.arange(len(offsets)) + offsets
    if (targets < 0).any() or (targets >= vocab_size).any() or len(np.unique(targets)) < len(targets):
        raise CheckpointError(f"{where}: d2t must map each draft token to another target token below {vocab_size}")
    return offsets


# Files


@dataclass(frozen=True)
class _Tensor:
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

    def array(self) -> NDArray[Any]:
        kind = {"I": "i", "U": "u", "F": "f"}.get(self.type[0])
        if kind is None or not self.type[1:].isdigit():
            return np.zeros(self.shape, bool)
        return np.frombuffer(self.data, f"<{kind}{int(self.type[1:]) // 8}").reshape(self.shape)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} has no config.json, which a draft head needs") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    if not isinstance(settings, dict):
        raise CheckpointError(f"{file} must hold a JSON object")
    return settings


def _read_safetensors(file: Path) -> tuple[dict[str, _Tensor], dict[str, str]]:
    from safetensors import SafetensorError, deserialize, safe_open

    try:
        with safe_open(file, framework="np") as opened:
            metadata = dict(opened.metadata() or {})
        entries = deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    tensors = {name: _Tensor(e["dtype"], tuple(e["shape"]), e["data"]) for name, e in entries}
    return tensors, metadata


def _read_bin(file: Path) -> dict[str, _Tensor]:
    """A pickled state dict, with the loader that runs no code."""
    try:
        import torch
    except ImportError:
        raise CheckpointError(
            f"reading {file} needs PyTorch (pip install 'eyas[torch]'); a model.safetensors would not"
        ) from None
    types = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}
    types |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"}
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can fail in any way
        raise CheckpointError(f"{file} cannot be read: {str(error).partition(chr(10))[0] or repr(error)}") from None
    if not isinstance(state, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
        raise CheckpointError(f"{file} must hold a state dict: names and tensors")
    return {
        str(name): _Tensor(
            types.get(tensor.dtype, str(tensor.dtype)),
            tuple(tensor.shape),
            tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, tensor in state.items()
    }


def _to_bfloat16(array: Floats) -> NDArray[np.uint16]:
    """The upper halves of finite float32 numbers, rounded to nearest, ties to even."""
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _safetensors(arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> Iterator[bytes]:
    """The bytes of a safetensors file: length of the header, header, arrays (uint16 stands for bfloat16)."""
    types = {"uint16": "BF16", "float32": "F32", "int64": "I64"}
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


def _replace(file: Path, parts: Iterable[bytes]) -> None:
    """Write beside ``file`` and rename over it once all is on the disk."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as handle:
            for part in parts:
                handle.write(part)
            handle.flush()
            os.fsync(handle.fileno())
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
