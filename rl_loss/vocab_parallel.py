"""The weight split by vocabulary over the ranks of a group: who has which ids, and what is summed.

Every rank has all rows, labels and supports, and the weight's rows of its own ids. In the forward
each fills in the logits of its own ids, and one sum over the ranks makes them whole; in the
backward the hidden gradients of all ranks are summed. The calls and their sizes follow from N, nnz
and the kinds of rows alone, which all ranks have alike: a rank that owns none of the ids, or no id
at all, makes the same ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rl_loss.host import host_sees

PRIME = 1048573  # what a fingerprint is taken by: its remainders are float32 numbers
_NOWHERE = 2**31 - 1  # the local number of an id of another rank

_P = ParamSpec("_P")
_R = TypeVar("_R")


_uncompiled: dict[Callable, Callable] = {}


def outside_graphs(function: Callable[_P, _R], *args: _P.args, **options: _P.kwargs) -> _R:
    """What the function gives; `torch.compile` breaks the graph here and traces nothing of it."""
    if not torch.compiler.is_compiling():
        return function(*args, **options)
    if function not in _uncompiled:  # made late, for it loads the compiler
        _uncompiled[function] = torch.compiler.disable(function)
    return _uncompiled[function](*args, **options)


def outside_graphs_with(*names: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """The function, which with any of these options is no part of a compiled graph."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(function)
        def call(*args: _P.args, **options: _P.kwargs) -> _R:
            if all(options.get(name) is None for name in names):
                return function(*args, **options)
            return outside_graphs(function, *args, **options)

        return call

    return decorate


class RankLogits(NamedTuple):
    """What a rank knows of the logits: of its own ids; of others 0."""

    entries: Tensor  # [E] logits of support entries
    labels: Tensor  # [D] of the labels of the rows over the vocabulary
    stats: Tensor  # [3, D] of these rows: maximum, sum of exp(z - maximum), and of that times
    # (z - maximum), over the ids of which the rank has any part
    batch: Tensor  # [B] what all ranks must have alike, see `fingerprint`


@dataclass(frozen=True)
class Shard:
    """The ids whose rows of the weight are here."""

    group: Any  # None: all are
    first: int
    rows: int  # how many of the weight are ids, from its first on
    most: int  # of the rank that has the most: what all agree upon
    vocab_size: int  # of all ranks
    sequence_parallel: bool = False

    @property
    def alone(self) -> bool:
        return self.group is None

    @property
    def ranks(self) -> int:
        return 1 if self.alone else dist.get_world_size(self.group)

    def owned(self, ids: Tensor) -> Tensor:
        """Which ids are here."""
        return (ids >= self.first) & (ids < self.first + self.rows)

    def local(self, ids: Tensor) -> Tensor:
        """The row of each id here; of another rank's a number that is no row's."""
        if self.alone:
            return ids
        return torch.where(self.owned(ids), ids - self.first, _NOWHERE)

    # --- forward ---

    def gather_rows(self, hidden: Tensor) -> Tensor:
        """All ranks' rows `[N, H]`, where each has its own `[N / ranks, H]`."""
        if not self.sequence_parallel:
            return hidden
        whole = hidden.new_empty(self.ranks * len(hidden), hidden.shape[1])
        _call("all_gather")(whole, hidden.contiguous(), group=self.group)
        return whole

    def sum_logits(self, own: RankLogits) -> RankLogits:
        """The logits of all ranks: one sum, in which each rank's statistics have a column.

        Raises:
            ValueError: ranks whose labels, supports or shares of the vocabulary differ; on a GPU
                all becomes NaN.
        """
        rank, ranks = dist.get_rank(self.group), self.ranks
        e, d, b = len(own.entries), len(own.labels), len(own.batch)
        buffer = own.entries.new_zeros(e + d + (3 * d + b) * ranks)
        entries, labels, stats, batch = buffer.split([e, d, 3 * d * ranks, b * ranks])
        columns, batch = stats.view(ranks, 3, d), batch.view(ranks, b)
        entries.copy_(own.entries)
        labels.copy_(own.labels)
        columns[rank], batch[rank] = own.stats, own.batch
        dist.all_reduce(buffer, group=self.group)
        differ = (batch != batch[:1]).any()
        if host_sees(buffer.device):
            if differ:
                raise ValueError(
                    "labels and support must be the same on every rank of process_group, and the "
                    "weight split alike: equal numbers of rows, the last ranks' padded, or a "
                    "DTensor"
                )
        else:
            buffer += torch.where(differ, torch.nan, 0.0)
        if not d:
            return RankLogits(entries, labels, own.stats, own.batch)
        top, total, moment = columns.unbind(1)  # [ranks, D] each
        highest = top.amax(0)
        shift = torch.where(highest == -torch.inf, 0.0, highest)
        shrink, below = (top - shift).exp(), torch.where(total == 0, 0.0, top - shift)
        stats = highest, (shrink * total).sum(0), (shrink * (moment + total * below)).sum(0)
        return RankLogits(entries, labels, torch.stack(stats), own.batch)

    # --- backward ---

    def sum_hidden(self, own: Tensor) -> Callable[[], Tensor]:
        """Starts the sum of the ranks' hidden gradients `[N, H]`; what it gives waits for it. With
        `sequence_parallel` this rank's rows of it."""
        if self.alone:
            return lambda: own
        if not self.sequence_parallel:
            work = dist.all_reduce(own, group=self.group, async_op=True)
            return _after(work, own)
        part = own.new_empty(len(own) // self.ranks, own.shape[1])
        work = _call("reduce_scatter")(part, own, group=self.group, async_op=True)
        return _after(work, part)


def fingerprint(rows: Any, shard: Shard, dtype: torch.dtype) -> Tensor:
    """`[4]` small integers that hardly two batches have alike, of labels and kinds, ids and which
    of them are known; and how the vocabulary is split. `rows` as `FlatRows`."""
    sums = []
    for values in (rows.labels.long() * 4 + rows.kind, rows.ids.long() * 2 + rows.known):
        place = torch.arange(len(values), device=values.device) % 1021 + 1
        sums.append((values * place).sum() % PRIME)
    split = torch.tensor([shard.most, shard.vocab_size], device=rows.ids.device) % PRIME
    return torch.cat([torch.stack(sums), split]).to(dtype)


def _call(name: str) -> Callable:
    """The collective of one tensor each way, by the name that this torch has for it."""
    older = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
    return getattr(dist, f"{name}_single", None) or getattr(dist, older[name])


def _after(work: Any, result: Tensor) -> Callable[[], Tensor]:
    def wait() -> Tensor:
        work.wait()
        return result

    return wait


def whole(vocab_size: int) -> Shard:
    """All ids, here."""
    return Shard(None, 0, vocab_size, vocab_size, vocab_size)


def equal_shard(rows: int, vocab_size: int, group: Any, sequence_parallel: bool) -> Shard:
    """This rank's ids where every rank has as many `rows` of the weight, in the order of the
    ranks, those behind `vocab_size` being padding."""
    first = rows * dist.get_rank(group)
    own = min(max(vocab_size - first, 0), rows)
    return Shard(group, first, own, rows, vocab_size, sequence_parallel)


def torch_shard(all_rows: int, vocab_size: int, group: Any, sequence_parallel: bool) -> Shard:
    """This rank's ids as torch cuts `all_rows` of a DTensor: like `torch.chunk`, so that the last
    ranks may have less, or nothing."""
    rows = -(-all_rows // dist.get_world_size(group))
    first = min(rows * dist.get_rank(group), all_rows)
    own = min(max(vocab_size - first, 0), rows)
    return Shard(group, first, own, rows, vocab_size, sequence_parallel)
