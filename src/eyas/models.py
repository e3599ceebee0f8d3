"""Finding a model by the name a user gives and reading everything but its arithmetic."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from eyas.checkpoints import hf
from eyas.checkpoints.gguf import CONTROL, GGUFFile, GGUFWeights
from eyas.checkpoints.gguf import read_config as read_gguf_config
from eyas.checkpoints.weights import BLOCK_SIZES, RawTensor, Weights, to_bfloat16
from eyas.errors import CheckpointError, EyasError, FetchError
from eyas.fetch import Progress, default_model_path
from eyas.text import TextTokenizer

DEFAULT_NAMES = ("default", "smollm2-135m-instruct")

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|endoftext|>")


@dataclass(frozen=True, eq=False)
class ModelSource:
    """A model on disk. Config is read at once; tokenizer and weights when first asked for.

    Attributes:
        name: as the user gave it.
        path: the GGUF file or the Hugging Face directory.
        format: "gguf" or "hf".
        config: Hugging Face style config (``model_type``, ``hidden_size``, ..., ``rope_theta``, ``rope_scaling``).
        eos_token_ids: every id that ends an answer.
        generation_defaults: sampling settings the model's authors suggest (``temperature``, ``top_p``, ...), may be
            empty.
    """

    name: str
    path: Path
    format: Literal["gguf", "hf"]
    config: dict[str, Any]
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, Any]
    _open_tokenizer: Callable[[], TextTokenizer] = field(repr=False)
    _open_tensors: Callable[[], Weights] = field(repr=False)

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        return self._open_tokenizer()

    @cached_property
    def tensors(self) -> Weights:
        """Name -> array. GGUF: float32, dequantised on each access. Hugging Face: as stored, bfloat16 as uint16.
        ``tensors.float32(name)`` is float32 from both, ``tensors.raw(name)`` the stored bytes."""
        return self._open_tensors()

    @property
    def lm_head_name(self) -> str:
        """The tensor that scores: ``lm_head.weight``, or the embedding where one serves as both."""
        return "lm_head.weight" if "lm_head.weight" in self.tensors else "model.embed_tokens.weight"

    @property
    def chat_template(self) -> str | None:
        return self.tokenizer.chat_template

    @property
    def bos_token_id(self) -> int | None:
        value = self.config.get("bos_token_id")
        return value if isinstance(value, int) else None

    def fingerprint(self) -> str:
        """16 hex digits that tell models apart: what the config computes, and two rows of every tensor.

        Values are compared as bfloat16, so a float32 or bfloat16 copy of the same weights has the same fingerprint,
        whatever the container.
        """
        digest = hashlib.sha256(json.dumps(_identity(self.config), sort_keys=True).encode())
        tied = bool(self.config.get("tie_word_embeddings"))
        for name in sorted(self.tensors):
            if name == "lm_head.weight" and tied:
                continue  # some files store the embeddings twice
            digest.update(name.encode())
            digest.update(_sample(self.tensors.raw(name)))
        return digest.hexdigest()[:16]


def load_source(target: str | Path | None = None, progress: Progress | None = None) -> ModelSource:
    """Find and open a model.

    Args:
        target: None or "default" (SmolLM2-135M-Instruct, fetched on first use), a local Hugging Face directory, a
            ``.gguf`` file, or a hub id like "Qwen/Qwen3-0.6B" ("owner/name/file.gguf" for a GGUF file there).
        progress: told about downloads, one line each.

    Raises:
        CheckpointError: nothing there, or something damaged.
        UnsupportedModelError: a GGUF architecture we cannot read.
        FetchError: a download that failed.
    """
    if target is None or str(target).lower() in DEFAULT_NAMES:
        return _from_gguf("smollm2-135m-instruct", default_model_path(progress))
    name = str(target)
    path = Path(name).expanduser()
    if path.is_dir():
        return _from_directory(name, path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise CheckpointError(f"{path}: a target file must end in .gguf; for safetensors name its directory")
        return _from_gguf(name, path)
    if path.suffix.lower() == ".gguf" and name.count("/") == 2 and not name.startswith((".", "/", "~")):
        return _from_gguf(name, _hub_file(name))
    if _HUB_ID.fullmatch(name) and not name.startswith("."):
        return _from_directory(name, _hub_directory(name, progress))
    raise CheckpointError(
        f"target {name!r}: no such file or directory, and not a hub id (owner/name); "
        f"'{DEFAULT_NAMES[0]}' is the built-in small model"
    )


def _from_gguf(name: str, path: Path) -> ModelSource:
    file = GGUFFile(path)
    config = read_gguf_config(file)
    template = file.get("tokenizer.chat_template", str)

    def tokenizer() -> TextTokenizer:
        from eyas.checkpoints.gguf_tokenizer import read_tokenizer

        tokens = file.strings("tokenizer.ggml.tokens")
        ids = {"bos_token": file.token_id("bos"), "eos_token": file.token_id("eos")}
        special = {key: tokens[index] for key, index in ids.items() if index is not None}
        return TextTokenizer(read_tokenizer(file), template, special)

    return ModelSource(
        name=name,
        path=path,
        format="gguf",
        config=config,
        eos_token_ids=_gguf_eos(file, template),
        generation_defaults={},
        _open_tokenizer=tokenizer,
        _open_tensors=lambda: GGUFWeights(file, config),
    )


def _gguf_eos(file: GGUFFile, template: str | None) -> tuple[int, ...]:
    """The ids named as end of text or end of turn, and the well-known end-of-turn marks that the template writes
    (a file has room for one eos id only, a chat model often ends by another)."""
    ids = [file.token_id("eos"), file.token_id("eot")]
    if template:
        tokens, kinds = file.strings("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type", list) or []
        marks = [tokens.index(mark) for mark in _END_OF_TURN if mark in template and mark in tokens]
        ids += [index for index in marks if kinds[index : index + 1] == [CONTROL]]
    return tuple(dict.fromkeys(index for index in ids if index is not None))


def _from_directory(name: str, path: Path) -> ModelSource:
    if not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return _from_gguf(name, files[0])
        if (path / "adapter_config.json").exists():
            raise CheckpointError(
                f"{path}: holds an adapter, not a model; merge it into its base model (peft: merge_and_unload) "
                "and name the directory of the whole"
            )
        found = f"several GGUF files, name one of them: {', '.join(file.name for file in files)}"
        raise CheckpointError(f"{path}: has no config.json{' but ' + found if files else ' and no GGUF file'}")
    config = hf.read_config(path)
    generation = hf.read_generation_config(path)

    def tokenizer() -> TextTokenizer:
        template, special = hf.read_chat_template(path)
        return TextTokenizer(hf.read_tokenizer(path), template, special)

    def tensors() -> Weights:
        return hf.open_weights(path)

    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = eos if isinstance(eos, list) else [eos]
    suggested = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return ModelSource(
        name=name,
        path=path,
        format="hf",
        config=config,
        eos_token_ids=tuple(dict.fromkeys(index for index in ids if isinstance(index, int))),
        generation_defaults={key: generation[key] for key in suggested if generation.get(key) is not None},
        _open_tokenizer=tokenizer,
        _open_tensors=tensors,
    )


def _hub_directory(name: str, progress: Progress | None) -> Path:
    """A snapshot of a hub repository: from the local cache if it is there, else downloaded."""
    snapshot = _hub("snapshot_download")
    wanted = ["*.json", "*.jinja", "*.safetensors"]
    try:
        path = Path(snapshot(name, allow_patterns=wanted, local_files_only=True))
        if _complete(path):
            return path
    except Exception:  # not in the cache: huggingface_hub has several errors for it
        pass
    if progress:
        progress(f"downloading {name} from the hub")
    try:
        path = Path(snapshot(name, allow_patterns=wanted))
        if not _complete(path):
            path = Path(snapshot(name, allow_patterns=["*.json", "*.jinja", "pytorch_model*.bin"]))
    except Exception as error:
        raise FetchError(_hub_failure(name, error)) from None
    return path


def _complete(directory: Path) -> bool:
    try:
        hf.open_weights(directory)
        return (directory / "config.json").exists()
    except EyasError:
        return False


def _hub_file(name: str) -> Path:
    owner, repo, file = name.split("/")
    download = _hub("hf_hub_download")
    try:
        return Path(download(f"{owner}/{repo}", file))
    except Exception as error:
        raise FetchError(_hub_failure(name, error)) from None


def _hub(function: str) -> Callable[..., str]:
    try:
        import huggingface_hub
    except ImportError:
        raise FetchError("hub ids need the package huggingface_hub: pip install huggingface_hub") from None
    found: Callable[..., str] = getattr(huggingface_hub, function)
    return found


def _hub_failure(name: str, error: Exception) -> str:
    first = next(iter(str(error).splitlines()), type(error).__name__)
    return (
        f"{name} is neither a local path nor in the local hub cache, and could not be downloaded: {first}\n"
        "Check the name and the network, or name a model on this machine: a directory or a GGUF file"
    )


_IDENTITY = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
)


def _identity(config: dict[str, Any]) -> dict[str, Any]:
    """What changes a model's function, and nothing about how it was saved."""
    return {key: config.get(key) for key in _IDENTITY}


def _sample(raw: RawTensor) -> bytes:
    """First and middle row (vectors: all of it), rounded to bfloat16."""
    rows = len(raw.data)
    picked = raw.data[[0, rows // 2]] if rows > 1 else raw.data
    values, size = BLOCK_SIZES[raw.type]
    shape = (len(picked), picked.shape[1] // size * values)
    return to_bfloat16(np.ascontiguousarray(RawTensor(raw.type, shape, picked).float32())).tobytes()
