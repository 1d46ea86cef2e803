"""What a token, an entry or a tail adds to a loss, inside kernels.

Each function is the one of `rl_loss.loss.weighting` or `rl_loss.loss.divergences` whose name or
formula it has, operation by operation, so that what is not finite comes out as there.
"""

import triton
import triton.language as tl

# Weight rules. Their two numbers: `limit` is ipo's eps or icepop's lowest log-ratio, `cap` the
# highest log-ratio of either.
RULE_IPO, RULE_ICEPOP, RULE_REINFORCE = (tl.constexpr(code) for code in range(3))

# Divergences to the sampler.
KL_NONE, KL_FORWARD, KL_REVERSE, KL_SQUARED = (tl.constexpr(code) for code in range(4))


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def at_most(x, bound):
    """The smaller of both; NaN stays NaN."""
    return tl.where(x > bound, bound, x)


@triton.jit
def expm1(x):
    """`e^x - 1` with its digits near 0: what exp is off by there, log takes back (W. Kahan)."""
    up = tl.exp(x)
    less = up - 1
    return tl.where(up == 1, x, tl.where(less == -1, -1.0, less * (x / tl.log(up))))


@triton.jit
def weigh(log_p, log_q, limit, cap, RULE: tl.constexpr):
    """A token's weight, and whether the rule keeps it."""
    log_ratio = log_p - log_q
    if RULE == RULE_IPO:
        kept = tl.abs(tl.exp(log_p) - tl.exp(log_q)) <= limit
        weight = tl.exp(at_most(log_ratio, cap))
    elif RULE == RULE_ICEPOP:
        kept = (log_ratio >= limit) & (log_ratio <= cap)
        weight = tl.exp(log_ratio)
    else:
        kept = tl.zeros_like(log_p) == 0
        weight = tl.zeros_like(log_p) + 1
    return tl.where(kept, weight, 0.0), kept


@triton.jit
def weigh_tail(log_p, log_q, limit, cap, RULE: tl.constexpr):
    """The weight of every token of a tail, from its sums, and whether some token might have
    another: ipo's test is per token, and the sums do not take it."""
    weight, _ = weigh(log_p, log_q, limit, cap, RULE)
    inexact = tl.zeros_like(log_p) != 0
    if RULE == RULE_IPO:
        weight = tl.exp(at_most(log_p - log_q, cap))
        inexact = tl.abs(tl.exp(log_p) - tl.exp(log_q)) > limit
    return weight, inexact


@triton.jit
def estimate(log_ratio, bound, KL: tl.constexpr):
    """A sample's divergence, and its derivative by log p; beyond the bound along its tangent."""
    if KL == KL_SQUARED:
        value = log_ratio * log_ratio
        slope = 2 * log_ratio
    else:
        x = at_most(log_ratio, bound)
        if KL == KL_FORWARD:
            slope = expm1(x)
            value = slope - x
        else:
            slope = x * tl.exp(x)
            value = slope - expm1(x)
        value += slope * (log_ratio - x)
    return value, slope


@triton.jit
def exact(log_p, log_q, KL: tl.constexpr):
    """An entry's part of the divergence of two distributions, and its derivative by log p."""
    if KL == KL_FORWARD:
        q = tl.exp(log_q)
        value = q * (log_q - log_p)
        slope = -q
    else:
        p = tl.exp(log_p)
        value = p * (log_p - log_q)
        slope = p * (log_p - log_q + 1)
    return value, slope


@triton.jit
def one_sided(p_tail, q_tail, KL: tl.constexpr):
    """Of a tail on which only one of both puts mass: the mass itself, and its derivative."""
    if KL == KL_FORWARD:
        value = tl.where(p_tail > 0, 0.0, q_tail)
        slope = tl.zeros_like(value)
    else:
        value = tl.where(q_tail > 0, 0.0, p_tail)
        slope = value
    return value, slope
