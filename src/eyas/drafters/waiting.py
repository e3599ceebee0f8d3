"""Committed pairs whose true feature came, but that a head has not run over yet: what sessions of all engines queue.

A head runs over waiting pairs when a policy expands the root, so that a cycle that drafts nothing costs nothing. Right
after a session is truncated, with no pair committed since, the head's output at the tip is gone: the tree is then the
bare root, and verifying it brings the next pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from eyas.errors import InvalidInputError
from eyas.targets.base import Features
from eyas.tree import Floats

if TYPE_CHECKING:
    from torch import Tensor

Rows = TypeVar("Rows", "Tensor", Floats)


class WaitingPairs(Generic[Rows]):
    """The newest pairs of one request, oldest first.

    Args:
        feature_size: numbers of a feature, feature_levels * H.
        copied: makes the engine's own rows [n, feature_size] of a target's features. A copy, as the target may reuse
            its buffer before the next tree is grown.
        joined: one array of several, one below the other.
    """

    def __init__(
        self, feature_size: int, copied: Callable[[Features], Rows], joined: Callable[[list[Rows]], Rows]
    ) -> None:
        self.tokens: list[int] = []
        self._rows: list[Rows] = []
        self._feature_size = feature_size
        self._copied: Callable[[Features], Rows] = copied
        self._joined: Callable[[list[Rows]], Rows] = joined

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def features(self) -> Rows | None:
        """[n, feature_size] of all; None where no pair waits."""
        if len(self._rows) > 1:
            self._rows = [self._joined(self._rows)]
        return self._rows[0] if self._rows else None

    def add(self, tokens: Sequence[int], features: Features) -> None:
        """Queue n pairs.

        Raises:
            InvalidInputError: features of another shape than [n, feature_size].
        """
        rows, expected = self._copied(features), (len(tokens), self._feature_size)
        if tuple(rows.shape) != expected:
            raise InvalidInputError(
                f"{len(tokens)} committed tokens need features of shape {expected}, got {tuple(rows.shape)}"
            )
        if len(tokens):
            self.tokens += map(int, tokens)
            self._rows.append(rows)

    def keep(self, count: int) -> None:
        """Forget all but the first ``count``."""
        if count <= 0:
            self.clear()
        elif (features := self.features) is not None and count < len(self):
            self.tokens, self._rows = self.tokens[:count], [features[:count]]

    def clear(self) -> None:
        """Forget all: the head has run over them."""
        self.tokens, self._rows = [], []
