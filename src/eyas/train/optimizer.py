"""The optimisers of a head: AdamW for everything, or Muon for its matrices and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from eyas.train.muon import Muon
from eyas.train.settings import TrainSettings


class HeadOptimizer:
    """One or two PyTorch optimisers that take their steps together.

    Muon turns the momentum of a matrix into the nearest orthogonal one, which suits the projections of a layer. An
    lm_head has a row per token, most of which a batch hardly touches: like norms and biases it is AdamW's.
    """

    def __init__(self, head: nn.Module, settings: TrainSettings) -> None:
        self._parts: dict[str, Optimizer] = {}
        self._rates = {"muon": settings.matrix_learning_rate, "adamw": settings.learning_rate}
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in head.named_parameters():
            muons = settings.optimizer == "muon" and parameter.ndim == 2 and name != "lm_head.weight"
            (matrices if muons else others).append(parameter)
        if matrices:
            self._parts["muon"] = Muon(
                matrices, lr=settings.matrix_learning_rate, momentum=0.95, weight_decay=settings.weight_decay
            )
        self._parts["adamw"] = torch.optim.AdamW(
            others,
            lr=settings.learning_rate,
            betas=(0.9, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def step(self, share: float) -> None:
        """Follow the gradients at ``share`` of the highest learning rates."""
        for name, optimizer in self._parts.items():
            for group in optimizer.param_groups:
                group["lr"] = share * self._rates[name]
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._parts.values():
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {name: optimizer.state_dict() for name, optimizer in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave; an AdamW's own state, as older checkpoints hold it, is taken, too."""
        states = {"adamw": dict(state)} if "param_groups" in state else state
        for name, optimizer in self._parts.items():
            optimizer.load_state_dict(states[name])
