"""The weight rules: what a loss multiplies a token's score with, `w(log p, log q)`.

Each rule is decided in log space on detached values, so that no ratio overflows. The sampled
token, every support entry and the tail go through the same rule.

Sources: ipo and icepop as prime-rl has them; icepop: arXiv 2510.18855.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Weights(NamedTuple):
    """A rule's verdict."""

    weight: Tensor  # w, 0 where rejected
    kept: Tensor  # bool


@dataclass(frozen=True)
class Ipo:
    """`w = min(r, max_importance_ratio)` if `|p - q| <= eps`, else 0."""

    eps: float
    max_importance_ratio: float

    def weigh(self, log_p: Tensor, log_q: Tensor) -> Weights:
        kept = (log_p.exp() - log_q.exp()).abs() <= self.eps
        return Weights(torch.where(kept, self._ratio(log_p, log_q), 0.0), kept)

    def tail(self, log_p: Tensor, log_q: Tensor) -> Weights:
        """The difference test is per token: the sums over a tail do not take it."""
        return Weights(self._ratio(log_p, log_q), torch.ones_like(log_p, dtype=torch.bool))

    def inexact(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Whether some token of a tail with these sums might have been rejected."""
        return (log_p.exp() - log_q.exp()).abs() > self.eps

    def _ratio(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return (log_p - log_q).clamp(max=math.log(self.max_importance_ratio)).exp()


@dataclass(frozen=True)
class IcePop:
    """`w = r` if `ratio_low <= r <= ratio_high`, else 0."""

    ratio_low: float
    ratio_high: float

    def weigh(self, log_p: Tensor, log_q: Tensor) -> Weights:
        log_ratio = log_p - log_q
        low = math.log(self.ratio_low) if self.ratio_low > 0 else -math.inf
        kept = (log_ratio >= low) & (log_ratio <= math.log(self.ratio_high))
        return Weights(torch.where(kept, log_ratio, -torch.inf).exp(), kept)

    def tail(self, log_p: Tensor, log_q: Tensor) -> Weights:
        """Every token of a modelled tail has the ratio of the sums."""
        return self.weigh(log_p, log_q)

    def inexact(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return torch.zeros_like(log_p, dtype=torch.bool)


@dataclass(frozen=True)
class Reinforce:
    """`w = 1`."""

    def weigh(self, log_p: Tensor, log_q: Tensor) -> Weights:
        return Weights(torch.ones_like(log_p), torch.ones_like(log_p, dtype=torch.bool))

    def tail(self, log_p: Tensor, log_q: Tensor) -> Weights:
        return self.weigh(log_p, log_q)

    def inexact(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return torch.zeros_like(log_p, dtype=torch.bool)


Rule = Ipo | IcePop | Reinforce
