"""The processes that train one head together, and the little they tell each other.

Each takes its share of the rows of every batch. Sums over all of them make loss, gradients and metrics those of the
whole batch, so their number changes nothing but rounding. A single process talks to nobody.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TypeVar

import torch
from torch import Tensor, distributed

from eyas.device import usable_device
from eyas.errors import EyasError, InvalidInputError

T = TypeVar("T")

LAUNCHED = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Where launchers (accelerate, torchrun, mpirun) say how many processes they started."""


@dataclass(frozen=True)
class Processes:
    """One process among those of a run, by default the only one.

    Attributes:
        device: where this one computes.
        index, count: its number, from 0, and how many there are.
    """

    device: torch.device = field(default_factory=partial(torch.device, "cpu"))
    index: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the one that evaluates, writes and talks to the user."""
        return self.index == 0

    def share(self, rows: int) -> slice:
        """Which of a batch's rows are this process's; the first row for one that is left without (see ``idle``)."""
        return slice(0, 1) if self.idle(rows) else slice(self.index, None, self.count)

    def idle(self, rows: int) -> bool:
        """Whether a batch has no row for this process, as the last one of an epoch may."""
        return self.index >= rows

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise, over all processes."""
        if self.count == 1:
            return values
        total = values.detach().clone()
        distributed.all_reduce(total)
        return total

    def sum_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Each number's sum over all processes."""
        if self.count == 1:
            return list(numbers)
        return self.sum(torch.tensor(numbers, dtype=torch.float64, device=self.device)).tolist()

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """In place, over all processes."""
        if self.count == 1:
            return
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = self.sum(parameter.grad)

    def least(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Each number's minimum over all processes."""
        if self.count == 1:
            return tuple(numbers)
        least = torch.tensor(numbers, device=self.device)
        distributed.all_reduce(least, distributed.ReduceOp.MIN)
        return tuple(least.tolist())

    def from_first(self, make: Callable[[], T]) -> T:
        """What ``make`` gives in the first process, the only one that calls it; its EyasErrors reach all."""
        if self.count == 1:
            return make()
        made: list[T | EyasError | None] = [None]
        if self.first:
            try:
                made = [make()]
            except EyasError as error:
                made = [error]
        distributed.broadcast_object_list(made, device=self.device)
        if isinstance(made[0], EyasError):
            raise made[0]
        return made[0]  # type: ignore[return-value]

    def wait(self) -> None:
        """Until all have come here."""
        self.sum_numbers([0.0])


@contextmanager
def joined(device: str | None) -> Iterator[Processes]:
    """The place of this process among those that ``accelerate launch`` (or torchrun, or mpirun) started.

    Args:
        device: None takes a GPU where there is one. Of several processes each gets its own "cuda".

    Raises:
        InvalidInputError: one certain GPU for several processes, or a device that they cannot share work on.
    """
    started = max(int(os.environ.get(name, 1)) for name in LAUNCHED)
    if device is None:
        wants_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
        device = "cuda" if torch.cuda.is_available() and not wants_cpu else "cpu"
    if started == 1:
        yield Processes(usable_device(device))
        return
    if ":" in device:
        raise InvalidInputError(
            f"--device {device} is one device for {started} processes; with --device {device.split(':')[0]} "
            "each gets its own"
        )
    from accelerate import PartialState

    # Functions of this module have the group as a default argument, whatever group there is when it is first imported.
    # Making an optimiser imports it. Were that after the group is made, the group would outlive its destruction below,
    # and gloo's threads with it; one that still holds a tensor while Python shuts down aborts the process.
    import_module("torch.distributed.nn.functional")
    state = PartialState(cpu=device == "cpu")
    if state.num_processes != started or state.device.type != device:
        raise InvalidInputError(
            f"{started} processes were started for --device {device}, but this machine has {state.device.type} only"
        )
    try:
        yield Processes(state.device, state.process_index, state.num_processes)
    finally:
        state.destroy_process_group()
