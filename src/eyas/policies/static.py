"""Trees whose shape is fixed before the context is known: chains and templates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index

import numpy as np

from eyas.errors import InvalidInputError
from eyas.policies.base import Candidates
from eyas.tree import Ints

RankPath = tuple[int, ...]
"""A node named by the ranks along its path: (0, 2) is the third best child of the best child of the root."""


def _paths(words: str) -> tuple[RankPath, ...]:
    """Rank paths written as words of one digit a level."""
    return tuple(tuple(map(int, word)) for word in words.split())


EAGLE1_TEMPLATE = _paths("0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001")
"""The 25 draft tokens of EAGLE-1's tree (arXiv 2401.15077, figure 7, in the shape its authors released)."""


@dataclass(frozen=True)
class StaticPolicy:
    """A fixed template, the same in every cycle.

    Attributes:
        template: rank paths of the nodes; every path's prefixes must be there too, each once.

    Raises:
        InvalidInputError: an empty template, a negative rank, a repeated path, or a path whose parent is missing.
    """

    template: tuple[RankPath, ...]

    def __post_init__(self) -> None:
        known = set(self.template)
        if not known:
            raise InvalidInputError("a static tree needs at least one node; for no drafting use --draft none")
        if len(known) < len(self.template):
            raise InvalidInputError("a static tree names a node twice; every rank path may appear once")
        for path in known:
            if not path or min(path) < 0:
                raise InvalidInputError(f"rank paths are non-empty lists of ranks >= 0, got {list(path)}")
            if len(path) > 1 and path[:-1] not in known:
                raise InvalidInputError(
                    f"the static tree has node {list(path)} but not its parent {list(path[:-1])}; add the parent"
                )

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> StaticPolicy:
        """Any user-given template, such as ``[[0], [1], [0, 0]]`` read from JSON."""
        try:
            template = tuple(tuple(index(rank) for rank in path) for path in paths)
        except TypeError as error:
            raise InvalidInputError(
                f"a static tree is a list of lists of ranks such as [[0], [1], [0, 0]]: {error}"
            ) from None
        return cls(template)

    @classmethod
    def eagle1(cls, num_draft_tokens: int | None = None) -> StaticPolicy:
        """EAGLE-1's tree, cut to ``num_draft_tokens`` where a smaller budget is asked for.

        The cut keeps the nodes of smallest sum of (rank + 1): the order of path value when every rank and every
        level costs the same factor, which is all a tree that ignores the context can know.
        """
        by_cost = sorted(EAGLE1_TEMPLATE, key=lambda path: sum(path) + len(path))
        budget = len(by_cost) if num_draft_tokens is None else max(0, num_draft_tokens)
        return cls(tuple(by_cost[:budget]))

    @classmethod
    def chain(cls, num_steps: int) -> StaticPolicy:
        """One token a level: the tree of width one."""
        return cls(tuple((0,) * depth for depth in range(1, num_steps + 1)))

    @property
    def num_steps(self) -> int:
        return max(map(len, self.template))

    @property
    def topk(self) -> int:
        return 1 + max(max(path) for path in self.template)

    @property
    def num_draft_tokens(self) -> int:
        return len(self.template)

    @cached_property
    def _plan(self) -> tuple[tuple[Ints, ...], Ints]:
        """Candidate indices to expand at each depth, and to verify at the end.

        With ``topk`` children per expanded node the layout of the candidates is the same in every cycle, so both
        are known beforehand.
        """
        known = set(self.template)
        inner = {path[:-1] for path in known}
        expansions: list[Ints] = []
        selected: list[int] = []
        level: list[tuple[int, RankPath]] = [(0, ())]  # (candidate index, rank path)
        offset = 1
        while expanded := [(node, path) for node, path in level if path in inner]:
            expansions.append(np.array([node for node, _ in expanded], np.int64))
            paths = [(*path, rank) for _, path in expanded for rank in range(self.topk)]
            level = list(enumerate(paths, offset))
            selected += [node for node, path in level if path in known]
            offset += len(level)
        return tuple(expansions), np.array(selected, np.int64)

    def expand(self, candidates: Candidates) -> Ints:
        return self._plan[0][candidates.depth]

    def select(self, candidates: Candidates) -> Ints:
        selected = self._plan[1]
        return selected[selected < len(candidates)]
