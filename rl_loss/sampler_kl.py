"""The KL divergence between trainer and sampler, with its gradient through the trainer."""

from typing import Literal

import torch
from torch import Tensor

from rl_loss.evidence import Evidence, Tokens, score

Direction = Literal["forward", "reverse", "squared"]

LOG_RATIO_MAX = 20.0  # where estimates of exp(log r) are cut off: e^20 is 5e8


def sampler_kl(direction: Direction, tokens: Tokens, evidence: Evidence) -> Tensor:
    """KL a row, `[N]`: forward `KL(q || p)`, reverse `KL(p || q)`.

    Rows with known q: the sum over the known ids and the tail as one entry, exact on a complete
    REPLAY row. Other rows: a non-negative estimate from their draws, or from the sampled token.
    "squared" is `(log r)**2` of the sampled token on every row (prime-rl).
    """
    value, slope = _estimate(direction, tokens.log_ratio)
    row = value + slope * score(tokens.log_p)
    if direction == "squared":
        return row
    log_p, log_q = evidence.log_p.detach(), evidence.log_q
    value, slope = _estimate(direction, log_p - log_q)
    drawn = evidence.sum(torch.where(evidence.valid, value + slope * score(evidence.log_p), 0.0))
    drawn = drawn / evidence.size.clamp(min=1)
    value, slope = _exact(direction, log_p, log_q)
    known = evidence.sum(torch.where(evidence.valid, value + slope * score(evidence.log_p), 0.0))
    value, slope = _exact(direction, evidence.log_p_tail.detach(), evidence.log_q_tail)
    tail = value + slope * score(evidence.log_p_tail)
    known = known + torch.where(evidence.has_tail, tail, _one_sided(direction, evidence))
    return torch.where(evidence.modelled, known, torch.where(evidence.drawn, drawn, row))


def _exact(direction: Direction, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """An entry's part of the divergence, and its derivative by log p."""
    if direction == "forward":
        q = log_q.exp()
        return q * (log_q - log_p), -q
    p = log_p.exp()
    return p * (log_p - log_q), p * (log_p - log_q + 1)


def _one_sided(direction: Direction, evidence: Evidence) -> Tensor:
    """The part of a tail on which only one of p and q puts mass, where KL would be infinite.

    The sum over the known ids alone could be negative, and would push p's mass into the tail.
    The unnormalised divergence, `p log(p / q) - p + q` summed, is finite: it adds the mass itself.
    """
    if direction == "reverse":
        lost = evidence.p_tail * (1 + score(evidence.log_p_tail))
        return torch.where(evidence.q_tail > 0, 0.0, lost)
    return torch.where(evidence.p_tail > 0, 0.0, evidence.q_tail)


def _estimate(direction: Direction, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """A sample's non-negative estimate under q, and the derivative by log p that is taken."""
    if direction == "squared":
        return log_ratio.square(), 2 * log_ratio
    x = log_ratio.clamp(max=LOG_RATIO_MAX)
    if direction == "forward":
        return x.expm1() - x, x.expm1()
    return x * x.exp() - x.expm1(), x * x.exp()
