"""The loop: prefill, then draft -> verify -> accept -> commit -> yield, until the answer ends.

Invariant: between cycles the target's cache holds every committed token but the last, which is the next root; the
draft session holds the feature of each of them, paired with the token that follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from eyas.drafters.base import Drafter, DrawingSession, begin
from eyas.draws import Draws
from eyas.errors import ContextLengthError, InvalidInputError
from eyas.metrics import Stats, Stopwatch
from eyas.policies import DynamicPolicy, TreePolicy
from eyas.policies.gate import Gate
from eyas.policies.trace import PolicyTrace
from eyas.sampling import Sampler, SamplingParams, log_softmax
from eyas.stopping import Answer, FinishReason, StopParams
from eyas.targets.base import Features, SamplesItself, Target, TargetInfo, TargetOutput
from eyas.text import TextTokenizer
from eyas.tree import DraftTree, Floats
from eyas.verify import Acceptance, verify_greedy, verify_sampling


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a committed token and of the likeliest tokens at its place (raw log-softmax, float32)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Cycle:
    """What happened between two commits.

    Attributes:
        tree: the verified tree.
        acceptance: which of its nodes survived, before any cut by a stop.
        trace: every candidate of the cycle and what the policy made of it.
    """

    tree: DraftTree
    acceptance: Acceptance
    trace: PolicyTrace


@dataclass(frozen=True)
class Step:
    """What one target pass brought: the prefill's first token, or a cycle's block.

    Attributes:
        tokens: committed tokens, none past the end of the answer.
        text: text that became final with them.
        finish_reason: set on the last step.
        seconds: wall-clock seconds by phase.
        cycle: how the block came about; None for the prefill.
        logprobs: one entry per token where asked for.
        stats: running sums of the request, the same object in every step.
    """

    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    seconds: dict[str, float]
    cycle: Cycle | None
    logprobs: tuple[TokenLogprob, ...]
    stats: Stats


def generate(
    session: Session,
    prompt: Sequence[int],
    *,
    policy: TreePolicy | None = None,
    gate: Gate | None = None,
    draw: bool = True,
    params: SamplingParams | None = None,
    stop: StopParams | None = None,
    tokenizer: TextTokenizer | None = None,
    logprobs: int | None = None,
    rng: np.random.Generator | None = None,
) -> Iterator[Step]:
    """Answer ``prompt``; yields a step per target pass, the prefill first.

    Args:
        session: where the conversation stands; abandoning the iterator between steps leaves it usable.
        prompt: T >= 1 token ids, the whole conversation so far.
        policy: how the draft tree grows; EAGLE-2 with its defaults where None.
        gate: switches drafting off for a while where it does not pay; where None, every cycle drafts.
        draw: for sampled answers let drafters that can draw their children, instead of proposing the likeliest.
        params: how tokens are chosen; greedy where None.
        stop: when the answer ends; at EOS or the context limit where None.
        tokenizer: for text and stop strings.
        logprobs: how many of the likeliest tokens to report at each place; None reports nothing.
        rng: the source of randomness; made from ``params.seed`` where None.

    Raises:
        InvalidInputError: an empty prompt, ids outside the vocabulary, or parameters that cannot work.
        ContextLengthError: a prompt that leaves no room for a token.
    """
    request = Request(
        session.target.info, prompt, params or SamplingParams(), stop or StopParams(), tokenizer, logprobs, rng
    )
    draws = request.draws if draw else None
    return _run(session, prompt, policy or DynamicPolicy(), gate, draws, request)


def _run(
    session: Session,
    prompt: Sequence[int],
    policy: TreePolicy,
    gate: Gate | None,
    draws: Draws | None,
    request: Request,
) -> Iterator[Step]:
    watch = Stopwatch()
    purse = gate.new_purse() if gate is not None else None
    output = session.prefill(prompt)
    acceptance = request.verify(DraftTree.root_only(prompt[-1]), output)
    tokens = request.push([acceptance.next_token])
    session.commit(tokens, output.features[-1:])
    yield request.step(tokens, output, {"prefill": watch.lap()})

    while request.remaining:
        watch.lap()  # the caller's time between steps is not ours
        trace = PolicyTrace(policy)
        drafts = purse is None or purse.drafts
        tree = session.propose(trace, max_depth=request.remaining - 1 if drafts else 0, draws=draws)
        drafting = watch.lap()
        (output,) = session.target.verify([(session.cache, tree)], logits=request.needs_logits)
        verifying = watch.lap()
        acceptance = request.verify(tree, output)
        tokens = request.push([*tree.tokens[list(acceptance.path[1:])].tolist(), acceptance.next_token])
        path = acceptance.path[: len(tokens)]  # the rows whose successors belong to the answer
        accepting = watch.lap()
        session.commit(tokens, output.features[list(path)], path)
        if purse is not None:
            purse.book(len(tokens), trace.widths, tree.num_draft_tokens)
        seconds = {
            "draft": drafting - trace.seconds,
            "policy": trace.seconds,
            "verify": verifying,
            "accept": accepting,
            "commit": watch.lap(),
        }
        yield request.step(tokens, output, seconds, Cycle(tree, acceptance, trace))


@dataclass
class Session:
    """A conversation: what the target and the drafter have taken in so far. One request at a time.

    A prompt that begins like the conversation is prefilled only from where they part.

    Attributes:
        target: the model.
        drafter: None decodes plainly.
        tokens: the committed tokens, the next root included.

    Raises:
        InvalidInputError: a drafter that reads other features than the target was loaded to give.
    """

    target: Target
    drafter: Drafter | None = None
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        info = self.target.info
        if self.drafter is not None and self.drafter.feature_levels not in (0, info.feature_levels):
            raise InvalidInputError(
                f"draft head {self.drafter.name} reads {self.drafter.feature_levels} feature level(s), but target "
                f"{info.name} was loaded to give {info.feature_levels}"
            )
        self.cache = self.target.new_cache()
        self.draft = self.drafter.new_session() if self.drafter is not None else None

    def prefill(self, prompt: Sequence[int]) -> TargetOutput:
        """Make target and drafter hold the prompt; the last feature still waits for the token that follows it."""
        common = 0
        for ours, theirs in zip(self.tokens, prompt, strict=False):
            if ours != theirs:
                break
            common += 1
        # The last common token is run again: whatever follows it starts from its logits and its feature. A cycle that
        # was interrupted half way may have left cache and draft session at different lengths.
        keep = min(max(0, common - 1), self.cache.length)
        if self.draft is not None:
            keep = min(keep, self.draft.length)
        self.cache.truncate(keep)
        if self.draft is not None:
            self.draft.truncate(keep)
            if keep == 0:
                begin(self.draft, prompt[0])
        self.tokens = list(prompt[:keep])
        fresh = list(prompt[keep:])
        output = self.target.prefill(self.cache, fresh)
        self.tokens += fresh
        if self.draft is not None and len(fresh) > 1:
            self.draft.commit(fresh[1:], output.features[:-1])
        return output

    def propose(self, policy: TreePolicy, max_depth: int, draws: Draws | None = None) -> DraftTree:
        """A tree below the last committed token; drawn where ``draws`` says how and the drafter can."""
        if self.draft is None or max_depth < 1:
            return DraftTree.root_only(self.tokens[-1])
        if draws is not None and isinstance(self.draft, DrawingSession):
            return self.draft.propose_drawn(self.tokens[-1], policy, max_depth, draws)
        return self.draft.propose(self.tokens[-1], policy, max_depth)

    def commit(self, tokens: Sequence[int], features: Features, path: Sequence[int] = ()) -> None:
        """Take in new tokens, each with the feature of the position before it, and keep the cache rows ``path``."""
        if path:
            self.cache.commit(path)
        self.tokens += tokens
        if self.draft is not None:
            self.draft.commit(tokens, features)


class Request:
    """One answer in the making: what may come next, where it ends, what it has cost."""

    def __init__(
        self,
        info: TargetInfo,
        prompt: Sequence[int],
        params: SamplingParams,
        stop: StopParams,
        tokenizer: TextTokenizer | None,
        logprobs: int | None,
        rng: np.random.Generator | None,
    ) -> None:
        _check_prompt(prompt, info)
        if logprobs is not None and not 0 <= logprobs <= info.vocab_size:
            raise InvalidInputError(
                f"logprobs must be between 0 and the vocabulary's {info.vocab_size}, got {logprobs}"
            )
        for token in stop.stop_token_ids:
            if not 0 <= token < info.vocab_size:
                raise InvalidInputError(
                    f"stop_token_ids names token {token}, but ids of {info.name} run from 0 to {info.vocab_size - 1}"
                )
        end_ids = stop.end_ids(info.eos_token_ids)
        self._answer = Answer(stop, info.eos_token_ids, info.max_positions - len(prompt), tokenizer)
        self._sampler = Sampler(params, info.vocab_size, prompt, stop.min_tokens, end_ids)
        self._rng = rng or np.random.default_rng(params.seed)
        self._logprobs = logprobs
        self._emitted = 0  # characters of text handed out
        self.stats = Stats()

    @property
    def draws(self) -> Draws | None:
        """How draft tokens may be drawn; None for greedy answers."""
        return None if self._sampler.params.greedy else Draws(self._sampler.params, self._rng)

    @property
    def remaining(self) -> int:
        """Tokens that may still come."""
        return self._answer.remaining

    @property
    def needs_logits(self) -> bool:
        """Whether the argmax of the next rows is not enough."""
        return not self._sampler.params.greedy or self._sampler.changes_logits or self._logprobs is not None

    def verify(self, tree: DraftTree, output: TargetOutput) -> Acceptance:
        """Ask the target's word on a tree, greedily or by sampling as the request says."""
        sampler = self._sampler

        def ancestors(node: int) -> list[int]:
            return [int(token) for token in tree.tokens[tree.path_to(node)[1:]]]

        if sampler.params.by_temperature and not sampler.changes_logits and isinstance(output, SamplesItself):
            return output.verify_sampled(tree, sampler.params.temperature, self._rng)
        if not sampler.params.greedy:
            return verify_sampling(
                tree, lambda node: sampler.probabilities(output.row(node), ancestors(node)), self._rng
            )
        if sampler.changes_logits:
            return verify_greedy(tree, lambda node: sampler.choice(output.row(node), ancestors(node)))
        return verify_greedy(tree, output.argmax().tolist().__getitem__)

    def push(self, block: Sequence[int]) -> list[int]:
        """Those tokens of a block that belong to the answer."""
        tokens = self._answer.push(block)
        self._sampler.commit(tokens)
        return tokens

    def step(
        self, tokens: Sequence[int], output: TargetOutput, seconds: dict[str, float], cycle: Cycle | None = None
    ) -> Step:
        """Account for a pass and report it."""
        self.stats.add(seconds)
        if cycle is not None:
            self.stats.cycles += 1
            self.stats.cycle_tokens += len(tokens)
            self.stats.draft_tokens += cycle.tree.num_draft_tokens
            self.stats.accepted_tokens += min(len(tokens), len(cycle.acceptance.path) - 1)
        logprobs: tuple[TokenLogprob, ...] = ()
        if self._logprobs is not None:
            rows = cycle.acceptance.path if cycle is not None else (0,)
            logprobs = tuple(
                token_logprob(output.row(row), token, self._logprobs) for row, token in zip(rows, tokens, strict=False)
            )
        text = self._answer.text[self._emitted :]
        self._emitted += len(text)
        return Step(tuple(tokens), text, self._answer.finish_reason, seconds, cycle, logprobs, self.stats)


def token_logprob(logits: Floats, token: int, count: int) -> TokenLogprob:
    """Log-probability of ``token`` and of the ``count`` likeliest tokens under raw logits [V].

    Ties are listed by index. Tokens the model itself rules out (logit -inf) are not listed: JSON has no such number.
    """
    values = log_softmax(logits)
    likeliest: list[tuple[int, float]] = []
    if count > 0:
        threshold = max(np.partition(values, -count)[-count], np.finfo(np.float32).min)
        listed = np.flatnonzero(values >= threshold)
        best = listed[np.argsort(-values[listed], kind="stable")[:count]]
        likeliest = list(zip(best.tolist(), values[best].tolist(), strict=True))
    return TokenLogprob(token, float(values[token]), tuple(likeliest))


def _check_prompt(prompt: Sequence[int], info: TargetInfo) -> None:
    if len(prompt) == 0:
        raise InvalidInputError("the prompt is empty; it needs at least one token")
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= info.vocab_size:
        raise InvalidInputError(
            f"the prompt holds token id {low if low < 0 else high}, but ids of {info.name} run from 0 to "
            f"{info.vocab_size - 1}; was it made by another tokenizer?"
        )
    if len(prompt) >= info.max_positions:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens, but {info.name} holds {info.max_positions} in all; shorten it to "
            f"at most {info.max_positions - 1}"
        )
