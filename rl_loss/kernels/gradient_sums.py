"""The gradients of hidden, weight and bias, from those of products.

A row of the hidden gradient is its entries' sum and what the blocks of logits made of it; a row of
the weight gradient is its id's entries' sum and the blocks' own product. Each is rounded once.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rl_loss.flat_rows import Needs
from rl_loss.kernels.blocks import wide_hidden_grads
from rl_loss.kernels.entry_grads import EntryGrads
from rl_loss.kernels.entry_sums import EntryList, Extras, entry_sums, in_order
from rl_loss.kernels.hot_ids import id_bounds, new_hot_ids, new_matrix
from rl_loss.kernels.hot_products import HotRows, hot_hidden, hot_weight, write_hot_rows
from rl_loss.kernels.records import HeadCall, RowOutputs, may_be_hot
from rl_loss.plan import least_count, weight_slots

# Programs that share the rows of the weight gradient, most of which are but written as 0.
_WEIGHT_PROGRAMS = 4096
# Entries of a row above which several programs share its hidden gradient, at the least.
_HEAVY_ROW = 128
# Entries of an id that one program may add up, where hardly an id can have so many.
_MOST_ALONE = 4096
# Bytes of what hot ids make of the hidden gradient, of a run of rows at a time.
_BASE_BYTES = 2**27


class SortedEntries(NamedTuple):
    """The entries in the order of their ids, and the product of the most frequent ones."""

    ids: Tensor | None  # [nnz] int32; None where an id that is not hot can have but few
    grad: Tensor  # [nnz]
    rows: Tensor  # [nnz] int32
    bounds: Tensor  # [V + 1] where each id's run begins
    hot: HotRows | None
    most: int  # entries of an id that is not hot, or more

    def times(self, factor: Tensor) -> "SortedEntries":
        """With every gradient multiplied; `factor` 0-dim."""
        hot = None if self.hot is None else self.hot._replace(grads=self.hot.grads * factor)
        return self._replace(grad=self.grad * factor, hot=hot)


def _hidden_sums(call: HeadCall, grads: EntryGrads, base: Tensor | None, state: Tensor) -> Tensor:
    """The hidden gradient `[N, H]`, of several ranks this one's part, not rounded; `base` `[D, H]`:
    what the blocks made of the rows over V."""
    rows, n = call.rows, call.n
    dtype = call.hidden.dtype if call.shard.alone else call.dtype  # to be added up
    out = torch.empty(call.hidden.shape, dtype=dtype, device=call.hidden.device)
    places = None
    if base is not None and len(base) < n:
        places = _places_of(rows.over_v, n)
    wide = len(rows.wide) > 0
    most = call.scalars.max_width
    slots = _places_of(rows.wide, n).int() if wide else None
    # A row of four times the mean width would keep its one program busy for too long.
    heavy = max(_HEAVY_ROW, 4 << (len(rows.ids) // max(1, n)).bit_length())
    if grads.laid is None:
        entries = EntryList(grads.grad, call.own_ids, rows.offsets, grads.rows, most)
        extras = Extras(base, places, grads.flags, call.own, slots)
        entry_sums(call.weight, entries, out, extras, heavy=heavy)
    else:
        laid, step = grads.laid, max(128, _BASE_BYTES // (4 * max(1, out.shape[1])) // 128 * 128)
        for first in range(0, n, step):
            run = slice(first, min(first + step, n))
            made = hot_hidden(call, laid.hot, laid.matrix, state, run)
            if base is not None:
                made += base[run] if places is None else _spread(base, places[run])
            bounds, counts = rows.offsets[first : run.stop + 1], laid.cold_counts[run]
            entries = EntryList(
                laid.cold_grad, laid.cold_ids, bounds, grads.rows, most, first, counts
            )
            some = None if slots is None else slots[run]
            extras = Extras(made, flags=grads.flags[run], slots=some)
            entry_sums(call.weight, entries, out[run], extras, heavy=heavy)
            del made
    if wide:
        made = wide_hidden_grads(call, grads)
        if base is not None:
            made += _spread(base, rows.wide if places is None else places[rows.wide])
        made = torch.where((grads.flags[rows.wide] == 1)[:, None], torch.nan, made)
        out[rows.wide] = made.to(out.dtype)
    return out


class HiddenSum:
    """The hidden gradient, over the ranks of a split vocabulary: started as soon as it can be, so
    that its way between them is hidden behind the weight's gradient."""

    def __init__(self, call: HeadCall, needs: Needs, state: Tensor) -> None:
        """`state` `[N]` as the forward gave it."""
        self._call, self._needed, self._state = call, needs.hidden, state
        self._wait: Callable[[], Tensor] | None = None

    def start(self, grads: EntryGrads, base: Tensor | None) -> None:
        """Once all that goes into it is there; again changes nothing."""
        if self._needed and self._wait is None:
            own = _hidden_sums(self._call, grads, base, self._state)
            self._wait = self._call.shard.sum_hidden(own)

    def result(self) -> Tensor:
        hidden = self._call.hidden
        return hidden.new_empty(0) if self._wait is None else self._wait().to(hidden.dtype)


def hot_rows(call: HeadCall, grads: EntryGrads, state: Tensor, needs: Needs) -> HotRows | None:
    """The weight gradient's rows of the hot ids that the forward found, if it looked for any;
    `state` `[N]` as the forward gave it."""
    laid = grads.laid
    if laid is None or not needs.weight:
        return None
    return hot_weight(call, laid.hot, laid.matrix, state)


def sorted_entries(
    call: HeadCall, grads: EntryGrads, saved: RowOutputs, hot: HotRows | None, needs: Needs
) -> SortedEntries:
    """Sorts the entries. Where the forward looked for no hot ids, it may pay to find them here and
    multiply their entries; else `hot` are theirs."""
    ids, n, v = call.own_ids, call.n, len(call.weight)
    sorted_ids, order = ids.sort(stable=True)
    slots, found, matrix = 0, None, None
    if saved.hot is None and needs.weight and may_be_hot(call.inputs, call.scalars):
        slots = weight_slots(n, len(ids))
    if slots:
        found = new_hot_ids(slots, v, ids.device)
        matrix = new_matrix(n, found, call.hidden.dtype)
    bounds = id_bounds(sorted_ids, v, n, found)
    grad, rows = in_order(order, sorted_ids, grads.grad, grads.rows, found, matrix)
    del order
    if found is not None and matrix is not None:
        hot = hot_weight(call, found, matrix, saved.state)
    most = len(ids) if hot is None else most_of_the_others(n, len(ids), len(hot.ids))
    kept = sorted_ids if hot is None or most > _MOST_ALONE else None
    return SortedEntries(kept, grad, rows, bounds, hot, most)


def most_of_the_others(n: int, nnz: int, slots: int) -> int:
    """The entries of an id that got no slot, or more: too few for one, or as many as each of those
    that have one, but for the width of a bin of counts (a quarter)."""
    return max(least_count(n), 5 * nnz // (4 * slots) + 1)


def new_weight_grad(call: HeadCall) -> Tensor:
    """`[rows of the weight, H]`: 0 in the padding behind the ids, the rest not written yet; or the
    buffer of the call, to be added to."""
    if call.into is not None:
        return call.into
    out = torch.empty_like(call.inputs.weight, memory_format=torch.contiguous_format)
    if call.shard.rows < len(out):
        out[call.shard.rows :] = 0
    return out


def weight_sums(
    hidden: Tensor,  # [N, H]
    entries: SortedEntries,
    ids: slice,
    base: Tensor | None,
    out: Tensor,
    into: bool,
) -> None:
    """Writes the weight gradient `out` `[B, H]` of a run of ids, `base` `[B, H]` what the blocks
    made of it; with `into` it is added to what `out` holds, and where it is 0 nothing is written.
    """
    hot, bounds = entries.hot, entries.bounds[ids.start : ids.stop + 1]
    listed = EntryList(entries.grad, entries.rows, bounds, entries.ids, entries.most, ids.start)
    heavy = _MOST_ALONE if entries.ids is None else None
    extras = Extras(base, slots=None if hot is None else hot.slots[ids], into=into)
    entry_sums(hidden, listed, out, extras, heavy=heavy, programs=_WEIGHT_PROGRAMS)
    if hot is not None:
        write_hot_rows(hot, out, base, ids.start, into)


def bias_sums(entries: SortedEntries, base: Tensor | None, bias: Tensor) -> Tensor:
    """The gradient of `bias`; `base` `[V]`: what the blocks made of it."""
    bounds = entries.bounds.long()
    total = torch.segment_reduce(entries.grad.double(), "sum", offsets=bounds, unsafe=True)
    if base is not None:
        total += base
    out = bias.new_zeros(len(bias))
    out[: len(total)] = total
    return out


def _spread(base: Tensor, places: Tensor) -> Tensor:
    """The rows of `base` at these places, 0 where there is none (-1)."""
    return torch.where((places >= 0)[:, None], base[places.clamp(min=0)], 0.0)


def _places_of(rows: Tensor, n: int) -> Tensor:
    """Each row's place in `rows`, `[N]` int64; -1 where it has none."""
    places = torch.full((n,), -1, dtype=torch.int64, device=rows.device)
    return places.index_copy_(0, rows, torch.arange(len(rows), device=rows.device))
