"""EAGLE-1/2 heads on disk: what is read, what is refused, and that nothing changes on the way."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.checkpoints.eagle import load_eagle, save_eagle
from eyas.checkpoints.head_layout import check_fits
from eyas.errors import CheckpointError
from eyas.heads.config import EagleConfig
from eyas.heads.eagle import EagleHead, head_from_arrays, initialise
from eyas.heads.layers import head_arrays
from eyas.targets.base import TargetInfo

CONFIG = EagleConfig(
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    vocab_size=40,
    rope_theta=1e6,
    rope_scaling={"rope_type": "linear", "factor": 2.0},
    max_position_embeddings=128,
)


def arrays(config: EagleConfig = CONFIG, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in config.tensor_shapes().items()}


def published(
    folder: Path,
    *,
    fc_bias: bool = True,
    file: str = "pytorch_model.bin",
    dtype: torch.dtype = torch.float16,
    settings: dict[str, Any] | None = None,
    change: dict[str, torch.Tensor | None] | None = None,
) -> dict[str, torch.Tensor]:
    """A head as its authors publish it; ``change`` adds, replaces or (None) drops tensors. Returns what was stored."""
    folder.mkdir(exist_ok=True)
    tensors: dict[str, torch.Tensor] = {
        name: torch.from_numpy(array).to(dtype) for name, array in arrays(replace(CONFIG, fc_bias=fc_bias)).items()
    }
    tensors["embed_tokens.weight"] = torch.zeros(40, 16, dtype=dtype)
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
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "num_hidden_layers": 1,
        "vocab_size": 40,
        "rms_norm_eps": 1e-5,
    }
    (folder / "config.json").write_text(json.dumps(config | (settings or {})))
    return tensors


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_published_heads_load_exactly(tmp_path: Path, file: str, dtype: torch.dtype) -> None:
    stored = published(tmp_path, file=file, dtype=dtype)
    head = load_eagle(tmp_path)
    assert head.dtype == str(dtype).removeprefix("torch.")
    assert set(head.tensors) == set(stored) - {"embed_tokens.weight"}
    for name, array in head.tensors.items():
        assert array.dtype == np.float32
        assert np.array_equal(array, stored[name].float().numpy()), name
    assert head.config == EagleConfig(
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        vocab_size=40,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        fc_bias=True,
    )
    assert head.d2t is None


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("says", [True, False, None])
@pytest.mark.parametrize("has", [True, False])
def test_bias_of_fc(tmp_path: Path, file: str, says: bool | None, has: bool) -> None:
    published(tmp_path, fc_bias=has, file=file, settings={} if says is None else {"bias": says})
    if has:
        head = load_eagle(tmp_path)
        assert head.config.fc_bias
        assert np.abs(head.tensors["fc.bias"]).max() > 0
    elif says is False:
        assert not load_eagle(tmp_path).config.fc_bias
    else:
        with pytest.raises(CheckpointError, match=r"no fc\.bias.*\"bias\": false"):
            load_eagle(tmp_path)


def test_biases_of_queries_keys_and_values(tmp_path: Path) -> None:
    def attention(*names: str) -> dict[str, torch.Tensor | None]:
        sizes = {"q_proj": 24, "k_proj": 12, "v_proj": 12, "o_proj": 16}
        return {f"layers.0.self_attn.{name}.bias": torch.ones(sizes[name]) for name in names}

    published(tmp_path / "said", settings={"qkv_bias": True}, change=attention("q_proj", "k_proj", "v_proj"))
    published(tmp_path / "unsaid", change=attention("q_proj", "k_proj", "v_proj"))
    for name in ("said", "unsaid"):
        assert load_eagle(tmp_path / name).config.qkv_bias
    published(tmp_path / "missing", settings={"qkv_bias": True})
    with pytest.raises(CheckpointError, match=r"missing: .*k_proj\.bias"):
        load_eagle(tmp_path / "missing")
    published(tmp_path / "partly", change=attention("q_proj"))
    with pytest.raises(CheckpointError, match=r"missing: .*k_proj\.bias"):
        load_eagle(tmp_path / "partly")
    published(tmp_path / "output", change=attention("o_proj"))
    with pytest.raises(CheckpointError, match=r"o_proj\.bias"):
        load_eagle(tmp_path / "output")


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers.0.mlp.up_proj.weight": None}, r"missing: layers\.0\.mlp\.up_proj\.weight"),
        ({"fc.weight": None, "model.fc.weight": torch.zeros(16, 32)}, r"missing: fc\.weight; unknown: model\.fc\.wei"),
        ({"norm.weight": torch.ones(16)}, r"unknown: norm\.weight"),
        ({"layers.1.mlp.up_proj.weight": torch.ones(24, 16)}, r"unknown: layers\.1"),
        ({"fc.weight": torch.zeros(16, 48)}, r"fc\.weight has shape \(16, 48\), the config asks for \(16, 32\)"),
        ({"fc.weight": torch.zeros(16, 32, dtype=torch.int32)}, r"floating point.*I32"),
        ({"fc.weight": torch.full((16, 32), torch.nan)}, r"fc\.weight has values that are not finite"),
        ({"embed_tokens.weight": torch.zeros(41, 16)}, r"embed_tokens\.weight has shape \(41, 16\)"),
        ({"midlayer.mlp.up_proj.weight": torch.zeros(24, 16)}, r"EAGLE-3 head"),
        ({"d2t": torch.zeros(10, dtype=torch.int64)}, r"unknown: d2t"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, file: str, change: dict[str, Any], words: str) -> None:
    published(tmp_path, file=file, change=change)
    with pytest.raises(CheckpointError, match=words):
        load_eagle(tmp_path)


def test_tolerated_surplus_and_absent_embedding(tmp_path: Path) -> None:
    inv_freq = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    published(tmp_path, change=inv_freq | {"embed_tokens.weight": None})
    assert set(load_eagle(tmp_path).tensors) == set(replace(CONFIG, fc_bias=True).tensor_shapes())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hidden_size": None}, "does not say hidden_size"),
        ({"num_key_value_heads": 3}, "multiple of"),
        ({"rope_scaling": 3}, r"config\.json"),
        ({"hidden_size": 20}, r"fc\.weight has shape|embed_tokens"),
        ({"num_hidden_layers": 2}, r"missing: layers\.1"),
        ({"draft_vocab_size": 10}, "missing: d2t"),
    ],
)
def test_wrong_configs_are_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    published(tmp_path, settings=settings)
    with pytest.raises(CheckpointError, match=words):
        load_eagle(tmp_path)


def test_rope_in_the_newer_spelling(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    published(tmp_path, settings={"rope_parameters": {"rope_theta": 5e5} | rope})
    config = load_eagle(tmp_path).config
    assert config.rope_theta == 5e5
    assert config.rope_scaling == rope


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        load_eagle(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_eagle(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON at line 1"):
        load_eagle(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="JSON object"):
        load_eagle(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds no weights"):
        load_eagle(tmp_path)
    for file in ("pytorch_model.bin", "model.safetensors"):
        folder = tmp_path / file
        published(folder, file=file)
        whole = (folder / file).read_bytes()
        for damaged in (whole[: len(whole) // 2], whole[:5], b"", b"\x00" * 200):
            (folder / file).write_bytes(damaged)
            with pytest.raises(CheckpointError, match=re.escape(str(folder / file))):
                load_eagle(folder)


class Surprise:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("true",)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    published(tmp_path)
    torch.save({"fc.weight": Surprise()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_eagle(tmp_path)
    torch.save([torch.zeros(2)], tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="state dict"):
        load_eagle(tmp_path)


@pytest.mark.parametrize("changes", [{}, {"fc_bias": True, "qkv_bias": True, "num_layers": 2, "rope_scaling": None}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_save_and_load(tmp_path: Path, changes: dict[str, Any], dtype: Any) -> None:
    config = replace(CONFIG, **changes)
    tensors = arrays(config)
    save_eagle(tmp_path / "a" / "b", config, tensors, dtype=dtype, metadata={"steps": "100"})
    head = load_eagle(tmp_path / "a" / "b")
    assert head.config == config
    assert head.dtype == dtype
    assert head.metadata["steps"] == "100"
    for name, array in tensors.items():
        kept = torch.from_numpy(array).to(getattr(torch, dtype)).float().numpy()  # the other rounding to nearest even
        assert np.array_equal(head.tensors[name], kept), name
    # Others read it too, and a second save of what was read is the same file.
    theirs = load_file(tmp_path / "a" / "b" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in theirs.items()} == config.tensor_shapes()
    assert all(np.array_equal(theirs[name].float().numpy(), head.tensors[name]) for name in theirs)
    save_eagle(tmp_path / "c", head.config, head.tensors, dtype=dtype, metadata=head.metadata)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "c" / file).read_bytes() == (tmp_path / "a" / "b" / file).read_bytes()
    assert sorted(os.listdir(tmp_path / "c")) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trained_head_survives_bit_by_bit(tmp_path: Path, dtype: Any) -> None:
    head = EagleHead(CONFIG)
    initialise(head, torch.Generator().manual_seed(0))
    head = head.to(getattr(torch, dtype))
    generator = torch.Generator().manual_seed(1)
    embeds, features, wanted = (torch.randn(2, 6, 16, generator=generator).to(head.fc.weight) for _ in range(3))
    positions = torch.arange(6)[None]
    optimiser = torch.optim.SGD(head.parameters(), lr=0.1)
    for _ in range(3):
        optimiser.zero_grad()
        (head(embeds, features, positions) - wanted).square().mean().backward()
        optimiser.step()
    save_eagle(tmp_path, head.config, head_arrays(head), dtype=dtype)
    read = load_eagle(tmp_path)
    twin = head_from_arrays(read.config, read.tensors, dtype=getattr(torch, dtype))
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, twin.state_dict()[name]), name
    assert torch.equal(twin(embeds, features, positions), head(embeds, features, positions))


def test_draft_vocabulary(tmp_path: Path) -> None:
    config = replace(CONFIG, draft_vocab_size=3)
    d2t = np.array([4, 6, 37])
    save_eagle(tmp_path, config, arrays(config), d2t=d2t)
    head = load_eagle(tmp_path)
    assert head.config.draft_vocab_size == 3
    assert head.d2t is not None
    assert head.d2t.dtype == np.int64
    assert head.d2t.tolist() == [4, 6, 37]
    with pytest.raises(CheckpointError, match="missing: d2t"):
        save_eagle(tmp_path, config, arrays(config))
    with pytest.raises(CheckpointError, match="unknown: d2t"):
        save_eagle(tmp_path, CONFIG, arrays(), d2t=d2t)
    for bad in ([4, 6, 38], [-1, 0, 0], [1, 0, 0]):
        with pytest.raises(CheckpointError, match="another target token below 40"):
            save_eagle(tmp_path, config, arrays(config), d2t=np.array(bad))
    assert load_eagle(tmp_path).d2t is not None, "a refused save leaves the old head alone"


def test_heads_that_do_not_fit_their_config_are_not_saved(tmp_path: Path) -> None:
    tensors = arrays()
    with pytest.raises(CheckpointError, match=r"unknown: extra"):
        save_eagle(tmp_path, CONFIG, tensors | {"extra": np.zeros(1, np.float32)})
    with pytest.raises(CheckpointError, match=r"fc\.weight.*not finite"):
        save_eagle(tmp_path, CONFIG, tensors | {"fc.weight": np.full((16, 32), np.inf, np.float32)})
    assert not list(tmp_path.iterdir())


def test_a_crash_while_saving_leaves_the_old_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_eagle(tmp_path, CONFIG, arrays(seed=1), dtype="float32")

    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        save_eagle(tmp_path, CONFIG, arrays(seed=2), dtype="float32")
    assert np.array_equal(load_eagle(tmp_path).tensors["fc.weight"], arrays(seed=1)["fc.weight"])
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


def test_reading_safetensors_needs_no_torch(tmp_path: Path) -> None:
    save_eagle(tmp_path, CONFIG, arrays())
    code = (
        "import sys; from eyas.checkpoints.eagle import load_eagle; head = load_eagle(sys.argv[1]);"
        "print(head.tensors['fc.weight'].shape, 'torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert ran.stdout.split("\n")[0] == "(16, 32) False"


def test_a_head_for_another_target_is_refused(tmp_path: Path) -> None:
    save_eagle(tmp_path, CONFIG, arrays())
    head = load_eagle(tmp_path)
    target = TargetInfo("some/target", 40, 16, 2, 64, (0,), "transformers", "float32")
    check_fits(head, target)
    for changes, numbers in (({"hidden_size": 32}, "hidden size 16.*32"), ({"vocab_size": 41}, "vocabulary 40.*41")):
        with pytest.raises(CheckpointError, match=numbers) as caught:
            check_fits(head, replace(target, **changes))
        assert str(tmp_path) in str(caught.value)
        assert "some/target" in str(caught.value)
