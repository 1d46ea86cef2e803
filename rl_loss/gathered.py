"""REPLAY rows: logits of the support's ids alone, forward and backward."""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_loss.head_rows import HeadRows
from rl_loss.logits import LogitTransform, accumulation_dtype
from rl_loss.segments import segment_logsumexp, segment_sum

# The most elements of a gathered block of weight rows, where no sparse product exists.
_BLOCK = 2**22


@dataclass(frozen=True)
class Gathered:
    """What the forward computed of G rows and their E entries, and the backward reads."""

    chosen: Tensor  # [G] the rows, in the batch
    entries: Tensor  # [E] the entries, in the support
    place: Tensor  # [E] each entry's row, in `chosen`
    z: Tensor  # [E] logits
    support_logprobs: Tensor  # [E]
    logprobs: Tensor  # [G]
    tail_logprobs: Tensor  # [G]
    entropy: Tensor | None  # [G]


def gathered_fwd(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    bias: Tensor | None,  # [V]
    rows: HeadRows,
    transform: LogitTransform,
    want_entropy: bool,
) -> Gathered:
    """Log-probabilities over the supports of all REPLAY rows.

    The tail of a row is the ids whose q is unknown. A row of one id has log p = 0 whatever its
    logit, which is not computed.
    """
    chosen, n = rows.gathered, len(rows.gathered)
    entries, place = rows.entries(chosen)
    ids = rows.support.ids[entries]
    wide = (rows.support.offsets.diff()[chosen] > 1)[place]
    z = torch.zeros(len(ids), dtype=accumulation_dtype(hidden, weight), device=hidden.device)
    z[wide] = transform(
        sampled_products(hidden, weight, chosen[place[wide]], ids[wide]),
        None if bias is None else bias[ids[wide]],
        rows.inv_temperature[chosen[place[wide]]],
    )
    support_logprobs = z - segment_logsumexp(z, place, n)[place]
    label = ids == rows.labels[chosen][place]
    unknown = ~rows.support.known[entries]
    entropy = None
    if want_entropy:
        entropy = -segment_sum(support_logprobs.exp() * support_logprobs, place, n)
    return Gathered(
        chosen=chosen,
        entries=entries,
        place=place,
        z=z,
        support_logprobs=support_logprobs,
        logprobs=segment_sum(torch.where(label, support_logprobs, 0.0), place, n),
        tail_logprobs=segment_logsumexp(support_logprobs[unknown], place[unknown], n),
        entropy=entropy,
    )


def gathered_bwd(
    saved: Gathered,
    rows: HeadRows,
    transform: LogitTransform,
    d_logprobs: Tensor | None,  # [N]
    d_support_logprobs: Tensor | None,  # [nnz]
    d_tail_logprobs: Tensor | None,  # [N]
    d_entropy: Tensor | None,  # [N]
) -> Tensor:
    """The gradient of each entry's raw product, `[E]`.

    With `u` an entry's upstream, the label's and its share of the tail's included,
    `dz_v = u_v - p_v * sum(u) - d_entropy * p_v * (log p_v + entropy)`.
    """
    chosen, place, logp = saved.chosen, saved.place, saved.support_logprobs
    upstream = torch.zeros_like(logp)
    if d_support_logprobs is not None:
        upstream += d_support_logprobs[saved.entries]
    if d_logprobs is not None:
        label = rows.support.ids[saved.entries] == rows.labels[chosen][place]
        upstream += torch.where(label, d_logprobs[chosen][place], 0.0)
    if d_tail_logprobs is not None:
        unknown = ~rows.support.known[saved.entries]
        log_share = torch.where(unknown, logp - saved.tail_logprobs[place], -torch.inf)
        upstream += torch.where(unknown, log_share.exp() * d_tail_logprobs[chosen][place], 0.0)
    p = logp.exp()
    dz = upstream - p * segment_sum(upstream, place, len(chosen))[place]
    if d_entropy is not None and saved.entropy is not None:
        dz -= p * (logp + saved.entropy[place]) * d_entropy[chosen][place]
    # A row of one id has no gradient; its logit was not computed and must not lend it a slope.
    wide = (rows.support.offsets.diff()[chosen] > 1)[place]
    slope = transform.derivative(saved.z, rows.inv_temperature[chosen][place])
    return torch.where(wide, dz * slope, 0.0)


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
    """Whether torch.sparse multiplies these: float32 or float64 through MKL or cuSPARSE."""
    alike = len({tensor.dtype for tensor in dense}) == 1
    library = dense[0].is_cuda or torch.backends.mkl.is_available()
    return alike and library and dense[0].dtype in (torch.float32, torch.float64)


def _entry_blocks(nnz: int, width: int) -> list[slice]:
    step = max(1, _BLOCK // max(1, width))
    return [slice(at, min(at + step, nnz)) for at in range(0, nnz, step)]


def sampled_products(hidden: Tensor, weight: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """`hidden[rows] . weight[ids]` an entry, `[E]`; entries sorted by row."""
    if len(ids) and _has_sparse_products(hidden, weight):
        shape = (len(hidden), len(weight))
        pattern = _sparse(rows, ids, hidden.new_zeros(len(ids)), shape)
        return torch.sparse.sampled_addmm(pattern, hidden, weight.T, beta=0.0).values()
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
