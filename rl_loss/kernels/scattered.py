"""The kernel of both gradients: sums of scaled rows, gathered by a CSR list.

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


@triton.jit
def _sum_entries(
    out, base, dense, grad, index, order, flags, o, start, end, columns, H, so, sd0, sd1,
    HAS_ORDER: tl.constexpr,
    HAS_BASE: tl.constexpr,
    HAS_FLAGS: tl.constexpr,
    R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    inside = columns < H
    acc = tl.zeros([R, BLOCK_H], dtype=ACC)
    for first in range(start, end, R):
        at = first + tl.arange(0, R)
        held = at < end
        entry = at
        if HAS_ORDER:
            entry = tl.load(order + at, mask=held, other=0)
        g = tl.load(grad + entry, mask=held, other=0.0)
        read = held & (g != 0)
        j = tl.load(index + entry, mask=read, other=0).to(tl.int64)
        x = tl.load(
            dense + j[:, None] * sd0 + columns[None, :] * sd1,
            mask=read[:, None] & inside[None, :],
            other=0.0,
        )
        acc += g[:, None] * x.to(ACC)
    total = tl.sum(acc, axis=0)
    if HAS_BASE:
        total += tl.load(base + o * H + columns, mask=inside, other=0.0)
    if HAS_FLAGS:
        total = tl.where(tl.load(flags + o) != 0, float("nan"), total)
    tl.store(out + o * so + columns, total, mask=inside)


@triton.jit
def _light_kernel(
    out,  # [M, H]
    base,  # [M, H] in the accumulation dtype: added before the rounding
    dense,  # [D, H]
    grad,  # [nnz]
    index,  # [nnz] int32, the row of dense
    order,  # [nnz] int64, where the CSR list's entries stand
    offsets,  # [M + 1]
    flags,  # [M] uint8: rows that become NaN
    H,
    so,
    sd0,
    sd1,
    HAS_ORDER: tl.constexpr,
    HAS_BASE: tl.constexpr,
    HAS_FLAGS: tl.constexpr,
    HEAVY: tl.constexpr,
    R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ACC: tl.constexpr,
):
    """One output row, or a wide part of it; heavy rows are left to the other kernel."""
    o = tl.program_id(0).to(tl.int64)
    start, end = tl.load(offsets + o).to(tl.int64), tl.load(offsets + o + 1).to(tl.int64)
    if end - start <= HEAVY:
        columns = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
        _sum_entries(
            out, base, dense, grad, index, order, flags, o, start, end, columns, H, so, sd0, sd1,
            HAS_ORDER, HAS_BASE, HAS_FLAGS, R, BLOCK_H, ACC,
        )  # fmt: skip


@triton.jit
def _heavy_kernel(
    out,
    base,
    dense,
    grad,
    index,
    order,
    offsets,
    owners,  # [nnz] int32, the output row of each entry of the CSR list
    flags,
    nnz,
    H,
    so,
    sd0,
    sd1,
    HAS_ORDER: tl.constexpr,
    HAS_BASE: tl.constexpr,
    HAS_FLAGS: tl.constexpr,
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
    if (end - start > HEAVY) & (at - start < HEAVY):
        columns = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
        _sum_entries(
            out, base, dense, grad, index, order, flags, o, start, end, columns, H, so, sd0, sd1,
            HAS_ORDER, HAS_BASE, HAS_FLAGS, R, BLOCK_H, ACC,
        )  # fmt: skip


def gathered_sums(
    dense: Tensor,  # [D, H]
    grad: Tensor,  # [nnz]
    index: Tensor,  # [nnz] int32
    offsets: Tensor,  # [M + 1]
    dtype: torch.dtype,
    *,
    owners: Tensor,  # [nnz] int32
    max_entries: int,
    order: Tensor | None = None,
    base: Tensor | None = None,
    flags: Tensor | None = None,
    heavy: int = HEAVY,
    light_shape: dict[str, int] | None = None,
    heavy_shape: dict[str, int] | None = None,
) -> Tensor:
    """The sums `[M, H]`, rounded once to `dtype`: one launch, two where a row may be heavy."""
    m, h = len(offsets) - 1, dense.shape[1]
    out = dense.new_empty(m, h, dtype=dtype)
    acc = tl.float64 if grad.dtype == torch.float64 else tl.float32
    flag: dict[str, Any] = {"HAS_ORDER": order is not None, "HAS_BASE": base is not None}
    flag |= {"HAS_FLAGS": flags is not None, "HEAVY": heavy, "ACC": acc}
    if m:
        block = min(max(triton.next_power_of_2(h), 16), 2048)
        shape = {"BLOCK_H": block, "R": 4, "num_warps": 4 if block >= 1024 else 2}
        shape |= light_shape or {}
        _light_kernel[(m, triton.cdiv(h, shape["BLOCK_H"]))](
            out, base, dense, grad, index, order, offsets, flags,
            h, out.stride(0), *dense.stride(), **flag, **shape,
        )  # fmt: skip
    if max_entries > heavy and len(grad):
        shape = {"BLOCK_H": 64, "R": 64, "num_warps": 4, **(heavy_shape or {})}
        grid = triton.cdiv(len(grad), heavy), triton.cdiv(h, shape["BLOCK_H"])
        _heavy_kernel[grid](
            out, base, dense, grad, index, order, offsets, owners, flags, len(grad),
            h, out.stride(0), *dense.stride(), **flag, **shape,
        )  # fmt: skip
    return out
