"""The one definition of a logit, inside kernels (outside: `rl_loss.logits`)."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ACC_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit
def inv_temperature(temperature, row, scalar, PER_ROW: tl.constexpr, ACC: tl.constexpr):
    """1 / T; NaN where T is not above 0 and finite."""
    t = scalar
    if PER_ROW:
        t = tl.load(temperature + row).to(ACC)
    good = (t > 0) & (t < float("inf"))
    return tl.where(good, 1.0 / tl.where(good, t, 1.0), float("nan"))


@triton.jit
def _tanh(x):
    t = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - t) / (1.0 + t)
    return tl.where(x < 0, -y, y)


@triton.jit
def _rounded(x, ROUND: tl.constexpr):
    """To bfloat16, to nearest even, by its bits: Triton's interpreter would truncate."""
    if ROUND:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True).to(x.dtype), x)
    return x


@triton.jit
def logit(
    product,
    bias,  # [V]
    ids,
    held,  # which ids there are
    inv,
    HAS_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALE: tl.constexpr,
    ROUND: tl.constexpr,
):
    """The logits of the products of a row with `ids`."""
    if HAS_BIAS:
        product += tl.load(bias + ids, mask=held, other=0.0).to(product.dtype)
    z = _rounded(product, ROUND)
    if SCALE != 1.0:
        z = _rounded(z * SCALE, ROUND)
    if SOFTCAP > 0:
        z = _rounded(z / SOFTCAP, ROUND)
        z = _rounded(SOFTCAP * _rounded(_tanh(z), ROUND), ROUND)
    return z * inv


@triton.jit
def derivative(z, inv, SOFTCAP: tl.constexpr, SCALE: tl.constexpr):
    """d logit / d raw product, from the logit; what is rounded counts as not rounded."""
    slope = SCALE * inv
    if SOFTCAP > 0:
        capped = z / (inv * SOFTCAP)
        slope = slope * (1.0 - capped * capped)
    return slope


class Logit(NamedTuple):
    """How raw products become logits: what every kernel that makes them is given."""

    bias: Tensor | None  # [V]
    temperature: Tensor | None  # [N]
    scalar: float  # the temperature where it is one value
    softcap: float  # 0: none
    scale: float
    rounded: bool  # to bfloat16, as a sampler's head leaves them

    @property
    def flags(self) -> dict:
        return {
            "HAS_BIAS": self.bias is not None,
            "PER_ROW": self.temperature is not None,
            "SOFTCAP": self.softcap,
            "SCALE": self.scale,
            "ROUND": self.rounded,
        }


def make_logit(
    bias: Tensor | None,
    temperature: Tensor | None,
    scalar: float,
    softcap: float,
    scale: float,
    rounded: bool,
    like: Tensor,  # [N, H]
    dtype: torch.dtype,
) -> Logit:
    if dtype == torch.float64 and temperature is None:
        # A scalar argument of a kernel is float32.
        temperature = torch.full((len(like),), scalar, dtype=dtype, device=like.device)
    bias = None if bias is None else bias.contiguous()
    return Logit(bias, temperature, scalar, softcap, scale, rounded)
