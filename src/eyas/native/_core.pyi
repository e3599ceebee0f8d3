"""The compiled engine (``csrc/binding.cpp``). Arrays are C-contiguous, on the CPU, and of exactly these dtypes.

N nodes or tokens, V the target's vocabulary, D a head's draft vocabulary, H hidden size, F width of a feature row. What
does not fit raises ValueError; memory that runs out, MemoryError. Passes let other Python threads run.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import CapsuleType

from eyas.tree import Doubles, Floats, Ints

Scores = tuple[Ints, Floats] | tuple[Ints, Floats, Floats] | Floats
"""A head's word on the children of n nodes: the k likeliest, as ids [n, k] (indices into D) and log-probabilities
[n, k]; of draws, their places [n, k] in D (-1: none left), the weights [n, D] they were drawn from, and the probability
of the likeliest [n, 1]; raw scores [n, D] where k is 0."""

Knots = Sequence[tuple[Sequence[float], Sequence[float]]]
"""A calibration: (promised, observed) of each level's map."""

def kernel_sets() -> list[str]:
    """Names of the kernel sets this processor can run, best first."""

def packed_bytes(type: str, rows: int, cols: int, kernels: str = "") -> int:
    """Bytes of one matrix in a weight type of the engine or a GGUF block type; ``kernels`` "" is the best set."""

def read_bandwidth(pool: Pool, megabytes: int = 256, repeats: int = 5) -> float:
    """Bytes per second read by all threads of the pool, best of ``repeats``."""

def peak_flops(pool: Pool, steps: int = 2000000, repeats: int = 5) -> float:
    """Floating-point operations per second of all threads of the pool, best of ``repeats``."""

class Pool:
    """Threads that share the work of a pass."""

    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...

class Cache:
    """K/V of one request, in pages."""

    @property
    def length(self) -> int:
        """Committed tokens."""
    @property
    def provisional(self) -> int:
        """Rows that the last pass wrote after them."""
    @property
    def nbytes(self) -> int:
        """Of the pages held, shared ones included."""
    def commit(self, path: Sequence[int]) -> None:
        """Keep the provisional rows ``path`` (increasing), in this order, and forget the others."""
    def commit_all(self) -> None: ...
    def truncate(self, length: int) -> None: ...
    def fork(self) -> Cache:
        """Another cache with the same tokens; pages are shared until one of the two writes."""

class Model:
    """A target's packed weights."""

    @staticmethod
    def load(
        config: dict[str, Any],
        weights: Mapping[str, Any],
        type: str,
        pool: Pool,
        feature_layers: Sequence[int],
        kernels: str = "",
    ) -> Model:
        """
        Args:
            config: see ``eyas.native.config.core_config``.
            weights: see ``eyas.native.config.StoredWeights``.
            type: "float32", "bfloat16", "int8" or "q4".
            feature_layers: whose inputs are the features, ascending; the number of layers stands for lm_head.
        """
    @property
    def weight_bytes(self) -> int: ...
    @property
    def streamed_bytes(self) -> int:
        """Of the weights that one pass reads."""
    @property
    def multiplications(self) -> float:
        """By weights, per row with logits."""
    @property
    def cache_token_bytes(self) -> int: ...
    @property
    def kernels(self) -> str:
        """Name of the kernel set."""
    def new_cache(self) -> Cache: ...
    def forward(
        self,
        caches: Sequence[Cache],
        tokens: Ints,
        parents: Ints | None,
        counts: Ints,
        logits: str = "all",
        features: bool = True,
    ) -> tuple[Floats | None, Ints, Floats | None]:
        """One pass over the trees of several requests, whose rows become provisional.

        Args:
            tokens: [N] of all trees, one after the other.
            parents: [N] indices within a tree, -1 for its root; None: chains.
            counts: [caches] nodes of each tree.
            logits: of which rows: "all", "last" (of each tree) or "none"; "argmax" keeps the argmax of all rows alone.

        Returns:
            Logits [R, V] of those rows, None where none are kept; their argmax [R]; features [N, F], None unless
            ``features``.
        """
    def verify_sampled(
        self,
        logits: Floats,
        tokens: Ints,
        parents: Ints,
        proposals: Sequence[tuple[int, Floats, Ints | None, Sequence[int], Sequence[int]]],
        temperature: float,
        bits: CapsuleType,
    ) -> tuple[list[int], int, bool]:
        """``eyas.verify.verify_sampling`` for logits [N, V] that only a temperature shapes.

        Args:
            tokens, parents: [N].
            proposals: node, weights [D], token ids [D] or None, tokens, places: see ``eyas.tree.Proposal``.
            bits: a bit generator's capsule, which nobody else uses meanwhile.

        Returns:
            Accepted path, next token, whether it was recovered.
        """

class Head:
    """A draft head's packed weights."""

    @staticmethod
    def load(
        target: Model, config: dict[str, Any], weights: Mapping[str, Any], type: str, token_ids: Ints | None
    ) -> Head:
        """``token_ids`` [D]: target ids of the draft vocabulary; None: all, in order. The rest as for ``Model``."""
    @property
    def weight_bytes(self) -> int: ...
    @property
    def draft_vocab(self) -> int:
        """D."""
    def new_session(self) -> HeadSession: ...

class Rule:
    """What a growing tree expands, see ``eyas.native.rules``."""

class DynamicRule(Rule):
    def __init__(self, topk: int, by_value: bool, calibration: Knots) -> None: ...

class BudgetedRule(Rule):
    """The arguments are attributes of ``eyas.policies.budgeted.BudgetedPolicy``."""

    def __init__(
        self,
        topk: int,
        calibration: Knots,
        acceptance: Sequence[Sequence[float]],
        closing: Sequence[float],
        level_ms: Sequence[float],
        first_ms: float,
        floor: float,
        rate: float | None,
        drafts: bool,
    ) -> None: ...

class HeadSession:
    """One request's drafting state: K/V of the committed pairs (token, feature before it), then of a growing tree.

    Where ``uniforms`` are given, children are drawn by them at ``temperature``.
    """

    @property
    def length(self) -> int:
        """Committed pairs."""
    @property
    def has_tip(self) -> bool:
        """Whether the head's output on the last pair is at hand."""
    @property
    def tree_rows(self) -> int: ...
    def commit(
        self, tokens: Ints, features: Floats, k: int, uniforms: Doubles | None = None, temperature: float = 1.0
    ) -> Scores:
        """Take in n pairs, tokens [n] and features [n, F], and score the last one's children; uniforms [1, k]."""
    def score_tip(self, k: int, uniforms: Doubles | None = None, temperature: float = 1.0) -> Scores:
        """The children of the last pair once more; uniforms [1, k]."""
    def expand(
        self,
        tokens: Ints,
        parents: Ints,
        depth: int,
        k: int,
        uniforms: Doubles | None = None,
        temperature: float = 1.0,
    ) -> Scores:
        """Run over n nodes of one level; uniforms [n, k].

        Args:
            tokens, parents: [n]; a parent is 0 for the root, r + 1 for the r-th row of this tree.
        """
    def grow(
        self,
        root: int,
        tokens: Ints,
        features: Floats | None,
        rule: Rule,
        max_depth: int,
        uniforms: Doubles | None = None,
        temperature: float = 1.0,
        confidence: Sequence[float] = [],
    ) -> tuple[tuple[Ints, Ints, Floats, Floats, Ints, tuple[int, ...]], Doubles, tuple[Ints, Ints, Floats] | None]:
        """A whole tree below ``root``.

        Args:
            tokens, features: [n], [n, F] pairs to take in first; n == 0 with None: the tip is scored once more.
            uniforms: [max_depth, topk, topk].
            confidence: [3], see ``eyas.draws.CONFIDENCE``; only for draws.

        Returns:
            Tokens, parents, log_probs, log_values, ranks and levels of ``eyas.policies.base.Candidates``; calibrated
            values of a prefix of them; of draws, the nodes [n] that have children, their places [n * topk], and the
            weights [n, D] they were drawn from.
        """
    def truncate(self, length: int) -> None: ...
