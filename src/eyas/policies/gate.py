"""Never slower: a request that does not gain by drafting stops drafting for a while.

A policy knows what drafting brings on average; a request may be an exception. So each keeps a purse of time. What
drafting gains over plain decoding goes in, what it loses comes out, both by the cost table: the clock is never asked,
and the same request always decides the same. An empty purse means plain decoding until a small allowance per token
has filled it enough for another try.

A request of n tokens thus costs at most ``(1 + allowance) * n + start`` plain passes and one drafted cycle's loss, by
the table, whatever the drafter guesses. What it gained earlier counts up to ``limit`` only: text that drafts
badly is noticed soon, however well it went before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eyas.costs import CostTable
from eyas.errors import InvalidInputError


@dataclass(frozen=True)
class Gate:
    """When a request may draft. All amounts are in plain passes.

    Attributes:
        costs: what cycles cost; only their ratios matter.
        start: what a request may lose at first.
        allowance: what it may lose more with every token.
        limit: what it can save up.

    Raises:
        InvalidInputError: amounts that are negative, or a limit that holds nothing.
    """

    costs: CostTable
    start: float = 1.0
    allowance: float = 0.03
    limit: float = 4.0

    def __post_init__(self) -> None:
        if self.start < 0 or self.allowance < 0 or not self.limit > 0:
            raise InvalidInputError(
                f"a gate's amounts are plain passes >= 0 and its limit above 0, got start {self.start}, allowance "
                f"{self.allowance}, limit {self.limit}"
            )

    def new_purse(self) -> Purse:
        return Purse(self)


class Purse:
    """One request's account.

    Attributes:
        balance: plain passes that drafting may still lose.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.balance = min(gate.start, gate.limit)

    @property
    def drafts(self) -> bool:
        """Whether the next cycle may draft."""
        return self.balance > 0

    def book(self, tokens: int, expanded: Sequence[int], num_draft_tokens: int) -> None:
        """Account for a cycle.

        Args:
            tokens: committed.
            expanded: nodes the drafter was run on per level, none where nothing was drafted.
            num_draft_tokens: nodes verified, root excluded.
        """
        gate = self._gate
        gain = tokens - gate.costs.cycle(expanded, num_draft_tokens) / gate.costs.plain_ms
        self.balance = min(gate.limit, self.balance + gain + gate.allowance * tokens)
