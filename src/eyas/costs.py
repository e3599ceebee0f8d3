"""What a cycle costs on one machine: a small table of measured times, read as piecewise linear curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from eyas.errors import InvalidInputError
from eyas.tree import Doubles

CURVE = 512
"""Rows or nodes for which the curves are tabulated; beyond, the last slope goes on."""


@dataclass(frozen=True)
class CostTable:
    """Milliseconds of the parts of a cycle; curves are linear between the measured points and beyond the last.

    A cycle that drafts d levels and verifies m draft tokens costs ``first_ms`` (level 1: the drafter's pass over the
    newly committed tokens), one ``level(n)`` for each of the other d - 1 levels, n being the nodes expanded there,
    ``verify(1 + m)`` and ``overhead_ms``. A cycle that drafts nothing is plain decoding: ``verify(1) + overhead_ms``.

    Attributes:
        verify_rows: rows of a target pass that were measured, increasing, root included.
        verify_ms: milliseconds of each.
        draft_nodes: expanded nodes per drafter level that were measured, increasing.
        draft_ms: milliseconds of each; zero for a drafter that costs nothing worth counting.
        first_ms: milliseconds of the first level.
        overhead_ms: everything else in a cycle: policy, acceptance, commit.

    Raises:
        InvalidInputError: curves without points or of unequal length, points out of order, negative times, or a target
            pass that costs nothing.
    """

    verify_rows: tuple[int, ...]
    verify_ms: tuple[float, ...]
    draft_nodes: tuple[int, ...] = (1,)
    draft_ms: tuple[float, ...] = (0.0,)
    first_ms: float = 0.0
    overhead_ms: float = 0.0

    def __post_init__(self) -> None:
        for what, xs, ys in (
            ("verify", self.verify_rows, self.verify_ms),
            ("draft", self.draft_nodes, self.draft_ms),
        ):
            if not xs or len(xs) != len(ys):
                raise InvalidInputError(
                    f"the {what} costs need as many times as sizes, one at least, got {list(xs)} and {list(ys)}"
                )
            if xs[0] < 1 or any(b <= a for a, b in pairwise(xs)):
                raise InvalidInputError(f"the sizes of the {what} costs must increase from 1 on, got {list(xs)}")
        times = (*self.verify_ms, *self.draft_ms, self.first_ms, self.overhead_ms)
        if not all(np.isfinite(times)) or min(times) < 0 or min(self.verify_ms) <= 0:
            raise InvalidInputError(
                f"costs are milliseconds >= 0, and a target pass takes some, got verify {list(self.verify_ms)}, draft "
                f"{list(self.draft_ms)}, first {self.first_ms}, overhead {self.overhead_ms}"
            )

    @classmethod
    def fit(
        cls,
        verify: Mapping[int, float],
        draft: Mapping[int, float] | None = None,
        *,
        first_ms: float = 0.0,
        overhead_ms: float = 0.0,
    ) -> CostTable:
        """From noisy times by size: the nearest curves (least squares) that never fall with size."""
        draft = draft or {1: 0.0}
        rows, nodes = sorted(verify), sorted(draft)
        return cls(
            verify_rows=tuple(rows),
            verify_ms=tuple(monotone([verify[size] for size in rows])),
            draft_nodes=tuple(nodes),
            draft_ms=tuple(monotone([draft[size] for size in nodes])),
            first_ms=first_ms,
            overhead_ms=overhead_ms,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CostTable:
        """The inverse of ``as_dict``."""
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        try:
            return cls(**fields)
        except TypeError as error:
            raise InvalidInputError(f"not a cost table: {error}") from None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @cached_property
    def verify_curve(self) -> Doubles:
        """[CURVE + 1] milliseconds of a target pass by rows; index 0 is unused."""
        return _curve(self.verify_rows, self.verify_ms)

    @cached_property
    def level_curve(self) -> Doubles:
        """[CURVE + 1] milliseconds of a level by expanded nodes; expanding none costs nothing."""
        curve = _curve(self.draft_nodes, self.draft_ms)
        curve[0] = 0.0
        return curve

    def verify(self, rows: int) -> float:
        """Milliseconds of a target pass over ``rows`` rows."""
        return _at(self.verify_curve, rows)

    def level(self, nodes: int) -> float:
        """Milliseconds of a drafter pass that expands ``nodes`` nodes below the first level."""
        return _at(self.level_curve, nodes)

    def draft(self, expanded: Sequence[int]) -> float:
        """Milliseconds of a whole draft: expanded nodes per level, the root's first."""
        if not expanded:
            return 0.0
        return self.first_ms + sum(self.level(nodes) for nodes in expanded[1:])

    def cycle(self, expanded: Sequence[int], num_draft_tokens: int) -> float:
        """Milliseconds of a cycle: expanded nodes per level, and nodes verified besides the root."""
        return self.draft(expanded) + self.verify(1 + num_draft_tokens) + self.overhead_ms

    @property
    def plain_ms(self) -> float:
        """Milliseconds of a cycle that drafts nothing."""
        return self.cycle((), 0)


@dataclass(frozen=True)
class TimedCycle:
    """A cycle of a real answer.

    Attributes:
        expanded: nodes per drafter level.
        num_draft_tokens: nodes verified, root excluded.
        tokens: committed.
        ms: milliseconds it took.
    """

    expanded: tuple[int, ...]
    num_draft_tokens: int
    tokens: int
    ms: float


def with_whole_cycles(costs: CostTable, cycles: Sequence[TimedCycle]) -> CostTable:
    """What cycles take beyond the passes that were timed by themselves, put into the table.

    What plain decoding spends beside its passes every cycle spends: ``overhead_ms``. What drafted cycles spend more is
    drafting and verifying: least squares tell how much of it comes with every draft, every further level, and every
    further row (up to the most rows seen). Parts that the cycles do not tell apart stay as they are.
    """
    if plain := [cycle for cycle in cycles if not cycle.expanded and not cycle.num_draft_tokens]:
        beyond = costs.overhead_ms + fmean(cycle.ms - costs.cycle((), 0) for cycle in plain)
        # Less than nothing: one pass after the other finds more of the weights in the caches than a timed one did.
        passes = tuple(max(ms + min(0.0, beyond), 0.0) for ms in costs.verify_ms)
        costs = replace(costs, overhead_ms=max(0.0, beyond), verify_ms=passes)
    drafted = [cycle for cycle in cycles if cycle.expanded]
    if not drafted:
        return costs
    parts = np.array([(len(cycle.expanded) - 1, cycle.num_draft_tokens) for cycle in drafted], np.float64)
    excess = np.array([cycle.ms - costs.cycle(cycle.expanded, cycle.num_draft_tokens) for cycle in drafted])
    # About the mean, the least-squares solution of smallest norm leaves alone what never changes.
    level, row = np.linalg.lstsq(parts - parts.mean(axis=0), excess - excess.mean())[0].tolist()
    first = excess.mean() - parts.mean(axis=0) @ (level, row)
    most = parts[:, 1].max()
    # A draft costs nothing at least: what is saved beyond that was saved in the passes that verify it.
    saved = min(0.0, costs.first_ms + float(first))
    rows = [
        ms + row * min(size - 1, most) + saved * (size > 1)
        for size, ms in zip(costs.verify_rows, costs.verify_ms, strict=True)
    ]
    return replace(
        costs,
        first_ms=max(0.0, costs.first_ms + float(first)),
        draft_ms=tuple(max(0.0, ms + level) for ms in costs.draft_ms),
        verify_ms=tuple(monotone([max(rows[0], float(ms)) for ms in rows])),
    )


def typical_costs(level: float) -> CostTable:
    """A guess where nothing was measured, in plain passes: a dozen rows ride along for a third of a pass, as with
    bfloat16 and int8 weights on CPUs that are short of bandwidth.

    Args:
        level: a drafter pass as a share of a target pass.
    """
    return CostTable((1, 12, 64), (1.0, 1.3, 3.0), (1, 8), (level, 1.2 * level), first_ms=1.5 * level)


def monotone(values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """The non-decreasing sequence nearest to ``values`` by (weighted) least squares: pool adjacent violators."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights or [1.0] * len(values), strict=True):
        block = (float(value), float(weight), 1)
        while blocks and blocks[-1][0] > block[0]:
            mean, mass, length = blocks.pop()
            total = mass + block[1]
            block = ((mean * mass + block[0] * block[1]) / total, total, length + block[2])
        blocks.append(block)
    return [mean for mean, _, length in blocks for _ in range(length)]


def _curve(sizes: Sequence[int], times: Sequence[float]) -> Doubles:
    x = np.arange(CURVE + 1)
    curve: Doubles = np.interp(x, sizes, times)
    if len(sizes) > 1:
        slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
        curve += np.maximum(x - sizes[-1], 0) * slope
    return curve


def _at(curve: Doubles, size: int) -> float:
    if size < len(curve):
        return float(curve[size])
    return float(curve[-1] + (size - len(curve) + 1) * (curve[-1] - curve[-2]))
