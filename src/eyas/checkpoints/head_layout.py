"""What the layouts of all draft heads share: the config, the checks, and the head as read.

Arrays come out as float32 whatever they are stored as (widening bfloat16 or float16 loses nothing). Names and shapes
must be exactly those that the config calls for; only two kinds of surplus tensor are tolerated and ignored:
``embed_tokens.weight``, because the target's own embedding is used (its shape is still checked), and the
``rotary_emb.inv_freq`` that old files carry, because the config decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from eyas.checkpoints.head_files import StoredHead
from eyas.checkpoints.weights import RawTensor, to_bfloat16
from eyas.errors import CheckpointError, InvalidInputError
from eyas.heads.config import HeadConfig
from eyas.targets.base import TargetInfo
from eyas.tree import Bools, Floats, Ints

Config = TypeVar("Config", bound=HeadConfig)

StoredType = Literal["bfloat16", "float16", "float32", "float64"]

_FLOATS: dict[str, StoredType] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


@dataclass(frozen=True)
class HeadCheckpoint(Generic[Config]):
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
    config: Config
    tensors: Mapping[str, Floats]
    dtype: StoredType = "float32"
    d2t: Ints | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def token_ids(self) -> Ints | None:
        """[draft_vocab_size] int64 target id of each draft token; None where they are the same."""
        return None if self.d2t is None else np.arange(len(self.d2t), dtype=np.int64) + self.d2t


def check_fits(checkpoint: HeadCheckpoint[Any], target: TargetInfo) -> None:
    """Refuse a head that was made for another target.

    Raises:
        CheckpointError: hidden size or vocabulary differ; names both models and both numbers.
    """
    config: HeadConfig = checkpoint.config
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


def read_config(kind: type[Config], stored: StoredHead) -> Config:
    """``config.json`` without the bias of fc; defaults are those of the published code.

    Raises:
        CheckpointError: something is missing or makes no sense.
    """
    settings, folder = stored.settings, stored.folder
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
        return kind(
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
            qkv_bias=bool(get("qkv_bias", False)) or any(name.endswith("_proj.bias") for name in stored.tensors),
        )
    except (InvalidInputError, TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from None


def settings_of(config: HeadConfig, architecture: str, dtype: str) -> dict[str, Any]:
    """The other way round: ``config.json`` as the published heads have it."""
    settings: dict[str, Any] = {
        "architectures": [architecture],
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
        "qkv_bias": config.qkv_bias,
        "torch_dtype": dtype,
    }
    if config.draft_vocab_size is not None:
        settings["draft_vocab_size"] = config.draft_vocab_size
    return settings


# Checks


def own_tensors(config: HeadConfig, head: StoredHead) -> dict[str, RawTensor]:
    """The stored tensors without what is tolerated and ignored, whose shape is still checked."""
    stored, folder, shape = head.tensors, head.folder, (config.vocab_size, config.hidden_size)
    if "embed_tokens.weight" in stored and stored["embed_tokens.weight"].shape != shape:
        raise CheckpointError(
            f"{folder}: embed_tokens.weight has shape {stored['embed_tokens.weight'].shape}, but config.json says "
            f"vocab_size, hidden_size = {shape}"
        )
    return {
        name: tensor
        for name, tensor in stored.items()
        if name != "embed_tokens.weight" and not name.endswith("rotary_emb.inv_freq")
    }


def check_shapes(
    expected: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]], kind: str, where: str
) -> None:
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
        raise CheckpointError(f"{where} does not fit its config as an {kind} head; {'; '.join(faults)}")


def stored_type(tensor: RawTensor, where: str | Path) -> StoredType:
    """What a tensor of weights is stored as; refused unless floating point."""
    if tensor.type not in _FLOATS:
        raise CheckpointError(
            f"{where}: weights must be floating point (bfloat16, float16, float32), got {tensor.type}"
        )
    return _FLOATS[tensor.type]


def weights(tensors: Mapping[str, RawTensor], where: str | Path) -> dict[str, Floats]:
    """The tensors as float32, independent of the file; refused unless floating point and finite."""
    arrays = {}
    for name, tensor in tensors.items():
        stored_type(tensor, where)
        arrays[name] = np.array(tensor.float32())
        if not np.isfinite(arrays[name]).all():
            raise CheckpointError(f"{where}: {name} has values that are not finite")
    return arrays


def integers(tensor: RawTensor, name: str, where: str | Path) -> Ints:
    """A tensor of signed integers as int64."""
    if tensor.type not in ("I8", "I16", "I32", "I64"):
        raise CheckpointError(f"{where}: {name} must hold whole numbers, got {tensor.type}")
    return tensor.array().astype(np.int64)


def bools(tensor: RawTensor, name: str, where: str | Path) -> Bools:
    """A tensor of booleans."""
    if tensor.type != "BOOL":
        raise CheckpointError(f"{where}: {name} must hold true and false, got {tensor.type}")
    return tensor.array()


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def check_offsets(offsets: Ints, vocab_size: int, where: str | Path) -> Ints:
    """``d2t`` as int64; refused unless every draft token is another target token."""
    offsets = offsets.astype(np.int64)
    targets = np.arange(len(offsets)) + offsets
    if (targets < 0).any() or (targets >= vocab_size).any() or len(np.unique(targets)) < len(targets):
        raise CheckpointError(f"{where}: d2t must map each draft token to another target token below {vocab_size}")
    return offsets


def head_entries(
    config: HeadConfig,
    tensors: Mapping[str, Floats],
    d2t: Ints | None,
    dtype: Literal["bfloat16", "float32"],
    kind: str,
) -> dict[str, NDArray[Any]]:
    """A head as it is written: its tensors, and ``d2t`` [draft_vocab_size] where it has a draft vocabulary.

    Raises:
        CheckpointError: names or shapes that do not fit the config, values that are not finite, offsets that lead
            nowhere.
    """
    where, expected = "the head to be saved", config.tensor_shapes()
    given = {name: array.shape for name, array in tensors.items()}
    if config.draft_vocab_size is not None:
        expected["d2t"] = (config.draft_vocab_size,)
    if d2t is not None:
        given["d2t"] = d2t.shape
    check_shapes(expected, given, kind, where)
    entries = storable(tensors, dtype)
    if d2t is not None:
        entries["d2t"] = check_offsets(d2t, config.vocab_size, where)
    return entries


def storable(tensors: Mapping[str, Floats], dtype: Literal["bfloat16", "float32"]) -> dict[str, NDArray[Any]]:
    """The arrays as they are written; bfloat16 rounds to nearest, ties to even.

    Raises:
        CheckpointError: values that are not finite.
    """
    entries: dict[str, NDArray[Any]] = {}
    for name, array in tensors.items():
        if not np.isfinite(array).all():
            raise CheckpointError(f"the head to be saved has values in {name} that are not finite")
        wide = np.ascontiguousarray(array, np.float32)
        entries[name] = wide if dtype == "float32" else to_bfloat16(wide)
    return entries
