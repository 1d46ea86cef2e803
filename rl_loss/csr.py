"""Ragged rows: their kinds, their bounds, what the host knows of both, and sums by row."""

from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.serialization import add_safe_globals


class RowKind(IntEnum):
    """What a row's ids are, and so over what the trainer normalises it."""

    FAILED = -1  # the sampler could not record the row: an error where a loss reads it
    NONE = 0  # no evidence: normalised over the vocabulary, not centered
    REPLAY = 1  # the whole kept set, unique, with the label: normalised over the set
    HEAD = 2  # the top ids of an untruncated distribution, unique: over the vocabulary
    DRAWS = 3  # i.i.d. draws from the sampler, repeats kept: over the vocabulary

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """By its number: Python 3.11.2, for one, would have the name looked up, which torch does
        not trust."""
        return type(self), (int(self),)


add_safe_globals([RowKind])  # for torch.load with weights_only, its default

# As plain ints: inside torch.compile a tensor equals no enum, in silence.
FAILED, NONE, REPLAY, HEAD, DRAWS = (int(kind) for kind in RowKind)


# How far probabilities that a sampler reports may be from adding up to 1, and a sampled token's
# entry from the log-probability reported for it.
TOLERANCE = 1e-3


class HostFacts(NamedTuple):
    """What the host knows of a support wherever its tensors are (CPU tensors)."""

    offsets: Tensor  # [N + 1] int64
    kind: Tensor  # [N] int8
    complete: Tensor  # [N] bool: the row has entries and q is known for each


def first_row(bad: Tensor) -> int:
    """The index of the first True of a host mask."""
    return int(bad.to(torch.uint8).argmax())


def rows_of_entries(offsets: Tensor, nnz: int) -> Tensor:
    """The row of each entry, `[nnz]` int64, without a sync."""
    rows = torch.arange(len(offsets) - 1, device=offsets.device)
    return torch.repeat_interleave(rows, offsets.diff(), output_size=nnz)


def rows_at(offsets: Tensor, entries: Tensor) -> Tensor:
    """The rows of some entries `[M]`: what `rows_of_entries` says of them, without the others."""
    return torch.searchsorted(offsets, entries, right=True) - 1


def count_by_row(mask: Tensor, offsets: Tensor) -> Tensor:
    """How many entries of each row are True, `[N]` int64, without a sync."""
    if mask.device.type != "cpu":
        rows = rows_of_entries(offsets, len(mask))
        return torch.zeros_like(offsets[1:]).index_add_(0, rows, mask.long())
    few = 2 * int(mask.count_nonzero()) <= len(mask)  # on the host the fewer ones are looked up
    entries = (mask if few else ~mask).nonzero()[:, 0]
    counted = torch.bincount(rows_at(offsets, entries), minlength=len(offsets) - 1)
    return counted if few else offsets.diff() - counted


def entries_of(tokens: Tensor, ids: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The entries whose int32 id is their row's token (int64, `[N]`), and the rows of these."""
    # What no int32 holds is no id, as -1 is none.
    narrow = torch.where((tokens >= 0) & (tokens < 2**31), tokens, -1).to(torch.int32)
    found = ids == torch.repeat_interleave(narrow, offsets.diff(), output_size=len(ids))
    entries = found.nonzero()[:, 0]
    return entries, rows_at(offsets, entries)


def offsets_of(counts: Tensor) -> Tensor:
    """The bounds `[N + 1]` int64 of rows with so many entries each."""
    zero = torch.zeros(1, dtype=torch.int64, device=counts.device)
    return torch.cat([zero, counts.to(torch.int64).cumsum(0)])


def selected_entries(offsets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of the given rows in their order, and the bounds they then have (host)."""
    counts = offsets.diff()[rows]
    moved = offsets_of(counts)
    nnz = int(moved[-1])
    shift = offsets[:-1][rows] - moved[:-1]
    return torch.arange(nnz) + torch.repeat_interleave(shift, counts, output_size=nnz), moved


# --- reductions over the entries of each row ---


def segment_sum(values: Tensor, rows: Tensor, n: int) -> Tensor:
    """Sums `values [nnz]` by `rows [nnz]` into `[n]`."""
    return values.new_zeros(n).index_add(0, rows, values)


def segment_logsumexp(values: Tensor, rows: Tensor, n: int) -> Tensor:
    """Log-sum-exp of `values [nnz]` by `rows [nnz]`, `[n]`; -inf where a row has no entry."""
    top = values.new_full((n,), -torch.inf)
    top = top.scatter_reduce(0, rows, values.detach(), "amax")
    some = top > -torch.inf
    shift = torch.where(some | top.isnan(), top, 0.0)
    total = segment_sum((values - shift[rows]).exp(), rows, n)
    # An empty row is kept out of the logarithm, whose gradient there would be NaN.
    empty = total == 0
    return torch.where(empty, -torch.inf, shift + torch.where(empty, 1.0, total).log())
