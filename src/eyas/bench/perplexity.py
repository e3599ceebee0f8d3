"""What a weight type costs in quality: perplexity of a text, distance of the logits from transformers in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from eyas.environment import commit, machine, versions
from eyas.errors import InvalidInputError
from eyas.models import ModelSource
from eyas.native.config import WEIGHT_TYPES
from eyas.targets.base import Target
from eyas.tree import DraftTree, Floats

ROWS = 64  # per pass: their logits are held together


def perplexity(
    source: ModelSource,
    text: str,
    *,
    types: Sequence[str] = WEIGHT_TYPES,
    window: int = 512,
    most: int = 4096,
    compare: int = 512,
    reference: bool = True,
    threads: int | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Read a text with every weight type of the native engine.

    Args:
        source: the model.
        text: what it should predict; text it was not trained on, if the figure is to mean something.
        types: weight types.
        window: tokens that are read in a row; each window starts without a past, so its first token is not predicted.
        most: tokens taken from the text's beginning.
        compare: tokens, from the first, whose logits are compared; at most ``most``.
        reference: read the text with transformers in float32, too, and compare with that.
        threads: None takes all.
        tell: progress, one line each.

    Returns:
        ``tokens`` read and ``predicted``; ``reference`` and per type in ``types``: ``perplexity``; per type also
        ``change`` (of the perplexity over the reference's, 0 is none), ``logits_error`` (norm of the difference over
        the norm of the reference, over all compared rows together), ``same_argmax`` (share of rows),
        ``kl_divergence`` (mean, nats); what was measured and where. Without reference those are None.

    Raises:
        InvalidInputError: a text of fewer than two tokens, a window the model cannot hold.
        UnsupportedModelError: what the engines cannot run.
    """
    ids = source.tokenizer.encode(text)[:most]
    if len(ids) < 2:
        raise InvalidInputError(f"the text has {len(ids)} tokens; at least 2 are needed")
    if not 2 <= window <= (limit := source.config["max_position_embeddings"]):
        raise InvalidInputError(f"a window of {window} tokens is not within 2 and the model's context of {limit}")
    windows = [ids[start : start + window] for start in range(0, len(ids), window)]
    result: dict[str, Any] = {"model": source.name, "tokens": len(ids), "predicted": len(ids) - len(windows)}
    wanted: list[Floats] = []
    expected = None
    if reference:
        from eyas.targets.hf import load_hf

        tell("transformers float32: reading")
        target = load_hf(source, dtype="float32", threads=threads)
        expected = _read(target, windows, compare, wanted)
    result["reference"] = {"perplexity": expected}
    result["types"] = {}
    for kind in types:
        from eyas.targets.native import NativeTarget

        tell(f"{kind}: reading")
        rows: list[Floats] = []
        found = _read(NativeTarget.load(source, dtype=kind, threads=threads), windows, compare if wanted else 0, rows)
        result["types"][kind] = {
            "perplexity": found,
            "change": None if expected is None else found / expected - 1,
            **_distance(rows, wanted),
        }
    return result | {
        "window": window,
        "compared": len(wanted),
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
    }


def _read(target: Target, windows: Sequence[Sequence[int]], keep: int, kept: list[Floats]) -> float:
    """Perplexity; the first ``keep`` rows of logits [V] are appended to ``kept``."""
    total, count = 0.0, 0
    for ids in windows:
        for row, following in zip(_logits(target, ids), [*ids[1:], None], strict=True):
            if len(kept) < keep:
                kept.append(row)
            if following is not None:
                total -= _log_softmax(row)[following]
                count += 1
    return math.exp(total / count)


def _logits(target: Target, ids: Sequence[int]) -> Iterator[Floats]:
    """[V] after each token."""
    cache = target.new_cache(len(ids))
    for start in range(0, len(ids), ROWS):
        chunk = list(ids[start : start + ROWS])
        [output] = target.verify([(cache, DraftTree.chain(chunk))])
        yield from map(output.row, range(len(chunk)))
        cache.commit(range(len(chunk)))


def _distance(rows: Sequence[Floats], wanted: Sequence[Floats]) -> dict[str, float | None]:
    if not wanted:
        return {"logits_error": None, "same_argmax": None, "kl_divergence": None}
    apart = sum(float(np.square(a.astype(np.float64) - b).sum()) for a, b in zip(rows, wanted, strict=True))
    size = sum(float(np.square(b.astype(np.float64)).sum()) for b in wanted)
    same = sum(int(a.argmax() == b.argmax()) for a, b in zip(rows, wanted, strict=True))
    divergence = 0.0
    for a, b in zip(rows, wanted, strict=True):
        p = _log_softmax(b)
        divergence += float(np.exp(p) @ (p - _log_softmax(a)))
    return {
        "logits_error": math.sqrt(apart / size),
        "same_argmax": same / len(wanted),
        "kl_divergence": divergence / len(wanted),
    }


def _log_softmax(row: Floats) -> np.ndarray[Any, np.dtype[np.float64]]:
    shifted = row.astype(np.float64) - row.max()
    result: np.ndarray[Any, np.dtype[np.float64]] = shifted - math.log(np.exp(shifted).sum())
    return result


def table(result: dict[str, Any]) -> str:
    """The figures as plain text."""
    lines = [f"{result['model']}, {result['tokens']} tokens in windows of {result['window']}"]
    if (expected := result["reference"]["perplexity"]) is not None:
        lines.append(f"{'transformers float32':<22}perplexity {expected:8.3f}")
    for kind, found in result["types"].items():
        line = f"{kind:<22}perplexity {found['perplexity']:8.3f}"
        if found["change"] is not None:
            line += (
                f" ({found['change']:+.2%}), logits {found['logits_error']:.1e} off, same best token "
                f"{found['same_argmax']:.1%}, KL {found['kl_divergence']:.1e}"
            )
        lines.append(line)
    return "\n".join(lines)
