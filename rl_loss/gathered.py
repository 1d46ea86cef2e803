"""REPLAY rows without kernels: logits of the support's ids alone, forward and backward."""

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from rl_loss.csr import segment_logsumexp, segment_sum
from rl_loss.flat_rows import FlatRows, HeadInputs, Needs, Sums, Upstreams
from rl_loss.logits import LogitTransform, accumulation_dtype, p_log_p
from rl_loss.vocab_parallel import Shard

# The most elements of a gathered block of weight rows, where no sparse product exists.
_BLOCK = 2**22


class Gathered(NamedTuple):
    """What the forward computed, and the backward reads: of G rows of several ids, whose entries
    are E, and of S rows of one id, which have log p = 0 whatever their logit."""

    chosen: Tensor  # [G] the rows of several ids, in the batch
    entries: Tensor  # [E] their entries, in the support
    place: Tensor  # [E] each entry's row, in `chosen`
    z: Tensor  # [E]
    support_logprobs: Tensor  # [E]
    logprobs: Tensor  # [G]
    tail_logprobs: Tensor  # [G] of the ids whose q is unknown
    entropy: Tensor  # [G], 0 where not asked for
    single: Tensor  # [S] the rows of one id, in the batch


class Replayed(NamedTuple):
    """The entries whose logits REPLAY rows are made of, as `Gathered` has them."""

    chosen: Tensor
    entries: Tensor
    place: Tensor
    single: Tensor


def replayed_entries(rows: FlatRows) -> Replayed:
    """Of all REPLAY rows of several ids."""
    replayed = rows.replayed()
    several = rows.offsets.diff()[replayed] > 1
    chosen = replayed[several]
    return Replayed(chosen, *rows.entries(chosen), replayed[~several])


def gathered_logits_of(
    inputs: HeadInputs, rows: FlatRows, transform: LogitTransform, replayed: Replayed, shard: Shard
) -> Tensor:
    """The logits of the entries that are here, 0 elsewhere, `[E]`, through torch's sparse products
    or bounded gathers."""
    at, ids = replayed.chosen[replayed.place], rows.ids[replayed.entries]
    own: Tensor | slice = slice(None)
    some = ids
    if not shard.alone:
        own = shard.owned(ids)
        at, some = at[own], shard.local(ids)[own]
    raw = sampled_products(inputs.hidden, inputs.weight, at, some)
    bias = None if inputs.bias is None else inputs.bias[some]
    z = raw.new_zeros(len(ids))
    z[own] = transform(raw, bias, rows.temperature[at])
    return z


def gathered_fwd(z: Tensor, rows: FlatRows, replayed: Replayed, want_entropy: bool) -> Gathered:
    """Log-probabilities over their supports, from the logits `[E]`."""
    chosen, entries, place, single = replayed
    n, at, ids = len(chosen), chosen[place], rows.ids[entries]
    logp = z - segment_logsumexp(z, place, n)[place]
    label, unknown = ids == rows.labels[at], ~rows.known[entries]
    disorder = p_log_p(logp) if want_entropy else torch.zeros_like(logp)
    return Gathered(
        chosen=chosen,
        entries=entries,
        place=place,
        z=z,
        support_logprobs=logp,
        logprobs=segment_sum(torch.where(label, logp, 0.0), place, n),
        tail_logprobs=segment_logsumexp(logp[unknown], place[unknown], n),
        entropy=-segment_sum(disorder, place, n),
        single=single,
    )


def gathered_bwd(
    saved: Gathered,
    inputs: HeadInputs,
    rows: FlatRows,
    transform: LogitTransform,
    upstreams: Upstreams,
    needs: Needs,
    shard: Shard,
    into: Tensor | None = None,
) -> Sums:
    """The gradients of hidden, weight and bias that come of the entries here, in the accumulation
    dtype, 0 where there is none; None where not needed. That of the weight is added to `into`
    `[V, H]` where given, and then is that."""
    hidden, weight, bias = inputs
    grad = _entry_grads(saved, rows, transform, upstreams)
    at, ids = saved.chosen[saved.place], rows.ids[saved.entries]
    if not shard.alone:
        own = shard.owned(ids)
        grad, at, ids = grad[own], at[own], shard.local(ids)[own]
    d_hidden = d_weight = d_bias = None
    if needs.hidden:
        d_hidden = scattered_products(grad, weight, at, ids, len(hidden), ordered=True)
        d_hidden[_lost(saved.single, rows, upstreams)] = torch.nan
    if needs.weight and into is not None:
        add_scattered_products(into, grad, hidden, ids, at)
        d_weight = into
    elif needs.weight:
        d_weight = scattered_products(grad, hidden, ids, at, len(weight), ordered=False)
    if needs.bias and bias is not None:
        d_bias = segment_sum(grad, ids, len(bias))
    return Sums(d_hidden, d_weight, d_bias)


def _lost(single: Tensor, rows: FlatRows, upstreams: Upstreams) -> Tensor:
    """Rows of one id have no gradient, but what is NaN upstream must not end there."""
    nan = torch.zeros_like(single, dtype=torch.bool)
    for upstream in (upstreams.logprobs, upstreams.tail_logprobs, upstreams.entropy):
        if upstream is not None:
            nan |= upstream[single].isnan()
    if upstreams.support_logprobs is not None:
        nan |= upstreams.support_logprobs[rows.offsets[single]].isnan()
    return single[nan]


def _entry_grads(
    saved: Gathered, rows: FlatRows, transform: LogitTransform, upstreams: Upstreams
) -> Tensor:
    """The gradient of each entry's raw product, `[E]`.

    With `u` an entry's upstream, the label's and its share of the tail's included,
    `dz_v = u_v - p_v * sum(u) - d_entropy * p_v * (log p_v + entropy)`.
    """
    place, logp = saved.place, saved.support_logprobs
    at, ids = saved.chosen[place], rows.ids[saved.entries]
    u = torch.zeros_like(logp)
    if upstreams.support_logprobs is not None:
        u += upstreams.support_logprobs[saved.entries]
    if upstreams.logprobs is not None:
        u += torch.where(ids == rows.labels[at], upstreams.logprobs[at], 0.0)
    if upstreams.tail_logprobs is not None:
        tail = saved.tail_logprobs[place]
        unknown = ~rows.known[saved.entries] & (tail > -torch.inf)  # else p puts nothing there
        tail = torch.where(unknown, tail, 0.0)
        share = torch.where(unknown, logp - tail, -torch.inf).exp()
        u += torch.where(unknown, share * upstreams.tail_logprobs[at], 0.0)
    p = logp.exp()
    dz = u - p * segment_sum(u, place, len(saved.chosen))[place]
    if upstreams.entropy is not None:
        dz -= (p_log_p(logp) + p * saved.entropy[place]) * upstreams.entropy[at]
    return dz * transform.derivative(saved.z, rows.temperature[at])


# --- the three products of entries (row, id) ---


def _sparse(rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """A CSR matrix from entries sorted by row. MKL wants int32 and converts anything else."""
    counts = torch.bincount(rows, minlength=shape[0])
    bounds = torch.zeros(shape[0] + 1, dtype=torch.int32, device=rows.device)
    bounds[1:] = counts.cumsum(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(
            bounds, columns.to(torch.int32), values, shape, check_invariants=False
        )


def _has_sparse_products(*dense: Tensor) -> bool:
    """Whether torch.sparse multiplies these: float32 or float64 through MKL."""
    alike = len({tensor.dtype for tensor in dense}) == 1
    fits = alike and dense[0].dtype in (torch.float32, torch.float64)
    return fits and torch.backends.mkl.is_available()


def _entry_blocks(nnz: int, width: int) -> list[slice]:
    step = max(1, _BLOCK // max(1, width))
    return [slice(at, min(at + step, nnz)) for at in range(0, nnz, step)]


def sampled_products(hidden: Tensor, weight: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """`hidden[rows] . weight[ids]` an entry, `[E]`; entries sorted by row."""
    if len(ids) and _has_sparse_products(hidden, weight):
        shape = (len(hidden), len(weight))
        pattern = _sparse(rows, ids, hidden.new_zeros(len(ids)), shape)
        found = torch.sparse.sampled_addmm(pattern, hidden, weight.T, beta=0.0)
        return found.values().clone()  # torch.compile takes no view of a sparse tensor
    dtype = accumulation_dtype(hidden, weight)
    out = torch.empty(len(ids), dtype=dtype, device=hidden.device)
    for block in _entry_blocks(len(ids), weight.shape[1]):
        gathered = hidden[rows[block]].to(dtype), weight[ids[block]].to(dtype)
        out[block] = torch.linalg.vecdot(*gathered)
    return out


def scattered_products(
    grad: Tensor,  # [E] in the accumulation dtype
    dense: Tensor,  # [M, H]
    out_rows: Tensor,  # [E] the row of the result that an entry adds to
    dense_rows: Tensor,  # [E] the row of `dense` that it multiplies
    n_out: int,
    *,
    ordered: bool,
) -> Tensor:
    """`out[r] = sum of grad * dense[c]` over the entries (r, c), `[n_out, H]`, as `grad`'s dtype.

    Each row of the result is one sum in the accumulation dtype. `ordered` says that the entries
    are sorted by `out_rows` already.
    """
    if len(grad) and _has_sparse_products(grad, dense):
        if not ordered:
            order = out_rows.to(torch.int32).argsort(stable=True)
            out_rows, dense_rows, grad = out_rows[order], dense_rows[order], grad[order]
        return _sparse(out_rows, dense_rows, grad, (n_out, len(dense))) @ dense
    out = grad.new_zeros(n_out, dense.shape[1])
    for block in _entry_blocks(len(grad), dense.shape[1]):
        out.index_add_(0, out_rows[block], grad[block, None] * dense[dense_rows[block]].to(grad))
    return out


def add_scattered_products(
    out: Tensor,  # [M, H] of any dtype
    grad: Tensor,  # [E] in the accumulation dtype
    dense: Tensor,  # [D, H]
    out_rows: Tensor,  # [E]
    dense_rows: Tensor,  # [E]
) -> None:
    """Adds `scattered_products` to `out`: of rows that have an entry whose gradient is not 0, which
    alone are read and written, each rounded once."""
    used = (grad != 0).nonzero()[:, 0]
    used = used[out_rows[used].argsort(stable=True)]
    grad, dense_rows = grad[used], dense_rows[used]
    touched, place = out_rows[used].unique_consecutive(return_inverse=True)
    step = max(1, _BLOCK // max(1, out.shape[1]))
    starts = torch.arange(0, len(touched) + step, step, device=place.device)
    bounds = torch.searchsorted(place, starts).tolist()
    for i, start in enumerate(range(0, len(touched), step)):
        run, some = slice(bounds[i], bounds[i + 1]), touched[start : start + step]
        products = grad[run], dense, place[run] - start, dense_rows[run]
        total = scattered_products(*products, len(some), ordered=True)
        out[some] = (total + out[some]).to(out.dtype)
