"""A whole answer, gathered from its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.generate import Step
from eyas.metrics import Stats
from eyas.stopping import FinishReason
from eyas.targets.base import Target


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


@dataclass(frozen=True)
class Divergence:
    """Where two answers part.

    Attributes:
        token: number of the first token that differs, from 0.
        gap: between the logits of the two tokens there, as one pass over prompt and common part gives them, before any
            penalty or bias. In half precision, where passes of different shape round differently, a near-tie has a
            small one. None where one answer merely ends earlier.
    """

    token: int
    gap: float | None


def divergence(target: Target, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> Divergence | None:
    """None if the answers are the same."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if at is None:
        return None if len(ours) == len(theirs) else Divergence(min(len(ours), len(theirs)), None)
    known = [*prompt, *ours[:at]]
    logits = target.prefill(target.new_cache(len(known)), known).row(-1)
    return Divergence(at, abs(float(logits[ours[at]]) - float(logits[theirs[at]])))
