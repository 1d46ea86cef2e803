"""Rows normalised over the vocabulary without kernels: chunks of logits, forward and backward."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rl_loss.csr import HEAD
from rl_loss.flat_rows import FlatRows, HeadInputs, Upstreams
from rl_loss.logits import LogitTransform, accumulation_dtype, p_log_p

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


def dense_fwd(
    inputs: HeadInputs,
    rows: FlatRows,
    chosen: Tensor,  # [D]
    transform: LogitTransform,
    want_entropy: bool,
) -> Dense:
    """Log-probabilities over the vocabulary of the chosen rows.

    The tail of a HEAD row is every id that is not one of its known ids, taken over their logits
    apart: as `1 - sum(p)` it would be rounding noise where it is small.
    """
    hidden, vocab_size = inputs.hidden, len(inputs.weight)
    entries, place = rows.entries(chosen)
    ids = rows.ids[entries].long()
    lse, logprobs, tail, entropy = hidden.new_zeros(4, len(chosen), dtype=inputs.dtype).unbind()
    support_logprobs = hidden.new_empty(len(entries), dtype=inputs.dtype)
    for chunk, inside in _chunks(place, len(chosen), vocab_size):
        some, at = chosen[chunk], (place[inside] - chunk.start, ids[inside])
        z = _logits(inputs, rows, some, transform)
        lse[chunk] = z.logsumexp(-1)
        logprobs[chunk] = z.gather(1, rows.labels[some, None])[:, 0] - lse[chunk]
        support_logprobs[inside] = z[at] - lse[chunk][at[0]]
        if want_entropy:
            entropy[chunk] = -p_log_p(z - lse[chunk, None]).sum(-1)
        head = rows.kind[some] == HEAD
        known = rows.known[entries[inside]]
        z[at[0][known], at[1][known]] = -torch.inf
        tail[chunk] = torch.where(head, z.logsumexp(-1) - lse[chunk], -torch.inf)
    return Dense(
        chosen=chosen,
        entries=entries,
        place=place,
        lse=lse,
        support_logprobs=support_logprobs,
        logprobs=logprobs,
        tail_logprobs=tail,
        entropy=entropy,
    )


def dense_bwd(
    saved: Dense,
    inputs: HeadInputs,
    rows: FlatRows,
    transform: LogitTransform,
    upstreams: Upstreams,
    sums: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:
    """Adds the gradients of the chosen rows to those of hidden, weight and bias in `sums`."""
    d_hidden, d_weight, d_bias = sums
    ids = rows.ids[saved.entries].long()
    for chunk, inside in _chunks(saved.place, len(saved.chosen), len(inputs.weight)):
        some, at = saved.chosen[chunk], (saved.place[inside] - chunk.start, ids[inside])
        z = _logits(inputs, rows, some, transform)
        logp = z - saved.lse[chunk, None]
        total = torch.zeros_like(saved.lse[chunk])  # the sum of a row's upstreams
        dz = torch.zeros_like(z)
        if upstreams.logprobs is not None:
            upstream = upstreams.logprobs[some]
            dz.scatter_add_(1, rows.labels[some, None], upstream[:, None])
            total += upstream
        if upstreams.support_logprobs is not None:
            upstream = upstreams.support_logprobs[saved.entries[inside]]
            dz.index_put_(at, upstream, accumulate=True)
            total.index_add_(0, at[0], upstream)
        if upstreams.tail_logprobs is not None:
            tail = saved.tail_logprobs[chunk]
            some_tail = tail > -torch.inf
            upstream = torch.where(some_tail, upstreams.tail_logprobs[some], 0.0)
            share = logp - torch.where(some_tail, tail, 0.0)[:, None]
            known = rows.known[saved.entries[inside]]
            share[at[0][known], at[1][known]] = -torch.inf
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


def _chunks(place: Tensor, n: int, vocab_size: int) -> Iterator[tuple[slice, slice]]:
    """Runs of rows with at most `_CHUNK` logits, and the run of entries in each."""
    step = max(1, _CHUNK // max(1, vocab_size))
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
