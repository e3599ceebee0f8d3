"""Replays against real runs, the tuner against a machine whose prices are known, profiles on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas.costs import CostTable, TimedCycle, with_whole_cycles
from eyas.draws import Draws
from eyas.errors import CheckpointError, InvalidInputError
from eyas.generate import Session, generate
from eyas.policies import Candidates, DynamicPolicy, StaticPolicy, TreePolicy, grow_tree
from eyas.policies.base import Children
from eyas.policies.budgeted import BudgetedPolicy
from eyas.policies.sequoia import expected_accepted
from eyas.profile import Check, Profile, ProfileKey
from eyas.profile_files import load_profile, profile_path, read_profile, save_profile
from eyas.profile_policies import budgeted_policy, dynamic_policy, fastest_way, sequoia_policy
from eyas.replay import Recording, record, replay, walks
from eyas.sampling import SamplingParams, log_softmax
from eyas.stopping import StopParams
from eyas.targets.base import ArrayOutput, Features
from eyas.timing import random_tree
from eyas.tree import DraftTree, Ints
from eyas.tuner import Effort, choose, drawn_trees, over_all, settings, settle, tune
from eyas.way import PLAINLY, Way
from support.tiny import TableCache, TableTarget

PROMPTS = [[1, 2, 3, 4, 5, 6], [3, 1, 4, 1, 5], [2, 7, 1, 8], [6, 6, 6]]


class NoisyDrafter:
    """The target's own distribution with noise on its logits, decided by the prefix: the same guesses in any tree.

    For targets with a memory of three tokens: a session is never told the prompt's first.
    """

    name = "noisy"
    feature_levels = 0

    def __init__(self, target: TableTarget, noise: float = 0.7) -> None:
        self.target, self.noise = target, noise

    def new_session(self) -> NoisySession:
        return NoisySession(self)

    def log_probs(self, prefix: list[int]) -> np.ndarray:
        rng = np.random.default_rng([99, *prefix[-5:]])
        logits = self.target.logits(prefix)
        return log_softmax((logits + self.noise * rng.normal(size=len(logits))).astype(np.float32))


def path_of(candidates: Candidates, node: int) -> list[int]:
    path: list[int] = []
    while node > 0:
        path.insert(0, int(candidates.tokens[node]))
        node = int(candidates.parents[node])
    return path


class NoisySession:
    def __init__(self, drafter: NoisyDrafter) -> None:
        self._drafter = drafter
        self.tokens: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    def commit(self, tokens: Sequence[int], features: Features) -> None:
        self.tokens += [int(token) for token in tokens]

    def truncate(self, length: int) -> None:
        del self.tokens[length:]

    def propose(self, root: int, policy: TreePolicy, max_depth: int) -> DraftTree:
        def score(candidates: Candidates, expanded: Ints) -> Children:
            tokens, logs = [], []
            for node in expanded.tolist():
                values = self._drafter.log_probs(self.tokens + path_of(candidates, node))
                best = np.argsort(-values, kind="stable")[: policy.topk]
                tokens.append(best)
                logs.append(values[best])
            return Children(np.array(tokens), np.array(logs, np.float32))

        return grow_tree(root, policy, max_depth, score)


def make_key(target: TableTarget, fingerprint: str, threads: int | None = None) -> ProfileKey:
    return ProfileKey.of(target.info, fingerprint, ("noisy", "d00d"), threads=threads)


def chosen(recording: Recording, costs: CostTable, key: ProfileKey) -> Profile:
    return choose(recording, costs, key, 15, settings(recording, 15))


COSTS = CostTable((1, 4, 8, 16), (10.0, 10.5, 12.0, 22.0), (1, 2, 4), (0.6, 0.7, 0.9), first_ms=0.8, overhead_ms=0.4)


def peaked_target() -> TableTarget:
    return TableTarget(10, seed=2, spread=2.5, max_positions=200, memory=3)


@pytest.fixture(scope="module")
def recording() -> Recording:
    target = peaked_target()
    return record(target, NoisyDrafter(target), PROMPTS, num_steps=4, topk=4, max_tokens=30)


def test_recording_is_plain_decoding(recording: Recording) -> None:
    target = peaked_target()
    for prompt, answer in zip(PROMPTS, recording.answers, strict=True):
        steps = generate(Session(target), prompt, stop=StopParams(max_tokens=30))
        tokens = [token for step in steps for token in step.tokens]
        assert len(answer) == 29
        for place, moment in enumerate(answer):
            assert moment.candidates.tokens[0] == tokens[place]
            assert list(moment.rest) == tokens[place + 1 :]
            for depth, node in enumerate(moment.path, start=1):
                assert moment.candidates.tokens[node] == tokens[place + depth]
    assert max(len(moment.path) for moment in recording.moments) == 4  # the drafter is right for long at times


WITHIN: list[TreePolicy] = [
    DynamicPolicy(4, 4, 9),
    DynamicPolicy(2, 4, 3),
    StaticPolicy.chain(3),
    StaticPolicy.from_paths([[0], [1], [0, 0], [1, 0], [0, 0, 1]]),
    BudgetedPolicy(COSTS, ((0.5, 0.2, 0.1, 0.05),), 4, 4, 12),
    BudgetedPolicy(COSTS, ((0.5, 0.2, 0.1, 0.05),), 4, 4, 12, rate=0.15),
]


@pytest.mark.parametrize("policy", WITHIN)
def test_a_replay_is_what_a_run_would_be(recording: Recording, policy: TreePolicy) -> None:
    target = peaked_target()
    cycles = tokens = draft_tokens = 0
    ms = 0.0
    for prompt in PROMPTS:
        session = Session(target, NoisyDrafter(target))
        for step in generate(session, prompt, policy=policy, stop=StopParams(max_tokens=30)):
            if step.cycle is None:
                continue
            cycles += 1
            tokens += len(step.tokens)
            draft_tokens += step.cycle.tree.num_draft_tokens
            candidates, expanded = step.cycle.trace.candidates, step.cycle.trace.expanded
            levels = (
                []
                if candidates is None
                else [
                    sum(low <= node < high for node in expanded)
                    for low, high in zip(candidates.levels, candidates.levels[1:], strict=False)
                ]
            )
            ms += COSTS.cycle([width for width in levels if width], step.cycle.tree.num_draft_tokens)
    result = replay(recording, policy, COSTS)
    assert (result.cycles, result.tokens, result.draft_tokens) == (cycles, tokens, draft_tokens)
    assert result.ms == pytest.approx(ms)
    assert result.acceptance_length == tokens / cycles


def test_the_grid_is_many_replays(recording: Recording) -> None:
    steps, widths, budgets = range(1, 5), (1, 2, 4), (1, 3, 8, 20)
    tried = walks(recording, num_steps=steps, topk=widths, num_draft_tokens=budgets)
    points = [walk.priced(COSTS) for walk in tried]
    assert {(p.num_steps, p.topk, p.num_draft_tokens) for p in points} == set(product(steps, widths, budgets))
    for point in points:
        policy = DynamicPolicy(point.num_steps, point.topk, point.num_draft_tokens)
        result = replay(recording, policy, COSTS)
        assert point.acceptance_length == pytest.approx(result.acceptance_length)
        assert point.rate == pytest.approx(result.rate)


def test_acceptance_and_calibration_describe_the_drafter(recording: Recording) -> None:
    acceptance = recording.acceptance(weight=0.0)
    first = [moment for moment in recording.moments if moment.candidates.depth]
    for rank in range(4):
        hits = sum(bool(m.path) and m.candidates.ranks[m.path[0]] == rank for m in first)
        assert acceptance[0][rank] == pytest.approx(hits / len(first))
    assert acceptance[0][0] > acceptance[0][1] > acceptance[0][3]
    # Sequoia's estimate of a chain of one is the share of right first guesses.
    accepted = expected_accepted([(0,)], recording.acceptance(weight=0.0))
    assert accepted == pytest.approx(acceptance[0][0])
    calibration = recording.calibration()
    candidates = max(recording.moments, key=lambda moment: len(moment.path)).candidates
    values = candidates.acceptance_by(calibration)
    assert (values[1:] <= values[candidates.parents[1:]]).all()
    promised = sum(each.value * each.count for each in recording.reliability()[0])
    hit = sum(each.accepted * each.count for each in recording.reliability()[0])
    mapped = sum(m.candidates.acceptance_by(calibration)[1 : m.candidates.levels[2]].sum() for m in first)
    assert abs(mapped - hit) < abs(promised - hit) + 0.05 * hit  # closer to the truth than the drafter's own word


def test_sampled_answers_can_be_recorded() -> None:
    target = peaked_target()
    params = SamplingParams(temperature=1.0, seed=3)
    sampled = record(target, NoisyDrafter(target, 0.2), PROMPTS, num_steps=2, topk=4, max_tokens=30, params=params)
    assert 1.0 < replay(sampled, DynamicPolicy(2, 4, 8), COSTS).acceptance_length <= 3.0


def test_the_budgeted_policy_beats_the_best_fixed_setting_it_was_tuned_beside(recording: Recording) -> None:
    target = peaked_target()
    profile = chosen(recording, COSTS, make_key(target, "f"))
    assert profile.best is not None
    assert profile.best.rate == max(point.rate for point in profile.grid)
    budgeted = replay(recording, budgeted_policy(profile), COSTS).rate
    assert budgeted > profile.best.rate
    assert sequoia_policy(profile) is not None
    assert dynamic_policy(profile) == DynamicPolicy(
        profile.best.num_steps, profile.best.topk, profile.best.num_draft_tokens
    )


def test_where_nothing_pays_nothing_is_chosen(recording: Recording) -> None:
    dear = replace(COSTS, first_ms=500.0)
    target = peaked_target()
    profile = chosen(recording, dear, make_key(target, "f"))
    assert profile.best is None
    assert profile.template == ()
    assert dynamic_policy(profile) is None
    assert sequoia_policy(profile) is None
    assert not budgeted_policy(profile).drafts
    assert profile.rate == pytest.approx(1 / dear.plain_ms)
    assert settle(recording, budgeted_policy(profile)) == pytest.approx(1 / dear.plain_ms)


# --- a machine whose prices are known ---


class Machine:
    """A clock that only work moves."""

    def __init__(self, costs: CostTable) -> None:
        self.costs, self.now = costs, 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, ms: float) -> None:
        self.now += ms / 1000


class PricedTarget(TableTarget):
    def __init__(self, machine: Machine, overhead_ms: float) -> None:
        super().__init__(10, seed=2, spread=2.5, max_positions=400, memory=3)
        self.machine, self.overhead_ms = machine, overhead_ms

    def new_cache(self, capacity: int | None = None) -> PricedCache:
        return PricedCache(self)

    def verify(self, batch: Sequence[tuple[TableCache, DraftTree]], *, logits: bool = True) -> list[ArrayOutput]:
        self.machine.spend(self.machine.costs.verify(len(batch[0][1])))
        return super().verify(batch, logits=logits)


class PricedCache(TableCache):
    """Committing is the rest of a cycle."""

    def __init__(self, target: PricedTarget) -> None:
        super().__init__()
        self._target = target

    def commit(self, path: Sequence[int]) -> None:
        self._target.machine.spend(self._target.overhead_ms)
        super().commit(path)


class PricedDrafter(NoisyDrafter):
    def __init__(self, target: PricedTarget) -> None:
        super().__init__(target)
        self.machine = target.machine

    def new_session(self) -> PricedSession:
        return PricedSession(self)


class PricedSession(NoisySession):
    def propose(self, root: int, policy: TreePolicy, max_depth: int) -> DraftTree:
        assert isinstance(self._drafter, PricedDrafter)
        return super().propose(root, Paying(policy, self._drafter.machine), max_depth)


@dataclass
class Paying:
    """A policy whose every expansion is paid for."""

    policy: TreePolicy
    machine: Machine

    def __post_init__(self) -> None:
        self.num_steps, self.topk = self.policy.num_steps, self.policy.topk
        self.num_draft_tokens = self.policy.num_draft_tokens

    def expand(self, candidates: Candidates) -> Ints:
        chosen = self.policy.expand(candidates)
        costs = self.machine.costs
        if len(chosen):
            self.machine.spend(costs.level(len(chosen)) if candidates.depth else costs.first_ms)
        return chosen

    def select(self, candidates: Candidates) -> Ints:
        return self.policy.select(candidates)


EFFORT = Effort(rows=(1, 4, 8, 16), nodes=(1, 2, 4), num_steps=4, topk=4, max_tokens=24)


def test_the_tuner_finds_the_prices_and_predicts_the_speeds(tmp_path: Path) -> None:
    machine = Machine(COSTS)
    target = PricedTarget(machine, overhead_ms=0.4)
    drafter = PricedDrafter(target)
    told: list[tuple[str, float]] = []
    key = make_key(target, "abc", threads=2)
    profile = tune(
        target,
        drafter,
        PROMPTS,
        key,
        effort=EFFORT,
        clock=machine,
        progress=lambda text, share: told.append((text, share)),
    )
    found = profile.costs
    assert found.verify_rows == (1, 4, 8, 16)
    assert found.verify_ms == pytest.approx(COSTS.verify_ms)
    assert found.draft_ms == pytest.approx(COSTS.draft_ms)
    assert found.first_ms == pytest.approx(COSTS.first_ms)
    assert found.overhead_ms == pytest.approx(0.4)
    drafted = {"budgeted", "dynamic", "sequoia"}
    ways = {Way(name, graft) for name in drafted for graft in (False, True)}
    assert {check.way for check in profile.checks} == {PLAINLY} | ways
    for check in profile.checks:
        if check.way.graft:
            assert check.predicted is None
        else:  # children outside the recorded width are the one thing a replay cannot know
            assert check.measured == pytest.approx(check.predicted, rel=0.01)
    speeds = {check.way: check.measured for check in profile.checks}
    assert speeds[Way("budgeted")] >= speeds[Way("dynamic")] > speeds[PLAINLY]
    assert speeds[fastest_way(profile)] == max(speeds.values())
    assert fastest_way(profile, graft=False) == Way("budgeted")
    tried = [point for point in profile.grid if point.measured is not None]
    assert {point.num_steps for point in tried} == {1, 2, 3, 4}
    for point in tried:
        assert point.expected is not None
        assert point.measured == pytest.approx(point.expected, rel=0.01)
    assert len(profile.hit_rates) == 12
    assert read_profile(save_profile(profile, tmp_path / "p.json")) == profile
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert told[-1] == ("done", 1.0)


class DrawingDrafter(PricedDrafter):
    def new_session(self) -> DrawingSession:
        return DrawingSession(self)


class DrawingSession(PricedSession):
    """Draws from the target's own distribution: every draw is accepted."""

    def propose_drawn(self, root: int, policy: TreePolicy, max_depth: int, draws: Draws) -> DraftTree:
        drafter = self._drafter
        assert isinstance(drafter, PricedDrafter)

        def score(candidates: Candidates, expanded: Ints) -> Children:
            logits = [drafter.target.logits([*self.tokens, *path_of(candidates, node)]) for node in expanded.tolist()]
            return draws.children(np.array(logits), None, policy.topk)

        return grow_tree(root, Paying(policy, drafter.machine), max_depth, score)


def test_the_tuner_tries_drawn_trees_where_answers_are_sampled(tmp_path: Path) -> None:
    machine = Machine(COSTS)
    target = PricedTarget(machine, overhead_ms=0.4)
    key = make_key(target, "abc", threads=2)
    sampled = SamplingParams(temperature=1.0, seed=0)
    profile = tune(target, DrawingDrafter(target), PROMPTS, key, params=sampled, effort=EFFORT, clock=machine)
    assert fastest_way(profile) == Way("dynamic", draw=True)
    assert sorted((t.num_steps, t.topk, t.num_draft_tokens) for t in profile.drawn) == sorted(drawn_trees(EFFORT))
    (check,) = [check for check in profile.checks if check.way.draw]
    assert check.predicted is None
    assert check.acceptance_length == profile.drawn[0].acceptance_length > 3
    assert fastest_way(profile, draw=False) != Way("dynamic", draw=True)
    assert read_profile(save_profile(profile, tmp_path / "p.json")) == profile
    with pytest.raises(InvalidInputError, match="its tree is missing"):
        Profile.from_dict({**profile.as_dict(), "drawn": []})
    # Greedy answers draw nothing, nor does a drafter that cannot.
    for drafter, params in ((DrawingDrafter(target), None), (PricedDrafter(target), sampled)):
        profile = tune(target, drafter, PROMPTS, key, params=params, effort=EFFORT, clock=machine)
        assert profile.drawn == ()
        assert not any(check.way.draw for check in profile.checks)


class WanderingMachine(Machine):
    """Takes half as long again in the end as it does at first, and works in fits."""

    def spend(self, ms: float) -> None:
        super().spend(ms * (1 + 0.5 * min(1.0, self.now / 20)) * (1.1 if self.now % 0.5 < 0.1 else 1.0))


def test_predictions_hold_on_a_machine_whose_speed_wanders() -> None:
    machine = WanderingMachine(COSTS)
    target = PricedTarget(machine, overhead_ms=0.4)
    profile = tune(target, PricedDrafter(target), PROMPTS, make_key(target, "abc"), effort=EFFORT, clock=machine)
    assert machine.now > 20
    assert profile.costs.verify_ms[0] > 1.2 * COSTS.verify_ms[0]  # the machine of the race, not of the start
    for check in profile.checks:
        if check.predicted is not None:
            assert check.measured == pytest.approx(check.predicted, rel=0.05)


def test_what_cycles_take_beyond_their_passes_goes_into_the_table() -> None:
    bare = replace(COSTS, first_ms=0.0, overhead_ms=0.0)
    shapes: list[tuple[tuple[int, ...], int]] = [((), 0), ((1, 3), 5), ((1,), 2)]
    cycles = [TimedCycle(widths, kept, 1, COSTS.cycle(widths, kept)) for widths, kept in shapes]
    known = with_whole_cycles(bare, cycles)
    assert (known.overhead_ms, known.first_ms) == pytest.approx((COSTS.overhead_ms, COSTS.first_ms))
    assert with_whole_cycles(COSTS, []) == COSTS
    # Timed alone, passes over several rows took three drafts longer than they do in cycles.
    slow = replace(COSTS, verify_ms=(COSTS.verify_ms[0], *(ms + 3 * COSTS.first_ms for ms in COSTS.verify_ms[1:])))
    for cycle in cycles:
        put_right = with_whole_cycles(slow, cycles).cycle(cycle.expanded, cycle.num_draft_tokens)
        assert put_right == pytest.approx(cycle.ms, rel=0.03)
    # Passes timed by themselves found cold caches.
    cold = replace(COSTS, verify_ms=tuple(ms + 1.5 for ms in COSTS.verify_ms))
    for widths, kept in shapes:
        assert with_whole_cycles(cold, cycles).cycle(widths, kept) == pytest.approx(COSTS.cycle(widths, kept))
    free = with_whole_cycles(bare, [replace(cycle, ms=0.1) for cycle in cycles])
    assert (
        min(free.overhead_ms, free.first_ms, *free.draft_ms, *free.verify_ms) >= 0.0
    )  # nothing costs less than nothing
    assert free.plain_ms == pytest.approx(0.1)


def test_cycles_of_many_shapes_tell_levels_from_rows() -> None:
    dear = replace(COSTS, verify_ms=(10.0, 10.8, 12.7, 23.5), draft_ms=(0.9, 1.0, 1.2), first_ms=1.0)
    shapes = [((1,) * levels, kept) for levels in (1, 2, 4) for kept in (1, 7, 15)]
    found = with_whole_cycles(COSTS, [TimedCycle(widths, kept, 1, dear.cycle(widths, kept)) for widths, kept in shapes])
    assert found.verify_ms == pytest.approx(dear.verify_ms)
    assert found.draft_ms == pytest.approx(dear.draft_ms)
    assert found.first_ms == pytest.approx(dear.first_ms)


def test_speeds_on_a_few_prompts_tell_of_all() -> None:
    few = [
        Check(PLAINLY, 100.0, 98.0, 1.0),
        Check(Way("dynamic"), 200.0, 210.0, 2.0),
        Check(Way("dynamic", graft=True), None, 231.0, 2.2),
    ]
    all_prompts = {each.way: speed for each, speed in zip(few, (102.0, 180.0, 180.0), strict=True)}
    found = [check.overall for check in over_all(few, all_prompts)]
    assert found == pytest.approx([102 * 0.98, 180 * 1.05, 180 * 1.05 * 1.1])


def test_the_tuned_policy_answers_the_same() -> None:
    machine = Machine(COSTS)
    target = PricedTarget(machine, overhead_ms=0.4)
    drafter = PricedDrafter(target)
    profile = tune(target, drafter, PROMPTS, make_key(target, "abc"), effort=EFFORT, clock=machine)
    for policy in (budgeted_policy(profile), dynamic_policy(profile), sequoia_policy(profile)):
        answers = []
        for each in (drafter, None):
            steps = generate(Session(target, each), [4, 2], policy=policy, stop=StopParams(max_tokens=40))
            answers.append([token for step in steps for token in step.tokens])
        assert answers[0] == answers[1]


def test_prompts_that_cannot_be_tuned_by() -> None:
    target = peaked_target()
    drafter = NoisyDrafter(target)
    key = make_key(target, "f")
    with pytest.raises(InvalidInputError, match="needs prompts"):
        tune(target, drafter, [], key)
    with pytest.raises(InvalidInputError, match="more than 4 tokens"):
        tune(target, drafter, [[1, 2]], key)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rows": (2, 4)}, "start at 1"),
        ({"rows": (1,)}, "two at least"),
        ({"nodes": (1, 4, 2)}, "increase"),
        ({"races": 0}, "races must be at least 1"),
        ({"max_tokens": 1}, "at least 2 tokens"),
    ],
)
def test_efforts_that_make_no_sense(values: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Effort(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 2, 33])
def test_random_trees(rows: int) -> None:
    tree = random_tree(rows, 7, np.random.default_rng(0))
    assert len(tree) == rows
    assert 0 <= tree.tokens.min() <= tree.tokens.max() < 7


# --- profiles on disk ---


@pytest.fixture
def profile(recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Profile:
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path))
    target = peaked_target()
    return chosen(recording, COSTS, make_key(target, "0123abcd", threads=2))


def test_a_profile_survives_the_disk(profile: Profile, tmp_path: Path) -> None:
    path = save_profile(profile)
    assert path == profile_path(profile.key)
    assert tmp_path in path.parents
    assert read_profile(path) == profile
    assert load_profile(profile.key) == profile
    assert [each.name for each in path.parent.iterdir()] == [path.name]  # nothing half written lies about
    json.loads(path.read_text())


def test_what_was_measured_is_written_by_name() -> None:
    check = Check(Way("dynamic", draw=True), None, 50.0, 2.5)
    values = {"policy": "dynamic+drawn", "predicted": None, "measured": 50.0, "acceptance_length": 2.5, "overall": None}
    assert check.as_dict() == values
    assert Check.from_dict(values) == check


def test_nothing_there_is_no_news(profile: Profile) -> None:
    notices: list[str] = []
    assert load_profile(profile.key, notice=notices.append) is None
    assert notices == []


@pytest.mark.parametrize(("field", "value"), [("machine", "Z80 x1"), ("threads", 7), ("drafter_fingerprint", "ffff")])
def test_another_machine_is_noticed_at_the_usual_place(profile: Profile, field: str, value: object) -> None:
    save_profile(profile)
    notices: list[str] = []
    key = replace(profile.key, **{field: value})  # type: ignore[arg-type]
    assert load_profile(key, notice=notices.append) is None
    (notice,) = notices
    assert field.replace("_", " ") in notice
    assert repr(value) in notice
    assert "eyas tune" in notice


def test_another_model_is_noticed_in_a_named_file(profile: Profile) -> None:
    path = save_profile(profile)
    notices: list[str] = []
    key = replace(profile.key, model="ffff", sampled=True)
    assert load_profile(key, path, notices.append) is None
    assert (
        "model '0123abcd', not 'ffff'; greedy answers, not sampled ones; run eyas tune --temperature 1 again"
        in notices[0]
    )
    assert load_profile(profile.key, path) == profile


def test_damaged_profiles(profile: Profile, tmp_path: Path) -> None:
    path = save_profile(profile)
    for text in ("{", "[]", "{}", '{"format": 1}', path.read_text().replace('"rate"', '"rat"')):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=r"profile"):
            load_profile(profile.key, path)
        notices: list[str] = []
        assert load_profile(profile.key, notice=notices.append) is None
        assert len(notices) == 1
    with pytest.raises(CheckpointError, match="cannot read"):
        load_profile(profile.key, tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("costs",), None),
        (("costs", "verify_rows", 0), 10**400),
        (("rate",), 10**400),
        (("acceptance",), 10**400),
        (("best", "num_steps"), None),
        (("best", "topk"), 1e308),
        (("best", "topk"), 100_000),
        (("template",), [[100_000]]),
        (("template",), [["0"]]),
        (("hit_rates",), "x"),
        (("checks",), [{"policy": "magic", "predicted": None, "measured": 1.0, "acceptance_length": 1.0}]),
        (("checks",), [{"policy": 1, "predicted": None, "measured": 1.0, "acceptance_length": 1.0}]),
        (("checks",), [{"policy": "dynamic+x", "predicted": None, "measured": 1.0, "acceptance_length": 1.0}]),
        (("checks",), [{"predicted": None, "measured": 1.0, "acceptance_length": 1.0}]),
    ],
)
def test_no_policy_comes_from_impossible_numbers(
    profile: Profile, tmp_path: Path, place: tuple[str | int, ...], value: object
) -> None:
    values: Any = json.loads(json.dumps(profile.as_dict()))
    at = values
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    (tmp_path / "p.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"damaged: .*run eyas tune again"):
        read_profile(tmp_path / "p.json")


def test_a_place_that_cannot_be_written(profile: Profile, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match="EYAS_CACHE chooses another place"):
        save_profile(profile, tmp_path / "file" / "p.json")


def test_names_are_safe_for_files(profile: Profile) -> None:
    key = replace(profile.key, drafter="../../etc/x y")
    assert profile_path(key).parent == profile_path(profile.key).parent
    assert profile_path(replace(profile.key, sampled=True)) != profile_path(profile.key)
