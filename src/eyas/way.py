"""How answers are drafted, in a word: ``dynamic``, ``budgeted+graft``, ``dynamic+drawn``."""

from __future__ import annotations

from dataclasses import dataclass

from eyas.errors import InvalidInputError

_DRAW = {True: "drawn", False: "likeliest"}
_GRAFT = "graft"


@dataclass(frozen=True)
class Way:
    """A way to draft. ``str`` prints it, ``parse`` reads it; nothing else knows how it is written.

    Attributes:
        policy: its name; "none" is plain decoding.
        graft: whether n-grams join the drafter's tree.
        draw: whether sampled answers draw their draft tokens from the drafter's distribution or take its likeliest;
            None where nothing is said about it. Of a policy as ``eyas tune`` measured it: the likeliest.

    Raises:
        InvalidInputError: what cannot go together.
    """

    policy: str
    graft: bool = False
    draw: bool | None = None

    def __post_init__(self) -> None:
        if not self.drafts and (self.graft or self.draw is not None):
            raise InvalidInputError("plain decoding has no tree to graft onto or to draw")
        if self.graft and self.draw:
            raise InvalidInputError("grafting cuts a tree down by what its tokens are, so none of them can be drawn")

    def __str__(self) -> str:
        draw = [] if self.draw is None else [_DRAW[self.draw]]
        return "+".join([self.policy, *draw, *([_GRAFT] if self.graft else [])])

    @classmethod
    def parse(cls, text: str) -> Way:
        """The inverse of ``str``. Which policies there are is for others to say.

        Raises:
            InvalidInputError: no way to draft.
        """
        policy, *words = text.split("+")
        draw = next((draw for draw, word in _DRAW.items() if word in words), None)
        way = cls(policy, _GRAFT in words, draw)
        if str(way) != text:
            raise InvalidInputError(f"{text!r} is no way to draft; one is written like budgeted+graft or dynamic+drawn")
        return way

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted at all."""
        return self.policy != "none"

    @property
    def bare(self) -> bool:
        """Neither grafted nor drawn: all that recorded drafts and cost tables know about."""
        return not self.graft and not self.draw


PLAINLY = Way("none")
"""Plain decoding."""
