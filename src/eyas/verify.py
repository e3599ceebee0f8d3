"""Which draft tokens survive. Pure functions: the tree, the target's word on its nodes, and randomness come in.

Both verifiers are lossless for any tree whose children were *chosen* without looking at the draws made here: top-k
lists, reranked trees, fixed templates, oracles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from eyas.tree import DraftTree, Floats


@dataclass(frozen=True)
class Acceptance:
    """The outcome of one cycle.

    Attributes:
        path: accepted node indices from the root (always there) to the last accepted node.
        next_token: the token the target itself adds: *recovered* after a rejection, else *bonus*.
        recovered: whether a child of the last accepted node was tried and rejected.
    """

    path: tuple[int, ...]
    next_token: int
    recovered: bool


def verify_greedy(tree: DraftTree, choice: Callable[[int], int]) -> Acceptance:
    """Follow the target's own choices as far as the tree has them.

    Args:
        tree: N nodes.
        choice: node -> the token plain greedy decoding would take after that node's path.
    """
    parents = tree.parents.tolist()
    children: dict[tuple[int, int], int] = {}  # (parent, token) -> the first such child
    for node, key in enumerate(zip(parents, tree.tokens.tolist(), strict=True)):
        children.setdefault(key, node)
    path = [0]
    while True:
        token = choice(path[-1])
        accepted = children.get((path[-1], token))
        if accepted is None:
            return Acceptance(tuple(path), token, recovered=path[-1] in parents)
        path.append(accepted)


def verify_sampling(tree: DraftTree, distribution: Callable[[int], Floats], rng: np.random.Generator) -> Acceptance:
    """Accept so that every committed token has exactly the target's distribution.

    Each child is a point-mass proposal. At a node with target distribution p the distinct children are tried in
    order: child x is accepted with probability p(x) / (mass not yet tried); a rejected child's mass is removed.
    When no child is left, the token is drawn from what remains. Summed over the ways to get there, token x comes
    out with probability p(x), child or not.

    Args:
        tree: N nodes.
        distribution: node -> [V] processed target probabilities after that node's path (non-negative; they are
            normalised here, in float64).
        rng: the only source of randomness.
    """
    path = [0]
    while True:
        weights = distribution(path[-1]).astype(np.float64)  # [V]
        children = tree.children[path[-1]]
        accepted = None
        remaining = weights.sum()
        tried: set[int] = set()
        for child in children:
            token = int(tree.tokens[child])
            if token in tried:
                continue
            tried.add(token)
            if rng.random() * remaining < weights[token]:
                accepted = child
                break
            weights[token] = 0.0
            # Summed afresh, not subtracted: no rounding may leave mass where there is none.
            remaining = weights.sum()
        if accepted is None:
            return Acceptance(tuple(path), sample(weights, rng), recovered=bool(children))
        path.append(accepted)


def sample(weights: Floats | np.ndarray[tuple[int], np.dtype[np.float64]], rng: np.random.Generator) -> int:
    """One index drawn in proportion to ``weights`` [V]; an index of weight zero is never drawn."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
    # A draw so near 1 that its product rounds up to the whole mass belongs to the last index that has any.
    return min(index, int(np.flatnonzero(weights)[-1]))
