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


# As plain ints: torch.compile compares no tensor with an enum.
NONE, REPLAY, HEAD, DRAWS = (int(kind) for kind in list(RowKind)[1:])


# How far probabilities that a sampler reports may be from adding up to 1, and a sampled token's
# entry from the log-probability reported for it.
TOLERANCE = 1e-3


class HostFacts(NamedTuple):
    """What the host knows of a support wherever its tensors are (CPU tensors)."""

    offsets: Tensor  # [N + 1] int64
    kind: Tensor  # [N] int8
    complete: Tensor  # [N] bool: the row has entries and q is known for each


class HeadPlan(NamedTuple):
    """How the kernels of a head are launched: known on the host, so without a sync."""

    tiles: Tensor  # [T] int64: row << 32 | number of the tile in its row; rows of one id have none
    wide: Tensor  # [W] int64: REPLAY rows without tiles, wide enough for a product over V
    over_v: Tensor  # [D] int64: the rows that are normalised over the vocabulary
    max_width: int  # entries of the widest row, rounded up to a power of two
    wide_on_host: Tensor  # [W] int64: `wide` as a CPU tensor
    head: bool  # some row is HEAD
    draws: bool  # some row is DRAWS
    sound: bool  # no row failed to be recorded or was left empty


TILE = 32  # entries of a tile

# Where a row's product with all of V takes as long as gathering its entries, in entries a V, and
# how many entries beyond that must come together for the weight to be read. Both sides grow with
# H, so V alone decides. Measured on an H200 (`python -m benchmarks.threshold`), on no other GPU.
ENTRIES_A_PRODUCT = 1 / 100
ENTRIES_A_READ = 0.1


def widest_gathered(vocab_size: int) -> float:
    """The width up to which gathering a row is cheaper than its product with the vocabulary."""
    return vocab_size * ENTRIES_A_PRODUCT


def wide_rows(host: HostFacts, vocab_size: int) -> Tensor:
    """The REPLAY rows that a product over the vocabulary is cheaper for, `[N]` bool."""
    widths, least = host.offsets.diff(), widest_gathered(vocab_size)
    wide = (host.kind == REPLAY) & (widths > least)
    gain = float((widths[wide] - least).sum())
    return wide if gain > vocab_size * ENTRIES_A_READ else torch.zeros_like(wide)


def head_plan(host: HostFacts, device: torch.device, vocab_size: int | None = None) -> HeadPlan:
    """The plan of rows of which the host knows `host`, its tensors on `device`; without a
    vocabulary's size no row is wide."""
    widths, replay = host.offsets.diff(), host.kind == REPLAY
    wide = torch.zeros_like(replay) if vocab_size is None else wide_rows(host, vocab_size)
    counts = torch.where(replay & ~wide & (widths > 1), (widths + TILE - 1) // TILE, 0)
    total = int(counts.sum())
    rows = torch.repeat_interleave(torch.arange(len(counts)), counts, output_size=total)
    number = torch.arange(total) - (counts.cumsum(0) - counts)[rows]
    widest = int(widths.max()) if len(widths) else 0

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    return HeadPlan(
        tiles=moved(rows << 32 | number),
        wide=moved(wide.nonzero()[:, 0]),
        wide_on_host=wide.nonzero()[:, 0],
        over_v=moved(((host.kind >= 0) & ~replay).nonzero()[:, 0]),
        max_width=1 << max(0, widest - 1).bit_length(),
        head=bool((host.kind == HEAD).any()),
        draws=bool((host.kind == DRAWS).any()),
        sound=not ((host.kind != NONE) & (widths == 0)).any(),
    )


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
