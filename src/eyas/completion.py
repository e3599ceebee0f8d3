"""A whole answer, gathered from its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from eyas.generate import Step
from eyas.metrics import Stats
from eyas.stopping import FinishReason


@dataclass(frozen=True)
class Completion:
    """A finished answer (or one that was abandoned: then without a finish reason).

    Attributes:
        text: its text; empty when generated without a tokenizer.
        token_ids: its tokens, a final EOS or stop id included.
        finish_reason: why it ended.
        prompt_tokens: tokens of the prompt.
        stats: what it took.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    prompt_tokens: int
    stats: Stats

    def as_dict(self) -> dict[str, Any]:
        """The JSON object that ``eyas generate --json`` prints."""
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "usage": {"prompt_tokens": self.prompt_tokens, "completion_tokens": len(self.token_ids)},
            "stats": self.stats.as_dict(),
        }


def collect(steps: Iterable[Step], prompt_tokens: int, watch: Callable[[Step], object] | None = None) -> Completion:
    """Run ``generate`` to its end.

    Args:
        steps: what ``generate`` returned.
        prompt_tokens: length of the prompt it was given.
        watch: called with every step as it comes, to stream or to draw; a true answer abandons the rest.
    """
    text: list[str] = []
    tokens: list[int] = []
    reason: FinishReason | None = None
    stats = Stats()
    for step in steps:
        text.append(step.text)
        tokens += step.tokens
        reason, stats = step.finish_reason, step.stats
        if watch is not None and watch(step):
            break
    return Completion("".join(text), tuple(tokens), reason, prompt_tokens, stats)
