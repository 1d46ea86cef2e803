"""torchtitan: head and loss in place of its chunked loss, for its RL trainer and others.

Of torchtitan 0.3, whose trainers hand hidden states and the LM head to a `ChunkedLossWrapper`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper

from rl_loss.integrations.replaced import replaced
from rl_loss.lm_head import LMHeadOutput, fused_lm_head
from rl_loss.loss.inputs import LossInputs, LossOutputs
from rl_loss.loss.losses import icepop_loss
from rl_loss.loss.metrics import metric_sums
from rl_loss.support import Support


class ReplayLoss(ChunkedLossWrapper):
    """A loss of `rl_loss` over hidden states, with the head of replayed rows gathered.

    `ReplayLoss.Config(loss=partial(icepop_loss, kl_tau=1e-3))` goes where a
    `ChunkedLossWrapper.Config` went: the trainer then sets the LM head and leaves it out of the
    model's forward. There are no chunks: no logits over the vocabulary are held.

    The head runs inside its own module, which FSDP2 gathers for it. A head that is split by
    vocabulary (tensor parallelism) is refused.

    Example:
        >>> config.loss = ReplayLoss.Config(  # doctest: +SKIP
        ...     loss=partial(icepop_loss, kl_tau=1e-3)
        ... )
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        loss: Callable[..., LossOutputs] = icepop_loss
        """A loss of `rl_loss`, or a `functools.partial` of one."""

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        if getattr(config.loss, "keywords", {}).get("ref_tau"):
            raise ValueError(
                "loss must not have a ref_tau: torchtitan's trainers have no reference"
            )
        self.loss, self.lm_head = config.loss, None

    def __call__(  # type: ignore[override]
        self,
        pred: Tensor,
        labels: Tensor,
        global_valid_tokens: float | Tensor | None = None,
        *,
        generator_logprobs: Tensor,
        advantages: Tensor,
        loss_mask: Tensor,
        support: Support | None = None,
        temperature: float | Tensor = 1.0,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss over all loss tokens of the step, and its metrics as torchtitan adds them up.

        Tokens whose `generator_logprobs` are not finite are no loss tokens, as in torchtitan's
        own RL losses, whose `global_valid_tokens` count the others.

        Args:
            pred: `[B, L, D]` hidden states.
            labels, generator_logprobs, advantages, loss_mask: `[B, L]`, shifted already.
            global_valid_tokens: the denominator, over all ranks and micro-batches.
            support: `B * L` rows, aligned to the labels; None: the rows are over the vocabulary.
            temperature: of the sampler: one value, or `[B, L]`.

        Returns:
            The loss, and metrics: shares of the denominator (`/mean`, to be summed over ranks)
            and maxima (`/max`).
        """
        if self.lm_head is None:
            raise ValueError("lm_head must be set before the first call (set_lm_head)")
        if loss_mask.dtype != torch.bool:
            raise ValueError(f"loss_mask must be bool, got {loss_mask.dtype}")
        active, module = loss_mask & generator_logprobs.isfinite(), self.lm_head

        def forward(hidden: Tensor) -> LMHeadOutput:  # inside the module's hooks
            options = {"bias": module.bias, "temperature": temperature, "active": active}
            return fused_lm_head(hidden, module.weight, labels, support, **options)

        with replaced(module, "forward", forward):
            head = module(pred)
        inputs = LossInputs.from_head(
            head, inference_logprobs=generator_logprobs, advantages=advantages
        )
        out, count = self.loss(inputs), 1 if global_valid_tokens is None else global_valid_tokens
        count = torch.as_tensor(count, dtype=out.loss.dtype, device=out.loss.device).clamp(min=1)
        sums, counts = metric_sums(out.metrics, out.metric_counts)
        tokens = counts["importance_ratio_mean"]  # every loss token
        loss = out.loss / count
        metrics = {"loss/mean": loss.detach()}
        for name in _OF_EVERY_TOKEN:
            metrics[f"loss/{name.removesuffix('_mean')}/mean"] = sums[name] / count
        metrics["loss/importance_ratio/max"] = out.metrics["importance_ratio_max"]
        metrics["loss/tokens/mean"] = tokens / count  # 1 over all ranks and micro-batches
        return loss, metrics


# Means over all loss tokens: over any other rows a share of the global count would be no mean.
_OF_EVERY_TOKEN = (
    "mismatch_kl",
    "is_masked",
    "importance_ratio_mean",
    "log_ratio_clipped",
    "score_centering/uncentered",
)
