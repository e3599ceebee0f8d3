"""What a results file says of the command that made it."""

from __future__ import annotations

import pytest

from eyas.environment import command_line, machine, machine_name, portable


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("/home/me/sets/alpaca.jsonl", "alpaca.jsonl"),
        ("/home/me/head/", "head/"),
        ("--out=/scratch/results.json", "--out=results.json"),
        ("/home/me/head+ngram", "head+ngram"),
        ("sets/alpaca.jsonl", "sets/alpaca.jsonl"),
        ("none,chain", "none,chain"),
        ("/", "/"),
        ("", ""),
    ],
)
def test_absolute_paths_lose_their_directories(word: str, wanted: str) -> None:
    assert portable(word) == wanted


def test_a_machine_is_named_by_its_processor_and_cores() -> None:
    name = machine_name()
    assert name.startswith(f"{machine()['cpu']} x")
    assert machine_name("mps") == f"{name}, mps"


def test_the_command_can_be_given_again() -> None:
    words = ["eyas", "bench", "/my data/a b.jsonl", "--limit", "2"]
    assert command_line(words) == "eyas bench 'a b.jsonl' --limit 2"
