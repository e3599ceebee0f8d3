"""Documents packed into rows of one length, with masks that keep them apart.

The one place of the training side where EAGLE's shift lives: pair t of a document is (feature t, token t + 1); it
predicts feature t + 1, hence the distribution of token t + 2. A document of T rows has T - 1 pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from eyas.errors import InvalidInputError
from eyas.train.store import Document
from eyas.tree import Ints


@dataclass(frozen=True)
class Batch:
    """B rows of S pairs; unused places belong to document -1 and have weight 0.

    Attributes:
        tokens: [B, S] int64, token t + 1 of pair t.
        features: [B, S, F] float32, feature t as the head reads it.
        targets: [B, S, H] float32, the input of lm_head at t + 1.
        positions: [B, S] int64, t; starts anew with each document.
        documents: [B, S] int64, number of the document within its row.
        weights: [B, S] float32: 1 where token t + 2 is part of an answer, ``prompt_weight`` where of a prompt.
        greedy: [B, S] bool, whether the document was answered greedily.
    """

    tokens: Tensor
    features: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor
    weights: Tensor
    greedy: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(**{name: tensor.to(device) for name, tensor in vars(self).items()})

    def silenced(self) -> Batch:
        """The same shapes, nothing to learn."""
        return replace(self, documents=torch.full_like(self.documents, -1), weights=torch.zeros_like(self.weights))

    def taught(self, steps: int) -> Places:
        """Where unrolled steps after the first have anything to do: the pairs whose weight, or that of one of the
        ``steps - 2`` pairs after them, is above 0. Prompts are mostly left out."""
        counted = self.weights > 0
        wanted = counted.clone()
        for ahead in range(1, steps - 1):
            wanted[:, :-ahead] |= counted[:, ahead:]
        size = max(int(wanted.sum(dim=1).max()), 1)
        # A stable sort brings the wanted places to the front, in order.
        order = wanted.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, :size]  # [B, P]
        return Places(order, wanted.gather(1, order))

    def step_mask(self, step: int, places: Places | None = None) -> Tensor:
        """Additive mask of unrolled step ``step``: [B, 1, S, S] in step 1, [B, 1, P, S + (step - 1) * P] after it.

        In step 1 pair t sees the pairs 0..t of its document. In step j its feature is the head's own, made j - 1
        predictions after the last true one, as at inference: of the true pairs (block 1 of the keys) it sees those
        up to t - j + 1, and of each later block i the one pair t - j + i on its own path.

        Args:
            places: of the P pairs per row that take the steps after the first; the later blocks hold only these.
        """
        every = torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)  # [B, S]
        asking = every if places is None else places.index
        documents = self.documents.gather(1, asking)
        same = documents[:, :, None] == self.documents[:, None, :]
        behind = asking[:, :, None] - every[:, None, :]
        # A document's first pairs have no true pair that far back: in block 1 they see themselves, a row whose loss
        # does not count.
        lost = self.positions.gather(1, asking) < step - 1
        blocks = [same & (behind >= step - 1) | (behind == 0) & lost[:, :, None]]
        if places is not None:
            same = (documents[:, :, None] == documents[:, None, :]) & places.used[:, None, :]
            behind = asking[:, :, None] - asking[:, None, :]
            blocks += [same & (behind == step - i) for i in range(2, step + 1)]
        seen = torch.cat(blocks, dim=-1)
        return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)[:, None]


@dataclass(frozen=True)
class Places:
    """P places of each row of a batch, ascending.

    Attributes:
        index: [B, P] int64.
        used: [B, P] bool; the others, behind them, only fill up rows that have fewer.
    """

    index: Tensor
    used: Tensor


def pack(lengths: Sequence[int], row_size: int) -> list[list[int]]:
    """First-fit packing: indices of the documents of each row, in order; longer documents get cut to ``row_size``.

    Args:
        lengths: pairs of each document.
        row_size: pairs per row.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index, length in enumerate(lengths):
        need = min(length, row_size)
        place = next((r for r in range(max(0, len(rows) - 32), len(rows)) if room[r] >= need), None)
        if place is None:
            rows.append([])
            room.append(row_size)
            place = len(rows) - 1
        rows[place].append(index)
        room[place] -= need
    return rows


def make_batch(rows: Sequence[Sequence[Document]], row_size: int, prompt_weight: float = 0.0) -> Batch:
    """A batch whose row r holds the documents ``rows[r]`` one after the other."""
    size = len(rows)
    first = next(document for row in rows for document in row)
    tokens = np.zeros((size, row_size), np.int64)
    positions = np.zeros((size, row_size), np.int64)
    documents = np.full((size, row_size), -1, np.int64)
    weights = np.zeros((size, row_size), np.float32)
    greedy = np.zeros((size, row_size), np.bool_)
    features = torch.zeros(size, row_size, first.features.shape[1])
    targets = torch.zeros(size, row_size, first.final.shape[1])
    for r, row in enumerate(rows):
        start = 0
        for number, document in enumerate(row):
            n = min(len(document) - 1, row_size - start)
            if n < 1:
                continue
            place = slice(start, start + n)
            tokens[r, place] = document.ids[1 : n + 1]
            positions[r, place] = np.arange(n)
            documents[r, place] = number
            predicted_is_answer = np.append(document.answer, True)[2 : n + 2]
            weights[r, place] = np.where(predicted_is_answer, 1.0, prompt_weight)
            greedy[r, place] = document.greedy
            features[r, place] = document.features[:n].float()
            targets[r, place] = document.final[1 : n + 1].float()
            start += n
    as_tensor = torch.from_numpy
    return Batch(
        as_tensor(tokens),
        features,
        targets,
        as_tensor(positions),
        as_tensor(documents),
        as_tensor(weights),
        as_tensor(greedy),
    )


def epoch_rows(lengths: Ints, row_size: int, seed: int, epoch: int) -> list[list[int]]:
    """The documents of each row of an epoch, freshly shuffled; a function of its arguments alone.

    Args:
        lengths: [D] tokens of each document.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths))
    rows = pack((lengths[order] - 1).tolist(), row_size)
    return [[int(order[i]) for i in rows[r]] for r in rng.permutation(len(rows))]


def choose_draft_vocabulary(documents: Iterator[Document] | Sequence[Document], vocab_size: int, size: int) -> Ints:
    """The ``size`` most frequent answer tokens as d2t offsets [size] int64: target id = draft id + d2t[draft id].

    A prompt's token counts a tenth of an answer's: users' words come back in later answers. Ids never seen are taken
    in ascending order: tokenizers number their merges by frequency.
    """
    if not 1 <= size <= vocab_size:
        raise InvalidInputError(f"a draft vocabulary holds 1 to {vocab_size} tokens (the target's), got {size}")
    counts = np.zeros(vocab_size, np.int64)
    for document in documents:
        np.add.at(counts, document.ids, np.where(document.answer, 10, 1))
        counts[document.last] += 10
    kept = np.sort(np.argsort(-counts, kind="stable")[:size])
    return (kept - np.arange(size)).astype(np.int64)


def coverage(documents: Iterator[Document] | Sequence[Document], d2t: Ints) -> float:
    """Share of answer tokens that the draft vocabulary holds."""
    kept = np.arange(len(d2t)) + d2t
    hits = total = 0
    for document in documents:
        answers = np.append(document.ids[document.answer], document.last)
        hits += int(np.isin(answers, kept).sum())
        total += len(answers)
    return hits / max(total, 1)
