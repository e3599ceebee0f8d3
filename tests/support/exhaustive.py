"""A random generator that takes every turn: runs code once per outcome and tells each outcome's exact probability.

``Rng.random()`` is a uniform number that is not drawn but kept as an interval. Only when the code compares it with
something does it matter on which side it lies: then the run splits, and both sides are explored, each with its own
part of the interval. The code under test runs unchanged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from fractions import Fraction
from functools import cache
from math import prod
from typing import TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class Rng:
    """Replays ``decisions``, then answers every further open question with yes and notes that it did."""

    def __init__(self, decisions: list[bool]) -> None:
        self._decisions = decisions
        self._asked = 0
        self._uniforms: list[Uniform] = []

    def random(self) -> Uniform:
        self._uniforms.append(Uniform(self))
        return self._uniforms[-1]

    def decide(self) -> bool:
        """The answer to a question that is open."""
        if self._asked == len(self._decisions):
            self._decisions.append(True)
        self._asked += 1
        return self._decisions[self._asked - 1]

    @property
    def draws(self) -> int:
        return len(self._uniforms)

    @property
    def probability(self) -> Fraction:
        """Of this run: all that is known of its uniform numbers."""
        return prod((uniform.high - uniform.low for uniform in self._uniforms), start=Fraction(1))


class Uniform:
    """A number somewhere between ``low`` and ``high``, times a factor."""

    def __init__(self, rng: Rng) -> None:
        self._rng = rng
        self._factor = 1.0
        self.low, self.high = Fraction(0), Fraction(1)

    def __mul__(self, factor: float) -> Uniform:
        assert self._factor == 1.0, "one factor is enough"
        self._factor = float(factor)
        return self

    def __lt__(self, other: float | Uniform) -> bool:
        if isinstance(other, Uniform):
            assert other is self  # numpy's binary search begins by comparing the needle with itself
            return False
        threshold = _ratio(float(other), self._factor)
        if threshold >= self.high:
            return True
        if threshold <= self.low:
            return False
        below = self._rng.decide()
        if below:
            self.high = threshold
        else:
            self.low = threshold
        return below

    def __gt__(self, other: float | Uniform) -> bool:
        return other is not self and not self < other  # other equalities have probability zero


@cache
def _ratio(value: float, factor: float) -> Fraction:
    return Fraction(value) / Fraction(factor)


def outcomes(run: Callable[[Rng], T]) -> Iterator[tuple[T, Fraction]]:
    """Every way ``run`` can go, with its probability; the same result may come up in several ways."""
    decisions: list[bool] = []
    while True:
        rng = Rng(decisions)
        yield run(rng), rng.probability
        while decisions and not decisions[-1]:
            decisions.pop()
        if not decisions:
            return
        decisions[-1] = False


def distribution(run: Callable[[Rng], K]) -> dict[K, Fraction]:
    """The exact distribution of what ``run`` returns."""
    total: defaultdict[K, Fraction] = defaultdict(Fraction)
    for result, probability in outcomes(run):
        total[result] += probability
    assert sum(total.values()) == 1
    return dict(total)
