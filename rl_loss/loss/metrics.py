"""What a person watches: means and maxima with the counts that combine them exactly."""

from collections.abc import Iterable

import torch
from torch import Tensor

from rl_loss.loss.centering import Centering
from rl_loss.loss.rows import LOG_RATIO_MAX, SupportEntries, Tokens

Metrics = dict[str, Tensor]


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
