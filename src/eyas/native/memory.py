"""What a model takes on the native engine, known from its file's header before anything is packed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from eyas import native
from eyas.checkpoints.weights import Weights
from eyas.memory import available_bytes, human, require_memory
from eyas.native.config import BLOCK_TYPES, WEIGHT_TYPES

CONTEXT = 2048
"""Tokens of context that must fit (or the model's limit, if that is less); a cache grows beyond them as it is used."""

_CHUNK, _TREE = 256, 64  # rows of the largest pass, and of the largest one with all logits
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_READ_AS_STORED = {"F32", "BF16", *BLOCK_TYPES}


def memory_needed(numbers: Mapping[str, Any], weights: Weights, kind: str, kernels: str = "") -> dict[str, int]:
    """Bytes by purpose.

    Args:
        numbers: see ``eyas.native.config.core_config``.
        weights: the checkpoint; only names, shapes and types are looked at.
        kind: weight type of the engine.
        kernels: a kernel set by name; they differ in padding.

    Returns:
        "weights": packed, to the byte. "cache": K and V of ``CONTEXT`` tokens. "workspace": about what passes need.
        "loading": float32 copies of the matrices packed together, where the engine cannot read what is stored.
    """
    return {
        "weights": sum(_packed(name, weights, kind, kernels) for name in weights),
        "cache": _cache(numbers, kind),
        "workspace": _workspace(numbers),
        "loading": max((_widened(name, weights) for name in weights), default=0),
    }


def check_memory(name: str, numbers: Mapping[str, Any], weights: Weights, kind: str, kernels: str = "") -> None:
    """Refuse a model that will not fit.

    Raises:
        NotEnoughMemoryError: with what is needed, what is there, and the weight types that would fit.
    """
    available = available_bytes()
    if available is None:
        return
    parts = memory_needed(numbers, weights, kind, kernels)
    if sum(parts.values()) <= available:
        return
    others = {other: sum(memory_needed(numbers, weights, other, kernels).values()) for other in WEIGHT_TYPES}
    fitting = [f"{other} ({human(size)})" for other, size in others.items() if size <= available]
    advice = f"these weight types would fit: {', '.join(fitting)}" if fitting else "no weight type would fit"
    require_memory(f"{name} as {kind}", parts, available, advice)


def _packed(name: str, weights: Weights, kind: str, kernels: str) -> int:
    shape, stored = weights.shape(name), weights.type(name)
    if len(shape) != 2:
        return 4 * math.prod(shape)
    if kind == "q4":
        kind = stored if stored in BLOCK_TYPES else "int8"
    if name == _EMBEDDING and _OUTPUT in weights and kind == "int8":
        kind = "bfloat16"  # rows are looked up, not multiplied
    rows, columns = shape
    return native.core.packed_bytes(kind, rows, columns, kernels)


def _widened(name: str, weights: Weights) -> int:
    shape = weights.shape(name)
    if len(shape) != 2 or weights.type(name) in _READ_AS_STORED:
        return 0
    together = 1 if name in (_EMBEDDING, _OUTPUT) else 2  # gate and up; q with k and v
    return 4 * together * math.prod(shape)


def _cache(numbers: Mapping[str, Any], kind: str) -> int:
    head_dim = numbers["head_dim"]
    values = head_dim + -(-head_dim // 16) * 16  # of K, and of V padded to whole vectors
    tokens = min(CONTEXT, numbers["max_position_embeddings"])
    size = 4 if kind == "float32" else 2  # bytes of a number
    return int(size * tokens * numbers["num_hidden_layers"] * numbers["num_key_value_heads"] * values)


def _workspace(numbers: Mapping[str, Any]) -> int:
    attention = numbers["num_attention_heads"] * numbers["head_dim"]
    keys = numbers["num_key_value_heads"] * numbers["head_dim"]
    inner, hidden = numbers["intermediate_size"], numbers["hidden_size"]
    row = 3 * hidden + 2 * attention + 2 * keys + 2 * inner
    return int(4 * (_CHUNK * row + _TREE * numbers["vocab_size"]))
