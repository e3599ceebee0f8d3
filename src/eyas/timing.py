"""Timing passes and whole answers. Whatever is compared takes turns, so that a slow spell of the machine hits all of
it; medians count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from eyas.costs import CostTable
from eyas.drafters.base import Drafter, begin
from eyas.errors import InvalidInputError
from eyas.generate import Session, Step, generate
from eyas.policies.base import Candidates, TreePolicy
from eyas.sampling import SamplingParams
from eyas.stopping import StopParams
from eyas.targets.base import Target
from eyas.tree import DraftTree, Ints

Clock = Callable[[], float]
"""Seconds, from any start."""

FRESH = 3
"""Committed tokens that the drafter's first pass of a cycle takes in when it is timed: a usual acceptance length."""

DEEPER = 2
"""Further levels over which the price of one is averaged."""

WARM_UP_TOKENS = 8


def time_verify(
    target: Target, context: Sequence[int], rows: Sequence[int], repeats: int, clock: Clock
) -> dict[int, float]:
    """Milliseconds of a target pass by rows, over random trees after ``context``."""
    rng = np.random.default_rng(0)
    cache = target.new_cache()
    target.prefill(cache, context)
    length = cache.length

    def sample(size: int) -> float:
        tree = random_tree(size, target.info.vocab_size, rng)
        start = clock()
        target.verify([(cache, tree)])[0].argmax()  # asking for the result waits for it
        spent = clock() - start
        cache.truncate(length)
        return spent

    return _medians(rows, sample, repeats)


def time_draft(
    target: Target,
    drafter: Drafter,
    context: Sequence[int],
    nodes: Sequence[int],
    topk: int,
    num_steps: int,
    repeats: int,
    clock: Clock,
) -> tuple[float, dict[int, float]]:
    """(milliseconds of the first level, milliseconds of a further one by expanded nodes), after ``context``."""
    features = target.prefill(target.new_cache(), context).features
    known = len(context) - 1 - FRESH  # pairs; the last FRESH are taken in anew by every sample
    session = drafter.new_session()
    begin(session, context[0])
    session.commit(context[1 : known + 1], features[:known])
    levels = 1 + min(DEEPER, max(0, num_steps - 1))

    def sample(policy: TreePolicy) -> float:
        session.truncate(known)
        start = clock()
        session.commit(context[known + 1 :], features[known:-1])
        session.propose(context[-1], policy, policy.num_steps)
        return clock() - start

    # Width 0 stands for the first level alone.
    sizes = [0, *(size for size in nodes if size <= topk and levels > 1)]
    policies = {size: Levels(size, levels if size else 1, topk) for size in sizes}
    times = _medians(sizes, lambda size: sample(policies[size]), repeats)
    first = times.pop(0)
    if not times:
        return first, {1: first}
    return first, {size: max(0.0, (spent - first) / (levels - 1)) for size, spent in times.items()}


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
    """A way to answer. Without a drafter: plain decoding."""

    name: str
    drafter: Drafter | None = None
    policy: TreePolicy | None = None


@dataclass(frozen=True)
class Finish:
    """What a contender did.

    Attributes:
        shapes: (expanded nodes per level, draft tokens) of every cycle.
        tokens: committed by them.
        ms: milliseconds of all cycles: per prompt the median over the repeats, then the sum.
    """

    shapes: tuple[tuple[tuple[int, ...], int], ...]
    tokens: int
    ms: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return 1000 * self.tokens / self.ms

    @property
    def acceptance_length(self) -> float:
        return self.tokens / len(self.shapes)

    def unexplained_ms(self, costs: CostTable) -> float:
        """Mean milliseconds per cycle beyond what the table says."""
        return self.ms / len(self.shapes) - fmean(costs.cycle(expanded, kept) for expanded, kept in self.shapes)


def race(
    target: Target,
    contenders: Sequence[Contender],
    prompts: Sequence[Sequence[int]],
    *,
    params: SamplingParams | None,
    max_tokens: int,
    repeats: int,
    clock: Clock,
    progress: Callable[[float], object] = lambda share: None,
) -> list[Finish]:
    """Let all contenders answer all prompts, ``repeats`` times. They take turns prompt by prompt, in rotating order.

    Raises:
        InvalidInputError: every answer ends at its first token.
    """

    def steps(contender: Contender, number: int, limit: int) -> Iterator[Step]:
        return generate(
            Session(target, contender.drafter),
            prompts[number],
            policy=contender.policy,
            params=params,
            stop=StopParams(max_tokens=limit),
            rng=np.random.default_rng([0, number]),  # every repeat draws the same
        )

    for contender in contenders:
        for _ in steps(contender, 0, WARM_UP_TOKENS):
            pass
    count = len(contenders)
    times: list[list[list[float]]] = [[[] for _ in prompts] for _ in contenders]
    answers: list[list[list[Step]]] = [[[] for _ in prompts] for _ in contenders]
    for repeat in range(repeats):
        for number in range(len(prompts)):
            for turn in range(count):
                which = (turn + number + repeat) % count
                answer = steps(contenders[which], number, max_tokens)
                next(answer)  # the prefill
                start = clock()
                answers[which][number] = list(answer)
                times[which][number].append(1000 * (clock() - start))
            progress((repeat * len(prompts) + number + 1) / (repeats * len(prompts)))
    finishes = []
    for taken, given in zip(times, answers, strict=True):
        cycles = [(len(step.tokens), step.cycle) for answer in given for step in answer]
        shapes = tuple((cycle.trace.widths, cycle.tree.num_draft_tokens) for _, cycle in cycles if cycle is not None)
        if not shapes:
            raise InvalidInputError("the prompts' answers end at their first token: there is nothing to tune by")
        finishes.append(Finish(shapes, sum(tokens for tokens, _ in cycles), sum(map(median, taken))))
    return finishes


def _medians(sizes: Sequence[int], sample: Callable[[int], float], repeats: int) -> dict[int, float]:
    """Median milliseconds by size; the first round warms up and does not count."""
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for turn in range(repeats + 1):
        for size in sizes:
            spent = sample(size)
            if turn:
                times[size].append(1000 * spent)
    return {size: median(values) for size, values in times.items()}
