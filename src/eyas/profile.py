"""What was measured on one machine for one model and drafter, as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from eyas.calibration import Bin, Calibration
from eyas.costs import CURVE, CostTable
from eyas.environment import machine_name
from eyas.errors import InvalidInputError
from eyas.native import default_threads
from eyas.policies.dynamic import DynamicPolicy
from eyas.policies.sequoia import AcceptanceTable, as_acceptance
from eyas.replay import GridPoint
from eyas.targets.base import TargetInfo
from eyas.way import Way

FORMAT = 3

CHECKED = ("none", "budgeted", "dynamic", "sequoia")
"""Policies that a tuning measures, with and without grafting."""


@dataclass(frozen=True)
class ProfileKey:
    """What a profile is valid for; all of it must agree.

    Attributes:
        machine: see ``eyas.environment.machine_name``; with an accelerator, its name too.
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
    """The speed of a way to draft as predicted and as measured afterwards.

    Attributes:
        way: that was measured.
        predicted, measured: tokens per second; no prediction for grafted and drawn trees.
        acceptance_length: tokens per cycle, measured.
        overall: tokens per second that follow for all prompts of the tuning; None where only ``measured`` is known.
    """

    way: Way
    predicted: float | None
    measured: float
    acceptance_length: float
    overall: float | None = None

    @property
    def speed(self) -> float:
        """The best word on its tokens per second."""
        return self.measured if self.overall is None else self.overall

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        values = asdict(self)
        del values["way"]
        return {"policy": str(self.way), **values}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Check:
        """The inverse of ``as_dict``.

        Raises:
            InvalidInputError: a way that no tuning measures.
        """
        way = Way.parse(values["policy"])
        if way.policy not in CHECKED or way.draw is False:
            raise InvalidInputError(f"'{way}' was measured, which is not among {', '.join(CHECKED)}")
        return cls(way, **{name: value for name, value in values.items() if name != "policy"})


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

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        values = asdict(self)
        values["calibration"] = self.calibration.as_dict()
        values["checks"] = tuple(check.as_dict() for check in self.checks)
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
                checks=tuple(map(Check.from_dict, values["checks"])),
                reliability=tuple(tuple(Bin(**each) for each in level) for level in values["reliability"]),
                hit_rates=tuple(values["hit_rates"]),
                drawn=tuple(DrawnTree(**tree) for tree in values["drawn"]),
            )
            profile._check_numbers()
        except InvalidInputError:
            raise
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise InvalidInputError(f"not a profile: {error!r}") from None
        return profile

    def _check_numbers(self) -> None:
        """InvalidInputError for what fits no tree and no clock."""
        setting = self.best.setting if self.best else ()
        sizes = [*setting, *(1 + rank for path in self.template for rank in path)]
        if not all(map(is_size, sizes)):
            raise InvalidInputError(f"settings and ranks are below {CURVE}, got {setting} and {self.template}")
        if not math.isfinite(ms := self.costs.cycle((1, 1), 1)):
            raise InvalidInputError(f"a cycle takes {ms} ms")
        for check in self.checks:
            if check.way.draw and not self.drawn:
                raise InvalidInputError(f"'{check.way}' was measured, but its tree is missing")
