"""EAGLE-2's context-aware tree: expansion and reranking (arXiv 2406.16858, section 4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eyas.calibration import IDENTITY, Calibration
from eyas.errors import InvalidInputError
from eyas.policies.base import Candidates
from eyas.tree import Doubles, Floats, Ints


@dataclass(frozen=True)
class DynamicPolicy:
    """Expand the ``topk`` most valuable nodes of each level, then keep the ``num_draft_tokens`` most valuable of all.

    Attributes:
        num_steps: levels below the root, one drafter pass each.
        topk: nodes expanded per level and children per expanded node.
        num_draft_tokens: nodes verified, root excluded.
        value: expand by path value V; False expands by the node's own confidence (ablation).
        rerank: keep the nodes of largest V; False keeps each level's ``topk`` best, shallow levels first and the
            best of a level first, until the budget is spent (ablation).
        calibration: what path values are worth; nodes are ordered by it, equal ones by the drafter's own V.

    Raises:
        InvalidInputError: a setting below 1.
    """

    num_steps: int = 5
    topk: int = 4
    num_draft_tokens: int = 10
    value: bool = True
    rerank: bool = True
    calibration: Calibration = IDENTITY

    def __post_init__(self) -> None:
        for name in ("num_steps", "topk", "num_draft_tokens"):
            if getattr(self, name) < 1:
                raise InvalidInputError(
                    f"{name} must be at least 1, got {getattr(self, name)}; for no drafting use --draft none"
                )

    def expand(self, candidates: Candidates) -> Ints:
        return np.sort(self._level_best(candidates, candidates.depth))

    def select(self, candidates: Candidates) -> Ints:
        if self.rerank:
            # Candidates lie in level order, so a stable sort breaks ties towards the shallower, earlier node. As V
            # never grows along a path, no node can be kept without its parent.
            best = 1 + _best(candidates.log_values[1:], self.num_draft_tokens, self._worth(candidates, slice(1, None)))
        else:
            levels = range(1, candidates.depth + 1)
            best = np.concatenate([self._level_best(candidates, depth) for depth in levels] or [_NONE])
            best = best[: self.num_draft_tokens]
        return np.sort(best)

    def _level_best(self, candidates: Candidates, depth: int) -> Ints:
        """The ``topk`` best nodes of a level, best first."""
        start, stop = candidates.levels[depth : depth + 2]
        level = slice(start, stop)
        if not self.value:
            return start + _best(candidates.log_probs[level], self.topk)
        return start + _best(candidates.log_values[level], self.topk, self._worth(candidates, level))

    def _worth(self, candidates: Candidates, part: slice) -> Doubles | None:
        return candidates.acceptance_by(self.calibration)[part] if self.calibration.levels else None


_NONE = np.zeros(0, np.int64)


def _best(scores: Floats, count: int, worth: Doubles | None = None) -> Ints:
    """Indices of the ``count`` largest, by ``worth`` where given, then by score, ties towards the smaller index."""
    if worth is not None:
        return np.lexsort((-scores, -worth))[:count]
    return np.argsort(-scores, kind="stable")[:count]
