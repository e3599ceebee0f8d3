"""Where an answer ends: the one place that decides it, token by token, whatever a block committed.

Text, token ids, log-probabilities and counts all end at the token named here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from eyas.errors import InvalidInputError
from eyas.text import IncrementalDetokenizer, StopStrings, TextTokenizer

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class StopParams:
    """When to stop.

    Attributes:
        max_tokens: most tokens of answer; None is bounded by the context alone.
        min_tokens: no end-of-answer token may be chosen, and no stop string completed, before this many tokens.
        stop_strings: the answer ends just before the first of these; needs a tokenizer.
        stop_token_ids: ids that end the answer like the model's own EOS; they stay in ``token_ids``, as EOS does.
        ignore_eos: go on past the model's EOS.

    Raises:
        InvalidInputError: counts that leave no token, or an empty stop string.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidInputError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.min_tokens < 0:
            raise InvalidInputError(f"min_tokens must be at least 0, got {self.min_tokens}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidInputError(f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens})")
        if isinstance(self.stop_strings, str):
            raise InvalidInputError("stop_strings is a tuple of strings, got one string")
        if "" in self.stop_strings:
            raise InvalidInputError("a stop string is empty; it would end every answer before its first word")

    def end_ids(self, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
        """Every id that ends the answer, given the model's own."""
        own = () if self.ignore_eos else tuple(eos_token_ids)
        return tuple(dict.fromkeys((*own, *self.stop_token_ids)))


class Answer:
    """The answer so far. ``push`` is fed committed tokens one by one until ``finish_reason`` is set.

    Args:
        stop: the request's rules.
        eos_token_ids: the model's.
        room: tokens that fit into the context after the prompt.
        tokenizer: needed for text and stop strings; without it ``text`` stays empty.
    """

    def __init__(
        self, stop: StopParams, eos_token_ids: Sequence[int], room: int, tokenizer: TextTokenizer | None = None
    ) -> None:
        if stop.stop_strings and tokenizer is None:
            raise InvalidInputError("stop strings need a tokenizer; pass one, or use stop_token_ids")
        self._stop = stop
        self._end_ids = frozenset(stop.end_ids(eos_token_ids))
        self._limit = room if stop.max_tokens is None else min(room, stop.max_tokens)
        self._detokenizer = IncrementalDetokenizer(tokenizer) if tokenizer is not None else None
        self._stop_strings = StopStrings(stop.stop_strings)
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None

    @property
    def remaining(self) -> int:
        """Tokens that may still come."""
        return 0 if self.finish_reason else self._limit - len(self.token_ids)

    def push(self, tokens: Sequence[int]) -> list[int]:
        """Take tokens up to the end of the answer; returns those that belong to it."""
        before = len(self.token_ids)
        for token in tokens:
            if self.finish_reason:
                break
            self._push_one(token)
        return self.token_ids[before:]

    def _push_one(self, token: int) -> None:
        self.token_ids.append(token)
        ended = token in self._end_ids
        if self._detokenizer is not None:
            delta = "" if ended else self._detokenizer.push(token)
            if ended or len(self.token_ids) >= self._limit:
                delta += self._detokenizer.finish()
            self.text += self._stop_strings.push(delta, armed=len(self.token_ids) >= self._stop.min_tokens)
        if ended or self._stop_strings.matched:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self._limit:
            self.finish_reason = "length"
        if self.finish_reason:
            self.text += self._stop_strings.finish()
