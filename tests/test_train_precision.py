"""Numbers near zero while training."""

import subprocess
import sys

import torch

from eyas.train.precision import denormals_flushed

SMALL = """
import torch
from eyas.train.precision import denormals_flushed
torch.set_num_threads(2)
with denormals_flushed():
    print(int((torch.full((4_000_000,), 1e-30) * 1e-10).count_nonzero()))
"""


def test_denormals_are_zero_inside_and_what_they_were_outside() -> None:
    def product() -> float:
        return float(torch.tensor(1e-30) * 1e-10)

    before = product()
    with denormals_flushed():
        assert product() == 0.0
    assert product() == before > 0.0


def test_worker_threads_flush_them_too() -> None:
    ran = subprocess.run([sys.executable, "-c", SMALL], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "0"
