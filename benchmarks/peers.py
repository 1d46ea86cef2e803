"""Ways to get the log-probabilities of replayed rows; each is an algorithm in our own words."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.workloads import Workload
from rl_loss import fused_lm_head

# A peer maps a workload whose hidden and weight are leaves to (logprobs [N], of entries [nnz]).
Peer = Callable[[Workload], tuple[Tensor, Tensor]]


def ours(work: Workload) -> tuple[Tensor, Tensor]:
    """This package."""
    out = fused_lm_head(work.hidden, work.weight, work.labels, work.support)
    return out.logprobs, out.support_logprobs


def full_log_softmax(work: Workload) -> tuple[Tensor, Tensor]:
    """All logits at once, log_softmax over the vocabulary, then normalised over the support."""
    logprobs = (work.hidden @ work.weight.T).float().log_softmax(-1)
    return _replayed(work, logprobs[work.support.entry_rows, work.support.ids.long()])


def csr_pairs(work: Workload) -> tuple[Tensor, Tensor]:
    """Eager gathers of both rows of every (token, id) pair: nnz x H in memory, twice."""
    rows, ids = work.support.entry_rows, work.support.ids.long()
    logits = (work.hidden.index_select(0, rows) * work.weight.index_select(0, ids)).sum(
        -1, dtype=torch.float32
    )
    return _replayed(work, logits)


def _replayed(work: Workload, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Support logits to log-probabilities over each row's support, and the label's."""
    rows, n = work.support.entry_rows, len(work.labels)
    top = torch.full((n,), -torch.inf, device=logits.device)
    top = top.scatter_reduce(0, rows, logits.detach(), "amax")
    shifted = logits - top[rows]
    total = torch.zeros(n, device=logits.device).index_add(0, rows, shifted.exp())
    logprobs = shifted - total.log()[rows]
    label = work.support.ids == work.labels[rows]
    return torch.zeros_like(total).index_add(0, rows, torch.where(label, logprobs, 0.0)), logprobs


PEERS: dict[str, Peer] = {
    "rl_loss": ours,
    "full log_softmax": full_log_softmax,
    "eager CSR pairs": csr_pairs,
}
