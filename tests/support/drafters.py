"""Drafters that know the answer, or pretend to: with a random head hardly more than one token commits per cycle,
and faults in blocks, trees and caches stay hidden.

Each is a ``ScriptedDrafter``: it is told what the target would say next (``next_tokens``) and a script turns that into
the children it proposes. Children of nodes on the target's own path get high confidence, all others a low one, so any
policy follows the path, whatever the order of the siblings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from eyas.policies.base import Candidates, Children, TreePolicy, grow_tree
from eyas.targets.base import Features
from eyas.tree import DraftTree, Ints

Ranking = Callable[[list[int]], Sequence[int]]
"""All tokens of the vocabulary after a prefix, the target's choice first."""

Script = Callable[[list[int], list[int]], list[int]]
"""(prefix, ranking) -> the children to propose, best first."""


def oracle(prefix: list[int], ranking: list[int]) -> list[int]:
    """The target's own order: the first child is always right."""
    return ranking


def anti_oracle(prefix: list[int], ranking: list[int]) -> list[int]:
    """Never the right token."""
    return ranking[:0:-1]


def mixed(*places: int) -> Script:
    """The right token is the ``places[i]``-th sibling (0: the first), in turn by the length of the prefix."""

    def script(prefix: list[int], ranking: list[int]) -> list[int]:
        place = places[len(prefix) % len(places)]
        return [*ranking[1 : place + 1], ranking[0], *ranking[place + 1 :]]

    return script


def dial(q: float, seed: int = 0) -> Script:
    """Right with probability q, otherwise never; decided by prefix and seed alone, so any policy meets the same."""

    def script(prefix: list[int], ranking: list[int]) -> list[int]:
        right = np.random.default_rng([seed, *prefix]).random() < q
        return (oracle if right else anti_oracle)(prefix, ranking)

    return script


class ScriptedDrafter:
    """A drafter without weights, for any policy.

    Args:
        next_tokens: the target's ranking after a prefix (asked once per prefix).
        script: one of the above.
        first_token: the prompt's first token: a session is told pairs (feature, next token), so it never sees it.
        feature_levels: what it claims to need.
    """

    def __init__(
        self, next_tokens: Ranking, script: Script = oracle, *, first_token: int, feature_levels: int = 0
    ) -> None:
        self._next_tokens = next_tokens
        self._script = script
        self._rankings: dict[tuple[int, ...], list[int]] = {}
        self.first_token = first_token
        self.name = "scripted"
        self.feature_levels = feature_levels

    def new_session(self) -> ScriptedSession:
        return ScriptedSession(self)

    def ranking(self, prefix: list[int]) -> list[int]:
        key = tuple(prefix)
        if key not in self._rankings:
            self._rankings[key] = [int(token) for token in self._next_tokens(prefix)]
        return self._rankings[key]

    def proposals(self, prefix: list[int]) -> list[int]:
        return self._script(prefix, self.ranking(prefix))


class ScriptedSession:
    """Remembers the committed tokens; asserts that it is told of every one exactly once."""

    def __init__(self, drafter: ScriptedDrafter) -> None:
        self._drafter = drafter
        self.tokens: list[int] = []  # committed, without the prompt's first

    @property
    def length(self) -> int:
        return len(self.tokens)

    def commit(self, tokens: Sequence[int], features: Features) -> None:
        if self._drafter.feature_levels:
            assert len(features) == len(tokens), (len(features), len(tokens))
        self.tokens += [int(token) for token in tokens]

    def truncate(self, length: int) -> None:
        del self.tokens[length:]

    def propose(self, root: int, policy: TreePolicy, max_depth: int) -> DraftTree:
        committed = [self._drafter.first_token, *self.tokens]
        assert committed[-1] == root, f"root {root} is not the last committed token of {committed}"

        def score(candidates: Candidates, expanded: Ints) -> Children:
            rows = [self._children(committed, _path(candidates, node), policy.topk) for node in expanded.tolist()]
            return Children(np.array([tokens for tokens, _ in rows]), np.array([log for _, log in rows], np.float32))

        return grow_tree(root, policy, max_depth, score)

    def _children(self, committed: list[int], path: list[int], topk: int) -> tuple[list[int], list[float]]:
        drafter = self._drafter
        right = all(drafter.ranking([*committed, *path[:i]])[0] == token for i, token in enumerate(path))
        tokens = drafter.proposals([*committed, *path])[:topk]
        # Nearly even among siblings, so that a right one in second or third place survives reranking.
        total = 0.98 if right else 0.02
        log_probs = [float(np.log(total / topk * (1 - 0.01 * rank))) for rank in range(len(tokens))]
        # Fewer guesses than asked for: filled up with confidence zero, which no policy keeps.
        missing = topk - len(tokens)
        return tokens + [0] * missing, log_probs + [-np.inf] * missing


def _path(candidates: Candidates, node: int) -> list[int]:
    """Tokens from below the root down to a candidate, itself included."""
    path: list[int] = []
    while node > 0:
        path.append(int(candidates.tokens[node]))
        node = int(candidates.parents[node])
    return path[::-1]
