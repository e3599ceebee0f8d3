"""Small valid model files, ways to damage them, and everything Eyas would read from them.

A damaged file either still loads or is refused by one of ``eyas.errors``; anything else is a fault of ours.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Quant
from safetensors.numpy import save as save_safetensors
from tokenizers import Tokenizer

from eyas import native
from eyas.checkpoints.eagle import load_eagle, save_eagle
from eyas.checkpoints.eagle3 import load_eagle3, save_eagle3
from eyas.errors import EyasError, NotEnoughMemoryError
from eyas.heads.config import Eagle3Config, EagleConfig
from eyas.models import load_source
from support import gguf_files


@dataclass(frozen=True)
class Subject:
    """A valid model or head.

    Attributes:
        name: for messages.
        files: content by name.
        read: opens a folder with such files and looks at everything in them.
    """

    name: str
    files: dict[str, bytes]
    read: Callable[[Path], None]

    def meets(self, folder: Path, file: str, content: bytes) -> EyasError | None:
        """What happens with ``content`` in the place of ``file``: None if it loads, the refusal if it is refused.
        Whatever else is raised gets through."""
        for name, whole in self.files.items():
            (folder / name).write_bytes(content if name == file else whole)
        try:
            self.read(folder)
        except NotEnoughMemoryError as error:
            if "ran out" in str(error):  # it was tried
                raise
            return error
        except EyasError as error:
            return error
        return None


def subjects(folder: Path) -> list[Subject]:
    """GGUF files of two families, a Hugging Face directory, draft heads; ``folder`` is for their making."""
    llama, qwen2 = gguf_files.tiny_config("llama"), gguf_files.tiny_config("qwen2")
    gguf = {
        "llama.gguf": (llama, gguf_files.random_tensors(llama), Quant.F32),
        "qwen2.gguf": (qwen2, gguf_files.random_tensors(qwen2), Quant.Q4_1),
    }
    made = []
    for name, parts in gguf.items():
        content = gguf_files.write_gguf(folder / name, *parts).read_bytes()
        made.append(Subject(name, {"model.gguf": content}, lambda path: _read_model(path / "model.gguf")))
    tokenizer: Tokenizer = load_source(folder / "llama.gguf").tokenizer.backend
    half = {name: array.astype(np.float16) for name, array in gguf["qwen2.gguf"][1].items()}
    files = {
        "config.json": json.dumps(qwen2 | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}).encode(),
        "generation_config.json": json.dumps({"eos_token_id": [1, 2], "temperature": 0.5}).encode(),
        "tokenizer_config.json": json.dumps({"bos_token": "<|im_start|>", "chat_template": "{{ bos_token }}"}).encode(),
        "tokenizer.json": tokenizer.to_str().encode(),
        "model.safetensors": save_safetensors(half, {"format": "pt"}),
    }
    made.append(Subject("directory", files, _read_model))

    config = EagleConfig(
        hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=4, vocab_size=40,
        draft_vocab_size=10,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    tensors = {key: rng.normal(size=shape).astype(np.float32) for key, shape in config.tensor_shapes().items()}
    save_eagle(folder / "head", config, tensors, d2t=np.arange(10, dtype=np.int64))
    head = {path.name: path.read_bytes() for path in (folder / "head").iterdir()}
    made.append(Subject("head", head, lambda path: _discard(load_eagle(path))))
    tied = Eagle3Config(16, 24, 4, 2, 4, 40, draft_vocab_size=10, target_lm_head=True)
    tensors = {key: rng.normal(size=shape).astype(np.float32) for key, shape in tied.tensor_shapes().items()}
    save_eagle3(folder / "eagle3", tied, tensors, d2t=np.arange(10, dtype=np.int64))
    head = {path.name: path.read_bytes() for path in (folder / "eagle3").iterdir()}
    made.append(Subject("eagle3", head, lambda path: _discard(load_eagle3(path))))
    return made


def mutate(content: bytes, rng: random.Random, front: int = 1 << 20) -> bytes:
    """One to three small changes, most of them within the first ``front`` bytes."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 3))):
        size = len(data)
        at = rng.randrange(min(size, front) if rng.random() < 0.9 else size) if size else 0
        length = rng.choice((1, 2, 4, 8, 40))
        kind = rng.randrange(8)
        if kind == 0 and size:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and size:
            data[at] = rng.choice((0, 1, 127, 128, 255, 34, 44, 45, 48, 57, 91, 123))
        elif kind == 2:
            width = rng.choice((4, 8))
            number = rng.choice((0, 1, 2, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)) % 2 ** (8 * width)
            data[at : at + width] = number.to_bytes(width, "little")
        elif kind == 3:
            del data[at:]
        elif kind == 4:
            del data[at : at + length]
        elif kind == 5:
            data[at:at] = data[at : at + length]
        elif kind == 6:
            data[at : at + length] = rng.randbytes(length)
        else:
            data = bytearray(_other_value(bytes(data), rng, front))
    return bytes(data)


_VALUES = re.compile(rb'-?\b\d+(?:\.\d+)?(?:e[-+]?\d+)?\b|"[^"\n]{0,60}"|\btrue\b|\bfalse\b|\bnull\b')
_OTHERS = (
    b"0", b"-1", b"1", b"3", b"1e400", b"0.5", b"9223372036854775808", b"1" + b"0" * 40, b"NaN", b"null", b"true",
    b'""', b'"x"', b"[]", b"[1]", b"{}", b'{"a": 1}', b"[" * 3000,
)  # fmt: skip


def _other_value(data: bytes, rng: random.Random, front: int) -> bytes:
    """Another JSON value in the place of one, where the file has any."""
    found = list(_VALUES.finditer(data, 0, front))
    if not found:
        return data[: len(data) // 2]
    match = rng.choice(found)
    return data[: match.start()] + rng.choice(_OTHERS) + data[match.end() :]


def _read_model(path: Path) -> None:
    source = load_source(path)
    source.tokenizer.encode("the 12 cats<|im_end|>")
    _discard(source.bos_token_id, source.chat_template, source.generation_defaults)
    for name in source.tensors:
        _discard(source.tensors.float32(name), source.tensors.nbytes(name))
    _discard(source.fingerprint())
    if native.available():
        from eyas.targets.native import NativeTarget

        target = NativeTarget.load(source, dtype="q4", threads=1)
        target.prefill(target.new_cache(), [1, 2])
    source.tensors.release()


def _discard(*_: object) -> None:
    pass
