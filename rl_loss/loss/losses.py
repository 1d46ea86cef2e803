"""Policy-gradient losses on log-probabilities: ipo, icepop and reinforce."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_loss.arguments import require_number
from rl_loss.csr import TOLERANCE
from rl_loss.loss.centering import expected_score
from rl_loss.loss.inputs import LossOutputs
from rl_loss.loss.metrics import MetricTable, centering_metrics, token_metrics
from rl_loss.loss.rows import read_evidence, read_tokens, to_entries
from rl_loss.loss.sampler_kl import Direction, sampler_kl
from rl_loss.loss.weighting import IcePop, Ipo, Reinforce, Rule


def ipo_loss(
    inputs: Any,
    *,
    adv_tau: float = 1.0,
    score_centering: bool = True,
    kl_tau: float = 0.0,
    kl: Direction = "forward",
    eps: float = 0.3,
    max_importance_ratio: float = 1e4,
) -> LossOutputs:
    """The ratio loss on tokens whose probabilities agree: `w = min(r, cap)` if `|p - q| <= eps`.

    The gradient of a loss token is `-adv_tau * A * W * (w grad log p_y - grad mu)`, where `mu`
    is the sampler-expected score, plus `kl_tau * W * grad KL`; the value is
    `-adv_tau * A * W * w`. Truncated importance sampling is `eps=1, max_importance_ratio=C`.

    Args:
        inputs: `LossInputs`, or any object with its fields; missing ones count as None.
        adv_tau: the factor of the advantages.
        score_centering: subtract the sampler-expected score, on rejected tokens too.
        kl_tau: the factor of the sampler KL; 0 computes none.
        kl: "forward" `KL(q || p)`, "reverse" `KL(p || q)`, or "squared" `(log r)**2`.
        eps: the largest difference of the probabilities p and q that keeps a token.
        max_importance_ratio: the cap of the ratio `r = p / q`.

    Returns:
        LossOutputs; `loss` is the sum over loss tokens: divide by the global token count.

    Raises:
        ValueError: a shape, dtype or device that does not fit, or an option out of range. A
            loss token with evidence that no number may come of (a FAILED row, probabilities
            that are not finite, above 1, or do not add up to 1) is NaN.

    Source: ipo of prime-rl; score centering: arXiv 2609.20807.

    Example:
        >>> from rl_loss import LossInputs
        >>> logp = torch.tensor([-1.0, -2.0], requires_grad=True)
        >>> on = torch.ones(2, dtype=torch.bool)
        >>> out = ipo_loss(LossInputs(logp, logp.detach(), torch.tensor([1.0, -1.0]), on))
        >>> out.per_token_loss.tolist()
        [-1.0, 1.0]
    """
    eps = require_number("eps", eps)
    max_importance_ratio = require_number("max_importance_ratio", max_importance_ratio)
    if not eps >= 0:
        raise ValueError(f"eps must be at least 0, got {eps}")
    if not max_importance_ratio > 0:
        raise ValueError(f"max_importance_ratio must be above 0, got {max_importance_ratio}")
    rule = Ipo(eps, max_importance_ratio)
    return _loss(inputs, rule, adv_tau, score_centering, kl_tau, kl)


def icepop_loss(
    inputs: Any,
    *,
    adv_tau: float = 1.0,
    score_centering: bool = True,
    kl_tau: float = 0.0,
    kl: Direction = "forward",
    ratio_low: float = 0.2,
    ratio_high: float = 5.0,
) -> LossOutputs:
    """The ratio loss on tokens whose ratio is in range: `w = r` if `low <= r <= high`, else 0.

    Gradient, value, other arguments, errors: as `ipo_loss`.

    Args:
        inputs, adv_tau, score_centering, kl_tau, kl: as `ipo_loss`.
        ratio_low, ratio_high: the inclusive bounds of the ratio `r = p / q`.

    Source: IcePop, arXiv 2510.18855; score centering: arXiv 2609.20807.

    Example:
        >>> from rl_loss import LossInputs
        >>> logp = torch.tensor([-1.0], requires_grad=True)
        >>> on = torch.ones(1, dtype=torch.bool)
        >>> inputs = LossInputs(logp, torch.tensor([-9.0]), torch.ones(1), on)
        >>> float(icepop_loss(inputs).metrics["is_masked"])
        1.0
    """
    ratio_low = require_number("ratio_low", ratio_low)
    ratio_high = require_number("ratio_high", ratio_high)
    if not 0 <= ratio_low <= ratio_high:
        raise ValueError(
            f"ratio_low and ratio_high must be 0 <= low <= high, got {ratio_low}, {ratio_high}"
        )
    if ratio_high == 0:
        raise ValueError("ratio_high must be above 0, got 0")
    rule = IcePop(ratio_low, ratio_high)
    return _loss(inputs, rule, adv_tau, score_centering, kl_tau, kl)


def reinforce_loss(
    inputs: Any,
    *,
    adv_tau: float = 1.0,
    score_centering: bool = True,
    kl_tau: float = 0.0,
    kl: Direction = "forward",
) -> LossOutputs:
    """The loss without an importance weight, `w = 1`; its value is `-adv_tau * A * W * log p`.

    Gradient, arguments, errors: as `ipo_loss`.

    Source: REINFORCE (Williams, 1992); score centering: arXiv 2609.20807.

    Example:
        >>> from rl_loss import LossInputs
        >>> logp = torch.tensor([-1.0], requires_grad=True)
        >>> on = torch.ones(1, dtype=torch.bool)
        >>> out = reinforce_loss(LossInputs(logp, torch.tensor([-9.0]), torch.ones(1), on))
        >>> float(out.loss)
        1.0
    """
    return _loss(inputs, Reinforce(), adv_tau, score_centering, kl_tau, kl)


def _loss(
    inputs: Any, rule: Rule, adv_tau: float, score_centering: bool, kl_tau: float, kl: Direction
) -> LossOutputs:
    if kl not in ("forward", "reverse", "squared"):
        raise ValueError(f'kl must be "forward", "reverse" or "squared", got {kl!r}')
    adv_tau, kl_tau = require_number("adv_tau", adv_tau), require_number("kl_tau", kl_tau)
    for name, factor in {"adv_tau": adv_tau, "kl_tau": kl_tau}.items():
        if not math.isfinite(factor) or (name == "kl_tau" and factor < 0):
            raise ValueError(
                f"{name} must be finite{', at least 0' * (name == 'kl_tau')}, got {factor}"
            )
    with torch.no_grad():
        tokens = read_tokens(inputs)
        evidence = read_evidence(inputs, tokens)
        table = MetricTable()
        weight, kept = rule.weigh(tokens.log_p, tokens.log_q)
        token_metrics(table, tokens, kept)
        centering = expected_score(rule, evidence)
        centering_metrics(table, tokens, evidence, centering)
        scale = -adv_tau * tokens.advantages * tokens.weights
        value = scale * (tokens.log_p if isinstance(rule, Reinforce) else weight)
        d_tokens = scale * weight
        d_entries: Tensor | None = None
        d_tails: Tensor | None = None
        if score_centering:
            d_entries = -evidence.at(scale) * centering.entries
            d_tails = -scale * centering.tails
        divergence = torch.zeros_like(tokens.log_q)
        if kl_tau != 0:
            shares = kl_tau * tokens.weights
            kl_rows = sampler_kl(kl, tokens, evidence)
            divergence = kl_rows.value
            value = value + shares * divergence
            d_tokens = d_tokens + shares * kl_rows.tokens
            d_entries = _plus(d_entries, kl_rows.entries, evidence.at(shares))
            d_tails = _plus(d_tails, kl_rows.tails, shares)
        table.mean("sampler_kl", divergence, tokens.mask & (kl_tau != 0))
        if d_entries is not None and d_tails is not None and not evidence.tail_given:
            # log p_tail came of the known ids: `grad = -sum(p_v grad log p_v) / p_tail`, which
            # is the published form's `alpha * p_v` taken from each of them.
            share = torch.where(evidence.p_tail > 0, d_tails / evidence.p_tail, 0.0)
            d_entries = d_entries - evidence.at(share) * evidence.log_p.exp() * evidence.valid
        metrics, counts = table.reduce()
        # What is bad is NaN in value and in gradient.
        bad = evidence.bad | ~(tokens.log_p.isfinite() & tokens.log_q.isfinite())
        bad |= tokens.log_q > TOLERANCE  # a probability above 1, or none: -log q, say
        value = torch.where(bad, torch.nan, value)
        d_tokens = torch.where(bad, torch.nan, d_tokens)
        if d_entries is not None and d_tails is not None:
            d_entries = torch.where(evidence.at(bad), torch.nan, d_entries)
            d_tails = torch.where(bad, torch.nan, d_tails)
    per_token = _PerToken.apply(
        inputs.trainer_logprobs,
        getattr(inputs, "trainer_support_logprobs", None),
        getattr(inputs, "trainer_tail_logprobs", None),
        value,
        d_tokens,
        d_entries,
        d_tails,
        evidence.layout.rows,
    )
    return LossOutputs(
        loss=per_token.sum(),
        metrics=metrics,
        metric_counts=counts,
        per_token_loss=per_token.reshape(inputs.loss_mask.shape),
    )


def _plus(total: Tensor | None, slope: Tensor | None, factor: Tensor) -> Tensor | None:
    if slope is None:
        return total
    return factor * slope if total is None else total + factor * slope


class _PerToken(torch.autograd.Function):
    """Values whose gradient is specified apart: slopes by each log-probability."""

    @staticmethod
    def forward(ctx, log_p, support_log_p, tail_log_p, value, d_tokens, d_entries, d_tails, rows):
        ctx.save_for_backward(d_tokens, d_entries, d_tails, rows)
        ctx.like = [
            None if t is None else (t.shape, t.dtype) for t in (log_p, support_log_p, tail_log_p)
        ]
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        d_tokens, d_entries, d_tails, rows = ctx.saved_tensors
        grads = []
        for i, slopes in enumerate((d_tokens, d_entries, d_tails)):
            if slopes is None or ctx.like[i] is None or not ctx.needs_input_grad[i]:
                grads.append(None)
                continue
            shape, dtype = ctx.like[i]
            up = to_entries(upstream, rows, len(slopes)) if i == 1 else upstream
            grads.append((up * slopes).to(dtype).reshape(shape))
        return *grads, None, None, None, None, None
