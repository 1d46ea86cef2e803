"""What the kernels of a head are given and give; the names of their codes."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from rl_loss.csr import DRAWS, FAILED, HEAD, NONE, REPLAY
from rl_loss.flat_rows import HeadArguments, HeadInputs, rows_over_v
from rl_loss.plan import HeadPlan, forward_slots
from rl_loss.support import Support
from rl_loss.validation import check_recorded
from rl_loss.vocab_parallel import Shard

ACC_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}

# Kinds of rows, as kernels read them.
KIND_FAILED, KIND_NONE, KIND_REPLAY, KIND_HEAD, KIND_DRAWS = (
    tl.constexpr(kind) for kind in (FAILED, NONE, REPLAY, HEAD, DRAWS)
)

# What the forward found a row to be, one code in `RowOutputs.state`.
REPLAYED = tl.constexpr(0)  # over its support, of several ids
BROKEN = tl.constexpr(1)  # active, and breaks a rule: NaN
UNREAD = tl.constexpr(2)  # inactive
ONE_ID = tl.constexpr(3)  # over its support of one id: log p is 0, without a gradient
OVER_V = tl.constexpr(4)  # over the vocabulary

# Of which distribution the entropy is.
ENTROPY = {None: 0, "support": 1, "full": 2}


class RowTensors(NamedTuple):
    """The rows of a batch and their entries; what only the device can see is not checked yet."""

    labels: Tensor  # [...] N in all
    temperature: Tensor | None  # [N], None where all rows have one
    active: Tensor | None  # [N] bool, None: all
    ids: Tensor  # [nnz] int32
    known: Tensor  # [nnz] bool
    offsets: Tensor  # [N + 1] int64
    kind: Tensor  # [N] int8
    tiles: Tensor  # [T] int64: of the REPLAY rows whose logits are gathered
    wide: Tensor  # [W] int64: the REPLAY rows whose logits come of blocks over the vocabulary
    over_v: Tensor  # [D] int64: the rows of which something is taken over the vocabulary
    normalised_v: Tensor  # int64: those of them that are normalised over it, or more


class HeadScalars(NamedTuple):
    """What is no tensor."""

    temperature: float  # where all rows have one
    softcap: float  # 0: none
    scale: float
    rounded: bool  # logits to bfloat16
    vocab_size: int  # rows of the weight that are ids
    max_width: int  # of the support's rows, or more
    any_head: bool  # some row is HEAD
    any_draws: bool  # some row is DRAWS: an id may stand in it twice
    entropy: int  # 0: none, 1: of what the row is normalised over, 2: over the vocabulary
    full: bool  # log-probabilities of the labels over the vocabulary as well
    workspace: int  # bytes of a block of logits


class RowOutputs(NamedTuple):
    """What the forward gives: the five outputs, and what the backward reads beside them."""

    logprobs: Tensor  # [...] as the labels
    support_logprobs: Tensor  # [nnz]
    tail_logprobs: Tensor  # [...]
    entropy: Tensor  # [...], empty where not asked for
    full_logprobs: Tensor  # [...], likewise
    valid: Tensor  # [nnz] bool
    lse: Tensor  # [N]
    lse_v: Tensor  # [N], empty where no row is over the vocabulary
    state: Tensor  # [N] uint8
    hot_slots: Tensor  # [V] int32 see `HotIds`; empty where the forward looks for no frequent ids
    hot_ids: Tensor  # [S] int32
    hot_used: Tensor  # [1] int32

    @classmethod
    def new(cls, inputs: HeadInputs, rows: RowTensors, scalars: HeadScalars) -> "RowOutputs":
        """Not written yet."""
        new, shape, n = inputs.hidden.new_empty, rows.labels.shape, rows.labels.numel()
        dtype, nnz = inputs.dtype, rows.ids.shape[0]
        slots = 0
        if may_be_hot(inputs, scalars):
            slots = forward_slots(n, nnz, rows.tiles.shape[0], inputs.hidden.shape[1])
        v, one = (inputs.weight.shape[0], 1) if slots else (0, 0)
        return cls(
            logprobs=new(shape, dtype=dtype),
            support_logprobs=new(nnz, dtype=dtype),
            tail_logprobs=new(shape, dtype=dtype),
            entropy=new(shape if scalars.entropy else (0,), dtype=dtype),
            full_logprobs=new(shape if scalars.full else (0,), dtype=dtype),
            valid=new(nnz, dtype=torch.bool),
            lse=new(n, dtype=dtype),
            lse_v=new(n if rows.over_v.shape[0] else 0, dtype=dtype),
            state=new(n, dtype=torch.uint8),
            hot_slots=new(v, dtype=torch.int32),
            hot_ids=new(slots, dtype=torch.int32),
            hot_used=new(one, dtype=torch.int32),
        )

    @property
    def hot(self) -> "HotIds | None":
        """The frequent ids, where the forward looks for them."""
        return HotIds(self.hot_slots, self.hot_ids, self.hot_used) if len(self.hot_ids) else None


class HotIds(NamedTuple):
    """The most frequent ids of a batch, of those whose rows of the weight are here; a slot each."""

    slots: Tensor  # [V] int32, -1 where an id is not frequent
    ids: Tensor  # [S] int32, -1 where a slot is not used
    used: Tensor  # [1] int32 how many slots are used, the first ones


def may_be_hot(inputs: HeadInputs, scalars: HeadScalars) -> bool:
    """Whether a product of frequent ids is exact enough, and has a cell for every entry: an id
    that was drawn twice in a row has two entries for one."""
    low = inputs.hidden.dtype == inputs.weight.dtype == torch.bfloat16
    return low and not scalars.any_draws


class OwnEntries(NamedTuple):
    """Of a vocabulary split over ranks: the entries whose ids are here."""

    within: Tensor  # [nnz] int32 their places in the row, from each row's start on
    counts: Tensor  # [N] int32 how many each row has
    batch: Tensor  # [4] int64 what all ranks must have alike


class Logit(NamedTuple):
    """How raw products become logits, as every kernel that makes them is told."""

    bias: Tensor | None  # [V] as `HeadCall.weight`
    temperature: Tensor | None  # [N]
    one_temperature: float  # where all rows have one
    flags: dict[str, object]


@dataclass(frozen=True)
class HeadCall:
    """One call of a head: what every launch of it reads."""

    inputs: HeadInputs  # of this rank, padding of the vocabulary included
    rows: RowTensors
    scalars: HeadScalars
    shard: Shard
    own: OwnEntries | None  # None: all entries are here
    into: Tensor | None = None  # [rows of the weight, H]: what its gradient is added to

    @cached_property
    def n(self) -> int:
        return self.rows.labels.numel()

    @cached_property
    def dtype(self) -> torch.dtype:
        """What is added up in."""
        return self.inputs.dtype

    @property
    def hidden(self) -> Tensor:
        return self.inputs.hidden

    @cached_property
    def weight(self) -> Tensor:
        """`[V, H]`, the rows that are ids; on a rank of several, its own."""
        return self.inputs.cut(self.shard.rows).weight

    @cached_property
    def own_ids(self) -> Tensor:
        """The row of `weight` of each entry `[nnz]`; outside it where that is another rank's."""
        return self.shard.local(self.rows.ids)

    @cached_property
    def logit(self) -> Logit:
        s, temperature = self.scalars, self.rows.temperature
        if self.dtype == torch.float64 and temperature is None:
            # A scalar argument of a kernel is float32.
            temperature = self.hidden.new_full((self.n,), s.temperature, dtype=self.dtype)
        bias = self.inputs.cut(self.shard.rows).bias
        bias = None if bias is None else bias.contiguous()
        flags = {
            "HAS_BIAS": bias is not None,
            "PER_ROW": temperature is not None,
            "SOFTCAP": s.softcap,
            "SCALE": s.scale,
            "ROUND": s.rounded,
            "ACC": ACC_TYPES[self.dtype],
        }
        return Logit(bias, temperature, s.temperature, flags)

    @cached_property
    def active(self) -> Tensor | None:
        """`[N]` uint8, as kernels load it."""
        active = self.rows.active
        return None if active is None else active.view(torch.uint8)

    @cached_property
    def known(self) -> Tensor:
        """`[nnz]` uint8, as kernels load it."""
        return self.rows.known.view(torch.uint8)


def row_tensors(given: HeadArguments, on: Tensor) -> tuple[RowTensors, HeadScalars]:
    """The arguments of a head as its kernels take them; `on` is `active` on the device."""
    n, support = given.n, given.support_or_empty()
    plan = support.plan_for(given.ids)
    if not plan.sound and (given.active is None or given.active.device.type == "cpu"):
        check_recorded(support, given.active)
    one, temperature = 1.0, None
    if isinstance(given.temperature, Tensor):
        temperature = given.temperature.expand(given.labels.shape).reshape(n).contiguous()
    else:
        one = float(given.temperature)
    replay = given.replay_over_v
    over_v = rows_over_v(given, support, plan.over_v, replay)
    normalised_v = over_v
    masked = given.active is not None and given.active.device.type != "cpu"
    if replay and not (masked and len(plan.over_v)):  # which would cost a second sync
        normalised_v = rows_over_v(given, support, plan.over_v, replay=False)
    rows = RowTensors(
        labels=given.labels.contiguous(),
        temperature=temperature,
        active=None if given.active is None else on.reshape(n).contiguous(),
        ids=support.ids,
        known=support.known,
        offsets=support.offsets,
        kind=support.kind,
        tiles=plan.tiles,
        wide=_active_wide(given.active, support, plan),
        over_v=over_v,
        normalised_v=normalised_v,
    )
    scalars = HeadScalars(
        temperature=one,
        softcap=float(given.softcap or 0.0),
        scale=float(given.logit_scale),
        rounded=given.logits_dtype is not None,
        vocab_size=given.ids,
        max_width=plan.max_width,
        any_head=plan.any_head,
        any_draws=plan.any_draws,
        entropy=ENTROPY[given.entropy],
        full=given.full,
        workspace=int(given.workspace_mib * 2**20),
    )
    return rows, scalars


def _active_wide(active: Tensor | None, support: Support, plan: HeadPlan) -> Tensor:
    """The wide rows that a loss may read, as far as the host knows, `[W]` int64."""
    if len(plan.wide) == 0 or active is None or active.device.type != "cpu":
        return plan.wide
    if torch.compiler.is_compiling():  # a shape that depends on values breaks the graph
        return plan.wide
    rows = plan.wide_on_host
    return rows[active.reshape(-1)[rows]].to(support.device, non_blocking=True)
