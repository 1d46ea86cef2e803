"""Loss inputs made safe: flat rows and entries, neutral wherever a value must not matter."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from einops import repeat
from torch import Tensor

from rl_loss.arguments import is_integral, refuse_half, require_tensor
from rl_loss.csr import DRAWS, HEAD, NONE, REPLAY, TOLERANCE, first_row, rows_of_entries
from rl_loss.host import host_sees

LOG_RATIO_MAX = 20.0  # where exp(log r) itself is needed, log r is cut off: e^20 is 5e8


@dataclass(frozen=True)
class Tokens:
    """The N rows of a loss, detached; outside `mask` every value is 0."""

    mask: Tensor  # [N] bool
    log_p: Tensor  # [N]
    log_q: Tensor  # [N]
    advantages: Tensor  # [N]
    weights: Tensor  # [N] W
    ref: Tensor | None  # [N] log-probabilities of a reference

    @property
    def log_ratio(self) -> Tensor:
        return self.log_p - self.log_q


@dataclass(frozen=True)
class Layout:
    """Where the E entries of N rows stand: row after row, or padded `[N, K]`."""

    n: int
    size: int  # E
    rows: Tensor | None = None  # [E] int64 each entry's row; None: padded
    offsets: Tensor | None = None  # [N + 1] int64 their bounds; None: padded

    def sum(self, values: Tensor) -> Tensor:
        """`[E]` to `[N]`, each row in a fixed order."""
        if self.offsets is None:
            return values.reshape(self.n, self.size // max(1, self.n)).sum(-1)
        return torch.segment_reduce(values, "sum", offsets=self.offsets, unsafe=True)

    def at(self, values: Tensor) -> Tensor:
        """`[N]` to `[E]`."""
        return to_entries(values, self.rows, self.size)


@dataclass(frozen=True)
class SupportEntries:
    """The E support entries of these rows, detached; where not `valid` every value is 0."""

    valid: Tensor  # [E] bool
    log_p: Tensor  # [E]
    log_q: Tensor  # [E]
    layout: Layout
    kind: Tensor  # [N] int8
    size: Tensor  # [N] the number of valid entries
    usable: Tensor  # [N] bool: a loss row of which some entry is valid
    log_p_tail: Tensor  # [N], 0 where p puts nothing outside the known ids
    log_q_tail: Tensor  # [N], 0 where q puts nothing there
    has_tail: Tensor  # [N] bool: both put some mass there
    q_tail: Tensor  # [N]
    p_tail: Tensor  # [N]
    bad: Tensor  # [N] bool: loss rows with entries that no number may come of
    tail_given: bool  # else log_p_tail was computed from the known ids

    @property
    def modelled(self) -> Tensor:
        """Rows whose q is known up to the tail model, `[N]`."""
        return self.usable & (self.kind != DRAWS)

    @property
    def drawn(self) -> Tensor:
        return self.usable & (self.kind == DRAWS)

    def sum(self, values: Tensor) -> Tensor:
        """`[E]` to `[N]`."""
        return self.layout.sum(values)

    def at(self, values: Tensor) -> Tensor:
        """`[N]` to `[E]`."""
        return self.layout.at(values)


class Slopes(NamedTuple):
    """Derivatives of each row's loss by its log-probabilities; None: all 0."""

    by_token: Tensor  # [N]
    by_entry: Tensor | None = None  # [E]
    by_tail: Tensor | None = None  # [N]


def to_entries(values: Tensor, rows: Tensor | None, n_entries: int) -> Tensor:
    if rows is None:
        return repeat(values, "n -> (n k)", k=n_entries // max(1, len(values)))
    return values[rows]


def read_tokens(inputs: Any) -> Tokens:
    """The rows of `inputs`, checked for shape."""
    for name in ("loss_mask", "trainer_logprobs", "inference_logprobs", "advantages"):
        require_tensor(name, getattr(inputs, name, None))
    for name in ("trainer_logprobs", "inference_logprobs"):
        if not getattr(inputs, name).is_floating_point():
            raise ValueError(f"{name} must be floating point, got {getattr(inputs, name).dtype}")
    for name in ("inference_logprobs", "ref_logprobs"):
        if getattr(inputs, name, None) is not None:
            refuse_half(name, require_tensor(name, getattr(inputs, name)))
    mask = inputs.loss_mask
    if mask.dtype != torch.bool:
        raise ValueError(f"loss_mask must be bool, got {mask.dtype}")
    log_p = inputs.trainer_logprobs
    dtype = torch.promote_types(log_p.dtype, torch.float32)

    def read(name: str, value: Tensor) -> Tensor:
        if _check_tensor(name, value, mask.device).shape != mask.shape:
            raise ValueError(
                f"{name} must be {tuple(mask.shape)} as loss_mask, got {tuple(value.shape)}"
            )
        return torch.where(mask, value.detach().to(dtype), 0.0).reshape(-1)

    weights, ref = (getattr(inputs, name, None) for name in ("loss_weights", "ref_logprobs"))
    weights = torch.ones_like(mask, dtype=dtype) if weights is None else weights
    return Tokens(
        mask=mask.reshape(-1),
        log_p=read("trainer_logprobs", log_p),
        log_q=read("inference_logprobs", inputs.inference_logprobs),
        advantages=read("advantages", inputs.advantages),
        weights=read("loss_weights", weights),
        ref=None if ref is None else read("ref_logprobs", ref),
    )


def read_entries(inputs: Any, tokens: Tokens) -> SupportEntries:
    """The support entries of `inputs`, flat with offsets or padded, checked for shape."""
    n, dtype, device = len(tokens.mask), tokens.log_p.dtype, tokens.mask.device
    log_p: Any = getattr(inputs, "trainer_support_logprobs", None)
    log_q: Any = getattr(inputs, "sampler_support_logprobs", None)
    if (log_p is None) != (log_q is None):
        raise ValueError(
            "trainer_support_logprobs and sampler_support_logprobs must be given together"
        )
    if log_p is None or log_q is None:
        log_p = log_q = torch.zeros(0, dtype=dtype, device=device)
        rows = torch.zeros(0, dtype=torch.int64, device=device)
        layout = Layout(n, 0, rows, torch.zeros(n + 1, dtype=torch.int64, device=device))
    else:
        layout = _layout(inputs, _check_tensor("trainer_support_logprobs", log_p, device))
    given = getattr(inputs, "support_valid", None)
    valid: Tensor = torch.ones_like(log_p, dtype=torch.bool) if given is None else given
    for name, value in {"sampler_support_logprobs": log_q, "support_valid": valid}.items():
        _check_tensor(name, value, device)
        if value.shape != log_p.shape:
            raise ValueError(
                f"{name} must be {tuple(log_p.shape)} as trainer_support_logprobs, "
                f"got {tuple(value.shape)}"
            )
    refuse_half("sampler_support_logprobs", log_q)
    if valid.dtype != torch.bool:
        raise ValueError(f"support_valid must be bool, got {valid.dtype}")
    kind, mass = _kind_and_mass(inputs, n, dtype, device)
    kind = torch.where(tokens.mask, kind, NONE)
    if layout.size == 0:
        return _no_entries(layout, kind, log_p.detach().reshape(-1).to(dtype))
    valid = valid.reshape(-1)
    valid = valid & layout.at(tokens.mask & (kind > NONE))
    log_p = torch.where(valid, log_p.detach().reshape(-1).to(dtype), 0.0)
    log_q = torch.where(valid, log_q.detach().reshape(-1).to(dtype), 0.0)
    size = layout.sum(valid.to(dtype))
    usable = size > 0
    modelled = usable & (kind != DRAWS)
    q_tail = torch.zeros(n, dtype=dtype, device=device) if mass is None else mass
    q_tail = torch.where(modelled, q_tail, 0.0)
    wanted = modelled & ((q_tail > 0) | (kind == HEAD))
    log_p_tail = _trainer_tail(inputs, log_p, valid, layout, wanted)
    some = modelled & (log_p_tail > -torch.inf)
    p_tail = torch.where(some, log_p_tail, -torch.inf).exp()
    has_tail = some & (q_tail > 0)
    total = q_tail + layout.sum(torch.where(valid, log_q.exp(), 0.0))
    wrong = valid & ~(log_q.isfinite() & (log_q <= TOLERANCE) & log_p.isfinite())
    if layout.rows is not None:  # in padded rows an entry without q cannot be told from padding
        wrong |= ~valid & layout.at(kind == DRAWS)
    bad = (kind < NONE) | (kind > DRAWS) | (layout.sum(wrong.to(dtype)) > 0)
    bad |= modelled & (log_p_tail.isnan() | ~(q_tail >= -TOLERANCE))
    bad |= modelled & ~((total - 1).abs() <= TOLERANCE)
    return SupportEntries(
        valid=valid,
        log_p=log_p,
        log_q=log_q,
        layout=layout,
        kind=kind,
        size=size,
        usable=usable,
        log_p_tail=torch.where(some, log_p_tail, 0.0),
        log_q_tail=torch.where(q_tail > 0, q_tail, 1.0).log(),
        has_tail=has_tail,
        q_tail=q_tail.clamp(min=0),
        p_tail=p_tail,
        bad=bad,
        tail_given=getattr(inputs, "trainer_tail_logprobs", None) is not None,
    )


def _no_entries(layout: Layout, kind: Tensor, none: Tensor) -> SupportEntries:
    """Of rows without a single entry, in few launches; `none` is an empty tensor of their dtype."""
    zero, never = none.new_zeros(layout.n), torch.zeros_like(kind, dtype=torch.bool)
    return SupportEntries(
        valid=none > 0,
        log_p=none,
        log_q=none,
        layout=layout,
        kind=kind,
        size=zero,
        usable=never,
        log_p_tail=zero,
        log_q_tail=zero,
        has_tail=never,
        q_tail=zero,
        p_tail=zero,
        bad=(kind < NONE) | (kind > DRAWS),
        tail_given=True,
    )


def _layout(inputs: Any, log_p: Tensor) -> Layout:
    shape, n = inputs.loss_mask.shape, inputs.loss_mask.numel()
    offsets = getattr(inputs, "support_offsets", None)
    if offsets is not None:
        _check_tensor("support_offsets", offsets, inputs.loss_mask.device)
        if log_p.dim() != 1 or offsets.shape != (n + 1,):
            raise ValueError(
                f"trainer_support_logprobs and support_offsets must be [nnz] and [{n + 1}], got "
                f"{tuple(log_p.shape)} and {tuple(offsets.shape)}"
            )
        if host_sees(offsets.device):
            _check_offsets(offsets, len(log_p))
        offsets = offsets.to(torch.int64).contiguous()
        return Layout(n, len(log_p), rows_of_entries(offsets, len(log_p)), offsets)
    if log_p.dim() != len(shape) + 1 or log_p.shape[:-1] != shape:
        raise ValueError(
            f"trainer_support_logprobs must be [*{tuple(shape)}, K] without support_offsets, "
            f"got {tuple(log_p.shape)}"
        )
    return Layout(n, log_p.numel())


def _check_offsets(offsets: Tensor, nnz: int) -> None:
    if offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise ValueError(f"support_offsets must be integers, got {offsets.dtype}")
    falling = offsets.diff() < 0
    if falling.any():
        row = first_row(falling)
        raise ValueError(
            f"support_offsets must not fall, got {int(offsets[row])}, {int(offsets[row + 1])} "
            f"in row {row}"
        )
    if offsets[0] != 0 or offsets[-1] != nnz:
        raise ValueError(
            f"support_offsets must run from 0 to {nnz}, got {int(offsets[0])} to {int(offsets[-1])}"
        )


def _check_tensor(name: str, value: Any, device: torch.device) -> Tensor:
    if require_tensor(name, value).device != device:
        raise ValueError(f"{name} must be on {device} as loss_mask, got {value.device}")
    return value


def _per_row(inputs: Any, name: str) -> Tensor | None:
    """A field with one value a row: of the shape of `loss_mask`, or `[N]`."""
    value, mask = getattr(inputs, name, None), inputs.loss_mask
    if value is None:
        return None
    if _check_tensor(name, value, mask.device).shape not in (mask.shape, (mask.numel(),)):
        raise ValueError(
            f"{name} must be {tuple(mask.shape)} as loss_mask, or [{mask.numel()}], got "
            f"{tuple(value.shape)}"
        )
    return value


def _kind_and_mass(
    inputs: Any, n: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    mass, kind = _per_row(inputs, "sampler_tail_mass"), _per_row(inputs, "support_kind")
    if kind is not None and not is_integral(kind):
        raise ValueError(f"support_kind must be integers, got {kind.dtype}")
    if mass is not None:
        refuse_half("sampler_tail_mass", mass)
        mass = mass.detach().reshape(-1).to(dtype)
    if kind is not None:
        return kind.reshape(-1), mass
    replay = torch.full((n,), REPLAY, dtype=torch.int8, device=device)
    if mass is None:
        return replay, None
    return torch.where(mass > 0, HEAD, replay).to(torch.int8), mass


def _trainer_tail(
    inputs: Any, log_p: Tensor, valid: Tensor, layout: Layout, wanted: Tensor
) -> Tensor:
    """`log p_tail`, `[N]`: as given, or from the known ids where nothing was given."""
    given = _per_row(inputs, "trainer_tail_logprobs")
    if given is not None:
        return given.detach().reshape(-1).to(log_p.dtype)
    rest = 1 - layout.sum(torch.where(valid, log_p.exp(), 0.0))
    some = wanted & (rest > 8 * torch.finfo(log_p.dtype).eps)
    return torch.where(some, torch.where(some, rest, 1.0).log(), -torch.inf)
