"""The kernel between upstream gradients and the two gradients of products: one number an entry."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_loss.kernels.gathered import ACC_TYPES, GatheredRows, inv_temperature, width_block


@triton.jit
def _entry_grads_kernel(
    support_logprobs,  # [nnz]
    ids,  # [nnz] int32
    known,  # [nnz] uint8
    offsets,  # [N + 1] int64
    labels,  # [N]
    temperature,  # [N]
    tails,  # [N]
    entropy,  # [N]
    lse,  # [N]
    state,  # [N] uint8
    d_logprobs,  # [N]
    d_support,  # [nnz]
    d_tails,  # [N]
    d_entropy,  # [N]
    grad,  # [nnz] out
    rows,  # [nnz] int32 out: each entry's row
    flags,  # [N] uint8 out: 1 where the row's hidden gradient is NaN
    T,
    PER_ROW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALE: tl.constexpr,
    D_LOGPROBS: tl.constexpr,
    D_SUPPORT: tl.constexpr,
    D_TAILS: tl.constexpr,
    D_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    """The gradient of each raw product of a row, 0 wherever there is none."""
    row = tl.program_id(0).to(tl.int64)
    start, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    this = tl.load(state + row)
    on = (this == 0) | (this == 3)
    label = tl.load(labels + row).to(tl.int64)
    inv = inv_temperature(temperature, row, T, PER_ROW, ACC)
    d_label = tl.zeros([], dtype=ACC)
    if D_LOGPROBS:
        d_label = tl.load(d_logprobs + row, mask=on, other=0.0).to(ACC)
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
    lost = (this == 1) | ((this == 3) & ((total != total) | (d_h != d_h)))
    tl.store(flags + row, lost.to(tl.uint8))
    stop = tl.where(this == 0, end, start)
    for first in range(start, end, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        held = entry < end
        read = entry < stop
        logp = tl.load(support_logprobs + entry, mask=read, other=0.0)
        v = tl.load(ids + entry, mask=read, other=-1).to(tl.int64)
        p = tl.exp(logp)
        u = tl.where(v == label, d_label, 0.0)
        if D_SUPPORT:
            u += tl.load(d_support + entry, mask=read, other=0.0).to(ACC)
        if D_TAILS:
            unknown = tl.load(known + entry, mask=read, other=1) == 0
            u += tl.where(unknown, tl.exp(tl.where(unknown, logp - tail, 0.0)) * d_tail, 0.0)
        dz = u - p * total
        if D_ENTROPY:
            dz -= p * (tl.where(p == 0, 0.0, logp) + h) * d_h
        if SOFTCAP > 0:
            capped = (logp + norm) / (inv * SOFTCAP)
            dz *= 1.0 - capped * capped
        tl.store(grad + entry, tl.where(read, dz * (SCALE * inv), 0.0), mask=held)
        tl.store(rows + entry, row.to(tl.int32), mask=held)


def entry_grads(
    saved: GatheredRows,
    labels: Tensor,
    temperature: Tensor | float,
    ids: Tensor,
    known: Tensor,
    offsets: Tensor,
    max_width: int,
    softcap: float,
    scale: float,
    d_logprobs: Tensor | None,  # [N]
    d_support_logprobs: Tensor | None,  # [nnz]
    d_tail_logprobs: Tensor | None,  # [N]
    d_entropy: Tensor | None,  # [N]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of each entry's raw product `hidden . weight`, its row `[nnz]`, and a flag
    `[N]` for rows whose hidden gradient is NaN: one launch."""
    n, acc = len(labels), saved.logprobs.dtype
    grad = torch.empty_like(saved.support_logprobs)
    rows, flags = torch.empty_like(ids), torch.empty_like(saved.state)
    if acc == torch.float64 and not isinstance(temperature, Tensor):
        temperature = torch.full((n,), temperature, dtype=acc, device=labels.device)
    per_row = isinstance(temperature, Tensor)
    upstreams = [d_logprobs, d_support_logprobs, d_tail_logprobs, d_entropy]
    upstreams = [None if d is None else d.contiguous() for d in upstreams]
    if n:
        _entry_grads_kernel[(n,)](
            saved.support_logprobs,
            ids,
            known.view(torch.uint8),
            offsets,
            labels,
            temperature if per_row else None,
            saved.tail_logprobs,
            saved.entropy,
            saved.lse,
            saved.state,
            *upstreams,
            grad,
            rows,
            flags,
            1.0 if per_row else float(temperature),
            PER_ROW=per_row,
            SOFTCAP=softcap,
            SCALE=scale,
            D_LOGPROBS=d_logprobs is not None,
            D_SUPPORT=d_support_logprobs is not None,
            D_TAILS=d_tail_logprobs is not None,
            D_ENTROPY=d_entropy is not None,
            ACC=ACC_TYPES[acc],
            **width_block(max_width),
        )
    return grad, rows, flags
