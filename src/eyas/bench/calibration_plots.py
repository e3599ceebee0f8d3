"""Plots of what ``eyas calibrate`` measured, with matplotlib. Reads JSON, never a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.bench.calibrate import AFTER, BEFORE
from eyas.bench.plots import COLOURS, Plot, draw, write_svgs
from eyas.errors import InvalidInputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCHEMA = 1
"""Version of the results file; its key is ``eyas_calibrate``."""


def load_calibration_results(file: Path) -> dict[str, Any]:
    """What ``eyas calibrate --out`` wrote.

    Raises:
        InvalidInputError: another file, or one that cannot be read.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"cannot read {file}: {error}") from None
    if not isinstance(data, dict) or data.get("eyas_calibrate") != SCHEMA:
        raise InvalidInputError(f"{file} holds no results of `eyas calibrate`")
    return data


def write_calibration_plots(data: Mapping[str, Any], beside: Path) -> dict[str, str]:
    """Write each plot as SVG beside the results file; title -> file name.

    Raises:
        InvalidInputError: matplotlib is not installed.
    """
    return write_svgs(draw(data, calibration_plots(data), (5.2, 4.0)), beside)


def calibration_plots(data: Mapping[str, Any]) -> dict[str, Plot]:
    """Title -> plot."""
    return {
        "Confidence and acceptance": partial(_reliability, kind="confidence"),
        "Confidence and acceptance by level": _levels,
        "Path value and acceptance": partial(_reliability, kind="path"),
        "Acceptance by position": _positions,
        "Confidence and acceptance by file": _files,
    }


def _reliability(axes: Axes, data: Mapping[str, Any], kind: str) -> None:
    total = data["report"]["total"]
    for index, when in enumerate(part for part in (BEFORE, AFTER) if part in total):
        found = total[when][kind]["all"]
        label = f"{when}, ECE {found['ece']:.3f}" if found["ece"] is not None else when
        _line(axes, found, COLOURS[index], label)
    _frame(axes, "confidence" if kind == "confidence" else "path value")


def _levels(axes: Axes, data: Mapping[str, Any]) -> None:
    for index, found in enumerate(data["report"]["total"][BEFORE]["confidence"]["levels"]):
        _line(axes, found, COLOURS[index % len(COLOURS)], f"level {index + 1}")
    _frame(axes, "confidence")


def _files(axes: Axes, data: Mapping[str, Any]) -> None:
    for index, (file, part) in enumerate(data["report"]["files"].items()):
        _line(axes, part[BEFORE]["confidence"]["all"], COLOURS[index % len(COLOURS)], file)
    _frame(axes, "confidence")


def _positions(axes: Axes, data: Mapping[str, Any]) -> None:
    for index, level in enumerate(data["report"]["total"]["positions"]):
        ranks = [rank for rank, position in enumerate(level) if position["asked"]]
        shares = [level[rank]["right"] / level[rank]["asked"] for rank in ranks]
        axes.plot(
            [rank + 1 for rank in ranks], shares, marker="o", color=COLOURS[index % len(COLOURS)],
            label=f"level {index + 1}",
        )  # fmt: skip
    axes.set_xticks(range(1, 1 + max(map(len, data["report"]["total"]["positions"]), default=1)))
    axes.set_xlabel("place among the siblings")
    axes.set_ylabel("share accepted, parent accepted")
    axes.set_ylim(0, 1)
    axes.legend(frameon=False)


def _line(axes: Axes, found: Mapping[str, Any], colour: str, label: str) -> None:
    bins = found["bins"]
    axes.plot(
        [each["promised"] for each in bins], [each["right"] for each in bins], marker=".", color=colour, label=label
    )


def _frame(axes: Axes, promised: str) -> None:
    axes.plot([0, 1], [0, 1], color="#888", linewidth=0.8, linestyle="--")
    axes.set_xlabel(promised)
    axes.set_ylabel("share accepted")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.legend(frameon=False)
