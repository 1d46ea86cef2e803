"""The weight gradient of a batch's most frequent ids, as a dense product on the tensor cores.

By Zipf's law a few hundred ids hold about half of the entries of a batch. Their gradients are
laid out as a matrix over all rows and multiplied with the hidden states: a tenth of the cost of
gathering a hidden row for every entry. Each gradient enters as the sum of two bfloat16 numbers,
16 bits of it, twice as many as the result is rounded to. Nothing is read back to the host: an id
is hot if its count reaches a bound that a histogram of counts gives.

A hidden row that is not finite, of an active row with a gradient, makes the gradients of all hot
ids NaN, not of its own ids alone.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_loss.kernels.entry_grads import EntryGrads
from rl_loss.kernels.launching import launched
from rl_loss.kernels.records import OVER_V, REPLAYED, UNREAD, HeadCall

HOT = 384  # ids at most
_BINS = 64  # of counts, four an octave
_SPLITS = 4  # runs of rows whose products are added at the end
_ROWS = 2**15  # laid out at a time: 48 MiB


@launched
@triton.jit
def _count_kernel(ids, counts, nnz, V, BLOCK: tl.constexpr):
    """The entries of each id; sums of integers are the same in any order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(ids + at, mask=at < nnz, other=-1)
    tl.atomic_add(counts + v, 1, mask=(v >= 0) & (v < V), sem="relaxed")


@triton.jit
def _bin(count):
    return tl.minimum(4.0 * tl.log2(tl.maximum(count, 1).to(tl.float32)), 63.0).to(tl.int32)


@launched
@triton.jit
def _histogram_kernel(bounds, bins, V, BLOCK: tl.constexpr, BINS: tl.constexpr):
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(bounds + v + 1, mask=v < V, other=0) - tl.load(bounds + v, mask=v < V, other=0)
    found = tl.histogram(_bin(count), BINS)
    tl.atomic_add(bins + tl.arange(0, BINS), found, sem="relaxed")


@launched
@triton.jit
def _slots_kernel(
    bounds,  # [V + 1] int32
    bins,  # [BINS] int32 ids of each bin of counts, and how many slots were given
    slots,  # [V] int32 out
    hot_ids,  # [HOT] int64 out: -1 before
    V,
    HOT: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    """Gives a slot to every id of the highest bins, as many bins as have at most HOT ids."""
    b = tl.arange(0, BINS)
    ids_of = tl.load(bins + b)
    # The number of ids in this bin and all above, from the running sum below it.
    above = tl.sum(ids_of, axis=0) - tl.cumsum(ids_of, axis=0) + ids_of
    first = tl.max(tl.where(above > HOT, b, -1), axis=0) + 1
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(bounds + v + 1, mask=v < V, other=0) - tl.load(bounds + v, mask=v < V, other=0)
    hot = (_bin(count) >= first) & (count > 1)
    taken = tl.sum(hot.to(tl.int32), axis=0)
    start = tl.atomic_add(bins + BINS, taken, sem="relaxed")
    slot = start + tl.cumsum(hot.to(tl.int32), axis=0) - 1
    tl.store(slots + v, tl.where(hot, slot, -1), mask=v < V)
    tl.store(hot_ids + slot, v.to(tl.int64), mask=hot)


@launched
@triton.jit
def _lay_out_kernel(
    grad,  # [nnz]
    rows,  # [nnz] int32
    ids,  # [nnz] int32
    slots,  # [V] int32
    matrix,  # [ROWS, 2, HOT] out: 0 before
    first_row,
    n_rows,
    nnz,
    V,
    HOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(ids + at, mask=at < nnz, other=-1)
    slot = tl.load(slots + v, mask=(v >= 0) & (v < V), other=-1)
    row = tl.load(rows + at, mask=slot >= 0, other=0) - first_row
    hot = (slot >= 0) & (row >= 0) & (row < n_rows)
    g = tl.load(grad + at, mask=hot, other=0.0)
    high = g.to(matrix.dtype.element_ty)
    low = (g - high.to(tl.float32)).to(matrix.dtype.element_ty)
    cell = matrix + row * (2 * HOT) + slot
    tl.store(cell, high, mask=hot)
    tl.store(cell + HOT, low, mask=hot)


@launched
@triton.jit
def _product_kernel(
    hidden,  # [N, H]
    matrix,  # [N, 2, HOT]
    hot_ids,  # [HOT] int64
    state,  # [N] uint8: of REPLAYED and OVER_V rows alone hidden states are read
    parts,  # [SPLITS, HOT, H] out
    N,
    H,
    sh0,
    sh1,
    rows_a_split,
    FAR: tl.constexpr,
    HOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A block of `matrix.T @ hidden` over one run of rows."""
    slot = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    if FAR:
        columns = columns.to(tl.int64)
    split = tl.program_id(2)
    if tl.max(tl.load(hot_ids + slot), axis=0) >= 0:
        total = tl.zeros([BLOCK_M, BLOCK_H], dtype=tl.float32)
        start = split * rows_a_split
        end = tl.minimum(start + rows_a_split, N)
        for first in range(start, end, BLOCK_N):
            row = first + tl.arange(0, BLOCK_N).to(tl.int64)
            this = tl.load(state + row, mask=row < end, other=UNREAD)
            read = ((this == REPLAYED) | (this == OVER_V))[:, None]
            h = tl.load(
                hidden + row[:, None] * sh0 + columns[None, :] * sh1,
                mask=read & (columns < H)[None, :],
                other=0.0,
            )
            cells = matrix + row[None, :] * (2 * HOT) + slot[:, None]
            inside = (row < end)[None, :]
            total = tl.dot(tl.load(cells, mask=inside, other=0.0), h, total)
            total = tl.dot(tl.load(cells + HOT, mask=inside, other=0.0), h, total)
        part = parts + (split * HOT + slot).to(tl.int64)[:, None] * H + columns[None, :]
        tl.store(part, total, mask=(columns < H)[None, :])


@launched
@triton.jit
def _write_hot_kernel(
    out, base, grads, hot_ids, first, M, H, so,
    HAS_BASE: tl.constexpr,
    INTO: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    o = tl.load(hot_ids + slot) - first
    o = tl.where(o < M, o, -1)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = columns < tl.where(o >= 0, H, 0)
    total = tl.load(grads + slot * H + columns, mask=inside, other=0.0)
    if HAS_BASE:
        total += tl.load(base + o * H + columns, mask=inside, other=0.0)
    if INTO:
        inside = inside & (total != 0)
        total += tl.load(out + o * so + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + o * so + columns, total, mask=inside)


class HotIds(NamedTuple):
    """The hot ids of a batch and their part of the weight gradient."""

    slots: Tensor  # [V] int32, -1 where an id is not hot
    ids: Tensor  # [HOT] int64, -1 where a slot is not used
    grads: Tensor  # [HOT, H] float32


def id_bounds(ids: Tensor, vocab_size: int) -> Tensor:
    """Where each id's run begins once the entries are sorted by id, `[V + 1]`: int32, or int64
    from 2**31 entries on."""
    counts = torch.zeros(vocab_size + 1, dtype=torch.int32, device=ids.device)
    if len(ids):
        _count_kernel[(triton.cdiv(len(ids), 1024),)](
            ids, counts[1:], len(ids), vocab_size, BLOCK=1024
        )
    return counts.cumsum(0, dtype=torch.int32 if len(ids) < 2**31 else torch.int64)


def use_hot_ids(call: HeadCall) -> bool:
    """Whether the dense product is exact enough and pays: bfloat16, and many entries."""
    low = call.hidden.dtype == call.weight.dtype == torch.bfloat16
    many = len(call.rows.ids) >= max(2**16, 4 * call.n)
    return low and many


def hot_product(call: HeadCall, grads: EntryGrads, bounds: Tensor, state: Tensor) -> HotIds:
    """Finds the hot ids by `bounds` `[V + 1]` and computes their rows of the weight gradient;
    `state` `[N]` as the forward gave it."""
    hidden, grad, rows, ids = call.hidden, grads.grad, grads.rows, call.own_ids
    (n, h), v, nnz = hidden.shape, len(bounds) - 1, len(ids)
    bins = torch.zeros(_BINS + 1, dtype=torch.int32, device=ids.device)
    slots = torch.empty(v, dtype=torch.int32, device=ids.device)
    hot_ids = torch.full((HOT,), -1, dtype=torch.int64, device=ids.device)
    grid = (triton.cdiv(v, 1024),)
    _histogram_kernel[grid](bounds, bins, v, BLOCK=1024, BINS=_BINS)
    _slots_kernel[grid](bounds, bins, slots, hot_ids, v, HOT=HOT, BLOCK=1024, BINS=_BINS)
    matrix = torch.empty(min(n, _ROWS), 2, HOT, dtype=hidden.dtype, device=ids.device)
    parts = torch.empty(_SPLITS, HOT, h, dtype=torch.float32, device=ids.device)
    sums, block = parts.new_zeros(HOT, h), min(64, HOT)
    for first in range(0, n, _ROWS):
        some = hidden[first : first + _ROWS]
        matrix.zero_()
        _lay_out_kernel[(triton.cdiv(nnz, 1024),)](
            grad, rows, ids, slots, matrix, first, len(some), nnz, v, HOT=HOT, BLOCK=1024
        )
        _product_kernel[(HOT // block, triton.cdiv(h, 128), _SPLITS)](
            some, matrix, hot_ids, state[first:], parts, len(some), h, *some.stride(),
            triton.cdiv(triton.cdiv(len(some), _SPLITS), 64) * 64,
            FAR=some.stride(1) * h >= 2**31,
            HOT=HOT, BLOCK_M=block, BLOCK_H=128, BLOCK_N=64, num_warps=4, num_stages=3,
        )  # fmt: skip
        sums += parts.sum(0)
    return HotIds(slots, hot_ids, sums)


def write_hot_rows(
    hot: HotIds, out: Tensor, base: Tensor | None, first: int = 0, into: bool = False
) -> None:
    """Writes the hot rows among those of `out` `[B, H]`, the ids from `first` on; `base`
    `[B, H]` is added before the rounding, and with `into` what `out` holds."""
    m, h = out.shape
    _write_hot_kernel[(len(hot.ids), triton.cdiv(h, 1024))](
        out, base, hot.grads, hot.ids, first, m, h, out.stride(0),
        HAS_BASE=base is not None, INTO=into, BLOCK_H=1024,
    )  # fmt: skip
