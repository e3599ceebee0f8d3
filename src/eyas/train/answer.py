"""The target answers prompts itself and its features are kept: the data a head learns from.

A head must guess what *this* target says, so foreign answers teach it the wrong thing. Many conversations share each
target pass; features cost nothing extra, the pass computes them anyway.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from eyas.errors import InvalidInputError
from eyas.targets.base import Features, Target, TargetCache, TargetInfo
from eyas.train.prompts import Message, Prompt
from eyas.train.store import Document, StoreWriter, finished_prompts
from eyas.train.together import Job, decode_together, sampled

SORT_WINDOW = 512
"""Prompts are answered in order of length within windows this wide: a pass costs what its longest slot costs."""

IDENTITY = ("name", "vocab_size", "hidden_size", "num_layers", "feature_levels")
"""What identifies a target: features of another must not get into a store."""

Encode = Callable[[Sequence[Message]], list[int]]
"""Messages -> ids up to where the next reply begins (the chat template)."""

Decode = Callable[[Sequence[int]], str]
"""Ids of a reply -> its text, special tokens left out."""


@dataclass(frozen=True)
class AnswerSettings:
    """How prompts are answered.

    Attributes:
        max_tokens: per answer.
        max_prompt_tokens: longer prompts are dropped and counted (of a later turn: the turn is).
        batch: conversations decoded at once.
        sampled_share: share of the conversations answered by sampling, the others greedily.
        temperature: of the sampled ones.
        seed: with the prompt's index it decides everything random, whatever the batch.
    """

    max_tokens: int = 160
    max_prompt_tokens: int = 400
    batch: int = 64
    sampled_share: float = 0.3
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.max_prompt_tokens < 1 or self.batch < 1:
            raise InvalidInputError(f"max_tokens, max_prompt_tokens and batch must be at least 1, got {self}")
        if not 0 <= self.sampled_share <= 1 or not 0 < self.temperature < math.inf:
            raise InvalidInputError(
                f"sampled_share lies in 0..1 and temperature above 0, got {self.sampled_share} and {self.temperature}"
            )
        if self.seed < 0:
            raise InvalidInputError(f"seed must be at least 0, got {self.seed}")


@dataclass
class AnswerProgress:
    """Counts of this run, handed to the progress callback after every pass.

    Attributes:
        prompts: prompts to answer in this run; ``skipped`` are in the store already.
        documents: finished in this run.
        answer_tokens: generated in this run; ``prompt_tokens``: prefilled.
        too_long, empty: dropped prompts, by reason.
        agreed, judged: of greedy answers from elsewhere: tokens that the target would have said, and all of them.
        seconds: since the start.
    """

    prompts: int = 0
    skipped: int = 0
    documents: int = 0
    answer_tokens: int = 0
    prompt_tokens: int = 0
    too_long: int = 0
    empty: int = 0
    agreed: int = 0
    judged: int = 0
    seconds: float = 0.0


class Conversation:
    """What a conversation's cache has taken in, token by token, with the features that came back.

    Attributes:
        ids: the tokens.
        answer: of each whether the target generated it.
    """

    def __init__(self, info: TargetInfo) -> None:
        self.ids: list[int] = []
        self.answer: list[bool] = []
        self._hidden_size = info.hidden_size
        # Grown ahead of need.
        self._features = torch.zeros(0, info.feature_levels * info.hidden_size, dtype=torch.bfloat16)

    def take_in(self, ids: Sequence[int], generated: bool, features: Features) -> None:
        """Append tokens with their features [n, F]."""
        at, end = len(self.ids), len(self.ids) + len(ids)
        if end > len(self._features):
            room = self._features.new_zeros(end + 256, self._features.shape[1])
            room[:at] = self._features[:at]
            self._features = room
        self._features[at:end] = torch.as_tensor(features)
        self.ids += ids
        self.answer += [generated] * len(ids)

    def truncate(self, length: int) -> None:
        """Forget all but the first tokens."""
        del self.ids[length:], self.answer[length:]

    def document(self, last: int, prompt_index: int, greedy: bool) -> Document:
        """As the store takes it."""
        features = self._features[: len(self.ids)].clone()
        return Document(
            ids=np.array(self.ids, np.int64),
            answer=np.array(self.answer, bool),
            features=features,
            final=features[:, -self._hidden_size :],
            last=last,
            prompt_index=prompt_index,
            greedy=greedy,
        )


def answer_prompts(
    target: Target,
    prompts: Sequence[Prompt],
    out: Path,
    settings: AnswerSettings,
    *,
    encode: Encode,
    decode: Decode,
    progress: Callable[[AnswerProgress], None] = lambda _: None,
) -> AnswerProgress:
    """Answer every prompt that the store ``out`` does not hold yet.

    Args:
        target: answers; several requests share each of its passes.
        encode: the chat template.
        decode: used between the turns of a conversation.
        progress: called after every pass.
    """
    writer = open_store(out, target.info, asdict(settings))
    done = finished_prompts(out)
    todo = [prompt for prompt in prompts if prompt.index not in done]
    count = AnswerProgress(prompts=len(todo), skipped=len(prompts) - len(todo))
    answering = _Answering(target, settings, encode, decode, count)
    jobs = (partial(answering.converse, prompt, ids) for prompt, ids in _encoded(todo, encode, settings, count))
    capacity = settings.max_prompt_tokens + settings.max_tokens
    started = time.perf_counter()
    for ended in decode_together(target, jobs, slots=settings.batch, capacity=capacity):
        for document in ended:
            if document is None:
                count.empty += 1
            else:
                writer.add(document)
                count.documents += 1
        count.seconds = time.perf_counter() - started
        progress(count)
    writer.flush()
    return count


def open_store(out: Path, info: TargetInfo, settings: dict[str, object]) -> StoreWriter:
    """A writer for this target's features."""
    identity = {key: value for key, value in asdict(info).items() if key in IDENTITY}
    return StoreWriter(out, target=identity, feature_size=info.feature_levels * info.hidden_size, settings=settings)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


def _encoded(
    prompts: Sequence[Prompt], encode: Encode, settings: AnswerSettings, count: AnswerProgress
) -> Iterator[tuple[Prompt, list[int]]]:
    """Prompts with their ids, shortest first within each window; those too long are dropped and counted."""
    for start in range(0, len(prompts), SORT_WINDOW):
        window = [(prompt, encode(prompt.opening)) for prompt in prompts[start : start + SORT_WINDOW]]
        for prompt, ids in sorted(window, key=lambda item: len(item[1])):
            if len(ids) > settings.max_prompt_tokens:
                count.too_long += 1
            else:
                yield prompt, ids


@dataclass(frozen=True)
class _Answering:
    """What all conversations of a run share."""

    target: Target
    settings: AnswerSettings
    encode: Encode
    decode: Decode
    count: AnswerProgress

    def converse(self, prompt: Prompt, ids: Sequence[int], cache: TargetCache) -> Job[Document | None]:
        """One conversation, all its turns; None where nothing was said. ``ids`` are those of its opening."""
        info, settings = self.target.info, self.settings
        rng = np.random.default_rng([settings.seed, prompt.index])
        greedy = bool(rng.random() >= settings.sampled_share)
        temperature = 0.0 if greedy else settings.temperature
        talk = Conversation(info)
        messages = prompt.opening
        for following in (*prompt.turns[1:], None):
            fresh = list(ids[len(talk.ids) :])
            output = self.target.prefill(cache, fresh)
            talk.take_in(fresh, False, output.features)
            self.count.prompt_tokens += len(fresh)
            start = len(talk.ids)
            token = sampled(output, temperature, rng)
            while token not in info.eos_token_ids and len(talk.ids) + 1 - start < settings.max_tokens:
                output = yield token
                talk.take_in([token], True, output.features)
                self.count.answer_tokens += 1
                token = sampled(output, temperature, rng)
            reply = talk.ids[start:]
            if not reply or following is None:
                break
            messages = [
                *messages,
                {"role": "assistant", "content": self.decode([*reply, token])},
                {"role": "user", "content": following},
            ]
            ids = self.encode(messages)
            # Decoded and encoded again, a reply may come out differently. Then the template's version counts, as it
            # will when a user goes on chatting: what differs is taken in anew.
            common = common_prefix(talk.ids, ids)
            if not common < len(ids) <= settings.max_prompt_tokens:
                break
            cache.truncate(common)
            talk.truncate(common)
        return talk.document(token, prompt.index, greedy) if any(talk.answer) else None
