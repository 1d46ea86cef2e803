"""A real model's own supports: SmolLM2-135M sampled with top-p 0.95 (see benchmarks/workloads)."""

import sys
from functools import partial
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


EPS = torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def real():
    return real_rows(FOLDER)


def outside_of(support, vocab_size):
    """The cells of every row's logits that its support leaves out, `[N, V]` bool."""
    outside = torch.ones(len(support), vocab_size, dtype=torch.bool)
    outside[support.entry_rows, support.ids.long()] = False
    return outside


@needs_data
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_trainer_logprobs_are_reproduced(real, dtype):
    """Within twice the error of logits over the vocabulary in float32, on every twelfth row, and
    four units of the largest; in float64 2^29 times less."""
    work, arrays = real
    exact = torch.from_numpy(arrays["trainer_logprobs_fp64"])
    rows = torch.arange(0, len(work.labels), 12)
    z = work.hidden[rows] @ work.weight.T
    logp = z.masked_fill(outside_of(work.support.select(rows), z.shape[1]), -torch.inf)
    plain = logp.log_softmax(1).gather(1, work.labels[rows, None])[:, 0]
    error = float((plain.double() - exact[rows]).abs().max()) + 2 * EPS * float(z.abs().max())
    out = fused_lm_head(work.hidden.to(dtype), work.weight.to(dtype), work.labels, work.support)
    allowed = 2 * error * torch.finfo(dtype).eps / EPS
    assert (out.logprobs.double() - exact).abs().max() <= allowed


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
    """Mean ratio and mismatch KL, computed apart in numpy and float64."""
    work, arrays = real
    out = fused_lm_head(work.hidden, work.weight, work.labels, work.support)
    inputs = LossInputs.from_head(
        out,
        work.support,
        inference_logprobs=torch.from_numpy(arrays["inference_logprobs"]),
        advantages=torch.ones(len(work.labels)),
    )
    metrics = icepop_loss(inputs).metrics
    reported = arrays["inference_logprobs"].astype(np.float64)
    log_ratio = out.logprobs.double().numpy() - reported
    ratio = np.exp(log_ratio)
    # Each token's number is off by a few roundings of its ratio, and of its log-ratio.
    close = partial(pytest.approx, rel=4 * EPS)
    assert float(metrics["importance_ratio_mean"]) == close(ratio.mean())
    assert float(metrics["mismatch_kl"]) == pytest.approx(
        (ratio - 1 - log_ratio).mean(), abs=4 * EPS * np.abs(log_ratio).mean()
    )
    assert round((arrays["trainer_logprobs_fp64"] - reported).mean(), 4) == -0.0021
    assert metrics["score_centering/uncentered"] == 0
    assert float(metrics["score_centering/support_size"]) == close(work.support.nnz / len(ratio))


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
    p = z.masked_fill(outside_of(support, len(weight)), -torch.inf).softmax(-1)
    label = torch.nn.functional.one_hot(work.labels[rows], len(weight))
    wanted = (d_logprobs[:, None] * (label - p)) @ weight
    # A p is off by four units of the largest logit.
    unit = torch.finfo(torch.float64).eps * z.abs().max()
    allowed = 4 * unit * (d_logprobs.abs()[:, None] * (label + p)) @ weight.abs()
    assert ((hidden.grad - wanted).abs() <= allowed).all()


def test_the_synthetic_rows_have_the_shape_of_the_real_ones():
    work = real_like(n=400, h=8, v=20000)
    widths = work.support.host.offsets.diff().double()
    assert 25 < widths.median() < 75
    assert 120 < widths.mean() < 450
    work.support.validate(work.labels, 20000)
