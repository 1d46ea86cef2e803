"""The head on the kernels: one autograd function over two custom operators, for rows of any kind.

The operators take tensors and scalars alone, so that `torch.compile` sees them whole; run eagerly
the same functions are called without the dispatcher in between.
"""

from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_loss.host import launching_on
from rl_loss.logits import accumulation_dtype

# Programs that share the rows of the weight gradient, most of which are but written as 0.
_WEIGHT_PROGRAMS = 4096


class HeadTensors(NamedTuple):
    """What the operators read; N rows, nnz entries."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    labels: Tensor  # [N]
    temperatures: Tensor | None  # [N]
    active: Tensor | None  # [N] bool
    ids: Tensor  # [nnz] int32
    known: Tensor  # [nnz] bool
    offsets: Tensor  # [N + 1] int64
    kind: Tensor  # [N] int8
    tiles: Tensor  # [T] int64: of the REPLAY rows whose logits are gathered
    wide: Tensor  # [W] int64: the REPLAY rows whose logits come of blocks over the vocabulary
    over_v: Tensor  # [D] int64: the rows of which something is taken over the vocabulary


class HeadScalars(NamedTuple):
    """What is no tensor."""

    temperature: float  # where it is one value
    softcap: float  # 0: none
    scale: float
    rounded: bool  # logits to bfloat16
    max_width: int  # of the support's rows, or more
    head: bool  # some row is HEAD
    entropy: int  # 0: none, 1: of what the row is normalised over, 2: over the vocabulary
    workspace: int  # bytes of a block of logits


class _Outputs(NamedTuple):
    """The operators' view of `kernels.gathered.Rows`."""

    logprobs: Tensor  # [N]
    support_logprobs: Tensor  # [nnz]
    tail_logprobs: Tensor  # [N]
    entropy: Tensor  # [N]
    valid: Tensor  # [nnz] bool
    lse: Tensor  # [N]
    lse_v: Tensor  # [N]
    state: Tensor  # [N] uint8


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


def _logits(t: HeadTensors, s: HeadScalars) -> Any:  # kernels.logits.Logit
    from rl_loss.kernels.logits import make_logit

    dtype = accumulation_dtype(t.hidden, t.weight)
    options = s.temperature, s.softcap, s.scale, s.rounded
    return make_logit(t.bias, t.temperatures, *options, t.hidden, dtype)


def _entries(t: HeadTensors) -> Any:  # kernels.gathered.Entries
    from rl_loss.kernels.gathered import Entries

    return Entries(t.labels, t.ids, t.known, t.offsets, t.kind)


def head_fwd(t: HeadTensors, s: HeadScalars):
    """`kernels.gathered.Rows` of all rows."""
    from rl_loss.blocks import vocabulary_stats, wide_logits
    from rl_loss.kernels.gathered import Rows, gathered_logits, normalise

    n, nnz, over_v = len(t.labels), len(t.ids), len(t.over_v) > 0
    dtype, logits, entries = accumulation_dtype(t.hidden, t.weight), _logits(t, s), _entries(t)
    out = Rows.new(t.hidden, dtype, n, nnz, s.entropy > 0, over_v)
    gathered = t.active, t.ids, t.offsets, t.tiles, s.max_width
    gathered_logits(t.hidden, t.weight, *gathered, logits, out.support_logprobs)
    block = s.max_width, s.workspace
    if len(t.wide):
        wide_logits(t.hidden, t.weight, t.wide, entries, logits, out, *block)
    stats = None
    if over_v:
        stats = vocabulary_stats(
            t.hidden, t.weight, t.over_v, entries, logits, out, *block, moment=s.entropy > 0
        )
    normalise(out, entries, t.active, logits, len(t.weight), stats, s.entropy)
    return out


def head_bwd(
    t: HeadTensors,
    s: HeadScalars,
    saved,  # kernels.gathered.Rows
    upstreams: tuple[Tensor | None, ...],
    need: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of hidden, weight and bias; empty where not needed."""
    from rl_loss.kernels.entry_grads import EntryGrads, entry_grads

    upstreams = (*upstreams[:3], upstreams[3] if s.entropy else None)
    logits, entries = _logits(t, s), _entries(t)
    grads = EntryGrads.new(saved, len(t.over_v) > 0)
    entry_grads(grads, saved, entries, logits, upstreams, s.entropy == 2)
    work = GradientSums(t, s, saved.state, grads, need)
    if len(t.over_v):
        from rl_loss.blocks import vocabulary_grads

        # Of rows that are replayed the entropy alone is over the vocabulary.
        vocabulary_grads(
            t.hidden, t.weight, t.over_v, entries, logits, saved, grads.over_v,
            upstreams[2] is not None and s.head, upstreams[3] is not None,
            s.max_width if s.head else 0, s.workspace,
            work.over_v, work.d_weight, work.over_v_bias, work.finish_block,
        )  # fmt: skip
    return work.finish()


class GradientSums:
    """Adds up what entries and the vocabulary's blocks send to hidden, weight and bias.

    A row of the hidden gradient is its entries' sum and the row of `over_v` that the blocks made;
    a block of the weight gradient is its ids' entries' sum and the block's own product. Each is
    rounded once.
    """

    def __init__(
        self,
        t: HeadTensors,
        s: HeadScalars,
        state: Tensor,  # [N] uint8
        grads,  # kernels.entry_grads.EntryGrads
        need: tuple[bool, bool, bool],
    ) -> None:
        self.t, self.s, self.state, self.grads, self.need = t, s, state, grads, need
        acc, d, v = grads.grad.dtype, len(t.over_v), len(t.weight)
        new = t.hidden.new_zeros
        self.over_v = new(d, t.hidden.shape[1], dtype=acc) if need[0] and d else None
        self.over_v_bias = new(v, dtype=acc) if need[2] and d else None
        self.d_weight: Tensor | None = None
        # Without entries a block of the weight gradient is one product, written where it belongs.
        self.finish_block = self._finish_block if len(t.ids) else None
        if d and need[1]:
            self._prepare_weight()

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        none = self.grads.grad.new_empty(0)
        d_hidden = self._hidden() if self.need[0] else none
        if self.need[1] and self.d_weight is None:
            self._prepare_weight()
            self._finish_block(slice(0, len(self.t.weight)), None)
        d_bias = self._bias() if self.need[2] and self.t.bias is not None else none
        return d_hidden, none if self.d_weight is None else self.d_weight, d_bias

    def _hidden(self) -> Tensor:
        from rl_loss.kernels.scattered import gathered_sums

        t, grads, n = self.t, self.grads, len(self.t.labels)
        out = torch.empty_like(t.hidden, memory_format=torch.contiguous_format)
        places = skip = None
        if self.over_v is not None and len(self.over_v) < n:
            places = places_of(t.over_v, n)
        if len(t.wide):
            skip = places_of(t.wide, n).int()
        gathered_sums(
            t.weight, grads.grad, t.ids, t.offsets, out,
            owners=grads.rows,
            max_entries=self.s.max_width,
            base=self.over_v,
            base_rows=places,
            flags=grads.flags,
            slots=skip,
            # A row of four times the mean width would keep its one program busy for too long.
            heavy=max(128, 4 << (len(t.ids) // max(1, n)).bit_length()),
        )  # fmt: skip
        if len(t.wide):
            from rl_loss.blocks import grad_dtype, wide_hidden_grads

            dtype = grad_dtype(t.hidden, t.weight)
            width = self.s.max_width, self.s.workspace
            rows = wide_hidden_grads(t.weight, t.wide, _entries(t), grads.grad, dtype, *width)
            if self.over_v is not None:
                at = t.wide if places is None else places[t.wide]
                rows += torch.where((at >= 0)[:, None], self.over_v[at.clamp(min=0)], 0.0)
            rows = torch.where((grads.flags[t.wide] == 1)[:, None], torch.nan, rows)
            out[t.wide] = rows.to(out.dtype)
        return out

    def _prepare_weight(self) -> None:
        """The entries in the order of their ids; the gradient is allocated last, when what that
        needed is free again."""
        from rl_loss.kernels.hot_ids import hot_product, id_bounds, use_hot_ids
        from rl_loss.kernels.scattered import entries_by_id

        t, grads = self.t, self.grads
        self.hot = None
        if len(t.ids) or not len(t.over_v):
            self.bounds = id_bounds(t.ids, len(t.weight))
            if use_hot_ids(t.hidden, t.weight, grads.grad):
                rows = grads.grad, grads.rows, t.ids, self.bounds, self.state
                self.hot = hot_product(t.hidden, *rows)
            self.sorted = entries_by_id(t.ids, grads.grad, grads.rows)
        self.d_weight = torch.empty_like(t.weight, memory_format=torch.contiguous_format)

    def _finish_block(self, ids: slice, base: Tensor | None) -> None:
        from rl_loss.kernels.hot_ids import write_hot_rows
        from rl_loss.kernels.scattered import gathered_sums

        t, (sorted_ids, grad, rows) = self.t, self.sorted
        assert self.d_weight is not None
        out = self.d_weight[ids]
        gathered_sums(
            t.hidden, grad, rows, self.bounds[ids.start :], out,
            owners=sorted_ids,
            max_entries=min(len(t.labels), len(t.ids)),
            first_owner=ids.start,
            base=base,
            slots=None if self.hot is None else self.hot.slots[ids.start :],
            programs=_WEIGHT_PROGRAMS,
        )  # fmt: skip
        if self.hot is not None:
            write_hot_rows(self.hot, out, base, ids.start)

    def _bias(self) -> Tensor:
        from rl_loss.kernels.hot_ids import id_bounds
        from rl_loss.kernels.scattered import entries_by_id

        t, grads = self.t, self.grads
        # Differences of one running sum, in float64: in a fixed order, as an atomic sum is not.
        _, grad, _ = entries_by_id(t.ids, grads.grad, grads.rows)
        running = torch.zeros(len(t.ids) + 1, dtype=torch.float64, device=t.ids.device)
        torch.cumsum(grad, 0, dtype=torch.float64, out=running[1:])
        d_bias = running[id_bounds(t.ids, len(t.weight)).long()].diff()
        if self.over_v_bias is not None:
            d_bias += self.over_v_bias
        return d_bias.to(t.bias.dtype)  # type: ignore[union-attr]


def places_of(rows: Tensor, n: int) -> Tensor:
    """Each row's place in `rows`, `[N]` int64; -1 where it has none."""
    places = torch.full((n,), -1, dtype=torch.int64, device=rows.device)
    return places.index_copy_(0, rows, torch.arange(len(rows), device=rows.device))


# --- the two operators ---


def _forward(*args):
    t = HeadTensors(*args[: len(HeadTensors._fields)])
    with launching_on(t.hidden):
        return tuple(head_fwd(t, HeadScalars(*args[len(t) :])))


def _backward(*args):
    from rl_loss.kernels.gathered import Rows

    args, parts = list(args), []
    for kind in (HeadTensors, Rows, _Upstreams, _Needs, HeadScalars):
        parts.append(kind(*args[: len(kind._fields)]))
        del args[: len(kind._fields)]
    t, saved, upstreams, need, s = parts
    with launching_on(t.hidden):
        return head_bwd(t, s, saved, upstreams, need)


def _schema(returns: int, *parts: type) -> str:
    names = {
        Tensor: "Tensor",
        Tensor | None: "Tensor?",
        float: "float",
        int: "SymInt",
        bool: "bool",
    }
    args = [
        f"{names[hint]} {name}" for part in parts for name, hint in get_type_hints(part).items()
    ]
    return f"({', '.join(args)}) -> ({', '.join(['Tensor'] * returns)})"


_head_fwd = torch.library.custom_op(
    "rl_loss::head_fwd", _forward, mutates_args=(), schema=_schema(8, HeadTensors, HeadScalars)
)
_head_bwd = torch.library.custom_op(
    "rl_loss::head_bwd",
    _backward,
    mutates_args=(),
    schema=_schema(3, HeadTensors, _Outputs, _Upstreams, _Needs, HeadScalars),
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
        new(n if s.entropy else none),
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
