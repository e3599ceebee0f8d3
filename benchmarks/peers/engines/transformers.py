"""Hugging Face transformers: plain, and its prompt lookup."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria

from peers.protocol import Answer, Engine, Request, Stopwatch, cut


def load(settings: dict[str, Any]) -> Engine:
    """Settings beyond the common ones: ``dtype``, ``compile`` (one-token passes over a static cache), ``lookup``
    ({"prompt_lookup_num_tokens", "max_matching_ngram_size"})."""
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(0)
    dtype = getattr(torch, settings.get("dtype", "bfloat16"))
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype, attn_implementation="sdpa")
    model.train(False)
    options: dict[str, Any] = dict(settings.get("lookup", {}))
    if settings.get("compile"):
        options |= {"cache_implementation": "static", "max_length": None}
        model.forward = torch.compile(model.forward, dynamic=True)
    return Transformers(model, options)


class Clock(StoppingCriteria):
    """Stops nothing; notes when tokens came."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self._watch.token()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Transformers:
    """``model.generate``."""

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        self._model = model
        self._options = options

    def facts(self) -> dict[str, Any]:
        return {name: version(name) for name in ("torch", "transformers")}

    def answer(self, request: Request) -> Answer:
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False,
            max_new_tokens=request.tokens,
            eos_token_id=list(request.stop) or None,
            pad_token_id=0,
            **self._options,
        )
        ids = torch.tensor([request.prompt])
        watch = Stopwatch()
        with torch.inference_mode():
            output = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config, stopping_criteria=[Clock(watch)]
            )
        watch.token()
        return watch.answer(cut(output[0, len(request.prompt) :].tolist(), request))
