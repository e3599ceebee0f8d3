"""The EAGLE-1/2 head as a network: its arithmetic against transformers, its cache, its start values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eyas.errors import InvalidInputError, UnsupportedModelError
from eyas.heads.config import EagleConfig
from eyas.heads.eagle import EagleHead, head_from_arrays, initialise
from eyas.heads.layers import HeadCache, causal_mask, draft_rows, head_arrays
from eyas.heads.rope import rotary_frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS: list[dict[str, Any] | None] = [
    None,
    {"type": "linear", "factor": 2.5},
    LLAMA3,
    YARN,
    YARN | {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.25},
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False},
]


def config(**changes: Any) -> EagleConfig:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
    }
    return EagleConfig(**(sizes | changes))


def lively_head(settings: EagleConfig, seed: int = 0) -> EagleHead:
    """Weights large enough that attention, biases and norms all matter."""
    head = EagleHead(settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.normal_(1.0 if "layernorm" in name else 0.0, 0.2, generator=generator)
    return head


def pairs(batch: int, rows: int, hidden: int = 32, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    embeds = torch.randn(batch, rows, hidden, generator=generator)
    features = torch.randn(batch, rows, hidden, generator=generator)
    return embeds, features, torch.arange(rows)[None]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("head_dim", "theta"), [(8, 1e4), (10, 1e6), (36, 5e5), (64, 1e6)])
def test_rotary_frequencies_equal_transformers(scaling: dict[str, Any] | None, head_dim: int, theta: float) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    ours, factor = rotary_frequencies(head_dim, theta, scaling, 256)
    parameters = {"rope_type": "default"} if scaling is None else dict(scaling)
    parameters["rope_type"] = parameters.pop("type", parameters.get("rope_type"))
    theirs_config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=256,
        rope_parameters=parameters | {"rope_theta": theta},
    )
    theirs = LlamaRotaryEmbedding(theirs_config)
    np.testing.assert_allclose(ours, theirs.inv_freq.numpy(), rtol=1e-5)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-6)


@pytest.mark.parametrize(
    ("scaling", "error"),
    [
        ({"rope_type": "longrope"}, UnsupportedModelError),
        ({"rope_type": "dynamic", "factor": 2.0}, UnsupportedModelError),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, UnsupportedModelError),
        ({"rope_type": "linear"}, InvalidInputError),
        ({"rope_type": "llama3", "factor": -1.0}, InvalidInputError),
    ],
)
def test_rotary_scaling_that_cannot_be_computed_is_refused(scaling: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=r"rope_type|positive number|partial_rotary_factor"):
        rotary_frequencies(8, 1e4, scaling, 256)


@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN])
@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True, "fc_bias": True, "head_dim": 10}, {"hidden_act": "gelu"}])
def test_head_equals_a_transformers_layer_without_input_norm(
    scaling: dict[str, Any] | None, changes: dict[str, Any]
) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    settings = config(rope_theta=1e6, rope_scaling=scaling, max_position_embeddings=256, **changes)
    head = lively_head(settings)
    theirs_config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=settings.head_dim,
        hidden_act=settings.hidden_act,
        rms_norm_eps=settings.rms_norm_eps,
        attention_bias=settings.qkv_bias,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 1e6} | (scaling or {"rope_type": "default"}),
        attn_implementation="eager",
    )
    layer = LlamaDecoderLayer(theirs_config, 0)
    layer.input_layernorm = torch.nn.Identity()
    own = {name.removeprefix("layers.0."): tensor for name, tensor in head.state_dict().items() if "layers" in name}
    if settings.qkv_bias:
        own["self_attn.o_proj.bias"] = torch.zeros(32)
    layer.load_state_dict(own)

    embeds, features, positions = pairs(2, 9)
    with torch.no_grad():
        x = torch.nn.functional.linear(torch.cat((embeds, features), -1), head.fc.weight, head.fc.bias)
        angles = LlamaRotaryEmbedding(theirs_config)(x, positions)
        expected = layer(x, attention_mask=causal_mask(9, 0, x.device), position_embeddings=angles)
        torch.testing.assert_close(head(embeds, features, positions), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"fc_bias": True}, {"qkv_bias": True}, {"num_layers": 3}])
def test_state_dict_has_exactly_the_names_and_shapes_of_the_config(changes: dict[str, Any]) -> None:
    settings = config(**changes)
    state = EagleHead(settings).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == settings.tensor_shapes()


def test_only_layers_after_the_first_have_an_input_norm() -> None:
    names = config(num_layers=2).tensor_shapes()
    assert "layers.0.input_layernorm.weight" not in names
    assert "layers.1.input_layernorm.weight" in names


@pytest.mark.parametrize("cuts", [(3,), (1, 2, 3, 4, 5, 6, 7), (6, 7)])
def test_rows_taken_in_pieces_equal_one_pass(cuts: tuple[int, ...]) -> None:
    head = lively_head(config(num_layers=2))
    embeds, features, positions = pairs(2, 8)
    with torch.no_grad():
        whole = head(embeds, features, positions)
        cache = HeadCache(2)
        pieces = []
        for start, stop in zip((0, *cuts), (*cuts, 8), strict=True):
            part = slice(start, stop)
            pieces.append(head(embeds[:, part], features[:, part], positions[:, part], cache=cache))
            assert cache.length == stop
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-5, atol=1e-5)


def test_truncated_rows_are_forgotten() -> None:
    head = lively_head(config())
    embeds, features, positions = pairs(1, 8)
    other = pairs(1, 8, seed=2)
    with torch.no_grad():
        whole = head(embeds, features, positions)
        cache = HeadCache(1)
        head(embeds[:, :3], features[:, :3], positions[:, :3], cache=cache)
        head(other[0][:, 3:], other[1][:, 3:], positions[:, 3:], cache=cache)
        cache.truncate(3)
        again = head(embeds[:, 3:], features[:, 3:], positions[:, 3:], cache=cache)
    torch.testing.assert_close(again, whole[:, 3:], rtol=1e-5, atol=1e-5)


def test_masked_padding_changes_nothing() -> None:
    head = lively_head(config())
    embeds, features, positions = pairs(1, 5)
    junk = pairs(1, 3, seed=3)
    mask = causal_mask(8, 0, embeds.device)
    mask[..., 5:, :] = torch.where(torch.eye(8, dtype=torch.bool)[5:], 0.0, -torch.inf)
    padded = torch.cat((embeds, junk[0]), 1), torch.cat((features, junk[1]), 1), torch.arange(8)[None]
    torch.testing.assert_close(head(*padded, mask=mask)[:, :5], head(embeds, features, positions), rtol=1e-5, atol=1e-5)


def test_half_precision_heads_keep_float32_angles() -> None:
    """Position 5001 is not even a bfloat16 number; angles rounded to it would make neighbours look alike."""
    head = lively_head(config()).bfloat16()
    embeds, features, _ = (x.bfloat16() if x.is_floating_point() else x for x in pairs(1, 6))
    near, far = torch.arange(6)[None], torch.arange(6)[None] + 5001
    with torch.no_grad():
        # Rotary attention sees distances only, so a shift of all positions must not change anything.
        difference = (head(embeds, features, near) - head(embeds, features, far)).abs().max()
        scale = head(embeds, features, near).abs().max()
    assert difference <= 0.03 * scale


def test_trains_in_float32_and_under_autocast() -> None:
    head = lively_head(config(fc_bias=True, qkv_bias=True))
    embeds, features, positions = pairs(2, 6)
    plain = head(embeds, features, positions)
    plain.square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for n, p in head.named_parameters() if "k_proj.b" not in n)
    with torch.autocast("cpu", torch.bfloat16):
        rough = head(embeds, features, positions, mask=causal_mask(6, 0, embeds.device))
    assert (rough.float() - plain).abs().max() < 0.05 * plain.abs().max()


def test_start_values() -> None:
    settings = config(hidden_size=64, num_layers=2, fc_bias=True, qkv_bias=True)
    before = torch.random.get_rng_state()
    head, again, other = (EagleHead(settings) for _ in range(3))
    torch.random.set_rng_state(before)
    initialise(head, torch.Generator().manual_seed(5))
    initialise(again, torch.Generator().manual_seed(5))
    initialise(other, torch.Generator().manual_seed(6))
    assert torch.equal(torch.random.get_rng_state(), before), "the global generator was used"
    state = head.state_dict()
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in state.items())
    assert not torch.equal(state["fc.weight"], other.state_dict()["fc.weight"])
    embedding_part, feature_part = state["fc.weight"].chunk(2, dim=1)
    assert embedding_part.std() < 0.01
    assert (feature_part - torch.eye(64)).std() < 0.01
    assert state["layers.0.self_attn.q_proj.weight"].std() == pytest.approx(0.004, rel=0.1)
    assert state["layers.1.mlp.gate_proj.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert all((tensor == 0).all() for name, tensor in state.items() if name.endswith("bias"))
    assert all((tensor == 1).all() for name, tensor in state.items() if "layernorm" in name)
    # The head starts as "the feature stays what it is".
    embeds, features, positions = pairs(1, 6, hidden=64)
    with torch.no_grad():
        assert (head(embeds, features, positions) - features).std() < 0.1


def test_arrays_and_back() -> None:
    head = lively_head(config(qkv_bias=True))
    twin = head_from_arrays(head.config, head_arrays(head))
    embeds, features, positions = pairs(1, 4)
    assert torch.equal(twin(embeds, features, positions), head(embeds, features, positions))
    assert not any(parameter.requires_grad for parameter in twin.parameters())


def test_draft_rows_pick_the_target_ids() -> None:
    lm_head = torch.arange(12.0).view(6, 2)
    assert torch.equal(draft_rows(lm_head, torch.tensor([1, 1, 3])), lm_head[[1, 2, 5]])
    assert draft_rows(lm_head, None) is lm_head


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 3}, "multiple of"),
        ({"head_dim": 7}, "even"),
        ({"hidden_act": "tanh"}, "silu"),
        ({"num_layers": 0}, "num_layers"),
        ({"hidden_size": 32.0}, "hidden_size"),
        ({"draft_vocab_size": 65}, "between 1 and"),
        ({"rope_theta": 0.0}, "positive"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        config(**changes)
