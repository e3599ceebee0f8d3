"""Who is compared, and the settings among which a trial finds each one's best."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Contestant:
    """An engine doing one thing on one form of the model.

    Attributes:
        name: "engine type method".
        engine: module in ``peers.engines``; also the name of its environment (Eyas runs in the driver's own).
        model: form of the model, see ``peers.models``; empty for Eyas, which opens the target as the user named it.
        variants: settings to try; the first is used where there is no trial.
        plain: name of the contestant whose answers this one's must equal; its own for plain decoding.
        excuse: why it cannot run; it is listed and not asked.
    """

    name: str
    engine: str
    model: str
    variants: tuple[Settings, ...]
    plain: str
    excuse: str = ""

    @property
    def peer(self) -> bool:
        """Whether it is not ours."""
        return self.engine != "eyas"


def default_lineup(head: str = "default") -> list[Contestant]:
    """Everything that can be compared; ``head`` is Eyas's draft head."""
    return [*_llamacpp(), *_openvino(), *_vllm(), *_transformers(), *_eyas(head)]


def choose(lineup: Sequence[Contestant], patterns: Iterable[str]) -> list[Contestant]:
    """Contestants matching any pattern like ``llamacpp*`` or ``*int8*``.

    Raises:
        ValueError: a pattern that matches none.
    """
    wanted = list(patterns)
    for pattern in wanted:
        if not any(fnmatchcase(one.name, pattern) for one in lineup):
            raise ValueError(f"{pattern!r} matches none of: {', '.join(one.name for one in lineup)}")
    return [one for one in lineup if any(fnmatchcase(one.name, pattern) for pattern in wanted)]


def _llamacpp() -> list[Contestant]:
    plain = [
        {"loop": loop, "flash_attn": flash, "n_batch": 512}
        for loop in ("direct", "bindings")
        for flash in (True, False)
    ] + [{"loop": "direct", "flash_attn": True, "n_batch": 512, "kv_type": "q8_0"}]
    lookup = [
        {"loop": loop, "flash_attn": True, "n_batch": 512, "lookup": {"max_ngram_size": size, "num_pred_tokens": count}}
        for loop, size, count in (
            ("direct", 3, 2),
            ("direct", 3, 4),
            ("direct", 2, 10),
            ("bindings", 3, 2),
            ("bindings", 2, 10),
        )
    ]
    made: list[Contestant] = []
    for kind, model in (("file", "gguf"), ("q8_0", "gguf-q8_0"), ("q4_0", "gguf-q4_0")):
        base = f"llamacpp {kind} plain"
        made += [
            Contestant(base, "llamacpp", model, tuple(plain), base),
            Contestant(f"llamacpp {kind} lookup", "llamacpp", model, tuple(lookup), base),
        ]
    excuse = "not applicable: there is no smaller model with the same tokenizer"
    return [*made, Contestant("llamacpp file draft", "llamacpp", "gguf", ({},), "llamacpp file plain", excuse)]


def _openvino() -> list[Contestant]:
    made: list[Contestant] = []
    hints: dict[str, list[dict[str, Any]]] = {
        "bf16": [{"INFERENCE_PRECISION_HINT": "bf16"}],
        "int8": [
            {"INFERENCE_PRECISION_HINT": precision, "DYNAMIC_QUANTIZATION_GROUP_SIZE": group}
            for precision in ("bf16", "f32")
            for group in (32, 0)
        ],
        "int4": [
            {"INFERENCE_PRECISION_HINT": precision, "DYNAMIC_QUANTIZATION_GROUP_SIZE": group}
            for precision in ("bf16", "f32")
            for group in (32, 0)
        ],
    }
    for kind, properties in hints.items():
        model = f"openvino-{'fp16' if kind == 'bf16' else kind}"
        base = f"openvino {kind} plain"
        plain = [{"properties": one, "backend": backend} for one in properties for backend in ("SDPA", "PA")]
        lookup = [
            {"properties": one, "lookup": {"num_assistant_tokens": count, "max_ngram_size": 3}}
            for one in properties[:2]
            for count in (2, 4, 8)
        ]
        made += [
            Contestant(base, "openvino", model, tuple(plain), base),
            Contestant(f"openvino {kind} lookup", "openvino", model, tuple(lookup), base),
        ]
    return made


def _vllm() -> list[Contestant]:
    base = "vllm bf16 plain"
    plain = [
        {"dtype": "bfloat16", "enforce_eager": eager, "in_process": inside}
        for eager in (False, True)
        for inside in (False, True)
    ]
    lookup = [
        {**one, "lookup": {"num_speculative_tokens": count, "prompt_lookup_min": 2, "prompt_lookup_max": 4}}
        for one in plain[:2]
        for count in (2, 4)
    ]
    return [
        Contestant(base, "vllm", "hf", tuple(plain), base),
        Contestant("vllm bf16 lookup", "vllm", "hf", tuple(lookup), base),
    ]


def _transformers() -> list[Contestant]:
    base = "transformers bf16 plain"
    plain = [{"dtype": "bfloat16", "compile": compiled} for compiled in (False, True)]
    lookup = [
        {"dtype": "bfloat16", "lookup": {"prompt_lookup_num_tokens": count, "max_matching_ngram_size": size}}
        for count, size in ((3, 3), (10, 2))
    ]
    return [
        Contestant(base, "transformers", "hf", tuple(plain), base),
        Contestant("transformers bf16 lookup", "transformers", "hf", tuple(lookup), base),
    ]


def _eyas(head: str) -> list[Contestant]:
    trees = [
        {"num_steps": steps, "topk": topk, "num_draft_tokens": count}
        for steps, topk, count in ((4, 4, 8), (3, 4, 7), (5, 4, 11), (2, 3, 5))
    ]
    made: list[Contestant] = []
    for kind, dtype in (("bf16", "bfloat16"), ("int8", "int8"), ("q4", "q4")):
        base = f"eyas {kind} plain"
        eagle2: list[dict[str, Any]] = [{"drafter": "head", "policy": tree} for tree in trees]
        others: list[dict[str, Any]] = [
            *({"drafter": "head+ngram", "policy": tree} for tree in trees),
            *({"drafter": "ngram", "policy": tree} for tree in trees[:2]),
            *({"drafter": drafter, "policy": "budgeted"} for drafter in ("head", "head+ngram")),
        ]
        methods = {"eagle2": eagle2, "best": [*others, *eagle2]}
        made.append(Contestant(base, "eyas", "", ({"dtype": dtype, "drafter": "none"},), base))
        made += [
            Contestant(
                f"eyas {kind} {method}",
                "eyas",
                "",
                tuple({"dtype": dtype, "head": head, **one} for one in variants),
                base,
            )
            for method, variants in methods.items()
        ]
    return made
