"""Head and loss in one pass on the kernels: the gradients with the loss, a chunk of rows at a time.

The rows over their supports come first, then the rows over the vocabulary in chunks: logits,
log-probabilities, loss, its slopes and the gradient while that chunk's logits are there.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_loss.csr import REPLAY
from rl_loss.flat_rows import (
    HeadArguments,
    HeadInputs,
    Needs,
    Upstreams,
    host_rows_over_v,
    next_record,
)
from rl_loss.host import launching_on
from rl_loss.kernels.blocks import (
    BlockSums,
    all_ids,
    entry_logits,
    new_stats,
    of_all_ranks,
    product_blocks,
    some_of_all_ranks,
    take_stats,
)
from rl_loss.kernels.entry_grads import EntryGrads, entry_grads
from rl_loss.kernels.gradient_sums import (
    HiddenSum,
    bias_sums,
    hot_rows,
    new_weight_grad,
    sorted_entries,
    weight_sums,
)
from rl_loss.kernels.late_weight import LateWeight
from rl_loss.kernels.launching import launched
from rl_loss.kernels.own_entries import own_entries
from rl_loss.kernels.records import HeadCall, RowOutputs, row_tensors
from rl_loss.kernels.rows import normalise
from rl_loss.loss.inputs import LossInputs, LossOutputs
from rl_loss.loss.metrics import combine_metrics
from rl_loss.support import Support

Loss = Callable[..., LossOutputs]

_SCALED_AT_ONCE = 4096  # elements of a gradient that one program multiplies


class Gradients(NamedTuple):
    """None where not needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    late: LateWeight | None  # in the place of the weight's, where that goes into a buffer
    most: int  # as `SortedEntries` has it


def one_pass(given: HeadArguments, loss: Loss, per_token: dict[str, Tensor | None]) -> LossOutputs:
    """See `fused_lm_head_loss`; `per_token` are the loss's values `[...]` by name."""
    support, active = given.support_or_empty(), given.active
    if active is not None and active.device.type != "cpu" and len(support.plan.over_v):
        active = active.cpu()  # the one sync: which rows are in a chunk
        given = given.with_active(active)
    on, shard = given.active_on_device(), given.shard
    rows, scalars = row_tensors(given, on)
    hidden, weight, bias = given.inputs
    enabled = torch.is_grad_enabled()
    needs = Needs(*(enabled and t is not None and t.requires_grad for t in given.inputs))
    values = {name: None if v is None else v.reshape(-1) for name, v in per_token.items()}
    batch = _Batch(support, loss, on.reshape(-1), values, host_rows_over_v(support, active))
    device = hidden.device.type
    with torch.no_grad(), torch.autocast(device, enabled=False), launching_on(hidden):
        inputs = HeadInputs(shard.gather_rows(hidden), weight, bias)
        rows = rows._replace(labels=rows.labels.reshape(-1))
        own, buffer = own_entries(rows, shard), given.grad_into
        call = HeadCall(inputs, rows, scalars, shard, own, buffer)
        grads = batch.run(call, needs)
    total = _WithGradients.apply(hidden, weight, bias, batch.total, grads, given.into)
    metrics, counts = combine_metrics(batch.metrics)
    return LossOutputs(total, metrics, counts, batch.per_token.reshape(given.labels.shape))


class _WithGradients(torch.autograd.Function):
    """A loss whose gradients are there already."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, total, grads, into):
        ctx.save_for_backward(*grads[:3], *(grads.late or ()))
        ctx.into, ctx.most = into, grads.most
        return total.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        saved = iter(ctx.saved_tensors)
        d_hidden, d_weight, d_bias = (_scaled(next(saved), upstream) for _ in range(3))
        late = next_record(LateWeight, saved)
        if late is not None:
            late.add(upstream, ctx.into.buffer, ctx.most)
            d_weight = ctx.into.instead()
        return d_hidden, d_weight, d_bias, None, None, None


@launched
@triton.jit
def _scaled_kernel(grad, upstream, out, SIZE, BLOCK: tl.constexpr):
    """The product is formed in the upstream's dtype, the wider one, and rounded when stored."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(grad + at, mask=at < SIZE, other=0.0).to(upstream.dtype.element_ty)
    tl.store(out + at, g * tl.load(upstream), mask=at < SIZE)


def _scaled(grad: Tensor | None, upstream: Tensor) -> Tensor | None:
    """The gradient, contiguous, times the 0-dim upstream; torch's own product of two dtypes takes
    four times as long."""
    if grad is None:
        return None
    out = torch.empty_like(grad)
    if grad.numel():
        with launching_on(grad):
            _scaled_kernel[(triton.cdiv(grad.numel(), _SCALED_AT_ONCE),)](
                grad, upstream, out, grad.numel(), BLOCK=_SCALED_AT_ONCE, num_warps=8
            )
    return out


class _Span(NamedTuple):
    """A stretch of rows of the batch, and of their entries."""

    rows: slice
    entries: slice


class _Batch:
    """One batch on its way: what the loss is given, and what it has given so far."""

    def __init__(
        self,
        support: Support,
        loss: Loss,
        on: Tensor,  # [N] bool
        values: dict[str, Tensor | None],  # [N]
        over_v: Tensor,  # [D] int64 on the host
    ) -> None:
        self.support, self.loss, self.on, self.values = support, loss, on, values
        self.over_v = over_v
        self.metrics: list[tuple[dict, dict]] = []
        self.total: Tensor
        self.per_token: Tensor

    def run(self, call: HeadCall, needs: Needs) -> Gradients:
        """Computes the loss, and gives the gradients."""
        n, v, rows = call.n, len(call.weight), call.rows
        self.per_token = call.hidden.new_zeros(n, dtype=call.dtype)
        self.total = self.per_token.new_zeros(())
        out = entry_logits(call)
        grads = EntryGrads.new(call, out)
        if not call.shard.alone:
            of_all_ranks(call, out)
        normalise(call, out)
        some_over_v = len(self.over_v) > 0
        upstreams = Upstreams(None, None, None)
        if len(self.over_v) < n or n == 0:
            # Rows over the vocabulary are not read here: they have no loss yet.
            mask = self.on & (rows.kind == REPLAY) if some_over_v else self.on
            upstreams = self._slopes(out, self._span(0, n), mask)
        entry_grads(call, grads, out, upstreams)
        sums = BlockSums(call, needs)
        base = self._chunks(call, out, grads, sums) if some_over_v else None
        d_weight = d_bias = late = None
        hidden_sum = HiddenSum(call, needs, out.state)
        hidden_sum.start(grads, sums.hidden)
        hot = hot_rows(call, grads, out.state, needs)
        grads = grads._replace(laid=None)  # free for what follows
        if needs.weight or needs.bias:
            entries = sorted_entries(call, grads, out, hot, needs)
        del grads  # free for what follows
        if needs.weight and call.into is not None:
            late = LateWeight.of(call.hidden, base, entries)
        elif needs.weight:
            d_weight = new_weight_grad(call)
            if base is not None and not len(rows.ids):
                d_weight[:v] = base
            else:
                weight_sums(call.hidden, entries, slice(0, v), base, d_weight[:v], into=False)
        if needs.bias and call.inputs.bias is not None:
            d_bias = bias_sums(entries, sums.bias, call.inputs.bias)
        d_hidden = hidden_sum.result() if needs.hidden else None
        return Gradients(d_hidden, d_weight, d_bias, late, 0 if late is None else entries.most)

    def _chunks(
        self, call: HeadCall, out: RowOutputs, grads: EntryGrads, sums: BlockSums
    ) -> Tensor | None:
        """Every row over the vocabulary; the weight's gradient `[V, H]`, in the accumulation
        dtype, if it is needed."""
        stats, base = new_stats(call), None
        shape, n = all_ids(call, len(self.over_v)), len(self.over_v)
        blocks = product_blocks(call, call.rows.over_v, shape)
        for start in range(0, n, shape.rows):  # all ranks alike, also one without ids
            run = slice(start, min(start + shape.rows, n))
            block, chosen, inside = next(blocks, None), call.rows.over_v[run], self.over_v[run]
            span = self._span(int(inside[0]), int(inside[-1]) + 1)
            taken = torch.zeros_like(self.on).index_fill_(0, chosen, True)
            z = out.support_logprobs[span.entries]
            if not call.shard.alone:
                mine = taken[grads.rows[span.entries].long()]
                z.masked_fill_(mine, 0.0)
            if block is not None:
                take_stats(call, block, out, stats)
            if not call.shard.alone:
                some_of_all_ranks(call, z, mine, stats, chosen)
            normalise(call, out, stats, chosen)
            upstreams = self._slopes(out, span, taken[span.rows])
            entry_grads(call, grads, out, upstreams, chosen)
            if block is not None and any(sums.needs):
                dz = sums.add(call, block, out, upstreams, grads.over_v)
                base = sums.add_to_weight(block, dz)
        return base

    def _span(self, start: int, stop: int) -> _Span:
        host = self.support.host.offsets
        return _Span(slice(start, stop), slice(int(host[start]), int(host[stop])))

    def _slopes(self, out: RowOutputs, span: _Span, mask: Tensor) -> Upstreams:
        """The loss of the masked rows of a stretch, and its slopes by every log-probability:
        of the whole batch's shape, 0 outside the stretch."""
        rows, entries = span
        outputs = out.logprobs, out.support_logprobs, out.tail_logprobs
        spans = rows, entries, rows
        leaves = [
            part[at].detach().requires_grad_() for part, at in zip(outputs, spans, strict=True)
        ]
        values: dict[str, Any] = {k: None if v is None else v[rows] for k, v in self.values.items()}
        inputs = LossInputs(trainer_logprobs=leaves[0], loss_mask=mask, **values)
        if entries.stop > entries.start:
            support = self.support
            inputs.trainer_support_logprobs, inputs.trainer_tail_logprobs = leaves[1], leaves[2]
            inputs.sampler_support_logprobs = support.sampler_logprobs[entries]
            inputs.support_valid = out.valid[entries]
            inputs.sampler_tail_mass = support.sampler_tail_mass[rows]
            bounds = support.offsets[rows.start : rows.stop + 1]
            inputs.support_offsets = bounds - entries.start
            inputs.support_kind = support.kind[rows]
        with torch.enable_grad():
            result = self.loss(inputs)
            slopes = torch.autograd.grad(result.loss, leaves, allow_unused=True)
        self.metrics.append((result.metrics, result.metric_counts))
        self.total = self.total + result.loss.detach()
        self.per_token[rows] += result.per_token_loss.detach()
        pairs = zip(slopes, outputs, spans, strict=True)
        return Upstreams(*(_over_all(slope, whole, at) for slope, whole, at in pairs))


def _over_all(slope: Tensor | None, whole: Tensor, at: slice) -> Tensor | None:
    """A stretch's slopes in a tensor of the batch's size, 0 elsewhere."""
    if slope is None or slope.shape == whole.shape:
        return slope
    out = torch.zeros_like(whole)
    out[at] = slope
    return out
