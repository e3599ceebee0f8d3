"""Drafting without weights: what followed the last time the text said the same.

Answers repeat their prompt and themselves: names, quotations, code. The longest suffix of the committed text that
occurred before is looked up, and what followed it then is proposed, priced by how often such a guess has been right.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import numpy as np

from eyas.drafters.base import check_root
from eyas.errors import InvalidInputError
from eyas.policies.base import Candidates, Children, TreePolicy, grow_tree
from eyas.targets.base import Features
from eyas.tree import DraftTree, Ints

HIT_RATES = (0.29, 0.53, 0.62, 0.68, 0.77, 0.79, 0.81, 0.83, 0.86, 0.86, 0.88, 0.97)
"""Prior hit rates by match length 1, 2, ..., 12 and more: how often the next token is among those that followed the
longest match before. Measured on greedy answers of SmolLM2-135M-Instruct (206 mixed prompts, 22,629 tokens)."""


class SuffixIndex:
    """Every run of up to ``longest + 1`` tokens of a growing text, as a trie that counts.

    Appending a token costs ``longest + 1`` dictionary look-ups, so indexing is linear in the text. A position is a
    list of trie nodes, one for each length 0, 1, 2, ... of the suffix that ends there, as far as the trie knows it.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._followers: list[dict[int, int]] = [{}]  # node -> token -> node one token longer, latest seen last
        self._counts: list[int] = [0]
        self.end: list[int] = [0]  # the position at the end of the text

    def append(self, token: int) -> None:
        """One more token of text."""
        end = [0]
        for node in self.end:
            followers = self._followers[node]
            # Put back at the end: followers stay in the order in which they were last seen.
            longer = followers.pop(token, -1)
            if longer < 0:
                longer = len(self._followers)
                self._followers.append({})
                self._counts.append(0)
            followers[token] = longer
            self._counts[longer] += 1
            end.append(longer)
        self.end = end[: self.longest + 1]

    def step(self, position: list[int], token: int) -> list[int]:
        """The position after a token that is only supposed: nothing is counted."""
        after = [0]
        for node in position[: self.longest]:
            longer = self._followers[node].get(token, -1)
            if longer < 0:
                break  # where a suffix is unknown, so is every longer one
            after.append(longer)
        return after

    def match(self, position: list[int]) -> tuple[int, dict[int, int]]:
        """(match length, token -> trie node) of what followed the longest suffix that has been followed by anything.

        Tokens seen latest come last. Length 0, with nothing, where no suffix has.
        """
        for length in range(len(position) - 1, 0, -1):
            if found := self._followers[position[length]]:
                return length, found
        return 0, {}

    def followers(self, position: list[int]) -> tuple[int, dict[int, int]]:
        """(match length, token -> count) of the same; tokens seen latest come first."""
        length, found = self.match(position)
        return length, {token: self._counts[node] for token, node in reversed(found.items())}


@dataclass(frozen=True)
class NgramDrafter:
    """Proposes what followed the longest match earlier in prompt and answer. For any target.

    A match of length l makes its followers a guess that hits with rate h(l), shared among them by how often each was
    seen. h starts from ``hit_rates`` and is corrected by the answer itself: the prior counts as ``prior_weight``
    tries, every committed token of the answer is one more.

    Attributes:
        longest: match length at most; longer matches are as good as this one.
        hit_rates: prior of h by match length from 1 on; lengths beyond take the last.
        prior_weight: how many observations the prior is worth.

    Raises:
        InvalidInputError: a length below 1, rates outside (0, 1], or a negative weight.
    """

    longest: int = 12
    hit_rates: tuple[float, ...] = HIT_RATES
    prior_weight: float = 8.0

    def __post_init__(self) -> None:
        if self.longest < 1:
            raise InvalidInputError(f"the longest match must be at least 1 token, got {self.longest}")
        if not self.hit_rates or not all(0 < rate <= 1 for rate in self.hit_rates):
            raise InvalidInputError(f"hit rates lie above 0 and at most at 1, got {list(self.hit_rates)}")
        if not self.prior_weight > 0:
            raise InvalidInputError(f"the prior needs a weight above 0, got {self.prior_weight}")

    @property
    def name(self) -> str:
        return "ngram"

    @property
    def feature_levels(self) -> int:
        return 0

    def new_session(self) -> NgramSession:
        return NgramSession(self)


class NgramSession:
    """One request's text. The prompt's first token never arrives (nothing precedes it) and is not missed."""

    def __init__(self, drafter: NgramDrafter) -> None:
        self._drafter = drafter
        self._tokens: list[int] = []
        self._index = SuffixIndex(drafter.longest)
        self._answering = False
        self._tries = [0] * (drafter.longest + 1)  # by match length
        self._hits = [0] * (drafter.longest + 1)

    @property
    def length(self) -> int:
        return len(self._tokens)

    def commit(self, tokens: Sequence[int], features: Features = None) -> None:
        """Take in committed tokens; features are not looked at."""
        for token in tokens:
            if self._answering:  # a prompt repeats itself at another rate than the answer does
                length, followers = self._index.match(self._index.end)
                self._tries[length] += 1
                self._hits[length] += token in followers
            self._index.append(int(token))
        self._tokens += [int(token) for token in tokens]

    def truncate(self, length: int) -> None:
        self._answering = False  # what comes next is a prompt
        if length >= len(self._tokens):
            return
        del self._tokens[length:]
        self._index = SuffixIndex(self._drafter.longest)
        for token in self._tokens:
            self._index.append(token)

    def propose(self, root: int, policy: TreePolicy, max_depth: int) -> DraftTree:
        """Grow a tree as the policy says; the bare root where nothing like the end of the text came before."""
        self._begin(root)
        if not self._index.match(self._index.end)[1]:
            return DraftTree.root_only(root)
        positions = {0: self._index.end}  # of candidates that were expanded

        def score(candidates: Candidates, expanded: Ints) -> Children:
            tokens = np.zeros((len(expanded), policy.topk), np.int64)
            log_probs = np.full(tokens.shape, -np.inf, np.float32)
            for row, node in enumerate(expanded.tolist()):
                if node:
                    before = positions.get(int(candidates.parents[node]), [0])
                    positions[node] = self._index.step(before, int(candidates.tokens[node]))
                if np.isfinite(candidates.log_values[node]):
                    for rank, (token, confidence) in enumerate(self.guesses(positions[node])[: policy.topk]):
                        tokens[row, rank], log_probs[row, rank] = token, log(confidence)
            return Children(tokens, log_probs)

        return grow_tree(root, policy, max_depth, score)

    def lookup(self, root: int, budget: int, max_depth: int, *, topk: int = 2, floor: float = 0.05) -> DraftTree:
        """The ``budget`` most valuable continuations, best first and without a policy: cheap enough for every cycle.

        Args:
            root: the last committed token.
            budget: draft tokens at most.
            max_depth: levels below the root at most.
            topk: children per node at most.
            floor: path value below which nothing is proposed.
        """
        self._begin(root)
        tokens, parents, values, positions = [root], [-1], [0.0], [self._index.end]
        depths = [0]
        lowest = log(floor)
        # (-log value, age) orders the heap: the age, unique, breaks ties towards the earlier guess.
        heap: list[tuple[float, int, int, int]] = []  # ..., parent, token
        age = 0

        def offer(parent: int) -> None:
            nonlocal age
            if depths[parent] < max_depth:
                for token, confidence in self.guesses(positions[parent])[:topk]:
                    value = values[parent] + log(confidence)
                    if value >= lowest:
                        heapq.heappush(heap, (-value, age, parent, token))
                        age += 1

        offer(0)
        while heap and len(tokens) <= budget:
            cost, _, parent, token = heapq.heappop(heap)
            tokens.append(token)
            parents.append(parent)
            values.append(-cost)
            depths.append(depths[parent] + 1)
            positions.append(self._index.step(positions[parent], token))
            offer(len(tokens) - 1)
        return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64), np.array(values, np.float32))

    def guesses(self, position: list[int]) -> list[tuple[int, float]]:
        """(token, confidence) of everything that followed the longest match, the most frequent first, then the
        latest."""
        length, found = self._index.match(position)
        if not found:
            return []
        if len(found) == 1:
            return [(next(iter(found)), self.hit_rate(length))]
        _, counts = self._index.followers(position)
        unit = self.hit_rate(length) / sum(counts.values())
        ranked = sorted(counts.items(), key=lambda item: -item[1])
        return [(token, count * unit) for token, count in ranked]

    def hit_rate(self, length: int) -> float:
        """h(length) as known by now, for a match length from 1 on."""
        drafter = self._drafter
        prior = drafter.hit_rates[min(length, len(drafter.hit_rates)) - 1]
        tries = drafter.prior_weight + self._tries[length]
        return (drafter.prior_weight * prior + self._hits[length]) / tries

    def _begin(self, root: int) -> None:
        check_root(root, self._tokens)
        self._answering = True


def measured_hit_rates(
    prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], drafter: NgramDrafter | None = None
) -> tuple[float, ...]:
    """h(length) over some answers, by match length from 1 on, drawn towards the drafter's prior as by its weight.

    Args:
        prompts, answers: token ids; an answer's own tokens count, its prompt only fills the index.
        drafter: its prior and longest match; the defaults where None.
    """
    drafter = drafter or NgramDrafter()
    tries, hits = [0] * (drafter.longest + 1), [0] * (drafter.longest + 1)
    for prompt, answer in zip(prompts, answers, strict=True):
        index = SuffixIndex(drafter.longest)
        for token in prompt:
            index.append(int(token))
        for token in answer:
            length, followers = index.match(index.end)
            tries[length] += 1
            hits[length] += token in followers
            index.append(int(token))
    weight = drafter.prior_weight
    return tuple(
        (weight * drafter.hit_rates[min(length, len(drafter.hit_rates)) - 1] + hits[length]) / (weight + tries[length])
        for length in range(1, drafter.longest + 1)
    )
