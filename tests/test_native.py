"""The native engine: right against float64, and the same bits whatever shares a pass."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from eyas import native
from eyas.checkpoints.weights import dequantise
from eyas.errors import ContextLengthError, InvalidInputError, UnsupportedModelError
from eyas.targets.base import TargetInfo
from eyas.tree import DraftTree
from support.decoder import random_tree, reference, tiny_config, tiny_weights

if not native.available():
    pytest.skip(native.reason(), allow_module_level=True)

from eyas.targets.native import NativeCache, NativeOutput, NativeTarget

TYPES = ["float32", "bfloat16", "int8"]
# Relative error of the logits against float64 on these tiny random models, whose three layers amplify rounding.
TOLERANCE = {"float32": 2e-6, "bfloat16": 4e-2, "int8": 0.1}
# Kernels with dot-product instructions round activations, to bfloat16 or to 8 bits, as well as weights.
ROUNDS_TO_BFLOAT16 = {"avx512_dot", "amx"}
ROUNDS_TO_BYTES = {"avx512_vnni", *ROUNDS_TO_BFLOAT16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
MODELS: dict[str, dict[str, Any]] = {
    "llama": tiny_config(),
    "untied": tiny_config(tie_word_embeddings=False),
    "qwen2": tiny_config("qwen2", head_dim=8, num_key_value_heads=1),
    "qwen3": tiny_config("qwen3", head_dim=20, num_attention_heads=4),
    "mistral": tiny_config("mistral", num_key_value_heads=6, sliding_window=None),
    "odd": tiny_config(hidden_size=45, intermediate_size=37, head_dim=10, num_attention_heads=7, num_key_value_heads=1),
    "wide head": tiny_config(head_dim=52, num_attention_heads=5, num_key_value_heads=5),
    "llama3 rope": tiny_config(rope_scaling=LLAMA3),
    "yarn rope": tiny_config(rope_scaling=YARN),
}


def load(
    config: dict[str, Any] | None = None, dtype: str = "float32", threads: int = 2, **options: Any
) -> NativeTarget:
    config = config or tiny_config()
    return NativeTarget.from_weights(config, tiny_weights(config), dtype=dtype, threads=threads, **options)


def logits(output: NativeOutput) -> np.ndarray:
    return np.stack([output.row(i) for i in range(len(output.argmax()))])


def prompt(length: int, seed: int = 1, vocab: int = 101) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


def error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def bits(array: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, as uint16."""
    whole = np.ascontiguousarray(array, np.float32).view(np.uint32).astype(np.uint64)
    return ((whole + 0x7FFF + (whole >> 16 & 1)) >> 16).astype(np.uint16)


def widened(bits: np.ndarray) -> np.ndarray:
    """bfloat16 as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bfloat16(array: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, as float32.

    So are keys and values beside weights of every type but float32. One that lies between two bfloat16 numbers may go
    to either: that is what tolerances over 3e-6 are for where activations are exact.
    """
    return widened(bits(array))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", MODELS)
def test_prompt_and_tree_match_float64(name: str, dtype: str) -> None:
    config = MODELS[name]
    ids = prompt(90)
    tree = random_tree(np.random.default_rng(2), 11, config["vocab_size"])
    wanted, features, _ = reference(config, tiny_weights(config), ids, tree)
    target = load(config, dtype)
    cache = target.new_cache()
    first = target.prefill(cache, ids)
    assert first.features.shape == (90, config["hidden_size"])
    assert error(first.row(0), wanted[89]) < TOLERANCE[dtype]
    assert error(first.features, features[:90]) < TOLERANCE[dtype]
    [output] = target.verify([(cache, tree)])
    assert error(logits(output), wanted[90:]) < TOLERANCE[dtype]
    assert error(output.features, features[90:]) < TOLERANCE[dtype]
    assert output.argmax().tolist() == logits(output).argmax(-1).tolist()


def test_without_logits_everything_else_is_the_same() -> None:
    target = load(MODELS["llama"])
    caches = [target.new_cache(), target.new_cache()]
    trees = [random_tree(np.random.default_rng(seed), 5 + seed, MODELS["llama"]["vocab_size"]) for seed in (0, 1)]
    for batch in ([(caches[0], trees[0])], list(zip(caches, trees, strict=True))):
        for cache in caches:
            cache.truncate(0)
            target.prefill(cache, prompt(9))
        for whole, spare in zip(target.verify(batch), target.verify(batch, logits=False), strict=True):
            assert spare.argmax().tolist() == whole.argmax().tolist()
            assert spare.features.tobytes() == whole.features.tobytes()
            with pytest.raises(InvalidInputError, match="argmax"):
                spare.row(0)


@pytest.mark.parametrize("kernels", native.kernel_sets())
@pytest.mark.parametrize("dtype", TYPES)
def test_every_kernel_set_matches_float64(kernels: str, dtype: str) -> None:
    config = MODELS["llama"]
    ids = prompt(40)
    wanted, _, _ = reference(config, tiny_weights(config), ids)
    target = load(config, dtype, kernels=kernels)
    assert target.core.kernels == kernels
    cache = target.new_cache()
    [output] = target.verify([(cache, DraftTree.chain(ids))])
    assert error(logits(output), wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_as_exact_as_its_weights(name: str) -> None:
    config = MODELS[name]
    weights = {name: bits(array) if array.ndim == 2 else array for name, array in tiny_weights(config).items()}
    exact = {name: widened(array) if array.dtype == np.uint16 else array for name, array in weights.items()}
    ids = prompt(30)
    wanted, _, _ = reference(config, exact, ids, store=bfloat16)
    for given in (weights, exact):
        target = NativeTarget.from_weights(config, given, dtype="bfloat16", threads=1)
        limit = 2e-2 if target.core.kernels in ROUNDS_TO_BFLOAT16 else 3e-4
        assert error(target.prefill(target.new_cache(), ids).row(0), wanted[-1]) < limit


def eight_bits(array: np.ndarray) -> np.ndarray:
    """Rounded to int8 in groups of 64 along the last axis, one bfloat16 scale each (rounded up), as float32."""
    if array.ndim == 1:
        return array
    rows, columns = array.shape
    groups = np.pad(array, ((0, 0), (0, -columns % 64))).reshape(rows, -1, 64)
    most = np.abs(groups).max(-1, keepdims=True)
    scale = bits(most / np.float32(127))
    scale += widened(scale) * np.float32(127) < most
    scale = widened(scale)
    return (np.rint(groups / scale).clip(-127, 127) * scale).reshape(rows, -1)[:, :columns].astype(np.float32)


@pytest.mark.parametrize("kernels", native.kernel_sets())
@pytest.mark.parametrize("name", ["llama", "odd", "untied"])
def test_int8_is_as_exact_as_its_weights(name: str, kernels: str) -> None:
    config = tiny_config(**MODELS[name] | {"tie_word_embeddings": False, "hidden_size": 200})
    weights = tiny_weights(config)
    table = "model.embed_tokens.weight"  # looked up, not multiplied: bfloat16
    weights[table] = bfloat16(weights[table])
    ids = prompt(30)
    exact = {key: array if key == table else eight_bits(array) for key, array in weights.items()}
    wanted, _, _ = reference(config, exact, ids, store=bfloat16)
    target = NativeTarget.from_weights(config, weights, dtype="int8", threads=1, kernels=kernels)
    limit = 0.1 if kernels in ROUNDS_TO_BYTES else 3e-3
    assert error(target.prefill(target.new_cache(), ids).row(0), wanted[-1]) < limit


def test_three_feature_levels_are_layer_inputs() -> None:
    config = tiny_config(num_hidden_layers=7)
    ids = prompt(20)
    _, _, inputs = reference(config, tiny_weights(config), ids)
    target = load(config, feature_levels=3)
    features = target.prefill(target.new_cache(), ids).features
    assert features.shape == (20, 3 * 48)
    for level, layer in enumerate([2, 3, 4]):
        assert error(features[:, level * 48 : (level + 1) * 48], inputs[layer]) < 2e-6
    both = load(config, feature_levels=4)
    joined = both.prefill(both.new_cache(), ids).features
    alone = load(config)
    last = alone.prefill(alone.new_cache(), ids).features
    np.testing.assert_array_equal(joined, np.concatenate([features, last], axis=1))


BLOCKS = tiny_config(hidden_size=96, intermediate_size=160, num_attention_heads=4, num_key_value_heads=2, head_dim=24)


def blocks(kinds: tuple[str, ...], seed: int = 0) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Random GGUF blocks for every matrix, the kinds in turn, and what they mean."""
    rng = np.random.default_rng(seed)
    packed: dict[str, Any] = {}
    meant: dict[str, np.ndarray] = {}
    for at, (name, array) in enumerate(tiny_weights(BLOCKS).items()):
        if array.ndim == 1:
            packed[name] = meant[name] = array
            continue
        kind = kinds[at % len(kinds)]
        rows, columns = array.shape
        size = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind]
        data = rng.integers(0, 256, (rows, columns // 32, size)).astype(np.uint8)
        step = np.float32(2.5 / np.sqrt(columns) / (127 if kind == "Q8_0" else 7.5))
        scale = (step * rng.uniform(0.3, 1, (rows, columns // 32)) * rng.choice([-1, 1], (rows, 1))).astype(np.float16)
        data[..., :2] = scale[..., None].view(np.uint8)
        if kind == "Q4_1":
            data[..., 2:4] = (scale * np.float16(-7.5))[..., None].view(np.uint8)
        data = data.reshape(rows, -1)
        packed[name] = (kind, data, columns)
        meant[name] = dequantise(kind, data)
    return packed, meant


@pytest.mark.parametrize("kernels", native.kernel_sets())
@pytest.mark.parametrize("kinds", [("Q8_0",), ("Q4_0",), ("Q4_1",), ("Q4_0", "Q4_1", "Q8_0")])
def test_gguf_blocks_run_as_they_are(kinds: tuple[str, ...], kernels: str) -> None:
    packed, meant = blocks(kinds)
    ids = prompt(40)
    wanted, _, _ = reference(BLOCKS, meant, ids, store=bfloat16)
    target = NativeTarget.from_weights(BLOCKS, packed, dtype="q4", threads=2, kernels=kernels)
    cache = target.new_cache()
    [output] = target.verify([(cache, DraftTree.chain(ids))])
    exact = kinds == ("Q8_0",) and kernels not in ROUNDS_TO_BYTES
    assert error(logits(output), wanted) < (3e-3 if exact else 0.05)
    alone = np.stack(plain(target, ids))
    assert np.array_equal(alone, logits(output))


def test_gguf_blocks_become_other_types_as_numpy_reads_them() -> None:
    packed, meant = blocks(("Q4_0", "Q4_1", "Q8_0"))
    ids = prompt(20)
    for dtype in TYPES:
        pair = [NativeTarget.from_weights(BLOCKS, weights, dtype=dtype) for weights in (packed, meant)]
        rows = [target.prefill(target.new_cache(), ids).row(0) for target in pair]
        assert np.array_equal(*rows)


def test_other_blocks_are_refused() -> None:
    packed, _ = blocks(("Q8_0",))
    name = "model.layers.0.mlp.up_proj.weight"
    _, data, columns = packed[name]
    with pytest.raises(InvalidInputError, match=r"block type Q6_K; supported: Q4_0, Q4_1, Q8_0"):
        NativeTarget.from_weights(BLOCKS, packed | {name: ("Q6_K", data, columns)}, dtype="q4")
    with pytest.raises(InvalidInputError, match="bytes per row"):
        NativeTarget.from_weights(BLOCKS, packed | {name: ("Q8_0", data[:, :-1].copy(), columns)}, dtype="q4")


# ---- the same bits ------------------------------------------------------------------------------------------------


def plain(target: NativeTarget, ids: list[int]) -> list[np.ndarray]:
    """Logits of every position, one token per pass."""
    cache = target.new_cache()
    rows = []
    for token in ids:
        [output] = target.verify([(cache, DraftTree.root_only(token))])
        cache.commit([0])
        rows.append(output.row(0))
    return rows


@pytest.mark.parametrize("kernels", native.kernel_sets())
@pytest.mark.parametrize("dtype", TYPES)
def test_chunks_of_any_size_give_the_same_bits(dtype: str, kernels: str) -> None:
    target = load(dtype=dtype, kernels=kernels)
    ids = prompt(100)
    wanted = np.stack(plain(target, ids))
    for size in (2, 3, 5, 7, 12, 13, 31, 64, 100):
        cache = target.new_cache()
        got = []
        for start in range(0, len(ids), size):
            chunk = DraftTree.chain(ids[start : start + size])
            [output] = target.verify([(cache, chunk)])
            cache.commit(range(len(chunk)))
            got.append(logits(output))
        assert np.array_equal(np.concatenate(got), wanted), size


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "odd"])
@pytest.mark.parametrize("dtype", TYPES)
def test_trees_equal_plain_decoding_bit_for_bit_across_commits(name: str, dtype: str) -> None:
    config = MODELS[name]
    target = load(config, dtype)
    rng = np.random.default_rng(3)
    committed = prompt(61, vocab=config["vocab_size"])
    cache = target.new_cache()
    target.prefill(cache, committed)
    for cycle in range(6):
        tree = random_tree(rng, int(rng.integers(1, 40)), config["vocab_size"])
        [output] = target.verify([(cache, tree)])
        fresh = target.new_cache()
        target.prefill(fresh, committed)
        for node in rng.choice(len(tree), min(4, len(tree)), replace=False).tolist():
            path = tree.path_to(node)
            branch = fresh.fork()
            for step in path:
                [one] = target.verify([(branch, DraftTree.root_only(int(tree.tokens[step])))])
                branch.commit([0])
            assert np.array_equal(one.row(0), output.row(node)), (cycle, node)
            assert np.array_equal(one.features[0], output.features[node])
        cache.commit(path)
        committed += tree.tokens[path].tolist()
        assert cache.length == len(committed)


@pytest.mark.parametrize("dtype", TYPES)
def test_threads_do_not_matter(dtype: str) -> None:
    ids = prompt(70)
    tree = random_tree(np.random.default_rng(4), 23, 101)
    results = []
    for threads in (1, 2, 3, 5):
        target = load(dtype=dtype, threads=threads)
        cache = target.new_cache()
        first = target.prefill(cache, ids)
        [output] = target.verify([(cache, tree)])
        results.append((first.row(0), logits(output), output.features, output.argmax()))
    for result in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("dtype", TYPES)
def test_a_fused_batch_equals_each_request_alone(dtype: str) -> None:
    target = load(dtype=dtype)
    rng = np.random.default_rng(5)
    batch: list[tuple[NativeCache, DraftTree]] = []
    for length in (1, 40, 64, 65, 200, 3):
        cache = target.new_cache()
        target.prefill(cache, prompt(length, seed=length))
        batch.append((cache, random_tree(rng, int(rng.integers(1, 9)), 101)))
    together = target.verify(batch)
    for (cache, tree), output in zip(batch, together, strict=True):
        assert len(output.argmax()) == len(tree)
        [alone] = target.verify([(cache, tree)])
        assert np.array_equal(logits(alone), logits(output))
        assert np.array_equal(alone.features, output.features)
    assert target.verify([]) == []


def test_equal_maxima_take_the_first() -> None:
    config = tiny_config(tie_word_embeddings=False)
    weights = tiny_weights(config)
    weights["lm_head.weight"][50] = weights["lm_head.weight"][7]
    weights["lm_head.weight"][93] = weights["lm_head.weight"][7]
    for threads in (1, 2, 4):
        target = NativeTarget.from_weights(config, weights, dtype="float32", threads=threads)
        [output] = target.verify([(target.new_cache(), DraftTree.chain(prompt(60)))])
        rows = logits(output)
        assert np.array_equal(rows[:, 7], rows[:, 93])
        assert output.argmax().tolist() == rows.argmax(-1).tolist()


def test_several_python_threads_share_a_target() -> None:
    target = load(dtype="bfloat16")
    wanted = {seed: np.stack(plain(target, prompt(30, seed))) for seed in range(6)}
    got: dict[int, np.ndarray] = {}

    def answer(seed: int) -> None:
        got[seed] = np.stack(plain(target, prompt(30, seed)))

    workers = [threading.Thread(target=answer, args=(seed,)) for seed in wanted]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(np.array_equal(got[seed], wanted[seed]) for seed in wanted)


# ---- the cache ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
def test_truncate_forgets_and_the_rest_is_as_if_never_written(dtype: str) -> None:
    target = load(dtype=dtype)
    ids = prompt(200)
    cache = target.new_cache()
    target.prefill(cache, ids)
    for length in (150, 64, 63, 1, 0):
        cache.truncate(length)
        assert cache.length == length
        [output] = target.verify([(cache.fork(), DraftTree.chain(ids[length : length + 5]))])
        fresh = target.new_cache()
        [wanted] = target.verify([(fresh, DraftTree.chain(ids[: length + 5]))])
        assert np.array_equal(logits(output), logits(wanted)[length:])


@pytest.mark.parametrize("dtype", TYPES)
def test_a_fork_shares_until_one_side_writes(dtype: str) -> None:
    target = load(dtype=dtype)
    ids = prompt(100)
    cache = target.new_cache()
    target.prefill(cache, ids)
    fork = cache.fork()
    target.prefill(fork, [1, 2, 3])
    cache_next = target.verify([(cache, DraftTree.chain([4, 5]))])[0]
    wanted = target.verify([(target_cache(target, ids), DraftTree.chain([4, 5]))])[0]
    assert np.array_equal(logits(cache_next), logits(wanted))
    assert (cache.length, fork.length) == (100, 103)
    later = cache.fork()  # between verify and commit: rows written once may be shared as well
    cache.commit([0])
    later.commit([0, 1])
    assert (cache.length, later.length) == (101, 102)
    after = target.verify([(later, DraftTree.root_only(9))])[0]
    assert np.array_equal(
        after.row(0), target.verify([(target_cache(target, [*ids, 4, 5]), DraftTree.root_only(9))])[0].row(0)
    )


def target_cache(target: NativeTarget, ids: list[int]) -> NativeCache:
    cache = target.new_cache()
    target.prefill(cache, ids)
    return cache


def test_the_rows_of_a_pass_are_provisional() -> None:
    target = load()
    cache = target_cache(target, prompt(10))
    before = target.verify([(cache, DraftTree.chain([1, 2, 3]))])[0]
    target.verify([(cache, DraftTree.chain([7, 8]))])
    again = target.verify([(cache, DraftTree.chain([1, 2, 3]))])[0]
    assert cache.length == 10
    assert np.array_equal(logits(before), logits(again))
    with pytest.raises(InvalidInputError, match="increasing"):
        cache.commit([0, 3])
    with pytest.raises(InvalidInputError, match="increasing"):
        cache.commit([1, 0])
    cache.commit([])
    assert cache.length == 10
    with pytest.raises(InvalidInputError, match="truncate"):
        cache.truncate(11)


# ---- refusals -----------------------------------------------------------------------------------------------------


def test_bad_input_is_refused() -> None:
    target = load()
    cache = target.new_cache()
    with pytest.raises(InvalidInputError, match="at least one token"):
        target.prefill(cache, [])
    with pytest.raises(ContextLengthError, match="512"):
        target.prefill(cache, [1] * 513)
    with pytest.raises(InvalidInputError, match="outside the vocabulary"):
        target.verify([(cache, DraftTree.root_only(101))])
    with pytest.raises(InvalidInputError, match="twice"):
        target.verify([(cache, DraftTree.root_only(1)), (cache, DraftTree.root_only(2))])
    target.prefill(cache, [1] * 512)
    with pytest.raises(InvalidInputError, match="beyond the context"):
        target.verify([(cache, DraftTree.root_only(1))])
    other = load(tiny_config(num_hidden_layers=2))
    with pytest.raises(InvalidInputError, match="another model"):
        other.verify([(cache, DraftTree.root_only(1))])


def test_weights_must_fit() -> None:
    config = tiny_config()
    weights = tiny_weights(config)
    name = "model.layers.1.mlp.up_proj.weight"
    missing = {key: value for key, value in weights.items() if key != name}
    with pytest.raises(InvalidInputError, match=r"model: weight 'model.layers.1.mlp.up_proj.weight' is missing"):
        NativeTarget.from_weights(config, missing)
    with pytest.raises(InvalidInputError, match=r"shape \[79, 48\], expected \[80, 48\]"):
        NativeTarget.from_weights(config, weights | {name: weights[name][:79]})
    with pytest.raises(InvalidInputError, match="float32, or bfloat16"):
        NativeTarget.from_weights(config, weights | {name: weights[name].astype(np.float64)})
    with pytest.raises(InvalidInputError, match="weight types auto"):
        NativeTarget.from_weights(config, weights, dtype="float16")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_the_engine_lacks_is_named(changes: dict[str, Any], named: str) -> None:
    config = tiny_config(**changes)
    assert not native.supports(config)
    with pytest.raises(UnsupportedModelError, match=named):
        NativeTarget.from_weights(config, tiny_weights(tiny_config()))


def test_a_sliding_window_limits_the_context() -> None:
    assert load(tiny_config("mistral", sliding_window=64)).info.max_positions == 64
    assert load(tiny_config("qwen2", sliding_window=64, use_sliding_window=False)).info.max_positions == 512


def test_info_and_sizes() -> None:
    target = load(dtype="int8", name="tiny", eos_token_ids=(3, 4))
    assert target.info == TargetInfo("tiny", 101, 48, 3, 512, (3, 4), "native", "int8", 1, native.kernel_sets()[0])
    assert load(dtype="int8").weight_bytes < load(dtype="bfloat16").weight_bytes < load(dtype="float32").weight_bytes
    assert load(dtype="int8").cache_token_bytes == load(dtype="bfloat16").cache_token_bytes
    assert load(dtype="bfloat16").cache_token_bytes * 2 == load(dtype="float32").cache_token_bytes
    assert native.supports(tiny_config()) and not native.supports(tiny_config(), "float16")
