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
    want_entropy: int  # 0: none, 1: of what the row is normalised over, 2: over the vocabulary
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


def head_logits(t: HeadTensors, s: HeadScalars) -> Any:  # kernels.logits.Logit
    from rl_loss.kernels.logits import make_logit

    dtype = accumulation_dtype(t.hidden, t.weight)
    options = s.temperature, s.softcap, s.scale, s.rounded
    return make_logit(t.bias, t.temperatures, *options, t.hidden, dtype)


def head_entries(t: HeadTensors) -> Any:  # kernels.gathered.Entries
    from rl_loss.kernels.gathered import Entries

    return Entries(t.labels, t.ids, t.known, t.offsets, t.kind)


def replayed_rows(t: HeadTensors, s: HeadScalars, normal: bool = True) -> Any:
    """`kernels.gathered.Rows` in which every row but those over the vocabulary is computed; not
    `normal`: the logits of their entries alone."""
    from rl_loss.kernels.gathered import Rows, gathered_logits, normalise

    dtype, logits = accumulation_dtype(t.hidden, t.weight), head_logits(t, s)
    sizes = len(t.labels), len(t.ids)
    out = Rows.new(t.hidden, dtype, *sizes, s.want_entropy > 0, len(t.over_v) > 0)
    gathered = t.active, t.ids, t.offsets, t.tiles, s.max_width
    gathered_logits(t.hidden, t.weight, *gathered, logits, out.support_logprobs)
    entries = head_entries(t)
    if len(t.wide):
        from rl_loss.blocks import wide_logits

        sizes = s.max_width, s.workspace
        wide_logits(t.hidden, t.weight, t.wide, entries, logits, out, *sizes)
    if normal:
        normalise(out, entries, t.active, logits, len(t.weight), None, s.want_entropy)
    return out


def head_fwd(t: HeadTensors, s: HeadScalars) -> Any:
    """`kernels.gathered.Rows` of all rows."""
    from rl_loss.kernels.gathered import normalise

    over_v = len(t.over_v) > 0
    out = replayed_rows(t, s, normal=not over_v)
    if over_v:
        from rl_loss.blocks import vocabulary_stats

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
    saved,  # kernels.gathered.Rows
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
        from rl_loss.blocks import vocabulary_grads

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


class GradientSums:
    """Adds up what entries and the vocabulary's blocks send to hidden, weight and bias.

    A row of the hidden gradient is its entries' sum and the row of `over_v` that the blocks made;
    a block of the weight gradient is its ids' entries' sum and the block's own product. Each is
    rounded once.
    """

    def __init__(self, t: HeadTensors, s: HeadScalars, need: tuple[bool, bool, bool]) -> None:
        self.t, self.s, self.need = t, s, need
        acc, d = accumulation_dtype(t.hidden, t.weight), len(t.over_v)
        new = t.hidden.new_zeros
        self.over_v = new(d, t.hidden.shape[1], dtype=acc) if need[0] and d else None
        self.over_v_bias = new(len(t.weight), dtype=acc) if need[2] and d else None
        self.d_weight: Tensor | None = None
        self.grads: Any = None  # kernels.entry_grads.EntryGrads
        self.state: Any = None  # [N] uint8
        self.sorted: tuple[Tensor, Tensor, Tensor] | None = None  # entries by id

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three gradients; the weight's here where no block wrote it before."""
        none = self.grads.grad.new_empty(0)
        d_hidden = self._hidden() if self.need[0] else none
        if self.need[1] and self.d_weight is None:
            self.start_weight(last=True)
            self.finish_block(slice(0, len(self.t.weight)), None)
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
            rows = wide_hidden_grads(t.weight, t.wide, head_entries(t), grads.grad, dtype, *width)
            if self.over_v is not None:
                at = t.wide if places is None else places[t.wide]
                rows += torch.where((at >= 0)[:, None], self.over_v[at.clamp(min=0)], 0.0)
            rows = torch.where((grads.flags[t.wide] == 1)[:, None], torch.nan, rows)
            out[t.wide] = rows.to(out.dtype)
        return out

    def start_weight(self, last: bool = False) -> None:
        """The entries in the order of their ids. The gradient is allocated when what that needed
        is free again; `last`: the entries' own gradients too, which nothing else reads then."""
        from rl_loss.kernels.hot_ids import hot_product, use_hot_ids

        t, self.hot = self.t, None
        if len(t.ids) or not len(t.over_v):
            bounds = self._sort()
            grad, rows, _, _ = self.grads
            if use_hot_ids(t.hidden, t.weight, grad):
                self.hot = hot_product(t.hidden, grad, rows, t.ids, bounds, self.state)
            del grad, rows
        if last:
            self.grads = None
        self.d_weight = torch.empty_like(t.weight, memory_format=torch.contiguous_format)

    def _sort(self) -> Tensor:
        from rl_loss.kernels.hot_ids import id_bounds
        from rl_loss.kernels.scattered import entries_by_id

        if self.sorted is None:
            self.bounds = id_bounds(self.t.ids, len(self.t.weight))
            self.sorted = entries_by_id(self.t.ids, self.grads.grad, self.grads.rows)
        return self.bounds

    def finish_block(self, ids: slice, base: Tensor | None) -> None:
        """Writes the weight gradient of these ids, `base` `[B, H]` what the blocks made of it."""
        from rl_loss.kernels.hot_ids import write_hot_rows
        from rl_loss.kernels.scattered import gathered_sums

        assert self.d_weight is not None
        assert self.sorted is not None
        t, (sorted_ids, grad, rows) = self.t, self.sorted
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
        bounds = self._sort().long()
        assert self.sorted is not None
        assert self.t.bias is not None
        # Differences of one running sum, in float64: in a fixed order, as an atomic sum is not.
        running = torch.zeros(len(self.t.ids) + 1, dtype=torch.float64, device=bounds.device)
        torch.cumsum(self.sorted[1], 0, dtype=torch.float64, out=running[1:])
        d_bias = running[bounds].diff()
        if self.over_v_bias is not None:
            d_bias += self.over_v_bias
        return d_bias.to(self.t.bias.dtype)


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
