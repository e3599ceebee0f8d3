"""What a generation did and how long each part took."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

PHASES = ("prefill", "draft", "policy", "verify", "accept", "commit")


class Stopwatch:
    """Splits running time into laps: each ``lap`` gives the seconds since the one before."""

    def __init__(self) -> None:
        self._last = perf_counter()

    def lap(self) -> float:
        now = perf_counter()
        seconds, self._last = now - self._last, now
        return seconds


@dataclass
class Stats:
    """Sums over the cycles of one request.

    Attributes:
        cycles: target passes after the prefill.
        cycle_tokens: tokens committed by cycles (the prefill's first token excluded).
        draft_tokens: draft tokens verified.
        accepted_tokens: draft tokens that became part of the answer.
        seconds: wall-clock seconds by phase.
    """

    cycles: int = 0
    cycle_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def add(self, seconds: dict[str, float]) -> None:
        """Add the seconds of one pass, by phase."""
        for phase, value in seconds.items():
            self.seconds[phase] += value

    @property
    def acceptance_length(self) -> float:
        """tau: committed tokens per target pass."""
        return self.cycle_tokens / self.cycles if self.cycles else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens over draft tokens."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def decode_seconds(self) -> float:
        """All phases but the prefill."""
        return sum(seconds for phase, seconds in self.seconds.items() if phase != "prefill")

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the cycles over the seconds of the cycles: the decoding rate, without the prefill."""
        return self.cycle_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The ``stats`` object of the JSON output."""
        return {
            "cycles": self.cycles,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
            "acceptance_length": self.acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_second": self.tokens_per_second,
            "seconds": dict(self.seconds),
        }
