"""A profile without a tuning: stored with a head what holds anywhere, timed once what does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import eyas.forecast
from eyas.calibration import Calibration, LevelMap
from eyas.cli import main
from eyas.costs import CostTable
from eyas.errors import CheckpointError, InvalidInputError
from eyas.forecast import FORECAST, Forecast, Load, costs_path, estimated_profile, read_forecast
from eyas.plan import profile_key
from eyas.profile import DrawnTree
from eyas.profile_files import profile_path, save_profile
from eyas.profile_policies import fastest_way
from eyas.timing import measure_costs
from eyas.way import PLAINLY, Way
from support.profiles import COSTS, made_up_profile
from support.table_cli import load_table

LOADED, DRAFTER = load_table()
KEY = profile_key("default", LOADED, greedy=True)  # type: ignore[arg-type]
MAP = LevelMap((-3.0, -0.5), (-2.0, -0.1))
SMALL, LARGE = DrawnTree(2, 1, 2, 1.8), DrawnTree(5, 4, 12, 2.8)
FORECAST_HERE = Forecast(((0.5, 0.2, 0.1),) * 3, Calibration((MAP,)), 15, (0.3, 0.6))
STEEP = CostTable((1, 4, 16), (10.0, 15.0, 30.0), (1, 4), (0.3, 0.5), first_ms=0.5)
DEAR = CostTable((1, 4, 16), (10.0, 40.0, 160.0), (1, 4), (9.0, 9.0), first_ms=9.0)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """What was asked of ``measure_costs``, which always finds ``COSTS``; profiles in a directory of the test's own."""
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path))
    asked: list[dict[str, Any]] = []

    def measure(target: Any, drafter: Any, **options: Any) -> CostTable:
        asked.append(options)
        return COSTS

    monkeypatch.setattr(eyas.forecast, "measure_costs", measure)
    return asked


def estimate(forecast: Forecast = FORECAST_HERE, notice: Callable[[str], object] | None = None, **key: Any) -> Any:
    return estimated_profile(replace(KEY, **key), LOADED.target, DRAFTER, forecast, notice)


def test_it_is_stored_with_the_head_for_each_way_of_answering(tmp_path: Path) -> None:
    assert read_forecast(tmp_path, greedy=True) is None
    sampled = replace(FORECAST_HERE, drawn=(SMALL, LARGE))
    for each, greedy in ((FORECAST_HERE, True), (sampled, False)):
        FORECAST.write(tmp_path, each.as_dict(), greedy=greedy)
    assert read_forecast(tmp_path, greedy=True) == FORECAST_HERE
    assert read_forecast(tmp_path, greedy=False) == sampled


def test_where_nothing_can_be_written_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"cannot write .*forecast\.json"):
        FORECAST.write(tmp_path / "nowhere", FORECAST_HERE.as_dict(), greedy=True)


def damaged(**values: Any) -> str:
    return json.dumps({"format": 1, "greedy": {**FORECAST_HERE.as_dict(), **values}})


TREE = {"num_steps": 2, "topk": 1, "num_draft_tokens": 2, "acceptance_length": 1.5}


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        '{"format": 2}',
        '{"format": 1, "greedy": []}',
        '{"format": 1, "greedy": {"acceptance": [[0.5]]}}',
        damaged(acceptance=[[2.0]]),
        damaged(acceptance=[]),
        damaged(acceptance=[[0.1, 0.1]] * 300),
        *(damaged(num_draft_tokens=value) for value in (0, 1000000, 2.7, "10", True, float("inf"), None)),
        *(damaged(hit_rates=value) for value in ([float("nan")], [1.5], ["x"], 3)),
        *(damaged(drawn=[{**TREE, "num_steps": value}]) for value in ("5", 0, 4.5, 10**10, -3)),
        *(
            damaged(drawn=[{**TREE, "acceptance_length": value}])
            for value in ("x", None, float("inf"), 0.5, float("nan"))
        ),
        damaged(drawn=[{"num_steps": 2}]),
    ],
)
def test_a_damaged_one_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / FORECAST.file).write_text(text)
    with pytest.raises(CheckpointError, match=FORECAST.file):
        read_forecast(tmp_path, greedy=True)


def test_prices_decide() -> None:
    greedy = FORECAST_HERE.profile(KEY, COSTS)
    assert fastest_way(greedy) == Way("budgeted", graft=True)
    assert fastest_way(greedy, False) == Way("budgeted")
    assert greedy.rate > 1 / COSTS.plain_ms
    assert greedy.template
    assert Forecast.of(greedy) == FORECAST_HERE
    poor = replace(FORECAST_HERE, acceptance=((0.02, 0.01, 0.01),) * 3).profile(KEY, DEAR)
    assert fastest_way(poor) == PLAINLY
    assert poor.rate == 1 / DEAR.plain_ms
    assert poor.template == ()


def test_drawn_trees_are_ordered_by_what_they_bring_here() -> None:
    sampled = replace(FORECAST_HERE, drawn=(SMALL, LARGE))
    flat = sampled.profile(KEY, COSTS)
    assert flat.drawn == (LARGE, SMALL)
    assert fastest_way(flat) == Way("dynamic", draw=True)
    assert fastest_way(flat, draw=False) == Way("budgeted", graft=True)
    assert fastest_way(flat, graft=True) == Way("budgeted", graft=True)
    assert sampled.profile(KEY, STEEP).drawn == (SMALL,)  # 2.8 tokens do not pay for 13 rows
    assert sampled.profile(KEY, DEAR).drawn == ()
    expanded = (1, 4, 4, 4, 4)
    assert LARGE.rate(COSTS) == 2.8 / COSTS.cycle(expanded, 12)


def test_passes_are_timed_once(timed: list[dict[str, Any]]) -> None:
    told: list[str] = []
    first = estimate(notice=told.append)
    assert timed == [{"topk": 3, "logits": False}]
    assert "once" in told.pop()
    assert estimate(notice=told.append) == first
    assert not told
    # Another word of the head on its guesses needs no other prices.
    other = replace(FORECAST_HERE, num_draft_tokens=4)
    assert estimate(other) == other.profile(KEY, COSTS)
    assert len(timed) == 1
    # Other threads do, and sampled answers, whose passes write their logits down; each have a file of their own.
    for _ in range(2):
        estimate(threads=7)
        estimate(sampled=True)
        estimate()
    assert [each["logits"] for each in timed] == [False, False, True]
    estimate(machine="another")  # whose home it is, too
    assert len(timed) == 4


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"format": 1, "key": {}}', '{"format": 1, "key": 3, "costs": {}}', "NaN"]
)
def test_what_was_kept_may_be_damaged(timed: list[dict[str, Any]], text: str) -> None:
    expected = estimate()
    costs_path(KEY).write_text(text)
    assert estimate() == expected
    assert len(timed) == 2
    estimate()
    assert len(timed) == 2


def test_what_cannot_be_kept_is_used_all_the_same(timed: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "profiles").write_text("no directory")
    told: list[str] = []
    assert estimate(notice=told.append).costs == COSTS
    assert told[-1].startswith("cannot write")


def test_prices_of_a_busy_machine_are_not_kept(timed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Load, "others_since", lambda self, start: 0.9)
    told: list[str] = []
    assert estimate(notice=told.append).costs == COSTS
    assert "busy" in told[-1]
    monkeypatch.setattr(Load, "others_since", lambda self, start: 0.1)
    estimate()
    estimate()
    assert len(timed) == 2


def test_load_is_what_others_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    start, later = Load(10.0, 3.0, 100.0), Load(12.0, 6.0, 105.0)
    assert later.others_since(start) == pytest.approx((5 - 3) / (2 * 4))
    assert Load(12.0, 9.0, 105.0).others_since(start) == 0.0  # ours ran ahead of the system's ticks
    assert Load.now().clock > 0.0 and Load.now().others_since(Load.now()) >= 0.0
    monkeypatch.setattr(Path, "read_text", lambda self: "no such thing")
    assert Load.now().everybody == 0.0


def test_a_tuning_comes_first(timed: list[dict[str, Any]]) -> None:
    estimate()
    save_profile(made_up_profile(KEY, none=1.0))
    assert {path.name for path in profile_path(KEY).parent.iterdir()} == {profile_path(KEY).name, costs_path(KEY).name}


def test_quick_costs_are_those_of_the_machine() -> None:
    now = 0.0

    def clock() -> float:  # every look takes a second and a half
        nonlocal now
        now += 1.5
        return now

    costs = measure_costs(LOADED.target, DRAFTER, topk=2, logits=True, clock=clock)
    assert costs.verify_rows[:2] == (1, 2)
    assert costs.draft_nodes == (1,)  # no wider than asked
    assert set(costs.verify_ms) == {1500.0}
    assert costs.first_ms == 1500.0
    assert costs.level(1) == 0.0
    short, drafter = load_table(max_positions=48)
    assert measure_costs(short.target, drafter, topk=2, logits=False, clock=clock).plain_ms == 1500.0


def test_only_a_head_can_keep_a_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["tune", "--draft", "ngram", "--save"])
    assert "--save stores a forecast with a head" in capsys.readouterr().err
