"""Memory: what there is, what a model needs, refusal before loading, and what stays after it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant
from safetensors.numpy import save_file

from eyas import native
from eyas.checkpoints import hf
from eyas.errors import NotEnoughMemoryError
from eyas.memory import available_bytes, require_memory, resident_bytes
from eyas.models import load_source
from support import gguf_files
from support.decoder import tiny_config, tiny_weights

needs_native = pytest.mark.skipif(not native.available(), reason=native.reason())


def system(tmp_path: Path, available: int | None, groups: str = "", address_space: str = "unlimited") -> Path:
    """A /proc as the kernel would show it, sizes in kB; beside it an empty cgroup directory."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "groups").mkdir()
    if available is not None:
        (tmp_path / "proc/meminfo").write_text(f"MemTotal: 64000 kB\nMemAvailable:   {available} kB\n")
    (tmp_path / "proc/self/cgroup").write_text(groups)
    (tmp_path / "proc/self/status").write_text("Name: python\nVmSize:     500 kB\nVmRSS:    100 kB\n")
    (tmp_path / "proc/self/limits").write_text(f"Max address space         {address_space}      unlimited      bytes\n")
    return tmp_path


def seen(root: Path) -> int | None:
    return available_bytes(root / "proc", root / "groups")


def limit(group: Path, most: str, used: int, cached: int = 0, old: bool = False) -> None:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if old else ("memory.max", "memory.current")
    group.mkdir(parents=True, exist_ok=True)
    (group / names[0]).write_text(f"{most}\n")
    (group / names[1]).write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 7\n{'total_' if old else ''}inactive_file {cached}\n")


def test_available_memory_is_the_least_of_all_limits(tmp_path: Path) -> None:
    assert seen(system(tmp_path / "plain", 2000)) == 2000 * 1024
    assert seen(system(tmp_path / "nothing known", None)) is None
    assert seen(system(tmp_path / "ulimit", 2000, address_space=str(700 * 1024))) == 200 * 1024

    root = system(tmp_path / "v2", 2000, "0::/outer/inner\n")
    limit(root / "groups/outer/inner", "max", 100)
    assert seen(root) == 2000 * 1024
    limit(root / "groups/outer", "900000", 300000, cached=50000)
    assert seen(root) == 650000
    limit(root / "groups", "400000", 500000)
    assert seen(root) == 0

    root = system(tmp_path / "v1", 2000, "4:cpu:/x\n3:memory:/docker/a\n")
    limit(root / "groups/memory/docker/a", "1000000", 200000, cached=1000, old=True)
    assert seen(root) == 801000


def test_this_machine_tells() -> None:
    if not Path("/proc/meminfo").exists():
        pytest.skip("no /proc here")
    available, resident = available_bytes(), resident_bytes()
    assert available is not None and available > 0
    assert resident is not None and resident > 1 << 20


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    parts = {"weights": 3 << 30, "cache": 1 << 29}
    require_memory("m", parts, None)
    require_memory("m", parts, 7 << 29)
    with pytest.raises(
        NotEnoughMemoryError, match=r"m: .* 3\.50 GiB .*weights 3\.00 GiB, cache 512\.0 MiB.*3\.00 GiB are.*; try x"
    ):
        require_memory("m", parts, 3 << 30, "try x")


CONFIGS = {
    "llama": tiny_config(tie_word_embeddings=False),
    "qwen2": tiny_config("qwen2"),
    "odd": tiny_config(hidden_size=45, intermediate_size=37, head_dim=10, num_attention_heads=7, num_key_value_heads=1),
}


def directory(path: Path, config: dict[str, Any], weights: dict[str, np.ndarray]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors")
    return path


@needs_native
@pytest.mark.parametrize("kernels", native.kernel_sets())
@pytest.mark.parametrize("name", CONFIGS)
def test_the_estimate_of_packed_weights_is_exact(tmp_path: Path, name: str, kernels: str) -> None:
    from eyas.native.config import WEIGHT_TYPES, core_config
    from eyas.native.memory import CONTEXT, memory_needed
    from eyas.targets.native import NativeTarget

    config = CONFIGS[name]
    weights = tiny_weights(config)
    vectors = sum(array.nbytes for array in weights.values() if array.ndim == 1)
    files = [directory(tmp_path / "hf", config, weights)]
    if name != "odd":
        tiny = gguf_files.tiny_config(config["model_type"])
        for quant in (Quant.Q4_1, Quant.Q5_0):
            path = tmp_path / f"{quant.name}.gguf"
            files.append(gguf_files.write_gguf(path, tiny, gguf_files.random_tensors(tiny), quant))
    for file in files:
        source = load_source(file)
        for kind in WEIGHT_TYPES:
            needed = memory_needed(core_config(source.config), source.tensors, kind, kernels)
            target = NativeTarget.load(source, dtype=kind, threads=1, kernels=kernels)
            if file.suffix == ".gguf":
                shapes = map(source.tensors.shape, source.tensors)
                vectors = sum(4 * shape[0] for shape in shapes if len(shape) == 1)
            assert needed["weights"] == target.weight_bytes + vectors, (file.name, kind)
            tokens = min(CONTEXT, target.info.max_positions)
            assert needed["cache"] == tokens * target.cache_token_bytes
            assert (needed["loading"] > 0) == (file.stem == "Q5_0")


@pytest.mark.parametrize("engine", ["transformers", pytest.param("native", marks=needs_native)])
def test_too_large_a_model_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    config = tiny_config(tie_word_embeddings=False, vocab_size=4096, max_position_embeddings=1)
    source = load_source(directory(tmp_path / "hf", config, tiny_weights(config)))

    def read(*_: Any) -> Any:
        raise AssertionError("weights were read")

    monkeypatch.setattr(hf.SafetensorsFile, "raw", read)
    if engine == "native":
        from eyas.targets.native import NativeTarget as Target

        monkeypatch.setattr("eyas.native.memory.available_bytes", lambda: 2_600_000)
        with pytest.raises(NotEnoughMemoryError, match=r"as float32: .*would fit: bfloat16 \(.*int8 \("):
            Target.load(source, dtype="float32")
        monkeypatch.setattr("eyas.native.memory.available_bytes", lambda: 1000)
        with pytest.raises(NotEnoughMemoryError, match="no weight type would fit"):
            Target.load(source)
    else:
        from eyas.targets.hf import load_hf

        monkeypatch.setattr("eyas.targets.hf.available_bytes", lambda: 1000)
        with pytest.raises(NotEnoughMemoryError, match="as float32: needs about"):
            load_hf(source)


AFTER_LOADING = """
import sys, gguf.quants
from eyas.memory import resident_bytes
from eyas.models import load_source
from eyas.targets.native import NativeTarget
source = load_source(sys.argv[1])
tensors = source.tensors
before = resident_bytes()
target = NativeTarget.load(source, dtype=sys.argv[2], threads=2)
print(resident_bytes() - before, target.weight_bytes)
name = "model.layers.0.mlp.up_proj.weight"
assert (tensors[name] == load_source(sys.argv[1]).tensors[name]).all()
"""


@needs_native
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell")
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("layout", ["safetensors", "torch", "gguf"])
def test_only_the_packed_weights_stay_in_memory(tmp_path: Path, layout: str, dtype: str) -> None:
    config = gguf_files.tiny_config("llama", hidden_size=512, intermediate_size=1536, num_hidden_layers=8, head_dim=128)
    weights = gguf_files.random_tensors(config)
    if layout == "gguf":
        path = gguf_files.write_gguf(tmp_path / "m.gguf", config, weights, Quant.F32)
    else:
        path = directory(tmp_path / "hf", config, weights)
        if layout == "torch":
            torch = pytest.importorskip("torch")
            state = {name: torch.from_numpy(array) for name, array in weights.items()}
            torch.save(state, path / "pytorch_model.bin")
            (path / "model.safetensors").unlink()
    command = [sys.executable, "-c", AFTER_LOADING, str(path), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    grown, packed = map(int, done.stdout.split())
    assert packed > 20e6
    assert grown <= 1.2 * packed + 4e6  # the arena's last page, and what an interpreter takes along the way
