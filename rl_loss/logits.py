"""The one definition of a logit, its derivative, and the rows that a head computes."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rl_loss.support import RowKind, Support


@dataclass(frozen=True)
class LogitTransform:
    """`z = softcap * tanh((raw + bias) * scale / softcap) / T`, without a cap where None."""

    softcap: float | None = None
    scale: float = 1.0

    def __call__(self, raw: Tensor, bias: Tensor | None, inv_temperature: Tensor) -> Tensor:
        """Raw products to logits; `bias` and `inv_temperature` broadcast against `raw`."""
        z = raw if bias is None else raw + bias.to(raw.dtype)
        if self.scale != 1.0:
            z = z * self.scale
        if self.softcap is not None:
            z = self.softcap * torch.tanh(z / self.softcap)
        return z * inv_temperature

    def derivative(self, z: Tensor, inv_temperature: Tensor) -> Tensor:
        """`dz / draw` from the logits themselves, in a shape that broadcasts against them."""
        slope = self.scale * inv_temperature
        if self.softcap is not None:
            slope = slope * (1 - (z / (inv_temperature * self.softcap)).square())
        return slope


@dataclass(frozen=True)
class HeadRows:
    """N flat rows on one device, with neutral values where a row is inactive."""

    labels: Tensor  # [N] int64, in [0, V)
    inv_temperature: Tensor  # [N] in the accumulation dtype
    active: Tensor  # [N] bool
    broken: Tensor  # [N] bool: active, but breaks a rule that only the device could see
    support: Support  # N rows

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def gathered(self) -> Tensor:
        """The rows that are normalised over their support, `[G]` int64."""
        return self._where(self.support.kind == RowKind.REPLAY)

    @cached_property
    def dense(self) -> Tensor:
        """The rows that are normalised over the vocabulary, `[D]` int64."""
        return self._where(self.support.kind != RowKind.REPLAY)

    def _where(self, mask: Tensor) -> Tensor:
        return (mask & self.active & ~self.broken).nonzero()[:, 0]

    def entries(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The entries of some rows: their numbers and each one's place in `rows`, both `[E]`."""
        counts = self.support.offsets.diff()[rows]
        places = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), counts)
        within = torch.arange(len(places), device=rows.device) - (counts.cumsum(0) - counts)[places]
        return self.support.offsets[rows][places] + within, places


def accumulation_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any tensor is, else float32."""
    double = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if double else torch.float32
