"""Products over the vocabulary with their epilogue: what a row makes of its logits, and their
gradient, without a logit in memory.

The forward keeps of each tile of logits a row's maximum and sums, and puts them together at the
end; the backward computes the tile again and stores the gradient of its products, in half
precision, as the next products take it. Tiles are multiplied on tensor cores from shared memory,
which the tensor memory accelerator fills: so these kernels are a Hopper GPU's, and take matrices
that it takes.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rl_loss.flat_rows import Upstreams
from rl_loss.kernels.block_passes import Block
from rl_loss.kernels.launching import launched
from rl_loss.kernels.logits import derivative, inverse_of, logit
from rl_loss.kernels.records import BROKEN, HeadCall, RowOutputs

# A tile of logits and how it is made: of what was measured, the fastest on an H200.
TILE_ROWS, TILE_IDS = 128, 256
_TILE: dict[str, int] = {"BM": TILE_ROWS, "BN": TILE_IDS, "BK": 64, "GROUP": 16}
_LAUNCH = {"num_warps": 8, "num_stages": 3}

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tile_at(number, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Where the tile of this number is: down GROUP tiles of rows, then on to the next ids, so that
    tiles of one time share what they read."""
    band = number // (GROUP * tiles_n)
    top = band * GROUP
    high = tl.minimum(tiles_m - top, GROUP)
    inside = number - band * GROUP * tiles_n
    return top + inside % high, inside // high


@triton.jit
def _with_bias(raw, bias, column, V, HAS_BIAS: tl.constexpr):
    """The products [BM, BN] and the bias of their columns [BN]: loaded as one row it takes their
    layout, loaded as a matrix they would take its, by way of shared memory that is full."""
    if HAS_BIAS:
        raw += tl.load(bias + column, mask=column < V, other=0.0).to(raw.dtype)[None, :]
    return raw


@triton.jit
def _stats_kernel(
    hidden,  # descriptor of [R, H]
    weight,  # descriptor of [V, H]
    chosen,  # [R] int64 the rows
    bias,  # [V]
    temperature,  # [N]
    parts,  # [3, T, R] out: of each tile's ids the maximum, the sum of exp, the entropy's sum
    one_temperature,
    R,
    V,
    H,
    MOMENT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PER_ROW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALE: tl.constexpr,
    ROUND: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    ACC: tl.constexpr,
):
    """Statistics of every tile of logits."""
    tiles_m, tiles_n = tl.cdiv(R, BM), tl.cdiv(V, BN)
    plane = tiles_n.to(tl.int64) * R
    for number in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        m, n = _tile_at(number, tiles_m, tiles_n, GROUP)
        raw = tl.zeros([BM, BN], dtype=tl.float32)
        for at in range(0, H, BK):
            h, w = hidden.load([m * BM, at]), weight.load([n * BN, at])
            raw = tl.dot(h, w.T, raw)
        at_row = m * BM + tl.arange(0, BM)
        inside = at_row < R
        if PER_ROW:
            row = tl.load(chosen + at_row, mask=inside, other=0)
            inverse = inverse_of(temperature, row, one_temperature, PER_ROW, ACC)[:, None]
        else:
            inverse = inverse_of(temperature, 0, one_temperature, PER_ROW, ACC)
        column = n * BN + tl.arange(0, BN)
        raw = _with_bias(raw, bias, column, V, HAS_BIAS)
        z = logit(raw, bias, column, column < V, inverse, False, SOFTCAP, SCALE, ROUND)
        z = tl.where((column < V)[None, :], z, float("-inf"))
        top = tl.max(z, axis=1)
        shift = tl.where(top == float("-inf"), 0.0, top)
        e = tl.exp2(z * LOG2E - (shift * LOG2E)[:, None])
        part = parts + n.to(tl.int64) * R + at_row
        tl.store(part, top, mask=inside)
        tl.store(part + plane, tl.sum(e, axis=1), mask=inside)
        if MOMENT:
            below = tl.where(e == 0, 0.0, z - shift[:, None])
            tl.store(part + 2 * plane, tl.sum(e * below, axis=1), mask=inside)


@launched
@triton.jit
def _together_kernel(
    parts,  # [3, T, R]
    hidden,  # [R, H]
    weight,  # [V, H]
    chosen,  # [R] int64 the rows
    labels,  # [N]
    bias,  # [V]
    temperature,  # [N]
    top,  # [N] out
    total,  # [N] out
    moment,  # [N] out
    label_z,  # [N] out
    one_temperature,
    R,
    H,
    first,
    V,
    sh0,
    sw0,
    MOMENT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PER_ROW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALE: tl.constexpr,
    ROUND: tl.constexpr,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ACC: tl.constexpr,
):
    """Puts the tiles' statistics of some rows together; the logits of their labels."""
    at_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = at_row < R
    row = tl.load(chosen + at_row, mask=inside, other=0)
    T = tl.cdiv(V, BN)
    plane = T.to(tl.int64) * R
    minus_inf = float("-inf")
    m = tl.full([ROWS], minus_inf, dtype=ACC)
    s = tl.zeros([ROWS], dtype=ACC)
    a = tl.zeros([ROWS], dtype=ACC)
    for at in range(0, T, TILES):
        tile = at + tl.arange(0, TILES)
        there = (tile < T)[:, None] & inside[None, :]
        part = parts + tile.to(tl.int64)[:, None] * R + at_row[None, :]
        tops = tl.load(part, mask=there, other=minus_inf)
        sums = tl.load(part + plane, mask=there, other=0.0)
        up = tl.maximum(m, tl.max(tops, axis=0))
        shift = tl.where(up == minus_inf, 0.0, up)
        shrink, weight_of = tl.exp(m - shift), tl.exp(tops - shift[None, :])
        if MOMENT:
            moments = tl.load(part + 2 * plane, mask=there, other=0.0)
            moments += sums * tl.where(sums == 0, 0.0, tops - shift[None, :])
            a = (a + s * tl.where(s == 0, 0.0, m - shift)) * shrink
            a += tl.sum(moments * weight_of, axis=0)
        s = s * shrink + tl.sum(sums * weight_of, axis=0)
        m = up
    tl.store(top + row, m, mask=inside)
    tl.store(total + row, s, mask=inside)
    if MOMENT:
        tl.store(moment + row, a, mask=inside)
    label = tl.load(labels + row, mask=inside, other=-1).to(tl.int64) - first
    here = inside & (label >= 0) & (label < V)
    label = tl.where(here, label, 0)
    raw = tl.zeros([ROWS], dtype=ACC)
    for at in range(0, H, BLOCK_H):
        column = at + tl.arange(0, BLOCK_H)
        mask = here[:, None] & (column < H)[None, :]
        h = tl.load(hidden + at_row.to(tl.int64)[:, None] * sh0 + column[None, :], mask, 0.0)
        w = tl.load(weight + label[:, None] * sw0 + column[None, :], mask, 0.0)
        raw += tl.sum(h.to(ACC) * w.to(ACC), axis=1)
    inverse = inverse_of(temperature, row, one_temperature, PER_ROW, ACC)
    z = logit(raw, bias, label, here, inverse, HAS_BIAS, SOFTCAP, SCALE, ROUND)
    tl.store(label_z + row, z, mask=here)


@triton.jit
def _grads_kernel(
    hidden,  # descriptor of [R, H]
    weight,  # descriptor of [B, H]
    dz,  # descriptor of [R, B] out: the gradient of the products
    chosen,  # [R] int64 the rows
    bias,  # [B] of these ids
    temperature,  # [N]
    labels,  # [N]
    lse,  # [N] over the vocabulary
    state,  # [N] uint8: broken rows have no gradient
    entropy,  # [N]
    totals,  # [N] the sum of the row's upstreams
    d_labels,  # [N]
    d_entropy,  # [N]
    up,  # [R] powers of two that rows are multiplied with
    one_temperature,
    first,
    R,
    B,
    H,
    SCALED: tl.constexpr,
    ENTROPY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PER_ROW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALE: tl.constexpr,
    ROUND: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    ACC: tl.constexpr,
):
    """The gradient of every tile of products."""
    tiles_m, tiles_n = tl.cdiv(R, BM), tl.cdiv(B, BN)
    for number in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        m, n = _tile_at(number, tiles_m, tiles_n, GROUP)
        raw = tl.zeros([BM, BN], dtype=tl.float32)
        for at in range(0, H, BK):
            h, w = hidden.load([m * BM, at]), weight.load([n * BN, at])
            raw = tl.dot(h, w.T, raw)
        at_row = m * BM + tl.arange(0, BM)
        inside = at_row < R
        row = tl.load(chosen + at_row, mask=inside, other=0)
        # A broken row is made of neutral values; of a state that is finite it has no gradient.
        broken = tl.load(state + row) == BROKEN
        norm = tl.where(broken, float("inf"), tl.load(lse + row))
        total = tl.where(broken, 0.0, tl.load(totals + row))
        d_label = tl.where(broken, 0.0, tl.load(d_labels + row))
        inverse = inverse_of(temperature, row, one_temperature, PER_ROW, ACC)
        inverse = tl.where(broken, 1.0, inverse)[:, None]
        label = tl.load(labels + row).to(tl.int64) - first
        label = tl.where((label >= 0) & (label < B), label, -1).to(tl.int32)
        if SCALED:
            power = tl.load(up + at_row, mask=inside, other=1.0)
            total *= power
            d_label *= power
        column = n * BN + tl.arange(0, BN)
        raw = _with_bias(raw, bias, column, B, HAS_BIAS)
        z = logit(raw, bias, column, column < B, inverse, False, SOFTCAP, SCALE, ROUND)
        p = tl.exp2(z * LOG2E - (norm * LOG2E)[:, None])
        g = tl.where(column[None, :] == label[:, None], d_label[:, None], 0.0) - p * total[:, None]
        if ENTROPY:
            d_h = tl.where(broken, 0.0, tl.load(d_entropy + row))
            if SCALED:
                d_h *= power
            h_row = tl.where(broken, 0.0, tl.load(entropy + row))
            g -= p * (tl.where(p == 0, 0.0, z - norm[:, None]) + h_row[:, None]) * d_h[:, None]
        g *= derivative(z, inverse, SOFTCAP, SCALE)
        dz.store([m * BM, n * BN], g.to(dz.dtype))


def fuses(call: HeadCall) -> bool:
    """Whether the rows over the vocabulary take these kernels: half precision on a Hopper GPU, in
    rows of whole 16 bytes, no row whose entries are read of its logits (HEAD, DRAWS), and logits
    that are not rounded: a label's, summed by itself, could be rounded to the other side."""
    hidden, weight = call.hidden, call.weight
    half = hidden.dtype == weight.dtype and hidden.dtype in (torch.bfloat16, torch.float16)
    scalars = call.scalars
    if not half or scalars.any_head or scalars.any_draws or scalars.rounded or not len(weight):
        return False
    return _on_hopper(hidden.device) and hidden.shape[1] > 0 and _loads(weight) and _loads(hidden)


@cache
def _on_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _loads(matrix: Tensor) -> bool:
    """Whether the tensor memory accelerator takes its rows."""
    size = matrix.element_size()
    aligned = matrix.data_ptr() % 16 == 0 and matrix.stride(0) * size % 16 == 0
    return aligned and matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]


def add_row_stats(call: HeadCall, hidden: Tensor, chosen: Tensor, stats: Tensor) -> None:
    """Writes the statistics `[4, N]` of the rows `chosen` `[D]`, whose states are `hidden`
    `[D, H]`: top, total, moment if entropy is asked for, and the label's logit."""
    logits, weight, (v, h) = call.logit, call.weight, call.weight.shape
    moment, tiles = call.scalars.entropy > 0, triton.cdiv(v, TILE_IDS)
    planes = 3 if moment else 2
    most = max(1, call.scalars.workspace // (planes * tiles * 4))
    parts = hidden.new_empty(planes * tiles * min(most, len(chosen)), dtype=call.dtype)
    for some, rows in zip(hidden.split(most), chosen.split(most), strict=True):
        r = len(rows)
        _stats_kernel[_programs(hidden.device, tiles * triton.cdiv(r, TILE_ROWS))](
            TensorDescriptor.from_tensor(some, [_TILE["BM"], _TILE["BK"]]),
            TensorDescriptor.from_tensor(weight, [_TILE["BN"], _TILE["BK"]]),
            rows, logits.bias, logits.temperature, parts, logits.one_temperature, r, v, h,
            MOMENT=moment, **logits.flags, **_TILE, **_LAUNCH,
        )  # fmt: skip
        _together_kernel[(triton.cdiv(r, 16),)](
            parts, some, weight, rows, call.rows.labels, logits.bias, logits.temperature, *stats,
            logits.one_temperature, r, h, call.shard.first, v, some.stride(0), weight.stride(0),
            MOMENT=moment, ROWS=16, BN=TILE_IDS, TILES=32, BLOCK_H=128, **logits.flags,
        )  # fmt: skip


def product_grads(
    call: HeadCall,
    block: Block,
    dtype: torch.dtype,
    saved: RowOutputs,
    upstreams: Upstreams,
    over_v: Tensor,  # [4, N] EntryGrads.over_v
    up: Tensor | None = None,  # [R]
) -> Tensor:
    """The gradient of the block's products, `[R, B]` in `dtype`, in its memory; each row times
    `up`. As `block_passes.to_grads`, of a block that is not multiplied yet."""
    dz, logits = block.raw.view(dtype)[:, : len(block.weight)], call.logit
    (r, b), h = dz.shape, block.hidden.shape[1]
    total, d_label, _, d_entropy = over_v
    _grads_kernel[_programs(dz.device, triton.cdiv(r, TILE_ROWS) * triton.cdiv(b, TILE_IDS))](
        TensorDescriptor.from_tensor(block.hidden, [_TILE["BM"], _TILE["BK"]]),
        TensorDescriptor.from_tensor(block.weight, [_TILE["BN"], _TILE["BK"]]),
        TensorDescriptor.from_tensor(dz, [_TILE["BM"], _TILE["BN"]]),
        block.rows, block.bias, logits.temperature, call.rows.labels, saved.lse_v, saved.state,
        saved.entropy, total, d_label, d_entropy, up, logits.one_temperature, block.first, r, b, h,
        SCALED=up is not None, ENTROPY=upstreams.entropy is not None,
        **logits.flags, **_TILE, **_LAUNCH,
    )  # fmt: skip
    return dz


def _programs(device: torch.device, tiles: int) -> tuple[int]:
    """One a multiprocessor, for each holds one tile in its registers and shared memory."""
    return (min(_processors(device), tiles),)


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":  # the interpreter: few, so that each has several tiles
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count
