"""The arguments of a head, checked and made into flat rows that are safe to compute."""

import math
import os
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rl_loss.arguments import is_integral, require_number, require_tensor
from rl_loss.csr import NONE, REPLAY, RowKind, first_row, segment_sum
from rl_loss.host import host_sees
from rl_loss.logits import LogitTransform, accumulation_dtype
from rl_loss.plan import HeadPlan
from rl_loss.support import Support
from rl_loss.validation import check_ids, check_labels, check_recorded


@dataclass(frozen=True)
class FlatRows:
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


def local_tensor(name: str, tensor: Any) -> Any:
    """The tensor itself, or what a replicated DTensor holds; a sharded one is refused."""
    module = sys.modules.get("torch.distributed.tensor")
    if tensor is None or module is None or not isinstance(tensor, module.DTensor):
        return tensor
    if not all(placement.is_replicate() for placement in tensor.placements):
        raise ValueError(
            f"{name} must not be a sharded DTensor, got placements {tensor.placements}: call the "
            "head inside its FSDP module, where the weight is gathered"
        )
    return tensor.to_local()


def use_kernels(impl: str, device: torch.device) -> bool:
    """Whether the Triton kernels compute the head; what cannot run raises."""
    if impl not in ("auto", "reference", "triton"):
        raise ValueError(f'impl must be "auto", "reference" or "triton", got {impl!r}')
    if impl == "reference" or (impl == "auto" and device.type == "cpu"):
        return False
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        raise ValueError(
            f"impl={impl!r} needs tensors on a CUDA device, got {device.type}: "
            'use impl="auto" on the CPU, "reference" elsewhere'
        )
    return True


def rows_over_v(support: Support, plan: HeadPlan, active: Tensor | None, full: bool) -> Tensor:
    """The rows of which a head takes something over the vocabulary, `[D]` int64 on the device.

    A mask on the device costs a sync where there are any; one on the host does not.
    """
    if not full and (active is None or len(plan.over_v) == 0):
        return plan.over_v
    rows = host_rows_over_v(support, active, full).to(support.device, non_blocking=True)
    if active is not None and active.device.type != "cpu" and len(rows):
        rows = rows[active.reshape(-1)[rows]]
    return rows


def host_rows_over_v(support: Support, active: Tensor | None, full: bool = False) -> Tensor:
    """These rows as far as the host knows them, `[D]` int64 on the host."""
    kind = support.host.kind
    wanted = kind >= NONE if full else (kind >= NONE) & (kind != REPLAY)
    if active is not None and active.device.type == "cpu":
        wanted = wanted & active.reshape(-1)
    return wanted.nonzero()[:, 0]


def active_wide(support: Support, plan: HeadPlan, active: Tensor | None) -> Tensor:
    """The wide rows that a loss may read, as far as the host knows, `[W]` int64."""
    if len(plan.wide) == 0 or active is None or active.device.type != "cpu":
        return plan.wide
    if torch.compiler.is_compiling():  # a shape that depends on values breaks the graph
        return plan.wide
    rows = plan.wide_on_host
    return rows[active.reshape(-1)[rows]].to(support.device, non_blocking=True)


def check_options(
    softcap: float | None,
    logit_scale: float,
    entropy: str | None,
    logits_dtype: torch.dtype | None,
    workspace_mib: float,
    process_group: Any,
) -> LogitTransform:
    if process_group is not None:
        raise ValueError("process_group: vocabulary-parallel weights are not supported yet")
    if entropy not in (None, "support", "full"):
        raise ValueError(f'entropy must be None, "support" or "full", got {entropy!r}')
    if logits_dtype not in (None, torch.bfloat16):
        raise ValueError(f"logits_dtype must be None or torch.bfloat16, got {logits_dtype}")
    if not 0 < require_number("workspace_mib", workspace_mib) < math.inf:
        raise ValueError(f"workspace_mib must be above 0 and finite, got {workspace_mib!r}")
    return logit_transform(softcap, logit_scale, logits_dtype is not None)


def logit_transform(
    softcap: float | None, logit_scale: float, rounded: bool = False
) -> LogitTransform:
    if softcap is not None:
        softcap = require_number("softcap", softcap)
        if not 0 < softcap < math.inf:
            raise ValueError(f"softcap must be above 0 and finite, got {softcap}")
    logit_scale = require_number("logit_scale", logit_scale)
    if not math.isfinite(logit_scale):
        raise ValueError(f"logit_scale must be finite, got {logit_scale}")
    return LogitTransform(softcap, logit_scale, rounded)


def flat_rows(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    support: Support | None,
    temperature: float | Tensor,
    bias: Tensor | None,
    active: Tensor | None,
) -> tuple[Tensor, FlatRows]:
    """Checks the values that the host sees; flattens to N rows, neutral where inactive."""
    shape, n, device = labels.shape, labels.numel(), hidden.device
    vocab_size = weight.shape[0]
    support = Support.empty(n, device=device) if support is None else support
    if active is None or active.device.type == "cpu":
        check_recorded(support, active)
    if active is None:
        active = torch.ones(shape, dtype=torch.bool, device=device)
    on_device = active.to(device, non_blocking=True).reshape(n)
    inv_temperature = _inv_temperature(temperature, hidden, weight, shape, on_device)
    if host_sees(device):
        check_ids(support, vocab_size, on_device)
        check_labels(labels, vocab_size, support, on_device)
        broken = torch.zeros(n, dtype=torch.bool)
    else:
        broken = _broken(labels.reshape(n), support, vocab_size, on_device, inv_temperature)
    usable = on_device & ~broken
    rows = FlatRows(
        labels=torch.where(usable, labels.reshape(n), 0).long(),
        inv_temperature=torch.where(usable, inv_temperature, 1.0),
        active=on_device,
        broken=broken,
        support=support,
    )
    return hidden.reshape(n, hidden.shape[-1]), rows


def check_tensors(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    support: Support | None,
    bias: Tensor | None,
    active: Tensor | None,
) -> None:
    """Refuses arguments whose types, shapes, dtypes or devices do not fit together."""
    for name, given in {"hidden": hidden, "weight": weight, "labels": labels}.items():
        require_tensor(name, given)
    if not (support is None or isinstance(support, Support)):
        raise ValueError(f"support must be a Support, got {type(support).__name__}")
    for name, option in {"bias": bias, "active": active}.items():
        if option is not None:
            require_tensor(name, option)
    for name, tensor in {"hidden": hidden, "weight": weight, "bias": bias}.items():
        if tensor is not None and not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {tensor.dtype}")
    if hidden.dim() < 2 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden and weight must be [..., H] and [V, H], got {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if not is_integral(labels):
        raise ValueError(f"labels must be integers, got {labels.dtype}")
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels must be {tuple(hidden.shape[:-1])} as hidden, got {tuple(labels.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{weight.shape[0]}], got {tuple(bias.shape)}")
    if support is not None and len(support) != labels.numel():
        raise ValueError(f"support must have {labels.numel()} rows, got {len(support)}")
    if active is not None and (active.dtype != torch.bool or active.shape != labels.shape):
        raise ValueError(
            f"active must be bool {tuple(labels.shape)}, got {active.dtype} {tuple(active.shape)}"
        )
    others: dict[str, Any] = {"weight": weight, "labels": labels, "support": support, "bias": bias}
    for name, value in others.items():
        if value is not None and value.device != hidden.device:
            raise ValueError(f"{name} must be on {hidden.device} as hidden, got {value.device}")
    if active is not None and active.device.type != "cpu" and active.device != hidden.device:
        raise ValueError(f"active must be on {hidden.device} or the host, got {active.device}")


def check_temperature(temperature: float) -> float:
    temperature = require_number("temperature", temperature)
    if not 0 < temperature < math.inf or 1 / temperature == math.inf:
        raise ValueError(f"temperature must be above 0 and finite, got {temperature!r}")
    return temperature


def check_temperatures(temperature: Tensor, hidden: Tensor, shape: torch.Size) -> None:
    """Refuses a tensor of temperatures for its form alone."""
    if temperature.requires_grad:
        raise ValueError("temperature must not require a gradient: the head gives it none")
    if temperature.device != hidden.device:
        raise ValueError(
            f"temperature must be on {hidden.device} as hidden, got {temperature.device}"
        )
    if temperature.dim() and temperature.shape != shape:
        raise ValueError(
            f"temperature must be one value or {tuple(shape)}, got {tuple(temperature.shape)}"
        )


def _inv_temperature(
    temperature: float | Tensor, hidden: Tensor, weight: Tensor, shape: torch.Size, on: Tensor
) -> Tensor:
    """`1 / T`, `[N]`; a bad T on a device gives NaN."""
    dtype = accumulation_dtype(hidden, weight)
    if not isinstance(temperature, Tensor):
        inv = 1.0 / check_temperature(temperature)
        return torch.full((len(on),), inv, dtype=dtype, device=hidden.device)
    check_temperatures(temperature, hidden, shape)
    temperature = temperature.to(dtype).expand(shape).reshape(-1)
    good = (temperature > 0) & (temperature < torch.inf)
    bad = on & ~good
    if host_sees(temperature.device) and bad.any():
        row = first_row(bad)
        raise ValueError(
            f"temperature must be above 0 and finite, got {float(temperature[row])} in row {row}"
        )
    return torch.where(good, 1.0 / torch.where(good, temperature, 1.0), torch.nan)


def _broken(
    labels: Tensor, support: Support, vocab_size: int, active: Tensor, inv_temperature: Tensor
) -> Tensor:
    """The active rows that break a rule which only the device can see, `[N]`."""
    rows, n = support.entry_rows, len(labels)
    outside = segment_sum((support.ids >= vocab_size).int(), rows, n) > 0
    held = segment_sum((support.ids == labels[rows]).int(), rows, n) > 0
    kind = support.kind
    bad = (labels < 0) | (labels >= vocab_size) | inv_temperature.isnan() | outside
    bad |= (kind == RowKind.FAILED) | ((kind == RowKind.REPLAY) & ~held)
    bad |= (kind > RowKind.NONE) & (support.offsets.diff() == 0)
    return active & bad
