"""Watching a policy decide, without changing what it decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter

import numpy as np

from eyas.policies.base import Candidates, Watcher
from eyas.policies.merge import Union
from eyas.tree import Ints


@dataclass
class PolicyTrace(Watcher):
    """A policy that remembers the cycle it decided: what there was to choose from, what it chose, how long it took.

    Attributes:
        candidates: all nodes of the cycle, None before the first selection.
        kept: candidate indices sent to the target, root excluded.
        seconds: time spent in the policy; where a drafter knows what it would expand, that is part of drafting.
    """

    candidates: Candidates | None = None
    kept: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    seconds: float = 0.0
    _grown: Candidates | None = None  # by the drafter
    _places: Ints | None = None  # where they went among the candidates; None: nowhere else

    @property
    def widths(self) -> tuple[int, ...]:
        """Nodes the drafter was run on, by level, the root's first."""
        if self._grown is None:
            return ()
        return tuple((stop - start) // self.topk for start, stop in pairwise(self._grown.levels[1:]))

    @property
    def expanded(self) -> list[int]:
        """Candidate indices the drafter was run on."""
        if self._grown is None:
            return []
        nodes = self._grown.expanded
        chosen: list[int] = (nodes if self._places is None else self._places[nodes]).tolist()
        return chosen

    def expand(self, candidates: Candidates) -> Ints:
        start = perf_counter()
        chosen = self.policy.expand(candidates)
        self.seconds += perf_counter() - start
        return chosen

    def select(self, candidates: Candidates) -> Ints:
        start = perf_counter()
        self.candidates, self.kept = candidates, self.policy.select(candidates)
        self.seconds += perf_counter() - start
        self._grown, self._places = candidates, None
        return self.kept

    def graft(self, grown: Candidates, union: Union, kept: Ints) -> None:
        """What was chosen from is a union of the drafter's candidates ``grown`` with others."""
        self.candidates, self.kept = union.candidates, kept
        self._grown, self._places = grown, union.own
