"""The kept ids of an answer's tokens, and what its log-probabilities say of them."""

import math
from collections.abc import Iterable, Mapping
from reprlib import repr as short
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_loss.csr import first_row, offsets_of, rows_at
from rl_loss.engine_lists import (
    INTS,
    REALS,
    check_range,
    column,
    is_flat,
    is_list,
    ragged,
    read,
    read_top,
    vector,
)
from rl_loss.packing import UNKNOWN_LOGPROB

_ASK = "was the sampling mask asked for (return_sampling_mask)?"


class KeptIds(NamedTuple):
    """The kept ids of N tokens, one token after another."""

    ids: Tensor  # [nnz] int32
    offsets: Tensor  # [N + 1] int64
    counts: Tensor  # [N] int64
    flat: bool  # whether they came flat: their log-probabilities may then, too


class Entries(NamedTuple):
    """Some of the kept ids: which, and of which token."""

    at: Tensor  # [M] int64
    rows: Tensor  # [M] int64


def read_kept(argument: str, mask: Any) -> KeptIds:
    """From a list of ids a token, or from flat ids with `offsets` or `lengths`."""
    ids, offsets, widths = (read(mask, name) for name in ("token_ids", "offsets", "lengths"))
    ids = mask if ids is None and is_list(mask) else ids
    flat = offsets is not None or widths is not None
    if not is_list(ids) or (not flat and len(ids) and is_flat(ids)):
        got = "one id of each" if is_list(ids) else type(mask).__name__
        raise ValueError(f"{argument} must hold the kept ids of each token, got {got}: {_ASK}")
    if not flat:
        ids, counts = ragged(argument, ids, INTS)
    elif widths is not None:
        ids, counts = column(argument, ids, INTS), vector(f"{argument}: lengths", widths, INTS)
        if (counts < 0).any() or int(counts.sum()) != len(ids):
            raise ValueError(
                f"{argument}: lengths must add up to {len(ids)}, got {short(counts.tolist())}"
            )
    else:
        ids, bounds = column(argument, ids, INTS), vector(f"{argument}: offsets", offsets, INTS)
        counts = bounds.diff()
        if not len(bounds) or bounds[0] != 0 or bounds[-1] != len(ids) or (counts < 0).any():
            raise ValueError(
                f"{argument}: offsets must rise from 0 to {len(ids)}, got {short(bounds.tolist())}"
            )
    bounds = offsets_of(counts)
    check_range(argument, ids, bounds)
    return KeptIds(ids.to(torch.int32), bounds, counts, flat)


def kept_logprobs(name: str, rows: Any, kept: KeptIds) -> Tensor:
    """`[nnz]` float32, NaN where unknown."""
    if kept.flat and is_flat(rows):
        return known_logprobs(name, column(name, rows, REALS), kept).float()
    if any(isinstance(row, Mapping) or hasattr(row, "logprob") for row in rows):
        q = nothing_known(kept)
        found, logprobs = looked_up(name, rows, kept)
        q[found.at] = logprobs.float()
        return q
    q, counts = ragged(name, rows, REALS)
    unequal = counts != kept.counts
    if unequal.any():
        row = first_row(unequal)
        raise ValueError(
            f"{name}[{row}] must have one entry a kept id ({int(kept.counts[row])}), "
            f"got {int(counts[row])}"
        )
    return known_logprobs(name, q, kept).float()


def looked_up(name: str, rows: Iterable[Any], kept: KeptIds) -> tuple[Entries, Tensor]:
    """The kept ids that are among the top ones, and what those say of them, `[M]` float64."""
    ids, of_row, logprobs = read_top(name, rows)
    counts, order = kept.counts, None
    keys = torch.repeat_interleave(
        torch.arange(len(counts)) << 32, counts, output_size=len(kept.ids)
    ).bitwise_or_(kept.ids)
    if (keys[1:] <= keys[:-1]).any():  # engines list the kept ids in ascending order
        keys, order = keys.sort()
    wanted = of_row << 32 | ids
    at = torch.searchsorted(keys, wanted)
    held = (at < len(keys)).nonzero()[:, 0]
    held = held[keys[at[held]] == wanted[held]]
    at = at[held] if order is None else order[at[held]]
    return Entries(at, of_row[held]), known_logprobs(name, logprobs[held], kept, at)


def known_logprobs(name: str, q: Tensor, kept: KeptIds, at: Tensor | None = None) -> Tensor:
    """The log-probabilities of the kept ids `at` (all by default), NaN where unknown; none may be
    infinite."""
    least, most = (float(q.amin()), float(q.amax())) if len(q) else (0.0, 0.0)  # NaN: some is
    if least > UNKNOWN_LOGPROB and most < math.inf:
        return q
    if not (-math.inf < least and most < math.inf) and q.isinf().any():
        infinite = q.isinf().nonzero()[:, 0]
        entries = infinite if at is None else at[infinite]
        first = entries.argmin()
        entry, value = entries[first], float(q[infinite[first]])
        raise ValueError(
            f"{name}: kept id {int(kept.ids[entry])} of row {int(rows_at(kept.offsets, entry))} "
            f"has log-probability {value}: the mask and the log-probabilities are not of one "
            "request"
        )
    return q.masked_fill(q <= UNKNOWN_LOGPROB, math.nan)


def nothing_known(kept: KeptIds) -> Tensor:
    return torch.full(kept.ids.shape, math.nan, dtype=torch.float32)
