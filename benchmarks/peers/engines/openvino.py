"""OpenVINO GenAI: plain, and its prompt lookup."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from peers.protocol import Answer, Engine, Request, Stopwatch, cut


def load(settings: dict[str, Any]) -> Engine:
    """Settings beyond the common ones: ``properties`` of the CPU device, ``backend`` (SDPA or PA), ``lookup``
    ({"num_assistant_tokens", "max_ngram_size"})."""
    properties: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": settings["threads"],
        **settings.get("properties", {}),
    }
    lookup = settings.get("lookup")
    if lookup:
        properties["prompt_lookup"] = True
    else:
        properties["ATTENTION_BACKEND"] = settings.get("backend", "SDPA")
    paged = bool(lookup) or properties["ATTENTION_BACKEND"] == "PA"
    extra = {"scheduler_config": scheduler(settings["positions"])} if paged else {}
    pipeline = genai.LLMPipeline(settings["model"], "CPU", **properties, **extra)
    return OpenVINO(pipeline, lookup or {}, properties)


def scheduler(positions: int) -> genai.SchedulerConfig:
    """For paged attention: whole prompts in one pass as by default, but nothing kept from one request to the next."""
    config = genai.SchedulerConfig()
    config.max_num_batched_tokens = positions
    config.enable_prefix_caching = False
    return config


class OpenVINO:
    """An ``LLMPipeline``; token ids in and out, so its tokenizer takes no time."""

    def __init__(self, pipeline: genai.LLMPipeline, lookup: dict[str, int], properties: dict[str, Any]) -> None:
        self._pipeline = pipeline
        self._lookup = lookup
        self._properties = properties

    def facts(self) -> dict[str, Any]:
        packages = ("openvino", "openvino-genai", "optimum-intel", "nncf")
        return {**{name: version(name) for name in packages}, "properties": self._properties}

    def answer(self, request: Request) -> Answer:
        config = genai.GenerationConfig()
        config.max_new_tokens = request.tokens
        config.do_sample = False
        config.apply_chat_template = False
        config.ignore_eos = not request.stop
        if request.stop:
            config.stop_token_ids = set(request.stop)
        for key, value in self._lookup.items():
            setattr(config, key, value)
        ids = np.array([request.prompt], np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        watch = Stopwatch()
        result = self._pipeline.generate(inputs, config)
        watch.token()
        tokens = cut(result.tokens[0], request)
        whole = watch.answer(tokens)
        first = result.perf_metrics.get_ttft().mean / 1000
        return Answer(tokens, whole.seconds, first)
