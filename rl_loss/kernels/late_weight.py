"""The weight's gradient of one pass where it goes into a buffer: kept in its parts until the
backward, which knows what to multiply it with, and whether there is one at all."""

from typing import NamedTuple

import torch
from torch import Tensor

from rl_loss.flat_rows import next_record
from rl_loss.host import launching_on
from rl_loss.kernels.gradient_sums import SortedEntries, weight_sums
from rl_loss.kernels.hot_products import HotRows

_IDS = 8192  # whose gradients are multiplied at a time


class LateWeight(NamedTuple):
    """What autograd saves; the entries as `SortedEntries`."""

    hidden: Tensor  # [N, H]
    base: Tensor | None  # [V, H] in the accumulation dtype: what the blocks made of it
    ids: Tensor | None  # [nnz]
    grad: Tensor  # [nnz]
    rows: Tensor  # [nnz]
    bounds: Tensor  # [V + 1]
    hot_slots: Tensor | None  # as `HotRows`
    hot_ids: Tensor | None
    hot_grads: Tensor | None

    @classmethod
    def of(cls, hidden: Tensor, base: Tensor | None, entries: SortedEntries) -> "LateWeight":
        hot = (None,) * 3 if entries.hot is None else entries.hot
        return cls(hidden, base, *entries[:4], *hot)

    def add(self, upstream: Tensor, buffer: Tensor, most: int) -> None:
        """Adds it, times the 0-dim `upstream`, to `buffer` `[V or more, H]`; `most` as
        `SortedEntries` has it."""
        v, base = len(self.bounds) - 1, self.base
        hot = None if self.hot_slots is None else next_record(HotRows, iter(self[6:]))
        entries = SortedEntries(*self[2:6], hot, most).times(upstream)
        with launching_on(buffer), torch.autocast(buffer.device.type, enabled=False):
            if base is not None and base.dtype == buffer.dtype:
                buffer[:v].addcmul_(base, upstream)
                base = None
            if base is None and not len(entries.grad):
                return
            # Rounded once: blocks of ids as in two steps.
            step = max(1, v) if base is None else _IDS
            for start in range(0, v, step):
                ids = slice(start, min(start + step, v))
                part = None if base is None else base[ids] * upstream
                weight_sums(self.hidden, entries, ids, part, buffer[ids], into=True)
