"""The EAGLE-1/2 head: one decoder layer that extrapolates the target's features.

    h_t = fc(concat(embedding(token_{t+1}), feature_t))
    predicted feature_{t+1} = decoder layer without input norm, without final norm (h)
    draft logits = predicted feature @ lm_head of the target

A feature is the target's hidden state after its final norm, the very input of lm_head. The pair
(feature_t, token_{t+1}) has index t, and t is its position for the rotary embedding.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from eyas.heads.config import EagleConfig
from eyas.heads.layers import DraftHead, HeadCache, Layer, normal_, with_arrays


class EagleHead(DraftHead):
    """The head as a network; its output is the predicted feature, and the target's lm_head scores it."""

    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList(Layer(config, index, input_norm=index > 0) for index in range(config.num_layers))

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def run_layers(
        self, embeds: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: HeadCache | None
    ) -> Tensor:
        x: Tensor = self.fc(torch.cat((embeds, hidden), dim=-1))
        for layer in self.layers:
            x = layer(x, cos, sin, mask, cache)
        return x


@torch.no_grad()
def initialise(head: EagleHead, generator: torch.Generator) -> None:
    """Start values that learn fast on raw, unnormalised features.

    The first layer reads features whose few outlying dimensions are dozens of times larger than the rest, with no
    norm in front: ordinary start values saturate its attention. So queries and keys start tiny (attention near
    uniform), ``fc`` starts as [small | identity] (the feature passes through), and the two projections that write
    to the residual stream start small (the layer begins near the identity).
    """
    hidden = head.config.hidden_size
    for name, parameter in head.named_parameters():
        if name.endswith("layernorm.weight"):
            parameter.fill_(1.0)
        elif name.endswith(".bias"):
            parameter.zero_()
        else:
            small = "q_proj" in name or "k_proj" in name or "o_proj" in name or "down_proj" in name
            normal_(parameter, 0.004 if small or name == "fc.weight" else 0.02, generator)
    head.fc.weight[:, hidden:] += torch.eye(hidden, dtype=head.fc.weight.dtype, device=head.fc.weight.device)


def head_from_arrays(
    config: EagleConfig,
    tensors: Mapping[str, np.ndarray],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> EagleHead:
    """See ``with_arrays``."""
    return with_arrays(lambda: EagleHead(config), tensors, device, dtype)
