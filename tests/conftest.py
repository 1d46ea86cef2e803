"""Makes the helpers beside the tests importable wherever pytest is started; fixtures of several
files."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("factory", "trl_runs")

from interpreter import DEVICE  # noqa: E402

# The tensors here are small: threads would cost more than they bring.
torch.set_num_threads(1)


@pytest.fixture
def unwritten_is_nan(request):
    """New memory holds NaN (integers: their largest value) until it is written.

    Not where a test is about the GPU alone: syncs and graphs are those of torch's usual ways.
    """
    if request.node.get_closest_marker("gpu"):
        yield
        return
    # On a GPU some operations have no deterministic way: only their memory matters here.
    request.node.add_marker(pytest.mark.filterwarnings("ignore:.*deterministic"))
    torch.use_deterministic_algorithms(True, warn_only=DEVICE == "cuda")
    assert torch.empty(3, device=DEVICE).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def rows_are_gathered(request, monkeypatch):
    """In a vocabulary as small as a test's nearly every row would be wide, and go through
    products with all of it; the tests of those rows say so."""
    import rl_loss.plan as plan

    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(plan, "ENTRIES_A_PRODUCT", 1.0)


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def default_dtype(request):
    """For a test to set as torch's default dtype; the one before comes back."""
    before = torch.get_default_dtype()
    yield request.param
    torch.set_default_dtype(before)
