"""``eyas bench``: methods side by side on question files, and reports of earlier runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Exit, Option

from eyas.cli.bench_run import Part, Record, prepare, run
from eyas.cli.options import DraftOptions, ModelOptions, SamplingOptions, spread
from eyas.cli.output import check_writable
from eyas.errors import InvalidInputError

DEFAULT_METHODS = "none,chain,static,dynamic"


@spread
def bench_command(
    model: ModelOptions,
    draft: DraftOptions,
    sampling: SamplingOptions,
    more: Annotated[
        list[Path] | None, Argument(metavar="[FILE]...", help="Further question files; with --report, results.")
    ] = None,
    questions: Annotated[
        list[Path] | None, Option(help="JSON lines with 'turns'; may name several files.", show_default=False)
    ] = None,
    data: Annotated[
        Path | None, Option(help="A directory with the paper's six sets, instead of --questions.", show_default=False)
    ] = None,
    suite: Annotated[
        Literal["paper"] | None,
        Option(
            help="paper: greedy and at temperature 1, every policy, and EAGLE-2 without each of its stages.",
            show_default=False,
        ),
    ] = None,
    methods: Annotated[
        str | None,
        Option(
            help="Methods, comma-separated; dynamic@20 has num_draft_tokens of its own. "
            f"Default: {DEFAULT_METHODS}, or the suite's.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int | None, Option(help="Questions of each file.", show_default=False)] = None,
    repeats: Annotated[int, Option(help="Ask everything so many times; times are medians.")] = 1,
    first_turn: Annotated[bool, Option("--first-turn", help="Ask first turns only.")] = False,
    check_reference: Annotated[
        bool, Option("--check-reference", help="Also answer by transformers' own generate, in float32, and compare.")
    ] = False,
    report: Annotated[
        Path | None, Option(help="Make a report of these results; nothing is run.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        Option(help="Where results (.json, .json.gz) or the report (.md, .html) go.", show_default=False),
    ] = None,
) -> None:
    """Measure methods side by side, or report on measurements (--report)."""
    if report is not None:
        make_report([report, *(more or [])], out)
        return
    from eyas.bench import paper
    from eyas.bench.methods import parse_methods
    from eyas.bench.questions import load_questions

    names = parse_methods(methods if methods is not None else ",".join(paper.METHODS) if suite else DEFAULT_METHODS)
    files = [*(questions or []), *(more or []), *(paper.set_files(data) if data is not None else [])]
    chosen = load_questions(files, limit, first_turn=first_turn)
    params = sampling.sampling()
    # Mistakes are told before a model is loaded.
    settings = draft.settings(model.target, greedy=params.greedy and not suite)
    if check_reference and (not params.greedy or params.looks_back or sampling.stop):
        raise InvalidInputError(
            "--check-reference compares plain greedy answers; leave out --temperature, penalties and --stop"
        )
    if suite and sampling.temperature != SamplingOptions.temperature:
        raise InvalidInputError("a suite sets the temperatures itself; leave out --temperature")
    if params.greedy and not suite and (odd := [str(name) for name in names if name.way.draw is not None]):
        raise InvalidInputError(f"greedy answers never draw, so leave out {', '.join(odd)}")
    check_writable(out)
    asked = [replace(sampling, temperature=one) for one in paper.TEMPERATURES] if suite else [sampling]
    loaded = model.load_for(settings.draft)
    more_facts = {"repeats": repeats, "limit": limit, "first_turn": first_turn}
    # All of them are made before the first one runs: what is missing for the last is told now, not hours later.
    parts = []
    for one in asked:
        greedy = suite and one.sampling().greedy  # where nothing is drawn, whatever was asked
        ours = [name for name in names if name.way.draw is None] if greedy else names
        drafting = replace(settings, draw=None) if greedy else settings
        parts.append(prepare(ours, loaded, model, drafting, one, more_facts, chosen))
    if check_reference:
        from eyas.bench.reference import TransformersReference

        parts[0].bench.methods = [*parts[0].bench.methods, TransformersReference.load(loaded)]
    record = Record(out, suite)
    for part in parts:
        whole = run(part, chosen, record, last=part is parts[-1])
        print_summary(part)
        if not whole:
            break
    if out is not None:
        print(f"wrote {out}")
    if not whole:
        print(f"interrupted: {len(part.bench.rows)} answers of whole questions were kept", file=sys.stderr)
        raise Exit(130)


def print_summary(part: Part) -> None:
    """The results as tables, all files first; what was skipped."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from eyas.bench.table import HEADINGS, row_of

    console = Console(highlight=False)
    summary, target = part.bench.summary(), part.facts["target"]
    where = f"{target['name']}, {target['engine']}, {target['dtype']}, T={part.facts['settings']['temperature']:g}"
    files = summary["files"]
    tables = {"all files": summary["total"], **files} if len(files) > 1 else files
    for name, numbers in tables.items():
        count = max((one["questions"] for one in numbers.values()), default=0)
        title = f"{name}: {count} questions, {where}"
        table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=0)
        for column in HEADINGS:
            table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
        for method, values in numbers.items():
            table.add_row(*row_of(method, values))
        console.print(table)
    for one in part.bench.skipped:
        print(f"skipped {one['file']} {one['question_id']}: {one['reason']}", file=sys.stderr)


def make_report(results: Sequence[Path], out: Path | None) -> None:
    """Write a report of results files, or print it as Markdown."""
    from eyas.bench.plots import draw, write_svgs
    from eyas.bench.report import sections, to_html, to_markdown
    from eyas.bench.results import load_runs

    runs = [run for file in results for run in load_runs(file)]
    if out is None:
        print(to_markdown(sections(runs)))
        return
    check_writable(out)
    if out.suffix == ".md":
        text = to_markdown(sections(runs, lambda data, plots: write_svgs(draw(data, plots), out)))
    elif out.suffix in (".html", ".htm"):
        text = to_html(sections(runs, draw))
    else:
        raise InvalidInputError(f"a report is .md or .html, got {out}")
    out.write_text(text, encoding="utf-8")
    print(f"wrote {out}")
