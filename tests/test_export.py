"""Heads for other engines: what they read is there, and everything comes back unchanged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from eyas.checkpoints.eagle import save_eagle
from eyas.checkpoints.eagle3 import save_eagle3
from eyas.checkpoints.export import TOKEN_MAP, export_head
from eyas.checkpoints.heads import load_head
from eyas.cli import main
from eyas.errors import CheckpointError, InvalidInputError
from eyas.heads.config import Eagle3Config, EagleConfig, HeadConfig
from support.tiny import tiny_llama

SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 40,
    "rope_theta": 1e6,
}
IDS = np.array([1, 2, 7, 30])
D2T = IDS - np.arange(4)


def arrays(config: HeadConfig) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in config.tensor_shapes().items()}


def saved(folder: Path, config: EagleConfig | Eagle3Config) -> Path:
    d2t = None if config.draft_vocab_size is None else D2T
    if isinstance(config, Eagle3Config):
        save_eagle3(folder, config, arrays(config), dtype="float32", d2t=d2t, metadata={"target": "t"})
    else:
        save_eagle(folder, config, arrays(config), dtype="float32", d2t=d2t, metadata={"target": "t"})
    return folder


def settings(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("change", [{}, {"qkv_bias": True}, {"num_layers": 2}, {"draft_vocab_size": 4}])
def test_an_eagle_head_comes_back(tmp_path: Path, engine: str, change: dict[str, Any]) -> None:
    config = EagleConfig(**SHAPE, **change)
    export_head(saved(tmp_path / "head", config), engine, tmp_path / "out")
    back = load_head(tmp_path / "out")
    for name, array in arrays(config).items():
        np.testing.assert_array_equal(back.tensors[name], array)
    assert replace(back.config, fc_bias=False) == replace(config, draft_vocab_size=None)
    assert back.metadata["target"] == "t"
    assert back.d2t is None
    written = settings(tmp_path / "out")
    assert written["bias"] is False and written["attention_bias"] is False
    assert written["qkv_bias"] == config.qkv_bias


def test_sglang_gets_its_bias_and_its_token_map(tmp_path: Path) -> None:
    head = saved(tmp_path / "head", EagleConfig(**SHAPE, draft_vocab_size=4))
    done = export_head(head, "sglang", tmp_path / "out")
    assert settings(tmp_path / "out")["architectures"] == ["LlamaForCausalLMEagle"]
    bias = load_file(tmp_path / "out" / "model.safetensors")["fc.bias"]
    assert bias.shape == (16,) and not bias.any()
    hot = torch.load(tmp_path / "out" / TOKEN_MAP, weights_only=True)
    assert hot.dtype == torch.int64 and hot.tolist() == IDS.tolist()
    assert str(tmp_path / "out" / TOKEN_MAP) in done.command
    whole = export_head(saved(tmp_path / "whole", EagleConfig(**SHAPE)), "sglang", tmp_path / "two")
    assert "token-map" not in whole.command and not (tmp_path / "two" / TOKEN_MAP).exists()
    kept = EagleConfig(**SHAPE, fc_bias=True)
    export_head(saved(tmp_path / "biased", kept), "sglang", tmp_path / "three")
    np.testing.assert_array_equal(load_head(tmp_path / "three").tensors["fc.bias"], arrays(kept)["fc.bias"])


def test_vllm_gets_no_bias_and_says_what_it_lacks(tmp_path: Path) -> None:
    head = saved(tmp_path / "head", EagleConfig(**SHAPE, draft_vocab_size=4))
    done = export_head(head, "vllm", tmp_path / "out")
    assert settings(tmp_path / "out")["architectures"] == ["EagleLlamaForCausalLM"]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert "fc.bias" not in stored and "d2t" not in stored
    assert any("draft vocabulary" in note for note in done.notes)
    json.loads(done.command.split("'")[1])
    with pytest.raises(CheckpointError, match="bias in fc"):
        export_head(saved(tmp_path / "biased", EagleConfig(**SHAPE, fc_bias=True)), "vllm", tmp_path / "no")


@pytest.mark.parametrize(
    ("engine", "architecture"), [("sglang", "LlamaForCausalLMEagle3"), ("vllm", "Eagle3LlamaForCausalLM")]
)
def test_an_eagle3_head_passes_through(tmp_path: Path, engine: str, architecture: str) -> None:
    config = Eagle3Config(**SHAPE, draft_vocab_size=4)
    export_head(saved(tmp_path / "head", config), engine, tmp_path / "out")
    back = load_head(tmp_path / "out")
    assert back.config == config
    assert back.d2t is not None and back.d2t.tolist() == D2T.tolist()
    for name, array in arrays(config).items():
        np.testing.assert_array_equal(back.tensors[name], array)
    assert settings(tmp_path / "out")["architectures"] == [architecture]
    assert not (tmp_path / "out" / TOKEN_MAP).exists()


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("size", [4, None])
def test_a_head_without_lm_head_gets_the_targets_rows(tmp_path: Path, engine: str, size: int | None) -> None:
    config = Eagle3Config(**SHAPE, draft_vocab_size=size, target_lm_head=True)
    head = saved(tmp_path / "head", config)
    lm_head = np.random.default_rng(1).normal(size=(40, 16)).astype(np.float32)
    export_head(head, engine, tmp_path / "out", lambda: lm_head)
    back = load_head(tmp_path / "out")
    assert back.config == replace(config, target_lm_head=False)
    np.testing.assert_array_equal(back.tensors["lm_head.weight"], lm_head if size is None else lm_head[IDS])
    for name, array in arrays(config).items():
        np.testing.assert_array_equal(back.tensors[name], array)
    with pytest.raises(CheckpointError, match=r"of shape \(40, 16\), but the given target's has \(41, 16\)"):
        export_head(head, engine, tmp_path / "no", lambda: np.zeros((41, 16), np.float32))
    with pytest.raises(CheckpointError, match="needs a copy of"):
        export_head(head, engine, tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_an_eagle3_head_of_several_layers_goes_where_it_is_run(tmp_path: Path) -> None:
    head = saved(tmp_path / "head", Eagle3Config(**SHAPE, num_layers=2))
    with pytest.raises(CheckpointError, match="has 2 layers, and SGLang runs EAGLE-3 heads of one"):
        export_head(head, "sglang", tmp_path / "sglang")
    assert not (tmp_path / "sglang").exists()
    exported = export_head(head, "vllm", tmp_path / "vllm")
    assert exported.notes[-1] == "Older versions of vLLM run EAGLE-3 heads of one layer only."
    assert settings(tmp_path / "vllm")["num_hidden_layers"] == 2
    assert load_head(tmp_path / "vllm").tensors.keys() == load_head(head).tensors.keys()


def test_mistakes(tmp_path: Path) -> None:
    biased = saved(tmp_path / "biased", Eagle3Config(**SHAPE, qkv_bias=True))
    with pytest.raises(CheckpointError, match="biases in q, k and v"):
        export_head(biased, "sglang", tmp_path / "out")
    head = saved(tmp_path / "head", EagleConfig(**SHAPE))
    with pytest.raises(InvalidInputError, match="the head itself"):
        export_head(head, "vllm", tmp_path / "." / "head")
    with pytest.raises(InvalidInputError, match="sglang, vllm"):
        export_head(head, "ollama", tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match="file is a file"):
        export_head(head, "vllm", tmp_path / "file")


@pytest.mark.parametrize("tied", [False, True])
def test_the_command_reads_the_targets_lm_head(tmp_path: Path, capsys: pytest.CaptureFixture[str], tied: bool) -> None:
    model = tiny_llama(vocab_size=40, hidden_size=16, tied=tied)
    model.save_pretrained(tmp_path / "model")
    config = Eagle3Config(**SHAPE, draft_vocab_size=4, target_lm_head=True)
    metadata = {"target": "another", "target_fingerprint": "0"}
    save_eagle3(tmp_path / "head", config, arrays(config), dtype="float32", d2t=D2T, metadata=metadata)
    command = ["export", str(tmp_path / "head"), "--for", "vllm", "--out", str(tmp_path / "out"), "--target"]
    with pytest.raises(SystemExit) as left:
        main([*command, str(tmp_path / "model")])
    assert left.value.code in (0, None)
    assert "was trained for another" in capsys.readouterr().err
    rows = model.lm_head.weight.detach().numpy()[IDS]
    np.testing.assert_array_equal(load_head(tmp_path / "out").tensors["lm_head.weight"], rows)
    tiny_llama(vocab_size=41, hidden_size=16).save_pretrained(tmp_path / "other")
    with pytest.raises(SystemExit) as left:
        main([*command, str(tmp_path / "other")])
    assert left.value.code not in (0, None)
    assert "name the model that it was trained for" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*command, str(tmp_path / "head")])
    assert "has no lm_head; --target is the model" in capsys.readouterr().err


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = saved(tmp_path / "head", EagleConfig(**SHAPE, draft_vocab_size=4))
    with pytest.raises(SystemExit) as left:
        main(["export", str(head), "--for", "sglang", "--out", str(tmp_path / "out")])
    assert left.value.code in (0, None)
    assert "--speculative-token-map" in capsys.readouterr().out
