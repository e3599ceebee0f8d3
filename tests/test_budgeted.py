"""The budgeted policy against slow, plain restatements of what it promises; cost tables and calibration with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.calibration import IDENTITY, Calibration, LevelMap, reliability
from eyas.costs import CostTable, monotone
from eyas.errors import InvalidInputError
from eyas.generate import Session, generate
from eyas.policies import Candidates, DynamicPolicy, grow_tree
from eyas.policies.base import Children
from eyas.policies.budgeted import BudgetedPolicy
from eyas.policies.trace import PolicyTrace
from eyas.sampling import SamplingParams
from eyas.stopping import StopParams
from eyas.tree import Ints
from support.answers import answer, assert_same_distribution, exact_answers
from support.drafters import Script, ScriptedDrafter, dial, mixed, oracle
from support.tiny import TableTarget

COSTS = CostTable((1, 4, 8, 16, 32), (10.0, 10.5, 12.0, 20.0, 40.0), (1, 8), (1.0, 1.5), first_ms=1.2, overhead_ms=0.3)
RATES = ((0.6, 0.15, 0.07, 0.03),)


@dataclass(frozen=True)
class Table:
    """A drafter: confidences drawn from the seed and the node's path; tokens name ranks."""

    seed: int
    k: int
    sure: float = 1.0

    def score(self, candidates: Candidates, expanded: Ints) -> Children:
        rows = []
        for node in expanded.tolist():
            path = []
            while node > 0:
                path.append(int(candidates.tokens[node]))
                node = int(candidates.parents[node])
            rng = np.random.default_rng([self.seed, *path])
            confidence = np.sort(rng.dirichlet(np.full(self.k, 0.4)))[::-1] * rng.uniform(0.3, 1.0) * self.sure
            rows.append(np.log(np.maximum(confidence, 1e-12)).astype(np.float32))
        return Children(np.tile(np.arange(self.k), (len(rows), 1)), np.array(rows))


def grown(table: Table, steps: int, calibration: Calibration = IDENTITY) -> Candidates:
    trace = PolicyTrace(DynamicPolicy(steps, table.k, 99, calibration=calibration))
    grow_tree(7, trace, steps, table.score)
    assert trace.candidates is not None
    return trace.candidates


def worth(policy: BudgetedPolicy, values: list[float], kept: int, draft_ms: float) -> float:
    """The objective, written out."""
    tokens = 1 + sum(sorted(values, reverse=True)[:kept])
    ms = policy.costs.verify(1 + kept) + policy.costs.overhead_ms
    return tokens / (draft_ms + ms) if policy.rate is None else tokens - policy.rate * ms


tables = st.builds(Table, st.integers(0, 2**31), st.integers(1, 5), st.sampled_from([1.0, 0.3]))
rates = st.sampled_from([None, 0.05, 0.1, 0.2, 0.3])


@given(tables, st.integers(1, 4), rates, st.integers(1, 20))
def test_select_keeps_the_m_that_pays_most(table: Table, steps: int, rate: float | None, bound: int) -> None:
    policy = BudgetedPolicy(COSTS, RATES, 6, table.k, bound, rate=rate)
    candidates = grown(table, steps)
    values = np.exp(candidates.log_values[1:].astype(float))
    draft_ms = COSTS.draft([1] + [min(table.k, table.k**d) for d in range(1, steps)])
    options = [worth(policy, values.tolist(), m, draft_ms) for m in range(min(bound, len(values)) + 1)]
    selected = policy.select(candidates)
    assert worth(policy, values.tolist(), len(selected), draft_ms) == pytest.approx(max(options))
    assert (np.diff(selected) > 0).all()
    assert set(candidates.parents[selected].tolist()) <= {0, *selected.tolist()}
    assert sum(values[selected - 1]) == pytest.approx(sum(sorted(values, reverse=True)[: len(selected)]))


@given(tables, st.integers(1, 3), rates, st.integers(1, 20))
def test_expand_takes_the_width_that_should_pay_most(table: Table, steps: int, rate: float | None, bound: int) -> None:
    policy = BudgetedPolicy(COSTS, RATES, 6, table.k, bound, rate=rate)
    candidates = grown(table, steps)
    values = np.exp(candidates.log_values.astype(float))
    draft_ms = COSTS.draft([1] + [min(table.k, table.k**d) for d in range(1, steps)])
    newest = list(range(candidates.levels[-2], candidates.levels[-1]))
    newest.sort(key=lambda node: -values[node])
    options = []
    for width in range(min(table.k, len(newest)) + 1):
        forecast = [values[node] * rate_ for node in newest[:width] for rate_ in RATES[0][: table.k]]
        at_hand = [*values[1:].tolist(), *forecast]
        price = COSTS.level(width) if width else 0.0
        best = max(worth(policy, at_hand, m, draft_ms + price) for m in range(min(bound, len(at_hand)) + 1))
        options.append(best if rate is None else best - rate * price)
    chosen = policy.expand(candidates)
    assert options[len(chosen)] == pytest.approx(max(options))
    assert set(chosen.tolist()) == set(newest[: len(chosen)])
    assert (np.diff(chosen) > 0).all()


def test_nothing_is_drafted_where_nothing_pays() -> None:
    free_rows = CostTable((1, 32), (10.0, 10.0), (1, 8), (1.0, 1.0), first_ms=1.0)
    dear_draft = replace(free_rows, first_ms=9.0, draft_ms=(9.0, 9.0))
    dear_rows = CostTable((1, 2, 32), (10.0, 19.0, 300.0), first_ms=1.0)
    root = Candidates.root(3)
    assert BudgetedPolicy(free_rows, RATES).expand(root).tolist() == [0]
    for costs in (dear_draft, dear_rows):
        policy = BudgetedPolicy(costs, RATES)
        assert policy.expand(root).tolist() == []
        assert not policy.drafts
        assert len(grow_tree(3, policy, 9, Table(0, 8).score)) == 1
    assert not BudgetedPolicy(free_rows, ((0.01, 0.0),)).drafts  # a drafter that is hardly ever right
    # One level alone does not pay, three do: the first costs as much as it brings.
    deep = CostTable((1, 9), (10.0, 10.0), (1, 8), (0.1, 0.1), first_ms=9.5)
    assert not BudgetedPolicy(deep, ((0.9,),), num_steps=1).drafts
    assert BudgetedPolicy(deep, ((0.9,),), num_steps=3).drafts


def test_a_sure_context_is_drafted_deeper_than_an_unsure_one() -> None:
    def depth(confidence: float) -> int:
        def score(candidates: Candidates, expanded: Ints) -> Children:
            logs = np.log(np.array([confidence, (1 - confidence) / 4, 1e-6, 1e-6], np.float32))
            return Children(np.tile(np.arange(4), (len(expanded), 1)), np.tile(logs, (len(expanded), 1)))

        trace = PolicyTrace(BudgetedPolicy(COSTS, RATES, num_steps=9, topk=4, rate=0.2))
        grow_tree(0, trace, 9, score)
        assert trace.candidates is not None
        return trace.candidates.depth

    depths = [depth(confidence) for confidence in (0.02, 0.3, 0.6, 0.95)]
    assert depths == sorted(depths)
    assert depths[0] < depths[-1]


@settings(max_examples=15)
@given(st.integers(0, 2**31))
def test_the_long_run_rate_beats_judging_each_cycle_alone(seed: int) -> None:
    """Sure and unsure cycles in turn: maximising tokens - rate * ms gives the larger ratio of sums."""
    rng = np.random.default_rng(seed)
    cycles = [grown(Table(int(rng.integers(2**31)), 4, sure), 3) for sure in rng.choice([1.0, 0.1], 12)]

    def speed(policy: BudgetedPolicy) -> float:
        tokens = ms = 0.0
        for candidates in cycles:
            kept = policy.select(candidates)
            tokens += 1 + np.exp(candidates.log_values[kept].astype(float)).sum()
            ms += COSTS.cycle([1, 4, 4], len(kept))
        return tokens / ms

    alone = speed(BudgetedPolicy(COSTS, RATES, 3, 4))
    rate = alone
    for _ in range(20):  # Dinkelbach: the rate that a policy of this rate reaches
        rate = speed(BudgetedPolicy(COSTS, RATES, 3, 4, rate=rate))
    assert rate >= alone * (1 - 1e-9)
    assert speed(BudgetedPolicy(COSTS, RATES, 3, 4, rate=rate)) == pytest.approx(rate)


@pytest.mark.parametrize("script", [oracle, dial(0.6), mixed(0, 1, 2)])
@pytest.mark.parametrize("rate", [None, 0.1, 0.4])
def test_answers_stay_the_same(script: Script, rate: float | None) -> None:
    target = TableTarget(8, seed=5, max_positions=80)
    drafter = ScriptedDrafter(target.ranking, script, first_token=1)
    policy = BudgetedPolicy(COSTS, RATES, num_steps=4, topk=3, num_draft_tokens=12, rate=rate)
    ours = answer(target, [1, 2], drafter, policy=policy, max_tokens=40)
    assert ours.tokens == answer(target, [1, 2], max_tokens=40).tokens
    assert ours.steps[-1].stats.draft_tokens > 0


@pytest.mark.parametrize("script", [oracle, dial(0.6), mixed(0, 1, 2)])
@pytest.mark.parametrize("rate", [None, 0.1, 0.4])
def test_sampled_answers_keep_their_distribution(script: Script, rate: float | None) -> None:
    target = TableTarget(3, seed=3, eos_token_ids=(2,))
    policy = BudgetedPolicy(COSTS, RATES, num_steps=2, topk=2, num_draft_tokens=4, rate=rate)
    params = SamplingParams(temperature=1.0)
    plain = exact_answers(target, None, policy, params, max_tokens=4)
    assert_same_distribution(exact_answers(target, script, policy, params, max_tokens=4), plain)


def test_refusing_to_draft_is_plain_decoding() -> None:
    target = TableTarget(8, seed=5)
    drafter = ScriptedDrafter(target.ranking, oracle, first_token=1)
    policy = BudgetedPolicy(replace(COSTS, first_ms=1000.0), RATES)
    steps = list(generate(Session(target, drafter), [1, 2], policy=policy, stop=StopParams(max_tokens=9)))
    assert steps[-1].stats.draft_tokens == 0
    assert steps[-1].stats.cycles == 8


def test_settings_that_cannot_work() -> None:
    for setting in ("num_steps", "topk", "num_draft_tokens"):
        with pytest.raises(InvalidInputError, match=f"{setting} must be at least 1, got 0"):
            BudgetedPolicy(COSTS, RATES, **{setting: 0})  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="below 512"):
        BudgetedPolicy(COSTS, RATES, num_draft_tokens=600)
    with pytest.raises(InvalidInputError, match="above 0"):
        BudgetedPolicy(COSTS, RATES, rate=0.0)
    with pytest.raises(InvalidInputError, match="sum to at most 1"):
        BudgetedPolicy(COSTS, ((0.9, 0.9),))


# --- cost tables ---


def test_costs_are_linear_between_and_beyond_the_measured_sizes() -> None:
    assert COSTS.verify(1) == 10.0
    assert COSTS.verify(6) == pytest.approx(11.25)
    assert COSTS.verify(64) == pytest.approx(80.0)
    assert COSTS.verify(1000) == pytest.approx(40.0 + (1000 - 32) * 1.25)
    assert COSTS.level(0) == 0.0
    assert COSTS.level(8) == 1.5
    assert COSTS.plain_ms == pytest.approx(10.3)
    assert COSTS.cycle([1, 8, 1], 7) == pytest.approx(1.2 + 1.5 + 1.0 + 12.0 + 0.3)
    assert CostTable((1,), (5.0,)).verify(900) == 5.0


def test_costs_survive_json() -> None:
    import json

    assert CostTable.from_dict(json.loads(json.dumps(COSTS.as_dict()))) == COSTS
    with pytest.raises(InvalidInputError, match="not a cost table"):
        CostTable.from_dict({"verify_rows": [1]})


@given(st.lists(st.floats(0, 100), min_size=1, max_size=7))
def test_monotone_is_the_nearest_sequence_that_never_falls(values: list[float]) -> None:
    fitted = monotone(values)
    assert all(b >= a for a, b in pairwise(fitted))
    assert sum(fitted) == pytest.approx(sum(values), abs=1e-6)
    distance = sum((a - b) ** 2 for a, b in zip(fitted, values, strict=True))
    rng = np.random.default_rng(0)
    for _ in range(50):
        other = np.sort(np.asarray(fitted) + rng.normal(size=len(values)))
        assert distance <= ((other - np.asarray(values)) ** 2).sum() + 1e-6


def test_fitted_costs_never_fall() -> None:
    table = CostTable.fit({1: 10.0, 4: 9.0, 8: 12.0}, {2: 3.0, 1: 4.0}, first_ms=1.0)
    assert table.verify_ms == (9.5, 9.5, 12.0)
    assert (table.draft_nodes, table.draft_ms) == ((1, 2), (3.5, 3.5))


@pytest.mark.parametrize(
    ("rows", "times", "message"),
    [
        ((), (), "one at least"),
        ((1, 2), (1.0,), "as many"),
        ((2, 2), (1.0, 2.0), "increase"),
        ((0, 1), (1.0, 2.0), "from 1 on"),
        ((1, 2), (0.0, 2.0), "takes some"),
        ((1, 2), (1.0, float("nan")), "milliseconds"),
    ],
)
def test_costs_that_cannot_be(rows: tuple[int, ...], times: tuple[float, ...], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        CostTable(rows, times)


# --- calibration ---


def test_calibration_learns_what_confidence_is_worth() -> None:
    rng = np.random.default_rng(0)
    values = rng.uniform(0.01, 1.0, 20000).astype(np.float32)
    accepted = rng.random(20000) < values**2  # a drafter twice as sure as it should be, in log space
    calibration = Calibration.fit([(np.log(values), accepted)])
    for value in (0.2, 0.5, 0.9):
        mapped = np.exp(calibration.levels[0](np.log(np.array([value]))))[0]
        assert mapped == pytest.approx(value**2, abs=0.05)


@given(tables, st.integers(1, 4), st.integers(0, 2**31))
def test_calibrated_values_never_grow_along_a_path(table: Table, steps: int, seed: int) -> None:
    candidates = grown(table, steps)
    rng = np.random.default_rng(seed)
    levels = []
    for depth in range(1, 3):
        level = candidates.log_values[slice(*candidates.levels[min(depth, steps) : min(depth, steps) + 2])]
        levels.append((level, rng.random(len(level)) < 0.5))
    values = candidates.acceptance_by(Calibration.fit(levels))
    assert values[0] == 1.0
    assert (values[1:] <= values[candidates.parents[1:]]).all()
    assert (values >= 0).all()
    policy = BudgetedPolicy(COSTS, RATES, 6, table.k, calibration=Calibration.fit(levels))
    selected = policy.select(candidates)
    assert set(candidates.parents[selected].tolist()) <= {0, *selected.tolist()}


@given(tables, st.integers(1, 4))
def test_acceptance_kept_from_level_to_level_is_what_it_is_afresh(table: Table, steps: int) -> None:
    calibration = Calibration((LevelMap((-2.0, -0.1), (-1.5, -0.2)), LevelMap((-3.0, -0.5), (-4.0, -0.1))))
    candidates = grown(table, steps, calibration)  # which asks at every level
    for by in (calibration, IDENTITY, calibration):
        afresh = by.acceptance(candidates.log_values, candidates.parents, candidates.levels)
        assert candidates.acceptance_by(by).tolist() == afresh.tolist()


def test_without_observations_nothing_changes() -> None:
    empty = (np.zeros(0, np.float32), np.zeros(0, bool))
    assert Calibration.fit([empty, empty]) == Calibration()
    one = (np.log(np.array([0.5, 0.25], np.float32)), np.array([True, False]))
    assert len(Calibration.fit([one, empty]).levels) == 2  # the level above stands in
    assert Calibration.from_dict(Calibration.fit([one]).as_dict()) == Calibration.fit([one])


def test_guesses_of_confidence_zero_stay_worthless() -> None:
    level = LevelMap((-2.0, -0.1), (-1.5, -0.2))
    mapped = level(np.array([-np.inf, -4.0, -2.0, 0.0], np.float32))
    assert mapped.tolist() == pytest.approx([-np.inf, -3.5, -1.5, -0.2])
    assert reliability(np.array([-np.inf, 0.0], np.float32), np.array([False, True]))[0].count == 1


def test_bins_hold_equal_mass() -> None:
    values = np.array([0.9, 0.05, 0.05, 0.9], np.float32)
    found = reliability(np.log(values), np.array([True, False, True, True]), bins=2)
    assert [each.count for each in found] == [1, 3]
    assert found[0].accepted == 1.0


@pytest.mark.parametrize(
    ("promised", "observed"),
    [((), ()), ((-1.0, -1.0), (-1.0, -0.5)), ((-1.0, 0.0), (-0.5, -1.0)), ((-1.0,), (0.1,)), ((-1.0,), (-np.inf,))],
)
def test_maps_that_cannot_be(promised: tuple[float, ...], observed: tuple[float, ...]) -> None:
    with pytest.raises(InvalidInputError, match="calibration map"):
        LevelMap(promised, observed)
