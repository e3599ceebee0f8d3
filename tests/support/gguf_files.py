"""Writes tiny GGUF files as llama.cpp's converter would, for tests that read them back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from eyas.checkpoints.gguf import expected_shapes

CONTROL, NORMAL, BYTE = 3, 1, 6

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Tensors = dict[str, np.ndarray]


def tiny_config(model_type: str, **changes: Any) -> dict[str, Any]:
    """Every width a multiple of 32, so that each tensor divides into quantised blocks; grouped queries."""
    return {
        "model_type": model_type,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32 if model_type == "qwen3" else 16,
        "vocab_size": 288,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": model_type == "qwen2",
        "mlp_bias": False,
    } | changes


def random_tensors(config: dict[str, Any], seed: int = 0) -> Tensors:
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(0, 0.1, shape).astype(np.float32) + (1 if "norm" in name else 0)
        for name, shape in expected_shapes(config).items()
    }


def byte_vocabulary() -> tuple[list[str], list[int], list[str]]:
    """288 tokens of a byte-level vocabulary: three specials, all bytes, a few merges: (tokens, kinds, merges)."""
    from tokenizers import pre_tokenizers

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merges = ["t h", "th e", "Ġ the", "Ġ a", "i n", "1 2", "Ġ 1"]
    tokens = specials + sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in merges]
    tokens += [f"<|extra_{index}|>" for index in range(288 - len(tokens))]
    kinds = [CONTROL if token.startswith("<|") else NORMAL for token in tokens]
    return tokens, kinds, merges


def _interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's reordering of q and k rows: from half-split to neighbouring pairs."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    config: dict[str, Any],
    tensors: Tensors,
    quant: GGMLQuantizationType = GGMLQuantizationType.F32,
    extra: dict[str, Any] | None = None,
    tokenizer: bool = True,
) -> Path:
    """Write ``tensors`` (Hugging Face names and row order) as the converter would; 1-D tensors stay float32."""
    arch = "llama" if config["model_type"] == "mistral" else config["model_type"]
    writer = GGUFWriter(str(path), arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if config["head_dim"] != config["hidden_size"] // config["num_attention_heads"]:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    for key, value in (extra or {}).items():
        adders = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
        adders[type(value)](key, value)
    if tokenizer:
        tokens, kinds, merges = byte_vocabulary()
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges(merges)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config["num_hidden_layers"])
    for name, value in tensors.items():
        if arch == "llama" and ".q_proj." in name:
            value = _interleave(value, config["num_attention_heads"])
        elif arch == "llama" and ".k_proj." in name:
            value = _interleave(value, config["num_key_value_heads"])
        stored = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        if value.ndim == 1 or quant == GGMLQuantizationType.F32:
            writer.add_tensor(stored, value)
        else:
            writer.add_tensor(stored, quantize(value, quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
