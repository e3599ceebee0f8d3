"""``eyas tune`` with a table in place of the model: a profile that later commands find, tables, a heat map."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from eyas.bench.tuning import PROMPTS, best_widths, tables, write_heat_map
from eyas.cli import main
from eyas.cli.tune import make_effort, show
from eyas.errors import InvalidInputError
from eyas.plan import profile_key
from eyas.profile import Profile
from eyas.profile_files import read_profile
from eyas.profile_policies import fastest_way
from eyas.replay import GridPoint
from support.profiles import made_up_profile
from support.table_cli import load_table, use_table

SMALL = ("--effort", "quick", "--num-steps", "3", "--topk", "3", "--num-draft-tokens", "7", "--limit", "3")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    use_table(monkeypatch, eos=False)
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))

    def once(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(list(arguments))
        captured = capsys.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return once


def test_a_profile_is_made_where_later_commands_find_it(run: Run, tmp_path: Path) -> None:
    code, out, err = run("tune", *SMALL)
    assert code == 0, err
    assert "Tokens per second" in out
    (path,) = (tmp_path / "cache" / "profiles").iterdir()
    profile = read_profile(path)
    fastest = fastest_way(profile)  # whatever that is: a table's passes take microseconds
    assert (f"--policy auto is {fastest}: " in out) == fastest.drafts
    assert ("Drafting does not pay here" in out) != fastest.drafts
    assert {(point.num_steps, point.topk) for point in profile.grid} == {(d, k) for d in (1, 2, 3) for k in (1, 2, 3)}
    assert profile.num_draft_tokens == 7
    question = ("generate", "w9 w10", "--json", "--max-tokens", "30", "--ignore-eos")
    plain = json.loads(run(*question, "--draft", "none")[1])
    for words in ((), ("--policy", "sequoia"), ("--policy", "budgeted", "--graft")):
        code, out, err = run(*question, *words)
        assert (code, err) == (0, "")
        assert json.loads(out)["token_ids"] == plain["token_ids"]
    # Sampled answers have a profile of their own.
    assert "eyas tune" in run(*question, "--policy", "budgeted", "--temperature", "1")[2]
    assert run("tune", *SMALL, "--temperature", "1")[0] == 0
    assert run(*question, "--policy", "budgeted", "--temperature", "1")[0] == 0


def test_json_and_a_place_of_ones_own(run: Run, tmp_path: Path) -> None:
    questions = tmp_path / "mine.jsonl"
    questions.write_text("".join(json.dumps({"turns": [f"w{9 + i} w{10 + i} w11"]}) + "\n" for i in range(3)))
    out = tmp_path / "mine.json"
    code, text, _ = run("tune", *SMALL, "--prompts", str(questions), "--json", "--out", str(out))
    assert code == 0
    assert Profile.from_dict(json.loads(text)) == read_profile(out)
    assert not (tmp_path / "cache").exists()
    assert run("generate", "w9", "--policy", "budgeted", "--profile", str(out))[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--draft", "none"), "nothing to tune"),
        (("--topk", "0"), "topk must be at least 1"),
        (("--num-draft-tokens", "1000"), "num_draft_tokens must be at most 256"),
        (("--limit", "0"), "limit must be at least 1"),
        (("--prompts", "/nowhere.jsonl"), "cannot read"),
        (("--plot", "/nowhere/at/all.png"), "cannot write"),
        (("--temperature", "-1"), "temperature must be between 0"),
    ],
)
def test_mistakes(run: Run, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = run("tune", *SMALL, *arguments)
    assert code == 2
    assert err.startswith("eyas: ")
    assert message in err


def test_efforts_keep_to_the_users_bounds() -> None:
    effort = make_effort("quick", {"num_draft_tokens": 10, "topk": 3})
    assert effort.rows == (1, 2, 4, 8, 11)
    assert (effort.topk, effort.races) == (3, 1)
    assert make_effort("normal", {"num_draft_tokens": 1}).rows == (1, 2)
    assert max(make_effort("thorough", {}).rows) == 64


def test_prompts_are_of_several_lengths_and_kinds() -> None:
    assert len(set(PROMPTS)) == len(PROMPTS) >= 10
    assert max(map(len, PROMPTS)) > 3 * min(map(len, PROMPTS))


# --- showing ---------------------------------------------------------------------------------------------------


@pytest.fixture
def profile() -> Profile:
    found = made_up_profile(profile_key("default", load_table()[0], greedy=True), none=100, dynamic=150)  # type: ignore[arg-type]
    grid = tuple(
        GridPoint(steps, width, size, 2.0, 0.1 + 0.01 * steps + 0.002 * width, 0.13 if width == size == 2 else None)
        for steps in (1, 2)
        for width in (1, 2)
        for size in (1, 2, 4)
    )
    return replace(found, grid=grid)


def test_where_drafting_does_not_pay_it_is_said(profile: Profile, capsys: pytest.CaptureFixture[str]) -> None:
    slow = [replace(check, measured=50.0) if check.way.drafts else check for check in profile.checks]
    show(replace(profile, checks=tuple(slow)))
    out = capsys.readouterr().out
    assert "Drafting does not pay here: --policy auto decodes plainly." in out
    assert "--policy auto is" not in out


def test_tables_show_what_was_found(profile: Profile, capsys: pytest.CaptureFixture[str]) -> None:
    titles = [str(table.title) for table in tables(profile)]
    assert len(titles) == 4
    show(profile)
    out = capsys.readouterr().out
    assert "--policy auto is dynamic: 1.50 times plain decoding" in out
    assert "124/2" in out  # two levels at the best width
    best = best_widths(profile.grid)
    assert {point.topk for point in best.values()} == {2}
    assert set(best) == {(steps, size) for steps in (1, 2) for size in (1, 2, 4)}


@pytest.mark.parametrize("name", ["map.png", "map.svg"])
def test_heat_maps(profile: Profile, name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_heat_map(profile, tmp_path / name)
    start = (tmp_path / name).read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if name.endswith("png") else b"<?xml" in start
    with pytest.raises(InvalidInputError, match="cannot write"):
        write_heat_map(profile, tmp_path / "map.unknown")
