"""The value checks of `Support.validate`: each names the argument, the row and the value."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_loss.arguments import is_integral, refuse_half, require_count, require_tensor
from rl_loss.csr import (
    TOLERANCE,
    RowKind,
    count_by_row,
    entries_of,
    first_row,
    rows_of_entries,
    selected_entries,
)

if TYPE_CHECKING:
    from rl_loss.support import Support

# An engine without weights is seen by its uniform rows. Up to so many ids may well be alike.
_FEW = 8
_UNIFORM_WITHIN = 1e-5
# A sampler that truncates leaves an edge: each of its ids stands at _SHARE or more, all others
# together at _NO_TAIL, which is what the rounding of log-probabilities leaves of 0. The top ids of
# a model that does not truncate end in no such edge: of 1024 real rows (SmolLM2-135M) at six
# temperatures from 1 to 0.05 none did with 8 ids or more, up to one in 40 with 3 or 4, one in 10
# with 2, which few ids to choose from may explain. So rows of 8 ids tell by themselves, those of 3
# to 7 only where no row of the batch has a tail, those of 1 and 2 nothing, nor one row alone.
_NO_TAIL = 1e-5
_SHARE = 1e-3
# So far apart lie no model's logits at a temperature of 1e-3, but those masked with -1e9 do.
_FILLED = -1e6


def _check(bad: Tensor, message: Callable[[int], str]) -> None:
    if bad.any():
        raise ValueError(message(first_row(bad)))


def check_recorded(support: "Support", active: Tensor | None) -> None:
    """Refuses active rows that the sampler failed to record or left empty (host tensors)."""
    kind, widths = support.host.kind, support.host.offsets.diff()
    on = torch.ones(len(kind), dtype=torch.bool) if active is None else active.reshape(-1)
    _check(
        on & (kind == RowKind.FAILED),
        lambda i: (
            f"support: row {i} is active but the sampler failed to record it (count -1); "
            "set it inactive or sample it again"
        ),
    )
    _check(
        on & (kind > RowKind.NONE) & (widths == 0),
        lambda i: f"support: row {i} is active, of kind {RowKind(int(kind[i])).name}, and empty",
    )


def check_labels(
    labels: Tensor, vocab_size: int, support: "Support | None", active: Tensor | None
) -> None:
    """Refuses active labels outside the vocabulary or their REPLAY row (host tensors)."""
    labels = labels.reshape(-1).to(torch.int64)  # a uint8 compares modulo 256
    on = torch.ones_like(labels, dtype=torch.bool) if active is None else active.reshape(-1)
    _check(
        on & ((labels < 0) | (labels >= vocab_size)),
        lambda i: f"labels[{i}] is {int(labels[i])}, outside [0, {vocab_size})",
    )
    if support is None:
        return
    held = torch.zeros_like(on)
    held[entries_of(labels, support.ids, support.offsets)[1]] = True
    widths = support.host.offsets.diff()
    _check(
        on & (support.kind == RowKind.REPLAY) & ~held,
        lambda i: (
            f"labels[{i}] is {int(labels[i])}, which its REPLAY row ({int(widths[i])} ids) "
            "does not hold"
        ),
    )


def check_ids(support: "Support", vocab_size: int, active: Tensor | None) -> None:
    """Refuses ids outside the vocabulary in active rows (host tensors)."""
    if not support.nnz or int(support.ids.amax()) < vocab_size:
        return
    rows = support.entry_rows
    outside = support.ids >= vocab_size
    if active is not None:
        outside &= active.reshape(-1)[rows]
    _check(
        outside,
        lambda e: (
            f"support: id {int(support.ids[e])} in row {int(rows[e])} is outside "
            f"[0, {vocab_size}); was it recorded with another vocabulary?"
        ),
    )


def validate_support(
    support: "Support",
    labels: Tensor,
    vocab_size: int,
    active: Tensor | None,
    inference_logprobs: Tensor | None,
) -> None:
    """See `Support.validate`."""
    require_count("vocab_size", vocab_size, 1)
    support, n = support.to("cpu"), len(support)
    require_tensor("labels", labels)
    for name, tensor in {
        "labels": labels,
        "active": active,
        "inference_logprobs": inference_logprobs,
    }.items():
        if tensor is None:
            continue
        if require_tensor(name, tensor).numel() != n:
            raise ValueError(f"{name} must have {n} rows, got {tuple(tensor.shape)}")
        if name == "inference_logprobs":
            refuse_half(name, tensor)
        if tensor.shape not in (labels.shape, (n,)):
            raise ValueError(
                f"{name} must be {tuple(labels.shape)} as labels, or [{n}], got "
                f"{tuple(tensor.shape)}"
            )
    if not is_integral(labels):
        raise ValueError(f"labels must be integers, got {labels.dtype}")
    if active is not None and active.dtype != torch.bool:
        raise ValueError(f"active must be bool, got {active.dtype}")
    labels = labels.reshape(-1).cpu()
    on = torch.ones(n, dtype=torch.bool) if active is None else active.reshape(-1).cpu()
    check_recorded(support, on)
    check_ids(support, vocab_size, on)
    check_labels(labels, vocab_size, support, on)
    _check_probabilities(support, on)
    _check_uniform(support, vocab_size, on)
    _check_truncated(support, vocab_size, on)
    if inference_logprobs is not None:
        reported = inference_logprobs.detach().reshape(-1).float().cpu()
        _check_reported(support, labels, vocab_size, reported, on)


def _check_probabilities(support: "Support", on: Tensor) -> None:
    kind, rows = support.kind, rows_of_entries(support.offsets, support.nnz)
    logq, tail = support.sampler_logprobs, support.sampler_tail_mass
    read = on[rows] & support.known
    # NaN is neither, so what is usual is whole: then no entry need be looked for.
    usual = bool(support.nnz) and bool(logq.amin() >= _FILLED) and bool(logq.amax() <= TOLERANCE)
    if not usual:
        _check(
            read & ~((logq > -math.inf) & (logq <= TOLERANCE)),
            lambda e: (
                f"sampler_logprobs of id {int(support.ids[e])} in row {int(rows[e])} must be "
                f"finite and at most 0, got {float(logq[e]):.6g}"
            ),
        )
    if (kind == RowKind.DRAWS).any():
        _check(
            on[rows] & (kind[rows] == RowKind.DRAWS) & ~support.known,
            lambda e: f"known must be True for every draw, got False in row {int(rows[e])}",
        )
    if not usual:
        _check(
            read & (kind[rows] == RowKind.REPLAY) & (logq < _FILLED),
            lambda e: (
                f"sampler_logprobs of id {int(support.ids[e])} in row {int(rows[e])} is "
                f"{float(logq[e]):.6g}: was the sampler's mask a finite value instead of -inf?"
            ),
        )
    q = torch.where(read, logq.double().exp(), 0.0)
    total = tail.double().index_add(0, rows, q)

    def why_off(i: int) -> str:
        row = read & (rows == i)
        most = float((q * logq.double().abs())[row].sum())  # moved by a share, log q moves q so
        why = _rounded(logq[row], lambda step: float((total[i] - 1).abs()) <= step * most)
        return "" if why is None else f": {why}"

    sums = on & ((kind == RowKind.REPLAY) | (kind == RowKind.HEAD))
    _check(
        sums & ~((total - 1).abs() <= TOLERANCE),
        lambda i: (
            f"support: the known q and sampler_tail_mass of row {i} must add up to 1 within "
            f"{TOLERANCE}, got {float(total[i] - tail[i]):.6f} + {float(tail[i]):.6f}" + why_off(i)
        ),
    )
    _check(
        sums & ~((tail >= -TOLERANCE) & (tail <= 1 + TOLERANCE)),
        lambda i: f"sampler_tail_mass must be in [0, 1], got {float(tail[i]):.6g} in row {i}",
    )


def _check_uniform(support: "Support", vocab_size: int, on: Tensor) -> None:
    offsets, widths = support.offsets, support.offsets.diff()
    known = count_by_row(support.known, offsets)
    several = (known > 1).nonzero()[:, 0]

    def uniform_over(sizes: Tensor) -> Tensor:
        """Rows of more than one known log q, all of which are -log of their size, `[N]`."""
        rows, level, uniform = several, -sizes.double().log(), torch.zeros_like(on)

        def off(entries: Tensor, of_row: Tensor) -> Tensor:
            gap = (support.sampler_logprobs[entries] - level[of_row]).abs()
            return support.known[entries] & ~(gap < _UNIFORM_WITHIN)

        rows = rows[~off(offsets[rows], rows)]  # most rows' first entry tells
        entries, bounds = selected_entries(offsets, rows)
        of_row = rows[rows_of_entries(bounds, len(entries))]
        uniform[rows] = True
        uniform[of_row[off(entries, of_row)]] = False
        return uniform

    _check(
        on & (known > 1) & (vocab_size > 1) & uniform_over(torch.full_like(widths, vocab_size)),
        lambda i: (
            f"sampler_logprobs of row {i} all are -log V = {-math.log(vocab_size):.4f}: has the "
            "engine loaded its weights?"
        ),
    )
    # One such row among others is a tie; a batch of nothing else is no model's.
    wide = on & (support.kind == RowKind.REPLAY) & (known > _FEW)
    _check(
        wide & (uniform_over(widths) | ~wide).all(),
        lambda i: (
            f"sampler_logprobs of each active REPLAY row of more than {_FEW} known ids are uniform "
            f"over its kept set, -log {int(widths[i])} = {-math.log(int(widths[i])):.4f} in row "
            f"{i}: has the engine loaded its weights?"
        ),
    )


def _check_truncated(support: "Support", vocab_size: int, on: Tensor) -> None:
    head = on & (support.kind == RowKind.HEAD)
    if not head.any():
        return
    rows, zeros = support.entry_rows, torch.zeros(len(on), dtype=torch.float64)
    known = zeros.index_add(0, rows, support.known.double())
    q = torch.where(support.known & on[rows], support.sampler_logprobs.double().exp(), 0.0)
    tail = (1 - zeros.index_add(0, rows, q)).maximum(support.sampler_tail_mass.double())
    least = torch.ones_like(zeros).scatter_reduce(
        0, rows, torch.where(support.known, q, 1.0), "amin"
    )
    edge = head & (2 * known <= vocab_size) & (least >= _SHARE) & (tail <= _NO_TAIL)
    without = not (head & (tail > _NO_TAIL)).any()
    bad = edge & ((known >= _FEW) | ((known > 2) & without))
    _check(
        bad & (bad.sum() > 1),
        lambda i: (
            f"support: the {int(known[i])} known ids of HEAD row {i}, each of q {_SHARE} or more, "
            f"leave no tail, nor do those of {int(bad.sum()) - 1} other active rows: has the "
            "sampler truncated (top_k, top_p, min_p, a grammar)? Its rows are REPLAY then, with "
            "the whole kept set"
        ),
    )


def _check_reported(
    support: "Support", labels: Tensor, vocab_size: int, reported: Tensor, on: Tensor
) -> None:
    _check(
        on & ~((reported > -math.inf) & (reported <= TOLERANCE)),
        lambda i: (
            f"inference_logprobs[{i}] must be finite and at most 0, got {float(reported[i]):.6g}"
        ),
    )
    uniform = (reported + math.log(vocab_size)).abs() < _UNIFORM_WITHIN
    _check(
        on & (on.sum() > 1) & (vocab_size > _FEW) & (uniform | ~on).all(),
        lambda i: (
            f"inference_logprobs of all active rows are -log V = {-math.log(vocab_size):.4f}, "
            f"from row {i} on: has the engine loaded its weights?"
        ),
    )
    entries, rows = entries_of(labels, support.ids, support.offsets)
    logq, given = support.sampler_logprobs[entries], reported[rows]
    bad = on[rows] & support.known[entries] & ((logq - given).abs() > TOLERANCE)
    _check(
        bad,
        lambda e: (
            f"inference_logprobs[{int(rows[e])}] is {float(given[e]):.6f}, but the row's entry of "
            f"its label says {float(logq[e]):.6f}: {_why_apart(given[bad], logq[bad])}"
        ),
    )


def _why_apart(given: Tensor, logq: Tensor) -> str:
    """What can have put all these log-probabilities apart from those of the entries."""
    gap, size = (given - logq).abs(), torch.maximum(given.abs(), logq.abs())

    def explained(step: float) -> bool:
        return bool((gap <= step * size).all())

    rounded = _rounded(given, explained) or _rounded(logq, explained)
    also = ", or computed in half precision" if explained(torch.finfo(torch.bfloat16).eps) else ""
    return rounded or f"raw instead of processed log-probabilities{also}?"


def _rounded(values: Tensor, explained: Callable[[float], bool]) -> str | None:
    """Says in which half precision the values were held: all are its numbers, and rounding by up
    to a share `step` of each has `explained` what is wrong."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(values.to(dtype).float(), values) and explained(torch.finfo(dtype).eps / 2):
            return f"rounded to {dtype} on the way? Keep log-probabilities in float32"
    return None
