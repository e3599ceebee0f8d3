"""Plans: the fastest that was measured, sensible defaults where nothing was, a word where a profile does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eyas.cli import main
from eyas.drafters.grafted import GraftedDrafter
from eyas.drafters.ngram import NgramDrafter
from eyas.drafters.small_model import SmallModelDrafter
from eyas.errors import InvalidInputError
from eyas.generate import Session, generate
from eyas.plan import CHOICES, MEASURED, PLAIN, DraftSettings, Planner, profile_key, read_template
from eyas.policies import DynamicPolicy, StaticPolicy
from eyas.policies.gate import Gate
from eyas.profile import DrawnTree, Profile
from eyas.profile_files import profile_path, save_profile
from eyas.profile_policies import budgeted_policy, sequoia_policy
from eyas.stopping import StopParams
from eyas.way import Way
from support.profiles import COSTS, made_up_profile
from support.table_cli import load_table, use_table
from support.tiny import TableTarget

QUESTION = "w9 w10"
LOADED, DRAFTER = load_table()


def profile(**speeds: float) -> Profile:
    return made_up_profile(profile_key("default", LOADED, greedy=True), **speeds)  # type: ignore[arg-type]


def planner(settings: DraftSettings | None = None, known: Profile | None = None, drafter: Any = DRAFTER) -> Planner:
    return Planner(settings or DraftSettings(), LOADED.target, drafter, known)


# --- what auto chooses -----------------------------------------------------------------------------------------


def test_without_a_profile_it_is_eagle2_behind_a_gate_of_typical_costs() -> None:
    plan = planner().plan()
    assert (plan.way, plan.drafter, plan.policy) == (Way("dynamic"), DRAFTER, DynamicPolicy())
    assert plan.gate is not None
    head, ngram = plan.gate.costs, planner(drafter=NgramDrafter()).costs
    assert head.verify_ms == ngram.verify_ms
    assert ngram.draft((1, 4, 4)) == 0.0 < head.draft((1, 4, 4))
    model = planner(drafter=SmallModelDrafter(LOADED.target, 48)).costs
    assert model.level(1) == model.plain_ms  # the target drafts for itself


@pytest.mark.parametrize("fastest", ["none", "dynamic", "sequoia", "budgeted", "budgeted+graft"])
def test_with_one_it_is_the_fastest(fastest: str) -> None:
    speeds = dict.fromkeys(("none", "dynamic", "sequoia", "budgeted", "budgeted_graft"), 100.0)
    known = profile(**speeds | {fastest.replace("+", "_"): 120.0})
    plan = planner(known=known).plan()
    assert str(plan.way) == fastest
    if fastest == "none":
        assert plan == PLAIN
        return
    assert plan.gate == Gate(COSTS)
    assert isinstance(plan.drafter, GraftedDrafter) == plan.way.graft
    wanted = {"dynamic": DynamicPolicy(2, 3, 5), "sequoia": sequoia_policy(known), "budgeted": budgeted_policy(known)}
    assert plan.policy == wanted[plan.way.policy]


def test_grafting_can_be_asked_for_and_refused() -> None:
    known = profile(none=100, dynamic=110, budgeted=130, budgeted_graft=120, dynamic_graft=140)
    assert planner(known=known).plan().way == Way("dynamic", graft=True)
    assert planner(DraftSettings(graft=False), known).plan().way == Way("budgeted")
    plan = planner(DraftSettings(graft=True), profile(none=100, dynamic=110)).plan()
    assert plan.way == Way("dynamic", graft=True)
    assert isinstance(plan.drafter, GraftedDrafter)
    assert plan.drafter.ngram == NgramDrafter(hit_rates=(0.3, 0.6))  # at its measured price
    assert planner(DraftSettings(graft=True)).plan().way == Way("dynamic", graft=True)
    # Asked for where nothing pays: still nothing.
    assert planner(DraftSettings(graft=True), profile(none=150, dynamic=110, dynamic_graft=120)).plan() == PLAIN


def test_drawing_is_what_was_measured_or_asked_for() -> None:
    assert planner().plan().draw
    assert not planner(DraftSettings(draw=False)).plan().draw
    known = replace(profile(none=100, dynamic=110, budgeted=130, dynamic_drawn=140), drawn=(DrawnTree(3, 2, 4, 2.5),))
    plan = planner(known=known).plan()
    assert (plan.way, plan.policy, plan.draw) == (Way("dynamic", draw=True), DynamicPolicy(3, 2, 4), True)
    chosen = planner(DraftSettings(draw=False), known).plan()
    assert (chosen.way, chosen.draw) == (Way("budgeted"), False)
    grafted = planner(DraftSettings(graft=True), known).plan()
    assert (grafted.way, grafted.draw) == (Way("budgeted", graft=True), False)
    slow = replace(profile(none=100, dynamic=150, budgeted=130, dynamic_drawn=140), drawn=(DrawnTree(3, 2, 4, 2.5),))
    assert not planner(known=slow).plan().draw  # its tree was chosen by what the likeliest brought
    assert planner(DraftSettings(draw=True), slow).plan().way == Way("dynamic", draw=True)
    assert planner(DraftSettings(policy="dynamic"), slow).plan().draw
    assert not planner(DraftSettings(policy="sequoia"), slow).plan().draw
    assert planner(DraftSettings(policy="sequoia", draw=True), slow).plan().draw
    assert not planner(DraftSettings(policy="dynamic", graft=True), slow).plan().draw


def test_unmeasured_profiles_are_trusted_for_their_predictions() -> None:
    assert planner(known=profile()).plan().way == Way("budgeted", graft=True)
    assert planner(DraftSettings(graft=False), profile()).plan().way == Way("budgeted")
    assert planner(known=replace(profile(), hit_rates=())).plan().way == Way("budgeted")
    drawn = planner(known=replace(profile(), drawn=(DrawnTree(3, 2, 4, 2.5), DrawnTree(2, 1, 2, 2.0)))).plan()
    assert (drawn.way, drawn.policy, drawn.draw) == (Way("dynamic", draw=True), DynamicPolicy(3, 2, 4), True)
    dear = replace(profile(), costs=replace(COSTS, first_ms=500.0))
    assert planner(known=dear).plan() == PLAIN


def test_numbers_of_ones_own_make_it_dynamic() -> None:
    settings = DraftSettings(topk=2, num_draft_tokens=3)
    plan = planner(settings, profile(none=1, budgeted=9)).plan()
    assert plan.policy == DynamicPolicy(topk=2, num_draft_tokens=3)
    assert plan.gate == Gate(COSTS)


def test_named_policies_are_taken_as_they_are() -> None:
    known = profile(none=900, dynamic=1)  # nothing pays: asked for all the same
    for name in CHOICES[1:]:
        plan = planner(DraftSettings(policy=name), known).plan()
        assert plan.way == Way(name)
        assert plan.drafter is DRAFTER
        assert (plan.gate is not None) == (name == "budgeted")
    assert planner(DraftSettings(policy="dynamic"), known).plan().policy == DynamicPolicy()
    small = planner(DraftSettings(policy="sequoia", num_draft_tokens=3), known).plan().policy
    assert isinstance(small, StaticPolicy)
    assert small.num_draft_tokens == 3
    bound = planner(DraftSettings(policy="budgeted", num_draft_tokens=3, num_steps=2), known).plan().policy
    assert bound == replace(budgeted_policy(known), num_draft_tokens=3, num_steps=2)
    for name in MEASURED:
        with pytest.raises(InvalidInputError, match=f"{name} needs measurements"):
            planner(DraftSettings(policy=name)).plan()


@pytest.mark.parametrize("graft", [False, True])
@pytest.mark.parametrize("name", CHOICES)
def test_every_plan_gives_the_plain_answer(name: str, graft: bool) -> None:
    plan = planner(known=profile(none=1, budgeted=2)).plan(Way(name, graft))
    target: TableTarget = LOADED.target

    def answer(drafter: Any) -> list[int]:
        steps = generate(
            Session(target, drafter), [0, 9, 10], policy=plan.policy, gate=plan.gate, stop=StopParams(max_tokens=60)
        )
        return [token for step in steps for token in step.tokens]

    assert answer(plan.drafter) == answer(None)


# --- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "best"}, "unknown policy 'best'"),
        ({"topk": 0}, "topk must be at least 1, got 0"),
        ({"num_steps": 65}, "num_steps must be at most 64"),
        ({"num_draft_tokens": 10**9}, "num_draft_tokens must be at most 256"),
        ({"graft": True, "draft": "ngram"}, "--draft ngram"),
        ({"graft": True, "draw": True}, "--draw excludes --graft"),
        ({"draft": "ngram", "draw": True}, "--draw draws from a head's distribution"),
        ({"template": Path("t.json")}, "--policy static"),
        ({"policy": "static", "num_steps": 3, "topk": 2}, "leave out num_steps and topk"),
        ({"policy": "chain", "topk": 2}, "leave out topk"),
        ({"draft": "none", "policy": "static"}, "--draft none decodes plainly; leave out --policy static"),
        ({"draft": "none", "num_steps": 3}, "leave out num_steps"),
        ({"template": Path("t.json"), "policy": "static", "topk": 2}, "leave out topk"),
        ({"template": Path("/nowhere.json"), "policy": "static"}, "cannot read the template"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        DraftSettings(**settings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[0], [0, 0]", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("{}", "not a list of rank paths"),
        ("[0, 1]", "not a list of rank paths"),
        ("[]", "at least one node"),
        ("[[0], [1, 0]]", r"not its parent \[1\]"),
        ("[[0], [0]]", "twice"),
        ("[[-1]]", "ranks >= 0"),
        ("[[0.5]]", "list of lists of ranks"),
        ('[["a"]]', "list of lists of ranks"),
        ("[[100]]", "has topk 101, at most 64"),
        (json.dumps([[0] * depth for depth in range(1, 70)]), "has num_steps 69, at most 64"),
        (json.dumps([[i, j] for i in range(20) for j in range(20)] + [[i] for i in range(20)]), "num_draft_tokens 420"),
    ],
)
def test_bad_templates(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=message):
        read_template(path)


# --- from the command line -------------------------------------------------------------------------------------


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    use_table(monkeypatch)
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))

    def once(*arguments: str, command: str = "generate") -> tuple[str, str]:
        words = ("--json",) if command == "generate" else ()
        with pytest.raises(SystemExit):
            main([command, QUESTION, "--max-tokens", "40", "--ignore-eos", *words, *arguments])
        captured = capsys.readouterr()
        return captured.out, captured.err

    return once


def test_a_template_from_a_file(run: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    path.write_text("[[0], [1], [0, 0], [0, 1]]")
    plain, _ = run("--draft", "none")
    out, _ = run("--policy", "static", "--template", str(path))
    assert json.loads(out)["token_ids"] == json.loads(plain)["token_ids"]
    stats = json.loads(out)["stats"]
    assert stats["draft_tokens"] >= 4 * (stats["cycles"] - 2)
    path.write_text("[[1, 1]]")
    _, err = run("--policy", "static", "--template", str(path))
    assert err.startswith("eyas: the template")


def test_without_one_the_heads_forecast_serves(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = run("--draft", "none")
    for turn, words in enumerate([(), *(("--policy", name) for name in MEASURED), ("--graft",), ("--no-graft",)]):
        out, err = run(*words)
        assert ("timing this machine once" in err) == (turn == 0)
        assert json.loads(out)["token_ids"] == json.loads(plain)["token_ids"]
        assert json.loads(out)["stats"]["draft_tokens"] > 0
    out, _ = run("--temperature", "1", "--seed", "3")
    assert json.loads(out)["stats"]["draft_tokens"] > 0
    monkeypatch.setattr("eyas.plan.read_forecast", lambda head, *, greedy: None)
    for name in MEASURED:
        _, err = run("--policy", name)
        assert f"--policy {name} needs measurements" in err


def test_a_profile_is_found_and_used(run: Callable[..., Any]) -> None:
    plain, err = run("--draft", "none")
    assert err == ""
    save_profile(profile(none=100, sequoia=150))
    for words in ((), ("--policy", "budgeted"), ("--graft",), ("--no-graft",)):
        out, err = run(*words)
        assert err == ""
        assert json.loads(out)["token_ids"] == json.loads(plain)["token_ids"]
    save_profile(profile(none=100, sequoia=50))
    out, _ = run()
    assert json.loads(out)["stats"]["draft_tokens"] == 0
    _, err = run(command="inspect")
    assert "does not pay here" in err


@pytest.mark.parametrize(
    ("field", "value"),
    [("machine", "Z80 x1"), ("threads", 999), ("drafter_fingerprint", "0"), ("model", "0"), ("kernels", "mmx")],
)
def test_a_profile_that_does_not_fit_is_noticed(run: Callable[..., Any], field: str, value: Any) -> None:
    known = profile(none=100, sequoia=150)
    save_profile(replace(known, key=replace(known.key, **{field: value})), profile_path(known.key))
    out, err = run()
    assert f"made for {field.replace('_', ' ')} {value!r}, not" in err
    assert "run eyas tune again" in err
    assert json.loads(out)["stats"]["draft_tokens"] > 0  # by the default policy
    _, err = run("--policy", "dynamic")
    assert err == ""  # which has no use for it


def test_a_profile_by_name(run: Callable[..., Any], tmp_path: Path) -> None:
    path = save_profile(profile(none=100, sequoia=50), tmp_path / "mine.json")
    out, _ = run("--profile", str(path))
    assert json.loads(out)["stats"]["draft_tokens"] == 0
    _, err = run("--profile", str(tmp_path / "nothing.json"))
    assert err.startswith("eyas: cannot read the profile")
    path.write_text("{}")
    _, err = run("--profile", str(path))
    assert "damaged" in err
