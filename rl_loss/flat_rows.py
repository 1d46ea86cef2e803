"""The arguments of a head, checked, and its N flat rows; what goes in, and what comes back."""

import copy
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rl_loss.arguments import is_integral, require_count, require_number, require_tensor
from rl_loss.csr import FAILED, NONE, REPLAY, first_row, rows_of_entries, segment_sum
from rl_loss.grad_into import GradInto, check_grad_into
from rl_loss.host import host_sees
from rl_loss.logits import LogitTransform, accumulation_dtype
from rl_loss.support import Support
from rl_loss.validation import check_ids, check_labels, check_recorded
from rl_loss.vocab_parallel import Shard, equal_shard, torch_shard, whole


class HeadInputs(NamedTuple):
    """What a head multiplies, in the order of its gradients."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]

    @property
    def dtype(self) -> torch.dtype:
        """What is added up in, and the dtype of the outputs."""
        return accumulation_dtype(self.hidden, self.weight)

    def cut(self, vocab_size: int) -> "HeadInputs":
        """Without the rows of the weight that are padding (views)."""
        if vocab_size == len(self.weight):
            return self
        bias = None if self.bias is None else self.bias[:vocab_size]
        return HeadInputs(self.hidden, self.weight[:vocab_size], bias)


class Needs(NamedTuple):
    """Which gradients are asked for."""

    hidden: bool
    weight: bool
    bias: bool


class Sums(NamedTuple):
    """Gradients in the making, in the accumulation dtype; None where not needed."""

    hidden: Tensor | None  # [N, H]
    weight: Tensor | None  # [V, H]
    bias: Tensor | None  # [V]


class Upstreams(NamedTuple):
    """The gradient that comes back to each output of a head; None where nothing reads it."""

    logprobs: Tensor | None  # [N]
    support_logprobs: Tensor | None  # [nnz]
    tail_logprobs: Tensor | None  # [N]
    entropy: Tensor | None = None  # [N]
    full_logprobs: Tensor | None = None  # [N]

    @property
    def none(self) -> bool:
        return all(upstream is None for upstream in self)

    def over_v(self) -> "Upstreams":
        """Of rows over the vocabulary, whose full log-probabilities are their log-probabilities."""
        if self.full_logprobs is None:
            return self
        both = self.full_logprobs
        return self._replace(logprobs=both if self.logprobs is None else self.logprobs + both)


def next_record(record: Any, values: Iterator[Any]) -> Any:
    """The next values as such a record; None where there are no more."""
    fields = list(islice(values, len(record._fields)))
    return record(*fields) if fields else None


@dataclass(frozen=True)
class HeadArguments:
    """What a head is called with: the arguments of `fused_lm_head`, checked for their form."""

    hidden: Tensor  # [..., H]
    weight: Tensor  # [V, H]
    labels: Tensor  # [...]
    support: Support | None
    temperature: float | Tensor
    bias: Tensor | None
    softcap: float | None
    logit_scale: float
    active: Tensor | None  # [...] bool
    entropy: str | None
    full: bool
    impl: str
    logits_dtype: torch.dtype | None
    workspace_mib: float
    vocab_size: int | None
    process_group: Any
    sequence_parallel: bool
    grad_into: Tensor | None  # [rows of the weight here, H]
    shard: Shard = field(init=False)
    into: GradInto | None = field(init=False)

    def __post_init__(self) -> None:
        cut_by_torch = is_dtensor(self.weight) and self.process_group is not None
        if require_tensor("weight", self.weight).dim() != 2:
            raise ValueError(f"weight must be [V, H], got {tuple(self.weight.shape)}")
        weight = self.weight
        rows = len(weight)  # of all ranks, where so cut
        for name in ("weight", "bias"):
            local = local_tensor(name, getattr(self, name), self.process_group)
            object.__setattr__(self, name, local)
        object.__setattr__(self, "shard", _shard(self, rows, cut_by_torch))
        _check_tensors(self)
        _check_options(self)
        object.__setattr__(self, "into", self._into(weight))

    def _into(self, weight: Tensor) -> GradInto | None:
        """Where the gradient of the weight, as it was given, goes; None: to autograd."""
        if self.grad_into is None:
            return None
        if is_dtensor(self.grad_into):
            raise ValueError("grad_into must be a plain tensor, this rank's rows, got a DTensor")
        check_grad_into(self.grad_into, self.weight, weight.requires_grad)
        if is_dtensor(weight):  # which would be given zeros where it has no gradient
            local = self.weight.detach().requires_grad_(weight.requires_grad)
            object.__setattr__(self, "weight", local)
        return GradInto(self.grad_into, self.weight)

    def with_active(self, active: Tensor) -> "HeadArguments":
        """The same, checked already, with another mask."""
        other = copy.copy(self)
        object.__setattr__(other, "active", active)
        return other

    @property
    def n(self) -> int:
        return self.labels.numel()

    @property
    def ids(self) -> int:
        """V: the rows of the weight, of all ranks', that are ids."""
        return self.shard.vocab_size

    @property
    def inputs(self) -> HeadInputs:
        """Of this rank: with `sequence_parallel` its rows of the hidden states alone."""
        hidden = self.hidden.reshape(-1, self.hidden.shape[-1])
        return HeadInputs(hidden, self.weight, self.bias)

    @property
    def transform(self) -> LogitTransform:
        return logit_transform(self.softcap, self.logit_scale, self.logits_dtype is not None)

    @property
    def replay_over_v(self) -> bool:
        """Whether REPLAY rows are computed over the vocabulary as well."""
        return self.full or self.entropy == "full"

    @property
    def on_kernels(self) -> bool:
        """Whether the Triton kernels compute the head; what cannot run raises."""
        if self.impl not in ("auto", "reference", "triton"):
            raise ValueError(f'impl must be "auto", "reference" or "triton", got {self.impl!r}')
        device = self.hidden.device.type
        if self.impl == "reference" or (self.impl == "auto" and device == "cpu"):
            return False
        if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                f"impl={self.impl!r} needs tensors on a CUDA device, got {device}: "
                'use impl="auto" on the CPU, "reference" elsewhere'
            )
        return True

    def support_or_empty(self) -> Support:
        """The support, on the device of the hidden states; rows of kind NONE where not given."""
        if self.support is not None:
            return self.support
        return Support.empty(self.n).to(self.hidden.device, non_blocking=True)

    def active_on_device(self) -> Tensor:
        """`[...]` bool."""
        if self.active is None:
            return torch.ones(self.labels.shape, dtype=torch.bool, device=self.hidden.device)
        return self.active.to(self.hidden.device, non_blocking=True)


class FlatRows(NamedTuple):
    """N flat rows on one device, with neutral values where a row is inactive."""

    labels: Tensor  # [N] int64, in [0, V)
    temperature: Tensor  # [N] in the accumulation dtype
    active: Tensor  # [N] bool
    broken: Tensor  # [N] bool: active, but breaks a rule that only the device could see
    ids: Tensor  # [nnz] int32
    known: Tensor  # [nnz] bool
    offsets: Tensor  # [N + 1] int64
    kind: Tensor  # [N] int8

    @property
    def n(self) -> int:
        return len(self.labels)

    @property
    def entry_rows(self) -> Tensor:
        """The row of each entry, `[nnz]` int64."""
        return rows_of_entries(self.offsets, len(self.ids))

    def replayed(self) -> Tensor:
        """The rows that are normalised over their support, `[G]` int64."""
        return self._where(self.kind == REPLAY)

    def over_v(self) -> Tensor:
        """The rows that are normalised over the vocabulary, `[D]` int64."""
        return self._where(self.kind != REPLAY)

    def _where(self, mask: Tensor) -> Tensor:
        return (mask & self.active & ~self.broken).nonzero()[:, 0]

    def usable_entries(self) -> Tensor:
        """Entries that a loss may read, `[nnz]` bool."""
        usable = self.active & ~self.broken & (self.kind > NONE)
        return usable[self.entry_rows] & self.known

    def without_entries(self) -> "FlatRows":
        """The same rows without evidence."""
        return self._replace(
            ids=self.ids[:0],
            known=self.known[:0],
            offsets=torch.zeros_like(self.offsets),
            kind=torch.zeros_like(self.kind),
        )

    def entries(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The entries of some rows: their numbers and each one's place in `rows`, both `[E]`."""
        counts = self.offsets.diff()[rows]
        places = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), counts)
        within = torch.arange(len(places), device=rows.device) - (counts.cumsum(0) - counts)[places]
        return self.offsets[rows][places] + within, places


def flat_rows(given: HeadArguments) -> FlatRows:
    """Checks the values that the host sees; flattens to N rows, neutral where inactive."""
    n, support, active = given.n, given.support_or_empty(), given.active
    labels = given.labels.reshape(n)
    if active is None or active.device.type == "cpu":
        check_recorded(support, active)
    on_device = given.active_on_device().reshape(n)
    temperature = _temperatures(given, on_device)
    if host_sees(labels.device):
        check_ids(support, given.ids, on_device)
        check_labels(labels, given.ids, support, on_device)
        broken = torch.zeros(n, dtype=torch.bool)
    else:
        broken = on_device & _breaks_a_rule(labels, support, given.ids, temperature)
    usable = on_device & ~broken
    return FlatRows(
        labels=torch.where(usable, labels, 0).long(),
        temperature=torch.where(usable, temperature, 1.0),
        active=on_device,
        broken=broken,
        ids=support.ids,
        known=support.known,
        offsets=support.offsets,
        kind=support.kind,
    )


def _temperatures(given: HeadArguments, on: Tensor) -> Tensor:
    """`[N]`; NaN where a device holds what is no temperature."""
    temperature, dtype = given.temperature, given.inputs.dtype
    if not isinstance(temperature, Tensor):
        return torch.full((len(on),), float(temperature), dtype=dtype, device=on.device)
    temperature = temperature.to(dtype).expand(given.labels.shape).reshape(-1)
    good = (temperature > 0) & (temperature < torch.inf) & (1 / temperature < torch.inf)
    bad = on & ~good
    if host_sees(temperature.device) and bad.any():
        row = first_row(bad)
        raise ValueError(
            f"temperature must be above 0 and finite, got {float(temperature[row])} in row {row}"
        )
    return torch.where(good, temperature, torch.nan)


def _breaks_a_rule(
    labels: Tensor, support: Support, vocab_size: int, temperature: Tensor
) -> Tensor:
    """The rows that break a rule which only the device can see, `[N]`."""
    rows, n = support.entry_rows, len(labels)
    outside = segment_sum((support.ids >= vocab_size).int(), rows, n) > 0
    held = segment_sum((support.ids == labels[rows]).int(), rows, n) > 0
    kind = support.kind
    bad = (labels < 0) | (labels >= vocab_size) | temperature.isnan() | outside
    bad |= (kind == FAILED) | ((kind == REPLAY) & ~held)
    return bad | ((kind > NONE) & (support.offsets.diff() == 0))


def rows_over_v(given: HeadArguments, support: Support, plan_rows: Tensor, replay: bool) -> Tensor:
    """The rows that are normalised over the vocabulary, `[D]` int64 on the device, with `replay`
    REPLAY rows among them; `plan_rows` are those without them that the plan names.

    A mask on the device costs a sync where there are any; one on the host does not.
    """
    active = given.active
    if not replay and (active is None or len(plan_rows) == 0):
        return plan_rows
    rows = host_rows_over_v(support, active, replay).to(support.device, non_blocking=True)
    if active is not None and active.device.type != "cpu" and len(rows):
        rows = rows[active.reshape(-1)[rows]]
    return rows


def host_rows_over_v(support: Support, active: Tensor | None, replay: bool = False) -> Tensor:
    """These rows as far as the host knows them, `[D]` int64 on the host; with `replay` REPLAY rows
    are among them."""
    kind = support.host.kind
    wanted = kind >= NONE if replay else (kind >= NONE) & (kind != REPLAY)
    if active is not None and active.device.type == "cpu":
        wanted = wanted & active.reshape(-1)
    return wanted.nonzero()[:, 0]


# --- checks of form ---


def is_dtensor(value: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_tensor(name: str, tensor: Any, group: Any = None) -> Any:
    """The tensor itself, or what a DTensor holds here: a replicated one, or with a `group` one that
    is cut by its rows over that very group. Any other is refused."""
    if not is_dtensor(tensor):
        return tensor
    placements, mesh = tensor.placements, tensor.device_mesh
    if group is None:
        if not all(placement.is_replicate() for placement in placements):
            raise ValueError(
                f"{name} must not be a sharded DTensor, got placements {placements}: call the "
                "head inside its FSDP module, where the weight is gathered, or give the "
                "process_group over which the vocabulary is split"
            )
    elif not (
        mesh.ndim == 1
        and placements[0].is_shard(0)
        and dist.get_process_group_ranks(mesh.get_group()) == dist.get_process_group_ranks(group)
    ):
        raise ValueError(
            f"{name} must be cut by its rows over process_group alone, got placements "
            f"{placements} over {mesh}: call the head inside its FSDP module, where the rest is "
            "gathered"
        )
    return tensor.to_local()


def _shard(given: HeadArguments, rows: int, cut_by_torch: bool) -> Shard:
    """Which ids are here; `rows` of the weight, of all ranks' where torch has cut it."""
    group, vocab_size = given.process_group, given.vocab_size
    if group is None:
        if given.sequence_parallel:
            raise ValueError("sequence_parallel needs a process_group")
        check_vocab_size(vocab_size, rows)
        return whole(rows if vocab_size is None else int(vocab_size))
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"process_group must be a ProcessGroup, got {type(group).__name__}")
    all_rows = rows if cut_by_torch else rows * dist.get_world_size(group)
    check_vocab_size(vocab_size, all_rows)
    v = all_rows if vocab_size is None else int(vocab_size)
    cut = torch_shard if cut_by_torch else equal_shard
    return cut(rows, v, group, bool(given.sequence_parallel))


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


def check_vocab_size(vocab_size: int | None, rows: int | None = None) -> None:
    """Refuses what is no size, or one that the rows of the weight do not hold."""
    if vocab_size is None:
        return
    require_count("vocab_size", vocab_size, 1)
    if rows is not None and vocab_size > rows:
        raise ValueError(f"vocab_size must be at most the weight's {rows} rows, got {vocab_size}")


def _check_options(given: HeadArguments) -> None:
    if given.entropy not in (None, "support", "full"):
        raise ValueError(f'entropy must be None, "support" or "full", got {given.entropy!r}')
    if not isinstance(given.full, bool):
        raise ValueError(f"full must be True or False, got {given.full!r}")
    if given.logits_dtype not in (None, torch.bfloat16):
        raise ValueError(f"logits_dtype must be None or torch.bfloat16, got {given.logits_dtype}")
    if not 0 < require_number("workspace_mib", given.workspace_mib) < math.inf:
        raise ValueError(f"workspace_mib must be above 0 and finite, got {given.workspace_mib!r}")
    logit_transform(given.softcap, given.logit_scale)
    _check_temperature(given)


def _check_temperature(given: HeadArguments) -> None:
    """Refuses one value that is no temperature, and a tensor of them for its form alone."""
    temperature, shape = given.temperature, given.labels.shape
    if not isinstance(temperature, Tensor):
        value = require_number("temperature", temperature)
        if not 0 < value < math.inf or 1 / value == math.inf:
            raise ValueError(f"temperature must be above 0 and finite, got {temperature!r}")
        return
    if temperature.requires_grad:
        raise ValueError("temperature must not require a gradient: the head gives it none")
    if temperature.dtype in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"temperature must be float32 or float64, got {temperature.dtype}: was it cast by "
            "mixed precision? FSDP2 casts a module's inputs unless its MixedPrecisionPolicy has "
            "cast_forward_inputs=False"
        )
    if temperature.device != given.hidden.device:
        raise ValueError(
            f"temperature must be on {given.hidden.device} as hidden, got {temperature.device}"
        )
    if temperature.dim() and temperature.shape != shape:
        raise ValueError(
            f"temperature must be one value or {tuple(shape)}, got {tuple(temperature.shape)}"
        )


def _check_tensors(given: HeadArguments) -> None:
    """Refuses arguments whose types, shapes, dtypes or devices do not fit together."""
    hidden, weight, labels = given.hidden, given.weight, given.labels
    support, bias, active = given.support, given.bias, given.active
    for name, value in {"hidden": hidden, "weight": weight, "labels": labels}.items():
        require_tensor(name, value)
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
    shape = hidden.shape[:-1]
    if given.sequence_parallel:
        shape = torch.Size((shape[0] * given.shard.ranks, *shape[1:]))
    if labels.shape != shape:
        raise ValueError(f"labels must be {tuple(shape)} as hidden, got {tuple(labels.shape)}")
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
