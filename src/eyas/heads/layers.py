"""What the networks of all draft heads are made of: attention with a cache, MLP, norms, rotary embedding, weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.heads.config import HeadConfig
from eyas.heads.rope import rotary_frequencies

Head = TypeVar("Head", bound=nn.Module)

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class HeadCache:
    """Keys and values of one request, per layer, in buffers that grow by doubling.

    The head appends; whoever owns the cache truncates. Rows before ``length`` are valid.
    """

    def __init__(self, num_layers: int, capacity: int = 0) -> None:
        self.length = 0
        self._capacity = capacity
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write rows [B, KVH, T, D] behind the valid ones; returns views of all rows [B, KVH, length + T, D].

        ``length`` itself moves once per pass (``advance``), after every layer has written.
        """
        end = self.length + keys.shape[2]
        return self._write(self._keys, layer, keys, end), self._write(self._values, layer, values, end)

    def _write(self, buffers: list[Tensor | None], layer: int, rows: Tensor, end: int) -> Tensor:
        buffer = buffers[layer]
        if buffer is None or buffer.shape[2] < end:
            batch, heads, _, dim = rows.shape
            larger = rows.new_empty(batch, heads, max(self._capacity, 2 * end), dim)
            if buffer is not None:
                larger[:, :, : self.length] = buffer[:, :, : self.length]
            buffers[layer] = buffer = larger
        buffer[:, :, self.length : end] = rows
        return buffer[:, :, :end]

    def advance(self, rows: int) -> None:
        self.length += rows

    def truncate(self, length: int) -> None:
        """Forget every row from ``length`` on; a length beyond the valid rows changes nothing."""
        self.length = min(self.length, length)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        scaled: Tensor = self.weight * wide.to(x.dtype)
        return scaled


class Attention(nn.Module):
    """Grouped-query attention; queries, keys and values read ``input_size`` numbers, the output has H."""

    def __init__(self, config: HeadConfig, input_size: int) -> None:
        super().__init__()
        dim, bias = config.head_dim, config.qkv_bias
        self.head_dim = dim
        self.grouped = config.num_key_value_heads != config.num_attention_heads
        self.q_proj = nn.Linear(input_size, config.num_attention_heads * dim, bias=bias)
        self.k_proj = nn.Linear(input_size, config.num_key_value_heads * dim, bias=bias)
        self.v_proj = nn.Linear(input_size, config.num_key_value_heads * dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, config.hidden_size, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: HeadCache | None, layer: int
    ) -> Tensor:
        split = (*x.shape[:2], -1, self.head_dim)
        queries = rotate(self.q_proj(x).view(split).transpose(1, 2), cos, sin)  # [B, QH, T, D]
        keys = rotate(self.k_proj(x).view(split).transpose(1, 2), cos, sin)  # [B, KVH, T, D]
        values = self.v_proj(x).view(split).transpose(1, 2)
        if cache is not None:
            keys, values = cache.append(layer, keys, values)  # [B, KVH, S, D]
        out = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=None if mask is None else mask.to(queries.dtype),
            is_causal=mask is None and x.shape[1] > 1,
            enable_gqa=self.grouped,
        )
        written: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return written


class MLP(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = _ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """A Llama decoder layer, the ``index``-th of a head; the first of an EAGLE-1/2 head has no input norm."""

    def __init__(self, config: HeadConfig, index: int, *, input_norm: bool = True) -> None:
        super().__init__()
        self.index = index
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps) if input_norm else None
        self.self_attn = Attention(config, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: HeadCache | None) -> Tensor:
        read = x if self.input_layernorm is None else self.input_layernorm(x)
        x = x + self.self_attn(read, cos, sin, mask, cache, self.index)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DraftHead(nn.Module, ABC):
    """A head's own weights and its arithmetic; the target's embedding stays with the target.

    ``state_dict()`` has the keys of an official checkpoint. A fresh head holds PyTorch's default values: initialise it
    to train it or ``load_state_dict`` to use it.
    """

    config: HeadConfig
    fc: nn.Linear

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        frequencies, self._rope_factor = rotary_frequencies(
            config.head_dim, config.rope_theta, config.rope_scaling, config.max_position_embeddings
        )
        # Not a buffer: head.bfloat16() would round it, and angles need float32.
        self._frequencies = torch.from_numpy(frequencies)

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """What ``forward`` reads of true features [..., feature_levels * H]: [..., H]."""

    @abstractmethod
    def run_layers(
        self, embeds: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: HeadCache | None
    ) -> Tensor: ...

    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: HeadCache | None = None,
    ) -> Tensor:
        """Run over T pairs.

        Args:
            embeds: [B, T, H] target embedding of token t+1.
            hidden: [B, T, H] ``fuse`` of the target's feature t, or this head's own output on the pair before.
            positions: [B, T] or [1, T] integers, t of each pair.
            mask: additive float, broadcastable to [B, 1, T, S] with S = cached rows + T: 0 where row t may look,
                -inf (or a very negative number) where not; every row must see something. None: causal.
            cache: keys and values of earlier pairs; the T new rows are appended to it.

        Returns:
            [B, T, H] the head's output, which scores token t+2 and stands in for the unknown feature t+1.
        """
        cos, sin = self._angles(positions)
        past = 0 if cache is None else cache.length
        rows = embeds.shape[1]
        if mask is None and past > 0 and rows > 1:
            mask = causal_mask(rows, past, embeds.device)
        out = self.run_layers(embeds, hidden, cos, sin, mask, cache)
        if cache is not None:
            cache.advance(rows)
        return out

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, 1, T, head_dim] float32."""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        angles = positions[:, None, :, None].float() * self._frequencies  # [B, 1, T, head_dim / 2]
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self._rope_factor, angles.sin() * self._rope_factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [B, heads, T, D] in float32, returned in the dtype of ``x``."""
    wide = x.float()
    low, high = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)


def causal_mask(rows: int, past: int, device: torch.device) -> Tensor:
    """[1, 1, rows, past + rows] float32: each row sees the past, the rows before it and itself."""
    return torch.full((1, 1, rows, past + rows), -torch.inf, device=device).triu_(past + 1)


def draft_rows(lm_head: Tensor, d2t: Tensor | None) -> Tensor:
    """Rows of the target's lm_head [V, H] that score the draft vocabulary: [draft vocab, H], or all of them.

    Args:
        lm_head: [V, H].
        d2t: [draft vocab] int64 offsets, target id = draft id + d2t[draft id]; None for the whole vocabulary.
    """
    return lm_head if d2t is None else lm_head[torch.arange(len(d2t), device=d2t.device) + d2t]


def normal_(parameter: Tensor, std: float, generator: torch.Generator) -> None:
    """Fill with normal numbers, drawn in float32 on the generator's device: one seed, one head, whatever its dtype."""
    drawn = torch.empty(parameter.shape, device=generator.device).normal_(0.0, std, generator=generator)
    parameter.copy_(drawn)


def with_arrays(
    make: Callable[[], Head],
    tensors: Mapping[str, np.ndarray],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Head:
    """The head that ``make`` makes, with the given weights (float32 arrays under their checkpoint names), ready to
    draft: no gradients.

    Raises:
        RuntimeError: names or shapes other than the head's own; a loaded checkpoint never differs.
    """
    with torch.device("meta"):
        head = make()
    weights = {name: torch.tensor(array, dtype=dtype, device=device) for name, array in tensors.items()}
    head.load_state_dict(weights, assign=True)
    return head.requires_grad_(False).eval()


def head_arrays(head: nn.Module) -> dict[str, np.ndarray]:
    """The head's weights as float32 numpy arrays under their checkpoint names (widening bfloat16 loses nothing)."""
    return {name: tensor.detach().float().cpu().numpy() for name, tensor in head.state_dict().items()}
