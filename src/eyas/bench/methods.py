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
from eyas.profile import GRAFT
from eyas.sampling import SamplingParams
from eyas.stopping import StopParams
from eyas.targets.base import Target
from eyas.text import TextTokenizer

BASELINE = "none"
"""Plain decoding by our own loop: what speed-ups are measured against."""

REFERENCE = "transformers"
"""transformers' own ``generate``, see ``eyas.bench.reference``."""

ABLATIONS: dict[str, dict[str, Any]] = {
    "dynamic-no-value": {"value": False},
    "dynamic-no-rerank": {"rerank": False},
    "dynamic-neither": {"value": False, "rerank": False},
}
LIKELIEST = "+likeliest"
"""Behind a method's name: sampled answers, too, propose the drafter's likeliest tokens instead of drawing them."""

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
    """A method's name in parts: ``base``, ``base@m`` with its own num_draft_tokens, either with ``GRAFT`` or
    ``LIKELIEST`` behind it."""

    base: str
    num_draft_tokens: int | None = None
    graft: bool = False
    likeliest: bool = False

    @classmethod
    def parse(cls, name: str) -> MethodName:
        """Take a name apart.

        Raises:
            InvalidInputError: no such method, or a budget that makes no sense.
        """
        stem = name.removesuffix(GRAFT).removesuffix(LIKELIEST)
        base, at, budget = stem.partition("@")
        if base not in METHODS or (at and not budget.isdecimal()) or (base == BASELINE and base != name):
            raise InvalidInputError(
                f"unknown method {name!r}; choose from {', '.join(METHODS)}, each but {BASELINE} also with "
                f"num_draft_tokens of its own (dynamic@20), with {GRAFT} or with {LIKELIEST}"
            )
        if at:
            DraftSettings(num_draft_tokens=int(budget))  # told before anything is loaded
        return cls(base, int(budget) if at else None, name.endswith(GRAFT), LIKELIEST in name)

    @property
    def policy(self) -> str:
        """The plan it builds on, see ``eyas.plan.Planner``."""
        policy = "dynamic" if self.base in ABLATIONS else self.base
        return policy + GRAFT if self.graft else policy


def parse_methods(names: str) -> list[str]:
    """Names from a list like "none,chain,dynamic,dynamic@20".

    Raises:
        InvalidInputError: an unknown or repeated name, or none at all.
    """
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if not chosen:
        raise InvalidInputError(f"no method given; choose from {', '.join(METHODS)}")
    for name in chosen:
        MethodName.parse(name)
        if chosen.count(name) > 1:
            raise InvalidInputError(f"method {name!r} is named twice")
    return chosen


def method_plan(name: str, planner: Planner) -> DraftPlan:
    """How a method drafts; ``@m`` is the same as ``num_draft_tokens`` in the planner's settings.

    Raises:
        InvalidInputError: a method that needs a profile where there is none, or a budget that makes no sense.
    """
    method = MethodName.parse(name)
    if method.num_draft_tokens is not None:
        planner = replace(planner, settings=replace(planner.settings, num_draft_tokens=method.num_draft_tokens))
    if method.likeliest:
        planner = replace(planner, settings=replace(planner.settings, draw=False))
    plan = planner.plan(method.policy)
    if method.base not in ABLATIONS:
        return plan
    assert isinstance(plan.policy, DynamicPolicy)
    return replace(plan, name=name, policy=replace(plan.policy, **ABLATIONS[method.base]))
