"""Drafting with a head in PyTorch, on whatever device the weights are.

One drafter pass per tree level: the first runs the head over the newly committed pairs (true features), whose last
output scores the root's children; each further pass runs it over the nodes that the policy expands, with the head's
own outputs in place of features. Those guessed rows are forgotten with the tree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eyas.drafters.base import check_root
from eyas.drafters.waiting import WaitingPairs
from eyas.draws import Draws
from eyas.errors import InvalidInputError
from eyas.heads.layers import DraftHead, HeadCache, draft_rows
from eyas.policies.base import Candidates, Children, TreePolicy, grow_tree
from eyas.targets.base import Features
from eyas.tree import Bools, DraftTree, Ints

CHUNK = 2048
"""Committed pairs per pass at most, so that a long prompt does not cost memory by its square."""


class HeadDrafter(ABC):
    """A head with the target's embedding. Weights only: all state is in the sessions.

    Args:
        head: the head; its parameters fix device and dtype of the computation.
        embedding: [V, H] the target's token embedding.
        d2t: [draft vocab] int64 offsets, target id = draft id + d2t[draft id]; None scores the whole vocabulary.
        name: for reports.

    Raises:
        InvalidInputError: weights whose shapes do not fit the head.
    """

    def __init__(self, head: DraftHead, embedding: Tensor, d2t: Tensor | None, name: str) -> None:
        self.head = head.eval()
        self.name = name
        self.check_shape("embedding", embedding)
        weight = head.fc.weight
        self.device = weight.device
        self.dtype = weight.dtype
        self.embedding = embedding.detach().to(weight)
        self.token_ids = None  # [draft vocab] int64: target id of each scored row; None where they are the same
        if d2t is not None:
            self.token_ids = torch.arange(len(d2t), device=self.device) + d2t.to(self.device)

    @property
    @abstractmethod
    def feature_levels(self) -> int: ...

    @abstractmethod
    def logits(self, outputs: Tensor) -> Tensor:
        """Scores [n, draft vocab] of the token after next, from outputs [n, H] of the head."""

    def new_session(self) -> HeadSession:
        return HeadSession(self)

    def copied(self, features: Features) -> Tensor:
        """[n, feature_levels * H] of a tensor or an array, where and as the head computes."""
        if isinstance(features, Tensor):
            return features.detach().to(self.device, self.dtype, copy=True)
        return torch.tensor(features, device=self.device, dtype=self.dtype)

    def check_shape(self, what: str, weight: Tensor) -> None:
        """Refuse a matrix of the target that is not [V, H]."""
        shape = (self.head.config.vocab_size, self.head.config.hidden_size)
        if tuple(weight.shape) != shape:
            raise InvalidInputError(
                f"the target's {what} has shape {tuple(weight.shape)}, but draft head {self.name} was made for "
                f"{shape} (vocab_size, hidden_size); use a head trained for this target"
            )

    def target_rows(self, lm_head: Tensor, d2t: Tensor | None) -> Tensor:
        """[draft vocab, H] rows of the target's lm_head [V, H] that score, where and as the head computes."""
        self.check_shape("lm_head", lm_head)
        rows = draft_rows(lm_head.detach(), None if d2t is None else d2t.to(lm_head.device))
        return rows.to(self.head.fc.weight)

    def children(self, outputs: Tensor, topk: int, draws: Draws | None = None) -> Children:
        """``topk`` next tokens of each output [n, H] of the head, drawn, or the best; log-softmax in float32."""
        logits = self.logits(outputs).float()  # [n, draft vocab]
        if draws is not None:
            ids = None if self.token_ids is None else self.token_ids.cpu().numpy()
            return draws.children(logits.cpu().numpy(), ids, topk)
        best, rows = logits.topk(min(topk, logits.shape[1]), dim=-1)  # [n, k], best first
        log_probs = best - logits.logsumexp(dim=-1, keepdim=True)
        tokens = rows if self.token_ids is None else self.token_ids[rows]
        # One transfer to the host instead of two: the float bits travel as integers.
        both = torch.stack((tokens.int(), log_probs.view(torch.int32))).cpu().numpy()
        ids, confidences = both[0].astype(np.int64), both[1].view(np.float32)
        if missing := topk - ids.shape[1]:
            # A policy counts on topk children each: a smaller vocabulary is filled up with confidence zero.
            ids = np.pad(ids, ((0, 0), (0, missing)))
            confidences = np.pad(confidences, ((0, 0), (0, missing)), constant_values=-np.inf)
        return Children(ids, confidences)


class HeadSession:
    """One request's drafting state: the head's K/V of all committed pairs, and the pairs it has not yet run over."""

    def __init__(self, drafter: HeadDrafter) -> None:
        self._drafter = drafter
        self._cache = HeadCache(drafter.head.config.num_layers)
        self._waiting = WaitingPairs(
            drafter.feature_levels * drafter.head.config.hidden_size, drafter.copied, torch.cat
        )
        self._tip: Tensor | None = None  # [H] the head's output on the last pair it ran over

    @property
    def length(self) -> int:
        return self._cache.length + len(self._waiting)

    def commit(self, tokens: Sequence[int], features: Features) -> None:
        """Queue n pairs; the head runs over them with the next tree. ``features`` [n, feature_levels * H], a tensor or
        an array."""
        self._waiting.add(tokens, features)

    @torch.inference_mode()
    def propose(self, root: int, policy: TreePolicy, max_depth: int) -> DraftTree:
        """Grow a tree below ``root``, the token of the last pair (see ``eyas.drafters.waiting``)."""
        return self._propose(root, policy, max_depth, None)

    @torch.inference_mode()
    def propose_drawn(self, root: int, policy: TreePolicy, max_depth: int, draws: Draws) -> DraftTree:
        """As ``propose``, with children drawn from the head's distribution."""
        return self._propose(root, policy, max_depth, draws)

    def _propose(self, root: int, policy: TreePolicy, max_depth: int, draws: Draws | None) -> DraftTree:
        check_root(root, self._waiting.tokens)
        if max_depth < 1 or not (self._waiting or self._tip is not None):
            return DraftTree.root_only(root)
        committed = self.length
        growth: _Growth | None = None

        def score(candidates: Candidates, expanded: Ints) -> Children:
            nonlocal growth
            if growth is None:
                growth = _Growth(self._drafter, self._cache, self._run_waiting(), policy.topk, draws)
            return growth(candidates, expanded)

        try:
            return grow_tree(root, policy, max_depth, score)
        finally:
            self._cache.truncate(committed)

    def truncate(self, length: int) -> None:
        self._waiting.keep(length - self._cache.length)
        if length < self._cache.length:
            self._cache.truncate(length)
            self._tip = None

    def _run_waiting(self) -> Tensor:
        """[H] the head's output on the last pair, after a run over the waiting ones: only true features enter the
        committed part of its K/V."""
        features, drafter = self._waiting.features, self._drafter
        if features is None:
            assert self._tip is not None
            return self._tip
        tokens = torch.tensor(self._waiting.tokens, device=drafter.device)
        self._waiting.clear()
        for start in range(0, len(tokens), CHUNK):
            part = slice(start, start + CHUNK)
            first = self._cache.length
            embeds = drafter.embedding[tokens[part]][None]  # [1, t, H]
            positions = torch.arange(first, first + embeds.shape[1], device=drafter.device)[None]
            out = drafter.head(embeds, drafter.head.fuse(features[part][None]), positions, cache=self._cache)
            self._tip = out[0, -1].clone()
        assert self._tip is not None
        return self._tip


class _Growth:
    """One tree in the making: which draft row in the K/V belongs to which candidate, and what the head said there.

    A candidate gets a row when it is expanded. It reads the head's output on its parent's row, which exists
    because only children of expanded nodes are candidates; row numbers count from the end of the committed pairs.
    """

    def __init__(
        self, drafter: HeadDrafter, cache: HeadCache, tip: Tensor, topk: int, draws: Draws | None = None
    ) -> None:
        self._drafter = drafter
        self._cache = cache
        self._topk = topk
        self._draws = draws
        self._committed = cache.length
        self._outputs = tip[None]  # [rows + 1, H]: the root's, then one per draft row
        self._output_of = {0: 0}  # candidate -> index into _outputs; its draft row is one less
        self._sees: Bools = np.zeros((0, 0), bool)  # [rows, rows] row i sees itself and its ancestors

    def __call__(self, candidates: Candidates, expanded: Ints) -> Children:
        """Score the children of candidates of the newest level, all in one pass."""
        if candidates.depth == 0:
            return self._drafter.children(self._outputs, self._topk, self._draws)
        drafter, nodes = self._drafter, expanded.tolist()
        parents = [self._output_of[parent] for parent in candidates.parents[expanded].tolist()]
        for node in nodes:
            self._output_of[node] = len(self._output_of)
        tokens = torch.from_numpy(candidates.tokens[expanded]).to(drafter.device)
        out = drafter.head(
            drafter.embedding[tokens][None],
            self._outputs[torch.tensor(parents, device=drafter.device)][None],
            # The root's pair is the last committed one, so a node of depth d stands d places after it.
            torch.full((1, len(nodes)), self._committed - 1 + candidates.depth, device=drafter.device),
            mask=self._mask(parents),
            cache=self._cache,
        )[0]
        self._outputs = torch.cat((self._outputs, out))
        return drafter.children(out, self._topk, self._draws)

    def _mask(self, parents: list[int]) -> Tensor:
        """[1, 1, n, committed + rows] additive: all committed pairs, the row's ancestors, itself."""
        old, n = len(self._sees), len(parents)
        sees = np.zeros((old + n, old + n), bool)
        sees[:old, :old] = self._sees
        for row, parent in enumerate(parents, start=old):
            if parent > 0:  # the root's own pair is a committed one
                sees[row, :old] = self._sees[parent - 1]
        np.fill_diagonal(sees, True)
        self._sees = sees
        mask = np.zeros((1, 1, n, self._committed + old + n), np.float32)
        mask[0, 0, :, self._committed :][~sees[old:]] = -np.inf
        return torch.from_numpy(mask).to(self._drafter.device)
