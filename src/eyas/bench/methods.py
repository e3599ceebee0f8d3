"""What is measured side by side: ways to answer that a bench can play one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from eyas.completion import Completion, collect
from eyas.errors import InvalidInputError
from eyas.generate import Session, Step, generate
from eyas.plan import CHOICES, PLAIN, DraftPlan, Planner
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
METHODS = (BASELINE, *CHOICES, *ABLATIONS)
"""Each but the baseline may have ``GRAFT`` behind its name."""

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
                params=self.params,
                stop=stop,
                tokenizer=self.tokenizer,
                rng=rng,
            )
            return collect(steps, len(prompt), watch)

        return answer


def parse_methods(names: str) -> list[str]:
    """Names from a list like "none,chain,dynamic".

    Raises:
        InvalidInputError: an unknown or repeated name, or none at all.
    """
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if not chosen:
        raise InvalidInputError(f"no method given; choose from {', '.join(METHODS)}")
    for name in chosen:
        if name not in METHODS and (name == BASELINE + GRAFT or name.removesuffix(GRAFT) not in METHODS):
            raise InvalidInputError(
                f"unknown method {name!r}; choose from {', '.join(METHODS)}, each but {BASELINE} also with {GRAFT}"
            )
        if chosen.count(name) > 1:
            raise InvalidInputError(f"method {name!r} is named twice")
    return chosen


def method_plan(name: str, planner: Planner) -> DraftPlan:
    """How a method drafts.

    Raises:
        InvalidInputError: a method that needs a profile where there is none.
    """
    base = name.removesuffix(GRAFT)
    if base not in ABLATIONS:
        return planner.plan(name)
    plan = planner.plan("dynamic" + name[len(base) :])
    assert isinstance(plan.policy, DynamicPolicy)
    return replace(plan, name=name, policy=replace(plan.policy, **ABLATIONS[base]))
