"""Ways to draft, and the one place that reads and prints them."""

from __future__ import annotations

import pytest

from eyas.errors import InvalidInputError
from eyas.way import PLAINLY, Way

TEXTS = {
    "none": PLAINLY,
    "dynamic": Way("dynamic"),
    "budgeted+graft": Way("budgeted", graft=True),
    "dynamic+drawn": Way("dynamic", draw=True),
    "dynamic+likeliest": Way("dynamic", draw=False),
    "sequoia+likeliest+graft": Way("sequoia", graft=True, draw=False),
}


@pytest.mark.parametrize(("text", "way"), TEXTS.items())
def test_what_is_printed_can_be_read(text: str, way: Way) -> None:
    assert str(way) == text
    assert Way.parse(text) == way


@pytest.mark.parametrize(
    "text",
    [
        "dynamic+x",
        "dynamic+",
        "dynamic+graft+graft",
        "dynamic+graft+likeliest",
        "dynamic+drawn+likeliest",
        "dynamic+drawn+graft",
        "none+graft",
        "none+drawn",
        "none+likeliest",
    ],
)
def test_no_ways_to_draft(text: str) -> None:
    with pytest.raises(InvalidInputError):
        Way.parse(text)


def test_only_plain_decoding_drafts_nothing() -> None:
    assert [text for text, way in TEXTS.items() if not way.drafts] == ["none"]


def test_recordings_know_of_trees_that_are_neither_grafted_nor_drawn() -> None:
    assert [text for text, way in TEXTS.items() if way.bare] == ["none", "dynamic", "dynamic+likeliest"]
