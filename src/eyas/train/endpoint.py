"""Answers of an OpenAI-compatible server (vLLM, SGLang, ...), so that a cluster can do the talking.

Only texts come from there; features are the local target's own, see ``eyas.train.take_in``. The server must run the
very model that the head is for.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import numpy as np

from eyas.errors import CheckpointError, FetchError, InvalidInputError
from eyas.train.answer import AnswerSettings
from eyas.train.prompts import Message, Prompt

REPLIES = "replies.jsonl"
"""Beside the shards: ``{"prompt_index", "greedy", "messages", "finish_reasons"}`` per conversation, as they end."""

PASSING = (408, 409, 425, 429, 500, 502, 503, 504)
"""Answers of a server that may be another one in a moment."""


@dataclass(frozen=True)
class Endpoint:
    """A server that answers.

    Attributes:
        url: up to and including ``/v1``.
        model: its name there.
        api_key: sent as bearer token; None sends none.
        timeout: seconds per request.
        retries: further tries where the server is busy or out of reach.
        backoff: seconds before the first of them, doubled each time up to a minute; the server's Retry-After counts.
        sleep: waits.

    Raises:
        InvalidInputError: a URL that is not http or https.
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 600.0
    retries: int = 6
    backoff: float = 1.0
    sleep: Callable[[float], object] = field(default=time.sleep, repr=False)

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise InvalidInputError(f"the endpoint is a URL like http://localhost:8000/v1, got {self.url!r}")

    def reply(
        self, messages: Sequence[Message], *, max_tokens: int, temperature: float, seed: int
    ) -> tuple[str, str | None]:
        """Text and finish reason of the next reply.

        Raises:
            InvalidInputError: the server refuses the request.
            FetchError: it stayed busy, out of reach, or said something else than a chat completion.
        """
        question = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
        }
        answered = self._post(json.dumps(question).encode())
        try:
            choice = json.loads(answered)["choices"][0]
            text = choice["message"]["content"] or ""
            if not isinstance(text, str):
                raise TypeError(f"content is {text!r:.80}")
            return text, choice.get("finish_reason")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            raise FetchError(
                f"{self.url} did not answer with a chat completion ({error!r}): {answered!r:.200}"
            ) from None

    def _post(self, body: bytes) -> bytes:
        url = self.url.rstrip("/") + "/chat/completions"
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        for attempt in range(self.retries + 1):
            pause = min(60.0, self.backoff * 2**attempt)
            try:
                with urlopen(Request(url, body, headers), timeout=self.timeout) as response:
                    read: bytes = response.read()
                    return read
            except HTTPError as error:
                said = error.read()[:300].decode("utf-8", "replace")
                fault = f"{url} answered {error.code}: {said}"
                if error.code not in PASSING:
                    raise InvalidInputError(fault) from None
                pause = max(pause, _seconds(error.headers.get("Retry-After")))
            except (URLError, OSError) as error:
                fault = f"{url} cannot be reached: {getattr(error, 'reason', None) or error}"
            if attempt < self.retries:
                self.sleep(pause)
        raise FetchError(f"{fault}; gave up after {self.retries + 1} tries. What was answered is kept: try again later")


def _seconds(retry_after: str | None) -> float:
    try:
        return min(60.0, float(retry_after or 0))
    except ValueError:
        return 0.0


@dataclass(frozen=True)
class Reply:
    """A whole conversation as the server had it.

    Attributes:
        prompt_index: of its prompt.
        greedy: asked for at temperature 0.
        messages: all turns, replies included.
        finish_reasons: of each reply; "length" was cut off.
    """

    prompt_index: int
    greedy: bool
    messages: tuple[Message, ...]
    finish_reasons: tuple[str | None, ...]


def fetch_replies(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    out: Path,
    settings: AnswerSettings,
    progress: Callable[[int, int], object] = lambda done, of: None,
) -> list[Reply]:
    """Ask everything that ``out / REPLIES`` does not answer yet; all replies to ``prompts``, in their order.

    Args:
        endpoint: asked by ``settings.batch`` threads at once.
        prompts: conversations.
        out: the store's directory, made if missing.
        settings: ``max_prompt_tokens`` is left to the taking in.
        progress: told how many are answered, of how many.

    Raises:
        InvalidInputError, FetchError: see ``Endpoint.reply``; what was answered before is kept.
        CheckpointError: a damaged file of replies.
    """
    out.mkdir(parents=True, exist_ok=True)
    file = out / REPLIES
    known = {reply.prompt_index: reply for reply in read_replies(file)}
    todo = [prompt for prompt in prompts if prompt.index not in known]
    done = len(prompts) - len(todo)
    lock, stop = threading.Lock(), threading.Event()
    with file.open("a", encoding="utf-8") as lines:

        def ask(prompt: Prompt) -> None:
            nonlocal done
            if stop.is_set():
                return
            reply = _converse(endpoint, prompt, settings)
            line = json.dumps({**vars(reply), "messages": list(reply.messages)}, ensure_ascii=False) + "\n"
            with lock:
                lines.write(line)
                lines.flush()
                known[prompt.index] = reply
                done += 1
                progress(done, len(prompts))

        with ThreadPoolExecutor(settings.batch) as pool:
            futures = [pool.submit(ask, prompt) for prompt in todo]
            try:
                finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                stop.set()  # after a failure or Ctrl-C only what is under way is waited for
            for future in finished:
                future.result()
    return [known[prompt.index] for prompt in prompts]


def _converse(endpoint: Endpoint, prompt: Prompt, settings: AnswerSettings) -> Reply:
    rng = np.random.default_rng([settings.seed, prompt.index])
    greedy = bool(rng.random() >= settings.sampled_share)
    messages, reasons = prompt.opening, list[str | None]()
    for following in (*prompt.turns[1:], None):
        text, reason = endpoint.reply(
            messages,
            max_tokens=settings.max_tokens,
            temperature=0.0 if greedy else settings.temperature,
            seed=int(rng.integers(2**31)),
        )
        messages = [*messages, {"role": "assistant", "content": text}]
        reasons.append(reason)
        if following is None or not text:
            break
        messages = [*messages, {"role": "user", "content": following}]
    return Reply(prompt.index, greedy, tuple(messages), tuple(reasons))


def read_replies(file: Path) -> Iterator[Reply]:
    """The replies of a file, none if it is missing. A last line without its end was cut off by a kill: it is removed.

    Raises:
        CheckpointError: any other line that is not a reply.
    """
    if not file.exists():
        return
    text = file.read_text(encoding="utf-8", errors="replace")
    whole, _, rest = text.rpartition("\n")
    if rest:
        with file.open("rb+") as damaged:
            damaged.truncate(damaged.read().rfind(b"\n") + 1)
    for number, line in enumerate(whole.split("\n") if whole else (), 1):
        try:
            record: Mapping[str, Any] = json.loads(line)
            yield Reply(
                int(record["prompt_index"]),
                bool(record["greedy"]),
                tuple(record["messages"]),
                tuple(record["finish_reasons"]),
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{file}, line {number} is not a reply ({error!r}); delete the line") from None
