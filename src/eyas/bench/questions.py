"""Question files: JSON lines with ``turns``, the form in which MT-bench and its kin are published."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import InvalidInputError


@dataclass(frozen=True)
class Question:
    """A conversation's user turns.

    Attributes:
        file: stem of the file it came from.
        question_id: as in the file; the line number where it gives none.
        category: as in the file, may be empty.
        turns: at least one.
    """

    file: str
    question_id: int | str
    category: str
    turns: tuple[str, ...]


def load_questions(files: Sequence[Path], limit: int | None = None, *, first_turn: bool = False) -> list[Question]:
    """Questions of all files, one of each file in turn, so that a run cut short has seen all of them alike.

    Args:
        files: JSON-lines files with different stems.
        limit: at most so many of each file, from its start.
        first_turn: leave out later turns.

    Raises:
        InvalidInputError: a file that cannot be read, has no questions, or has a line that is not a question; the
            message names file and line.
    """
    if not files:
        raise InvalidInputError("no question file given; name files of JSON lines with 'turns'")
    stems = [file.stem for file in files]
    if repeated := next((stem for stem in stems if stems.count(stem) > 1), None):
        raise InvalidInputError(f"two question files are called {repeated}; results are listed by that name")
    if limit is not None and limit < 1:
        raise InvalidInputError(f"limit must be at least 1, got {limit}")
    lists = [_load_file(file, limit, first_turn) for file in files]
    longest = max(map(len, lists))
    return [questions[i] for i in range(longest) for questions in lists if i < len(questions)]


def _load_file(file: Path, limit: int | None, first_turn: bool) -> list[Question]:
    try:
        # Not splitlines: JSON strings may hold U+2028 and other characters that it takes for line ends.
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"cannot read the questions {file}: {error}") from None
    questions: list[Question] = []
    for number, line in enumerate(lines, 1):
        if limit is not None and len(questions) >= limit:
            break
        if line.strip():
            questions.append(_question(file, number, line, first_turn))
    if not questions:
        raise InvalidInputError(f"{file} holds no questions; each line should be like {EXAMPLE}")
    return questions


EXAMPLE = '{"question_id": 1, "turns": ["Why is the sky blue?"]}'


def _question(file: Path, number: int, line: str, first_turn: bool) -> Question:
    where = f"{file}, line {number}"
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{where} is not JSON: {error}") from None
    turns = record.get("turns") if isinstance(record, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise InvalidInputError(f"{where} needs 'turns', a list of one or more non-empty strings, like {EXAMPLE}")
    identity = record.get("question_id", number)
    if not isinstance(identity, int | str):
        raise InvalidInputError(f"{where}: question_id must be a number or a string, got {identity!r}")
    return Question(
        file=file.stem,
        question_id=identity,
        category=str(record.get("category") or ""),
        turns=tuple(turns[:1] if first_turn else turns),
    )
