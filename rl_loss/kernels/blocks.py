"""Logits over the vocabulary on a GPU: blocks of them, each used up while it is there.

A block is `[R, B]` float32: the products of R rows with B ids. The forward takes of it each row's
log-sum-exp and the logits of its label and entries. The backward computes it again, turns it into
the gradient of the products in place, and multiplies that with the weight and with the hidden
states. Blocks of ids, not of rows, because a block of the weight's gradient is then one product,
rounded once, and only the hidden gradient is added up.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rl_loss.kernels.block_passes import add_stats, pick, put_entries, to_grads
from rl_loss.kernels.logits import Logit
from rl_loss.kernels.records import Entries, Rows
from rl_loss.logits import accumulation_dtype

# Fewer ids a block, and the matrix products lose more than the memory is worth.
_LEAST_IDS = 2048


def block_shape(n: int, vocab_size: int, size: int, workspace: int) -> tuple[int, int]:
    """Rows and ids of a block of at most `workspace` bytes, `size` a logit."""
    cells = max(1, workspace // size)
    rows = min(n, max(1, cells // min(_LEAST_IDS, vocab_size)))
    ids = min(vocab_size, max(1, cells // max(1, rows)))
    if 256 <= ids < vocab_size:
        ids = ids // 256 * 256  # whole tiles of a matrix product
    return rows, ids


def new_block(rows: int, ids: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """`[rows, ids]` for logits, its rows laid out so that matrix products read them well."""
    return like.new_empty(rows, (ids + 63) // 64 * 64, dtype=dtype)


def _blocks(n: int, vocab_size: int, rows: int, ids: int) -> Iterator[tuple[slice, list[slice]]]:
    """Each run of ids, and the runs of rows that its block is computed for."""
    runs = [slice(r, min(r + rows, n)) for r in range(0, n, rows)]
    for v in range(0, vocab_size, ids):
        yield slice(v, min(v + ids, vocab_size)), runs


def vocabulary_stats(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    chosen: Tensor,  # [D] int64
    entries: Entries,
    logits: Logit,
    out: Rows,  # support_logprobs: the logits of these rows' entries
    max_width: int,
    workspace: int,
    moment: bool,
) -> Tensor:
    """`[4, N]`: log-sum-exp as maximum and sum, the entropy's sum, and the label's logit."""
    dtype, some = accumulation_dtype(hidden, weight), rows_of(hidden, chosen)
    stats = hidden.new_empty(4, len(hidden), dtype=dtype)
    shape = block_shape(len(chosen), len(weight), dtype.itemsize, workspace)
    buffer = new_block(*shape, hidden, dtype)
    for ids, runs in _blocks(len(chosen), len(weight), *shape):
        for run in runs:
            raw = products(some[run], weight[ids], buffer)
            at = chosen[run]
            pick(raw, at, entries, logits, ids.start, out.support_logprobs, stats[3], max_width)
            add_stats(raw, at, logits, stats, ids.start, moment)
    return stats


def vocabulary_grads(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    chosen: Tensor,  # [D] int64
    entries: Entries,
    logits: Logit,
    saved: Rows,
    upstream: Tensor,  # [4, N] EntryGrads.over_v
    has_tail: bool,
    has_entropy: bool,
    max_width: int,
    workspace: int,
    d_hidden: Tensor | None,  # [D, H] added to, in the accumulation dtype
    d_weight: Tensor | None,  # [V, H] written, one rounding, where `finish` is None
    d_bias: Tensor | None,  # [V] added to
    finish: Callable[[slice, Tensor], None] | None,  # is given ids and their `[B, H]`
) -> None:
    """The gradients that go through logits over the vocabulary."""
    acc, some = accumulation_dtype(hidden, weight), rows_of(hidden, chosen)
    shape = block_shape(len(chosen), len(weight), acc.itemsize, workspace)
    buffer = new_block(*shape, hidden, acc)
    dtype = grad_dtype(hidden, weight)
    for ids, runs in _blocks(len(chosen), len(weight), *shape):
        w, part = weight[ids], None
        for run in runs:
            raw, at = products(some[run], w, buffer), chosen[run]
            if max_width:
                pick(raw, at, entries, logits, ids.start, None, None, max_width)
            dz = to_grads(
                raw, dtype, at, logits, entries.labels, saved, upstream, ids.start,
                has_tail, has_entropy,
            )  # fmt: skip
            if d_hidden is not None:
                add_product(d_hidden[run], dz, w)
            if d_bias is not None:
                d_bias[ids] += dz.sum(0, dtype=acc)
            if d_weight is None:
                continue
            if finish is None and len(runs) == 1 and dtype == hidden.dtype == d_weight.dtype:
                torch.mm(dz.T, some[run], out=d_weight[ids])
            elif part is None:
                part = _product(dz.T, some[run])
            else:
                add_product(part, dz.T, some[run])
        if part is not None and d_weight is not None:
            if finish is None:
                d_weight[ids] = part
            else:
                finish(ids, part)


def wide_logits(
    hidden: Tensor,
    weight: Tensor,
    wide: Tensor,  # [W] int64
    entries: Entries,
    logits: Logit,
    out: Rows,
    max_width: int,
    workspace: int,
) -> None:
    """The logits of REPLAY rows so wide that a matrix product over V is cheaper than gathering."""
    dtype, v = accumulation_dtype(hidden, weight), len(weight)
    runs = wide.split(max(1, workspace // (dtype.itemsize * v)))
    buffer = new_block(len(runs[0]), v, hidden, dtype)
    for run in runs:
        raw = products(hidden[run], weight, buffer)
        z = out.support_logprobs
        pick(raw, run, entries, logits, 0, z, None, max_width, take_out=False)


def wide_hidden_grads(
    weight: Tensor,  # [V, H]
    wide: Tensor,  # [W] int64
    entries: Entries,
    grad: Tensor,  # [nnz]
    dtype: torch.dtype,  # of the gradient of products
    max_width: int,
    workspace: int,
) -> Tensor:
    """The hidden gradients of these rows, `[W, H]` in the accumulation dtype."""
    parts, runs = [], wide.split(max(1, workspace // (dtype.itemsize * len(weight))))
    buffer = new_block(len(runs[0]), len(weight), weight, dtype)
    for run in runs:
        dz = buffer[: len(run), : len(weight)].zero_()
        put_entries(dz, run, entries.ids, entries.offsets, grad, max_width)
        parts.append(_product(dz, weight))
    return torch.cat(parts)


def rows_of(hidden: Tensor, chosen: Tensor) -> Tensor:
    """The chosen rows, ascending and each once: the tensor itself where that is all of them."""
    return hidden if len(chosen) == len(hidden) else hidden[chosen]


# --- products with a result in the accumulation dtype, whatever the inputs' ---


def grad_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Of the gradient of products: bfloat16 where tensor cores take it.

    Never float16: a gradient of 1e-6 is no number there.
    """
    if hidden.is_cuda and hidden.dtype == weight.dtype == torch.bfloat16:
        return torch.bfloat16
    return accumulation_dtype(hidden, weight)


def _native(a: Tensor, b: Tensor) -> bool:
    return a.is_cuda and a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16)


def products(h: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    """`h [R, H] @ w.T [H, B]` in the upper left of `buffer`, in its dtype."""
    out = buffer[: len(h), : len(w)]
    if _native(h, w):
        return torch.mm(h, w.T, out_dtype=out.dtype, out=out)
    return torch.mm(h.to(out.dtype), w.to(out.dtype).T, out=out)


def _product(a: Tensor, b: Tensor) -> Tensor:
    acc = accumulation_dtype(a, b)
    if _native(a, b):
        return torch.mm(a, b, out_dtype=acc)
    return a.to(acc) @ b.to(acc)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds `a @ b` to `total`."""
    if _native(a, b):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
