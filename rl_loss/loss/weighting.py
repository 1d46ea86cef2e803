"""The weight rules: what a loss multiplies a token's score with, `w(log p, log q, A)`.

Each rule is decided in log space on detached values, so that no ratio overflows. The sampled
token, every support entry and the tail go through the same rule.

Sources: ipo and icepop as prime-rl has them; icepop: arXiv 2510.18855.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

RuleFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


class Weights(NamedTuple):
    """A rule's verdict."""

    weight: Tensor  # w, 0 where rejected
    kept: Tensor  # bool


class Rule(Protocol):
    """What a loss asks of a rule; `advantages` are those of the rows, one a token."""

    by_advantage: ClassVar[bool]  # else the advantages that it is given may have any shape

    def weigh(self, log_p: Tensor, log_q: Tensor, advantages: Tensor) -> Weights: ...

    def tail(self, log_p: Tensor, log_q: Tensor, advantages: Tensor) -> Weights:
        """The weight that every token of a modelled tail has, from the sums over the tail."""

    def inexact(self, log_p: Tensor, log_q: Tensor, advantages: Tensor) -> Tensor:
        """Whether some token of a tail with these sums might have another weight."""


@dataclass(frozen=True)
class Ipo:
    """`w = min(r, max_importance_ratio)` if `|p - q| <= eps`, else 0."""

    eps: float
    max_importance_ratio: float
    by_advantage: ClassVar[bool] = False

    def weigh(self, log_p: Tensor, log_q: Tensor, advantages: Tensor) -> Weights:
        kept = (log_p.exp() - log_q.exp()).abs() <= self.eps
        return Weights(torch.where(kept, self._ratio(log_p, log_q), 0.0), kept)

    def tail(self, log_p: Tensor, log_q: Tensor, advantages: Tensor) -> Weights:
        """The difference test is per token: the sums over a tail do not take it."""
        return Weights(self._ratio(log_p, log_q), torch.ones_like(log_p, dtype=torch.bool))

    def inexact(self, log_p: Tensor, log_q: Tensor, advantages: Tensor) -> Tensor:
        """Some token of a tail with these sums might have been rejected."""
        return (log_p.exp() - log_q.exp()).abs() > self.eps

    def _ratio(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return (log_p - log_q).clamp(max=math.log(self.max_importance_ratio)).exp()


@dataclass(frozen=True)
class IcePop:
    """`w = r` if `ratio_low <= r <= ratio_high`, else 0."""

    ratio_low: float
    ratio_high: float
    by_advantage: ClassVar[bool] = False

    def weigh(self, log_p: Tensor, log_q: Tensor, advantages: Tensor) -> Weights:
        log_ratio = log_p - log_q
        low = math.log(self.ratio_low) if self.ratio_low > 0 else -math.inf
        kept = (log_ratio >= low) & (log_ratio <= math.log(self.ratio_high))
        return Weights(torch.where(kept, log_ratio, -torch.inf).exp(), kept)

    def tail(self, log_p: Tensor, log_q: Tensor, advantages: Tensor) -> Weights:
        """Every token of a modelled tail has the ratio of the sums."""
        return self.weigh(log_p, log_q, advantages)

    def inexact(self, log_p: Tensor, log_q: Tensor, advantages: Tensor) -> Tensor:
        return torch.zeros_like(log_p, dtype=torch.bool)


@dataclass(frozen=True)
class Reinforce:
    """`w = 1`."""

    by_advantage: ClassVar[bool] = False

    def weigh(self, log_p: Tensor, log_q: Tensor, advantages: Tensor) -> Weights:
        return Weights(torch.ones_like(log_p), torch.ones_like(log_p, dtype=torch.bool))

    def tail(self, log_p: Tensor, log_q: Tensor, advantages: Tensor) -> Weights:
        return self.weigh(log_p, log_q, advantages)

    def inexact(self, log_p: Tensor, log_q: Tensor, advantages: Tensor) -> Tensor:
        return torch.zeros_like(log_p, dtype=torch.bool)


@dataclass(frozen=True)
class Custom:
    """A caller's `w(log p, log q, A)`; a weight of 0 is a rejection."""

    function: RuleFunction
    by_advantage: ClassVar[bool] = True

    def weigh(self, log_p: Tensor, log_q: Tensor, advantages: Tensor) -> Weights:
        # Copies: they are read again, and a rule that writes into them would change the rest.
        weight = self.function(log_p.clone(), log_q.clone(), advantages.clone())
        if not isinstance(weight, Tensor) or weight.shape != log_p.shape:
            got = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
            raise ValueError(
                f"rule must give one weight a token, {tuple(log_p.shape)} as its log_p, got {got}"
            )
        weight = weight.to(log_p.dtype)
        return Weights(weight, weight != 0)

    def tail(self, log_p: Tensor, log_q: Tensor, advantages: Tensor) -> Weights:
        """Of a token with the ratio of the sums and hardly any mass: a tail has many of them."""
        return self.weigh(log_p - _FAR, log_q - _FAR, advantages)

    def inexact(self, log_p: Tensor, log_q: Tensor, advantages: Tensor) -> Tensor:
        """A token that held the whole tail would have another weight."""
        small = self.tail(log_p, log_q, advantages).weight
        whole = self.weigh(log_p, log_q, advantages).weight
        return (whole - small).abs() > 1e-4 * whole.abs().maximum(small.abs())


_FAR = 40.0  # e^-40 is 4e-18: a difference of such probabilities is none
