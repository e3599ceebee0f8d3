"""Where two answers part, and by how little."""

from __future__ import annotations

import pytest

from eyas.completion import Divergence, divergence
from eyas.targets.hf import HFTarget
from eyas.tree import DraftTree
from support.tiny import tiny_llama

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return HFTarget(tiny_llama(), "tiny")


def test_the_gap_is_that_of_the_two_tokens_after_the_common_part(target: HFTarget) -> None:
    cache = target.new_cache()
    target.prefill(cache, [*PROMPT, 9])
    (output,) = target.verify([(cache, DraftTree.root_only(2))])
    logits = output.row(0)
    found = divergence(target, PROMPT, [9, 2, 6, 5], [9, 2, 7])
    assert found is not None
    assert found.token == 2
    assert found.gap == pytest.approx(abs(float(logits[6]) - float(logits[7])), abs=1e-4)


def test_the_same_answers_do_not_part(target: HFTarget) -> None:
    assert divergence(target, PROMPT, [9, 2], [9, 2]) is None


def test_an_answer_that_merely_ends_earlier_has_no_gap(target: HFTarget) -> None:
    assert divergence(target, PROMPT, [9, 2], [9, 2, 6]) == Divergence(2, None)
