"""The best tree whose shape is fixed: Sequoia's dynamic programme (arXiv 2402.12374, section 4.1).

What is known beforehand is position-wise acceptance: p[d][r] is how often the child of rank r is the accepted one,
given that its parent at depth d was accepted. A node is then accepted with the product of p along its rank path, and
the expected number of accepted draft tokens of a tree is the sum of these products over its nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from eyas.costs import CostTable
from eyas.errors import InvalidInputError
from eyas.policies.static import RankPath, StaticPolicy
from eyas.tree import Doubles

AcceptanceTable = tuple[tuple[float, ...], ...]
"""p[depth][rank]; levels deeper than the last are like the last. Within a level the ranks exclude each other, so
they sum to at most 1."""


def as_acceptance(table: Sequence[float] | Sequence[Sequence[float]]) -> AcceptanceTable:
    """Check a table p[rank] or p[depth][rank] and give it its one form.

    Raises:
        InvalidInputError: an empty or ragged table, values outside [0, 1], or ranks that sum to more than 1.
    """
    try:
        array = np.atleast_2d(np.asarray(table, np.float64))
    except (TypeError, ValueError):
        array = np.zeros((0, 0))
    if array.ndim != 2 or array.size == 0:
        raise InvalidInputError(f"acceptance is a table p[rank] or p[depth][rank] of equal rows, got {table!r}")
    if not ((array >= 0) & (array <= 1)).all() or (array.sum(axis=1) > 1 + 1e-6).any():
        raise InvalidInputError(
            f"acceptance rates lie between 0 and 1 and sum to at most 1 over the ranks, got {array.tolist()}"
        )
    return tuple(tuple(row) for row in array.tolist())


def expected_accepted(template: Sequence[RankPath], table: AcceptanceTable) -> float:
    """Expected accepted draft tokens of a fixed tree; a rank the table does not know is never accepted."""
    total = 0.0
    for path in template:
        value = 1.0
        for depth, rank in enumerate(path):
            row = table[min(depth, len(table) - 1)]
            value *= row[rank] if rank < len(row) else 0.0
        total += value
    return total


def sequoia(
    acceptance: Sequence[float] | Sequence[Sequence[float]], num_draft_tokens: int, *, num_steps: int = 8, topk: int = 8
) -> StaticPolicy:
    """The fixed tree of at most ``num_draft_tokens`` nodes that is expected to have the most tokens accepted.

    Args:
        acceptance: measured p[rank] or p[depth][rank].
        num_draft_tokens: nodes, root excluded.
        num_steps: levels at most.
        topk: children per node at most.

    Raises:
        InvalidInputError: a table or bounds that cannot work.
    """
    return _Programme(as_acceptance(acceptance), num_draft_tokens, num_steps, topk).tree(num_steps, num_draft_tokens)


@dataclass(frozen=True)
class SizedTree:
    """A fixed tree and what it should bring on a machine.

    Attributes:
        policy: the tree, or None where plain decoding is faster than any.
        tokens: expected tokens per cycle, the target's own included.
        ms: milliseconds per cycle.
    """

    policy: StaticPolicy | None
    tokens: float
    ms: float

    @property
    def rate(self) -> float:
        """Expected tokens per millisecond."""
        return self.tokens / self.ms


def sequoia_for(
    acceptance: Sequence[float] | Sequence[Sequence[float]],
    costs: CostTable,
    *,
    num_draft_tokens: int = 64,
    num_steps: int = 8,
    topk: int = 8,
) -> SizedTree:
    """The fixed tree with the most expected tokens per millisecond: every size and depth within the bounds is tried.

    Sequoia's hardware-aware choice (section 4.3), with measured costs of levels and of rows in place of constants.
    """
    table = as_acceptance(acceptance)
    programme = _Programme(table, num_draft_tokens, num_steps, topk)
    best = SizedTree(None, 1.0, costs.plain_ms)
    for depth in range(1, num_steps + 1):
        for size in range(depth, num_draft_tokens + 1):
            policy = programme.tree(depth, size)
            if policy.num_draft_tokens < size:
                break  # the bounds leave no room for more nodes
            cost = costs.cycle(expanded_per_level(policy.template), size)
            tree = SizedTree(policy, 1 + expected_accepted(policy.template, table), cost)
            if tree.rate > best.rate:
                best = tree
    return best


def expanded_per_level(template: Sequence[RankPath]) -> list[int]:
    """Nodes a drafter must be run on at each level of a fixed tree, the root's first."""
    inner = {path[:-1] for path in template}
    return [sum(len(path) == depth for path in inner) for depth in range(max(map(len, template), default=0))]


class _Programme:
    """best[h][d, n]: expected accepted nodes, itself included, of the best subtree of n nodes and at most h levels
    below its root, which stands at depth d and is taken as accepted.

    One node is worth 1. Of n nodes, n - 1 are shared out among the children: a child of rank r that gets s of them
    adds p[d][r] * best[h - 1][d + 1, s]. Sharing out is a knapsack over the ranks.
    """

    def __init__(self, table: AcceptanceTable, nodes: int, num_steps: int, topk: int) -> None:
        for name, value in (("num_draft_tokens", nodes), ("num_steps", num_steps), ("topk", topk)):
            if value < 1:
                raise InvalidInputError(f"{name} must be at least 1, got {value}; for no drafting use --draft none")
        self._table = table
        self._ranks = min(topk, len(table[0]))
        self._size = nodes + 1  # the root counts here
        self._num_steps = num_steps

    @cached_property
    def _solved(self) -> tuple[dict[tuple[int, int], Doubles], dict[tuple[int, int], Any]]:
        """Values [size + 1] and, per rank, the child sizes [ranks, size] of the best shares, by (levels left, depth).

        A tree of at most D levels below the root is (D, 0), its children are (D - 1, 1), and so on.
        """
        size = self._size
        values: dict[tuple[int, int], Doubles] = {}
        shares: dict[tuple[int, int], Any] = {}
        for levels in range(self._num_steps + 1):
            for depth in range(self._num_steps - levels + 1):
                value = np.full(size + 1, -np.inf)
                value[1] = 1.0
                if levels:
                    child = values[levels - 1, depth + 1]
                    row = self._table[min(depth, len(self._table) - 1)]
                    shared, shares[levels, depth] = _share_out(child, row[: self._ranks], size)
                    value[1:] = 1.0 + shared
                values[levels, depth] = value
        return values, shares

    def tree(self, num_steps: int, num_draft_tokens: int) -> StaticPolicy:
        """The best tree of at most these levels and nodes."""
        values, shares = self._solved
        best = 2 + int(np.argmax(values[num_steps, 0][2 : num_draft_tokens + 2]))  # ties: the smaller tree
        template: list[RankPath] = []

        def walk(path: RankPath, levels: int, size: int) -> None:
            left = size - 1
            if path:
                template.append(path)
            for rank in reversed(range(self._ranks)) if left else ():
                given = int(shares[levels, len(path)][rank, left])
                if given:
                    walk((*path, rank), levels - 1, given)
                left -= given

        walk((), num_steps, best)
        return StaticPolicy(tuple(sorted(template, key=lambda path: (len(path), path))))


def _share_out(child: Doubles, rates: Sequence[float], size: int) -> tuple[Doubles, Any]:
    """The best way to share n = 0 .. size - 1 nodes among children: (values [size], sizes [ranks, size]).

    Args:
        child: [size + 1] value of a child's subtree by nodes.
        rates: acceptance by rank.
        size: one more than the nodes to share out at most.
    """
    value = np.full(size, -np.inf)
    value[0] = 0.0
    sizes = np.zeros((len(rates), size), np.int64)
    # spare[n, s]: what remains for better ranks when this one gets s of n nodes; -1 where s > n.
    spare = np.arange(size)[:, None] - np.arange(size)[None, :]
    for rank, rate in enumerate(rates):
        possible = np.isfinite(child[:size])
        gain = np.where(possible, rate * np.where(possible, child[:size], 0.0), -np.inf)
        gain[0] = 0.0  # no such child
        total = np.where(spare >= 0, value[spare] + gain[None, :], -np.inf)  # [n, s]
        sizes[rank] = total.argmax(axis=1)
        value = total.max(axis=1)
    return value, sizes
