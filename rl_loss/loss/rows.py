"""A loss's tensors made safe: flat rows and entries, neutral wherever a value must not matter."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import repeat
from torch import Tensor

from rl_loss.csr import DRAWS, HEAD, NONE, REPLAY, TOLERANCE, rows_of_entries
from rl_loss.loss.tensors import LossTensors

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


def read_tokens(given: LossTensors) -> Tokens:
    """The rows, detached, in the dtype of the loss."""
    mask, dtype = given.mask, given.dtype

    def read(value: Tensor) -> Tensor:
        return torch.where(mask, value.detach().to(dtype), 0.0).reshape(-1)

    weights = given.weights
    return Tokens(
        mask=mask.reshape(-1),
        log_p=read(given.log_p),
        log_q=read(given.log_q),
        advantages=read(given.advantages),
        weights=read(torch.ones_like(mask, dtype=dtype) if weights is None else weights),
        ref=None if given.ref is None else read(given.ref),
    )


def read_entries(given: LossTensors, tokens: Tokens) -> SupportEntries:
    """The support entries, flat with offsets or padded, detached."""
    n, dtype, device = given.n, given.dtype, given.mask.device
    kind, mass = _kind_and_mass(given)
    kind = torch.where(tokens.mask, kind, NONE)
    if given.support_log_p is None or given.support_log_q is None or given.nnz == 0:
        return _no_entries(kind, tokens)
    layout = _layout(given)
    valid = layout.at(tokens.mask & (kind > NONE))
    if given.valid is not None:
        valid = given.valid.reshape(-1) & valid
    log_p = torch.where(valid, given.support_log_p.detach().reshape(-1).to(dtype), 0.0)
    log_q = torch.where(valid, given.support_log_q.detach().reshape(-1).to(dtype), 0.0)
    size = layout.sum(valid.to(dtype))
    usable = size > 0
    modelled = usable & (kind != DRAWS)
    q_tail = torch.zeros(n, dtype=dtype, device=device) if mass is None else mass
    q_tail = torch.where(modelled, q_tail, 0.0)
    wanted = modelled & ((q_tail > 0) | (kind == HEAD))
    log_p_tail = _trainer_tail(given, log_p, valid, layout, wanted)
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
        tail_given=given.tail_log_p is not None,
    )


def _no_entries(kind: Tensor, tokens: Tokens) -> SupportEntries:
    """Of rows without a single entry, in few launches."""
    zero, never = torch.zeros_like(tokens.log_p), torch.zeros_like(kind, dtype=torch.bool)
    none, n = zero[:0], len(zero)
    bounds = torch.zeros(n + 1, dtype=torch.int64, device=zero.device)
    return SupportEntries(
        valid=never[:0],
        log_p=none,
        log_q=none,
        layout=Layout(n, 0, bounds[:0], bounds),
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


def _layout(given: LossTensors) -> Layout:
    offsets, nnz = given.offsets, given.nnz
    if offsets is None:
        return Layout(given.n, nnz)
    return Layout(given.n, nnz, rows_of_entries(offsets, nnz), offsets)


def _kind_and_mass(given: LossTensors) -> tuple[Tensor, Tensor | None]:
    """Both `[N]`; without a kind a row is HEAD where its tail has mass."""
    mass, kind = given.tail_mass, given.kind
    mass = None if mass is None else mass.detach().reshape(-1).to(given.dtype)
    if kind is not None:
        return kind.reshape(-1), mass
    replay = torch.full((given.n,), REPLAY, dtype=torch.int8, device=given.mask.device)
    if mass is None:
        return replay, None
    return torch.where(mass > 0, HEAD, replay).to(torch.int8), mass


def _trainer_tail(
    given: LossTensors, log_p: Tensor, valid: Tensor, layout: Layout, wanted: Tensor
) -> Tensor:
    """`log p_tail`, `[N]`: as given, or from the known ids where nothing was given."""
    if given.tail_log_p is not None:
        return given.tail_log_p.detach().reshape(-1).to(log_p.dtype)
    rest = 1 - layout.sum(torch.where(valid, log_p.exp(), 0.0))
    some = wanted & (rest > 8 * torch.finfo(log_p.dtype).eps)
    return torch.where(some, torch.where(some, rest, 1.0).log(), -torch.inf)
