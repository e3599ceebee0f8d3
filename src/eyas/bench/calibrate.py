"""Fitting a calibration on one part of some questions, and measuring on the other what it is worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eyas.bench.intervals import acceptance_length_gain_interval
from eyas.bench.methods import EyasMethod
from eyas.bench.questions import Question
from eyas.bench.reliability import curves, joined, observe, positions
from eyas.bench.run import Bench, BenchSettings, Encode
from eyas.bench.summary import per_question
from eyas.calibration import Calibration
from eyas.drafters.base import Drafter
from eyas.errors import InvalidInputError
from eyas.plan import DraftPlan
from eyas.policies.dynamic import DynamicPolicy
from eyas.replay import Recording, record
from eyas.sampling import SamplingParams
from eyas.stopping import StopParams
from eyas.targets.base import Target
from eyas.text import TextTokenizer
from eyas.way import Way

BEFORE, AFTER = "before", "after"

Told = Callable[[str, int, int], object]
"""What is going on, how much of it is done, of how much."""


@dataclass(frozen=True)
class Calibrator:
    """Everything that answering the questions takes.

    Attributes:
        encode: the chat template.
        policy: how trees grow, uncalibrated.
        params: how tokens are chosen.
        max_tokens: per answer.
        seed: of sampled answers.
        tell: told how far it is.
    """

    target: Target
    drafter: Drafter
    tokenizer: TextTokenizer
    encode: Encode
    policy: DynamicPolicy
    params: SamplingParams
    max_tokens: int
    seed: int = 0
    tell: Told = lambda what, done, of: None

    def record(self, what: str, questions: Sequence[Question]) -> dict[str, Recording]:
        """First turns answered plainly with a draft at every token, by file."""
        found: dict[str, list[Question]] = {}
        for question in questions:
            found.setdefault(question.file, []).append(question)
        recordings: dict[str, Recording] = {}
        done = 0
        for file, group in found.items():
            before = done

            def progress(count: int, before: int = before) -> None:
                self.tell(what, before + count, len(questions))

            recordings[file] = record(
                self.target,
                self.drafter,
                [self.encode([{"role": "user", "content": question.turns[0]}]) for question in group],
                num_steps=self.policy.num_steps,
                topk=self.policy.topk,
                max_tokens=self.max_tokens,
                params=self.params,
                progress=progress,
            )
            done += len(group)
        return recordings

    def fit(self, questions: Sequence[Question]) -> Calibration:
        """A map per level, from all files together.

        Raises:
            InvalidInputError: answers too short to learn anything from.
        """
        calibration = joined(list(self.record("fitting", questions).values())).calibration()
        if not calibration.levels:
            raise InvalidInputError("the answers are too short to fit a calibration; give more questions")
        return calibration

    def report(self, questions: Sequence[Question], calibration: Calibration | None) -> dict[str, Any]:
        """Curves and positions of each file and of all together; see ``eyas.bench.reliability``.

        Returns:
            ``{"total": part, "files": {file: part}}``; a part has ``questions``, ``places``, ``positions``, ``before``
            and, with a calibration, ``after``.
        """
        recordings = self.record("measuring", questions)
        return {
            "total": self._part(joined(list(recordings.values())), calibration),
            "files": {file: self._part(recording, calibration) for file, recording in recordings.items()},
        }

    def _part(self, recording: Recording, calibration: Calibration | None) -> dict[str, Any]:
        observed = observe(recording, self.policy)
        part = {
            "questions": len(recording.answers),
            "places": len(recording.moments),
            "positions": positions(observed),
            BEFORE: curves(observed),
        }
        if calibration is not None:
            part[AFTER] = curves(observe(recording, self.policy, calibration))
        return part

    def gain(self, questions: Sequence[Question], calibration: Calibration) -> dict[str, Any]:
        """tau with and without the calibration: each question decoded both ways, one after the other.

        Returns:
            ``{"total": one, "files": {file: one}}`` with ``before``, ``after`` (tau), ``ratio``, its 95 % ``interval``
            over questions (None for fewer than two) and ``questions``.
        """
        methods = [
            EyasMethod(name, self.target, self.tokenizer, self.params, DraftPlan(Way("dynamic"), self.drafter, policy))
            for name, policy in ((BEFORE, self.policy), (AFTER, replace(self.policy, calibration=calibration)))
        ]
        bench = Bench(
            methods,
            BenchSettings(StopParams(max_tokens=self.max_tokens), self.params.greedy, self.seed),
            self.encode,
            progress=lambda done: self.tell("decoding", done, len(questions)),
        )
        bench.run([replace(question, turns=question.turns[:1]) for question in questions])
        files = dict.fromkeys(row["file"] for row in bench.rows)
        return {
            "total": _gain(bench.rows),
            "files": {file: _gain([row for row in bench.rows if row["file"] == file]) for file in files},
        }


def split(questions: Sequence[Question]) -> tuple[list[Question], list[Question]]:
    """Every other question of each file, to fit on, and the rest, to report on.

    Raises:
        InvalidInputError: a file with a single question.
    """
    seen: dict[str, int] = {}
    parts: tuple[list[Question], list[Question]] = ([], [])
    for question in questions:
        parts[seen.get(question.file, 0) % 2].append(question)
        seen[question.file] = seen.get(question.file, 0) + 1
    if alone := [file for file, count in seen.items() if count == 1]:
        raise InvalidInputError(
            f"{alone[0]} has a single question, and a calibration is never judged by what it was fitted on; "
            "give two or more, or other questions to fit on (--fit FILE)"
        )
    return parts


def _gain(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ours, plain = per_question(map(dict, rows), AFTER), per_question(map(dict, rows), BEFORE)
    after, before = _tau(ours), _tau(plain)
    return {
        "questions": len(ours),
        BEFORE: before,
        AFTER: after,
        "ratio": after / before if before and after else None,
        "interval": acceptance_length_gain_interval(ours, plain),
    }


def _tau(rows: Mapping[Any, Mapping[str, Any]]) -> float | None:
    cycles = sum(row["cycles"] for row in rows.values())
    return sum(row["cycle_tokens"] for row in rows.values()) / cycles if cycles else None
