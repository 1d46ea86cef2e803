"""Ways to get the log-probabilities of rows; each an algorithm in our own words, or a package."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.workloads import Workload
from rl_loss import LossInputs, fused_lm_head, fused_lm_head_loss, icepop_loss

# Maps a workload whose hidden and weight are leaves to its outputs, in the order of
# `upstreams`: log-probabilities of the labels [N], then of the support entries [nnz].
Way = Callable[[Workload], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Peer:
    """A way, what rows it can compute, and the package that it needs."""

    way: Way
    replay: bool = True
    full: bool = False
    kinds: bool = False  # rows of all kinds in one batch
    active: bool = False  # leaves out the rows that no loss reads
    whole: bool = False  # does its own backward
    only: str | None = None  # run on this preset alone
    package: str | None = None
    float32: bool = False  # computes in float32 alone

    def takes(self, key: str, work: Workload) -> bool:
        if self.only not in (None, key):
            return False
        if work.active is not None:
            return self.active
        kinds = set(work.support.host.kind.tolist())
        return self.full if kinds == {0} else self.replay if kinds == {1} else self.kinds

    @property
    def available(self) -> bool:
        return self.package is None or importlib.util.find_spec(self.package) is not None


def ours(work: Workload, **options: Any) -> tuple[Tensor, ...]:
    rows = work.hidden, work.weight, work.labels, work.support
    out = fused_lm_head(*rows, active=work.active, **options)
    return _some(work, out.logprobs, out.support_logprobs)


def _some(work: Workload, logprobs: Tensor, entries: Tensor) -> tuple[Tensor, ...]:
    return (logprobs, entries) if work.support.nnz else (logprobs,)


def with_loss(evidence: bool, compiled: bool = False) -> Way:
    """Our head and icepop: one scalar, of which every token has its share.

    Without evidence the loss reads the sampled tokens alone: no centering and no metric of it.
    """

    def step(hidden: Tensor, weight: Tensor, work: Workload) -> Tensor:
        out = fused_lm_head(hidden, weight, work.labels, work.support, active=work.active)
        values = {
            "inference_logprobs": out.logprobs.detach() - 0.01,
            "advantages": -work.d_logprobs,
        }
        if evidence:
            inputs = LossInputs.from_head(out, work.support, **values)
        else:
            inputs = LossInputs(trainer_logprobs=out.logprobs, loss_mask=out.active, **values)
        return icepop_loss(inputs).loss

    whole = torch.compile(step, fullgraph=True, dynamic=False) if compiled else step
    return lambda work: (whole(work.hidden, work.weight, work),)


def graphed(work: Workload) -> tuple[Tensor, ...]:
    """Our head and its backward, captured once in a CUDA graph and replayed: one launch."""
    if work.graph is None:
        hidden, weight = (
            work.hidden.detach().requires_grad_(),
            work.weight.detach().requires_grad_(),
        )
        upstreams = [work.d_logprobs, work.d_support_logprobs]

        def step() -> tuple[Tensor, ...]:
            out = fused_lm_head(hidden, weight, work.labels, work.support)
            outputs = out.logprobs, out.support_logprobs
            return *outputs, *torch.autograd.grad(outputs, (hidden, weight), upstreams)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()
        work.graph = graph, results
    graph, results = work.graph
    graph.replay()
    work.hidden.grad, work.weight.grad = results[2:]
    return results[:2]


def one_pass(work: Workload) -> tuple[Tensor, ...]:
    """Our head and icepop in one pass."""
    loss = fused_lm_head_loss(
        work.hidden,
        work.weight,
        work.labels,
        work.support,
        active=work.active,
        loss=icepop_loss,
        inference_logprobs=torch.full_like(work.d_logprobs, -1.0),
        advantages=-work.d_logprobs,
    )
    return (loss.loss,)


def full_log_softmax(work: Workload) -> tuple[Tensor, ...]:
    """All logits at once, log_softmax over the vocabulary, then over the support."""
    logprobs = (work.hidden @ work.weight.T).float().log_softmax(-1)
    if not work.support.nnz:
        return (logprobs.gather(1, work.labels[:, None])[:, 0],)
    return _replayed(work, logprobs[work.support.entry_rows, work.support.ids.long()])


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
    rows, ids = work.support.entry_rows, work.support.ids.long()
    products = work.hidden.index_select(0, rows) * work.weight.index_select(0, ids)
    return _replayed(work, products.sum(-1, dtype=torch.float32))


def cusparse(work: Workload) -> tuple[Tensor, ...]:
    """torch.sparse: a sampled product forward, CSR times dense backward."""
    rows, ids = work.support.entry_rows, work.support.ids
    return _replayed(work, _SampledProduct.apply(work.hidden, work.weight, rows, ids))


def padded_dense_replay(work: Workload) -> tuple[Tensor, ...]:
    """Ids padded to one width; logits over the vocabulary, 8192 ids at a time."""
    width = int(work.support.host.offsets.diff().max())
    if width > 16384:
        raise ValueError(f"not run: padded to {width} ids a row")
    ids = work.support.to_padded()[0].long()
    logits = _PaddedDense.apply(work.hidden, work.weight, ids)
    logprobs = logits - logits.logsumexp(-1, keepdim=True)
    label = ids == work.labels[:, None]
    held = ids >= 0
    return torch.where(label, logprobs, 0.0).sum(-1), logprobs[held]


def liger(reduction: str) -> Way:
    """liger-kernel's fused linear cross entropy over the vocabulary."""

    def way(work: Workload) -> tuple[Tensor, ...]:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        loss = liger_fused_linear_cross_entropy(
            work.hidden, work.weight, work.labels, reduction=reduction
        )
        return (-loss.float(),)

    return way


def liger_hopper(work: Workload) -> tuple[Tensor, ...]:
    """liger-kernel's scaled cross entropy for Hopper, in CuTe: an upstream a token."""
    from liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90 import (
        LigerFusedScaledCrossEntropySM90Function,
    )

    return (-LigerFusedScaledCrossEntropySM90Function.apply(work.hidden, work.weight, work.labels),)


def cut_cross_entropy(work: Workload) -> tuple[Tensor, ...]:
    """Apple's cut cross entropy, its gradient filter off."""
    from cut_cross_entropy import linear_cross_entropy

    loss = linear_cross_entropy(
        work.hidden, work.weight, work.labels, reduction="none", filter_eps=None
    )
    return (-loss.float(),)


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


class _PaddedDense(torch.autograd.Function):
    BLOCK = 8192

    @staticmethod
    def forward(ctx, hidden, weight, ids):
        ctx.save_for_backward(hidden, weight, ids)
        out = torch.full(ids.shape, -torch.inf, device=ids.device)
        for start in range(0, len(weight), _PaddedDense.BLOCK):
            logits = (hidden @ weight[start : start + _PaddedDense.BLOCK].T).float()
            local = ids - start
            inside = (local >= 0) & (local < logits.shape[1])
            picked = logits.gather(1, local.clamp(0, logits.shape[1] - 1))
            out = torch.where(inside, picked, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, ids = ctx.saved_tensors
        d_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        d_weight = torch.empty_like(weight)
        for start in range(0, len(weight), _PaddedDense.BLOCK):
            block = weight[start : start + _PaddedDense.BLOCK]
            local = ids - start
            inside = (local >= 0) & (local < len(block))
            dz = torch.zeros(len(hidden), len(block), device=hidden.device)
            dz.scatter_add_(1, local.clamp(0, len(block) - 1), torch.where(inside, grad, 0.0))
            dz = dz.to(hidden.dtype)
            d_hidden += dz @ block
            d_weight[start : start + _PaddedDense.BLOCK] = dz.T @ hidden
        return d_hidden.to(hidden.dtype), d_weight, None


PEERS: dict[str, Peer] = {
    "rl_loss": Peer(ours, full=True, kinds=True, active=True),
    "rl_loss, 256 MiB": Peer(partial(ours, workspace_mib=256), replay=False, full=True),
    "rl_loss, CUDA graph": Peer(graphed, whole=True),
    "rl_loss + icepop": Peer(with_loss(True), full=True, kinds=True, active=True),
    "rl_loss + icepop, one pass": Peer(one_pass, replay=False, full=True, kinds=True, active=True),
    "rl_loss + icepop, no evidence": Peer(with_loss(False)),
    "rl_loss + icepop, compiled": Peer(with_loss(True, True), only="k128"),
    "rl_loss + icepop, no evidence, compiled": Peer(with_loss(False, True), only="k128"),
    "torch.sparse": Peer(cusparse, float32=True),
    "eager CSR pairs": Peer(csr_pairs),
    "padded dense replay": Peer(padded_dense_replay),
    "full log_softmax": Peer(full_log_softmax, full=True),
    "chunked torch": Peer(chunked_torch, replay=False, full=True),
    "Liger, none": Peer(liger("none"), replay=False, full=True, package="liger_kernel"),
    "Liger, mean": Peer(liger("mean"), replay=False, full=True, package="liger_kernel"),
    "Liger, Hopper": Peer(liger_hopper, replay=False, full=True, package="cutlass"),
    "CCE, unfiltered": Peer(
        cut_cross_entropy, replay=False, full=True, package="cut_cross_entropy"
    ),
}
