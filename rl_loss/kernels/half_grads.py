"""Gradients of products in float16, scaled by powers of two so that tensor cores can take them.

A gradient of 1e-6 is no float16 number, and one of 1e5 neither; its mantissa is what PyTorch's own
float16 autograd has. So each row of a block is multiplied with a power of two that brings its
largest cell just below 2^14: what is 2^-38 of that or less is lost. The hidden gradient is divided
by the row's own power afterwards. The weight's sums over rows: there a row is taken at the batch's
power, by multiplying its hidden state with what it has more. Where rows are further apart than
2^13 that would cost the hidden state its own digits, and the smaller row is scaled less.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rl_loss.flat_rows import Upstreams
from rl_loss.kernels.records import HeadCall, RowOutputs

_TOP = 14  # cells stay below 2^14, which leaves room to float16's 65504
_APART = 13  # binary orders by which rows may be scaled apart


class HalfScales(NamedTuple):
    """Of R rows."""

    up: Tensor  # [R] what a row's gradient is multiplied with
    apart: Tensor  # [R] float16: what its hidden state is multiplied with instead
    common: Tensor  # 0-dim: what a sum over rows is multiplied with after all


def half_scales(
    call: HeadCall, rows: Tensor, saved: RowOutputs, upstreams: Upstreams, over_v: Tensor
) -> HalfScales:
    """The scales of the rows `[R]`; `over_v` `[4, N]` their upstreams as `EntryGrads` has them."""
    total, label, tail, entropy = over_v[:, rows].abs()
    bound = total + label  # p is at most 1, a share of the tail as well
    if upstreams.tail_logprobs is not None and call.scalars.any_head:
        bound = bound + tail
    if upstreams.entropy is not None:  # p |log p| is below 0.4
        bound = bound + entropy * (0.4 + saved.entropy.flatten()[rows].abs())
    temperature = call.logit.temperature
    warm = call.logit.one_temperature if temperature is None else temperature[rows]
    return _scales(bound * abs(call.scalars.scale) / warm)


def entry_scales(call: HeadCall, rows: Tensor, grad: Tensor) -> HalfScales:
    """Those of rows `[R]` whose cells are their entries' gradients, `grad` `[nnz]`."""
    most = torch.segment_reduce(grad.abs(), "max", offsets=call.rows.offsets, unsafe=True)
    return _scales(most[rows])


def _scales(bound: Tensor) -> HalfScales:
    """From the bounds of the rows' cells, `[R]`; a bound that is not finite spoils no other row."""
    usable = bound.isfinite() & (bound > 0)
    exponent = torch.frexp(torch.where(usable, bound, 1.0)).exponent.clamp(min=-100)
    lowest = torch.full_like(exponent, -100)
    top = torch.where(usable, exponent, lowest).amax()
    apart = (top - exponent).clamp(0, _APART)
    one = torch.ones_like(bound)
    return HalfScales(
        up=torch.ldexp(one, _TOP - top + apart),
        apart=torch.ldexp(one, -apart).half(),
        common=torch.ldexp(one[:1], top - _TOP)[0],
    )
