"""Processed distributions: transformers' own processors as the reference, edges, and whose past a node sees."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.errors import EyasError, InvalidInputError
from eyas.sampling import LogitsProcessor, Sampler, SamplingParams, log_softmax, warp
from eyas.tree import Floats

V = 40


def random_logits(seed: int, *, ties: bool = False, size: int = V) -> Floats:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=size) * 3
    return (np.round(logits) if ties else logits).astype(np.float32)


def sampler(prompt: Sequence[int] = (1, 2, 3), answer: Sequence[int] = (), **settings: Any) -> Sampler:
    made = Sampler(
        SamplingParams(**{name: value for name, value in settings.items() if name not in ("min_tokens", "end_ids")}),
        V,
        prompt,
        settings.get("min_tokens", 0),
        settings.get("end_ids", ()),
    )
    made.commit(answer)
    return made


# --- against transformers --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference() -> Callable[..., Floats]:
    """transformers' probabilities after a prefix, made by its own processors in the order of its own generate."""
    torch = pytest.importorskip("torch")
    generation = pytest.importorskip("transformers.generation")
    process = pytest.importorskip("transformers.generation.logits_process")

    def probabilities(logits: Floats, prefix: Sequence[int], answer_start: int, settings: dict[str, Any]) -> Floats:
        chain = generation.LogitsProcessorList()
        if bias := settings.get("logit_bias"):
            chain.append(process.SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()}))
        if (penalty := settings.get("repetition_penalty", 1.0)) != 1.0:
            chain.append(process.RepetitionPenaltyLogitsProcessor(penalty))
        if settings.get("end_ids"):
            chain.append(
                process.MinNewTokensLengthLogitsProcessor(
                    answer_start, settings["min_tokens"], eos_token_id=list(settings["end_ids"]), device="cpu"
                )
            )
        if allowed := settings.get("allowed"):
            chain.append(process.PrefixConstrainedLogitsProcessor(lambda batch, ids: sorted(allowed), 1))
        if (temperature := settings.get("temperature", 1.0)) != 1.0:
            chain.append(process.TemperatureLogitsWarper(temperature))
        if settings.get("top_k"):
            chain.append(process.TopKLogitsWarper(settings["top_k"]))
        if settings.get("top_p", 1.0) < 1.0:
            chain.append(process.TopPLogitsWarper(settings["top_p"]))
        if settings.get("min_p"):
            chain.append(process.MinPLogitsWarper(settings["min_p"]))
        scores = chain(torch.tensor([list(prefix)]), torch.tensor(logits)[None])
        return scores.softmax(dim=-1)[0].numpy()

    return probabilities


def only(allowed: set[int]) -> LogitsProcessor:
    """A grammar that allows a fixed set."""

    def processor(prefix: Sequence[int], logits: Floats) -> Floats:
        masked = np.full_like(logits, -np.inf)
        masked[sorted(allowed)] = logits[sorted(allowed)]
        return masked

    return processor


FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": V - 1},
    {"top_k": V},
    {"top_k": V + 1},
    {"top_p": 0.9},
    {"top_p": 0.5},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 1.5, "min_p": 0.2},
    {"temperature": 2.0, "top_k": 8, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 6, "top_p": 0.7, "min_p": 0.15},
    {"temperature": 1.7, "top_k": 12, "top_p": 0.95, "min_p": 0.05},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "temperature": 1.2},
    {"logit_bias": {3: 4.0, 7: -100.0, 0: 0.5}},
    {"logit_bias": {1: -6.0, 2: 6.0}, "repetition_penalty": 1.5, "temperature": 0.8, "top_k": 10, "top_p": 0.9},
    {"min_tokens": 6, "end_ids": (4, 9), "repetition_penalty": 1.2},
    {"min_tokens": 5, "end_ids": (4, 9), "top_p": 0.9},
    {"allowed": {1, 2, 5, 8, 13, 21}, "repetition_penalty": 1.3, "logit_bias": {5: 3.0}, "top_k": 3},
]


@pytest.mark.parametrize("settings", FILTERS, ids=str)
@pytest.mark.parametrize("ties", [False, True], ids=["smooth", "ties"])
def test_same_distribution_as_transformers(
    reference: Callable[..., Floats], settings: dict[str, Any], ties: bool
) -> None:
    prompt, answer, ancestors = [1, 2, 3, 2], [5, 3, 30], [8, 5]
    ours = {name: value for name, value in settings.items() if name != "allowed"}
    if allowed := settings.get("allowed"):
        ours["processors"] = (only(allowed),)
    made = sampler(prompt, answer, **{"temperature": 1.0} | ours)
    for seed in range(12):
        logits = random_logits(seed, ties=ties)
        wanted = reference(logits, [*prompt, *answer, *ancestors], len(prompt), settings)
        if settings.get("top_k") == 1:  # transformers keeps all tokens that tie for the first place, greedy takes one
            first = np.zeros(V, np.float32)
            first[logits.argmax()] = 1
            wanted = first
        got = made.probabilities(logits.copy(), ancestors)
        assert got.dtype == np.float32
        if ties and "top_p" in settings:  # transformers' unstable sort says not which of equal tokens top_p drops
            got, wanted = np.sort(got), np.sort(wanted)
        assert (got > 0).tolist() == (wanted > 0).tolist()  # the same support
        np.testing.assert_allclose(got, wanted, atol=2e-6)


@given(
    st.integers(0, 2**31),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.integers(0, V + 2),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
    st.booleans(),
)
def test_filters_by_their_definitions(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, ties: bool
) -> None:
    """Restated one by one, in float64 and without any trick."""
    logits = random_logits(seed, ties=ties)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    p = softmax64(logits.astype(np.float64) / temperature)
    if params.greedy:
        wanted = {int(logits.argmax())}
    else:
        alive = np.ones(V, bool)
        if 0 < top_k < V:
            alive &= logits >= np.sort(logits)[-top_k]
        p = softmax64(np.where(alive, logits.astype(np.float64) / temperature, -np.inf))
        if top_p < 1:
            ascending = np.argsort(-p, kind="stable")[::-1]
            masses = np.cumsum(p[ascending])
            if np.abs(masses - (1 - top_p)).min() < 1e-5:
                return  # on the very edge rounding decides
            alive &= ~np.isin(np.arange(V), ascending[:-1][masses[:-1] <= 1 - top_p])
        p = np.where(alive, p, 0)
        if np.abs(p[p > 0] / p.max() - min_p).min() < 1e-5 and min_p < 1:
            return
        alive &= p >= min_p * p.max() * (1 - 1e-6)
        wanted = set(np.flatnonzero(alive).tolist())
    got = warp(logits, params)
    assert set(np.flatnonzero(got).tolist()) == wanted
    assert got.sum() == pytest.approx(1, abs=1e-6)
    kept = sorted(wanted)
    if not params.greedy:
        np.testing.assert_allclose(got[kept], p[kept] / p[kept].sum(), rtol=1e-4)


def softmax64(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def test_the_order_top_k_before_top_p_decides() -> None:
    p = np.array([0.40, 0.30, 0.15, 0.10, 0.05], np.float32)
    # top_k first leaves .471 .353 .176: the last is more than .2 short of nothing, so top_p .8 drops it; the other
    # way round .40 .30 .15 survive top_p, and top_k 3 keeps all three.
    assert np.flatnonzero(warp(np.log(p), SamplingParams(temperature=1.0, top_k=3, top_p=0.8))).tolist() == [0, 1]
    assert np.flatnonzero(warp(np.log(p), SamplingParams(temperature=1.0, top_p=0.8))).tolist() == [0, 1, 2]


def test_temperature_comes_before_the_filters() -> None:
    p = np.array([0.40, 0.30, 0.15, 0.10, 0.05], np.float32)
    # At T=2 the distribution flattens to .29 .25 .18 .15 .10, so the same top_p keeps more.
    assert np.flatnonzero(warp(np.log(p), SamplingParams(temperature=2.0, top_p=0.8))).tolist() == [0, 1, 2, 3]
    assert np.flatnonzero(warp(np.log(p), SamplingParams(temperature=0.5, top_p=0.8))).tolist() == [0, 1]


def test_tokens_that_tie() -> None:
    logits = np.array([1, 3, 1, 1, 0], np.float32)
    # For the last place of top_k: all stay. For the last mass of top_p: those of lower index stay.
    assert np.flatnonzero(warp(logits, SamplingParams(temperature=1.0, top_k=2))).tolist() == [0, 1, 2, 3]
    assert np.flatnonzero(warp(logits, SamplingParams(temperature=1.0, top_p=0.8))).tolist() == [0, 1, 2]
    assert np.flatnonzero(warp(logits, SamplingParams(temperature=1.0, min_p=np.exp(-2.01)))).tolist() == [0, 1, 2, 3]


# --- edges -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-46, 1e-40, 1e-7, 1e-4, 0.1, 2, 1e30])
def test_no_corner_makes_nan(temperature: float) -> None:
    shapes = {
        "smooth": random_logits(1),
        "ties": random_logits(1, ties=True),
        "all equal": np.zeros(V, np.float32),
        "huge": random_logits(2) * 1e30,
        "masked": np.where(np.arange(V) == 7, 0, -np.inf).astype(np.float32),
        "nearly masked": np.where(np.arange(V) % 7 == 0, random_logits(3), -np.inf).astype(np.float32),
    }
    for (name, logits), top_p, top_k, min_p in product(shapes.items(), [0, 1e-6, 0.9, 1], [-1, 0, 1, V, V + 1], [0, 1]):
        params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
        p = warp(logits.copy(), params)
        where = (name, params)
        assert np.isfinite(p).all(), where
        assert (p >= 0).all(), where
        assert p.sum() == pytest.approx(1, abs=1e-5), where
        assert p[~np.isfinite(logits)].sum() == 0, where
        assert p[logits.argmax()] == p.max() or temperature == 1e30, where  # at 1e30 all are equal in float32
        if top_k == 1 or temperature == 0 or top_p == 0:
            assert params.greedy
            assert p[logits.argmax()] == 1, where
        if 0 < temperature < 1e-4 and name == "smooth":
            assert p[logits.argmax()] == 1, where


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, r"temperature must be between 0 and 1e\+30, got -0.1"),
        ({"temperature": float("nan")}, r"temperature must be between 0 and 1e\+30, got nan"),
        ({"temperature": 1e300}, "temperature must be between"),
        ({"temperature": float("inf")}, r"temperature must be between 0 and 1e\+30, got inf"),
        ({"top_k": -2}, r"top_k must be -1 or 0 \(off\) or a count >= 1, got -2"),
        ({"top_p": 1.1}, "top_p must be between 0 and 1, got 1.1"),
        ({"top_p": -1e-9}, "top_p must be between 0 and 1"),
        ({"top_p": float("nan")}, "top_p must be between 0 and 1, got nan"),
        ({"min_p": 1.5}, "min_p must be between 0 and 1, got 1.5"),
        ({"min_p": -0.5}, "min_p must be between 0 and 1"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty must be between 1e-30 and 1e\+30, got 0.0"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty must be between 1e-30 and"),
        ({"repetition_penalty": -1.0}, "repetition_penalty must be between 1e-30 and"),
        ({"presence_penalty": float("nan")}, r"presence_penalty must be between -1e\+30 and 1e\+30, got nan"),
        ({"frequency_penalty": float("-inf")}, "frequency_penalty must be between"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias of token 5 must be between"),
        ({"seed": -1}, "seed must be a whole number >= 0, got -1"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        SamplingParams(**settings)
    assert isinstance(caught.value, EyasError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("token", [-1, V, V + 100])
def test_a_biased_token_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(InvalidInputError, match=f"logit_bias names token {token}, but ids run from 0 to {V - 1}"):
        sampler(logit_bias={token: 1.0})


def test_a_choice_of_nothing_is_refused() -> None:
    banned = sampler(answer=[5], processors=(lambda prefix, logits: np.full_like(logits, -np.inf),))
    for ask in (banned.choice, banned.probabilities):
        with pytest.raises(InvalidInputError, match="after 1 tokens of answer no token is left to choose"):
            ask(random_logits(0))
    only_the_end = sampler(processors=(only({9}),), min_tokens=2, end_ids=(9,))
    with pytest.raises(InvalidInputError, match=r"no token is left to choose.*min_tokens"):
        only_the_end.choice(random_logits(0))
    with pytest.raises(InvalidInputError, match="largest logit: inf"):
        sampler(processors=(lambda prefix, logits: logits + np.inf,)).choice(random_logits(0))


@pytest.mark.parametrize(
    ("settings", "greedy"),
    [
        ({}, True),
        ({"temperature": 0.0, "top_p": 0.9}, True),
        ({"temperature": 1.0}, False),
        ({"temperature": 1.0, "top_k": 1}, True),
        ({"temperature": 1.0, "top_p": 0.0}, True),
        ({"temperature": 1.0, "top_k": -1}, False),
        ({"temperature": 1.0, "min_p": 1.0}, False),
        ({"temperature": 1e-300}, False),
    ],
)
def test_what_counts_as_greedy(settings: dict[str, Any], greedy: bool) -> None:
    assert SamplingParams(**settings).greedy == greedy


@pytest.mark.parametrize(
    ("settings", "looks_back"),
    [
        ({}, False),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 3}, False),
        ({"repetition_penalty": 1.01}, True),
        ({"repetition_penalty": 0.9}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"logit_bias": {1: 0.1}}, True),
        ({"processors": (only({1}),)}, True),
    ],
)
def test_what_looks_back(settings: dict[str, Any], looks_back: bool) -> None:
    assert SamplingParams(**settings).looks_back == looks_back
    made = sampler(**settings)
    assert made.changes_logits == looks_back
    if not looks_back:
        raw = random_logits(0)
        assert made.logits(raw.copy(), [4, 4]).tolist() == raw.tolist()


def test_the_first_of_equal_maxima_is_chosen() -> None:
    logits = np.zeros(V, np.float32)
    logits[[11, 5, 30]] = 2.0
    assert sampler().choice(logits.copy()) == 5
    assert sampler(logit_bias={20: 2.0}).choice(logits.copy()) == 5
    assert sampler(temperature=1.0, top_k=1).probabilities(logits.copy())[5] == 1.0


# --- whose past ------------------------------------------------------------------------------------------------


def test_repetition_penalty_divides_or_multiplies_once_whatever_was_seen() -> None:
    raw = np.full(V, 2.0, np.float32)
    raw[[1, 6]] = -2.0
    made = sampler([1, 2, 2], [6, 7], repetition_penalty=2.0)
    changed = made.logits(raw.copy(), [8, 8])
    wanted = raw.copy()
    wanted[[2, 7, 8]] = 1.0  # prompt, answer, ancestors
    wanted[[1, 6]] = -4.0
    assert changed.tolist() == wanted.tolist()


@pytest.mark.parametrize("sign", [1.5, -1.5])
def test_presence_and_frequency_count_the_answer_alone(sign: float) -> None:
    raw = np.zeros(V, np.float32)
    answer, ancestors = [6, 7, 6], [7, 6, 8]
    presence = sampler([1, 2, 6], answer, presence_penalty=sign).logits(raw.copy(), ancestors)
    frequency = sampler([1, 2, 6], answer, frequency_penalty=sign).logits(raw.copy(), ancestors)
    assert {token: presence[token] for token in np.flatnonzero(presence)} == {6: -sign, 7: -sign, 8: -sign}
    assert {token: frequency[token] for token in np.flatnonzero(frequency)} == {6: -3 * sign, 7: -2 * sign, 8: -sign}


def test_a_node_sees_its_own_ancestors_and_nothing_else() -> None:
    """Asked in any order about different branches, a sampler answers as if each branch were already the answer."""
    seen: list[list[int]] = []

    def record(prefix: Sequence[int], logits: Floats) -> Floats:
        seen.append(list(prefix))
        return logits

    settings: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.7,
        "logit_bias": {4: 1.0},
        "temperature": 0.9,
        "processors": (record,),
    }
    prompt, answer = [1, 2, 3], [4, 5]
    made = sampler(prompt, answer, **settings)
    branches: list[list[int]] = [[], [6], [7], [6, 4], [6, 6], [7, 4, 4], []]
    for seed, branch in enumerate(branches):
        alone = sampler(prompt, [*answer, *branch], **settings)
        raw = random_logits(seed)
        assert made.probabilities(raw.copy(), branch).tolist() == alone.probabilities(raw.copy()).tolist()
    assert seen == [[*prompt, *answer, *branch] for branch in branches for _ in range(2)]


def test_the_documented_order() -> None:
    """bias 1 -> repetition /2 -> presence -0.5 -> end banned -> processor sees all that -> temperature."""
    met: list[Floats] = []

    def record(prefix: Sequence[int], logits: Floats) -> Floats:
        met.append(logits.copy())
        return logits * 2

    raw = np.zeros(V, np.float32)
    raw[5] = 3.0
    made = sampler(
        [1],
        [5],
        logit_bias={5: 1.0},
        repetition_penalty=2.0,
        presence_penalty=0.5,
        processors=(record,),
        temperature=3.0,
        min_tokens=9,
        end_ids=(6,),
    )
    p = made.probabilities(raw.copy())
    assert met[0][5] == (3.0 + 1.0) / 2 - 0.5
    assert met[0][6] == -np.inf
    assert p[5] / p[7] == pytest.approx(np.exp(1.5 * 2 / 3.0), rel=1e-5)


def test_min_tokens_bans_every_end_until_they_are_out() -> None:
    made = sampler([1, 2], [], min_tokens=3, end_ids=(4, 9))
    raw = np.zeros(V, np.float32)
    raw[[4, 9]] = 5.0
    for length in range(3):
        assert made.changes_logits
        assert made.choice(raw.copy(), [7] * length if length else []) == 0
    assert made.choice(raw.copy(), [7, 7, 7]) == 4  # three tokens are out along this branch
    made.commit([7, 7])
    assert made.changes_logits
    assert made.choice(raw.copy()) == 0
    made.commit([7])
    assert not made.changes_logits
    assert made.choice(raw.copy()) == 4


def test_min_tokens_without_an_end_changes_nothing() -> None:
    assert not sampler(min_tokens=5).changes_logits
    assert not sampler(min_tokens=5, end_ids=(V, V + 7, -1)).changes_logits  # ids no logit belongs to


def test_nothing_is_asked_past_the_end_of_the_answer() -> None:
    """A grammar has no word on what follows its end; a draft tree may well go there."""

    def grammar(prefix: Sequence[int], logits: Floats) -> Floats:
        assert 9 not in prefix[3:], "asked past the end"
        return logits

    made = sampler([9, 1, 2], processors=(grammar,), end_ids=(9,))
    raw = random_logits(0)
    assert made.choice(raw.copy(), [4]) == raw.argmax()
    assert made.choice(raw.copy(), [4, 9]) == raw.argmax()
    assert made.probabilities(raw.copy(), [9, 5, 6]).sum() == 1


def test_log_softmax() -> None:
    logits = np.stack([random_logits(0), random_logits(1) * 100])
    values = log_softmax(logits.copy())
    wanted = (
        logits.astype(np.float64)
        - np.log(np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
        - logits.max(axis=1, keepdims=True)
    )
    np.testing.assert_allclose(values, wanted, atol=1e-4)
    assert (values <= 0).all()
    json.dumps(values.tolist(), allow_nan=False)
