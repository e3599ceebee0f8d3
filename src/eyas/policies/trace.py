"""Watching a policy decide, without changing what it decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from eyas.policies.base import Candidates, TreePolicy
from eyas.tree import Ints


@dataclass
class PolicyTrace:
    """A policy that remembers the cycle it decided: what there was to choose from, what it chose, how long it took.

    Attributes:
        policy: decides; every call is passed on.
        candidates: all nodes of the cycle, None before the first selection.
        expanded: candidate indices the drafter was run on.
        kept: candidate indices sent to the target, root excluded.
        seconds: time spent in the policy.
    """

    policy: TreePolicy
    candidates: Candidates | None = None
    expanded: list[int] = field(default_factory=list)
    kept: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    seconds: float = 0.0
    _widths: list[int] = field(default_factory=list)

    @property
    def widths(self) -> tuple[int, ...]:
        """Nodes the drafter was run on, by level, the root's first."""
        return tuple(self._widths)

    @property
    def num_steps(self) -> int:
        return self.policy.num_steps

    @property
    def topk(self) -> int:
        return self.policy.topk

    @property
    def num_draft_tokens(self) -> int:
        return self.policy.num_draft_tokens

    def expand(self, candidates: Candidates) -> Ints:
        start = perf_counter()
        chosen = self.policy.expand(candidates)
        self.seconds += perf_counter() - start
        if len(chosen):  # all of one level
            self.expanded += chosen.tolist()
            self._widths.append(len(chosen))
        return chosen

    def select(self, candidates: Candidates) -> Ints:
        start = perf_counter()
        self.candidates, self.kept = candidates, self.policy.select(candidates)
        self.seconds += perf_counter() - start
        return self.kept
