"""What was measured on one machine for one model and drafter, kept as a small JSON file."""

from __future__ import annotations

import json
import math
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from eyas.calibration import Bin, Calibration
from eyas.costs import CURVE, CostTable
from eyas.drafters.ngram import NgramDrafter
from eyas.errors import CheckpointError, EyasError, InvalidInputError
from eyas.fetch import cache_directory
from eyas.files import replace_file
from eyas.native import default_threads
from eyas.policies.base import TreePolicy
from eyas.policies.budgeted import BudgetedPolicy
from eyas.policies.dynamic import DynamicPolicy
from eyas.policies.sequoia import AcceptanceTable, as_acceptance
from eyas.policies.static import StaticPolicy
from eyas.replay import GridPoint
from eyas.targets.base import TargetInfo

FORMAT = 3

GRAFT = "+graft"
"""Behind a policy's name: n-grams join the drafter's tree."""

DRAWN = "+drawn"
"""Behind a policy's name: draft tokens are drawn from the drafter's distribution (sampled answers only)."""

CHECKED = ("none", "budgeted", "dynamic", "sequoia")
"""Policies that a tuning measures, with and without ``GRAFT``."""


@dataclass(frozen=True)
class ProfileKey:
    """What a profile is valid for; all of it must agree.

    Attributes:
        machine: see ``machine_name``; with an accelerator, its name too.
        model: fingerprint of the target's weights (``ModelSource.fingerprint``).
        engine: "transformers" or "native".
        dtype: weight type.
        kernels: instruction set of the native engine; empty elsewhere.
        threads: CPU threads.
        drafter: where the drafter came from.
        drafter_fingerprint: of its weights; empty for a drafter without any.
        sampled: answers are sampled; acceptance then differs from greedy answers.
    """

    machine: str
    model: str
    engine: str
    dtype: str
    threads: int
    drafter: str
    drafter_fingerprint: str = ""
    sampled: bool = False
    kernels: str = ""

    @classmethod
    def of(
        cls,
        info: TargetInfo,
        fingerprint: str,
        drafter: tuple[str, str],
        *,
        threads: int | None = None,
        sampled: bool = False,
        device: str = "cpu",
    ) -> ProfileKey:
        """The key of a tuning.

        Args:
            info, fingerprint: of the target as loaded.
            drafter: (where it came from, fingerprint), see ``eyas.loading.drafter_identity``.
            threads: CPU threads; None for all this process may use.
            sampled: whether answers are sampled.
            device: what the target runs on.
        """
        return cls(
            machine=machine_name(device),
            model=fingerprint,
            engine=info.engine,
            dtype=info.dtype,
            threads=threads or default_threads(),
            drafter=drafter[0],
            drafter_fingerprint=drafter[1],
            sampled=sampled,
            kernels=info.kernels,
        )

    def differences(self, other: ProfileKey) -> list[str]:
        """What does not agree, in words."""
        different = [
            f"{field.name.replace('_', ' ')} {getattr(self, field.name)!r}, not {getattr(other, field.name)!r}"
            for field in fields(self)
            if field.name != "sampled" and getattr(self, field.name) != getattr(other, field.name)
        ]
        if self.sampled != other.sampled:
            different.append("sampled answers, not greedy ones" if self.sampled else "greedy answers, not sampled ones")
        return different

    @property
    def command(self) -> str:
        """What makes a profile of this way of answering."""
        return "eyas tune --temperature 1" if self.sampled else "eyas tune"


@dataclass(frozen=True)
class Check:
    """A policy's speed as predicted and as measured afterwards.

    Attributes:
        policy: its name, with ``GRAFT`` behind it where n-grams were grafted, ``DRAWN`` where draft tokens were drawn.
        predicted, measured: tokens per second; no prediction for grafted and drawn trees.
        acceptance_length: tokens per cycle, measured.
        overall: tokens per second that follow for all prompts of the tuning; None where only ``measured`` is known.
    """

    policy: str
    predicted: float | None
    measured: float
    acceptance_length: float
    overall: float | None = None

    @property
    def speed(self) -> float:
        """The best word on this policy's tokens per second."""
        return self.measured if self.overall is None else self.overall


def is_size(value: object) -> bool:
    """Whether ``value`` is a number of levels, nodes or ranks that a cost table can price."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < CURVE


@dataclass(frozen=True)
class DrawnTree:
    """EAGLE-2's tree with drawn tokens, and what it brought.

    Attributes:
        num_steps, topk, num_draft_tokens: its budget.
        acceptance_length: tokens per cycle.

    Raises:
        InvalidInputError: sizes or a length that no tree has.
    """

    num_steps: int
    topk: int
    num_draft_tokens: int
    acceptance_length: float

    def __post_init__(self) -> None:
        budget = (self.num_steps, self.topk, self.num_draft_tokens)
        if not all(is_size(size) for size in budget) or not isinstance(self.acceptance_length, int | float):
            raise InvalidInputError(f"a drawn tree has sizes below {CURVE} and a number of tokens, got {self}")
        if not 1 <= self.acceptance_length <= CURVE:
            raise InvalidInputError(f"a cycle commits 1 to {CURVE} tokens, got {self.acceptance_length}")

    @property
    def policy(self) -> DynamicPolicy:
        return DynamicPolicy(self.num_steps, self.topk, self.num_draft_tokens)

    def rate(self, costs: CostTable) -> float:
        """Tokens per millisecond at these costs."""
        expanded = (1, *[self.topk] * (self.num_steps - 1))
        return self.acceptance_length / costs.cycle(expanded, self.num_draft_tokens)


@dataclass(frozen=True)
class Profile:
    """Costs and acceptance, and what follows from them.

    Attributes:
        key: what it is valid for.
        costs: milliseconds.
        acceptance: p[depth][rank] of the drafter.
        calibration: path values to probabilities.
        rate: tokens per millisecond that the budgeted policy should reach.
        best: the best setting of EAGLE-2's policy on the grid, None where plain decoding is predicted to be faster, or
            where there is no grid (``eyas.forecast``).
        template: Sequoia's tree for this machine; empty where plain decoding is predicted to be faster.
        num_draft_tokens: nodes verified per cycle at most.
        grid: predictions for every setting tried.
        checks: predictions against measurements.
        reliability: per level, bins of path value and acceptance.
        hit_rates: of n-gram guesses by match length from 1 on; empty where nothing was measured.
        drawn: trees of drawn tokens, the fastest first; empty where none is known that pays.
    """

    key: ProfileKey
    costs: CostTable
    acceptance: AcceptanceTable
    calibration: Calibration
    rate: float
    best: GridPoint | None
    template: tuple[tuple[int, ...], ...]
    num_draft_tokens: int
    grid: tuple[GridPoint, ...] = ()
    checks: tuple[Check, ...] = ()
    reliability: tuple[tuple[Bin, ...], ...] = ()
    hit_rates: tuple[float, ...] = ()
    drawn: tuple[DrawnTree, ...] = ()

    def fastest(self, graft: bool | None = None, *, draw: bool | None = None) -> str:
        """Name of the policy found to be the fastest, "none" for plain decoding. Where none was raced, what should be.

        Args:
            graft: whether n-grams are grafted; where None, whichever is faster.
            draw: whether draft tokens are drawn; likewise.
        """
        checks = [
            check
            for check in self.checks
            if check.policy == "none"
            or (graft in (None, check.policy.endswith(GRAFT)) and draw in (None, check.policy.endswith(DRAWN)))
        ]
        if not checks:
            return self._presumed(graft, draw)
        return max(checks, key=lambda check: check.speed).policy

    def _presumed(self, graft: bool | None, draw: bool | None) -> str:
        """``fastest`` by costs and acceptance alone, where nothing was raced."""
        if self.drawn and draw is not False and not graft:
            return f"dynamic{DRAWN}"
        if not self.budgeted().drafts:
            return "none"
        joined = graft or (graft is None and bool(self.hit_rates))
        return f"budgeted{GRAFT}" if joined else "budgeted"

    def ngram(self) -> NgramDrafter:
        """N-grams at their measured price."""
        return NgramDrafter(hit_rates=self.hit_rates) if self.hit_rates else NgramDrafter()

    def budgeted(self) -> BudgetedPolicy:
        """The policy that decides per cycle."""
        return BudgetedPolicy(
            self.costs,
            self.acceptance,
            num_steps=len(self.acceptance),
            topk=len(self.acceptance[0]),
            num_draft_tokens=self.num_draft_tokens,
            calibration=self.calibration,
            rate=self.rate,
        )

    def dynamic(self) -> TreePolicy | None:
        """EAGLE-2's policy at its best setting; None: decode plainly."""
        if self.best is None:
            return None
        return self.best.policy

    def dynamic_drawn(self) -> TreePolicy | None:
        """The policy of the fastest tree of drawn tokens; None: there is none that pays."""
        return self.drawn[0].policy if self.drawn else None

    def sequoia(self) -> TreePolicy | None:
        """The best fixed tree; None: decode plainly."""
        return StaticPolicy(self.template) if self.template else None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        values = asdict(self)
        values["calibration"] = self.calibration.as_dict()
        return {"format": FORMAT, **values}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Profile:
        """The inverse of ``as_dict``.

        Raises:
            InvalidInputError: values that are not a profile of this format.
        """
        if values.get("format") != FORMAT:
            raise InvalidInputError(f"profile format {values.get('format')!r}, but this version reads {FORMAT}")
        try:
            profile = cls(
                key=ProfileKey(**values["key"]),
                costs=CostTable.from_dict(values["costs"]),
                acceptance=as_acceptance(values["acceptance"]),
                calibration=Calibration.from_dict(values["calibration"]),
                rate=float(values["rate"]),
                best=GridPoint(**values["best"]) if values["best"] else None,
                template=tuple(tuple(path) for path in values["template"]),
                num_draft_tokens=int(values["num_draft_tokens"]),
                grid=tuple(GridPoint(**point) for point in values["grid"]),
                checks=tuple(Check(**check) for check in values["checks"]),
                reliability=tuple(tuple(Bin(**each) for each in level) for level in values["reliability"]),
                hit_rates=tuple(values["hit_rates"]),
                drawn=tuple(DrawnTree(**tree) for tree in values["drawn"]),
            )
            profile._try_policies()
        except InvalidInputError:
            raise
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise InvalidInputError(f"not a profile: {error!r}") from None
        return profile

    def _try_policies(self) -> None:
        """Make everything that can be planned with: what is wrong shows when a profile is read, not in an answer."""
        setting = self.best.setting if self.best else ()
        sizes = [*setting, *(1 + rank for path in self.template for rank in path)]
        if not all(map(is_size, sizes)):
            raise InvalidInputError(f"settings and ranks are below {CURVE}, got {setting} and {self.template}")
        if not math.isfinite(ms := self.costs.cycle((1, 1), 1)):
            raise InvalidInputError(f"a cycle takes {ms} ms")
        for check in self.checks:
            if check.policy.removesuffix(GRAFT).removesuffix(DRAWN) not in CHECKED:
                raise InvalidInputError(f"{check.policy!r} was measured, which is not among {', '.join(CHECKED)}")
            if check.policy.endswith(DRAWN) and not self.drawn:
                raise InvalidInputError(f"{check.policy!r} was measured, but its tree is missing")
        for make in (self.budgeted, self.dynamic, self.dynamic_drawn, self.sequoia, self.ngram, self.fastest):
            make()


def machine_name(device: str = "cpu") -> str:
    """Processor and number of cores, as far as the system tells: "AMD EPYC 7763 x2"; with an accelerator its name,
    too."""
    name = platform.processor() or platform.machine()
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        info = ""
    if found := re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE):
        name = found[1].strip()
    name = f"{name} x{os.cpu_count()}"
    if device.startswith("cuda"):
        import torch

        return f"{name}, {torch.cuda.get_device_name(device)}"
    return name if device == "cpu" else f"{name}, {device}"


def profiles_directory() -> Path:
    """Where all profiles are kept."""
    return cache_directory() / "profiles"


def profile_path(key: ProfileKey) -> Path:
    """Where the profile for ``key`` is kept. Machine, threads and the drafter's weights are not in the name: one file
    per choice of model, engine, dtype, drafter and way of answering, replaced by every re-tuning."""
    place = sha256(key.drafter.encode()).hexdigest()[:8]  # heads of one name in several directories
    words = (key.model, key.engine, key.dtype, f"{Path(key.drafter).name[:40]}.{place}")
    name = "-".join(re.sub(r"[^\w.+]+", "_", word).strip("_.") for word in words)
    return profiles_directory() / f"{name}-{'sampled' if key.sampled else 'greedy'}.json"


def save_profile(profile: Profile, path: Path | None = None) -> Path:
    """Write a profile whole or not at all.

    Raises:
        InvalidInputError: a place that cannot be written.
    """
    path = path or profile_path(profile.key)
    keep(path, profile.as_dict())
    return path


def keep(path: Path, values: Mapping[str, Any]) -> None:
    """Write plain JSON values into the cache.

    Raises:
        InvalidInputError: a place that cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [json.dumps(values, indent=1, allow_nan=False).encode()])
    except OSError as error:
        raise InvalidInputError(f"cannot write {path}: {error}; EYAS_CACHE chooses another place") from None


def read_profile(path: Path) -> Profile:
    """Read a profile, whatever it is valid for.

    Raises:
        CheckpointError: nothing there, or no profile.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read the profile {path}: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"the profile {path} is damaged: not a JSON object; run eyas tune again")
    try:
        return Profile.from_dict(values)
    except EyasError as error:
        raise CheckpointError(f"the profile {path} is damaged: {error}; run eyas tune again") from None


def load_profile(
    key: ProfileKey, path: Path | None = None, notice: Callable[[str], object] | None = None
) -> Profile | None:
    """The profile for ``key``, or None with a ``notice`` where there is one that does not fit.

    Args:
        key: what it must be valid for.
        path: a certain file; where None, the place ``save_profile`` uses, and nothing there is no news.
        notice: told in one line why a profile is not used.

    Raises:
        CheckpointError: a named file that is missing or damaged. (A damaged one at the usual place is only noticed.)
    """
    usual = path is None
    place = path or profile_path(key)
    if usual and not place.exists():
        return None
    try:
        profile = read_profile(place)
    except CheckpointError as error:
        if not usual:
            raise
        if notice:
            notice(str(error))
        return None
    if different := profile.key.differences(key):
        if notice:
            notice(f"the profile {place} is not used: it was made for {'; '.join(different)}; run {key.command} again")
        return None
    return profile
