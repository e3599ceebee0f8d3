"""A new run may begin with the weights of a head instead of random ones."""

from __future__ import annotations

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


def start_weights(start: HeadCheckpoint[Any], config: HeadConfig) -> dict[str, Tensor]:
    """The weights of ``start``, float32 under their names, for a head of shape ``config``.

    Raises:
        CheckpointError: the shapes differ in more than the draft vocabulary, or in that where the head has an lm_head
            of its own.
    """
    free = FREE[1:] if "lm_head.weight" in start.tensors else FREE
    if faults := differing(asdict(start.config), config, free):
        raise CheckpointError(f"training cannot begin with {start.name}, a head of another shape: {faults}")
    return {name: torch.tensor(array) for name, array in start.tensors.items()}
