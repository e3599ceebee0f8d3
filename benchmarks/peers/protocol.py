"""What driver and workers say to each other: one JSON object a line, over the worker's standard input and output.

Only the standard library, since this module is imported in every engine's environment.

    driver -> {...}                                                     the engine's settings, once
    worker -> {"ready": {...}}                                          once, when the model is loaded
    driver -> {"prompt": [ids], "tokens": 128, "stop": [ids]}
    worker -> {"token_ids": [ids], "seconds": s, "first_seconds": s}    or {"error": "..."}

The driver ends a worker by closing its standard input.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import IO, Any, Protocol


class ProtocolError(Exception):
    """A line that is not what was due."""


@dataclass(frozen=True)
class Request:
    """A question as token ids.

    Attributes:
        prompt: chat template applied.
        tokens: most tokens of answer; exactly so many where ``stop`` is empty.
        stop: ids that end the answer; they stay in it.
    """

    prompt: list[int]
    tokens: int
    stop: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What a request brought.

    Attributes:
        token_ids: the answer, a final stop id included.
        seconds: from the prompt's arrival to the last token.
        first_seconds: from the prompt's arrival to the first token.
    """

    token_ids: list[int]
    seconds: float
    first_seconds: float


class Engine(Protocol):
    """A loaded model in a worker."""

    def facts(self) -> dict[str, Any]:
        """Versions and settings in effect, for the record."""
        ...

    def answer(self, request: Request) -> Answer:
        """Greedy, with nothing kept from earlier requests."""
        ...


class Stopwatch:
    """Times of the first and the last token since it was made."""

    def __init__(self) -> None:
        self._start = perf_counter()
        self._first: float | None = None
        self._last = self._start

    def token(self) -> None:
        """A token (or several at once) has come."""
        self._last = perf_counter()
        if self._first is None:
            self._first = self._last

    def answer(self, token_ids: Sequence[int]) -> Answer:
        """The answer, ended when ``token`` was last called."""
        first = self._last if self._first is None else self._first
        return Answer([int(token) for token in token_ids], self._last - self._start, first - self._start)


def cut(token_ids: Sequence[int], request: Request) -> list[int]:
    """The answer up to its end: blocks may run past a stop id or the last token asked for."""
    ids = [int(token) for token in token_ids[: request.tokens]]
    ends = [place for place, token in enumerate(ids) if token in request.stop]
    return ids[: ends[0] + 1] if ends else ids


def encode(message: Mapping[str, Any]) -> str:
    """A message as a line."""
    return json.dumps(message, separators=(",", ":")) + "\n"


def decode(line: str) -> dict[str, Any]:
    """A line as a message.

    Raises:
        ProtocolError: not a JSON object.
    """
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise ProtocolError(f"expected a JSON object, got {line.strip()!r:.120}")
    return message


def read_request(message: dict[str, Any]) -> Request:
    """The request in a message.

    Raises:
        ProtocolError: it holds none.
    """
    try:
        return Request(list(message["prompt"]), int(message["tokens"]), tuple(message["stop"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"not a request: {error!r}") from None


def read_answer(message: dict[str, Any]) -> Answer:
    """The answer in a message.

    Raises:
        ProtocolError: it holds none, or the worker's own error.
    """
    if "error" in message:
        raise ProtocolError(str(message["error"]))
    try:
        return Answer(list(message["token_ids"]), float(message["seconds"]), float(message["first_seconds"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"not an answer: {error!r}") from None


def serve(load: Callable[[dict[str, Any]], Engine], lines: Iterator[str], out: IO[str]) -> None:
    """Load an engine with the settings in the first line and answer requests until ``lines`` end.

    Errors go to the driver, tracebacks to the log.
    """

    def say(message: dict[str, Any]) -> None:
        out.write(encode(message))
        out.flush()

    try:
        engine = load(decode(next(lines)))
        say({"ready": engine.facts()})
        for line in lines:
            say(asdict(engine.answer(read_request(decode(line)))))
    except Exception as error:  # whatever an engine may raise
        traceback.print_exc()
        first = next(iter(str(error).splitlines()), "")
        say({"error": f"{type(error).__name__}: {first}"})


def private_stdout() -> IO[str]:
    """The standard output for the protocol alone: whatever libraries print goes to standard error from now on."""
    own = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return own
