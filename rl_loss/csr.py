"""Ragged rows: their kinds, their bounds, and what the host knows of both."""

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor


class RowKind(IntEnum):
    """What a row's ids are, and so over what the trainer normalises it."""

    FAILED = -1  # the sampler could not record the row: an error where a loss reads it
    NONE = 0  # no evidence: normalised over the vocabulary, not centered
    REPLAY = 1  # the whole kept set, unique, with the label: normalised over the set
    HEAD = 2  # the top ids of an untruncated distribution, unique: over the vocabulary
    DRAWS = 3  # i.i.d. draws from the sampler, repeats kept: over the vocabulary


class HostFacts(NamedTuple):
    """What the host knows of a support wherever its tensors are (CPU tensors)."""

    offsets: Tensor  # [N + 1] int64
    kind: Tensor  # [N] int8
    complete: Tensor  # [N] bool: the row has entries and q is known for each


class GatherPlan(NamedTuple):
    """How the kernels of REPLAY rows are launched: known on the host, so without a sync."""

    tiles: Tensor  # [T] int64: row << 32 | number of the tile in its row; rows of one id have none
    max_width: int  # entries of the widest row, rounded up to a power of two
    only_replay: bool  # every row is REPLAY and has an entry


TILE = 32  # entries of a tile


def gather_plan(host: HostFacts, device: torch.device) -> GatherPlan:
    """The plan of rows of which the host knows `host`, its tiles on `device`."""
    widths = host.offsets.diff()
    counts = torch.where(
        (host.kind == RowKind.REPLAY) & (widths > 1), (widths + TILE - 1) // TILE, 0
    )
    total = int(counts.sum())
    rows = torch.repeat_interleave(torch.arange(len(counts)), counts, output_size=total)
    number = torch.arange(total) - (counts.cumsum(0) - counts)[rows]
    widest = int(widths.max()) if len(widths) else 0
    only = bool(((host.kind == RowKind.REPLAY) & (widths > 0)).all())
    tiles = (rows << 32 | number).to(device, non_blocking=True)
    return GatherPlan(tiles, 1 << max(0, widest - 1).bit_length(), only)


def first_row(bad: Tensor) -> int:
    """The index of the first True of a host mask."""
    return int(bad.to(torch.uint8).argmax())


def rows_of_entries(offsets: Tensor, nnz: int) -> Tensor:
    """The row of each entry, `[nnz]` int64, without a sync."""
    rows = torch.arange(len(offsets) - 1, device=offsets.device)
    return torch.repeat_interleave(rows, offsets.diff(), output_size=nnz)


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
