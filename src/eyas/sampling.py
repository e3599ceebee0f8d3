"""From raw logits to the distribution a token is drawn from: one documented order, float32, on the host.

Order, the one transformers uses where both have the option:

1. ``logit_bias``
2. ``repetition_penalty`` (prompt and answer), ``presence_penalty`` and ``frequency_penalty`` (answer only)
3. end-of-answer tokens banned until ``min_tokens`` are out
4. custom ``processors`` (grammars and the like)
5. ``temperature``, ``top_k``, ``top_p``, ``min_p``

Steps 1-4 depend on the tokens before a node, so they see each node's own true prefix: the committed tokens plus
the node's ancestors in the draft tree, never a sibling. Past a token that ends the answer they are not asked:
nothing chosen there is ever committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import numpy as np

from eyas.errors import InvalidInputError
from eyas.tree import Floats

LARGEST = 1e30
"""Bound of every parameter's size: sums and products with logits stay finite in float32."""

LogitsProcessor = Callable[[Sequence[int], Floats], Floats]
"""(prefix token ids, logits [V]) -> logits [V]; must depend on nothing else, so that any drafter stays lossless."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. The defaults are greedy decoding.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens (ties of the k-th kept); 0 or -1 keeps all.
        top_p: keep the most likely tokens until their mass reaches top_p; 1 keeps all, 0 keeps one.
        min_p: keep tokens at least min_p times as likely as the likeliest; 0 keeps all.
        repetition_penalty: > 0; logits of tokens seen in prompt or answer are divided (if positive) or multiplied.
        presence_penalty: subtracted once from the logits of tokens already in the answer.
        frequency_penalty: subtracted once per occurrence in the answer.
        logit_bias: token id -> number added to its logit.
        processors: further logits processors, applied in order.
        seed: seed of this request's own generator; None draws one from the system.

    Raises:
        InvalidInputError: a value out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    processors: tuple[LogitsProcessor, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0)
        if self.top_k < -1:
            raise InvalidInputError(f"top_k must be -1 or 0 (off) or a count >= 1, got {self.top_k}")
        _check("top_p", self.top_p, 0.0, 1.0)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("repetition_penalty", self.repetition_penalty, 1 / LARGEST)
        _check("presence_penalty", self.presence_penalty)
        _check("frequency_penalty", self.frequency_penalty)
        for token, bias in self.logit_bias.items():
            _check(f"logit_bias of token {token}", bias)
        if self.seed is not None and self.seed < 0:
            raise InvalidInputError(f"seed must be a whole number >= 0, got {self.seed}")

    @property
    def greedy(self) -> bool:
        """Whether one token has all the mass; greedy decoding touches no randomness."""
        return self.temperature == 0.0 or self.top_k == 1 or self.top_p == 0.0

    @property
    def by_temperature(self) -> bool:
        """Whether the distribution is a matter of the temperature alone, one that is no rounding error, but for what
        ``looks_back`` tells."""
        return self.top_k <= 0 and self.top_p == 1.0 and self.min_p == 0.0 and self.temperature >= 1e-3

    @property
    def looks_back(self) -> bool:
        """Whether logits are changed at all before the temperature."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.processors
        )


def _check(name: str, value: float, low: float = -LARGEST, high: float = LARGEST) -> None:
    if not low <= value <= high:  # NaN is nowhere
        raise InvalidInputError(f"{name} must be between {low:g} and {high:g}, got {value}")


class Sampler:
    """One request's view of its own distribution: parameters plus the committed tokens.

    Args:
        params: the request's sampling parameters.
        vocab_size: V; ids in ``logit_bias`` must lie below it.
        prompt: token ids of the prompt.
        min_tokens: answer length below which ``end_ids`` cannot be chosen.
        end_ids: ids that would end the answer; those outside the vocabulary cannot come and are left out.

    Raises:
        InvalidInputError: a biased token id outside the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt: Sequence[int],
        min_tokens: int = 0,
        end_ids: Sequence[int] = (),
    ) -> None:
        for token in params.logit_bias:
            if not 0 <= token < vocab_size:
                raise InvalidInputError(f"logit_bias names token {token}, but ids run from 0 to {vocab_size - 1}")
        self.params = params
        self._tokens = list(prompt)
        self._answer_start = len(self._tokens)
        self._min_tokens = min_tokens
        self._end_ids = [token for token in end_ids if 0 <= token < vocab_size]
        self._bias_ids = np.array(list(params.logit_bias), np.int64)
        self._bias = np.array(list(params.logit_bias.values()), np.float32)

    def commit(self, tokens: Sequence[int]) -> None:
        """Take in tokens that are now part of the answer."""
        self._tokens.extend(tokens)

    @property
    def changes_logits(self) -> bool:
        """Whether ``logits`` changes anything for the next tokens; if not, greedy decoding takes the raw argmax."""
        return self.params.looks_back or self._held(len(self._tokens))

    def _held(self, length: int) -> bool:
        """Whether no end-of-answer token may follow a prefix of this length."""
        return length - self._answer_start < self._min_tokens and len(self._end_ids) > 0

    def logits(self, raw: Floats, ancestors: Sequence[int] = ()) -> Floats:
        """Steps 1-4.

        Args:
            raw: [V] float32, may be changed in place.
            ancestors: draft tokens between the committed tokens and the one to choose.

        Returns:
            [V] float32.

        Raises:
            InvalidInputError: no token is left to choose.
        """
        params = self.params
        held = self._held(len(self._tokens) + len(ancestors))
        if not (params.looks_back or held) or any(token in self._end_ids for token in ancestors):
            return raw
        prefix = [*self._tokens, *ancestors]
        logits = raw
        if len(self._bias_ids):
            logits[self._bias_ids] += self._bias
        if params.repetition_penalty != 1.0:
            seen = np.unique(np.asarray(prefix, np.int64))
            values = logits[seen]
            factor = np.float32(params.repetition_penalty)
            logits[seen] = np.where(values > 0, values / factor, values * factor)
        if params.presence_penalty or params.frequency_penalty:
            used, counts = np.unique(np.asarray(prefix[self._answer_start :], np.int64), return_counts=True)
            penalty = params.presence_penalty + params.frequency_penalty * counts
            logits[used] -= penalty.astype(np.float32)
        if held:
            logits[self._end_ids] = -np.inf
        for processor in params.processors:
            logits = processor(prefix, logits)
        if not isfinite(logits.max()):
            raise InvalidInputError(
                f"after {len(prefix) - self._answer_start} tokens of answer no token is left to choose (largest logit: "
                f"{logits.max()}); logit_bias, min_tokens and processors must leave at least one"
            )
        return logits

    def choice(self, raw: Floats, ancestors: Sequence[int] = ()) -> int:
        """The greedy token: index of the first maximum after steps 1-4."""
        return int(self.logits(raw, ancestors).argmax())

    def probabilities(self, raw: Floats, ancestors: Sequence[int] = ()) -> Floats:
        """[V] float32: steps 1-5, normalised; ``raw`` may be changed in place."""
        logits = self.logits(raw, ancestors)
        return warp(logits, self.params, out=raw if logits is raw else None)


def warp(logits: Floats, params: SamplingParams, out: Floats | None = None) -> Floats:
    """Temperature, top-k, top-p, min-p, each on what the one before left (step 5).

    Args:
        logits: [V] float32 with at least one finite value.
        out: [V] float32 that may be written over and handed back, may be ``logits``; None: ``logits`` stay as they are.

    Returns:
        [V] float32 probabilities that sum to 1.
    """
    if params.greedy:
        one_hot = np.zeros_like(logits)
        one_hot[logits.argmax()] = 1.0
        return one_hot
    # A tiny temperature sends all but the maximum to -inf, as it should; float32's own zero would make NaN of it.
    temperature = max(np.float32(params.temperature), np.finfo(np.float32).tiny)
    scaled: Floats = np.subtract(logits, logits.max(), out=out)  # everything else happens in place
    if temperature != 1.0:
        with np.errstate(over="ignore"):
            scaled /= temperature
    if 0 < params.top_k < len(scaled):
        threshold = np.partition(scaled, -params.top_k)[-params.top_k]
        scaled[scaled < threshold] = -np.inf
    probabilities: Floats = np.exp(scaled, out=scaled)
    probabilities /= probabilities.sum()
    if params.top_p == 1.0 and params.min_p == 0.0:
        return probabilities
    if params.top_p < 1.0:
        probabilities = _nucleus(probabilities, params.top_p)
    if params.min_p > 0.0:
        probabilities[probabilities < params.min_p * probabilities.max()] = 0.0
    probabilities /= probabilities.sum()
    return probabilities


def _nucleus(probabilities: Floats, top_p: float) -> Floats:
    """Drop the least likely tokens whose masses together stay within 1 - top_p; of equal ones the lower index stays."""
    allowed = np.float32(1.0 - top_p)
    # Together, tokens below allowed / V can never exceed it: they fall without being sorted.
    tail = probabilities < allowed / len(probabilities)
    kept = np.flatnonzero(~tail)
    order = kept[np.argsort(-probabilities[kept], kind="stable")[::-1]]  # ascending
    masses = np.cumsum(probabilities[order], dtype=np.float64) + probabilities[tail].sum(dtype=np.float64)
    dropped = masses.astype(np.float32) <= allowed
    dropped[-1] = False
    probabilities[order[dropped]] = 0.0
    probabilities[tail] = 0.0
    return probabilities


def log_softmax(logits: Floats) -> Floats:
    """[..., V] float32 log-probabilities of raw logits."""
    shifted: Floats = logits - logits.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted
