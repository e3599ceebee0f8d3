"""From single answers to the numbers one talks about. Reads rows, never a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from eyas.bench.methods import BASELINE, REFERENCE
from eyas.metrics import PHASES

Row = dict[str, Any]
"""One question answered once by one method; see ``eyas.bench.run``."""

OVERHEAD = ("policy", "accept", "commit")
"""Phases that belong neither to the target nor to the head."""


def summarise(rows: Sequence[Row], methods: Sequence[str], *, greedy: bool) -> dict[str, Any]:
    """Totals over all files and per file: ``{"total": {method: ...}, "files": {file: {method: ...}}}``.

    Of each method: counts; ``acceptance_length`` (tau, ratio of sums) and ``acceptance_length_mean`` (over
    questions); ``acceptance_rate``; ``tokens_per_second`` of decoding; ``seconds`` by phase; ``overhead``, the share
    of policy, accept and commit in decoding; ``speedup`` over plain decoding as ``ratio_of_sums`` and ``median`` of
    the questions' ratios, and ``with_prefill``, the ratio of sums of whole times; ``identical`` answers to plain
    decoding and to the transformers reference. Totals also have ``mean_of_files`` for tau and the speed-up. What
    cannot be said (no baseline, sampled answers) is None.
    """
    files = list(dict.fromkeys(row["file"] for row in rows))
    by_file = {file: _of_methods([row for row in rows if row["file"] == file], methods, greedy) for file in files}
    total = _of_methods(rows, methods, greedy)
    for method in methods:
        each = [by_file[file][method] for file in files]
        total[method]["mean_of_files"] = {
            "acceptance_length": _mean(one["acceptance_length"] for one in each),
            "speedup": _mean(one["speedup"]["ratio_of_sums"] for one in each),
        }
    return {"total": total, "files": by_file}


def per_question(rows: Iterable[Row], method: str) -> dict[tuple[str, Any], Row]:
    """One row per question: counts of the first repeat, times the medians over the repeats."""
    repeats: dict[tuple[str, Any], list[Row]] = {}
    for row in rows:
        if row["method"] == method:
            repeats.setdefault((row["file"], row["question_id"]), []).append(row)
    merged: dict[tuple[str, Any], Row] = {}
    for key, group in repeats.items():
        seconds = {phase: median(row["seconds"][phase] for row in group) for phase in PHASES}
        merged[key] = {**group[0], "seconds": seconds}
    return merged


def decode_seconds(row: Mapping[str, Any]) -> float:
    """All phases but the prefill."""
    return float(sum(seconds for phase, seconds in row["seconds"].items() if phase != "prefill"))


def question_speedups(ours: Mapping[Any, Row], plain: Mapping[Any, Row]) -> list[float]:
    """Ratio of decoding rates of each question that both decoded."""
    return [
        (row["cycle_tokens"] / decode_seconds(row)) / (plain[key]["cycle_tokens"] / decode_seconds(plain[key]))
        for key, row in ours.items()
        if key in plain and row["cycles"] and plain[key]["cycles"]
    ]


def _of_methods(rows: Sequence[Row], methods: Sequence[str], greedy: bool) -> dict[str, Any]:
    questions = {method: per_question(rows, method) for method in methods}
    return {
        method: _of_method(
            questions[method],
            questions.get(BASELINE, {}),
            {
                other: _identical(rows, method, other) if greedy and other in methods else None
                for other in (BASELINE, REFERENCE)
            },
        )
        for method in methods
    }


def _of_method(ours: Mapping[Any, Row], plain: Mapping[Any, Row], identical: dict[str, Any]) -> dict[str, Any]:
    rows = list(ours.values())
    shared = [key for key in ours if key in plain]
    tokens, cycles, drafted, accepted = (
        sum(row[key] for row in rows) for key in ("cycle_tokens", "cycles", "draft_tokens", "accepted_tokens")
    )
    seconds = {phase: sum(row["seconds"][phase] for row in rows) for phase in PHASES}
    decoding = sum(map(decode_seconds, rows))
    ratios = question_speedups(ours, plain)
    return {
        "questions": len(rows),
        "tokens": sum(len(ids) for row in rows for ids in row["token_ids"]),
        "cycles": cycles,
        "draft_tokens": drafted,
        "accepted_tokens": accepted,
        "acceptance_length": _ratio(tokens, cycles),
        "acceptance_length_mean": _mean(row["acceptance_length"] for row in rows if row["cycles"]),
        "acceptance_rate": _ratio(accepted, drafted),
        "tokens_per_second": _ratio(tokens, decoding),
        "seconds": seconds,
        "overhead": _ratio(sum(seconds[phase] for phase in OVERHEAD), decoding),
        "speedup": {
            "median": median(ratios) if ratios else None,
            "ratio_of_sums": _ratio(_rate(ours, shared, prefill=False), _rate(plain, shared, prefill=False)),
            "with_prefill": _ratio(_rate(ours, shared, prefill=True), _rate(plain, shared, prefill=True)),
        },
        "identical": identical,
    }


def _identical(rows: Sequence[Row], method: str, other: str) -> dict[str, int]:
    """How many questions (each repeat of them) have the same tokens as the other method's first repeat."""
    reference = {key: row["token_ids"] for key, row in per_question(rows, other).items()}
    same: dict[tuple[str, Any], bool] = {}
    for row in rows:
        key = row["file"], row["question_id"]
        if row["method"] == method and key in reference:
            same[key] = same.get(key, True) and row["token_ids"] == reference[key]
    return {"same": sum(same.values()), "of": len(same)}


def _rate(rows: Mapping[Any, Row], keys: Sequence[Any], *, prefill: bool) -> float | None:
    """Tokens per second over those questions, with or without the prefill and its token."""
    if prefill:
        tokens = sum(len(ids) for key in keys for ids in rows[key]["token_ids"])
        return _ratio(tokens, sum(sum(rows[key]["seconds"].values()) for key in keys))
    return _ratio(sum(rows[key]["cycle_tokens"] for key in keys), sum(decode_seconds(rows[key]) for key in keys))


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
