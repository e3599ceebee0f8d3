"""Measuring a machine, a model and a drafter, and working out how much drafting pays there.

Everything goes through the protocols: any target engine and any drafter can be tuned. Acceptance is recorded once,
costs are timed between real answers, and every policy's speed is predicted from both; a few are then run for real.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from eyas.costs import CostTable, TimedCycle, with_whole_cycles
from eyas.drafters.base import Drafter, DrawingSession
from eyas.drafters.grafted import GraftedDrafter
from eyas.drafters.ngram import NgramDrafter, measured_hit_rates
from eyas.errors import InvalidInputError
from eyas.policies.base import TreePolicy
from eyas.policies.budgeted import BudgetedPolicy
from eyas.policies.dynamic import DynamicPolicy
from eyas.policies.sequoia import sequoia_for
from eyas.profile import Check, DrawnTree, Profile, ProfileKey
from eyas.profile_policies import budgeted_policy, dynamic_policy, ngram_drafter, sequoia_policy
from eyas.replay import GridPoint, Recording, Walk, record, replay, walks
from eyas.sampling import SamplingParams
from eyas.targets.base import Target
from eyas.timing import FRESH, Clock, Contender, CostProbe, Finish, race
from eyas.way import PLAINLY, Way

TuneProgress = Callable[[str, float], object]
"""Told what is going on and which share of the whole is done, 0 to 1."""

DRAWN_TREES = ((2, 1, 2), (3, 2, 4), (4, 3, 8), (5, 4, 12), (6, 4, 20), (6, 8, 31))
"""num_steps, topk, num_draft_tokens of the trees of drawn tokens that are tried, where answers are sampled: what they
bring is measured, not predicted."""

DRAWN = Way("dynamic", draw=True)
"""How these trees draft."""

SETTLING = 6
"""Rounds in which the budgeted policy's rate finds itself; it moves by less than a percent after three."""


@dataclass(frozen=True)
class Effort:
    """How thoroughly to measure; everything is proportional to these.

    Attributes:
        rows: rows of a target pass to time, the root included, increasing from 1.
        nodes: expanded nodes of a drafter level to time; those above ``topk`` are left out.
        num_steps: levels recorded: the deepest tree that can be chosen.
        topk: width recorded: the widest.
        max_tokens: length of each recorded answer.
        checks: prompts answered for real by each checked policy.
        races: times each of them is answered; the median counts.
    """

    rows: tuple[int, ...] = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
    nodes: tuple[int, ...] = (1, 2, 4, 8)
    num_steps: int = 6
    topk: int = 8
    max_tokens: int = 64
    checks: int = 4
    races: int = 3

    def __post_init__(self) -> None:
        if list(self.rows) != sorted(set(self.rows)) or self.rows[:1] != (1,) or len(self.rows) < 2:
            raise InvalidInputError(f"rows to time start at 1 and increase, two at least, got {list(self.rows)}")
        if list(self.nodes) != sorted(set(self.nodes)) or self.nodes[:1] != (1,):
            raise InvalidInputError(f"nodes to time start at 1 and increase, got {list(self.nodes)}")
        for name in ("num_steps", "topk", "checks", "races"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_tokens < 2:
            raise InvalidInputError(f"answers to tune by need at least 2 tokens, got {self.max_tokens}")

    @property
    def num_draft_tokens(self) -> int:
        """Nodes of the largest tree that can be chosen."""
        return max(self.rows) - 1

    def within(self, num_steps: int, topk: int, num_draft_tokens: int) -> tuple[int, int, int]:
        """A tree's budget, cut down to what is recorded and timed."""
        return min(num_steps, self.num_steps), min(topk, self.topk), min(num_draft_tokens, self.num_draft_tokens)


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
        key: what the profile will be valid for, see ``ProfileKey.of``.
        params: how answers are chosen; greedy where None.
        effort: how thoroughly.
        progress: told about the steps.
        clock: for tests.

    Raises:
        InvalidInputError: no prompts, or prompts too short to time anything.
    """
    effort, params = effort or Effort(), params or SamplingParams()
    tell: TuneProgress = progress or (lambda text, share: None)
    probe = CostProbe(
        target,
        drafter,
        usual_context(prompts, effort, target.info.max_positions),
        effort.rows,
        effort.nodes,
        topk=effort.topk,
        num_steps=effort.num_steps,
        clock=clock,
        logits=not params.greedy,
    )

    recording = record(
        target,
        drafter,
        prompts,
        num_steps=effort.num_steps,
        topk=effort.topk,
        max_tokens=effort.max_tokens,
        params=params,
        progress=lambda done: tell("recording drafts", 0.3 * done / len(prompts)),
    )
    few = [number for number, answer in enumerate(recording.answers) if answer][: effort.checks]
    if not few:
        raise InvalidInputError("every answer ended at its first token: there is nothing to tune by")
    course = Course(target, [prompts[number] for number in few], params, effort.max_tokens, probe, clock, tell)

    finishes = course.run(unlike(drafter, effort), 1, "timing passes and cycles", 0.3, 0.15)
    costs = with_whole_cycles(probe.costs(), [cycle for finish in finishes for cycle in finish.cycles])

    tell("predicting", 0.45)
    tried = settings(recording, effort.num_draft_tokens)
    chosen = choose(recording, costs, key, effort.num_draft_tokens, tried)
    chosen = replace(chosen, hit_rates=measured_hit_rates(prompts, recording.texts))

    draws = not params.greedy and isinstance(drafter.new_session(), DrawingSession)
    trees = drawn_trees(effort) if draws else []
    field = Field(drafter, contenders(chosen, drafter), strongest(chosen.grid), trees)
    finishes = course.run(field.everyone, effort.races, "checking predictions", 0.45, 0.55)
    raced = replace(recording, answers=tuple(recording.answers[number] for number in few))
    outcome = Outcome(field, finishes, predictions(raced, field.everyone, finishes, probe.costs()))

    # What was raced stays chosen; its prices are those of the race.
    costs = with_whole_cycles(probe.costs(), _bare_cycles(field.everyone, finishes))
    final = choose(recording, costs, key, effort.num_draft_tokens, tried)
    grid = outcome.measured(final.grid)
    everywhere = {each.way: 1000 * replay(recording, each.policy, costs).rate for each in field.choices}
    tell("done", 1.0)
    return replace(
        final,
        best=chosen.best and grid[chosen.best.setting],
        template=chosen.template,
        hit_rates=chosen.hit_rates,
        drawn=outcome.drawn(),
        grid=tuple(grid.values()),
        checks=tuple(over_all(outcome.checks(), everywhere)),
    )


def usual_context(prompts: Sequence[Sequence[int]], effort: Effort, max_positions: int) -> list[int]:
    """Tokens that timed passes look back on. The more there are, the more passes cost: these are as many as in the
    middle of a usual answer.

    Raises:
        InvalidInputError: no prompts, or prompts too short to time anything.
    """
    if not prompts:
        raise InvalidInputError("tuning needs prompts to answer, got none")
    if not any(len(prompt) > FRESH + 1 for prompt in prompts):
        raise InvalidInputError(f"tuning needs a prompt of more than {FRESH + 1} tokens")
    middle = sum(map(len, prompts)) // len(prompts) + effort.max_tokens // 2
    room = max_positions - max(effort.rows) - 1
    context = [*max(prompts, key=len)]
    while len(context) < middle:
        context += context
    return context[: max(FRESH + 2, min(middle, room))]


@dataclass(frozen=True)
class Course:
    """Where races are run: a few prompts, with passes timed between their answers.

    Attributes:
        target, prompts, params, max_tokens: who answers what, and how.
        probe: times the passes; it holds the samples of the latest race alone.
        clock: tells the time.
        tell: told what is going on.
    """

    target: Target
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    max_tokens: int
    probe: CostProbe
    clock: Clock
    tell: TuneProgress

    def run(self, contenders: Sequence[Contender], repeats: int, what: str, start: float, share: float) -> list[Finish]:
        """A race, ``repeats`` times; ``what`` is told of it, at ``start`` of the whole tuning, of which it is
        ``share``."""
        self.tell(what, start)
        self.probe.round()  # warms up
        self.probe.forget()
        return race(
            self.target,
            contenders,
            self.prompts,
            params=self.params,
            max_tokens=self.max_tokens,
            repeats=repeats,
            clock=self.clock,
            between=self.probe.round,
            progress=lambda done: self.tell(what, start + share * done),
        )


@dataclass(frozen=True)
class Field:
    """Who races in the end, in three groups.

    Attributes:
        drafter: the one that is tuned.
        choices: see ``contenders``.
        points: settings of EAGLE-2's tree, see ``strongest``.
        trees: of drawn tokens, see ``drawn_trees``.
    """

    drafter: Drafter
    choices: Sequence[Contender]
    points: Sequence[GridPoint]
    trees: Sequence[tuple[int, int, int]]

    @property
    def everyone(self) -> list[Contender]:
        """The groups one after the other."""
        return [
            *self.choices,
            *(Contender(Way("dynamic"), self.drafter, point.policy) for point in self.points),
            *(Contender(DRAWN, self.drafter, DynamicPolicy(*tree)) for tree in self.trees),
        ]


@dataclass(frozen=True)
class Outcome:
    """How the race went.

    Attributes:
        field: who raced.
        finishes, predicted: what each of ``field.everyone`` did, and its tokens per second as ``predictions`` has them.
    """

    field: Field
    finishes: Sequence[Finish]
    predicted: Sequence[float | None]

    def checks(self) -> list[Check]:
        """What can be chosen, with the fastest tree of drawn tokens last."""
        raced = zip(self.field.choices, self.predicted, self.finishes, strict=False)  # they are the first group
        found = [Check(each.way, rate, finish.rate, finish.acceptance_length) for each, rate, finish in raced]
        for _, finish in self._drawn()[:1]:
            found.append(Check(DRAWN, None, finish.rate, finish.acceptance_length))
        return found

    def measured(self, grid: Sequence[GridPoint]) -> dict[tuple[int, int, int], GridPoint]:
        """The grid by setting, those points that raced with what was measured of them and what was expected."""
        found = {point.setting: point for point in grid}
        start = len(self.field.choices)
        for point, rate, finish in zip(self.field.points, self.predicted[start:], self.finishes[start:], strict=False):
            found[point.setting] = replace(
                found[point.setting], measured=finish.rate / 1000, expected=rate and rate / 1000
            )
        return found

    def drawn(self) -> tuple[DrawnTree, ...]:
        """The trees of drawn tokens, the fastest first."""
        return tuple(DrawnTree(*tree, finish.acceptance_length) for tree, finish in self._drawn())

    def _drawn(self) -> list[tuple[tuple[int, int, int], Finish]]:
        last = self.finishes[len(self.finishes) - len(self.field.trees) :]
        return sorted(zip(self.field.trees, last, strict=True), key=lambda each: -each[1].rate)


def unlike(drafter: Drafter, effort: Effort) -> list[Contender]:
    """Plain decoding, and trees that differ in levels and in nodes: whole cycles tell what each of them costs."""
    shapes = [(1, 2, 2), (effort.num_steps, 4, 8), (2, effort.topk, 16), (effort.num_steps, 2, 3)]
    policies = [DynamicPolicy(*effort.within(*shape)) for shape in shapes]
    return [Contender(PLAINLY), *(Contender(Way("dynamic"), drafter, policy) for policy in policies)]


def contenders(profile: Profile, drafter: Drafter) -> list[Contender]:
    """Everything ``--policy auto`` can choose from: plain decoding, and each policy that is predicted to beat it, with
    the drafter alone and with n-grams grafted onto it."""
    policies: dict[str, TreePolicy | None] = {
        "budgeted": budgeted_policy(profile),
        "dynamic": dynamic_policy(profile),
        "sequoia": sequoia_policy(profile),
    }
    found = [Contender(PLAINLY)]
    found += [Contender(Way(name), drafter, policy) for name, policy in policies.items() if policy is not None]
    if not isinstance(drafter, NgramDrafter):
        grafted = GraftedDrafter(drafter, ngram_drafter(profile))
        found += [
            Contender(replace(each.way, graft=True), grafted, each.policy) for each in found if each.policy is not None
        ]
    return found


def drawn_trees(effort: Effort) -> list[tuple[int, int, int]]:
    """The trees of drawn tokens within the bounds of an effort."""
    return list(dict.fromkeys(effort.within(*tree) for tree in DRAWN_TREES))


def strongest(points: Sequence[GridPoint]) -> list[GridPoint]:
    """Of a grid, the setting of each depth that is predicted to be the fastest: what is worth measuring."""
    best: dict[int, GridPoint] = {}
    for point in points:
        if point.num_steps not in best or point.rate > best[point.num_steps].rate:
            best[point.num_steps] = point
    return list(best.values())


def predictions(
    recording: Recording, raced: Sequence[Contender], finishes: Sequence[Finish], costs: CostTable
) -> list[float | None]:
    """Tokens per second of each contender, by replay; None where there are guesses that the recording does not know.

    The prompts are dealt into two halves, and what is predicted of one rests on whole cycles of the other alone.

    Args:
        recording: of the prompts that were raced.
        raced, finishes: who raced, and how it went.
        costs: of passes timed by themselves meanwhile.
    """
    halves = [range(half, len(recording.answers), 2) for half in (0, 1)]
    tokens, ms = [0.0] * len(raced), [0.0] * len(raced)
    for half, other in (halves, halves[::-1]):
        known = with_whole_cycles(costs, _bare_cycles(raced, finishes, other or half))
        part = replace(recording, answers=tuple(recording.answers[number] for number in half))
        for which, contender in enumerate(raced):
            if contender.way.bare:
                expected = replay(part, contender.policy, known)
                tokens[which] += expected.tokens
                ms[which] += expected.ms
    return [1000 * count / spent if spent else None for count, spent in zip(tokens, ms, strict=True)]


def over_all(checks: Sequence[Check], everywhere: Mapping[Way, float]) -> list[Check]:
    """The checks with what they tell of all prompts. How much fits into the answers of a few prompts is chance, but it
    is much the same chance for what was predicted of them: the prediction for all prompts is put right by what was
    measured over what was predicted. Grafting gains as much over its policy as it did on the few, drawing as much over
    plain decoding.

    Args:
        checks: plain decoding first, each grafted one behind the same without grafting.
        everywhere: tokens per second over all prompts, predicted.
    """
    found: dict[Way, Check] = {}
    for check in checks:
        alike = found.get(PLAINLY if check.way.draw else replace(check.way, graft=False))
        if check.predicted:
            overall: float | None = everywhere[check.way] * check.measured / check.predicted
        else:
            overall = alike.speed * check.measured / alike.measured if alike else None
        found[check.way] = replace(check, overall=overall)
    return list(found.values())


def _bare_cycles(
    raced: Sequence[Contender], finishes: Sequence[Finish], prompts: Sequence[int] | None = None
) -> list[TimedCycle]:
    """The cycles that a cost table speaks of, without n-grams and without drawing; of some prompts, where given."""
    return [
        cycle
        for contender, finish in zip(raced, finishes, strict=True)
        if contender.way.bare
        for number, answer in enumerate(finish.answers)
        if prompts is None or number in prompts
        for cycle in answer
    ]


def settings(recording: Recording, num_draft_tokens: int) -> list[Walk]:
    """EAGLE-2's policy at every setting worth trying, up to the recording's bounds."""
    return walks(
        recording,
        num_steps=range(1, recording.num_steps + 1),
        topk=[k for k in (1, 2, 3, 4, 6, 8, 10, 16) if k <= recording.topk],
        num_draft_tokens=[m for m in (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 60) if m <= num_draft_tokens],
    )


def choose(
    recording: Recording, costs: CostTable, key: ProfileKey, num_draft_tokens: int, tried: Sequence[Walk]
) -> Profile:
    """Everything that follows from costs and recorded drafts, without measuring anything more.

    Args:
        recording, costs: what to choose by.
        key: what the profile will be valid for.
        num_draft_tokens: nodes verified at most.
        tried: see ``settings``.
    """
    acceptance, calibration = recording.acceptance(), recording.calibration()
    points = [walk.priced(costs) for walk in tried]
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
