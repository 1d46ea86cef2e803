"""The kernel between upstream gradients and the two gradients of products: one number an entry."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_loss.flat_rows import Upstreams
from rl_loss.kernels.hot_ids import lay_out, new_matrix
from rl_loss.kernels.launching import launched
from rl_loss.kernels.logits import derivative, inverse_of
from rl_loss.kernels.records import (
    BROKEN,
    ENTROPY,
    KIND_HEAD,
    ONE_ID,
    OVER_V,
    REPLAYED,
    HeadCall,
    HotIds,
    RowOutputs,
)
from rl_loss.plan import width_block


@launched
@triton.jit
def _entry_grads_kernel(
    support_logprobs,  # [nnz]
    ids,  # [nnz] int32
    known,  # [nnz] uint8
    offsets,  # [N + 1] int64
    kind,  # [N] int8
    labels,  # [N]
    temperature,  # [N]
    chosen,  # int64 the rows; None: all
    tails,  # [N]
    entropy,  # [N]
    lse,  # [N]
    state,  # [N] uint8
    d_logprobs,  # [N]
    d_support,  # [nnz]
    d_tails,  # [N]
    d_entropy,  # [N]
    d_full,  # [N]
    grad,  # [nnz] out
    rows,  # [nnz] int32 out: each entry's row
    flags,  # [N] uint8 out: 1 where the row's hidden gradient is NaN
    v_total,  # [N] out: what the passes over the vocabulary read of the upstreams
    v_label,  # [N] out
    v_tail,  # [N] out
    v_entropy,  # [N] out
    slots,  # [V] int32, see `HotIds`
    matrix,  # [N, 2, S] out: 0 before
    cold_grad,  # [nnz] out: of each row the entries here that are not hot, from its start on
    cold_ids,  # [nnz] int32 out: their rows of the weight
    cold_counts,  # [N] int32 out
    one_temperature,
    first_id,
    V,
    S,
    PER_ROW: tl.constexpr,
    CHOSEN: tl.constexpr,
    THROUGH_V: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALE: tl.constexpr,
    D_LOGPROBS: tl.constexpr,
    D_SUPPORT: tl.constexpr,
    D_TAILS: tl.constexpr,
    D_ENTROPY: tl.constexpr,
    D_FULL: tl.constexpr,
    ENTROPY_OVER_V: tl.constexpr,
    HAS_HOT: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    """The gradient of each raw product of a row's entries, 0 wherever there is none.

    On a row over the vocabulary the passes over blocks of logits carry the gradient of every
    cell, so that an entry has its own upstream alone; but the known ids of a HEAD row have
    their whole gradient here and none there. Of a replayed row they carry what was taken of it
    over the vocabulary: its entries have the rest.
    """
    row = tl.program_id(0).to(tl.int64)
    if CHOSEN:
        row = tl.load(chosen + row)
    start, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    this = tl.load(state + row)
    over = this == OVER_V
    on = (this == REPLAYED) | (this == ONE_ID) | over
    label = tl.load(labels + row).to(tl.int64)
    inverse = inverse_of(temperature, row, one_temperature, PER_ROW, ACC)
    d_label = tl.zeros([], dtype=ACC)
    if D_LOGPROBS:
        d_label = tl.load(d_logprobs + row, mask=on, other=0.0).to(ACC)
    d_label_v = tl.zeros([], dtype=ACC)
    if D_FULL:
        d_label_v = tl.load(d_full + row, mask=on, other=0.0).to(ACC)
        d_label += tl.where(over, d_label_v, 0.0)
    d_tail = tl.zeros([], dtype=ACC)
    tail = tl.zeros([], dtype=ACC)
    if D_TAILS:
        tail = tl.load(tails + row, mask=on, other=0.0)
        some = tail > float("-inf")
        d_tail = tl.load(d_tails + row, mask=on & some, other=0.0).to(ACC)
        tail = tl.where(some, tail, 0.0)
    d_h = tl.zeros([], dtype=ACC)
    h = tl.zeros([], dtype=ACC)
    if D_ENTROPY:
        d_h = tl.load(d_entropy + row, mask=on, other=0.0).to(ACC)
        h = tl.load(entropy + row, mask=on, other=0.0)
    norm = tl.load(lse + row)
    stop = tl.where(on, end, start)
    total = d_label + d_tail
    if D_SUPPORT:
        sums = tl.zeros([BLOCK], dtype=ACC)
        for first in range(start, end, BLOCK):
            entry = first + tl.arange(0, BLOCK)
            sums += tl.load(d_support + entry, mask=entry < stop, other=0.0).to(ACC)
        total += tl.sum(sums, axis=0)
    # A row of one id has no gradient, but what is NaN upstream must not end there.
    lost = (this == BROKEN) | ((this == ONE_ID) & ((total != total) | (d_h != d_h)))
    tl.store(flags + row, lost.to(tl.uint8))
    whole = tl.where(over, start, end)
    if THROUGH_V:
        head = tl.load(kind + row) == KIND_HEAD
        whole = tl.where(over & (head == 0), start, end)
        tl.store(v_total + row, tl.where(over, total, d_label_v))
        tl.store(v_label + row, tl.where(over, d_label, d_label_v))
        tl.store(v_tail + row, tl.where(over, d_tail, 0.0))
        d_h_v = tl.where(over, d_h, 0.0)
        if ENTROPY_OVER_V:
            tl.store(v_entropy + row, d_h)
            d_h = d_h_v
        else:
            tl.store(v_entropy + row, d_h_v)
    stop = tl.where((this == REPLAYED) | over, end, start)
    always = tl.where(over, start, end)
    count = tl.zeros([], dtype=tl.int32)
    for first in range(start, end, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        held = entry < end
        read = entry < stop
        logp = tl.load(support_logprobs + entry, mask=read, other=0.0)
        v = tl.load(ids + entry, mask=read, other=-1).to(tl.int64)
        unknown = tl.load(known + entry, mask=read, other=1) == 0
        # Of entries whose cell in a block counts, their own upstream alone.
        full = (entry < always) | ((entry < whole) & (unknown == 0))
        p = tl.where(full, tl.exp(logp), 0.0)
        u = tl.where(full & (v == label), d_label, 0.0)
        if D_SUPPORT:
            u += tl.load(d_support + entry, mask=read, other=0.0).to(ACC)
        if D_TAILS:
            share = tl.exp(tl.where(unknown, logp - tail, 0.0)) * d_tail
            u += tl.where(full & unknown, share, 0.0)
        dz = u - p * total
        if D_ENTROPY:
            dz -= p * (tl.where(p == 0, 0.0, logp) + h) * d_h
        dz *= derivative(logp + norm, inverse, SOFTCAP, SCALE)
        # What lies on another rank has its gradient there.
        own = read & (v >= first_id) & (v < first_id + V)
        tl.store(grad + entry, tl.where(own, dz, 0.0), mask=held)
        tl.store(rows + entry, row.to(tl.int32), mask=held)
        if HAS_HOT:
            slot = tl.load(slots + (v - first_id), mask=own, other=-1)
            lay_out(matrix, row, slot, slot >= 0, dz, S)
            cold = own & (slot < 0)
            place = start + count + tl.cumsum(cold.to(tl.int32), axis=0) - 1
            tl.store(cold_grad + place, dz, mask=cold)
            tl.store(cold_ids + place, (v - first_id).to(tl.int32), mask=cold)
            count += tl.sum(cold.to(tl.int32), axis=0)
    if HAS_HOT:
        tl.store(cold_counts + row, count)


class LaidOut(NamedTuple):
    """The gradients of hot entries as a matrix, and the list of the others of each row."""

    hot: HotIds
    matrix: Tensor  # [N, 2, S]
    cold_grad: Tensor  # [nnz] from each row's start on
    cold_ids: Tensor  # [nnz] int32, the rows of the weight
    cold_counts: Tensor  # [N] int32


class EntryGrads(NamedTuple):
    """What an upstream gradient is for the products of entries, and for the passes over V."""

    grad: Tensor  # [nnz]
    rows: Tensor  # [nnz] int32 each entry's row
    flags: Tensor  # [N] uint8: 1 where the row's hidden gradient is NaN
    over_v: Tensor  # [4, N]: the sum of the row's upstreams, the label's, the tail's, the entropy's
    laid: LaidOut | None  # where the forward found hot ids

    @classmethod
    def new(cls, call: HeadCall, saved: RowOutputs) -> "EntryGrads":
        """Not written yet."""
        nnz, n, new = len(call.rows.ids), call.n, call.hidden.new_empty
        laid = None
        if saved.hot is not None:
            laid = LaidOut(
                hot=saved.hot,
                matrix=new_matrix(n, saved.hot, call.hidden.dtype),
                cold_grad=new(nnz, dtype=call.dtype),
                cold_ids=new(nnz, dtype=torch.int32),
                cold_counts=new(n, dtype=torch.int32),
            )
        return cls(
            grad=new(nnz, dtype=call.dtype),
            rows=new(nnz, dtype=torch.int32),
            flags=new(n, dtype=torch.uint8),
            over_v=new(4, n if len(call.rows.over_v) else 0, dtype=call.dtype),
            laid=laid,
        )


def entry_grads(
    call: HeadCall,
    out: EntryGrads,
    saved: RowOutputs,
    upstreams: Upstreams,
    chosen: Tensor | None = None,  # the rows, all by default
) -> None:
    """Writes the gradient of each entry's raw product `hidden . weight`: one launch."""
    rows, logits, s = call.rows, call.logit, call.scalars
    n = call.n if chosen is None else len(chosen)
    d_logprobs, d_support, d_tails, d_entropy, d_full = (
        None if d is None else d.contiguous() for d in upstreams
    )
    if n:
        _entry_grads_kernel[(n,)](
            saved.support_logprobs,
            rows.ids,
            call.known,
            rows.offsets,
            rows.kind,
            rows.labels,
            logits.temperature,
            chosen,
            saved.tail_logprobs,
            saved.entropy,
            saved.lse,
            saved.state,
            d_logprobs,
            d_support,
            d_tails,
            d_entropy,
            d_full,
            out.grad,
            out.rows,
            out.flags,
            *out.over_v,
            saved.hot_slots,
            *((None,) * 4 if out.laid is None else out.laid[1:]),
            logits.one_temperature,
            call.shard.first,
            len(call.weight),
            len(saved.hot_ids),
            PER_ROW=logits.temperature is not None,
            CHOSEN=chosen is not None,
            THROUGH_V=out.over_v.shape[1] > 0,
            SOFTCAP=s.softcap,
            SCALE=s.scale,
            D_LOGPROBS=d_logprobs is not None,
            D_SUPPORT=d_support is not None,
            D_TAILS=d_tails is not None,
            D_ENTROPY=d_entropy is not None,
            D_FULL=d_full is not None,
            ENTROPY_OVER_V=s.entropy == ENTROPY["full"],
            HAS_HOT=out.laid is not None,
            ACC=logits.flags["ACC"],
            **width_block(call.n, len(rows.ids)),
        )
