"""Tree policies: which nodes a drafter expands and which the target verifies."""

from __future__ import annotations

from eyas.errors import InvalidInputError
from eyas.policies.base import Candidates, TreePolicy, grow_tree
from eyas.policies.dynamic import DynamicPolicy
from eyas.policies.static import StaticPolicy

__all__ = ["POLICIES", "Candidates", "DynamicPolicy", "StaticPolicy", "TreePolicy", "grow_tree", "make_policy"]

POLICIES = ("dynamic", "static", "chain")


def make_policy(name: str, *, num_steps: int, topk: int, num_draft_tokens: int) -> TreePolicy:
    """The policy called ``name`` under one common budget.

    A static tree is EAGLE-1's, cut to the budget; a chain is as long as ``num_steps`` and the budget allow.

    Raises:
        InvalidInputError: an unknown name or a setting below 1.
    """
    dynamic = DynamicPolicy(num_steps, topk, num_draft_tokens)  # checks the numbers for all three
    if name == "dynamic":
        return dynamic
    if name == "static":
        return StaticPolicy.eagle1(num_draft_tokens)
    if name == "chain":
        return StaticPolicy.chain(min(num_steps, num_draft_tokens))
    raise InvalidInputError(f"unknown policy {name!r}; choose one of {', '.join(POLICIES)}")
