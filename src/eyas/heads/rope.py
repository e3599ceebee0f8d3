"""Rotary frequencies, plain and stretched, in numpy: one source for training, drafting and native engines.

Position p turns the pair (i, i + head_dim/2) of every query and key by the angle p * frequency[i]. Models
trained on short texts are stretched to long ones by lowering the frequencies:

* ``linear``: all by one factor (Chen et al., arXiv 2306.15595);
* ``llama3``: only the slow ones, with a ramp in between (Llama 3.1);
* ``yarn``: the slow ones, with a ramp over dimensions, and hotter attention (Peng et al., arXiv 2309.00071).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from eyas.errors import InvalidInputError, UnsupportedModelError
from eyas.tree import Floats


def rotary_frequencies(
    head_dim: int, theta: float, scaling: Mapping[str, Any] | None, max_positions: int
) -> tuple[Floats, float]:
    """Angle per position of each rotated pair, and the factor on cosine and sine.

    Args:
        head_dim: size of one attention head, even.
        theta: the base.
        scaling: ``rope_scaling`` of a ``config.json``: ``rope_type`` (older: ``type``) and its numbers; None for plain.
        max_positions: ``max_position_embeddings``, yarn's original length where ``scaling`` does not name one.

    Returns:
        frequencies [head_dim/2] float32 in radians per position, and the factor (1.0 but for yarn).

    Raises:
        UnsupportedModelError: a kind of scaling not listed above.
        InvalidInputError: a number that the scaling needs is missing or not positive.
    """
    plain = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)  # [head_dim / 2]
    scaling = scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError("this head rotates only a part of each attention head (partial_rotary_factor)")
    if kind == "default":
        return plain.astype(np.float32), 1.0
    if kind == "linear":
        return (plain / _number(scaling, "factor")).astype(np.float32), 1.0
    if kind == "llama3":
        return _llama3(plain, scaling).astype(np.float32), 1.0
    if kind == "yarn":
        frequencies, factor = _yarn(plain, head_dim, theta, scaling, max_positions)
        return frequencies.astype(np.float32), factor
    raise UnsupportedModelError(f"rope_type {kind!r} is not supported; supported: default, linear, llama3, yarn")


def _number(scaling: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = scaling.get(name)
    if value is None:
        value = default
    if not isinstance(value, (int, float)) or not value > 0:
        raise InvalidInputError(f"rope_scaling needs a positive number {name!r}, got {dict(scaling)}")
    return float(value)


def _llama3(plain: np.ndarray, scaling: Mapping[str, Any]) -> np.ndarray:
    """Turns per original context decide: many keep their frequency, few are divided by the factor."""
    factor = _number(scaling, "factor")
    few, many = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    turns = _number(scaling, "original_max_position_embeddings") * plain / (2 * math.pi)
    keep = np.clip((turns - few) / (many - few), 0.0, 1.0) if many > few else (turns >= few).astype(np.float64)
    return plain * (keep + (1 - keep) / factor)


def _yarn(
    plain: np.ndarray, head_dim: int, theta: float, scaling: Mapping[str, Any], max_positions: int
) -> tuple[np.ndarray, float]:
    original = _number(scaling, "original_max_position_embeddings", max_positions)
    factor = _number(scaling, "factor", max_positions / original)

    def pair_with(turns: float) -> float:
        """The (fractional) pair that makes this many turns over the original context."""
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_with(_number(scaling, "beta_fast", 32.0)), pair_with(_number(scaling, "beta_slow", 1.0))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp = (np.arange(head_dim // 2) - first) / max(last - first, 1e-3)
    stretch = np.clip(ramp, 0.0, 1.0)  # 0: keep, 1: divide by the factor

    def heat(scale: float, weight: float) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    if scaling.get("attention_factor") is not None:
        attention = _number(scaling, "attention_factor")
    elif scaling.get("mscale") and scaling.get("mscale_all_dim"):
        attention = heat(factor, _number(scaling, "mscale")) / heat(factor, _number(scaling, "mscale_all_dim"))
    else:
        attention = heat(factor, 1.0)
    return plain * ((1 - stretch) + stretch / factor), attention
