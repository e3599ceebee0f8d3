"""Prompts where there are none: the target writes user turns itself (Magpie, arXiv 2406.08464).

A chat model has read so many user turns that, given the template up to where one begins, it goes on with one.
Sampling makes them differ; what repeats, rambles or is no text is dropped and counted.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from eyas.errors import InvalidInputError
from eyas.targets.base import Target, TargetCache
from eyas.text import TextTokenizer
from eyas.train.together import Job, decode_together, sampled

MARK = "\u2402user turn\u2403"
"""Stands for the user's words while the template is cut there; no template holds it."""

SHINGLE = 5
"""Words in a row that count as one when texts are compared."""


@dataclass(frozen=True)
class SynthesisSettings:
    """How user turns are written and which are kept.

    Attributes:
        count: turns to keep, those already in the file included.
        max_attempts: turns to write at most; None: twenty for each one to keep.
        max_tokens: longer turns are cut off and dropped.
        min_characters: shorter turns are dropped.
        temperature: of sampling, above 0.
        batch: turns written at once.
        seed: with the number of the attempt it decides everything random, whatever the batch.
        max_repetition: a turn is dropped if more than this share of its n-grams (``SHINGLE`` words) repeats an earlier
            one of the same turn.
        max_overlap: a turn is dropped if more than this share of its n-grams was seen in turns kept before.
    """

    count: int = 1000
    max_attempts: int | None = None
    max_tokens: int = 200
    min_characters: int = 12
    temperature: float = 1.0
    batch: int = 64
    seed: int = 0
    max_repetition: float = 0.2
    max_overlap: float = 0.5

    def __post_init__(self) -> None:
        for name in ("count", "max_tokens", "min_characters", "batch"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.seed < 0:
            raise InvalidInputError(f"seed must be at least 0, got {self.seed}")
        if not 0 < self.temperature < math.inf:
            raise InvalidInputError(
                f"temperature must be above 0, got {self.temperature}: written greedily, all turns would be the same"
            )

    @property
    def attempts(self) -> int:
        """Turns to write at most."""
        return 20 * self.count if self.max_attempts is None else self.max_attempts


@dataclass
class SynthesisProgress:
    """Counts, handed to the progress callback after every pass.

    Attributes:
        kept: turns in the file.
        attempts: turns written in this run, kept or not.
        tokens: generated in this run.
        dropped: by reason.
        seconds: since the start.
    """

    kept: int = 0
    attempts: int = 0
    tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


def synthesize(
    target: Target,
    tokenizer: TextTokenizer,
    out: Path,
    settings: SynthesisSettings,
    *,
    system: str | None = None,
    progress: Callable[[SynthesisProgress], None] = lambda _: None,
) -> SynthesisProgress:
    """Write user turns to ``out`` (JSON lines with ``turns``, which ``read_prompts`` reads) until enough are kept.

    A file found there is continued: its turns count, new ones must differ from them.

    Args:
        target: writes; many turns share each of its passes.
        tokenizer: with the model's chat template.
        system: system message of the conversations; the template's own where None.
        progress: called after every pass.

    Raises:
        InvalidInputError: a template that does not print the user's words, or a file of another kind.
    """
    opening, closing = user_turn(tokenizer, system)
    header = tokenizer.encode(opening, add_special=False)
    ends = set(target.info.eos_token_ids) | set(tokenizer.encode(closing, add_special=False)[:1] if closing else ())
    if not ends:
        raise InvalidInputError(f"{target.info.name} has no token that ends a user turn, so it would go on for ever")
    kept = Kept(settings)
    first = _continue(out, kept)
    count = SynthesisProgress(kept=len(kept))
    attempts = iter(range(first, first + settings.attempts))

    def jobs() -> Iterator[Callable[[TargetCache], Job[tuple[int, list[int], bool]]]]:
        for attempt in attempts:
            if count.kept >= settings.count:
                return
            yield partial(_write, target, header, frozenset(ends), settings, attempt, count)

    started = time.perf_counter()
    with out.open("a", encoding="utf-8") as file:
        capacity = len(header) + settings.max_tokens
        for ended in decode_together(target, jobs(), slots=settings.batch, capacity=capacity):
            for attempt, ids, whole in ended:
                if count.kept >= settings.count:
                    break
                count.attempts += 1
                text = tokenizer.decode(ids).strip()
                reason = kept.objection(text) if whole else "unfinished"
                if reason is not None:
                    count.dropped[reason] += 1
                    continue
                kept.add(text)
                count.kept += 1
                # One write per line: a killed run leaves whole lines.
                record = {"id": f"synthetic-{attempt:06d}", "attempt": attempt, "turns": [text]}
                if system is not None:
                    record["system"] = system
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                file.flush()
            count.seconds = time.perf_counter() - started
            progress(count)
            if count.kept >= settings.count:
                break
        os.fsync(file.fileno())
    return count


def user_turn(tokenizer: TextTokenizer, system: str | None = None) -> tuple[str, str]:
    """The chat template's text before a first user turn, and after it.

    Raises:
        InvalidInputError: a template that changes or hides the user's words.
    """
    messages = [] if system is None else [{"role": "system", "content": system}]
    rendered = tokenizer.render_chat([*messages, {"role": "user", "content": MARK}], add_generation_prompt=False)
    opening, found, closing = rendered.partition(MARK)
    if not found:
        raise InvalidInputError("the chat template does not print a user's words as they are; give prompts of your own")
    return opening, closing


def _write(
    target: Target,
    header: Sequence[int],
    ends: frozenset[int],
    settings: SynthesisSettings,
    attempt: int,
    count: SynthesisProgress,
    cache: TargetCache,
) -> Job[tuple[int, list[int], bool]]:
    """One user turn: the attempt's number, its ids, and whether it came to an end."""
    rng = np.random.default_rng([settings.seed, attempt])
    output = target.prefill(cache, header)
    ids: list[int] = []
    while (token := sampled(output, settings.temperature, rng)) not in ends:
        ids.append(token)
        count.tokens += 1
        if len(ids) >= settings.max_tokens:
            return attempt, ids, False
        output = yield token
    return attempt, ids, True


class Kept:
    """The turns kept so far, and what speaks against another. The rules know no language."""

    def __init__(self, settings: SynthesisSettings) -> None:
        self._settings = settings
        self._texts: set[str] = set()
        self._shingles: set[int] = set()

    def __len__(self) -> int:
        return len(self._texts)

    def objection(self, text: str) -> str | None:
        """Why a turn is dropped: ``short``, ``not text``, ``repetitive``, ``duplicate`` or ``similar``; None keeps."""
        if len(text) < self._settings.min_characters:
            return "short"
        if not _is_text(text):
            return "not text"
        shingles = _shingles(text)
        if 1 - len(set(shingles)) / len(shingles) > self._settings.max_repetition or _runs_on(text):
            return "repetitive"
        if _normal(text) in self._texts:
            return "duplicate"
        if sum(shingle in self._shingles for shingle in shingles) / len(shingles) > self._settings.max_overlap:
            return "similar"
        return None

    def add(self, text: str) -> None:
        """Keep a turn."""
        self._texts.add(_normal(text))
        self._shingles.update(_shingles(text))


def _normal(text: str) -> str:
    return " ".join(text.casefold().split())


def _words(text: str) -> list[str]:
    """Words where they are set apart by spaces, characters where they are not (as in Chinese)."""
    words = _normal(text).split()
    return words if len(text) < 12 * len(words) else [char for word in words for char in word]


def _shingles(text: str) -> list[int]:
    words = _words(text)
    return [hash(tuple(words[i : i + SHINGLE])) for i in range(max(1, len(words) - SHINGLE + 1))]


def _is_text(text: str) -> bool:
    """Letters or digits for the most part, and every character a real one."""
    solid = [char for char in text if not char.isspace()]
    return "\ufffd" not in text and any(map(str.isalpha, solid)) and sum(map(str.isalnum, solid)) > 0.5 * len(solid)


def _runs_on(text: str, limit: int = 16) -> bool:
    """One character so many times in a row."""
    return any(text[i : i + limit] == text[i] * limit for i in range(len(text) - limit + 1))


def _continue(out: Path, kept: Kept) -> int:
    """Take in the turns of a file; the number of the next attempt."""
    if not out.exists():
        return 0
    following = 0
    for number, line in enumerate(out.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            record: Any = json.loads(line)
            following = max(following, int(record["attempt"]) + 1)
            kept.add(str(record["turns"][0]))
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            raise InvalidInputError(
                f"{out}, line {number} was not written by `eyas data synthesize`; choose another file"
            ) from None
    return following
