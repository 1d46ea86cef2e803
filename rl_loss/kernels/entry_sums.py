"""The kernels of both gradients: sums of scaled rows, gathered by a CSR list.

`out[o] = sum over the entries e of o of grad[e] * dense[index[e]]`: with the entries of a token
and the weight's rows it is the hidden gradient; with the entries of an id and the hidden rows,
the weight gradient. Each output row is one sum in a fixed order, stored once: deterministic,
without atomics, every row written (but for 0, where sums are added to what is there). Entries
whose gradient is 0 are not read.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_loss.kernels.hot_ids import lay_out
from rl_loss.kernels.launching import launched
from rl_loss.kernels.records import ACC_TYPES, HotIds, OwnEntries

# Output rows of more entries go to narrow blocks of columns, many programs a row.
HEAVY = 1024
_HEAVY_BLOCK = {"BLOCK_H": 32, "R": 128}


@triton.jit
def _sum_entries(
    out, base, base_rows, dense, grad, index, within, flags, o, start, end, columns,
    H, so, sd0, sd1,
    HAS_WITHIN: tl.constexpr,
    HAS_BASE: tl.constexpr,
    HAS_BASE_ROWS: tl.constexpr,
    HAS_FLAGS: tl.constexpr,
    INTO: tl.constexpr,
    R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    inside = columns < H
    total = tl.zeros([BLOCK_H], dtype=ACC)
    for first in range(start, end, R):
        entry = first + tl.arange(0, R)
        held = entry < end
        if HAS_WITHIN:
            entry = start + tl.load(within + entry, mask=held, other=0)
        g = tl.load(grad + entry, mask=held, other=0.0)
        j = tl.load(index + entry, mask=held, other=0).to(tl.int64)
        x = tl.load(
            dense + j[:, None] * sd0 + columns[None, :] * sd1,
            mask=(g != 0)[:, None] & inside[None, :],
            other=0.0,
        )
        total += tl.sum(g[:, None] * x.to(ACC), axis=0)
    if HAS_BASE:
        at = o
        if HAS_BASE_ROWS:
            at = tl.load(base_rows + o)
        more = columns < tl.where(at >= 0, H, 0)
        total += tl.load(base + at * H + columns, mask=more, other=0.0)
    if HAS_FLAGS:
        total = tl.where(tl.load(flags + o) == 1, float("nan"), total)
    if INTO:  # what has no gradient is neither read nor written
        inside = inside & (total != 0)
        total += tl.load(out + o * so + columns, mask=inside, other=0.0).to(ACC)
    tl.store(out + o * so + columns, total, mask=inside)


@launched
@triton.jit
def _light_kernel(
    out,  # [M, H]
    base,  # [D, H] in the accumulation dtype: added before the rounding
    base_rows,  # [M] int64 the row of base, -1: none; None: the same
    dense,  # [D, H]
    grad,  # [nnz]
    index,  # [nnz] int32, the row of dense
    offsets,  # [M + 1]
    within,  # [nnz] int32 the entries that count, see `OwnEntries`; None: all
    counts,  # [M] int32 the entries of a row, from its offset on; None: all to the next one's
    flags,  # [M] uint8: 1 makes a row NaN
    slots,  # [M] int32: rows with a slot are left out
    M,
    H,
    so,
    sd0,
    sd1,
    HAS_WITHIN: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    HAS_BASE: tl.constexpr,
    HAS_BASE_ROWS: tl.constexpr,
    HAS_FLAGS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    INTO: tl.constexpr,
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
        if HAS_COUNTS:
            end = start + tl.load(counts + o)
        if HAS_SLOTS:
            mine = mine & (tl.load(slots + o) < 0)
        if INTO and not HAS_BASE:
            mine = mine & (end > start)
        if mine:
            _sum_entries(
                out, base, base_rows, dense, grad, index, within, flags, o, start, end, columns,
                H, so, sd0, sd1, HAS_WITHIN, HAS_BASE, HAS_BASE_ROWS, HAS_FLAGS, INTO, R, BLOCK_H,
                ACC,
            )  # fmt: skip


@launched
@triton.jit
def _heavy_kernel(
    out,
    base,
    base_rows,
    dense,
    grad,
    index,
    offsets,
    within,
    counts,
    owners,  # [nnz] int32, the output row of each entry, or a number that is none
    flags,
    slots,
    first_owner,
    M,
    H,
    so,
    sd0,
    sd1,
    HAS_WITHIN: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    HAS_BASE: tl.constexpr,
    HAS_BASE_ROWS: tl.constexpr,
    HAS_FLAGS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    INTO: tl.constexpr,
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
    o = tl.load(owners + at).to(tl.int64) - first_owner
    exists = (o >= 0) & (o < M)
    o = tl.where(exists, o, 0)
    start, end = tl.load(offsets + o).to(tl.int64), tl.load(offsets + o + 1).to(tl.int64)
    mine = exists & (end - start > HEAVY) & (at >= start) & (at - start < HEAVY)
    if HAS_COUNTS:
        end = start + tl.load(counts + o)
    if HAS_SLOTS:
        mine = mine & (tl.load(slots + o) < 0)
    if mine:
        columns = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
        _sum_entries(
            out, base, base_rows, dense, grad, index, within, flags, o, start, end, columns,
            H, so, sd0, sd1, HAS_WITHIN, HAS_BASE, HAS_BASE_ROWS, HAS_FLAGS, INTO, R, BLOCK_H, ACC,
        )  # fmt: skip


@launched
@triton.jit
def _in_order_kernel(
    order,  # [nnz] int64
    grad,  # [nnz]
    rows,  # [nnz] int32
    sorted_ids,  # [nnz] int32
    slots,  # [V] int32, see `HotIds`
    sorted_grad,  # [nnz] out
    sorted_rows,  # [nnz] int32 out
    matrix,  # [N, 2, S] out: 0 before
    nnz,
    V,
    S,
    HAS_HOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Entries in the order of their ids, so that a sum reads them without a detour; those of hot
    ids are laid out as well."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    held = at < nnz
    entry = tl.load(order + at, mask=held, other=0)
    g = tl.load(grad + entry, mask=held, other=0.0)
    row = tl.load(rows + entry, mask=held, other=0)
    tl.store(sorted_grad + at, g, mask=held)
    tl.store(sorted_rows + at, row, mask=held)
    if HAS_HOT:
        v = tl.load(sorted_ids + at, mask=held, other=-1)
        slot = tl.load(slots + v, mask=(v >= 0) & (v < V), other=-1)
        lay_out(matrix, row, slot, slot >= 0, g, S)


class EntryList(NamedTuple):
    """The entries of M output rows, one row's after another's."""

    grad: Tensor  # [nnz]
    dense_rows: Tensor  # [nnz] int32 the row of the dense matrix that an entry multiplies
    offsets: Tensor  # [M + 1]
    owners: Tensor | None  # [nnz] int32 the output row of each entry, or a number that is none;
    # None where no row is heavy
    most: int  # entries of one output row, or more
    first_owner: int = 0  # the number that the first output row has in `owners`
    counts: Tensor | None = None  # [M] int32 entries of a row, from its offset on; None: all


class Extras(NamedTuple):
    """What else goes into output rows; None: nothing."""

    base: Tensor | None = None  # [D, H] in the accumulation dtype: added before the rounding
    base_rows: Tensor | None = None  # [M] int64 the row of base, -1: none; None: the same
    flags: Tensor | None = None  # [M] uint8: 1 makes a row NaN
    own: OwnEntries | None = None  # the entries that count, of an output row each; None: all
    slots: Tensor | None = None  # [M] int32: rows with a slot (not -1) are left out
    into: bool = False  # the sums are added to what the output holds, unless 0


def entry_sums(
    dense: Tensor,  # [D, H]
    entries: EntryList,
    out: Tensor,  # [M, H]
    extras: Extras,
    *,
    heavy: int | None = None,  # entries of an output row above which narrow programs share it
    programs: int | None = None,  # that share the output rows, one a row by default
) -> None:
    """Writes the sums, rounded once to `out`'s dtype: a launch, two where a row may be heavy."""
    m, h = out.shape
    grad, index, offsets, owners, most, first_owner, counts = entries
    base, base_rows, flags, some, slots, into = extras
    own = (None, counts) if some is None else some[:2]
    heavy = HEAVY if heavy is None else heavy
    flag: dict[str, Any] = {"HAS_BASE": base is not None, "HAS_FLAGS": flags is not None}
    flag |= {"HAS_WITHIN": some is not None, "HAS_BASE_ROWS": base_rows is not None}
    flag |= {"HAS_COUNTS": own[1] is not None, "HAS_SLOTS": slots is not None}
    flag |= {"INTO": into}
    flag |= {"HEAVY": heavy, "ACC": ACC_TYPES[grad.dtype]}
    if m:
        block = min(max(triton.next_power_of_2(h), 16), 1024)
        _light_kernel[(min(m, programs or m), triton.cdiv(h, block))](
            out, base, base_rows, dense, grad, index, offsets, *own, flags, slots,
            m, h, out.stride(0), *dense.stride(), **flag, R=1, BLOCK_H=block, num_warps=4,
        )  # fmt: skip
    if m and most > heavy and len(grad):
        grid = triton.cdiv(len(grad), heavy), triton.cdiv(h, _HEAVY_BLOCK["BLOCK_H"])
        _heavy_kernel[grid](
            out, base, base_rows, dense, grad, index, offsets, *own, owners, flags, slots,
            first_owner, m, h, out.stride(0), *dense.stride(), **flag, **_HEAVY_BLOCK, num_warps=4,
        )  # fmt: skip


def in_order(
    order: Tensor,  # [nnz] int64
    sorted_ids: Tensor,  # [nnz] int32
    grad: Tensor,  # [nnz]
    rows: Tensor,  # [nnz] int32
    hot: HotIds | None = None,
    matrix: Tensor | None = None,  # [N, 2, S] of 0
) -> tuple[Tensor, Tensor]:
    """The gradients and rows of all entries in the order of their ids; the gradients of hot ids are
    laid out in `matrix`."""
    sorted_grad, sorted_rows, nnz = torch.empty_like(grad), torch.empty_like(rows), len(order)
    slots, v, s = (None, 0, 0) if hot is None else (hot.slots, len(hot.slots), len(hot.ids))
    if nnz:
        _in_order_kernel[(triton.cdiv(nnz, 1024),)](
            order, grad, rows, sorted_ids, slots, sorted_grad, sorted_rows, matrix,
            nnz, v, s, HAS_HOT=hot is not None, BLOCK=1024,
        )  # fmt: skip
    return sorted_grad, sorted_rows
