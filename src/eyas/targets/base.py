"""The seam to the model whose output must not change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from eyas.errors import InvalidInputError, UnsupportedModelError
from eyas.tree import DraftTree, Floats, Ints
from eyas.verify import Acceptance

Features = Any
"""Per-token hidden states in whatever form the target keeps them (a torch tensor on its device, a numpy
array). The loop never looks inside: it indexes rows (``features[rows]``) and hands them to the drafter."""


@dataclass(frozen=True)
class TargetInfo:
    """What the rest of the house may know about a target.

    Attributes:
        name: as the user gave it.
        vocab_size: V.
        hidden_size: H.
        num_layers: L.
        max_positions: context limit in tokens, prompt and answer together.
        eos_token_ids: every id that ends an answer (generation_config's list included).
        engine: "transformers" or "native".
        dtype: weight type: "float32", "bfloat16", "int8", ...
        feature_levels: how many hidden states of size H stand side by side in one feature row: 1 (the input of
            lm_head, EAGLE-1/2), 3 (inputs of layers 2, L//2 and L-3, EAGLE-3) or 4 (those three, then that one: data
            from which either kind of head learns).
        kernels: the instruction set that the native engine computes with; empty elsewhere.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    engine: str
    dtype: str
    feature_levels: int = 1
    kernels: str = ""


def feature_layers(levels: int, num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs are the features; ``num_layers`` stands for lm_head, behind the final norm.

    Raises:
        InvalidInputError: levels other than 1, 3 and 4.
        UnsupportedModelError: too few layers for three different inputs.
    """
    if levels not in (1, 3, 4):
        raise InvalidInputError(f"feature_levels is 1 (EAGLE-1/2), 3 (EAGLE-3) or 4 (both), got {levels}")
    if levels > 1 and num_layers < 6:
        raise UnsupportedModelError(f"EAGLE-3 features need a model of at least 6 layers, this one has {num_layers}")
    inner = (2, num_layers // 2, num_layers - 3) if levels > 1 else ()
    return inner if levels == 3 else (*inner, num_layers)


class TargetOutput(Protocol):
    """Logits and features of the rows of one pass; N rows, stays on the target's device until asked."""

    @property
    def features(self) -> Features:
        """[N, feature_levels * H], row i belongs to row i of the tree (or of the prefilled tokens)."""
        ...

    def argmax(self) -> Ints:
        """[N] int64 on the host: index of the (first) largest logit of each row with logits."""
        ...

    def row(self, node: int) -> Floats:
        """[V] float32 on the host: the raw logits of one row; a fresh array the caller may change."""
        ...


@runtime_checkable
class SamplesItself(Protocol):
    """A TargetOutput whose engine verifies sampled answers by itself."""

    def verify_sampled(self, tree: DraftTree, temperature: float, rng: np.random.Generator) -> Acceptance:
        """As ``eyas.verify.verify_sampling`` where each node's distribution is the softmax of its logits over
        ``temperature`` > 0; draws the same random numbers."""
        ...


class TargetCache(Protocol):
    """K/V of one request. Rows written by ``verify`` are provisional until ``commit``."""

    @property
    def length(self) -> int:
        """Committed tokens whose K/V are held."""
        ...

    def commit(self, path: Sequence[int]) -> None:
        """Keep the provisional rows ``path`` (node indices of the last verified tree, root first, increasing)
        in this order right after the committed prefix, and forget the others."""
        ...

    def truncate(self, length: int) -> None:
        """Forget every token from position ``length`` on."""
        ...


class Target(Protocol):
    """A causal language model that can verify trees. Besides its weights it holds at most memory that caches share:
    nothing of a request outlives its cache."""

    @property
    def info(self) -> TargetInfo: ...

    def new_cache(self, capacity: int | None = None) -> TargetCache:
        """An empty cache for one request; ``capacity`` in tokens is a hint, the cache grows."""
        ...

    def prefill(self, cache: TargetCache, tokens: Sequence[int]) -> TargetOutput:
        """Append T >= 1 tokens to the committed prefix (chunked inside as needed).

        Returns features for all T rows ([T, F]); logits for the last row only, addressed as row 0 / -1
        (``argmax`` has length 1).
        """
        ...

    def verify(self, batch: Sequence[tuple[TargetCache, DraftTree]], *, logits: bool = True) -> list[TargetOutput]:
        """One pass over the trees of several requests. Row i of a tree sees its cache's committed prefix, its own
        ancestors and itself; its position is ``cache.length + depth``. Logits for all rows, unless ``logits`` is False:
        then only ``argmax`` will be asked, and an engine need not write down the rest."""
        ...


class ArrayOutput:
    """TargetOutput over plain numpy arrays: logits [R, V] float32, features [N, F]."""

    def __init__(self, logits: Floats, features: Features) -> None:
        self._logits = logits
        self._features = features

    @property
    def features(self) -> Features:
        return self._features

    def argmax(self) -> Ints:
        best: Ints = self._logits.argmax(axis=-1).astype(np.int64)
        return best

    def row(self, node: int) -> Floats:
        logits: Floats = self._logits[node].astype(np.float32, copy=True)
        return logits
