"""``eyas bench``: methods side by side on question files, and reports of earlier runs."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from eyas.cli.interrupt import deferred_interrupt
from eyas.cli.options import DraftOptions, ModelOptions, SamplingOptions, spread
from eyas.errors import InvalidInputError

if TYPE_CHECKING:
    from eyas.bench.methods import EyasMethod
    from eyas.bench.run import Bench
    from eyas.loading import LoadedTarget

SAVE_EVERY = 10.0
"""Seconds between saves of partial results."""


@spread
def bench_command(
    model: ModelOptions,
    draft: DraftOptions,
    sampling: SamplingOptions,
    more: Annotated[list[Path] | None, Argument(metavar="[FILE]...", help="Further question files.")] = None,
    questions: Annotated[
        list[Path] | None, Option(help="JSON lines with 'turns'; may name several files.", show_default=False)
    ] = None,
    methods: Annotated[str, Option(help="Methods, comma-separated.")] = "none,chain,static,dynamic",
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
        Path | None, Option(help="Where results (.json) or the report (.md, .html) go.", show_default=False)
    ] = None,
) -> None:
    """Measure methods side by side, or report on a measurement (--report)."""
    if report is not None:
        make_report(report, out)
        return
    from eyas.bench.methods import parse_methods
    from eyas.bench.questions import load_questions
    from eyas.bench.run import Bench, BenchSettings

    names = parse_methods(methods)
    draft.settings()  # mistakes are told before a model is loaded
    chosen = load_questions([*(questions or []), *(more or [])], limit, first_turn=first_turn)
    params = sampling.sampling()
    settings = BenchSettings(sampling.stopping(), params.greedy, sampling.seed or 0, repeats)
    if check_reference and (not params.greedy or params.looks_back or settings.stop.stop_strings):
        raise InvalidInputError(
            "--check-reference compares plain greedy answers; leave out --temperature, penalties and --stop"
        )
    check_writable(out)
    started = datetime.now(UTC)
    loaded = model.load(draft.feature_levels())
    ours = make_methods(names, loaded, model, draft, sampling)
    bench = Bench(ours, settings, loaded.tokenizer.encode_chat)
    if check_reference:
        from eyas.bench.reference import TransformersReference

        bench.methods = [*bench.methods, TransformersReference.load(loaded)]
    facts: dict[str, Any] = {
        "started": started.isoformat(timespec="seconds"),
        "questions": len(chosen),
        "settings": {
            **asdict(model),
            **{key: str(value) if isinstance(value, Path) else value for key, value in asdict(draft).items()},
            **asdict(sampling),
            "seed": settings.seed,
            "repeats": repeats,
            "limit": limit,
            "first_turn": first_turn,
        },
        "target": asdict(loaded.target.info),
        "plans": {method.name: method.plan.name for method in ours},
    }
    whole = run(bench, chosen, facts, out)
    print_summary(bench.summary(), facts["target"])
    for one in bench.skipped:
        print(f"skipped {one['file']} {one['question_id']}: {one['reason']}", file=sys.stderr)
    if out is not None:
        print(f"wrote {out}")
    if not whole:
        print(f"interrupted: {len(bench.rows)} answers of whole questions were kept", file=sys.stderr)
        raise Exit(130)


def make_methods(
    names: Sequence[str], loaded: LoadedTarget, model: ModelOptions, draft: DraftOptions, sampling: SamplingOptions
) -> list[EyasMethod]:
    """The methods called ``names``; the head is loaded only if one of them drafts."""
    from eyas.bench.methods import BASELINE, EyasMethod, method_plan
    from eyas.plan import PLAIN

    params = sampling.sampling()
    drafting = [name for name in names if name != BASELINE]
    if drafting and draft.draft == "none":
        raise InvalidInputError(f"--draft none can only be measured as --methods {BASELINE}; choose a head")
    planner = draft.planner(loaded, model, greedy=params.greedy, policies=drafting) if drafting else None
    plans = {name: method_plan(name, planner) if planner is not None else PLAIN for name in names}
    return [EyasMethod(name, loaded.target, loaded.tokenizer, params, plan) for name, plan in plans.items()]


def run(bench: Bench, questions: Sequence[Any], facts: dict[str, Any], out: Path | None) -> bool:
    """Run with a progress bar, saving as it goes. False if interrupted."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from eyas.bench.run import SCHEMA, write_json
    from eyas.environment import commit, machine, versions

    begun = saved = time.monotonic()
    fixed = {
        "eyas_bench": SCHEMA,
        "command": shlex.join(["eyas", *sys.argv[1:]]),
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        **facts,
        "methods": [method.name for method in bench.methods],
    }

    def save(complete: bool) -> None:
        nonlocal saved
        saved = time.monotonic()
        if out is not None:
            results = {
                "complete": complete,
                "seconds": saved - begun,
                "summary": bench.summary(),
                "skipped": bench.skipped,
                "rows": bench.rows,
            }
            write_json(out, fixed | results)

    def done(count: int) -> None:
        bar.update(task, completed=count)
        if time.monotonic() - saved > SAVE_EVERY:
            save(complete=False)

    columns = (TextColumn("bench"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("bench", total=len(questions))
        with deferred_interrupt() as interrupted:
            bench.progress, bench.interrupted = done, interrupted
            whole = bench.run(questions)
    save(complete=whole)
    return whole


def print_summary(summary: dict[str, Any], target: dict[str, Any]) -> None:
    """The results as tables, all files first."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from eyas.bench.table import HEADINGS, row_of

    console = Console(highlight=False)
    files = summary["files"]
    parts = {"all files": summary["total"], **files} if len(files) > 1 else files
    for name, numbers in parts.items():
        count = max((one["questions"] for one in numbers.values()), default=0)
        title = f"{name}: {count} questions, {target['name']}, {target['engine']}, {target['dtype']}"
        table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=0)
        for column in HEADINGS:
            table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
        for method, values in numbers.items():
            table.add_row(*row_of(method, values))
        console.print(table)


def check_writable(out: Path | None) -> None:
    """Refuse a place that cannot be written before the work is done, not after."""
    if out is None:
        return
    if out.is_dir() or not out.parent.is_dir():
        raise InvalidInputError(f"cannot write {out}: {'a directory' if out.is_dir() else 'no such directory'}")


def make_report(results: Path, out: Path | None) -> None:
    """Write a report of results, or print it as Markdown."""
    from eyas.bench.report import load_results, to_html, to_markdown

    data = load_results(results)
    if out is None:
        print(to_markdown(data))
        return
    check_writable(out)
    if out.suffix == ".md":
        from eyas.bench.plots import write_plots

        out.write_text(to_markdown(data, write_plots(data, out)), encoding="utf-8")
    elif out.suffix in (".html", ".htm"):
        from eyas.bench.plots import inline_plots

        out.write_text(to_html(data, inline_plots(data)), encoding="utf-8")
    else:
        raise InvalidInputError(f"a report is .md or .html, got {out}")
    print(f"wrote {out}")
