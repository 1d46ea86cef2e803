"""The one input factory of all benchmarks: peaked logits and supports as samplers leave them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_loss import Support

if TYPE_CHECKING:
    import numpy as np

LOGIT_STD = 4.0


class NotRun(Exception):
    """A way says of a workload why it does not run there."""


@dataclass
class Workload:
    """Rows of one kind, with an upstream gradient for every label and every support entry."""

    name: str
    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    labels: Tensor  # [N]
    support: Support
    d_logprobs: Tensor  # [N]
    d_support_logprobs: Tensor  # [nnz]
    active: Tensor | None = None  # [N] bool on the host: the rows that a loss reads
    kept: Any = None  # what a way keeps from call to call: a graph, padded ids, a sum of gradients

    @property
    def shape(self) -> str:
        n, h = self.hidden.shape
        widths = self.support.host.offsets.diff()
        shape = f"N {n}, H {h}, V {len(self.weight)}"
        if self.active is not None:
            shape += f", {int(self.active.sum())} active"
        if self.support.nnz == 0:
            return f"{shape}, no supports"
        mean, top = widths.double().mean(), int(widths.max())
        return f"{shape}, nnz {self.support.nnz}, width mean {mean:.1f}, max {top}"

    @property
    def kinds(self) -> set[int]:
        return set(self.support.host.kind.tolist())

    def to(self, device: str, dtype: torch.dtype) -> Workload:
        return Workload(
            self.name,
            self.hidden.to(device, dtype),
            self.weight.to(device, dtype),
            self.labels.to(device),
            self.support.to(device),
            self.d_logprobs.to(device),
            self.d_support_logprobs.to(device),
            self.active,
        )


# Maps a workload whose hidden and weight are leaves to its outputs, in the order of the upstreams:
# log-probabilities of the labels [N], then of the support entries [nnz].
Way = Callable[[Workload], tuple[Tensor, ...]]


def data_folder() -> Path | None:
    """Where the real supports are, if anywhere: the folder that `RL_LOSS_DATA` names."""
    given = os.environ.get("RL_LOSS_DATA")
    there = given is not None and (Path(given) / "smollm2_top_p95.npz").exists()
    return Path(given) if there else None


def real_support(folder: Path) -> tuple[Support, dict[str, np.ndarray]]:
    """SmolLM2-135M's own top-p 0.95 supports, and the raw arrays."""
    import numpy as np

    arrays = dict(np.load(folder / "smollm2_top_p95.npz"))
    counts = torch.from_numpy(np.diff(arrays["offsets"]))
    logprobs = torch.from_numpy(arrays["sampler_logprobs"])
    support = Support(
        ids=torch.from_numpy(arrays["ids"]),
        sampler_logprobs=logprobs,
        known=torch.ones_like(logprobs, dtype=torch.bool),
        offsets=torch.from_numpy(arrays["offsets"]),
        kind=torch.ones(len(counts), dtype=torch.int8),
        sampler_tail_mass=torch.zeros(len(counts)),
    )
    return support, arrays


def real_rows(folder: Path) -> tuple[Workload, dict[str, np.ndarray]]:
    """These supports with the model's hidden states and head, and the raw arrays."""
    import numpy as np

    support, arrays = real_support(folder)
    workload = _with_upstream(
        "real",
        torch.from_numpy(arrays["hidden"]).float(),
        torch.from_numpy(np.load(folder / "smollm2_lm_head.npy")).float(),
        torch.from_numpy(arrays["labels"]).long(),
        support,
    )
    return workload, arrays


def real_like(n: int = 2337, h: int = 576, v: int = 49152, device: str = "cpu") -> Workload:
    """Widths with the quantiles of the real rows: median 44, mean 235, max 5092."""
    normal = torch.randn(n, generator=torch.Generator().manual_seed(0))
    widths = (44 * (1.83 * normal).exp()).clamp(1, min(5092, v)).long()
    return zipf_rows("real-like", widths, h, v, device=device)


def zipf_rows(name: str, widths: Tensor, h: int, v: int, *, device: str = "cpu") -> Workload:
    """Unique ids in each row, drawn by Zipf's law, as the frequent tokens of a text are.

    `device`: where they are drawn, and where hidden states and weight stay; all else is on the
    host.
    """
    g = torch.Generator(device).manual_seed(0)
    n, nnz = len(widths), int(widths.sum())
    widths = widths.to(device)
    offsets = torch.cat([widths.new_zeros(1), widths.cumsum(0)])
    rows = torch.repeat_interleave(torch.arange(n, device=device), widths)
    ids = torch.empty(nnz, dtype=torch.int64, device=device)
    wide = widths > v // 8  # drawn evenly: redrawing until unique would take for ever
    todo = ~wide[rows]
    for i in wide.nonzero()[:, 0].tolist():
        some = torch.randperm(v, generator=g, device=device)[: widths[i]]
        ids[offsets[i] : offsets[i + 1]] = some
    for attempt in range(60):  # what stands twice in a row is drawn again, at last evenly
        many = int(todo.sum())
        draws = torch.rand(many, generator=g, dtype=torch.float64, device=device)
        ids[todo] = (v**draws).long() - 1 if attempt < 6 else (v * draws).long()
        todo = _twice(rows, ids, v)
        if not todo.any():
            break
    order = (rows * v + ids).argsort()
    ids = ids[order].int()
    logits = LOGIT_STD * torch.randn(nnz, generator=g, device=device)
    total = logits.new_zeros(n, dtype=torch.float64).index_add(0, rows, logits.double().exp())
    pick = (torch.rand(n, generator=g, device=device) * widths).long()
    labels = ids[offsets[:-1] + torch.minimum(pick, widths - 1)].long()
    support = Support(
        ids=ids.cpu(),
        sampler_logprobs=(logits - total.log()[rows]).float().cpu(),
        known=torch.ones(nnz, dtype=torch.bool),
        offsets=offsets.cpu(),
        kind=torch.ones(n, dtype=torch.int8),
        sampler_tail_mass=torch.zeros(n),
    )
    return _with_upstream(
        name,
        torch.randn(n, h, generator=g, device=device),
        torch.randn(v, h, generator=g, device=device).mul_(LOGIT_STD / math.sqrt(h)),
        labels.cpu(),
        support,
    )


# One H200's worth of tokens through the head of a 2-billion-parameter model.
N, H, V = 16384, 2048, 151936


def fixed(width: int, n: int = N, h: int = H, v: int = V, *, device: str = "cpu") -> Workload:
    """Every row keeps `width` ids."""
    return zipf_rows(f"K = {width}", torch.full((n,), width), h, v, device=device)


def chat_like(*, device: str = "cpu") -> Workload:
    """46 % of the rows keep one id; mean 6, widest 684."""
    g = torch.Generator().manual_seed(0)
    widths = (4.5 * (1.28 * torch.randn(N, generator=g)).exp()).long().clamp(2, 684)
    widths[torch.rand(N, generator=g) < 0.46] = 1
    widths[0] = 684
    return zipf_rows("chat-like", widths, H, V, device=device)


def forced_length(*, device: str = "cpu") -> Workload:
    """Sequences run past their end: 16 rows of all V, 16 of 50000, mean width 264."""
    g = torch.Generator().manual_seed(0)
    widths = (28 * (1.33 * torch.randn(N, generator=g)).exp()).long().clamp(1, 4000)
    widths[:16], widths[16:32] = V, 50_000
    order = torch.randperm(N, generator=g)
    return zipf_rows("forced-length", widths[order], H, V, device=device)


def full_vocabulary(n: int = N, h: int = H, v: int = V, *, device: str = "cpu") -> Workload:
    """No row has evidence: every one is normalised over the vocabulary."""
    work = fixed(1, n, h, v, device=device)
    empty = Support.empty(n)
    return _with_upstream("full vocabulary", work.hidden, work.weight, work.labels, empty)


def prompts(*, device: str = "cpu") -> Workload:
    """As `full_vocabulary`, 75 % of the rows in prompts: no loss reads them."""
    work = full_vocabulary(device=device)
    work.name, work.active = "prompts", torch.zeros(N, dtype=torch.bool)
    for start in range(0, N, 1024):  # of each sequence the last quarter is sampled
        work.active[start + 768 : start + 1024] = True
    work.d_logprobs[~work.active] = 0.0
    return work


def mixed_rows(n: int = N, h: int = H, v: int = V, *, device: str = "cpu") -> Workload:
    """All four kinds by turns: 20 replayed ids, none, the top 20, 20 draws."""
    work = fixed(20, n, h, v, device=device)
    kind = torch.tensor([1, 0, 2, 3], dtype=torch.int8).repeat(n // 4)
    rows = work.support.entry_rows
    held = kind[rows] != 0
    counts = torch.where(kind == 0, 0, 20)
    q = torch.where(kind[rows] == 2, 0.9, 1.0).log() + work.support.sampler_logprobs
    support = Support(
        ids=work.support.ids[held],
        sampler_logprobs=q[held].float(),
        known=torch.ones(int(held.sum()), dtype=torch.bool),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
        kind=kind,
        sampler_tail_mass=torch.where(kind == 2, 0.1, torch.where(kind == 0, 1.0, 0.0)),
    )
    return _with_upstream("mixed", work.hidden, work.weight, work.labels, support)


# --- how ids fall on equal shards of the vocabulary ---


def even_ids(n: int, width: int, v: int) -> Tensor:
    """Of each of `width` equal parts of the vocabulary one id at random, a row `[n * width]`."""
    edges = torch.arange(width + 1) * v // width
    place = torch.rand(n, width, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return (edges[:-1] + (place * edges.diff()).long()).flatten()


def dealt(v: int, ranks: int) -> Tensor:
    """New numbers `[V]` that deal the ids to the ranks by turns, in their order."""
    return (torch.arange(v) % -(-v // ranks)).argsort(stable=True)


def renumbered(work: Workload, ids: Tensor) -> Workload:
    """The same rows with other ids `[nnz]`, the labels with them."""
    old = work.support
    label = (old.ids == work.labels[old.entry_rows]).nonzero()[:, 0]
    fields = ("sampler_logprobs", "known", "offsets", "kind", "sampler_tail_mass")
    support = Support(ids=ids.int(), **{name: getattr(old, name) for name in fields})
    return replace(work, support=support, labels=ids[label].long())


def _twice(rows: Tensor, ids: Tensor, v: int) -> Tensor:
    """All but the first of the equal ids of a row."""
    order = (rows * v + ids).argsort(stable=True)
    keys = (rows * v + ids)[order]
    first = torch.zeros(1, dtype=torch.bool, device=keys.device)
    repeat = torch.cat([first, keys[1:] == keys[:-1]])
    return torch.zeros_like(repeat).scatter(0, order, repeat)


def _with_upstream(
    name: str, hidden: Tensor, weight: Tensor, labels: Tensor, support: Support
) -> Workload:
    advantages = torch.randn(len(labels), generator=torch.Generator().manual_seed(1))
    centering = support.sampler_logprobs.exp() * advantages[support.entry_rows]
    return Workload(name, hidden, weight, labels, support, -advantages, centering)
