"""Several proposers, one tree: a further draft tree joined to a policy's candidates."""

from __future__ import annotations

from dataclasses import dataclass

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
    old = len(candidates)
    node_of = {0: 0}  # node of the tree -> candidate, old or new
    log_probs = candidates.log_probs.copy()
    tokens: list[int] = []  # of new candidates
    parents: list[int] = []
    added: list[float] = []  # their log_probs
    known: dict[tuple[int, int], int] = {}  # (parent, token) of new candidates
    for node in range(1, len(tree)):
        parent, token = node_of[int(tree.parents[node])], int(tree.tokens[node])
        confidence = tree.log_values[node] - tree.log_values[tree.parents[node]]
        same = np.flatnonzero((candidates.parents == parent) & (candidates.tokens == token))
        # Where a proposer pads with confidence zero, one token may stand there twice: the first is the real one.
        if len(same):
            node_of[node] = int(same[0])
            log_probs[same[0]] = max(log_probs[same[0]], confidence)
        elif (parent, token) in known:
            node_of[node] = known[parent, token]
            added[node_of[node] - old] = max(added[node_of[node] - old], float(confidence))
        else:
            node_of[node] = known[parent, token] = old + len(tokens)
            tokens.append(token)
            parents.append(parent)
            added.append(float(confidence))
    union, place = _in_levels(candidates, log_probs, tokens, parents, added)
    return Union(union, place[:old], place[[node_of[node] for node in range(len(tree))]])


def _in_levels(
    candidates: Candidates, log_probs: Floats, tokens: list[int], parents: list[int], added: list[float]
) -> tuple[Candidates, Ints]:
    """Old candidates with their new ``log_probs``, and new ones, in level order; path values and ranks afresh.
    Also where each of them, old before new, went."""
    all_parents = np.concatenate([candidates.parents, np.array(parents, np.int64)])
    widths = np.diff(candidates.levels)
    depths = np.concatenate([np.repeat(np.arange(len(widths)), widths), np.zeros(len(parents), np.int64)])
    ranks = np.concatenate([candidates.ranks, np.zeros(len(parents), np.int64)])
    siblings: dict[int, int] = {}
    for node, parent in enumerate(parents, start=len(candidates)):
        depths[node] = depths[parent] + 1  # parents come first
        if parent not in siblings:
            siblings[parent] = int((candidates.parents == parent).sum())
        ranks[node] = siblings[parent]
        siblings[parent] += 1

    order = np.argsort(depths, kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    levels = (0, *np.cumsum(np.bincount(depths)).tolist())
    log_probs = np.concatenate([log_probs, np.array(added, np.float32)])[order]
    new_parents = place[all_parents[order]]
    new_parents[0] = -1
    log_values = log_probs.copy()
    for depth in range(1, len(levels) - 1):
        level = slice(levels[depth], levels[depth + 1])
        log_values[level] = log_values[new_parents[level]] + log_probs[level]
    union = Candidates(
        tokens=np.concatenate([candidates.tokens, np.array(tokens, np.int64)])[order],
        parents=new_parents,
        log_probs=log_probs,
        log_values=log_values,
        ranks=ranks[order],
        levels=levels,
    )
    return union, place
