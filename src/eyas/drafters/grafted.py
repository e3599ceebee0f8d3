"""An n-gram index and a head in one tree: both guess, the policy buys the best of both, one pass verifies them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from eyas.drafters.base import Drafter, DraftSession, begin
from eyas.drafters.ngram import NgramDrafter, NgramSession
from eyas.errors import InvalidInputError
from eyas.policies.base import Candidates, TreePolicy, Watcher, prune, watched
from eyas.policies.budgeted import BudgetedPolicy
from eyas.policies.dynamic import DynamicPolicy
from eyas.policies.merge import graft
from eyas.policies.trace import PolicyTrace
from eyas.targets.base import Features
from eyas.tree import Bools, DraftTree, Ints


@dataclass(frozen=True)
class GraftedDrafter:
    """A head whose tree gets the n-gram index's continuations as further nodes.

    The policy drafts with the head as always; then it selects among all nodes of both, by path value. Where it does
    not select by value (a fixed tree, EAGLE-2 without reranking), its own nodes and the index's are joined and cut to
    its budget by value.

    Attributes:
        head: any other drafter.
        ngram: the index.
        budget: n-gram nodes offered per cycle at most.
        max_depth: levels below the root at most that the n-gram may reach: its guesses cost no drafter passes, so
            they go deeper than the head's.

    Raises:
        InvalidInputError: a budget or depth below 1.
    """

    head: Drafter
    ngram: NgramDrafter = field(default_factory=NgramDrafter)
    budget: int = 12
    max_depth: int = 12

    def __post_init__(self) -> None:
        if self.budget < 1 or self.max_depth < 1:
            raise InvalidInputError(
                f"grafting needs a budget and a depth of at least 1, got {self.budget} and {self.max_depth}; "
                "for no grafting use the head alone"
            )

    @property
    def name(self) -> str:
        return f"{self.head.name}+{self.ngram.name}"

    @property
    def feature_levels(self) -> int:
        return self.head.feature_levels

    def new_session(self) -> GraftedSession:
        return GraftedSession(self, self.head.new_session(), self.ngram.new_session())


class GraftedSession:
    """One request: the head's session and the index, told the same."""

    def __init__(self, drafter: GraftedDrafter, head: DraftSession, ngram: NgramSession) -> None:
        self._drafter = drafter
        self._head = head
        self._ngram = ngram

    @property
    def length(self) -> int:
        return self._head.length

    def begin(self, token: int) -> None:
        begin(self._head, token)

    def commit(self, tokens: Sequence[int], features: Features) -> None:
        self._head.commit(tokens, features)
        self._ngram.commit(tokens)

    def truncate(self, length: int) -> None:
        self._head.truncate(length)
        self._ngram.truncate(length)

    def propose(self, root: int, policy: TreePolicy, max_depth: int) -> DraftTree:
        if max_depth < 1:
            return DraftTree.root_only(root)
        limits = self._drafter
        found = self._ngram.lookup(root, limits.budget, min(max_depth, limits.max_depth))
        if found.num_draft_tokens == 0:
            return self._head.propose(root, policy, max_depth)
        gathered = _Gather(policy, Candidates.root(root))
        self._head.propose(root, gathered, max_depth)
        return _select(policy, gathered.candidates, found)


@dataclass
class _Gather(Watcher):
    """Puts off the selection: keeps the candidates instead."""

    candidates: Candidates

    def select(self, candidates: Candidates) -> Ints:
        self.candidates = candidates
        return np.zeros(0, np.int64)


def _select(policy: TreePolicy, candidates: Candidates, found: DraftTree) -> DraftTree:
    """The policy's choice among the head's candidates and the index's nodes."""
    decides = watched(policy)
    if isinstance(decides, BudgetedPolicy | DynamicPolicy):
        # The policy's calibration is for the head's word; a hit rate is what it says already.
        found = decides.calibration.promised(found)
    union = graft(candidates, found)
    if _by_value(decides):
        selected = policy.select(union.candidates)
    else:
        either = np.zeros(len(union.candidates), bool)
        either[union.own[policy.select(candidates)]] = True
        either[union.grafted] = True
        selected = _best_of(union.candidates, either, policy.num_draft_tokens)
    if isinstance(policy, PolicyTrace):
        policy.graft(candidates, union, selected)
    return prune(union.candidates, selected)


def _by_value(policy: TreePolicy) -> bool:
    """Whether a policy selects by path value alone; the others select by place, which grafted nodes do not have."""
    return isinstance(policy, BudgetedPolicy) or (isinstance(policy, DynamicPolicy) and policy.rerank)


def _best_of(candidates: Candidates, allowed: Bools, count: int) -> Ints:
    """The ``count`` most valuable of the ``allowed`` candidates, a set closed under parents."""
    nodes = np.flatnonzero(allowed[1:]) + 1
    best = nodes[np.argsort(-candidates.log_values[nodes], kind="stable")[:count]]
    return np.sort(best)
