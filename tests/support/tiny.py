"""Tiny targets: a random Llama, and a table of distributions without any network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from eyas.targets.base import ArrayOutput, TargetInfo
from eyas.tree import DraftTree, Floats

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from eyas.targets.native import NativeTarget


def tiny_llama(
    *,
    vocab_size: int = 64,
    hidden_size: int = 32,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    max_positions: int = 256,
    tied: bool = True,
    seed: int = 0,
    **config: object,
) -> LlamaForCausalLM:
    """A float32 LlamaForCausalLM with random weights, large enough that its greedy text does not loop at once.

    No token ends an answer; further ``config`` values go to LlamaConfig. The global torch generator is left alone.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        initializer_range=0.3,
        **config,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(settings).eval()


def greedy_ranking(model: LlamaForCausalLM) -> Callable[[list[int]], list[int]]:
    """``next_tokens`` for a scripted drafter: all tokens by falling logit, from a fresh full forward pass."""
    import torch

    @torch.inference_mode()
    def ranking(prefix: list[int]) -> list[int]:
        logits = model(torch.tensor([prefix])).logits[0, -1]
        return torch.argsort(logits, descending=True, stable=True).tolist()

    return ranking


def tiny_native(model: LlamaForCausalLM, dtype: str = "float32", eos_token_ids: Sequence[int] = ()) -> NativeTarget:
    """The same weights on the native engine, with one thread."""
    from eyas.targets.native import NativeTarget

    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
    )
    config = {name: getattr(model.config, name) for name in names}
    tied = model.config.tie_word_embeddings
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items() if not (tied and "lm_head" in name)}
    return NativeTarget.from_weights(
        {"model_type": "llama", "rope_theta": 10000.0, "tie_word_embeddings": tied, **config},
        weights,
        dtype=dtype,
        threads=1,
        eos_token_ids=eos_token_ids,
    )


class TableTarget:
    """A target that is a table: a fixed distribution per context, drawn from a seed and the whole prefix.

    Small enough to enumerate. Its feature of a position is (position, token), so a test can see which feature was
    paired with which token.

    Args:
        vocab_size: V.
        seed: another seed, another table.
        max_positions: context limit.
        spread: standard deviation of the logits; 0 makes all tokens equally likely.
        eos_token_ids: tokens that end an answer.
        memory: how many last tokens decide the distribution; None: all of them.
    """

    def __init__(
        self,
        vocab_size: int = 4,
        *,
        seed: int = 0,
        max_positions: int = 64,
        spread: float = 1.0,
        eos_token_ids: tuple[int, ...] = (),
        memory: int | None = None,
    ) -> None:
        self._seed = seed
        self._spread = spread
        self._memory = memory
        self._rows: dict[tuple[int, ...], Floats] = {}
        self._info = TargetInfo(
            name="table",
            vocab_size=vocab_size,
            hidden_size=2,
            num_layers=1,
            max_positions=max_positions,
            eos_token_ids=eos_token_ids,
            engine="table",
            dtype="float32",
        )

    @property
    def info(self) -> TargetInfo:
        return self._info

    def logits(self, prefix: Sequence[int]) -> Floats:
        """[V] float32 raw logits of the token after ``prefix``."""
        key = tuple(prefix if self._memory is None else prefix[len(prefix) - min(self._memory, len(prefix)) :])
        if key not in self._rows:
            rng = np.random.default_rng([self._seed, len(key), *key])
            self._rows[key] = (rng.normal(size=self._info.vocab_size) * self._spread).astype(np.float32)
        return self._rows[key].copy()

    def ranking(self, prefix: list[int]) -> list[int]:
        """``next_tokens`` for a scripted drafter."""
        return np.argsort(-self.logits(prefix), kind="stable").tolist()

    def new_cache(self, capacity: int | None = None) -> TableCache:
        return TableCache()

    def prefill(self, cache: TableCache, tokens: Sequence[int]) -> ArrayOutput:
        start = cache.length
        cache.tokens += [int(token) for token in tokens]
        cache.check(self._info.max_positions)
        features = np.array([(start + i, token) for i, token in enumerate(tokens)], np.float32)
        return ArrayOutput(self.logits(cache.tokens)[None], features)

    def verify(self, batch: Sequence[tuple[TableCache, DraftTree]], *, logits: bool = True) -> list[ArrayOutput]:
        return [self._verify(cache, tree) for cache, tree in batch]

    def _verify(self, cache: TableCache, tree: DraftTree) -> ArrayOutput:
        paths = [tree.tokens[tree.path_to(node)].tolist() for node in range(len(tree))]
        cache.tree = tree
        cache.check(self._info.max_positions)
        logits = np.stack([self.logits(cache.tokens + path) for path in paths])
        features = np.array([(cache.length + len(path) - 1, path[-1]) for path in paths], np.float32)
        return ArrayOutput(logits, features)


class TableCache:
    """The committed tokens themselves, and the tree that was verified last."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.tree: DraftTree | None = None

    @property
    def length(self) -> int:
        return len(self.tokens)

    def commit(self, path: Sequence[int]) -> None:
        assert self.tree is not None, "commit without verify"
        parents = self.tree.parents[list(path)].tolist()
        assert parents == [-1, *path][: len(path)], f"{list(path)} is not a path from the root"
        self.tokens += self.tree.tokens[list(path)].tolist()
        self.tree = None

    def truncate(self, length: int) -> None:
        del self.tokens[length:]
        self.tree = None

    def check(self, max_positions: int) -> None:
        """Nothing may run past the context limit, provisional rows included."""
        deepest = 0 if self.tree is None else int(self.tree.depths.max()) + 1
        assert len(self.tokens) + deepest <= max_positions, "a position beyond the context limit"
