"""The target over transformers: any decoder-only causal LM whose attention sees its whole context.

No modelling code is copied: a pass calls the model's own forward with a cache that writes into a preallocated pool
(``eyas.targets.hf_cache``), explicit position ids and a 4-D float mask. Nothing is stored on the model.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.utils import logging as transformers_logging

from eyas.device import usable_device
from eyas.errors import CheckpointError, ContextLengthError, InvalidInputError, UnsupportedModelError
from eyas.memory import available_bytes, require_memory
from eyas.models import ModelSource
from eyas.targets.base import TargetCache, TargetInfo, TargetOutput, feature_layers
from eyas.targets.hf_cache import CachePool, PooledCache, PoolPass
from eyas.tree import Bools, DraftTree, Floats, Ints

ATTENTION = "eyas_tree"
PREFILL_CHUNK = 512
MIN_CAPACITY = 256
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
        attention_mask: [B, 1, N, T], added to the scores; None: causal.
        scaling: of the scores; default head_dim ** -0.5.

    Returns:
        [B, N, heads, head_dim], and no weights.
    """
    batch, heads, rows, dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    if attention_mask is None:  # the model used by itself, outside of our passes
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=rows > 1, scale=scaling, enable_gqa=groups > 1
        )
        return out.transpose(1, 2), None
    if groups > 1:  # the query heads of one KV head become further rows, so its keys are read once
        query = query.reshape(batch, kv_heads, groups * rows, dim)
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
        feature_levels: 1, 3 or 4, see ``TargetInfo``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        *,
        eos_token_ids: Sequence[int] | None = None,
        max_positions: int | None = None,
        feature_levels: int = 1,
    ) -> None:
        config = model.config.get_text_config()
        if eos_token_ids is None:
            eos = model.generation_config.eos_token_id if model.generation_config else config.eos_token_id
            eos_token_ids = [] if eos is None else [eos] if isinstance(eos, int) else eos
        self.model = model
        self._pools: dict[int, CachePool] = {}  # by capacity
        layers = int(config.num_hidden_layers)
        self._feature_layers = feature_layers(feature_levels, layers)
        self._info = TargetInfo(
            name=name,
            vocab_size=self.lm_head_weight.shape[0],
            hidden_size=config.hidden_size,
            num_layers=layers,
            max_positions=max_positions or _positions(config),
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
        return _weight(self.model.get_input_embeddings())

    @property
    def lm_head_weight(self) -> torch.Tensor:
        """[V, H] output projection, shared memory with the model."""
        return _weight(self.model.get_output_embeddings())  # type: ignore[no-untyped-call]

    def new_cache(self, capacity: int | None = None) -> PooledCache:
        """An empty cache. Caches of like capacity share a pool: ``verify`` runs them in one pass."""
        size = 1 << max(capacity or MIN_CAPACITY, MIN_CAPACITY).bit_length() - 1
        pool = self._pools.setdefault(size, CachePool(capacity or size))
        pool.reserve(capacity or size)
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

    def verify(self, batch: Sequence[tuple[TargetCache, DraftTree]], *, logits: bool = True) -> list[TargetOutput]:
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
            indices.sort(key=lambda i: entries[i].cache.slot)  # neighbours in the pool are read in place
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
        ids = np.zeros((len(entries), width), np.int64)
        positions = np.zeros((len(entries), width), np.int64)
        seen = np.zeros((len(entries), width, view.columns), bool)
        for line, entry in enumerate(entries):
            n, start = len(entry.tokens), entry.cache.length
            ids[line, :n] = entry.tokens
            positions[line, :n] = entry.positions
            seen[line, :n, :start] = True
            seen[line, :n, start : start + n] = entry.mask
            seen[line, n:, 0] = True  # a padding row must see something, or its softmax is nan
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
        hidden = torch.cat([output.hidden_states[level] for level in self._feature_layers], dim=-1)  # [B, N, F]
        outputs = []
        for line, entry in enumerate(entries):
            n = len(entry.tokens)
            logits = output.logits[line] if last_logits_only else output.logits[line, :n]
            outputs.append(TorchOutput(logits, hidden[line, :n]))
        return outputs


def _weight(module: torch.nn.Module) -> torch.Tensor:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach()


def load_hf(
    source: ModelSource,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    threads: int | None = None,
    feature_levels: int = 1,
) -> HFTarget:
    """Load a model that ``eyas.models.load_source`` found.

    Args:
        source: a Hugging Face directory or a GGUF file.
        dtype: "float32", "bfloat16", or "auto": bfloat16 on an accelerator, float32 on the CPU.
        device: as PyTorch names it.
        threads: CPU threads for all of PyTorch; None leaves its default.
        feature_levels: see ``TargetInfo``.

    Raises:
        UnsupportedModelError: a model whose cache cannot hold a tree.
        CheckpointError: weights that are missing or do not fit.
        InvalidInputError: an unknown dtype, or a device that is not there.
        NotEnoughMemoryError: before anything is loaded, on the CPU.
    """
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    if dtype not in DTYPES:
        raise InvalidInputError(
            f"the transformers engine computes in {' or '.join(DTYPES)}, not in {dtype!r}; int8 and q4 need the native "
            "engine"
        )
    place = usable_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    config = _config(source)
    check_supported(config, source.name)
    if place.type == "cpu":
        _require_memory(source, dtype)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    options: dict[str, Any] = {
        "config": config,
        "dtype": DTYPES[dtype],
        "attn_implementation": attention_for(config),
        "output_loading_info": True,
    }
    with _quiet():
        try:
            if source.format == "hf":
                model, info = model_class.from_pretrained(source.path, local_files_only=True, **options)
            else:
                # What the file holds in float32 comes as a read-only view of it: torch wants its own copy.
                arrays = {name: np.require(source.tensors.float32(name), requirements="W") for name in source.tensors}
                state = {name: torch.from_numpy(array) for name, array in arrays.items()}
                model, info = model_class.from_pretrained(None, state_dict=state, **options)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(f"{source.path} cannot be loaded: {error}") from error
    wrong = {key: sorted(map(str, info[key])) for key in ("missing_keys", "mismatched_keys") if info[key]}
    if wrong:
        raise CheckpointError(f"{source.path} does not hold the weights its config calls for: {wrong}")
    return HFTarget(
        model.to(place).eval(), source.name, eos_token_ids=source.eos_token_ids, feature_levels=feature_levels
    )


def _require_memory(source: ModelSource, dtype: str) -> None:
    values = sum(math.prod(source.tensors.shape(name)) for name in source.tensors)
    parts = {"weights": values * DTYPES[dtype].itemsize}
    if source.format == "gguf":
        parts["loading"] = values * 4  # dequantised before transformers takes them over
    advice = "" if dtype == "bfloat16" else "--dtype bfloat16 takes half of it, --engine native with int8 or q4 less"
    require_memory(f"{source.name} as {dtype}", parts, available_bytes(), advice)


def check_supported(config: PretrainedConfig, name: str) -> None:
    """Refuse what cannot verify a tree losslessly: state that is no K/V, and layers that forget.

    Raises:
        UnsupportedModelError: naming the model and what stands in the way.
    """
    text = config.get_text_config()
    reason = None
    if config.is_encoder_decoder:
        reason = "it is an encoder-decoder model"
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        reason = f"transformers knows no causal language model for model_type {config.model_type!r}"
    else:
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        kinds = set(getattr(text, "layer_types", None) or ["full_attention"]) - {"full_attention"}
        window = getattr(text, "sliding_window", None)
        if getattr(model_class, "_is_stateful", False) or "linear_attention" in kinds or "conv" in kinds:
            reason = "its layers are recurrent: a rejected draft token cannot be taken out of their state"
        elif kinds - {"sliding_attention"}:
            reason = f"its layers are of kind {', '.join(sorted(kinds))}; only full attention keeps every token"
        elif window and getattr(text, "use_sliding_window", True) and window < _positions(text):
            reason = f"its attention sees the last {window} tokens only, of a context of {_positions(text)}"
        elif not {"position_ids", "cache"} <= set(inspect.signature(model_class.forward).parameters):
            reason = "it takes no position ids, which the nodes of a tree need"
    if reason:
        raise UnsupportedModelError(
            f"{name} ({config.model_type}) cannot be a target: {reason}. "
            "Decoder-only models with full attention can: Llama, Qwen2, Qwen3, Mixtral, OLMo 2, GPT-NeoX, ..."
        )


def attention_for(config: PretrainedConfig) -> str:
    """Our attention, or eager where the model bends the scores in ways that a fused kernel cannot."""
    text = config.get_text_config()
    bends = getattr(text, "attn_logit_softcapping", None) or text.model_type in ("gpt_oss",)
    return "eager" if bends else ATTENTION


def _positions(config: PretrainedConfig) -> int:
    positions = getattr(config, "max_position_embeddings", None)
    return int(positions) if positions else 2048


def _config(source: ModelSource) -> PretrainedConfig:
    try:
        if source.format == "hf":
            config: PretrainedConfig = AutoConfig.from_pretrained(source.path, local_files_only=True)
        else:
            config = AutoConfig.for_model(**source.config)
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModelError(f"transformers cannot read the config of {source.name}: {error}") from None
    return config


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bar and load report: what is wrong becomes our own error."""
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
