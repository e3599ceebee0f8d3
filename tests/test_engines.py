"""Whole answers on models made of weights: where they end, what caches hold after every cycle, who may draft."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from eyas import native
from eyas.checkpoints.eagle import EagleCheckpoint
from eyas.drafters.base import Drafter, DraftSession
from eyas.drafters.eagle import EagleDrafter
from eyas.drafters.native_eagle import NativeEagleDrafter
from eyas.drafters.small_model import SmallModelDrafter
from eyas.errors import ContextLengthError
from eyas.generate import Session, Step, generate
from eyas.heads.config import EagleConfig
from eyas.policies import DynamicPolicy, StaticPolicy, TreePolicy
from eyas.sampling import SamplingParams
from eyas.stopping import StopParams
from eyas.targets.base import Features, Target
from eyas.targets.hf import ATTENTION, HFTarget
from eyas.targets.hf_cache import PooledCache
from eyas.targets.native import NativeTarget
from eyas.tree import DraftTree
from support.answers import Answered, answer
from support.drafters import Script, ScriptedDrafter, ScriptedSession, anti_oracle, mixed, oracle
from support.tiny import greedy_ranking, tiny_llama, tiny_native

POSITIONS = 64
PROMPT = [3, 1, 4, 1, 5, 9, 2]
SCRIPTS: dict[str, Script] = {
    "oracle": oracle,
    "second": mixed(1),
    "third": mixed(2),
    "mixed": mixed(0, 1, 2),
    "anti-oracle": anti_oracle,
}
BLOCKS_OF_6 = DynamicPolicy(num_steps=5, topk=3, num_draft_tokens=16)
HEAD = EagleConfig(
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=64,
)
every_engine = pytest.mark.parametrize(
    "engine",
    [
        "transformers",
        pytest.param("native", marks=pytest.mark.skipif(not native.available(), reason=native.reason())),
    ],
)
Ranking = Callable[[list[int]], Sequence[int]]


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    """With transformers' own attention and cache: the reference."""
    return tiny_llama(max_positions=POSITIONS)


@pytest.fixture(scope="module")
def ranking(llama: LlamaForCausalLM) -> Ranking:
    known = greedy_ranking(llama)
    cache: dict[tuple[int, ...], Sequence[int]] = {}

    def ranked(prefix: list[int]) -> Sequence[int]:
        key = tuple(prefix)
        if key not in cache:
            cache[key] = known(prefix)
        return cache[key]

    return ranked


def load(engine: str, llama: LlamaForCausalLM, eos: tuple[int, ...] = ()) -> Target:
    """The same weights behind an engine."""
    if engine == "native":
        return tiny_native(llama, eos_token_ids=eos)
    return HFTarget(tiny_llama(max_positions=POSITIONS, attn_implementation=ATTENTION), "tiny llama", eos_token_ids=eos)


def generated(llama: LlamaForCausalLM, prompt: Sequence[int], **settings: Any) -> list[int]:
    """What transformers' own generate says."""
    ids = torch.tensor([list(prompt)])
    out: Any = llama.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **settings
    )
    return [int(token) for token in out[0, len(prompt) :]]


# --- where answers end -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def endings(llama: LlamaForCausalLM) -> list[tuple[list[int], list[int]]]:
    """For every offset inside a block of six a prompt, and its answer up to a token that comes there first."""
    found: dict[int, tuple[list[int], list[int]]] = {}
    for last in range(POSITIONS):
        if len(found) == 6:
            break
        prompt = [*PROMPT, last]
        said = generated(llama, prompt, max_new_tokens=19)
        for place in range(7, 19):  # in the second or the third block; token 0 is the prefill's
            if said[place] not in said[:place]:
                found.setdefault((place - 1) % 6, (prompt, said[: place + 1]))
    return [found[offset] for offset in range(6)]


@every_engine
@pytest.mark.parametrize("script", ["oracle", "mixed"])
@pytest.mark.parametrize("offset", range(6))
def test_an_end_at_every_offset_of_a_block_and_a_second_turn(
    engine: str,
    llama: LlamaForCausalLM,
    ranking: Ranking,
    endings: list[tuple[list[int], list[int]]],
    script: str,
    offset: int,
) -> None:
    prompt, wanted = endings[offset]
    end = wanted[-1]
    target = load(engine, llama, (end,))
    drafter = ScriptedDrafter(ranking, SCRIPTS[script], first_token=prompt[0])
    session = Session(target, drafter)
    first = answer(session, prompt, policy=BLOCKS_OF_6, max_tokens=40)
    assert first.tokens == wanted == generated(llama, prompt, max_new_tokens=40, eos_token_id=end)
    assert first.reason == "stop"
    assert first.blocks[0] == 6
    assert session.cache.length == len(prompt) + len(wanted) - 1  # the end itself was never run, nor anything behind

    second = [*prompt, *wanted, 7, 8, 9]
    warm, cold = (
        answer(each, second, policy=BLOCKS_OF_6, max_tokens=12, logprobs=2)
        for each in (session, Session(target, drafter))
    )
    assert warm.tokens == cold.tokens == generated(llama, second, max_new_tokens=12, eos_token_id=end)
    assert warm.reason == cold.reason
    assert [shape(step) for step in warm.steps[1:]] == [shape(step) for step in cold.steps[1:]]
    if engine == "native":
        assert warm.logprobs == cold.logprobs
    np.testing.assert_allclose(
        [entry.logprob for entry in warm.logprobs], [entry.logprob for entry in cold.logprobs], atol=1e-4
    )


def shape(step: Step) -> Any:
    assert step.cycle is not None
    return step.cycle.tree.tokens.tolist(), step.cycle.tree.parents.tolist(), step.cycle.acceptance


@every_engine
@pytest.mark.parametrize("policy", [StaticPolicy.eagle1(), StaticPolicy.chain(19)], ids=["eagle1", "chain"])
@pytest.mark.parametrize("length", [50, 56, 61, 62, 63])
def test_the_context_limit(
    engine: str, llama: LlamaForCausalLM, ranking: Ranking, policy: TreePolicy, length: int
) -> None:
    prompt = [7 * i % POSITIONS for i in range(length)]
    wanted = generated(llama, prompt, max_new_tokens=POSITIONS - length)
    target = load(engine, llama)
    for script in ("oracle", "mixed"):
        session = Session(target, ScriptedDrafter(ranking, SCRIPTS[script], first_token=prompt[0]))
        ours = answer(session, prompt, policy=policy, max_tokens=100)
        assert (ours.tokens, ours.reason) == (wanted, "length")
        done = 1
        for step in ours.steps[1:]:
            assert step.cycle is not None
            assert max(step.cycle.tree.depths) <= POSITIONS - length - done - 1
            done += len(step.tokens)
    for tokens in (POSITIONS, POSITIONS + 2):
        with pytest.raises(ContextLengthError, match=f"the prompt has {tokens} tokens"):
            generate(session, [1] * tokens)
    assert answer(session, prompt, policy=policy, max_tokens=1).tokens == wanted[:1]


# --- what is left of a cycle -----------------------------------------------------------------------------------


class Accompanied:
    """A script that says what is drafted, and a head beside it that guesses every tree and is told every token."""

    name = "accompanied"

    def __init__(self, head: Drafter, script: ScriptedDrafter) -> None:
        self.head, self.script = head, script
        self.feature_levels = head.feature_levels

    def new_session(self) -> AccompaniedSession:
        return AccompaniedSession(self.head.new_session(), self.script.new_session())


class AccompaniedSession:
    def __init__(self, head: DraftSession, script: ScriptedSession) -> None:
        self.head, self.script = head, script

    @property
    def length(self) -> int:
        return self.head.length

    def commit(self, tokens: Sequence[int], features: Features) -> None:
        self.head.commit(tokens, features)
        self.script.commit(tokens, features)

    def truncate(self, length: int) -> None:
        self.head.truncate(length)
        self.script.truncate(length)

    def propose(self, root: int, policy: TreePolicy, max_depth: int) -> DraftTree:
        self.head.propose(root, policy, max_depth)
        return self.script.propose(root, policy, max_depth)


def checkpoint() -> EagleCheckpoint:
    """A random head for the tiny model."""
    rng = np.random.default_rng(0)
    tensors = {
        name: (rng.standard_normal(shape) * 0.2 + ("layernorm" in name)).astype(np.float32)
        for name, shape in HEAD.tensor_shapes().items()
    }
    return EagleCheckpoint("tiny head", HEAD, tensors)


def head_of(target: Target) -> Drafter:
    if isinstance(target, NativeTarget):
        return NativeEagleDrafter(checkpoint(), target)
    assert isinstance(target, HFTarget)
    return EagleDrafter.from_checkpoint(checkpoint(), target.embedding_weight, target.lm_head_weight)


def rows(cache: PooledCache) -> list[Tensor]:
    """The committed keys and values of every layer."""
    sides = (cache.pool.keys, cache.pool.values)
    return [tensor[cache.slot, :, : cache.length] for side in sides for tensor in side.values()]


@every_engine
@pytest.mark.parametrize("script", SCRIPTS)
def test_after_every_cycle_target_and_head_stand_as_after_a_fresh_start(
    engine: str, llama: LlamaForCausalLM, ranking: Ranking, script: str
) -> None:
    """Keys and values, next logits and features, and the head's next tree are those of a prefill of the whole text."""
    target = load(engine, llama)
    tolerance = 0.0 if engine == "native" else 1e-4
    drafter = Accompanied(head_of(target), ScriptedDrafter(ranking, SCRIPTS[script], first_token=PROMPT[0]))
    session = Session(target, drafter)
    blocks: list[int] = []
    for step in generate(session, PROMPT, policy=BLOCKS_OF_6, stop=StopParams(max_tokens=40)):
        blocks.append(len(step.tokens))
        fresh = target.new_cache()
        output = target.prefill(fresh, session.tokens[:-1])
        assert session.cache.length == fresh.length == len(session.tokens) - 1
        if isinstance(fresh, PooledCache):
            assert isinstance(session.cache, PooledCache)
            torch.testing.assert_close(rows(session.cache), rows(fresh), rtol=1e-4, atol=1e-4)
        root = DraftTree.root_only(session.tokens[-1])
        ours, theirs = (target.verify([(cache, root)])[0] for cache in (session.cache, fresh))
        np.testing.assert_allclose(ours.row(0), theirs.row(0), rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(ours.features, theirs.features, rtol=tolerance, atol=tolerance)

        head = drafter.head.new_session()
        head.commit(session.tokens[1:], output.features)
        assert isinstance(session.draft, AccompaniedSession)
        assert session.draft.length == head.length
        kept, anew = (each.propose(session.tokens[-1], BLOCKS_OF_6, 5) for each in (session.draft.head, head))
        assert kept.tokens.tolist() == anew.tokens.tolist()
        assert kept.parents.tolist() == anew.parents.tolist()
        # Five guesses fed back into a random head magnify the rounding of the features.
        np.testing.assert_allclose(kept.log_values, anew.log_values, rtol=100 * tolerance, atol=100 * tolerance)
    assert sum(blocks) == 40
    assert max(blocks[1:]) == (1 if script == "anti-oracle" else 6)


# --- neighbours ------------------------------------------------------------------------------------------------


@every_engine
def test_traffic_on_the_engine_changes_no_answer(engine: str, llama: LlamaForCausalLM, ranking: Ranking) -> None:
    """Greedy and seeded requests, a step of each in turn, among others that draw as they like."""
    target = load(engine, llama)
    requests = [
        (PROMPT, SamplingParams()),
        (PROMPT, SamplingParams(temperature=1.0, seed=5)),
        ([11], SamplingParams(temperature=1.5)),
        ([2, 3, 5], SamplingParams(temperature=0.7, seed=6)),
        (PROMPT, SamplingParams(temperature=1.0, seed=5)),
        (PROMPT[:2], SamplingParams(temperature=1.0)),
    ]

    def start(prompt: list[int], params: SamplingParams) -> Iterator[Step]:
        drafter = ScriptedDrafter(ranking, SCRIPTS["mixed"], first_token=prompt[0])
        return generate(Session(target, drafter), prompt, params=params, stop=StopParams(max_tokens=30))

    alone = [[token for step in start(*request) for token in step.tokens] for request in requests]
    running = [start(*request) for request in requests]
    together: list[list[int]] = [[] for _ in requests]
    for steps in zip_longest(*running):
        for tokens, step in zip(together, steps, strict=True):
            tokens += step.tokens if step else ()
    for (_, params), ours, theirs in zip(requests, together, alone, strict=True):
        assert len(ours) == 30
        assert (ours == theirs) == (params.greedy or params.seed is not None)
    assert together[1] == together[4] != together[0]


# --- half precision --------------------------------------------------------------------------------------------


def test_in_half_precision_only_near_ties_part_from_plain_decoding(ranking: Ranking) -> None:
    """A pass over a tree rounds otherwise than one over a token. What is accepted is the argmax of its own pass."""
    model = tiny_llama(max_positions=POSITIONS, attn_implementation=ATTENTION).bfloat16()
    target = HFTarget(model, "half")
    for last in range(12):
        prompt = [*PROMPT, last]
        plain = answer(target, prompt, max_tokens=40, logprobs=2)
        for script in ("oracle", "second", "mixed"):
            drafter = ScriptedDrafter(ranking, SCRIPTS[script], first_token=prompt[0])
            ours = answer(target, prompt, drafter, policy=BLOCKS_OF_6, max_tokens=40, logprobs=2)
            assert all(entry.logprob == entry.top[0][1] for entry in ours.logprobs)
            assert max(ours.blocks) > 1
            assert_near_tie_at_the_parting(ours, plain)


def assert_near_tie_at_the_parting(ours: Answered, plain: Answered) -> None:
    parting = next((at for at, (a, b) in enumerate(zip(ours.tokens, plain.tokens, strict=True)) if a != b), None)
    if parting is not None:
        (_, best), (_, next_best) = plain.logprobs[parting].top
        assert best - next_best < 0.2


# --- a drafter made for something else -------------------------------------------------------------------------


class Adapter(nn.Module):
    """A frozen layer with a low-rank correction beside it."""

    def __init__(self, layer: nn.Linear, generator: torch.Generator) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(2, layer.in_features, generator=generator) * 0.2)
        self.up = nn.Parameter(torch.randn(layer.out_features, 2, generator=generator) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        corrected: Tensor = self.layer(x) + x @ self.down.T @ self.up.T
        return corrected


def test_drafters_of_the_base_model_serve_an_adapted_one() -> None:
    base = HFTarget(tiny_llama(max_positions=POSITIONS, attn_implementation=ATTENTION), "base")
    model = tiny_llama(max_positions=POSITIONS, attn_implementation=ATTENTION)
    generator = torch.Generator().manual_seed(0)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapter(getattr(layer.self_attn, name), generator))
    target = HFTarget(model.eval(), "adapted")
    plain = answer(target, PROMPT, max_tokens=40)
    assert plain.tokens != answer(base, PROMPT, max_tokens=40).tokens
    for drafter in (SmallModelDrafter(base, 64), head_of(base)):
        ours = answer(target, PROMPT, drafter, policy=BLOCKS_OF_6, max_tokens=40)
        assert ours.tokens == plain.tokens
        assert ours.steps[-1].stats.draft_tokens > 0
    merged = answer(target, PROMPT, SmallModelDrafter(target, 64), policy=BLOCKS_OF_6, max_tokens=40)
    assert max(merged.blocks) > 3


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_a_head_may_have_a_device_and_a_precision_of_its_own(device: str) -> None:
    model = tiny_llama(max_positions=POSITIONS, attn_implementation=ATTENTION).to(device)  # type: ignore[arg-type]
    target = HFTarget(model, "tiny llama")
    drafter = EagleDrafter.from_checkpoint(
        checkpoint(), target.embedding_weight, target.lm_head_weight, device="cpu", dtype=torch.bfloat16
    )
    assert (drafter.device.type, drafter.dtype) == ("cpu", torch.bfloat16)
    assert drafter.embedding.device == drafter.lm_head.device == drafter.device
    ours = answer(target, PROMPT, drafter, policy=BLOCKS_OF_6, max_tokens=30)
    assert ours.tokens == answer(target, PROMPT, max_tokens=30).tokens
    assert ours.steps[-1].stats.draft_tokens > 0
