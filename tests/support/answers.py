"""Whole answers, and a tokenizer for tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from eyas.drafters.base import Drafter
from eyas.generate import Session, Step, TokenLogprob, generate
from eyas.policies import TreePolicy
from eyas.sampling import SamplingParams
from eyas.stopping import FinishReason, StopParams
from eyas.targets.base import Target
from eyas.text import TextTokenizer
from support.drafters import Script, ScriptedDrafter
from support.exhaustive import distribution
from support.tiny import TableTarget


@dataclass
class Answered:
    """The steps of an answer put together."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @property
    def outcome(self) -> tuple[list[int], str, FinishReason | None, list[TokenLogprob]]:
        """All that a user sees."""
        return self.tokens, self.text, self.reason, self.logprobs

    @property
    def blocks(self) -> list[int]:
        """Tokens per cycle."""
        return [len(step.tokens) for step in self.steps[1:]]


def answer(target: Target | Session, prompt: Sequence[int], drafter: Drafter | None = None, **options: Any) -> Answered:
    """Run ``generate`` to its end, on a session or on a fresh one; StopParams' fields may be given one by one."""
    session = target if isinstance(target, Session) else Session(target, drafter)
    stops = {name: options.pop(name) for name in list(options) if name in StopParams.__dataclass_fields__}
    answered = Answered()
    for step in generate(session, prompt, stop=StopParams(**stops), **options):
        assert answered.reason is None, "a step after the last one"
        answered.tokens += step.tokens
        answered.text += step.text
        answered.reason = step.finish_reason
        answered.logprobs += step.logprobs
        answered.steps.append(step)
    return answered


def scripted(target: TableTarget, script: Script, prompt: Sequence[int], feature_levels: int = 0) -> ScriptedDrafter:
    """A scripted drafter for a table."""
    return ScriptedDrafter(target.ranking, script, first_token=int(prompt[0]), feature_levels=feature_levels)


def exact_answers(
    target: TableTarget, script: Script | None, policy: TreePolicy, params: SamplingParams, **options: Any
) -> dict[tuple[int, ...], Fraction]:
    """Every answer the loop can give, with its exact probability."""
    prompt = [1, 0]
    drafter = scripted(target, script, prompt) if script else None
    return distribution(
        lambda rng: tuple(answer(target, prompt, drafter, policy=policy, params=params, rng=rng, **options).tokens)
    )


def assert_same_distribution(ours: dict[tuple[int, ...], Fraction], plain: dict[tuple[int, ...], Fraction]) -> None:
    assert ours.keys() == plain.keys()
    for tokens, chance in plain.items():
        assert float(ours[tokens]) == pytest.approx(float(chance), rel=1e-6)


def syllables(vocab_size: int) -> TextTokenizer:
    """Every token a syllable of its own; no text has two readings."""
    words = ["".join(pair) for pair in product("bdfgklmnprst", "aeiou")][:vocab_size]
    assert len(words) == vocab_size
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.decoder = decoders.ByteLevel()
    return TextTokenizer(backend)
