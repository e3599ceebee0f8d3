"""Which draft tokens survive. Pure functions: the tree, the target's word on its nodes, and randomness come in.

Both verifiers are lossless for any tree whose children were *chosen* without looking at the draws made here: top-k
lists, reranked trees, fixed templates, oracles. Sampled answers are lossless for children that were *drawn*, too
(``eyas.draws``).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from math import frexp

import numpy as np

from eyas.tree import Doubles, DraftTree, Floats, Ints, Proposal

BLOCK = 256
"""Tokens whose weights are summed before one of them is looked for."""


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


def verify_known(tree: DraftTree, rest: Sequence[int]) -> Acceptance:
    """As ``verify_greedy`` where the target has spoken already: ``rest`` follows the root in its answer, and has more
    tokens than the tree has levels."""
    depths = tree.depths.tolist()
    return verify_greedy(tree, lambda node: rest[depths[node]])


def verify_sampling(tree: DraftTree, distribution: Callable[[int], Floats], rng: np.random.Generator) -> Acceptance:
    """Accept so that every committed token has exactly the target's distribution.

    At each node the children are tried in order; each trial either accepts its child or leaves a rest of the target's
    distribution to be met, and whatever comes of the rest, by further children or by drawing from it, token x comes out
    with probability p(x) in all.

    Args:
        tree: N nodes.
        distribution: node -> [V] processed target probabilities after that node's path, of any scale; a fresh array,
            which is changed here.
        rng: the only source of randomness.
    """
    path = [0]
    while True:
        node = path[-1]
        mass = Mass(distribution(node))
        children: dict[int, int] = {}  # token -> the first such child, in node order
        for child in tree.children[node]:
            children.setdefault(int(tree.tokens[child]), child)
        proposal = tree.proposals.get(node)
        tokens = children.keys()
        token = try_chosen(tokens, mass, rng) if proposal is None else try_drawn(tokens, proposal, mass, rng)
        if token is None:
            return Acceptance(tuple(path), mass.sample(rng), recovered=bool(children))
        path.append(children[token])


class Mass:
    """What one token is drawn by: weights [V], and the sums of their blocks, so that neither a draw nor taking a token
    out costs much beside the weights themselves. Sums are float64 whatever the weights are.

    Args:
        weights: [V] float32 or float64, none negative, some positive; any scale. Changed in place.
    """

    def __init__(self, weights: Floats | Doubles) -> None:
        self.weights = weights
        self._add_up()

    def _add_up(self) -> None:
        starts = np.arange(0, len(self.weights), BLOCK)
        self._sums = np.add.reduceat(self.weights, starts, dtype=np.float64)  # [blocks]

    @property
    def total(self) -> float:
        """Sum of the weights."""
        return float(self._sums.sum())

    def put(self, weights: Doubles | float, at: Ints | slice) -> None:
        """Give some tokens other weights."""
        self.weights[at] = weights
        self._add_up()

    def take_out(self, token: int) -> None:
        """Give a token weight zero."""
        self.weights[token] = 0.0
        block = token // BLOCK
        # Summed afresh, not subtracted: no rounding may leave mass where there is none.
        self._sums[block] = self.weights[block * BLOCK : (block + 1) * BLOCK].sum(dtype=np.float64)

    def sample(self, rng: np.random.Generator) -> int:
        """One index drawn in proportion to the weights; one of weight zero is never drawn."""
        ends = np.cumsum(self._sums)
        mark = rng.random() * ends[-1]
        block = int(np.searchsorted(ends, mark, side="right"))
        weights = self.weights
        if block < len(ends):
            start, before = block * BLOCK, ends[block - 1] if block else 0.0
            within = before + np.cumsum(weights[start : start + BLOCK], dtype=np.float64)
            index = int(np.searchsorted(within, mark, side="right"))
            if index < len(within):
                return start + index
            weights = weights[: start + BLOCK]
        # A draw so near the end that rounding leads past it belongs to the last index that has any mass.
        return int(np.flatnonzero(weights)[-1])


def try_chosen(tokens: Iterable[int], mass: Mass, rng: np.random.Generator) -> int | None:
    """The first of some distinct tokens that is accepted, each a point-mass proposal: x with probability
    p(x) / (mass not yet tried). Rejected tokens are taken out of ``mass``."""
    for token in tokens:
        if rng.random() * mass.total < float(mass.weights[token]):  # in float64, whatever the weights are
            return token
        mass.take_out(token)
    return None


def try_drawn(tokens: Container[int], proposal: Proposal, mass: Mass, rng: np.random.Generator) -> int | None:
    """The first drawn token that is accepted: x, drawn from q, with probability min(1, p(x) / q(x)).

    A rejection leaves of p what exceeds q, and of q what is not x: the next token was drawn from that (Leviathan et
    al., arXiv 2211.17192, theorem 1, once per draw). Drawn tokens that are not in the tree are passed over.

    Args:
        tokens: those in the tree.
        proposal: D weights, and what was drawn from them.
        mass: p; where all are rejected it becomes what is left of it.
    """
    scored = slice(None) if proposal.token_ids is None else proposal.token_ids
    q = proposal.weights.astype(np.float64)  # [D]
    p = mass.weights[scored].astype(np.float64)  # [D]
    mass.put(0.0, scored)
    outside, scale = mass.total, 1.0  # p of the tokens that q has not; what it shrinks by
    for token, place in zip(proposal.tokens, proposal.places, strict=True):
        if token in tokens:
            # Nothing is divided: p and q keep their sums P and Q, and x is accepted if u < (p(x) / P) / (q(x) / Q).
            # Only powers of two are taken out of q, lest what is left of p should vanish by and by.
            q *= 2.0 ** -frexp(q.sum())[1]
            p_sum, q_sum = p.sum() + outside, q.sum()
            if rng.random() * (p_sum * q[place]) < p[place] * q_sum:
                return token
            rest = np.maximum(p * q_sum - p_sum * q, 0.0)
            if not outside and not rest.any():
                return token  # p is q but for rounding
            p, outside, scale = rest, outside * q_sum, scale * q_sum
        q[place] = 0.0
    mass.weights = mass.weights.astype(np.float64) * scale
    mass.put(p, scored)
    return None
