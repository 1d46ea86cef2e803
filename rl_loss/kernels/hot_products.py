"""The products of the most frequent ids on the tensor cores: logits, and both gradients.

A tenth of the cost of gathering a row for every entry. Gradients are laid out as a matrix `[N, 2,
S]`: rows, two numbers a gradient, slots. Blocks of slots that no id has end at once.

A hidden row that is not finite, of an active row with a gradient, makes the weight gradients of
all hot ids NaN, not of its own ids alone; so does a hot id's row of the weight that is not finite
with the hidden gradients of all rows.
"""

from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_loss.kernels.launching import launched
from rl_loss.kernels.records import (
    KIND_NONE,
    KIND_REPLAY,
    OVER_V,
    REPLAYED,
    UNREAD,
    HeadCall,
    HotIds,
)

# Tiles of the products and how they are launched.
LOGITS_TILE = {"BLOCK_M": 128, "BLOCK_S": 128, "BLOCK_H": 64, "num_warps": 8, "num_stages": 3}
HIDDEN_TILE = {"BLOCK_M": 128, "BLOCK_H": 128, "BLOCK_S": 64, "num_warps": 8, "num_stages": 4}
WEIGHT_TILE = {"BLOCK_S": 128, "BLOCK_H": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3}
NARROW_TILE = {"BLOCK_S": 64, "BLOCK_H": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}

# The weight's product is cut into runs of rows, added up at the end: of so many programs, no run
# shorter than so many rows.
_PROGRAMS, _LEAST_RUN = 512, 1024
# Slots up to which its tile is the narrow one.
_NARROW = 512


@launched
@triton.jit
def _hot_logits_kernel(
    hidden,  # [N, H]
    weight,  # [V, H]
    hot_ids,  # [S] int32
    kind,  # [N] int8
    active,  # [N] uint8
    z,  # [N, S] out
    N,
    H,
    S,
    sh0,
    sh1,
    sw0,
    sw1,
    HAS_ACTIVE: tl.constexpr,
    FAR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """A tile of `hidden @ weight[hot_ids].T`, of replayed rows.

    The tensor cores cut off what does not fit when they add up: theirs are sums of few terms, and
    these are added up here.
    """
    blocks = S // BLOCK_S
    slot = tl.program_id(0) % blocks * BLOCK_S + tl.arange(0, BLOCK_S)
    row = tl.program_id(0) // blocks * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    v = tl.load(hot_ids + slot)
    on = tl.load(kind + row, mask=row < N, other=KIND_NONE) == KIND_REPLAY
    if HAS_ACTIVE:
        on = on & (tl.load(active + row, mask=row < N, other=0) != 0)
    if (tl.max(v, axis=0) >= 0) & (tl.max(on.to(tl.int32), axis=0) > 0):
        columns = tl.arange(0, BLOCK_H)
        if FAR:
            columns = columns.to(tl.int64)
        rows = hidden + row[:, None] * sh0
        ids = weight + v.to(tl.int64)[None, :] * sw0
        total = tl.zeros([BLOCK_M, BLOCK_S], dtype=tl.float32)
        for first in range(0, H, 2 * BLOCK_H):
            part = tl.zeros([BLOCK_M, BLOCK_S], dtype=tl.float32)
            for half in tl.static_range(2):
                c = first + half * BLOCK_H + columns
                h = tl.load(rows + c[None, :] * sh1, mask=on[:, None] & (c < H)[None, :], other=0.0)
                w = tl.load(
                    ids + c[:, None] * sw1, mask=(v >= 0)[None, :] & (c < H)[:, None], other=0.0
                )
                part = tl.dot(h, w, part)
            total += part
        tl.store(z + row[:, None] * S + slot[None, :], total, mask=(row < N)[:, None])


@launched
@triton.jit
def _hot_hidden_kernel(
    matrix,  # [N, 2, S]
    weight,  # [V, H]
    hot_ids,  # [S] int32
    hot_used,  # [1] int32
    state,  # [N] uint8
    out,  # [N, H]
    N,
    H,
    S,
    sw0,
    sw1,
    FAR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """A tile of `matrix @ weight[hot_ids]`, 0 in rows without a gradient."""
    blocks = tl.cdiv(H, BLOCK_H)
    columns = tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    if FAR:
        columns = columns.to(tl.int64)
    row = tl.program_id(0) // blocks * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    inside = (row < N)[:, None]
    this = tl.load(state + row, mask=row < N, other=UNREAD)
    some = tl.max(((this == REPLAYED) | (this == OVER_V)).to(tl.int32), axis=0)
    total = tl.zeros([BLOCK_M, BLOCK_H], dtype=tl.float32)
    for first in range(0, tl.where(some > 0, tl.load(hot_used), 0), BLOCK_S):
        slot = first + tl.arange(0, BLOCK_S)
        v = tl.load(hot_ids + slot).to(tl.int64)
        w = tl.load(
            weight + v[:, None] * sw0 + columns[None, :] * sw1,
            mask=(v >= 0)[:, None] & (columns < H)[None, :],
            other=0.0,
        )
        cells = matrix + row[:, None] * (2 * S) + slot[None, :]
        total = tl.dot(tl.load(cells, mask=inside, other=0.0), w, total)
        total = tl.dot(tl.load(cells + S, mask=inside, other=0.0), w, total)
    tl.store(out + row[:, None] * H + columns[None, :], total, mask=inside & (columns < H)[None, :])


@launched
@triton.jit
def _hot_weight_kernel(
    hidden,  # [N, H]
    matrix,  # [N, 2, S]
    hot_ids,  # [S] int32
    state,  # [N] uint8: of REPLAYED and OVER_V rows alone hidden states are read
    parts,  # [splits, S, H] out
    N,
    H,
    S,
    sh0,
    sh1,
    rows_a_split,
    FAR: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A block of `matrix.T @ hidden` over one run of rows."""
    slot = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    if FAR:
        columns = columns.to(tl.int64)
    split = tl.program_id(2)
    if tl.max(tl.load(hot_ids + slot), axis=0) >= 0:
        total = tl.zeros([BLOCK_S, BLOCK_H], dtype=tl.float32)
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
            cells = matrix + row[None, :] * (2 * S) + slot[:, None]
            inside = (row < end)[None, :]
            total = tl.dot(tl.load(cells, mask=inside, other=0.0), h, total)
            total = tl.dot(tl.load(cells + S, mask=inside, other=0.0), h, total)
        part = parts + (split * S + slot).to(tl.int64)[:, None] * H + columns[None, :]
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
    o = tl.load(hot_ids + slot).to(tl.int64) - first
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


class HotRows(NamedTuple):
    """The hot ids and their rows of the weight gradient."""

    slots: Tensor  # [V] int32, -1 where an id is not hot
    ids: Tensor  # [S] int32, -1 where a slot is not used
    grads: Tensor  # [S, H] float32, in slots that are used


def _tile(given: dict[str, int], slots: int) -> dict[str, int]:
    """Its slots divide those that there are."""
    return {**given, "BLOCK_S": gcd(given["BLOCK_S"], slots)}


def hot_logits(call: HeadCall, hot: HotIds) -> Tensor:
    """The raw products `[N, S]` of all replayed rows with the hot ids; the rest is not written."""
    hidden, weight, slots = call.hidden, call.weight, len(hot.ids)
    n, h = hidden.shape
    z = torch.empty(n, slots, dtype=torch.float32, device=hidden.device)
    tile = _tile(LOGITS_TILE, slots)
    _hot_logits_kernel[(triton.cdiv(n, tile["BLOCK_M"]) * (slots // tile["BLOCK_S"]),)](
        hidden, weight, hot.ids, call.rows.kind, call.active, z, n, h, slots,
        *hidden.stride(), *weight.stride(),
        HAS_ACTIVE=call.active is not None,
        FAR=max(hidden.stride(1), weight.stride(1)) * h >= 2**31, **tile,
    )  # fmt: skip
    return z


def hot_hidden(call: HeadCall, hot: HotIds, matrix: Tensor, state: Tensor, rows: slice) -> Tensor:
    """What the hot entries of a run of rows make of their hidden gradient, `[R, H]` float32."""
    some, weight, h = matrix[rows], call.weight, call.hidden.shape[1]
    out = torch.empty(len(some), h, dtype=torch.float32, device=some.device)
    tile = _tile(HIDDEN_TILE, len(hot.ids))
    grid = triton.cdiv(len(some), tile["BLOCK_M"]) * triton.cdiv(h, tile["BLOCK_H"])
    _hot_hidden_kernel[(grid,)](
        some, weight, hot.ids, hot.used, state[rows], out, len(some), h, len(hot.ids),
        *weight.stride(), FAR=weight.stride(1) * h >= 2**31, **tile,
    )  # fmt: skip
    return out


def hot_weight(call: HeadCall, hot: HotIds, matrix: Tensor, state: Tensor) -> HotRows:
    """The hot ids' rows of the weight gradient; `state` `[N]` as the forward gave it."""
    hidden, slots = call.hidden, len(hot.ids)
    n, h = hidden.shape
    tile = _tile(NARROW_TILE if slots <= _NARROW else WEIGHT_TILE, slots)
    grid = slots // tile["BLOCK_S"], triton.cdiv(h, tile["BLOCK_H"])
    splits = max(1, min(_PROGRAMS // (grid[0] * grid[1]), 8, n // _LEAST_RUN))
    parts = torch.empty(splits, slots, h, dtype=torch.float32, device=hidden.device)
    _hot_weight_kernel[(*grid, splits)](
        hidden, matrix, hot.ids, state, parts, n, h, slots, *hidden.stride(),
        triton.cdiv(triton.cdiv(n, splits), tile["BLOCK_N"]) * tile["BLOCK_N"],
        FAR=hidden.stride(1) * h >= 2**31, **tile,
    )  # fmt: skip
    return HotRows(hot.slots, hot.ids, parts.sum(0) if splits > 1 else parts[0])


def write_hot_rows(
    hot: HotRows, out: Tensor, base: Tensor | None, first: int = 0, into: bool = False
) -> None:
    """Writes the hot rows among those of `out` `[B, H]`, the ids from `first` on; `base`
    `[B, H]` is added before the rounding, and with `into` what `out` holds."""
    m, h = out.shape
    _write_hot_kernel[(len(hot.ids), triton.cdiv(h, 1024))](
        out, base, hot.grads, hot.ids, first, m, h, out.stride(0),
        HAS_BASE=base is not None, INTO=into, BLOCK_H=1024,
    )  # fmt: skip
