"""How a tree grows: the candidates, the seam every policy fills, and the one loop that joins it to a drafter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from eyas.calibration import ROOT, Calibration
from eyas.tree import Doubles, DraftTree, Floats, Ints, Proposal


@dataclass(frozen=True)
class Children:
    """k children of each of n nodes, most confident first.

    Attributes:
        tokens: [n, k] int64 target token ids.
        log_probs: [n, k] float32 log confidence given the parent, non-increasing along k.
        proposals: [n] what the children were drawn from; none where they are the drafter's likeliest.
    """

    tokens: Ints
    log_probs: Floats
    proposals: tuple[Proposal, ...] = ()


@dataclass(frozen=True)
class Candidates:
    """Every node generated so far in one cycle, level by level, the root first.

    Attributes:
        tokens: [C] int64.
        parents: [C] int64 indices into the candidates; -1 for the root.
        log_probs: [C] float32, log confidence given the parent; 0 for the root.
        log_values: [C] float32, log path value: sum of log_probs from the root down; 0 for the root.
        ranks: [C] int64, 0 for a parent's most confident child, 1 for the next, ...
        levels: offsets of the levels: level d is ``levels[d] : levels[d + 1]``; level 0 is the root.
        proposals: candidate -> what its children were drawn from, where they were drawn.
    """

    tokens: Ints
    parents: Ints
    log_probs: Floats
    log_values: Floats
    ranks: Ints
    levels: tuple[int, ...]
    proposals: Mapping[int, Proposal] = field(default_factory=dict, compare=False, repr=False)
    _accepted: tuple[Calibration, Doubles] | None = field(default=None, compare=False, repr=False)
    """What ``acceptance_by`` gave last, for the first nodes."""

    @classmethod
    def root(cls, token: int) -> Candidates:
        zero = np.zeros(1, np.float32)
        return cls(np.array([token]), np.array([-1]), zero, zero, np.zeros(1, np.int64), (0, 1))

    @property
    def depth(self) -> int:
        """Levels below the root."""
        return len(self.levels) - 2

    @property
    def expanded(self) -> Ints:
        """[n] int64 increasing indices of the nodes that a drafter has given children."""
        parents: Ints = self.parents[1:][self.ranks[1:] == 0]
        return parents

    @property
    def newest(self) -> slice:
        """The deepest level."""
        return slice(self.levels[-2], self.levels[-1])

    def __len__(self) -> int:
        return len(self.tokens)

    def with_children(self, expanded: Ints, children: Children) -> Candidates:
        """A level deeper: ``children`` [n, k] of the nodes ``expanded`` [n], in that order."""
        n, k = children.tokens.shape
        values = self.log_values[expanded, None] + children.log_probs  # [n, k]
        proposals = self.proposals
        if children.proposals:
            proposals = {**proposals, **dict(zip(expanded.tolist(), children.proposals, strict=True))}
        return Candidates(
            tokens=np.concatenate([self.tokens, children.tokens.ravel()]),
            parents=np.concatenate([self.parents, np.repeat(expanded, k)]),
            log_probs=np.concatenate([self.log_probs, children.log_probs.ravel()]),
            log_values=np.concatenate([self.log_values, values.ravel()]),
            ranks=np.concatenate([self.ranks, np.arange(n * k) % k]),
            levels=(*self.levels, len(self) + n * k),
            proposals=proposals,
            _accepted=self._accepted,
        )

    def with_acceptance(self, calibration: Calibration, values: Doubles) -> Candidates:
        """The same, told what ``acceptance_by(calibration)`` is: whoever grew them had to work it out."""
        return replace(self, _accepted=(calibration, values))

    def acceptance_by(self, calibration: Calibration) -> Doubles:
        """[C] float64 probability that each node is accepted: 1 for the root, never more than its parent's.

        The last answer is kept and goes along ``with_children``, so that a policy that asks at every level pays for the
        newest alone. Not to be written to.
        """
        by, known = self._accepted or (calibration, ROOT)
        if by is not calibration:
            known = ROOT
        if len(known) < len(self):
            known = calibration.acceptance(self.log_values, self.parents, self.levels, known)
            object.__setattr__(self, "_accepted", (calibration, known))
        return known


class TreePolicy(Protocol):
    """Decides which nodes to expand and which to verify. Pure: all state is in the candidates."""

    @property
    def num_steps(self) -> int:
        """Drafter passes per cycle at most = deepest level."""
        ...

    @property
    def topk(self) -> int:
        """Children asked of the drafter per expanded node."""
        ...

    @property
    def num_draft_tokens(self) -> int:
        """Nodes verified at most, root excluded."""
        ...

    def expand(self, candidates: Candidates) -> Ints:
        """[n] int64, increasing candidate indices, all of the newest level, to expand next; empty stops the growth.

        Asked from the root on (``candidates.depth == 0``), until ``num_steps`` levels exist.
        """
        ...

    def select(self, candidates: Candidates) -> Ints:
        """[m] int64, increasing indices of the nodes to verify, root excluded, closed under parents."""
        ...


@dataclass
class Watcher:
    """A policy that decides like another, for those who want to watch.

    A drafter that grows a whole tree at once, knowing by itself what the policy would expand, asks for the selection
    only.

    Attributes:
        policy: decides.
    """

    policy: TreePolicy

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
        return self.policy.expand(candidates)

    def select(self, candidates: Candidates) -> Ints:
        return self.policy.select(candidates)


def watched(policy: TreePolicy) -> TreePolicy:
    """Who decides, behind all watchers."""
    while isinstance(policy, Watcher):
        policy = policy.policy
    return policy


def grow_tree(
    root: int, policy: TreePolicy, max_depth: int, score: Callable[[Candidates, Ints], Children]
) -> DraftTree:
    """Expand level by level, then keep what the policy selects (EAGLE-2, section 4).

    Args:
        root: the last committed token.
        policy: decides.
        max_depth: levels allowed below the root; 0 gives a tree without draft tokens.
        score: one drafter pass over the given candidates, returns their children.
    """
    candidates = Candidates.root(root)
    while candidates.depth < min(policy.num_steps, max_depth):
        chosen = policy.expand(candidates)
        if len(chosen) == 0:
            break
        candidates = candidates.with_children(chosen, score(candidates, chosen))
    return prune(candidates, policy.select(candidates))


def prune(candidates: Candidates, selected: Ints) -> DraftTree:
    """The tree of the root and the ``selected`` candidates (increasing, closed under parents)."""
    # A drafter that has fewer guesses than asked for pads them with confidence zero; so do all their descendants.
    selected = selected[np.isfinite(candidates.log_values[selected])]
    kept = np.concatenate([np.zeros(1, np.int64), selected])
    places = {node: place for place, node in enumerate(kept.tolist())} if candidates.proposals else {}
    return DraftTree(
        tokens=candidates.tokens[kept],
        # What lies left of a kept parent, itself included, less one: its new place; -1 of the root's.
        parents=np.searchsorted(kept, candidates.parents[kept], side="right") - 1,
        log_values=candidates.log_values[kept],
        proposals={places[node]: each for node, each in candidates.proposals.items() if node in places},
    )
