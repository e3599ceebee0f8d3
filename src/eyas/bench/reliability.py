"""What a drafter's confidence is worth, as numbers: reliability curves, calibration errors, acceptance by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyas.calibration import IDENTITY, Calibration
from eyas.policies.base import TreePolicy
from eyas.replay import Moment, Recording
from eyas.tree import Bools, Doubles, Ints

BINS = 20
"""Bins of equal width that a reliability curve has."""


@dataclass(frozen=True)
class Observations:
    """Nodes that were drafted at places whose continuation is known, one row each.

    Attributes:
        depths: [n] 1 for the root's children.
        ranks: [n] place among its siblings, 0 the most confident.
        confidences: [n] what the drafter gave the node, given its parent.
        values: [n] what it gave the whole path.
        right: [n] whether the answer went on along the whole path.
        asked: [n] whether the parent was right, so that a target would have been asked about the node.
        kept: [n] whether the policy sends it to the target.
    """

    depths: Ints
    ranks: Ints
    confidences: Doubles
    values: Doubles
    right: Bools
    asked: Bools
    kept: Bools

    def __getitem__(self, which: Bools) -> Observations:
        return Observations(**{name: column[which] for name, column in vars(self).items()})


def observe(recording: Recording, policy: TreePolicy, calibration: Calibration = IDENTITY) -> Observations:
    """Every drafted node of a recording.

    Args:
        policy: its choice makes ``kept``; with a calibration of its own, that of a calibrated drafter.
        calibration: applied to the path values; confidences follow as ratios of path values.
    """
    parts = [_of_moment(moment, policy, calibration) for moment in recording.moments]
    if not parts:
        none, never = np.zeros(0), np.zeros(0, bool)
        return Observations(np.zeros(0, np.int64), np.zeros(0, np.int64), none, none, never, never, never)
    return Observations(**{name: np.concatenate([vars(part)[name] for part in parts]) for name in vars(parts[0])})


def _of_moment(moment: Moment, policy: TreePolicy, calibration: Calibration) -> Observations:
    candidates = moment.candidates
    deepest = min(len(moment.rest), candidates.depth)
    judged = np.zeros(len(candidates), bool)
    judged[1 : candidates.levels[deepest + 1]] = True
    judged &= np.isfinite(candidates.log_values)
    right = np.zeros(len(candidates), bool)
    right[[0, *moment.path]] = True
    kept = np.zeros(len(candidates), bool)
    kept[policy.select(candidates)] = True
    values = candidates.acceptance_by(calibration)
    above = values[candidates.parents]
    with np.errstate(under="ignore"):
        # With the identity the drafter's own number, exactly.
        own = np.exp(candidates.log_probs, dtype=np.float64)
        confidences = (
            np.divide(values, above, out=np.zeros_like(values), where=above > 0) if calibration.levels else own
        )
    depths = np.repeat(np.arange(candidates.depth + 1), np.diff(candidates.levels))
    every = Observations(depths, candidates.ranks, confidences, values, right, right[candidates.parents], kept)
    return every[judged]


def curve(promised: Doubles, right: Bools) -> dict[str, Any]:
    """A reliability curve over bins of equal width.

    Returns:
        ``count``; ``promised`` and ``right``, sums over all nodes; ``ece``, the expected calibration error: the mean
        distance, over nodes, between a bin's mean promise and its share of right nodes (None without nodes); ``bins``
        that have nodes, each ``{"promised": mean, "right": share, "count": n}``.
    """
    which = np.minimum((promised * BINS).astype(np.int64), BINS - 1)
    counts = np.bincount(which, minlength=BINS)
    sums = np.bincount(which, promised, BINS)
    hits = np.bincount(which, right, BINS)
    some = counts > 0
    total = int(counts.sum())
    return {
        "count": total,
        "promised": float(sums.sum()),
        "right": int(hits.sum()),
        "ece": float(np.abs(sums - hits).sum() / total) if total else None,
        "bins": [
            {"promised": float(p / n), "right": float(h / n), "count": int(n)}
            for p, h, n in zip(sums[some], hits[some], counts[some], strict=True)
        ],
    }


def curves(observed: Observations) -> dict[str, Any]:
    """Of confidences: over all nodes whose parent was right, per level, per rank. Of path values: over the nodes that
    the policy keeps, and per level. Lists begin with level 1 and rank 0."""
    asked, kept = observed[observed.asked], observed[observed.kept]
    levels = range(1, int(observed.depths.max(initial=0)) + 1)
    ranks = range(int(observed.ranks.max(initial=-1)) + 1)

    def of_confidence(which: Bools) -> dict[str, Any]:
        return curve(asked.confidences[which], asked.right[which])

    def of_value(which: Bools) -> dict[str, Any]:
        return curve(kept.values[which], kept.right[which])

    return {
        "confidence": {
            "all": of_confidence(np.ones(len(asked.right), bool)),
            "levels": [of_confidence(asked.depths == level) for level in levels],
            "ranks": [of_confidence(asked.ranks == rank) for rank in ranks],
        },
        "path": {
            "all": of_value(np.ones(len(kept.right), bool)),
            "levels": [of_value(kept.depths == level) for level in levels],
        },
    }


def positions(observed: Observations) -> list[list[dict[str, int]]]:
    """Per level and rank: how often a node there had a right parent (``asked``), and was right itself (``right``)."""
    asked = observed[observed.asked]
    levels, ranks = int(observed.depths.max(initial=0)), int(observed.ranks.max(initial=-1)) + 1
    table = np.zeros((levels, ranks, 2), np.int64)
    np.add.at(table[:, :, 0], (asked.depths - 1, asked.ranks), 1)
    np.add.at(table[:, :, 1], (asked.depths - 1, asked.ranks), asked.right)
    return [[{"asked": int(n), "right": int(hits)} for n, hits in level] for level in table]


def joined(recordings: Sequence[Recording]) -> Recording:
    """Several recordings of the same width as one."""
    answers = tuple(answer for recording in recordings for answer in recording.answers)
    return Recording(answers, recordings[0].num_steps, recordings[0].topk)
