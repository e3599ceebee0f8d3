"""The one model in the forms that the engines read, each made once.

gguf            the file itself, where the target is a GGUF file
gguf-q8_0, -q4_0  the same re-rounded by llama.cpp, whose kernels for these types are its fastest
hf              float32 safetensors, config and tokenizer: a copy of the dequantised weights
openvino-fp16, -int8, -int4  made from that copy by optimum-intel
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eyas.models import ModelSource
from peers.environments import Environments, failure

OPENVINO_FORMATS = {
    "fp16": ["--weight-format", "fp16"],
    "int8": ["--weight-format", "int8"],
    "int4": ["--weight-format", "int4", "--group-size", "32", "--ratio", "1.0"],
}

_REQUANTISE = """
import sys, llama_cpp
source, out, kind = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.allow_requantize = getattr(llama_cpp, "LLAMA_FTYPE_MOSTLY_" + kind), True
sys.exit(llama_cpp.llama_model_quantize(source.encode(), out.encode(), params))
"""


class ModelError(Exception):
    """A form of the model that cannot be made; the message says why in one line."""


@dataclass(frozen=True)
class Models:
    """Makes forms of a model on demand.

    Attributes:
        source: the model.
        root: where they are kept.
        environments: whose tools make them.
    """

    source: ModelSource
    root: Path
    environments: Environments

    def path(self, form: str) -> Path:
        """A form by name, made if it is not there.

        Raises:
            ModelError: it cannot be made.
        """
        if form == "gguf":
            if self.source.format != "gguf":
                raise ModelError(f"{self.source.name} is no GGUF file, and llama.cpp reads nothing else")
            return self.source.path
        place = self.root / self.source.fingerprint() / form
        if not place.exists():
            self.root.mkdir(parents=True, exist_ok=True)
            unfinished = place.with_name(place.name + ".unfinished")
            _remove(unfinished)
            unfinished.parent.mkdir(parents=True, exist_ok=True)
            self._maker(form)(unfinished)
            os.replace(unfinished, place)
        return place

    def _maker(self, form: str) -> Callable[[Path], None]:
        if form == "hf":
            return lambda out: write_hf(self.source, out)
        family, _, kind = form.partition("-")
        if family == "gguf":
            return lambda out: self._run(
                "llamacpp", ["-c", _REQUANTISE, str(self.path("gguf")), str(out), kind.upper()]
            )
        return lambda out: self._run(
            "openvino",
            ["-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", str(self.path("hf")),
             "--task", "text-generation-with-past", *OPENVINO_FORMATS[kind], str(out)],
        )  # fmt: skip

    def _run(self, environment: str, arguments: list[str]) -> None:
        python = self.environments.python(environment)
        if not python.exists():
            raise ModelError(f"needs the environment {environment}")
        variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            ["nice", "-n", str(self.environments.niceness), str(python), *arguments],
            capture_output=True,
            text=True,
            env={**variables, "HF_HUB_OFFLINE": "1"},
            check=False,
        )
        if done.returncode:
            raise ModelError(failure(done.stdout + done.stderr))


def write_hf(source: ModelSource, out: Path) -> None:
    """A model directory as transformers and its kin read it, with float32 weights."""
    from safetensors.numpy import save_file

    out.mkdir(parents=True)
    tied = bool(source.config.get("tie_word_embeddings"))
    tensors = {
        name: np.ascontiguousarray(source.tensors.float32(name))
        for name in source.tensors
        if not (tied and name == "lm_head.weight")
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = {key: value for key, value in source.config.items() if value is not None}
    _write_json(out / "config.json", {**config, "dtype": "float32"})
    _write_json(out / "generation_config.json", {"eos_token_id": list(source.eos_token_ids)})
    (out / "tokenizer.json").write_text(source.tokenizer.backend.to_str(), encoding="utf-8")
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": source.chat_template,
            "model_max_length": source.config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            **source.tokenizer.special_tokens,
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
