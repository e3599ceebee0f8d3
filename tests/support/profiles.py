"""A profile without any measuring."""

from __future__ import annotations

from eyas.calibration import IDENTITY
from eyas.costs import CostTable
from eyas.profile import Check, Profile, ProfileKey
from eyas.replay import GridPoint
from eyas.way import Way

COSTS = CostTable((1, 4, 16), (10.0, 10.5, 14.0), (1, 4), (0.3, 0.5), first_ms=0.5, overhead_ms=0.2)


def made_up_profile(key: ProfileKey, **speeds: float) -> Profile:
    """Costs at which drafting pays, and tokens per second measured by policy ("_" for "+" in names)."""
    checks = [Check(Way.parse(name.replace("_", "+")), None, speed, 2.0) for name, speed in speeds.items()]
    return Profile(
        key=key,
        costs=COSTS,
        acceptance=((0.5, 0.2, 0.1),) * 3,
        calibration=IDENTITY,
        rate=0.15,
        best=GridPoint(2, 3, 5, 2.0, 0.14),
        template=((0,), (1,), (0, 0), (0, 1)),
        num_draft_tokens=15,
        checks=tuple(checks),
        hit_rates=(0.3, 0.6),
    )
