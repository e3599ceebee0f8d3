"""From rows to numbers. Pure: no engine, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

Key = tuple[str, int | str]
"""(file, question_id)."""


@dataclass(frozen=True)
class Answered:
    """A question's answer by one contestant; times are medians over repeats.

    Attributes:
        tokens: length of the answer.
        seconds: all of it.
        decode_seconds: without the time to the first token.
        token_ids: of the first repeat.
    """

    tokens: int
    seconds: float
    decode_seconds: float
    token_ids: tuple[int, ...]

    @property
    def rate(self) -> float:
        """Tokens per second of the whole answer."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Line:
    """A contestant's numbers.

    Attributes:
        name: contestant.
        questions: answered.
        tokens_per_second: sum of tokens over sum of seconds, prompt included.
        decode_tokens_per_second: the same after the first token.
        first_ms: median time to the first token.
        over_fastest_peer: median over questions of its rate over that of the peer which was fastest overall.
        over_best_peer: the same against whichever peer was fastest on each question.
        identical: answers equal to plain decoding by the same engine and type; None where there is none to compare.
        compared: how many answers were.
    """

    name: str
    questions: int
    tokens_per_second: float
    decode_tokens_per_second: float | None
    first_ms: float
    over_fastest_peer: float | None
    over_best_peer: float | None
    identical: int | None
    compared: int


def collect(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[Key, Answered]]:
    """Answers by contestant and question, in order of first appearance."""
    grouped: dict[str, dict[Key, list[Mapping[str, Any]]]] = {}
    for row in rows:
        questions = grouped.setdefault(row["contestant"], {})
        questions.setdefault((row["file"], row["question_id"]), []).append(row)
    return {
        name: {key: _answered(repeats) for key, repeats in questions.items()} for name, questions in grouped.items()
    }


def _answered(repeats: Sequence[Mapping[str, Any]]) -> Answered:
    return Answered(
        tokens=len(repeats[0]["token_ids"]),
        seconds=median(row["seconds"] for row in repeats),
        decode_seconds=median(row["seconds"] - row["first_seconds"] for row in repeats),
        token_ids=tuple(repeats[0]["token_ids"]),
    )


def rate(answers: Mapping[Key, Answered]) -> float:
    """Tokens per second over all questions, as ratio of sums."""
    return sum(one.tokens for one in answers.values()) / sum(one.seconds for one in answers.values())


def fastest(answers: Mapping[str, Mapping[Key, Answered]], among: Sequence[str]) -> str | None:
    """Of the contestants in ``among``, the one with the largest rate over the questions that all of them answered."""
    present = [name for name in among if answers.get(name)]
    common = set.intersection(*(set(answers[name]) for name in present)) if present else set()
    if not common:
        return None
    return max(present, key=lambda name: rate({key: answers[name][key] for key in common}))


def median_ratio(mine: Mapping[Key, Answered], theirs: Mapping[Key, float]) -> float | None:
    """Median over common questions of my rate over theirs."""
    ratios = [mine[key].rate / theirs[key] for key in mine if key in theirs]
    return median(ratios) if ratios else None


def summarise(rows: Sequence[Mapping[str, Any]], plain: Mapping[str, str], peers: Sequence[str]) -> dict[str, Any]:
    """Numbers of a run.

    Args:
        rows: as ``peers.race`` makes them.
        plain: contestant -> the contestant whose answers its own must equal.
        peers: contestants that are not ours.

    Returns:
        ``fastest_peer``, ``lines`` (dicts of ``Line``, fastest first) and ``files``: the same per question file.
    """
    files = list(dict.fromkeys(row["file"] for row in rows))
    parts = {file: [row for row in rows if row["file"] == file] for file in files} if len(files) > 1 else {}
    whole = _summarise(rows, plain, peers)
    return {**whole, "files": {file: _summarise(part, plain, peers) for file, part in parts.items()}}


def _summarise(rows: Sequence[Mapping[str, Any]], plain: Mapping[str, str], peers: Sequence[str]) -> dict[str, Any]:
    answers = collect(rows)
    reference = fastest(answers, peers)
    fixed = {key: one.rate for key, one in answers[reference].items()} if reference else {}
    best: dict[Key, float] = {}
    for name in peers:
        for key, one in answers.get(name, {}).items():
            best[key] = max(best.get(key, 0.0), one.rate)
    lines = [_line(name, mine, answers.get(plain.get(name, "")), fixed, best) for name, mine in answers.items()]
    lines.sort(key=lambda line: -line.tokens_per_second)
    return {"fastest_peer": reference, "lines": [asdict(line) for line in lines]}


def _line(
    name: str,
    mine: Mapping[Key, Answered],
    plain: Mapping[Key, Answered] | None,
    fixed: Mapping[Key, float],
    best: Mapping[Key, float],
) -> Line:
    after_first = sum(one.tokens - 1 for one in mine.values())
    decode_seconds = sum(one.decode_seconds for one in mine.values())
    common = [key for key in mine if plain is not None and key in plain]
    same = sum(mine[key].token_ids == plain[key].token_ids for key in common) if plain is not None else 0
    return Line(
        name=name,
        questions=len(mine),
        tokens_per_second=rate(mine),
        decode_tokens_per_second=after_first / decode_seconds if decode_seconds > 0 else None,
        first_ms=1000 * median(one.seconds - one.decode_seconds for one in mine.values()),
        over_fastest_peer=median_ratio(mine, fixed),
        over_best_peer=median_ratio(mine, best),
        identical=same if common else None,
        compared=len(common),
    )
