"""Measuring a machine, a model and a drafter, and working out how much drafting pays there.

Everything goes through the protocols: any target engine and any drafter can be tuned. Costs are timed in isolation,
acceptance is recorded once, and every policy's speed is predicted from both; a few are then run for real.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from time import perf_counter

import numpy as np

from eyas.costs import CostTable
from eyas.drafters.base import Drafter
from eyas.errors import InvalidInputError
from eyas.generate import Session, Step, generate
from eyas.policies.base import Candidates, TreePolicy
from eyas.policies.budgeted import BudgetedPolicy
from eyas.policies.dynamic import DynamicPolicy
from eyas.policies.sequoia import sequoia_for
from eyas.profile import Check, Profile, ProfileKey, machine_name
from eyas.replay import Recording, grid, record, replay
from eyas.sampling import SamplingParams
from eyas.stopping import StopParams
from eyas.targets.base import Target
from eyas.tree import DraftTree, Ints

Clock = Callable[[], float]
"""Seconds, from any start."""

TuneProgress = Callable[[str, float], object]
"""Told what is going on and which share of the whole is done, 0 to 1."""

SETTLING = 6
"""Rounds in which the budgeted policy's rate finds itself; it moves by less than a percent after three."""


@dataclass(frozen=True)
class Effort:
    """How thoroughly to measure; everything is proportional to these.

    Attributes:
        rows: rows of a target pass to time, the root included, increasing from 1.
        nodes: expanded nodes of a drafter level to time; those above ``topk`` are left out.
        repeats: times each size is timed; the median counts.
        num_steps: levels recorded: the deepest tree that can be chosen.
        topk: width recorded: the widest.
        max_tokens: length of each recorded answer.
        context: tokens of context for the timings, as far as the prompts have them.
        checks: prompts answered for real by each checked policy.
    """

    rows: tuple[int, ...] = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
    nodes: tuple[int, ...] = (1, 2, 4, 8)
    repeats: int = 7
    num_steps: int = 6
    topk: int = 8
    max_tokens: int = 64
    context: int = 256
    checks: int = 4

    def __post_init__(self) -> None:
        if list(self.rows) != sorted(set(self.rows)) or self.rows[:1] != (1,) or len(self.rows) < 2:
            raise InvalidInputError(f"rows to time start at 1 and increase, two at least, got {list(self.rows)}")
        if list(self.nodes) != sorted(set(self.nodes)) or self.nodes[:1] != (1,):
            raise InvalidInputError(f"nodes to time start at 1 and increase, got {list(self.nodes)}")
        for name in ("repeats", "num_steps", "topk", "context", "checks"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_tokens < 2:
            raise InvalidInputError(f"answers to tune by need at least 2 tokens, got {self.max_tokens}")


def make_key(
    target: Target, drafter: Drafter, fingerprint: str, *, threads: int | None = None, sampled: bool = False
) -> ProfileKey:
    """The key of a tuning.

    Args:
        target, drafter: as loaded.
        fingerprint: of the target's weights.
        threads: CPU threads; None for all cores.
        sampled: whether answers are sampled.
    """
    info = target.info
    return ProfileKey(
        machine=machine_name(),
        model=fingerprint,
        engine=info.engine,
        dtype=info.dtype,
        threads=threads or os.cpu_count() or 1,
        drafter=drafter.name,
        sampled=sampled,
    )


def tune(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    key: ProfileKey,
    *,
    params: SamplingParams | None = None,
    effort: Effort | None = None,
    progress: TuneProgress | None = None,
    clock: Clock = perf_counter,
) -> Profile:
    """Measure, predict, choose, check.

    Args:
        target, drafter: what is tuned.
        prompts: token ids, like those it will be used for; a dozen or more.
        key: what the profile will be valid for, see ``make_key``.
        params: how answers are chosen; greedy where None.
        effort: how thoroughly.
        progress: told about the steps.
        clock: for tests.

    Raises:
        InvalidInputError: no prompts, or prompts too short to time anything.
    """
    effort = effort or Effort()
    if not prompts:
        raise InvalidInputError("tuning needs prompts to answer, got none")
    if not any(len(prompt) > FRESH + 1 for prompt in prompts):
        raise InvalidInputError(f"tuning needs a prompt of more than {FRESH + 1} tokens")
    tell = progress or (lambda text, share: None)
    context = [*max(prompts, key=len)]
    while len(context) < effort.context:
        context += context
    room = target.info.max_positions - max(effort.rows) - 1
    context = context[: max(FRESH + 2, min(effort.context, room))]

    tell("timing the target", 0.0)
    verify = time_verify(target, context, effort, clock)
    tell("timing the drafter", 0.15)
    first_ms, levels = time_draft(target, drafter, context, effort, clock)
    costs = CostTable.fit(verify, levels, first_ms=first_ms)

    recording = record(
        target,
        drafter,
        prompts,
        num_steps=effort.num_steps,
        topk=effort.topk,
        max_tokens=effort.max_tokens,
        params=params,
        progress=lambda done: tell("recording drafts", 0.25 + 0.4 * done / len(prompts)),
    )
    if not any(recording.answers):
        raise InvalidInputError("every answer ended at its first token: there is nothing to tune by")

    tell("measuring the rest of a cycle", 0.65)
    few = prompts[: effort.checks]
    reference = DynamicPolicy(effort.num_steps, min(4, effort.topk), min(8, max(effort.rows) - 1))
    run = Run.of(target, drafter, few, reference, params, effort.max_tokens, clock)
    costs = replace(costs, overhead_ms=max(0.0, run.ms_per_cycle - fmean(run.predicted(costs))))

    tell("predicting", 0.7)
    profile = choose(recording, costs, key, max(effort.rows) - 1)

    policies: dict[str, TreePolicy | None] = {"none": None, "budgeted": profile.budgeted()}
    policies |= {"dynamic": profile.dynamic()} if profile.best else {}
    policies |= {"sequoia": profile.sequoia()} if profile.template else {}
    part = replace(recording, answers=recording.answers[: len(few)])
    checks = []
    for done, (name, policy) in enumerate(policies.items()):
        tell(f"checking {name}", 0.8 + 0.2 * done / len(policies))
        run = Run.of(target, drafter if policy else None, few, policy, params, effort.max_tokens, clock)
        rate = replay(part, policy, profile.costs).rate if policy else 1 / profile.costs.plain_ms
        measured = run.acceptance_length / run.ms_per_cycle
        checks.append(Check(name, 1000 * rate, 1000 * measured, run.acceptance_length))
    tell("done", 1.0)
    return replace(profile, checks=tuple(checks))


def choose(recording: Recording, costs: CostTable, key: ProfileKey, num_draft_tokens: int) -> Profile:
    """Everything that follows from costs and recorded drafts, without measuring anything more."""
    acceptance, calibration = recording.acceptance(), recording.calibration()
    points = grid(
        recording,
        costs,
        num_steps=range(1, recording.num_steps + 1),
        topk=[k for k in (1, 2, 3, 4, 6, 8, 10, 16) if k <= recording.topk],
        num_draft_tokens=[m for m in (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 60) if m <= num_draft_tokens],
    )
    best = max(points, key=lambda point: point.rate)
    plain = 1 / costs.plain_ms
    tree = sequoia_for(
        acceptance,
        costs,
        num_draft_tokens=num_draft_tokens,
        num_steps=recording.num_steps,
        topk=recording.topk,
    )
    policy = BudgetedPolicy(
        costs,
        acceptance,
        recording.num_steps,
        recording.topk,
        num_draft_tokens,
        calibration,
        rate=max(plain, best.rate),
    )
    return Profile(
        key=key,
        costs=costs,
        acceptance=acceptance,
        calibration=calibration,
        rate=settle(recording, policy),
        best=best if best.rate > plain else None,
        template=tree.policy.template if tree.policy else (),
        num_draft_tokens=num_draft_tokens,
        grid=tuple(points),
        reliability=tuple(tuple(level) for level in recording.reliability()),
    )


def settle(recording: Recording, policy: BudgetedPolicy, rounds: int = SETTLING) -> float:
    """The rate that the budgeted policy reaches when told that very rate (Dinkelbach's iteration).

    With true probabilities every round raises it; with estimated ones it may not, so the best seen counts. Never
    below plain decoding: at that rate the policy at worst drafts nothing.
    """
    best = plain = 1 / policy.costs.plain_ms
    chosen = rate = policy.rate or plain
    for _ in range(rounds):
        reached = replay(recording, replace(policy, rate=rate), policy.costs).rate
        if reached > best:
            best, chosen = reached, rate
        if reached <= 0 or abs(reached - rate) < 1e-3 * rate:
            break
        rate = max(reached, plain)
    return chosen


FRESH = 3
"""Committed tokens that the drafter's first pass of a cycle takes in when it is timed: a usual acceptance length."""

DEEPER = 2
"""Further levels over which the price of one is averaged."""


def time_verify(target: Target, context: Sequence[int], effort: Effort, clock: Clock) -> dict[int, float]:
    """Milliseconds of a target pass by rows, over random trees after ``context``."""
    rng = np.random.default_rng(0)
    cache = target.new_cache()
    target.prefill(cache, context)
    length = cache.length

    def sample(rows: int) -> float:
        tree = random_tree(rows, target.info.vocab_size, rng)
        start = clock()
        target.verify([(cache, tree)])[0].argmax()  # asking for the result waits for it
        spent = clock() - start
        cache.truncate(length)
        return spent

    return _medians(effort.rows, sample, effort.repeats)


def time_draft(
    target: Target, drafter: Drafter, context: Sequence[int], effort: Effort, clock: Clock
) -> tuple[float, dict[int, float]]:
    """(milliseconds of the first level, milliseconds of a further one by expanded nodes), after ``context``."""
    features = target.prefill(target.new_cache(), context).features
    known = len(context) - 1 - FRESH  # pairs; the last FRESH are taken in anew by every sample
    session = drafter.new_session()
    session.commit(context[1 : known + 1], features[:known])
    levels = 1 + min(DEEPER, max(0, effort.num_steps - 1))

    def sample(policy: TreePolicy) -> float:
        session.truncate(known)
        start = clock()
        session.commit(context[known + 1 :], features[known:-1])
        session.propose(context[-1], policy, policy.num_steps)
        return clock() - start

    # Width 0 stands for the first level alone.
    sizes = [0, *(nodes for nodes in effort.nodes if nodes <= effort.topk and levels > 1)]
    policies = {nodes: Levels(nodes, levels if nodes else 1, effort.topk) for nodes in sizes}
    times = _medians(sizes, lambda nodes: sample(policies[nodes]), effort.repeats)
    first = times.pop(0)
    if not times:
        return first, {1: first}
    return first, {nodes: max(0.0, (spent - first) / (levels - 1)) for nodes, spent in times.items()}


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
class Run:
    """Real answers: what each cycle did, and how long all of them took.

    Attributes:
        shapes: (expanded nodes per level, draft tokens) of every cycle.
        tokens: committed by them.
        ms_per_cycle: mean milliseconds.
    """

    shapes: tuple[tuple[tuple[int, ...], int], ...]
    tokens: int
    ms_per_cycle: float

    @classmethod
    def of(
        cls,
        target: Target,
        drafter: Drafter | None,
        prompts: Sequence[Sequence[int]],
        policy: TreePolicy | None,
        params: SamplingParams | None,
        max_tokens: int,
        clock: Clock,
    ) -> Run:
        shapes: list[tuple[tuple[int, ...], int]] = []
        tokens, spent = 0, 0.0

        def steps(prompt: Sequence[int], limit: int) -> Iterator[Step]:
            stop = StopParams(max_tokens=limit)
            return generate(Session(target, drafter), prompt, policy=policy, params=params, stop=stop)

        for _ in steps(prompts[0], 8):
            pass  # warm up
        for prompt in prompts:
            answer = steps(prompt, max_tokens)
            next(answer)  # the prefill
            start = clock()
            cycles = list(answer)
            spent += clock() - start
            for step in cycles:
                assert step.cycle is not None
                tokens += len(step.tokens)
                shapes.append((step.cycle.trace.widths, step.cycle.tree.num_draft_tokens))
        if not shapes:
            raise InvalidInputError("the prompts' answers end at their first token: there is nothing to tune by")
        return cls(tuple(shapes), tokens, 1000 * spent / len(shapes))

    @property
    def acceptance_length(self) -> float:
        return self.tokens / len(self.shapes)

    def predicted(self, costs: CostTable) -> list[float]:
        """Milliseconds of each cycle by the table."""
        return [costs.cycle(expanded, kept) for expanded, kept in self.shapes]


def _medians(sizes: Sequence[int], sample: Callable[[int], float], repeats: int) -> dict[int, float]:
    """Median milliseconds by size. The sizes take turns, so that a slow spell of the machine hits all of them; the
    first round warms up and does not count."""
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for turn in range(repeats + 1):
        for size in sizes:
            spent = sample(size)
            if turn:
                times[size].append(1000 * spent)
    return {size: median(values) for size, values in times.items()}
