"""What a person watches: means and maxima with the counts that combine them exactly."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_loss.arguments import require_tensor
from rl_loss.loss.centering import Centering
from rl_loss.loss.inputs import LossOutputs, Metrics
from rl_loss.loss.rows import LOG_RATIO_MAX, SupportEntries, Tokens

# Every loss has these, in this order.
METRICS = (
    "mismatch_kl",
    "masked_mismatch_kl",
    "unmasked_mismatch_kl",
    "is_masked",
    "importance_ratio_mean",
    "log_ratio_clipped",
    "score_centering/uncentered",
    "score_centering/support_size",
    "score_centering/head_mass",
    "score_centering/tail_mass",
    "score_centering/mask_tv",
    "score_centering/correction_l1",
    "score_centering/tail_inexact",
    "sampler_kl",
    "ref_kl",
    "importance_ratio_max",
)


class MetricTable:
    """Collects values `[N]` and reduces them all at once, without a sync; over nothing: 0."""

    def __init__(self) -> None:
        self._means: dict[str, tuple[Tensor, Tensor]] = {}
        self._maxima: dict[str, tuple[Tensor, Tensor]] = {}

    def mean(self, name: str, values: Tensor, where: Tensor) -> None:
        self._means[name] = values, where

    def max(self, name: str, values: Tensor, where: Tensor) -> None:
        """Of values that are at least 0."""
        self._maxima[name] = values, where

    def reduce(self) -> tuple[Metrics, Metrics]:
        """Values and counts, 0-dim each."""
        columns = [*self._means.values(), *self._maxima.values()]
        dtype = torch.float64 if columns[0][0].dtype == torch.float64 else torch.float32
        where = torch.stack([where for _, where in columns])
        values = torch.stack([values.to(dtype) for values, _ in columns])
        values = torch.where(where, values, 0.0)
        counts, n = where.sum(1), len(self._means)
        means = values[:n].sum(1) / counts[:n].clamp(min=1)
        zero = values.new_zeros(len(self._maxima), 1)
        maxima = torch.cat([values[n:], zero], 1).amax(1)
        names = [*self._means, *self._maxima]
        found = zip(names, [*means.unbind(), *maxima.unbind()], strict=True)
        return dict(found), dict(zip(names, counts.unbind(), strict=True))


def token_metrics(table: MetricTable, tokens: Tokens, kept: Tensor) -> None:
    """Mismatch between trainer and sampler on the sampled tokens."""
    mask, log_ratio = tokens.mask, tokens.log_ratio
    x = log_ratio.clamp(max=LOG_RATIO_MAX)
    mismatch, ratio = x.expm1() - x, x.exp()
    table.mean("mismatch_kl", mismatch, mask)
    table.mean("masked_mismatch_kl", mismatch, mask & ~kept)
    table.mean("unmasked_mismatch_kl", mismatch, mask & kept)
    table.mean("is_masked", ~kept, mask)
    table.mean("importance_ratio_mean", ratio, mask)
    table.max("importance_ratio_max", ratio, mask)
    table.mean("log_ratio_clipped", log_ratio > LOG_RATIO_MAX, mask)


def centering_metrics(
    table: MetricTable, tokens: Tokens, entries: SupportEntries, centering: Centering
) -> None:
    """What the entries are worth; all but `uncentered` over the rows with known q."""
    known = entries.modelled
    p, q = entries.log_p.exp(), entries.log_q.exp()
    gap = entries.sum(torch.where(entries.valid, (p - q).abs(), 0.0))
    values = {
        "support_size": entries.size,
        "head_mass": entries.sum(torch.where(entries.valid, p, 0.0)),
        "tail_mass": entries.q_tail,
        "mask_tv": (gap + (entries.p_tail - entries.q_tail).abs()) / 2,
        "correction_l1": centering.l1,
        "tail_inexact": centering.inexact,
    }
    table.mean("score_centering/uncentered", ~entries.usable, tokens.mask)
    for name, value in values.items():
        table.mean(f"score_centering/{name}", value, known)


def combine_metrics(parts: Iterable[tuple[Metrics, Metrics]]) -> tuple[Metrics, Metrics]:
    """The metrics of several micro-batches or ranks as if they had been one batch.

    A mean is the mean weighted by its counts, a maximum (`..._max`) the maximum, a count the sum.

    Args:
        parts: `(metrics, metric_counts)` of each.

    Raises:
        ValueError: parts whose metrics have other names.

    Example:
        >>> one, two = torch.tensor(1.0), torch.tensor(4.0)
        >>> parts = [({"a": one}, {"a": one}), ({"a": two}, {"a": torch.tensor(2.0)})]
        >>> float(combine_metrics(parts)[0]["a"])
        3.0
    """
    parts = list(parts)
    if not parts:
        return {}, {}
    names = list(parts[0][0])
    for i, (metrics, _) in enumerate(parts):
        if metrics.keys() != set(names):
            odd = sorted(metrics.keys() ^ set(names))
            raise ValueError(f"parts[{i}] must have the metrics of parts[0], but for {odd}")
    values = torch.stack([torch.stack([metrics[name] for name in names]) for metrics, _ in parts])
    counts = torch.stack([torch.stack([counts[name] for name in names]) for _, counts in parts])
    total = counts.sum(0)
    means = (values * counts).sum(0) / total.clamp(min=1)
    pairs = zip(names, means.unbind(), values.amax(0).unbind(), strict=True)
    metrics = {name: most if name.endswith("_max") else mean for name, mean, most in pairs}
    return metrics, dict(zip(names, total.unbind(), strict=True))


def metric_floats(metrics: Metrics) -> dict[str, float]:
    """The metrics as Python numbers, for a logger: one device-to-host sync for all of them.

    Example:
        >>> metric_floats({"a": torch.tensor(1.5), "b": torch.tensor(2)})
        {'a': 1.5, 'b': 2.0}
    """
    values = torch.stack(list(metrics.values())).tolist() if metrics else []
    return {name: float(value) for name, value in zip(metrics, values, strict=True)}


def metric_sums(metrics: Metrics, counts: Metrics) -> tuple[Metrics, Metrics]:
    """Sums and counts of the means, for trainers that add up over micro-batches and ranks.

    Added up, `sum / max(1, count)` is the mean of all rows. Maxima (`..._max`), which no sum
    gives, are left out.

    Args:
        metrics, counts: of `LossOutputs`, or as `combine_metrics` gives them.

    Example:
        >>> sums, counts = metric_sums({"a": torch.tensor(2.0)}, {"a": torch.tensor(3)})
        >>> float(sums["a"]), int(counts["a"])
        (6.0, 3)
    """
    names = [name for name in metrics if not name.endswith("_max")]
    if not names:
        return {}, {}
    rows = torch.stack([counts[name] for name in names])
    sums = torch.stack([metrics[name] for name in names]) * rows
    return dict(zip(names, sums.unbind(), strict=True)), {name: counts[name] for name in names}


# --- over ranks ---


def reduce_metrics(
    outputs: LossOutputs | Iterable[LossOutputs], group: Any = None
) -> tuple[Metrics, Metrics]:
    """The metrics of all ranks' losses as if they had been one batch, in two all-reduces.

    Combined as by `combine_metrics`, alike on every rank, without a sync; a rank without a loss
    token changes nothing. Where torch.distributed is not initialised there is one rank.

    Args:
        outputs: this rank's LossOutputs, or those of its micro-batches. Every rank calls it, with
            metrics of the same names.
        group: the ranks that have different rows (of data and context parallelism: ranks that
            share a vocabulary have the same); None: all ranks.

    Returns:
        The metrics and their counts, 0-dim each.

    Raises:
        ValueError: no outputs, or micro-batches whose metrics have other names.

    Example:
        >>> from rl_loss import LossInputs, reinforce_loss
        >>> logp, on = torch.tensor([-1.0, -2.0]), torch.tensor([True, False])
        >>> parts = [LossInputs(logp, logp, logp, mask) for mask in (on, ~on)]
        >>> metrics, counts = reduce_metrics([reinforce_loss(part) for part in parts])
        >>> float(metrics["importance_ratio_mean"]), int(counts["importance_ratio_mean"])
        (1.0, 2)
    """
    parts: list[Any] = [outputs] if hasattr(outputs, "metrics") else list(outputs)
    if not parts:
        raise ValueError("outputs must be one LossOutputs or more, got none")
    metrics, counts = combine_metrics((part.metrics, part.metric_counts) for part in parts)
    if not _many_ranks():
        return metrics, counts
    # The means before the maxima, in an order that no rank's dictionary decides.
    names = sorted(metrics, key=lambda name: (name.endswith("_max"), name))
    n = sum(not name.endswith("_max") for name in names)
    values = torch.stack([metrics[name] for name in names])
    rows = torch.stack([counts[name] for name in names])
    # In float64, which holds every count. A maximum over ranks may lose a NaN, a sum does not.
    wide, maxima = rows.double(), values[n:].clone()
    sums = torch.cat([values[:n] * wide[:n], wide, maxima.isnan()])
    dist.all_reduce(sums, group=group)
    dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
    totals, wide, broken = sums.split([n, len(names), len(maxima)])
    means = totals / wide[:n].clamp(min=1)
    found = torch.cat([means.to(values.dtype), torch.where(broken > 0, torch.nan, maxima)])
    columns = found.unbind(), wide.to(rows.dtype).unbind()
    reduced, total = (dict(zip(names, column, strict=True)) for column in columns)
    return reduced, total


def global_token_count(loss_mask: Tensor | Iterable[Tensor], group: Any = None) -> Tensor:
    """The loss tokens of all ranks, by which each divides its loss, in one all-reduce.

    At least 1: where no rank has a loss token, every loss is 0 and stays 0. DDP and FSDP average
    gradients over their ranks: multiply the loss by their number, or let FSDP2 add them up
    (`set_gradient_divide_factor(1.0)`).

    Args:
        loss_mask: bool, what this rank's loss reads (`AlignedRows.active`), or one of each of its
            micro-batches.
        group: as in `reduce_metrics`.

    Returns:
        0-dim int64: a loss that is divided by it keeps its dtype. On the device of the mask, or
        of the group where that has no backend for it, as NCCL has none for a mask on the host.

    Raises:
        ValueError: a mask that is not bool.

    Example:
        >>> masks = [torch.tensor([True, False, True]), torch.tensor([[True]])]
        >>> global_token_count(masks)
        tensor(3)
    """
    masks = [loss_mask] if isinstance(loss_mask, Tensor) else list(loss_mask)
    for mask in masks:
        if require_tensor("loss_mask", mask).dtype != torch.bool:
            raise ValueError(f"loss_mask must be bool, got {mask.dtype}")
    count = sum((mask.sum() for mask in masks), torch.zeros((), dtype=torch.int64))
    if _many_ranks():
        backends = dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
        if f"{count.device.type}:" not in backends:
            count = count.to(backends.partition(":")[0], non_blocking=True)
        dist.all_reduce(count, group=group)
    return count.clamp(min=1)


def _many_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()
