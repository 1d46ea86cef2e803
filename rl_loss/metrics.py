"""What a person watches: means and maxima with the counts that combine them exactly."""

from collections.abc import Iterable

import torch
from torch import Tensor

from rl_loss.centering import Centering
from rl_loss.evidence import Evidence, Tokens
from rl_loss.sampler_kl import LOG_RATIO_MAX

Metrics = dict[str, Tensor]


class MetricTable:
    """Collects 0-dim values and counts without a sync; a mean over nothing is 0."""

    def __init__(self) -> None:
        self.values: Metrics = {}
        self.counts: Metrics = {}

    def mean(self, name: str, values: Tensor, where: Tensor) -> None:
        count = where.sum()
        total = torch.where(where, values, 0.0).sum()
        self.values[name] = total / count.clamp(min=1)
        self.counts[name] = count

    def max(self, name: str, values: Tensor, where: Tensor) -> None:
        top = torch.where(where, values, 0.0)
        # One 0 more, so that no row at all gives 0 as well.
        self.values[name] = torch.cat([top, top.new_zeros(1)]).max()
        self.counts[name] = where.sum()


def token_metrics(table: MetricTable, tokens: Tokens, kept: Tensor) -> None:
    """Mismatch between trainer and sampler on the sampled tokens."""
    mask, log_ratio = tokens.mask, tokens.log_ratio
    x = log_ratio.clamp(max=LOG_RATIO_MAX)
    mismatch = x.expm1() - x
    table.mean("mismatch_kl", mismatch, mask)
    table.mean("masked_mismatch_kl", mismatch, mask & ~kept)
    table.mean("unmasked_mismatch_kl", mismatch, mask & kept)
    table.mean("is_masked", (~kept).to(x.dtype), mask)
    table.mean("importance_ratio_mean", x.exp(), mask)
    table.max("importance_ratio_max", x.exp(), mask)
    table.mean("log_ratio_clipped", (log_ratio > LOG_RATIO_MAX).to(x.dtype), mask)


def centering_metrics(
    table: MetricTable, tokens: Tokens, evidence: Evidence, centering: Centering
) -> None:
    """What the evidence is worth; all but `uncentered` over the rows with known q."""
    known, zero = evidence.modelled, torch.zeros_like(evidence.q_tail)
    p, q = evidence.log_p.detach().exp(), evidence.log_q.exp()
    gap = evidence.sum(torch.where(evidence.valid, (p - q).abs(), 0.0))
    values = {
        "support_size": evidence.size,
        "head_mass": evidence.sum(torch.where(evidence.valid, p, 0.0)),
        "tail_mass": evidence.q_tail,
        "mask_tv": (gap + (evidence.p_tail - evidence.q_tail).abs()) / 2,
        "correction_l1": centering.l1,
        "tail_inexact": centering.inexact.to(zero.dtype),
    }
    table.mean("score_centering/uncentered", (~evidence.usable).to(zero.dtype), tokens.mask)
    for name, value in values.items():
        table.mean(f"score_centering/{name}", value, known)


def combine_metrics(parts: Iterable[tuple[Metrics, Metrics]]) -> tuple[Metrics, Metrics]:
    """The metrics of several micro-batches or ranks as if they had been one batch.

    A mean is the mean weighted by its counts, a maximum (`..._max`) the maximum, a count the sum.

    Args:
        parts: `(metrics, metric_counts)` of each.

    Example:
        >>> one, two = torch.tensor(1.0), torch.tensor(4.0)
        >>> parts = [({"a": one}, {"a": one}), ({"a": two}, {"a": torch.tensor(2.0)})]
        >>> float(combine_metrics(parts)[0]["a"])
        3.0
    """
    parts = list(parts)
    metrics, counts = {}, {}
    for name in parts[0][0] if parts else ():
        values = torch.stack([part[0][name] for part in parts])
        count = torch.stack([part[1][name] for part in parts])
        counts[name] = count.sum()
        if name.endswith("_max"):
            metrics[name] = values.max()
        else:
            metrics[name] = (values * count).sum() / counts[name].clamp(min=1)
    return metrics, counts
