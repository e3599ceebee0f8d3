"""One cycle as plain data for drawing: every candidate with what became of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp
from typing import Literal

import numpy as np

from eyas.errors import InvalidInputError
from eyas.generate import Cycle, Step

NextKind = Literal["recovered", "bonus", "plain"]


@dataclass(frozen=True)
class NodeView:
    """A candidate of a draft tree.

    Attributes:
        parent: index into the cycle's nodes; -1 for the root.
        depth: 0 for the root.
        token: its id.
        text: its text, whitespace and control characters made visible.
        confidence: the drafter's probability given the parent; 1 for the root.
        value: path value, the product of confidences from the root down.
        expanded: the drafter was run on it.
        kept: it was sent to the target (always so for the root).
        accepted: it became part of the answer; the root already is.
    """

    parent: int
    depth: int
    token: int
    text: str
    confidence: float
    value: float
    expanded: bool
    kept: bool
    accepted: bool


@dataclass(frozen=True)
class CycleView:
    """A cycle.

    Attributes:
        number: 1 for the first cycle of an answer.
        nodes: root first, parents before children, siblings best first.
        next_text: the token the target added itself, as visible text; None where the answer ended before it.
        next_kind: "recovered" after a rejection, "bonus" after a fully accepted path, "plain" without a draft.
        text: what the cycle added to the answer.
    """

    number: int
    nodes: tuple[NodeView, ...]
    next_text: str | None
    next_kind: NextKind
    text: str

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node."""
        lists: list[list[int]] = [[] for _ in self.nodes]
        for index, node in enumerate(self.nodes):
            if node.parent >= 0:
                lists[node.parent].append(index)
        return tuple(map(tuple, lists))

    @property
    def num_candidates(self) -> int:
        """Nodes generated, root excluded."""
        return len(self.nodes) - 1

    @property
    def num_kept(self) -> int:
        """Nodes verified, root excluded."""
        return sum(node.kept for node in self.nodes) - 1

    @property
    def num_accepted(self) -> int:
        """Draft tokens that became part of the answer."""
        return sum(node.accepted for node in self.nodes) - 1

    @property
    def last_accepted(self) -> int:
        """Index of the deepest accepted node, below which the target's own token hangs."""
        return max(index for index, node in enumerate(self.nodes) if node.accepted)

    def without_dropped(self) -> CycleView:
        """The verified tree alone."""
        kept = [index for index, node in enumerate(self.nodes) if node.kept]
        position = {old: new for new, old in enumerate(kept)} | {-1: -1}
        nodes = tuple(replace(self.nodes[index], parent=position[self.nodes[index].parent]) for index in kept)
        return replace(self, nodes=nodes)

    @property
    def summary(self) -> str:
        """One line about it."""
        line = f"cycle {self.number}: {self.num_kept} draft tokens verified, {self.num_accepted} accepted"
        return line if self.next_text is None else f"{line}, + {visible(self.next_text)} ({self.next_kind})"


def view_cycle(number: int, step: Step, token_text: Callable[[int], str]) -> CycleView:
    """What happened in a step.

    Args:
        number: the cycle's number, for captions.
        step: a step with a cycle; the prefill has none.
        token_text: id -> text.

    Raises:
        InvalidInputError: the step is a prefill.
    """
    cycle = step.cycle
    if cycle is None:
        raise InvalidInputError("a prefill has no draft tree; pass a later step")
    accepted = cycle.acceptance.path[: len(step.tokens) + 1]  # a stop may have cut the block
    whole = len(step.tokens) == len(cycle.acceptance.path)
    kind: NextKind = "plain" if len(cycle.tree) == 1 else "recovered" if cycle.acceptance.recovered else "bonus"
    return CycleView(
        number=number,
        nodes=_all_nodes(cycle, accepted, token_text) or _tree_nodes(cycle, accepted, token_text),
        next_text=token_text(cycle.acceptance.next_token) if whole else None,
        next_kind=kind,
        text=step.text,
    )


def _all_nodes(cycle: Cycle, accepted: tuple[int, ...], token_text: Callable[[int], str]) -> tuple[NodeView, ...]:
    """Every candidate; empty where the drafter did not show them to the policy."""
    candidates = cycle.trace.candidates
    if candidates is None:
        return ()
    real = np.flatnonzero(np.isfinite(candidates.log_values))  # the others only fill up a level
    kept = [0, *cycle.trace.kept[np.isfinite(candidates.log_values[cycle.trace.kept])].tolist()]
    if len(kept) != len(cycle.tree):
        return ()
    position = {old: new for new, old in enumerate(real.tolist())} | {-1: -1}
    expanded, verified, taken = set(cycle.trace.expanded), set(kept), {kept[node] for node in accepted}
    depths = np.repeat(np.arange(len(candidates.levels) - 1), np.diff(candidates.levels))
    return tuple(
        NodeView(
            parent=position[int(candidates.parents[index])],
            depth=int(depths[index]),
            token=int(candidates.tokens[index]),
            text=visible(token_text(int(candidates.tokens[index]))),
            confidence=exp(candidates.log_probs[index]),
            value=exp(candidates.log_values[index]),
            expanded=index in expanded,
            kept=index in verified,
            accepted=index in taken,
        )
        for index in real.tolist()
    )


def _tree_nodes(cycle: Cycle, accepted: tuple[int, ...], token_text: Callable[[int], str]) -> tuple[NodeView, ...]:
    """The verified tree alone; a node counts as expanded if it has children."""
    tree = cycle.tree
    return tuple(
        NodeView(
            parent=int(parent),
            depth=int(tree.depths[node]),
            token=int(tree.tokens[node]),
            text=visible(token_text(int(tree.tokens[node]))),
            confidence=exp(tree.log_values[node] - (tree.log_values[parent] if parent >= 0 else 0)),
            value=exp(tree.log_values[node]),
            expanded=bool(tree.children[node]),
            kept=True,
            accepted=node in accepted,
        )
        for node, parent in enumerate(tree.parents.tolist())
    )


_VISIBLE = {" ": "·", "\n": "⏎", "\t": "⇥"}


def visible(text: str) -> str:
    """Text with its whitespace shown and anything unprintable spelled out."""
    shown = (
        _VISIBLE.get(char) or (char if char.isprintable() else char.encode("unicode_escape").decode()) for char in text
    )
    return "".join(shown)


def short(probability: float) -> str:
    """A probability in few characters: two decimals, or one significant digit below a tenth."""
    return f"{probability:.2f}" if probability >= 0.095 else f"{probability:.1g}"
