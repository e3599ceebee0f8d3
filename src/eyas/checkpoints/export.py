"""Draft heads for SGLang and vLLM.

Both take the published layout with their own name of the architecture, and both use the target's embedding and, for
EAGLE-1/2, its lm_head. Where they differ from it and from each other is said here:

* In a head's ``config.json`` ``bias`` means a bias of fc to the published code. To both engines it means biases of all
  four attention projections, so it is always false here, and ``qkv_bias`` says what there is.
* SGLang's fc always has a bias, vLLM's never has one.
* A reduced draft vocabulary of an EAGLE-1/2 head: SGLang reads target ids from a file of its own; vLLM scores the whole
  vocabulary. EAGLE-3 heads bring theirs along.
* EAGLE-3 heads of several layers: vLLM names the layers after the first as we do, SGLang has none or others.
* An EAGLE-3 head has an lm_head of its own for both: one that the target's scores gets a copy of its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from eyas.checkpoints.eagle import EagleCheckpoint
from eyas.checkpoints.eagle3 import Eagle3Checkpoint, save_eagle3
from eyas.checkpoints.head_files import write_head
from eyas.checkpoints.head_layout import settings_of, storable
from eyas.checkpoints.heads import load_head
from eyas.errors import CheckpointError, InvalidInputError
from eyas.tree import Floats, Ints

TOKEN_MAP = "hot_token_ids.pt"
"""SGLang's ``--speculative-token-map``: int64 tensor of target ids, saved by torch."""

COMMON = {"bias": False, "attention_bias": False, "tie_word_embeddings": False}
"""Settings that both engines would otherwise take for something else."""


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        command: how the engine is started with it; TARGET stands for the model.
        notes: what the engine does otherwise than Eyas, a sentence each.
    """

    command: str
    notes: tuple[str, ...]


def export_head(
    head: str | Path, engine: str, out: Path, target_lm_head: Callable[[], Floats] | None = None
) -> Exported:
    """Write the head in directory ``head`` into ``out`` as ``engine`` reads it.

    Args:
        target_lm_head: gives the target's lm_head [V, H]; called for an EAGLE-3 head without one.

    Raises:
        InvalidInputError: an unknown engine; ``out`` is the head itself, or a file.
        CheckpointError: a head that cannot be read, or that the engine cannot run; an lm_head that does not fit it.
    """
    if engine not in ENGINES:
        raise InvalidInputError(f"heads can be exported for {', '.join(ENGINES)}, not for {engine!r}")
    if out.resolve() == Path(head).resolve():
        raise InvalidInputError(f"{out} is the head itself; choose another directory")
    if out.exists() and not out.is_dir():
        raise InvalidInputError(f"{out} is a file; the exported head is a directory, choose another name")
    checkpoint = load_head(head)
    if isinstance(checkpoint, Eagle3Checkpoint) and checkpoint.config.target_lm_head:
        if target_lm_head is None:
            raise CheckpointError(f"{head} is scored by its target's lm_head, which {engine} needs a copy of")
        checkpoint = _with_lm_head(checkpoint, target_lm_head())
    return ENGINES[engine](checkpoint, out)


def _for_sglang(checkpoint: EagleCheckpoint | Eagle3Checkpoint, out: Path) -> Exported:
    algorithm, options = "EAGLE3", ""
    if isinstance(checkpoint, Eagle3Checkpoint):
        if checkpoint.config.num_layers > 1:
            raise CheckpointError(
                f"{checkpoint.name} has {checkpoint.config.num_layers} layers, and SGLang runs EAGLE-3 heads of one; "
                "train such a one"
            )
        _save_eagle3(checkpoint, out, "LlamaForCausalLMEagle3")
    else:
        algorithm = "EAGLE"
        # The published code has a Qwen2 variant for biased attention, and so has SGLang.
        architecture = "Qwen2ForCausalLMEagle" if checkpoint.config.qkv_bias else "LlamaForCausalLMEagle"
        bias = checkpoint.tensors.get("fc.bias", np.zeros(checkpoint.config.hidden_size, np.float32))
        _save_eagle(checkpoint, out, architecture, {"fc.bias": bias})
        if checkpoint.token_ids is not None:
            _save_token_map(checkpoint.token_ids, out / TOKEN_MAP)
            options = f" --speculative-token-map {out / TOKEN_MAP}"
    return Exported(
        f"python -m sglang.launch_server --model-path TARGET --speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path {out}{options} --speculative-num-steps 5 --speculative-eagle-topk 4 "
        "--speculative-num-draft-tokens 11",
        ("SGLang's number of draft tokens counts the root: 11 there are 10 in Eyas.",),
    )


def _for_vllm(checkpoint: EagleCheckpoint | Eagle3Checkpoint, out: Path) -> Exported:
    notes = ["vLLM drafts chains; the tree that this head was made for is not used."]
    method = "eagle3"
    if isinstance(checkpoint, Eagle3Checkpoint):
        _save_eagle3(checkpoint, out, "Eagle3LlamaForCausalLM")
        if checkpoint.config.num_layers > 1:
            notes.append("Older versions of vLLM run EAGLE-3 heads of one layer only.")
    else:
        method = "eagle"
        if checkpoint.tensors.get("fc.bias", np.zeros(1)).any():
            raise CheckpointError(
                f"{checkpoint.name} has a bias in fc, which vLLM's EAGLE-1/2 heads do not have; train one without"
            )
        _save_eagle(checkpoint, out, "EagleLlamaForCausalLM", {})
        if checkpoint.token_ids is not None:
            notes.append(
                f"vLLM has no draft vocabulary for EAGLE-1/2 heads: it scores all {checkpoint.config.vocab_size} "
                f"tokens instead of {len(checkpoint.token_ids)}. Drafts may differ, answers do not."
            )
    settings = f'{{"method": "{method}", "model": "{out}", "num_speculative_tokens": 3}}'
    return Exported(f"vllm serve TARGET --speculative-config '{settings}'", tuple(notes))


ENGINES: dict[str, Callable[[EagleCheckpoint | Eagle3Checkpoint, Path], Exported]] = {
    "sglang": _for_sglang,
    "vllm": _for_vllm,
}


def _save_eagle(checkpoint: EagleCheckpoint, out: Path, architecture: str, bias: dict[str, Any]) -> None:
    weights = {name: tensor for name, tensor in checkpoint.tensors.items() if name != "fc.bias"}
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if checkpoint.dtype == "bfloat16" else "float32"
    settings = settings_of(checkpoint.config, architecture, dtype) | COMMON
    settings.pop("draft_vocab_size", None)
    if architecture.startswith("Qwen2"):
        settings["model_type"] = "qwen2"
    write_head(out, settings, storable(weights | bias, dtype), checkpoint.metadata)


def _save_eagle3(checkpoint: Eagle3Checkpoint, out: Path, architecture: str) -> None:
    if checkpoint.config.qkv_bias:
        raise CheckpointError(f"{checkpoint.name} has biases in q, k and v, which no engine's EAGLE-3 heads have")
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if checkpoint.dtype == "bfloat16" else "float32"
    save_eagle3(
        out,
        checkpoint.config,
        checkpoint.tensors,
        dtype=dtype,
        d2t=checkpoint.d2t,
        metadata=checkpoint.metadata,
        settings={"architectures": [architecture], **COMMON},
    )


def _with_lm_head(checkpoint: Eagle3Checkpoint, target_lm_head: Floats) -> Eagle3Checkpoint:
    """The head with the rows of its draft vocabulary as an lm_head of its own."""
    config, ids = checkpoint.config, checkpoint.token_ids
    if target_lm_head.shape != (config.vocab_size, config.hidden_size):
        raise CheckpointError(
            f"{checkpoint.name} is scored by its target's lm_head of shape {(config.vocab_size, config.hidden_size)}, "
            f"but the given target's has {target_lm_head.shape}; name the model that it was trained for (--target)"
        )
    rows = target_lm_head if ids is None else target_lm_head[ids]
    tensors = {**checkpoint.tensors, "lm_head.weight": rows}
    return replace(checkpoint, config=replace(config, target_lm_head=False), tensors=tensors)


def _save_token_map(token_ids: Ints, file: Path) -> None:
    try:
        import torch
    except ImportError:
        raise InvalidInputError("SGLang's token map is a PyTorch file: pip install 'eyas[torch]'") from None
    torch.save(torch.from_numpy(token_ids), file)
