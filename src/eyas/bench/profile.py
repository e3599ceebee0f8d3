"""What a pass of the native engine costs, beside what the machine could do, measured in one run.

Read bandwidth and arithmetic peak are measured by the engine's own kernels between the passes, so that a slow moment of
the machine hits both sides. The limit of a pass is the time in which its weights can be read once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from eyas import native
from eyas.checkpoints.heads import head_feature_levels, load_head
from eyas.environment import commit, machine, versions
from eyas.errors import UnsupportedModelError
from eyas.models import ModelSource
from eyas.policies import DynamicPolicy
from eyas.targets.native import NativeTarget
from eyas.tree import DraftTree, Floats

ROWS = (1, 2, 4, 6, 8, 10, 12, 16, 24, 32, 64)
TYPES = ("bfloat16", "int8", "q4")


def profile(
    source: ModelSource,
    *,
    types: Sequence[str] = TYPES,
    rows: Sequence[int] = ROWS,
    context: int = 256,
    repeats: int = 15,
    threads: int | None = None,
    draft: str | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure one model.

    Args:
        source: the model.
        types: weight types of the native engine.
        rows: M, new tokens per pass: a binary tree after ``context`` committed tokens, logits for every row.
        context: committed tokens.
        repeats: passes per figure; the median counts.
        threads: None takes all.
        draft: a head whose levels (4 nodes each, 4 children) are timed too.
        tell: progress, one line each.

    Returns:
        ``bandwidth_gb_s`` and ``peak_gflop_s`` (multiply-adds in registers: float32, or
        bfloat16 where the kernels have products of it), median and best; ``weights``:
        per type ``bytes`` of weights read per pass, ``cache_bytes`` of K/V read beside them, ``limit_ms`` (both over
        the bandwidth), ``forward_ms`` {M: ms}, ``share_of_bandwidth`` (limit over the first forward),
        ``share_of_peak`` (of the largest M), ``prefill_tokens_s``, ``draft_level_ms`` (None without a head); what was
        measured and where.
    """
    if not native.available():
        raise UnsupportedModelError(native.reason())
    bandwidths: list[float] = []
    peaks: list[float] = []
    weights: dict[str, Any] = {}
    levels = head_feature_levels(draft) if draft else 1
    for kind in types:
        tell(f"{kind}: loading")
        target = NativeTarget.load(source, dtype=kind, threads=threads, feature_levels=levels)
        timings = _time_target(target, rows, context, repeats, bandwidths, peaks, tell)
        timings["draft_level_ms"] = _time_draft(target, draft, context, repeats) if draft else None
        weights[kind] = timings
    bandwidth, peak = statistics.median(bandwidths), statistics.median(peaks)
    for timings in weights.values():
        timings["limit_ms"] = (timings["bytes"] + timings["cache_bytes"]) / bandwidth * 1e3
        timings["share_of_bandwidth"] = timings["limit_ms"] / timings["forward_ms"][str(rows[0])]
        most = rows[-1]
        timings["share_of_peak"] = timings.pop("flops_per_row") * most / timings["forward_ms"][str(most)] * 1e3 / peak
    return {
        "bandwidth_gb_s": bandwidth / 1e9,
        "bandwidth_gb_s_best": max(bandwidths) / 1e9,
        "peak_gflop_s": peak / 1e9,
        "peak_gflop_s_best": max(peaks) / 1e9,
        "model": source.name,
        "context": context,
        "repeats": repeats,
        "threads": threads or native.default_threads(),
        "kernels": native.kernel_sets()[0],
        "weights": weights,
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
    }


def _time_target(
    target: NativeTarget,
    rows: Sequence[int],
    context: int,
    repeats: int,
    bandwidths: list[float],
    peaks: list[float],
    tell: Callable[[str], None],
) -> dict[str, Any]:
    vocab = target.info.vocab_size
    ids = np.random.default_rng(0).integers(0, vocab, max(context, *rows))
    prompt = ids[:context].tolist()
    prefills = []
    for _ in range(3):
        cache = target.new_cache()
        prefills.append(_seconds(lambda cache=cache: target.prefill(cache, prompt)))  # type: ignore[misc]
    trees = {m: _binary_tree(ids[:m]) for m in rows}
    times: dict[int, list[float]] = {m: [] for m in rows}
    for repeat in range(repeats + 1):
        bandwidths.append(native.core.read_bandwidth(target.pool, 256, 1))
        peaks.append(native.core.peak_flops(target.pool, 500_000, 1))
        target.verify([(cache, trees[rows[0]])])  # measuring has emptied the caches, as no earlier pass would
        for m, tree in trees.items():
            seconds = _seconds(lambda tree=tree: target.verify([(cache, tree)]))  # type: ignore[misc]
            if repeat:  # the first round warms up
                times[m].append(seconds)
        tell(f"{target.info.dtype}: round {repeat} of {repeats}")
    return {
        "bytes": target.core.streamed_bytes,
        "cache_bytes": target.core.cache_token_bytes * context,
        "flops_per_row": 2 * target.core.multiplications,
        "forward_ms": {str(m): statistics.median(values) * 1e3 for m, values in times.items()},
        "forward_ms_best": {str(m): min(values) * 1e3 for m, values in times.items()},
        "prefill_tokens_s": context / min(prefills),
    }


def _time_draft(target: NativeTarget, draft: str, context: int, repeats: int) -> float:
    """Milliseconds per level, the first of five (one committed pair) included; the policy's Python too."""
    from eyas.drafters.native_eagle import NativeEagleDrafter

    drafter = NativeEagleDrafter(load_head(draft), target)
    session = drafter.new_session()
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, target.info.vocab_size, context + repeats + 1).tolist()
    features: Floats = rng.standard_normal((len(tokens), drafter.feature_size)).astype(np.float32)
    session.commit(tokens[:context], features[:context])
    policy = DynamicPolicy(num_steps=5, topk=4, num_draft_tokens=10)
    session.propose(tokens[context - 1], policy, 5)
    times = []
    for at in range(context, context + repeats):
        session.commit(tokens[at : at + 1], features[at : at + 1])
        times.append(_seconds(lambda at=at: session.propose(tokens[at], policy, 5)))  # type: ignore[misc]
    return statistics.median(times) / policy.num_steps * 1e3


def _binary_tree(tokens: Any) -> DraftTree:
    n = len(tokens)
    parents = (np.arange(n) - 1) // 2
    parents[0] = -1
    return DraftTree(np.asarray(tokens, np.int64), parents, np.zeros(n, np.float32))


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def table(result: dict[str, Any]) -> str:
    """The figures as plain text."""
    operands = "bfloat16" if result["kernels"] in ("amx", "avx512_dot") else "float32"
    lines = [
        f"{result['model']}, context {result['context']}, {result['threads']} threads, {result['kernels']} kernels",
        f"reads {result['bandwidth_gb_s']:.1f} GB/s, computes {result['peak_gflop_s']:.0f} GFLOP/s ({operands})",
    ]
    for kind, timings in result["weights"].items():
        forward, first = timings["forward_ms"], next(iter(timings["forward_ms"].values()))
        lines.append(
            f"{kind}: {timings['bytes'] / 1e6:.0f} MB, limit {timings['limit_ms']:.1f} ms "
            f"({timings['share_of_bandwidth']:.0%} of the bandwidth), "
            f"prefill {timings['prefill_tokens_s']:.0f} tokens/s"
            + (f", draft level {timings['draft_level_ms']:.2f} ms" if timings["draft_level_ms"] else "")
        )
        lines.append("  " + "  ".join(f"{m}: {ms:.1f} ({ms / first:.2f}x)" for m, ms in forward.items()))
    return "\n".join(lines)
