"""Many texts decoded in shared target passes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

import numpy as np

from eyas.targets.base import Target, TargetCache, TargetOutput
from eyas.tree import DraftTree

Result = TypeVar("Result")
Job = Generator[int, TargetOutput, Result]
"""One text in the making: yields the token that its cache should take in next, is sent what the target says to it,
and returns when it is done. It prefills its cache itself."""


def decode_together(
    target: Target, jobs: Iterator[Callable[[TargetCache], Job[Result]]], *, slots: int, capacity: int
) -> Iterator[list[Result]]:
    """Run jobs side by side, a new one as soon as another has ended.

    Args:
        target: every running job has one row in each of its passes.
        jobs: each is started with an empty cache; taken from the iterator when a slot is free.
        slots: how many run at once.
        capacity: tokens that a cache should hold.

    Yields:
        After every pass, and after the last one, the results of the jobs that have ended since.
    """
    idle = [target.new_cache(capacity) for _ in range(slots)][::-1]
    active: list[tuple[TargetCache, Job[Result], int]] = []
    ended: list[Result] = []

    def proceed(cache: TargetCache, job: Job[Result], output: TargetOutput | None) -> None:
        try:
            token = next(job) if output is None else job.send(output)
        except StopIteration as stop:
            ended.append(stop.value)
            cache.truncate(0)
            idle.append(cache)
        else:
            active.append((cache, job, token))

    while True:
        while idle and (start := next(jobs, None)) is not None:
            cache = idle.pop()
            proceed(cache, start(cache), None)
        if not active:
            break
        stepped, active = active, []
        outputs = target.verify([(cache, DraftTree.root_only(token)) for cache, _, token in stepped])
        for (cache, job, _), output in zip(stepped, outputs, strict=True):
            cache.commit([0])
            proceed(cache, job, output)
        yield ended
        ended = []
    yield ended


def sampled(output: TargetOutput, temperature: float, rng: np.random.Generator) -> int:
    """A token drawn from the last row with logits; the likeliest one at temperature 0."""
    if temperature == 0:
        return int(output.argmax()[-1])
    logits = output.row(-1)
    cumulative = np.exp((logits - logits.max()) / temperature).cumsum(dtype=np.float64)
    return int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
