"""Kernels of the sampler's side: what a row of processed logits keeps, and its entries, packed.

One program a row, in every kernel. A row of another kind than the kernel's is left at once, so
that it costs nothing; excluded ids are -inf.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _packed(logprob, token):
    """The wire format: the float32's bits above, the id below."""
    bits = logprob.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64)
    return (bits << 32) | token.to(tl.int64)


@triton.jit
def _row_stats_kernel(
    logits,  # [R, V]
    sampled,  # [R]
    kind,  # [R] int8
    top,  # [R] out: the largest logit
    log_total,  # [R] out: log of the sum of exp(z - top)
    sampled_logprobs,  # [R] out
    kept,  # [R] int64 out: how many logits are finite
    healthy,  # [R] uint8 out
    V,
    stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    asked = tl.load(kind + row)
    if (asked >= 1) & (asked <= 3):
        minus_inf = float("-inf")
        m = tl.full([], minus_inf, dtype=tl.float32)
        s = tl.zeros([], dtype=tl.float32)
        low = tl.full([], float("inf"), dtype=tl.float32)
        n = tl.zeros([BLOCK], dtype=tl.int32)
        bad = tl.zeros([BLOCK], dtype=tl.int32)
        for at in range(0, V, BLOCK):
            v = at + tl.arange(0, BLOCK)
            z = tl.load(logits + row * stride + v, mask=v < V, other=minus_inf).to(tl.float32)
            bad += ((z != z) | (z == float("inf"))).to(tl.int32)
            finite = z > minus_inf
            n += finite.to(tl.int32)
            low = tl.minimum(low, tl.min(tl.where(finite, z, float("inf")), axis=0))
            up = tl.maximum(m, tl.max(z, axis=0))
            shift = tl.where(up == minus_inf, 0.0, up)
            s = s * tl.exp(m - shift) + tl.sum(tl.exp(z - shift), axis=0)
            m = up
        total = tl.log(s)
        token = tl.load(sampled + row).to(tl.int64)
        inside = (token >= 0) & (token < V)
        own = tl.load(logits + row * stride + token, mask=inside, other=minus_inf).to(tl.float32)
        # Finite logits may lie further apart than float32 reaches: q is 0 then on a kept id.
        fine = (tl.sum(bad, axis=0) == 0) & (own > minus_inf) & ((low - m) - total > minus_inf)
        tl.store(top + row, m)
        tl.store(log_total + row, total)
        tl.store(kept + row, tl.sum(n, axis=0).to(tl.int64))
        tl.store(healthy + row, fine.to(tl.uint8))
        tl.store(sampled_logprobs + row, tl.where(fine, (own - m) - total, float("nan")))
    else:
        tl.store(kept + row, tl.zeros([], dtype=tl.int64))
        tl.store(healthy + row, tl.zeros([], dtype=tl.uint8))
        tl.store(sampled_logprobs + row, tl.full([], float("nan"), dtype=tl.float32))


@triton.jit
def _ordered(z):
    """A float32 as an integer of the same order, in [0, 2**32)."""
    bits = z.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -bits - 1, bits + 2147483648)


@triton.jit
def _top_kernel(
    logits,  # [R, V]
    sampled,  # [R]
    kind,  # [R] int8
    healthy,  # [R] uint8
    top,  # [R]
    log_total,  # [R]
    kept,  # [R] int64 in: finite logits, out: entries of the row
    narrow,  # [R, W] int64 out
    tail,  # [R] float32 out
    V,
    W,
    K,
    stride,
    BLOCK: tl.constexpr,
):
    """HEAD rows: the sampled token and the K likeliest ids, equal ones by id.

    The K-th largest logit is found by its bits, eight at a time: four readings of the row, and a
    fifth to write what is above it. (So a radix select, as sorts on GPUs do it.)
    """
    row = tl.program_id(0).to(tl.int64)
    if (tl.load(kind + row) == 2) & (tl.load(healthy + row) != 0):
        minus_inf = float("-inf")
        z_row = logits + row * stride
        left = tl.minimum(tl.load(kept + row), K).to(tl.int32)
        edge = tl.zeros([], dtype=tl.int64)
        digits = tl.arange(0, 256)
        for shift in tl.static_range(24, -8, -8):
            found = tl.zeros([256], dtype=tl.int32)
            for at in range(0, V, BLOCK):
                v = at + tl.arange(0, BLOCK)
                z = tl.load(z_row + v, mask=v < V, other=minus_inf).to(tl.float32)
                key = _ordered(z)
                same = (z > minus_inf) & ((key >> (shift + 8)) == (edge >> (shift + 8)))
                found += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=same)
            above = tl.sum(found, axis=0) - tl.cumsum(found, axis=0)
            digit = tl.max(tl.where(above + found >= left, digits, -1), axis=0)
            left -= tl.sum(tl.where(digits == digit, above, 0), axis=0)
            edge += digit.to(tl.int64) << shift
        m, total = tl.load(top + row), tl.load(log_total + row)
        token = tl.load(sampled + row).to(tl.int64)
        own = tl.load(z_row + token).to(tl.float32)
        out = narrow + row * W
        tl.store(out, _packed((own - m) - total, token))
        n = tl.full([], 1, dtype=tl.int64)
        ties = tl.zeros([], dtype=tl.int32)
        rest = tl.zeros([BLOCK], dtype=tl.float32)
        for at in range(0, V, BLOCK):
            v = at + tl.arange(0, BLOCK)
            z = tl.load(z_row + v, mask=v < V, other=minus_inf).to(tl.float32)
            key = _ordered(z)
            finite = z > minus_inf
            tie = (finite & (key == edge)).to(tl.int32)
            rank = ties + tl.cumsum(tie, axis=0)
            chosen = (finite & (key > edge)) | ((tie != 0) & (rank <= left))
            other = v != token
            written = (chosen & other).to(tl.int32)
            place = n + tl.cumsum(written, axis=0) - 1
            logprob = (z - m) - total
            tl.store(out + place, _packed(logprob, v), mask=written != 0)
            rest += tl.where(finite & other & (chosen == 0), tl.exp(logprob), 0.0)
            n += tl.sum(written, axis=0)
            ties += tl.sum(tie, axis=0)
        tl.store(kept + row, n)
        tl.store(tail + row, tl.sum(rest, axis=0))


@triton.jit
def _block_mass_kernel(
    logits,  # [R, V]
    kind,  # [R] int8
    healthy,  # [R] uint8
    top,  # [R]
    log_total,  # [R]
    mass,  # [R, V / BLOCK] out
    V,
    stride,
    BLOCK: tl.constexpr,
):
    """DRAWS rows: what q puts on each block of ids."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if (tl.load(kind + row) == 3) & (tl.load(healthy + row) != 0):
        v = block * BLOCK + tl.arange(0, BLOCK)
        z = tl.load(logits + row * stride + v, mask=v < V, other=float("-inf")).to(tl.float32)
        q = tl.exp((z - tl.load(top + row)) - tl.load(log_total + row))
        tl.store(mass + row * tl.num_programs(1) + block, tl.sum(q, axis=0))


@triton.jit
def _draws_kernel(
    logits,  # [R, V]
    uniform,  # [R, M] in [0, 1)
    mass,  # [R, BLOCKS]
    kind,  # [R] int8
    healthy,  # [R] uint8
    top,  # [R]
    log_total,  # [R]
    kept,  # [R] int64 out: entries of the row
    narrow,  # [R, W] int64 out
    V,
    W,
    blocks,
    stride,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One draw of a DRAWS row: the id where the running sum of q passes its uniform number."""
    row, j, draws = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if (tl.load(kind + row) == 3) & (tl.load(healthy + row) != 0):
        u = tl.load(uniform + row * draws + j)
        lane = tl.arange(0, LANES)
        part = tl.load(mass + row * blocks + lane, mask=lane < blocks, other=0.0)
        upto = tl.cumsum(part, axis=0)
        block = tl.min(tl.where((upto > u) & (part > 0), lane, LANES), axis=0)
        # Rounding may leave the sum below u: then it is the last id that q puts something on.
        last = tl.max(tl.where(part > 0, lane, 0), axis=0)
        block = tl.where(block < LANES, block, last)
        before = tl.sum(tl.where(lane < block, part, 0.0), axis=0)
        m, total = tl.load(top + row), tl.load(log_total + row)
        v = block * BLOCK + tl.arange(0, BLOCK)
        z = tl.load(logits + row * stride + v, mask=v < V, other=float("-inf")).to(tl.float32)
        q = tl.exp((z - m) - total)
        inside = before + tl.cumsum(q, axis=0)
        token = tl.min(tl.where((inside > u) & (q > 0), v, V), axis=0)
        token = tl.where(token < V, token, tl.max(tl.where(q > 0, v, 0), axis=0))
        z = tl.load(logits + row * stride + token).to(tl.float32)
        tl.store(narrow + row * W + j, _packed((z - m) - total, token))
        if j == 0:
            tl.store(kept + row, draws.to(tl.int64))


@triton.jit
def _write_rows_kernel(
    logits,  # [R, V]
    kind,  # [R] int8
    recorded,  # [R] uint8
    starts,  # [R] int64
    counts,  # [R] int64
    top,  # [R]
    log_total,  # [R]
    narrow,  # [R, W] int64
    packed,  # [capacity] int64 out
    V,
    W,
    stride,
    BLOCK: tl.constexpr,
):
    """The entries of every recorded row to their place in the buffer."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(recorded + row) != 0:
        out = packed + tl.load(starts + row)
        if tl.load(kind + row) == 1:
            m, total = tl.load(top + row), tl.load(log_total + row)
            n = tl.zeros([], dtype=tl.int32)
            for at in range(0, V, BLOCK):
                v = at + tl.arange(0, BLOCK)
                z = tl.load(logits + row * stride + v, mask=v < V, other=float("-inf"))
                z = z.to(tl.float32)
                finite = (z > float("-inf")).to(tl.int32)
                place = n + tl.cumsum(finite, axis=0) - 1
                tl.store(out + place, _packed((z - m) - total, v), mask=finite != 0)
                n += tl.sum(finite, axis=0)
        else:
            count = tl.load(counts + row)
            for done in range(0, count, BLOCK):
                j = done + tl.arange(0, BLOCK)
                entry = tl.load(narrow + row * W + j, mask=j < count, other=0)
                tl.store(out + j, entry, mask=j < count)


class RowsLookedAt:
    """The first reading of the logits: what each row needs; then its entries can be written."""

    def __init__(
        self,
        logits: Tensor,  # [R, V], its rows contiguous
        sampled: Tensor,  # [R]
        kind: Tensor,  # [R] int8
        head: bool,  # some row may be HEAD
        draws: int,  # of a DRAWS row, 0 where none may be
        top: int,
        generator: torch.Generator | None,
    ) -> None:
        # The kernels count rows: whatever has one value a row has to lie row after row.
        sampled, kind = sampled.contiguous(), kind.contiguous()
        self.logits, self.kind = logits, kind
        r, v = logits.shape
        new = logits.new_empty
        self.top, self.log_total, self.sampled_logprobs = new(3, r, dtype=torch.float32).unbind()
        self.needed = new(r, dtype=torch.int64)
        self.healthy = new(r, dtype=torch.bool)
        self.tail_mass = torch.zeros(r, dtype=torch.float32, device=logits.device)
        self.narrow = new(r, max(top + 1 if head else 0, draws, 1), dtype=torch.int64)
        if not r:
            return
        healthy, w, stride = self.healthy.view(torch.uint8), self.narrow.shape[1], logits.stride(0)
        _row_stats_kernel[(r,)](
            logits, sampled, kind, self.top, self.log_total, self.sampled_logprobs, self.needed,
            healthy, v, stride, BLOCK=4096, num_warps=8,
        )  # fmt: skip
        common = kind, healthy, self.top, self.log_total, self.needed, self.narrow
        if head:
            _top_kernel[(r,)](
                logits, sampled, *common, self.tail_mass, v, w, top, stride,
                BLOCK=4096, num_warps=8,
            )  # fmt: skip
        if draws:
            uniform = torch.rand(r, draws, generator=generator, device=logits.device)
            block, seen = 4096, common[:4]
            blocks = triton.cdiv(v, block)
            mass = new(r, blocks, dtype=torch.float32)
            _block_mass_kernel[(r, blocks)](
                logits, *seen, mass, v, stride, BLOCK=block, num_warps=4
            )
            _draws_kernel[(r, draws)](
                logits, uniform, mass, *common, v, w, blocks, stride,
                LANES=triton.next_power_of_2(blocks), BLOCK=block, num_warps=4,
            )  # fmt: skip

    def write(self, recorded: Tensor, starts: Tensor, counts: Tensor, packed: Tensor) -> None:
        """The entries of the `recorded` `[R]` rows to `packed`, each row's from its start on."""
        if len(recorded):
            _write_rows_kernel[(len(recorded),)](
                self.logits, self.kind, recorded.view(torch.uint8), starts, counts, self.top,
                self.log_total, self.narrow, packed, self.logits.shape[1], self.narrow.shape[1],
                self.logits.stride(0), BLOCK=1024, num_warps=4,
            )  # fmt: skip
