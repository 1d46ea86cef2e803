"""What a loss reads, and what it gives."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass

from rl_loss.arguments import require_tensor
from rl_loss.csr import first_row
from rl_loss.host import host_sees

Metrics = dict[str, Tensor]  # 0-dim each


@dataclass
class LossInputs:
    """What a loss reads; the first six names are prime-rl's. Only `trainer_*` carry gradient.

    Support tensors are flat `[nnz]` with `support_offsets`, or padded `[*loss_mask.shape, K]`
    without. Values outside `loss_mask`, and entries where `support_valid` is False, are never
    read, whatever they hold.
    """

    trainer_logprobs: Tensor  # [...] log p of the sampled token
    inference_logprobs: Tensor  # [...] log q of the sampled token
    advantages: Tensor  # [...]
    loss_mask: Tensor  # [...] bool
    loss_weights: Tensor | None = None  # [...] W, 1 by default
    ref_logprobs: Tensor | None = None  # [...] log p of a reference, normalised as the trainer's
    trainer_support_logprobs: Tensor | None = None  # [nnz] or [..., K]
    sampler_support_logprobs: Tensor | None = None  # [nnz] or [..., K]
    support_valid: Tensor | None = None  # [nnz] or [..., K] bool, all by default
    sampler_tail_mass: Tensor | None = None  # N
    trainer_tail_logprobs: Tensor | None = None  # N
    support_offsets: Tensor | None = None  # [N + 1] int64
    support_kind: Tensor | None = None  # N, RowKind; None: HEAD where a tail mass is above 0

    @classmethod
    def from_head(
        cls,
        output: Any,
        support: Any = None,
        *,
        inference_logprobs: Tensor,
        advantages: Tensor,
        loss_mask: Tensor | None = None,
        loss_weights: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
    ) -> "LossInputs":
        """The inputs of a loss from the output of `fused_lm_head`.

        Args:
            output: LMHeadOutput.
            support: the `Support` that the head was called with; by default the output's own.
            inference_logprobs: `[...]` log q of the sampled token, as the sampler reported it.
            advantages: `[...]`.
            loss_mask: `[...]` bool, the tokens of the loss; the head's `active` by default.
            loss_weights: `[...]`.
            ref_logprobs: `[...]` log p of the sampled token under a reference, from a head that
                was given the same support: `fused_lm_head(ref_hidden, ..., support).logprobs`.

        Raises:
            ValueError: a support of other rows than the head's; on the CPU also one of other ids,
                and a loss token that was not active in the head (on a GPU its loss is NaN).
        """
        if not hasattr(output, "support_valid"):
            raise ValueError(f"output must be an LMHeadOutput, got {type(output).__name__}")
        logprobs, active = output.logprobs, output.active
        loss_mask = active if loss_mask is None else require_tensor("loss_mask", loss_mask)
        if loss_mask.shape != active.shape or loss_mask.dtype != torch.bool:
            raise ValueError(
                f"loss_mask must be bool {tuple(active.shape)} as the head's rows, got "
                f"{loss_mask.dtype} {tuple(loss_mask.shape)}"
            )
        if loss_mask.device != active.device:
            raise ValueError(f"loss_mask must be on {active.device}, got {loss_mask.device}")
        if loss_mask is not active:
            logprobs = _where_active(logprobs, loss_mask, active)
        inputs = cls(
            trainer_logprobs=logprobs,
            inference_logprobs=inference_logprobs,
            advantages=advantages,
            loss_mask=loss_mask,
            loss_weights=loss_weights,
            ref_logprobs=ref_logprobs,
        )
        headed = getattr(output, "support", None)
        support = headed if support is None else support
        if support is None:
            if output.support_logprobs.numel():
                raise ValueError("support must be the one that the head was called with, got None")
            return inputs
        if not hasattr(support, "nnz"):
            raise ValueError(f"support must be a Support, got {type(support).__name__}")
        if len(support) != logprobs.numel() or support.nnz != output.support_logprobs.numel():
            raise ValueError(
                f"support must be the head's ({logprobs.numel()} rows, "
                f"{output.support_logprobs.numel()} entries), got {len(support)} rows, "
                f"{support.nnz} entries"
            )
        inputs.trainer_support_logprobs = output.support_logprobs
        inputs.sampler_support_logprobs = _of_head(support, headed)
        inputs.support_valid = output.support_valid
        inputs.sampler_tail_mass = support.sampler_tail_mass
        inputs.trainer_tail_logprobs = output.trainer_tail_logprobs
        inputs.support_offsets = support.offsets
        inputs.support_kind = support.kind
        return inputs


def _where_active(logprobs: Tensor, loss_mask: Tensor, active: Tensor) -> Tensor:
    """The log-probabilities, NaN where a loss token was inactive in the head (on a GPU)."""
    unread = loss_mask & ~active
    if not host_sees(loss_mask.device):
        return torch.where(unread, torch.nan, logprobs)
    if unread.any():
        row = first_row(unread.reshape(-1))
        raise ValueError(f"loss_mask is True in row {row}, which the head had inactive")
    return logprobs


def _of_head(support: Any, headed: Any) -> Tensor:
    """The support's log-probabilities, NaN where the head's had another id (on a GPU)."""
    logprobs = support.sampler_logprobs
    if headed is None or support is headed or torch.compiler.is_compiling():
        return logprobs
    same = all(
        torch.equal(getattr(support.host, name), getattr(headed.host, name))
        for name in ("offsets", "kind")
    )
    if host_sees(logprobs.device):
        same = same and torch.equal(support.ids, headed.ids)
    if not same:
        raise ValueError("support must be the one that the head was called with, got other rows")
    return torch.where(support.ids == headed.ids, logprobs, torch.nan)


@dataclass
class LossOutputs:
    """A loss: its sum, what makes it up, and what to watch."""

    loss: Tensor  # 0-dim, the sum of per_token_loss
    metrics: Metrics  # 0-dim means (maxima where the name ends in _max), detached
    metric_counts: Metrics  # 0-dim, over how many rows each was taken
    per_token_loss: Tensor  # [...] as loss_mask, 0 outside it


# FSDP2 looks for a module's outputs, which tell it when the backward begins, in what is a tree.
register_dataclass(LossOutputs)
