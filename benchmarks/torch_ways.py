"""Plain PyTorch: what a loop without a package of its own would write, and the library's calls."""

import os

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.workloads import NotRun, Workload


def full_log_softmax(work: Workload) -> tuple[Tensor, ...]:
    """All logits at once, log_softmax over the vocabulary, then over the support."""
    _must_fit(work, 3 * 4 * len(work.hidden) * len(work.weight))
    logprobs = (work.hidden @ work.weight.T).float().log_softmax(-1)
    if not work.support.nnz:
        return (logprobs.gather(1, work.labels[:, None])[:, 0],)
    return replayed(work, logprobs[work.support.entry_rows, work.support.ids.long()])


def chunked_torch(work: Workload) -> tuple[Tensor, ...]:
    """As `full_log_softmax`, 1024 rows at a time, each chunk computed again in the backward."""

    def chunk(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return (hidden @ weight.T).float().log_softmax(-1).gather(1, labels[:, None])[:, 0]

    parts = [
        checkpoint(chunk, hidden, work.weight, labels, use_reentrant=False)
        for hidden, labels in zip(work.hidden.split(1024), work.labels.split(1024), strict=True)
    ]
    return (torch.cat(parts),)


def csr_pairs(work: Workload) -> tuple[Tensor, ...]:
    """Eager gathers of both rows of every (token, id) pair: nnz x H in memory, several times."""
    _must_fit(work, 3 * work.support.nnz * work.hidden.shape[1] * work.hidden.element_size())
    rows, ids = work.support.entry_rows, work.support.ids.long()
    products = work.hidden.index_select(0, rows) * work.weight.index_select(0, ids)
    return replayed(work, products.sum(-1, dtype=torch.float32))


def cusparse(work: Workload) -> tuple[Tensor, ...]:
    """torch.sparse: a sampled product forward, CSR times dense backward."""
    rows, ids = work.support.entry_rows, work.support.ids
    return replayed(work, _SampledProduct.apply(work.hidden, work.weight, rows, ids))


def replayed(work: Workload, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Support logits to log-probabilities over each row's support, and the label's."""
    rows, n = work.support.entry_rows, len(work.labels)
    top = torch.full((n,), -torch.inf, device=logits.device)
    top = top.scatter_reduce(0, rows, logits.detach(), "amax")
    shifted = logits - top[rows]
    total = torch.zeros(n, device=logits.device).index_add(0, rows, shifted.exp())
    logprobs = shifted - total.log()[rows]
    label = work.support.ids == work.labels[rows]
    return torch.zeros_like(total).index_add(0, rows, torch.where(label, logprobs, 0.0)), logprobs


def _must_fit(work: Workload, size: int) -> None:
    """On a CPU, where nothing says "out of memory": the program would be killed."""
    if work.hidden.is_cuda or not hasattr(os, "sysconf"):
        return
    held = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > 0.8 * held:
        raise NotRun(f"takes {size / 2**30:.0f} GiB, of {held / 2**30:.0f} here")


class _SampledProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, rows, ids):
        ctx.save_for_backward(hidden, weight, rows, ids)
        pattern = _csr(rows, ids, hidden.new_zeros(len(ids)), (len(hidden), len(weight)))
        return torch.sparse.sampled_addmm(pattern, hidden, weight.T, beta=0.0).values()

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, rows, ids = ctx.saved_tensors
        sorted_ids, order = ids.sort(stable=True)
        shape = len(hidden), len(weight)
        d_hidden = _csr(rows, ids, grad, shape) @ weight
        d_weight = _csr(sorted_ids, rows[order], grad[order], shape[::-1]) @ hidden
        return d_hidden, d_weight, None, None


def _csr(rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    bounds = torch.zeros(shape[0] + 1, dtype=torch.int32, device=rows.device)
    bounds[1:] = torch.bincount(rows, minlength=shape[0]).cumsum(0)
    return torch.sparse_csr_tensor(bounds, columns.int(), values, shape, check_invariants=False)
