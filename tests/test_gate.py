"""The gate: what a request may lose is bounded, what it gains is kept, and answers never change."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from eyas.costs import CostTable, typical_costs
from eyas.errors import InvalidInputError
from eyas.generate import Session, Step, generate
from eyas.policies import DynamicPolicy
from eyas.policies.gate import Gate
from eyas.sampling import SamplingParams
from eyas.stopping import StopParams
from support.drafters import ScriptedDrafter, anti_oracle, dial, mixed, oracle
from support.exhaustive import distribution
from support.tiny import TableTarget

PROMPT = [3, 1, 4, 1, 5]
COSTS = CostTable((1, 8), (10.0, 14.0), (1, 4), (0.5, 1.0), first_ms=1.0, overhead_ms=0.5)
POLICY = DynamicPolicy(3, 3, 7)


def run(script: Any, gate: Gate | None, count: int = 100) -> list[Step]:
    target = TableTarget(24, seed=1, max_positions=256)
    drafter = ScriptedDrafter(target.ranking, script, first_token=PROMPT[0]) if script else None
    steps = generate(Session(target, drafter), PROMPT, policy=POLICY, gate=gate, stop=StopParams(max_tokens=count))
    return list(steps)


def tokens(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


def ms(steps: list[Step]) -> float:
    total = 0.0
    for step in steps[1:]:
        assert step.cycle is not None
        total += COSTS.cycle(step.cycle.trace.widths, step.cycle.tree.num_draft_tokens)
    return total


@pytest.mark.parametrize(
    "script", [oracle, anti_oracle, mixed(0, 1, 2), dial(0.3)], ids=["oracle", "anti", "mix", "dial"]
)
@pytest.mark.parametrize("gate", [Gate(COSTS), Gate(COSTS, 0.0, 0.1), Gate(COSTS, 0.0, 0.0)], ids=str)
def test_answers_are_plain_and_losses_bounded(script: Any, gate: Gate) -> None:
    steps = run(script, gate)
    assert tokens(steps) == tokens(run(None, None))
    plain = COSTS.plain_ms
    one_cycle = COSTS.cycle((1, 3, 3), 7) - plain
    assert ms(steps) <= 99 * plain * (1 + gate.allowance) + gate.start * plain + one_cycle + 1e-6


def test_a_hopeless_drafter_is_asked_now_and_then() -> None:
    steps = run(anti_oracle, Gate(COSTS))
    drafted = [step.cycle is not None and step.cycle.tree.num_draft_tokens > 0 for step in steps[1:]]
    assert drafted[:3] == [True, True, False]
    assert 2 < sum(drafted) < 8
    assert ms(steps) < ms(run(anti_oracle, None))


def test_a_good_drafter_is_always_asked() -> None:
    steps = run(oracle, Gate(COSTS))
    assert [len(step.tokens) for step in steps] == [len(step.tokens) for step in run(oracle, None)]


def test_what_went_well_before_does_not_pay_for_long() -> None:
    def worse(prefix: list[int], ranking: list[int]) -> list[int]:
        return (oracle if len(prefix) < 60 else anti_oracle)(prefix, ranking)

    steps = run(worse, Gate(COSTS))
    late = [step.cycle.tree.num_draft_tokens > 0 for step in steps[1:] if step.cycle and len(step.tokens) == 1]
    assert sum(late) < 15
    assert len(late) > 35
    assert not any(one and next_one for one, next_one in pairwise(late[12:]))  # single tries, far between


def test_the_same_request_decides_the_same() -> None:
    shapes = [[step.tokens for step in run(dial(0.3), Gate(COSTS))] for _ in range(2)]
    assert shapes[0] == shapes[1]


def test_an_open_gate_with_nothing_drafted_costs_nothing() -> None:
    purse = Gate(COSTS, allowance=0.0).new_purse()
    purse.book(1, (), 0)
    assert purse.balance == 1.0
    purse.book(1, (1, 3, 3), 7)
    assert purse.balance == pytest.approx(2.0 - COSTS.cycle((1, 3, 3), 7) / COSTS.plain_ms)


def test_sampled_answers_have_the_plain_distribution() -> None:
    """Whether to draft depends on what was accepted before, never on the draws to come."""
    target = TableTarget(3, seed=3, eos_token_ids=(2,))
    params = SamplingParams(temperature=1.0)
    drafter = ScriptedDrafter(target.ranking, mixed(1), first_token=1)

    def answers(gate: Gate | None, drafter: ScriptedDrafter | None) -> dict[tuple[int, ...], Any]:
        def once(rng: Any) -> tuple[int, ...]:
            steps = generate(
                Session(target, drafter),
                [1, 0],
                policy=DynamicPolicy(2, 2, 4),
                gate=gate,
                params=params,
                stop=StopParams(max_tokens=5),
                rng=rng,
            )
            return tuple(token for step in steps for token in step.tokens)

        return distribution(once)

    plain, gated = answers(None, None), answers(Gate(COSTS, start=0.1, limit=0.2, allowance=0.2), drafter)
    assert gated.keys() == plain.keys()
    for answer, chance in plain.items():
        assert float(gated[answer]) == pytest.approx(float(chance), rel=1e-6)


@pytest.mark.parametrize("amounts", [{"start": -1}, {"allowance": -0.1}, {"limit": 0}], ids=str)
def test_amounts_that_make_no_sense(amounts: dict[str, float]) -> None:
    with pytest.raises(InvalidInputError, match="plain passes"):
        Gate(typical_costs(0.03), **amounts)
