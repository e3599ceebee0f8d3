"""Eyas: lossless speculative decoding with context-aware draft trees (EAGLE-2).

The library in five lines::

    import eyas

    loaded = eyas.load_target()  # SmolLM2-135M-Instruct, fetched on first use
    session = eyas.Session(loaded.target, eyas.load_drafter("default", loaded))
    prompt = loaded.tokenizer.encode_chat([{"role": "user", "content": "Why is the sky blue?"}])
    for step in eyas.generate(session, prompt, tokenizer=loaded.tokenizer):
        print(step.text, end="", flush=True)
"""

from eyas.completion import Completion, collect
from eyas.errors import (
    CheckpointError,
    ContextLengthError,
    EyasError,
    FetchError,
    InvalidInputError,
    NotEnoughMemoryError,
    UnsupportedModelError,
)
from eyas.generate import Session, Step, generate
from eyas.loading import LoadedTarget, load_drafter, load_target
from eyas.policies import DynamicPolicy, StaticPolicy, make_policy
from eyas.sampling import SamplingParams
from eyas.stopping import StopParams
from eyas.tree import DraftTree

__all__ = [
    "CheckpointError",
    "Completion",
    "ContextLengthError",
    "DraftTree",
    "DynamicPolicy",
    "EyasError",
    "FetchError",
    "InvalidInputError",
    "LoadedTarget",
    "NotEnoughMemoryError",
    "SamplingParams",
    "Session",
    "StaticPolicy",
    "Step",
    "StopParams",
    "UnsupportedModelError",
    "collect",
    "generate",
    "load_drafter",
    "load_target",
    "make_policy",
]
