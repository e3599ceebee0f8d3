"""A small model as drafter: any target that speaks the same tokens, whatever its engine.

Its own cache holds the committed text but for the tokens it has not run over yet, the root always among them. A level
of the tree is one tree pass of the small model over the root and everything expanded so far, rolled back at once: only
committed tokens stay in its K/V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eyas.drafters.base import check_root
from eyas.errors import InvalidInputError
from eyas.policies.base import Candidates, Children, TreePolicy, grow_tree
from eyas.sampling import log_softmax
from eyas.targets.base import Features, Target, TargetOutput
from eyas.text import TextTokenizer
from eyas.tree import DraftTree, Ints

CHAIN = 16
"""New tokens up to this many share a pass with the root; more are prefilled before it."""


@dataclass(frozen=True)
class SmallModelDrafter:
    """A model that guesses for a larger one. Weights only: all state is in the sessions.

    Attributes:
        model: guesses; its features are not looked at.
        vocab_size: ids of the target; the small model's logits beyond are ignored, as some models pad theirs.
    """

    model: Target
    vocab_size: int

    @property
    def name(self) -> str:
        return self.model.info.name

    @property
    def feature_levels(self) -> int:
        return 0

    def new_session(self) -> SmallModelSession:
        return SmallModelSession(self)

    def children(self, output: TargetOutput, rows: Sequence[int], topk: int) -> Children:
        """The ``topk`` likeliest next tokens of some rows of a pass; log-softmax over the shared vocabulary."""
        tokens = np.zeros((len(rows), topk), np.int64)
        log_probs = np.full((len(rows), topk), -np.inf, np.float32)  # fewer tokens than asked for: confidence zero
        for place, row in enumerate(rows):
            values = log_softmax(output.row(row)[: self.vocab_size])
            count = min(topk, len(values))
            best = np.flatnonzero(values >= np.partition(values, -count)[-count])
            best = best[np.argsort(-values[best], kind="stable")][:count]
            tokens[place, :count], log_probs[place, :count] = best, values[best]
        return Children(tokens, log_probs)


class SmallModelSession:
    """One request: the small model's cache and the whole committed text."""

    def __init__(self, drafter: SmallModelDrafter) -> None:
        self._drafter = drafter
        self._cache = drafter.model.new_cache()
        self._first: list[int] = []  # the prompt's first token, once known; it belongs to no pair
        self._tokens: list[int] = []

    @property
    def length(self) -> int:
        return len(self._tokens)

    @property
    def last_id(self) -> int:
        """The small model's largest id; it stands in for ids that only a padded target has."""
        return self._drafter.model.info.vocab_size - 1

    def begin(self, token: int) -> None:
        """The prompt's first token."""
        self._cache.truncate(0)
        self._first = [int(token)]

    def commit(self, tokens: Sequence[int], features: Features = None) -> None:
        """Take in committed tokens; the model runs over them with the next tree."""
        self._tokens += map(int, tokens)

    def truncate(self, length: int) -> None:
        del self._tokens[length:]
        # The last token stays outside: it is the next root, whose logits are asked for.
        self._cache.truncate(min(self._cache.length, max(0, len(self._first) + len(self._tokens) - 1)))

    def propose(self, root: int, policy: TreePolicy, max_depth: int) -> DraftTree:
        """Grow a tree below ``root``; the bare root where the text no longer fits the small model's context."""
        if not self._tokens:
            return DraftTree.root_only(root)
        check_root(root, self._tokens)
        # The deepest nodes are scored by their parents' pass, so they take no position.
        room = self._drafter.model.info.max_positions - len(self._first) - len(self._tokens) + 1
        depth = min(max_depth, room)
        if depth < 1:
            return DraftTree.root_only(root)
        return grow_tree(root, policy, depth, _Growth(self, root, policy.topk))

    def score_root(self, topk: int) -> Children:
        """Run over all waiting tokens; afterwards the cache holds all of them but the root."""
        drafter, cache = self._drafter, self._cache
        waiting = [min(token, self.last_id) for token in [*self._first, *self._tokens][cache.length :]]
        if len(waiting) > CHAIN:
            drafter.model.prefill(cache, waiting[:-1])
            waiting = waiting[-1:]
        chain = DraftTree(
            np.array(waiting, np.int64), np.arange(-1, len(waiting) - 1), np.zeros(len(waiting), np.float32)
        )
        (output,) = drafter.model.verify([(cache, chain)])
        children = drafter.children(output, [len(waiting) - 1], topk)
        if len(waiting) > 1:
            cache.commit(range(len(waiting) - 1))
        else:
            cache.truncate(cache.length)
        return children

    def score_tree(self, tree: DraftTree, rows: Sequence[int], topk: int) -> Children:
        """The children of some nodes of a tree below the root; nothing of it stays in the cache."""
        (output,) = self._drafter.model.verify([(self._cache, tree)])
        children = self._drafter.children(output, rows, topk)
        self._cache.truncate(self._cache.length)
        return children


class _Growth:
    """One tree in the making: the root and every expanded candidate, parents first, as a tree of their own."""

    def __init__(self, session: SmallModelSession, root: int, topk: int) -> None:
        self._session = session
        self._topk = topk
        self._tokens = [min(root, session.last_id)]
        self._parents = [-1]
        self._row = {0: 0}  # candidate -> row of that tree

    def __call__(self, candidates: Candidates, expanded: Ints) -> Children:
        if candidates.depth == 0:
            return self._session.score_root(self._topk)
        for node in expanded.tolist():
            self._row[node] = len(self._tokens)
            self._tokens.append(int(candidates.tokens[node]))
            self._parents.append(self._row[int(candidates.parents[node])])
        size = len(self._tokens)
        tree = DraftTree(
            np.array(self._tokens, np.int64), np.array(self._parents, np.int64), np.zeros(size, np.float32)
        )
        return self._session.score_tree(tree, range(size - len(expanded), size), self._topk)


def check_tokenizers(target: TextTokenizer, small: TextTokenizer, name: str) -> None:
    """Refuse a small model that speaks other tokens.

    Raises:
        InvalidInputError: an id that means different tokens to the two.
    """
    ours = target.backend.get_vocab(with_added_tokens=True)
    theirs = small.backend.get_vocab(with_added_tokens=True)
    if ours == theirs:
        return
    different = sorted(ours.items() ^ theirs.items(), key=lambda item: (item[1], item[0]))
    token, place = different[0]
    raise InvalidInputError(
        f"draft model {name} has another tokenizer than the target: {len({id_ for _, id_ in different})} ids differ, "
        f"the first is {place} ({token!r} for {'the target' if (token, place) in ours.items() else name} only); "
        "a drafter must share the target's tokens"
    )
