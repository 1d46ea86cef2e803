"""Kernels of REPLAY rows: the logits of support entries, and what a row makes of them.

Every kernel addresses rows and entries with int64, reads nothing of an inactive row but its flag,
and leaves the rows of other kinds at 0. A row that breaks a rule which only the device can see is
NaN.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_loss.support import TILE

ACC_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit
def _tanh(x):
    t = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - t) / (1.0 + t)
    return tl.where(x < 0, -y, y)


@triton.jit
def inv_temperature(temperature, row, scalar, PER_ROW: tl.constexpr, ACC: tl.constexpr):
    """1 / T; NaN where T is not above 0 and finite."""
    t = scalar
    if PER_ROW:
        t = tl.load(temperature + row).to(ACC)
    good = (t > 0) & (t < float("inf"))
    return tl.where(good, 1.0 / tl.where(good, t, 1.0), float("nan"))


@triton.jit
def _logits_kernel(
    hidden,  # [N, H]
    weight,  # [V, H]
    bias,  # [V]
    ids,  # [nnz] int32
    offsets,  # [N + 1] int64
    tiles,  # [T] int64: row << 32 | number of the tile in its row
    active,  # [N] uint8
    temperature,  # [N]
    z,  # [nnz] out
    T,
    H,
    V,
    sh0,
    sh1,
    sw0,
    sw1,
    HAS_BIAS: tl.constexpr,
    HAS_ACTIVE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALE: tl.constexpr,
    PER_ROW: tl.constexpr,
    FAR: tl.constexpr,
    WHOLE_H: tl.constexpr,
    TILE: tl.constexpr,
    R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ACC: tl.constexpr,
):
    """Logits of one tile of a row's entries; the hidden row stays in registers where it fits."""
    tile = tl.load(tiles + tl.program_id(0))
    row = tile >> 32
    on = True
    if HAS_ACTIVE:
        on = tl.load(active + row) != 0
    if on:
        start = tl.load(offsets + row) + (tile & 0xFFFFFFFF) * TILE
        end = tl.minimum(tl.load(offsets + row + 1), start + TILE)
        inv = inv_temperature(temperature, row, T, PER_ROW, ACC)
        columns = tl.arange(0, BLOCK_H)
        if FAR:
            columns = columns.to(tl.int64)
        h_row = hidden + row * sh0
        h = tl.load(h_row + columns * sh1, mask=columns < H, other=0.0).to(ACC)
        for first in range(start, end, R):
            entry = first + tl.arange(0, R)
            held = entry < end
            v = tl.load(ids + entry, mask=held, other=0).to(tl.int64)
            held = held & (v >= 0) & (v < V)
            w_rows = weight + v[:, None] * sw0
            if WHOLE_H:
                w = tl.load(
                    w_rows + columns[None, :] * sw1,
                    mask=held[:, None] & (columns < H)[None, :],
                    other=0.0,
                )
                raw = tl.sum(w.to(ACC) * h[None, :], axis=1)
            else:
                raw = tl.zeros([R], dtype=ACC)
                for at in range(0, H, BLOCK_H):
                    c = at + columns
                    part = tl.load(h_row + c * sh1, mask=c < H, other=0.0).to(ACC)
                    w = tl.load(
                        w_rows + c[None, :] * sw1,
                        mask=held[:, None] & (c < H)[None, :],
                        other=0.0,
                    )
                    raw += tl.sum(w.to(ACC) * part[None, :], axis=1)
            if HAS_BIAS:
                raw += tl.load(bias + v, mask=held, other=0.0).to(ACC)
            raw *= SCALE
            if SOFTCAP > 0:
                raw = SOFTCAP * _tanh(raw / SOFTCAP)
            tl.store(z + entry, raw * inv, mask=entry < end)


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
    logprobs,  # [N] out
    tails,  # [N] out
    entropy,  # [N] out
    lse,  # [N] out
    valid,  # [nnz] uint8 out
    state,  # [N] uint8 out: 0 computed, 1 broken, 2 not read, 3 of one id
    T,
    V,
    HAS_ACTIVE: tl.constexpr,
    PER_ROW: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    """Normalises one row over its support; a row of one id needs no logit."""
    row = tl.program_id(0).to(tl.int64)
    start, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    this = tl.load(kind + row)
    on = this >= -1
    if HAS_ACTIVE:
        on = tl.load(active + row) != 0
    replay = on & (this == 1)
    label = tl.load(labels + row).to(tl.int64)
    several = end - start > 1  # one id has log p = 0 whatever its logit
    # Masks are bounds: what lies behind `computed` has no logit.
    computed = tl.where(replay & several, end, start)
    minus_inf = float("-inf")
    top = tl.full([BLOCK], minus_inf, dtype=ACC)
    total = tl.zeros([BLOCK], dtype=ACC)
    top_tail = tl.full([BLOCK], minus_inf, dtype=ACC)
    total_tail = tl.zeros([BLOCK], dtype=ACC)
    found = tl.zeros([BLOCK], dtype=tl.int32)
    outside = tl.zeros([BLOCK], dtype=tl.int32)
    if replay:
        for first in range(start, end, BLOCK):
            entry = first + tl.arange(0, BLOCK)
            held = entry < end
            v = tl.load(ids + entry, mask=held, other=0).to(tl.int64)
            x = tl.load(support_logprobs + entry, mask=entry < computed, other=0.0)
            unknown = tl.load(known + entry, mask=held, other=1) == 0
            found += (held & (v == label)).to(tl.int32)
            outside += (held & ((v < 0) | (v >= V))).to(tl.int32)
            # A running maximum and sum a lane; lanes meet once, below. NaN stays NaN.
            z = tl.where(held, x, minus_inf)
            up = tl.maximum(top, z)
            shift = tl.where(up == minus_inf, 0.0, up)
            total = total * tl.exp(top - shift) + tl.exp(z - shift)
            top = up
            z = tl.where(held & unknown, x, minus_inf)
            up = tl.maximum(top_tail, z)
            shift = tl.where(up == minus_inf, 0.0, up)
            total_tail = total_tail * tl.exp(top_tail - shift) + tl.exp(z - shift)
            top_tail = up
    peak = tl.max(top, axis=0)
    norm = peak + tl.log(tl.sum(total * tl.exp(top - peak), axis=0))
    peak_tail = tl.max(top_tail, axis=0)
    safe = tl.where(peak_tail == minus_inf, 0.0, peak_tail)
    mass = tl.sum(total_tail * tl.exp(top_tail - safe), axis=0)
    tail = tl.where(mass == 0, minus_inf, safe + tl.log(tl.where(mass == 0, 1.0, mass)) - norm)
    inv = inv_temperature(temperature, row, T, PER_ROW, ACC)
    bad = (inv != inv) | (label < 0) | (label >= V)
    bad = bad | (tl.sum(found, axis=0) == 0) | (tl.sum(outside, axis=0) > 0)
    bad = on & ((this == -1) | (replay & bad))
    usable_end = tl.where(replay & (bad == 0), end, start)
    nan = float("nan")
    picked = tl.zeros([BLOCK], dtype=ACC)
    disorder = tl.zeros([BLOCK], dtype=ACC)
    for first in range(start, end, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        held = entry < end
        v = tl.load(ids + entry, mask=held, other=-1).to(tl.int64)
        x = tl.load(support_logprobs + entry, mask=entry < computed, other=0.0)
        q_known = tl.load(known + entry, mask=held, other=0) != 0
        logp = tl.where(entry < computed, x - norm, 0.0)
        picked += tl.where(held & (v == label), logp, 0.0)
        if ENTROPY:
            disorder -= tl.exp(logp) * tl.where(logp == minus_inf, 0.0, logp)
        tl.store(support_logprobs + entry, tl.where(bad, nan, logp), mask=held)
        usable = q_known & (entry < usable_end)
        tl.store(valid + entry, usable.to(tl.uint8), mask=held)
    tl.store(logprobs + row, tl.where(bad, nan, tl.where(replay, tl.sum(picked, axis=0), 0.0)))
    tl.store(tails + row, tl.where(bad, nan, tl.where(replay, tail, 0.0)))
    tl.store(lse + row, tl.where(replay & several, norm, 0.0))
    read = tl.where(replay, tl.where(several, 0, 3), 2)
    tl.store(state + row, tl.where(bad, 1, read).to(tl.uint8))
    if ENTROPY:
        tl.store(entropy + row, tl.where(bad, nan, tl.sum(disorder, axis=0)))


class GatheredRows(NamedTuple):
    """What the forward gives: the four outputs, and what the backward reads beside them."""

    logprobs: Tensor  # [N]
    support_logprobs: Tensor  # [nnz]
    tail_logprobs: Tensor  # [N]
    entropy: Tensor  # [N], empty where not asked for
    valid: Tensor  # [nnz] bool
    lse: Tensor  # [N]
    state: Tensor  # [N] uint8: 0 computed, 1 broken, 2 not read, 3 of one id


def width_block(max_width: int) -> dict[str, int]:
    """Entries that a program of the row kernels takes at a time, and its warps."""
    if max_width <= 32:
        return {"BLOCK": 32, "num_warps": 1}
    if max_width <= 128:
        return {"BLOCK": 128, "num_warps": 1}
    return {"BLOCK": 1024, "num_warps": 4}


def _logits_shape(h: int, max_width: int) -> dict[str, int | bool]:
    """The block of the logits kernel: weight rows at a time and columns held in registers."""
    # At least 256 columns: narrower, the threads of a warp would hold the same values twice.
    block = min(max(triton.next_power_of_2(h), 256), 4096)
    # Measured at H 2048: one warp and two rows are best once rows are wide (benchmarks/NOTES.md).
    rows, warps = (8, 4) if max_width <= 16 else (2, 1)
    scale = max(1, block // 2048)
    return {
        "WHOLE_H": h <= block,
        "R": max(1, rows // scale),
        "BLOCK_H": block,
        "num_warps": min(8, warps * scale),
    }


def gathered_rows_fwd(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    bias: Tensor | None,  # [V]
    labels: Tensor,  # [N]
    temperature: Tensor | float,  # [N]
    active: Tensor | None,  # [N] bool
    ids: Tensor,  # [nnz] int32
    known: Tensor,  # [nnz] bool
    offsets: Tensor,  # [N + 1] int64
    kind: Tensor,  # [N] int8
    tiles: Tensor,  # [T] int64
    max_width: int,
    softcap: float,  # 0: none
    scale: float,
    want_entropy: bool,
    **shape: int | bool,
) -> GatheredRows:
    """Log-probabilities of all REPLAY rows: two launches."""
    n, h = hidden.shape
    acc = torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else torch.float32
    if acc == torch.float64 and not isinstance(temperature, Tensor):
        # A scalar argument of a kernel is float32.
        temperature = torch.full((n,), temperature, dtype=acc, device=hidden.device)
    per_row = isinstance(temperature, Tensor)
    new = hidden.new_empty
    support_logprobs = new(len(ids), dtype=acc)
    logprobs, tails, lse = new(n, dtype=acc), new(n, dtype=acc), new(n, dtype=acc)
    entropy = new(n if want_entropy else 0, dtype=acc)
    valid, state = new(len(ids), dtype=torch.bool), new(n, dtype=torch.uint8)
    flags = None if active is None else active.view(torch.uint8)
    bias = None if bias is None else bias.contiguous()
    common = {"HAS_ACTIVE": active is not None, "PER_ROW": per_row, "ACC": ACC_TYPES[acc]}
    t = (temperature, 1.0) if per_row else (None, float(temperature))
    if len(tiles):
        _logits_kernel[(len(tiles),)](
            hidden,
            weight,
            bias,
            ids,
            offsets,
            tiles,
            flags,
            t[0],
            support_logprobs,
            t[1],
            h,
            len(weight),
            *hidden.stride(),
            *weight.stride(),
            HAS_BIAS=bias is not None,
            SOFTCAP=softcap,
            SCALE=scale,
            FAR=max(hidden.stride(1), weight.stride(1)) * h >= 2**31,
            TILE=TILE,
            **common,
            **{**_logits_shape(h, max_width), **shape},
        )
    if n:
        _rows_kernel[(n,)](
            support_logprobs,
            ids,
            known.view(torch.uint8),
            offsets,
            kind,
            labels,
            flags,
            t[0],
            logprobs,
            tails,
            entropy,
            lse,
            valid.view(torch.uint8),
            state,
            t[1],
            len(weight),
            ENTROPY=want_entropy,
            **common,
            **width_block(max_width),
        )
    return GatheredRows(logprobs, support_logprobs, tails, entropy, valid, lse, state)
