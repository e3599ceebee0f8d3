"""What a tuning found, as tables and as a heat map. Reads a profile, never a model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from eyas.errors import InvalidInputError
from eyas.profile import Profile
from eyas.profile_policies import fastest_way
from eyas.replay import GridPoint

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = 8
"""Budgets shown side by side in a table."""

PROMPTS = (
    "What is the difference between weather and climate? Answer in a few sentences.",
    "Write a Python function that returns the second largest number of a list, and explain it.",
    "A train leaves at 9:40 and arrives at 12:05. How long is the journey, in minutes? Show your steps.",
    "Give me five tips for keeping houseplants alive in winter.",
    "Summarise this in two sentences: The council met on Tuesday to discuss the old bridge over the river. Engineers "
    "had found cracks in two of its pillars and asked for it to be closed to lorries at once. Shop owners on the far "
    "side fear for their deliveries, as the next bridge is nine miles away. The council will close the bridge to "
    "lorries from Monday and vote on a new one in spring.",
    "Translate into French, German and Spanish: Where is the nearest library?",
    "Rewrite this politely: You sent the wrong file again. Send the right one today.",
    "Who wrote Pride and Prejudice, and what is it about?",
    "Fix the mistake in this code and show the whole code again:\n\ndef mean(values):\n    total = 0\n    for value in "
    "values:\n        total = value\n    return total / len(values)",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "List the planets of the solar system with one fact about each.",
    "Explain to a child why the sky is blue.",
)
"""Made-up questions of the usual kinds, for tuning where the user brings none."""


def tables(profile: Profile) -> list[Table]:
    """Costs, policies and grid of a tuning, for a terminal."""
    costs = profile.costs
    passes = _table("Milliseconds per pass", "", *map(str, costs.verify_rows))
    passes.add_row("target, by rows", *(f"{ms:.3g}" for ms in costs.verify_ms))
    levels = {**dict(zip(costs.draft_nodes, costs.draft_ms, strict=True))}
    if any(levels.values()):
        cells = (f"{levels[size]:.3g}" if size in levels else "" for size in costs.verify_rows)
        passes.add_row("drafter, by nodes", *cells)
    passes.caption = f"first drafter pass {costs.first_ms:.2f}, rest of a cycle {costs.overhead_ms:.2f}"

    speeds = _table("Tokens per second", "policy", "predicted", "measured", "difference", "tau", "all prompts", "")
    fastest = fastest_way(profile)
    for check in sorted(profile.checks, key=lambda check: -check.speed):
        speeds.add_row(
            str(check.way),
            "-" if check.predicted is None else f"{check.predicted:.1f}",
            f"{check.measured:.1f}",
            _difference(check.predicted, check.measured),
            f"{check.acceptance_length:.2f}",
            f"{check.speed:.1f}",
            "chosen" if check.way == fastest else "",
        )

    tried = _table("EAGLE-2's tree, settings tried", "levels", "width", "nodes", "predicted", "measured", "difference")
    for point in profile.grid:
        if point.measured is not None:
            tried.add_row(
                str(point.num_steps),
                str(point.topk),
                str(point.num_draft_tokens),
                "-" if point.expected is None else f"{1000 * point.expected:.1f}",
                f"{1000 * point.measured:.1f}",
                _difference(point.expected, point.measured),
            )

    best = best_widths(profile.grid)
    sizes = sorted({size for _, size in best})
    sizes = [sizes[place] for place in np.unique(np.linspace(0, len(sizes) - 1, COLUMNS).astype(int)) if sizes]
    whole = _table("EAGLE-2's tree, predicted: tokens per second at the best width", "levels", *map(str, sizes))
    for steps in sorted({steps for steps, _ in best}):
        points = [best[steps, size] for size in sizes]
        whole.add_row(str(steps), *(f"{_speed(point.rate)}/{point.topk}" for point in points))
    whole.caption = "columns: nodes verified; behind the stroke: width"
    return [passes, whole, tried, speeds]


def best_widths(points: Iterable[GridPoint]) -> dict[tuple[int, int], GridPoint]:
    """(levels, nodes) -> the point of the best width."""
    best: dict[tuple[int, int], GridPoint] = {}
    for point in points:
        place = point.num_steps, point.num_draft_tokens
        if place not in best or point.rate > best[place].rate:
            best[place] = point
    return best


def write_heat_map(profile: Profile, path: Path) -> None:
    """Predicted speed over plain decoding for the whole grid, one panel per width; tried settings are ringed and
    labelled with what was measured. PNG, SVG or PDF, as the file's name ends.

    Raises:
        InvalidInputError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidInputError("plots need matplotlib: pip install 'eyas[plots]'") from None
    plain = 1 / profile.costs.plain_ms
    widths = sorted({point.topk for point in profile.grid})
    steps = sorted({point.num_steps for point in profile.grid})
    sizes = sorted({point.num_draft_tokens for point in profile.grid})
    ratios = {(p.topk, p.num_steps, p.num_draft_tokens): p.rate / plain for p in profile.grid}
    limits = {"vmin": min(1.0, *ratios.values()), "vmax": max(1.0, *ratios.values())}
    columns = min(3, len(widths))
    rows = -(-len(widths) // columns)
    figure = Figure(figsize=(0.42 * len(sizes) * columns + 2.5, (0.5 * len(steps) + 1.1) * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    for axes in grid[len(widths) :]:
        axes.set_visible(False)
    for axes, width in zip(grid, widths, strict=False):
        image = axes.imshow(
            [[ratios[width, depth, size] for size in sizes] for depth in steps],
            aspect="auto",
            origin="lower",
            cmap="viridis",
            **limits,
        )
        axes.set_title(f"width {width}", fontsize=9)
        axes.tick_params(labelbottom=True)
        axes.set_xticks(range(len(sizes)), map(str, sizes), fontsize=7)
        axes.set_yticks(range(len(steps)), map(str, steps), fontsize=7)
        for point in profile.grid:
            if point.topk == width and point.measured is not None:
                x, y = sizes.index(point.num_draft_tokens), steps.index(point.num_steps)
                axes.plot(x, y, "o", markersize=17, markerfacecolor="none", markeredgecolor="black")
                axes.annotate(f"{point.measured / plain:.2f}", (x, y), ha="center", va="center", fontsize=6)
    figure.supxlabel("nodes verified", fontsize=9)
    figure.supylabel("levels", fontsize=9)
    figure.colorbar(image, ax=list(grid), label="predicted speed, plain decoding = 1")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"cannot write {path}: {error}") from None


def _speed(rate: float) -> str:
    """Tokens per second, short."""
    return f"{1000 * rate:.0f}" if rate >= 0.1 else f"{1000 * rate:.1f}"


def _difference(predicted: float | None, measured: float) -> str:
    return "-" if not predicted else f"{100 * (measured / predicted - 1):+.1f} %"


def _table(title: str, first: str, *numbers: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=0)
    table.caption_justify = "left"
    table.min_width = 76
    table.add_column(first, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table
