"""Of a vocabulary that is split over ranks: the entries whose ids are here, row by row.

Without it every kernel would walk over the entries of all ranks to find its own.
"""

import torch
import triton
import triton.language as tl

from rl_loss.kernels.launching import launched
from rl_loss.kernels.records import OwnEntries, RowTensors
from rl_loss.plan import width_block
from rl_loss.vocab_parallel import PRIME, Shard


@launched
@triton.jit
def _own_kernel(
    ids,  # [nnz] int32
    known,  # [nnz] uint8
    offsets,  # [N + 1] int64
    labels,  # [N]
    kind,  # [N] int8
    within,  # [nnz] int32 out: the places in the row of the entries that are here, from its start
    counts,  # [N] int32 out: how many
    batch,  # [4] int64 in, out: 0 before
    first_id,
    V,
    most,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Lists a row's own entries in their order; adds up what tells one batch from another."""
    row = tl.program_id(0).to(tl.int64)
    start, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    count = tl.zeros([], dtype=tl.int32)
    total = tl.zeros([BLOCK], dtype=tl.int64)
    for first in range(start, end, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        v = tl.load(ids + entry, mask=entry < end, other=-1).to(tl.int64)
        own = (v >= first_id) & (v < first_id + V)
        place = count + tl.cumsum(own.to(tl.int32), axis=0) - 1
        tl.store(within + start + place, (entry - start).to(tl.int32), mask=own)
        count += tl.sum(own.to(tl.int32), axis=0)
        facts = v * 2 + tl.load(known + entry, mask=entry < end, other=0).to(tl.int64)
        total += tl.where(entry < end, facts * (entry % 1021 + 1), 0)
    tl.store(counts + row, count)
    facts = tl.load(labels + row).to(tl.int64) * 4 + tl.load(kind + row).to(tl.int64)
    tl.atomic_add(batch, facts * (row % 1021 + 1), sem="relaxed")
    tl.atomic_add(batch + 1, tl.sum(total, axis=0), sem="relaxed")
    if row == 0:
        tl.store(batch + 2, most)
        tl.store(batch + 3, vocab_size)


def own_entries(rows: RowTensors, shard: Shard) -> OwnEntries | None:
    """One launch; None where all ids are here."""
    if shard.alone:
        return None
    n, nnz, new = rows.labels.numel(), len(rows.ids), rows.ids.new_empty
    within, counts = new(nnz), new(n)
    batch = torch.zeros(4, dtype=torch.int64, device=rows.ids.device)
    if n:
        _own_kernel[(n,)](
            rows.ids, rows.known.view(torch.uint8), rows.offsets, rows.labels, rows.kind, within,
            counts, batch, shard.first, shard.rows, shard.most, shard.vocab_size,
            **width_block(n, nnz),
        )  # fmt: skip
    return OwnEntries(within, counts, batch.remainder_(PRIME))
