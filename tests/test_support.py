"""The test drafters and tiny targets do what the other tests rely on."""

from __future__ import annotations

import numpy as np
import pytest

from eyas.policies import DynamicPolicy, StaticPolicy, TreePolicy
from eyas.tree import DraftTree
from support.drafters import Script, ScriptedDrafter, anti_oracle, dial, mixed, oracle
from support.tiny import TableTarget, greedy_ranking, tiny_llama

POLICIES: list[TreePolicy] = [DynamicPolicy(4, 3, 12), StaticPolicy.eagle1(), StaticPolicy.chain(4)]
PROMPT = [1, 5, 2]


def greedy(target: TableTarget, prefix: list[int], count: int) -> list[int]:
    for _ in range(count):
        prefix = [*prefix, int(target.logits(prefix).argmax())]
    return prefix[-count:]


def propose(target: TableTarget, script: Script, policy: TreePolicy) -> DraftTree:
    session = ScriptedDrafter(target.ranking, script, first_token=PROMPT[0]).new_session()
    session.commit(PROMPT[1:], None)
    return session.propose(PROMPT[-1], policy, 99)


def accepted(tree: DraftTree, truth: list[int]) -> list[int]:
    """Sibling places of the nodes along the true continuation."""
    places: list[int] = []
    node = 0
    for token in truth:
        siblings = [int(tree.tokens[child]) for child in tree.children[node]]
        if token not in siblings:
            break
        places.append(siblings.index(token))
        node = tree.children[node][places[-1]]
    return places


@pytest.mark.parametrize("policy", POLICIES)
def test_oracle_and_its_opposite(policy: TreePolicy) -> None:
    target = TableTarget(8)
    truth = greedy(target, PROMPT, 5)
    right = accepted(propose(target, oracle, policy), truth)
    assert right == [0] * policy.num_steps
    assert accepted(propose(target, anti_oracle, policy), truth) == []


@pytest.mark.parametrize("places", [(1,), (2,), (1, 2), (0, 2, 1)])
def test_mixed_trees_hold_the_right_token_among_later_siblings(places: tuple[int, ...]) -> None:
    target = TableTarget(8)
    found = accepted(propose(target, mixed(*places), POLICIES[0]), greedy(target, PROMPT, 4))
    assert found == [places[(len(PROMPT) + depth) % len(places)] for depth in range(4)]
    assert accepted(propose(target, mixed(1), StaticPolicy.chain(3)), greedy(target, PROMPT, 3)) == []


@pytest.mark.parametrize("q", [0.0, 0.3, 0.8, 1.0])
def test_dial_is_right_with_its_probability(q: float) -> None:
    target = TableTarget(8)
    hits = 0
    drafter = ScriptedDrafter(target.ranking, dial(q, seed=3), first_token=0)
    again = ScriptedDrafter(target.ranking, dial(q, seed=3), first_token=0)
    for i in range(600):
        prefix = [0, i % 8, i // 8 % 8, i // 64]
        hits += drafter.proposals(prefix)[0] == target.ranking(prefix)[0]
        assert drafter.proposals(prefix) == again.proposals(prefix)
    assert hits / 600 == pytest.approx(q, abs=0.07)


def test_the_table_target_is_one_distribution_per_context() -> None:
    target = TableTarget(5, seed=2)
    cache = target.new_cache()
    output = target.prefill(cache, [1, 2])
    assert output.features.tolist() == [[0, 1], [1, 2]]
    assert output.argmax().tolist() == [int(target.logits([1, 2]).argmax())]
    target.prefill(cache, [4])
    tree = DraftTree(np.array([0, 3, 2, 1]), np.array([-1, 0, 0, 1]), np.zeros(4, np.float32))
    cache.truncate(2)
    (output,) = target.verify([(cache, tree)])
    for node, path in enumerate([[0], [0, 3], [0, 2], [0, 3, 1]]):
        assert np.array_equal(output.row(node), TableTarget(5, seed=2).logits([1, 2, *path]))
        assert output.features[node].tolist() == [1 + len(path), path[-1]]
    cache.commit([0, 1, 3])
    assert cache.tokens == [1, 2, 0, 3, 1]
    assert not np.array_equal(target.logits([1]), TableTarget(5, seed=3).logits([1]))
    assert np.array_equal(TableTarget(5, memory=1).logits([3, 1]), TableTarget(5, memory=1).logits([2, 1]))


def test_the_tiny_llama_is_reproducible_and_does_not_loop_at_once() -> None:
    import torch

    state = torch.random.get_rng_state()
    ranking = greedy_ranking(tiny_llama())
    assert torch.equal(torch.random.get_rng_state(), state)
    prefix = [1, 2, 3]
    for _ in range(24):
        prefix.append(ranking(prefix)[0])
    assert len(set(prefix)) > 8
    assert sorted(ranking(prefix)) == list(range(64))
    assert greedy_ranking(tiny_llama())(prefix) == ranking(prefix)
