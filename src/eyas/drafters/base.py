"""The seam to whatever guesses: an EAGLE head, a small model, an n-gram index.

A drafter holds weights and makes sessions; a session holds one request's state (the drafter's own K/V). How a
tree grows is not the drafter's business: a session scores children of nodes, a policy decides which
(``eyas.policies.base.grow_tree`` joins the two).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from eyas.draws import Draws
from eyas.errors import InvalidInputError
from eyas.policies.base import TreePolicy
from eyas.targets.base import Features
from eyas.tree import DraftTree


class DraftSession(Protocol):
    """One request's drafter state."""

    @property
    def length(self) -> int:
        """Committed tokens taken in so far: pairs (feature of position i, token at i + 1)."""
        ...

    def commit(self, tokens: Sequence[int], features: Features) -> None:
        """Take in n committed tokens and the n target features *before* them.

        ``tokens[i]`` is the token that follows the position whose feature is ``features[i]``. This pairing is the
        one place where EAGLE's shift by one lives. Guessed state of the last cycle is forgotten: only true
        features enter the drafter's K/V.
        """
        ...

    def propose(self, root: int, policy: TreePolicy, max_depth: int) -> DraftTree:
        """Grow a tree below ``root`` (the last committed token), at most ``max_depth`` levels deep.

        Raises:
            InvalidInputError: another root.
        """
        ...

    def truncate(self, length: int) -> None:
        """Forget all but the first ``length`` pairs."""
        ...


@runtime_checkable
class WholeTextSession(DraftSession, Protocol):
    """A session that wants the prompt's first token too, which no pair brings: nothing precedes it."""

    def begin(self, token: int) -> None:
        """The text begins with ``token``; called before anything else is committed."""
        ...


@runtime_checkable
class DrawingSession(DraftSession, Protocol):
    """A session that can also draw children from the drafter's distribution instead of taking the likeliest."""

    def propose_drawn(self, root: int, policy: TreePolicy, max_depth: int, draws: Draws) -> DraftTree:
        """As ``propose``, with children drawn."""
        ...


class Drafter(Protocol):
    """Weights that can guess for one target."""

    @property
    def name(self) -> str: ...

    @property
    def feature_levels(self) -> int:
        """Feature levels it needs from the target (0: none, 1: EAGLE-1/2, 3: EAGLE-3)."""
        ...

    def new_session(self) -> DraftSession: ...


def begin(session: DraftSession, token: int) -> None:
    """Tell a fresh session the prompt's first token, if it wants to know."""
    if isinstance(session, WholeTextSession):
        session.begin(token)


def check_root(root: int, tokens: Sequence[int]) -> None:
    """Refuse a root other than the last of the committed ``tokens``, of which a session may know none.

    Raises:
        InvalidInputError: it is another.
    """
    if tokens and tokens[-1] != root:
        raise InvalidInputError(f"the tree's root is token {root}, but the last committed one is {tokens[-1]}")
