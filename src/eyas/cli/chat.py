"""``eyas chat``: a conversation that keeps its caches from turn to turn."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

from typer import Option

from eyas.cli.generate import print_step, report
from eyas.cli.interrupt import deferred_interrupt
from eyas.cli.options import DraftOptions, ModelOptions, SamplingOptions, spread
from eyas.cli.prompts import opening
from eyas.completion import Completion, collect
from eyas.errors import ContextLengthError
from eyas.generate import Session, Step, generate

HELP = "/reset starts afresh, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer."


@spread
def chat_command(
    model: ModelOptions,
    draft: DraftOptions,
    sampling: SamplingOptions,
    system: Annotated[str | None, Option(help="A system message.", show_default=False)] = None,
) -> None:
    """Talk with the model; one line is one turn."""
    params, stop = sampling.sampling(), sampling.stopping()
    settings = draft.settings(model.target, greedy=params.greedy)  # mistakes are told before a model is loaded
    loaded = model.load_for(settings.draft)
    plan = model.planner(settings, loaded, greedy=params.greedy).plan()
    tokenizer = loaded.tokenizer
    session = Session(loaded.target, plan.drafter)
    messages = opening(system)
    if sys.stdin.isatty():
        print(f"{loaded.target.info.name}. {HELP}")
    for line in read_lines():
        if line == "/exit":
            return
        if line == "/reset":
            messages = opening(system)
            continue
        if line.startswith("/"):
            print(f"unknown command {line.split()[0]}. {HELP}", file=sys.stderr)
            continue
        asked = [*messages, {"role": "user", "content": line}]
        prompt = tokenizer.encode_chat(asked)
        try:
            steps = generate(
                session,
                prompt,
                policy=plan.policy,
                gate=plan.gate,
                draw=plan.draw,
                params=params,
                stop=stop,
                tokenizer=tokenizer,
            )
            answer = stream(steps, len(prompt))
        except ContextLengthError as error:
            print(f"{error}. /reset starts afresh.", file=sys.stderr)
            continue
        print()
        if sys.stderr.isatty():
            report(answer, None, plan.way, params.greedy)
        messages = [*asked, {"role": "assistant", "content": answer.text}]


def stream(steps: Iterator[Step], prompt_tokens: int) -> Completion:
    """Print an answer as it comes; Ctrl-C ends it after the step under way, so that the session stays sound."""
    with deferred_interrupt() as interrupted:

        def watch(step: Step) -> bool:
            print_step(step)
            return interrupted()

        return collect(steps, prompt_tokens, watch)


def read_lines() -> Iterator[str]:
    """The user's turns, from a terminal or a pipe; blank lines are skipped."""
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        import readline  # noqa: F401  gives ``input`` editing and history
    while True:
        try:
            line = input("> " if at_terminal else "").strip()
        except EOFError:
            if at_terminal:
                print()
            return
        if line:
            yield line
