"""Policy-gradient losses on log-probabilities: ipo, icepop, reinforce, and any other rule."""

import math
import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from rl_loss.arguments import require_number
from rl_loss.loss.definition import KLTokens, LossOptions, plain_loss
from rl_loss.loss.divergences import Direction
from rl_loss.loss.inputs import LossOutputs
from rl_loss.loss.tensors import LossTensors, loss_tensors
from rl_loss.loss.weighting import Custom, IcePop, Ipo, Reinforce, Rule, RuleFunction


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
    options = _options(
        adv_tau=adv_tau,
        score_centering=score_centering,
        kl_tau=kl_tau,
        kl=kl,
        kl_on=kl_on,
        kl_max_ratio=kl_max_ratio,
        ref_tau=ref_tau,
    )
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
    options = _options(
        adv_tau=adv_tau,
        score_centering=score_centering,
        kl_tau=kl_tau,
        kl=kl,
        kl_on=kl_on,
        kl_max_ratio=kl_max_ratio,
        ref_tau=ref_tau,
    )
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
    options = _options(
        adv_tau=adv_tau,
        score_centering=score_centering,
        kl_tau=kl_tau,
        kl=kl,
        kl_on=kl_on,
        kl_max_ratio=kl_max_ratio,
        ref_tau=ref_tau,
    )
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

    Source: the clip of PPO, arXiv 1707.06347, in the example; docs/rules.md has the others.

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
    options = _options(
        adv_tau=adv_tau,
        score_centering=score_centering,
        kl_tau=kl_tau,
        kl=kl,
        kl_on=kl_on,
        kl_max_ratio=kl_max_ratio,
        ref_tau=ref_tau,
    )
    return _loss(inputs, Custom(rule), options)


def _options(
    *,
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
    given = loss_tensors(inputs)
    if options.ref_tau > 0 and given.ref is None:
        raise ValueError(f"ref_logprobs must be given with ref_tau {options.ref_tau}, got None")
    if _on_kernels(given, rule):
        from rl_loss.kernels.loss import kernel_loss

        return kernel_loss(given, rule, options)
    return plain_loss(given, rule, options)


def _on_kernels(given: LossTensors, rule: Rule) -> bool:
    """Whether the kernels compute a loss: of a named rule, with flat entries or none, on a GPU.

    A compiler fuses the definition by itself; float64 has it too, for a kernel takes options as
    float32.
    """
    if isinstance(rule, Custom) or given.padded or torch.compiler.is_compiling():
        return False
    device = given.mask.device.type
    compiled = device == "cuda" and given.log_p.dtype != torch.float64
    interpreted = device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return (compiled or interpreted) and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
