"""EAGLE-1/2: come close to the next feature and to the next token's distribution; plain or unrolled (HASS)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from eyas.checkpoints.eagle import save_eagle
from eyas.drafters.eagle import EagleDrafter
from eyas.heads.config import EagleConfig
from eyas.heads.eagle import EagleHead, initialise
from eyas.heads.layers import head_arrays
from eyas.train.batches import Batch
from eyas.train.losses import distillation_loss, regression_loss, teacher_probabilities, weighted_mean
from eyas.train.recipes.base import AddUp, BatchLoss, Recipe, alone, hard_shares, unroll
from eyas.train.settings import TrainSettings
from eyas.tree import Ints


class EagleRecipe(Recipe[EagleConfig, EagleHead]):
    """See ``Recipe``."""

    feature_levels = 1

    def new_head(self, config: EagleConfig) -> EagleHead:
        return EagleHead(config)

    def initialise(self, head: EagleHead, draft_lm_head: Tensor, norm: Tensor, generator: torch.Generator) -> None:
        initialise(head, generator)

    def loss(
        self,
        head: EagleHead,
        batch: Batch,
        embedding: Tensor,
        draft_lm_head: Tensor,
        settings: TrainSettings,
        noise: Tensor | None = None,
        add_up: AddUp = alone,
    ) -> BatchLoss:
        features = batch.features if noise is None else batch.features + noise
        total = features.new_zeros(())
        regression_sum = distillation_sum = shares = 0.0
        agreement = []
        rows = batch.weights > 0  # [B, S]
        true = batch.targets[rows]  # [n, H]
        teacher = teacher_probabilities(true, draft_lm_head, hard_shares(batch, settings))  # [n, draft vocab]
        for step in unroll(head, batch, embedding[batch.tokens], features, settings, add_up):
            distillation, same = distillation_loss(step.outputs, draft_lm_head, teacher, step.weights, step.total)
            regression = weighted_mean(regression_loss(step.outputs, true), step.weights, step.total)
            total = total + step.share * (
                settings.regression_weight * regression + settings.distillation_weight * distillation
            )
            shares += step.share
            regression_sum += float(regression.detach())
            distillation_sum += float(distillation.detach())
            agreement.append(float(weighted_mean(same.float(), step.weights, step.total)))
        return BatchLoss(
            total / shares,
            regression_sum / settings.unroll,
            distillation_sum / settings.unroll,
            tuple(agreement),
            float(rows.sum()),
        )

    def drafter(self, head: EagleHead, embedding: Tensor, lm_head: Tensor, d2t: Tensor | None) -> EagleDrafter:
        return EagleDrafter(head, embedding, lm_head, d2t)

    def save(self, path: Path, head: EagleHead, d2t: Ints | None, metadata: Mapping[str, str]) -> None:
        save_eagle(path, head.config, head_arrays(head), d2t=d2t, metadata=metadata)
