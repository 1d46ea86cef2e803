"""How the kernels of a head are launched, from what the host knows of a support: no sync."""

from typing import NamedTuple

import torch
from torch import Tensor

from rl_loss.csr import DRAWS, HEAD, NONE, REPLAY, HostFacts


class HeadPlan(NamedTuple):
    """How the kernels of a head are launched: known on the host, so without a sync."""

    tiles: Tensor  # [T] int64: row << 32 | number of the tile in its row; rows of one id have none
    wide: Tensor  # [W] int64: REPLAY rows without tiles, wide enough for a product over V
    over_v: Tensor  # [D] int64: the rows that are normalised over the vocabulary
    max_width: int  # entries of the widest row, rounded up to a power of two
    wide_on_host: Tensor  # [W] int64: `wide` as a CPU tensor
    any_head: bool  # some row is HEAD
    any_draws: bool  # some row is DRAWS
    sound: bool  # no row failed to be recorded or was left empty


TILE = 32  # entries of a tile

# Where a row's product with all of V takes as long as gathering its entries, in entries a V, and
# how many entries beyond that must come together for the weight to be read. Both sides grow with
# H, so V alone decides. Measured on an H200 (`python -m benchmarks.threshold`), on no other GPU.
ENTRIES_A_PRODUCT = 1 / 100
ENTRIES_A_READ = 0.1

# The most frequent ids of a batch take part in products on the tensor cores
# (`kernels/hot_ids.py`), where a product is exact enough: in bfloat16. In the one of the weight's
# gradient from so many entries and so many a row on; in those of the forward and of the hidden
# gradient too from so many gathered entries a row on, and so many numbers that they gather.
LEAST_ENTRIES, LEAST_A_ROW = 2**16, 4
FORWARD_A_ROW, FORWARD_NUMBERS = 256, 2**29
# An id is frequent if one row in so many has it: its columns of the products take about as long as
# gathering that many entries, whatever H. But tiles of rows are never smaller than 16 of these.
ROWS_AN_ENTRY, LEAST_COUNT = 96, 16
# There is room for so many frequent ids for every entry of a mean row: a float32 number each in all
# rows takes 32 bytes an entry, about what sorting the entries takes. Of the weight's gradient alone
# fewer.
FORWARD_SLOTS, WEIGHT_SLOTS = 8, 4
_WHOLE_SLOTS, _FEWEST_SLOTS, _MOST_SLOTS = 128, 256, 4096


def forward_slots(n: int, nnz: int, tiles: int, h: int) -> int:
    """Room for frequent ids in all three products; 0 where they do not pay in the forward."""
    many = tiles * TILE >= FORWARD_A_ROW * n and tiles * TILE * h >= FORWARD_NUMBERS
    return _slots(n, nnz, FORWARD_SLOTS) if many and nnz >= LEAST_ENTRIES else 0


def weight_slots(n: int, nnz: int) -> int:
    """Room for frequent ids in the weight's gradient alone; 0 where they do not pay."""
    many = nnz >= LEAST_ENTRIES and nnz >= LEAST_A_ROW * n
    return _slots(n, nnz, WEIGHT_SLOTS) if many else 0


def _slots(n: int, nnz: int, share: int) -> int:
    tiles = -(-share * nnz // (n * _WHOLE_SLOTS))
    return min(_MOST_SLOTS, max(_FEWEST_SLOTS, tiles * _WHOLE_SLOTS))


def least_count(n: int) -> int:
    """The entries that a frequent id has at the least."""
    return max(LEAST_COUNT, -(-n // ROWS_AN_ENTRY))


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
        any_head=bool((host.kind == HEAD).any()),
        any_draws=bool((host.kind == DRAWS).any()),
        sound=not ((host.kind != NONE) & (widths == 0)).any(),
    )


def width_block(n: int, nnz: int) -> dict[str, int]:
    """Entries that a program of the row kernels takes at a time, and its warps: by the mean
    width, for a row far wider than most just takes more turns."""
    mean = nnz / max(1, n)
    if mean <= 24:
        return {"BLOCK": 32, "num_warps": 1}
    if mean <= 128:
        return {"BLOCK": 128, "num_warps": 1}
    return {"BLOCK": 1024, "num_warps": 4}
