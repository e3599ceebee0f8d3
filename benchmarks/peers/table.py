"""A summary as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEADINGS = ("engine", "tokens/s", "after 1st", "1st ms", "x fastest peer", "x best peer", "as plain")


def to_text(results: Mapping[str, Any]) -> str:
    """The table of a results file, what is missing below it."""
    summary = results["summary"]
    parts = [_part("all questions", summary)]
    parts += [_part(file, part) for file, part in summary.get("files", {}).items()]
    absent = [f"{name}: {reason}" for name, reason in results.get("missing", {}).items()]
    notes = ["not measured:", *(f"  {line}" for line in absent)] if absent else []
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])])


def _part(title: str, summary: Mapping[str, Any]) -> str:
    rows = [row_of(line) for line in summary["lines"]]
    count = max((line["questions"] for line in summary["lines"]), default=0)
    head = f"{title}: {count} questions; fastest peer: {summary['fastest_peer'] or 'none'}"
    return f"{head}\n{align([HEADINGS, *rows])}"


def row_of(line: Mapping[str, Any]) -> tuple[str, ...]:
    """A contestant's cells, in the order of ``HEADINGS``."""
    return (
        line["name"],
        number(line["tokens_per_second"], 1),
        number(line["decode_tokens_per_second"], 1),
        number(line["first_ms"], 0),
        number(line["over_fastest_peer"], 2),
        number(line["over_best_peer"], 2),
        "-" if line["identical"] is None else f"{line['identical']}/{line['compared']}",
    )


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def align(rows: Sequence[Sequence[str]]) -> str:
    """Columns: the first to the left, the others to the right, a rule under the headings."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join([line(rows[0]), "  ".join("-" * width for width in widths), *map(line, rows[1:])])
