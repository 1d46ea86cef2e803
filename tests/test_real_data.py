"""A real model's own supports: SmolLM2-135M sampled with top-p 0.95 (see benchmarks/workloads)."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks stand beside the tests

from benchmarks.workloads import data_folder, real_like, real_rows
from rl_loss import LossInputs, fused_lm_head, icepop_loss

FOLDER = data_folder()
needs_data = pytest.mark.skipif(
    FOLDER is None, reason="the real supports are not here; set RL_LOSS_DATA to their folder"
)


@pytest.fixture(scope="module")
def real():
    return real_rows(FOLDER)


@needs_data
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 2e-5)])
def test_trainer_logprobs_are_reproduced(real, dtype, tolerance):
    work, arrays = real
    out = fused_lm_head(work.hidden.to(dtype), work.weight.to(dtype), work.labels, work.support)
    exact = torch.from_numpy(arrays["trainer_logprobs_fp64"])
    assert (out.logprobs.double() - exact).abs().max() < tolerance


@needs_data
def test_the_evidence_is_sound(real):
    work, arrays = real
    reported = torch.from_numpy(arrays["inference_logprobs"])
    work.support.validate(work.labels, len(work.weight), inference_logprobs=reported)
    widths = work.support.host.offsets.diff()
    assert int(widths.max()) == 5092
    assert int(widths.median()) == 44


@needs_data
def test_ratio_and_mismatch_on_real_rows(real):
    """Mean ratio and mismatch KL, computed apart in numpy from the stored log-probabilities."""
    work, arrays = real
    out = fused_lm_head(work.hidden, work.weight, work.labels, work.support)
    inputs = LossInputs.from_head(
        out,
        work.support,
        inference_logprobs=torch.from_numpy(arrays["inference_logprobs"]),
        advantages=torch.ones(len(work.labels)),
    )
    metrics = icepop_loss(inputs).metrics
    log_ratio = arrays["trainer_logprobs_fp64"] - arrays["inference_logprobs"].astype(np.float64)
    ratio = np.exp(log_ratio)
    assert float(metrics["importance_ratio_mean"]) == pytest.approx(ratio.mean(), abs=1e-5)
    assert float(metrics["mismatch_kl"]) == pytest.approx(
        (ratio - 1 - log_ratio).mean(), rel=1e-3, abs=1e-6
    )
    assert abs(log_ratio.mean() + 0.0021) < 1e-4
    assert metrics["score_centering/uncentered"] == 0
    assert float(metrics["score_centering/support_size"]) == pytest.approx(235.47, abs=0.01)


@needs_data
def test_gradients_on_real_rows_against_full_logits(real):
    """Every twelfth row through logits over the whole vocabulary, in float64."""
    work, _ = real
    rows = torch.arange(0, len(work.labels), 12)
    support = work.support.select(rows)
    hidden = work.hidden[rows].double().requires_grad_()
    weight = work.weight.double()
    d_logprobs = work.d_logprobs[rows].double()
    fused_lm_head(hidden, weight, work.labels[rows], support).logprobs.backward(d_logprobs)
    z = hidden.detach() @ weight.T
    outside = torch.ones_like(z, dtype=torch.bool)
    outside[support.entry_rows, support.ids.long()] = False
    p = z.masked_fill(outside, -torch.inf).softmax(-1)
    p[torch.arange(len(rows)), work.labels[rows]] -= 1
    torch.testing.assert_close(hidden.grad, -(d_logprobs[:, None] * p) @ weight, atol=1e-10, rtol=0)


def test_the_synthetic_rows_have_the_shape_of_the_real_ones():
    work = real_like(n=400, h=8, v=20000)
    widths = work.support.host.offsets.diff().double()
    assert 25 < widths.median() < 75
    assert 120 < widths.mean() < 450
    work.support.validate(work.labels, 20000)
