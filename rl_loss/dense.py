"""Rows normalised over the vocabulary without kernels: chunks of logits, forward and backward."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rl_loss.csr import HEAD, segment_logsumexp, segment_sum
from rl_loss.flat_rows import FlatRows, HeadInputs, Sums, Upstreams
from rl_loss.logits import LogitTransform, accumulation_dtype, p_log_p
from rl_loss.vocab_parallel import RankLogits, Shard

_CHUNK = 2**24  # the most logits that are held at a time
_VOCAB_BLOCK = 8192  # weight rows that are converted to the accumulation dtype at a time


class Dense(NamedTuple):
    """What the forward computed of D rows and their E entries, and the backward reads."""

    chosen: Tensor  # [D] the rows, in the batch
    entries: Tensor  # [E] the entries, in the support
    place: Tensor  # [E] each entry's row, in `chosen`
    lse: Tensor  # [D] log-sum-exp of the logits
    support_logprobs: Tensor  # [E]
    logprobs: Tensor  # [D]
    tail_logprobs: Tensor  # [D]
    entropy: Tensor  # [D], 0 where not asked for


class DenseLogits(NamedTuple):
    """What a rank takes of its logits of D rows and their E entries, 0 where it has no part."""

    chosen: Tensor  # as `Dense` has them
    entries: Tensor
    place: Tensor
    own: RankLogits


def dense_logits(
    inputs: HeadInputs,
    rows: FlatRows,
    chosen: Tensor,  # [D]
    transform: LogitTransform,
    want_entropy: bool,
    shard: Shard,
) -> DenseLogits:
    """The logits over the ids here of the chosen rows: what is normalised over all of V.

    The known ids of a HEAD row are left out of its statistics: what these add up to is its tail,
    taken over its logits apart. As `1 - sum(p)` it would be rounding noise where it is small.
    """
    entries, place = rows.entries(chosen)
    new = inputs.hidden.new_zeros
    label_z, top, total, moment = new(4, len(chosen), dtype=inputs.dtype).unbind()
    z_entries = new(len(entries), dtype=inputs.dtype)
    top.fill_(-torch.inf)
    for chunk, inside in _chunks(place, len(chosen), len(inputs.weight)):
        some = chosen[chunk]
        z = _logits(inputs, rows, some, transform)
        label = shard.local(rows.labels[some])
        has_label = label < z.shape[1]
        label_z[chunk][has_label] = z[has_label, label[has_label]]
        at, cells = _own_cells(rows, entries[inside], place[inside] - chunk.start, shard)
        z_entries[inside][at] = z[cells]
        known = (rows.known & (rows.kind == HEAD)[rows.entry_rows])[entries[inside]][at]
        z[cells[0][known], cells[1][known]] = -torch.inf
        top[chunk] = z.amax(-1)
        z -= torch.where(top[chunk] == -torch.inf, 0.0, top[chunk])[:, None]
        e = z.exp()
        total[chunk] = e.sum(-1)
        if want_entropy:
            moment[chunk] = (e * torch.where(z == -torch.inf, 0.0, z)).sum(-1)
    own = RankLogits(z_entries, label_z, torch.stack([top, total, moment]), new(0))
    return DenseLogits(chosen, entries, place, own)


def dense_fwd(logits: DenseLogits, rows: FlatRows, whole: RankLogits, want_entropy: bool) -> Dense:
    """Log-probabilities over the vocabulary, from what all ranks together took."""
    chosen, entries, place, _ = logits
    n, (top, total, moment) = len(chosen), whole.stats
    rest = top + total.log()  # of what the statistics are of
    head = rows.kind[chosen] == HEAD
    counted = rows.known[entries] & head[place]
    apart = segment_logsumexp(whole.entries[counted], place[counted], n)
    lse = torch.where(head, torch.logaddexp(rest, apart), rest)
    logp = whole.entries - lse[place]
    uncertainty = torch.zeros_like(lse)
    if want_entropy:
        gap = torch.where(total == 0, 0.0, top - lse)
        uncertainty -= torch.where(total == 0, 0.0, gap.exp() * (moment + total * gap))
        uncertainty -= segment_sum(p_log_p(logp[counted]), place[counted], n)
    return Dense(
        chosen=chosen,
        entries=entries,
        place=place,
        lse=lse,
        support_logprobs=logp,
        logprobs=whole.labels - lse,
        tail_logprobs=torch.where(head, rest - lse, -torch.inf),
        entropy=uncertainty,
    )


def dense_bwd(
    saved: Dense,
    inputs: HeadInputs,
    rows: FlatRows,
    transform: LogitTransform,
    upstreams: Upstreams,
    sums: Sums,
    shard: Shard,
) -> None:
    """Adds what the ids here send to hidden, weight and bias to `sums`."""
    d_hidden, d_weight, d_bias = sums
    for chunk, inside in _chunks(saved.place, len(saved.chosen), len(inputs.weight)):
        some, place = saved.chosen[chunk], saved.place[inside] - chunk.start
        entries = saved.entries[inside]
        at, cells = _own_cells(rows, entries, place, shard)
        z = _logits(inputs, rows, some, transform)
        logp = z - saved.lse[chunk, None]
        total = torch.zeros_like(saved.lse[chunk])  # the sum of a row's upstreams
        dz = torch.zeros_like(z)
        if upstreams.logprobs is not None:
            upstream = upstreams.logprobs[some]
            label = shard.local(rows.labels[some])
            has_label = label < dz.shape[1]
            dz[has_label, label[has_label]] = upstream[has_label]
            total += upstream
        if upstreams.support_logprobs is not None:
            upstream = upstreams.support_logprobs[entries]
            dz.index_put_(cells, upstream[at], accumulate=True)
            total.index_add_(0, place, upstream)
        if upstreams.tail_logprobs is not None:
            tail = saved.tail_logprobs[chunk]
            some_tail = tail > -torch.inf
            upstream = torch.where(some_tail, upstreams.tail_logprobs[some], 0.0)
            share = logp - torch.where(some_tail, tail, 0.0)[:, None]
            known = rows.known[entries][at]
            share[cells[0][known], cells[1][known]] = -torch.inf
            dz += share.exp_() * upstream[:, None]
            total += upstream
        if upstreams.entropy is not None:
            dz -= upstreams.entropy[some, None] * p_log_p(logp)
            total += upstreams.entropy[some] * saved.entropy[chunk]
        dz -= logp.exp_() * total[:, None]
        dz *= transform.derivative(z, rows.temperature[some, None])
        if d_bias is not None:
            d_bias += dz.sum(0)
        if d_hidden is not None:
            d_hidden[some] += _times_weight(dz, inputs.weight)
        if d_weight is not None:
            d_weight.addmm_(dz.T, inputs.hidden[some].to(dz.dtype))


def _own_cells(
    rows: FlatRows, entries: Tensor, place: Tensor, shard: Shard
) -> tuple[Tensor | slice, tuple[Tensor, Tensor]]:
    """Which of some entries are here, and their cells: rows of a chunk, and columns."""
    ids = rows.ids[entries]
    if shard.alone:
        return slice(None), (place, ids.long())
    own = shard.owned(ids)
    return own, (place[own], shard.local(ids)[own].long())


def _chunks(place: Tensor, n: int, vocab_size: int) -> Iterator[tuple[slice, slice]]:
    """Runs of rows with at most `_CHUNK` logits, and the run of entries in each."""
    if not vocab_size:  # a rank without ids
        return
    step = max(1, _CHUNK // vocab_size)
    starts = torch.arange(0, n + step, step, device=place.device).clamp(max=n)
    bounds = torch.searchsorted(place, starts).tolist()
    for i, start in enumerate(range(0, n, step)):
        yield slice(start, min(start + step, n)), slice(bounds[i], bounds[i + 1])


# --- products with a result in the accumulation dtype, whatever the inputs' ---


def _in_dtype(tensor: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """The tensor in `dtype`: whole if it has it already, else block by block of its rows."""
    step = max(1, len(tensor) if tensor.dtype == dtype else _VOCAB_BLOCK)
    for start in range(0, len(tensor), step):
        block = slice(start, min(start + step, len(tensor)))
        yield block, tensor[block].to(dtype)


def _transposed_product(a: Tensor, weight: Tensor) -> Tensor:
    """`a [R, H] @ weight.T [H, V]`."""
    dtype = accumulation_dtype(a, weight)
    a = a.to(dtype)
    return torch.cat([a @ part.T for _, part in _in_dtype(weight, dtype)], 1)


def _times_weight(dz: Tensor, weight: Tensor) -> Tensor:
    """`dz [R, V] @ weight [V, H]`."""
    out = dz.new_zeros(len(dz), weight.shape[1])
    for block, part in _in_dtype(weight, dz.dtype):
        out += dz[:, block] @ part
    return out


def _logits(
    inputs: HeadInputs, rows: FlatRows, chosen: Tensor, transform: LogitTransform
) -> Tensor:
    raw = _transposed_product(inputs.hidden[chosen], inputs.weight)
    return transform(raw, inputs.bias, rows.temperature[chosen, None])
