"""Timing passes and whole answers. Whatever is compared takes turns, so that a slow spell of the machine hits all of
it; medians count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from time import perf_counter

import numpy as np

from eyas.costs import CostTable, TimedCycle
from eyas.drafters.base import Drafter, begin
from eyas.errors import InvalidInputError
from eyas.generate import Session, Step, generate
from eyas.policies.base import Candidates, TreePolicy
from eyas.sampling import SamplingParams
from eyas.stopping import StopParams
from eyas.targets.base import Target
from eyas.tree import DraftTree, Ints
from eyas.way import Way

Clock = Callable[[], float]
"""Seconds, from any start."""

FRESH = 3
"""Committed tokens that the drafter's first pass of a cycle takes in when it is timed: a usual acceptance length."""

DEEPER = 2
"""Further levels over which the price of one is averaged."""

SAMPLES = 2
"""Target passes of each size per round: the price of a few rows more is a small difference of large numbers."""

WARM_UP_TOKENS = 8

QUICK_ROWS = (1, 2, 4, 8, 12, 16, 24, 32)
QUICK_NODES = (1, 4, 8)
QUICK_CONTEXT = 128
QUICK_ROUNDS = 3
QUICK_SECONDS = 1.0
"""What a first start times: sizes, tokens looked back on, rounds, and when to be content with fewer."""


class CostProbe:
    """Times target passes and drafts of every size, a sample of each per round, after ``context``.

    Rounds can be strewn over whatever else is measured: a machine's speed wanders, and only prices of the same while
    can be compared. Medians over the rounds count.

    Args:
        target, drafter: whose passes are timed.
        context: more than ``FRESH + 1`` token ids.
        rows: rows of a target pass, over random trees.
        nodes: expanded nodes of a drafter level; those above ``topk`` are left out.
        topk, num_steps: width and depth of the drafts.
        clock: tells the time.
        logits: whether target passes write their logits down, as they do for sampled answers.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        context: Sequence[int],
        rows: Sequence[int],
        nodes: Sequence[int],
        *,
        topk: int,
        num_steps: int,
        clock: Clock,
        logits: bool,
    ) -> None:
        self._target, self._clock, self._logits = target, clock, logits
        self._rng = np.random.default_rng(0)
        self._cache = target.new_cache()
        self._context = list(context)
        self._features = target.prefill(self._cache, context).features
        self._session = drafter.new_session()
        begin(self._session, context[0])
        self._known = len(context) - 1 - FRESH  # pairs; the last FRESH are taken in anew by every sample
        self._session.commit(context[1 : self._known + 1], self._features[: self._known])
        self._levels = 1 + min(DEEPER, max(0, num_steps - 1))
        # Width 0 stands for the first level alone.
        widths = [0, *(size for size in nodes if size <= topk and self._levels > 1)]
        self._policies = {size: Levels(size, self._levels if size else 1, topk) for size in widths}
        self._verify: dict[int, list[float]] = {size: [] for size in rows}
        self._draft: dict[int, list[float]] = {size: [] for size in widths}

    def round(self) -> None:
        """Take samples of every size."""
        for _ in range(SAMPLES):
            for size, times in self._verify.items():
                times.append(self._pass(size))
        for size, times in self._draft.items():
            self._pass(1)  # as in a cycle: the target's weights have driven the drafter's out of the caches
            times.append(self._propose(size))

    def forget(self) -> None:
        """Drop the samples taken so far: the machine was cold, or time has gone by."""
        for times in (*self._verify.values(), *self._draft.values()):
            times.clear()

    def costs(self) -> CostTable:
        """Medians of the rounds since the start or ``forget``, one at least."""
        verify = {size: median(times) for size, times in self._verify.items()}
        draft = {size: median(times) for size, times in self._draft.items()}
        first = draft.pop(0)
        levels = {size: max(0.0, (spent - first) / (self._levels - 1)) for size, spent in draft.items()}
        return CostTable.fit(verify, levels or {1: first}, first_ms=first)

    def _pass(self, size: int) -> float:
        """Milliseconds of a target pass over ``size`` rows."""
        length = self._cache.length
        tree = random_tree(size, self._target.info.vocab_size, self._rng)
        start = self._clock()
        (output,) = self._target.verify([(self._cache, tree)], logits=self._logits)
        output.argmax()  # asking for the result waits for it
        spent = self._clock() - start
        self._cache.truncate(length)
        return 1000 * spent

    def _propose(self, size: int) -> float:
        """Milliseconds of a draft that expands ``size`` nodes per level."""
        context, known, policy = self._context, self._known, self._policies[size]
        self._session.truncate(known)
        start = self._clock()
        self._session.commit(context[known + 1 :], self._features[known:-1])
        self._session.propose(context[-1], policy, policy.num_steps)
        return 1000 * (self._clock() - start)


def measure_costs(
    target: Target, drafter: Drafter, *, topk: int, logits: bool, clock: Clock = perf_counter
) -> CostTable:
    """Costs in about a second, after arbitrary text: enough to tell what pays.

    Args:
        target, drafter: whose passes are timed.
        topk: width of the drafts.
        logits: whether target passes write their logits down, as they do for sampled answers.
        clock: for tests.
    """
    info = target.info
    length = max(FRESH + 2, min(QUICK_CONTEXT, info.max_positions - max(QUICK_ROWS) - 1))
    context = np.random.default_rng(0).integers(info.vocab_size, size=length).tolist()
    probe = CostProbe(
        target, drafter, context, QUICK_ROWS, QUICK_NODES, topk=topk, num_steps=1 + DEEPER, clock=clock, logits=logits
    )
    start = clock()
    for number in range(1 + QUICK_ROUNDS):
        probe.round()
        if clock() - start > QUICK_SECONDS:
            break
        if number == 0:
            probe.forget()  # it only warmed up
    return probe.costs()


@dataclass(frozen=True)
class Levels:
    """A policy for timing: ``nodes`` expanded at each of ``num_steps`` levels, whatever they are worth."""

    nodes: int
    num_steps: int
    topk: int
    num_draft_tokens: int = 1

    def expand(self, candidates: Candidates) -> Ints:
        if candidates.depth == 0:
            return np.zeros(1, np.int64)
        newest = candidates.newest
        return np.arange(newest.start, min(newest.start + self.nodes, newest.stop))

    def select(self, candidates: Candidates) -> Ints:
        return np.arange(1, min(2, len(candidates)))


def random_tree(rows: int, vocab_size: int, rng: np.random.Generator) -> DraftTree:
    """A tree of ``rows`` nodes with random tokens, each node below any earlier one."""
    parents = np.array([-1, *(int(rng.integers(node)) for node in range(1, rows))], np.int64)
    tokens = rng.integers(vocab_size, size=rows, dtype=np.int64)
    return DraftTree(tokens, parents, np.zeros(rows, np.float32))


@dataclass(frozen=True)
class Contender:
    """A way to answer, with who drafts (nobody: plain decoding) and how trees grow."""

    way: Way
    drafter: Drafter | None = None
    policy: TreePolicy | None = None


@dataclass(frozen=True)
class Finish:
    """What a contender did.

    Attributes:
        answers: the cycles of its answer to each prompt, timed.
    """

    answers: tuple[tuple[TimedCycle, ...], ...]

    @property
    def cycles(self) -> list[TimedCycle]:
        return [cycle for answer in self.answers for cycle in answer]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        cycles = self.cycles
        return 1000 * sum(cycle.tokens for cycle in cycles) / sum(cycle.ms for cycle in cycles)

    @property
    def acceptance_length(self) -> float:
        return fmean(cycle.tokens for cycle in self.cycles)


def race(
    target: Target,
    contenders: Sequence[Contender],
    prompts: Sequence[Sequence[int]],
    *,
    params: SamplingParams | None,
    max_tokens: int,
    repeats: int,
    clock: Clock,
    between: Callable[[], object] = lambda: None,
    progress: Callable[[float], object] = lambda share: None,
) -> list[Finish]:
    """Let all contenders answer all prompts, ``repeats`` times. They take turns prompt by prompt, in rotating order.

    Every repeat goes through the same cycles; the median of each counts.

    Args:
        target, contenders, prompts, params, max_tokens, repeats: who answers what, and how often.
        clock: tells the time.
        between: called before all take their turn at a prompt.
        progress: told which share is done.

    Raises:
        InvalidInputError: every answer ends at its first token.
    """

    def steps(contender: Contender, number: int, limit: int) -> Iterator[Step]:
        return generate(
            Session(target, contender.drafter),
            prompts[number],
            policy=contender.policy,
            draw=bool(contender.way.draw),
            params=params,
            stop=StopParams(max_tokens=limit),
            rng=np.random.default_rng([0, number]),  # every repeat draws the same
        )

    for contender in contenders:
        for _ in steps(contender, 0, WARM_UP_TOKENS):
            pass
    count = len(contenders)
    answers = [[list[list[TimedCycle]]() for _ in prompts] for _ in contenders]
    for repeat in range(repeats):
        for number in range(len(prompts)):
            between()
            for turn in range(count):
                which = (turn + number + repeat) % count
                answers[which][number].append(_timed(steps(contenders[which], number, max_tokens), clock))
            progress((repeat * len(prompts) + number + 1) / (repeats * len(prompts)))
    if not any(answers[0][number][0] for number in range(len(prompts))):
        raise InvalidInputError("the prompts' answers end at their first token: there is nothing to tune by")
    return [Finish(tuple(map(_typical, given))) for given in answers]


def _timed(answer: Iterator[Step], clock: Clock) -> list[TimedCycle]:
    next(answer)  # the prefill
    cycles = []
    start = clock()
    for step in answer:
        spent = 1000 * (clock() - start)
        assert step.cycle is not None
        cycles.append(TimedCycle(step.cycle.trace.widths, step.cycle.tree.num_draft_tokens, len(step.tokens), spent))
        start = clock()
    return cycles


def _typical(repeats: Sequence[Sequence[TimedCycle]]) -> tuple[TimedCycle, ...]:
    """The same cycles measured several times, as one: with the median of the times of each."""
    return tuple(replace(cycles[0], ms=median(each.ms for each in cycles)) for cycles in zip(*repeats, strict=True))
