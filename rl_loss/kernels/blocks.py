"""Logits over the vocabulary on a GPU: blocks of them, each used up while it is there.

A block is `[R, B]` float32: the products of R rows with B ids. The forward takes of it each row's
log-sum-exp and the logits of its label and entries. The backward computes it again, turns it into
the gradient of the products in place, and multiplies that with the weight and with the hidden
states. In two steps blocks run over ids, because a block of the weight's gradient is then one
product, rounded once, and only the hidden gradient is added up; in one pass a block has all ids of
some rows.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rl_loss.flat_rows import Needs, Upstreams
from rl_loss.kernels.block_passes import Block, add_stats, pick, put_entries, to_grads
from rl_loss.kernels.entry_grads import EntryGrads
from rl_loss.kernels.fused_products import add_row_stats, fuses, product_grads
from rl_loss.kernels.gathered import gathered_logits
from rl_loss.kernels.half_grads import HalfScales, entry_scales, half_scales
from rl_loss.kernels.records import HeadCall, RowOutputs
from rl_loss.logits import accumulation_dtype
from rl_loss.vocab_parallel import RankLogits

# Fewer ids a block, and the matrix products lose more than the memory is worth.
_LEAST_IDS = 2048


class Shape(NamedTuple):
    """The largest block."""

    rows: int
    ids: int


def wide_in_ids(call: HeadCall, dtype: torch.dtype) -> Shape:
    """Of the rows over the vocabulary, in two steps: as many rows as there are, ids to fit; cells
    of `dtype`."""
    n, vocab_size = len(call.rows.over_v), len(call.weight)
    cells = max(1, call.scalars.workspace // dtype.itemsize)
    rows = min(n, max(1, cells // max(1, min(_LEAST_IDS, vocab_size))))
    ids = min(vocab_size, max(1, cells // max(1, rows)))
    if 256 <= ids < vocab_size:
        ids = ids // 256 * 256  # whole tiles of a matrix product
    return Shape(rows, ids)


def all_ids(call: HeadCall, n: int) -> Shape:
    """Of `n` rows in runs of about one length, each with the whole vocabulary."""
    # By the rank that has most ids, for all ranks make the same runs.
    most = max(1, call.scalars.workspace // (call.dtype.itemsize * call.shard.most))
    runs = -(-n // most)
    return Shape(-(-n // max(1, runs)), len(call.weight))


def product_blocks(
    call: HeadCall, chosen: Tensor, shape: Shape, grads_alone: torch.dtype | None = None
) -> Iterator[Block]:
    """The blocks of the rows `chosen` `[D]`, ascending: every run of rows for one run of ids
    after another. The next block takes the memory of the one before.

    `grads_alone`: the blocks are memory for gradients of that dtype, and are not multiplied."""
    n, vocab_size, bias = len(chosen), len(call.weight), call.logit.bias
    if not n or not vocab_size:
        return
    hidden = _rows_of(call.hidden, chosen)
    buffer = _new_block(min(shape.rows, n), shape.ids, call.hidden, grads_alone or call.dtype)
    for first in range(0, vocab_size, shape.ids):
        ids = slice(first, min(first + shape.ids, vocab_size))
        weight, some_bias = call.weight[ids], None if bias is None else bias[ids]
        for start in range(0, n, shape.rows):
            run = slice(start, min(start + shape.rows, n))
            some = hidden[run]
            raw = buffer[: len(some), : len(weight)]
            if grads_alone is None:
                _multiply(some, weight, raw)
            yield Block(
                raw=raw,
                rows=chosen[run],
                run=run,
                ids=ids,
                first=call.shard.first + first,
                hidden=some,
                weight=weight,
                bias=some_bias,
                last=run.stop == n,
                multiplied=grads_alone is None,
            )


def entry_logits(call: HeadCall) -> RowOutputs:
    """Outputs of which no more is written than the logits of the replayed rows' entries."""
    out = RowOutputs.new(call.inputs, call.rows, call.scalars)
    if not call.shard.alone:
        out.support_logprobs.zero_()  # what other ranks have is added to it
    gathered_logits(call, out)
    if len(call.rows.wide):
        _wide_logits(call, out)
    return out


def new_stats(call: HeadCall) -> Tensor:
    """`[4, N]` of rows over the vocabulary: log-sum-exp as maximum and sum, the entropy's sum, and
    the label's logit; not written yet, or where a rank may have no part of it those of nothing."""
    if call.shard.alone:
        return call.hidden.new_empty(4, call.n, dtype=call.dtype)
    stats = call.hidden.new_zeros(4, call.n, dtype=call.dtype)
    stats[0] = -torch.inf
    return stats


def vocabulary_stats(call: HeadCall, out: RowOutputs) -> Tensor:
    """`new_stats` of the rows over the vocabulary, written. The logits of their entries go to
    `out.support_logprobs`."""
    stats, rows = new_stats(call), call.rows.over_v
    if fuses(call):
        add_row_stats(call, _rows_of(call.hidden, rows), rows, stats)
        return stats
    for block in product_blocks(call, rows, wide_in_ids(call, call.dtype)):
        take_stats(call, block, out, stats)
    return stats


def of_all_ranks(
    call: HeadCall, out: RowOutputs, stats: Tensor | None = None, rows: Tensor | None = None
) -> None:
    """Logits of entries, and the statistics of `rows` `[D]`, become those of all ranks."""
    z = out.support_logprobs
    z.copy_(_summed(call, z, stats, rows))


def _summed(call: HeadCall, z: Tensor, stats: Tensor | None, rows: Tensor | None) -> Tensor:
    """Those logits `z` `[E]`; the statistics are written."""
    if stats is None or rows is None:
        stats, rows = z.new_zeros(4, 0), z.new_zeros(0, dtype=torch.int64)
    some = stats[:, rows]
    assert call.own is not None
    batch = call.own.batch.to(z.dtype)
    whole = call.shard.sum_logits(RankLogits(z, some[3], some[:3], batch))
    stats[:, rows] = torch.cat([whole.stats, whole.labels[None]])
    return whole.entries


def some_of_all_ranks(call: HeadCall, z: Tensor, mine: Tensor, stats: Tensor, rows: Tensor) -> None:
    """As `of_all_ranks`, of the entries `z` `[E]` that are `mine` `[E]` alone."""
    whole = _summed(call, torch.where(mine, z, 0.0), stats, rows)
    z.copy_(torch.where(mine, whole, z))


def take_stats(call: HeadCall, block: Block, out: RowOutputs, stats: Tensor) -> None:
    """What the forward takes of a block, whose known HEAD cells are empty afterwards."""
    pick(call, block, out.support_logprobs, stats[3])
    add_stats(call, block, stats)


class BlockSums:
    """What the blocks send to hidden, weight and bias, in the accumulation dtype."""

    def __init__(self, call: HeadCall, needs: Needs, d_weight: Tensor | None = None) -> None:
        """`d_weight` `[V, H]`: written where a block's product is all of its ids' gradient; where
        the call adds to it, and it is in the accumulation dtype, every product goes into it."""
        d, h, v = len(call.rows.over_v), call.hidden.shape[1], len(call.weight)
        new = call.hidden.new_zeros
        self.needs, self._d_weight = needs, d_weight
        self._into = d_weight is not None and call.into is not None
        self.all_into = self._into and d_weight.dtype == call.dtype  # type: ignore[union-attr]
        self._dtype = grad_dtype(call.hidden, call.weight)
        self.bias = new(v, dtype=call.dtype) if needs.bias and d else None  # [V]
        self._hidden = new(d, h, dtype=call.dtype) if needs.hidden and d else None  # [D, H]
        self._part: Tensor | None = None  # [B, H] of the ids at hand
        self._up: Tensor | None = None  # [D] what rows of `_hidden` are too large by
        self._scales: HalfScales | None = None  # of the block at hand
        if self._dtype == torch.float16:
            self._up = new(d, dtype=call.dtype)

    @property
    def hidden(self) -> Tensor | None:
        """`[D, H]`, when all blocks are added."""
        if self._hidden is not None and self._up is not None:
            self._hidden /= self._up[:, None]
            self._up = None
        return self._hidden

    def add(
        self, call: HeadCall, block: Block, saved: RowOutputs, upstreams: Upstreams, over_v: Tensor
    ) -> Tensor:
        """Turns the block into its gradient `[R, B]`, and adds that to hidden and bias."""
        up = None
        if self._up is not None:
            self._scales = half_scales(call, block.rows, saved, upstreams, over_v)
            up = self._up[block.run] = self._scales.up
        grads_of = to_grads if block.multiplied else product_grads
        dz = grads_of(call, block, self._dtype, saved, upstreams, over_v, up)
        if self._hidden is not None:
            _add_product(self._hidden[block.run], dz, block.weight)
        if self.bias is not None:
            self.bias[block.ids] += self._sum_of_rows(dz)
        return dz

    def _sum_of_rows(self, dz: Tensor) -> Tensor:
        """`[R, B]` to `[B]` in the accumulation dtype."""
        assert self.bias is not None
        if self._scales is None:
            return dz.sum(0, dtype=self.bias.dtype)
        return _product(dz.T, self._scales.apart[:, None])[:, 0] * self._scales.common

    def add_to_weight(self, block: Block, dz: Tensor) -> Tensor | None:
        """Gives, with the last rows of these ids, their weight gradient `[B, H]`; None before, and
        where nothing is left to add."""
        if not self.needs.weight:
            return None
        if self.all_into:
            self._part = self._d_weight[block.ids]  # type: ignore[index]
        elif self._writes_at_once(block, dz):
            out = self._d_weight[block.ids]  # type: ignore[index]
            if self._into:
                torch.addmm(out, dz.T, block.hidden, out=out)
            else:
                torch.mm(dz.T, block.hidden, out=out)
            return None
        if self._scales is not None:
            part = _product(dz.T, block.hidden * self._scales.apart[:, None])
            part *= self._scales.common
            self._part = part if self._part is None else self._part.add_(part)
        elif self._part is None:
            self._part = _product(dz.T, block.hidden)
        else:
            _add_product(self._part, dz.T, block.hidden)
        if not block.last:
            return None
        part, self._part = self._part, None
        return None if self.all_into else part

    def _writes_at_once(self, block: Block, dz: Tensor) -> bool:
        out = self._d_weight
        alone = out is not None and block.last and block.run.start == 0 and self._scales is None
        return alone and dz.dtype == block.hidden.dtype == out.dtype  # type: ignore[union-attr]


def blocks_to_grads(
    call: HeadCall, saved: RowOutputs, upstreams: Upstreams, over_v: Tensor, sums: BlockSums
) -> Iterator[tuple[Block, Tensor]]:
    """Every block and its gradient `[R, B]`, which was added to hidden and bias of `sums`."""
    dtype = grad_dtype(call.hidden, call.weight) if fuses(call) else None
    shape = wide_in_ids(call, dtype or call.dtype)
    for block in product_blocks(call, call.rows.over_v, shape, dtype):
        if call.scalars.any_head:
            pick(call, block, None)  # empties the cells of known ids
        yield block, sums.add(call, block, saved, upstreams, over_v)


# --- REPLAY rows so wide that a matrix product over V is cheaper than gathering ---


def _wide_logits(call: HeadCall, out: RowOutputs) -> None:
    """The logits of their entries."""
    wide = call.rows.wide
    shape = Shape(max(1, call.scalars.workspace // _row_bytes(call, call.dtype)), len(call.weight))
    for block in product_blocks(call, wide, shape):
        pick(call, block, out.support_logprobs, take_out=False)


def wide_hidden_grads(call: HeadCall, grads: EntryGrads) -> Tensor:
    """Their hidden gradients, `[W, H]` in the accumulation dtype."""
    weight, dtype = call.weight, grad_dtype(call.hidden, call.weight)
    runs = call.rows.wide.split(max(1, call.scalars.workspace // _row_bytes(call, dtype)))
    buffer, parts = _new_block(len(runs[0]), len(weight), weight, dtype), []
    grad, up = grads.grad, None
    if dtype == torch.float16:
        up = entry_scales(call, call.rows.wide, grad).up
        each = grad.new_ones(call.n).index_copy_(0, call.rows.wide, up)
        grad = grad * each[grads.rows]
    for run in runs:
        dz = buffer[: len(run), : len(weight)].zero_()
        put_entries(call, run, grad, dz)
        parts.append(_product(dz, weight))
    made = torch.cat(parts)
    return made if up is None else made / up[:, None]


def _row_bytes(call: HeadCall, dtype: torch.dtype) -> int:
    return dtype.itemsize * max(1, len(call.weight))


def _rows_of(hidden: Tensor, chosen: Tensor) -> Tensor:
    """The chosen rows, ascending and each once: the tensor itself where that is all of them."""
    return hidden if len(chosen) == len(hidden) else hidden[chosen]


def _new_block(rows: int, ids: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """`[rows, ids]` for logits, its rows laid out so that matrix products read them well."""
    return like.new_empty(rows, (ids + 63) // 64 * 64, dtype=dtype)


# --- products with a result in the accumulation dtype, whatever the inputs' ---


def grad_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Of the gradient of products: bfloat16 where tensor cores take it, float16 scaled
    (`half_grads`)."""
    if hidden.is_cuda and hidden.dtype == weight.dtype == torch.bfloat16:
        return torch.bfloat16
    if hidden.dtype == weight.dtype == torch.float16:
        return torch.float16
    return accumulation_dtype(hidden, weight)


def _native(a: Tensor, b: Tensor) -> bool:
    return a.is_cuda and a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16)


def _multiply(h: Tensor, w: Tensor, out: Tensor) -> None:
    """Writes `h [R, H] @ w.T [H, B]` to `out`, in its dtype."""
    if _native(h, w):
        torch.mm(h, w.T, out_dtype=out.dtype, out=out)
    else:
        torch.mm(h.to(out.dtype), w.to(out.dtype).T, out=out)


def _product(a: Tensor, b: Tensor) -> Tensor:
    acc = accumulation_dtype(a, b)
    if _native(a, b):
        return torch.mm(a, b, out_dtype=acc)
    return a.to(acc) @ b.to(acc)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds `a @ b` to `total`."""
    if _native(a, b):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
