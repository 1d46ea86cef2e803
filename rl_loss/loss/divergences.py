"""The trainer's KL divergences to the sampler and to a reference, with their gradients."""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rl_loss.loss.rows import LOG_RATIO_MAX, Slopes, SupportEntries, Tokens

Direction = Literal["forward", "reverse", "squared"]


class Divergence(NamedTuple):
    """KL a row, and its derivatives."""

    value: Tensor  # [N]
    slopes: Slopes


def sampler_kl(
    tokens: Tokens, entries: SupportEntries, acts: Tensor, direction: Direction, max_ratio: float
) -> Divergence:
    """Forward `KL(q || p)` or reverse `KL(p || q)` of the rows where `acts [N]`, elsewhere 0.

    Rows with known q: the sum over the known ids and the tail as one entry, exact on a complete
    REPLAY row. Other rows: a non-negative estimate from their draws, or from the sampled token,
    bounded at `max_ratio`. "squared" is `(log r)**2` of the sampled token on every row (prime-rl).
    """
    bound = min(math.log(max_ratio), LOG_RATIO_MAX)
    log_ratio = torch.where(acts, tokens.log_ratio, 0.0)
    value, slope = _estimate(direction, log_ratio, bound)
    if direction == "squared":
        return Divergence(value, Slopes(slope))
    valid, modelled = entries.valid & entries.at(acts), entries.modelled & acts
    is_drawn, share = entries.at(entries.drawn), entries.at(1 / entries.size.clamp(min=1))
    estimates = _estimate(direction, entries.log_p - entries.log_q, bound)
    exact = _exact(direction, entries.log_p, entries.log_q)
    values, slopes = (
        torch.where(valid, torch.where(is_drawn, estimate * share, part), 0.0)
        for estimate, part in zip(estimates, exact, strict=True)
    )
    both = _exact(direction, entries.log_p_tail, entries.log_q_tail)
    one = _one_sided(direction, entries)
    tail, tail_slope = (
        torch.where(entries.has_tail, two, lone) for two, lone in zip(both, one, strict=True)
    )
    known = entries.sum(values) + torch.where(modelled, tail, 0.0)
    return Divergence(
        value=torch.where(entries.usable, known, value),
        slopes=Slopes(
            by_token=torch.where(entries.usable, 0.0, slope),
            by_entry=slopes,
            by_tail=torch.where(modelled, tail_slope, 0.0),
        ),
    )


def reference_kl(tokens: Tokens, ref: Tensor, max_ratio: float) -> tuple[Tensor, Tensor]:
    """The estimate `e^x - 1 - x`, `x = ref - log p`, from the sampled token of each row, and its
    derivative by log p; bounded at `max_ratio` as the estimates of the sampler KL.

    Source: the k3 estimator of J. Schulman, "Approximating KL divergence", 2020; GRPO, arXiv
    2402.03300.
    """
    x = torch.where(tokens.mask, ref - tokens.log_p, 0.0)
    value, slope = _estimate("forward", x, min(math.log(max_ratio), LOG_RATIO_MAX))
    return value, -slope


def _exact(direction: Direction, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """An entry's part of the divergence, and its derivative by log p."""
    if direction == "forward":
        q = log_q.exp()
        return q * (log_q - log_p), -q
    p = log_p.exp()
    return p * (log_p - log_q), p * (log_p - log_q + 1)


def _one_sided(direction: Direction, entries: SupportEntries) -> tuple[Tensor, Tensor]:
    """The part of a tail on which only one of p and q puts mass, where KL would be infinite.

    The sum over the known ids alone could be negative, and would push p's mass into the tail.
    The unnormalised divergence, `p log(p / q) - p + q` summed, is finite: it adds the mass itself.
    """
    none = torch.zeros_like(entries.q_tail)
    if direction == "reverse":
        lost = torch.where(entries.q_tail > 0, none, entries.p_tail)
        return lost, lost
    return torch.where(entries.p_tail > 0, none, entries.q_tail), none


def _estimate(direction: Direction, log_ratio: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """A sample's non-negative estimate under q, and its derivative by log p.

    Beyond the bound the value goes on along its tangent, so that the derivative stays what it is
    at the bound.
    """
    if direction == "squared":
        return log_ratio.square(), 2 * log_ratio
    x = log_ratio.clamp(max=bound)
    if direction == "forward":
        slope = x.expm1()
        value = slope - x
    else:
        slope = x * x.exp()
        value = slope - x.expm1()
    return torch.addcmul(value, slope, log_ratio - x), slope
