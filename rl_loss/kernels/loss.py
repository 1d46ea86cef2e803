"""A named loss on kernels: one autograd function, two launches forward and one backward.

`rl_loss.loss.definition` is what they compute. The forward finds the slopes as well, as the
definition does: the backward multiplies them with its upstream.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_loss.host import launching_on
from rl_loss.kernels.loss_passes import Like, RowLosses, Wanted, gradients, row_losses
from rl_loss.kernels.loss_sums import Sums, totals
from rl_loss.loss.definition import LossOptions
from rl_loss.loss.inputs import LossOutputs
from rl_loss.loss.metrics import METRICS
from rl_loss.loss.tensors import LossTensors
from rl_loss.loss.weighting import Rule


def kernel_loss(given: LossTensors, rule: Rule, options: LossOptions) -> LossOutputs:
    """The loss of a rule that is no caller's own, with flat entries or none."""
    leaves = given.log_p, given.support_log_p, given.tail_log_p
    wanted = _wanted(leaves, options)
    loss, per_token, metrics, counts = _KernelLoss.apply(*leaves, given, rule, options, wanted)
    return LossOutputs(
        loss=loss,
        metrics=dict(zip(METRICS, metrics.unbind(), strict=True)),
        metric_counts=dict(zip(METRICS, counts.unbind(), strict=True)),
        per_token_loss=per_token,
    )


class _KernelLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, log_p, support_log_p, tail_log_p, given, rule, options, wanted):
        rows, sums = loss_fwd(given, rule, options, wanted)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(sums.metrics, sums.counts)
        ctx.save_for_backward(rows.slopes, given.offsets)
        pairs = zip((log_p, support_log_p, tail_log_p), wanted, strict=True)
        ctx.like = [Like(leaf.shape, leaf.dtype) if want else None for leaf, want in pairs]
        return sums.loss, rows.per_token, sums.metrics, sums.counts

    @staticmethod
    @once_differentiable
    def backward(ctx, by_loss, by_token, *_):
        slopes, offsets = ctx.saved_tensors
        grads = loss_bwd(slopes, offsets, by_loss, by_token, ctx.like)
        return *grads, None, None, None, None


def _wanted(leaves: tuple[Tensor | None, ...], options: LossOptions) -> Wanted:
    """Without centering and without a divergence of distributions a loss knows no entry."""
    known = options.score_centering or (options.kl_tau != 0 and options.kl != "squared")
    enabled = torch.is_grad_enabled()
    token, entry, tail = (enabled and leaf is not None and leaf.requires_grad for leaf in leaves)
    return Wanted(token, entry and known, tail and known)


def loss_fwd(
    given: LossTensors, rule: Rule, options: LossOptions, wanted: Wanted
) -> tuple[RowLosses, Sums]:
    """The loss of every row with the slopes that are wanted, and what the rows add up to."""
    with launching_on(given.mask):
        rows = row_losses(given, rule, options, wanted)
        return rows, totals(rows.sums)


def loss_bwd(
    slopes: Tensor,  # as `RowLosses` has them
    offsets: Tensor | None,  # [N + 1]
    by_loss: Tensor | None,  # [] upstream
    by_token: Tensor | None,  # [...] upstream
    like: list[Like | None],  # the gradients by token, entry and tail; None: not wanted
) -> list[Tensor | None]:
    """The gradients, each rounded once."""
    if by_loss is None and by_token is None:
        return [None] * len(like)
    with launching_on(slopes):
        return gradients(slopes, offsets, by_loss, by_token, like)
