"""Rows over the vocabulary: chunks and blocks change nothing, small tails stay exact."""

import pytest
import torch
from factory import outputs, random_batch, relative_error, weighted_sum

import rl_loss.dense as dense
from rl_loss import RowKind, Support, fused_lm_head


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_chunks_of_rows_and_blocks_of_the_vocabulary_change_nothing(rows, dtype, monkeypatch):
    whole, cut = random_batch(dtype=dtype).leaves(), random_batch(dtype=dtype).leaves()
    results = []
    for batch in (whole, cut):
        out = fused_lm_head(
            batch.hidden,
            batch.weight,
            batch.labels,
            batch.support,
            bias=batch.bias,
            temperature=batch.temperature,
            softcap=9.0,
            entropy="full",
        )
        weighted_sum(outputs(out)).backward()
        results.append([*outputs(out), *batch.grads()])
        monkeypatch.setattr(dense, "_CHUNK", rows * 31 + 3)
        monkeypatch.setattr(dense, "_VOCAB_BLOCK", 7)
    tolerance = 1e-12 if dtype == torch.float64 else torch.finfo(dtype).eps
    for value, wanted in zip(*results, strict=True):
        finite = ~wanted.isneginf()
        assert torch.equal(value.isneginf(), ~finite)
        assert relative_error(value[finite], wanted[finite]) < tolerance


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_a_tail_of_1e_9_is_exact_in_float32(impl):
    """As 1 - sum(p) it would be rounding noise: value and gradient against float64."""
    z = torch.full((1, 9), -22.0)
    z[0, 4], z[0, 2] = 1.0, 0.3
    support = Support.from_rows([([4, 2], [-0.4, -1.2])], kind=RowKind.HEAD)
    results = []
    for dtype in (torch.float32, torch.float64):
        hidden = z.to(dtype).clone().requires_grad_()
        out = fused_lm_head(
            hidden, torch.eye(9, dtype=dtype), torch.tensor([4]), support, impl=impl
        )
        out.trainer_tail_logprobs.backward(torch.ones(1, dtype=dtype))
        results.append((out.trainer_tail_logprobs.detach(), hidden.grad))
    assert results[1][0].exp() < 1e-9
    assert abs(float(results[0][0] - results[1][0])) < 1e-5
    assert relative_error(results[0][1], results[1][1]) < 1e-6
