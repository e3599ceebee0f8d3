"""The seam between the trainer and the kinds of heads, and the unrolling that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from eyas.drafters.base import Drafter
from eyas.heads.config import HeadConfig
from eyas.heads.layers import DraftHead, HeadCache
from eyas.train.batches import Batch, Places
from eyas.train.settings import TrainSettings
from eyas.tree import Ints

Config = TypeVar("Config", bound=HeadConfig)
Head = TypeVar("Head", bound=DraftHead)

AddUp = Callable[[Tensor], Tensor]
"""What a sum over some rows is over the whole batch, where processes share one."""


def alone(value: Tensor) -> Tensor:
    """``AddUp`` of rows that are the whole batch."""
    return value


@dataclass(frozen=True)
class BatchLoss:
    """One batch's outcome, or a part's: the values of all parts add up to the batch's.

    Attributes:
        loss: scalar to minimise.
        regression, distillation: its parts, mean over rows and steps; regression is 0 where the recipe has none.
        agreement: share of rows, per unrolled step, where the head's first choice is the target's.
        weight: rows counted.
    """

    loss: Tensor
    regression: float
    distillation: float
    agreement: tuple[float, ...]
    weight: float


class Recipe(ABC, Generic[Config, Head]):
    """How one kind of head is made, taught, tried out and saved."""

    feature_levels: ClassVar[int]
    """What its batches hold as features (see ``eyas.train.store.FeatureStore``)."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Settings that suit this kind better than those of ``TrainSettings``."""

    @abstractmethod
    def new_head(self, config: Config) -> Head:
        """A head without sensible values."""

    @abstractmethod
    def initialise(self, head: Head, draft_lm_head: Tensor, norm: Tensor, generator: torch.Generator) -> None:
        """Give a new head its start values, from the target's scored rows [draft vocab, H] and final norm [H]."""

    @abstractmethod
    def loss(
        self,
        head: Head,
        batch: Batch,
        embedding: Tensor,
        draft_lm_head: Tensor,
        settings: TrainSettings,
        noise: Tensor | None = None,
        add_up: AddUp = alone,
    ) -> BatchLoss:
        """The loss of a batch; a function of its arguments alone.

        Args:
            embedding: [V, H] of the target.
            draft_lm_head: [draft vocab, H], the rows of the target's lm_head that are scored, in the dtype to multiply
                in.
            noise: like ``batch.features``, added to them.
            add_up: where ``batch`` is a part of one; called once per unrolled step.
        """

    @abstractmethod
    def drafter(self, head: Head, embedding: Tensor, lm_head: Tensor, d2t: Tensor | None) -> Drafter:
        """Draft with the head as it is; ``lm_head`` [V, H] is the target's."""

    @abstractmethod
    def save(self, path: Path, head: Head, d2t: Ints | None, metadata: Mapping[str, str]) -> None:
        """Write the head in its published layout."""


@dataclass(frozen=True)
class UnrolledStep:
    """One step of the head on a batch.

    Attributes:
        share: weight of the step in the loss.
        outputs: [n, H] the head's, for the rows whose batch weight is above 0.
        weights: [n] of those rows; 0 where a document has no true pair that far back.
        total: their sum over the whole batch.
    """

    share: float
    outputs: Tensor
    weights: Tensor
    total: Tensor


def unroll(
    head: DraftHead, batch: Batch, embeds: Tensor, hidden: Tensor, settings: TrainSettings, add_up: AddUp = alone
) -> Iterator[UnrolledStep]:
    """Let the head take ``settings.unroll`` steps from every pair, as drafting would: after the first on its own
    outputs, each step seeing true pairs and self-made ones as a draft chain does (``Batch.step_mask``).

    Args:
        embeds: [B, S, H] of the batch's tokens.
        hidden: [B, S, H] true features as the head reads them.
    """
    cache = UnrollCache(head.config.num_layers) if settings.unroll > 1 else None
    rows = batch.weights > 0  # [B, S]
    out = head(embeds, hidden, batch.positions, batch.step_mask(1), cache)  # [B, S, H]
    weights = batch.weights[rows]
    yield UnrolledStep(1.0, out[rows], weights, add_up(weights.sum()))
    if settings.unroll == 1:
        return
    places = batch.taught(settings.unroll)
    embeds, positions = _at(embeds, places), batch.positions.gather(1, places.index)  # [B, P, H], [B, P]
    counted = (batch.weights.gather(1, places.index) > 0) & places.used  # the same pairs as rows, in the same order
    hidden = _at(_follow(hidden, out), places)
    for step in range(2, settings.unroll + 1):
        if settings.detach:
            hidden = hidden.detach()
        out = head(embeds, hidden, positions, batch.step_mask(step, places), cache)  # [B, P, H]
        share = settings.unroll_decay ** (step - 1)
        usable = weights * (positions[counted] >= step - 1)
        yield UnrolledStep(share, out[counted], usable, add_up(usable.sum()))
        hidden = _follow(hidden, out)


def hard_shares(batch: Batch, settings: TrainSettings) -> Tensor | None:
    """``settings.hard_share`` at the rows whose batch weight is above 0 and whose document is greedy, 0 at the other
    counted ones: [n] float32; None where it is 0 everywhere."""
    if settings.hard_share == 0.0:
        return None
    return batch.greedy[batch.weights > 0].float() * settings.hard_share


def _follow(hidden: Tensor, out: Tensor) -> Tensor:
    """The output of pair t - 1 stands in for the true feature t. Behind a gap the pair before is another's: such a
    pair's own loss does not count, nor does any counted pair see it."""
    return torch.cat((hidden[:, :1], out[:, :-1]), dim=1)


def _at(values: Tensor, places: Places) -> Tensor:
    """[B, S, H] -> [B, P, H]."""
    return values.gather(1, places.index[:, :, None].expand(-1, -1, values.shape[2]))


class UnrollCache(HeadCache):
    """Keys and values of all unrolled steps side by side, kept as autograd values instead of written in place."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self._past: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        past = self._past[layer]
        if past is not None:
            keys, values = torch.cat((past[0], keys), dim=2), torch.cat((past[1], values), dim=2)
        self._past[layer] = (keys, values)
        return keys, values
