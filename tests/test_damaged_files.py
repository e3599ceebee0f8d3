"""Damaged model files load or are refused with an error of ours, never anything else. ``make fuzz`` tries more."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from support.mutants import Subject, mutate, subjects

NAMES = ("llama.gguf", "qwen2.gguf", "directory", "head", "eagle3")
ROUNDS = 60


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    return {subject.name: subject for subject in subjects(tmp_path_factory.mktemp("subjects"))}


@pytest.mark.parametrize("name", NAMES)
def test_damage_is_refused_or_harmless(known: dict[str, Subject], tmp_path: Path, name: str) -> None:
    subject, rng = known[name], random.Random(5)
    for file, content in subject.files.items():
        assert subject.meets(tmp_path, file, content) is None
    refused = 0
    for _ in range(ROUNDS):
        file = rng.choice(list(subject.files))
        refused += subject.meets(tmp_path, file, mutate(subject.files[file], rng, front=20_000)) is not None
    assert refused > ROUNDS // 8


@pytest.mark.parametrize("name", NAMES)
def test_truncation_names_the_file(known: dict[str, Subject], tmp_path: Path, name: str) -> None:
    subject = known[name]
    for file, content in subject.files.items():
        if file.endswith((".gguf", ".safetensors")):
            for share in (0, 0.001, 0.3, 0.9):
                refusal = subject.meets(tmp_path, file, content[: int(share * len(content))])
                assert refusal is not None and file in str(refusal)
