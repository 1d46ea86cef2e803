"""The KL divergence between trainer and sampler, with its gradient through the trainer."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rl_loss.loss.rows import Evidence, Tokens

Direction = Literal["forward", "reverse", "squared"]

LOG_RATIO_MAX = 20.0  # where estimates of exp(log r) are cut off: e^20 is 5e8


class Divergence(NamedTuple):
    """KL a row, and its derivatives by the log-probabilities that it is made of."""

    value: Tensor  # [N]
    tokens: Tensor  # [N]
    entries: Tensor | None  # [E], None: all 0
    tails: Tensor | None  # [N]


def sampler_kl(direction: Direction, tokens: Tokens, evidence: Evidence) -> Divergence:
    """Forward `KL(q || p)` or reverse `KL(p || q)` of every row.

    Rows with known q: the sum over the known ids and the tail as one entry, exact on a complete
    REPLAY row. Other rows: a non-negative estimate from their draws, or from the sampled token.
    "squared" is `(log r)**2` of the sampled token on every row (prime-rl).
    """
    value, slope = _estimate(direction, tokens.log_ratio)
    if direction == "squared":
        return Divergence(value, slope, None, None)
    drawn, modelled = evidence.drawn, evidence.modelled
    share = 1 / evidence.size.clamp(min=1)
    estimates = _estimate(direction, evidence.log_p - evidence.log_q)
    exact = _exact(direction, evidence.log_p, evidence.log_q)
    is_drawn, share = evidence.at(drawn), evidence.at(share)
    values, slopes = (
        torch.where(evidence.valid, torch.where(is_drawn, estimate * share, part), 0.0)
        for estimate, part in zip(estimates, exact, strict=True)
    )
    both = _exact(direction, evidence.log_p_tail, evidence.log_q_tail)
    one = _one_sided(direction, evidence)
    tail, tail_slope = (
        torch.where(evidence.has_tail, two, lone) for two, lone in zip(both, one, strict=True)
    )
    known = evidence.sum(values) + torch.where(modelled, tail, 0.0)
    return Divergence(
        value=torch.where(evidence.usable, known, value),
        tokens=torch.where(evidence.usable, 0.0, slope),
        entries=slopes,
        tails=torch.where(modelled, tail_slope, 0.0),
    )


def _exact(direction: Direction, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """An entry's part of the divergence, and its derivative by log p."""
    if direction == "forward":
        q = log_q.exp()
        return q * (log_q - log_p), -q
    p = log_p.exp()
    return p * (log_p - log_q), p * (log_p - log_q + 1)


def _one_sided(direction: Direction, evidence: Evidence) -> tuple[Tensor, Tensor]:
    """The part of a tail on which only one of p and q puts mass, where KL would be infinite.

    The sum over the known ids alone could be negative, and would push p's mass into the tail.
    The unnormalised divergence, `p log(p / q) - p + q` summed, is finite: it adds the mass itself.
    """
    none = torch.zeros_like(evidence.q_tail)
    if direction == "reverse":
        lost = torch.where(evidence.q_tail > 0, none, evidence.p_tail)
        return lost, lost
    return torch.where(evidence.p_tail > 0, none, evidence.q_tail), none


def _estimate(direction: Direction, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """A sample's non-negative estimate under q, and the derivative by log p that is taken."""
    if direction == "squared":
        return log_ratio.square(), 2 * log_ratio
    x = log_ratio.clamp(max=LOG_RATIO_MAX)
    if direction == "forward":
        return x.expm1() - x, x.expm1()
    return x * x.exp() - x.expm1(), x * x.exp()
