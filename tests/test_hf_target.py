"""The transformers target on tiny random models: a tree costs one pass and changes nothing."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from eyas.errors import CheckpointError, ContextLengthError, InvalidInputError, UnsupportedModelError
from eyas.loading import load_target
from eyas.models import load_source
from eyas.targets.hf import HFTarget, TorchOutput, attention_for, check_supported, load_hf
from eyas.targets.hf_cache import PooledCache
from eyas.tree import DraftTree
from support import gguf_files

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "sliding_window": None,
}
TREE = DraftTree(  # 0 -> 1, 2; 1 -> 3, 4; 2 -> 5; 5 -> 6
    tokens=np.array([7, 8, 9, 10, 11, 12, 13]),
    parents=np.array([-1, 0, 0, 1, 1, 2, 5]),
    log_values=np.zeros(7, np.float32),
)
PROMPT = [3, 5, 2, 9, 4]


def tiny(kind: str = "llama", **changes: Any) -> HFTarget:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SHAPE, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention_for(config))
    return HFTarget(model.eval(), f"tiny-{kind}")


def prefilled(target: HFTarget, tokens: list[int]) -> PooledCache:
    cache = target.new_cache()
    target.prefill(cache, tokens)
    return cache


def kept(cache: PooledCache) -> list[np.ndarray[Any, Any]]:
    """The committed keys and values of every layer."""
    sides = (cache.pool.keys, cache.pool.values)
    return [tensor[cache.slot, :, : cache.length].numpy() for side in sides for tensor in side.values()]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gpt_neox", "olmo2", "granite"])
def test_a_tree_equals_decoding_each_path_alone(kind: str) -> None:
    target = tiny(kind)
    cache = prefilled(target, PROMPT)
    (out,) = target.verify([(cache, TREE)])
    assert out.features.shape == (len(TREE), SHAPE["hidden_size"])
    for node in range(len(TREE)):
        path = TREE.path_to(node)
        alone = target.prefill(target.new_cache(), PROMPT + TREE.tokens[path].tolist())
        np.testing.assert_allclose(out.row(node), alone.row(0), atol=2e-5)
        np.testing.assert_allclose(out.features[node], alone.features[-1], atol=2e-5)
        assert out.argmax()[node] == alone.argmax()[0]


@pytest.mark.parametrize("path", [[0], [0, 1], [0, 2, 5, 6], [0, 1, 4]])
def test_after_a_commit_the_cache_equals_a_fresh_prefill(path: list[int]) -> None:
    target = tiny()
    cache = prefilled(target, PROMPT)
    target.verify([(cache, TREE)])
    cache.commit(path)
    fresh = prefilled(target, PROMPT + TREE.tokens[path].tolist())
    assert cache.length == fresh.length == len(PROMPT) + len(path)
    for ours, theirs in zip(kept(cache), kept(fresh), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_truncate_forgets() -> None:
    target = tiny()
    cache = prefilled(target, PROMPT)
    target.prefill(cache, [20, 21, 22])
    cache.truncate(len(PROMPT))
    again = target.prefill(cache, [30])
    alone = target.prefill(target.new_cache(), [*PROMPT, 30])
    np.testing.assert_allclose(again.row(0), alone.row(0), atol=1e-5)


def test_prefill_in_chunks_equals_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny()
    whole = target.prefill(target.new_cache(), list(range(2, 40)))
    monkeypatch.setattr("eyas.targets.hf.PREFILL_CHUNK", 7)
    chunked = target.prefill(target.new_cache(), list(range(2, 40)))
    assert chunked.features.shape == (38, SHAPE["hidden_size"])
    assert len(chunked.argmax()) == 1
    np.testing.assert_allclose(chunked.features, whole.features, atol=1e-5)
    np.testing.assert_allclose(chunked.row(-1), whole.row(-1), atol=1e-5)


def test_features_are_the_input_of_lm_head() -> None:
    target = tiny()
    (out,) = target.verify([(prefilled(target, PROMPT), TREE)])
    logits = out.features @ target.lm_head_weight.T
    np.testing.assert_allclose(logits, np.stack([out.row(node) for node in range(len(TREE))]), atol=1e-5)


def test_three_feature_levels_are_layer_inputs() -> None:
    target = tiny()
    levels = HFTarget(target.model, "tiny", feature_levels=3)
    out = levels.prefill(levels.new_cache(), PROMPT)
    states = target.model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[2][0], states[3][0], states[3][0]], dim=-1)  # L = 6: 2, L // 2, L - 3
    np.testing.assert_allclose(out.features, expected.detach(), atol=1e-5)
    both = HFTarget(target.model, "tiny", feature_levels=4)
    joined = both.prefill(both.new_cache(), PROMPT).features
    np.testing.assert_allclose(joined, torch.cat([expected, states[6][0]], dim=-1).detach(), atol=1e-5)


def test_one_pass_over_requests_of_different_length_equals_each_alone() -> None:
    """Prompts of 1 and 40 tokens; the padding id is also the end-of-sequence id and occurs in a prompt."""
    target = tiny()
    prompts = [[5], [1, *range(2, 41)], [9, 1, 1, 4]]
    caches = [prefilled(target, prompt) for prompt in prompts]
    trees = [DraftTree.root_only(6), TREE, DraftTree.chain([3, 1, 8])]
    fused = target.verify(list(zip(caches, trees, strict=True)))
    for prompt, tree, out in zip(prompts, trees, fused, strict=True):
        (alone,) = target.verify([(prefilled(target, prompt), tree)])
        assert out.features.shape == alone.features.shape
        np.testing.assert_allclose(out.features, alone.features, atol=1e-5)
        for node in range(len(tree)):
            np.testing.assert_allclose(out.row(node), alone.row(node), atol=1e-5)


def test_a_pass_over_some_requests_leaves_the_others_alone() -> None:
    """Slots between the verified ones may hold provisional rows that are committed later."""
    target = tiny()
    caches = [prefilled(target, [token, *PROMPT]) for token in (2, 3, 4)]
    target.verify([(caches[1], TREE)])
    target.verify([(caches[2], TREE), (caches[0], DraftTree.root_only(5))])  # in any order, with a gap
    caches[1].commit([0, 2, 5])
    caches[2].commit([0, 1, 3])
    for cache, tokens in ((caches[1], [3, *PROMPT, 7, 9, 12]), (caches[2], [4, *PROMPT, 7, 8, 10])):
        for ours, theirs in zip(kept(cache), kept(prefilled(target, tokens)), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_caches_of_different_capacity_verify_together() -> None:
    target = tiny()
    small, large = target.new_cache(16), target.new_cache(1000)
    assert small.pool is not large.pool
    for cache in (small, large):
        target.prefill(cache, PROMPT)
    first, second = target.verify([(large, TREE), (small, DraftTree.root_only(7))])
    assert first.features.shape[0] == len(TREE)
    np.testing.assert_allclose(first.row(0), second.row(0), atol=1e-5)


def test_the_pool_grows_and_reuses_slots() -> None:
    target = tiny()
    first = target.new_cache(4)
    target.prefill(first, PROMPT)
    others = [prefilled(target, [token]) for token in range(2, 7)]
    pool = first.pool
    assert [cache.slot for cache in others] == [1, 2, 3, 4, 5]
    for _ in range(60):  # past the capacity the pool began with
        target.verify([(first, DraftTree.root_only(5))])
        first.commit([0])
    fresh = prefilled(target, PROMPT + [5] * 60)
    np.testing.assert_allclose(kept(first)[0], kept(fresh)[0], atol=1e-5)
    slot = fresh.slot
    del fresh
    gc.collect()
    assert target.new_cache().slot == slot
    del first, others
    gc.collect()
    assert pool.keys == {}
    assert target.new_cache().slot == 0


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_greedy_equals_transformers_generate(kind: str) -> None:
    target = tiny(kind, eos_token_id=63)
    expected = target.model.generate(torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False)[0].tolist()
    cache = target.new_cache()
    tokens = [*PROMPT, int(target.prefill(cache, PROMPT).argmax()[0])]
    while len(tokens) < len(expected):
        (out,) = target.verify([(cache, DraftTree.root_only(tokens[-1]))])
        cache.commit([0])
        tokens.append(int(out.argmax()[0]))
    assert tokens == expected


def test_bfloat16_runs_and_says_so() -> None:
    target = tiny()
    half = HFTarget(target.model.bfloat16(), "half")
    assert half.info.dtype == "bfloat16"
    (out,) = half.verify([(prefilled(half, PROMPT), TREE)])
    assert out.features.dtype == torch.bfloat16
    assert out.row(0).dtype == np.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_equal_maxima_the_first_is_taken_as_on_the_host(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 50_000, dtype=dtype)
    logits[0, [49_999, 9, 31]] = 2.0
    logits[2, [40_000, 20_001]] = 1.0
    output = TorchOutput(logits, logits)
    assert output.argmax().tolist() == [9, 0, 20_001]
    assert [int(output.row(node).argmax()) for node in range(3)] == [9, 0, 20_001]


def test_nothing_is_left_on_the_model() -> None:
    target = tiny()
    cache = prefilled(target, PROMPT)  # transformers notes its own output hooks on the first call
    before = [dict(vars(module)) for module in target.model.modules()]
    target.verify([(cache, TREE)])
    after = [vars(module) for module in target.model.modules()]
    assert [list(state) for state in after] == [list(state) for state in before]


def save_bin(target: HFTarget, path: Path) -> None:
    target.model.config.save_pretrained(path)
    torch.save(target.model.state_dict(), path / "pytorch_model.bin")


SAVERS: dict[str, Callable[[HFTarget, Path], None]] = {
    "one file": lambda target, path: target.model.save_pretrained(path),
    "shards": lambda target, path: target.model.save_pretrained(path, max_shard_size="30KB"),
    "bin": save_bin,
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("saver", SAVERS)
def test_loading_a_directory(tmp_path: Path, tied: bool, saver: str) -> None:
    target = tiny(tie_word_embeddings=tied)
    SAVERS[saver](target, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) >= {"one file": 1, "shards": 2, "bin": 0}[saver]
    loaded = load_hf(load_source(tmp_path))
    assert loaded.info.eos_token_ids == (1,)
    assert loaded.info.dtype == "float32"
    assert (loaded.lm_head_weight.data_ptr() == loaded.embedding_weight.data_ptr()) == tied
    ours, theirs = (t.prefill(t.new_cache(), PROMPT) for t in (loaded, target))
    np.testing.assert_allclose(ours.row(0), theirs.row(0), atol=1e-6)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    target = tiny()
    state = target.model.state_dict()
    del state["model.layers.3.mlp.up_proj.weight"]
    target.model.config.save_pretrained(tmp_path)
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"layers\.3\.mlp\.up_proj"):
        load_hf(load_source(tmp_path))


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("mamba", {}, "recurrent"),
        ("jamba", {}, "recurrent"),
        ("recurrent_gemma", {}, "recurrent"),
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 16}, "recurrent"),
        ("mistral", {"sliding_window": 64, "max_position_embeddings": 512}, "last 64 tokens only"),
        ("t5", {}, "encoder-decoder"),
        ("bloom", {}, "position ids"),
    ],
)
def test_refused_by_name(kind: str, changes: dict[str, Any], reason: str) -> None:
    config = AutoConfig.for_model(kind, **changes)
    with pytest.raises(UnsupportedModelError, match=rf"the-name.*{reason}"):
        check_supported(config, "the-name")


@pytest.mark.parametrize("kind", ["mamba", "jamba", "qwen3_next", "minimax"])
def test_refused_at_load_before_any_weight_is_read(tmp_path: Path, kind: str) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path / "the-name")
    with pytest.raises(UnsupportedModelError, match=rf"the-name \({kind}\) cannot be a target: its layers are"):
        load_target(str(tmp_path / "the-name"))


@pytest.mark.slow
def test_whatever_keeps_a_state_beside_keys_and_values_is_refused() -> None:
    """Every causal model that transformers has, known by the words its source uses."""
    words = re.compile(r"\b(conv_states?|recurrent_states?|ssm_states?)\b")
    refused = set()
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        module = model_type_to_module_name(kind)
        source = Path(transformers.__file__).parent / "models" / module / f"modeling_{module}.py"
        if not source.is_file() or not words.search(source.read_text(encoding="utf-8")):
            continue
        config = AutoConfig.for_model(kind)
        if kind in ("lfm2", "lfm2_moe"):  # whose config says which layers are convolutions, by default none
            config.layer_types = ["conv", "full_attention"]
        with pytest.raises(UnsupportedModelError, match="the-name"):
            check_supported(config, "the-name")
        refused.add(kind)
    assert refused >= {"mamba", "mamba2", "jamba", "bamba", "zamba2", "falcon_h1", "qwen3_next", "lfm2"}


def test_a_window_as_wide_as_the_context_is_fine() -> None:
    check_supported(AutoConfig.for_model("mistral", sliding_window=512, max_position_embeddings=512), "m")
    check_supported(AutoConfig.for_model("qwen2", sliding_window=64, use_sliding_window=False), "q")


def test_bad_input_is_refused() -> None:
    target = tiny()
    cache = target.new_cache()
    with pytest.raises(InvalidInputError, match="at least one token"):
        target.prefill(cache, [])
    with pytest.raises(InvalidInputError, match=r"0\.\.63"):
        target.prefill(cache, [64])
    with pytest.raises(ContextLengthError, match="128 positions"):
        target.prefill(cache, [2] * 129)
    target.prefill(cache, [2] * 128)
    with pytest.raises(ContextLengthError):
        target.verify([(cache, DraftTree.root_only(3))])
    short = prefilled(target, PROMPT)
    with pytest.raises(InvalidInputError, match="two trees"):
        target.verify([(short, TREE), (short, TREE)])
    target.verify([(short, TREE)])
    with pytest.raises(InvalidInputError, match="path is increasing"):
        short.commit([0, 2, 1])
    with pytest.raises(InvalidInputError, match="7 rows"):
        short.commit([0, 7])
    with pytest.raises(InvalidInputError, match="truncate"):
        short.truncate(99)
    with pytest.raises(InvalidInputError, match="levels"):
        HFTarget(target.model, "x", feature_levels=2)


def test_a_gguf_file_is_loaded_without_a_word(tmp_path: Path) -> None:
    """Its float32 tensors are read-only views of the file, which torch warns of once in a process."""
    config = gguf_files.tiny_config("llama")
    tensors = gguf_files.random_tensors(config)
    torch.set_warn_always(True)
    try:
        target = load_hf(load_source(gguf_files.write_gguf(tmp_path / "tiny.gguf", config, tensors)))
    finally:
        torch.set_warn_always(False)
    np.testing.assert_array_equal(target.lm_head_weight.detach().float(), tensors["lm_head.weight"])


def test_bad_options_are_refused(tmp_path: Path) -> None:
    tiny().model.save_pretrained(tmp_path)
    source = load_source(tmp_path)
    with pytest.raises(InvalidInputError, match="float32 or bfloat16"):
        load_hf(source, dtype="int8")
    with pytest.raises(InvalidInputError, match="nonsense"):
        load_hf(source, device="nonsense")
