"""The draft tree: everything derived from tokens and parents, against trees drawn by hand and naive walks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.errors import EyasError, InvalidInputError
from eyas.tree import DraftTree

T, F = True, False


def make(parents: list[int], tokens: list[int] | None = None) -> DraftTree:
    n = len(parents)
    return DraftTree(np.array(tokens or range(n), np.int64), np.array(parents, np.int64), np.zeros(n, np.float32))


@st.composite
def parent_lists(draw: st.DrawFn) -> list[int]:
    n = draw(st.integers(1, 40))
    return [-1] + [draw(st.integers(0, i - 1)) for i in range(1, n)]


def naive_path(parents: list[int], node: int) -> list[int]:
    """From the root down to ``node``, one parent at a time."""
    return [*(naive_path(parents, parents[node]) if parents[node] >= 0 else []), node]


def test_a_tree_drawn_by_hand() -> None:
    #         0
    #       / | \
    #      1  2  3
    #     / \    |
    #    4   5   6
    #        |
    #        7
    tree = make([-1, 0, 0, 0, 1, 1, 3, 5])
    assert tree.ancestor_mask.tolist() == [
        [T, F, F, F, F, F, F, F],
        [T, T, F, F, F, F, F, F],
        [T, F, T, F, F, F, F, F],
        [T, F, F, T, F, F, F, F],
        [T, T, F, F, T, F, F, F],
        [T, T, F, F, F, T, F, F],
        [T, F, F, T, F, F, T, F],
        [T, T, F, F, F, T, F, T],
    ]
    assert tree.depths.tolist() == [0, 1, 1, 1, 2, 2, 2, 3]
    assert tree.children == [[1, 2, 3], [4, 5], [], [6], [], [7], [], []]
    assert tree.path_to(7) == [0, 1, 5, 7]
    assert tree.path_to(6) == [0, 3, 6]
    assert tree.path_to(0) == [0]
    assert (len(tree), tree.num_draft_tokens, tree.is_chain()) == (8, 7, False)


def test_depth_first_numbering_is_a_tree_too() -> None:
    #    0 - 1 - 2
    #      \ 3 - 4
    tree = make([-1, 0, 1, 0, 3])
    assert tree.ancestor_mask.tolist() == [
        [T, F, F, F, F],
        [T, T, F, F, F],
        [T, T, T, F, F],
        [T, F, F, T, F],
        [T, F, F, T, T],
    ]
    assert tree.depths.tolist() == [0, 1, 2, 1, 2]
    assert tree.children == [[1, 3], [2], [], [4], []]


def test_a_chain_sees_everything_before_it() -> None:
    tree = DraftTree.chain([7, 8, 9, 7])
    assert tree.tokens.tolist() == [7, 8, 9, 7]
    assert tree.parents.tolist() == [-1, 0, 1, 2]
    assert tree.ancestor_mask.tolist() == [[T, F, F, F], [T, T, F, F], [T, T, T, F], [T, T, T, T]]
    assert tree.depths.tolist() == [0, 1, 2, 3]
    assert tree.is_chain()


def test_a_root_alone() -> None:
    tree = DraftTree.root_only(5)
    assert tree.tokens.tolist() == [5]
    assert tree.ancestor_mask.tolist() == [[T]]
    assert tree.depths.tolist() == [0]
    assert tree.children == [[]]
    assert (len(tree), tree.num_draft_tokens, tree.is_chain()) == (1, 0, True)


@given(parent_lists())
def test_everything_derived_equals_a_naive_walk(parents: list[int]) -> None:
    tree = make(parents)
    paths = [naive_path(parents, node) for node in range(len(parents))]
    for node, path in enumerate(paths):
        assert np.flatnonzero(tree.ancestor_mask[node]).tolist() == path
        assert tree.path_to(node) == path
        assert tree.depths[node] == len(path) - 1
        assert tree.children[node] == [child for child in range(len(parents)) if parents[child] == node]
    assert tree.is_chain() == (tree.depths.tolist() == list(range(len(parents))))
    # Rows see nothing behind themselves: a verifier may flatten the tree in node order.
    assert not np.triu(tree.ancestor_mask, 1).any()


def test_a_long_chain_takes_few_doublings_and_stays_right() -> None:
    n = 1000
    assert (make([*range(-1, n - 1)]).ancestor_mask == np.tri(n, dtype=bool)).all()


@pytest.mark.parametrize(
    "parents",
    [
        [0],  # the root has no parent
        [-2],
        [-1, -1],  # a second root
        [-1, 1],  # its own parent
        [-1, 2, 0],  # a parent that comes later
        [-1, 0, 5],  # a parent that does not exist
        [-1, 0, -3],
    ],
)
def test_bad_parents_are_refused(parents: list[int]) -> None:
    with pytest.raises(InvalidInputError, match="parents must start with -1") as caught:
        make(parents)
    assert str(parents) in str(caught.value)
    assert isinstance(caught.value, EyasError)


@pytest.mark.parametrize("lengths", [(0, 0, 0), (2, 1, 2), (1, 2, 2), (2, 2, 1)])
def test_arrays_of_different_lengths_are_refused(lengths: tuple[int, int, int]) -> None:
    tokens, parents, values = lengths
    with pytest.raises(InvalidInputError, match="of one length"):
        DraftTree(np.zeros(tokens, np.int64), np.arange(-1, parents - 1), np.zeros(values, np.float32))
