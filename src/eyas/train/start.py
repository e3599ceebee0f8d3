"""A new run may begin with the weights of a head instead of random ones, and make it larger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from eyas.checkpoints.head_layout import HeadCheckpoint
from eyas.errors import CheckpointError
from eyas.heads.config import HeadConfig
from eyas.train.checkpoint import differing

FREE = ("draft_vocab_size", "max_position_embeddings")
"""What may change: no weight depends on it."""

GROWING = ("intermediate_size", "num_layers")
"""What may become larger."""

WRITES = ("o_proj.weight", "down_proj.weight")
"""The projections that write to the residual stream."""


def check_start(start: HeadCheckpoint[Any], config: HeadConfig) -> None:
    """Refuse a head that none of shape ``config`` can begin with.

    Raises:
        CheckpointError: the shapes differ in more than the draft vocabulary, or in that where the head has an lm_head
            of its own; or a head that is larger.
    """
    free = FREE[1:] if "lm_head.weight" in start.tensors else FREE
    grown = tuple(name for name in GROWING if getattr(start.config, name) <= getattr(config, name))
    if faults := differing(asdict(start.config), config, free + grown):
        raise CheckpointError(f"training cannot begin with {start.name}, a head of another shape: {faults}")


def start_weights(start: HeadCheckpoint[Any], fresh: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of ``start`` for a head that may be larger, float32 under their names.

    What is new comes from ``fresh``, but for what writes: further layers and a wider MLP add nothing at first, and the
    larger head begins with the same output.

    Args:
        fresh: the start values that the head would have otherwise.
    """
    weights = {}
    for name, values in fresh.items():
        grown = torch.zeros_like(values) if name.endswith(WRITES) else values.clone()
        if name in start.tensors:
            old = torch.tensor(start.tensors[name])
            grown[tuple(slice(size) for size in old.shape)] = old
        weights[name] = grown
    return weights
