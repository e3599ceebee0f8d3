"""Measuring a machine, a model and a drafter, and working out how much drafting pays there.

Everything goes through the protocols: any target engine and any drafter can be tuned. Costs are timed in isolation,
acceptance is recorded once, and every policy's speed is predicted from both; a few are then run for real.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from eyas.costs import CostTable
from eyas.drafters.base import Drafter
from eyas.drafters.grafted import GraftedDrafter
from eyas.drafters.ngram import NgramDrafter, measured_hit_rates
from eyas.errors import InvalidInputError
from eyas.policies.base import TreePolicy
from eyas.policies.budgeted import BudgetedPolicy
from eyas.policies.dynamic import DynamicPolicy
from eyas.policies.sequoia import sequoia_for
from eyas.profile import GRAFT, Check, Profile, ProfileKey
from eyas.replay import GridPoint, Recording, grid, record, replay
from eyas.sampling import SamplingParams
from eyas.targets.base import Target
from eyas.timing import FRESH, Clock, Contender, Finish, race, time_draft, time_verify

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
        checks: prompts answered for real by each checked policy.
        races: times each of them is answered.
    """

    rows: tuple[int, ...] = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
    nodes: tuple[int, ...] = (1, 2, 4, 8)
    repeats: int = 7
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
        for name in ("repeats", "num_steps", "topk", "checks", "races"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_tokens < 2:
            raise InvalidInputError(f"answers to tune by need at least 2 tokens, got {self.max_tokens}")


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
    effort = effort or Effort()
    if not prompts:
        raise InvalidInputError("tuning needs prompts to answer, got none")
    if not any(len(prompt) > FRESH + 1 for prompt in prompts):
        raise InvalidInputError(f"tuning needs a prompt of more than {FRESH + 1} tokens")
    tell: TuneProgress = progress or (lambda text, share: None)
    # Passes cost more the more they look back on: they are timed in the middle of a usual answer.
    middle = sum(map(len, prompts)) // len(prompts) + effort.max_tokens // 2
    room = target.info.max_positions - max(effort.rows) - 1
    context = [*max(prompts, key=len)]
    while len(context) < middle:
        context += context
    context = context[: max(FRESH + 2, min(middle, room))]

    tell("timing the target", 0.0)
    verify = time_verify(target, context, effort.rows, effort.repeats, clock)
    tell("timing the drafter", 0.1)
    first_ms, levels = time_draft(
        target, drafter, context, effort.nodes, effort.topk, effort.num_steps, effort.repeats, clock
    )
    costs = CostTable.fit(verify, levels, first_ms=first_ms)

    recording = record(
        target,
        drafter,
        prompts,
        num_steps=effort.num_steps,
        topk=effort.topk,
        max_tokens=effort.max_tokens,
        params=params,
        progress=lambda done: tell("recording drafts", 0.15 + 0.3 * done / len(prompts)),
    )
    if not any(recording.answers):
        raise InvalidInputError("every answer ended at its first token: there is nothing to tune by")

    answered = [number for number, answer in enumerate(recording.answers) if answer][: effort.checks]
    few = [prompts[number] for number in answered]

    def run(contenders: Sequence[Contender], what: str, start: float, share: float) -> list[Finish]:
        return race(
            target,
            contenders,
            few,
            params=params,
            max_tokens=effort.max_tokens,
            repeats=effort.races,
            clock=clock,
            progress=lambda done: tell(what, start + share * done),
        )

    usual = DynamicPolicy(effort.num_steps, min(4, effort.topk), min(8, max(effort.rows) - 1))
    plain, drafted = run([Contender("none"), Contender("dynamic", drafter, usual)], "measuring whole cycles", 0.45, 0.1)
    # What plain decoding spends outside the passes every cycle spends; what a drafted cycle spends more is drafting.
    costs = replace(costs, overhead_ms=max(0.0, plain.unexplained_ms(costs)))
    costs = replace(costs, first_ms=costs.first_ms + max(0.0, drafted.unexplained_ms(costs)))

    tell("predicting", 0.55)
    profile = choose(recording, costs, key, max(effort.rows) - 1)
    profile = replace(profile, hit_rates=measured_hit_rates(prompts, recording.texts))

    ours = contenders(profile, drafter)
    points = strongest(profile.grid)
    settings = [DynamicPolicy(each.num_steps, each.topk, each.num_draft_tokens) for each in points]
    finishes = run(
        [*ours, *(Contender("grid", drafter, policy) for policy in settings)], "checking predictions", 0.6, 0.4
    )
    part = replace(recording, answers=tuple(recording.answers[number] for number in answered))
    checks = tuple(
        Check(each.name, _predicted(part, each, profile), finish.rate, finish.acceptance_length)
        for each, finish in zip(ours, finishes, strict=False)
    )
    measured = {point: finish.rate / 1000 for point, finish in zip(points, finishes[len(ours) :], strict=True)}
    tell("done", 1.0)
    grid = tuple(replace(point, measured=measured.get(point)) for point in profile.grid)
    return replace(profile, checks=checks, grid=grid)


def contenders(profile: Profile, drafter: Drafter) -> list[Contender]:
    """Everything ``--policy auto`` can choose from: plain decoding, and each policy that is predicted to beat it, with
    the drafter alone and with n-grams grafted onto it."""
    policies: dict[str, TreePolicy | None] = {
        "budgeted": profile.budgeted(),
        "dynamic": profile.dynamic(),
        "sequoia": profile.sequoia(),
    }
    found = [Contender("none")]
    found += [Contender(name, drafter, policy) for name, policy in policies.items() if policy is not None]
    if not isinstance(drafter, NgramDrafter):
        grafted = GraftedDrafter(drafter, profile.ngram())
        found += [Contender(each.name + GRAFT, grafted, each.policy) for each in found if each.policy is not None]
    return found


def strongest(points: Sequence[GridPoint]) -> list[GridPoint]:
    """Of a grid, the setting of each depth that is predicted to be the fastest: what is worth measuring."""
    best: dict[int, GridPoint] = {}
    for point in points:
        if point.num_steps not in best or point.rate > best[point.num_steps].rate:
            best[point.num_steps] = point
    return list(best.values())


def _predicted(recording: Recording, contender: Contender, profile: Profile) -> float | None:
    """Tokens per second; None where guesses are mixed in that the recording does not know."""
    if contender.policy is None:
        return 1000 / profile.costs.plain_ms
    if contender.name.endswith(GRAFT):
        return None
    return 1000 * replay(recording, contender.policy, profile.costs).rate


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
