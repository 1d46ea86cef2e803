"""Tests of the Triton kernels: in the interpreter on the CPU, compiled on a GPU.

The interpreter is chosen when triton is imported, so on the CPU a file of such tests runs again,
in a process of its own.
"""

import os
import subprocess
import sys

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"

kernels = pytest.mark.skipif(
    not INTERPRETED and DEVICE == "cpu",
    reason="no GPU; the interpreter runs these tests in test_in_the_interpreter",
)
# What matrix products of kernels are tested in: the interpreter multiplies the bits of bfloat16
# matrices as integers.
HALVES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]


def run_interpreted(file: str, *options: str) -> None:
    """The tests of the file in the interpreter, where the kernels do not run already."""
    pytest.importorskip("triton")
    if INTERPRETED or DEVICE == "cuda":
        pytest.skip("the tests of this file run directly")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "passed" in done.stdout


# --- what of the kernels' rounding is not the tests' own ---


def truncated(dtype: torch.dtype) -> float:
    """How far a gradient's one rounding is off, in units in its last place: the interpreter cuts
    to bfloat16 instead of rounding."""
    return 1.0 if INTERPRETED and dtype == torch.bfloat16 else 0.5


def rounded_twice(allowed, dtype: torch.dtype):
    """What passes where gradients come of blocks of logits: that of every product is rounded to
    half precision, to bfloat16 on a GPU alone, before the sum is."""
    if dtype != torch.float16 and (DEVICE != "cuda" or dtype != torch.bfloat16):
        return allowed
    unit = torch.finfo(dtype).eps
    return allowed._replace(grads=[share + unit for share in allowed.grads])
