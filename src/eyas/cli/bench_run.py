"""Running benches from the command line: made from options, shown while they run, saved as they go."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.cli.interrupt import deferred_interrupt
from eyas.cli.options import ModelOptions, SamplingOptions
from eyas.errors import InvalidInputError
from eyas.plan import PLAIN, DraftSettings

if TYPE_CHECKING:
    from eyas.bench.methods import EyasMethod, MethodName
    from eyas.bench.questions import Question
    from eyas.bench.run import Bench
    from eyas.loading import LoadedTarget

SAVE_EVERY = 10.0
"""Seconds between saves of partial results, longer where a save takes long itself."""


@dataclass(frozen=True)
class Part:
    """A bench, and what its results file says of it from the start."""

    bench: Bench
    facts: dict[str, Any]


def prepare(
    names: Sequence[MethodName],
    loaded: LoadedTarget,
    model: ModelOptions,
    draft: DraftSettings,
    sampling: SamplingOptions,
    more: dict[str, Any],
    questions: Sequence[Question],
) -> Part:
    """A bench of the methods called ``names``."""
    from eyas.bench.run import Bench, BenchSettings
    from eyas.environment import portable

    params = sampling.sampling()
    settings = BenchSettings(sampling.stopping(), params.greedy, sampling.seed or 0, more["repeats"])
    methods = make_methods(names, loaded, model, draft, sampling)
    facts: dict[str, Any] = {
        "questions": len(questions),
        "settings": {
            **{
                key: portable(str(value)) if isinstance(value, str | Path) else value
                for key, value in (asdict(model) | asdict(draft)).items()
            },
            **asdict(sampling),
            "seed": settings.seed,
            **more,
        },
        "target": asdict(loaded.target.info),
        "plans": {method.name: str(method.plan.way) for method in methods},
        "budgets": {
            method.name: {key: getattr(method.plan.policy, key) for key in ("num_steps", "topk", "num_draft_tokens")}
            for method in methods
            if method.plan.drafter is not None
        },
    }
    return Part(Bench(methods, settings, loaded.tokenizer.encode_chat), facts)


def make_methods(
    names: Sequence[MethodName],
    loaded: LoadedTarget,
    model: ModelOptions,
    draft: DraftSettings,
    sampling: SamplingOptions,
) -> list[EyasMethod]:
    """The methods called ``names``; the head is loaded only if one of them drafts."""
    from eyas.bench.methods import BASELINE, EyasMethod, method_plan

    params = sampling.sampling()
    ways = [name.planned for name in names if name.way.drafts]
    if ways and draft.draft == "none":
        raise InvalidInputError(f"--draft none can only be measured as --methods {BASELINE}; choose a head")
    planner = model.planner(draft, loaded, greedy=params.greedy, ways=ways) if ways else None
    plans = {name: method_plan(name, planner) if planner is not None else PLAIN for name in names}
    return [EyasMethod(str(name), loaded.target, loaded.tokenizer, params, plan) for name, plan in plans.items()]


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
    from eyas.environment import command_line, commit, machine, versions

    bench = part.bench
    begun = time.monotonic()
    due = begun + SAVE_EVERY
    fixed = {
        "eyas_bench": SCHEMA,
        "command": command_line(["eyas", *sys.argv[1:]]),
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
