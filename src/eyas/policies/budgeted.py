"""Trees that know their price: EAGLE-2's candidates, and as many of them as pay (derivation: docs/policies.md).

A cycle commits T tokens and costs C milliseconds. Over a long answer the speed is the sum of all T over the sum of
all C. The decisions that make this ratio largest are those that maximise T - rate * C in every cycle, where ``rate``
is that best ratio itself: a row or a level is worth its price if it brings tokens at least as fast as the engine makes
them anyway. Where the rate is not known, a cycle's own T / C stands in for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from eyas.calibration import IDENTITY, Calibration
from eyas.costs import CURVE, CostTable, Doubles
from eyas.errors import InvalidInputError
from eyas.policies.base import Candidates
from eyas.policies.sequoia import Acceptance, as_acceptance
from eyas.tree import Ints

NEGLIGIBLE = 0.005
"""Share of a plain cycle below which a first level is not weighed but taken."""

_NONE = np.zeros(0, np.int64)
_ROOT = np.zeros(1, np.int64)


@dataclass(frozen=True)
class BudgetedPolicy:
    """How deep, how wide and how many, decided in every cycle from path values and prices.

    The expected accepted tokens of a tree are the sum of its nodes' probabilities of acceptance: the calibrated path
    values. So the m best nodes are those of largest value, and only m is open (``select``). Before a level is drafted
    its values are forecast: the child of rank r of a node of value V at depth d gets V * acceptance[d][r]
    (``expand``). Nothing is drafted at all where no number of forecast levels pays.

    Attributes:
        costs: what passes cost here.
        acceptance: position-wise acceptance p[depth][rank], the forecast; see ``eyas.policies.sequoia``.
        num_steps: levels at most.
        topk: nodes expanded per level at most, and children of each.
        num_draft_tokens: nodes verified at most.
        calibration: path values to probabilities of acceptance; for sampled answers another than for greedy ones.
        rate: tokens per millisecond that the engine makes with this policy; None takes each cycle's own.

    Raises:
        InvalidInputError: a bound below 1, a budget beyond the cost curves, a rate <= 0, or a bad acceptance table.
    """

    costs: CostTable
    acceptance: Acceptance
    num_steps: int = 8
    topk: int = 8
    num_draft_tokens: int = 32
    calibration: Calibration = IDENTITY
    rate: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_steps", "topk", "num_draft_tokens"):
            if getattr(self, name) < 1:
                raise InvalidInputError(
                    f"{name} must be at least 1, got {getattr(self, name)}; for no drafting use --draft none"
                )
        if max(self.num_draft_tokens, self.topk) >= CURVE:
            raise InvalidInputError(
                f"num_draft_tokens and topk must be below {CURVE}, got {self.num_draft_tokens} and {self.topk}"
            )
        if self.rate is not None and not self.rate > 0:
            raise InvalidInputError(f"the rate is in tokens per millisecond and above 0, got {self.rate}")
        object.__setattr__(self, "acceptance", as_acceptance(self.acceptance))

    def expand(self, candidates: Candidates) -> Ints:
        if candidates.depth == 0:
            return _ROOT if self.drafts else _NONE
        values = self.calibration.acceptance(candidates)
        start = candidates.levels[-2]
        best = _falling(values[candidates.newest])[: self.topk]
        newest = values[candidates.newest][best]  # [n], falling
        known = values[1:][_falling(values[1:])[: self.num_draft_tokens]]
        forecast = newest[:, None] * self._forecast[min(candidates.depth, len(self._forecast) - 1)]  # [n, k]
        count = self._width_worth(known, forecast, self._spent(candidates))
        return np.sort(start + best[:count])

    def select(self, candidates: Candidates) -> Ints:
        values = self.calibration.acceptance(candidates)[1:]
        # Level order and a stable sort: a tie goes to the shallower node. As no node is worth more than its parent,
        # every prefix is closed under parents.
        best = _falling(values)[: self.num_draft_tokens]
        tokens = 1.0 + np.concatenate([[0.0], np.cumsum(values[best])])  # [m + 1] expected, by nodes kept
        worth = self._worth(tokens, self._spent(candidates) + self._closing[: len(tokens)])
        return np.sort(1 + best[: int(worth.argmax())])  # argmax takes the first: a tie costs fewer rows

    @cached_property
    def drafts(self) -> bool:
        """Whether any number of levels is expected to beat plain decoding, as far as can be known beforehand.

        A first level that costs next to nothing is always worth a look: ``select`` still decides what is verified.
        """
        if self.costs.first_ms < NEGLIGIBLE * self.costs.plain_ms:
            return True
        known, newest, spent = np.zeros(0), np.ones(1), self.costs.first_ms
        plain = float(self._worth(np.ones(1), np.full(1, self.costs.plain_ms))[0])
        for depth in range(self.num_steps):
            level = (newest[:, None] * self._forecast[min(depth, len(self._forecast) - 1)]).ravel()
            level = -np.sort(-level)
            known = -np.sort(-np.concatenate([known, level]))[: self.num_draft_tokens]
            tokens = 1.0 + np.concatenate([[0.0], np.cumsum(known)])
            if self._worth(tokens, spent + self._closing[: len(tokens)]).max() > plain:
                return True
            newest = level[: self.topk]
            spent += self.costs.level(len(newest))
        return False

    @cached_property
    def _forecast(self) -> Doubles:
        """[depths, topk] acceptance by rank; ranks beyond the table are never accepted."""
        table = np.asarray(self.acceptance)[:, : self.topk]
        return np.pad(table, ((0, 0), (0, self.topk - table.shape[1])))

    @cached_property
    def _closing(self) -> Doubles:
        """[num_draft_tokens + 1] milliseconds from the finished draft to the next cycle, by nodes verified."""
        return self.costs.verify_curve[1 : self.num_draft_tokens + 2] + self.costs.overhead_ms

    def _spent(self, candidates: Candidates) -> float:
        """Milliseconds of the levels drafted so far; only a cycle judged by its own rate needs them."""
        if self.rate is not None:
            return 0.0
        widths = np.diff(candidates.levels[1:])
        return self.costs.draft([-(-int(width) // self.topk) for width in widths])

    def _worth(self, tokens: Doubles, ms: Doubles) -> Doubles:
        """What to maximise."""
        return tokens / ms if self.rate is None else tokens - self.rate * ms

    def _width_worth(self, known: Doubles, forecast: Doubles, spent: float) -> int:
        """How many nodes to expand: 0 where no number beats stopping here.

        Every choice is judged by the best tree it leads to. Known and forecast nodes are sorted together once; row j of
        a mask leaves the children of the first j expanded nodes.

        Args:
            known: [c] values of the best nodes at hand, falling.
            forecast: [n, k] values of the children of the n best leaves.
            spent: milliseconds of the draft so far.
        """
        n, k = forecast.shape
        values = np.concatenate([known, forecast.ravel()])  # [s]
        order = _falling(values)
        owner = np.concatenate([np.full(len(known), -1), np.repeat(np.arange(n), k)])[order]
        there = np.zeros((n + 1, 1 + len(values)), bool)  # column 0: no draft token is kept at all
        there[:, 1:] = owner < np.arange(n + 1)[:, None]
        counts = np.cumsum(there, axis=1)
        tokens = 1.0 + np.cumsum(there * np.concatenate([[0.0], values[order]]), axis=1)
        within = counts < len(self._closing)
        ms = spent + self._closing[np.where(within, counts, 0)] + self.costs.level_curve[: n + 1, None]
        worth = np.where(within, self._worth(tokens, ms), -np.inf).max(axis=1)
        return int(worth.argmax())


def _falling(values: Doubles | Sequence[float]) -> Ints:
    """Indices by falling value, ties in order."""
    return np.argsort(-np.asarray(values), kind="stable")
