"""The head on the kernels: one autograd function over two custom operators, for rows of any kind.

The operators take tensors and scalars alone, so that `torch.compile` sees them whole; run eagerly
the same functions are called without the dispatcher in between.
"""

from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_loss.host import launching_on
from rl_loss.kernels.gradient_sums import GradientSums
from rl_loss.kernels.records import HeadScalars, HeadTensors, Rows, head_entries, head_logits
from rl_loss.logits import accumulation_dtype


class _Upstreams(NamedTuple):
    d_logprobs: Tensor | None
    d_support_logprobs: Tensor | None
    d_tail_logprobs: Tensor | None
    d_entropy: Tensor | None


class _Needs(NamedTuple):
    need_hidden: bool
    need_weight: bool
    need_bias: bool


def kernel_head(tensors: HeadTensors, scalars: HeadScalars) -> tuple[Tensor, ...]:
    """logprobs `[N]`, support_logprobs `[nnz]`, tails `[N]`, entropy `[N]`, valid `[nnz]` bool.

    Inactive rows are 0.
    """
    return _KernelHead.apply(*tensors, *scalars)[:5]


_N_INPUTS = len(HeadTensors._fields) + len(HeadScalars._fields)


class _KernelHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        forward = torch.ops.rl_loss.head_fwd if torch.compiler.is_compiling() else _forward
        out = forward(*inputs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*out[4:])
        tensors = len(HeadTensors._fields)
        ctx.save_for_backward(*inputs[:tensors], *out)
        ctx.scalars = inputs[tensors:]
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(ctx, *upstreams):
        if all(upstream is None for upstream in upstreams[:4]):
            return (None,) * _N_INPUTS
        backward = torch.ops.rl_loss.head_bwd if torch.compiler.is_compiling() else _backward
        need = ctx.needs_input_grad[:3]
        grads = backward(*ctx.saved_tensors, *upstreams[:4], *need, *ctx.scalars)
        grads = [grad if n else None for grad, n in zip(grads, need, strict=True)]
        return *grads, *(None,) * (_N_INPUTS - 3)


def replayed_rows(t: HeadTensors, s: HeadScalars, normal: bool = True) -> Rows:
    """`Rows` in which every row but those over the vocabulary is computed; not
    `normal`: the logits of their entries alone."""
    from rl_loss.kernels.rows import gathered_logits, normalise

    dtype, logits = accumulation_dtype(t.hidden, t.weight), head_logits(t, s)
    sizes = len(t.labels), len(t.ids)
    out = Rows.new(t.hidden, dtype, *sizes, s.want_entropy > 0, len(t.over_v) > 0)
    gathered = t.active, t.ids, t.offsets, t.tiles, s.max_width
    gathered_logits(t.hidden, t.weight, *gathered, logits, out.support_logprobs)
    entries = head_entries(t)
    if len(t.wide):
        from rl_loss.kernels.blocks import wide_logits

        sizes = s.max_width, s.workspace
        wide_logits(t.hidden, t.weight, t.wide, entries, logits, out, *sizes)
    if normal:
        normalise(out, entries, t.active, logits, len(t.weight), None, s.want_entropy)
    return out


def head_fwd(t: HeadTensors, s: HeadScalars) -> Rows:
    """`Rows` of all rows."""
    from rl_loss.kernels.rows import normalise

    over_v = len(t.over_v) > 0
    out = replayed_rows(t, s, normal=not over_v)
    if over_v:
        from rl_loss.kernels.blocks import vocabulary_stats

        logits, entries, entropy = head_logits(t, s), head_entries(t), s.want_entropy
        sizes = s.max_width, s.workspace
        stats = vocabulary_stats(
            t.hidden, t.weight, t.over_v, entries, logits, out, *sizes, moment=entropy > 0
        )
        normalise(out, entries, t.active, logits, len(t.weight), stats, entropy)
    return out


def head_bwd(
    t: HeadTensors,
    s: HeadScalars,
    saved: Rows,
    upstreams: tuple[Tensor | None, ...],
    need: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of hidden, weight and bias; empty where not needed."""
    from rl_loss.kernels.entry_grads import EntryGrads, entry_grads

    upstreams = (*upstreams[:3], upstreams[3] if s.want_entropy else None)
    logits, entries = head_logits(t, s), head_entries(t)
    grads = EntryGrads.new(saved, len(t.over_v) > 0)
    entry_grads(grads, saved, entries, logits, upstreams, s.want_entropy == 2)
    work = GradientSums(t, s, need)
    work.grads, work.state = grads, saved.state
    del grads  # theirs alone: what a step has used is free for the next
    if len(t.over_v):
        from rl_loss.kernels.blocks import vocabulary_grads

        if need[1]:
            work.start_weight()
        # Without entries a block of the weight gradient is one product, written where it belongs.
        finish = work.finish_block if len(t.ids) else None
        vocabulary_grads(
            t.hidden, t.weight, t.over_v, entries, logits, saved, work.grads.over_v,
            upstreams[2] is not None and s.head, upstreams[3] is not None,
            s.max_width if s.head else 0, s.workspace,
            work.over_v, work.d_weight, work.over_v_bias, finish,
        )  # fmt: skip
    return work.finish()


# --- the two operators ---


def _forward(*args):
    t = HeadTensors(*args[: len(HeadTensors._fields)])
    with launching_on(t.hidden), torch.autocast(t.hidden.device.type, enabled=False):
        return tuple(head_fwd(t, HeadScalars(*args[len(t) :])))


def _backward(*args):
    args, parts = list(args), []
    for kind in (HeadTensors, Rows, _Upstreams, _Needs, HeadScalars):
        parts.append(kind(*args[: len(kind._fields)]))
        del args[: len(kind._fields)]
    t, saved, upstreams, need, s = parts
    with launching_on(t.hidden), torch.autocast(t.hidden.device.type, enabled=False):
        return head_bwd(t, s, saved, upstreams, need)


def _schema(returns: int, *parts: type) -> str:
    types: dict[Any, str] = {Tensor: "Tensor", Tensor | None: "Tensor?", float: "float"}
    types |= {int: "SymInt", bool: "bool"}
    hints = [hint for part in parts for hint in get_type_hints(part).items()]
    arguments = ", ".join(f"{types[kind]} {name}" for name, kind in hints)
    return f"({arguments}) -> ({', '.join(['Tensor'] * returns)})"


_head_fwd = torch.library.custom_op(
    "rl_loss::head_fwd", _forward, mutates_args=(), schema=_schema(8, HeadTensors, HeadScalars)
)
_head_bwd = torch.library.custom_op(
    "rl_loss::head_bwd",
    _backward,
    mutates_args=(),
    schema=_schema(3, HeadTensors, Rows, _Upstreams, _Needs, HeadScalars),
)


@_head_fwd.register_fake
def _(*args):
    t = HeadTensors(*args[: len(HeadTensors._fields)])
    s = HeadScalars(*args[len(t) :])
    dtype = accumulation_dtype(t.hidden, t.weight)
    n, nnz, none = t.hidden.shape[0], t.ids.shape[0], 0

    def new(length, dtype=dtype):
        return t.hidden.new_empty(length, dtype=dtype)

    return (
        new(n),
        new(nnz),
        new(n),
        new(n if s.want_entropy else none),
        new(nnz, torch.bool),
        new(n),
        new(n if t.over_v.shape[0] else none),
        new(n, torch.uint8),
    )


@_head_bwd.register_fake
def _(hidden, weight, bias, *rest):
    need = rest[-len(HeadScalars._fields) - 3 : -len(HeadScalars._fields)]
    inputs = zip((hidden, weight, bias), need, strict=True)
    return tuple(
        tensor.new_empty(tensor.shape) if needed and tensor is not None else hidden.new_empty(0)
        for tensor, needed in inputs
    )
