"""The queue of committed pairs that a head has not run over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from eyas.drafters.waiting import WaitingPairs
from eyas.errors import InvalidInputError

FEATURES = np.arange(10, dtype=np.float32).reshape(5, 2)

ENGINES: dict[str, Callable[[], WaitingPairs[Any]]] = {
    "numpy": lambda: WaitingPairs(2, lambda given: np.array(given, np.float32), np.concatenate),
    "torch": lambda: WaitingPairs(2, torch.tensor, torch.cat),
}


def pairs(waiting: WaitingPairs[Any]) -> tuple[list[int], list[list[float]] | None]:
    assert bool(waiting) == (waiting.features is not None)
    assert len(waiting) == len(waiting.tokens)
    return waiting.tokens, None if waiting.features is None else waiting.features.tolist()


@pytest.mark.parametrize("engine", ENGINES)
def test_pairs_stay_together(engine: str) -> None:
    waiting, given = ENGINES[engine](), FEATURES.copy()
    assert pairs(waiting) == ([], None)
    waiting.keep(3)
    waiting.add([], given[:0])
    assert pairs(waiting) == ([], None)
    waiting.add([7, 8], given[:2])
    waiting.add(np.array([9]), given[2:3])
    waiting.add((5, 6), given[3:])
    given[:] = -1  # the target uses its buffer again
    assert pairs(waiting) == ([7, 8, 9, 5, 6], FEATURES.tolist())
    for count in (9, 5):
        waiting.keep(count)
        assert len(waiting) == 5
    waiting.keep(4)
    waiting.add([1], FEATURES[:1])
    assert pairs(waiting) == ([7, 8, 9, 5, 1], [*FEATURES[:4].tolist(), [0.0, 1.0]])
    waiting.keep(3)
    assert pairs(waiting) == ([7, 8, 9], FEATURES[:3].tolist())
    waiting.keep(-2)
    assert pairs(waiting) == ([], None)


@pytest.mark.parametrize("engine", ENGINES)
def test_each_token_needs_its_feature(engine: str) -> None:
    waiting = ENGINES[engine]()
    with pytest.raises(InvalidInputError, match=r"3 committed tokens need features of shape \(3, 2\), got \(5, 2\)"):
        waiting.add([1, 2, 3], FEATURES)
    assert pairs(waiting) == ([], None)
