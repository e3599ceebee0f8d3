"""Trying out heads in training on the native CPU engine, which drafts many times faster than PyTorch there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from eyas import native
from eyas.checkpoints.eagle import EagleCheckpoint
from eyas.checkpoints.eagle3 import Eagle3Checkpoint
from eyas.drafters.native_eagle import NativeEagleDrafter
from eyas.errors import NotEnoughMemoryError
from eyas.heads.config import Eagle3Config, HeadConfig
from eyas.heads.layers import DraftHead, head_arrays
from eyas.models import ModelSource
from eyas.native.config import ACTIVATIONS
from eyas.targets.native import NativeTarget
from eyas.train.evaluate import MakeDrafter
from eyas.tree import Ints


def native_drafter(source: ModelSource, config: HeadConfig, *, threads: int, dtype: str = "auto") -> MakeDrafter | None:
    """What makes drafters of heads as ``eyas generate`` would; None where the engine cannot run target or head.

    Args:
        source: the target. Of its layers only as many are loaded as the engine insists on: drafting reads embedding and
            lm_head alone.
        config: shape of the heads.
        dtype: weight type of the target, which that of the head follows.
    """
    runs = native.available() and native.supports(source.config, dtype) and config.hidden_act in ACTIVATIONS
    if not runs:
        return None
    eagle3 = isinstance(config, Eagle3Config)
    layers = min(source.config["num_hidden_layers"], 6 if eagle3 else 1)
    short = replace(source, config={**source.config, "num_hidden_layers": layers})
    levels = Eagle3Config.FEATURE_LEVELS if eagle3 else 1
    try:
        target = NativeTarget.load(short, dtype=dtype, threads=threads, feature_levels=levels)
    except NotEnoughMemoryError:
        return None

    def make(head: DraftHead, d2t: Ints | None) -> NativeEagleDrafter:
        read: Any = Eagle3Checkpoint if eagle3 else EagleCheckpoint
        return NativeEagleDrafter(read("head", head.config, head_arrays(head), d2t=d2t), target)

    return make
