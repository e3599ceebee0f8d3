"""transformers' own ``generate`` as a method of the bench: somebody else's word on what the model says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, StoppingCriteria

from eyas.bench.methods import REFERENCE, Answer, Watch
from eyas.completion import Completion
from eyas.errors import UnsupportedModelError
from eyas.loading import LoadedTarget
from eyas.metrics import Stats
from eyas.models import ModelSource
from eyas.stopping import StopParams
from eyas.text import TextTokenizer


@dataclass(frozen=True)
class TransformersReference:
    """A second copy of the model in float32 with transformers' stock attention and cache; greedy, no drafting.

    Attributes:
        model: in evaluation mode.
        tokenizer: for the text of earlier turns.
        eos_token_ids: what ends an answer.
        max_positions: context limit.
    """

    model: PreTrainedModel
    tokenizer: TextTokenizer
    eos_token_ids: tuple[int, ...]
    max_positions: int
    name: str = REFERENCE

    @classmethod
    def load(cls, loaded: LoadedTarget) -> TransformersReference:
        """The model of a loaded target, read again from its files.

        Raises:
            UnsupportedModelError: transformers does not know the tensors.
        """
        info = loaded.target.info
        return cls(_load(loaded.source), loaded.tokenizer, info.eos_token_ids, info.max_positions)

    def start(self) -> Answer:
        return self._answer

    def _answer(self, prompt: Sequence[int], stop: StopParams, rng: np.random.Generator, watch: Watch) -> Completion:
        room = self.max_positions - len(prompt)
        ends = stop.end_ids(self.eos_token_ids)
        settings = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False,
            max_new_tokens=room if stop.max_tokens is None else min(room, stop.max_tokens),
            min_new_tokens=stop.min_tokens or None,
            eos_token_id=list(ends) or None,
            pad_token_id=ends[0] if ends else 0,
        )
        clock = _Clock()
        inputs = torch.tensor([prompt])
        with torch.inference_mode():
            output: Any = self.model.generate(  # type: ignore[operator]
                inputs,
                attention_mask=torch.ones_like(inputs),
                generation_config=settings,
                stopping_criteria=[clock],
            )
        tokens = tuple(output[0, len(prompt) :].tolist())
        return Completion(
            text=self.tokenizer.decode(tokens),
            token_ids=tokens,
            finish_reason="stop" if tokens[-1] in ends else "length",
            prompt_tokens=len(prompt),
            stats=clock.stats(len(tokens)),
        )


class _Clock(StoppingCriteria):
    """Never stops anything; notes when the first token and the last one came."""

    def __init__(self) -> None:
        self._start = perf_counter()
        self._first = self._last = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self._last = perf_counter()
        self._first = self._first or self._last
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def stats(self, tokens: int) -> Stats:
        """All of decoding counts as verification: one pass per token."""
        stats = Stats(cycles=tokens - 1, cycle_tokens=tokens - 1)
        stats.add({"prefill": self._first - self._start, "verify": self._last - self._first})
        return stats


def _load(source: ModelSource) -> PreTrainedModel:
    config = AutoConfig.for_model(**source.config)
    model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, attn_implementation="sdpa", dtype=torch.float32
    )
    tensors = {name: torch.from_numpy(source.tensors.float32(name).copy()) for name in source.tensors}
    wrong = model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    missing = [name for name in wrong.missing_keys if not (name == "lm_head.weight" and config.tie_word_embeddings)]
    if missing or wrong.unexpected_keys:
        raise UnsupportedModelError(
            f"{source.name} does not fit transformers' {config.model_type}: missing {missing}, "
            f"unexpected {wrong.unexpected_keys}"
        )
    model.eval()
    loaded: PreTrainedModel = model
    return loaded
