"""Muon against PyTorch's, which multiplies in bfloat16, and against what it promises."""

import pytest
import torch
from torch import nn

import eyas.train.muon
from eyas.train.muon import Muon, orthogonalised

SHAPES = [(96, 40), (40, 96), (64, 64), (1, 9), (9, 1)]
LONG = [(96, 40), (40, 96), (1, 9), (9, 1)]  # a square of noise has a singular value near zero, which stays small


@pytest.fixture(params=[False, True], ids=["float32", "bfloat16"])
def in_bfloat16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(eyas.train.muon, "has_fast_bfloat16", lambda device: request.param)
    return bool(request.param)


def normal(shape: tuple[int, int], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", LONG)
def test_singular_values_come_near_one_and_vectors_stay(shape: tuple[int, int], in_bfloat16: bool) -> None:
    matrix = normal(shape, 1)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    in_its_own_axes = u.T @ orthogonalised(matrix).float() @ v.T
    size = in_its_own_axes.diagonal()
    assert (size > 0.65).all() and (size < 1.25).all()
    assert (in_its_own_axes - torch.diag(size)).abs().max() < (5e-2 if in_bfloat16 else 1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_are_those_of_pytorch(shape: tuple[int, int], in_bfloat16: bool) -> None:
    start = normal(shape, 2)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    mine = Muon([ours], lr=0.05, momentum=0.9, weight_decay=0.3)
    reference = torch.optim.Muon([theirs], lr=0.05, momentum=0.9, weight_decay=0.3, adjust_lr_fn="original")
    for seed in range(4):
        ours.grad, theirs.grad = normal(shape, seed), normal(shape, seed)
        mine.step()
        reference.step()
        apart = (ours - theirs).norm() / (theirs - start).norm()
        assert apart < (1e-5 if in_bfloat16 else 2e-2)


def test_a_matrix_without_gradient_or_with_one_of_zeros_stays() -> None:
    still, zero = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2, 3))
    zero.grad = torch.zeros(2, 3)
    Muon([still, zero], lr=0.1, momentum=0.9, weight_decay=0.0).step()
    assert torch.equal(still, torch.ones(2, 3)) and torch.equal(zero, torch.ones(2, 3))
