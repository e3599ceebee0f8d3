"""The documents that a run trains on, epoch by epoch, and those held out to judge its head.

Stores may grow while a run trains: each epoch takes what is there when it begins. Its rows are a function of the seed,
its number and these documents, so a resumed run goes on in the middle of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from eyas.errors import InvalidInputError
from eyas.train.batches import pack
from eyas.train.processes import Processes
from eyas.train.settings import TrainSettings
from eyas.train.store import Document, FeatureStore
from eyas.tree import Bools, Ints

HELD_OUT_EVERY = 40
"""Every so manieth prompt is held out: by its index, so that a growing store keeps the split."""


@dataclass
class EpochState:
    """Where a run stands among its documents.

    Attributes:
        epoch, position: batches of this epoch done.
        documents: documents of each store that this epoch is made of (a store may grow meanwhile).
    """

    epoch: int = 0
    position: int = 0
    documents: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Plan:
    """An epoch: places (store, document) of its documents, and its rows as indices into them."""

    places: list[tuple[int, int]]
    rows: list[list[int]]


class Epochs:
    """The stores of a run, in batches.

    Args:
        paths: directories of answered prompts.
        settings: rows of a batch, their size, and the seed of the order.
        hidden_size, levels: H of the head's target, and what its documents hold as features (see ``FeatureStore``).
        processes: those that share each batch; they may see a growing store at different sizes, and agree on the least.

    Raises:
        CheckpointError: a store that cannot be read, or lacks the levels.
        InvalidInputError: a store of another target's size, or no answers yet.
    """

    def __init__(
        self, paths: Sequence[Path], settings: TrainSettings, processes: Processes, *, hidden_size: int, levels: int
    ) -> None:
        self._paths = list(paths)
        self._settings = settings
        self._processes = processes
        self._levels = levels
        self._stores = self._open()
        self._plan: _Plan | None = None
        for store in self._stores:
            if store.hidden_size != hidden_size:
                raise InvalidInputError(
                    f"{store.path} holds features of a model of hidden size {store.hidden_size}, the head's is "
                    f"{hidden_size}"
                )
        if not any(len(store) for store in self._stores):
            raise InvalidInputError(f"no answers yet in {', '.join(map(str, paths))}")

    def next_rows(self, state: EpochState) -> list[list[Document]]:
        """The documents of each row of the next batch; ``state`` moves on, into the next epoch where one ends."""
        if state.position == 0:
            self._stores = self._open()
            state.documents = self._processes.least([len(store) for store in self._stores])
            self._plan = None
        if self._plan is None:
            self._plan = self._plan_of(state)
        start, count = state.position * self._settings.rows, self._settings.rows
        chosen = [[self._plan.places[i] for i in row] for row in self._plan.rows[start : start + count]]
        state.position += 1
        if start + count >= len(self._plan.rows):
            state.epoch, state.position = state.epoch + 1, 0
        return [[self._stores[store][document] for store, document in row] for row in chosen]

    def training(self) -> list[Document]:
        """What is there to train on, in order."""
        return [store[i] for store in self._stores for i in np.flatnonzero(~_held_out(store)).tolist()]

    def held_out(self) -> list[Document]:
        """What is never trained on."""
        return [store[i] for store in self._stores for i in np.flatnonzero(_held_out(store)).tolist()]

    def feature_deviation(self) -> float:
        """Standard deviation of the features, from the first document of each store."""
        sample = torch.cat([store[0].features.float() for store in self._stores if len(store)])
        return float(sample.std())

    def _open(self) -> list[FeatureStore]:
        return [FeatureStore(path, levels=self._levels) for path in self._paths]

    def _plan_of(self, state: EpochState) -> _Plan:
        places: list[tuple[int, int]] = []
        lengths: list[int] = []
        for number, (store, count) in enumerate(zip(self._stores, state.documents, strict=True)):
            usable = np.flatnonzero(~_held_out(store)[:count] & (store.lengths()[:count] > 2))
            places += [(number, int(i)) for i in usable]
            lengths += store.lengths()[usable].tolist()
        settings = self._settings
        return _Plan(places, epoch_rows(np.array(lengths, np.int64), settings.row_size, settings.seed, state.epoch))


def epoch_rows(lengths: Ints, row_size: int, seed: int, epoch: int) -> list[list[int]]:
    """The documents of each row of an epoch, freshly shuffled; a function of its arguments alone.

    Args:
        lengths: [D] tokens of each document.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths))
    rows = pack((lengths[order] - 1).tolist(), row_size)
    return [[int(order[i]) for i in rows[r]] for r in rng.permutation(len(rows))]


def _held_out(store: FeatureStore) -> Bools:
    """[D], by document."""
    held_out: Bools = store.prompt_indices() % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    return held_out
