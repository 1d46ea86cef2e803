"""What a row makes of the logits of its entries: log-probabilities, tail and entropy.

Rows and entries are addressed with int64, and of an inactive row nothing is read but its flag. A
row that breaks a rule which only the device can see is NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_loss.kernels.launching import launched
from rl_loss.kernels.logits import inverse_of
from rl_loss.kernels.records import (
    BROKEN,
    KIND_DRAWS,
    KIND_FAILED,
    KIND_HEAD,
    KIND_NONE,
    KIND_REPLAY,
    ONE_ID,
    OVER_V,
    REPLAYED,
    UNREAD,
    HeadCall,
    RowOutputs,
)
from rl_loss.plan import width_block


@triton.jit
def _online(top, total, z):
    """A running maximum and sum a lane, one logit more; NaN stays NaN."""
    up = tl.maximum(top, z)
    shift = tl.where(up == float("-inf"), 0.0, up)
    return up, total * tl.exp(top - shift) + tl.exp(z - shift)


@launched
@triton.jit
def _rows_kernel(
    support_logprobs,  # [nnz] in: logits, out: log-probabilities
    ids,  # [nnz] int32
    known,  # [nnz] uint8
    offsets,  # [N + 1] int64
    kind,  # [N] int8
    labels,  # [N]
    active,  # [N] uint8
    temperature,  # [N]
    chosen,  # int64 the rows; None: all
    top_v,  # [N] stats over the vocabulary, without the known ids of HEAD rows
    total_v,  # [N]
    moment_v,  # [N]
    label_z,  # [N]
    logprobs,  # [N] out
    tails,  # [N] out
    entropy,  # [N] out
    full,  # [N] out: the label over the vocabulary
    lse,  # [N] out: over what the row is normalised over
    lse_v,  # [N] out: over the vocabulary, where there are stats
    valid,  # [nnz] uint8 out
    state,  # [N] uint8 out
    one_temperature,
    V,
    HAS_ACTIVE: tl.constexpr,
    PER_ROW: tl.constexpr,
    CHOSEN: tl.constexpr,
    STATS: tl.constexpr,
    ENTROPY: tl.constexpr,  # 0: none, 1: of what the row is normalised over, 2: over V
    FULL: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    """Normalises one row; a replayed row of one id needs no logit."""
    row = tl.program_id(0).to(tl.int64)
    if CHOSEN:
        row = tl.load(chosen + row)
    start, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    this = tl.load(kind + row)
    on = this >= KIND_FAILED
    if HAS_ACTIVE:
        on = tl.load(active + row) != 0
    replay = on & (this == KIND_REPLAY)
    over = on & ((this == KIND_NONE) | (this == KIND_HEAD) | (this == KIND_DRAWS))
    head = over & (this == KIND_HEAD)
    label = tl.load(labels + row).to(tl.int64)
    several = end - start > 1  # one id has log p = 0 whatever its logit
    # Masks are bounds: what lies behind one of them is not of that sort.
    read = tl.where(replay | over, end, start)
    computed = tl.where((replay & several) | over, end, start)
    replayed = tl.where(replay, end, start)
    headed = tl.where(head, end, start)
    minus_inf = float("-inf")
    top = tl.full([BLOCK], minus_inf, dtype=ACC)
    total = tl.zeros([BLOCK], dtype=ACC)
    top_tail = tl.full([BLOCK], minus_inf, dtype=ACC)
    total_tail = tl.zeros([BLOCK], dtype=ACC)
    found = tl.zeros([BLOCK], dtype=tl.int32)
    outside = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(start, read, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        held = entry < end
        v = tl.load(ids + entry, mask=held, other=0).to(tl.int64)
        x = tl.load(support_logprobs + entry, mask=entry < computed, other=0.0)
        unknown = tl.load(known + entry, mask=held, other=1) == 0
        found += (held & (v == label)).to(tl.int32)
        outside += (held & ((v < 0) | (v >= V))).to(tl.int32)
        # The whole support of a replayed row; the known ids of a HEAD row.
        counts = (entry < replayed) | ((entry < headed) & (unknown == 0))
        top, total = _online(top, total, tl.where(counts, x, minus_inf))
        tail_z = tl.where((entry < replayed) & unknown, x, minus_inf)
        top_tail, total_tail = _online(top_tail, total_tail, tail_z)
    peak = tl.max(top, axis=0)
    safe = tl.where(peak == minus_inf, 0.0, peak)
    mass = tl.sum(total * tl.exp(top - safe), axis=0)
    norm_v = tl.zeros([], dtype=ACC)
    log_label = tl.zeros([], dtype=ACC)
    if STATS:
        stats = over
        if FULL or ENTROPY == 2:
            stats = over | replay
        m = tl.load(top_v + row, mask=stats, other=0.0)
        s = tl.load(total_v + row, mask=stats, other=1.0)
        norm_v = m + tl.log(s)
        # A HEAD row is its known ids and what is left of V.
        up = tl.maximum(peak, m)
        both = up + tl.log(mass * tl.exp(safe - up) + s * tl.exp(m - up))
        tail_v = norm_v
        norm_v = tl.where(head & (mass > 0), both, norm_v)
        tail_v = tl.where(head & (s > 0), tail_v - norm_v, minus_inf)
        log_label = tl.load(label_z + row, mask=stats, other=0.0) - norm_v
    norm = peak + tl.log(mass)
    peak_tail = tl.max(top_tail, axis=0)
    safe_tail = tl.where(peak_tail == minus_inf, 0.0, peak_tail)
    mass_tail = tl.sum(total_tail * tl.exp(top_tail - safe_tail), axis=0)
    some_tail = mass_tail != 0
    tail = safe_tail + tl.log(tl.where(some_tail, mass_tail, 1.0)) - norm
    tail = tl.where(some_tail, tail, minus_inf)
    if STATS:
        norm = tl.where(over, norm_v, norm)
        tail = tl.where(over, tail_v, tail)
    inverse = inverse_of(temperature, row, one_temperature, PER_ROW, ACC)
    bad = (inverse != inverse) | (label < 0) | (label >= V) | (tl.sum(outside, axis=0) > 0)
    bad = bad | (replay & (tl.sum(found, axis=0) == 0)) | ((this > KIND_NONE) & (end == start))
    bad = on & ((this == KIND_FAILED) | bad)
    usable_end = tl.where((replay | over) & (bad == 0), end, start)
    nan = float("nan")
    picked = tl.zeros([BLOCK], dtype=ACC)
    disorder = tl.zeros([BLOCK], dtype=ACC)
    counted = tl.where(replay & (ENTROPY == 1), end, headed)
    for first in range(start, end, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        held = entry < end
        v = tl.load(ids + entry, mask=held, other=-1).to(tl.int64)
        x = tl.load(support_logprobs + entry, mask=entry < computed, other=0.0)
        q_known = tl.load(known + entry, mask=held, other=0) != 0
        logp = tl.where(entry < computed, x - norm, 0.0)
        picked += tl.where((entry < replayed) & (v == label), logp, 0.0)
        if ENTROPY > 0:
            counts = (entry < counted) & (q_known | (entry < replayed))
            part = tl.exp(logp) * tl.where(logp == minus_inf, 0.0, logp)
            disorder -= tl.where(counts, part, 0.0)
        tl.store(support_logprobs + entry, tl.where(bad, nan, logp), mask=held)
        usable = q_known & (entry < usable_end)
        tl.store(valid + entry, usable.to(tl.uint8), mask=held)
    if FULL:
        tl.store(full + row, tl.where(bad, nan, tl.where(replay | over, log_label, 0.0)))
    log_label = tl.where(replay, tl.sum(picked, axis=0), log_label)
    tl.store(logprobs + row, tl.where(bad, nan, tl.where(replay | over, log_label, 0.0)))
    tl.store(tails + row, tl.where(bad, nan, tl.where(replay | over, tail, 0.0)))
    tl.store(lse + row, tl.where((replay & several) | over, norm, 0.0))
    code = tl.where(replay, tl.where(several, REPLAYED, ONE_ID), UNREAD)
    code = tl.where(bad, BROKEN, tl.where(over, OVER_V, code))
    tl.store(state + row, code.to(tl.uint8))
    if STATS:
        tl.store(lse_v + row, norm_v)
    if ENTROPY > 0:
        h = tl.sum(disorder, axis=0)
        if STATS:
            disordered = over
            if ENTROPY == 2:
                disordered = stats
            a = tl.load(moment_v + row, mask=disordered, other=0.0)
            rest = a + s * (m - norm_v)
            h -= tl.where(disordered & (s > 0), tl.exp(m - norm_v) * rest, 0.0)
        tl.store(entropy + row, tl.where(bad, nan, tl.where(replay | over, h, 0.0)))


def normalise(
    call: HeadCall,
    out: RowOutputs,
    stats: Tensor | None = None,  # [4, N]: top, total, moment over V, the label's logit
    chosen: Tensor | None = None,  # the rows, all by default
) -> None:
    """Turns the logits in `out.support_logprobs` to all outputs: one launch."""
    rows, logits = call.rows, call.logit
    active, known = call.active, call.known
    n = call.n if chosen is None else len(chosen)
    if n:
        _rows_kernel[(n,)](
            out.support_logprobs,
            rows.ids,
            known,
            rows.offsets,
            rows.kind,
            rows.labels,
            active,
            logits.temperature,
            chosen,
            *((None,) * 4 if stats is None else stats),
            out.logprobs,
            out.tail_logprobs,
            out.entropy,
            out.full_logprobs,
            out.lse,
            out.lse_v,
            out.valid.view(torch.uint8),
            out.state,
            logits.one_temperature,
            call.scalars.vocab_size,
            HAS_ACTIVE=active is not None,
            PER_ROW=logits.temperature is not None,
            CHOSEN=chosen is not None,
            STATS=stats is not None,
            ENTROPY=call.scalars.entropy,
            FULL=call.scalars.full,
            ACC=logits.flags["ACC"],
            **width_block(call.n, len(rows.ids)),
        )
