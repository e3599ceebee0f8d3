"""Features for answers that were given elsewhere: the local target reads each conversation as it would have said it.

Ids and features of a document come from the same passes, so they cannot get out of step. Reading also tells whether the
target itself would have said the same: greedy answers of another model, precision or template show at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from eyas.targets.base import Target, TargetCache
from eyas.text import TextTokenizer
from eyas.train.answer import AnswerProgress, AnswerSettings, Conversation, common_prefix, open_store
from eyas.train.endpoint import Endpoint, Reply
from eyas.train.store import Document, finished_prompts
from eyas.tree import DraftTree, Ints

CHUNK = 64
"""Tokens of an answer per pass, as a chain: that gives the target's own choice at each."""


def take_in_replies(
    target: Target,
    tokenizer: TextTokenizer,
    replies: Sequence[Reply],
    out: Path,
    settings: AnswerSettings,
    endpoint: Endpoint,
    progress: Callable[[AnswerProgress], None] = lambda _: None,
) -> AnswerProgress:
    """Store every conversation that the store ``out`` does not hold yet, with features.

    A document counts as greedy only if it was asked for greedily and the target agrees with every token: simulated
    acceptance relies on that.

    Args:
        target: reads.
        tokenizer: the model's, with its chat template.
        replies: what the endpoint said.
        settings: limits; recorded in the manifest with the endpoint's address and model.
        progress: called after every conversation.
    """
    whole = {**asdict(settings), "endpoint": endpoint.url, "endpoint_model": endpoint.model}
    writer = open_store(out, target.info, whole)
    done = finished_prompts(out)
    todo = [reply for reply in replies if reply.prompt_index not in done]
    count = AnswerProgress(prompts=len(todo), skipped=len(replies) - len(todo))
    cache = target.new_cache(settings.max_prompt_tokens + settings.max_tokens)
    started = time.perf_counter()
    for reply in todo:
        cache.truncate(0)
        document = _read(target, tokenizer, cache, reply, settings, count)
        if document is not None:
            writer.add(document)
            count.documents += 1
        count.seconds = time.perf_counter() - started
        progress(count)
    writer.flush()
    return count


def _read(
    target: Target,
    tokenizer: TextTokenizer,
    cache: TargetCache,
    reply: Reply,
    settings: AnswerSettings,
    count: AnswerProgress,
) -> Document | None:
    talk = Conversation(target.info)
    last = -1
    agreed = judged = 0
    places = [place for place, message in enumerate(reply.messages) if message["role"] == "assistant"]
    for place, reason in zip(places, reply.finish_reasons, strict=True):
        ids = tokenizer.encode_chat(reply.messages[:place])
        if len(ids) > settings.max_prompt_tokens:
            count.too_long += last < 0
            break
        said = _said(tokenizer, reply, place, ids, reason, target.info.eos_token_ids)[: settings.max_tokens]
        if len(said) < 2:
            count.empty += last < 0
            break
        common = min(common_prefix(talk.ids, ids), len(ids) - 1)
        cache.truncate(common)
        talk.truncate(common)
        output = target.prefill(cache, ids[common:])
        talk.take_in(ids[common:], False, output.features)
        count.prompt_tokens += len(ids) - common
        choices = [int(output.argmax()[-1])]
        for start in range(0, len(said) - 1, CHUNK):
            part = said[start : min(start + CHUNK, len(said) - 1)]
            (output,) = target.verify([(cache, _chain(part))], logits=False)
            cache.commit(range(len(part)))
            talk.take_in(part, True, output.features)
            choices += output.argmax().tolist()
        last = said[-1]
        judged += len(said)
        agreed += sum(token == choice for token, choice in zip(said, choices, strict=True))
        count.answer_tokens += len(said) - 1
    if last < 0:
        return None
    if reply.greedy:
        count.judged += judged
        count.agreed += agreed
    return talk.document(last, reply.prompt_index, reply.greedy and agreed == judged)


def _said(
    tokenizer: TextTokenizer, reply: Reply, place: int, ids: Sequence[int], reason: str | None, eos: Sequence[int]
) -> list[int]:
    """Ids of a reply; one that was not cut off ends with the token that the template ends it with."""
    said = tokenizer.encode(reply.messages[place]["content"], add_special=False)
    if reason == "length" or not eos:
        return said
    closed = tokenizer.encode_chat(reply.messages[: place + 1], add_generation_prompt=False)
    after = closed[common_prefix(closed, [*ids, *said]) :]
    return [*said, next((token for token in after if token in eos), eos[0])]


def _chain(tokens: Sequence[int]) -> DraftTree:
    n = len(tokens)
    parents: Ints = np.arange(-1, n - 1)
    return DraftTree(np.array(tokens, np.int64), parents, np.zeros(n, np.float32))
