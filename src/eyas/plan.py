"""From what the user wants to who drafts, with which policy, behind which gate.

Where a profile of this machine, target and drafter is there (``eyas tune``), ``auto`` is the policy it measured to be
the fastest, plain decoding among them. Elsewhere a head that brings a forecast of its acceptance needs costs alone,
which are timed at the first start, and a drafter without one is EAGLE-2 with its defaults. Either way a gate watches
each request, by the measured costs or by typical ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.calibration import IDENTITY, Calibration, read_calibration
from eyas.costs import CostTable, typical_costs
from eyas.drafters.base import Drafter
from eyas.drafters.grafted import GraftedDrafter
from eyas.drafters.ngram import NgramDrafter
from eyas.errors import InvalidInputError
from eyas.forecast import estimated_profile, read_forecast
from eyas.policies import POLICIES, DynamicPolicy, StaticPolicy, TreePolicy, make_policy
from eyas.policies.gate import Gate
from eyas.policies.sequoia import sequoia
from eyas.profile import Profile, ProfileKey
from eyas.profile_files import load_profile
from eyas.profile_policies import (
    budgeted_policy,
    drawn_policy,
    dynamic_policy,
    fastest_way,
    ngram_drafter,
    sequoia_policy,
)
from eyas.targets.base import Target
from eyas.way import PLAINLY, Way

if TYPE_CHECKING:
    from eyas.loading import LoadedTarget

MEASURED = ("sequoia", "budgeted")
"""Policies that need a profile, or a head with a forecast."""

CHOICES = ("auto", *POLICIES, *MEASURED)

FIXED = {"static": ("num_steps", "topk"), "chain": ("topk",)}
"""Numbers that have no meaning for a policy: EAGLE-1's tree is only cut, a chain has no width."""

LIMITS = {"num_steps": 64, "topk": 64, "num_draft_tokens": 256}
"""The largest budgets that can be asked for: far beyond what pays anywhere."""

HEAD_LEVEL = 0.03
"""A pass of a one-layer head as a share of a pass of its target, where nothing was measured."""


@dataclass(frozen=True)
class DraftSettings:
    """What the user wants.

    Attributes:
        draft: who drafts, see ``eyas.loading.load_drafter``.
        policy: one of ``CHOICES``.
        template: JSON file with the rank paths of a static tree.
        graft: whether n-grams join the drafter's tree; None leaves it to ``auto`` and is no anywhere else.
        draw: for sampled answers, whether draft tokens are drawn from the drafter's distribution or are its likeliest;
            None: drawn, unless ``eyas tune`` found something faster or the policy goes by what it measured.
        num_steps, topk, num_draft_tokens: the budget; what is None comes from the policy, or from the profile.
        profile: a certain profile instead of the one at the usual place.

    Raises:
        InvalidInputError: settings that cannot work, or contradict each other; a template that is none.
    """

    draft: str = "default"
    policy: str = "auto"
    template: Path | None = None
    graft: bool | None = None
    draw: bool | None = None
    num_steps: int | None = None
    topk: int | None = None
    num_draft_tokens: int | None = None
    profile: Path | None = None

    def __post_init__(self) -> None:
        if self.policy not in CHOICES:
            raise InvalidInputError(f"unknown policy {self.policy!r}; choose one of {', '.join(CHOICES)}")
        for name, value in self.budget.items():
            if not 1 <= value <= LIMITS[name]:
                bound = "at least 1" if value < 1 else f"at most {LIMITS[name]}"
                raise InvalidInputError(f"{name} must be {bound}, got {value}; for no drafting use --draft none")
        if self.template is not None:
            if self.policy != "static":
                raise InvalidInputError(f"--template is the tree of --policy static, got --policy {self.policy}")
            if self.budget:
                raise InvalidInputError(f"a template is its own budget; leave out {' and '.join(self.budget)}")
            read_template(self.template)
        elif useless := [name for name in FIXED.get(self.policy, ()) if name in self.budget]:
            raise InvalidInputError(f"--policy {self.policy} has a shape of its own; leave out {' and '.join(useless)}")
        if self.draft == "none" and (self.policy != "auto" or self.budget):
            asked = [f"--policy {self.policy}"] if self.policy != "auto" else []
            raise InvalidInputError(f"--draft none decodes plainly; leave out {' and '.join([*asked, *self.budget])}")
        if self.graft and self.draft in ("none", "ngram"):
            raise InvalidInputError(f"--graft joins n-grams to another drafter's tree, got --draft {self.draft}")
        if self.draw and self.draft in ("none", "ngram"):
            raise InvalidInputError(f"--draw draws from a head's distribution, got --draft {self.draft}")
        if self.graft and self.draw:
            raise InvalidInputError("--draw excludes --graft, which cuts a tree down by what its tokens are")

    def check_greedy(self) -> None:
        """InvalidInputError where greedy answers are to be drawn for."""
        if self.draw:
            raise InvalidInputError(
                "--draw is about sampled answers, and these are greedy (temperature 0, top-k 1 or top-p 0)"
            )

    @property
    def budget(self) -> dict[str, Any]:
        """The numbers that were asked for."""
        asked = {name: getattr(self, name) for name in LIMITS}
        return {name: value for name, value in asked.items() if value is not None}


@dataclass(frozen=True)
class DraftPlan:
    """How a request is drafted.

    Attributes:
        way: that was chosen. Of drawing it says nothing but where ``auto`` chose a tree made for it.
        drafter: None decodes plainly.
        policy: how trees grow.
        gate: when drafting rests; None: never.
        draw: whether sampled answers draw their draft tokens, where the drafter can.
    """

    way: Way
    drafter: Drafter | None
    policy: TreePolicy
    gate: Gate | None = None
    draw: bool = True


PLAIN = DraftPlan(PLAINLY, None, DynamicPolicy())


@dataclass(frozen=True)
class Planner:
    """Everything that is known once target and drafter are loaded.

    Attributes:
        settings: what the user wants.
        target, drafter: as loaded; without a drafter every plan is plain decoding.
        profile: of a tuning, or estimated; None where neither is to be had.
        calibration: what was stored with the head.
    """

    settings: DraftSettings
    target: Target
    drafter: Drafter | None
    profile: Profile | None = None
    calibration: Calibration = IDENTITY

    def plan(self, way: Way | None = None) -> DraftPlan:
        """The plan of a way to draft, the one in the settings where None. What it leaves open the settings decide, and
        where they do not, ``auto``.

        Raises:
            InvalidInputError: a policy that needs a profile where there is none.
        """
        way = way or Way(self.settings.policy)
        if self.drafter is None or not way.drafts:
            return PLAIN
        graft = way.graft or self.settings.graft
        draw = self.settings.draw if way.draw is None else way.draw
        gate = Gate(self.costs) if way.policy in ("auto", "budgeted") else None
        name = way.policy
        if way.policy == "auto":
            fastest = self._fastest(graft, draw)
            if not fastest.drafts:
                return PLAIN
            if fastest.draw:
                drawn = drawn_policy(self.profile) if self.profile else None
                assert drawn is not None
                return DraftPlan(fastest, self.drafter, drawn, gate)
            graft = fastest.graft or graft
            name = fastest.policy
        policy = self._policy(name)
        if graft:
            ngram = ngram_drafter(self.profile) if self.profile else NgramDrafter()
            return DraftPlan(Way(name, graft=True), GraftedDrafter(self.drafter, ngram), policy, gate, draw=False)
        if draw is None:  # what was measured was measured of the likeliest
            by_measurement = way.policy == "auto" and self.profile is not None and not self.settings.budget
            draw = name not in MEASURED and not by_measurement
        return DraftPlan(Way(name), self.drafter, policy, gate, draw)

    @property
    def costs(self) -> CostTable:
        """As measured, or as usual."""
        if self.profile is not None:
            return self.profile.costs
        return typical_costs(_level_share(self.drafter, self.target))

    def _fastest(self, graft: bool | None, draw: bool | None) -> Way:
        if self.profile is None or self.settings.budget:
            return Way("dynamic")
        checks = self.profile.checks
        if graft and checks and not any(check.way.graft for check in checks):
            return fastest_way(self.profile, False, draw=False)  # grafted trees are not drawn
        return fastest_way(self.profile, graft, draw=draw)

    def _policy(self, name: str) -> TreePolicy:
        budget, profile = self.settings.budget, self.profile
        if name in MEASURED and profile is None:
            raise InvalidInputError(
                f"--policy {name} needs measurements of this machine, model and drafter: eyas tune, for sampled "
                "answers eyas tune --temperature 1"
            )
        if name == "budgeted":
            assert profile is not None
            return replace(budgeted_policy(profile), **budget)
        if name == "sequoia":
            assert profile is not None
            fixed = sequoia_policy(profile)
            if fixed is not None and not budget:
                return fixed
            bounds = {"num_draft_tokens": DynamicPolicy.num_draft_tokens, **budget}
            return sequoia(profile.acceptance, **bounds)
        if name == "static" and self.settings.template is not None:
            return read_template(self.settings.template)
        best = dynamic_policy(profile) if profile and self.settings.policy == "auto" and not budget else None
        if name == "dynamic" and best is not None:
            return best
        usual = {key: getattr(DynamicPolicy, key) for key in LIMITS}
        policy = make_policy(name, **{**usual, **budget})
        return replace(policy, calibration=self.calibration) if isinstance(policy, DynamicPolicy) else policy


def load_planner(
    settings: DraftSettings,
    loaded: LoadedTarget,
    *,
    greedy: bool,
    ways: Sequence[Way] | None = None,
    threads: int | None = None,
    device: str = "cpu",
    notice: Callable[[str], object] | None = None,
) -> Planner:
    """Load the drafter, and the profile if a policy has a use for it; without one time what passes cost, where the head
    brings a forecast.

    Args:
        settings: what the user wants.
        loaded: the target.
        greedy: how answers are chosen: each way has its own profile.
        ways: those that will be planned; None: the one in the settings.
        threads, device: as the target was loaded.
        notice: told in one line why a profile is not used, or that a head was trained for other weights.

    Raises:
        InvalidInputError, CheckpointError: see ``eyas.loading.load_drafter`` and ``eyas.profile_files.load_profile``;
            also greedy answers that are to draw.
    """
    from eyas.loading import head_directory, head_notice, load_drafter

    if greedy:
        settings.check_greedy()
    drafter = load_drafter(settings.draft, loaded)
    if drafter is None:
        return Planner(settings, loaded.target, None)
    folder = head_directory(settings.draft)
    if notice and (line := head_notice(settings.draft, loaded)):
        notice(line)
    calibration = read_calibration(folder, greedy=greedy) if folder else IDENTITY
    profile = None
    wanted = ways or [Way(settings.policy)]
    decided = any(way.policy in ("auto", *MEASURED) for way in wanted)
    if decided or settings.graft or any(way.graft for way in wanted):
        key = profile_key(settings.draft, loaded, greedy=greedy, threads=threads, device=device)
        profile = load_profile(key, settings.profile, notice)
        if decided and profile is None and folder and (forecast := read_forecast(folder, greedy=greedy)):
            profile = estimated_profile(key, loaded.target, drafter, forecast, notice)
    return Planner(settings, loaded.target, drafter, profile, calibration)


def profile_key(
    draft: str, loaded: LoadedTarget, *, greedy: bool, threads: int | None = None, device: str = "cpu"
) -> ProfileKey:
    """What a profile of this target and the drafter called ``draft`` must be valid for."""
    from eyas.loading import drafter_identity

    return ProfileKey.of(
        loaded.target.info,
        loaded.source.fingerprint(),
        drafter_identity(draft),
        threads=threads,
        sampled=not greedy,
        device=device,
    )


def read_template(path: Path) -> StaticPolicy:
    """A static tree from a JSON file such as ``[[0], [1], [0, 0]]``.

    Raises:
        InvalidInputError: no such file, no JSON, no tree, or one beyond all sense.
    """
    try:
        paths: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInputError(f"cannot read the template {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"the template {path} is not JSON: {error}") from None
    if not isinstance(paths, list) or not all(isinstance(each, list) for each in paths):
        raise InvalidInputError(f"the template {path} is not a list of rank paths such as [[0], [1], [0, 0]]")
    try:
        policy = StaticPolicy.from_paths(paths)
    except InvalidInputError as error:
        raise InvalidInputError(f"the template {path}: {error}") from None
    for name, limit in LIMITS.items():
        if getattr(policy, name) > limit:
            raise InvalidInputError(
                f"the template {path} has {name} {getattr(policy, name)}, at most {limit} is allowed"
            )
    return policy


def _level_share(drafter: Drafter | None, target: Target) -> float:
    """A drafter pass as a share of a target pass, by size."""
    from eyas.drafters.small_model import SmallModelDrafter

    if drafter is None or isinstance(drafter, NgramDrafter):
        return 0.0
    if isinstance(drafter, SmallModelDrafter):
        ours, theirs = (
            # Twelve H x H matrices a layer is what most models come near to; lm_head is read in every pass, too.
            info.hidden_size * (12 * info.num_layers * info.hidden_size + info.vocab_size)
            for info in (drafter.model.info, target.info)
        )
        return ours / theirs
    return HEAD_LEVEL
