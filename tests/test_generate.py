"""The whole loop is lossless: greedy token for token, sampled distribution for distribution, for every drafter."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

from eyas import native
from eyas.errors import InvalidInputError
from eyas.generate import Session, generate
from eyas.metrics import PHASES
from eyas.policies import DynamicPolicy, StaticPolicy, TreePolicy
from eyas.sampling import LogitsProcessor, Sampler, SamplingParams, log_softmax
from eyas.targets.base import Features, Target
from eyas.tree import Floats
from support.answers import Answered, answer, assert_same_distribution, exact_answers, scripted
from support.drafters import Script, ScriptedDrafter, ScriptedSession, anti_oracle, dial, mixed, oracle
from support.tiny import TableTarget, greedy_ranking, tiny_llama, tiny_native

PROMPT = [3, 1, 4, 1, 5, 9, 2]

SCRIPTS: dict[str, Script] = {
    "oracle": oracle,
    "anti-oracle": anti_oracle,
    "second": mixed(1),
    "third": mixed(2),
    "mixed": mixed(0, 1, 2),
    "dial .3": dial(0.3),
    "dial .8": dial(0.8),
}
POLICIES: dict[str, TreePolicy] = {
    "dynamic": DynamicPolicy(num_steps=5, topk=3, num_draft_tokens=16),
    "no rerank": DynamicPolicy(num_steps=4, topk=3, num_draft_tokens=12, rerank=False),
    "no value": DynamicPolicy(num_steps=4, topk=3, num_draft_tokens=12, value=False),
    "eagle1": StaticPolicy.eagle1(),
    "template": StaticPolicy.from_paths([[2], [2, 0], [2, 0, 1], [0], [0, 2], [1], [1, 1]]),
    "chain": StaticPolicy.chain(5),
    "long chain": StaticPolicy.chain(19),
}
every_drafter = pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
SOME = ("dynamic", "template", "chain")
some_policies = pytest.mark.parametrize("policy", [POLICIES[name] for name in SOME], ids=SOME)


# --- greedy: token for token -----------------------------------------------------------------------------------


@every_drafter
@every_policy
def test_greedy_on_a_table(script: Script, policy: TreePolicy) -> None:
    for seed in range(2):
        target = TableTarget(24, seed=seed, max_positions=128)
        wanted = [*PROMPT]
        for _ in range(30):
            wanted.append(int(target.logits(wanted).argmax()))
        ours = answer(target, PROMPT, scripted(target, script, PROMPT), policy=policy, max_tokens=30)
        assert ours.tokens == wanted[len(PROMPT) :]
        stats = ours.steps[-1].stats
        if script is oracle and policy is not POLICIES["template"]:  # which has no path of first children
            assert max(ours.blocks) == 1 + policy.num_steps
            assert stats.acceptance_length > min(4, policy.num_steps)
        if script is anti_oracle:
            assert set(ours.blocks) == {1}
            assert stats.accepted_tokens == 0
    assert answer(target, PROMPT, policy=policy, max_tokens=30).outcome == ours.outcome


@pytest.fixture(scope="module")
def llama() -> Any:
    pytest.importorskip("transformers")
    return tiny_llama()


@pytest.fixture(scope="module")
def hf(llama: Any) -> Target:
    """The same weights behind the transformers target."""
    from eyas.targets.hf import ATTENTION, HFTarget

    return HFTarget(tiny_llama(attn_implementation=ATTENTION), "tiny llama")


@pytest.fixture(scope="module", params=["float32", "bfloat16", "int8"])
def cpu(request: pytest.FixtureRequest, llama: Any) -> Target:
    """The same weights behind the native engine."""
    if not native.available():
        pytest.skip(native.reason())
    return tiny_native(llama, request.param)


@pytest.fixture(scope="module")
def wanted(llama: Any) -> list[int]:
    """What transformers' own generate says."""
    import torch

    ids = torch.tensor([PROMPT])
    out = llama.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, pad_token_id=0)
    return [int(token) for token in out[0, len(PROMPT) :]]


@pytest.fixture(scope="module")
def ranking(llama: Any) -> Callable[[list[int]], Sequence[int]]:
    known = greedy_ranking(llama)
    cache: dict[tuple[int, ...], list[int]] = {}

    def ranked(prefix: list[int]) -> list[int]:
        key = tuple(prefix)
        if key not in cache:
            cache[key] = known(prefix)
        return cache[key]

    return ranked


@every_drafter
@some_policies
def test_greedy_on_transformers(
    hf: Target, ranking: Any, wanted: list[int], script: Script, policy: TreePolicy
) -> None:
    drafter = ScriptedDrafter(ranking, script, first_token=PROMPT[0])
    ours = answer(hf, PROMPT, drafter, policy=policy, max_tokens=24)
    assert ours.tokens == wanted
    if script is oracle and policy is not POLICIES["template"]:
        assert max(ours.blocks) == 1 + policy.num_steps


@every_drafter
@some_policies
def test_greedy_on_the_native_engine(
    cpu: Target, ranking: Any, wanted: list[int], script: Script, policy: TreePolicy
) -> None:
    plain = answer(cpu, PROMPT, max_tokens=24, logprobs=3)
    if cpu.info.dtype == "float32":
        assert plain.tokens == wanted
    drafter = ScriptedDrafter(ranking, script, first_token=PROMPT[0])
    ours = answer(cpu, PROMPT, drafter, policy=policy, max_tokens=24, logprobs=3)
    assert ours.outcome == plain.outcome  # log-probabilities too, bit for bit
    if script is oracle and policy is not POLICIES["template"]:
        assert max(ours.blocks) > 3


class Ties(TableTarget):
    """A table in which most contexts have several equally large logits."""

    def logits(self, prefix: Sequence[int]) -> Floats:
        return np.minimum(np.round(super().logits(prefix)), 1)


class Forbidden:
    """A generator that nobody may touch."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("greedy decoding drew a random number")


@every_drafter
def test_of_equal_maxima_the_first_and_without_chance(script: Script) -> None:
    target = Ties(24, seed=1, max_positions=128)
    wanted = [*PROMPT]
    for _ in range(30):
        logits = target.logits(wanted)
        assert (logits == logits.max()).sum() > 1
        wanted.append(int(np.flatnonzero(logits == logits.max())[0]))
    drafter = scripted(target, script, PROMPT)
    for params in (None, SamplingParams(temperature=1.0, top_k=1), SamplingParams(temperature=0.5, top_p=0.0)):
        ours = answer(target, PROMPT, drafter, params=params, max_tokens=30, rng=Forbidden())
        assert ours.tokens == wanted[len(PROMPT) :]
    biased = SamplingParams(logit_bias={int(np.argmax(np.bincount(wanted))): 0.0})  # through the processed path
    assert answer(target, PROMPT, drafter, params=biased, max_tokens=30, rng=Forbidden()).tokens == ours.tokens


def test_greedy_beside_sampled_requests() -> None:
    target = Ties(24, seed=1, max_positions=128)
    alone = answer(target, PROMPT, scripted(target, mixed(0, 1), PROMPT), max_tokens=30)
    kinds = [None, SamplingParams(temperature=1.0), None, SamplingParams(temperature=2.0, seed=3)]
    tokens = together(target, [{"params": params, "max_tokens": 30} for params in kinds])
    assert tokens[0] == tokens[2] == alone.tokens


def together(target: TableTarget, requests: list[dict[str, Any]]) -> list[list[int]]:
    """Several answers to one prompt, a step of each in turn."""
    from eyas.stopping import StopParams

    running: list[Iterator[Any]] = []
    for request in requests:
        session = Session(target, scripted(target, mixed(0, 1), PROMPT))
        stop = StopParams(max_tokens=request["max_tokens"])
        running.append(generate(session, PROMPT, params=request["params"], stop=stop))
    tokens: list[list[int]] = [[] for _ in requests]
    while True:
        steps = [next(steps, None) for steps in running]
        if not any(steps):
            return tokens
        for ours, step in zip(tokens, steps, strict=True):
            if step is not None:
                ours += step.tokens


# --- penalties, biases, processors: each node's own past ------------------------------------------------------


def knowing(target: TableTarget, script: Script, prompt: list[int], params: SamplingParams) -> ScriptedDrafter:
    """A drafter that knows the processed distribution, so that long blocks commit under any settings."""

    def ranking(prefix: list[int]) -> list[int]:
        sampler = Sampler(params, target.info.vocab_size, prompt)
        sampler.commit(prefix[len(prompt) :])
        return np.argsort(-sampler.logits(target.logits(prefix)), kind="stable").tolist()

    return ScriptedDrafter(ranking, script, first_token=prompt[0])


def by_hand(target: TableTarget, prompt: list[int], count: int, settings: dict[str, Any]) -> list[int]:
    """Penalised greedy decoding, one token at a time, written down from the definitions."""
    answered: list[int] = []
    for _ in range(count):
        logits = target.logits([*prompt, *answered])
        for token, bias in settings.get("logit_bias", {}).items():
            logits[token] += np.float32(bias)
        penalty = np.float32(settings.get("repetition_penalty", 1.0))
        for token in {*prompt, *answered}:
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        for token, times in Counter(answered).items():
            logits[token] -= np.float32(
                settings.get("presence_penalty", 0.0) + settings.get("frequency_penalty", 0.0) * times
            )
        answered.append(int(logits.argmax()))
    return answered


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 1.5},
    {"frequency_penalty": -1.5},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4, "logit_bias": {2: 0.5}},
]


@every_drafter
@pytest.mark.parametrize("settings", PENALTIES, ids=str)
def test_penalties_on_a_loop(settings: dict[str, Any], script: Script) -> None:
    """The table forgets all but two tokens, so greedy text soon repeats itself, and every repetition is penalised."""
    target = TableTarget(10, seed=2, memory=2, spread=2.0, max_positions=128)
    params = SamplingParams(**settings)
    wanted = by_hand(target, PROMPT, 30, settings)
    assert wanted != by_hand(target, PROMPT, 30, {})
    for drafter in (scripted(target, script, PROMPT), knowing(target, script, PROMPT, params)):
        for policy in (POLICIES["dynamic"], POLICIES["chain"]):
            ours = answer(target, PROMPT, drafter, policy=policy, params=params, max_tokens=30)
            assert ours.tokens == wanted
    if script is oracle:
        assert max(ours.blocks) == 6


@every_drafter
def test_a_banned_token_never_comes_however_often_it_is_drafted(script: Script) -> None:
    target = TableTarget(10, seed=2, memory=2, spread=2.0, max_positions=128)
    plain = answer(target, PROMPT, max_tokens=40).tokens
    commonest = Counter(plain).most_common(1)[0][0]
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, logit_bias={commonest: -100.0}, seed=1)
        ours = answer(target, PROMPT, scripted(target, script, PROMPT), params=params, max_tokens=60)
        assert commonest not in ours.tokens
        drafted = {int(t) for step in ours.steps[1:] if step.cycle for t in step.cycle.tree.tokens[1:]}
        assert commonest in drafted
    wanted = by_hand(target, PROMPT, 60, {"logit_bias": {commonest: -100.0}})
    assert (
        answer(
            target,
            PROMPT,
            scripted(target, script, PROMPT),
            params=SamplingParams(logit_bias={commonest: -100.0}),
            max_tokens=60,
        ).tokens
        == wanted
    )


@every_drafter
def test_a_forced_token_always_comes(script: Script) -> None:
    target = TableTarget(10, seed=4, max_positions=128)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, logit_bias={7: 100.0})
        ours = answer(target, PROMPT, scripted(target, script, PROMPT), params=params, max_tokens=20)
        assert ours.tokens == [7] * 20


@every_drafter
@some_policies
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_processor_sees_each_true_prefix_once(script: Script, policy: TreePolicy, temperature: float) -> None:
    target = TableTarget(10, seed=4, max_positions=128, eos_token_ids=(6,))
    seen: list[list[int]] = []

    def record(prefix: Sequence[int], logits: Floats) -> Floats:
        seen.append(list(prefix))
        return logits

    params = SamplingParams(temperature=temperature, processors=(record,), seed=2)
    ours = answer(target, PROMPT, scripted(target, script, PROMPT), policy=policy, params=params, max_tokens=30)
    whole = [*PROMPT, *ours.tokens]
    assert seen == [whole[:length] for length in range(len(PROMPT), len(whole))]


def braces(digits: int) -> LogitsProcessor:
    """A grammar over ten tokens: 0 opens, 1-7 are digits, 8 closes, 9 ends. It knows nothing past its end."""

    def processor(prefix: Sequence[int], logits: Floats) -> Floats:
        said = list(prefix[len(PROMPT) :])
        assert 9 not in said, "asked past the end"
        if not said:
            allowed = [0]
        elif said[-1] == 8:
            allowed = [9]
        elif len(said) > digits:
            allowed = [8]
        else:
            allowed = [*range(1, 8), *([8] if len(said) > 1 else [])]
        masked = np.full_like(logits, -np.inf)
        masked[allowed] = logits[allowed]
        return masked

    return processor


@every_drafter
@some_policies
def test_a_grammar(script: Script, policy: TreePolicy) -> None:
    """Drafts that break the grammar, follow it, and go on past its end: all as plain constrained decoding."""
    for seed, temperature in ((0, 0.0), (2, 1.0)):
        target = TableTarget(10, seed=seed, max_positions=64, eos_token_ids=(9,))
        params = SamplingParams(temperature=temperature, processors=(braces(5),), seed=seed)

        def ranking(prefix: list[int], target: TableTarget = target) -> list[int]:
            """Grammatical as far as the grammar goes, anything beyond."""
            logits = target.logits(prefix)
            if 9 not in prefix[len(PROMPT) :]:
                logits = braces(5)(prefix, logits)
            return np.argsort(-logits, kind="stable").tolist()

        for drafter in (scripted(target, script, PROMPT), ScriptedDrafter(ranking, script, first_token=PROMPT[0])):
            ours = answer(target, PROMPT, drafter, policy=policy, params=params)
            if temperature == 0:
                assert ours.tokens == answer(target, PROMPT, params=params).tokens
            assert ours.reason == "stop"
            assert (ours.tokens[0], ours.tokens[-2:]) == (0, [8, 9])
            assert set(ours.tokens[1:-2]) <= set(range(1, 8))


# --- sampling: distribution for distribution -------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.5, "min_p": 0.2},
    {"temperature": 1.2, "top_k": 2, "repetition_penalty": 1.5},
    {"temperature": 1.0, "top_p": 0.8, "frequency_penalty": 0.8, "presence_penalty": -0.5},
    {"temperature": 1.0, "logit_bias": {0: 1.5, 1: -2.0}},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("script", [oracle, anti_oracle, mixed(1), dial(0.5)], ids=["oracle", "anti", "second", "dial"])
def test_sampled_answers_have_exactly_the_plain_distribution(settings: dict[str, Any], script: Script) -> None:
    target = TableTarget(3, seed=3, eos_token_ids=(2,))
    params = SamplingParams(**settings)
    policy = DynamicPolicy(num_steps=2, topk=2, num_draft_tokens=4)
    plain = exact_answers(target, None, policy, params, max_tokens=4)
    assert_same_distribution(exact_answers(target, script, policy, params, max_tokens=4), plain)


def test_plain_sampling_is_the_target_itself() -> None:
    target = TableTarget(3, seed=3, eos_token_ids=(2,))
    answers = exact_answers(target, None, StaticPolicy.chain(1), SamplingParams(temperature=0.7), max_tokens=3)
    assert {len(tokens) for tokens in answers} == {1, 2, 3}
    for tokens, chance in answers.items():
        wanted = 1.0
        for length, token in enumerate(tokens):
            logits = target.logits([1, 0, *tokens[:length]]).astype(np.float64) / 0.7
            wanted *= np.exp(logits[token]) / np.exp(logits).sum()
        assert float(chance) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("stops", [{"min_tokens": 2}, {"ignore_eos": True}, {"stop_token_ids": (0,)}], ids=str)
def test_sampled_answers_with_other_ends(stops: dict[str, Any]) -> None:
    target = TableTarget(3, seed=6, eos_token_ids=(2,))
    params = SamplingParams(temperature=1.0)
    policy = StaticPolicy.from_paths([[0], [1], [0, 0], [0, 1]])
    plain = exact_answers(target, None, policy, params, max_tokens=4, **stops)
    for script in (oracle, mixed(1)):
        assert_same_distribution(exact_answers(target, script, policy, params, max_tokens=4, **stops), plain)


class Five(TableTarget):
    """Five tokens with the same chances everywhere."""

    def logits(self, prefix: Sequence[int]) -> Floats:
        return np.log(np.array([0.40, 0.30, 0.15, 0.10, 0.05], np.float32))


@pytest.mark.parametrize(("temperature", "kept"), [(1.0, 2), (2.0, 3)])
def test_filters_leave_the_same_tokens_by_whatever_way(temperature: float, kept: int) -> None:
    """Speculative decoding, plain decoding and transformers' own processors; T=2 flattens before the filters."""
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    target = Five(5)
    scores = torch.tensor(target.logits([]))[None]
    for warper in (
        process.TemperatureLogitsWarper(temperature),
        process.TopKLogitsWarper(3),
        process.TopPLogitsWarper(0.8),
    ):
        scores = warper(None, scores)
    wanted = scores.softmax(-1)[0].tolist()
    assert [chance > 0 for chance in wanted] == [token < kept for token in range(5)]
    params = SamplingParams(temperature=temperature, top_k=3, top_p=0.8)
    policy = DynamicPolicy(num_steps=2, topk=4, num_draft_tokens=8)
    for script in (None, oracle, anti_oracle, mixed(2)):
        answers = exact_answers(target, script, policy, params, max_tokens=2)
        assert set(answers) == {(one, two) for one in range(kept) for two in range(kept)}
        for (one, two), chance in answers.items():
            assert float(chance) == pytest.approx(wanted[one] * wanted[two], rel=1e-5)


@pytest.mark.parametrize("temperature", [0, 1e-7, 1e-4, 0.1, 2])
def test_every_corner_of_the_settings_answers(temperature: float) -> None:
    target = TableTarget(12, seed=5)
    drafter = scripted(target, mixed(0, 1), PROMPT)
    greedy = answer(target, PROMPT, max_tokens=8).tokens
    for top_p, top_k, min_p in product([0, 1e-6, 0.9, 1], [-1, 0, 1, 12, 13], [0, 1]):
        params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=4)
        ours = answer(target, PROMPT, drafter, policy=POLICIES["dynamic"], params=params, max_tokens=8, logprobs=1)
        assert_teacher_forced(ours, target.logits, 1)
        assert len(ours.tokens) == 8
        if temperature < 1e-3 or top_p < 1e-3 or top_k == 1 or min_p == 1:  # one token is left
            assert ours.tokens == greedy, params


def test_draws_of_a_real_generator_follow_the_plain_distribution() -> None:
    """The same once more without the exhaustive stand-in: 2,000 answers of three tokens."""
    target = TableTarget(4, seed=9)
    params = SamplingParams(temperature=1.3)
    rng = np.random.default_rng(0)
    drafter = scripted(target, mixed(0, 1), [1, 0])
    policy = DynamicPolicy(num_steps=2, topk=2, num_draft_tokens=4)
    draws = 2000
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(draws):
        counts[tuple(answer(target, [1, 0], drafter, policy=policy, params=params, rng=rng, max_tokens=3).tokens)] += 1
    exact = exact_answers(target, None, policy, params, max_tokens=3)
    expected = np.array([float(chance) for chance in exact.values()])
    seen = np.array([counts[tokens] for tokens in exact])
    assert seen.sum() == draws
    distance = np.abs(seen / draws - expected).sum() / 2
    noise = [np.abs(rng.multinomial(draws, expected) / draws - expected).sum() / 2 for _ in range(200)]
    assert distance < np.mean(noise) + 5 * np.std(noise)


# --- seeds -----------------------------------------------------------------------------------------------------


def sampled(seed: int | None, **options: Any) -> list[int]:
    target = TableTarget(24, seed=2, max_positions=128)
    params = SamplingParams(temperature=1.0, seed=seed)
    return answer(
        target, PROMPT, scripted(target, mixed(0, 1), PROMPT), params=params, **{"max_tokens": 30} | options
    ).tokens


def test_a_seed_decides_the_answer() -> None:
    first = [sampled(seed) for seed in range(1, 21)]
    assert [sampled(seed) for seed in range(1, 21)] == first
    assert len(set(map(tuple, first))) == 20
    assert sampled(7) == sampled(None, rng=np.random.default_rng(7))


def test_without_a_seed_answers_differ() -> None:
    assert len({tuple(sampled(None)) for _ in range(10)}) == 10


def test_traffic_around_a_seeded_request_changes_nothing() -> None:
    target = TableTarget(24, seed=2, max_positions=128)

    def request(seed: int | None, temperature: float = 1.0) -> dict[str, Any]:
        return {"params": SamplingParams(temperature=temperature, seed=seed), "max_tokens": 30}

    around = together(target, [request(None), request(5), request(None, 0.5), request(5), request(6)])
    assert around[1] == around[3] == sampled(5)
    assert around[4] == sampled(6)


# --- log-probabilities -----------------------------------------------------------------------------------------


def assert_teacher_forced(ours: Answered, logits: Callable[[list[int]], Floats], top: int) -> None:
    """Each entry is the raw log-softmax at its place given the tokens before it."""
    assert len(ours.logprobs) == len(ours.tokens)
    for place, entry in enumerate(ours.logprobs):
        values = log_softmax(logits([*PROMPT, *ours.tokens[:place]]).astype(np.float64))
        assert entry.token == ours.tokens[place]
        assert entry.logprob == pytest.approx(values[entry.token], abs=1e-4)
        assert len(entry.top) == top
        np.testing.assert_allclose([value for _, value in entry.top], np.sort(values)[::-1][:top], atol=1e-4)
        for token, value in entry.top:
            assert value == pytest.approx(values[token], abs=1e-4)
        if entry.token in dict(entry.top):
            assert dict(entry.top)[entry.token] == entry.logprob
    json.dumps([(entry.token, entry.logprob, entry.top) for entry in ours.logprobs], allow_nan=False)


@every_drafter
@some_policies
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_teacher_forced(script: Script, policy: TreePolicy, temperature: float) -> None:
    target = TableTarget(24, seed=2, max_positions=128)
    params = SamplingParams(temperature=temperature, seed=3)
    ours = answer(
        target, PROMPT, scripted(target, script, PROMPT), policy=policy, params=params, logprobs=3, max_tokens=14
    )
    assert_teacher_forced(ours, target.logits, 3)
    if temperature == 0:
        assert all(entry.top[0] == (entry.token, entry.logprob) for entry in ours.logprobs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_on_transformers(hf: Target, llama: Any, ranking: Any, temperature: float) -> None:
    import torch

    @torch.inference_mode()
    def logits(prefix: list[int]) -> Floats:
        return llama(torch.tensor([prefix])).logits[0, -1].numpy()

    params = SamplingParams(temperature=temperature, seed=3)
    drafter = ScriptedDrafter(ranking, mixed(0, 1, 2), first_token=PROMPT[0])
    assert_teacher_forced(answer(hf, PROMPT, drafter, params=params, logprobs=3, max_tokens=10), logits, 3)


def test_logprobs_are_raw_whatever_was_done_to_the_logits() -> None:
    target = TableTarget(12, seed=2)
    params = SamplingParams(temperature=0.3, top_k=2, repetition_penalty=1.4, logit_bias={3: 2.0}, seed=1)
    ours = answer(target, PROMPT, scripted(target, oracle, PROMPT), params=params, logprobs=12, max_tokens=20)
    assert_teacher_forced(ours, target.logits, 12)


def test_logprobs_of_nothing_and_of_what_the_model_rules_out() -> None:
    class Holes(TableTarget):
        """A model whose last two ids are padding."""

        def logits(self, prefix: Sequence[int]) -> Floats:
            logits = super().logits(prefix)
            logits[-2:] = -np.inf
            return logits

    target = Holes(12, seed=2)
    drafter = scripted(target, oracle, PROMPT)
    assert [entry.top for entry in answer(target, PROMPT, drafter, logprobs=0, max_tokens=9).logprobs] == [()] * 9
    assert answer(target, PROMPT, drafter, max_tokens=9).logprobs == []
    for entry in answer(target, PROMPT, drafter, logprobs=12, max_tokens=9).logprobs:
        assert len(entry.top) == 10
        json.dumps(entry.top, allow_nan=False)


def test_equal_logprobs_are_listed_by_index() -> None:
    target = Ties(24, seed=1)
    for entry in answer(target, PROMPT, scripted(target, oracle, PROMPT), logprobs=7, max_tokens=9).logprobs:
        assert list(entry.top) == sorted(entry.top, key=lambda pair: (-pair[1], pair[0]))
        assert entry.top[0][0] == entry.token


# --- what the loop tells its drafter, and reports --------------------------------------------------------------


class Pairing(ScriptedDrafter):
    """Checks that each token comes with the feature of the position before it."""

    def new_session(self) -> ScriptedSession:
        return PairingSession(self)


class PairingSession(ScriptedSession):
    def commit(self, tokens: Sequence[int], features: Features) -> None:
        before = [self._drafter.first_token, *self.tokens, *tokens][:-1]
        positions = range(self.length, self.length + len(tokens))
        assert np.asarray(features).tolist() == [[float(at), float(before[at])] for at in positions]
        super().commit(tokens, features)


@every_drafter
@every_policy
def test_a_drafter_gets_every_token_with_the_feature_before_it(script: Script, policy: TreePolicy) -> None:
    target = TableTarget(24, seed=2, max_positions=128, eos_token_ids=(11,))
    drafter = Pairing(target.ranking, script, first_token=PROMPT[0], feature_levels=1)
    session = Session(target, drafter)
    for cap in (1, 9, 30):
        ours = answer(
            session, [*session.tokens[:-2], *PROMPT] if session.tokens else PROMPT, policy=policy, max_tokens=cap
        )
        assert session.draft is not None
        assert session.draft.length == session.cache.length == len(session.tokens) - 1
    assert ours.tokens


def test_a_head_for_other_features_is_refused() -> None:
    target = TableTarget(24)
    with pytest.raises(InvalidInputError, match=r"reads 3 feature level\(s\), but target table was loaded to give 1"):
        Session(target, scripted(target, oracle, PROMPT, feature_levels=3))
    Session(target, scripted(target, oracle, PROMPT, feature_levels=1))
    Session(target, scripted(target, oracle, PROMPT))


@every_policy
def test_steps_tell_what_happened(policy: TreePolicy) -> None:
    target = TableTarget(24, seed=2, max_positions=128)
    ours = answer(target, PROMPT, scripted(target, mixed(0, 1), PROMPT), policy=policy, max_tokens=30)
    first, *cycles = ours.steps
    assert first.cycle is None
    assert set(first.seconds) == {"prefill"}
    total = Counter(first.seconds)
    root = first.tokens[-1]
    for step in cycles:
        assert step.cycle is not None
        tree, acceptance, trace = step.cycle.tree, step.cycle.acceptance, step.cycle.trace
        assert tree.tokens[0] == root
        committed = [*tree.tokens[list(acceptance.path[1:])].tolist(), acceptance.next_token]
        assert list(step.tokens) == committed[: len(step.tokens)]
        assert set(step.seconds) == set(PHASES) - {"prefill"}
        assert all(seconds >= 0 for seconds in step.seconds.values())
        if len(tree) > 1:
            assert trace.candidates is not None
            assert trace.candidates.tokens[trace.kept].tolist() == tree.tokens[1:].tolist()
            assert trace.expanded[0] == 0
        total.update(step.seconds)
        root = step.tokens[-1]
    stats = ours.steps[-1].stats
    assert all(step.stats is stats for step in ours.steps)
    assert stats.seconds == pytest.approx(dict(total))
    assert stats.cycles == len(cycles)
    assert stats.draft_tokens == sum(step.cycle.tree.num_draft_tokens for step in cycles if step.cycle)
    assert stats.acceptance_length == (len(ours.tokens) - 1) / len(cycles)
    assert stats.acceptance_rate == stats.accepted_tokens / stats.draft_tokens
    assert stats.tokens_per_second == stats.cycle_tokens / (sum(stats.seconds.values()) - stats.seconds["prefill"])
    assert set(json.loads(json.dumps(stats.as_dict(), allow_nan=False))) == {
        "cycles",
        "draft_tokens",
        "accepted_tokens",
        "acceptance_length",
        "acceptance_rate",
        "tokens_per_second",
        "seconds",
    }


def test_plain_decoding_is_a_cycle_per_token() -> None:
    target = TableTarget(24, seed=2)
    ours = answer(target, PROMPT, max_tokens=10)
    assert ours.blocks == [1] * 9
    stats = ours.steps[-1].stats
    assert (stats.cycles, stats.acceptance_length, stats.draft_tokens, stats.acceptance_rate) == (9, 1.0, 0, 0.0)
    one = answer(target, PROMPT, max_tokens=1).steps[-1].stats
    assert (one.cycles, one.acceptance_length, one.tokens_per_second) == (0, 0.0, 0.0)


def test_one_token_prompts_and_numpy_prompts() -> None:
    target = TableTarget(24, seed=2)
    drafter = scripted(target, oracle, PROMPT)
    assert answer(target, PROMPT[:1], drafter, max_tokens=9).tokens == answer(target, PROMPT[:1], max_tokens=9).tokens
    ours = answer(target, np.array(PROMPT), drafter, max_tokens=9)
    assert ours.tokens == answer(target, PROMPT, max_tokens=9).tokens
    assert all(type(token) is int for token in ours.tokens)
