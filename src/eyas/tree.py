"""The draft tree: what a drafter proposes and a target verifies in one pass.

Words: the *root* is the last committed token, node 0 of every tree; *draft tokens* are all other nodes;
a node's *path value* is the product of drafter confidences from the root down to it, kept here as a sum
of float32 log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from eyas.errors import InvalidInputError

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Proposal:
    """What the children of one node were drawn from, one after the other, none twice.

    Attributes:
        weights: [D] float32 >= 0, the distribution of the first draw.
        token_ids: [D] int64 the tokens that the weights are of; None: all ids, in order.
        tokens: every token drawn, in order, whether it is in the tree or not.
        places: their indices into ``weights``.
    """

    weights: Floats
    token_ids: Ints | None
    tokens: Sequence[int]
    places: Sequence[int]


@dataclass(frozen=True)
class DraftTree:
    """N nodes, parents before children. Depths, mask and positions are derived, never stored twice.

    Attributes:
        tokens: [N] int64, the root's token first.
        parents: [N] int64, ``parents[0] == -1`` and ``0 <= parents[i] < i``.
        log_values: [N] float32, log of the path value V; 0 for the root.
        proposals: node -> what its children were drawn from; nodes that are not there have children that were chosen.
    """

    tokens: Ints
    parents: Ints
    log_values: Floats
    proposals: Mapping[int, Proposal] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if n == 0 or self.tokens.shape != self.parents.shape or self.tokens.shape != self.log_values.shape:
            raise InvalidInputError(
                f"a draft tree needs tokens, parents and log_values of one length >= 1, got shapes "
                f"{self.tokens.shape}, {self.parents.shape}, {self.log_values.shape}"
            )
        parents = self.parents.tolist()  # a dozen numbers: Python is done before numpy has begun
        if parents[0] != -1 or not all(0 <= parent < node for node, parent in enumerate(parents[1:], start=1)):
            raise InvalidInputError(f"parents must start with -1 and point to earlier nodes, got {parents}")

    @classmethod
    def root_only(cls, token: int) -> DraftTree:
        """A tree without draft tokens: verifying it is plain decoding."""
        return cls(np.array([token], np.int64), np.array([-1], np.int64), np.zeros(1, np.float32))

    @classmethod
    def chain(cls, tokens: list[int]) -> DraftTree:
        """A tree of width one: ``tokens[0]`` is the root, each further token the child of the one before."""
        n = len(tokens)
        return cls(np.asarray(tokens, np.int64), np.arange(-1, n - 1), np.zeros(n, np.float32))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_draft_tokens(self) -> int:
        return len(self) - 1

    @cached_property
    def depths(self) -> Ints:
        """[N] int64: 0 for the root, parent's depth + 1 below."""
        depths = [0]
        for parent in self.parents[1:].tolist():
            depths.append(depths[parent] + 1)
        return np.array(depths, np.int64)

    @cached_property
    def ancestor_mask(self) -> Bools:
        """[N, N] bool: row i is True at i and at each of its ancestors, and nowhere else.

        Built by pointer doubling: after step s every row knows its nearest 2**s ancestors.
        """
        n = len(self)
        mask = np.eye(n, dtype=bool)
        jump = self.parents.copy()
        while (live := jump >= 0).any():
            mask[live] |= mask[jump[live]]
            jump[live] = jump[jump[live]]
        return mask

    @cached_property
    def children(self) -> list[list[int]]:
        """Children of each node in node order, the order in which a verifier tries them."""
        lists: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                lists[parent].append(node)
        return lists

    def path_to(self, node: int) -> list[int]:
        """Node indices from the root to ``node``, both included."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = int(self.parents[node])
        return path[::-1]

    def is_chain(self) -> bool:
        """True when every node is the child of the node before it."""
        return bool((self.parents == np.arange(-1, len(self) - 1)).all())
