"""The files prompts come in, and the conversations they ask for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import InvalidInputError

Message = Mapping[str, str]


@dataclass(frozen=True)
class Prompt:
    """A conversation's user turns; the target supplies the replies.

    Attributes:
        index: line in the file, from 0.
        turns: at least one user turn.
        system: system message, if the file gives one.
    """

    index: int
    turns: tuple[str, ...]
    system: str | None = None

    @property
    def opening(self) -> list[Message]:
        """What is said before the first reply."""
        first: list[Message] = [{"role": "user", "content": self.turns[0]}]
        return first if self.system is None else [{"role": "system", "content": self.system}, *first]


def read_prompts(files: Iterable[Path]) -> list[Prompt]:
    """Prompts of JSON-lines files, numbered on through all files.

    A line holds ``turns`` (user turns, with optional ``system``), ``messages`` (roles and contents), ``conversations``
    (ShareGPT: ``from``, ``value``), ``instruction`` (with optional ``input``) or ``prompt``. Replies in the file are
    ignored.

    Raises:
        InvalidInputError: a line that is not JSON or holds none of these, with file and line number.
    """
    prompts: list[Prompt] = []
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON may hold U+2028
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInputError(f"cannot read the prompts {file}: {error}") from None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InvalidInputError(f"{where} is not valid JSON: {error}") from None
            prompts.append(_prompt(len(prompts), record, where))
    return prompts


def _prompt(index: int, record: Any, where: str) -> Prompt:
    system = None
    turns: list[Any] = []
    if not isinstance(record, dict):
        raise InvalidInputError(f"{where} is a JSON {type(record).__name__}, an object is needed")
    if "turns" in record:
        turns = record["turns"] if isinstance(record["turns"], list) else []
        system = record.get("system")
    elif "messages" in record or "conversations" in record:
        for message in record.get("messages") or record.get("conversations") or []:
            if not isinstance(message, dict):
                raise InvalidInputError(f"{where}: a message is an object with role and content, got {message!r}")
            role = message.get("role") or message.get("from")
            content = message.get("content") or message.get("value")
            if role == "system":
                system = content
            elif role in ("user", "human"):
                turns.append(content)
    elif "instruction" in record:
        turns = ["\n\n".join(part for part in (record["instruction"], record.get("input")) if part)]
    elif "prompt" in record:
        turns = [record["prompt"]]
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise InvalidInputError(
            f"{where} has no user turn: give `turns`, `messages`, `conversations`, `instruction` or `prompt`, "
            f"found the keys {sorted(record)}"
        )
    return Prompt(index, tuple(turns), system)
