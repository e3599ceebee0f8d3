"""Reading a local Hugging Face directory: config, tokenizer, chat template, safetensors by mmap, ``.bin`` by torch."""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from eyas.checkpoints.weights import BLOCK_SIZES, MAX_COUNT, RawTensor, Weights, release_pages
from eyas.errors import CheckpointError, UnsupportedModelError

_MAX_HEADER = 100_000_000  # the limit that the safetensors format itself sets


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``. CheckpointError, naming file and line, if it is anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such file") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}: not valid JSON at line {error.lineno}: {error.msg}") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, or an integer of endless digits
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, not a JSON object")
    return value


_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    # What transformers assumes where config.json is silent.
    "llama": {"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "qwen2": {"max_position_embeddings": 32768, "attention_bias": True, "mlp_bias": False},
    "qwen3": {"max_position_embeddings": 32768, "attention_bias": False, "mlp_bias": False, "head_dim": 128},
}


def read_config(directory: Path) -> dict[str, Any]:
    """config.json, normalised.

    Both spellings of the RoPE settings (``rope_theta``/``rope_scaling``, and transformers 5's ``rope_parameters``)
    become the first, with ``rope_scaling`` None where nothing is scaled; ``head_dim`` and ``num_key_value_heads`` are
    always there; for llama, mistral, qwen2 and qwen3 so is everything an engine needs.

    Raises:
        CheckpointError: no JSON object, or for those families an impossible number.
    """
    config = read_json(directory / "config.json")
    rope = config.pop("rope_parameters", None)
    if isinstance(rope, dict) and "full_attention" not in rope:
        config.setdefault("rope_theta", rope.get("rope_theta"))
        config.setdefault("rope_scaling", {key: value for key, value in rope.items() if key != "rope_theta"})
    elif rope is not None:
        config["rope_parameters"] = rope  # one set per layer type: left to engines that know such models
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict):
        if "type" in scaling and "rope_type" not in scaling:
            scaling["rope_type"] = scaling["type"]
        scaling.pop("type", None)
        if scaling.get("rope_type", "default") == "default":
            config["rope_scaling"] = None
    if (family := config.get("model_type")) in _FAMILY_DEFAULTS:
        common = {"rope_theta": 10000.0, "rope_scaling": None, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
        config = common | _FAMILY_DEFAULTS[family] | config
        if family.startswith("qwen") and not config.get("use_sliding_window"):
            config["sliding_window"] = None
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        if config.get("num_key_value_heads") is None:
            config["num_key_value_heads"] = heads
        if config.get("head_dim") is None:
            config["head_dim"] = hidden // heads
    if family in _FAMILY_DEFAULTS:
        _check_numbers(config, directory / "config.json")
    return config


_COUNTS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings",
)  # fmt: skip


def _check_numbers(config: dict[str, Any], path: Path) -> None:
    for key in config.keys() & set(_COUNTS):
        if type(value := config[key]) is not int or not 0 < value <= MAX_COUNT:
            raise CheckpointError(f"{path}: {key} should be a positive integer, found {value!r:.60}")
    for key in ("rope_theta", "rms_norm_eps"):
        value = config[key]
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise CheckpointError(f"{path}: {key} should be a positive number, found {value!r:.60}")
    if not isinstance(config["rope_scaling"], dict | None):
        raise CheckpointError(f"{path}: rope_scaling should be an object, found {config['rope_scaling']!r:.60}")


def read_generation_config(directory: Path) -> dict[str, Any]:
    """generation_config.json, or {} if there is none."""
    path = directory / "generation_config.json"
    return read_json(path) if path.exists() else {}


def read_tokenizer(directory: Path) -> Tokenizer:
    """tokenizer.json. CheckpointError if it is missing or damaged."""
    path = directory / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(
            f"{path}: there is no such file; save the model's fast tokenizer there "
            "(transformers: AutoTokenizer.from_pretrained(...).save_pretrained(directory))"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises bare Exception
        raise CheckpointError(f"{path}: not a readable tokenizer: {error}") from None


def read_chat_template(directory: Path) -> tuple[str | None, dict[str, str]]:
    """The chat template, and the special tokens it may name: ``({"bos_token": "<s>", ...})``.

    ``chat_template.jinja`` goes before ``chat_template.json`` and the entry in tokenizer_config.json; of several named
    templates, the one called "default" counts.
    """
    path = directory / "tokenizer_config.json"
    config = read_json(path) if path.exists() else {}
    special = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = config.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            special[key] = token
    template = config.get("chat_template")
    if (directory / "chat_template.json").exists():
        template = read_json(directory / "chat_template.json").get("chat_template", template)
    if (directory / "chat_template.jinja").exists():
        template = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template, special


class SafetensorsFile(Weights):
    """One memory-mapped .safetensors file.

    Raises CheckpointError, naming the file and the tensor or byte offset, for anything damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path}: cannot be opened as safetensors: {error}") from None
        size = len(self._map)
        length = struct.unpack_from("<Q", self._map)[0] if size >= 8 else _MAX_HEADER + 1
        if length > min(_MAX_HEADER, size - 8):
            raise CheckpointError(
                f"{self.path}: header at byte 8 does not fit into the file ({size} bytes): truncated?"
            )
        try:
            header = json.loads(self._map[8 : 8 + length])
            metadata = header.pop("__metadata__", {})
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: header at byte 8 is not a JSON object: {error}") from None
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise CheckpointError(f"{self.path}: __metadata__ in the header at byte 8 is not an object of strings")
        self.metadata: dict[str, str] = metadata
        self._entries = {name: self._check(name, entry, 8 + length, size) for name, entry in header.items()}

    def _check(self, name: str, entry: Any, base: int, size: int) -> tuple[str, tuple[int, ...], int, int]:
        """(type, shape, offset in the file, bytes) of one header entry, checked against the file."""
        try:
            kind, shape = str(entry["dtype"]), tuple(int(extent) for extent in entry["shape"])
            start, stop = (int(offset) for offset in entry["data_offsets"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise CheckpointError(f"{self.path}: tensor {name!r} has a damaged header entry: {entry!r:.80}") from None
        if kind not in BLOCK_SIZES:
            raise UnsupportedModelError(f"{self.path}: tensor {name!r} has type {kind}, which Eyas cannot read")
        count = 1
        for extent in shape:
            count *= extent
        if min((*shape, start), default=start) < 0 or stop - start != count * BLOCK_SIZES[kind][1]:
            raise CheckpointError(f"{self.path}: tensor {name!r} of shape {shape} claims bytes {start} to {stop}")
        if base + stop > size:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} ends at byte {base + stop}, the file at byte {size}: truncated"
            )
        return kind, shape, base + start, stop - start

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name][1]

    def type(self, name: str) -> str:
        return self._entries[name][0]

    def raw(self, name: str) -> RawTensor:
        kind, shape, offset, nbytes = self._entries[name]
        rows = int(np.prod(shape[:-1], dtype=np.int64))
        data = np.frombuffer(self._map, np.uint8, nbytes, offset)
        return RawTensor(kind, shape, data.reshape(rows, -1) if nbytes else data.reshape(rows, 0))

    def release(self) -> None:
        release_pages(self._map)


class TorchFile(Weights):
    """One pytorch_model.bin, read by torch with ``weights_only=True``: no code in the file is run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._tensors = _torch_tensors(self.path)
        self._extents = {name: (tensor.type, tensor.shape) for name, tensor in self._tensors.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._extents)

    def __len__(self) -> int:
        return len(self._extents)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._extents[name][1]

    def type(self, name: str) -> str:
        return self._extents[name][0]

    def raw(self, name: str) -> RawTensor:
        if not self._tensors:
            self._tensors = _torch_tensors(self.path)
        return self._tensors[name]

    def release(self) -> None:
        self._tensors = {}


def _torch_tensors(path: Path) -> dict[str, RawTensor]:
    try:
        import torch
    except ImportError:
        raise CheckpointError(
            f"{path}: reading a .bin file needs PyTorch (pip install 'eyas[torch]'); .safetensors does not"
        ) from None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle and torch errors share no base
        raise CheckpointError(f"{path}: cannot be read as a weights-only torch file: {error}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, not a state dict: names and tensors")
    names = {
        torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
        torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
        torch.bool: "BOOL",
    }  # fmt: skip
    tensors: dict[str, RawTensor] = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or value.dtype not in names:
            raise CheckpointError(f"{path}: key {key!r} is not a tensor of a known type: {type(value).__name__}")
        shape = tuple(value.shape)
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        rows = int(np.prod(shape[:-1], dtype=np.int64))
        tensors[str(key)] = RawTensor(
            names[value.dtype], shape, data.reshape(rows, -1) if data.size else data.reshape(rows, 0)
        )
    return tensors


class ShardedWeights(Weights):
    """Several files seen as one; a file is opened when its first tensor is asked for."""

    def __init__(self, directory: Path, index_name: str) -> None:
        self.path = directory / index_name
        shards = read_json(self.path).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise CheckpointError(f"{self.path}: key 'weight_map' is missing or empty")
        if missing := sorted({name for name in shards.values() if not (directory / name).exists()}):
            raise CheckpointError(f"{self.path}: these files are missing: {', '.join(missing)}")
        self._directory = directory
        self._shards: dict[str, str] = shards
        self._open: dict[str, Weights] = {}

    def _file(self, name: str) -> Weights:
        shard = self._shards[name]
        if shard not in self._open:
            self._open[shard] = open_file(self._directory / shard)
        file = self._open[shard]
        if name not in file:
            raise CheckpointError(f"{self._directory / shard}: key {name!r} is missing, {self.path.name} promises it")
        return file

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file(name).shape(name)

    def type(self, name: str) -> str:
        return self._file(name).type(name)

    def raw(self, name: str) -> RawTensor:
        return self._file(name).raw(name)

    def release(self) -> None:
        for file in self._open.values():
            file.release()


def open_file(path: str | Path) -> Weights:
    """One weight file, by its ending: ``.safetensors`` or ``.bin`` / ``.pt`` / ``.pth``."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file")
    return SafetensorsFile(path) if path.suffix == ".safetensors" else TorchFile(path)


def open_weights(directory: Path) -> Weights:
    """The weights of a model or head directory, whichever of the four usual layouts it has."""
    for stem in ("model.safetensors", "pytorch_model.bin"):
        if (directory / stem).exists():
            return open_file(directory / stem)
        if (directory / f"{stem}.index.json").exists():
            return ShardedWeights(directory, f"{stem}.index.json")
    raise CheckpointError(
        f"{directory}: no weights found; looked for model.safetensors, pytorch_model.bin and their .index.json"
    )
