"""The passes over blocks of logits: what a row makes of them, and their gradient.

A block is `[R, B]`: the raw products of R rows with B ids. A cell of -inf is left out of it (a
known id of a HEAD row, which counts apart from the tail). Each pass reads a cell once; the
gradient is written over the products it came of.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_loss.flat_rows import Upstreams
from rl_loss.kernels.launching import launched
from rl_loss.kernels.logits import derivative, inverse_of, logit
from rl_loss.kernels.records import (
    BROKEN,
    KIND_HEAD,
    KIND_REPLAY,
    HeadCall,
    RowOutputs,
)


class Block(NamedTuple):
    """The products of some rows of a batch with a run of ids."""

    raw: Tensor  # [R, B] in the accumulation dtype, and then their gradient in its memory; or
    # memory for the gradient alone, where the products were not `multiplied`
    rows: Tensor  # [R] int64 their numbers in the batch
    run: slice  # their places among all rows that blocks are made of
    ids: slice  # of the weight's rows here
    first: int  # the id of the first of them
    hidden: Tensor  # [R, H] the two factors
    weight: Tensor  # [B, H]
    bias: Tensor | None  # [B]
    last: bool  # no more rows with these ids
    multiplied: bool  # the products are there


@launched
@triton.jit
def _stats_kernel(
    raw,  # [R, B]
    chosen,  # [R] int64 the rows
    bias,  # [B] of these ids
    temperature,  # [N]
    top,  # [N] in, out
    total,  # [N] in, out: sum of exp(z - top)
    moment,  # [N] in, out: sum of exp(z - top) * (z - top)
    one_temperature,
    B,
    sr,
    NEW: tl.constexpr,
    MOMENT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PER_ROW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALE: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    """Adds a block to the running log-sum-exp of each row, and to its entropy's sum."""
    at_row = tl.program_id(0).to(tl.int64)
    row = tl.load(chosen + at_row)
    inverse = inverse_of(temperature, row, one_temperature, PER_ROW, ACC)
    minus_inf = float("-inf")
    m = tl.full([], minus_inf, dtype=ACC)
    s = tl.zeros([], dtype=ACC)
    a = tl.zeros([], dtype=ACC)
    if not NEW:
        m, s = tl.load(top + row), tl.load(total + row)
        if MOMENT:
            a = tl.load(moment + row)
    for at in range(0, B, BLOCK):
        column = at + tl.arange(0, BLOCK)
        held = column < B
        x = tl.load(raw + at_row * sr + column, mask=held, other=minus_inf)
        z = logit(x, bias, column, held, inverse, HAS_BIAS, SOFTCAP, SCALE, ROUND)
        z = tl.where(x == minus_inf, minus_inf, z)
        up = tl.maximum(m, tl.max(z, axis=0))
        shift = tl.where(up == minus_inf, 0.0, up)
        e = tl.exp(z - shift)
        shrink = tl.exp(m - shift)
        if MOMENT:
            a = (a + s * tl.where(s == 0, 0.0, m - shift)) * shrink
            a += tl.sum(e * tl.where(z == minus_inf, 0.0, z - shift), axis=0)
        s = s * shrink + tl.sum(e, axis=0)
        m = up
    tl.store(top + row, m)
    tl.store(total + row, s)
    if MOMENT:
        tl.store(moment + row, a)


@launched
@triton.jit
def _pick_kernel(
    raw,  # [R, B]
    chosen,  # [R] int64 the rows
    labels,  # [N]
    ids,  # [nnz] int32
    known,  # [nnz] uint8
    offsets,  # [N + 1] int64
    kind,  # [N] int8
    bias,  # [B] of these ids
    temperature,  # [N]
    z,  # [nnz] out, where the id is in the block
    label_z,  # [N] out, likewise
    one_temperature,
    first,
    B,
    sr,
    LABEL: tl.constexpr,
    ENTRIES: tl.constexpr,
    TAKE_OUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PER_ROW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALE: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    """Logits of a row's label and entries; TAKE_OUT empties the cells of a HEAD row's known ids."""
    at_row = tl.program_id(0).to(tl.int64)
    row = tl.load(chosen + at_row)
    cells = raw + at_row * sr
    inverse = inverse_of(temperature, row, one_temperature, PER_ROW, ACC)
    if LABEL:
        label = tl.load(labels + row).to(tl.int64) - first
        here = (label >= 0) & (label < B)
        own = tl.load(cells + label, mask=here, other=0.0)
        own = logit(own, bias, label, here, inverse, HAS_BIAS, SOFTCAP, SCALE, ROUND)
        tl.store(label_z + row, own, mask=here)
        tl.debug_barrier()  # the label's cell is read before it is emptied
    start, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    taken = start
    if TAKE_OUT:
        this = tl.load(kind + row)
        taken = tl.where(this == KIND_HEAD, end, start)
        end = tl.where(
            this == KIND_REPLAY, start, end
        )  # a replayed row's entries are not the block's
    step = BLOCK * tl.num_programs(1)
    for at in range(start + tl.program_id(1) * BLOCK, end, step):
        entry = at + tl.arange(0, BLOCK)
        column = tl.load(ids + entry, mask=entry < end, other=-1).to(tl.int64) - first
        inside = (column >= 0) & (column < tl.where(entry < end, B, 0))
        if ENTRIES:
            x = tl.load(cells + column, mask=inside, other=0.0)
            x = logit(x, bias, column, inside, inverse, HAS_BIAS, SOFTCAP, SCALE, ROUND)
            tl.store(z + entry, x, mask=inside)
        if TAKE_OUT:
            out = inside & (tl.load(known + entry, mask=entry < taken, other=0) != 0)
            tl.store(cells + column, tl.full([BLOCK], float("-inf"), dtype=ACC), mask=out)


@launched
@triton.jit
def _grads_kernel(
    raw,  # [R, B]
    dz,  # [R, B] out: the same memory, row by row
    chosen,  # [R] int64 the rows
    bias,  # [B] of these ids
    temperature,  # [N]
    labels,  # [N]
    lse,  # [N] over the vocabulary
    state,  # [N] uint8: broken rows have no gradient
    tail,  # [N] log p of the tail
    entropy,  # [N]
    totals,  # [N] the sum of the row's upstreams
    d_labels,  # [N]
    d_tails,  # [N]
    d_entropy,  # [N]
    up,  # [R] powers of two that rows are multiplied with
    one_temperature,
    first,
    B,
    sr,
    sd,
    SCALED: tl.constexpr,
    TAIL: tl.constexpr,
    ENTROPY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PER_ROW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALE: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    """Products to the gradient of products; an empty cell's is 0, for its entry carries it.

    A narrower gradient overwrites products that were read before: its row takes at most half of
    theirs, and within the first block a barrier parts the reading from the writing.
    """
    at_row = tl.program_id(0).to(tl.int64)
    row = tl.load(chosen + at_row)
    inverse = inverse_of(temperature, row, one_temperature, PER_ROW, ACC)
    label = tl.load(labels + row).to(tl.int64) - first
    norm = tl.load(lse + row)
    broken = tl.load(state + row) == BROKEN
    total, d_label = tl.load(totals + row), tl.load(d_labels + row)
    log_tail = tl.zeros([], dtype=ACC)
    d_tail = tl.zeros([], dtype=ACC)
    h = tl.zeros([], dtype=ACC)
    d_h = tl.zeros([], dtype=ACC)
    if TAIL:
        d_tail = tl.load(d_tails + row)
        log_tail = tl.load(tail + row)
        log_tail = tl.where(log_tail > float("-inf"), log_tail, 0.0)
    if ENTROPY:
        d_h = tl.load(d_entropy + row)
        h = tl.load(entropy + row)
    power = tl.full([], 1.0, dtype=ACC)
    if SCALED:
        power = tl.load(up + at_row)
    for at in range(0, B, BLOCK):
        column = at + tl.arange(0, BLOCK)
        held = column < B
        x = tl.load(raw + at_row * sr + column, mask=held, other=0.0)
        z = logit(x, bias, column, held, inverse, HAS_BIAS, SOFTCAP, SCALE, ROUND)
        logp = z - norm
        p = tl.exp(logp)
        g = tl.where(column == label, d_label, 0.0) - p * total
        if TAIL:
            g += tl.where(d_tail == 0, 0.0, tl.exp(logp - log_tail) * d_tail)
        if ENTROPY:
            g -= p * (tl.where(p == 0, 0.0, logp) + h) * d_h
        g = tl.where(x == float("-inf"), 0.0, g * derivative(z, inverse, SOFTCAP, SCALE))
        g = tl.where(broken, 0.0, g)
        if SCALED:
            g *= power
        tl.debug_barrier()
        tl.store(dz + at_row * sd + column, g.to(dz.dtype.element_ty), mask=held)


@launched
@triton.jit
def _put_kernel(
    dz,  # [R, B] out
    chosen,  # [R] int64 the rows
    ids,  # [nnz] int32
    offsets,  # [N + 1] int64
    grad,  # [nnz]
    B,
    sd,
    BLOCK: tl.constexpr,
):
    """The gradients of a row's entries to their cells; all ids are in the block."""
    at_row = tl.program_id(0).to(tl.int64)
    row = tl.load(chosen + at_row)
    start, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    entry = start + tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(ids + entry, mask=entry < end, other=-1).to(tl.int64)
    inside = (column >= 0) & (column < B)
    g = tl.load(grad + entry, mask=inside, other=0.0)
    tl.store(dz + at_row * sd + column, g.to(dz.dtype.element_ty), mask=inside)


def add_stats(call: HeadCall, block: Block, stats: Tensor) -> None:
    """Adds the block to the statistics `[4, N]` of the rows: top, total, and moment if entropy is
    asked for."""
    raw, logits = block.raw, call.logit
    if len(block.rows):
        _stats_kernel[(len(block.rows),)](
            raw, block.rows, block.bias, logits.temperature, *stats[:3], logits.one_temperature,
            raw.shape[1], raw.stride(0),
            NEW=block.ids.start == 0, MOMENT=call.scalars.entropy > 0, BLOCK=4096, num_warps=4,
            **logits.flags,
        )  # fmt: skip


def pick(
    call: HeadCall,
    block: Block,
    z: Tensor | None,  # [nnz] out
    label_z: Tensor | None = None,  # [N] out
    take_out: bool = True,
) -> None:
    """Writes the logits of labels and entries in the block, and empties known HEAD cells."""
    raw, rows, logits, width = block.raw, call.rows, call.logit, call.scalars.max_width
    if len(block.rows):
        # One program a row where it empties cells: the label is read by that program.
        parts = 1 if take_out else triton.cdiv(width, 2048)
        entries = min(512, max(32, width))
        _pick_kernel[(len(block.rows), parts)](
            raw, block.rows, rows.labels, rows.ids, call.known, rows.offsets, rows.kind,
            block.bias, logits.temperature, z, label_z, logits.one_temperature, block.first,
            raw.shape[1], raw.stride(0),
            LABEL=label_z is not None, ENTRIES=z is not None, TAKE_OUT=take_out, BLOCK=entries,
            num_warps=max(1, entries // 128), **logits.flags,
        )  # fmt: skip


def to_grads(
    call: HeadCall,
    block: Block,
    dtype: torch.dtype,
    saved: RowOutputs,
    upstreams: Upstreams,
    over_v: Tensor,  # [4, N] EntryGrads.over_v
    up: Tensor | None = None,  # [R]
) -> Tensor:
    """The gradient of the products, `[R, B]` in `dtype`, in their memory; each row times `up`."""
    raw, logits = block.raw, call.logit
    dz = raw.view(dtype)[:, : raw.shape[1]]
    if len(block.rows):
        _grads_kernel[(len(block.rows),)](
            raw, dz, block.rows, block.bias, logits.temperature, call.rows.labels, saved.lse_v,
            saved.state, saved.tail_logprobs, saved.entropy, *over_v, up, logits.one_temperature,
            block.first, raw.shape[1], raw.stride(0), dz.stride(0), SCALED=up is not None,
            TAIL=upstreams.tail_logprobs is not None and call.scalars.any_head,
            ENTROPY=upstreams.entropy is not None, BLOCK=2048, num_warps=4, **logits.flags,
        )  # fmt: skip
    return dz


def put_entries(call: HeadCall, rows: Tensor, grad: Tensor, dz: Tensor) -> None:
    """Writes the entries' gradients `[nnz]` of `rows` `[R]` to their cells of `dz` `[R, V]`."""
    if len(rows):
        _put_kernel[(len(rows), triton.cdiv(call.scalars.max_width, 1024))](
            dz, rows, call.own_ids, call.rows.offsets, grad, dz.shape[1], dz.stride(0),
            BLOCK=1024, num_warps=4,
        )  # fmt: skip
