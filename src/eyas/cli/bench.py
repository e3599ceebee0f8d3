"""``eyas bench``: methods side by side on question files, and reports of earlier runs."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Exit, Option

from eyas.cli.interrupt import deferred_interrupt
from eyas.cli.options import DraftOptions, ModelOptions, SamplingOptions, spread
from eyas.errors import InvalidInputError

if TYPE_CHECKING:
    from eyas.bench.methods import EyasMethod
    from eyas.bench.questions import Question
    from eyas.bench.run import Bench
    from eyas.loading import LoadedTarget

SAVE_EVERY = 10.0
"""Seconds between saves of partial results, longer where a save takes long itself."""

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
    draft.settings()  # mistakes are told before a model is loaded
    files = [*(questions or []), *(more or []), *(paper.set_files(data) if data is not None else [])]
    chosen = load_questions(files, limit, first_turn=first_turn)
    params = sampling.sampling()
    if check_reference and (not params.greedy or params.looks_back or sampling.stop):
        raise InvalidInputError(
            "--check-reference compares plain greedy answers; leave out --temperature, penalties and --stop"
        )
    if suite and sampling.temperature != SamplingOptions.temperature:
        raise InvalidInputError("a suite sets the temperatures itself; leave out --temperature")
    check_writable(out)
    asked = [replace(sampling, temperature=one) for one in paper.TEMPERATURES] if suite else [sampling]
    loaded = model.load(draft.feature_levels())
    more_facts = {"repeats": repeats, "limit": limit, "first_turn": first_turn}
    # All of them are made before the first one runs: what is missing for the last is told now, not hours later.
    parts = [prepare(names, loaded, model, draft, one, more_facts, chosen) for one in asked]
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


@dataclass(frozen=True)
class Part:
    """A bench, and what its results file says of it from the start."""

    bench: Bench
    facts: dict[str, Any]


def prepare(
    names: Sequence[str],
    loaded: LoadedTarget,
    model: ModelOptions,
    draft: DraftOptions,
    sampling: SamplingOptions,
    more: dict[str, Any],
    questions: Sequence[Question],
) -> Part:
    """A bench of the methods called ``names``."""
    from eyas.bench.run import Bench, BenchSettings

    params = sampling.sampling()
    settings = BenchSettings(sampling.stopping(), params.greedy, sampling.seed or 0, more["repeats"])
    methods = make_methods(names, loaded, model, draft, sampling)
    facts: dict[str, Any] = {
        "questions": len(questions),
        "settings": {
            **asdict(model),
            **{key: str(value) if isinstance(value, Path) else value for key, value in asdict(draft).items()},
            **asdict(sampling),
            "seed": settings.seed,
            **more,
        },
        "target": asdict(loaded.target.info),
        "plans": {method.name: method.plan.name for method in methods},
        "budgets": {
            method.name: {key: getattr(method.plan.policy, key) for key in ("num_steps", "topk", "num_draft_tokens")}
            for method in methods
            if method.plan.drafter is not None
        },
    }
    return Part(Bench(methods, settings, loaded.tokenizer.encode_chat), facts)


def make_methods(
    names: Sequence[str], loaded: LoadedTarget, model: ModelOptions, draft: DraftOptions, sampling: SamplingOptions
) -> list[EyasMethod]:
    """The methods called ``names``; the head is loaded only if one of them drafts."""
    from eyas.bench.methods import BASELINE, EyasMethod, MethodName, method_plan
    from eyas.plan import PLAIN

    params = sampling.sampling()
    policies = [MethodName.parse(name).policy for name in names if name != BASELINE]
    if policies and draft.draft == "none":
        raise InvalidInputError(f"--draft none can only be measured as --methods {BASELINE}; choose a head")
    planner = draft.planner(loaded, model, greedy=params.greedy, policies=policies) if policies else None
    plans = {name: method_plan(name, planner) if planner is not None else PLAIN for name in names}
    return [EyasMethod(name, loaded.target, loaded.tokenizer, params, plan) for name, plan in plans.items()]


@dataclass
class Record:
    """The results file in the making: one run, or a suite's runs so far.

    Attributes:
        out: where it is written; None: nowhere.
        suite: the suite's name; None: a single run.
        done: results of the runs that are over.
    """

    out: Path | None
    suite: str | None
    done: list[dict[str, Any]] = field(default_factory=list)

    def write(self, results: dict[str, Any], *, complete: bool) -> None:
        """Write what there is, ``results`` being those of the run under way."""
        from eyas.bench.results import suite
        from eyas.bench.run import write_json

        if self.out is not None:
            runs = [*self.done, results]
            write_json(self.out, suite(self.suite, runs, complete=complete) if self.suite else results)


def run(part: Part, questions: Sequence[Question], record: Record, *, last: bool) -> bool:
    """Run with a progress bar, saving as it goes. False if interrupted."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from eyas.bench.run import SCHEMA
    from eyas.environment import commit, machine, versions

    bench = part.bench
    begun = time.monotonic()
    due = begun + SAVE_EVERY
    fixed = {
        "eyas_bench": SCHEMA,
        "command": shlex.join(["eyas", *sys.argv[1:]]),
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **part.facts,
        "methods": [method.name for method in bench.methods],
    }

    def results(complete: bool) -> dict[str, Any]:
        return fixed | {
            "complete": complete,
            "seconds": time.monotonic() - begun,
            "summary": bench.summary(),
            "skipped": bench.skipped,
            "rows": bench.rows,
        }

    def done(count: int) -> None:
        nonlocal due
        bar.update(task, completed=count)
        now = time.monotonic()
        if now > due:
            record.write(results(complete=False), complete=False)
            took = time.monotonic() - now
            due = now + took + max(SAVE_EVERY, 20 * took)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(f"bench, T={part.facts['settings']['temperature']:g}", total=len(questions))
        with deferred_interrupt() as interrupted:
            bench.progress, bench.interrupted = done, interrupted
            whole = bench.run(questions)
    found = results(complete=whole)
    record.write(found, complete=whole and last)
    record.done.append(found)
    return whole


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


def check_writable(out: Path | None) -> None:
    """Refuse a place that cannot be written before the work is done, not after."""
    if out is None:
        return
    if out.is_dir() or not out.parent.is_dir():
        raise InvalidInputError(f"cannot write {out}: {'a directory' if out.is_dir() else 'no such directory'}")


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
