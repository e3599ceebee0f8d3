"""Answers end where plain decoding ends them, whatever a block committed: text, ids, log-probabilities, counts."""

from __future__ import annotations

from typing import Any

import pytest

from eyas.errors import ContextLengthError, InvalidInputError
from eyas.generate import Session, generate
from eyas.policies import DynamicPolicy, StaticPolicy, TreePolicy
from eyas.sampling import SamplingParams
from eyas.stopping import Answer, StopParams
from eyas.text import StopStrings
from support.answers import Answered, answer, scripted, syllables
from support.drafters import Script, anti_oracle, dial, mixed, oracle
from support.tiny import TableTarget

VOCAB = 60
TOKENIZER = syllables(VOCAB)
PROMPT = [3, 1, 4, 1, 5]

POLICIES: dict[str, TreePolicy] = {
    "blocks of 6": StaticPolicy.chain(5),
    "blocks of 20": StaticPolicy.chain(19),
    "eagle1": StaticPolicy.eagle1(),
    "dynamic": DynamicPolicy(num_steps=5, topk=3, num_draft_tokens=20),
}
SCRIPTS: dict[str, Script] = {
    "oracle": oracle,
    "mixed": mixed(0, 1, 2),
    "dial": dial(0.7),
    "anti-oracle": anti_oracle,
}
SETUPS = [("oracle", policy) for policy in POLICIES] + [(script, "dynamic") for script in SCRIPTS if script != "oracle"]
setups = pytest.mark.parametrize(("script", "policy"), SETUPS)


def table(**settings: Any) -> TableTarget:
    return TableTarget(VOCAB, seed=5, **{"max_positions": 256} | settings)


def decode(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens)


def plain_tokens(count: int = 40) -> list[int]:
    """What the table says, without any of the code under test."""
    target = table()
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(target.ranking(PROMPT + tokens)[0])
    return tokens


PLAIN = plain_tokens()
FRESH = [i for i, token in enumerate(PLAIN[:22]) if token not in PLAIN[:i]]  # places where a token comes first


def test_the_reference_has_events_at_every_offset() -> None:
    assert len(FRESH) >= 14
    assert {place % 6 for place in FRESH} == set(range(6))
    assert FRESH[-1] >= 20  # the target's own token behind a block of 20, or the first of the next


def both(script: str, policy: str, target: TableTarget, **options: Any) -> Answered:
    """A speculative answer, checked against plain decoding and for agreement with itself."""
    shared = {"tokenizer": TOKENIZER, "logprobs": 2} | options
    plain = answer(target, PROMPT, **shared)
    drafter = scripted(target, SCRIPTS[script], PROMPT)
    session = Session(target, drafter)
    ours = answer(session, PROMPT, policy=POLICIES[policy], **shared)
    assert ours.outcome == plain.outcome
    assert_consistent(ours)
    assert_consistent(plain)
    assert_nothing_past_the_end(session, ours)
    if script == "oracle" and len(ours.tokens) > 7:
        assert max(ours.blocks) >= 6
    return ours


def assert_consistent(ours: Answered) -> None:
    """Every count names the same number of tokens."""
    stats = ours.steps[-1].stats
    assert len(ours.logprobs) == len(ours.tokens)
    assert [entry.token for entry in ours.logprobs] == ours.tokens
    assert 1 + stats.cycle_tokens == len(ours.tokens)
    assert stats.cycles == len(ours.steps) - 1
    assert stats.cycle_tokens == sum(ours.blocks)
    assert stats.cycle_tokens - stats.cycles <= stats.accepted_tokens <= stats.cycle_tokens
    assert stats.accepted_tokens <= stats.draft_tokens
    assert all(step.finish_reason is None for step in ours.steps[:-1])
    assert ours.reason is not None


def assert_nothing_past_the_end(session: Session, ours: Answered) -> None:
    """The caches hold what was committed and nothing else."""
    committed = [*PROMPT, *ours.tokens]
    assert session.tokens == committed
    assert session.cache.tokens == committed[:-1]  # type: ignore[attr-defined]
    if session.draft is not None:
        assert session.draft.tokens == committed[1:]  # type: ignore[attr-defined]


# --- EOS, stop ids, stop strings -------------------------------------------------------------------------------


@setups
@pytest.mark.parametrize("place", FRESH)
def test_eos_at_every_offset(script: str, policy: str, place: int) -> None:
    ours = both(script, policy, table(eos_token_ids=(PLAIN[place],)))
    assert ours.tokens == PLAIN[: place + 1]
    assert ours.text == decode(PLAIN[:place])  # the end itself is no text
    assert ours.reason == "stop"


@setups
def test_stop_ids_and_several_ends(script: str, policy: str) -> None:
    for place in FRESH[:8]:
        ours = both(script, policy, table(), stop_token_ids=(PLAIN[place], PLAIN[place + 3]))
        assert (ours.tokens, ours.text, ours.reason) == (PLAIN[: place + 1], decode(PLAIN[:place]), "stop")
        first = min(place, FRESH[5])
        ours = both(script, policy, table(eos_token_ids=(PLAIN[FRESH[5]], 0)), stop_token_ids=(PLAIN[place],))
        assert ours.tokens == PLAIN[: first + 1]


@setups
@pytest.mark.parametrize("window", [1, 2, 3])
def test_stop_strings_over_windows_of_tokens(script: str, policy: str, window: int) -> None:
    ends = set()
    for place in range(22):
        stop = decode(PLAIN[place : place + window])
        count = next(n for n in range(1, 41) if stop in decode(PLAIN[:n]))
        ends.add(count)
        ours = both(script, policy, table(), stop_strings=(stop,))
        assert ours.tokens == PLAIN[:count]
        assert ours.text == decode(PLAIN).split(stop)[0]
        assert ours.reason == "stop"
    if window > 1:
        assert ends == set(range(window, 22 + window))  # wherever a block of 6 or of 20 may end, and past it


@setups
def test_stop_strings_that_end_inside_a_token(script: str, policy: str) -> None:
    for place in range(12):
        stop = decode(PLAIN[place : place + 3])[1:-1]  # from the middle of a syllable to the middle of another
        count = next(n for n in range(1, 41) if stop in decode(PLAIN[:n]))
        ours = both(script, policy, table(), stop_strings=(stop, "never"))
        assert (ours.tokens, ours.text) == (PLAIN[:count], decode(PLAIN).split(stop)[0])


@setups
def test_text_held_for_a_stop_string_comes_out_when_the_match_fails(script: str, policy: str) -> None:
    begun = [decode(PLAIN[place : place + 2]) + "zz" for place in range(8)]
    ours = both(script, policy, table(), stop_strings=tuple(begun), max_tokens=20)
    assert (ours.tokens, ours.text, ours.reason) == (PLAIN[:20], decode(PLAIN[:20]), "length")


@setups
@pytest.mark.parametrize("place", [0, 1, 5, 6, 7])
def test_eos_beats_a_cap_at_the_same_token(script: str, policy: str, place: int) -> None:
    at = FRESH[place]
    ours = both(script, policy, table(eos_token_ids=(PLAIN[at],)), max_tokens=at + 1)
    assert (len(ours.tokens), ours.reason) == (at + 1, "stop")
    if at:
        ours = both(script, policy, table(eos_token_ids=(PLAIN[at],)), max_tokens=at)
        assert (len(ours.tokens), ours.reason) == (at, "length")


# --- counts ----------------------------------------------------------------------------------------------------


@setups
@pytest.mark.parametrize("cap", range(1, 17))
def test_max_tokens(script: str, policy: str, cap: int) -> None:
    ours = both(script, policy, table(), max_tokens=cap)
    assert (ours.tokens, ours.text, ours.reason) == (PLAIN[:cap], decode(PLAIN[:cap]), "length")
    for step in ours.steps[1:]:
        assert step.cycle is not None
    assert_drafts_fit(ours, cap)


def assert_drafts_fit(ours: Answered, limit: int) -> None:
    """No tree is deeper than what may still come, the target's own token left out."""
    done = len(ours.steps[0].tokens)
    for step in ours.steps[1:]:
        assert step.cycle is not None
        assert max(step.cycle.tree.depths) <= limit - done - 1
        done += len(step.tokens)


@setups
def test_min_tokens_holds_every_end_back(script: str, policy: str) -> None:
    """The end is drafted again and again, and only counts once enough tokens are out."""
    end = PLAIN[FRESH[4]]
    for least in (1, 3, 5, 6, 7, 11):
        ours = both(script, policy, table(eos_token_ids=(end,)), min_tokens=least, max_tokens=30)
        assert end not in ours.tokens[:least]
        if ours.reason == "stop":
            assert ours.tokens[-1] == end
            assert len(ours.tokens) > least
        if least <= FRESH[4]:
            assert ours.tokens == PLAIN[: FRESH[4] + 1]


@setups
def test_stop_strings_do_not_count_before_min_tokens(script: str, policy: str) -> None:
    stop = decode(PLAIN[2:4])
    assert both(script, policy, table(), stop_strings=(stop,), min_tokens=4).tokens == PLAIN[:4]
    ours = both(script, policy, table(), stop_strings=(stop,), min_tokens=5, max_tokens=12)
    assert (ours.tokens, ours.text, ours.reason) == (PLAIN[:12], decode(PLAIN[:12]), "length")


def test_a_stop_string_completed_too_early_is_passed_over_for_good() -> None:
    stops = StopStrings(["ab", "xabyz"])
    assert stops.push("..xab", armed=False) == ".."  # may still become the long one
    assert stops.push("y") == ""
    assert stops.push("q") == "xabyq"
    assert stops.push("ab.") == ""
    assert stops.matched == "ab"


@setups
def test_ignore_eos_goes_on(script: str, policy: str) -> None:
    eos = table(eos_token_ids=(PLAIN[4], PLAIN[9]))
    ours = both(script, policy, eos, ignore_eos=True, max_tokens=15)
    assert (ours.tokens, ours.text, ours.reason) == (PLAIN[:15], decode(PLAIN[:15]), "length")
    ours = both(script, policy, eos, ignore_eos=True, stop_token_ids=(PLAIN[FRESH[6]],))
    assert (ours.tokens, ours.reason) == (PLAIN[: FRESH[6] + 1], "stop")


@setups
def test_the_prompt_ends_nothing(script: str, policy: str) -> None:
    unseen = next(token for token in PROMPT if token not in PLAIN[:10])
    ours = both(script, policy, table(eos_token_ids=(unseen,)), stop_strings=(decode(PROMPT[-1:]),), max_tokens=10)
    assert ours.tokens[: len(ours.tokens)] == PLAIN[: len(ours.tokens)]
    assert len(ours.tokens) > 1


# --- the context limit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [StaticPolicy.eagle1(), DynamicPolicy(6, 5, 25), StaticPolicy.chain(19)])
@pytest.mark.parametrize("script", ["oracle", "mixed", "anti-oracle"])
@pytest.mark.parametrize("length", range(50, 64))
def test_the_context_limit(policy: TreePolicy, script: str, length: int) -> None:
    target = TableTarget(VOCAB, seed=8, max_positions=64, memory=4)
    prompt = [(7 * i) % VOCAB for i in range(length)]
    plain = answer(target, prompt, max_tokens=100)
    assert (len(plain.tokens), plain.reason) == (64 - length, "length")
    session = Session(target, scripted(target, SCRIPTS[script], prompt))
    ours = answer(session, prompt, policy=policy, max_tokens=100)  # the cache asserts that no row lies past the limit
    assert ours.outcome == plain.outcome
    assert_drafts_fit(ours, 64 - length)
    assert len(session.tokens) == 64


@pytest.mark.parametrize("length", [64, 65, 66])
def test_a_prompt_that_does_not_fit_is_refused_and_the_session_lives(length: int) -> None:
    target = TableTarget(VOCAB, seed=8, max_positions=64, memory=4)
    session = Session(target, scripted(target, oracle, [0]))
    prompt = [0, *range(1, 20)]
    before = answer(session, prompt, max_tokens=8)
    with pytest.raises(ContextLengthError, match=f"the prompt has {length} tokens, but table holds 64 in all; shorten"):
        generate(session, [0] * length)
    after = answer(session, prompt, max_tokens=8)
    assert after.outcome == before.outcome


# --- conversations ---------------------------------------------------------------------------------------------


@setups
@pytest.mark.parametrize("offset", range(6))
def test_a_second_turn_equals_a_cold_start(script: str, policy: str, offset: int) -> None:
    place = next(place for place in FRESH if place >= 6 and place % 6 == offset)
    target = table(eos_token_ids=(PLAIN[place],))
    session = Session(target, scripted(target, SCRIPTS[script], PROMPT))
    first = answer(session, PROMPT, policy=POLICIES[policy])
    assert first.tokens == PLAIN[: place + 1]
    second = [*PROMPT, *first.tokens, 7, 8, 9]
    prefilled: list[int] = []
    session.target = Counting(target, prefilled)  # type: ignore[assignment]
    ours = answer(session, second, policy=POLICIES[policy], max_tokens=12, logprobs=2)
    assert prefilled == [4]  # the end of turn one, whose successor was never run, and the three new tokens
    cold = answer(
        target, second, scripted(target, SCRIPTS[script], PROMPT), policy=POLICIES[policy], max_tokens=12, logprobs=2
    )
    assert ours.outcome == cold.outcome
    assert [trees(step) for step in ours.steps[1:]] == [trees(step) for step in cold.steps[1:]]


class Counting:
    """A target that notes how many tokens it prefills."""

    def __init__(self, target: TableTarget, prefilled: list[int]) -> None:
        self._target = target
        self._prefilled = prefilled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def prefill(self, cache: Any, tokens: Any) -> Any:
        self._prefilled.append(len(tokens))
        return self._target.prefill(cache, tokens)


def trees(step: Any) -> Any:
    return step.cycle.tree.tokens.tolist(), step.cycle.tree.parents.tolist(), step.cycle.acceptance


@pytest.mark.parametrize(
    "turn",
    [
        lambda tokens: [*PROMPT, *tokens[:4]],  # back to the middle of the answer
        lambda tokens: PROMPT,  # once more
        lambda tokens: PROMPT[:2],  # a shorter prompt
        lambda tokens: PROMPT[:1],
        lambda tokens: [*PROMPT, *tokens],  # go on without a word
        lambda tokens: [*PROMPT, *tokens[:5], 11, 12],  # an edited answer
        lambda tokens: [PROMPT[0], 9, 9],  # nearly nothing in common
    ],
)
def test_any_next_prompt_equals_a_cold_start(turn: Any) -> None:
    target = table()
    for cap in range(1, 14):
        session = Session(target, scripted(target, mixed(0, 1), PROMPT))
        first = answer(session, PROMPT, max_tokens=cap)
        prompt = turn(first.tokens)
        ours = answer(session, prompt, max_tokens=9, logprobs=1)
        cold = answer(target, prompt, max_tokens=9, logprobs=1)
        assert ours.outcome == cold.outcome
        assert session.tokens == [*prompt, *ours.tokens]


@pytest.mark.parametrize("taken", range(5))
@pytest.mark.parametrize("script", ["oracle", "mixed"])
def test_an_abandoned_answer_leaves_the_session_usable(script: str, taken: int) -> None:
    target = table()
    session = Session(target, scripted(target, SCRIPTS[script], PROMPT))
    for _ in range(3):
        steps = generate(session, PROMPT, policy=POLICIES["dynamic"])
        got = [token for _, step in zip(range(taken), steps, strict=False) for token in step.tokens]
        steps.close()  # type: ignore[attr-defined]
        assert got == PLAIN[: len(got)]
    ours = answer(session, [*PROMPT, *got, 7], max_tokens=10)
    assert ours.outcome == answer(target, [*PROMPT, *got, 7], max_tokens=10).outcome
    assert answer(session, PROMPT, max_tokens=10).tokens == PLAIN[:10]


@pytest.mark.parametrize("where", ["target.verify", "target.prefill", "cache.commit", "draft.propose", "draft.commit"])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_an_interrupted_cycle_leaves_the_session_usable(monkeypatch: pytest.MonkeyPatch, where: str, call: int) -> None:
    """Ctrl-C may fall anywhere."""
    target = table()
    session = Session(target, scripted(target, SCRIPTS["mixed"], PROMPT))
    owner, name = where.split(".")
    calls: list[None] = []
    original = getattr(getattr(session, owner), name)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == call:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(getattr(session, owner), name, interrupted)
        steps = generate(session, PROMPT, policy=POLICIES["dynamic"])
        if where == "target.prefill" and call > 1:
            assert next(steps).tokens == (PLAIN[0],)
        else:
            with pytest.raises(KeyboardInterrupt):
                list(steps)
    for prompt in (PROMPT, [*PROMPT, *PLAIN[:9], 2]):
        ours = answer(session, prompt, policy=POLICIES["dynamic"], max_tokens=12)
        assert ours.outcome == answer(target, prompt, max_tokens=12).outcome
        assert max(ours.blocks) > 1


# --- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": -1}, "max_tokens must be at least 1, got -1"),
        ({"min_tokens": -1}, "min_tokens must be at least 0, got -1"),
        ({"min_tokens": 5, "max_tokens": 4}, r"min_tokens \(5\) exceeds max_tokens \(4\)"),
        ({"stop_strings": "stop"}, "stop_strings is a tuple of strings, got one string"),
        ({"stop_strings": ("a", "")}, "a stop string is empty"),
    ],
)
def test_stops_that_cannot_work(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        StopParams(**settings)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "the prompt is empty; it needs at least one token"),
        ([1, VOCAB], {}, f"the prompt holds token id {VOCAB}, but ids of table run from 0 to {VOCAB - 1}"),
        ([1, -3], {}, "the prompt holds token id -3"),
        (PROMPT, {"logprobs": -1}, f"logprobs must be between 0 and the vocabulary's {VOCAB}, got -1"),
        (PROMPT, {"logprobs": VOCAB + 1}, "logprobs must be between 0"),
        (PROMPT, {"stop": StopParams(stop_strings=("x",))}, "stop strings need a tokenizer"),
        (PROMPT, {"stop": StopParams(stop_token_ids=(VOCAB,))}, f"stop_token_ids names token {VOCAB}, but ids of"),
        (PROMPT, {"stop": StopParams(stop_token_ids=(-1,))}, "stop_token_ids names token -1"),
        (PROMPT, {"params": SamplingParams(logit_bias={VOCAB: 1.0})}, f"logit_bias names token {VOCAB}"),
    ],
)
def test_requests_that_cannot_work_are_refused_before_anything_happens(
    prompt: list[int], options: dict[str, Any], message: str
) -> None:
    session = Session(table())
    with pytest.raises(InvalidInputError, match=message):
        generate(session, prompt, **options)  # at the call, not at the first step
    assert session.tokens == []
    assert session.cache.length == 0


def test_an_eos_no_logit_belongs_to_never_comes() -> None:
    """Some models name end tokens beyond their vocabulary."""
    target = table(eos_token_ids=(VOCAB + 3,))
    assert both("oracle", "dynamic", target, max_tokens=9, min_tokens=4).tokens == PLAIN[:9]


# --- the book-keeping alone ------------------------------------------------------------------------------------


def test_an_answer_takes_what_belongs_to_it() -> None:
    book = Answer(StopParams(max_tokens=6), eos_token_ids=(9,), room=50)
    assert book.remaining == 6
    assert book.push([1, 2]) == [1, 2]
    assert (book.remaining, book.finish_reason) == (4, None)
    assert book.push([3, 9, 4]) == [3, 9]
    assert (book.token_ids, book.remaining, book.finish_reason) == ([1, 2, 3, 9], 0, "stop")
    assert book.push([5]) == []
    assert book.text == ""


def test_room_and_max_tokens_whichever_is_smaller() -> None:
    for cap, room, taken in ((None, 3, 3), (5, 3, 3), (2, 3, 2)):
        book = Answer(StopParams(max_tokens=cap), eos_token_ids=(), room=room)
        assert book.push([1] * 9) == [1] * taken
        assert book.finish_reason == "length"


def test_end_ids_are_listed_once() -> None:
    assert StopParams(stop_token_ids=(4, 2)).end_ids((2, 3)) == (2, 3, 4)
    assert StopParams(stop_token_ids=(4, 2), ignore_eos=True).end_ids((2, 3)) == (4, 2)
