"""What the ways are held to: float64 of the same inputs."""

import torch
from torch import Tensor

from benchmarks.workloads import Workload


def exact(work: Workload) -> tuple[Tensor, Tensor, Tensor] | None:
    """Log-probabilities of the labels and both gradients in float64; None for rows of several
    kinds, whose errors the tests measure."""
    kinds = work.kinds
    if kinds == {1}:
        return exact_replay(work)
    return exact_full(work) if kinds == {0} else None


def exact_replay(work: Workload, block: int = 2**15) -> tuple[Tensor, Tensor, Tensor]:
    """A block of entries at a time."""
    rows, ids, n = work.support.entry_rows, work.support.ids.long(), len(work.labels)
    spans = [slice(at, at + block) for at in range(0, len(ids), block)]
    hidden, weight = work.hidden.detach(), work.weight.detach()
    z = torch.cat([(hidden[rows[s]].double() * weight[ids[s]].double()).sum(-1) for s in spans])
    zeros = torch.zeros(n, dtype=torch.float64, device=z.device)
    top = torch.full_like(zeros, -torch.inf).scatter_reduce(0, rows, z, "amax")
    logp = z - top[rows]
    logp -= zeros.index_add(0, rows, logp.exp()).log()[rows]
    label = ids == work.labels[rows]
    upstream = work.d_support_logprobs + label * work.d_logprobs[rows].double()
    grad = upstream - logp.exp() * zeros.index_add(0, rows, upstream)[rows]
    d_hidden = torch.zeros_like(hidden, dtype=torch.float64)
    d_weight = torch.zeros_like(weight, dtype=torch.float64)
    for s in spans:
        d_hidden.index_add_(0, rows[s], grad[s, None] * weight[ids[s]].double())
        d_weight.index_add_(0, ids[s], grad[s, None] * hidden[rows[s]].double())
    return zeros.index_add(0, rows, torch.where(label, logp, 0.0)), d_hidden, d_weight


def exact_full(work: Workload, block: int = 1024) -> tuple[Tensor, Tensor, Tensor]:
    """A block of rows at a time."""
    hidden, weight = work.hidden.detach().double(), work.weight.detach().double()
    d_hidden, d_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
    logprobs = []
    for start in range(0, len(hidden), block):
        rows = slice(start, start + block)
        logp = (hidden[rows] @ weight.T).log_softmax(-1)
        label, upstream = work.labels[rows, None], work.d_logprobs[rows, None].double()
        logprobs.append(logp.gather(1, label)[:, 0])
        dz = logp.exp_().mul_(-upstream).scatter_add_(1, label, upstream)
        d_hidden[rows] = dz @ weight
        d_weight.addmm_(dz.T, hidden[rows])
    return torch.cat(logprobs), d_hidden, d_weight
