"""The EAGLE-3 head as a network: its arithmetic against dense numpy, its cache, masks and start values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eyas.heads.config import Eagle3Config
from eyas.heads.eagle3 import Eagle3Head, head_from_arrays, initialise
from eyas.heads.layers import HeadCache, causal_mask, head_arrays
from eyas.heads.rope import rotary_frequencies

H = 32


def config(**changes: Any) -> Eagle3Config:
    sizes = {
        "hidden_size": H,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "vocab_size": 64,
        "draft_vocab_size": 20,
    }
    return Eagle3Config(**(sizes | changes))


def lively_head(settings: Eagle3Config, seed: int = 0) -> Eagle3Head:
    """Weights large enough that attention, biases and norms all matter."""
    head = Eagle3Head(settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    return head.eval()


def pairs(batch: int, rows: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    embeds = torch.randn(batch, rows, H, generator=generator)
    return embeds, torch.randn(batch, rows, 3 * H, generator=generator), torch.arange(rows)[None]


def target_rows(settings: Eagle3Config) -> Tensor:
    return torch.randn(settings.scored_tokens, H, generator=torch.Generator().manual_seed(5))


def dense(head: Eagle3Head, embeds: np.ndarray, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [T, H] and logits of one sequence, from the formulas, in float64."""
    settings = head.config
    w = {name: array.astype(np.float64) for name, array in head_arrays(head).items()}
    dim, group = settings.head_dim, settings.num_attention_heads // settings.num_key_value_heads

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + settings.rms_norm_eps) * w[name]

    rows = len(embeds)
    frequencies, factor = rotary_frequencies(dim, settings.rope_theta, settings.rope_scaling, 2048)
    angles = np.arange(rows)[:, None] * frequencies
    cos, sin = np.cos(angles)[:, None] * factor, np.sin(angles)[:, None] * factor

    def rotate(x: np.ndarray) -> np.ndarray:
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), -1)

    h = features @ w["fc.weight"].T
    read = np.concatenate((norm(embeds, "midlayer.input_layernorm.weight"), norm(h, "midlayer.hidden_norm.weight")), -1)
    q, k, v = (
        (
            read @ w[f"midlayer.self_attn.{name}_proj.weight"].T
            + w.get(f"midlayer.self_attn.{name}_proj.bias", np.zeros(1))
        ).reshape(rows, -1, dim)
        for name in "qkv"
    )
    scores = np.einsum("qhd,khd->hqk", rotate(q), np.repeat(rotate(k), group, 1)) / np.sqrt(dim)
    scores = np.where(np.tril(np.ones((rows, rows), bool)), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    mixed = np.einsum("hqk,khd->qhd", p, np.repeat(v, group, 1)).reshape(rows, -1)
    x = h + mixed @ w["midlayer.self_attn.o_proj.weight"].T
    y = norm(x, "midlayer.post_attention_layernorm.weight")
    gate = y @ w["midlayer.mlp.gate_proj.weight"].T
    up = y @ w["midlayer.mlp.up_proj.weight"].T
    out = x + (gate / (1 + np.exp(-gate)) * up) @ w["midlayer.mlp.down_proj.weight"].T
    scoring = w.get("lm_head.weight", target_rows(settings).double().numpy())
    return out, norm(out, "norm.weight") @ scoring.T


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qkv_bias": True},
        {"target_lm_head": True},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ],
)
def test_the_head_computes_its_formulas(changes: dict[str, Any]) -> None:
    head = lively_head(config(**changes))
    embeds, features, positions = pairs(2, 9)
    with torch.no_grad():
        out = head(embeds, head.fuse(features), positions)
        logits = head.logits(out, target_rows(head.config))
    assert logits.shape == (2, 9, 20)
    for b in range(2):
        wanted_out, wanted_logits = dense(head, embeds[b].double().numpy(), features[b].double().numpy())
        np.testing.assert_allclose(out[b], wanted_out, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(logits[b], wanted_logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True}, {"draft_vocab_size": None}, {"target_lm_head": True}])
def test_state_dict_has_exactly_the_names_and_shapes_of_the_config(changes: dict[str, Any]) -> None:
    settings = config(**changes)
    head = Eagle3Head(settings)
    assert {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()} == settings.tensor_shapes()
    arrays = head_arrays(head)
    for name, array in head_arrays(head_from_arrays(settings, arrays)).items():
        assert np.array_equal(array, arrays[name])


def test_names_are_those_of_the_published_heads() -> None:
    shapes = config().tensor_shapes()
    assert shapes["fc.weight"] == (H, 3 * H)
    assert shapes["midlayer.self_attn.q_proj.weight"] == (40, 2 * H)
    assert shapes["midlayer.self_attn.k_proj.weight"] == shapes["midlayer.self_attn.v_proj.weight"] == (20, 2 * H)
    assert shapes["midlayer.self_attn.o_proj.weight"] == (H, 40)
    assert shapes.pop("lm_head.weight") == (20, H)
    assert config(target_lm_head=True).tensor_shapes() == shapes
    norms = {name for name in shapes if "norm" in name}
    middle = {f"midlayer.{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    assert norms == middle | {"norm.weight"}
    later = config(num_layers=2).tensor_shapes().keys() - config().tensor_shapes().keys()
    assert {name.split(".")[0] + "." + name.split(".")[1] for name in later} == {"layers.1"}
    assert len(later) == 9


def test_pair_after_pair_through_the_cache_equals_one_pass() -> None:
    """A pass with a mask, as in training, against sequential running, with chunks of every size."""
    head = lively_head(config())
    embeds, features, positions = pairs(2, 17)
    with torch.inference_mode():
        hidden = head.fuse(features)
        whole = head(embeds, hidden, positions)
        torch.testing.assert_close(head(embeds, hidden, positions, causal_mask(17, 0, embeds.device)), whole)
        cache, start = HeadCache(1), 0
        for count in (1, 1, 4, 2, 9):
            part = slice(start, start + count)
            out = head(embeds[:, part], hidden[:, part], positions[:, part], cache=cache)
            torch.testing.assert_close(out, whole[:, part], rtol=1e-5, atol=1e-5)
            start += count
        assert cache.length == 17


@pytest.mark.parametrize("tied", [False, True])
def test_start_values_pass_the_deepest_level_on_and_score_with_the_targets_rows(tied: bool) -> None:
    settings = config(target_lm_head=tied)
    rows = target_rows(settings)
    norm = torch.rand(H, generator=torch.Generator().manual_seed(6)) + 0.5
    heads = []
    for _ in range(2):
        head = Eagle3Head(settings)
        initialise(head, rows, norm, torch.Generator().manual_seed(3))
        heads.append(head)
    for name, array in head_arrays(heads[0]).items():
        assert np.array_equal(array, head_arrays(heads[1])[name]), name
    embeds, features, positions = pairs(1, 12)
    with torch.no_grad():
        out = heads[0](embeds, heads[0].fuse(features), positions)
        deepest = features[..., -H:]
        assert (out - deepest).std() < 0.1
        wanted = (norm * deepest * torch.rsqrt(deepest.square().mean(-1, keepdim=True) + 1e-6)) @ rows.T
        assert (heads[0].logits(out, rows) - wanted).std() < 0.1 * wanted.std()
