"""What the native engine needs to know of a model, from its Hugging Face style config; and what it cannot run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.checkpoints.weights import Weights
from eyas.errors import CheckpointError, InvalidInputError, UnsupportedModelError
from eyas.heads.rope import rotary_frequencies

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
WEIGHT_TYPES = ("float32", "bfloat16", "int8", "q4")
BLOCK_TYPES = ("Q4_0", "Q4_1", "Q8_0")
ACTIVATIONS = ("silu", "swish")
"""Two names of the one activation there is."""

_NEEDED = {
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
    "max_position_embeddings",
}  # fmt: skip


def weight_type(dtype: str) -> str:
    """The weight type that a dtype option means; "auto" is bfloat16.

    Raises:
        InvalidInputError: a type this engine does not have.
    """
    if dtype == "auto":
        return "bfloat16"
    if dtype not in WEIGHT_TYPES:
        raise InvalidInputError(f"the native engine has weight types auto, {', '.join(WEIGHT_TYPES)}, not {dtype!r}")
    return dtype


def core_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers for the compiled part.

    Raises:
        UnsupportedModelError: names the feature that this engine lacks.
        CheckpointError: names the entries that the config lacks.
    """
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise UnsupportedModelError(f"the native engine runs {', '.join(MODEL_TYPES)} models, not {kind!r}")
    if config.get("hidden_act", "silu") not in ACTIVATIONS:
        raise UnsupportedModelError(f"the native engine has no activation {config['hidden_act']!r}, only silu")
    if config.get("mlp_bias"):
        raise UnsupportedModelError("the native engine has no biases in the MLP (mlp_bias)")
    if config.get("rope_theta") is None:
        raise UnsupportedModelError("the native engine needs one rope_theta for all layers")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError("the native engine rotates whole attention heads (partial_rotary_factor is set)")
    if missing := sorted(_NEEDED - config.keys()):
        raise CheckpointError(f"the model's config lacks {', '.join(missing)}")
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    positions = config["max_position_embeddings"]
    frequencies, scale = rotary_frequencies(head_dim, config["rope_theta"], config.get("rope_scaling"), positions)
    return {
        "hidden_size": config["hidden_size"],
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "intermediate_size": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": _full_attention_positions(config, positions),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "inv_freq": frequencies.tolist(),
        "rope_scale": scale,
    }


def _full_attention_positions(config: Mapping[str, Any], positions: int) -> int:
    """A sliding window changes nothing while the context fits into it, so it becomes the context limit."""
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True):
        return min(positions, int(window))
    return positions


class StoredWeights(Mapping[str, Any]):
    """A checkpoint's tensors as the compiled part takes them: float32 and bfloat16 as stored, the quantised blocks it
    knows as (type, [rows, bytes] uint8, columns), everything else widened to float32."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __getitem__(self, name: str) -> NDArray[Any] | tuple[str, NDArray[np.uint8], int]:
        kind = self._weights.type(name)
        if kind == "BF16":
            return np.ascontiguousarray(self._weights.raw(name).array())
        if kind in BLOCK_TYPES:
            raw = self._weights.raw(name)
            return kind, np.ascontiguousarray(raw.data), raw.shape[-1]
        return np.ascontiguousarray(self._weights.float32(name))
