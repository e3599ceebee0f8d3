"""A dense decoder in float64 numpy, written for clarity: what every engine is held against. And tiny random models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.heads.rope import rotary_frequencies
from eyas.tree import DraftTree

Array = NDArray[Any]


def tiny_config(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    config = {
        "model_type": model_type,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 101,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
    }
    return config | changes


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Random weights large enough that attention is far from uniform and logits far from flat."""
    rng = np.random.default_rng(seed)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def normal(*shape: int) -> NDArray[np.float32]:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1]) * 1.4).astype(np.float32)

    def gain(size: int) -> NDArray[np.float32]:
        return (1 + 0.3 * rng.standard_normal(size)).astype(np.float32)

    weights = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden) * 6, "model.norm.weight": gain(hidden)}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        weights[at + "input_layernorm.weight"] = gain(hidden)
        weights[at + "post_attention_layernorm.weight"] = gain(hidden)
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            weights[f"{at}self_attn.{name}_proj.weight"] = normal(rows, hidden)
            if config["model_type"] == "qwen2":
                weights[f"{at}self_attn.{name}_proj.bias"] = normal(rows)
        if config["model_type"] == "qwen3":
            weights[at + "self_attn.q_norm.weight"] = gain(dim)
            weights[at + "self_attn.k_norm.weight"] = gain(dim)
        weights[at + "self_attn.o_proj.weight"] = normal(hidden, queries)
        weights[at + "mlp.gate_proj.weight"] = normal(inner, hidden)
        weights[at + "mlp.up_proj.weight"] = normal(inner, hidden)
        weights[at + "mlp.down_proj.weight"] = normal(hidden, inner)
    return weights


def reference(
    config: dict[str, Any],
    weights: dict[str, NDArray[np.float32]],
    tokens: list[int],
    tree: DraftTree | None = None,
    store: Callable[[Array], Array] = lambda x: x,
) -> tuple[Array, Array, list[Array]]:
    """Logits [N, V], post-norm features [N, H] and the input of each layer, for a prompt and then a tree.

    ``store`` is what the cache makes of keys and values.
    """
    prompt = len(tokens)
    ids = np.array([*tokens, *(tree.tokens.tolist() if tree else [])])
    sees = np.tril(np.ones((len(ids), len(ids)), bool))
    positions = np.arange(len(ids))
    if tree is not None:
        sees[prompt:, prompt:] = tree.ancestor_mask
        positions[prompt:] = prompt + tree.depths
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    heads, groups, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    frequencies, scale = rotary_frequencies(
        dim, config["rope_theta"], config["rope_scaling"], config["max_position_embeddings"]
    )
    angles = positions[:, None] * frequencies.astype(np.float64)
    cosine, sine = np.cos(angles)[:, None] * scale, np.sin(angles)[:, None] * scale

    def norm(x: Array, weight: Array) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weight

    def rotate(x: Array) -> Array:
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        return np.concatenate([a * cosine - b * sine, b * cosine + a * sine], -1)

    x = w["model.embed_tokens.weight"][ids]
    inputs = []
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        inputs.append(x)
        y = norm(x, w[at + "input_layernorm.weight"])
        q, k, v = (
            (y @ w[f"{at}self_attn.{n}_proj.weight"].T + w.get(f"{at}self_attn.{n}_proj.bias", 0)).reshape(
                len(ids), -1, dim
            )
            for n in "qkv"
        )
        if config["model_type"] == "qwen3":
            q, k = norm(q, w[at + "self_attn.q_norm.weight"]), norm(k, w[at + "self_attn.k_norm.weight"])
        q, k, v = rotate(q), store(rotate(k)), store(v)
        k, v = np.repeat(k, heads // groups, 1), np.repeat(v, heads // groups, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
        scores = np.where(sees, scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", p, v).reshape(len(ids), -1)
        x = x + mixed @ w[at + "self_attn.o_proj.weight"].T
        y = norm(x, w[at + "post_attention_layernorm.weight"])
        gate = y @ w[at + "mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w[at + "mlp.up_proj.weight"].T)) @ w[at + "mlp.down_proj.weight"].T
    features = norm(x, w["model.norm.weight"])
    return features @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T, features, inputs


def random_tree(rng: np.random.Generator, nodes: int, vocab: int) -> DraftTree:
    parents = np.array([-1, *(int(rng.integers(0, i)) for i in range(1, nodes))])
    return DraftTree(rng.integers(0, vocab, nodes), parents, np.zeros(nodes, np.float32))
