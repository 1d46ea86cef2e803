"""REPLAY rows: logits of the support's ids alone, forward and backward."""

import warnings

import torch
from torch import Tensor

from rl_loss.csr import segment_logsumexp, segment_sum
from rl_loss.flat_rows import FlatRows
from rl_loss.logits import LogitTransform, accumulation_dtype, p_log_p

# The most elements of a gathered block of weight rows, where no sparse product exists.
_BLOCK = 2**22


class SparseRows:
    """All REPLAY rows of a batch, through torch's sparse products or bounded gathers.

    The tail of a row is the ids whose q is unknown. A row of one id has log p = 0 whatever its
    logit, which is not computed.
    """

    def __init__(
        self,
        hidden: Tensor,  # [N, H]
        weight: Tensor,  # [V, H]
        bias: Tensor | None,  # [V]
        rows: FlatRows,
        transform: LogitTransform,
        want_entropy: bool,
    ) -> None:
        support = rows.support
        several = support.offsets.diff()[rows.gathered] > 1
        chosen, single = rows.gathered[several], rows.gathered[~several]
        entries, place = rows.entries(chosen)
        n, at, ids = len(chosen), chosen[place], support.ids[entries]
        z = transform(
            sampled_products(hidden, weight, at, ids),
            None if bias is None else bias[ids],
            rows.inv_temperature[at],
        )
        logp = z - segment_logsumexp(z, place, n)[place]
        label, unknown = ids == rows.labels[at], ~support.known[entries]
        self.size = len(rows), support.nnz
        self.chosen, self.entries, self.place = chosen, entries, place  # [G], [E], [E]
        self.at, self.ids, self.z, self.support_logprobs = at, ids, z, logp  # [E]
        self.label, self.unknown = label, unknown  # [E]
        self.single = single, support.known[support.offsets[single]]  # [S], [S]
        self.logprobs = segment_sum(torch.where(label, logp, 0.0), place, n)  # [G]
        self.tail_logprobs = segment_logsumexp(logp[unknown], place[unknown], n)  # [G]
        self.entropy = -segment_sum(p_log_p(logp), place, n) if want_entropy else None

    def outputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`[N]`, `[nnz]`, `[N]`, `[N]`, 0 for the rows that are not REPLAY."""
        n, nnz = self.size
        new = self.z.new_zeros
        logprobs, entries, tails, entropy = new(n), new(nnz), new(n), new(n)
        logprobs[self.chosen] = self.logprobs
        entries[self.entries] = self.support_logprobs
        tails[self.chosen] = self.tail_logprobs
        single, known = self.single
        tails[single] = torch.where(known, -torch.inf, 0.0).to(tails.dtype)
        if self.entropy is not None:
            entropy[self.chosen] = self.entropy
        return logprobs, entries, tails, entropy

    def backward(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: FlatRows,
        transform: LogitTransform,
        upstreams: tuple[Tensor | None, ...],
        needs: tuple[bool, ...],
        into: list[Tensor | None],
    ) -> list[Tensor | None]:
        """The gradients of hidden, weight and bias, those of `into` added before the rounding."""
        grad = self.entry_grads(rows, transform, *upstreams)
        at, ids = self.at, self.ids
        grads: list[Tensor | None] = [None, None, None]
        if needs[0]:
            d_hidden = scattered_products(grad, weight, at, ids, len(hidden), ordered=True)
            d_hidden[self._lost(rows, *upstreams)] = torch.nan
            grads[0] = d_hidden
        if needs[1]:
            grads[1] = scattered_products(grad, hidden, ids, at, len(weight), ordered=False)
        if needs[2] and bias is not None:
            grads[2] = segment_sum(grad, ids, len(bias))
        for i, (more, tensor) in enumerate(zip(into, (hidden, weight, bias), strict=True)):
            total = grads[i]
            if total is not None and tensor is not None:
                grads[i] = (total if more is None else total.add_(more)).to(tensor.dtype)
        return grads

    def _lost(
        self,
        rows: FlatRows,
        d_logprobs: Tensor | None,
        d_support_logprobs: Tensor | None,
        d_tail_logprobs: Tensor | None,
        d_entropy: Tensor | None,
    ) -> Tensor:
        """Rows of one id have no gradient, but what is NaN upstream must not end there."""
        single, _ = self.single
        nan = torch.zeros_like(single, dtype=torch.bool)
        for upstream in (d_logprobs, d_tail_logprobs, d_entropy):
            if upstream is not None:
                nan |= upstream[single].isnan()
        if d_support_logprobs is not None:
            nan |= d_support_logprobs[rows.support.offsets[single]].isnan()
        return single[nan]

    def entry_grads(
        self,
        rows: FlatRows,
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
        at, place, logp = self.at, self.place, self.support_logprobs
        u = torch.zeros_like(logp)
        if d_support_logprobs is not None:
            u += d_support_logprobs[self.entries]
        if d_logprobs is not None:
            u += torch.where(self.label, d_logprobs[at], 0.0)
        if d_tail_logprobs is not None:
            tail = torch.where(self.unknown, self.tail_logprobs[place], 0.0)
            share = torch.where(self.unknown, logp - tail, -torch.inf).exp()
            u += torch.where(self.unknown, share * d_tail_logprobs[at], 0.0)
        p = logp.exp()
        dz = u - p * segment_sum(u, place, len(self.chosen))[place]
        if d_entropy is not None and self.entropy is not None:
            dz -= (p_log_p(logp) + p * self.entropy[place]) * d_entropy[at]
        return dz * transform.derivative(self.z, rows.inv_temperature[at])


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
