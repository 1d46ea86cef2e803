"""What the rows of a loss add up to: its metrics, their counts and itself, a column each."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_loss.kernels.launching import launched
from rl_loss.kernels.loss_terms import at_most, expm1
from rl_loss.kernels.records import ACC_TYPES
from rl_loss.loss.metrics import METRICS
from rl_loss.loss.rows import LOG_RATIO_MAX

MOST = tl.constexpr(LOG_RATIO_MAX)
PROGRAMS = 2048  # at most so many share the rows, each with a sum of its own a column

# The columns: the metrics in their order, over how many rows they are taken, the loss.
MISMATCH, REJECTED_MISMATCH, KEPT_MISMATCH, REJECTED, RATIO, CLIPPED = map(tl.constexpr, range(6))
UNCENTERED, SIZE, HEAD_MASS, TAIL_MASS, MASK_TV, L1, INEXACT = map(tl.constexpr, range(6, 13))
SAMPLER_KL, REF_KL, LARGEST_RATIO = map(tl.constexpr, range(13, 16))
ALL, KEPT, KNOWN, ACTED, REFERRED, LOSS = map(tl.constexpr, range(16, 22))
COLUMNS = tl.constexpr(32)
assert len(METRICS) == ALL.value


class Sums(NamedTuple):
    """What `totals` gives."""

    loss: Tensor  # []
    metrics: Tensor  # [METRICS]
    counts: Tensor  # [METRICS] int64


@triton.jit
def _put(table, at, values):
    """The table `[R, COLUMNS]` with the values `[R]` in one column."""
    column = tl.arange(0, COLUMNS)
    return tl.where(column[None, :] == at, values.to(table.dtype)[:, None], table)


@triton.jit
def row_sums(
    value, on, kept, acts, usable, modelled, log_ratio, size, sum_p, q_tail, distance, l1, inexact,
    divergence, from_ref, HAS_KL: tl.constexpr, HAS_REF: tl.constexpr,
):  # fmt: skip
    """What rows `[R]` add to the columns, `[R, COLUMNS]`."""
    x = at_most(log_ratio, MOST)
    mismatch = tl.where(on, expm1(x) - x, 0.0)
    ratio = tl.where(on, tl.exp(x), 0.0)
    table = tl.zeros_like(value)[:, None] + tl.zeros([1, COLUMNS], dtype=value.dtype)
    table = _put(table, MISMATCH, mismatch)
    table = _put(table, REJECTED_MISMATCH, tl.where(kept, 0.0, mismatch))
    table = _put(table, KEPT_MISMATCH, tl.where(kept, mismatch, 0.0))
    table = _put(table, REJECTED, on & (kept == 0))
    table = _put(table, RATIO, ratio)
    table = _put(table, LARGEST_RATIO, ratio)
    table = _put(table, CLIPPED, log_ratio > MOST)
    table = _put(table, UNCENTERED, on & (usable == 0))
    table = _put(table, SIZE, tl.where(modelled, size, 0.0))
    table = _put(table, HEAD_MASS, tl.where(modelled, sum_p, 0.0))
    table = _put(table, TAIL_MASS, q_tail)
    table = _put(table, MASK_TV, tl.where(modelled, distance, 0.0))
    table = _put(table, L1, tl.where(modelled, l1, 0.0))
    table = _put(table, INEXACT, inexact)
    table = _put(table, SAMPLER_KL, tl.where(acts, divergence, 0.0))
    table = _put(table, REF_KL, from_ref)
    table = _put(table, ALL, on)
    table = _put(table, KEPT, kept)
    table = _put(table, KNOWN, modelled)
    if HAS_KL:
        table = _put(table, ACTED, acts)
    if HAS_REF:
        table = _put(table, REFERRED, on)
    return _put(table, LOSS, value)


@triton.jit
def _column(sums, column, programs, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    return tl.load(sums + column * programs + at, mask=at < programs, other=0.0)


@launched
@triton.jit
def _totals_kernel(
    sums,  # [COLUMNS, programs]
    loss,  # [] out
    metrics,  # [METRICS] out
    counts,  # [METRICS] int64 out
    programs,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    """A metric and its count, or the loss."""
    metric = tl.program_id(0)
    if metric == ALL:  # behind the metrics
        tl.store(loss, tl.sum(_column(sums, LOSS, programs, BLOCK), axis=0))
    else:
        counted = tl.where((metric >= SIZE) & (metric <= INEXACT), KNOWN, ALL)
        counted = tl.where(metric == SAMPLER_KL, ACTED, counted)
        counted = tl.where(metric == REF_KL, REFERRED, counted)
        counted = tl.where(metric == KEPT_MISMATCH, KEPT, counted)
        count = tl.sum(_column(sums, counted, programs, BLOCK).to(tl.int64), axis=0)
        if metric == REJECTED_MISMATCH:
            count -= tl.sum(_column(sums, KEPT, programs, BLOCK).to(tl.int64), axis=0)
        values = _column(sums, metric, programs, BLOCK)
        value = tl.sum(values, axis=0) / tl.maximum(count, 1).to(ACC)
        if metric == LARGEST_RATIO:
            # A maximum may lose a NaN, the sum of the ratios does not.
            ratios = tl.sum(_column(sums, RATIO, programs, BLOCK), axis=0)
            value = tl.where(ratios == ratios, tl.max(values, axis=0), ratios)
        tl.store(metrics + metric, value)
        tl.store(counts + metric, count)


def totals(sums: Tensor) -> Sums:
    """From the programs' sums `[COLUMNS, programs]`: one launch."""
    out = Sums(
        sums.new_empty(()),
        sums.new_empty(len(METRICS)),
        sums.new_empty(len(METRICS), dtype=torch.int64),
    )
    programs = sums.shape[1]
    _totals_kernel[(len(METRICS) + 1,)](
        sums, *out, programs, BLOCK=PROGRAMS, ACC=ACC_TYPES[sums.dtype]
    )
    return out
