"""Head and loss in one pass: each chunk's gradient is formed while its logits are still there."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from rl_loss.flat_rows import HeadArguments
from rl_loss.lm_head import fused_lm_head
from rl_loss.loss.inputs import LossInputs, LossOutputs
from rl_loss.losses import icepop_loss, ipo_loss, policy_loss, reinforce_loss
from rl_loss.support import Support
from rl_loss.vocab_parallel import outside_graphs_with

_LOSSES = (ipo_loss, icepop_loss, reinforce_loss, policy_loss)


@outside_graphs_with("process_group", "grad_into")
def fused_lm_head_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    support: Support | None = None,
    *,
    loss: Callable[..., LossOutputs],
    inference_logprobs: Tensor,
    advantages: Tensor,
    active: Tensor | None = None,
    loss_weights: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    impl: Literal["auto", "reference", "triton"] = "auto",
    logits_dtype: torch.dtype | None = None,
    workspace_mib: float = 2560,
    vocab_size: int | None = None,
    process_group: Any = None,
    sequence_parallel: bool = False,
    grad_into: Tensor | None = None,
) -> LossOutputs:
    """`fused_lm_head` and a loss at once: three matrix products over the vocabulary, not four.

    The forward computes the gradients too, a chunk of rows at a time: logits, log-probabilities,
    loss and gradient while that chunk's logits are there. The backward multiplies them with its
    upstream. The numbers are those of the two steps.

    On a GPU rows over the vocabulary hold a chunk of `workspace_mib` and the weight's gradient
    in float32 (4 V H bytes) at the peak; REPLAY rows, which have no such logits, cost what they
    cost in two steps. Without kernels it is the two steps. With `grad_into` nothing is added before
    the backward: until then those float32 gradients are held, and of REPLAY rows what their entries
    have, 12 bytes each.

    Args:
        hidden, weight, labels, support, active, temperature, bias, softcap, logit_scale, impl,
            logits_dtype, vocab_size, process_group, sequence_parallel, grad_into: as
            `fused_lm_head`.
        loss: `ipo_loss`, `icepop_loss`, `reinforce_loss` or `policy_loss`, or a
            `functools.partial` of one with its options: losses that are sums over tokens.
        inference_logprobs: `[...]` log q of the sampled token.
        advantages: `[...]`.
        loss_weights: `[...]` W. Dividing by the token count here instead of afterwards saves the
            gradients one rounding: they are rounded to their dtype before the upstream is known,
            and a second rounding can shift them all alike (bfloat16 by up to 0.2 %).
        ref_logprobs: `[...]` log p of the sampled token under a reference.
        workspace_mib: MiB that a chunk of logits may take: fewer rows a chunk add the weight's
            gradient up more often.

    Returns:
        LossOutputs; `loss` carries gradient to hidden, weight and bias, `per_token_loss` and the
        metrics are detached.

    Raises:
        ValueError: as `fused_lm_head` and the loss, and any other `loss`.

    Example:
        >>> hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(9, 4)
        >>> out = fused_lm_head_loss(
        ...     hidden, weight, torch.tensor([1, 2, 8]), loss=partial(ipo_loss, eps=0.2),
        ...     inference_logprobs=torch.full((3,), -2.0), advantages=torch.ones(3),
        ... )
        >>> out.loss.backward()
        >>> hidden.grad.shape
        torch.Size([3, 4])
    """
    rule = loss.func if isinstance(loss, partial) else loss
    if rule not in _LOSSES or (isinstance(loss, partial) and loss.args):
        raise ValueError(
            "loss must be ipo_loss, icepop_loss, reinforce_loss or policy_loss, or a "
            f"functools.partial of one with keyword options, got {loss!r}: any other takes the two "
            "steps"
        )
    options: dict[str, Any] = {
        "temperature": temperature,
        "bias": bias,
        "softcap": softcap,
        "logit_scale": logit_scale,
        "active": active,
        "entropy": None,
        "full": False,
        "impl": impl,
        "logits_dtype": logits_dtype,
        "workspace_mib": workspace_mib,
        "vocab_size": vocab_size,
        "process_group": process_group,
        "sequence_parallel": sequence_parallel,
        "grad_into": grad_into,
    }
    given = HeadArguments(hidden, weight, labels, support, **options)
    per_token: dict[str, Any] = {
        "inference_logprobs": inference_logprobs,
        "advantages": advantages,
        "loss_weights": loss_weights,
        "ref_logprobs": ref_logprobs,
    }
    _check_per_token(per_token, given)
    if given.on_kernels:
        from rl_loss.kernels.one_pass import one_pass

        return one_pass(given, loss, per_token)
    head = fused_lm_head(hidden, weight, labels, support, **options)
    out = loss(LossInputs.from_head(head, support, **per_token))
    return LossOutputs(out.loss, out.metrics, out.metric_counts, out.per_token_loss.detach())


def _check_per_token(values: dict[str, Any], given: HeadArguments) -> None:
    shape, device = given.labels.shape, given.hidden.device
    for name, value in values.items():
        if value is None and name in ("loss_weights", "ref_logprobs"):
            continue
        if not isinstance(value, Tensor) or value.shape != shape:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{name} must be {tuple(shape)} as labels, got {got}")
        if value.device != device:
            raise ValueError(f"{name} must be on {device} as hidden, got {value.device}")
