"""A small model as drafter: the same answers, the right guesses, a cache that holds committed text only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from eyas import native
from eyas.costs import typical_costs
from eyas.drafters.grafted import GraftedDrafter
from eyas.drafters.ngram import NgramDrafter
from eyas.drafters.small_model import SmallModelDrafter, SmallModelSession, check_tokenizers
from eyas.errors import InvalidInputError
from eyas.generate import Session, Step, generate
from eyas.policies import DynamicPolicy, StaticPolicy, TreePolicy
from eyas.policies.budgeted import BudgetedPolicy
from eyas.policies.gate import Gate
from eyas.sampling import SamplingParams
from eyas.stopping import StopParams
from eyas.targets.base import Target
from support.decoder import tiny_config, tiny_weights
from support.exhaustive import distribution
from support.table_cli import table_tokenizer
from support.tiny import TableTarget, tiny_llama

PROMPT = [3, 1, 4, 1, 5]
POLICIES: list[TreePolicy] = [
    DynamicPolicy(4, 3, 12),
    StaticPolicy.chain(5),
    StaticPolicy.from_paths([[0], [1], [0, 0], [1, 0], [1, 1], [1, 1, 0]]),
]
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=["dynamic", "chain", "template"])


def run(target: Target, drafter: Any, prompt: Sequence[int] = PROMPT, count: int = 30, **options: Any) -> list[Step]:
    session = options.pop("session", None) or Session(target, drafter)
    return list(generate(session, prompt, stop=StopParams(max_tokens=count), **options))


def tokens(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


@every_policy
def test_the_target_as_its_own_drafter_is_always_right(policy: TreePolicy) -> None:
    target = TableTarget(24, seed=1, max_positions=128)
    steps = run(target, SmallModelDrafter(target, 24), policy=policy)
    assert tokens(steps) == tokens(run(target, None))
    if policy is POLICIES[1]:
        blocks = [len(step.tokens) for step in steps[1:-1]]
        assert set(blocks) == {1 + policy.num_steps}  # it depends on the prompt's first token, too


@every_policy
@pytest.mark.parametrize("seed", [1, 2])
def test_another_model_changes_nothing(policy: TreePolicy, seed: int) -> None:
    """A table that agrees now and then: of the last two tokens it sees as much as the target does."""
    target = TableTarget(6, seed=1, max_positions=128, memory=2)
    small = TableTarget(6, seed=seed, max_positions=128, memory=3 if seed == 2 else 1)
    drafter = SmallModelDrafter(small, 6)
    steps = run(target, drafter, policy=policy)
    assert tokens(steps) == tokens(run(target, None))
    assert steps[-1].stats.draft_tokens > 0
    assert tokens(run(target, GraftedDrafter(drafter), policy=policy)) == tokens(run(target, None))


def test_sampled_answers_have_the_plain_distribution() -> None:
    target, small = TableTarget(3, seed=3, eos_token_ids=(2,)), TableTarget(3, seed=4)
    params = SamplingParams(temperature=1.0)
    ours, plain = (
        distribution(
            lambda rng, drafter=drafter: tuple(
                tokens(run(target, drafter, [1, 0], 4, policy=DynamicPolicy(2, 2, 4), params=params, rng=rng))
            )
        )
        for drafter in (SmallModelDrafter(small, 3), None)
    )
    assert ours.keys() == plain.keys()
    for answer, chance in plain.items():
        assert float(ours[answer]) == pytest.approx(float(chance), rel=1e-6)


def test_its_cache_holds_the_committed_text() -> None:
    target = TableTarget(24, seed=1, max_positions=128)
    session = Session(target, SmallModelDrafter(TableTarget(24, seed=2, max_positions=128), 24))
    for prompt in (PROMPT, [*PROMPT, 7, 7, *range(20)], [3, 1, 9], [5], [5, 2]):
        for step in generate(session, prompt, stop=StopParams(max_tokens=9)):
            draft = session.draft
            assert isinstance(draft, SmallModelSession)
            held = draft._cache.tokens  # type: ignore[attr-defined]
            assert held == session.tokens[: len(held)]
            if step.cycle is not None:  # it lags by two cycles' blocks at most
                assert len(held) >= len(session.tokens) - 12
            assert draft.length == len(session.tokens) - 1


def test_texts_beyond_its_context_are_decoded_plainly() -> None:
    target = TableTarget(24, seed=1, max_positions=128)
    small = TableTarget(24, seed=1, max_positions=16)
    steps = run(target, SmallModelDrafter(small, 24), policy=POLICIES[0])
    assert tokens(steps) == tokens(run(target, None))
    assert max(len(step.tokens) for step in steps) > 1
    assert [len(step.tokens) for step in steps[-10:]] == [1] * 10


def test_a_padded_vocabulary() -> None:
    target, small = TableTarget(6, seed=1, max_positions=128), TableTarget(9, seed=1, max_positions=128)
    steps = run(target, SmallModelDrafter(small, 6), policy=DynamicPolicy(3, 8, 20))
    assert tokens(steps) == tokens(run(target, None))
    small = TableTarget(4, seed=1, max_positions=128)
    assert tokens(run(target, SmallModelDrafter(small, 6), policy=DynamicPolicy(3, 8, 20))) == tokens(run(target, None))


@every_policy
def test_on_transformers(policy: TreePolicy) -> None:
    pytest.importorskip("transformers")
    from eyas.targets.hf import ATTENTION, HFTarget

    target = HFTarget(tiny_llama(attn_implementation=ATTENTION), "target")
    plain = tokens(run(target, None))
    steps = run(target, SmallModelDrafter(target, 64), policy=policy)
    assert tokens(steps) == plain
    if policy is POLICIES[1]:
        assert len(steps) == 1 + -(-29 // (1 + policy.num_steps))
    other = HFTarget(tiny_llama(attn_implementation=ATTENTION, seed=1, num_layers=1), "small")
    assert tokens(run(target, SmallModelDrafter(other, 64), policy=policy)) == plain


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_on_the_native_engine_every_plan_is_plain_decoding_bit_for_bit(dtype: str) -> None:
    """Small models, n-grams on top, budgets and gates: tokens and their log-probabilities are those of one by one."""
    if not native.available():
        pytest.skip(native.reason())
    from eyas.targets.native import NativeTarget

    config = tiny_config(tie_word_embeddings=False)
    target, other = (
        NativeTarget.from_weights(config, tiny_weights(config, seed), dtype=dtype, threads=1) for seed in (0, 1)
    )
    plain = run(target, None, logprobs=1)
    wanted = [(each.token, each.logprob) for step in plain for each in step.logprobs]
    budgeted = BudgetedPolicy(typical_costs(0.03), ((0.6, 0.2, 0.1),), 4, 3, 12)
    gate = Gate(typical_costs(0.1), start=0.5)
    drafted = 0
    for model in (target, other):
        small = SmallModelDrafter(model, 101)
        for drafter in (small, GraftedDrafter(small), NgramDrafter()):
            for policy in (*POLICIES, budgeted):
                for door in (None, gate):
                    steps = run(target, drafter, policy=policy, gate=door, logprobs=1)
                    assert [(each.token, each.logprob) for step in steps for each in step.logprobs] == wanted
                    drafted += steps[-1].stats.accepted_tokens
    assert drafted > 100


def test_children_are_the_likeliest_tokens() -> None:
    target = TableTarget(6, seed=1)
    output = target.prefill(target.new_cache(), [1, 2])
    children = SmallModelDrafter(target, 6).children(output, [0], 4)
    logits = target.logits([1, 2]).astype(np.float64)
    assert children.tokens.tolist() == [np.argsort(-logits)[:4].tolist()]
    wanted = np.sort(logits)[::-1][:4] - np.log(np.exp(logits).sum())
    assert children.log_probs[0] == pytest.approx(wanted, abs=1e-6)


def test_another_tokenizer_is_refused() -> None:
    ours, theirs = table_tokenizer(), table_tokenizer()
    check_tokenizers(ours, theirs, "small")
    theirs.backend.add_tokens(["extra"])
    with pytest.raises(InvalidInputError, match="draft model small has another tokenizer"):
        check_tokenizers(ours, theirs, "small")
