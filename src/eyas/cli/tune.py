"""``eyas tune``: what drafting costs and brings here, kept for every later command."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from eyas.cli.options import ModelOptions, drafter_for, notice, spread
from eyas.cli.output import check_writable
from eyas.errors import InvalidInputError

if TYPE_CHECKING:
    from eyas.loading import LoadedTarget
    from eyas.profile import Profile
    from eyas.tuner import Effort

EFFORTS: dict[str, dict[str, int]] = {
    "quick": {"max_tokens": 32, "checks": 2, "races": 1},
    "normal": {},
    "thorough": {"max_tokens": 128, "checks": 8, "races": 5},
}
"""What differs from ``Effort``'s defaults."""


@spread
def tune_command(
    model: ModelOptions,
    draft: Annotated[
        str, Option(help="Who drafts: 'default', 'eagle2', 'eagle3', a head directory, a small model, or 'ngram'.")
    ] = "default",
    prompts: Annotated[
        list[Path] | None,
        Option(help="JSON lines with 'turns' to tune by. Default: a dozen built-in ones.", show_default=False),
    ] = None,
    limit: Annotated[int | None, Option(help="Prompts of each file.", show_default=False)] = None,
    temperature: Annotated[float, Option(help="0 tunes greedy answers; sampled ones have their own profile.")] = 0.0,
    effort: Annotated[Literal["quick", "normal", "thorough"], Option(help="How long to measure.")] = "normal",
    num_steps: Annotated[int | None, Option(help="The deepest tree tried.", show_default=False)] = None,
    topk: Annotated[int | None, Option(help="The widest tree tried.", show_default=False)] = None,
    num_draft_tokens: Annotated[int | None, Option(help="The largest tree tried.", show_default=False)] = None,
    out: Annotated[
        Path | None,
        Option(help="Write the profile here (for --profile), not at its usual place.", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None, Option(help="Draw predicted speeds as a heat map (.png, .svg).", show_default=False)
    ] = None,
    save: Annotated[
        bool,
        Option(
            "--save",
            help="Also store with the head what holds on any machine: those who use it elsewhere need not tune.",
        ),
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print the profile as one JSON object instead of tables.")] = False,
) -> None:
    """Measure what passes cost and what drafts bring on this machine; choose the fastest way to draft."""
    from eyas.forecast import FORECAST, Forecast
    from eyas.loading import head_directory
    from eyas.plan import DraftSettings

    if draft == "none":
        raise InvalidInputError("--draft none has nothing to tune; choose a drafter")
    draft = drafter_for(model.target, draft)
    settings = DraftSettings(draft=draft, num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens)
    measured = make_effort(effort, settings.budget)
    check_writable(out)
    check_writable(plot)
    head = head_directory(draft) if save else None
    if save and (head is None or not head.is_dir()):
        raise InvalidInputError(f"--save stores a forecast with a head, got --draft {draft}")
    if head is not None:  # what would stop it in the end is told before the work
        FORECAST.read(head, greedy=True)
        if not os.access(head, os.W_OK):
            raise InvalidInputError(f"--save cannot write into {head}; copy the head, and name the copy with --draft")
    profile = measure(model, draft, prompts, limit, temperature, measured)
    from eyas.profile_files import save_profile

    path = save_profile(profile, out)
    if head is not None:
        FORECAST.write(head, Forecast.of(profile).as_dict(), greedy=temperature == 0)
    if plot is not None:
        from eyas.bench.tuning import write_heat_map

        write_heat_map(profile, plot)
        print(f"wrote {plot}", file=sys.stderr)
    if as_json:
        print(json.dumps(profile.as_dict(), allow_nan=False))
        return
    show(profile)
    print(f"wrote {path}")


def make_effort(name: str, bounds: dict[str, int]) -> Effort:
    """How thoroughly to measure, within the bounds the user set."""
    from eyas.tuner import Effort

    values: dict[str, int] = {**EFFORTS[name], **bounds}
    largest = values.pop("num_draft_tokens", None)
    if largest is None:
        return Effort(**values)  # type: ignore[arg-type]
    rows = (*(size for size in Effort.rows if size <= largest), largest + 1)
    return Effort(rows=rows, **values)  # type: ignore[arg-type]


def measure(
    model: ModelOptions,
    draft: str,
    files: list[Path] | None,
    limit: int | None,
    temperature: float,
    effort: Effort,
) -> Profile:
    """Load and tune, with a bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from eyas.loading import head_notice, load_drafter
    from eyas.plan import profile_key
    from eyas.sampling import SamplingParams
    from eyas.tuner import tune

    params = SamplingParams(temperature=temperature, seed=0)
    questions = read_prompts(files, limit)
    loaded = model.load_for(draft)
    drafter = load_drafter(draft, loaded)
    assert drafter is not None
    if line := head_notice(draft, loaded):
        notice(line)
    key = profile_key(draft, loaded, greedy=params.greedy, threads=model.threads, device=model.device)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("tune", total=1.0)
        return tune(
            loaded.target,
            drafter,
            [encode(loaded, question) for question in questions],
            key,
            params=params,
            effort=effort,
            progress=lambda text, share: bar.update(task, description=text, completed=share),
        )


def read_prompts(files: list[Path] | None, limit: int | None) -> list[str]:
    """First turns of the user's files, or the built-in prompts."""
    from eyas.bench.questions import load_questions
    from eyas.bench.tuning import PROMPTS

    if files:
        return [question.turns[0] for question in load_questions(files, limit, first_turn=True)]
    if limit is not None and limit < 1:
        raise InvalidInputError(f"limit must be at least 1, got {limit}")
    return list(PROMPTS[:limit])


def encode(loaded: LoadedTarget, question: str) -> list[int]:
    """In the model's chat template, where it has one."""
    tokenizer = loaded.tokenizer
    if tokenizer.chat_template is None:
        return tokenizer.encode(question)
    return tokenizer.encode_chat([{"role": "user", "content": question}])


def show(profile: Profile) -> None:
    """Tables on standard output, and what follows from them."""
    from rich.console import Console

    from eyas.bench.tuning import tables
    from eyas.profile_policies import fastest_way
    from eyas.way import PLAINLY

    console = Console(highlight=False)
    for table in tables(profile):
        console.print(table)
    speeds = {check.way: check.speed for check in profile.checks}
    fastest = fastest_way(profile)
    if not fastest.drafts:
        console.print("Drafting does not pay here: --policy auto decodes plainly.")
    else:
        console.print(f"--policy auto is {fastest}: {speeds[fastest] / speeds[PLAINLY]:.2f} times plain decoding.")
