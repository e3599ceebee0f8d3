"""EAGLE-3 heads on disk: the published layout, what is refused, and that nothing changes on the way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.checkpoints.eagle import EagleCheckpoint, load_eagle, save_eagle
from eyas.checkpoints.eagle3 import Eagle3Checkpoint, load_eagle3, save_eagle3
from eyas.checkpoints.heads import head_feature_levels, load_head
from eyas.errors import CheckpointError
from eyas.heads.config import Eagle3Config, EagleConfig
from eyas.heads.eagle3 import Eagle3Head, head_from_arrays, initialise
from eyas.heads.layers import head_arrays

CONFIG = Eagle3Config(
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    vocab_size=40,
    draft_vocab_size=5,
)
D2T = np.array([0, 2, 2, 9, 35])  # 0, 3, 4, 12, 39
FILES = ["pytorch_model.bin", "model.safetensors"]


def arrays(config: Eagle3Config = CONFIG, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in config.tensor_shapes().items()}


def published(
    folder: Path,
    file: str = "model.safetensors",
    settings: dict[str, Any] | None = None,
    change: dict[str, torch.Tensor | None] | None = None,
) -> dict[str, torch.Tensor]:
    """A head as its authors publish it; ``change`` adds, replaces or (None) drops tensors. Returns what was stored."""
    folder.mkdir(exist_ok=True)
    tensors = {name: torch.from_numpy(array).half() for name, array in arrays().items()}
    t2d = torch.zeros(40, dtype=torch.bool)
    t2d[[0, 3, 4, 12, 39]] = True
    tensors |= {"d2t": torch.from_numpy(D2T), "t2d": t2d}
    for name, tensor in (change or {}).items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    if file.endswith(".bin"):
        torch.save(tensors, folder / file)
    else:
        save_file(tensors, folder / file)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "num_hidden_layers": 1,
        "vocab_size": 40,
        "draft_vocab_size": 5,
    }
    (folder / "config.json").write_text(json.dumps(config | (settings or {})))
    return tensors


@pytest.mark.parametrize("file", FILES)
def test_published_heads_load_exactly(tmp_path: Path, file: str) -> None:
    stored = published(tmp_path, file)
    head = load_eagle3(tmp_path)
    assert head.config == CONFIG
    assert head.dtype == "float16"
    assert set(head.tensors) == set(stored) - {"d2t", "t2d"}
    for name, array in head.tensors.items():
        assert np.array_equal(array, stored[name].float().numpy()), name
    assert head.d2t is not None
    assert head.d2t.tolist() == D2T.tolist()
    assert head.token_ids is not None
    assert head.token_ids.tolist() == [0, 3, 4, 12, 39]


@pytest.mark.parametrize("file", FILES)
def test_the_kind_of_a_head_is_seen(tmp_path: Path, file: str) -> None:
    published(tmp_path / "3", file)
    assert head_feature_levels(tmp_path / "3") == 3
    assert isinstance(load_head(tmp_path / "3"), Eagle3Checkpoint)
    config = EagleConfig(16, 24, 4, 2, 6, 40)
    rng = np.random.default_rng(0)
    save_eagle(tmp_path / "1", config, {n: rng.normal(size=s).astype("f4") for n, s in config.tensor_shapes().items()})
    assert head_feature_levels(tmp_path / "1") == 1
    assert isinstance(load_head(tmp_path / "1"), EagleCheckpoint)
    with pytest.raises(CheckpointError, match="holds an EAGLE-3 head"):
        load_eagle(tmp_path / "3")
    with pytest.raises(CheckpointError, match=r"as an EAGLE-3 head; missing: .*midlayer"):
        load_eagle3(tmp_path / "1")
    with pytest.raises(CheckpointError, match="is not a directory"):
        head_feature_levels(tmp_path / "nowhere")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"midlayer.hidden_norm.weight": None}, r"missing: midlayer\.hidden_norm\.weight"),
        ({"norm.weight": None, "model.norm.weight": torch.ones(16)}, r"missing: norm\.weight; unknown: model\.norm"),
        ({"fc.bias": torch.ones(16)}, r"unknown: fc\.bias"),
        ({"fc.weight": torch.zeros(16, 32)}, r"fc\.weight has shape \(16, 32\), the config asks for \(16, 48\)"),
        ({"lm_head.weight": torch.zeros(6, 16)}, r"lm_head\.weight has shape \(6, 16\)"),
        ({"norm.weight": torch.full((16,), torch.nan)}, r"norm\.weight has values that are not finite"),
        ({"d2t": None}, "missing: d2t"),
        ({"t2d": None}, "missing: t2d"),
        ({"d2t": torch.tensor([0, 2, 2, 9, 36])}, "another target token below 40"),
        ({"d2t": torch.tensor([0, 2, 2, 9, 34])}, "name different draft vocabularies"),
        ({"d2t": torch.zeros(5)}, "d2t must hold whole numbers"),
        ({"t2d": torch.zeros(40, dtype=torch.int64)}, "t2d must hold true and false"),
        ({"embed_tokens.weight": torch.zeros(41, 16)}, r"embed_tokens\.weight has shape \(41, 16\)"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, file: str, change: dict[str, Any], words: str) -> None:
    published(tmp_path, file, change=change)
    with pytest.raises(CheckpointError, match=words):
        load_eagle3(tmp_path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_hidden_layers": 2}, r"missing: layers\.1\.input_layernorm\.weight"),
        ({"target_hidden_size": 32}, r"hidden_size 16 for a target with 32"),
        ({"draft_vocab_size": 41}, "draft_vocab_size must lie"),
    ],
)
def test_wrong_configs_are_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    published(tmp_path, settings=settings)
    with pytest.raises(CheckpointError, match=words):
        load_eagle3(tmp_path)


def test_what_is_tolerated(tmp_path: Path) -> None:
    published(tmp_path, settings={"target_hidden_size": 16}, change={"embed_tokens.weight": torch.zeros(40, 16)})
    assert set(load_eagle3(tmp_path).tensors) == set(CONFIG.tensor_shapes())


@pytest.mark.parametrize("file", FILES)
def test_a_head_may_leave_the_lm_head_to_its_target(tmp_path: Path, file: str) -> None:
    gone: dict[str, torch.Tensor | None] = {"lm_head.weight": None}
    for name, settings in (("said", {"target_lm_head": True}), ("seen", {})):
        published(tmp_path / name, file, settings=settings, change=gone)
        head = load_eagle3(tmp_path / name)
        assert head.config == replace(CONFIG, target_lm_head=True)
        assert "lm_head.weight" not in head.tensors
        assert head.d2t is not None and head.d2t.tolist() == D2T.tolist()
        assert head_feature_levels(tmp_path / name) == 3


@pytest.mark.parametrize(
    ("settings", "change", "words"),
    [
        ({"target_lm_head": True}, {}, r"unknown: lm_head\.weight"),
        ({"target_lm_head": False}, {"lm_head.weight": None}, r"missing: lm_head\.weight"),
        ({"target_lm_head": "yes"}, {}, "target_lm_head is true or false, got 'yes'"),
        ({}, {"lm_head.weight": None, "norm.weight": None}, r"missing: norm\.weight"),
    ],
)
def test_config_and_files_must_agree_about_the_lm_head(
    tmp_path: Path, settings: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    published(tmp_path, settings=settings, change=change)
    with pytest.raises(CheckpointError, match=words):
        load_eagle3(tmp_path)


def test_a_whole_vocabulary_needs_no_maps(tmp_path: Path) -> None:
    whole = {"lm_head.weight": torch.ones(40, 16).half()}
    maps = {"d2t": torch.zeros(40, dtype=torch.int64), "t2d": torch.ones(40, dtype=torch.bool)}
    published(tmp_path / "with", settings={"draft_vocab_size": 40}, change=whole | maps)
    published(tmp_path / "without", settings={"draft_vocab_size": 40}, change={**whole, "d2t": None, "t2d": None})
    for name in ("with", "without"):
        head = load_eagle3(tmp_path / name)
        assert head.config.draft_vocab_size is None
        assert head.d2t is head.token_ids is None
    published(tmp_path / "wrong", settings={"draft_vocab_size": 40}, change=whole)
    with pytest.raises(CheckpointError, match="unknown: d2t, t2d"):
        load_eagle3(tmp_path / "wrong")


@pytest.mark.parametrize(
    "changes", [{}, {"qkv_bias": True, "rope_theta": 5e5, "draft_vocab_size": None}, {"target_lm_head": True}]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_save_and_load(tmp_path: Path, changes: dict[str, Any], dtype: Any) -> None:
    config = replace(CONFIG, **changes)
    d2t = None if config.draft_vocab_size is None else D2T
    save_eagle3(tmp_path / "a", config, arrays(config), dtype=dtype, d2t=d2t, metadata={"steps": "100"})
    head = load_eagle3(tmp_path / "a")
    assert (head.config, head.dtype, head.metadata["steps"]) == (config, dtype, "100")
    for name, array in arrays(config).items():
        kept = torch.from_numpy(array).to(getattr(torch, dtype)).float().numpy()
        assert np.array_equal(head.tensors[name], kept), name
    settings = json.loads((tmp_path / "a" / "config.json").read_text())
    assert settings["architectures"] == ["LlamaForCausalLMEagle3"]
    assert settings["draft_vocab_size"] == config.scored_tokens
    assert settings["target_lm_head"] == config.target_lm_head
    theirs = load_file(tmp_path / "a" / "model.safetensors")
    if d2t is not None:
        assert theirs["d2t"].dtype == torch.int64
        assert theirs["t2d"].dtype == torch.bool
        assert theirs["t2d"].nonzero()[:, 0].tolist() == [0, 3, 4, 12, 39]
    save_eagle3(tmp_path / "b", head.config, head.tensors, dtype=dtype, d2t=head.d2t, metadata=head.metadata)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "b" / file).read_bytes() == (tmp_path / "a" / file).read_bytes()


def test_heads_that_do_not_fit_their_config_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing: d2t"):
        save_eagle3(tmp_path, CONFIG, arrays())
    with pytest.raises(CheckpointError, match="another target token below 40"):
        save_eagle3(tmp_path, CONFIG, arrays(), d2t=np.array([1, 0, 0, 0, 0]))
    with pytest.raises(CheckpointError, match="unknown: extra"):
        save_eagle3(tmp_path, CONFIG, arrays() | {"extra": np.zeros(1, np.float32)}, d2t=D2T)
    assert not list(tmp_path.iterdir())


def test_a_trained_head_survives_bit_by_bit(tmp_path: Path) -> None:
    head = Eagle3Head(CONFIG)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 16, generator=generator)
    initialise(head, rows, torch.ones(16), generator)
    embeds, features = torch.randn(2, 6, 16, generator=generator), torch.randn(2, 6, 48, generator=generator)
    positions = torch.arange(6)[None]
    optimiser = torch.optim.SGD(head.parameters(), lr=0.1)
    for _ in range(3):
        optimiser.zero_grad()
        head.logits(head(embeds, head.fuse(features), positions), rows).square().mean().backward()
        optimiser.step()
    save_eagle3(tmp_path, CONFIG, head_arrays(head), dtype="float32", d2t=D2T)
    read = load_eagle3(tmp_path)
    twin = head_from_arrays(read.config, read.tensors)
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, twin.state_dict()[name]), name
