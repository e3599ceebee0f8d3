"""``eyas calibrate``: curves against a restatement, calibrated policies, storage, and the command on a table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas.bench.calibrate import split
from eyas.bench.calibration_plots import calibration_plots
from eyas.bench.plots import draw
from eyas.bench.questions import Question
from eyas.bench.reliability import curve, curves, observe, positions
from eyas.calibration import CALIBRATION, IDENTITY, Calibration, LevelMap, read_calibration
from eyas.cli import main
from eyas.errors import CheckpointError, InvalidInputError
from eyas.policies import Candidates, DynamicPolicy
from eyas.policies.base import Children
from eyas.replay import Recording, record
from support.drafters import ScriptedDrafter, dial
from support.table_cli import use_table
from support.tiny import TableTarget

POLICY = DynamicPolicy(num_steps=3, topk=2, num_draft_tokens=4)


@pytest.fixture(scope="module")
def recording() -> Recording:
    target = TableTarget(16, seed=2, memory=2, max_positions=64)
    drafter = ScriptedDrafter(target.ranking, dial(0.6), first_token=3)
    return record(target, drafter, [[3, 4], [3, 9, 2]], num_steps=3, topk=2, max_tokens=20)


def test_observations_are_the_drafted_nodes(recording: Recording) -> None:
    observed = observe(recording, POLICY)
    row = 0
    for moment in recording.moments:
        c = moment.candidates
        for node in range(1, len(c)):
            path = []
            at = node
            while at > 0:
                path.insert(0, int(c.tokens[at]))
                at = int(c.parents[at])
            if len(path) > len(moment.rest) or not np.isfinite(c.log_values[node]):
                continue
            right = tuple(path) == moment.rest[: len(path)]
            assert observed.right[row] == right
            assert observed.asked[row] == (tuple(path[:-1]) == moment.rest[: len(path) - 1])
            assert observed.depths[row] == len(path)
            assert observed.confidences[row] == pytest.approx(np.exp(c.log_probs[node]))
            assert observed.kept[row] == (node in POLICY.select(c))
            row += 1
    assert row == len(observed.right) > 100
    assert 0 < observed.right.sum() < observed.asked.sum()


def test_positions_count_the_nodes_whose_parent_was_right(recording: Recording) -> None:
    table = positions(observe(recording, POLICY))
    judged = [moment for moment in recording.moments if moment.candidates.depth]
    assert table[0][0]["asked"] == table[0][1]["asked"] == len(judged)
    firsts = sum(bool(moment.path) and moment.candidates.ranks[moment.path[0]] == 0 for moment in judged)
    assert table[0][0]["right"] == firsts


def test_a_curve_sums_up_its_nodes() -> None:
    found = curve(np.array([0.01, 0.03, 0.97, 1.0, 0.5]), np.array([False, True, True, True, False]))
    assert [each["count"] for each in found["bins"]] == [2, 1, 2]
    assert found["bins"][0] == {"promised": pytest.approx(0.02), "right": 0.5, "count": 2}
    assert found["ece"] == pytest.approx((2 * 0.48 + 1 * 0.5 + 2 * 0.015) / 5)
    assert (found["count"], found["right"], found["promised"]) == (5, 3, pytest.approx(2.51))
    assert curve(np.zeros(0), np.zeros(0, bool))["ece"] is None


def test_a_fit_lowers_the_error_on_what_it_was_fitted_on(recording: Recording) -> None:
    fitted = recording.calibration()
    before, after = (curves(observe(recording, POLICY, each)) for each in (IDENTITY, fitted))
    assert after["path"]["all"]["ece"] < before["path"]["all"]["ece"]
    assert after["path"]["all"]["count"] == before["path"]["all"]["count"]


def candidates() -> Candidates:
    """Two levels of two children each."""
    grown = Candidates.root(0).with_children(
        np.array([0]), Children(np.array([[1, 2]]), np.log(np.array([[0.6, 0.3]], np.float32)))
    )
    log_probs = np.log(np.array([[0.9, 0.05], [0.9, 0.05]], np.float32))
    return grown.with_children(np.array([1, 2]), Children(np.array([[3, 4], [5, 6]]), log_probs))


def test_a_calibrated_policy_orders_by_what_values_are_worth() -> None:
    policy = DynamicPolicy(num_steps=2, topk=2, num_draft_tokens=2)
    assert policy.select(candidates()).tolist() == [1, 3]  # 0.6, 0.54
    same = LevelMap((-5.0, 0.0), (-5.0, 0.0))
    deep = LevelMap((-5.0, 0.0), (-6.0, -1.5))  # level 2 promises too much: 0.54 is worth 0.12
    doubting = replace(policy, calibration=Calibration((same, deep)))
    assert doubting.select(candidates()).tolist() == [1, 2]
    assert doubting.expand(Candidates.root(0)).tolist() == [0]


def test_nodes_of_equal_worth_keep_the_drafters_order_and_their_parents() -> None:
    flat = LevelMap((-9.0, 0.0), (-1.0, -1.0))
    for count in range(1, 7):
        policy = DynamicPolicy(2, 2, count, calibration=Calibration((flat,)))
        kept = policy.select(candidates()).tolist()
        values = candidates().log_values
        assert kept == sorted(sorted(range(1, 7), key=lambda node: (-values[node], node))[:count])
        assert all(candidates().parents[node] in (0, *kept) for node in kept)


def test_a_head_keeps_one_map_for_each_kind_of_answers(tmp_path: Path) -> None:
    greedy, sampled = (Calibration((LevelMap((-2.0, 0.0), (-1.0, -x)),)) for x in (0.1, 0.2))
    assert read_calibration(tmp_path, greedy=True) == IDENTITY
    for each, mode in ((greedy, True), (sampled, False)):
        CALIBRATION.write(tmp_path, each.as_dict(), greedy=mode)
    assert read_calibration(tmp_path, greedy=True) == greedy
    assert read_calibration(tmp_path, greedy=False) == sampled


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 9}', '{"format": 1, "greedy": [{"promised": [1]}]}'])
def test_a_file_that_is_no_calibration_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / CALIBRATION.file).write_text(text)
    with pytest.raises(CheckpointError, match=r"calibration\.json"):
        read_calibration(tmp_path, greedy=True)


def test_nothing_is_judged_by_what_it_was_fitted_on() -> None:
    questions = [Question(file, i, "", ("x",)) for i in range(3) for file in ("a", "b")]
    fit, rest = split(questions)
    assert [(q.file, q.question_id) for q in fit] == [("a", 0), ("b", 0), ("a", 2), ("b", 2)]
    assert [(q.file, q.question_id) for q in rest] == [("a", 1), ("b", 1)]
    with pytest.raises(InvalidInputError, match="single question"):
        split(questions[:2])


@pytest.fixture
def questions(tmp_path: Path) -> list[str]:
    files = []
    for name in ("a", "b"):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"turns": [f"w{9 + i} w{12 + i}"]}) + "\n" for i in range(4)))
        files.append(str(file))
    return files


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["calibrate", *arguments])
    return int(left.value.code or 0)


def test_the_command_measures_fits_and_stores(
    tmp_path: Path, questions: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_table(monkeypatch, eos=False)
    head, out = tmp_path / "head", tmp_path / "found.json"
    head.mkdir()
    width = ("--num-steps", "3", "--topk", "3", "--num-draft-tokens", "4", "--max-tokens", "24")
    assert run(*questions, "--draft", str(head), *width, "--out", str(out), "--save", "--no-plots") == 0
    assert "Expected calibration error" in capsys.readouterr().out
    data: dict[str, Any] = json.loads(out.read_text())
    assert data["fitted_on"] == {"questions": 4, "files": ["a", "b"]}
    assert set(data["report"]["files"]) == {"a", "b"}
    assert [part["questions"] for part in data["report"]["files"].values()] == [2, 2]
    gain = data["acceptance_length"]["total"]
    assert gain["ratio"] == pytest.approx(gain["after"] / gain["before"])
    assert gain["interval"][0] <= gain["ratio"] <= gain["interval"][1]
    assert read_calibration(head, greedy=True).as_dict() == data["calibration"]
    assert run("--report", str(out), "--json", "--no-plots") == 0
    assert json.loads(capsys.readouterr().out) == data
    pytest.importorskip("matplotlib")
    svgs = draw(data, calibration_plots(data))
    assert len(svgs) == 5 and all(svg.startswith("<svg") for svg in svgs.values())
    assert run("--report", str(out)) == 0
    assert len(list(tmp_path.glob("found-*.svg"))) == 5


def test_the_command_measures_alone(
    questions: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_table(monkeypatch, eos=False)
    assert run(*questions, "--draft", "default", "--measure-only", "--max-tokens", "8", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["calibration"] is None and data["acceptance_length"] is None
    assert data["report"]["total"]["questions"] == 8
    assert "after" not in data["report"]["total"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draft", "none"], "only a head has a confidence"),
        (["--policy", "chain"], "dynamic"),
        (["--save", "--measure-only"], "--save"),
        (["--report", "nowhere.json"], "cannot read"),
    ],
)
def test_what_cannot_be_calibrated_is_said(
    arguments: list[str],
    message: str,
    questions: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use_table(monkeypatch)
    assert run(*questions, *arguments) == 2
    assert message in capsys.readouterr().err
