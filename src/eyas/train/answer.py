"""The target answers prompts itself and its features are kept: the data a head learns from.

A head must guess what *this* target says, so foreign answers teach it the wrong thing. Decoding is continuous: a
fixed number of slots, each with one conversation, one target pass for all of them, a slot refilled as soon as its
answer ends. Features cost nothing extra, the pass computes them anyway.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.errors import InvalidInputError
from eyas.targets.base import Features, Target, TargetCache, TargetOutput
from eyas.train.store import Document, StoreWriter, finished_prompts
from eyas.tree import DraftTree

Message = Mapping[str, str]
SORT_WINDOW = 512
"""Prompts are answered in order of length within windows this wide: a pass costs what its longest slot costs."""


@dataclass(frozen=True)
class Prompt:
    """A conversation's user turns; the target supplies the replies.

    Attributes:
        index: line in the file, from 0.
        turns: at least one user turn.
        system: system message, if the file gives one.
    """

    index: int
    turns: tuple[str, ...]
    system: str | None = None


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
        if not 0 <= self.sampled_share <= 1 or self.temperature <= 0:
            raise InvalidInputError(
                f"sampled_share lies in 0..1 and temperature above 0, got {self.sampled_share} and {self.temperature}"
            )


@dataclass
class AnswerProgress:
    """Counts of this run, handed to the progress callback after every pass.

    Attributes:
        prompts: prompts to answer in this run; ``skipped`` are in the store already.
        documents: finished in this run.
        answer_tokens: generated in this run; ``prompt_tokens``: prefilled.
        too_long, empty: dropped prompts, by reason.
        seconds: since the start.
    """

    prompts: int = 0
    skipped: int = 0
    documents: int = 0
    answer_tokens: int = 0
    prompt_tokens: int = 0
    too_long: int = 0
    empty: int = 0
    seconds: float = 0.0


@dataclass
class _Slot:
    """One conversation being answered."""

    cache: TargetCache
    prompt: Prompt
    messages: list[Message]
    greedy: bool
    rng: np.random.Generator
    features: torch.Tensor  # [capacity, F] bfloat16, rows of the tokens taken in
    ids: list[int] = field(default_factory=list)
    answer: list[bool] = field(default_factory=list)
    root: int = -1  # generated, not yet taken in
    turn: int = 0
    answer_start: int = 0

    def take_in(self, ids: Sequence[int], generated: bool, features: Features) -> None:
        at = len(self.ids)
        self.features[at : at + len(ids)] = torch.as_tensor(features)
        self.ids += ids
        self.answer += [generated] * len(ids)


def answer_prompts(
    target: Target,
    prompts: Sequence[Prompt],
    out: Path,
    settings: AnswerSettings,
    *,
    encode: Callable[[Sequence[Message]], list[int]],
    decode: Callable[[Sequence[int]], str],
    progress: Callable[[AnswerProgress], None] = lambda _: None,
) -> AnswerProgress:
    """Answer every prompt that the store ``out`` does not hold yet.

    Args:
        target: answers; several requests share each of its passes.
        encode: messages -> ids up to where the next reply begins (the chat template).
        decode: ids of a reply -> its text, special tokens left out; used between the turns of a conversation.
        progress: called after every pass.
    """
    info = target.info
    feature_size = info.feature_levels * info.hidden_size
    identity = {key: value for key, value in asdict(info).items() if key in IDENTITY}
    writer = StoreWriter(out, target=identity, feature_size=feature_size, settings=asdict(settings))
    done = finished_prompts(out)
    todo = [prompt for prompt in prompts if prompt.index not in done]
    count = AnswerProgress(prompts=len(todo), skipped=len(prompts) - len(todo))
    queue = _encoded(todo, encode, settings, count)
    started = time.perf_counter()
    idle = _new_caches(target, settings)
    active: list[_Slot] = []
    while True:
        while idle and (item := next(queue, None)) is not None:
            prompt, ids = item
            rng = np.random.default_rng([settings.seed, prompt.index])
            slot = _Slot(
                idle.pop(),
                prompt,
                _opening(prompt),
                greedy=bool(rng.random() >= settings.sampled_share),
                rng=rng,
                features=torch.zeros(len(ids) + settings.max_tokens, feature_size, dtype=torch.bfloat16),
            )
            _begin_turn(target, slot, ids, settings, count)
            if _finished(slot, info.eos_token_ids, settings):
                _close_turn(target, slot, settings, encode, decode, writer, count, active, idle)
            else:
                active.append(slot)
        if not active:
            break
        outputs = target.verify([(slot.cache, DraftTree.root_only(slot.root)) for slot in active])
        stepped, active = active, []
        for slot, output in zip(stepped, outputs, strict=True):
            slot.cache.commit([0])
            slot.take_in([slot.root], True, output.features)
            slot.root = _choose(output, slot, settings)
            count.answer_tokens += 1
            if _finished(slot, info.eos_token_ids, settings):
                _close_turn(target, slot, settings, encode, decode, writer, count, active, idle)
            else:
                active.append(slot)
        count.seconds = time.perf_counter() - started
        progress(count)
    writer.flush()
    return count


IDENTITY = ("name", "vocab_size", "hidden_size", "num_layers", "feature_levels")


def _new_caches(target: Target, settings: AnswerSettings) -> list[TargetCache]:
    capacity = settings.max_prompt_tokens + settings.max_tokens
    return [target.new_cache(capacity) for _ in range(settings.batch)][::-1]


def _opening(prompt: Prompt) -> list[Message]:
    first: list[Message] = [{"role": "user", "content": prompt.turns[0]}]
    return first if prompt.system is None else [{"role": "system", "content": prompt.system}, *first]


def _encoded(
    prompts: Sequence[Prompt],
    encode: Callable[[Sequence[Message]], list[int]],
    settings: AnswerSettings,
    count: AnswerProgress,
) -> Iterator[tuple[Prompt, list[int]]]:
    """Prompts with their ids, shortest first within each window; those too long are dropped and counted."""
    for start in range(0, len(prompts), SORT_WINDOW):
        window = [(prompt, encode(_opening(prompt))) for prompt in prompts[start : start + SORT_WINDOW]]
        for prompt, ids in sorted(window, key=lambda item: len(item[1])):
            if len(ids) > settings.max_prompt_tokens:
                count.too_long += 1
            else:
                yield prompt, ids


def _begin_turn(
    target: Target, slot: _Slot, ids: Sequence[int], settings: AnswerSettings, count: AnswerProgress
) -> None:
    """Take in a turn's prompt, of which the conversation so far is a prefix, and choose the reply's first token."""
    fresh = list(ids[len(slot.ids) :])
    output = target.prefill(slot.cache, fresh)
    slot.take_in(fresh, False, output.features)
    slot.answer_start = len(slot.ids)
    slot.root = _choose(output, slot, settings)
    count.prompt_tokens += len(fresh)


def _choose(output: TargetOutput, slot: _Slot, settings: AnswerSettings) -> int:
    """The next token from the last row with logits."""
    if slot.greedy:
        return int(output.argmax()[-1])
    logits = output.row(-1)
    cumulative = np.exp((logits - logits.max()) / settings.temperature).cumsum(dtype=np.float64)
    return int(np.searchsorted(cumulative, slot.rng.random() * cumulative[-1], side="right"))


def _finished(slot: _Slot, eos: Sequence[int], settings: AnswerSettings) -> bool:
    return slot.root in eos or len(slot.ids) + 1 - slot.answer_start >= settings.max_tokens


def _close_turn(
    target: Target,
    slot: _Slot,
    settings: AnswerSettings,
    encode: Callable[[Sequence[Message]], list[int]],
    decode: Callable[[Sequence[int]], str],
    writer: StoreWriter,
    count: AnswerProgress,
    active: list[_Slot],
    idle: list[TargetCache],
) -> None:
    """A reply has ended: go on with the next turn, or store the conversation and free its slot."""
    reply = slot.ids[slot.answer_start :]
    slot.turn += 1
    if reply and slot.turn < len(slot.prompt.turns):
        following = [
            *slot.messages,
            {"role": "assistant", "content": decode([*reply, slot.root])},
            {"role": "user", "content": slot.prompt.turns[slot.turn]},
        ]
        ids = encode(following)
        common = _common_prefix(slot.ids, ids)
        # Decoded and encoded again, a reply may come out differently. Then the template's version counts, as it will
        # when a user goes on chatting: what differs is taken in anew.
        if common < len(ids) <= settings.max_prompt_tokens:
            slot.cache.truncate(common)
            del slot.ids[common:], slot.answer[common:]
            kept = slot.features
            slot.features = kept.new_zeros((len(ids) + settings.max_tokens, kept.shape[1]))
            slot.features[:common] = kept[:common]
            slot.messages = following
            _begin_turn(target, slot, ids, settings, count)
            if _finished(slot, target.info.eos_token_ids, settings):
                _close_turn(target, slot, settings, encode, decode, writer, count, active, idle)
            else:
                active.append(slot)
            return
    if any(slot.answer):
        writer.add(
            Document(
                ids=np.array(slot.ids, np.int64),
                answer=np.array(slot.answer, bool),
                features=slot.features[: len(slot.ids)].clone(),
                final=slot.features[: len(slot.ids), -target.info.hidden_size :],
                last=slot.root,
                prompt_index=slot.prompt.index,
                greedy=slot.greedy,
            )
        )
        count.documents += 1
    else:
        count.empty += 1
    slot.cache.truncate(0)
    idle.append(slot.cache)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


def read_prompts(files: Iterable[Path]) -> list[Prompt]:
    """Prompts of JSON-lines files, numbered on through all files.

    A line holds ``turns`` (user turns), ``messages`` (roles and contents), ``conversations`` (ShareGPT: ``from``,
    ``value``), ``instruction`` (with optional ``input``) or ``prompt``. Replies in the file are ignored.

    Raises:
        InvalidInputError: a line that is not JSON or holds none of these, with file and line number.
    """
    prompts: list[Prompt] = []
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON may hold U+2028
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInputError(f"cannot read the prompts {file}: {error}") from None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise InvalidInputError(f"{where} is not valid JSON: {error}") from None
            prompts.append(_prompt(len(prompts), record, where))
    return prompts


def _prompt(index: int, record: Any, where: str) -> Prompt:
    system = None
    turns: list[Any] = []
    if not isinstance(record, dict):
        raise InvalidInputError(f"{where} is a JSON {type(record).__name__}, an object is needed")
    if "turns" in record:
        turns = record["turns"] if isinstance(record["turns"], list) else []
    elif "messages" in record or "conversations" in record:
        for message in record.get("messages") or record.get("conversations") or []:
            if not isinstance(message, dict):
                raise InvalidInputError(f"{where}: a message is an object with role and content, got {message!r}")
            role = message.get("role") or message.get("from")
            content = message.get("content") or message.get("value")
            if role == "system":
                system = content
            elif role in ("user", "human"):
                turns.append(content)
    elif "instruction" in record:
        turns = ["\n\n".join(part for part in (record["instruction"], record.get("input")) if part)]
    elif "prompt" in record:
        turns = [record["prompt"]]
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise InvalidInputError(
            f"{where} has no user turn: give `turns`, `messages`, `conversations`, `instruction` or `prompt`, "
            f"found the keys {sorted(record)}"
        )
    return Prompt(index, tuple(turns), system)
