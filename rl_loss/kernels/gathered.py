"""The logits of the entries of REPLAY rows, gathered: one weight row an entry, the hidden row in
registers. Frequent ids are picked from a product where there is one (`hot_products`)."""

import triton
import triton.language as tl

from rl_loss.kernels.hot_ids import find_hot_ids
from rl_loss.kernels.hot_products import hot_logits
from rl_loss.kernels.launching import launched
from rl_loss.kernels.logits import inverse_of, logit
from rl_loss.kernels.records import HeadCall, RowOutputs
from rl_loss.plan import TILE

_MOST_COLUMNS = 4096  # of a hidden row in one block of registers


@triton.jit
def _pick_hot(
    hot_products, bias, ids, within, slots, z, begin, entry, end, inverse, V,
    HAS_OWN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALE: tl.constexpr,
    ROUND: tl.constexpr,
):  # fmt: skip
    """Logits of a tile's hot entries, from their products. Gives the tile's ids, each one's place
    among those that are left (-1: hot, or none), and how many these are."""
    there = entry < end
    if HAS_OWN:
        entry = begin + tl.load(within + entry, mask=there, other=0)
    v = tl.load(ids + entry, mask=there, other=-1)
    slot = tl.load(slots + v, mask=(v >= 0) & (v < V), other=-1)
    hot = slot >= 0
    raw = tl.load(hot_products + slot, mask=hot, other=0.0)
    raw = logit(raw, bias, v, hot, inverse, HAS_BIAS, SOFTCAP, SCALE, ROUND)
    tl.store(z + entry, raw, mask=hot)
    cold = (there & (slot < 0)).to(tl.int32)
    return v, tl.where(cold != 0, tl.cumsum(cold, axis=0) - 1, -1), tl.sum(cold, axis=0)


@launched
@triton.jit
def _logits_kernel(
    hidden,  # [N, H]
    weight,  # [V, H]
    bias,  # [V]
    ids,  # [nnz] int32
    offsets,  # [N + 1] int64
    tiles,  # [T] int64: row << 32 | number of the tile in its row
    within,  # [nnz] int32 the entries that count, see `OwnEntries`; None: all
    counts,  # [N] int32
    active,  # [N] uint8
    temperature,  # [N]
    slots,  # [V] int32, see `HotIds`
    hot_products,  # [N, S] raw products with the hot ids
    z,  # [nnz] out
    one_temperature,
    H,
    V,
    S,
    sh0,
    sh1,
    sw0,
    sw1,
    HAS_HOT: tl.constexpr,
    HAS_OWN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ACTIVE: tl.constexpr,
    PER_ROW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALE: tl.constexpr,
    ROUND: tl.constexpr,
    FAR: tl.constexpr,
    WHOLE_H: tl.constexpr,
    TILE: tl.constexpr,
    R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    REST_H: tl.constexpr,
    ACC: tl.constexpr,
):
    """Logits of one tile of a row's entries; the hidden row stays in registers where it fits, of
    BLOCK_H columns or of as many and REST_H more (blocks are powers of two, H is none above 4096
    in most models). Products with hot ids are there already: the other entries are gathered."""
    tile = tl.load(tiles + tl.program_id(0))
    row = tile >> 32
    on = True
    if HAS_ACTIVE:
        on = tl.load(active + row) != 0
    if on:
        begin, end = tl.load(offsets + row), tl.load(offsets + row + 1)
        if HAS_OWN:
            end = begin + tl.load(counts + row)
        start = begin + (tile & 0xFFFFFFFF) * TILE
        end = tl.minimum(end, start + TILE)
        inverse = inverse_of(temperature, row, one_temperature, PER_ROW, ACC)
        lane = tl.arange(0, TILE)
        if HAS_HOT:
            some, place, count = _pick_hot(
                hot_products + row * S, bias, ids, within, slots, z, begin, start + lane, end,
                inverse, V, HAS_OWN, HAS_BIAS, SOFTCAP, SCALE, ROUND,
            )  # fmt: skip
            end = start + count
        columns = tl.arange(0, BLOCK_H)
        if FAR:
            columns = columns.to(tl.int64)
        h_row = hidden + row * sh0
        h = tl.load(h_row + columns * sh1, mask=columns < H, other=0.0).to(ACC)
        if REST_H:
            rest = BLOCK_H + tl.arange(0, REST_H).to(columns.dtype)
            h_rest = tl.load(h_row + rest * sh1, mask=rest < H, other=0.0).to(ACC)
        for first in range(start, end, R):
            entry = first + tl.arange(0, R)
            there = entry < end
            if HAS_HOT:
                # Where it stands in the tile: sums over the lanes of a warp, no load.
                at = tl.zeros([R], dtype=tl.int32)
                v = tl.zeros([R], dtype=tl.int32)
                for i in tl.static_range(R):
                    this = place == (first - start).to(tl.int32) + i
                    nth = tl.arange(0, R) == i
                    at = tl.where(nth, tl.sum(tl.where(this, lane, 0), axis=0), at)
                    v = tl.where(nth, tl.sum(tl.where(this, some, 0), axis=0), v)
                entry = start + at
                v = v.to(tl.int64)
            if HAS_OWN:
                entry = begin + tl.load(within + entry, mask=there, other=0)
            if not HAS_HOT:
                v = tl.load(ids + entry, mask=there, other=0).to(tl.int64)
            held = there & (v >= 0) & (v < V)
            w_rows = weight + v[:, None] * sw0
            if WHOLE_H:
                w = tl.load(
                    w_rows + columns[None, :] * sw1,
                    mask=held[:, None] & (columns < H)[None, :],
                    other=0.0,
                )
                raw = tl.sum(w.to(ACC) * h[None, :], axis=1)
                if REST_H:
                    w_rest = tl.load(
                        w_rows + rest[None, :] * sw1,
                        mask=held[:, None] & (rest < H)[None, :],
                        other=0.0,
                    )
                    raw += tl.sum(w_rest.to(ACC) * h_rest[None, :], axis=1)
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
            raw = logit(raw, bias, v, held, inverse, HAS_BIAS, SOFTCAP, SCALE, ROUND)
            tl.store(z + entry, raw, mask=there)


def _logits_shape(h: int, max_width: int) -> dict[str, int | bool]:
    """The block of the logits kernel: weight rows at a time and columns held in registers."""
    # At least 256 columns: narrower, the threads of a warp would hold the same values twice.
    block = min(max(triton.next_power_of_2(h), 256), _MOST_COLUMNS)
    rest = triton.next_power_of_2(h - block) if block < h <= 2 * block else 0
    # Measured at H 2048: one warp and two rows are best once rows are wide (benchmarks/NOTES.md).
    rows, warps = (8, 4) if max_width <= 16 else (2, 1)
    scale = max(1, triton.next_power_of_2(block + rest) // 2048)
    shape = {"R": max(1, rows // scale), "num_warps": min(8, warps * scale)}
    if block < block + rest < 1.5 * block:  # H 5120
        shape = {"R": 1, "num_warps": 2}
    elif rest:  # H 7168, 8192
        shape = {"R": 4, "num_warps": 4}
    return {"WHOLE_H": h <= block + rest, "BLOCK_H": block, "REST_H": rest, **shape}


def gathered_logits(call: HeadCall, out: RowOutputs) -> None:
    """Writes the logits of all entries in the tiles to `out.support_logprobs`: one launch, and
    before it those of hot ids where `out` has room for them."""
    hidden, weight, rows, logits = call.hidden, call.weight, call.rows, call.logit
    hot, products = out.hot, None
    if hot is not None:
        find_hot_ids(call.own_ids, len(weight), call.n, hot)
        products = hot_logits(call, hot)
    if len(rows.tiles):
        h = hidden.shape[1]
        _logits_kernel[(len(rows.tiles),)](
            hidden,
            weight,
            logits.bias,
            call.own_ids,
            rows.offsets,
            rows.tiles,
            *(call.own or (None, None))[:2],
            call.active,
            logits.temperature,
            out.hot_slots,
            products,
            out.support_logprobs,
            logits.one_temperature,
            h,
            len(weight),
            len(out.hot_ids),
            *hidden.stride(),
            *weight.stride(),
            HAS_HOT=hot is not None,
            HAS_OWN=call.own is not None,
            HAS_ACTIVE=rows.active is not None,
            FAR=max(hidden.stride(1), weight.stride(1)) * h >= 2**31,
            TILE=TILE,
            **logits.flags,
            **_logits_shape(h, call.scalars.max_width),
        )
