"""Eyas itself."""

from __future__ import annotations

from typing import Any

from eyas.drafters.base import Drafter
from eyas.drafters.grafted import GraftedDrafter
from eyas.drafters.ngram import NgramDrafter
from eyas.environment import portable, versions
from eyas.errors import InvalidInputError
from eyas.generate import Session, generate
from eyas.loading import LoadedTarget, feature_levels, load_drafter, load_target
from eyas.plan import profile_key
from eyas.policies import DynamicPolicy, TreePolicy
from eyas.profile_files import load_profile
from eyas.profile_policies import budgeted_policy
from eyas.stopping import StopParams
from eyas.tuner import tune
from peers.protocol import Answer, Engine, Request, Stopwatch

DRAFTERS = ("none", "head", "ngram", "head+ngram")


def load(settings: dict[str, Any]) -> Engine:
    """Settings beyond the common ones: ``dtype``, ``drafter`` (one of ``DRAFTERS``), ``head`` (a directory, or the one
    shipped), ``policy`` ({"num_steps", "topk", "num_draft_tokens"}, or "budgeted": as the machine's profile says, tuned
    on ``tune_prompts`` where there is none)."""
    head = settings.get("head", "default")
    loaded = load_target(
        settings["model"],
        engine="native",
        dtype=settings["dtype"],
        threads=settings["threads"],
        feature_levels=feature_levels(head if "head" in settings["drafter"] else None),
    )
    drafter = make_drafter(settings["drafter"], head, loaded)
    policy = make_policy(settings, loaded, drafter) if drafter is not None else None
    return Eyas(loaded, drafter, policy)


def make_drafter(name: str, head: str, loaded: LoadedTarget) -> Drafter | None:
    """The drafter called ``name``."""
    if name not in DRAFTERS:
        raise InvalidInputError(f"unknown drafter {name!r}; choose one of {', '.join(DRAFTERS)}")
    if name == "none":
        return None
    if name == "ngram":
        return NgramDrafter()
    drafter = load_drafter(head, loaded)
    assert drafter is not None
    return GraftedDrafter(drafter) if name == "head+ngram" else drafter


def make_policy(settings: dict[str, Any], loaded: LoadedTarget, drafter: Drafter) -> TreePolicy:
    """The policy that the settings ask for."""
    policy = settings["policy"]
    if policy != "budgeted":
        return DynamicPolicy(**policy)
    ungrafted = drafter.head if isinstance(drafter, GraftedDrafter) else drafter
    name = "ngram" if settings["drafter"] == "ngram" else settings.get("head", "default")
    key = profile_key(name, loaded, greedy=True, threads=settings["threads"])
    profile = load_profile(key) or tune(loaded.target, ungrafted, settings["tune_prompts"], key)
    return budgeted_policy(profile)


class Eyas:
    """One session per request."""

    def __init__(self, loaded: LoadedTarget, drafter: Drafter | None, policy: TreePolicy | None) -> None:
        self._target = loaded.target
        self._drafter = drafter
        self._policy = policy

    def facts(self) -> dict[str, Any]:
        drafter = portable(self._drafter.name) if self._drafter is not None else None
        return {**versions(), "dtype": self._target.info.dtype, "drafter": drafter, "policy": repr(self._policy)[:200]}

    def answer(self, request: Request) -> Answer:
        stop = StopParams(max_tokens=request.tokens, stop_token_ids=request.stop, ignore_eos=True)
        watch = Stopwatch()
        tokens: list[int] = []
        session = Session(self._target, self._drafter)
        for step in generate(session, request.prompt, policy=self._policy, stop=stop):
            watch.token()
            tokens += step.tokens
        return watch.answer(tokens)
