"""Plots of a results file, with matplotlib (``pip install 'eyas[plots]'``). Reads JSON, never a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eyas.bench import paper
from eyas.bench.comparison import tau_by_budget
from eyas.bench.intervals import Interval, acceptance_length_interval, speedup_interval
from eyas.bench.methods import ABLATIONS, BASELINE, REFERENCE
from eyas.bench.summary import per_question
from eyas.errors import InvalidInputError
from eyas.metrics import PHASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Plot = Callable[["Axes", Mapping[str, Any]], None]
"""Draws something of a results file on axes."""

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")
"""Okabe and Ito's palette: told apart by colour-blind readers, too."""


def write_svgs(svgs: Mapping[str, str], report: Path) -> dict[str, str]:
    """Title -> SVG element as files beside ``report``, called after it and the title; title -> file name."""
    files: dict[str, str] = {}
    for title, svg in svgs.items():
        name = "-".join(re.findall(r"[a-z0-9]+", title.lower()))
        path = report.with_name(f"{report.stem}-{name}.svg")
        path.write_text(svg, encoding="utf-8")
        files[title] = path.name
    return files


def draw(data: Mapping[str, Any], plots: Mapping[str, Plot], size: tuple[float, float] = (8, 3.4)) -> dict[str, str]:
    """Title -> SVG element, each plot drawn from ``data`` on axes of its own.

    Raises:
        InvalidInputError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidInputError("plots need matplotlib: pip install 'eyas[plots]'") from None
    style: Any = {"svg.hashsalt": "eyas", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    svgs: dict[str, str] = {}
    with mpl.rc_context(style):
        for title, plot in plots.items():
            figure = Figure(figsize=size, layout="constrained")
            plot(figure.subplots(), data)
            svgs[title] = _svg(figure)
    return svgs


def _svg(figure: Figure) -> str:
    buffer = StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def run_plots(run: Mapping[str, Any]) -> dict[str, Plot]:
    """Title -> plot, of those that a run has something for."""
    plots: dict[str, Plot] = {}
    drafting = _drafting(run)
    if drafting and BASELINE in run["methods"]:
        plots["Speed-up over plain decoding"] = _speedups
    if drafting:
        plots["Acceptance length"] = _acceptance_lengths
    plots["Where a cycle's time goes"] = _phases
    if drafting:
        plots["Acceptance by depth"] = _depths
        plots["Confidence and acceptance"] = _calibration
    return plots


def comparison_plots(runs: Sequence[Mapping[str, Any]]) -> dict[str, Plot]:
    """Title -> plot of ``{"runs": runs}``, of those that the runs have something for."""
    return {"Acceptance length against draft tokens": _against_m} if tau_by_budget(runs) else {}


def _drafting(data: Mapping[str, Any]) -> list[str]:
    """The methods that are drawn: ablations and variants of one policy have tables and plots of their own."""
    drafting = [method for method in data["methods"] if method not in (BASELINE, REFERENCE)]
    whole = [method for method in drafting if "@" not in method and method not in ABLATIONS]
    return whole or drafting


def _against_m(axes: Axes, data: Mapping[str, Any]) -> None:
    for index, (name, points) in enumerate(tau_by_budget(data["runs"]).items()):
        colour = COLOURS[index % len(COLOURS)]
        axes.plot(list(points), [tau for tau, _ in points.values()], marker="o", color=colour, label=name)
        for size, (_, ends) in points.items():
            if ends is not None:
                axes.vlines(size, *ends, color=colour, linewidth=1)
    axes.set_xlabel("draft tokens (m)")
    axes.set_ylabel("tokens per cycle (tau)")
    axes.legend(frameon=False)


def _speedups(axes: Axes, data: Mapping[str, Any]) -> None:
    _bars(
        axes,
        data,
        lambda one: one["speedup"]["ratio_of_sums"],
        lambda rows, plain: speedup_interval(rows, plain),
    )
    axes.axhline(1, color="#444", linewidth=0.8)
    axes.set_ylabel("speed-up")


def _acceptance_lengths(axes: Axes, data: Mapping[str, Any]) -> None:
    _bars(axes, data, lambda one: one["acceptance_length"], lambda rows, plain: acceptance_length_interval(rows))
    axes.set_ylabel("tokens per cycle (tau)")


def _bars(
    axes: Axes,
    data: Mapping[str, Any],
    value: Callable[[Mapping[str, Any]], float | None],
    interval: Callable[[Mapping[Any, Any], Mapping[Any, Any]], Interval | None],
) -> None:
    """Bars by file and method, with 95 % intervals over questions."""
    methods, files = _drafting(data), list(data["summary"]["files"])
    width = 0.8 / len(methods)
    for index, method in enumerate(methods):
        for place, file in enumerate(files):
            height = value(data["summary"]["files"][file][method])
            if height is None:
                continue
            x = place + (index - (len(methods) - 1) / 2) * width
            label = method if place == 0 else None
            axes.bar(x, height, 0.92 * width, color=COLOURS[index % len(COLOURS)], label=label)
            rows = [row for row in data["rows"] if row["file"] == file]
            ends = interval(per_question(rows, method), per_question(rows, BASELINE))
            if ends is not None:
                axes.vlines(x, *ends, color="#222", linewidth=1)
    axes.set_xticks(range(len(files)), files)
    axes.legend(frameon=False, ncols=min(len(methods), 6), loc="lower left", bbox_to_anchor=(0, 1))


def _phases(axes: Axes, data: Mapping[str, Any]) -> None:
    total = {method: one for method, one in data["summary"]["total"].items() if one["cycles"]}
    names = list(total)[::-1]
    start = np.zeros(len(names))
    for index, phase in enumerate(PHASES[1:]):
        milliseconds = np.array([1000 * total[name]["seconds"][phase] / total[name]["cycles"] for name in names])
        axes.barh(names, milliseconds, left=start, color=COLOURS[index], label=phase, height=0.6)
        start += milliseconds
    axes.set_xlabel("milliseconds per cycle")
    axes.legend(frameon=False, ncols=5, loc="lower left", bbox_to_anchor=(0, 1))


def _depths(axes: Axes, data: Mapping[str, Any]) -> None:
    deepest = 1
    for index, method in enumerate(_drafting(data)):
        lists = [row["accepted_lengths"] for row in data["rows"] if row["method"] == method]
        counts = np.zeros(max(map(len, lists), default=0), np.int64)
        for each in lists:
            counts[: len(each)] += each
        if counts.sum() == 0:
            continue
        deepest = max(deepest, len(counts) - 1)
        reached = counts[::-1].cumsum()[::-1] / counts.sum()  # share of cycles that accepted at least so many
        axes.plot(range(1, len(reached)), reached[1:], marker="o", color=COLOURS[index % len(COLOURS)], label=method)
    axes.set_xlabel("depth")
    axes.set_ylabel("share of cycles accepted so deep")
    axes.set_ylim(0, 1)
    axes.set_xticks(range(1, deepest + 1))
    axes.legend(frameon=False)


def _calibration(axes: Axes, data: Mapping[str, Any]) -> None:
    for index, method in enumerate(_drafting(data)):
        table = np.sum([row["calibration"] for row in data["rows"] if row["method"] == method], axis=0)  # [bins, 2]
        centres = (np.arange(len(table)) + 0.5) / len(table)
        asked = table[:, 0] > 0
        share = table[asked, 1] / table[asked, 0]
        axes.plot(centres[asked], share, marker=".", color=COLOURS[index % len(COLOURS)], label=method)
    axes.plot(*zip(*paper.CALIBRATION, strict=True), "x", color="#222", label="the paper, Vicuna-7B")
    axes.plot([0, 1], [0, 1], color="#888", linewidth=0.8, linestyle="--")
    axes.set_xlabel("confidence")
    axes.set_ylabel("share accepted")
    axes.legend(frameon=False)
