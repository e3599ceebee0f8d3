"""Policies whose ``expand`` the engine knows too: it then grows a whole tree in one call.

The policies in Python are the reference; every rule expands the very nodes that its policy would.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from eyas import native
from eyas.calibration import Calibration
from eyas.policies.base import TreePolicy
from eyas.policies.budgeted import BudgetedPolicy
from eyas.policies.dynamic import DynamicPolicy

if TYPE_CHECKING:
    from eyas.native import _core


@dataclass(frozen=True)
class Rule:
    """``expand`` of a policy in the engine.

    Attributes:
        core: the compiled rule.
        calibration: the policy's, applied by the rule as well.
    """

    core: _core.Rule
    calibration: Calibration


def make_rule(policy: TreePolicy) -> Rule | None:
    """The rule of a policy; None where only the policy itself knows what it expands."""
    # Not isinstance: whoever derives from a policy may expand otherwise.
    if type(policy) is DynamicPolicy:
        dynamic = native.core.DynamicRule(policy.topk, policy.value, _knots(policy.calibration))
        return Rule(dynamic, policy.calibration)
    if type(policy) is BudgetedPolicy:
        costs = policy.costs
        budgeted = native.core.BudgetedRule(
            topk=policy.topk,
            calibration=_knots(policy.calibration),
            acceptance=policy.acceptance,
            closing=policy.closing,
            level_ms=[costs.level(nodes) for nodes in range(policy.topk + 1)],
            first_ms=costs.first_ms,
            floor=policy.floor,
            rate=policy.rate,
            drafts=policy.drafts,
        )
        return Rule(budgeted, policy.calibration)
    return None


def _knots(calibration: Calibration) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    return [(level.promised, level.observed) for level in calibration.levels]
