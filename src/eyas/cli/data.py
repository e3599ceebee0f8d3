"""``eyas data``: prompts and answers for a draft head to learn from."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option, Typer

from eyas.cli.options import ModelOptions, given, spread
from eyas.cli.output import check_directory, check_writable
from eyas.errors import InvalidInputError

if TYPE_CHECKING:
    from rich.progress import Progress

    from eyas.train.answer import AnswerProgress, AnswerSettings
    from eyas.train.endpoint import Endpoint, Reply
    from eyas.train.prompts import Prompt
    from eyas.train.synthesize import SynthesisProgress

FOREIGN = 0.9
"""Greedy answers from elsewhere that agree less with the target are probably another model's."""

data_app = Typer(help="Make training data.", no_args_is_help=True)


@dataclass(frozen=True)
class AnswerOptions:
    """Fields of ``AnswerSettings``; None leaves its default."""

    max_tokens: Annotated[int | None, Option(help="Longest answer. Default: 160.", show_default=False)] = None
    max_prompt_tokens: Annotated[
        int | None, Option(help="Longer prompts are left out. Default: 400.", show_default=False)
    ] = None
    batch: Annotated[int | None, Option(help="Conversations answered at once. Default: 64.", show_default=False)] = None
    sampled_share: Annotated[
        float | None, Option(help="Share answered by sampling. Default: 0.3.", show_default=False)
    ] = None
    temperature: Annotated[float | None, Option(help="Of the sampled answers. Default: 1.0.", show_default=False)] = (
        None
    )
    seed: Annotated[int | None, Option(help="Decides all randomness. Default: 0.", show_default=False)] = None


@dataclass(frozen=True)
class EndpointOptions:
    """Who answers in the model's place: a server that runs the same model."""

    endpoint: Annotated[
        str | None, Option(help="Let this OpenAI-compatible server answer (http://HOST/v1).", show_default=False)
    ] = None
    endpoint_model: Annotated[str | None, Option(help="The model's name there.", show_default=False)] = None
    api_key_env: Annotated[str | None, Option(help="Environment variable that holds its key.", show_default=False)] = (
        None
    )

    def make(self) -> Endpoint | None:
        """Raises InvalidInputError for half a description, or a variable that is not set."""
        if self.endpoint is None:
            if self.endpoint_model or self.api_key_env:
                raise InvalidInputError("--endpoint-model and --api-key-env describe an --endpoint; give its URL")
            return None
        if self.endpoint_model is None:
            raise InvalidInputError("which model should the endpoint answer with? Give --endpoint-model NAME")
        from eyas.train.endpoint import Endpoint

        key = os.environ.get(self.api_key_env) if self.api_key_env else None
        if self.api_key_env and not key:
            raise InvalidInputError(f"the environment variable {self.api_key_env} (--api-key-env) is not set")
        return Endpoint(self.endpoint, self.endpoint_model, key)


@dataclass(frozen=True)
class SynthesisOptions:
    """Fields of ``SynthesisSettings``; None leaves its default."""

    count: Annotated[int | None, Option(help="Prompts wanted. Default: 1000.", show_default=False)] = None
    max_attempts: Annotated[
        int | None, Option(help="Prompts written at most. Default: 20 for each one wanted.", show_default=False)
    ] = None
    max_tokens: Annotated[int | None, Option(help="Longer ones are dropped. Default: 200.", show_default=False)] = None
    min_characters: Annotated[int | None, Option(help="Shorter ones are dropped. Default: 12.", show_default=False)] = (
        None
    )
    temperature: Annotated[float | None, Option(help="Of sampling. Default: 1.0.", show_default=False)] = None
    batch: Annotated[int | None, Option(help="Prompts written at once. Default: 64.", show_default=False)] = None
    seed: Annotated[int | None, Option(help="Decides all randomness. Default: 0.", show_default=False)] = None


@data_app.command("answer")
@spread
def answer_command(
    prompts: Annotated[
        list[Path], Argument(help="JSON lines with 'turns', 'messages', 'conversations', 'instruction' or 'prompt'.")
    ],
    model: ModelOptions,
    options: AnswerOptions,
    elsewhere: EndpointOptions,
    out: Annotated[Path, Option(help="The store: a directory; continued if it is there.", show_default=False)],
    limit: Annotated[int | None, Option(help="Answer the first prompts only.", show_default=False)] = None,
    features: Annotated[
        Literal["eagle", "eagle3"],
        Option(help="For which head; eagle3's serve both, in four times the room."),
    ] = "eagle",
) -> None:
    """Let the model answer prompts itself and keep its features: what a draft head learns from."""
    from eyas.train.answer import AnswerSettings, answer_prompts
    from eyas.train.prompts import read_prompts

    settings = AnswerSettings(**given(options))
    endpoint = elsewhere.make()
    check_directory(out)
    chosen = read_prompts(prompts)[:limit]
    if not chosen:
        raise InvalidInputError(f"no prompts in {', '.join(map(str, prompts))}")
    replies = None if endpoint is None else _fetch(endpoint, chosen, out, settings)
    loaded = model.load({"eagle": 1, "eagle3": 4}[features])
    with _bar("answer" if replies is None else "features", "{task.fields[rate]:.0f} tokens/s") as bar:
        task = bar.add_task("answer", total=None, rate=0.0)

        def progress(now: AnswerProgress) -> None:
            rate = now.answer_tokens / now.seconds if now.seconds else 0.0
            bar.update(task, total=now.prompts, completed=now.documents, rate=rate)

        if endpoint is None or replies is None:
            done = answer_prompts(
                loaded.target,
                chosen,
                out,
                settings,
                encode=loaded.tokenizer.encode_chat,
                decode=loaded.tokenizer.decode,
                progress=progress,
            )
        else:
            from eyas.train.take_in import take_in_replies

            done = take_in_replies(loaded.target, loaded.tokenizer, replies, out, settings, endpoint, progress=progress)
    print(
        f"{done.documents} prompts answered with {done.answer_tokens} tokens in {done.seconds:.0f} s; "
        f"{done.skipped} were answered already, {done.too_long} too long, {done.empty} empty"
    )
    if done.empty > done.documents:
        print(
            "most answers were empty: is this a chat model, and the chat template the one it was trained with?",
            file=sys.stderr,
        )
    if done.judged:
        share = done.agreed / done.judged
        print(f"{loaded.target.info.name} itself would have said {share:.1%} of the greedy answers' tokens")
        if share < FOREIGN:
            print(
                "that is little: does the endpoint run the same model, with the same chat template? Foreign answers "
                "teach a head the wrong thing",
                file=sys.stderr,
            )


def _fetch(endpoint: Endpoint, prompts: list[Prompt], out: Path, settings: AnswerSettings) -> list[Reply]:
    from eyas.train.endpoint import fetch_replies

    with _bar("fetch") as bar:
        task = bar.add_task("fetch", total=len(prompts))
        return fetch_replies(
            endpoint, prompts, out, settings, lambda done, of: bar.update(task, completed=done, total=of)
        )


@data_app.command("synthesize")
@spread
def synthesize_command(
    model: ModelOptions,
    options: SynthesisOptions,
    out: Annotated[Path, Option(help="The prompts (.jsonl); continued if it is there.", show_default=False)],
    system: Annotated[str | None, Option(help="System message of the conversations.", show_default=False)] = None,
    as_json: Annotated[bool, Option("--json", help="Print the counts as one JSON object.")] = False,
) -> None:
    """Let the model write prompts itself, where you have none: its chat template up to the user's words, sampled on."""
    from eyas.train.synthesize import SynthesisSettings, synthesize

    settings = SynthesisSettings(**given(options))
    check_writable(out)
    loaded = model.load()
    with _bar("synthesize", "{task.fields[rate]:.0f} tokens/s") as bar:
        task = bar.add_task("synthesize", total=settings.count, rate=0.0)

        def progress(now: SynthesisProgress) -> None:
            bar.update(task, completed=now.kept, rate=now.tokens / now.seconds if now.seconds else 0.0)

        done = synthesize(loaded.target, loaded.tokenizer, out, settings, system=system, progress=progress)
    if as_json:
        print(json.dumps({**vars(done), "dropped": dict(done.dropped)}))
        return
    dropped = ", ".join(f"{count} {reason}" for reason, count in done.dropped.most_common()) or "none"
    print(
        f"{done.kept} prompts in {out}; {done.attempts} written with {done.tokens} tokens in {done.seconds:.0f} s, "
        f"dropped: {dropped}"
    )
    if done.kept < settings.count:
        print(f"{settings.count} were wanted: the attempts ran out (--max-attempts, --seed)", file=sys.stderr)


def _bar(*texts: str) -> Progress:
    """A progress bar on standard error, silent where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    first, *rest = texts
    columns = (TextColumn(first), BarColumn(), MofNCompleteColumn(), *map(TextColumn, rest), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
