"""Reports of results as Markdown or HTML. Reads JSON, never a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from eyas.bench.comparison import comparisons, labels
from eyas.bench.intervals import acceptance_length_interval, speedup_interval
from eyas.bench.methods import BASELINE, REFERENCE
from eyas.bench.plots import Plot, comparison_plots, run_plots
from eyas.bench.results import Run
from eyas.bench.summary import per_question
from eyas.bench.table import HEADINGS, Table, between, number, row_of, times
from eyas.metrics import PHASES

Plots = Mapping[str, str]
"""Title -> what the report puts there: a file name in Markdown, an SVG element in HTML."""

Render = Callable[[Mapping[str, Any], Mapping[str, Plot]], Plots]
"""Draws plots of some data."""


@dataclass(frozen=True)
class Section:
    """A part of a report."""

    title: str
    facts: Sequence[str] = ()
    tables: Sequence[Table] = ()
    plots: Plots = field(default_factory=dict)


def sections(runs: Sequence[Run], render: Render = lambda data, plots: {}) -> list[Section]:
    """What is found by comparing comes first, then each run by itself.

    Args:
        runs: one at least.
        render: how plots are drawn; without it there are none.
    """
    names = labels(runs)
    parts = [
        Section(
            name,
            list(facts(run)),
            list(tables(run)),
            render(run, {f"{title}, {name}": plot for title, plot in run_plots(run).items()}),
        )
        for name, run in zip(names, runs, strict=True)
    ]
    compared = list(comparisons(runs))
    if compared:
        parts.insert(0, Section("Comparisons", (), compared, render({"runs": runs}, comparison_plots(runs))))
    return parts


def to_markdown(parts: Sequence[Section]) -> str:
    """The report; plots are image files beside it."""
    lines = ["# Eyas bench", ""]
    for part in parts:
        lines += [f"## {part.title}", ""]
        lines += [*(f"- {fact}" for fact in part.facts), *([""] if part.facts else [])]
        for table in part.tables:
            lines += [f"### {table.title}", "", *table.markdown(), ""]
        for title, file in part.plots.items():
            lines += [f"### {title}", "", f"![{title}]({file})", ""]
    return "\n".join(lines)


_PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>Eyas bench</title><style>
:root{{color-scheme:light dark}}body{{margin:0;font:15px/1.5 system-ui,sans-serif}}
main{{max-width:60rem;margin:auto;padding:1.5rem}}h1{{font-size:1.4rem}}h2{{font-size:1.2rem;margin-top:2.5rem}}
h3{{font-size:1.05rem;margin-top:2rem}}
.wide{{overflow-x:auto}}table{{border-collapse:collapse;font-variant-numeric:tabular-nums}}
th,td{{padding:.25rem .7rem;text-align:right;border-bottom:1px solid #8884}}
th:first-child,td:first-child{{text-align:left}}
figure{{margin:0;background:#fff;border-radius:8px;overflow:hidden}}figure svg{{width:100%;height:auto;display:block}}
</style></head><body><main><h1>Eyas bench</h1>
{body}
</main></body></html>
"""


def to_html(parts: Sequence[Section]) -> str:
    """The report as one page that needs nothing from the network; plots are SVG elements."""
    lines: list[str] = []
    for part in parts:
        lines.append(f"<h2>{escape(part.title)}</h2>")
        if part.facts:
            lines += ["<ul>", *(f"<li>{escape(fact)}</li>" for fact in part.facts), "</ul>"]
        for table in part.tables:
            lines += [f"<h3>{escape(table.title)}</h3>", '<div class="wide"><table>', _html_line("th", table.headings)]
            lines += [*(_html_line("td", line) for line in table.lines), "</table></div>"]
        for title, svg in part.plots.items():
            lines += [f"<h3>{escape(title)}</h3>", f"<figure>{svg}</figure>"]
    return _PAGE.format(body="\n".join(lines))


def facts(run: Run) -> Iterator[str]:
    """What was measured, where and how."""
    target, machine, settings = run["target"], run["machine"], run["settings"]
    memory = machine.get("memory_bytes")
    yield f"Target: {target['name']}, {target['engine']} engine, {target['dtype']}"
    yield f"Drafter: {settings['draft']}"
    yield (
        f"Questions: {run['questions']}, at most {settings['max_tokens']} tokens, temperature "
        f"{settings['temperature']:g}, seed {settings['seed']}, repeats {settings['repeats']}"
    )
    yield f"Machine: {machine['cpu']}, {machine['cores']} cores" + (f", {memory / 2**30:.0f} GiB" if memory else "")
    yield "Versions: " + ", ".join(f"{name} {version}" for name, version in run["versions"].items() if version)
    yield f"Commit: {run['commit'] or 'not from a checkout'}"
    yield f"Command: {run['command']}"
    yield f"Started {run['started']}, took {run['seconds']:.0f} s"
    if not run["complete"]:
        yield "Interrupted: only the questions that were done are counted"
    if run["skipped"]:
        yield f"Skipped: {len(run['skipped'])} questions that do not fit the context"


def tables(run: Run) -> Iterator[Table]:
    """Every table of a run by itself."""
    total, files = run["summary"]["total"], run["summary"]["files"]
    yield Table("All files", HEADINGS, [row_of(method, numbers) for method, numbers in total.items()])
    yield _intervals(run)
    if len(files) > 1:
        yield _by_file("Acceptance length (tau) by file", run, lambda one: number(one["acceptance_length"], 2))
        yield _by_file("Speed-up by file", run, lambda one: times(one["speedup"]["ratio_of_sums"]))
        for file, methods in files.items():
            yield Table(file, HEADINGS, [row_of(method, numbers) for method, numbers in methods.items()])
    yield Table(
        "Milliseconds per cycle",
        ("method", *PHASES[1:]),
        [
            (method, *(number(1000 * one["seconds"][phase] / one["cycles"], 2) for phase in PHASES[1:]))
            for method, one in total.items()
            if one["cycles"]
        ],
    )
    yield _trees(run)


def _trees(run: Run) -> Table:
    """How large trees could grow; results of older versions only say what was asked for."""
    asked = {key: run["settings"].get(key) for key in ("num_steps", "topk", "num_draft_tokens")}
    drafting = [method for method in run["methods"] if method not in (BASELINE, REFERENCE)]
    budgets = run.get("budgets") or dict.fromkeys(drafting, asked)
    lines = [(method, *(number(value, 0) for value in budget.values())) for method, budget in budgets.items()]
    return Table("Trees at most", ("method", *asked), lines)


def _intervals(run: Run) -> Table:
    rows = {method: per_question(run["rows"], method) for method in run["methods"]}
    plain = rows.get(BASELINE, {})
    return Table(
        "95 % intervals (bootstrap over questions)",
        ("method", "tau", "speed-up"),
        [
            (
                method,
                between(acceptance_length_interval(rows[method])),
                between(speedup_interval(rows[method], plain), "x"),
            )
            for method in run["methods"]
            if method not in (BASELINE, REFERENCE)
        ],
    )


def _by_file(title: str, run: Run, show: Callable[[Mapping[str, Any]], str]) -> Table:
    files = run["summary"]["files"]
    lines = [(method, *(show(methods[method]) for methods in files.values())) for method in run["methods"]]
    return Table(title, ("method", *files), lines)


def _html_line(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
