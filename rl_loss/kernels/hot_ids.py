"""The most frequent ids of a batch: found on the device, nothing read back, a slot each.

By Zipf's law a few hundred ids hold about half of the entries of a batch. Where the products of
all rows with them are cheaper than gathering, they go through the tensor cores (`hot_products`).
An id is hot if enough rows have it, and among the most frequent ones if there are too many of
those: a histogram of counts tells. Slots are given in the order of the ids, so that nothing depends
on which program ran first.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_loss.kernels.launching import launched
from rl_loss.kernels.records import HotIds
from rl_loss.plan import least_count

BINS = 64  # of counts, four an octave; the first is of the ids that are not frequent
_IDS = 1024  # a program


@launched
@triton.jit
def _count_kernel(ids, counts, nnz, V, BLOCK: tl.constexpr):
    """The entries of each id; sums of integers are the same in any order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(ids + at, mask=at < nnz, other=-1)
    tl.atomic_add(counts + v, 1, mask=(v >= 0) & (v < V), sem="relaxed")


@triton.jit
def _octaves(count):
    """Four steps an octave: the exponent of a float32, and two bits behind it."""
    return tl.maximum(count, 1).to(tl.float32).to(tl.int32, bitcast=True) >> 21


@triton.jit
def _bin(count, least, BINS: tl.constexpr):
    number = 1 + _octaves(count) - _octaves(least)
    return tl.where(count >= least, tl.minimum(number, BINS - 1), 0)


@launched
@triton.jit
def _bins_kernel(counts, bins, V, least, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """The ids of each bin, of a block of ids."""
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.histogram(_bin(tl.load(counts + v, mask=v < V, other=0), least, BINS), BINS)
    tl.store(bins + tl.program_id(0) * BINS + tl.arange(0, BINS), found)


@triton.jit
def _first_entry(sorted_ids, nnz, steps, v, bounds):
    """Where the first entry of an id not below `v` stands, by halving."""
    low = tl.zeros(v.shape, dtype=bounds.dtype.element_ty)
    high = low + nnz
    for _ in range(steps):
        middle = low + (high - low) // 2
        some = low < high
        below = some & (tl.load(sorted_ids + middle, mask=some, other=0) < v)
        high = tl.where(some & (below == 0), middle, high)
        low = tl.where(below, middle + 1, low)
    return low


@launched
@triton.jit(do_not_specialize=["steps"])
def _bounds_kernel(
    sorted_ids,  # [nnz] int32
    bounds,  # [V + 1] out
    bins,  # [blocks, BINS] int32 out, as of `_bins_kernel`
    nnz,
    V,
    least,
    steps,
    HAS_BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start = _first_entry(sorted_ids, nnz, steps, v, bounds)
    tl.store(bounds + v, start, mask=v <= V)
    if HAS_BINS:
        count = _first_entry(sorted_ids, nnz, steps, v + 1, bounds) - start
        found = tl.histogram(_bin(tl.where(v < V, count, 0).to(tl.int32), least, BINS), BINS)
        tl.store(bins + tl.program_id(0) * BINS + tl.arange(0, BINS), found)


@launched
@triton.jit
def _slots_kernel(
    counts,  # [V], or [V + 1] the bounds of each id's run
    bins,  # [blocks, BINS] int32
    slots,  # [V] int32 out
    hot_ids,  # [S] int32 out
    hot_used,  # [1] int32 out
    V,
    S,
    least,
    blocks,
    BOUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    """A slot for every id of the highest bins, as many bins as have at most S ids, and for the
    first ids of the next one."""
    block = tl.program_id(0)
    b = tl.arange(0, BINS)
    ids_of = tl.zeros([BINS], dtype=tl.int32)
    before = tl.zeros([BINS], dtype=tl.int32)  # in the blocks before this one
    for first in range(0, blocks, 32):
        at = first + tl.arange(0, 32)
        part = tl.load(bins + at[:, None] * BINS + b[None, :], mask=(at < blocks)[:, None], other=0)
        ids_of += tl.sum(part, axis=0)
        before += tl.sum(tl.where((at < block)[:, None], part, 0), axis=0)
    above = tl.sum(ids_of, axis=0) - tl.cumsum(ids_of, axis=0) + ids_of  # in this bin or higher
    last = tl.max(tl.where(above > S, b, 0), axis=0)  # of this bin the first ids, of 0 none
    whole = tl.sum(tl.where(b > last, ids_of, 0), axis=0)
    used = whole + tl.sum(tl.where((b == last) & (b > 0), ids_of, 0), axis=0)
    used = tl.minimum(used, S)
    v = block * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(counts + v, mask=v < V, other=0)
    if BOUNDS:
        count = tl.load(counts + v + 1, mask=v < V, other=0) - count
    mine = _bin(count.to(tl.int32), least, BINS)
    sure = mine > last
    perhaps = (mine == last) & (mine > 0)
    slot = tl.sum(tl.where(b > last, before, 0), axis=0) + tl.cumsum(sure.to(tl.int32), axis=0) - 1
    more = whole + tl.sum(tl.where(b == last, before, 0), axis=0)
    more = more + tl.cumsum(perhaps.to(tl.int32), axis=0) - 1
    slot = tl.where(perhaps, more, slot)
    hot = (sure | perhaps) & (slot < S)
    tl.store(slots + v, tl.where(hot, slot, -1), mask=v < V)
    tl.store(hot_ids + slot, v.to(tl.int32), mask=hot)
    if block == 0:
        tl.store(hot_used, used)
        for first in range(0, S, BLOCK):
            s = first + tl.arange(0, BLOCK)
            tl.store(hot_ids + s, tl.full([BLOCK], -1, dtype=tl.int32), mask=(s >= used) & (s < S))


@triton.jit
def lay_out(matrix, row, slot, hot, g, S):
    """Puts gradients into the row's cells `[2, S]` of the matrix, as two numbers of its dtype each:
    16 bits in bfloat16, twice as many as a result is rounded to."""
    high = g.to(matrix.dtype.element_ty)
    low = (g - high.to(tl.float32)).to(matrix.dtype.element_ty)
    cell = matrix + row.to(tl.int64) * (2 * S) + slot
    tl.store(cell, high, mask=hot)
    tl.store(cell + S, low, mask=hot)


def new_hot_ids(slots: int, vocab_size: int, device: torch.device) -> HotIds:
    """Not written yet."""
    new: Any = {"dtype": torch.int32, "device": device}
    return HotIds(torch.empty(vocab_size, **new), torch.empty(slots, **new), torch.empty(1, **new))


def new_matrix(n: int, hot: HotIds, dtype: torch.dtype) -> Tensor:
    """`[N, 2, S]` of 0, for the gradients of hot entries."""
    return torch.zeros(n, 2, len(hot.ids), dtype=dtype, device=hot.ids.device)


def find_hot_ids(ids: Tensor, vocab_size: int, n: int, out: HotIds) -> None:
    """Writes the hot ids among the entries' `ids` `[nnz]` of `n` rows: four launches."""
    least, nnz = least_count(n), len(ids)
    counts = torch.zeros(vocab_size, dtype=torch.int32, device=ids.device)
    _count_kernel[(triton.cdiv(nnz, 1024),)](ids, counts, nnz, vocab_size, BLOCK=1024)
    blocks = triton.cdiv(vocab_size + 1, _IDS)  # one also where there are no ids
    bins = counts.new_empty(blocks, BINS)
    _bins_kernel[(blocks,)](counts, bins, vocab_size, least, BLOCK=_IDS, BINS=BINS)
    _give_slots(counts, bins, vocab_size, least, out)


def id_bounds(sorted_ids: Tensor, vocab_size: int, n: int = 0, out: HotIds | None = None) -> Tensor:
    """Where each id's run begins among the sorted ids, `[V + 1]`: int32, or int64 from 2**31
    entries on. Writes the hot ids of `n` rows to `out`: one launch more."""
    nnz, least = len(sorted_ids), least_count(n)
    dtype = torch.int32 if nnz < 2**31 else torch.int64
    bounds = torch.empty(vocab_size + 1, dtype=dtype, device=sorted_ids.device)
    blocks = triton.cdiv(vocab_size + 1, _IDS)
    bins = sorted_ids.new_empty(0 if out is None else blocks, BINS)
    _bounds_kernel[(blocks,)](
        sorted_ids, bounds, bins, nnz, vocab_size, least, nnz.bit_length(),
        HAS_BINS=out is not None, BLOCK=_IDS, BINS=BINS,
    )  # fmt: skip
    if out is not None:
        _give_slots(bounds, bins, vocab_size, least, out)
    return bounds


def _give_slots(counts: Tensor, bins: Tensor, vocab_size: int, least: int, out: HotIds) -> None:
    _slots_kernel[(len(bins),)](
        counts, bins, *out, vocab_size, len(out.ids), least, len(bins),
        BOUNDS=len(counts) > vocab_size, BLOCK=_IDS, BINS=BINS,
    )  # fmt: skip
