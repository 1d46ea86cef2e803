"""Ours: the head alone, and with what stands around it in a step."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.workloads import Way, Workload
from rl_loss import LossInputs, fused_lm_head, fused_lm_head_loss, icepop_loss


def ours(work: Workload, **options: Any) -> tuple[Tensor, ...]:
    rows = work.hidden, work.weight, work.labels, work.support
    out = fused_lm_head(*rows, active=work.active, **options)
    return (out.logprobs, out.support_logprobs) if work.support.nnz else (out.logprobs,)


def with_loss(evidence: bool, compiled: bool = False, **options: Any) -> Way:
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
        return icepop_loss(inputs, **options).loss

    @cache  # compiled when it is called: to list the ways costs nothing
    def whole() -> Callable[[Tensor, Tensor, Workload], Tensor]:
        return torch.compile(step, fullgraph=True, dynamic=False) if compiled else step

    return lambda work: (whole()(work.hidden, work.weight, work),)


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


def graphed(work: Workload) -> tuple[Tensor, ...]:
    """Our head and its backward, captured once in a CUDA graph and replayed: one launch."""
    if work.kept is None:
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
        work.kept = graph, results
    graph, results = work.kept
    graph.replay()
    work.hidden.grad, work.weight.grad = results[2:]
    return results[:2]


def added_to_grad(work: Workload) -> tuple[Tensor, ...]:
    """A micro-batch after others: autograd adds the weight's gradient to `.grad`."""
    if work.kept is None:
        work.kept = torch.zeros_like(work.weight)
    work.weight.grad = work.kept
    return _backward(work)


def added_to_float32(work: Workload) -> tuple[Tensor, ...]:
    """As `added_to_grad`, to a float32 buffer beside the weight: Megatron's way."""
    if work.kept is None:
        work.kept = torch.zeros_like(work.weight, dtype=torch.float32)
    outputs = _backward(work)
    work.kept.add_(work.weight.grad)
    work.weight.grad = None
    return outputs


def into_float32(work: Workload) -> tuple[Tensor, ...]:
    """As `added_to_float32`, by the backward itself."""
    if work.kept is None:
        work.kept = torch.zeros_like(work.weight, dtype=torch.float32)
    return _backward(work, grad_into=work.kept)


def _backward(work: Workload, **options: Any) -> tuple[Tensor, ...]:
    outputs = ours(work, **options)
    torch.autograd.backward(outputs, [work.d_logprobs, work.d_support_logprobs][: len(outputs)])
    return outputs
