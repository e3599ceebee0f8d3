"""``eyas calibrate``: what a head's confidence is worth, and a map that makes it honest."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from eyas.cli.options import DraftOptions, ModelOptions, notice, spread
from eyas.cli.output import check_writable
from eyas.errors import InvalidInputError

if TYPE_CHECKING:
    from rich.table import Table


@spread
def calibrate_command(
    model: ModelOptions,
    draft: DraftOptions,
    questions: Annotated[list[Path] | None, Argument(metavar="[FILE]...", help="JSON lines with 'turns'.")] = None,
    fit: Annotated[
        list[Path] | None,
        Option(help="Fit on these questions instead of every other one of FILE.", show_default=False),
    ] = None,
    recalibrate: Annotated[
        bool, Option("--recalibrate/--measure-only", help="Fit a map and measure what it brings.")
    ] = True,
    save: Annotated[bool, Option("--save", help="Store the map with the head; policies then use it.")] = False,
    limit: Annotated[int | None, Option(help="Questions of each file.", show_default=False)] = None,
    max_tokens: Annotated[int, Option(help="Longest answer.")] = 128,
    temperature: Annotated[float, Option(help="0 answers greedily; sampled answers have a map of their own.")] = 0.0,
    seed: Annotated[int, Option(help="Of sampled answers.")] = 0,
    out: Annotated[
        Path | None, Option(help="Where results (.json) go, plots (.svg) beside them.", show_default=False)
    ] = None,
    plots: Annotated[bool, Option("--plots/--no-plots", help="Draw plots beside --out.")] = True,
    report: Annotated[
        Path | None, Option(help="Show and plot these results; nothing is run.", show_default=False)
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Measure a head's confidence against what is accepted; fit a map, and see what it buys."""
    from eyas.bench.calibration_plots import load_calibration_results, write_calibration_plots

    if report is not None:
        data, out = load_calibration_results(report), report
    else:
        check_writable(out)
        data = measure(
            model, draft, questions or [], fit or [], recalibrate, save, limit, max_tokens, temperature, seed
        )
    if out is not None and report is None:
        from eyas.bench.run import write_json

        write_json(out, data)
    print_tables(data) if not as_json else print(json.dumps(data, allow_nan=False))
    if out is not None and plots:
        for title, file in write_calibration_plots(data, out).items():
            print(f"{title}: {out.with_name(file)}", file=sys.stderr)


def measure(
    model: ModelOptions,
    draft: DraftOptions,
    files: list[Path],
    fit: list[Path],
    recalibrate: bool,
    save: bool,
    limit: int | None,
    max_tokens: int,
    temperature: float,
    seed: int,
) -> dict[str, Any]:
    """Load, fit, measure; the results file.

    Raises:
        InvalidInputError: no head, a policy without confidences, or nothing to fit on.
    """
    from eyas.bench.calibrate import Calibrator, split
    from eyas.bench.calibration_plots import SCHEMA
    from eyas.bench.questions import load_questions
    from eyas.calibration import CALIBRATION
    from eyas.environment import command_line, commit, machine, portable, versions
    from eyas.loading import head_directory, head_notice, load_drafter
    from eyas.policies import DynamicPolicy
    from eyas.sampling import SamplingParams
    from eyas.stopping import StopParams

    if save and not recalibrate:
        raise InvalidInputError("--save stores the map that --measure-only does not fit; leave out one of them")
    settings = draft.settings(model.target)
    if settings.policy not in ("auto", "dynamic"):
        raise InvalidInputError(f"only dynamic trees ask for confidences, got --policy {settings.policy}")
    policy = DynamicPolicy(**settings.budget)
    params = SamplingParams(temperature=temperature, seed=seed)
    StopParams(max_tokens=max_tokens)  # checks it before a model is loaded
    asked = load_questions(files, limit, first_turn=True)
    learned = load_questions(fit, limit, first_turn=True) if fit else []
    if recalibrate and not fit:
        learned, asked = split(asked)
    folder = head_directory(settings.draft)
    if folder is None:
        raise InvalidInputError(f"only a head has a confidence to calibrate, got --draft {settings.draft}")
    started = datetime.now(UTC)
    loaded = model.load_for(settings.draft)
    drafter = load_drafter(settings.draft, loaded)
    assert drafter is not None
    if line := head_notice(settings.draft, loaded):
        notice(line)
    with _Bar() as tell:
        calibrator = Calibrator(
            loaded.target,
            drafter,
            loaded.tokenizer,
            loaded.tokenizer.encode_chat,
            policy,
            params,
            max_tokens,
            seed,
            tell,
        )
        calibration = calibrator.fit(learned) if recalibrate else None
        measured = calibrator.report(asked, calibration)
        gain = calibrator.gain(asked, calibration) if calibration is not None else None
    data: dict[str, Any] = {
        "eyas_calibrate": SCHEMA,
        "command": command_line(["eyas", *sys.argv[1:]]),
        "started": started.isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "target": asdict(loaded.target.info),
        "draft": portable(drafter.name),
        "settings": {
            **{name: getattr(policy, name) for name in ("num_steps", "topk", "num_draft_tokens")},
            "temperature": temperature,
            "max_tokens": max_tokens,
            "seed": seed,
            "limit": limit,
        },
        "fitted_on": None
        if calibration is None
        else {"questions": len(learned), "files": sorted({q.file for q in learned})},
        "calibration": None if calibration is None else calibration.as_dict(),
        "report": measured,
        "acceptance_length": gain,
    }
    if save:
        assert calibration is not None
        CALIBRATION.write(folder, calibration.as_dict(), greedy=params.greedy)
    return data


def print_tables(data: dict[str, Any]) -> None:
    """Calibration errors and tau by file; acceptance by position."""
    from rich.console import Console

    console = Console(highlight=False)
    settings = data["settings"]
    kind = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']:g}"
    facts = f"{data['target']['name']}, {data['draft']}, {kind}"
    gain, parts = data["acceptance_length"], {"all": data["report"]["total"], **data["report"]["files"]}

    errors = _table(f"Expected calibration error: {facts}", "file", "questions", "confidence", "path value")
    for name, part in parts.items():
        errors.add_row(name, str(part["questions"]), *(_before_after(part, kind) for kind in ("confidence", "path")))
    console.print(errors)

    if gain:
        lengths = _table("Acceptance length (tau)", "file", "before", "after", "ratio", "95 % interval")
        for name, one in {"all": gain["total"], **gain["files"]}.items():
            ends = "-" if one["interval"] is None else " to ".join(_number(end) for end in one["interval"])
            lengths.add_row(name, *(_number(one[key]) for key in ("before", "after", "ratio")), ends)
        console.print(lengths)

    ranks = [f"child {rank + 1}" for rank in range(settings["topk"])]
    table = _table("Accepted, of all whose parent was", "level", *ranks)
    for depth, level in enumerate(data["report"]["total"]["positions"], start=1):
        table.add_row(
            str(depth), *(_number(each["right"] / each["asked"] if each["asked"] else None) for each in level)
        )
    console.print(table)


def _table(title: str, first: str, *numbers: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column(first, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _before_after(part: dict[str, Any], kind: str) -> str:
    return " -> ".join(_number(part[when][kind]["all"]["ece"]) for when in ("before", "after") if when in part)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


class _Bar:
    """A progress bar on standard error; gives a function to be told (what, done, of)."""

    def __enter__(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
        self._bar.start()
        self._tasks: dict[str, Any] = {}
        return self._tell

    def _tell(self, what: str, done: int, of: int) -> None:
        task = self._tasks.setdefault(what, None)
        if task is None:
            task = self._tasks[what] = self._bar.add_task(what, total=of)
        self._bar.update(task, completed=done)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
