"""The bench: every question by every method, in one process, one method after the other.

Interleaving question by question gives all methods the same machine: what slows it down for a while slows all of
them. The order of the methods rotates from question to question, so none always runs first.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from eyas.bench.methods import Method
from eyas.bench.questions import Question
from eyas.bench.summary import Row, summarise
from eyas.completion import Completion
from eyas.errors import ContextLengthError, InvalidInputError
from eyas.files import replace_file
from eyas.generate import Step
from eyas.metrics import Stats
from eyas.stopping import StopParams

SCHEMA = 1
"""Version of the results file."""

WARM_UP_TOKENS = 16
CALIBRATION_BINS = 20

Encode = Callable[[Sequence[dict[str, str]]], list[int]]
"""Messages -> prompt ids."""


@dataclass(frozen=True)
class BenchSettings:
    """How questions are asked.

    Attributes:
        stop: when an answer ends.
        greedy: whether answers must be identical.
        seed: with question, turn and repeat it decides all randomness, alike for every method.
        repeats: times each question is asked of each method; times are medians over them.
    """

    stop: StopParams
    greedy: bool
    seed: int = 0
    repeats: int = 1

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise InvalidInputError(f"repeats must be at least 1, got {self.repeats}")


@dataclass
class Bench:
    """A bench under way; ``rows`` and ``skipped`` hold whole questions only.

    Attributes:
        encode: the chat template.
        interrupted: asked after every step; True ends the run after throwing away the question under way.
        progress: called after each question with the number of questions done.
    """

    methods: Sequence[Method]
    settings: BenchSettings
    encode: Encode
    interrupted: Callable[[], bool] = lambda: False
    progress: Callable[[int], object] = lambda done: None
    rows: list[Row] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)

    def run(self, questions: Sequence[Question]) -> bool:
        """Ask everything. False if interrupted."""
        self._warm_up(questions[0])
        for number, question in enumerate(questions):
            rows: list[Row] = []
            try:
                for repeat in range(self.settings.repeats):
                    for method in self._rotated(number + repeat):
                        rows.append(self._ask(method, question, number, repeat))
                        if self.interrupted():
                            return False
            except ContextLengthError as error:
                self.skipped.append({"file": question.file, "question_id": question.question_id, "reason": str(error)})
            else:
                self.rows += rows
            self.progress(number + 1)
        return True

    def summary(self) -> dict[str, Any]:
        """See ``eyas.bench.summary.summarise``."""
        return summarise(self.rows, [method.name for method in self.methods], greedy=self.settings.greedy)

    def _rotated(self, by: int) -> list[Method]:
        by %= len(self.methods)
        return [*self.methods[by:], *self.methods[:by]]

    def _warm_up(self, question: Question) -> None:
        prompt = self.encode([{"role": "user", "content": question.turns[0]}])
        short = replace(self.settings.stop, max_tokens=WARM_UP_TOKENS, min_tokens=0)
        for method in self.methods:
            try:
                method.start()(prompt, short, np.random.default_rng(0), lambda step: self.interrupted())
            except ContextLengthError:
                return  # the question itself will say so

    def _ask(self, method: Method, question: Question, number: int, repeat: int) -> Row:
        answer = method.start()
        messages: list[dict[str, str]] = []
        observed = Observation(self.settings.greedy)

        def watch(step: Step) -> bool:
            observed.take(step)
            return self.interrupted()

        completions: list[Completion] = []
        for turn, text in enumerate(question.turns):
            messages.append({"role": "user", "content": text})
            rng = np.random.default_rng([self.settings.seed, number, turn, repeat])
            completions.append(answer(self.encode(messages), self.settings.stop, rng, watch))
            messages.append({"role": "assistant", "content": completions[-1].text})
        return _row(question, method.name, repeat, completions, observed)


class Observation:
    """What the cycles of one conversation show about the drafter.

    Attributes:
        accepted_lengths: how many cycles accepted 0, 1, 2, ... draft tokens.
        calibration: per confidence bin of width 1 / CALIBRATION_BINS: draft tokens the target was asked about (the
            parent was accepted), and how many of them it accepted.
    """

    def __init__(self, greedy: bool) -> None:
        self._greedy = greedy
        self.accepted_lengths: list[int] = []
        self.calibration = [[0, 0] for _ in range(CALIBRATION_BINS)]

    def take(self, step: Step) -> None:
        """Look at a step."""
        if step.cycle is None:
            return
        tree, path = step.cycle.tree, step.cycle.acceptance.path
        self.accepted_lengths += [0] * (len(path) - len(self.accepted_lengths))
        self.accepted_lengths[len(path) - 1] += 1
        accepted = set(path)
        for parent in path:
            for child in tree.children[parent]:
                confidence = float(np.exp(tree.log_values[child] - tree.log_values[parent]))
                bin_ = self.calibration[min(int(confidence * CALIBRATION_BINS), CALIBRATION_BINS - 1)]
                bin_[0] += 1
                bin_[1] += child in accepted
                if child in accepted and not self._greedy:
                    break  # sampling never came to the siblings after it


def _row(question: Question, method: str, repeat: int, completions: Sequence[Completion], observed: Observation) -> Row:
    total = Stats()
    for completion in completions:
        stats = completion.stats
        total.add(stats.seconds)
        total.cycles += stats.cycles
        total.cycle_tokens += stats.cycle_tokens
        total.draft_tokens += stats.draft_tokens
        total.accepted_tokens += stats.accepted_tokens
    return {
        "file": question.file,
        "question_id": question.question_id,
        "category": question.category,
        "method": method,
        "repeat": repeat,
        "token_ids": [list(completion.token_ids) for completion in completions],
        "finish_reasons": [completion.finish_reason for completion in completions],
        "prompt_tokens": [completion.prompt_tokens for completion in completions],
        "cycle_tokens": total.cycle_tokens,
        **total.as_dict(),
        "accepted_lengths": observed.accepted_lengths,
        "calibration": observed.calibration,
    }


def write_json(path: Path, data: object) -> None:
    """Write JSON so that a reader finds the old file or the new one, never a half; compressed if it ends in .gz.

    Raises:
        InvalidInputError: the directory cannot be written to.
    """
    content = json.dumps(data, ensure_ascii=False, allow_nan=False).encode()
    try:
        replace_file(path, [gzip.compress(content, mtime=0) if path.suffix == ".gz" else content])
    except OSError as error:
        raise InvalidInputError(f"cannot write {path}: {error.strerror}") from None
