"""From a profile to policies: how trees grow that are made by what was measured, and which way is the fastest."""

from __future__ import annotations

from eyas.drafters.ngram import NgramDrafter
from eyas.errors import InvalidInputError
from eyas.policies.budgeted import BudgetedPolicy
from eyas.policies.dynamic import DynamicPolicy
from eyas.policies.static import StaticPolicy
from eyas.profile import Profile
from eyas.way import PLAINLY, Way


def fastest_way(profile: Profile, graft: bool | None = None, *, draw: bool | None = None) -> Way:
    """What was found to be the fastest, plain decoding among it. Where nothing was raced, what should be.

    Args:
        profile: of a tuning, or estimated.
        graft: whether n-grams are grafted; where None, whichever is faster.
        draw: whether draft tokens are drawn; likewise.
    """
    checks = [
        check
        for check in profile.checks
        if not check.way.drafts or (graft in (None, check.way.graft) and draw in (None, bool(check.way.draw)))
    ]
    if not checks:
        return _presumed(profile, graft, draw)
    return max(checks, key=lambda check: check.speed).way


def _presumed(profile: Profile, graft: bool | None, draw: bool | None) -> Way:
    """``fastest_way`` by costs and acceptance alone, where nothing was raced."""
    if profile.drawn and draw is not False and not graft:
        return Way("dynamic", draw=True)
    if not budgeted_policy(profile).drafts:
        return PLAINLY
    return Way("budgeted", graft=graft or (graft is None and bool(profile.hit_rates)))


def ngram_drafter(profile: Profile) -> NgramDrafter:
    """N-grams at their measured price."""
    return NgramDrafter(hit_rates=profile.hit_rates) if profile.hit_rates else NgramDrafter()


def budgeted_policy(profile: Profile) -> BudgetedPolicy:
    """The policy that decides per cycle."""
    return BudgetedPolicy(
        profile.costs,
        profile.acceptance,
        num_steps=len(profile.acceptance),
        topk=len(profile.acceptance[0]),
        num_draft_tokens=profile.num_draft_tokens,
        calibration=profile.calibration,
        rate=profile.rate,
    )


def dynamic_policy(profile: Profile) -> DynamicPolicy | None:
    """EAGLE-2's policy at its best setting; None: decode plainly."""
    return profile.best.policy if profile.best else None


def drawn_policy(profile: Profile) -> DynamicPolicy | None:
    """The policy of the fastest tree of drawn tokens; None: there is none that pays."""
    return profile.drawn[0].policy if profile.drawn else None


def sequoia_policy(profile: Profile) -> StaticPolicy | None:
    """The best fixed tree; None: decode plainly."""
    return StaticPolicy(profile.template) if profile.template else None


def check_policies(profile: Profile) -> None:
    """Make everything that can be planned with: what is wrong shows when a profile is read, not in an answer.

    Raises:
        InvalidInputError: numbers that no policy can be made of.
    """
    try:
        for make in (budgeted_policy, dynamic_policy, drawn_policy, sequoia_policy, ngram_drafter, fastest_way):
            make(profile)
    except InvalidInputError:
        raise
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise InvalidInputError(f"not a profile: {error!r}") from None
