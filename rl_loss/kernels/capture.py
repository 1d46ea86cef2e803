"""Kernels of the sampler's side: what a row of processed logits keeps, and its entries, packed.

A row is read in blocks of ids: facts of each block first (largest logit, mass, kept ids), which
one program a row joins into facts of the row. Everything after it looks only at the blocks that
hold something: kept ids are written block by block, the likeliest ids and the draws are searched in
the few blocks that can have them. Excluded ids are -inf; rows that asked for nothing are left at
once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_loss.kernels.records import KIND_DRAWS, KIND_FAILED, KIND_HEAD, KIND_NONE, KIND_REPLAY

_BLOCK = 512  # ids: fewer make more facts to join, more make more ids to read again
_ROWS = 1024  # widths compared at a time
_LIST = 1024  # ids of a row that may be among its likeliest
_GROUP = 8  # blocks of one program: a program of one costs more to start than to run


@triton.jit
def _packed(logprob, token):
    """The wire format: the float32's bits above, the id below."""
    bits = logprob.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64)
    return (bits << 32) | token.to(tl.int64)


@triton.jit
def _block_facts_kernel(
    logits,  # [R, V]
    kind,  # [R] int8
    largest,  # [R, blocks] out: -inf in a block without a finite logit
    smallest,  # [R, blocks] out: among the finite logits, +inf where there is none
    mass,  # [R, blocks] out: the sum of exp(z - largest)
    kept,  # [R, blocks] int32 out: how many logits are finite, -1 at a NaN or +inf
    V,
    blocks,
    groups,
    stride,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, group = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    asked = tl.load(kind + row)
    if (asked >= KIND_REPLAY) & (asked <= KIND_DRAWS):
        z_row, lane = logits + row * stride, tl.arange(0, BLOCK)
        start = group * GROUP
        end = tl.minimum(start + GROUP, blocks)
        v = start * BLOCK + lane
        z_ahead = tl.load(z_row + v, mask=v < V, other=float("-inf"))
        for block in range(start, end):
            z = z_ahead.to(tl.float32)
            # The next block is on its way while this one is looked at.
            v += BLOCK
            z_ahead = tl.load(z_row + v, mask=v < tl.minimum(V, end * BLOCK), other=float("-inf"))
            bad = (z != z) | (z == float("inf"))
            z = tl.where(bad, float("-inf"), z)
            finite = z > float("-inf")
            top = tl.max(z, axis=0)
            shift = tl.where(top > float("-inf"), top, 0.0)
            found = tl.sum(tl.where(bad, BLOCK + 1, finite.to(tl.int32)), axis=0)
            at = row * blocks + block
            tl.store(largest + at, top)
            tl.store(smallest + at, tl.min(tl.where(finite, z, float("inf")), axis=0))
            tl.store(mass + at, tl.sum(tl.exp(z - shift), axis=0))
            tl.store(kept + at, tl.where(found > BLOCK, -1, found))


@triton.jit
def _row_facts_kernel(
    logits,  # [R, V]
    sampled,  # [R]
    kind,  # [R] int8
    largest,  # [R, blocks]
    smallest,  # [R, blocks]
    mass,  # [R, blocks] in: of exp(z - largest), out: of q
    kept,  # [R, blocks] int32 in: of the block, out: of all blocks before
    top,  # [R] out: the largest logit
    log_total,  # [R] out: log of the sum of exp(z - top)
    sampled_logprobs,  # [R] out
    needed,  # [R] int64 out: entries of the row (HEAD: its kept ids), -1 where it is unusable
    V,
    blocks,
    draws,
    stride,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    asked = tl.load(kind + row)
    own_logprob = tl.full([], float("nan"), dtype=tl.float32)
    entries = tl.where(asked == KIND_NONE, 0, -1).to(tl.int64)
    if (asked >= KIND_REPLAY) & (asked <= KIND_DRAWS):
        lane = tl.arange(0, LANES)
        here, inside = row * blocks + lane, lane < blocks
        m_block = tl.load(largest + here, mask=inside, other=float("-inf"))
        part = tl.load(mass + here, mask=inside, other=0.0)
        number = tl.load(kept + here, mask=inside, other=0)
        low = tl.min(tl.load(smallest + here, mask=inside, other=float("inf")), axis=0)
        m = tl.max(m_block, axis=0)
        part *= tl.exp(m_block - tl.where(m > float("-inf"), m, 0.0))
        total = tl.log(tl.sum(part, axis=0))
        token = tl.load(sampled + row).to(tl.int64)
        in_vocab = (token >= 0) & (token < V)
        own = tl.load(logits + row * stride + token, mask=in_vocab, other=float("-inf"))
        own = own.to(tl.float32)
        # Finite logits may lie further apart than float32 reaches: q is 0 then on a kept id.
        fine = (own > float("-inf")) & ((low - m) - total > float("-inf"))
        if fine & (tl.min(number, axis=0) >= 0):
            own_logprob = (own - m) - total
            entries = tl.where(asked == KIND_DRAWS, draws, tl.sum(number, axis=0)).to(tl.int64)
            tl.store(top + row, m)
            tl.store(log_total + row, total)
            tl.store(mass + here, part * tl.exp(-total), mask=inside)
            tl.store(kept + here, tl.cumsum(number, axis=0) - number, mask=inside)
    tl.store(sampled_logprobs + row, own_logprob)
    tl.store(needed + row, entries)


@triton.jit
def _ordered(z):
    """A float32 as an unsigned integer of the same order."""
    bits = z.to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >> 31 != 0, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@triton.jit
def _load_candidates(z_row, listed, hits, is_listed, length, at, V, BLOCK: tl.constexpr):
    """Ids and logits `[BLOCK]`: of the list, or of one of the blocks in `hits`."""
    lane = tl.arange(0, BLOCK)
    if is_listed:
        v = tl.load(listed + at + lane, mask=at + lane < length, other=V)
    else:
        v = tl.load(hits + at // BLOCK) * BLOCK + lane
    return v, tl.load(z_row + v, mask=v < V, other=float("-inf")).to(tl.float32)


@triton.jit
def _top_kernel(
    logits,  # [R, V]
    sampled,  # [R]
    kind,  # [R] int8
    largest,  # [R, blocks]
    mass,  # [R, blocks]
    top,  # [R]
    log_total,  # [R]
    needed,  # [R] int64 in: kept ids, out: entries of the row
    narrow,  # [R, W] int64 out
    tail,  # [R] float32 out
    hits,  # [R, blocks] int32, room for the numbers of blocks
    listed,  # [R, LIST] int32, room for ids
    V,
    W,
    K,
    blocks,
    stride,
    LANES: tl.constexpr,
    LIST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """HEAD rows: the sampled token and the K likeliest ids, equal ones by id.

    The K-th largest of the blocks' largest logits is no larger than the K-th largest logit: only
    blocks that reach it are read, and the few logits that reach it are listed. Among these (among
    all of the blocks, where the list is too short: with many ties, or K above the number of
    blocks) the K-th largest is found by its bits, five at a time: a radix select, as sorts on GPUs
    do it, where each lane of a warp counts one of 32 digits.
    """
    row = tl.program_id(0).to(tl.int64)
    found = tl.load(needed + row)
    if (tl.load(kind + row) == KIND_HEAD) & (found > 0):
        z_row = logits + row * stride
        hits_row, listed_row = hits + row * blocks, listed + row * LIST
        m, total = tl.load(top + row), tl.load(log_total + row)
        token = tl.load(sampled + row).to(tl.int64)
        lane = tl.arange(0, LANES)
        here, inside = row * blocks + lane, lane < blocks
        m_block = tl.load(largest + here, mask=inside, other=float("-inf"))
        falling = tl.sort(m_block, descending=True)
        bound = tl.max(tl.where(lane == K - 1, falling, float("-inf")), axis=0)
        bound = tl.where(K == 0, float("inf"), bound)  # no block has to be read
        own_block = lane == token // BLOCK
        hit = (m_block > float("-inf")) & ((m_block >= bound) | own_block)
        nth = tl.cumsum(hit.to(tl.int32), axis=0) - 1
        number = tl.sum(hit.to(tl.int32), axis=0)
        tl.store(hits_row + nth, lane, mask=hit)
        q_block = tl.load(mass + here, mask=inside, other=0.0)
        unread = tl.sum(tl.where(hit, 0.0, q_block), axis=0)
        tl.debug_barrier()

        reaching = tl.zeros([], dtype=tl.int32)
        below = tl.zeros([BLOCK], dtype=tl.float32)
        v_ahead = tl.load(hits_row) * BLOCK + tl.arange(0, BLOCK)
        z_ahead = tl.load(z_row + v_ahead, mask=v_ahead < V, other=float("-inf"))
        for i in range(0, number):
            v, z = v_ahead, z_ahead.to(tl.float32)
            # The next block is on its way while this one is counted.
            block = tl.load(hits_row + i + 1, mask=i + 1 < number, other=blocks)
            v_ahead = block * BLOCK + tl.arange(0, BLOCK)
            z_ahead = tl.load(z_row + v_ahead, mask=v_ahead < V, other=float("-inf"))
            reaches = (z > float("-inf")) & (z >= bound)
            slot = reaching + tl.cumsum(reaches.to(tl.int32), axis=0) - 1
            tl.store(listed_row + slot, v, mask=reaches & (slot < LIST))
            reaching += tl.sum(reaches.to(tl.int32), axis=0)
            below += tl.where(reaches | (v == token), 0.0, tl.exp((z - m) - total))
        is_listed = reaching <= LIST
        length = tl.where(is_listed, reaching, number * BLOCK)
        unread += tl.where(is_listed, tl.sum(below, axis=0), 0.0)
        tl.debug_barrier()

        left = tl.minimum(found, K).to(tl.int32)
        edge = tl.zeros([], dtype=tl.uint32)
        digits = tl.arange(0, 32)
        for shift in tl.static_range(30, -5, -5):
            digit_count = tl.zeros([32], dtype=tl.int32)
            for at in range(0, length, BLOCK):
                v, z = _load_candidates(
                    z_row, listed_row, hits_row, is_listed, length, at, V, BLOCK
                )
                key = _ordered(z)
                same = (z > float("-inf")) & ((key >> shift >> 5) == (edge >> shift >> 5))
                digit_count += tl.histogram(((key >> shift) & 31).to(tl.int32), 32, mask=same)
            above = tl.sum(digit_count, axis=0) - tl.cumsum(digit_count, axis=0)
            digit = tl.max(tl.where(above + digit_count >= left, digits, -1), axis=0)
            left -= tl.sum(tl.where(digits == digit, above, 0), axis=0)
            edge += digit.to(tl.uint32) << shift

        own = tl.load(z_row + token).to(tl.float32)
        out = narrow + row * W
        tl.store(out, _packed((own - m) - total, token))
        n = tl.full([], 1, dtype=tl.int64)
        ties = tl.zeros([], dtype=tl.int32)
        rest = tl.zeros([BLOCK], dtype=tl.float32)
        for at in range(0, length, BLOCK):
            v, z = _load_candidates(z_row, listed_row, hits_row, is_listed, length, at, V, BLOCK)
            key = _ordered(z)
            finite = z > float("-inf")
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
        tl.store(needed + row, n)
        tl.store(tail + row, unread + tl.sum(rest, axis=0))


@triton.jit
def _draws_kernel(
    logits,  # [R, V]
    uniform,  # [R, M] in [0, 1)
    kind,  # [R] int8
    mass,  # [R, blocks]
    top,  # [R]
    log_total,  # [R]
    needed,  # [R] int64
    narrow,  # [R, W] int64 out
    V,
    W,
    draws,
    blocks,
    stride,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One draw of a DRAWS row: the id where the running sum of q passes its uniform number."""
    row, j = (tl.program_id(0) // draws).to(tl.int64), tl.program_id(0) % draws
    if (tl.load(kind + row) == KIND_DRAWS) & (tl.load(needed + row) > 0):
        lane = tl.arange(0, LANES)
        part = tl.load(mass + row * blocks + lane, mask=lane < blocks, other=0.0)
        upto = tl.cumsum(part, axis=0)
        u = tl.load(uniform + row * draws + j) * tl.max(upto, axis=0)
        block = tl.min(tl.where((upto > u) & (part > 0), lane, LANES), axis=0)
        # Sums are rounded one by one: none may pass u, in the row or then in the block.
        block = tl.where(block < LANES, block, tl.max(tl.where(part > 0, lane, 0), axis=0))
        before = tl.sum(tl.where(lane < block, part, 0.0), axis=0)
        m, total = tl.load(top + row), tl.load(log_total + row)
        v = block * BLOCK + tl.arange(0, BLOCK)
        z = tl.load(logits + row * stride + v, mask=v < V, other=float("-inf")).to(tl.float32)
        q = tl.exp((z - m) - total)
        inside = before + tl.cumsum(q, axis=0)
        token = tl.min(tl.where((inside > u) & (q > 0), v, V), axis=0)
        token = tl.where(token < V, token, tl.max(tl.where(z > float("-inf"), v, 0), axis=0))
        z = tl.load(logits + row * stride + token).to(tl.float32)
        tl.store(narrow + row * W + j, _packed((z - m) - total, token))


@triton.jit
def _fit_kernel(
    needed,  # [R] int64
    asked,  # [R] int8
    counts,  # [R] int64 out: -1 where the row is unusable or does not fit
    kind,  # [R] int8 out
    tail,  # [R] float32 in and out
    needed_in_all,  # int64 out
    R,
    capacity,
    TILE: tl.constexpr,
):
    """Which rows fit into the buffer: narrow rows first and equal ones in row order."""
    row = tl.program_id(0)
    mine = tl.load(needed + row)
    narrower = tl.zeros([TILE], dtype=tl.int64)
    everyone = tl.zeros([TILE], dtype=tl.int64)
    for at in range(0, R, TILE):
        j = at + tl.arange(0, TILE)
        others = tl.maximum(tl.load(needed + j, mask=j < R, other=0), 0)
        everyone += others
        narrower += tl.where((others < mine) | ((others == mine) & (j < row)), others, 0)
    fits = (mine >= 0) & (tl.sum(narrower, axis=0) + mine <= capacity)
    wanted = tl.load(asked + row)
    tl.store(counts + row, tl.where(fits, mine, -1))
    tl.store(kind + row, tl.where(fits, wanted, KIND_FAILED).to(tl.int8))
    tl.store(tail + row, tl.where(fits & (wanted != KIND_NONE), tl.load(tail + row), 1.0))
    if row == 0:
        tl.store(needed_in_all, tl.sum(everyone, axis=0))


@triton.jit
def _write_kernel(
    logits,  # [R, V]
    kind,  # [R] int8
    counts,  # [R] int64
    ends,  # [R] int64
    kept,  # [R, blocks] int32: of all blocks before
    top,  # [R]
    log_total,  # [R]
    narrow,  # [R, W] int64
    packed,  # [capacity] int64 out
    V,
    W,
    blocks,
    groups,
    stride,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    COPIED: tl.constexpr,
):
    """The entries of every recorded row to their place in the buffer."""
    row, group = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    count = tl.load(counts + row)
    if count > 0:
        out = packed + (tl.load(ends + row) - count)
        if tl.load(kind + row) == KIND_REPLAY:
            m, total = tl.load(top + row), tl.load(log_total + row)
            kept_row, start = kept + row * blocks, group * GROUP
            behind = tl.load(kept_row + start)
            for block in range(start, tl.minimum(start + GROUP, blocks)):
                first = behind
                behind = tl.load(kept_row + block + 1, mask=block + 1 < blocks, other=0)
                behind = tl.where(block + 1 < blocks, behind, count.to(tl.int32))
                if behind > first:
                    v = block * BLOCK + tl.arange(0, BLOCK)
                    z = tl.load(logits + row * stride + v, mask=v < V, other=float("-inf"))
                    z = z.to(tl.float32)
                    finite = (z > float("-inf")).to(tl.int32)
                    place = first + tl.cumsum(finite, axis=0) - 1
                    tl.store(out + place, _packed((z - m) - total, v), mask=finite != 0)
        else:
            for done in range(group * COPIED, count, groups * COPIED):
                j = done + tl.arange(0, COPIED)
                entry = tl.load(narrow + row * W + j, mask=j < count, other=0)
                tl.store(out + j, entry, mask=j < count)


def capture_rows(
    logits: Tensor,  # [R, V], R >= 1, its rows contiguous
    sampled: Tensor,  # [R]
    asked: Tensor,  # [R] int8
    packed: Tensor,  # [capacity] int64 out: slots that no entry takes keep what they hold
    replay: bool,  # some row may be REPLAY
    top: int | None,  # likeliest ids of a HEAD row; None: no row may be HEAD
    uniform: Tensor | None,  # [R, M] in [0, 1) for M draws of a DRAWS row; None: likewise
) -> tuple[Tensor, ...]:
    """The fields of `CapturedRows`, in their order."""
    # The kernels count rows: whatever has one value a row has to lie row after row.
    sampled, asked = sampled.contiguous(), asked.contiguous()
    r, v = logits.shape
    blocks = triton.cdiv(v, _BLOCK)
    lanes, stride = max(16, triton.next_power_of_2(blocks)), logits.stride(0)
    new = logits.new_empty
    largest, smallest, mass = new(3, r, blocks, dtype=torch.float32).unbind()
    kept = new(r, blocks, dtype=torch.int32)
    peak, log_total, sampled_logprobs = new(3, r, dtype=torch.float32).unbind()
    needed, counts = new(2, r, dtype=torch.int64).unbind()
    kind, needed_in_all = torch.empty_like(asked), new((), dtype=torch.int64)
    tail = torch.zeros(r, dtype=torch.float32, device=logits.device)
    draws = 0 if uniform is None else uniform.shape[1]
    narrow_width = max(0 if top is None else top + 1, draws)
    narrow = new(r, narrow_width, dtype=torch.int64)

    groups = triton.cdiv(blocks, _GROUP)
    _block_facts_kernel[(r * groups,)](
        logits, asked, largest, smallest, mass, kept, v, blocks, groups, stride, GROUP=_GROUP,
        BLOCK=_BLOCK, num_warps=1,
    )  # fmt: skip
    _row_facts_kernel[(r,)](
        logits, sampled, asked, largest, smallest, mass, kept, peak, log_total, sampled_logprobs,
        needed, v, blocks, draws, stride, LANES=lanes, num_warps=4,
    )  # fmt: skip
    if top is not None:
        hits = smallest.view(torch.int32)  # not read any more
        listed = new(r, _LIST, dtype=torch.int32)
        _top_kernel[(r,)](
            logits, sampled, asked, largest, mass, peak, log_total, needed, narrow, tail,
            hits, listed, v, narrow_width, top, blocks, stride, LANES=lanes, LIST=_LIST,
            BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    if uniform is not None:
        _draws_kernel[(r * draws,)](
            logits, uniform, asked, mass, peak, log_total, needed, narrow, v, narrow_width, draws,
            blocks, stride, LANES=lanes, BLOCK=_BLOCK, num_warps=1,
        )  # fmt: skip
    _fit_kernel[(r,)](needed, asked, counts, kind, tail, needed_in_all, r, len(packed), TILE=_ROWS)
    ends = counts.clamp(min=0).cumsum(0)
    copied = 128  # narrow entries of one program
    groups = groups if replay else triton.cdiv(narrow_width, copied)
    _write_kernel[(r * groups,)](
        logits, kind, counts, ends, kept, peak, log_total, narrow, packed, v, narrow_width, blocks,
        groups, stride, GROUP=_GROUP, BLOCK=_BLOCK, COPIED=copied, num_warps=1,
    )  # fmt: skip
    return packed, counts, kind, tail, sampled_logprobs, needed_in_all
