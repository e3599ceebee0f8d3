"""The EAGLE-3 head (Li et al., arXiv 2503.01840): a decoder layer over three feature levels.

    h_t = fc(features_t)                        features: inputs of the target's layers 2, L//2 and L-3, side by side
    g_t = h_t + attention(concat(input_layernorm(embedding(token_{t+1})), hidden_norm(h_t)))
    out_t = g_t + mlp(post_attention_layernorm(g_t))
    draft logits = lm_head(norm(out_t))         over the draft vocabulary; lm_head is the head's own or the target's

Where feature t+1 is not known yet, out_t stands in for h_{t+1}: before the final norm, and without fc. Index and
position of a pair are those of the EAGLE-1/2 head. Ours alone are heads of several layers: those after the first are a
Llama's own and come between out and norm.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.heads.config import Eagle3Config
from eyas.heads.layers import MLP, Attention, DraftHead, HeadCache, Layer, RMSNorm, normal_, with_arrays


class MidLayer(nn.Module):
    """A decoder layer whose attention reads embedding and hidden state side by side, each under its own norm."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, 2 * config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, embeds: Tensor, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: HeadCache | None
    ) -> Tensor:
        read = torch.cat((self.input_layernorm(embeds), self.hidden_norm(x)), dim=-1)
        x = x + self.self_attn(read, cos, sin, mask, cache, 0)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Eagle3Head(DraftHead):
    """The head as a network; ``logits`` scores what it puts out."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.layers = nn.ModuleDict({str(index): Layer(config, index) for index in range(1, config.num_layers)})
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None
        if not config.target_lm_head:
            self.lm_head = nn.Linear(config.hidden_size, config.scored_tokens, bias=False)

    def fuse(self, features: Tensor) -> Tensor:
        fused: Tensor = self.fc(features)
        return fused

    def run_layers(
        self, embeds: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: HeadCache | None
    ) -> Tensor:
        out: Tensor = self.midlayer(embeds, hidden, cos, sin, mask, cache)
        for layer in self.layers.values():
            out = layer(out, cos, sin, mask, cache)
        return out

    def scoring_rows(self, draft_lm_head: Tensor) -> Tensor:
        """[draft vocab, H] that score: the head's own lm_head, or the target's rows if it has none."""
        return draft_lm_head if self.lm_head is None else self.lm_head.weight

    def logits(self, out: Tensor, draft_lm_head: Tensor) -> Tensor:
        """Of outputs [..., H]: [..., draft vocab], for the token after next; ``draft_lm_head`` [draft vocab, H] are the
        target's rows."""
        return F.linear(self.norm(out), self.scoring_rows(draft_lm_head))


@torch.no_grad()
def initialise(head: Eagle3Head, draft_lm_head: Tensor, norm: Tensor, generator: torch.Generator) -> None:
    """Start values near what the target itself computes.

    ``fc`` lets the deepest feature level through, the layer writes little to the residual stream (attention near
    uniform, small output projections, as in ``eyas.heads.eagle.initialise``), and final norm and lm_head, if it has
    one, are the target's own.

    Args:
        draft_lm_head: [draft vocab, H] the target's rows of the draft vocabulary.
        norm: [H] weight of the target's final norm.
    """
    hidden = head.config.hidden_size
    for name, parameter in head.named_parameters():
        if name == "norm.weight":
            parameter.copy_(norm)
        elif name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith(".bias"):
            parameter.zero_()
        elif name == "lm_head.weight":
            parameter.copy_(draft_lm_head)
        else:
            small = "q_proj" in name or "k_proj" in name or "o_proj" in name or "down_proj" in name
            normal_(parameter, 0.004 if small or name == "fc.weight" else 0.02, generator)
    head.fc.weight[:, -hidden:] += torch.eye(hidden, dtype=head.fc.weight.dtype, device=head.fc.weight.device)


def head_from_arrays(
    config: Eagle3Config,
    tensors: Mapping[str, np.ndarray],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Eagle3Head:
    """See ``with_arrays``."""
    return with_arrays(lambda: Eagle3Head(config), tensors, device, dtype)
