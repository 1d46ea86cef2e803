"""The two passes of a loss over its rows and entries: values and slopes, and gradients."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_loss.kernels.launching import launched
from rl_loss.kernels.loss_rows import rows_loss
from rl_loss.kernels.loss_sums import COLUMNS, LARGEST_RATIO, PROGRAMS
from rl_loss.kernels.loss_terms import (
    KL_FORWARD,
    KL_NONE,
    KL_REVERSE,
    KL_SQUARED,
    RULE_ICEPOP,
    RULE_IPO,
    RULE_REINFORCE,
)
from rl_loss.kernels.records import ACC_TYPES
from rl_loss.loss.definition import LossOptions
from rl_loss.loss.rows import LOG_RATIO_MAX
from rl_loss.loss.tensors import LossTensors
from rl_loss.loss.weighting import IcePop, Ipo, Reinforce, Rule


@triton.jit
def _width(offsets, row, N):
    there = row < N
    begin = tl.load(offsets + row, mask=there, other=0)
    return tl.load(offsets + row + 1, mask=there, other=0) - begin


@launched
@triton.jit
def _loss_kernel(
    mask,  # [N] uint8
    log_p,  # [N]
    log_q,  # [N]
    advantages,  # [N]
    weights,  # [N]; None: 1
    ref,  # [N]; None: no reference
    offsets,  # [N + 1] int64; None: no entries
    kind,  # [N]; None: HEAD where a tail has mass, else REPLAY
    tail_mass,  # [N]; None: 0
    tail_log_p,  # [N]; None: from the known ids
    support_log_p,  # [nnz]
    support_log_q,  # [nnz]
    valid,  # [nnz] uint8; None: all
    per_token,  # [N] out
    slopes,  # out: [N] by token, [N] by tail, [nnz] by entry
    sums,  # [COLUMNS, programs] out
    adv_tau,
    kl_tau,
    ref_tau,
    bound,
    limit,
    cap,
    N,
    nnz,
    RULE: tl.constexpr,
    KL: tl.constexpr,
    KEPT_ALONE: tl.constexpr,
    CENTERED: tl.constexpr,
    WITH_REF: tl.constexpr,
    SLOPES: tl.constexpr,
    ENTRY_SLOPES: tl.constexpr,
    EPS: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    WIDE: tl.constexpr,
    ALONE: tl.constexpr,
    ACC: tl.constexpr,
):
    """R rows at a time and W entries of each; rows of more than ALONE entries by themselves, WIDE
    entries at a time."""
    tokens = mask, log_p, log_q, advantages, weights, ref
    evidence = offsets, kind, tail_mass, tail_log_p
    entries = support_log_p, support_log_q, valid
    out = per_token, slopes
    numbers = adv_tau, kl_tau, ref_tau, bound, limit, cap
    total = tl.zeros([COLUMNS], dtype=ACC)
    largest = tl.zeros([COLUMNS], dtype=ACC)
    for tile in range(tl.program_id(0), tl.cdiv(N, R), tl.num_programs(0)):
        row = (tl.zeros([R], dtype=tl.int64) + tile) * R + tl.arange(0, R)
        mine = row < N
        if offsets is not None:
            mine = mine & (_width(offsets, row, N) <= ALONE)
        table = rows_loss(
            row, mine, tokens, evidence, entries, out, numbers, N, nnz,
            RULE, KL, KEPT_ALONE, CENTERED, WITH_REF, SLOPES, ENTRY_SLOPES, EPS, W, ACC,
        )  # fmt: skip
        total += tl.sum(table, axis=0)
        largest = tl.maximum(largest, tl.max(table, axis=0))
    if offsets is not None:
        # Neighbours are often wide together: each goes to another program.
        step = tl.num_programs(0)
        for first in range(tl.program_id(0), N, step * R):
            row = tl.zeros([R], dtype=tl.int64) + first + tl.arange(0, R) * step
            if tl.max(_width(offsets, row, N), axis=0) > ALONE:
                for at in range(0, R):
                    one = tl.zeros([1], dtype=tl.int64) + first + at * step
                    if tl.max(_width(offsets, one, N), axis=0) > ALONE:
                        more = rows_loss(
                            one, one < N, tokens, evidence, entries, out, numbers, N, nnz,
                            RULE, KL, KEPT_ALONE, CENTERED, WITH_REF, SLOPES, ENTRY_SLOPES, EPS,
                            WIDE, ACC,
                        )  # fmt: skip
                        total += tl.sum(more, axis=0)
                        largest = tl.maximum(largest, tl.max(more, axis=0))
    column = tl.arange(0, COLUMNS)
    at = column.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(sums + at, tl.where(column == LARGEST_RATIO, largest, total))


# One shape for all batches: what a row gets does not depend on the rows beside it.
_SHAPE = {"R": 8, "W": 32, "WIDE": 512, "ALONE": 256, "num_warps": 4}
_KLS = {"forward": KL_FORWARD, "reverse": KL_REVERSE, "squared": KL_SQUARED}


class Wanted(NamedTuple):
    """By what the slopes of a loss are wanted."""

    token: bool
    entry: bool
    tail: bool


class RowLosses(NamedTuple):
    """What the rows of a loss give."""

    per_token: Tensor  # [...] as the mask
    slopes: Tensor  # [N] by token, [N] by tail, [nnz] by entry, as far as any are wanted
    sums: Tensor  # [COLUMNS, programs]


def row_losses(given: LossTensors, rule: Rule, options: LossOptions, wanted: Wanted) -> RowLosses:
    """The loss of every row, its slopes and what it adds to the sums: one launch."""
    n, nnz, dtype = given.n, given.nnz, given.dtype
    programs = max(1, min(n, PROGRAMS))
    entries = nnz if wanted.entry else 0
    out = RowLosses(
        given.log_p.new_empty(given.mask.shape, dtype=dtype),
        given.log_p.new_empty(2 * n + entries if any(wanted) else 0, dtype=dtype),
        given.log_p.new_empty((COLUMNS.value, programs), dtype=dtype),
    )
    bound = min(math.log(options.kl_max_ratio), LOG_RATIO_MAX)
    code, *limits = _rule(rule)
    numbers = options.adv_tau, options.kl_tau, options.ref_tau, bound, *limits
    # A scalar argument of a compiled kernel is float32: so is what comes here on a GPU.
    _loss_kernel[(programs,)](
        *_as_loaded(given),
        *out,
        *map(float, numbers),
        n,
        nnz,
        RULE=code.value,
        KL=(_KLS[options.kl] if options.kl_tau != 0 else KL_NONE).value,
        KEPT_ALONE=options.kl_on == "kept",
        CENTERED=bool(options.score_centering),
        WITH_REF=options.ref_tau != 0,
        SLOPES=any(wanted),
        ENTRY_SLOPES=entries > 0,
        EPS=torch.finfo(dtype).eps,
        ACC=ACC_TYPES[dtype],
        **_SHAPE,
    )
    return out


def _rule(rule: Rule) -> tuple[tl.constexpr, float, float]:
    """Its code, `limit` and `cap`."""
    if isinstance(rule, Ipo):
        return RULE_IPO, rule.eps, math.log(rule.max_importance_ratio)
    if isinstance(rule, IcePop):
        low = math.log(rule.ratio_low) if rule.ratio_low > 0 else -math.inf
        return RULE_ICEPOP, low, math.log(rule.ratio_high)
    assert isinstance(rule, Reinforce)
    return RULE_REINFORCE, 0.0, 0.0


def _as_loaded(given: LossTensors) -> list[Tensor | None]:
    """The tensors of a loss in the order of the kernel, one value after the other."""
    some = given.nnz > 0
    tensors = (
        given.mask,
        given.log_p,
        given.log_q,
        given.advantages,
        given.weights,
        given.ref,
        given.offsets if some else None,
        given.kind,
        given.tail_mass if some else None,
        given.tail_log_p if some else None,
        given.support_log_p if some else None,
        given.support_log_q if some else None,
        given.valid if some else None,
    )
    return [None if tensor is None else _plain(tensor) for tensor in tensors]


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


_BLOCK = 1024  # values that a program of the backward takes


class Like(NamedTuple):
    """What a gradient has to be."""

    shape: torch.Size
    dtype: torch.dtype


@launched
@triton.jit(do_not_specialize=["steps"])
def _grads_kernel(
    slopes,  # [N] by token, [N] by tail, [nnz] by entry
    offsets,  # [N + 1] int64
    by_loss,  # [] upstream; None: 0
    by_token,  # [N] upstream; None: 0
    d_token,  # [N] out; None: not wanted, as the others
    d_entry,  # [nnz] out
    d_tail,  # [N] out
    N,
    nnz,
    steps,  # halvings of N until one row is left
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    """Slopes times upstream, a stretch of the rows and one of the entries."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    of_all = tl.zeros([BLOCK], dtype=ACC)
    if by_loss is not None:
        of_all += tl.load(by_loss)
    there = at < N
    upstream = of_all
    if by_token is not None:
        upstream = of_all + tl.load(by_token + at, mask=there, other=0.0)
    if d_token is not None:
        slope = tl.load(slopes + at, mask=there, other=0.0)
        tl.store(d_token + at, upstream * slope, mask=there)
    if d_tail is not None:
        slope = tl.load(slopes + N + at, mask=there, other=0.0)
        tl.store(d_tail + at, upstream * slope, mask=there)
    if d_entry is not None:
        there = at < nnz
        upstream = of_all
        if by_token is not None:
            row, above = tl.zeros_like(at), tl.zeros_like(at) + N
            for _ in range(steps):
                middle = (row + above) // 2
                reached = tl.load(offsets + middle, mask=there, other=0) <= at
                row, above = tl.where(reached, middle, row), tl.where(reached, above, middle)
            upstream = of_all + tl.load(by_token + row, mask=there, other=0.0)
        slope = tl.load(slopes + N + N + at, mask=there, other=0.0)
        tl.store(d_entry + at, upstream * slope, mask=there)


def gradients(
    slopes: Tensor,
    offsets: Tensor | None,  # [N + 1]
    by_loss: Tensor | None,  # [] upstream
    by_token: Tensor | None,  # [...] upstream
    like: list[Like | None],  # by token, entry and tail; None: not wanted
) -> list[Tensor | None]:
    """The gradients, each rounded once: one launch."""
    grads = [one and slopes.new_empty(one.shape, dtype=one.dtype) for one in like]
    nnz = 0 if grads[1] is None else grads[1].numel()
    n = (len(slopes) - nnz) // 2
    if n or nnz:
        _grads_kernel[(-(-max(n, nnz) // _BLOCK),)](
            slopes,
            offsets,
            by_loss,
            None if by_token is None else by_token.contiguous(),
            *grads,
            n,
            nnz,
            max(0, n - 1).bit_length(),
            BLOCK=_BLOCK,
            ACC=ACC_TYPES[slopes.dtype],
            num_warps=4,
        )
    return grads
