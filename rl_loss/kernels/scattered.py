"""The kernels of both gradients: sums of scaled rows, gathered by a CSR list.

`out[o] = sum over the entries e of o of grad[e] * dense[index[e]]`: with the entries of a token
and the weight's rows it is the hidden gradient; with the entries of an id and the hidden rows,
the weight gradient. Each output row is one sum in a fixed order, stored once: deterministic,
without atomics, every row written. Entries whose gradient is 0 are not read.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

HEAVY = 512  # output rows of more entries go to narrow blocks of columns, many programs a row
HOT = 512  # the most frequent ids of a batch, whose weight gradient is a dense product


@triton.jit
def _sum_entries(
    out, base, dense, grad, index, flags, o, start, end, columns, H, so, sd0, sd1,
    HAS_BASE: tl.constexpr,
    HAS_FLAGS: tl.constexpr,
    R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    inside = columns < H
    total = tl.zeros([BLOCK_H], dtype=ACC)
    for first in range(start, end, R):
        entry = first + tl.arange(0, R)
        held = entry < end
        g = tl.load(grad + entry, mask=held, other=0.0)
        j = tl.load(index + entry, mask=held, other=0).to(tl.int64)
        x = tl.load(
            dense + j[:, None] * sd0 + columns[None, :] * sd1,
            mask=(g != 0)[:, None] & inside[None, :],
            other=0.0,
        )
        total += tl.sum(g[:, None] * x.to(ACC), axis=0)
    if HAS_BASE:
        total += tl.load(base + o * H + columns, mask=inside, other=0.0)
    if HAS_FLAGS:
        total = tl.where(tl.load(flags + o) == 1, float("nan"), total)
    tl.store(out + o * so + columns, total, mask=inside)


@triton.jit
def _light_kernel(
    out,  # [M, H]
    base,  # [M, H] in the accumulation dtype: added before the rounding
    dense,  # [D, H]
    grad,  # [nnz]
    index,  # [nnz] int32, the row of dense
    offsets,  # [M + 1]
    flags,  # [M] uint8: 1 makes a row NaN
    slots,  # [M] int32: rows with a slot are left out
    M,
    H,
    so,
    sd0,
    sd1,
    HAS_BASE: tl.constexpr,
    HAS_FLAGS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HEAVY: tl.constexpr,
    R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ACC: tl.constexpr,
):
    """Every output row in turn, or a wide part of it; heavy rows are left to the other kernel."""
    columns = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    for at in range(tl.program_id(0), M, tl.num_programs(0)):
        o = at + tl.zeros([], dtype=tl.int64)
        start, end = tl.load(offsets + o).to(tl.int64), tl.load(offsets + o + 1).to(tl.int64)
        mine = end - start <= HEAVY
        if HAS_SLOTS:
            mine = mine & (tl.load(slots + o) < 0)
        if mine:
            _sum_entries(
                out, base, dense, grad, index, flags, o, start, end, columns, H, so, sd0, sd1,
                HAS_BASE, HAS_FLAGS, R, BLOCK_H, ACC,
            )  # fmt: skip


@triton.jit
def _heavy_kernel(
    out,
    base,
    dense,
    grad,
    index,
    offsets,
    owners,  # [nnz] int32, the output row of each entry
    flags,
    slots,
    H,
    so,
    sd0,
    sd1,
    HAS_BASE: tl.constexpr,
    HAS_FLAGS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HEAVY: tl.constexpr,
    R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ACC: tl.constexpr,
):
    """A narrow part of a heavy row.

    A run of more than HEAVY entries holds a multiple of HEAVY; the program of its first one owns
    the row. So no list of heavy rows is made, and the grid needs no count from the device.
    """
    at = tl.program_id(0).to(tl.int64) * HEAVY
    o = tl.load(owners + at).to(tl.int64)
    start, end = tl.load(offsets + o).to(tl.int64), tl.load(offsets + o + 1).to(tl.int64)
    mine = (end - start > HEAVY) & (at - start < HEAVY)
    if HAS_SLOTS:
        mine = mine & (tl.load(slots + o) < 0)
    if mine:
        columns = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
        _sum_entries(
            out, base, dense, grad, index, flags, o, start, end, columns, H, so, sd0, sd1,
            HAS_BASE, HAS_FLAGS, R, BLOCK_H, ACC,
        )  # fmt: skip


@triton.jit
def _in_order_kernel(
    order,  # [nnz] int64
    sorted_ids,  # [nnz] int32
    grad,  # [nnz]
    rows,  # [nnz] int32
    slots,  # [V] int32
    sorted_grad,  # [nnz] out
    sorted_rows,  # [nnz] int32 out
    hot,  # [N, 2, HOT] out: zero before
    nnz,
    HAS_SLOTS: tl.constexpr,
    HOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Entries in the order of their ids; those of hot ids into a matrix, as a sum of two halves."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    held = at < nnz
    entry = tl.load(order + at, mask=held, other=0)
    g = tl.load(grad + entry, mask=held, other=0.0)
    row = tl.load(rows + entry, mask=held, other=0)
    tl.store(sorted_grad + at, g, mask=held)
    tl.store(sorted_rows + at, row, mask=held)
    if HAS_SLOTS:
        v = tl.load(sorted_ids + at, mask=held, other=0)
        slot = tl.load(slots + v, mask=held, other=-1)
        cell = hot + row.to(tl.int64) * (2 * HOT) + slot
        high = g.to(hot.dtype.element_ty)
        tl.store(cell, high, mask=slot >= 0)
        low = (g - high.to(tl.float32)).to(hot.dtype.element_ty)
        tl.store(cell + HOT, low, mask=slot >= 0)


@triton.jit
def _hot_kernel(
    out,  # [V, H]
    base,  # [V, H]
    hidden,  # [N, H]
    hot,  # [N, 2, HOT]
    hot_ids,  # [HOT] int64
    state,  # [N] uint8: rows other than 0 are not read
    N,
    H,
    so,
    sh0,
    sh1,
    HAS_BASE: tl.constexpr,
    HOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The weight gradient of hot ids, `hot.T @ hidden`, on the tensor cores."""
    slot = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros([BLOCK_M, BLOCK_H], dtype=tl.float32)
    for first in range(0, N, BLOCK_N):
        row = first + tl.arange(0, BLOCK_N).to(tl.int64)
        read = (tl.load(state + row, mask=row < N, other=2) == 0)[:, None]
        h = tl.load(
            hidden + row[:, None] * sh0 + columns[None, :] * sh1,
            mask=read & (columns < H)[None, :],
            other=0.0,
        )
        cells = hot + row[None, :] * (2 * HOT) + slot[:, None]
        inside = (row < N)[None, :]
        total = tl.dot(tl.load(cells, mask=inside, other=0.0), h, total)
        total = tl.dot(tl.load(cells + HOT, mask=inside, other=0.0), h, total)
    o = tl.load(hot_ids + slot)[:, None]
    inside = (columns < H)[None, :]
    if HAS_BASE:
        total += tl.load(base + o * H + columns[None, :], mask=inside, other=0.0)
    tl.store(out + o * so + columns[None, :], total, mask=inside)


def gathered_sums(
    dense: Tensor,  # [D, H]
    grad: Tensor,  # [nnz]
    index: Tensor,  # [nnz] int32
    offsets: Tensor,  # [M + 1]
    dtype: torch.dtype,
    *,
    owners: Tensor,  # [nnz] int32
    max_entries: int,
    base: Tensor | None = None,
    flags: Tensor | None = None,
    slots: Tensor | None = None,
    programs: int | None = None,
    heavy: int = HEAVY,
    light_shape: dict[str, int] | None = None,
    heavy_shape: dict[str, int] | None = None,
) -> Tensor:
    """The sums `[M, H]`, rounded once to `dtype`: one launch, two where a row may be heavy."""
    m, h = len(offsets) - 1, dense.shape[1]
    out = dense.new_empty(m, h, dtype=dtype)
    acc = tl.float64 if grad.dtype == torch.float64 else tl.float32
    flag: dict[str, Any] = {"HAS_BASE": base is not None, "HAS_FLAGS": flags is not None}
    flag |= {"HAS_SLOTS": slots is not None, "HEAVY": heavy, "ACC": acc}
    if m:
        block = min(max(triton.next_power_of_2(h), 16), 1024)
        shape = {"BLOCK_H": block, "R": 2, "num_warps": 2, **(light_shape or {})}
        _light_kernel[(min(m, programs or m), triton.cdiv(h, shape["BLOCK_H"]))](
            out, base, dense, grad, index, offsets, flags, slots, m,
            h, out.stride(0), *dense.stride(), **flag, **shape,
        )  # fmt: skip
    if max_entries > heavy and len(grad):
        shape = {"BLOCK_H": 64, "R": 64, "num_warps": 4, **(heavy_shape or {})}
        grid = triton.cdiv(len(grad), heavy), triton.cdiv(h, shape["BLOCK_H"])
        _heavy_kernel[grid](
            out, base, dense, grad, index, offsets, owners, flags, slots,
            h, out.stride(0), *dense.stride(), **flag, **shape,
        )  # fmt: skip
    return out


def weight_sums(
    hidden: Tensor,  # [N, H]
    grad: Tensor,  # [nnz]
    rows: Tensor,  # [nnz] int32
    ids: Tensor,  # [nnz] int32
    vocab_size: int,
    dtype: torch.dtype,
    *,
    state: Tensor,  # [N] uint8
    base: Tensor | None = None,
    dense_ids: bool | None = None,
    programs: int = 132 * 16,
    **shapes: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The weight gradient `[V, H]`, and the running list behind it: sorted gradients and bounds.

    The HOT most frequent ids of a large batch hold about half of its entries: as a dense product
    on the tensor cores they cost a tenth of gathering their rows. Their gradients enter as the sum
    of two low-precision halves, so that float32's digits are kept.
    """
    n, nnz = len(hidden), len(ids)
    sorted_ids, order = ids.sort(stable=True)
    every = torch.arange(vocab_size + 1, dtype=torch.int32, device=ids.device)
    bounds = torch.searchsorted(sorted_ids, every, out_int32=True)
    if dense_ids is None:
        low = hidden.dtype == torch.bfloat16 and grad.dtype == torch.float32
        dense_ids = low and nnz >= 2**19 and vocab_size >= 2 * HOT
    slots = hot = None
    if dense_ids:
        hot_ids = bounds.diff().topk(HOT, sorted=False).indices
        slots = torch.full((vocab_size,), -1, dtype=torch.int32, device=ids.device)
        slots[hot_ids] = every[:HOT]
        hot = torch.zeros(n, 2, HOT, dtype=hidden.dtype, device=ids.device)
    sorted_grad, sorted_rows = torch.empty_like(grad), torch.empty_like(rows)
    if nnz:
        _in_order_kernel[(triton.cdiv(nnz, 1024),)](
            order, sorted_ids, grad, rows, slots, sorted_grad, sorted_rows, hot, nnz,
            HAS_SLOTS=dense_ids, HOT=HOT, BLOCK=1024,
        )  # fmt: skip
    out = gathered_sums(
        hidden,
        sorted_grad,
        sorted_rows,
        bounds,
        dtype,
        owners=sorted_ids,
        max_entries=min(n, nnz),
        base=base,
        slots=slots,
        programs=programs,
        **shapes,
    )
    if dense_ids:
        h = hidden.shape[1]
        block = min(64, HOT)
        grid = HOT // block, triton.cdiv(h, 128)
        _hot_kernel[grid](
            out, base, hidden, hot, hot_ids, state, n, h, out.stride(0), *hidden.stride(),
            HAS_BASE=base is not None, HOT=HOT, BLOCK_M=block, BLOCK_H=128, BLOCK_N=64,
            num_warps=4, num_stages=3,
        )  # fmt: skip
    return out, sorted_grad, bounds
