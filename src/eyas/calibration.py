"""Confidence against acceptance: what a drafter's path values are worth, and a map that makes them honest."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from eyas.checkpoints.sidecar import Sidecar
from eyas.costs import monotone
from eyas.errors import CheckpointError, InvalidInputError
from eyas.tree import Bools, Doubles, DraftTree, Floats, Ints

CALIBRATION = Sidecar("calibration.json", "a calibration", "eyas calibrate")
"""Lies beside a head's weights; a part is a list of maps, one per level."""

ROOT = np.ones(1)
"""[1] probability of acceptance of a root."""

_NONE = np.zeros(0)


@dataclass(frozen=True)
class Bin:
    """Nodes of similar path value at one level.

    Attributes:
        value: their mean path value, which is what the drafter promises.
        accepted: the share that was accepted.
        count: how many.
    """

    value: float
    accepted: float
    count: int


@dataclass(frozen=True)
class LevelMap:
    """A non-decreasing, piecewise linear map of log path values at one level.

    Below the first knot values keep their ratio to it; above the last one they stay at it.

    Attributes:
        promised: log values of the knots, increasing.
        observed: log acceptance at each, non-decreasing, at most 0.
    """

    promised: tuple[float, ...]
    observed: tuple[float, ...]

    def __post_init__(self) -> None:
        x, y = np.asarray(self.promised), np.asarray(self.observed)
        good = len(x) == len(y) > 0 and np.isfinite([*x, *y]).all()
        if not good or (np.diff(x) <= 0).any() or (np.diff(y) < 0).any() or y[-1] > 0:
            raise InvalidInputError(
                "a calibration map needs increasing log values and as many non-decreasing log acceptances <= 0, got "
                f"{list(self.promised)} and {list(self.observed)}"
            )

    def __call__(self, log_values: Floats | Doubles) -> Doubles:
        mapped: Doubles = np.interp(log_values, *self._knots)
        return mapped + np.minimum(log_values - self.promised[0], 0.0)

    def inverse(self, log_acceptance: float) -> float:
        """The smallest log value that maps to a log acceptance; the last knot where none does."""
        # One number at a time, as it is needed: for a dozen numpy takes longer.
        place = bisect_left(self.observed, log_acceptance)
        if place == 0:
            return self.promised[0] + log_acceptance - self.observed[0]
        if place == len(self.observed):
            return self.promised[bisect_left(self.observed, self.observed[-1])]
        (low, high), (left, right) = self.observed[place - 1 : place + 1], self.promised[place - 1 : place + 1]
        return left + (right - left) * (log_acceptance - low) / (high - low)

    @cached_property
    def _knots(self) -> tuple[Doubles, Doubles]:
        return np.asarray(self.promised), np.asarray(self.observed)


@dataclass(frozen=True)
class Calibration:
    """How log path values become log probabilities of acceptance.

    Greedy and sampled answers need maps of their own: greedy accepts the target's likeliest token and nothing else, so
    a sure drafter is right more often than it says; sampled answers accept a token as often as the target gives it.

    Attributes:
        levels: one map per level below the root; deeper levels use the last one, an empty tuple changes nothing.
    """

    levels: tuple[LevelMap, ...] = ()

    def acceptance(self, log_values: Floats, parents: Ints, ends: Sequence[int], known: Doubles = ROOT) -> Doubles:
        """Probability that each node of some candidates is accepted: 1 for the root, never more than its parent's.

        Args:
            log_values: [C] float32 log path values, level by level, the root's first.
            parents: [C] int64 indices of their parents.
            ends: where each level begins, and C.
            known: what this calibration says of the first levels, the root's at least.

        Returns:
            [C] float64, ``known`` first.
        """
        if not self.levels:
            values: Doubles = np.exp(log_values, dtype=np.float64)
            return values
        deepest, fresh = len(self.levels), range(ends.index(len(known)), len(ends) - 1)
        logs = [_NONE]
        for depth in fresh:
            if depth >= deepest:  # the last map serves its own level and all below at once
                logs.append(self.levels[-1](log_values[ends[depth] :]))
                break
            logs.append(self.levels[depth - 1](log_values[ends[depth] : ends[depth + 1]]))
        values = np.concatenate([known, np.exp(np.concatenate(logs))])
        for depth in fresh:
            level = slice(ends[depth], ends[depth + 1])
            values[level] = np.minimum(values[level], values[parents[level]])
        return values

    def promised(self, tree: DraftTree) -> DraftTree:
        """A tree whose path values are probabilities of acceptance, such as n-grams with measured hit rates, in the
        drafter's own terms: with the path values that this calibration takes for those probabilities."""
        if not self.levels:
            return tree
        depths, values = tree.depths.tolist(), tree.log_values.tolist()
        for node, parent in enumerate(tree.parents[1:].tolist(), start=1):
            level = self.levels[min(depths[node], len(self.levels)) - 1]
            values[node] = min(level.inverse(values[node]), values[parent])
        return DraftTree(tree.tokens, tree.parents, np.array(values, np.float32))

    @classmethod
    def fit(cls, levels: Sequence[tuple[Floats, Bools]], bins: int = 12) -> Calibration:
        """From observations per level: log path values [n] and whether each node was accepted [n].

        A level without observations uses the map of the level above; without any at level 1 nothing is changed.
        """
        maps: list[LevelMap] = []
        for values, accepted in levels:
            fitted = _fit(reliability(values, accepted, bins))
            if fitted is None and not maps:
                break
            maps.append(fitted or maps[-1])
        return cls(tuple(maps))

    @classmethod
    def from_dict(cls, levels: Sequence[Mapping[str, Any]]) -> Calibration:
        """The inverse of ``as_dict``."""
        try:
            return cls(tuple(LevelMap(tuple(each["promised"]), tuple(each["observed"])) for each in levels))
        except (KeyError, TypeError) as error:
            raise InvalidInputError(f"not a calibration: {error!r}") from None

    def as_dict(self) -> list[dict[str, list[float]]]:
        return [{"promised": list(each.promised), "observed": list(each.observed)} for each in self.levels]


IDENTITY = Calibration()
"""Path values as the drafter gives them."""


def read_calibration(head: Path, *, greedy: bool) -> Calibration:
    """The maps stored with the head in directory ``head``; ``IDENTITY`` where there are none for such answers.

    Raises:
        CheckpointError: a file that is not a calibration.
    """
    try:
        return Calibration.from_dict(CALIBRATION.read(head, greedy=greedy) or [])
    except InvalidInputError as error:
        raise CheckpointError(f"{head / CALIBRATION.file}: {error}") from None


def reliability(log_values: Floats, accepted: Bools, bins: int = 12) -> list[Bin]:
    """Bins with an equal share of the *probability mass*, by falling value.

    Most candidates are worthless; bins of equal count would all lie among them. Cut by mass, each bin stands for as
    many expected acceptances as any other, and the few nodes that decide are told apart.

    Args:
        log_values: [n] log path values; -inf is left out.
        accepted: [n] what became of them.
        bins: how many at most.
    """
    known = np.isfinite(log_values)
    order = np.argsort(-log_values[known], kind="stable")
    values = np.exp(log_values[known][order], dtype=np.float64)
    hits = accepted[known][order]
    if not len(values):
        return []
    mass = np.cumsum(values)
    which = np.minimum((mass / mass[-1] * bins - 1e-9).astype(np.int64), bins - 1)
    found = []
    for number in np.unique(which):
        inside = which == number
        found.append(Bin(float(values[inside].mean()), float(hits[inside].mean()), int(inside.sum())))
    return found


def _fit(found: Sequence[Bin]) -> LevelMap | None:
    """A map through the bins, pooled until it never falls. A bin is shrunk towards its own promise by one
    observation, so that none is worth nothing for sure."""
    rising = [each for each in reversed(found) if each.value > 0]
    if not rising:
        return None
    shrunk = [(each.accepted * each.count + each.value) / (each.count + 1) for each in rising]
    pooled = monotone(shrunk, [float(each.count) for each in rising])
    knots: dict[float, float] = {}
    for each, observed in zip(rising, pooled, strict=True):
        # Bins of one value differ by rounding; they make one knot.
        key = max(float(np.log(each.value)), max(knots, default=-np.inf))
        knots[key] = float(np.log(min(observed, 1.0)))
    return LevelMap(tuple(knots), tuple(knots.values()))
