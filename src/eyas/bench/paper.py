"""What the EAGLE-2 paper measured (Li, Wei, Zhang, Zhang, arXiv 2406.16858), and its experiment as a suite.

Its numbers come from GPUs, with 48 to 60 draft tokens, 10 nodes expanded per level and depth 6. They stand beside ours
for orientation; tau and the gains of one method over another can be compared, tokens per second cannot.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eyas.errors import InvalidInputError

SETS = ("mt_bench", "humaneval", "gsm8k", "alpaca", "cnn_dm", "natural_questions")
"""MT-bench, HumanEval, GSM8K, Alpaca, CNN/DailyMail, Natural Questions: stems of the question files."""

TEMPERATURES = (0.0, 1.0)

ABLATION = (
    ("neither", "dynamic-neither"),
    ("value only", "dynamic-no-rerank"),
    ("reranking only", "dynamic-no-value"),
    ("both", "dynamic"),
)
"""The rows of the ablation, and the method that each of them is."""

METHODS = (
    *("none", "chain", "static", "sequoia", "dynamic", "budgeted"),
    *(method for _, method in ABLATION if method != "dynamic"),
)
"""What the suite measures, side by side."""


@dataclass(frozen=True)
class Mean:
    """Mean over the six sets of one target, for EAGLE (a static tree) and EAGLE-2 (a dynamic one).

    Attributes:
        speedups: over plain decoding, by our name of the method.
        taus: acceptance lengths, by our name of the method.
    """

    target: str
    temperature: float
    speedups: dict[str, float]
    taus: dict[str, float]


def _mean(target: str, temperature: float, static: tuple[float, float], dynamic: tuple[float, float]) -> Mean:
    speedups, taus = zip(static, dynamic, strict=True)
    return Mean(
        target,
        temperature,
        dict(zip(("static", "dynamic"), speedups, strict=True)),
        dict(zip(("static", "dynamic"), taus, strict=True)),
    )


MEANS = (
    _mean("Vicuna-13B", 0.0, (2.95, 3.82), (4.04, 4.65)),
    _mean("LLaMA2-Chat-13B", 0.0, (3.09, 3.89), (4.10, 4.68)),
    _mean("Vicuna-7B", 0.0, (2.78, 3.79), (3.39, 4.68)),
    _mean("LLaMA2-Chat-7B", 0.0, (2.78, 3.71), (3.43, 4.64)),
    _mean("Vicuna-13B", 1.0, (2.39, 3.39), (3.65, 4.26)),
    _mean("LLaMA2-Chat-13B", 1.0, (2.64, 3.53), (3.88, 4.51)),
    _mean("Vicuna-7B", 1.0, (2.18, 3.20), (2.94, 4.20)),
    _mean("LLaMA2-Chat-7B", 1.0, (2.32, 3.37), (3.15, 4.41)),
)

ABLATION_SPEEDUPS = {"dynamic-neither": 2.81, "dynamic": 3.62}
"""Vicuna-7B on MT-bench, greedy."""

CALIBRATION = ((0.025, 0.04), (0.975, 0.98))
"""Vicuna-7B on Alpaca: middle of a confidence bin (below 0.05, above 0.95), share of those tokens that was accepted."""


def set_files(directory: Path) -> list[Path]:
    """The six question files in a directory.

    Raises:
        InvalidInputError: a set that is not there.
    """
    files = [directory / f"{name}.jsonl" for name in SETS]
    if missing := [file.name for file in files if not file.is_file()]:
        raise InvalidInputError(
            f"{directory} lacks {', '.join(missing)}; it should hold {', '.join(f'{name}.jsonl' for name in SETS)}, or "
            "name the files you have with --questions"
        )
    return files
