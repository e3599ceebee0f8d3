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
from eyas.metrics import PHASES

RESULTS = readme.ROOT / "benchmarks" / "results"
MACHINES = '[machines]\n"Small" = "one core of a small machine"\n'
PART = f'{MACHINES}[[part]]\ntitle = "t"\nmachine = "Small"\n'


def test_the_documents_show_what_the_results_say() -> None:
    for name, section in readme.written(RESULTS).items():
        text = (readme.ROOT / name).read_text(encoding="utf-8")
        assert readme.between_markers(name, text, section) == text, "run python benchmarks/readme.py"
    assert readme.main(["--check"]) == 0


def test_only_what_is_stale_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    monkeypatch.setattr(readme, "written", lambda folder: {"README.md": "new", "docs/numbers.md": "as it is"})
    (tmp_path / "docs").mkdir()
    stale, good = tmp_path / "README.md", tmp_path / "docs" / "numbers.md"
    stale.write_text(f"{readme.BEGIN}\n\nold\n\n{readme.END}\n", encoding="utf-8")
    good.write_text(f"{readme.BEGIN}\n\nas it is\n\n{readme.END}\n", encoding="utf-8")
    good.chmod(0o444)
    assert readme.main(["--check"]) == 1
    assert capsys.readouterr().err.startswith("README.md: not what benchmarks/results says")
    assert "old" in stale.read_text(encoding="utf-8")
    assert readme.main([]) == 0
    assert stale.read_text(encoding="utf-8") == f"{readme.BEGIN}\n\nnew\n\n{readme.END}\n"
    assert readme.main(["--check"]) == 0


def test_only_the_section_changes() -> None:
    text = f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n"
    new = readme.between_markers("a.md", text, "new")
    assert new == f"before\n{readme.BEGIN}\n\nnew\n\n{readme.END}\nafter\n"
    assert readme.between_markers("a.md", new, "new") == new
    for broken in ("nothing", f"{readme.END} {readme.BEGIN}", text + text):
        with pytest.raises(InvalidInputError, match=r"a\.md needs one pair"):
            readme.between_markers("a.md", broken, "new")


@pytest.mark.slow
def test_the_library_in_five_lines_answers_with_the_shipped_head(capsys: pytest.CaptureFixture[str]) -> None:
    text = (readme.ROOT / "README.md").read_text(encoding="utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    assert "sky" in capsys.readouterr().out
    assert names["step"].stats.accepted_tokens > 0


def listed(folder: Path, text: str) -> str:
    (folder / "numbers.toml").write_text(text, encoding="utf-8")
    return readme.numbers(folder)


def a_run(dtype: str, **changes: Any) -> dict[str, Any]:
    """A run of ``none`` and ``auto`` over three questions of two sets, of which nothing but the summary is shown."""
    plain = {"questions": 3, "acceptance_length": 1.0, "acceptance_rate": None, "tokens_per_second": 50.0}
    plain |= {"speedup": {"ratio_of_sums": 1.0, "median": 1.0}, "overhead": 0.01}
    plain |= {"identical": {"none": {"same": 3, "of": 3}}}
    auto = plain | {"acceptance_length": 2.5, "acceptance_rate": 0.3, "tokens_per_second": 90.0}
    auto |= {"speedup": {"ratio_of_sums": 1.8, "median": 1.7}}
    run = {
        "eyas_bench": 1,
        "machine": {"cpu": "A CPU", "cores": 1},
        "commit": "0123456789abcdef-dirty",
        "target": {"name": "small", "dtype": dtype, "engine": "native", "kernels": "avx2"},
        "settings": {"draft": "default", "temperature": 0.0, "max_tokens": 64, "threads": None, "first_turn": True},
        "plans": {"none": "none", "auto": "budgeted+graft"},
        "complete": True,
        "summary": {"total": {"none": plain, "auto": auto}, "files": {"a": {}, "b": {}}},
        "rows": [{}],
    }
    return run | changes


PEERS: dict[str, Any] = {
    "peers_bench": 1,
    "model": {"name": "small"},
    "settings": {"tokens": 64},
    "summary": {
        "fastest_peer": "other",
        "lines": [
            {"name": "eyas bf16 best", "questions": 3, "tokens_per_second": 10.0, "decode_tokens_per_second": 11.0}
            | {"first_ms": 20.0, "over_fastest_peer": 2.5, "over_best_peer": None, "identical": 3, "compared": 3}
        ],
    },
}


def headline(folder: Path, *blocks: str) -> list[str]:
    text = MACHINES + "".join(f"[[headline]]\n{block}\n" for block in blocks)
    (folder / "numbers.toml").write_text(text, encoding="utf-8")
    return readme.headline(folder).splitlines()


def test_the_headline_has_a_row_for_each_file_of_each_machine(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", a_run("bfloat16"))
    write_json(tmp_path / "b.json", a_run("int8"))
    write_json(tmp_path / "peers.json", PEERS)
    raced = 'machine = "Small"\nfiles = ["a.json", "b.json"]\npeers = "peers.json"\nnote = "Quiet."'
    setting = (
        "**Small**: one core of a small machine; native engine with avx2 kernels, all threads; small, greedy; "
        "3 questions of 2 sets, first turns, at most 64 tokens."
    )
    lines = headline(tmp_path, raced, 'machine = "Small"\nfiles = ["b.json"]')
    assert lines[2:] == [
        "| Small | bfloat16 | 50.0 | 90.0 | 1.80x | 2.50 | 30.0 % | 3/3 | 2.50x |",
        "| Small | int8 | 50.0 | 90.0 | 1.80x | 2.50 | 30.0 % | 3/3 | - |",
        "| Small | int8 | 50.0 | 90.0 | 1.80x | 2.50 | 30.0 % | 3/3 | - |",
        "",
        f"{setting} Fastest peer: other, 3 questions, 64 tokens each. Quiet.",
        "",
        setting,
    ]


def test_headlines_that_compare_what_cannot_be_compared(tmp_path: Path) -> None:
    run = a_run("int8")
    write_json(tmp_path / "a.json", a_run("bfloat16"))
    write_json(tmp_path / "longer.json", run | {"settings": run["settings"] | {"max_tokens": 128}})
    write_json(tmp_path / "elsewhere.json", run | {"machine": {"cpu": "Another CPU", "cores": 1}})
    for other in ("longer", "elsewhere"):
        with pytest.raises(InvalidInputError, match="differ in weights alone"):
            headline(tmp_path, f'machine = "Small"\nfiles = ["a.json", "{other}.json"]')
    plain = {"total": {"none": run["summary"]["total"]["none"]}, "files": {}}
    write_json(tmp_path / "plain.json", run | {"summary": plain})
    with pytest.raises(InvalidInputError, match="needs auto"):
        headline(tmp_path, 'machine = "Small"\nfiles = ["plain.json"]')
    with pytest.raises(InvalidInputError, match=r"no machine 'Large'; there are Small"):
        headline(tmp_path, 'machine = "Large"\nfiles = ["a.json"]')


def test_a_part_says_how_it_was_measured(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", a_run("int8"))
    text = listed(tmp_path, f'{PART}files = ["a.json"]\n')
    assert text.startswith(
        "### t\n\nsmall, int8, drafter default, greedy; 3 questions of a, b, first turns, at most 64 tokens; one core "
        "of a small machine; native engine with avx2 kernels, all threads; auto is budgeted+graft; commit 0123456789 "
        "with changes (from `benchmarks/results/a.json`)\n\n| method |"
    )
    assert text.endswith("| auto | 2.50 | 30.0 % | 90.0 | 1.80x | 1.70x | 1.0 % | 3/3 |")


def test_questions_that_took_longer_are_counted(tmp_path: Path) -> None:
    def row(question: int, method: str, seconds: float) -> dict[str, Any]:
        asked = {"file": "a", "question_id": question, "method": method, "repeat": 0}
        return asked | {"seconds": dict.fromkeys(PHASES, 0.0) | {"verify": seconds}}

    pairs = [(1.0, 0.6), (1.0, 1.2), (2.0, 2.02)]
    rows = [row(i, method, s) for i, pair in enumerate(pairs) for method, s in zip(("none", "auto"), pair, strict=True)]
    write_json(tmp_path / "a.json", a_run("int8", rows=rows))
    assert (
        "With `auto`, 1 of 3 questions took more than 1.03 times as long as with plain decoding (1 of a); the slowest "
        "took 1.20 times as long."
    ) in listed(tmp_path, f'{PART}files = ["a.json"]\nslower = 1.03\n')


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_results_of_the_peers_are_shown_by_their_own_table(tmp_path: Path, suffix: str) -> None:
    write_json(tmp_path / f"peers{suffix}", PEERS)
    text = listed(tmp_path, f'{PART}files = ["peers{suffix}"]\nnote = "Quiet."\n')
    assert text.startswith(
        "### t\n\nsmall, greedy; 3 questions, 64 tokens each; one core of a small machine; fastest peer: other"
    )
    assert "| eyas bf16 best | 10.0 | 11.0 | 20 | 2.50 | - | 3/3 |" in text
    assert text.endswith("\n\nQuiet.")


def test_what_passes_and_weights_cost_is_shown_by_tables_of_their_own(tmp_path: Path) -> None:
    cost = {str(rows): 2.0 + rows / 16 for rows in (1, 2, 4, 8, 12, 16, 32)} | {"1": 2.0}
    profile = {
        "model": "small",
        "context": 256,
        "bandwidth_gb_s": 30.0,
        "threads": 1,
        "kernels": "avx2",
        "commit": None,
    }
    write_json(tmp_path / "profile.json", profile | {"weights": {"int8": {"forward_ms": cost}}})
    text = listed(tmp_path, f'{PART}files = ["profile.json"]\n')
    assert "one core of a small machine, 1 thread, avx2 kernels; reads 30.0 GB/s; commit unknown" in text
    assert "| int8 | 2.0 | 1.06x | 1.12x | 1.25x | 1.38x | 1.50x | 2.00x |" in text
    found = {"perplexity": 10.1, "change": 0.01, "logits_error": 0.05, "same_argmax": 0.9}
    quality = {"model": "small", "tokens": 64, "predicted": 63, "file": "a.txt", "window": 32, "commit": "a" * 40}
    write_json(tmp_path / "q.json", quality | {"reference": {"perplexity": 10.0}, "types": {"int8": found}})
    text = listed(tmp_path, f'{PART}files = ["q.json"]\n')
    assert "64 tokens of a.txt in windows of 32; one core of a small machine; commit aaaaaaaaaa (from" in text
    assert "| int8 | 10.10 | +1.00 % | 5.0 % | 90.0 % |" in text


def test_each_run_of_a_file_has_its_table_and_further_ones_are_found(tmp_path: Path) -> None:
    run = json.loads(gzip.decompress((RESULTS / "identity-float32-120.json.gz").read_bytes()))
    sampled = run | {"settings": run["settings"] | {"temperature": 1.0}}
    write_json(tmp_path / "s.json", {"eyas_suite": 1, "suite": "paper", "complete": True, "runs": [run, sampled]})
    head = PART + 'files = ["s.json"]\n'
    text = listed(tmp_path, head + 'columns = ["tau"]\ntables = ["Beside the paper"]\n')
    assert text.count("| method | tau |") == 2
    assert "temperature 1;" in text
    assert "| LLaMA2-Chat-7B | 2.78x / 3.71 |" in text
    with pytest.raises(InvalidInputError, match="no column nothing"):
        listed(tmp_path, head + 'columns = ["nothing"]\n')
    with pytest.raises(InvalidInputError, match="no table 'Nothing'"):
        listed(tmp_path, head + 'tables = ["Nothing"]\n')


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("broken", "cannot read"),
        ("", r"there is no \[\[part\]\]"),
        ('part = "t"', r"there is no \[\[part\]\]"),
        ('[[part]]\ntitle = "t"\n', "a part lacks files and machine"),
        ('[[part]]\ntitle = "t"\nmachine = "m"\nfiles = ["gone.json"]\n', "no machine 'm'; there are none"),
        (PART + 'files = ["gone.json"]\n', "cannot read"),
    ],
)
def test_lists_that_cannot_be_followed(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(EyasError, match=problem):
        listed(tmp_path, text)
