"""EAGLE-3: the next token's distribution alone, over several of the head's own steps (training-time test)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from eyas.checkpoints.eagle3 import save_eagle3
from eyas.drafters.eagle3 import Eagle3Drafter
from eyas.heads.config import Eagle3Config
from eyas.heads.eagle3 import Eagle3Head, initialise
from eyas.heads.layers import head_arrays
from eyas.train.batches import Batch
from eyas.train.losses import distillation_loss, teacher_probabilities, weighted_mean
from eyas.train.recipes.base import AddUp, BatchLoss, Recipe, alone, hard_shares, unroll
from eyas.train.settings import TrainSettings
from eyas.tree import Ints


class Eagle3Recipe(Recipe[Eagle3Config, Eagle3Head]):
    """See ``Recipe``. Without a feature loss nothing ties the head's outputs to the target's hidden states, so they
    must be learned on: several steps, and no noise on features of three different scales."""

    feature_levels = Eagle3Config.FEATURE_LEVELS
    defaults: ClassVar[Mapping[str, Any]] = {"unroll": 4, "noise": 0.0, "optimizer": "muon"}

    def new_head(self, config: Eagle3Config) -> Eagle3Head:
        return Eagle3Head(config)

    def initialise(self, head: Eagle3Head, draft_lm_head: Tensor, norm: Tensor, generator: torch.Generator) -> None:
        initialise(head, draft_lm_head, norm, generator)

    def loss(
        self,
        head: Eagle3Head,
        batch: Batch,
        embedding: Tensor,
        draft_lm_head: Tensor,
        settings: TrainSettings,
        noise: Tensor | None = None,
        add_up: AddUp = alone,
    ) -> BatchLoss:
        """Cross-entropy to the target's distribution over the draft vocabulary, see ``teacher_probabilities``."""
        features = batch.features if noise is None else batch.features + noise  # [B, S, 3H]
        total = features.new_zeros(())
        distillation_sum = shares = 0.0
        agreement = []
        rows = batch.weights > 0  # [B, S]
        teacher = teacher_probabilities(
            batch.targets[rows], draft_lm_head, hard_shares(batch, settings)
        )  # [n, draft vocab]
        scoring_rows = head.scoring_rows(draft_lm_head).to(draft_lm_head.dtype)
        for step in unroll(head, batch, embedding[batch.tokens], head.fuse(features), settings, add_up):
            distillation, same = distillation_loss(
                head.norm(step.outputs), scoring_rows, teacher, step.weights, step.total
            )
            total = total + step.share * distillation
            shares += step.share
            distillation_sum += float(distillation.detach())
            agreement.append(float(weighted_mean(same.float(), step.weights, step.total)))
        return BatchLoss(total / shares, 0.0, distillation_sum / settings.unroll, tuple(agreement), float(rows.sum()))

    def drafter(self, head: Eagle3Head, embedding: Tensor, lm_head: Tensor, d2t: Tensor | None) -> Eagle3Drafter:
        return Eagle3Drafter(head, embedding, lm_head, d2t)

    def save(self, path: Path, head: Eagle3Head, d2t: Ints | None, metadata: Mapping[str, str]) -> None:
        save_eagle3(path, head.config, head_arrays(head), d2t=d2t, metadata=metadata)
