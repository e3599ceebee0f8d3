"""Reading GGUF: names, row order, quantised blocks, hyperparameters, tokenizers, damage."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant
from gguf.quants import dequantize, quantize

from eyas.checkpoints.gguf import GGUFFile, GGUFWeights, expected_shapes, read_config, rope_row_order
from eyas.checkpoints.gguf_tokenizer import read_tokenizer
from eyas.checkpoints.weights import dequantise
from eyas.errors import CheckpointError, EyasError, UnsupportedModelError
from support import gguf_files

FAMILIES = ("llama", "qwen2", "qwen3")


def written(
    tmp_path: Path, model_type: str = "llama", quant: Quant = Quant.F32, **changes: Any
) -> tuple[Path, Any, Any]:
    config = gguf_files.tiny_config(model_type, **changes)
    tensors = gguf_files.random_tensors(config)
    return gguf_files.write_gguf(tmp_path / "tiny.gguf", config, tensors, quant), config, tensors


def opened(path: Path) -> GGUFWeights:
    file = GGUFFile(path)
    return GGUFWeights(file, read_config(file))


# --- weights and config ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_tensors_come_back_under_their_names_and_in_their_order(tmp_path: Path, model_type: str, tied: bool) -> None:
    path, _, tensors = written(tmp_path, model_type, tie_word_embeddings=tied)
    weights = opened(path)
    assert set(weights) == set(tensors)
    assert ("lm_head.weight" in weights) is not tied
    for name, expected in tensors.items():
        np.testing.assert_array_equal(weights[name], expected, err_msg=name)
        assert weights[name].dtype == np.float32


@pytest.mark.parametrize("model_type", FAMILIES)
def test_config_comes_back(tmp_path: Path, model_type: str) -> None:
    path, config, _ = written(tmp_path, model_type)
    found = read_config(GGUFFile(path))
    assert {key: found[key] for key in config} == config
    assert (found["eos_token_id"], found["bos_token_id"], found["rope_scaling"]) == (2, 1, None)


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
@pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.Q4_0, Quant.Q4_1, Quant.Q5_1, Quant.F16, Quant.BF16])
def test_quantised_tensors_equal_the_reference_dequantisation(tmp_path: Path, model_type: str, quant: Quant) -> None:
    path, _, tensors = written(tmp_path, model_type, quant)
    weights = opened(path)
    for name, value in tensors.items():
        expected = value if value.ndim == 1 else dequantize(quantize(value, quant), quant)
        np.testing.assert_array_equal(weights[name], expected, err_msg=name)


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_raw_blocks_are_in_hf_row_order(tmp_path: Path, model_type: str) -> None:
    path, _, tensors = written(tmp_path, model_type, Quant.Q4_1)
    weights = opened(path)
    name = "model.layers.1.self_attn.k_proj.weight"
    raw = weights.raw(name)
    assert (raw.type, raw.shape) == ("Q4_1", tensors[name].shape)
    np.testing.assert_array_equal(raw.data, quantize(tensors[name], Quant.Q4_1))
    np.testing.assert_array_equal(dequantise(raw.type, raw.data), weights[name])
    assert weights.nbytes(name) == raw.data.nbytes


def test_llama_attention_biases_are_reordered_too(tmp_path: Path) -> None:
    path, _, tensors = written(tmp_path, "llama", attention_bias=True)
    weights = opened(path)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        key = f"model.layers.0.self_attn.{name}.bias"
        np.testing.assert_array_equal(weights[key], tensors[key], err_msg=key)


def test_rope_row_order_by_hand() -> None:
    # Two heads of four rows: stored pairs (0, 2), (1, 3) of each head stand side by side.
    assert rope_row_order(8, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("quant", [Quant.Q4_0, Quant.Q4_1, Quant.Q8_0, Quant.Q5_0, Quant.Q5_1, Quant.Q6_K, Quant.Q4_K])
def test_every_bit_pattern_dequantises_as_the_reference_does(quant: Quant) -> None:
    from eyas.checkpoints.weights import BLOCK_SIZES

    size = BLOCK_SIZES[quant.name][1]
    blocks = np.random.default_rng(1).integers(0, 256, (9000, size), np.uint8)
    blocks[:, 1::2] &= 0x3B  # keep half-precision scales, wherever they lie, finite
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(dequantise(quant.name, blocks), dequantize(blocks, quant))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_against_a_transformers_twin(tmp_path: Path, model_type: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = gguf_files.tiny_config(model_type)
    torch.manual_seed(0)
    twin_config = transformers.AutoConfig.for_model(
        **{key: value for key, value in config.items() if key not in ("attention_bias", "mlp_bias")}
    )
    twin = transformers.AutoModelForCausalLM.from_config(twin_config).eval()
    state = {name: value.detach().numpy() for name, value in twin.state_dict().items()}
    assert {name: value.shape for name, value in state.items()} == expected_shapes(config)

    path = gguf_files.write_gguf(tmp_path / "twin.gguf", config, state)
    file = GGUFFile(path)
    found = read_config(file)
    again_config = transformers.AutoConfig.for_model(**found)
    again = transformers.AutoModelForCausalLM.from_config(again_config).eval()
    weights = GGUFWeights(file, found)
    again.load_state_dict({name: torch.from_numpy(np.array(weights[name])) for name in weights}, strict=True)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(twin(ids).logits, again(ids).logits)


# --- RoPE scalings and other metadata --------------------------------------------------------------------------


def llama3_divisors(head_dim: int, theta: float, factor: float, low: float, high: float, length: int) -> np.ndarray:
    """As llama.cpp's converter computes them from config.json."""
    out = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (index / head_dim)
        if wavelength < length / high:
            out.append(1.0)
        elif wavelength > length / low:
            out.append(factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


@pytest.mark.parametrize(
    ("factor", "low", "high", "length"), [(32.0, 1.0, 4.0, 8192), (8.0, 1.0, 4.0, 8192), (4.0, 2.0, 6.0, 4096)]
)
def test_llama3_scaling_is_recovered(tmp_path: Path, factor: float, low: float, high: float, length: int) -> None:
    config = gguf_files.tiny_config("llama", head_dim=64, rope_theta=500000.0)
    divisors = llama3_divisors(64, 500000.0, factor, low, high, length)
    tensors = gguf_files.random_tensors(config) | {"rope_freqs.weight": divisors}
    path = gguf_files.write_gguf(tmp_path / "l3.gguf", config, tensors)
    found = read_config(GGUFFile(path))["rope_scaling"]
    assert found["rope_type"] == "llama3"
    ratio = found["original_max_position_embeddings"] / length  # only ratios are determined
    assert found["factor"] == pytest.approx(factor)
    assert found["low_freq_factor"] == pytest.approx(low * ratio, rel=1e-2)
    assert found["high_freq_factor"] == pytest.approx(high * ratio, rel=1e-2)
    again = llama3_divisors(64, 500000.0, *[found[key] for key in list(found)[1:]])
    np.testing.assert_allclose(again, divisors, rtol=1e-3)


def test_foreign_frequency_divisors_are_refused(tmp_path: Path) -> None:
    config = gguf_files.tiny_config("llama")
    tensors = gguf_files.random_tensors(config) | {"rope_freqs.weight": np.array([1, 9, 2, 7, 1, 5, 3, 8], np.float32)}
    path = gguf_files.write_gguf(tmp_path / "odd.gguf", config, tensors)
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        read_config(GGUFFile(path))


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 16,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        ),
        ({"llama.rope.scaling.type": "none"}, None),
    ],
)
def test_other_rope_scalings(tmp_path: Path, extra: dict[str, Any], expected: dict[str, Any] | None) -> None:
    config = gguf_files.tiny_config("llama")
    path = gguf_files.write_gguf(tmp_path / "r.gguf", config, gguf_files.random_tensors(config), extra=extra)
    assert read_config(GGUFFile(path))["rope_scaling"] == expected


def test_a_sliding_window_makes_it_mistral(tmp_path: Path) -> None:
    config = gguf_files.tiny_config("llama")
    tensors = gguf_files.random_tensors(config)
    extra = {"llama.attention.sliding_window": 32}
    found = read_config(GGUFFile(gguf_files.write_gguf(tmp_path / "m.gguf", config, tensors, extra=extra)))
    assert (found["model_type"], found["sliding_window"]) == ("mistral", 32)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
    ],
)
def test_features_we_cannot_compute_are_refused_by_name(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    config = gguf_files.tiny_config("llama")
    path = gguf_files.write_gguf(tmp_path / "x.gguf", config, gguf_files.random_tensors(config), extra=extra)
    with pytest.raises(UnsupportedModelError, match=message):
        read_config(GGUFFile(path))


def test_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    config = gguf_files.tiny_config("mamba")
    path = gguf_files.write_gguf(tmp_path / "m.gguf", config, {})
    with pytest.raises(UnsupportedModelError, match=r"'mamba' is not supported; llama"):
        read_config(GGUFFile(path))


def test_missing_surplus_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    config = gguf_files.tiny_config("llama")
    tensors = gguf_files.random_tensors(config)
    path = tmp_path / "t.gguf"

    without = {name: value for name, value in tensors.items() if "1.mlp.up" not in name}
    gguf_files.write_gguf(path, config, without)
    with pytest.raises(CheckpointError, match=r"t\.gguf.*missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        opened(path)

    gguf_files.write_gguf(path, config, tensors | {"surprise": np.ones(4, np.float32)})
    with pytest.raises(CheckpointError, match=r"t\.gguf.*does not have: surprise"):
        opened(path)

    gguf_files.write_gguf(path, config, tensors | {"model.norm.weight": np.ones(32, np.float32)})
    with pytest.raises(CheckpointError, match=r"'output_norm\.weight' at byte \d+ has shape \(32,\).*\(64,\)"):
        opened(path)


# --- damage ----------------------------------------------------------------------------------------------------


def read_all(path: Path) -> None:
    file = GGUFFile(path)
    weights = GGUFWeights(file, read_config(file))
    for name in weights:
        weights.raw(name)
    read_tokenizer(file)


def test_every_truncation_names_the_file_and_the_offset(tmp_path: Path) -> None:
    path, _, _ = written(tmp_path)
    whole = path.read_bytes()
    data_start = min(info.offset for info in GGUFFile(path).tensors.values())
    cut = tmp_path / "cut.gguf"
    lengths = [*range(1, data_start, 61), *range(data_start, len(whole) - 32, len(whole) // 40), len(whole) - 33]
    for length in lengths:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf.* at byte \d+") as caught:
            read_all(cut)
        assert caught.value.__cause__ is None
    read_all(path)


def test_a_truncated_tensor_is_named(tmp_path: Path) -> None:
    path, _, _ = written(tmp_path)
    last = max(GGUFFile(path).tensors.values(), key=lambda info: info.offset)
    path.write_bytes(path.read_bytes()[: last.offset + last.nbytes // 2])
    with pytest.raises(CheckpointError, match=rf"tensor '{re.escape(last.name)}' at byte {last.offset}.*truncated"):
        GGUFFile(path)


def test_damaged_headers_never_raise_anything_else(tmp_path: Path) -> None:
    path, _, _ = written(tmp_path)
    whole = path.read_bytes()
    data_start = min(info.offset for info in GGUFFile(path).tensors.values())
    rng = random.Random(7)
    refused = 0
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 8])):
            damaged[rng.randrange(data_start)] = rng.choice([0, 1, 255, rng.randrange(256)])
        path.write_bytes(damaged)
        try:
            read_all(path)
        except EyasError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 not a model", b"GGUF\x09\x00\x00\x00" + b"\0" * 64])
def test_files_that_are_not_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "not.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"not\.gguf"):
        GGUFFile(path)


# --- tokenizers ------------------------------------------------------------------------------------------------

TEXTS = (
    "the cat in the hat",
    "def f(x):\n\treturn x ** 2  # 12345\n\n\n",
    "안녕하세요 세계!",
    "Příliš žluťoučký kůň",
    "👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
    "  it's  we'll 3.14 ١٢٣ ",
)


def test_byte_level_tokenizer_round_trips(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(GGUFFile(written(tmp_path)[0]))
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode("the the").tokens == ["the", "Ġthe"]
    assert tokenizer.encode("a<|im_end|>b").ids[1] == 2
    assert tokenizer.decode([2, tokenizer.token_to_id("the")]) == "the"  # specials are skipped


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("smollm", ["1", "2", "Ġ", "1", "2"]),
        ("qwen2", ["1", "2", "Ġ", "1", "2"]),
        ("gpt-2", ["12", "Ġ", "12"]),
        ("llama-bpe", ["12", "Ġ", "12"]),
        ("default", ["12", "Ġ", "12"]),
        ("tekken", ["1", "2", "Ġ", "1", "2"]),
    ],
)
def test_digits_are_split_as_the_named_rule_says(tmp_path: Path, rule: str, expected: list[str]) -> None:
    file = GGUFFile(written(tmp_path)[0])
    file.metadata["tokenizer.ggml.pre"] = rule
    tokenizer = read_tokenizer(file)
    assert tokenizer.encode("12 12", add_special_tokens=False).tokens == expected
    for text in TEXTS[1:]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_begin_mark_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    file = GGUFFile(written(tmp_path)[0])
    assert read_tokenizer(file).encode("a").ids[0] != 1
    file.metadata["tokenizer.ggml.add_bos_token"] = True
    file.metadata["tokenizer.ggml.add_eos_token"] = True
    ids = read_tokenizer(file).encode("a").ids
    assert (ids[0], ids[-1]) == (1, 2)
    assert read_tokenizer(file).encode("a", add_special_tokens=False).ids == ids[1:-1]


def test_unknown_splitting_rule_is_refused_by_name(tmp_path: Path) -> None:
    file = GGUFFile(written(tmp_path)[0])
    file.metadata["tokenizer.ggml.pre"] = "martian"
    with pytest.raises(UnsupportedModelError, match=r"'martian' is not known; known: .*smollm"):
        read_tokenizer(file)


def sentencepiece_file(tmp_path: Path) -> GGUFFile:
    file = GGUFFile(written(tmp_path)[0])
    pieces = [("▁the", -1.0), ("▁t", -2.0), ("he", -3.0), ("▁", -4.0), ("t", -5.0), ("h", -6.0), ("e", -7.0)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *(piece for piece, _ in pieces)]
    file.metadata |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.scores": [0.0] * 259 + [score for _, score in pieces],
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return file


def test_sentencepiece_tokenizer(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(sentencepiece_file(tmp_path))
    assert tokenizer.encode("the the").tokens == ["<s>", "▁the", "▁the"]
    assert tokenizer.encode("한", add_special_tokens=False).tokens == ["▁", "<0xED>", "<0x95>", "<0x9C>"]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_every_pair_of_tokens_merges_as_scores_say(tmp_path: Path) -> None:
    """Against the SentencePiece rule itself: join the best-scoring neighbours, leftmost first, until none is left."""
    file = sentencepiece_file(tmp_path)
    tokenizer = read_tokenizer(file)
    score = dict(zip(file.metadata["tokenizer.ggml.tokens"], file.metadata["tokenizer.ggml.scores"], strict=True))
    for letters in itertools.product("the ", repeat=4):
        text = "".join(letters)
        symbols = list("▁" + text.replace(" ", "▁"))
        while joins := [(score[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in score]:
            at = -max(joins)[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        assert tokenizer.encode(text, add_special_tokens=False).tokens == symbols, text
