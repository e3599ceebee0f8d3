"""The target on the native CPU engine: verifying a tree costs little more than decoding one token.

A row's logits are the same bits whatever shares its pass (other rows, other requests, chunks, threads), so greedy
output with any draft tree is that of plain decoding, in every weight type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from eyas import native
from eyas.errors import ContextLengthError, InvalidInputError, NotEnoughMemoryError, UnsupportedModelError
from eyas.native.config import StoredWeights, core_config, weight_type
from eyas.native.memory import check_memory
from eyas.targets.base import TargetCache, TargetInfo, TargetOutput, feature_layers
from eyas.tree import DraftTree, Floats, Ints
from eyas.verify import Acceptance

if TYPE_CHECKING:
    from eyas.models import ModelSource
    from eyas.native import _core

PREFILL_CHUNK = 256
"""Rows per pass of a prompt; any number gives the same bits."""


class NativeOutput:
    """TargetOutput, SamplesItself: over arrays that the engine filled.

    Attributes:
        features: [N, feature_levels * H] float32.
    """

    __slots__ = ("_best", "_core", "_logits", "features")

    def __init__(self, core: _core.Model, logits: Floats | None, best: Ints, features: Floats) -> None:
        self._core = core
        self._logits = logits  # [R, V], None where they were not asked for
        self._best = best  # [R]
        self.features = features

    def argmax(self) -> Ints:
        return self._best

    def row(self, node: int) -> Floats:
        fresh: Floats = self._kept()[node].copy()
        return fresh

    def verify_sampled(self, tree: DraftTree, temperature: float, rng: np.random.Generator) -> Acceptance:
        proposals = [
            (node, drawn.weights, drawn.token_ids, list(drawn.tokens), list(drawn.places))
            for node, drawn in tree.proposals.items()
        ]
        path, token, recovered = self._core.verify_sampled(
            self._kept(), tree.tokens, tree.parents, proposals, temperature, rng.bit_generator.capsule
        )
        return Acceptance(tuple(path), token, recovered)

    def _kept(self) -> Floats:
        if self._logits is None:
            raise InvalidInputError("this pass kept no logits, only their argmax")
        return self._logits


class NativeCache:
    """TargetCache in the engine's pages. One request's; not for two threads at once.

    Attributes:
        core: the compiled cache.
    """

    __slots__ = ("core",)

    def __init__(self, core: _core.Cache) -> None:
        self.core = core

    @property
    def length(self) -> int:
        return self.core.length

    @property
    def nbytes(self) -> int:
        """Bytes of the pages held, shared ones included."""
        return self.core.nbytes

    def commit(self, path: Sequence[int]) -> None:
        try:
            self.core.commit(list(path))
        except ValueError as error:
            raise InvalidInputError(str(error)) from None

    def truncate(self, length: int) -> None:
        try:
            self.core.truncate(length)
        except ValueError as error:
            raise InvalidInputError(str(error)) from None

    def fork(self) -> NativeCache:
        """A second request with the same committed prefix; pages are shared until one of the two writes."""
        return NativeCache(self.core.fork())


class NativeTarget:
    """A Llama, Mistral, Qwen2 or Qwen3 model on the CPU engine as ``eyas.targets.base.Target``.

    Weights only: all state is in the caches. Several threads may use one target; their passes take turns.
    """

    def __init__(self, core: _core.Model, pool: _core.Pool, info: TargetInfo) -> None:
        self.core = core
        self.pool = pool
        self._info = info

    @classmethod
    def load(
        cls,
        source: ModelSource,
        *,
        dtype: str = "auto",
        threads: int | None = None,
        feature_levels: int = 1,
        kernels: str = "",
        pool: _core.Pool | None = None,
    ) -> NativeTarget:
        """Pack a model's weights.

        Args:
            source: where config and weights come from.
            dtype: "bfloat16" ("auto"), "int8", "float32", or "q4": the blocks of a GGUF file as they are (Q4_0, Q4_1,
                Q8_0; anything else becomes int8).
            threads: None takes every processor this process may use.
            feature_levels: 1, 3 or 4, see ``TargetInfo``.
            kernels: a kernel set by name instead of the best one, for tests.
            pool: another target's threads to share; ``threads`` is then its number.

        Raises:
            UnsupportedModelError: the engine lacks a feature of the model, or is not built here.
            InvalidInputError: an unknown dtype, weights that do not fit the config.
            NotEnoughMemoryError: before anything is packed.
        """
        if not native.available():
            raise UnsupportedModelError(native.reason())
        kind = weight_type(dtype)
        try:
            check_memory(source.name, core_config(source.config), source.tensors, kind, kernels)
        except ValueError as error:
            raise InvalidInputError(f"{source.name}: {error}") from None
        try:
            return cls.from_weights(
                source.config,
                StoredWeights(source.tensors),
                name=source.name,
                eos_token_ids=source.eos_token_ids,
                dtype=kind,
                threads=threads,
                feature_levels=feature_levels,
                kernels=kernels,
                pool=pool,
            )
        finally:
            source.tensors.release()

    @classmethod
    def from_weights(
        cls,
        config: Mapping[str, Any],
        weights: Mapping[str, Any],
        *,
        name: str = "model",
        eos_token_ids: Sequence[int] = (),
        dtype: str = "auto",
        threads: int | None = None,
        feature_levels: int = 1,
        kernels: str = "",
        pool: _core.Pool | None = None,
    ) -> NativeTarget:
        """The same from arrays: Hugging Face names to float32 or bfloat16-as-uint16 arrays, or to GGUF blocks as
        (type, [rows, bytes] uint8, columns)."""
        if not native.available():
            raise UnsupportedModelError(native.reason())
        kind = weight_type(dtype)
        numbers = core_config(config)
        layers = numbers["num_hidden_layers"]
        inputs = feature_layers(feature_levels, layers)
        pool = pool or native.core.Pool(threads or native.default_threads())
        try:
            core = native.core.Model.load(numbers, weights, kind, pool, inputs, kernels)
        except ValueError as error:
            raise InvalidInputError(f"{name}: {error}") from None
        except MemoryError:
            raise NotEnoughMemoryError(f"{name}: memory ran out while its weights were packed as {kind}") from None
        info = TargetInfo(
            name=name,
            vocab_size=numbers["vocab_size"],
            hidden_size=numbers["hidden_size"],
            num_layers=layers,
            max_positions=numbers["max_position_embeddings"],
            eos_token_ids=tuple(eos_token_ids),
            engine="native",
            dtype=kind,
            feature_levels=feature_levels,
            kernels=core.kernels,
        )
        return cls(core, pool, info)

    @property
    def info(self) -> TargetInfo:
        return self._info

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights; one pass reads them once (of a separate embedding table, its rows)."""
        return self.core.weight_bytes

    @property
    def cache_token_bytes(self) -> int:
        """Bytes of K and V per token of context."""
        return self.core.cache_token_bytes

    def new_cache(self, capacity: int | None = None) -> NativeCache:
        return NativeCache(self.core.new_cache())

    def prefill(self, cache: TargetCache, tokens: Sequence[int]) -> NativeOutput:
        own = _own(cache)
        ids = np.asarray(tokens, np.int64)
        if len(ids) == 0:
            raise InvalidInputError("a prompt needs at least one token")
        if own.length + len(ids) > self._info.max_positions:
            raise ContextLengthError(
                f"{len(ids)} tokens after {own.length} do not fit the context of {self._info.max_positions}"
            )
        parts: list[Floats] = []
        for start in range(0, len(ids), PREFILL_CHUNK):
            chunk = ids[start : start + PREFILL_CHUNK]
            wanted = "last" if start + len(chunk) == len(ids) else "none"
            logits, best, features = self._pass([own], chunk, None, np.array([len(chunk)]), wanted)
            own.core.commit_all()
            parts.append(features)
        return NativeOutput(self.core, logits, best, parts[0] if len(parts) == 1 else np.concatenate(parts))

    def verify(self, batch: Sequence[tuple[TargetCache, DraftTree]], *, logits: bool = True) -> list[TargetOutput]:
        wanted = "all" if logits else "argmax"
        if len(batch) == 1:
            cache, tree = batch[0]
            counts = np.array([len(tree)])
            return [NativeOutput(self.core, *self._pass([_own(cache)], tree.tokens, tree.parents, counts, wanted))]
        if not batch:
            return []
        trees = [tree for _, tree in batch]
        counts = np.fromiter(map(len, trees), np.int64, len(trees))
        every, best, features = self._pass(
            [_own(cache) for cache, _ in batch],
            np.concatenate([tree.tokens for tree in trees]),
            np.concatenate([tree.parents for tree in trees]),
            counts,
            wanted,
        )
        ends = np.cumsum(counts).tolist()
        slices = map(slice, [0, *ends[:-1]], ends)
        return [
            NativeOutput(self.core, every[rows] if every is not None else None, best[rows], features[rows])
            for rows in slices
        ]

    def _pass(
        self, caches: list[NativeCache], tokens: Ints, parents: Ints | None, counts: Ints, wanted: str
    ) -> tuple[Floats | None, Ints, Floats]:
        try:
            logits, best, features = self.core.forward(
                [cache.core for cache in caches], tokens, parents, counts, wanted
            )
        except ValueError as error:
            raise InvalidInputError(str(error)) from None
        except MemoryError:
            lengths = ", ".join(str(cache.length) for cache in caches)
            raise NotEnoughMemoryError(
                f"memory ran out in a pass over {len(tokens)} tokens after {lengths} in the cache"
            ) from None
        assert features is not None  # by default they are wanted
        return logits, best, features


def _own(cache: TargetCache) -> NativeCache:
    """A cache that this engine made. InvalidInputError for another engine's."""
    if not isinstance(cache, NativeCache):
        raise InvalidInputError(f"the native engine needs a cache of its own, got a {type(cache).__name__}")
    return cache
