"""The one definition of a logit and its derivative."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitTransform:
    """`z = softcap * tanh((raw + bias) * scale / softcap) / T`, without a cap where None.

    `rounded` rounds to bfloat16 after each step before the division by T, as a bfloat16 head of
    an engine does; the derivative is that of the same steps without the rounding.
    """

    softcap: float | None = None
    scale: float = 1.0
    rounded: bool = False

    def __call__(self, raw: Tensor, bias: Tensor | None, temperature: Tensor) -> Tensor:
        """Raw products to logits; `bias` and `temperature` broadcast against `raw`."""
        z = self._round(raw if bias is None else raw + bias.to(raw.dtype))
        if self.scale != 1.0:
            z = self._round(z * self.scale)
        if self.softcap is not None:
            z = self._round(torch.tanh(self._round(z / self.softcap)))
            z = self._round(self.softcap * z)
        return z / temperature

    def _round(self, z: Tensor) -> Tensor:
        """The values rounded, the gradient passed on as it is."""
        if not self.rounded:
            return z
        return z + (z.detach().to(torch.bfloat16).to(z.dtype) - z.detach())

    def derivative(self, z: Tensor, temperature: Tensor) -> Tensor:
        """`dz / draw` from the logits themselves, in a shape that broadcasts against them."""
        slope = self.scale / temperature
        if self.softcap is not None:
            slope = slope * (1 - (z * temperature / self.softcap).square())
        return slope


def p_log_p(logp: Tensor) -> Tensor:
    """`p log p`, 0 where p is 0 (an id whose bias is -inf)."""
    return logp.exp() * torch.where(logp.isneginf(), 0.0, logp)


def accumulation_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any tensor is, else float32."""
    double = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if double else torch.float32
