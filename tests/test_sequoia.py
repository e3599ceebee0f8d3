"""The dynamic programme against every tree there is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.costs import CostTable
from eyas.errors import InvalidInputError
from eyas.generate import Session, generate
from eyas.policies.sequoia import as_acceptance, expanded_per_level, expected_accepted, sequoia, sequoia_for
from eyas.policies.static import RankPath, StaticPolicy
from eyas.stopping import StopParams
from support.drafters import ScriptedDrafter, mixed
from support.tiny import TableTarget


def all_trees(nodes: int, depth: int, ranks: int) -> list[tuple[RankPath, ...]]:
    """Every template of exactly ``nodes`` nodes, once."""
    found = {frozenset[RankPath]()}
    for _ in range(nodes):
        found = {
            tree | {(*parent, rank)}
            for tree in found
            for parent in [(), *tree]
            if len(parent) < depth
            for rank in range(ranks)
            if (*parent, rank) not in tree
        }
    return [tuple(sorted(tree, key=lambda path: (len(path), path))) for tree in found]


TREES = {
    (n, d): all_trees(n, d, 3) for n in range(1, 6) for d in range(1, 4) if n <= sum(3**i for i in range(1, d + 1))
}


@st.composite
def tables(draw: st.DrawFn, depths: int = 3, ranks: int = 3) -> list[list[float]]:
    """p[depth][rank], in no order, zeros and certainties included."""
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    table = rng.dirichlet(np.full(ranks + 1, 0.6), depths)[:, :ranks]
    if draw(st.booleans()):
        table[draw(st.integers(0, depths - 1)), draw(st.integers(0, ranks - 1))] = 0.0
    return table.tolist()


@given(tables(), st.sampled_from(sorted(TREES)))
def test_no_tree_of_that_size_is_better(table: list[list[float]], bounds: tuple[int, int]) -> None:
    nodes, depth = bounds
    policy = sequoia(table, nodes, num_steps=depth, topk=3)
    best = max(expected_accepted(tree, as_acceptance(table)) for tree in TREES[bounds])
    assert expected_accepted(policy.template, as_acceptance(table)) == pytest.approx(best, abs=1e-12)
    assert policy.num_draft_tokens <= nodes
    assert policy.num_steps <= depth


@settings(max_examples=10)
@given(tables(), st.integers(0, 2**31))
def test_the_size_choice_is_the_best_rate_of_all(table: list[list[float]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs = CostTable.fit(
        {1: 10.0, 2: 10 + rng.uniform(0, 4), 5: 14 + rng.uniform(0, 8)},
        {1: rng.uniform(0, 3), 3: 3 + rng.uniform(0, 2)},
        first_ms=rng.uniform(0, 3),
        overhead_ms=0.5,
    )
    choice = sequoia_for(table, costs, num_draft_tokens=5, num_steps=3, topk=3)
    rates = [1 / costs.plain_ms] + [
        (1 + expected_accepted(tree, as_acceptance(table))) / costs.cycle(expanded_per_level(tree), len(tree))
        for trees in TREES.values()
        for tree in trees
    ]
    # Among trees of one size and depth the programme takes the one of most tokens, whatever its levels cost.
    assert choice.rate <= max(rates) + 1e-12
    if choice.policy is not None:
        template = choice.policy.template
        assert choice.tokens == pytest.approx(1 + expected_accepted(template, as_acceptance(table)))
        assert choice.ms == pytest.approx(costs.cycle(expanded_per_level(template), len(template)))
        assert choice.rate > 1 / costs.plain_ms
    flat = CostTable(costs.verify_rows, costs.verify_ms, (1,), (2.0,), costs.first_ms, 0.5)
    by_size = [
        (1 + expected_accepted(tree, as_acceptance(table))) / flat.cycle(expanded_per_level(tree), len(tree))
        for trees in TREES.values()
        for tree in trees
    ]
    best = sequoia_for(table, flat, num_draft_tokens=5, num_steps=3, topk=3).rate
    assert best == pytest.approx(max(1 / flat.plain_ms, *by_size))  # levels of one price: nothing is missed


def test_one_table_for_all_depths() -> None:
    assert sequoia([0.6, 0.2], 6).template == sequoia([[0.6, 0.2]] * 4, 6).template


def test_a_sure_drafter_gets_a_chain_and_an_unsure_one_a_fan() -> None:
    assert sequoia([0.9, 0.05, 0.03], 4).template == ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))
    assert sequoia([0.25, 0.24, 0.23, 0.22], 4).template == ((0,), (1,), (2,), (3,))


def test_acceptance_that_falls_with_depth() -> None:
    # Nothing is ever accepted below level 1.
    assert sequoia([[0.3, 0.2, 0.1], [0.0, 0.0, 0.0]], 8, num_steps=4, topk=3).template == ((0,), (1,), (2,))


def test_a_hopeless_drafter_still_gives_a_tree_and_the_size_choice_gives_none() -> None:
    assert sequoia([0.0, 0.0], 5).num_draft_tokens == 1
    assert sequoia_for([0.0, 0.0], CostTable((1, 8), (10.0, 12.0), first_ms=1.0)).policy is None


def test_more_rows_only_where_they_are_cheap() -> None:
    rates = [0.6, 0.15, 0.08, 0.04]
    cheap = CostTable((1, 64), (10.0, 10.5), (1, 8), (0.5, 0.6), first_ms=0.5)
    dear = CostTable((1, 64), (10.0, 640.0), (1, 8), (0.5, 0.6), first_ms=0.5)
    wide, narrow = sequoia_for(rates, cheap).policy, sequoia_for(rates, dear).policy
    assert wide is not None
    assert wide.num_draft_tokens > 30
    assert narrow is None  # each row costs as much as plain decoding


def test_levels_are_counted_by_expanded_nodes() -> None:
    assert expanded_per_level(StaticPolicy.eagle1().template) == [1, 4, 4, 1, 1]
    assert expanded_per_level(()) == []


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], "table"),
        ([[0.5, 0.2], [0.5]], "table"),
        ("abc", "table"),
        ([0.7, 0.6], "sum to at most 1"),
        ([-0.1, 0.5], "between 0 and 1"),
        ([float("nan")], "between 0 and 1"),
    ],
)
def test_tables_that_cannot_be(table: object, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        sequoia(table, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("bound", ["num_draft_tokens", "num_steps", "topk"])
def test_bounds_below_one_are_refused(bound: str) -> None:
    settings = {"num_draft_tokens": 4, "num_steps": 3, "topk": 3} | {bound: 0}
    with pytest.raises(InvalidInputError, match=f"{bound} must be at least 1, got 0"):
        sequoia([0.5], **settings)  # type: ignore[arg-type]


def test_answers_stay_the_same() -> None:
    target = TableTarget(8, seed=3, max_positions=80)
    drafter = ScriptedDrafter(target.ranking, mixed(0, 1, 2), first_token=1)
    policy = sequoia([[0.4, 0.3, 0.2], [0.5, 0.3, 0.1]], 12, num_steps=4, topk=3)

    def answer(drafter: ScriptedDrafter | None) -> list[int]:
        steps = generate(Session(target, drafter), [1, 2], policy=policy, stop=StopParams(max_tokens=40))
        return [token for step in steps for token in step.tokens]

    assert answer(drafter) == answer(None)
