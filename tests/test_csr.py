"""Rows against a loop over them: their entries, and reductions with values and gradients."""

import math

import pytest
import torch

from rl_loss.csr import (
    count_by_row,
    entries_of,
    offsets_of,
    rows_at,
    rows_of_entries,
    segment_logsumexp,
    segment_sum,
)

INF = math.inf


def ragged(widths, seed=0, dtype=torch.float64):
    rows = torch.repeat_interleave(torch.arange(len(widths)), torch.tensor(widths))
    generator = torch.Generator().manual_seed(seed)
    values = 4 * torch.randn(len(rows), generator=generator, dtype=torch.float64)
    order = torch.randperm(len(rows), generator=generator)  # rows need not be in order
    return values.to(dtype)[order], rows[order]


@pytest.mark.parametrize("widths", [[3, 0, 1, 5], [0, 0], [1], [7, 7, 0, 2, 1, 0]])
def test_sums_and_logsumexps_of_each_row(widths):
    values, rows = ragged(widths)
    sums = segment_sum(values, rows, len(widths))
    logsumexps = segment_logsumexp(values, rows, len(widths))
    for i, width in enumerate(widths):
        row = values[rows == i]
        assert len(row) == width
        torch.testing.assert_close(sums[i], row.sum(), rtol=1e-12, atol=1e-12)
        if width:
            torch.testing.assert_close(logsumexps[i], row.logsumexp(0), rtol=1e-12, atol=0)
        else:
            assert sums[i] == 0
            assert logsumexps[i] == -INF


def test_gradients():
    values, rows = ragged([3, 0, 1, 5])
    values.requires_grad_()
    upstream = torch.tensor([0.0, 2.0, -1.5, 0.5], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v: segment_sum(v, rows, 4), values)
    # The empty row's -inf is a constant: it gives no gradient, NaN least of all.
    out = segment_logsumexp(values, rows, 4)
    (grad,) = torch.autograd.grad(out, values, upstream)
    shares = torch.stack([(v - out[r]).exp() for v, r in zip(values, rows, strict=True)])
    torch.testing.assert_close(grad, (shares * upstream[rows]).detach(), rtol=1e-12, atol=0)
    some = torch.tensor([0, 2, 3])
    assert torch.autograd.gradcheck(lambda v: segment_logsumexp(v, rows, 4)[some], values)


def test_far_apart_and_large_values_in_float32():
    values = torch.tensor([-200.0, -200.0, 3e4, 0.0, -3e4, -1e-3], requires_grad=True)
    rows = torch.tensor([0, 0, 1, 1, 2, 3])
    out = segment_logsumexp(values, rows, 4)
    expected = torch.tensor([-200 + math.log(2), 3e4, -3e4, -1e-3])
    torch.testing.assert_close(out, expected, rtol=1e-7, atol=0)
    (grad,) = torch.autograd.grad(out.sum(), values)
    assert grad.tolist() == [0.5, 0.5, 1.0, 0.0, 1.0, 1.0]


def test_minus_infinity_adds_nothing_and_nan_is_not_hidden():
    values = torch.tensor([-INF, -1.0, -INF, -INF, math.nan, 0.0], requires_grad=True)
    rows = torch.tensor([0, 0, 1, 1, 2, 2])
    out = segment_logsumexp(values, rows, 3)
    assert out[0] == -1
    assert out[1] == -INF
    assert out[2].isnan()
    (grad,) = torch.autograd.grad(out[:2].sum(), values)
    assert grad[:4].tolist() == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_default_dtype_does_not_matter(default, dtype):
    values, rows = ragged([3, 0, 1, 5], dtype=dtype)
    values.requires_grad_()

    def results():
        sums, tops = segment_sum(values, rows, 4), segment_logsumexp(values, rows, 4)
        return sums, tops, torch.autograd.grad((sums + tops)[[0, 2, 3]].sum(), values)[0]

    expected = results()
    torch.set_default_dtype(default)
    try:
        got = results()
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other)


def test_no_rows_and_no_entries():
    none = torch.empty(0)
    rows = torch.empty(0, dtype=torch.int64)
    assert segment_sum(none, rows, 0).tolist() == segment_logsumexp(none, rows, 0).tolist() == []
    assert segment_logsumexp(none, rows, 2).tolist() == [-INF, -INF]
    assert segment_sum(none, rows, 2).tolist() == [0, 0]


WIDTHS = [[3, 0, 1, 5], [0, 0], [1], [], [0, 7, 0, 0, 2, 0]]


@pytest.mark.parametrize("widths", WIDTHS)
def test_the_rows_of_some_entries(widths):
    offsets = offsets_of(torch.tensor(widths, dtype=torch.int64))
    rows = rows_of_entries(offsets, sum(widths))
    some = torch.arange(sum(widths)).flip(0)[::2].contiguous()
    assert rows_at(offsets, some).tolist() == rows[some].tolist()


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("share", [0.0, 0.2, 0.8, 1.0])
def test_the_true_entries_of_each_row_are_counted(widths, share):
    """Few and many: it is the fewer ones that are looked up."""
    offsets = offsets_of(torch.tensor(widths, dtype=torch.int64))
    mask = torch.rand(sum(widths), generator=torch.Generator().manual_seed(1)) < share
    got = count_by_row(mask, offsets)
    assert got.dtype == torch.int64
    assert got.tolist() == [int(row.sum()) for row in mask.split(widths)]


def test_the_entries_that_are_their_rows_token():
    offsets = offsets_of(torch.tensor([3, 0, 2, 1, 1, 1]))
    ids = torch.tensor([5, 9, 5, 5, 7, 2**31 - 1, 0, 4], dtype=torch.int32)
    # 2**32 + 4 is 4 in its lower 32 bits, and no id is -1.
    tokens = torch.tensor([5, 5, 7, 2**31 - 1, -1, 2**32 + 4])
    entries, rows = entries_of(tokens, ids, offsets)
    assert entries.tolist() == [0, 2, 4, 5]
    assert rows.tolist() == [0, 0, 2, 3]
