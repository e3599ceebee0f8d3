"""llama.cpp through llama-cpp-python: plain, and prompt lookup (its n-gram mode).

Two loops: ``bindings`` is the package's own ``generate``; ``direct`` calls llama_decode itself, which spares the
package's sampler chain and, with prompt lookup, its logits for every row of the prompt. The trial keeps the faster.
"""

from __future__ import annotations

from importlib.metadata import version
from itertools import islice
from typing import Any

import numpy as np
from llama_cpp import Llama, llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from peers.protocol import Answer, Engine, Request, Stopwatch, cut


def load(settings: dict[str, Any]) -> Engine:
    """Settings beyond the common ones: ``loop``, ``flash_attn``, ``n_batch``, ``kv_type``, ``lookup``
    ({"max_ngram_size", "num_pred_tokens"})."""
    lookup = settings.get("lookup")
    draft = LlamaPromptLookupDecoding(**lookup) if lookup else None
    bindings = settings["loop"] == "bindings"
    kv_type = getattr(llama_cpp, f"GGML_TYPE_{settings.get('kv_type', 'f16').upper()}")
    n_batch = settings.get("n_batch", 512)
    llama = Llama(
        settings["model"],
        n_ctx=settings["positions"],
        n_threads=settings["threads"],
        n_threads_batch=settings["threads"],
        n_batch=n_batch,
        n_ubatch=n_batch,
        flash_attn=settings.get("flash_attn", False),
        type_k=kv_type,
        type_v=kv_type,
        draft_model=draft if bindings else None,
        verbose=False,
    )
    facts = {
        "llama-cpp-python": version("llama-cpp-python"),
        "system": llama_cpp.llama_print_system_info().decode().strip(),
    }
    return Bindings(llama, facts) if bindings else Direct(llama, draft, n_batch, facts)


class Bindings:
    """``Llama.generate``."""

    def __init__(self, llama: Llama, facts: dict[str, Any]) -> None:
        self._llama = llama
        self._facts = facts

    def facts(self) -> dict[str, Any]:
        return self._facts

    def answer(self, request: Request) -> Answer:
        self._llama.reset()  # else the common beginning of two prompts is not computed again
        watch = Stopwatch()
        tokens = []
        for token in islice(self._llama.generate(request.prompt, temp=0.0), request.tokens):
            watch.token()
            tokens.append(token)
            if token in request.stop:
                break
        return watch.answer(tokens)


class Direct:
    """llama_decode in a loop: the arg max of each row, and where the lookup found something, rows to verify it."""

    def __init__(
        self, llama: Llama, draft: LlamaPromptLookupDecoding | None, n_batch: int, facts: dict[str, Any]
    ) -> None:
        self._context = llama._ctx.ctx
        self._llama = llama  # owns the context
        self._draft = draft
        self._n_batch = n_batch
        self._facts = facts
        self._batch = llama_cpp.llama_batch_init(n_batch, 0, 1)
        self._width = llama.n_vocab()

    def facts(self) -> dict[str, Any]:
        return self._facts

    def answer(self, request: Request) -> Answer:
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_clear(memory, False)
        watch = Stopwatch()
        ids = list(request.prompt)
        begin = len(ids)
        for at in range(0, begin, self._n_batch):
            chunk = ids[at : at + self._n_batch]
            last = at + len(chunk) == begin
            best = self._decode(chunk, at, first_logits=len(chunk) - 1 if last else len(chunk))
        ids.append(best[-1])
        watch.token()
        while len(ids) - begin < request.tokens and ids[-1] not in request.stop:
            room = request.tokens - (len(ids) - begin) - 1
            guess = self._guess(ids)[:room] if self._draft is not None else []
            held = len(ids) - 1
            best = self._decode([ids[-1], *guess], held, first_logits=0)
            accepted = 0
            while accepted < len(guess) and guess[accepted] == best[accepted]:
                accepted += 1
            ids += best[: accepted + 1]
            if accepted < len(guess):
                llama_cpp.llama_memory_seq_rm(memory, 0, held + 1 + accepted, -1)
            watch.token()
        return watch.answer(cut(ids[begin:], request))

    def _guess(self, ids: list[int]) -> list[int]:
        assert self._draft is not None
        guess: list[int] = self._draft(np.array(ids, np.intc)).tolist()
        return guess

    def _decode(self, tokens: list[int], position: int, first_logits: int) -> list[int]:
        """Run tokens at ``position``; the arg max of every row from ``first_logits`` on."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            batch.token[row] = token
            batch.pos[row] = position + row
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = 0
            batch.logits[row] = row >= first_logits
        if status := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode failed with status {status}")
        rows = len(tokens) - first_logits
        if rows <= 0:
            return []
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), (rows, self._width))
        best: list[int] = logits.argmax(axis=1).tolist()
        return best
