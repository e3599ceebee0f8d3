"""The target over transformers: any decoder-only causal LM whose attention sees its whole context.

No modelling code is copied: a pass calls the model's own forward with a cache that writes into a preallocated pool
(``eyas.targets.hf_cache``), explicit position ids and a 4-D float mask. Nothing is stored on the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from eyas.errors import CheckpointError, ContextLengthError, InvalidInputError, UnsupportedModelError
from eyas.targets.base import TargetCache, TargetInfo
from eyas.targets.hf_cache import CachePool, PooledCache, PoolPass
from eyas.tree import Bools, DraftTree, Floats, Ints

ATTENTION = "eyas_tree"
PREFILL_CHUNK = 512
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention under a 4-D float mask, without copying K/V per query head.

    Args:
        module: the attention module (unused, transformers passes it).
        query: [B, heads, N, head_dim].
        key, value: [B, kv_heads, T, head_dim].
        attention_mask: [B, 1, N, T], added to the scores.
        scaling: of the scores; default head_dim ** -0.5.

    Returns:
        [B, N, heads, head_dim], and no weights.
    """
    batch, heads, rows, dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    if groups > 1:  # the query heads of one KV head become further rows, so its keys are read once
        query = query.reshape(batch, kv_heads, groups * rows, dim)
        if attention_mask is not None and rows > 1:
            attention_mask = attention_mask.repeat(1, 1, groups, 1)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(batch, heads, rows, -1).transpose(1, 2), None


AttentionInterface.register(ATTENTION, tree_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


@dataclass(frozen=True)
class TorchOutput:
    """TargetOutput on the model's device.

    Attributes:
        logits: [R, V], R == N after verify, 1 after prefill.
        hidden: [N, feature_levels * H].
    """

    logits: torch.Tensor
    hidden: torch.Tensor

    @property
    def features(self) -> torch.Tensor:
        return self.hidden

    def argmax(self) -> Ints:
        indices: Ints = self.logits.argmax(dim=-1).cpu().numpy()
        return indices

    def row(self, node: int) -> Floats:
        return np.array(self.logits[node].float().cpu().numpy())


@dataclass(frozen=True)
class _Rows:
    """New rows of one request in a pass: tokens [N], position ids [N], who sees whom among them [N, N]."""

    cache: PooledCache
    tokens: Ints
    positions: Ints
    mask: Bools


class HFTarget:
    """A transformers causal LM as ``eyas.targets.base.Target``.

    Args:
        model: the loaded model, in evaluation mode, its attention set to ``ATTENTION`` or ``"eager"``.
        name: as the user gave it.
        eos_token_ids: default: those of the model's generation config.
        max_positions: default: the config's context limit.
        feature_levels: 1 or 3, see ``TargetInfo``.
        slots: caches that share one pool and so one pass of ``verify``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        *,
        eos_token_ids: Sequence[int] | None = None,
        max_positions: int | None = None,
        feature_levels: int = 1,
        slots: int = 1,
    ) -> None:
        config = model.config.get_text_config()
        if feature_levels not in (1, 3):
            raise InvalidInputError(f"feature_levels is 1 (EAGLE-1/2) or 3 (EAGLE-3), got {feature_levels}")
        if eos_token_ids is None:
            eos = model.generation_config.eos_token_id if model.generation_config else config.eos_token_id
            eos_token_ids = [] if eos is None else [eos] if isinstance(eos, int) else eos
        self.model = model
        self.slots = slots
        self._pools: list[CachePool] = []
        layers = int(config.num_hidden_layers)
        self._levels = (2, layers // 2, layers - 3) if feature_levels == 3 else (-1,)
        self._info = TargetInfo(
            name=name,
            vocab_size=self.lm_head_weight.shape[0],
            hidden_size=config.hidden_size,
            num_layers=layers,
            max_positions=max_positions or config.max_position_embeddings,
            eos_token_ids=tuple(eos_token_ids),
            engine="transformers",
            dtype=str(model.dtype).removeprefix("torch."),
            feature_levels=feature_levels,
        )

    @property
    def info(self) -> TargetInfo:
        return self._info

    @property
    def embedding_weight(self) -> torch.Tensor:
        """[V, H] input embeddings, shared memory with the model."""
        weight: torch.Tensor = self.model.get_input_embeddings().weight
        return weight.detach()

    @property
    def lm_head_weight(self) -> torch.Tensor:
        """[V, H] output projection, shared memory with the model."""
        weight: torch.Tensor = self.model.get_output_embeddings().weight
        return weight.detach()

    def new_cache(self, capacity: int | None = None) -> PooledCache:
        wanted = capacity or 256
        for pool in self._pools:
            if pool.free:
                pool.reserve(wanted)
                return pool.take()
        pool = CachePool(self.slots, wanted)
        if self.slots > 1:  # a pool of one slot lives and dies with its cache
            self._pools.append(pool)
        return pool.take()

    def prefill(self, cache: TargetCache, tokens: Sequence[int]) -> TorchOutput:
        own = self._own(cache)
        if len(tokens) == 0:
            raise InvalidInputError("prefill needs at least one token")
        ids = self._checked(tokens)
        hidden: list[torch.Tensor] = []
        for start in range(0, len(ids), PREFILL_CHUNK):
            chunk = ids[start : start + PREFILL_CHUNK]
            n = len(chunk)
            self._check_room(own, n)
            rows = _Rows(own, chunk, own.length + np.arange(n), np.tri(n, dtype=bool))
            (out,) = self._pass([rows], last_logits_only=True)
            own.extend(n)
            hidden.append(out.hidden)
        return TorchOutput(out.logits, torch.cat(hidden))

    def verify(self, batch: Sequence[tuple[TargetCache, DraftTree]]) -> list[TorchOutput]:
        entries = []
        for cache, tree in batch:
            own = self._own(cache)
            self._check_room(own, int(tree.depths.max()) + 1)
            tokens = self._checked(tree.tokens)
            entries.append(_Rows(own, tokens, own.length + tree.depths, tree.ancestor_mask))
        if len({id(entry.cache) for entry in entries}) < len(entries):
            raise InvalidInputError("one cache cannot verify two trees in one pass")
        by_pool: dict[int, list[int]] = {}
        for index, entry in enumerate(entries):
            by_pool.setdefault(id(entry.cache.pool), []).append(index)
        outputs: dict[int, TorchOutput] = {}
        for indices in by_pool.values():
            outputs.update(zip(indices, self._pass([entries[i] for i in indices]), strict=True))
        for entry in entries:
            entry.cache.provide(len(entry.tokens))
        return [outputs[i] for i in range(len(entries))]

    def _own(self, cache: TargetCache) -> PooledCache:
        if not isinstance(cache, PooledCache):
            raise InvalidInputError(f"a cache of the transformers target is needed, got a {type(cache).__name__}")
        return cache

    def _checked(self, tokens: Sequence[int] | Ints) -> Ints:
        ids = np.asarray(tokens, np.int64)
        if ids.min() < 0 or ids.max() >= self._info.vocab_size:
            raise InvalidInputError(
                f"token ids must lie in 0..{self._info.vocab_size - 1}, got {ids.min()}..{ids.max()}"
            )
        return ids

    def _check_room(self, cache: PooledCache, new: int) -> None:
        if cache.length + new > self._info.max_positions:
            raise ContextLengthError(
                f"{cache.length} tokens in the cache and {new} more exceed the {self._info.max_positions} positions "
                f"of {self._info.name}"
            )

    @torch.inference_mode()
    def _pass(self, entries: Sequence[_Rows], last_logits_only: bool = False) -> list[TorchOutput]:
        """One forward call over requests whose caches share a pool."""
        width = max(len(entry.tokens) for entry in entries)
        view = PoolPass(entries[0].cache.pool, [entry.cache for entry in entries], width)
        ids = np.zeros((view.batch, width), np.int64)
        positions = np.zeros((view.batch, width), np.int64)
        seen = np.zeros((view.batch, width, view.columns), bool)
        seen[:, :, 0] = True  # a padding row must see something, or its softmax is nan
        for entry in entries:
            line, n, start = view.line(entry.cache), len(entry.tokens), entry.cache.length
            ids[line, :n] = entry.tokens
            positions[line, :n] = entry.positions
            seen[line, :n, :start] = True
            seen[line, :n, start : start + n] = entry.mask
            if start == 0:
                seen[line, :n, 0] = entry.mask[:, 0]
        device, dtype = self.model.device, self.model.dtype
        bias = np.where(seen, np.float32(0), np.float32(torch.finfo(dtype).min))
        output = self.model(
            input_ids=torch.from_numpy(ids).to(device),
            position_ids=torch.from_numpy(positions).to(device),
            attention_mask=torch.from_numpy(bias).to(device, dtype)[:, None],  # [B, 1, N, T]
            cache=view,
            use_cache=True,
            logits_to_keep=1 if last_logits_only else 0,
            output_hidden_states=True,
        )
        hidden = torch.cat([output.hidden_states[level] for level in self._levels], dim=-1)  # [B, N, F]
        outputs = []
        for entry in entries:
            line, n = view.line(entry.cache), len(entry.tokens)
            logits = output.logits[line] if last_logits_only else output.logits[line, :n]
            outputs.append(TorchOutput(logits, hidden[line, :n]))
        return outputs


def from_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, Any], name: str, *, dtype: str = "float32", device: str = "cpu",
    **options: Any,
) -> HFTarget:
    """A target from an HF config dict and HF-named tensors (numpy or torch), e.g. read from a GGUF file."""
    settings = AutoConfig.for_model(**config)
    check_supported(settings, name)
    state = {key: torch.as_tensor(value).to(DTYPES[dtype]) for key, value in tensors.items()}
    model = AutoModelForCausalLM.from_config(settings, attn_implementation=ATTENTION)
    model.load_state_dict(state, assign=True, strict=False)
    model.tie_weights()
    return HFTarget(model.to(device).eval(), name, **options)


def check_supported(config: PretrainedConfig, name: str) -> None:
    pass
