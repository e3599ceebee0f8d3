"""How far numbers would move with other questions of the same kind: bootstrap over questions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.bench.summary import Row, decode_seconds

DRAWS = 2000

Interval = tuple[float, float]
"""Ends of a 95 % interval."""


def acceptance_length_interval(rows: Mapping[Any, Row]) -> Interval | None:
    """Of tau as ratio of sums; None for fewer than two questions."""
    sums = _resampled([[row["cycle_tokens"], row["cycles"]] for row in rows.values() if row["cycles"]])
    return None if sums is None else _ends(sums[:, 0] / sums[:, 1])


def acceptance_length_gain_interval(rows: Mapping[Any, Row], other: Mapping[Any, Row]) -> Interval | None:
    """Of tau divided by the other method's; the questions of both are drawn together."""
    sums = _resampled(
        [
            [row["cycle_tokens"], row["cycles"], other[key]["cycle_tokens"], other[key]["cycles"]]
            for key, row in rows.items()
            if key in other and row["cycles"] and other[key]["cycles"]
        ]
    )
    return None if sums is None else _ends((sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3]))


def speedup_interval(rows: Mapping[Any, Row], plain: Mapping[Any, Row]) -> Interval | None:
    """Of the speed-up as ratio of sums; the questions of both methods are drawn together."""
    sums = _resampled(
        [
            [row["cycle_tokens"], decode_seconds(row), plain[key]["cycle_tokens"], decode_seconds(plain[key])]
            for key, row in rows.items()
            if key in plain and row["cycles"] and plain[key]["cycles"]
        ]
    )
    return None if sums is None else _ends((sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3]))


def _resampled(columns: list[list[float]]) -> NDArray[np.float64] | None:
    """[DRAWS, C]: column sums over questions drawn with replacement, the same draws every time."""
    if len(columns) < 2:
        return None
    table = np.array(columns, np.float64)  # [Q, C]
    draws = np.random.default_rng(0).integers(0, len(table), (DRAWS, len(table)))
    sums: NDArray[np.float64] = table[draws].sum(axis=1)
    return sums


def _ends(values: NDArray[np.float64]) -> Interval:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
