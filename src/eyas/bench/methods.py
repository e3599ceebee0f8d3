"""What is measured side by side: ways to answer that a bench can play one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from eyas.completion import Completion, collect
from eyas.errors import InvalidInputError
from eyas.generate import Session, Step, generate
from eyas.plan import CHOICES, PLAIN, DraftPlan, DraftSettings, Planner
from eyas.policies import DynamicPolicy
from eyas.sampling import SamplingParams
from eyas.stopping import StopParams
from eyas.targets.base import Target
from eyas.text import TextTokenizer
from eyas.way import Way

BASELINE = "none"
"""Plain decoding by our own loop: what speed-ups are measured against."""

REFERENCE = "transformers"
"""transformers' own ``generate``, see ``eyas.bench.reference``."""

ABLATIONS: dict[str, dict[str, Any]] = {
    "dynamic-no-value": {"value": False},
    "dynamic-no-rerank": {"rerank": False},
    "dynamic-neither": {"value": False, "rerank": False},
}
METHODS = (BASELINE, *CHOICES, *ABLATIONS)
"""Variants of them: see ``MethodName``."""

Watch = Callable[[Step], bool]
"""Called with each step; True abandons the answer."""

Answer = Callable[[Sequence[int], StopParams, np.random.Generator, Watch], Completion]
"""(prompt ids, when to stop, randomness, watch) -> the answer, in one conversation from turn to turn."""


class Method(Protocol):
    """A way to answer."""

    @property
    def name(self) -> str: ...

    def start(self) -> Answer:
        """A new conversation with nothing in its caches."""
        ...


@dataclass(frozen=True)
class EyasMethod:
    """Our own loop with one plan."""

    name: str
    target: Target
    tokenizer: TextTokenizer
    params: SamplingParams
    plan: DraftPlan = PLAIN

    def start(self) -> Answer:
        session = Session(self.target, self.plan.drafter)

        def answer(prompt: Sequence[int], stop: StopParams, rng: np.random.Generator, watch: Watch) -> Completion:
            steps = generate(
                session,
                prompt,
                policy=self.plan.policy,
                gate=self.plan.gate,
                draw=self.plan.draw,
                params=self.params,
                stop=stop,
                tokenizer=self.tokenizer,
                rng=rng,
            )
            return collect(steps, len(prompt), watch)

        return answer


@dataclass(frozen=True)
class MethodName:
    """A method's name in parts. ``str`` prints it: a way to draft whose policy may have a budget, ``dynamic@20+graft``.

    Attributes:
        way: how it drafts; its policy is one of ``METHODS``.
        num_draft_tokens: of its own; None: that of the planner's settings.
    """

    way: Way
    num_draft_tokens: int | None = None

    def __str__(self) -> str:
        budget = "" if self.num_draft_tokens is None else f"@{self.num_draft_tokens}"
        return str(replace(self.way, policy=f"{self.way.policy}{budget}"))

    @classmethod
    def parse(cls, name: str) -> MethodName:
        """Take a name apart.

        Raises:
            InvalidInputError: no such method, or a budget that makes no sense.
        """
        unknown = InvalidInputError(
            f"unknown method {name!r}; choose from {', '.join(METHODS)}, each but {BASELINE} also with "
            f"num_draft_tokens of its own (dynamic@20), as {Way('dynamic', graft=True)} or {Way('dynamic', draw=False)}"
        )
        try:
            named = Way.parse(name)
            policy, at, budget = named.policy.partition("@")
            way = replace(named, policy=policy)
        except InvalidInputError:
            raise unknown from None
        if policy not in METHODS or way.draw or (at and (not way.drafts or not budget.isdecimal())):
            raise unknown
        if at:
            DraftSettings(num_draft_tokens=int(budget))  # told before anything is loaded
        return cls(way, int(budget) if at else None)

    @property
    def planned(self) -> Way:
        """The way it builds on, see ``eyas.plan.Planner``."""
        return replace(self.way, policy="dynamic") if self.way.policy in ABLATIONS else self.way


def parse_methods(names: str) -> list[MethodName]:
    """Names from a list like "none,chain,dynamic,dynamic@20".

    Raises:
        InvalidInputError: an unknown or repeated name, or none at all.
    """
    chosen = [MethodName.parse(name.strip()) for name in names.split(",") if name.strip()]
    if not chosen:
        raise InvalidInputError(f"no method given; choose from {', '.join(METHODS)}")
    for name in chosen:
        if chosen.count(name) > 1:
            raise InvalidInputError(f"method '{name}' is named twice")
    return chosen


def method_plan(method: MethodName, planner: Planner) -> DraftPlan:
    """How a method drafts; ``@m`` is the same as ``num_draft_tokens`` in the planner's settings.

    Raises:
        InvalidInputError: a method that needs a profile where there is none, or a budget that makes no sense.
    """
    if method.num_draft_tokens is not None:
        planner = replace(planner, settings=replace(planner.settings, num_draft_tokens=method.num_draft_tokens))
    plan = planner.plan(method.planned)
    if method.way.policy not in ABLATIONS:
        return plan
    assert isinstance(plan.policy, DynamicPolicy)
    return replace(plan, way=method.way, policy=replace(plan.policy, **ABLATIONS[method.way.policy]))
