"""The one definition of a logit, inside kernels (outside: `rl_loss.logits`)."""

import triton
import triton.language as tl


@triton.jit
def inverse_of(temperature, row, one_temperature, PER_ROW: tl.constexpr, ACC: tl.constexpr):
    """1 / T of a row; NaN where T is not above 0 and finite."""
    t = one_temperature
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
def _to_bfloat16(x, ROUND: tl.constexpr):
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
    inverse,  # 1 / T
    HAS_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALE: tl.constexpr,
    ROUND: tl.constexpr,
):
    """The logits of the products of a row with `ids`."""
    if HAS_BIAS:
        product += tl.load(bias + ids, mask=held, other=0.0).to(product.dtype)
    z = _to_bfloat16(product, ROUND)
    if SCALE != 1.0:
        z = _to_bfloat16(z * SCALE, ROUND)
    if SOFTCAP > 0:
        z = _to_bfloat16(z / SOFTCAP, ROUND)
        z = _to_bfloat16(SOFTCAP * _to_bfloat16(_tanh(z), ROUND), ROUND)
    return z * inverse


@triton.jit
def derivative(z, inverse, SOFTCAP: tl.constexpr, SCALE: tl.constexpr):
    """d logit / d raw product, from the logit; what is rounded counts as not rounded."""
    slope = SCALE * inverse
    if SOFTCAP > 0:
        capped = z / (inverse * SOFTCAP)
        slope = slope * (1.0 - capped * capped)
    return slope
