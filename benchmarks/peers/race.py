"""Questions to workers, one question and one worker at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peers.protocol import ProtocolError, Request
from peers.worker import Worker

Row = dict[str, Any]
"""file, question_id, contestant, repeat, prompt_tokens, token_ids, seconds, first_seconds."""

ANSWER_TIMEOUT = 600.0


@dataclass(frozen=True)
class Prompt:
    """A question as token ids.

    Attributes:
        file: stem of the file it came from.
        question_id: as in the file.
        token_ids: chat template applied.
    """

    file: str
    question_id: int | str
    token_ids: list[int]


@dataclass(frozen=True)
class Rules:
    """How everything is asked.

    Attributes:
        tokens: most tokens of answer.
        stop: ids that end an answer; none: every answer has exactly ``tokens``.
        repeats: times each question is asked.
    """

    tokens: int
    stop: tuple[int, ...] = ()
    repeats: int = 1


def race(
    workers: Mapping[str, Worker],
    prompts: Sequence[Prompt],
    rules: Rules,
    failed: Callable[[str, str], object],
    progress: Callable[[list[Row]], object] = lambda rows: None,
) -> list[Row]:
    """Every question to every worker; who begins rotates from question to question.

    Args:
        workers: by contestant name, loaded.
        failed: told the name and the reason when a worker fails; it is not asked again.
        progress: called after every question with all rows so far.
    """
    rows: list[Row] = []
    running = list(workers)
    for number, prompt in enumerate(prompts):
        request = Request(prompt.token_ids, rules.tokens, rules.stop)
        for repeat in range(rules.repeats):
            by = (number + repeat) % max(len(running), 1)
            for name in [*running[by:], *running[:by]]:
                try:
                    answer = workers[name].ask(request, ANSWER_TIMEOUT)
                except ProtocolError as error:
                    running.remove(name)
                    failed(name, str(error))
                    continue
                rows.append(
                    {
                        "file": prompt.file,
                        "question_id": prompt.question_id,
                        "contestant": name,
                        "repeat": repeat,
                        "prompt_tokens": len(prompt.token_ids),
                        "token_ids": answer.token_ids,
                        "seconds": answer.seconds,
                        "first_seconds": answer.first_seconds,
                    }
                )
        progress(rows)
    return rows


def warm_up(workers: Mapping[str, Worker], prompt: Prompt, tokens: int, failed: Callable[[str, str], object]) -> None:
    """A short answer of everyone, not counted: compilers and allocators settle."""
    rules = Rules(tokens)
    race(workers, [prompt], rules, failed)
