"""Tables and the numbers in them as text: one formatting for the terminal and for reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HEADINGS = ("method", "tau", "accepted", "tokens/s", "speed-up", "median", "overhead", "identical")


@dataclass(frozen=True)
class Table:
    """A titled table; the first column is text, the others are numbers."""

    title: str
    headings: Sequence[str]
    lines: Sequence[Sequence[str]]

    def markdown(self) -> list[str]:
        """Its lines, without the title."""
        return [
            _markdown_line(self.headings),
            _markdown_line(["---", *["---:"] * (len(self.headings) - 1)]),
            *map(_markdown_line, self.lines),
        ]


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def row_of(method: str, numbers: Mapping[str, Any]) -> tuple[str, ...]:
    """One line of a table, in the order of ``HEADINGS``."""
    return (
        method,
        number(numbers["acceptance_length"], 2),
        percent(numbers["acceptance_rate"]),
        number(numbers["tokens_per_second"], 1),
        times(numbers["speedup"]["ratio_of_sums"]),
        times(numbers["speedup"]["median"]),
        percent(numbers["overhead"]),
        identical(numbers["identical"]),
    )


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def identical(counts: Mapping[str, Mapping[str, int] | None]) -> str:
    """Identical answers to plain decoding and, where measured, to transformers."""
    known = [f"{count['same']}/{count['of']}" for count in counts.values() if count is not None]
    return ", ".join(known) or "-"


def between(ends: tuple[float, float] | None, unit: str = "") -> str:
    """An interval."""
    return "-" if ends is None else f"{ends[0]:.2f}{unit} to {ends[1]:.2f}{unit}"
