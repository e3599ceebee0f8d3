"""Reports of a results file as Markdown or HTML. Reads JSON, never a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from eyas.bench.intervals import Interval, acceptance_length_interval, speedup_interval
from eyas.bench.methods import BASELINE, REFERENCE
from eyas.bench.run import SCHEMA
from eyas.bench.summary import per_question
from eyas.bench.table import HEADINGS, number, row_of, times
from eyas.errors import CheckpointError, InvalidInputError
from eyas.metrics import PHASES

PAPER = (
    ("Vicuna-13B", "2.95x / 3.82", "4.04x / 4.65", "2.39x / 3.39", "3.65x / 4.26"),
    ("LLaMA2-Chat-13B", "3.09x / 3.89", "4.10x / 4.68", "2.64x / 3.53", "3.88x / 4.51"),
    ("Vicuna-7B", "2.78x / 3.79", "3.39x / 4.68", "2.18x / 3.20", "2.94x / 4.20"),
    ("LLaMA2-Chat-7B", "2.78x / 3.71", "3.43x / 4.64", "2.32x / 3.37", "3.15x / 4.41"),
)
"""The EAGLE-2 paper's means over six sets (arXiv 2406.16858), measured on GPUs with 48 to 60 draft tokens."""

Plots = Mapping[str, str]
"""Title -> what the report puts there: a file name in Markdown, an SVG element in HTML."""


@dataclass(frozen=True)
class Table:
    """A titled table; the first column is text, the others are numbers."""

    title: str
    headings: Sequence[str]
    lines: Sequence[Sequence[str]]


def load_results(path: Path) -> dict[str, Any]:
    """Read what ``eyas bench --out`` wrote.

    Raises:
        CheckpointError: no such file, or something else in it.
        InvalidInputError: a run that was interrupted before its first question was done.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read the results {path}: {error}") from None
    if not isinstance(data, dict) or data.get("eyas_bench") != SCHEMA:
        raise CheckpointError(f"{path} is not a results file of this version; make one with eyas bench --out FILE")
    if not data["rows"]:
        raise InvalidInputError(f"{path} holds no answers: the run was interrupted before its first question was done")
    return data


def to_markdown(data: Mapping[str, Any], plots: Plots | None = None) -> str:
    """The report; ``plots`` are image files beside it."""
    parts = ["# Eyas bench", "", *(f"- {fact}" for fact in facts(data)), ""]
    for table in tables(data):
        parts += [f"## {table.title}", "", _markdown_line(table.headings)]
        parts.append(_markdown_line(["---", *["---:"] * (len(table.headings) - 1)]))
        parts += [*map(_markdown_line, table.lines), ""]
    for title, file in (plots or {}).items():
        parts += [f"## {title}", "", f"![{title}]({file})", ""]
    return "\n".join(parts)


_PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>Eyas bench</title><style>
:root{{color-scheme:light dark}}body{{margin:0;font:15px/1.5 system-ui,sans-serif}}
main{{max-width:60rem;margin:auto;padding:1.5rem}}h1{{font-size:1.4rem}}h2{{font-size:1.05rem;margin-top:2rem}}
.wide{{overflow-x:auto}}table{{border-collapse:collapse;font-variant-numeric:tabular-nums}}
th,td{{padding:.25rem .7rem;text-align:right;border-bottom:1px solid #8884}}
th:first-child,td:first-child{{text-align:left}}
figure{{margin:0;background:#fff;border-radius:8px;overflow:hidden}}figure svg{{width:100%;height:auto;display:block}}
</style></head><body><main><h1>Eyas bench</h1>
{body}
</main></body></html>
"""


def to_html(data: Mapping[str, Any], plots: Plots | None = None) -> str:
    """The report as one page that needs nothing from the network; ``plots`` are SVG elements."""
    parts = ["<ul>", *(f"<li>{escape(fact)}</li>" for fact in facts(data)), "</ul>"]
    for table in tables(data):
        parts += [f"<h2>{escape(table.title)}</h2>", '<div class="wide"><table>', _html_line("th", table.headings)]
        parts += [*(_html_line("td", line) for line in table.lines), "</table></div>"]
    for title, svg in (plots or {}).items():
        parts += [f"<h2>{escape(title)}</h2>", f"<figure>{svg}</figure>"]
    return _PAGE.format(body="\n".join(parts))


def facts(data: Mapping[str, Any]) -> Iterator[str]:
    """What was measured, where and how."""
    target, machine, settings = data["target"], data["machine"], data["settings"]
    memory = machine.get("memory_bytes")
    yield f"Target: {target['name']}, {target['engine']} engine, {target['dtype']}"
    yield (
        f"Drafting: head {settings['draft']}, num_steps {settings['num_steps']}, topk {settings['topk']}, "
        f"num_draft_tokens {settings['num_draft_tokens']}"
    )
    yield (
        f"Questions: {data['questions']}, at most {settings['max_tokens']} tokens, temperature "
        f"{settings['temperature']:g}, seed {settings['seed']}, repeats {settings['repeats']}"
    )
    yield f"Machine: {machine['cpu']}, {machine['cores']} cores" + (f", {memory / 2**30:.0f} GiB" if memory else "")
    yield "Versions: " + ", ".join(f"{name} {version}" for name, version in data["versions"].items() if version)
    yield f"Commit: {data['commit'] or 'not from a checkout'}"
    yield f"Command: {data['command']}"
    yield f"Started {data['started']}, took {data['seconds']:.0f} s"
    if not data["complete"]:
        yield "Interrupted: only the questions that were done are counted"
    if data["skipped"]:
        yield f"Skipped: {len(data['skipped'])} questions that do not fit the context"


def tables(data: Mapping[str, Any]) -> Iterator[Table]:
    """Every table of the report."""
    total, files = data["summary"]["total"], data["summary"]["files"]
    yield Table("All files", HEADINGS, [row_of(method, numbers) for method, numbers in total.items()])
    yield _intervals(data)
    if len(files) > 1:
        yield _by_file("Acceptance length (tau) by file", data, lambda one: number(one["acceptance_length"], 2))
        yield _by_file("Speed-up by file", data, lambda one: times(one["speedup"]["ratio_of_sums"]))
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
    if "dynamic" in total:
        yield Table(
            "The paper's means, for orientation: speed-up / tau",
            ("target", "EAGLE, T=0", "EAGLE-2, T=0", "EAGLE, T=1", "EAGLE-2, T=1"),
            PAPER,
        )


def _intervals(data: Mapping[str, Any]) -> Table:
    rows = {method: per_question(data["rows"], method) for method in data["methods"]}
    plain = rows.get(BASELINE, {})
    return Table(
        "95 % intervals (bootstrap over questions)",
        ("method", "tau", "speed-up"),
        [
            (
                method,
                _interval(acceptance_length_interval(rows[method])),
                _interval(speedup_interval(rows[method], plain), "x"),
            )
            for method in data["methods"]
            if method not in (BASELINE, REFERENCE)
        ],
    )


def _interval(ends: Interval | None, unit: str = "") -> str:
    return "-" if ends is None else f"{ends[0]:.2f}{unit} to {ends[1]:.2f}{unit}"


def _by_file(title: str, data: Mapping[str, Any], show: Callable[[Mapping[str, Any]], str]) -> Table:
    files = data["summary"]["files"]
    lines = [(method, *(show(methods[method]) for methods in files.values())) for method in data["methods"]]
    return Table(title, ("method", *files), lines)


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _html_line(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
