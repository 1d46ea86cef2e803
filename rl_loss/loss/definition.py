"""The loss of any rule in plain PyTorch: the definition that the kernels are held to."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_loss.csr import TOLERANCE
from rl_loss.loss.centering import expected_score
from rl_loss.loss.divergences import Direction, reference_kl, sampler_kl
from rl_loss.loss.inputs import LossOutputs
from rl_loss.loss.metrics import MetricTable, centering_metrics, token_metrics
from rl_loss.loss.rows import Slopes, SupportEntries, read_entries, read_tokens, to_entries
from rl_loss.loss.tensors import LossTensors
from rl_loss.loss.weighting import Reinforce, Rule

KLTokens = Literal["all", "kept"]


@dataclass(frozen=True)
class LossOptions:
    """What every loss is told alike."""

    adv_tau: float
    score_centering: bool
    kl_tau: float
    kl: Direction
    kl_on: KLTokens
    kl_max_ratio: float
    ref_tau: float


def plain_loss(given: LossTensors, rule: Rule, options: LossOptions) -> LossOutputs:
    """The loss of a rule in plain PyTorch, on any device, in the layouts of `LossTensors`."""
    with torch.no_grad():
        tokens = read_tokens(given)
        entries = read_entries(given, tokens)
        table = MetricTable()
        weight, kept = rule.weigh(tokens.log_p, tokens.log_q, tokens.advantages)
        weight = torch.where(tokens.mask, weight, 0.0)  # a rule may give anything elsewhere
        token_metrics(table, tokens, kept)
        centering = expected_score(rule, entries, tokens.advantages)
        centering_metrics(table, tokens, entries, centering)
        scale = -options.adv_tau * tokens.advantages * tokens.weights
        value = scale * (tokens.log_p if isinstance(rule, Reinforce) else weight)
        slopes = Slopes(scale * weight)
        if options.score_centering:
            by_entry, by_tail = centering.by_entry, centering.by_tail
            slopes = Slopes(slopes.by_token, -entries.at(scale) * by_entry, -scale * by_tail)
        divergence, acts = torch.zeros_like(tokens.log_q), tokens.mask
        if options.kl_on == "kept":
            acts = acts & kept
        if options.kl_tau != 0:
            shares = options.kl_tau * tokens.weights
            kl = sampler_kl(tokens, entries, acts, options.kl, options.kl_max_ratio)
            divergence = kl.value
            value = value + shares * divergence
            slopes = Slopes(
                slopes.by_token + shares * kl.slopes.by_token,
                _plus(slopes.by_entry, kl.slopes.by_entry, entries.at(shares)),
                _plus(slopes.by_tail, kl.slopes.by_tail, shares),
            )
        table.mean("sampler_kl", divergence, acts & (options.kl_tau != 0))
        bad = entries.bad | ~(tokens.log_p.isfinite() & tokens.log_q.isfinite())
        from_ref, has_ref = torch.zeros_like(tokens.log_q), tokens.ref is not None
        if tokens.ref is not None:
            from_ref, slope = reference_kl(tokens, tokens.ref, options.kl_max_ratio)
            if options.ref_tau != 0:
                shares = options.ref_tau * tokens.weights
                value = value + shares * from_ref
                slopes = slopes._replace(by_token=slopes.by_token + shares * slope)
                bad |= ~tokens.ref.isfinite()
        table.mean("ref_kl", from_ref, tokens.mask & has_ref)
        metrics, counts = table.reduce()
        # What is bad is NaN in value and in gradient.
        bad |= tokens.log_q > TOLERANCE  # a probability above 1, or none: -log q, say
        value = torch.where(bad, torch.nan, value)
        slopes = _nan_where(bad, _by_known_ids(slopes, entries), entries)
    per_token = _PerToken.apply(
        given.log_p,
        given.support_log_p,
        given.tail_log_p,
        value.reshape(given.mask.shape),
        slopes,
        entries.layout.rows,
    )
    return LossOutputs(
        loss=per_token.sum(),
        metrics=metrics,
        metric_counts=counts,
        per_token_loss=per_token,
    )


def _plus(total: Tensor | None, slope: Tensor | None, factor: Tensor) -> Tensor | None:
    if slope is None:
        return total
    return factor * slope if total is None else total + factor * slope


def _by_known_ids(slopes: Slopes, entries: SupportEntries) -> Slopes:
    """The slopes with the tail's spread over the known ids, where `log p_tail` came of them.

    `grad log p_tail = -sum(p_v grad log p_v) / p_tail`: the published form's `alpha * p_v` taken
    from each known id.
    """
    if entries.tail_given or slopes.by_entry is None or slopes.by_tail is None:
        return slopes
    share = torch.where(entries.p_tail > 0, slopes.by_tail / entries.p_tail, 0.0)
    spread = entries.at(share) * entries.log_p.exp() * entries.valid
    return slopes._replace(by_entry=slopes.by_entry - spread)


def _nan_where(bad: Tensor, slopes: Slopes, entries: SupportEntries) -> Slopes:
    """NaN in the slopes of the rows `bad [N]`."""
    by_token, by_entry, by_tail = slopes
    return Slopes(
        torch.where(bad, torch.nan, by_token),
        None if by_entry is None else torch.where(entries.at(bad), torch.nan, by_entry),
        None if by_tail is None else torch.where(bad, torch.nan, by_tail),
    )


class _PerToken(torch.autograd.Function):
    """Values whose gradient is specified apart: slopes by each log-probability."""

    @staticmethod
    def forward(ctx, log_p, support_log_p, tail_log_p, value, slopes, rows):
        ctx.save_for_backward(*slopes, rows)
        ctx.like = [
            None if t is None else (t.shape, t.dtype) for t in (log_p, support_log_p, tail_log_p)
        ]
        return value.clone()  # in its shape, for FSDP2 warns of outputs that are views

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        by_token, by_entry, by_tail, rows = ctx.saved_tensors
        upstream, grads = upstream.reshape(-1), []
        for i, slopes in enumerate((by_token, by_entry, by_tail)):
            if slopes is None or ctx.like[i] is None or not ctx.needs_input_grad[i]:
                grads.append(None)
                continue
            shape, dtype = ctx.like[i]
            up = to_entries(upstream, rows, len(slopes)) if i == 1 else upstream
            grads.append((up * slopes).to(dtype).reshape(shape))
        return *grads, None, None, None
