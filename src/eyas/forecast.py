"""A profile without a tuning. What a head's guesses are worth is the same on any machine: ``eyas tune --save`` keeps it
with the head. What passes cost here is timed in about a second, the first time a model and a drafter meet."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from eyas.calibration import Calibration
from eyas.checkpoints.sidecar import Sidecar
from eyas.costs import CostTable
from eyas.drafters.base import Drafter
from eyas.errors import CheckpointError, InvalidInputError
from eyas.policies.sequoia import AcceptanceTable, as_acceptance, sequoia_for
from eyas.profile import DrawnTree, Profile, ProfileKey, is_size
from eyas.profile_files import keep, profile_path
from eyas.targets.base import Target
from eyas.timing import measure_costs

FORMAT = 1
"""Of what is kept in the cache."""

LARGEST = 128
"""Levels, ranks and nodes of a forecast at most: the best fixed tree is looked for among all of these."""

BUSY = 0.15
"""Share of the processors that others may use while passes are timed; above it the costs are not kept."""

FORECAST = Sidecar("forecast.json", "a forecast", "eyas tune --save")
"""Lies beside a head's weights; a part is as ``Forecast.as_dict`` gives it."""


@dataclass(frozen=True)
class Forecast:
    """What a head's guesses are worth, whatever runs it.

    Attributes:
        acceptance: p[depth][rank].
        calibration: path values to probabilities.
        num_draft_tokens: nodes verified per cycle at most.
        hit_rates: of n-gram guesses by match length from 1 on; empty where nothing was measured.
        drawn: trees of drawn tokens, for sampled answers.

    Raises:
        InvalidInputError: sizes or rates that no head has.
    """

    acceptance: AcceptanceTable
    calibration: Calibration
    num_draft_tokens: int
    hit_rates: tuple[float, ...] = ()
    drawn: tuple[DrawnTree, ...] = ()

    def __post_init__(self) -> None:
        sizes = (len(self.acceptance), len(self.acceptance[0]), self.num_draft_tokens)
        if not all(is_size(size) and size <= LARGEST for size in sizes):
            raise InvalidInputError(
                f"a forecast has 1 to {LARGEST} levels, ranks and nodes, got {', '.join(map(str, sizes))}"
            )
        if not all(0 <= rate <= 1 for rate in self.hit_rates):  # NaN is nowhere
            raise InvalidInputError(f"hit rates lie between 0 and 1, got {list(self.hit_rates)}")

    @classmethod
    def of(cls, profile: Profile) -> Forecast:
        """What a tuning found that holds elsewhere, too."""
        return cls(profile.acceptance, profile.calibration, profile.num_draft_tokens, profile.hit_rates, profile.drawn)

    def profile(self, key: ProfileKey, costs: CostTable) -> Profile:
        """What follows at these costs. The rate is that of the best fixed tree, drawn trees are ordered by what they
        bring; those that are slower than plain decoding are left out."""
        plain = 1 / costs.plain_ms
        tree = sequoia_for(
            self.acceptance,
            costs,
            num_draft_tokens=self.num_draft_tokens,
            num_steps=len(self.acceptance),
            topk=len(self.acceptance[0]),
        )
        paying = [each for each in self.drawn if each.rate(costs) > plain]
        return Profile(
            key=key,
            costs=costs,
            acceptance=self.acceptance,
            calibration=self.calibration,
            rate=max(plain, tree.rate),
            best=None,
            template=tree.policy.template if tree.policy else (),
            num_draft_tokens=self.num_draft_tokens,
            hit_rates=self.hit_rates,
            drawn=tuple(sorted(paying, key=lambda each: -each.rate(costs))),
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "acceptance": [list(row) for row in self.acceptance],
            "calibration": self.calibration.as_dict(),
            "num_draft_tokens": self.num_draft_tokens,
            "hit_rates": list(self.hit_rates),
            "drawn": [asdict(each) for each in self.drawn],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Forecast:
        """The inverse of ``as_dict``.

        Raises:
            InvalidInputError: values that are no forecast.
        """
        try:
            return cls(
                acceptance=as_acceptance(values["acceptance"]),
                calibration=Calibration.from_dict(values["calibration"]),
                num_draft_tokens=values["num_draft_tokens"],
                hit_rates=tuple(map(float, values["hit_rates"])),
                drawn=tuple(DrawnTree(**each) for each in values["drawn"]),
            )
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise InvalidInputError(f"not a forecast: {error!r}") from None


def read_forecast(head: Path, *, greedy: bool) -> Forecast | None:
    """The forecast stored with the head in directory ``head``; None where there is none for such answers.

    Raises:
        CheckpointError: a file that is not a forecast.
    """
    values = FORECAST.read(head, greedy=greedy)
    try:
        return None if values is None else Forecast.from_dict(values)
    except InvalidInputError as error:
        raise CheckpointError(f"{head / FORECAST.file}: {error}") from None


def estimated_profile(
    key: ProfileKey,
    target: Target,
    drafter: Drafter,
    forecast: Forecast,
    notice: Callable[[str], object] | None = None,
) -> Profile:
    """The profile that follows from a forecast and from costs timed here, now or at an earlier start.

    Args:
        key: what it is for.
        target, drafter: whose passes are timed.
        forecast: of the drafter.
        notice: told in one line that passes are timed, and why the result is not kept where it is not.
    """
    tell = notice or (lambda line: None)
    path = costs_path(key)
    costs = _kept_costs(path, key)
    if costs is None:
        tell("timing this machine once for this model and drafter; eyas tune measures more")
        start = Load.now()
        costs = measure_costs(target, drafter, topk=len(forecast.acceptance[0]), logits=key.sampled)
        if Load.now().others_since(start) > BUSY:
            tell("the machine is busy with other work: it is timed again at the next start")
        else:
            try:
                keep(path, {"format": FORMAT, "key": asdict(key), "costs": costs.as_dict()})
            except InvalidInputError as error:
                tell(str(error))
    return forecast.profile(key, costs)


def costs_path(key: ProfileKey) -> Path:
    """Where costs for ``key`` are kept: beside the profile of a tuning, one file for each number of threads."""
    return profile_path(key).with_suffix(f".costs-{key.threads}.json")


@dataclass(frozen=True)
class Load:
    """What the processors had done at some moment, in seconds.

    Attributes:
        clock: on the wall.
        ours: processor time of this process, all threads together.
        everybody: that of all processes, and of other machines on the same host; 0 where the system does not tell.
    """

    clock: float
    ours: float
    everybody: float

    @classmethod
    def now(cls) -> Load:
        everybody = 0.0
        try:
            # user, nice, system, idle, iowait, irq, softirq, steal (man 5 proc)
            ticks = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
            everybody = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            pass
        return cls(perf_counter(), process_time(), everybody)

    def others_since(self, start: Load) -> float:
        """Share of all processors that was not ours in the meantime."""
        others = (self.everybody - start.everybody) - (self.ours - start.ours)
        return max(0.0, others) / max(1e-9, (self.clock - start.clock) * (os.cpu_count() or 1))


def _kept_costs(path: Path, key: ProfileKey) -> CostTable | None:
    """What was timed for ``key`` at an earlier start; None where nothing is there, or something else."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["format"] != FORMAT or ProfileKey(**kept["key"]) != key:
            return None
        return CostTable.from_dict(kept["costs"])
    except (OSError, RecursionError, ValueError, KeyError, TypeError, AttributeError, InvalidInputError):
        return None
