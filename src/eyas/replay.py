"""What a policy would have done: candidates recorded once at every place of some answers, replayed at will.

Both greedy and sampled answers can be recorded. A draft token is right where the answer went on with it: for greedy
answers that is what the verifier accepts; for sampled ones the verifier accepts a token as often as the target gives
it, so an answer that was sampled accepts in expectation what the verifier would. (Draft tokens that are drawn are
accepted more often than an answer happens to agree with them: of those a recording knows nothing.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from eyas.calibration import Bin, Calibration, reliability
from eyas.costs import CostTable
from eyas.drafters.base import Drafter
from eyas.generate import Session, generate
from eyas.policies.base import Candidates, Children, TreePolicy, Watcher, grow_tree
from eyas.policies.dynamic import DynamicPolicy
from eyas.policies.sequoia import AcceptanceTable
from eyas.policies.trace import PolicyTrace
from eyas.sampling import SamplingParams
from eyas.stopping import StopParams
from eyas.targets.base import Target
from eyas.tree import Bools, Ints
from eyas.verify import verify_known


@dataclass(frozen=True)
class Moment:
    """One place in an answer.

    Attributes:
        candidates: everything the drafter guessed below the last committed token.
        rest: the tokens that really followed.
    """

    candidates: Candidates
    rest: tuple[int, ...]

    @cached_property
    def path(self) -> list[int]:
        """The candidates that are right, from level 1 on as deep as they go."""
        found: list[int] = []
        parent = 0
        levels = self.candidates.levels
        for depth, token in enumerate(self.rest[: self.candidates.depth], start=1):
            level = slice(*levels[depth : depth + 2])
            right = np.flatnonzero(
                (self.candidates.parents[level] == parent)
                & (self.candidates.tokens[level] == token)
                & np.isfinite(self.candidates.log_probs[level])  # padding is no guess
            )
            if not len(right):
                break
            parent = int(right[0]) + level.start
            found.append(parent)
        return found

    @cached_property
    def first_child(self) -> Ints:
        """[C] the first child of each candidate; -1 for those that were not expanded."""
        first = np.full(len(self.candidates), -1)
        # Backwards: of a parent's children, which lie side by side, the first is written last.
        first[self.candidates.parents[:0:-1]] = np.arange(len(self.candidates) - 1, 0, -1)
        return first


@dataclass(frozen=True)
class Recording:
    """The moments of some answers, one per committed token, and the width they were drafted with.

    Attributes:
        answers: the moments of each answer, in order.
        num_steps: levels drafted.
        topk: nodes expanded per level and children of each.
    """

    answers: tuple[tuple[Moment, ...], ...]
    num_steps: int
    topk: int

    @property
    def texts(self) -> list[list[int]]:
        """The answers' tokens."""
        return [[int(a[0].candidates.tokens[0]), *a[0].rest] if a else [] for a in self.answers]

    @property
    def moments(self) -> list[Moment]:
        return [moment for answer in self.answers for moment in answer]

    def acceptance(self, weight: float = 8.0) -> AcceptanceTable:
        """Position-wise acceptance p[depth][rank]: how often the child of that rank was right, of all times that the
        right node of that depth was expanded.

        Deep levels are seldom reached: each is drawn towards the mean of all levels as by ``weight`` observations.
        """
        counts = np.zeros((self.num_steps, self.topk))
        tries = np.zeros(self.num_steps)
        for moment in self.moments:
            for depth, node in enumerate((0, *moment.path)):
                if depth >= self.num_steps or depth >= len(moment.rest) or moment.first_child[node] < 0:
                    break
                tries[depth] += 1
                if depth < len(moment.path):
                    counts[depth, moment.candidates.ranks[moment.path[depth]]] += 1
        pooled = counts.sum(axis=0) / max(1.0, tries.sum())
        table = (counts + weight * pooled) / (tries + weight)[:, None]
        return tuple(tuple(row) for row in table.tolist())

    def observations(self) -> list[tuple[np.ndarray, Bools]]:
        """Per level: log path values of all candidates that can be judged, and whether they were right."""
        levels: list[tuple[np.ndarray, Bools]] = []
        for depth in range(1, self.num_steps + 1):
            values, right = [np.zeros(0, np.float32)], [np.zeros(0, bool)]
            for moment in self.moments:
                if min(len(moment.rest), moment.candidates.depth) >= depth:
                    level = slice(*moment.candidates.levels[depth : depth + 2])
                    values.append(moment.candidates.log_values[level])
                    right.append(np.zeros(level.stop - level.start, bool))
                    if len(moment.path) >= depth:
                        right[-1][moment.path[depth - 1] - level.start] = True
            levels.append((np.concatenate(values), np.concatenate(right)))
        return levels

    def calibration(self, bins: int = 12) -> Calibration:
        """The map from path values to how often they were right, per level."""
        return Calibration.fit(self.observations(), bins)

    def reliability(self, bins: int = 12) -> list[list[Bin]]:
        """The same as bins, for reports."""
        return [reliability(values, right, bins) for values, right in self.observations()]


def record(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    num_steps: int,
    topk: int,
    max_tokens: int,
    params: SamplingParams | None = None,
    progress: Callable[[int], object] | None = None,
) -> Recording:
    """Answer the prompts plainly, drafting at every token without verifying.

    Args:
        target: answers.
        drafter: guesses; its state is built from true features, so at each place it is what it would be in any cycle.
        prompts: token ids.
        num_steps, topk: how much is drafted; policies can be replayed within these bounds.
        max_tokens: per answer.
        params: greedy where None.
        progress: called with the number of prompts done.
    """
    policy = Unverified(DynamicPolicy(num_steps, topk, 1))
    answers = []
    for number, prompt in enumerate(prompts, start=1):
        steps = list(
            generate(
                Session(target, drafter),
                prompt,
                policy=policy,
                draw=False,
                params=params,
                stop=StopParams(max_tokens=max_tokens),
            )
        )
        tokens = [token for step in steps for token in step.tokens]
        moments = []
        for place, step in enumerate(steps[1:]):
            assert step.cycle is not None
            candidates = step.cycle.trace.candidates or Candidates.root(tokens[place])
            moments.append(Moment(candidates, tuple(tokens[place + 1 :])))
        answers.append(tuple(moments))
        if progress:
            progress(number)
    return Recording(tuple(answers), num_steps, topk)


@dataclass(frozen=True)
class Replay:
    """What a policy did with a recording, and what that would cost.

    Attributes:
        cycles: target passes.
        tokens: committed tokens.
        draft_tokens: nodes verified.
        ms: predicted milliseconds.
    """

    cycles: int
    tokens: int
    draft_tokens: int
    ms: float

    @property
    def acceptance_length(self) -> float:
        return self.tokens / self.cycles if self.cycles else 0.0

    @property
    def rate(self) -> float:
        """Tokens per millisecond."""
        return self.tokens / self.ms if self.ms else 0.0


def replay(recording: Recording, policy: TreePolicy | None, costs: CostTable) -> Replay:
    """Go through the answers as ``policy`` would; without one, as plain decoding does.

    Exact for whatever it expands that was expanded in the recording too; children nobody drafted count as wrong.
    """
    cycles = tokens = draft_tokens = 0
    ms = 0.0
    for answer in recording.answers:
        place = 0
        while place < len(answer):
            moment = answer[place]
            kept, expanded, accepted = _cycle(moment, policy, len(moment.rest) - 1) if policy else (0, [], 0)
            cycles += 1
            tokens += accepted + 1
            draft_tokens += kept
            ms += costs.cycle(expanded, kept)
            place += accepted + 1
    return Replay(cycles, tokens, draft_tokens, ms)


def _cycle(moment: Moment, policy: TreePolicy, max_depth: int) -> tuple[int, list[int], int]:
    """(nodes verified, nodes expanded per level, nodes accepted) of a policy at one place."""
    recorded = moment.candidates
    origin = np.zeros(1, np.int64)  # candidate of the replay -> recorded one, -1 where there is none
    expanded_per_level: list[int] = []

    def score(candidates: Candidates, expanded: Ints) -> Children:
        nonlocal origin
        expanded_per_level.append(len(expanded))
        source = origin[expanded]
        first = np.where(source >= 0, moment.first_child[source], -1)
        children = first[:, None] + np.arange(policy.topk)  # [n, k]
        # Children lie side by side; past the last one stands somebody else's.
        inside = (first[:, None] >= 0) & (children < len(recorded))
        children = np.where(inside, children, 0)
        inside &= recorded.parents[children] == source[:, None]
        origin = np.concatenate([origin, np.where(inside, children, -1).ravel()])
        return Children(
            np.where(inside, recorded.tokens[children], 0),
            np.where(inside, recorded.log_probs[children], np.float32(-np.inf)).astype(np.float32),
        )

    tree = grow_tree(int(recorded.tokens[0]), policy, max_depth, score)
    return tree.num_draft_tokens, expanded_per_level, len(verify_known(tree, moment.rest).path) - 1


@dataclass(frozen=True)
class GridPoint:
    """One setting of EAGLE-2's policy and what it should bring.

    Attributes:
        num_steps, topk, num_draft_tokens: the setting.
        acceptance_length: tokens per cycle.
        rate: tokens per millisecond.
        measured: tokens per millisecond as they turned out where it was tried: on a few of the answers.
        expected: what was predicted of just these.
    """

    num_steps: int
    topk: int
    num_draft_tokens: int
    acceptance_length: float
    rate: float
    measured: float | None = None
    expected: float | None = None

    @property
    def setting(self) -> tuple[int, int, int]:
        return self.num_steps, self.topk, self.num_draft_tokens

    @property
    def policy(self) -> DynamicPolicy:
        return DynamicPolicy(*self.setting)


@dataclass(frozen=True)
class Walk:
    """What one setting of EAGLE-2's policy did with a recording, whatever that costs.

    Attributes:
        setting: num_steps, topk, num_draft_tokens.
        tokens: committed.
        shapes: (nodes expanded per level, nodes verified) of its cycles, each with how often it came about.
    """

    setting: tuple[int, int, int]
    tokens: int
    shapes: Mapping[tuple[tuple[int, ...], int], int]

    def priced(self, costs: CostTable) -> GridPoint:
        ms = sum(count * costs.cycle(*shape) for shape, count in self.shapes.items())
        cycles = sum(self.shapes.values())
        return GridPoint(*self.setting, self.tokens / max(cycles, 1), self.tokens / ms if ms else 0.0)


def walks(
    recording: Recording, *, num_steps: Sequence[int], topk: Sequence[int], num_draft_tokens: Sequence[int]
) -> list[Walk]:
    """``replay`` of ``DynamicPolicy`` for every combination, in one go.

    The candidates of s levels are the first s levels of any deeper draft, and the m best nodes of them are a prefix of
    one order. So each width is drafted once, and a path is accepted as far as its nodes rank among the first m.
    """
    found = []
    for width in topk:
        drafted = [[_Ranked.of(moment, max(num_steps), width) for moment in answer] for answer in recording.answers]
        for steps in num_steps:
            for budget in num_draft_tokens:
                tokens = 0
                shapes = Counter[tuple[tuple[int, ...], int]]()
                for answer in drafted:
                    place = 0
                    while place < len(answer):
                        accepted, shape = answer[place].cycle(steps, budget)
                        shapes[shape] += 1
                        tokens += accepted + 1
                        place += accepted + 1
                found.append(Walk((steps, width, budget), tokens, shapes))
    return found


@dataclass(frozen=True)
class _Ranked:
    """A moment's draft at one width: for s levels, how many guesses there are and where the right ones rank."""

    expanded: tuple[int, ...]  # per level
    guesses: list[int]  # [s] finite candidates in the first s levels
    places: list[list[int]]  # [s] rank by value of each right node among them

    @classmethod
    def of(cls, moment: Moment, num_steps: int, topk: int) -> _Ranked:
        trace = PolicyTrace(DynamicPolicy(num_steps, topk, 1))
        _, expanded, _ = _cycle(moment, trace, len(moment.rest) - 1)
        candidates = trace.candidates
        assert candidates is not None
        right = Moment(candidates, moment.rest).path
        guesses, places = [0], [list[int]()]
        for depth in range(1, num_steps + 1):
            values = candidates.log_values[1 : candidates.levels[min(depth, candidates.depth) + 1]]
            rank = np.empty(len(values), np.int64)
            rank[np.argsort(-values, kind="stable")] = np.arange(len(values))
            guesses.append(int(np.isfinite(values).sum()))
            places.append([int(rank[node - 1]) for node in right[:depth]])
        return cls(tuple(expanded), guesses, places)

    def cycle(self, num_steps: int, budget: int) -> tuple[int, tuple[tuple[int, ...], int]]:
        """(nodes accepted, shape of the cycle)."""
        accepted = sum(place < budget for place in self.places[num_steps])
        return accepted, (self.expanded[:num_steps], min(budget, self.guesses[num_steps]))


class Unverified(Watcher):
    """Grows the tree that its policy grows, and verifies nothing of it."""

    def select(self, candidates: Candidates) -> Ints:
        return np.zeros(0, np.int64)
