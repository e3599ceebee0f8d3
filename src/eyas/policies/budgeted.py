"""Trees that know their price: EAGLE-2's candidates, and as many of them as pay (derivation: docs/policies.md).

A cycle commits T tokens and costs C milliseconds. Over a long answer the speed is the sum of all T over the sum of
all C. The decisions that make this ratio largest are those that maximise T - rate * C in every cycle, where ``rate``
is that best ratio itself: a row or a level is worth its price if it brings tokens at least as fast as the engine makes
them anyway. Where the rate is not known, a cycle's own T / C stands in for it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from eyas.calibration import IDENTITY, Calibration
from eyas.costs import CURVE, CostTable
from eyas.errors import InvalidInputError
from eyas.policies.base import Candidates
from eyas.policies.sequoia import AcceptanceTable, as_acceptance
from eyas.tree import Doubles, Ints

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
    acceptance: AcceptanceTable
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
        values = candidates.acceptance_by(self.calibration)
        start = candidates.levels[-2]
        best = _falling(values[start:])[: self.topk]
        known = -np.sort(-values[1:])[: self.num_draft_tokens]
        count = self._width(
            known.tolist(), values[start:][best].tolist(), self._forecast(candidates.depth), self._spent(candidates)
        )
        return np.sort(start + best[:count])

    def select(self, candidates: Candidates) -> Ints:
        values = candidates.acceptance_by(self.calibration)[1:]
        # Level order and a stable sort: a tie goes to the shallower node. As no node is worth more than its parent,
        # every prefix is closed under parents.
        best = _falling(values)[: self.num_draft_tokens]
        _, count = self._kept(values[best].tolist(), self._spent(candidates))
        return np.sort(1 + best[:count])

    @cached_property
    def drafts(self) -> bool:
        """Whether any number of levels is expected to beat plain decoding, as far as can be known beforehand.

        A first level that costs next to nothing is always worth a look: ``select`` still decides what is verified.
        """
        if self.costs.first_ms < NEGLIGIBLE * self.costs.plain_ms:
            return True
        known, newest, spent = list[float](), [1.0], self.costs.first_ms
        plain = self._worth(1.0, self.costs.plain_ms)
        for depth in range(self.num_steps):
            level = sorted((value * share for value in newest for share in self._forecast(depth)), reverse=True)
            known = sorted(known + level, reverse=True)[: self.num_draft_tokens]
            # What is spent counts here even against a given rate: it can still be saved.
            if self._kept(known, spent)[0] > plain:
                return True
            newest = level[: self.topk]
            spent += self.costs.level(len(newest))
        return False

    def _forecast(self, depth: int) -> tuple[float, ...]:
        """Acceptance by rank of the children of a node at ``depth``; beyond the table its last row."""
        return self.acceptance[min(depth, len(self.acceptance) - 1)][: self.topk]

    @cached_property
    def closing(self) -> list[float]:
        """[num_draft_tokens + 1] milliseconds from the finished draft to the next cycle, by nodes verified."""
        curve = self.costs.verify_curve[1 : self.num_draft_tokens + 2] + self.costs.overhead_ms
        return [float(ms) for ms in curve]

    @cached_property
    def floor(self) -> float:
        """Value below which no node pays: the price of the cheapest row, where the rate is known."""
        rows = [after - before for before, after in pairwise(self.closing)]
        return 0.0 if self.rate is None else self.rate * min(rows)

    def _spent(self, candidates: Candidates) -> float:
        """Milliseconds of the levels drafted so far; only a cycle judged by its own rate needs them."""
        if self.rate is not None:
            return 0.0
        widths = np.diff(candidates.levels[1:])
        return self.costs.draft([-(-int(width) // self.topk) for width in widths])

    def _worth(self, tokens: float, ms: float) -> float:
        """What to maximise."""
        return tokens / ms if self.rate is None else tokens - self.rate * ms

    def _kept(self, values: Sequence[float], spent: float) -> tuple[float, int]:
        """(worth, number) of the nodes to verify: the first of ``values``, which fall, after ``spent`` milliseconds.

        Of equally good numbers the smallest.
        """
        tokens, count, rate = 1.0, 0, self.rate
        best = self._worth(tokens, spent + self.closing[0])
        for number, (value, closing) in enumerate(zip(values, self.closing[1:], strict=False), start=1):
            tokens += value
            ms = spent + closing
            worth = tokens / ms if rate is None else tokens - rate * ms  # ``_worth``, called too often to be called
            if worth > best:
                best, count = worth, number
        return best, count

    def _width(self, known: list[float], leaves: list[float], shares: Sequence[float], spent: float) -> int:
        """How many nodes to expand: 0 where no number beats stopping here. Every choice is judged by the best tree it
        leads to.

        Args:
            known: values of the best nodes at hand, falling.
            leaves: values of the newest level's best nodes, falling.
            shares: of a leaf's value that its children are expected to have, by rank.
            spent: milliseconds of the draft so far.
        """
        floor, chosen = self.floor, 0
        lost = [-value for value in known if value > floor]  # rising, as bisect wants it
        best, _ = self._kept([-value for value in lost], spent)
        for width, leaf in enumerate(leaves, start=1):
            children = [leaf * share for share in shares if leaf * share > floor]
            if not children:
                break  # nor have the leaves that are worth less
            for value in children:
                insort(lost, -value)
            worth, _ = self._kept([-value for value in lost], spent + self.costs.level(width))
            if worth > best:
                best, chosen = worth, width
        return chosen


def _falling(values: Doubles | Sequence[float]) -> Ints:
    """Indices by falling value, ties in order."""
    return np.argsort(-np.asarray(values), kind="stable")
