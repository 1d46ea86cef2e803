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
from rl_loss.kernels.entry_sums import EntryList, Extras, entries_by_id, entry_sums
from rl_loss.kernels.hot_ids import HotIds, hot_product, id_bounds, use_hot_ids, write_hot_rows
from rl_loss.kernels.records import HeadCall

# Programs that share the rows of the weight gradient, most of which are but written as 0.
_WEIGHT_PROGRAMS = 4096
# Entries of a row above which several programs share its hidden gradient, at the least.
_HEAVY_ROW = 128


class SortedEntries(NamedTuple):
    """The entries in the order of their ids, and the product of the most frequent ones."""

    ids: Tensor  # [nnz] int32
    grad: Tensor  # [nnz]
    rows: Tensor  # [nnz] int32
    bounds: Tensor  # [V + 1] where each id's run begins
    hot: HotIds | None

    def times(self, factor: Tensor) -> "SortedEntries":
        """With every gradient multiplied; `factor` 0-dim."""
        hot = None if self.hot is None else self.hot._replace(grads=self.hot.grads * factor)
        return self._replace(grad=self.grad * factor, hot=hot)


def _hidden_sums(call: HeadCall, grads: EntryGrads, base: Tensor | None) -> Tensor:
    """The hidden gradient `[N, H]`, of several ranks this one's part, not rounded; `base` `[D, H]`:
    what the blocks made of the rows over V."""
    rows, n = call.rows, call.n
    dtype = call.hidden.dtype if call.shard.alone else call.dtype  # to be added up
    out = torch.empty(call.hidden.shape, dtype=dtype, device=call.hidden.device)
    places = None
    if base is not None and len(base) < n:
        places = _places_of(rows.over_v, n)
    wide = len(rows.wide) > 0
    entries = EntryList(grads.grad, call.own_ids, rows.offsets, grads.rows, call.scalars.max_width)
    slots = _places_of(rows.wide, n).int() if wide else None
    # A row of four times the mean width would keep its one program busy for too long.
    heavy = max(_HEAVY_ROW, 4 << (len(rows.ids) // max(1, n)).bit_length())
    entry_sums(
        call.weight, entries, out, Extras(base, places, grads.flags, call.own, slots), heavy=heavy
    )
    if wide:
        made = wide_hidden_grads(call, grads)
        if base is not None:
            at = rows.wide if places is None else places[rows.wide]
            made += torch.where((at >= 0)[:, None], base[at.clamp(min=0)], 0.0)
        made = torch.where((grads.flags[rows.wide] == 1)[:, None], torch.nan, made)
        out[rows.wide] = made.to(out.dtype)
    return out


class HiddenSum:
    """The hidden gradient, over the ranks of a split vocabulary: started as soon as it can be, so
    that its way between them is hidden behind the weight's gradient."""

    def __init__(self, call: HeadCall, needs: Needs) -> None:
        self._call, self._needed = call, needs.hidden
        self._wait: Callable[[], Tensor] | None = None

    def start(self, grads: EntryGrads, base: Tensor | None) -> None:
        """Once all that goes into it is there; again changes nothing."""
        if self._needed and self._wait is None:
            own = _hidden_sums(self._call, grads, base)
            self._wait = self._call.shard.sum_hidden(own)

    def result(self) -> Tensor:
        hidden = self._call.hidden
        return hidden.new_empty(0) if self._wait is None else self._wait().to(hidden.dtype)


def sorted_entries(call: HeadCall, grads: EntryGrads, state: Tensor) -> SortedEntries:
    """Sorts the entries, and multiplies those of the most frequent ids; `state` `[N]` as the
    forward gave it."""
    ids = call.own_ids
    bounds = id_bounds(ids, len(call.weight))
    # An id that was drawn twice in a row has two entries for one cell of the product.
    use_hot = use_hot_ids(call) and not call.scalars.any_draws
    hot = hot_product(call, grads, bounds, state) if use_hot else None
    return SortedEntries(*entries_by_id(ids, grads.grad, grads.rows), bounds, hot)


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
    hot, nnz = entries.hot, len(entries.ids)
    bounds = entries.bounds[ids.start : ids.stop + 1]
    listed = EntryList(entries.grad, entries.rows, bounds, entries.ids, nnz, ids.start)
    slots = None if hot is None else hot.slots[ids]
    extras = Extras(base, slots=slots, into=into)
    entry_sums(hidden, listed, out, extras, programs=_WEIGHT_PROGRAMS)
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


def _places_of(rows: Tensor, n: int) -> Tensor:
    """Each row's place in `rows`, `[N]` int64; -1 where it has none."""
    places = torch.full((n,), -1, dtype=torch.int64, device=rows.device)
    return places.index_copy_(0, rows, torch.arange(len(rows), device=rows.device))
