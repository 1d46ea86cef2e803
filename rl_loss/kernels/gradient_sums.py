"""The gradients of hidden, weight and bias, from those of products."""

from typing import Any

import torch
from torch import Tensor

from rl_loss.kernels.records import HeadScalars, HeadTensors, head_entries
from rl_loss.logits import accumulation_dtype

# Programs that share the rows of the weight gradient, most of which are but written as 0.
_WEIGHT_PROGRAMS = 4096


class GradientSums:
    """Adds up what entries and the vocabulary's blocks send to hidden, weight and bias.

    A row of the hidden gradient is its entries' sum and the row of `over_v` that the blocks made;
    a block of the weight gradient is its ids' entries' sum and the block's own product. Each is
    rounded once.
    """

    def __init__(self, t: HeadTensors, s: HeadScalars, need: tuple[bool, bool, bool]) -> None:
        self.t, self.s, self.need = t, s, need
        acc, d = accumulation_dtype(t.hidden, t.weight), len(t.over_v)
        new = t.hidden.new_zeros
        self.over_v = new(d, t.hidden.shape[1], dtype=acc) if need[0] and d else None
        self.over_v_bias = new(len(t.weight), dtype=acc) if need[2] and d else None
        self.d_weight: Tensor | None = None
        self.grads: Any = None  # kernels.entry_grads.EntryGrads
        self.state: Any = None  # [N] uint8
        self.sorted: tuple[Tensor, Tensor, Tensor] | None = None  # entries by id

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three gradients; the weight's here where no block wrote it before."""
        none = [self.t.hidden.new_empty(0) for _ in range(3)]  # an operator's outputs differ
        d_hidden = self._hidden() if self.need[0] else none[0]
        if self.need[1] and self.d_weight is None:
            self.start_weight(last=True)
            self.finish_block(slice(0, len(self.t.weight)), None)
        d_bias = self._bias() if self.need[2] and self.t.bias is not None else none[2]
        return d_hidden, none[1] if self.d_weight is None else self.d_weight, d_bias

    def _hidden(self) -> Tensor:
        from rl_loss.kernels.entry_sums import gathered_sums

        t, grads, n = self.t, self.grads, len(self.t.labels)
        out = torch.empty_like(t.hidden, memory_format=torch.contiguous_format)
        places = skip = None
        if self.over_v is not None and len(self.over_v) < n:
            places = places_of(t.over_v, n)
        if len(t.wide):
            skip = places_of(t.wide, n).int()
        gathered_sums(
            t.weight, grads.grad, t.ids, t.offsets, out,
            owners=grads.rows,
            max_entries=self.s.max_width,
            base=self.over_v,
            base_rows=places,
            flags=grads.flags,
            slots=skip,
            # A row of four times the mean width would keep its one program busy for too long.
            heavy=max(128, 4 << (len(t.ids) // max(1, n)).bit_length()),
        )  # fmt: skip
        if len(t.wide):
            from rl_loss.kernels.blocks import grad_dtype, wide_hidden_grads

            dtype = grad_dtype(t.hidden, t.weight)
            width = self.s.max_width, self.s.workspace
            rows = wide_hidden_grads(t.weight, t.wide, head_entries(t), grads.grad, dtype, *width)
            if self.over_v is not None:
                at = t.wide if places is None else places[t.wide]
                rows += torch.where((at >= 0)[:, None], self.over_v[at.clamp(min=0)], 0.0)
            rows = torch.where((grads.flags[t.wide] == 1)[:, None], torch.nan, rows)
            out[t.wide] = rows.to(out.dtype)
        return out

    def start_weight(self, last: bool = False) -> None:
        """The entries in the order of their ids. The gradient is allocated when what that needed
        is free again; `last`: the entries' own gradients too, which nothing else reads then."""
        from rl_loss.kernels.hot_ids import hot_product, use_hot_ids

        t, self.hot = self.t, None
        if len(t.ids) or not len(t.over_v):
            bounds = self._sort()
            grad, rows, _, _ = self.grads
            # An id that was drawn twice in a row has two entries for one cell of the product.
            if not self.s.draws and use_hot_ids(t.hidden, t.weight, grad):
                self.hot = hot_product(t.hidden, grad, rows, t.ids, bounds, self.state)
            del grad, rows
        if last:
            self.grads = None
        self.d_weight = torch.empty_like(t.weight, memory_format=torch.contiguous_format)

    def _sort(self) -> Tensor:
        from rl_loss.kernels.entry_sums import entries_by_id
        from rl_loss.kernels.hot_ids import id_bounds

        if self.sorted is None:
            self.bounds = id_bounds(self.t.ids, len(self.t.weight))
            self.sorted = entries_by_id(self.t.ids, self.grads.grad, self.grads.rows)
        return self.bounds

    def finish_block(self, ids: slice, base: Tensor | None) -> None:
        """Writes the weight gradient of these ids, `base` `[B, H]` what the blocks made of it."""
        from rl_loss.kernels.entry_sums import gathered_sums
        from rl_loss.kernels.hot_ids import write_hot_rows

        assert self.d_weight is not None
        assert self.sorted is not None
        t, (sorted_ids, grad, rows) = self.t, self.sorted
        out = self.d_weight[ids]
        gathered_sums(
            t.hidden, grad, rows, self.bounds[ids.start :], out,
            owners=sorted_ids,
            max_entries=len(t.ids),
            first_owner=ids.start,
            base=base,
            slots=None if self.hot is None else self.hot.slots[ids.start :],
            programs=_WEIGHT_PROGRAMS,
        )  # fmt: skip
        if self.hot is not None:
            write_hot_rows(self.hot, out, base, ids.start)

    def _bias(self) -> Tensor:
        bounds = self._sort().long()
        assert self.sorted is not None
        assert self.t.bias is not None
        grad = self.sorted[1].double()
        d_bias = torch.segment_reduce(grad, "sum", offsets=bounds, unsafe=True)
        if self.over_v_bias is not None:
            d_bias += self.over_v_bias
        return d_bias.to(self.t.bias.dtype)


def places_of(rows: Tensor, n: int) -> Tensor:
    """Each row's place in `rows`, `[N]` int64; -1 where it has none."""
    places = torch.full((n,), -1, dtype=torch.int64, device=rows.device)
    return places.index_copy_(0, rows, torch.arange(len(rows), device=rows.device))
