"""The head on the kernels: one autograd function over two operators, for rows of any kind.

The operators take tensors and scalars alone, so that `torch.compile` sees them whole; run eagerly
the same functions are called without the dispatcher in between.
"""

from dataclasses import replace
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_loss.flat_rows import HeadArguments, HeadInputs, Needs, Upstreams, next_record
from rl_loss.host import launching_on
from rl_loss.kernels.blocks import (
    BlockSums,
    blocks_to_grads,
    entry_logits,
    of_all_ranks,
    vocabulary_stats,
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
from rl_loss.kernels.own_entries import own_entries
from rl_loss.kernels.records import (
    ENTROPY,
    HeadCall,
    HeadScalars,
    RowOutputs,
    RowTensors,
    row_tensors,
)
from rl_loss.kernels.rows import normalise
from rl_loss.vocab_parallel import Shard, outside_graphs, whole


def kernel_head(given: HeadArguments, on: Tensor) -> tuple[Tensor, ...]:
    """logprobs `[...]`, support_logprobs `[nnz]`, tails `[...]`, entropy `[...]`, full_logprobs
    `[...]`, valid `[nnz]` bool; `on` is `active` on the device. Inactive rows are 0."""
    return _KernelHead.apply(*given.inputs, *row_tensors(given, on), given.shard, given.into)[:6]


class _KernelHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, rows, scalars, shard, into):
        if torch.compiler.is_compiling():
            out = torch.ops.rl_loss.head_fwd(hidden, weight, bias, *rows, *scalars)
        else:
            hidden = shard.gather_rows(hidden)
            out = _forward(HeadInputs(hidden, weight, bias), rows, scalars, shard)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*out[5:])
        ctx.save_for_backward(hidden, weight, bias, *rows, *out)
        ctx.scalars, ctx.shard, ctx.into = scalars, shard, into
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(ctx, *upstreams):
        upstreams, needs = Upstreams(*upstreams[:5]), Needs(*ctx.needs_input_grad[:3])
        if upstreams.none:
            return (None,) * 7
        if torch.compiler.is_compiling() and ctx.shard.alone and ctx.into is None:
            given = *ctx.saved_tensors, *upstreams, *needs, *ctx.scalars
            grads = torch.ops.rl_loss.head_bwd(*given)
        else:
            saved = iter(ctx.saved_tensors)
            inputs, rows = next_record(HeadInputs, saved), next_record(RowTensors, saved)
            given = inputs, rows, ctx.scalars, ctx.shard
            outputs = next_record(RowOutputs, saved)
            buffer = None if ctx.into is None else ctx.into.buffer
            grads = outside_graphs(_backward, *given, outputs, upstreams, needs, buffer)
            if ctx.into is not None and needs.weight:
                grads = grads[0], ctx.into.instead(), grads[2]
        grads = (grad if need else None for grad, need in zip(grads, needs, strict=True))
        return *grads, None, None, None, None


def head_fwd(call: HeadCall) -> RowOutputs:
    """The outputs of all rows."""
    out = entry_logits(call)
    stats = vocabulary_stats(call, out) if len(call.rows.over_v) else None
    if not call.shard.alone:
        of_all_ranks(call, out, stats, call.rows.over_v)
    normalise(call, out, stats)
    return out


def head_bwd(
    call: HeadCall, saved: RowOutputs, upstreams: Upstreams, needs: Needs
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of hidden, weight and bias; empty where not needed. That of the weight is added
    to the buffer of the call, where there is one, and is that buffer."""
    if not call.scalars.entropy:
        upstreams = upstreams._replace(entropy=None)
    if not call.scalars.full:
        upstreams = upstreams._replace(full_logprobs=None)
    entropy_v = None if call.scalars.entropy != ENTROPY["full"] else upstreams.entropy
    if entropy_v is None and upstreams.full_logprobs is None:
        # Nothing reads what was taken of REPLAY rows over the vocabulary: it costs no product here.
        call = replace(call, rows=call.rows._replace(over_v=call.rows.normalised_v))
    grads, into = EntryGrads.new(call, saved), call.into
    entry_grads(call, grads, saved, upstreams)
    d_weight, d_bias = call.hidden.new_empty(0), call.hidden.new_empty(0)
    over_v, v = len(call.rows.over_v) > 0, len(call.weight)
    sum_hidden = HiddenSum(call, needs, saved.state)
    if not over_v:
        sum_hidden.start(grads, None)
    hot = hot_rows(call, grads, saved.state, needs)
    if not over_v:
        grads = grads._replace(laid=None)  # free for what follows
    if needs.weight or needs.bias:
        entries = sorted_entries(call, grads, saved, hot, needs)
    if not over_v:
        del grads  # free for what follows
    if needs.weight:
        d_weight = new_weight_grad(call)
    # Without entries a block of the weight gradient is one product, written where it belongs; a
    # buffer in the accumulation dtype takes the products and the entries one after the other.
    alone = not len(call.rows.ids) or (into is not None and into.dtype == call.dtype)
    sums = BlockSums(call, needs, d_weight[:v] if needs.weight and alone else None)
    if over_v:
        for block, dz in blocks_to_grads(call, saved, upstreams, grads.over_v, sums):
            if block.last and block.ids.stop == v and not call.shard.alone:
                sum_hidden.start(grads, sums.hidden)  # on its way while the rest is multiplied
            part = sums.add_to_weight(block, dz)
            if part is not None:
                some = block.ids, part, d_weight[block.ids]
                weight_sums(call.hidden, entries, *some, into is not None)
            del block, dz, part  # the memory of a block is not held any longer than it is needed
        sum_hidden.start(grads, sums.hidden)
    if needs.weight and (not over_v or (sums.all_into and len(call.rows.ids))):
        weight_sums(call.hidden, entries, slice(0, v), None, d_weight[:v], into is not None)
    if call.inputs.bias is not None and needs.bias:
        d_bias = bias_sums(entries, sums.bias, call.inputs.bias)
    return sum_hidden.result(), d_weight, d_bias


# --- the two operators ---


def _forward(
    inputs: HeadInputs, rows: RowTensors, scalars: HeadScalars, shard: Shard
) -> tuple[Tensor, ...]:
    hidden = inputs.hidden
    with launching_on(hidden), torch.autocast(hidden.device.type, enabled=False):
        return tuple(head_fwd(HeadCall(inputs, rows, scalars, shard, own_entries(rows, shard))))


def _backward(
    inputs: HeadInputs,
    rows: RowTensors,
    scalars: HeadScalars,
    shard: Shard,
    saved: RowOutputs,
    upstreams: Upstreams,
    needs: Needs,
    into: Tensor | None = None,
) -> tuple[Tensor, ...]:
    hidden = inputs.hidden
    with launching_on(hidden), torch.autocast(hidden.device.type, enabled=False):
        call = HeadCall(inputs, rows, scalars, shard, own_entries(rows, shard), into)
        return head_bwd(call, saved, upstreams, needs)


def _forward_op(*args: Any) -> tuple[Tensor, ...]:
    given = iter(args)
    inputs, rows, scalars = (next_record(r, given) for r in (HeadInputs, RowTensors, HeadScalars))
    return _forward(inputs, rows, scalars, whole(scalars.vocab_size))


def _backward_op(*args: Any) -> tuple[Tensor, ...]:
    given = iter(args)
    records = (HeadInputs, RowTensors, RowOutputs, Upstreams, Needs, HeadScalars)
    inputs, rows, saved, upstreams, needs, scalars = (next_record(r, given) for r in records)
    shard = whole(scalars.vocab_size)
    return _backward(inputs, rows, scalars, shard, saved, upstreams, needs)


def _schema(returns: int, *parts: type) -> str:
    """Every field of the records, an argument each."""
    types: dict[Any, str] = {Tensor: "Tensor", Tensor | None: "Tensor?", float: "float"}
    types |= {int: "SymInt", bool: "bool"}
    arguments, taken = [], set()
    for part in parts:
        for name, kind in get_type_hints(part).items():
            name = f"{part.__name__.lower()}_{name}" if name in taken else name
            taken.add(name)
            arguments.append(f"{types[kind]} {name}")
    return f"({', '.join(arguments)}) -> ({', '.join(['Tensor'] * returns)})"


_head_fwd = torch.library.custom_op(
    "rl_loss::head_fwd",
    _forward_op,
    mutates_args=(),
    schema=_schema(len(RowOutputs._fields), HeadInputs, RowTensors, HeadScalars),
)
_head_bwd = torch.library.custom_op(
    "rl_loss::head_bwd",
    _backward_op,
    mutates_args=(),
    schema=_schema(3, HeadInputs, RowTensors, RowOutputs, Upstreams, Needs, HeadScalars),
)


@_head_fwd.register_fake
def _(*args):
    given = iter(args)
    parts = (
        next_record(HeadInputs, given),
        next_record(RowTensors, given),
        next_record(HeadScalars, given),
    )
    return tuple(RowOutputs.new(*parts))


@_head_bwd.register_fake
def _(*args):
    given = iter(args)
    inputs = next_record(HeadInputs, given)
    for record in (RowTensors, RowOutputs, Upstreams):
        next_record(record, given)
    return tuple(
        tensor.new_empty(tensor.shape) if need and tensor is not None else args[0].new_empty(0)
        for tensor, need in zip(inputs, next_record(Needs, given), strict=True)
    )
