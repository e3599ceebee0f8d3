"""Several proposers, one tree: a further draft tree joined to a policy's candidates."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from eyas.policies.base import Candidates
from eyas.tree import DraftTree, Floats, Ints


@dataclass(frozen=True)
class Union:
    """Candidates joined with a tree.

    Attributes:
        candidates: all nodes of both, each once.
        own: [C] int64 where each of the old candidates went.
        grafted: [N] int64 where each node of the tree went.
    """

    candidates: Candidates
    own: Ints
    grafted: Ints


def graft(candidates: Candidates, tree: DraftTree) -> Union:
    """The union of ``candidates`` and ``tree``, both below the same root.

    A node of the tree that names the same token under the same parent as a candidate is that candidate. Its
    confidence is the larger of the two: agreement never makes a guess cheaper. Path values follow from confidences, so
    V still never grows along a path. Within a level the candidates come first, in their order, then the tree's nodes.
    """
    tokens, parents = candidates.tokens.tolist(), candidates.parents.tolist()
    log_probs, ranks = candidates.log_probs.tolist(), candidates.ranks.tolist()
    widths = np.diff(candidates.levels)
    depths = np.repeat(np.arange(len(widths)), widths).tolist()
    last_rank = dict(zip(parents, ranks, strict=True))  # of each node's children
    # (parent, token) -> its place. From behind: padding may repeat a token, the first is the real one.
    known = dict(zip(zip(parents[::-1], tokens[::-1], strict=True), range(len(tokens) - 1, -1, -1), strict=True))
    node_of = [0]  # node of the tree -> its place
    confidences = (tree.log_values[1:] - tree.log_values[tree.parents[1:]]).tolist()
    for above, token, confidence in zip(tree.parents[1:].tolist(), tree.tokens[1:].tolist(), confidences, strict=True):
        parent = node_of[above]
        place = known.setdefault((parent, token), len(tokens))
        node_of.append(place)
        if place < len(tokens):
            log_probs[place] = max(log_probs[place], confidence)
            continue
        tokens.append(token)
        parents.append(parent)
        log_probs.append(confidence)
        last_rank[parent] = last_rank.get(parent, -1) + 1
        ranks.append(last_rank[parent])
        depths.append(depths[parent] + 1)

    order = np.argsort(depths, kind="stable")
    now = np.empty(len(order), np.int64)  # where each place went
    now[order] = np.arange(len(order))
    new_parents = now[np.array(parents)[order]]
    new_parents[0] = -1
    levels = (0, *np.cumsum(np.bincount(depths)).tolist())
    new_log_probs = np.array(log_probs, np.float32)[order]
    union = Candidates(
        tokens=np.array(tokens)[order],
        parents=new_parents,
        log_probs=new_log_probs,
        log_values=_path_values(new_log_probs, new_parents, levels),
        ranks=np.array(ranks)[order],
        levels=levels,
    )
    return Union(union, now[: len(candidates)], now[node_of])


def _path_values(log_probs: Floats, parents: Ints, levels: tuple[int, ...]) -> Floats:
    """[C] sums of ``log_probs`` from the root down."""
    values = log_probs.copy()
    for start, stop in pairwise(levels[1:]):
        values[start:stop] += values[parents[start:stop]]
    return values
