"""README.md's numbers are those of the committed results."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import readme
from eyas.bench.run import write_json
from eyas.errors import EyasError, InvalidInputError

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def test_the_section_is_what_the_results_say() -> None:
    text = (RESULTS.parents[1] / "README.md").read_text(encoding="utf-8")
    assert readme.filled(text, readme.numbers(RESULTS)) == text, "run python benchmarks/readme.py"


def test_only_the_section_changes() -> None:
    text = f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n"
    new = readme.filled(text, "new")
    assert new == f"before\n{readme.BEGIN}\n\nnew\n\n{readme.END}\nafter\n"
    assert readme.filled(new, "new") == new
    for broken in ("nothing", f"{readme.END} {readme.BEGIN}", text + text):
        with pytest.raises(InvalidInputError, match="one pair"):
            readme.filled(broken, "new")


@pytest.mark.slow
def test_the_library_in_five_lines_answers_with_the_shipped_head(capsys: pytest.CaptureFixture[str]) -> None:
    text = (RESULTS.parents[1] / "README.md").read_text(encoding="utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    assert "sky" in capsys.readouterr().out
    assert names["step"].stats.accepted_tokens > 0


def listed(folder: Path, text: str) -> str:
    (folder / "numbers.toml").write_text(text, encoding="utf-8")
    return readme.numbers(folder)


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_results_of_the_peers_are_shown_by_their_own_table(tmp_path: Path, suffix: str) -> None:
    line = {"name": "eyas", "questions": 3, "tokens_per_second": 10.0, "decode_tokens_per_second": 11.0}
    line |= {"first_ms": 20.0, "over_fastest_peer": 2.5, "over_best_peer": None, "identical": 3, "compared": 3}
    data: dict[str, Any] = {
        "peers_bench": 1,
        "model": {"name": "small"},
        "machine": {"cpu": "A CPU", "cores": 2},
        "settings": {"tokens": 64},
        "summary": {"fastest_peer": "other", "lines": [line]},
    }
    write_json(tmp_path / f"peers{suffix}", data)
    text = listed(tmp_path, f'[[part]]\ntitle = "Beside"\nfiles = ["peers{suffix}"]\nnote = "Quiet."\n')
    assert text.startswith(
        "### Beside\n\nsmall, greedy; 3 questions, 64 tokens each; A CPU, 2 cores; fastest peer: other"
    )
    assert "| eyas | 10.0 | 11.0 | 20 | 2.50 | - | 3/3 |" in text
    assert text.endswith("\n\nQuiet.")


def test_each_run_of_a_file_has_its_table_and_further_ones_are_found(tmp_path: Path) -> None:
    run = json.loads(gzip.decompress((RESULTS / "identity-float32-120.json.gz").read_bytes()))
    sampled = run | {"settings": run["settings"] | {"temperature": 1.0}}
    write_json(tmp_path / "s.json", {"eyas_suite": 1, "suite": "paper", "complete": True, "runs": [run, sampled]})
    head = '[[part]]\ntitle = "t"\nfiles = ["s.json"]\n'
    text = listed(tmp_path, head + 'columns = ["tau"]\ntables = ["Beside the paper"]\n')
    assert text.count("| method | tau |") == 2
    assert "temperature 1;" in text
    assert "| LLaMA2-Chat-7B | 2.78x / 3.71 |" in text
    with pytest.raises(InvalidInputError, match="no column nothing"):
        listed(tmp_path, head + 'columns = ["nothing"]\n')
    with pytest.raises(InvalidInputError, match="no table 'Nothing'"):
        listed(tmp_path, head + 'tables = ["Nothing"]\n')


@pytest.mark.parametrize("text", ["", "broken", '[[part]]\ntitle = "t"\nfiles = ["gone.json"]\n'])
def test_lists_that_cannot_be_followed(tmp_path: Path, text: str) -> None:
    with pytest.raises(EyasError, match="cannot read"):
        listed(tmp_path, text)
