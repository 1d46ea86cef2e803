"""Batches of REPLAY rows on the kernels: one autograd function over two custom operators.

The operators take tensors and scalars alone, so that `torch.compile` sees them whole; run eagerly
the same functions are called without the dispatcher in between.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_loss.head_rows import HeadRows
from rl_loss.host import launching_on
from rl_loss.logits import LogitTransform
from rl_loss.support import Support

# Programs that share the rows of the weight gradient, most of which are but written as 0.
_WEIGHT_PROGRAMS = 4096


class ReplayOptions(NamedTuple):
    """What is no tensor."""

    temperature: float  # where it is one value
    softcap: float  # 0: none
    scale: float
    max_width: int  # of the support's rows, or more
    entropy: bool


def replay_rows(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    bias: Tensor | None,  # [V]
    labels: Tensor,  # [N]
    support: Support,
    temperature: float | Tensor,  # one value or [N]
    active: Tensor | None,  # [N] bool, on the device
    transform: LogitTransform,
    entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """logprobs, support_logprobs, tails, entropy, valid `[nnz]` bool.

    Rows of other kinds, and inactive ones, are 0.
    """
    # The kernels count rows: whatever has one value a row has to lie row after row.
    temperatures = temperature.contiguous() if isinstance(temperature, Tensor) else None
    options = ReplayOptions(
        temperature=1.0 if isinstance(temperature, Tensor) else float(temperature),
        softcap=transform.softcap or 0.0,
        scale=transform.scale,
        max_width=support.plan.max_width,
        entropy=entropy,
    )
    out = _Replay.apply(
        hidden,
        weight,
        bias,
        labels.contiguous(),
        temperatures,
        None if active is None else active.contiguous(),
        support.ids,
        support.known,
        support.offsets,
        support.kind,
        support.plan.tiles,
        *options,
    )
    return out[:5]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, *rest):
        forward = torch.ops.rl_loss.replay_fwd if torch.compiler.is_compiling() else _forward
        out = forward(hidden, weight, bias, labels, *rest)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*out[4:])
        ctx.save_for_backward(hidden, weight, bias, labels, *rest[:7], *out)
        ctx.options = rest[7:]
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(ctx, *upstreams):
        saved, options = ctx.saved_tensors, ctx.options
        if all(upstream is None for upstream in upstreams[:4]):
            return (None,) * 16
        backward = torch.ops.rl_loss.replay_bwd if torch.compiler.is_compiling() else _backward
        need = ctx.needs_input_grad[:3]
        grads = backward(*saved, *upstreams[:4], *need, *options)
        return *(grad if n else None for grad, n in zip(grads, need, strict=True)), *(None,) * 13


def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    temperatures: Tensor | None,
    active: Tensor | None,
    ids: Tensor,
    known: Tensor,
    offsets: Tensor,
    kind: Tensor,
    tiles: Tensor,
    temperature: float,
    softcap: float,
    scale: float,
    max_width: int,
    entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from rl_loss.kernels.gathered import gathered_rows_fwd

    with launching_on(hidden):
        return gathered_rows_fwd(
            hidden,
            weight,
            bias,
            labels,
            temperature if temperatures is None else temperatures,
            active,
            ids,
            known,
            offsets,
            kind,
            tiles,
            max_width,
            softcap,
            scale,
            entropy,
        )


def _backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    temperatures: Tensor | None,
    active: Tensor | None,
    ids: Tensor,
    known: Tensor,
    offsets: Tensor,
    kind: Tensor,
    tiles: Tensor,
    logprobs: Tensor,
    support_logprobs: Tensor,
    tails: Tensor,
    entropies: Tensor,
    valid: Tensor,
    lse: Tensor,
    state: Tensor,
    d_logprobs: Tensor | None,
    d_support_logprobs: Tensor | None,
    d_tails: Tensor | None,
    d_entropy: Tensor | None,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    temperature: float,
    softcap: float,
    scale: float,
    max_width: int,
    entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from rl_loss.kernels.gathered import GatheredRows

    with launching_on(hidden):
        d_hidden, d_weight, d_bias = replay_grads(
            GatheredRows(logprobs, support_logprobs, tails, entropies, valid, lse, state),
            hidden,
            weight,
            labels,
            temperature if temperatures is None else temperatures,
            ids,
            known,
            offsets,
            max_width,
            softcap,
            scale,
            (d_logprobs, d_support_logprobs, d_tails, d_entropy if entropy else None),
            (need_hidden, need_weight, need_bias),
        )
    return d_hidden, d_weight, d_bias.to(bias.dtype) if need_bias and bias is not None else d_bias


class KernelRows:
    """The REPLAY rows of a mixed batch on the kernels; the interface of `SparseRows`."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: HeadRows,
        transform: LogitTransform,
        want_entropy: bool,
    ) -> None:
        from rl_loss.kernels.gathered import gathered_rows_fwd

        support = rows.support
        self.entropy = want_entropy
        self.rows = (
            rows.labels.contiguous(),
            rows.inv_temperature.reciprocal().contiguous(),
            (rows.active & ~rows.broken).contiguous(),
            support.ids,
            support.known,
            support.offsets,
            support.kind,
        )
        self.transform = transform.softcap or 0.0, transform.scale
        with launching_on(hidden):
            self.saved = gathered_rows_fwd(
                hidden,
                weight,
                bias,
                *self.rows,
                support.plan.tiles,
                support.plan.max_width,
                *self.transform,
                want_entropy,
            )

    def outputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`[N]`, `[nnz]`, `[N]`, `[N]`, 0 for the rows that are not REPLAY."""
        out = self.saved
        entropy = out.entropy if self.entropy else torch.zeros_like(out.logprobs)
        # What the backward reads stays as it is: the other rows are written into copies.
        return tuple(t.clone() for t in (*out[:3], entropy))  # type: ignore[return-value]

    def backward(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: HeadRows,
        transform: LogitTransform,
        upstreams: tuple[Tensor | None, ...],
        needs: tuple[bool, ...],
        into: list[Tensor | None],
    ) -> list[Tensor | None]:
        """The gradients of hidden, weight and bias, those of `into` added before the rounding."""
        labels, temperature, _, ids, known, offsets, _ = self.rows
        with launching_on(hidden):
            d_hidden, d_weight, d_bias = replay_grads(
                self.saved,
                hidden,
                weight,
                labels,
                temperature,
                ids,
                known,
                offsets,
                rows.support.plan.max_width,
                *self.transform,
                upstreams if self.entropy else (*upstreams[:3], None),
                (needs[0], needs[1], needs[2]),
                bases=(into[0], into[1]),
            )
        if into[2] is not None:
            d_bias = d_bias + into[2]
        return [
            d_hidden if needs[0] else None,
            d_weight if needs[1] else None,
            d_bias.to(bias.dtype) if needs[2] and bias is not None else None,
        ]


def replay_grads(
    saved: Any,  # kernels.gathered.GatheredRows
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: Tensor | float,
    ids: Tensor,
    known: Tensor,
    offsets: Tensor,
    max_width: int,
    softcap: float,
    scale: float,
    upstreams: tuple[Tensor | None, ...],
    need: tuple[bool, bool, bool],
    bases: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of hidden, weight and bias (the last in float64); empty where not needed.

    `bases`, `[N, H]` and `[V, H]` in the accumulation dtype, are added before the rounding. The
    weight gradient is allocated last, when what its preparation needed is free again.
    """
    from rl_loss.kernels.entry_grads import entry_grads
    from rl_loss.kernels.hot_ids import hot_product, id_bounds, use_hot_ids, write_hot_rows
    from rl_loss.kernels.scattered import entries_by_id, gathered_sums

    grad, rows, flags = entry_grads(
        saved, labels, temperature, ids, known, offsets, max_width, softcap, scale, *upstreams
    )
    v = len(weight)
    d_hidden, d_weight, d_bias = (grad.new_empty(0) for _ in range(3))
    if need[0]:
        d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        gathered_sums(
            weight,
            grad,
            ids,
            offsets,
            d_hidden,
            owners=rows,
            max_entries=max_width,
            base=bases[0],
            flags=flags,
            # A row of four times the mean width would keep its one program busy for too long.
            heavy=max(128, 4 << (len(ids) // max(1, len(hidden))).bit_length()),
        )
    if not (need[1] or need[2]):
        return d_hidden, d_weight, d_bias
    bounds, hot = id_bounds(ids, v), None
    if need[1] and use_hot_ids(hidden, weight, grad):
        hot = hot_product(hidden, grad, rows, ids, bounds, saved.state)
    sorted_ids, grad, rows = entries_by_id(ids, grad, rows)
    if need[1]:
        d_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
        gathered_sums(
            hidden,
            grad,
            rows,
            bounds,
            d_weight,
            owners=sorted_ids,
            max_entries=min(len(hidden), len(ids)),
            base=bases[1],
            slots=None if hot is None else hot.slots,
            programs=_WEIGHT_PROGRAMS,
        )
        if hot is not None:
            write_hot_rows(hot, d_weight, bases[1])
    if need[2]:
        # Differences of one running sum, in float64: in a fixed order, as an atomic sum is not.
        running = torch.zeros(len(ids) + 1, dtype=torch.float64, device=ids.device)
        torch.cumsum(grad, 0, dtype=torch.float64, out=running[1:])
        d_bias = running[bounds.long()].diff()
    return d_hidden, d_weight, d_bias


_replay_fwd = torch.library.custom_op("rl_loss::replay_fwd", _forward, mutates_args=())
_replay_bwd = torch.library.custom_op("rl_loss::replay_bwd", _backward, mutates_args=())


@_replay_fwd.register_fake
def _(hidden, weight, bias, labels, temperatures, active, ids, known, offsets, kind, tiles,
      temperature, softcap, scale, max_width, entropy):  # fmt: skip
    double = torch.float64 in (hidden.dtype, weight.dtype)
    acc = torch.float64 if double else torch.float32
    n, nnz = hidden.shape[0], ids.shape[0]
    rows, entries = hidden.new_empty(n, dtype=acc), hidden.new_empty(nnz, dtype=acc)
    return (
        rows,
        entries,
        torch.empty_like(rows),
        hidden.new_empty(n if entropy else 0, dtype=acc),
        hidden.new_empty(nnz, dtype=torch.bool),
        torch.empty_like(rows),
        hidden.new_empty(n, dtype=torch.uint8),
    )


@_replay_bwd.register_fake
def _(hidden, weight, bias, *rest):
    need_hidden, need_weight, need_bias = rest[19:22]
    return tuple(
        tensor.new_empty(tensor.shape) if needed else hidden.new_empty(0)
        for tensor, needed in ((hidden, need_hidden), (weight, need_weight), (bias, need_bias))
    )
