"""Policy-gradient losses on log-probabilities: ipo, icepop, reinforce, and any other rule."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_loss.arguments import require_number
from rl_loss.csr import TOLERANCE
from rl_loss.loss.centering import expected_score
from rl_loss.loss.divergences import Direction, reference_kl, sampler_kl
from rl_loss.loss.inputs import LossOutputs
from rl_loss.loss.metrics import MetricTable, centering_metrics, token_metrics
from rl_loss.loss.rows import Slopes, SupportEntries, read_entries, read_tokens, to_entries
from rl_loss.loss.weighting import Custom, IcePop, Ipo, Reinforce, Rule, RuleFunction

KLTokens = Literal["all", "kept"]


def ipo_loss(
    inputs: Any,
    *,
    adv_tau: float = 1.0,
    score_centering: bool = True,
    kl_tau: float = 0.0,
    kl: Direction = "forward",
    kl_on: KLTokens = "all",
    kl_max_ratio: float = 10.0,
    ref_tau: float = 0.0,
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
        kl_on: the loss tokens that have the sampler KL: "all", or those that the rule has "kept";
            a rejected token then has none, and its row's support none either.
        kl_max_ratio: at least 1; beyond this ratio a KL estimate from samples (DRAWS and NONE
            rows, ids alone) goes on along its tangent in `log r`, so that its slope by `log p`
            is at most `kl_max_ratio - 1` forward, `kl_max_ratio * log(kl_max_ratio)` reverse.
            The bias: a forward estimate is low by at most p's mass on the ids beyond, a reverse
            one by at most what they add to the divergence. math.inf leaves `log r <= 20`.
            "squared" is not bounded: its slope is `2 log r`. Bounds the reference KL alike.
        ref_tau: the factor of the KL to a reference, `W * (e^x - 1 - x)`, `x = ref - log p` of
            every loss token, whose `ref_logprobs` are then needed. On REPLAY rows both sides are
            over the kept set: the head gives the reference's with the same support.
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
    options = _options(adv_tau, score_centering, kl_tau, kl, kl_on, kl_max_ratio, ref_tau)
    return _loss(inputs, rule, options)


def icepop_loss(
    inputs: Any,
    *,
    adv_tau: float = 1.0,
    score_centering: bool = True,
    kl_tau: float = 0.0,
    kl: Direction = "forward",
    kl_on: KLTokens = "all",
    kl_max_ratio: float = 10.0,
    ref_tau: float = 0.0,
    ratio_low: float = 0.2,
    ratio_high: float = 5.0,
) -> LossOutputs:
    """The ratio loss on tokens whose ratio is in range: `w = r` if `low <= r <= high`, else 0.

    Gradient, value, other arguments, errors: as `ipo_loss`.

    Args:
        inputs, adv_tau, score_centering, kl_tau, kl, kl_on, kl_max_ratio, ref_tau: as `ipo_loss`.
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
    options = _options(adv_tau, score_centering, kl_tau, kl, kl_on, kl_max_ratio, ref_tau)
    return _loss(inputs, rule, options)


def reinforce_loss(
    inputs: Any,
    *,
    adv_tau: float = 1.0,
    score_centering: bool = True,
    kl_tau: float = 0.0,
    kl: Direction = "forward",
    kl_on: KLTokens = "all",
    kl_max_ratio: float = 10.0,
    ref_tau: float = 0.0,
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
    options = _options(adv_tau, score_centering, kl_tau, kl, kl_on, kl_max_ratio, ref_tau)
    return _loss(inputs, Reinforce(), options)


def policy_loss(
    inputs: Any,
    *,
    rule: RuleFunction,
    adv_tau: float = 1.0,
    score_centering: bool = True,
    kl_tau: float = 0.0,
    kl: Direction = "forward",
    kl_on: KLTokens = "all",
    kl_max_ratio: float = 10.0,
    ref_tau: float = 0.0,
) -> LossOutputs:
    """The loss of any rule of a token, `w(log p, log q, A)`: PPO's clip, CISPO, KPop, DPPO, yours.

    Gradient, value, other arguments, errors: as `ipo_loss`, with `w` the rule's. The sampled
    token and, with its row's advantage, every support entry go through the rule, which makes the
    centering exact whatever the rule is. It is called without autograd, on flat tensors of any
    length; places that no loss reads hold 0, and what it gives there is not read.

    Args:
        rule: from log p, log q and the advantage of each token, `[M]` each, its weight `[M]`: what
            its `grad log p` is multiplied with, beside the advantage; 0 rejects it. Where q is
            known for some ids alone, every id of the tail has the ratio of the tail's sums, and
            the rule is asked about one of hardly any mass; `score_centering/tail_inexact` counts
            the rows where one that held the whole tail would weigh otherwise.

    Raises:
        ValueError: a rule that is not callable, or gives no tensor of its arguments' shape.

    Source: the clip of PPO, arXiv 1707.06347, in the example; docs/math.md has the others.

    Example:
        >>> from rl_loss import LossInputs
        >>> def ppo_clip(log_p, log_q, advantages, low=0.2, high=0.28):
        ...     ratio = (log_p - log_q).exp()
        ...     clipped = torch.where(advantages > 0, ratio > 1 + high, ratio < 1 - low)
        ...     return torch.where(clipped, 0.0, ratio)
        >>> logp = torch.tensor([-1.0, -1.0, -1.5], requires_grad=True)
        >>> logq, on = torch.tensor([-1.0, -2.0, -1.4]), torch.ones(3, dtype=torch.bool)
        >>> out = policy_loss(LossInputs(logp, logq, torch.ones(3), on), rule=ppo_clip)
        >>> out.metrics["is_masked"]
        tensor(0.3333)
    """
    if not callable(rule):
        raise ValueError(f"rule must be a function of tokens, got {type(rule).__name__}")
    options = _options(adv_tau, score_centering, kl_tau, kl, kl_on, kl_max_ratio, ref_tau)
    return _loss(inputs, Custom(rule), options)


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


def _options(
    adv_tau: float,
    score_centering: bool,
    kl_tau: float,
    kl: Direction,
    kl_on: KLTokens,
    kl_max_ratio: float,
    ref_tau: float,
) -> LossOptions:
    """The options of a loss, checked."""
    if kl not in ("forward", "reverse", "squared"):
        raise ValueError(f'kl must be "forward", "reverse" or "squared", got {kl!r}')
    if kl_on not in ("all", "kept"):
        raise ValueError(f'kl_on must be "all" or "kept", got {kl_on!r}')
    factors = {"adv_tau": adv_tau, "kl_tau": kl_tau, "ref_tau": ref_tau}
    for name, value in factors.items():
        factor = factors[name] = require_number(name, value)
        least = "" if name == "adv_tau" else ", at least 0"
        if not math.isfinite(factor) or (least and factor < 0):
            raise ValueError(f"{name} must be finite{least}, got {factor}")
    kl_max_ratio = require_number("kl_max_ratio", kl_max_ratio)
    if not kl_max_ratio >= 1:
        raise ValueError(f"kl_max_ratio must be at least 1, got {kl_max_ratio}")
    return LossOptions(
        score_centering=score_centering, kl=kl, kl_on=kl_on, kl_max_ratio=kl_max_ratio, **factors
    )


def _loss(inputs: Any, rule: Rule, options: LossOptions) -> LossOutputs:
    with torch.no_grad():
        tokens = read_tokens(inputs)
        if options.ref_tau > 0 and tokens.ref is None:
            raise ValueError(f"ref_logprobs must be given with ref_tau {options.ref_tau}, got None")
        entries = read_entries(inputs, tokens)
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
        inputs.trainer_logprobs,
        getattr(inputs, "trainer_support_logprobs", None),
        getattr(inputs, "trainer_tail_logprobs", None),
        value.reshape(inputs.loss_mask.shape),
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
