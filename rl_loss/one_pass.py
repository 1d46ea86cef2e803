"""Head and loss in one pass: each chunk's gradient is formed while its logits are still there."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_loss.csr import RowKind
from rl_loss.flat_rows import (
    check_options,
    check_tensors,
    host_rows_over_v,
    local_tensor,
    use_kernels,
)
from rl_loss.host import launching_on
from rl_loss.kernels.gradient_sums import GradientSums
from rl_loss.kernels.operators import replayed_rows
from rl_loss.kernels.records import HeadScalars, HeadTensors, head_entries, head_logits
from rl_loss.lm_head import fused_lm_head, head_inputs
from rl_loss.logits import accumulation_dtype
from rl_loss.loss.inputs import LossInputs, LossOutputs
from rl_loss.loss.losses import icepop_loss, ipo_loss, reinforce_loss
from rl_loss.loss.metrics import combine_metrics
from rl_loss.support import Support

_LOSSES = (ipo_loss, icepop_loss, reinforce_loss)


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
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    impl: Literal["auto", "reference", "triton"] = "auto",
    logits_dtype: torch.dtype | None = None,
    workspace_mib: float = 2560,
    process_group: Any = None,
) -> LossOutputs:
    """`fused_lm_head` and a loss at once: three matrix products over the vocabulary, not four.

    The forward computes the gradients too, a chunk of rows at a time: logits, log-probabilities,
    loss and gradient while that chunk's logits are there. The backward multiplies them with its
    upstream. The numbers are those of the two steps.

    On a GPU rows over the vocabulary hold a chunk of `workspace_mib` and the weight's gradient
    in float32 (4 V H bytes) at the peak; REPLAY rows, which have no such logits, cost what they
    cost in two steps. Without kernels it is the two steps.

    Args:
        hidden, weight, labels, support, active, temperature, bias, softcap, logit_scale, impl,
            logits_dtype, process_group: as `fused_lm_head`.
        loss: `ipo_loss`, `icepop_loss` or `reinforce_loss`, or a `functools.partial` of one with
            its options: losses that are sums over tokens.
        inference_logprobs: `[...]` log q of the sampled token.
        advantages: `[...]`.
        loss_weights: `[...]` W. Dividing by the token count here instead of afterwards saves the
            gradients one rounding: they are rounded to their dtype before the upstream is known,
            and a second rounding can shift them all alike (bfloat16 by up to 0.2 %).
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
            "loss must be ipo_loss, icepop_loss or reinforce_loss, or a functools.partial of one "
            f"with keyword options, got {loss!r}: any other takes the two steps"
        )
    weight, bias = local_tensor("weight", weight), local_tensor("bias", bias)
    check_tensors(hidden, weight, labels, support, bias, active)
    per_token: dict[str, Any] = {
        "inference_logprobs": inference_logprobs,
        "advantages": advantages,
        "loss_weights": loss_weights,
    }
    for name, value in per_token.items():
        if value is None and name == "loss_weights":
            continue
        if not isinstance(value, Tensor) or value.shape != labels.shape:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{name} must be {tuple(labels.shape)} as labels, got {got}")
        if value.device != hidden.device:
            raise ValueError(f"{name} must be on {hidden.device} as hidden, got {value.device}")
    if not use_kernels(impl, hidden.device):
        head = fused_lm_head(
            hidden, weight, labels, support,
            temperature=temperature, bias=bias, softcap=softcap, logit_scale=logit_scale,
            active=active, impl=impl, logits_dtype=logits_dtype, workspace_mib=workspace_mib,
            process_group=process_group,
        )  # fmt: skip
        out = loss(LossInputs.from_head(head, support, **per_token))
        return LossOutputs(out.loss, out.metrics, out.metric_counts, out.per_token_loss.detach())
    transform = check_options(
        softcap, logit_scale, None, logits_dtype, workspace_mib, process_group
    )
    if support is None:
        support = Support.empty(labels.numel()).to(hidden.device, non_blocking=True)
    if active is not None and active.device.type != "cpu" and len(support.plan.over_v):
        active = active.cpu()  # the one sync: which rows are in a chunk
    options = temperature, bias, active, transform, None, int(workspace_mib * 2**20)
    tensors, scalars, on = head_inputs(hidden, weight, labels, support, *options)
    step = _Step(support, scalars, loss, active, on, per_token)
    total = _OnePass.apply(tensors.hidden, weight, bias, tensors, step)
    metrics, counts = combine_metrics(step.metrics)
    return LossOutputs(total, metrics, counts, step.per_token.reshape(labels.shape))


class _OnePass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, tensors, step):
        tensors = tensors._replace(hidden=hidden, weight=weight, bias=bias)
        with torch.autocast(hidden.device.type, enabled=False), launching_on(hidden):
            total, grads = step.run(tensors, [n and step.grads for n in ctx.needs_input_grad[:3]])
        ctx.save_for_backward(*grads)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        # One value, not 0-dim: the product is formed in the wider dtype and rounded when stored.
        scale = upstream.reshape(1)
        grads = (
            torch.mul(grad, scale, out=torch.empty_like(grad)) if need else None
            for grad, need in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        )
        return *grads, None, None


class _Step:
    """One batch: the rows over their supports first, then chunks of rows over the vocabulary."""

    def __init__(
        self,
        support: Support,
        scalars: HeadScalars,
        loss: Callable[..., LossOutputs],
        active: Tensor | None,  # [...] bool, on the host where rows are over the vocabulary
        on: Tensor,  # [...] bool
        per_token: dict[str, Any],
    ) -> None:
        self.support, self.scalars, self.loss = support, scalars, loss
        self.grads = torch.is_grad_enabled()
        self.on = on.reshape(-1)
        self.values = {
            name: None if value is None else value.reshape(-1) for name, value in per_token.items()
        }
        self.over_v = host_rows_over_v(support, active)  # [D]
        self.metrics: list[tuple[dict, dict]] = []

    def run(self, t: HeadTensors, wanted: list[bool]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The loss, and the gradients of hidden, weight and bias."""
        from rl_loss.kernels.entry_grads import EntryGrads, entry_grads

        s, n = self.scalars, len(t.labels)
        need = wanted[0], wanted[1], wanted[2]
        logits, entries = head_logits(t, s), head_entries(t)
        self.per_token = t.hidden.new_zeros(n, dtype=accumulation_dtype(t.hidden, t.weight))
        self.total = self.per_token.new_zeros(())
        out = replayed_rows(t, s)
        grads = EntryGrads.new(out, len(t.over_v) > 0)
        upstreams: tuple[Tensor | None, ...] = (None,) * 4
        if len(self.over_v) < n or n == 0:
            # Rows over the vocabulary are not read here: they have no loss yet.
            mask = self.on & (t.kind == RowKind.REPLAY) if len(t.over_v) else self.on
            upstreams = self._slopes(out, slice(0, n), mask)
        entry_grads(grads, out, entries, logits, upstreams, False)
        work = GradientSums(t, s, need)
        work.grads, work.state = grads, out.state
        base = self._chunks(t, out, grads, work) if len(t.over_v) else None
        if base is not None:
            work.start_weight()
            if len(t.ids):
                work.finish_block(slice(0, len(t.weight)), base)
            else:
                work.d_weight.copy_(base)  # type: ignore[union-attr]
        return self.total, work.finish()

    def _chunks(self, t: HeadTensors, out: Any, grads: Any, work: GradientSums) -> Tensor | None:
        """Every row over the vocabulary; the weight's gradient `[V, H]`, in the accumulation
        dtype, if it is needed."""
        from rl_loss.kernels.block_passes import add_stats, pick, to_grads
        from rl_loss.kernels.blocks import add_product, grad_dtype, new_block, products, rows_of
        from rl_loss.kernels.entry_grads import entry_grads
        from rl_loss.kernels.rows import normalise

        s, v = self.scalars, len(t.weight)
        acc, logits, entries = out.lse.dtype, head_logits(t, s), head_entries(t)
        stats = t.hidden.new_empty(4, len(t.labels), dtype=acc)
        sums = t.weight.new_zeros(t.weight.shape, dtype=acc) if work.need[1] else None
        rows = max(1, s.workspace // (acc.itemsize * v))
        count = -(-len(self.over_v) // rows)
        runs = list(self._runs(-(-len(self.over_v) // count)))
        block = new_block(max(run.stop - run.start for run, _ in runs), v, t.hidden, acc)
        for run, span in runs:
            chosen = t.over_v[run]
            h = rows_of(t.hidden, chosen)
            raw = products(h, t.weight, block)
            pick(raw, chosen, entries, logits, 0, out.support_logprobs, stats[3], s.max_width)
            add_stats(raw, chosen, logits, stats, 0, False)
            normalise(out, entries, t.active, logits, v, stats, 0, chosen)
            mask = torch.zeros_like(self.on).index_fill_(0, chosen, True)[span]
            upstreams = self._slopes(out, span, mask)
            entry_grads(grads, out, entries, logits, upstreams, False, chosen)
            if not any(work.need):
                continue
            tail = upstreams[2] is not None and s.head
            dtype = grad_dtype(t.hidden, t.weight)
            where = logits, t.labels, out, grads.over_v
            dz = to_grads(raw, dtype, chosen, *where, 0, tail, False)
            if work.over_v is not None:
                add_product(work.over_v[run], dz, t.weight)
            if sums is not None:
                add_product(sums, dz.T, h)
            if work.over_v_bias is not None:
                work.over_v_bias += dz.sum(0, dtype=acc)
        return sums

    def _runs(self, rows: int) -> Iterator[tuple[slice, slice]]:
        """Runs of `over_v`, and the stretch of the batch that each lies in."""
        for start in range(0, len(self.over_v), rows):
            run = slice(start, min(start + rows, len(self.over_v)))
            yield run, slice(int(self.over_v[run.start]), int(self.over_v[run.stop - 1]) + 1)

    def _slopes(self, out: Any, span: slice, mask: Tensor) -> tuple[Tensor | None, ...]:
        """The loss of the masked rows of a stretch, and its slopes by every log-probability:
        of the whole batch's shape, 0 outside the stretch."""
        host = self.support.host.offsets
        first, last = int(host[span.start]), int(host[span.stop])
        leaves = [
            part.detach().requires_grad_()
            for part in (
                out.logprobs[span],
                out.support_logprobs[first:last],
                out.tail_logprobs[span],
            )
        ]
        inputs = LossInputs(trainer_logprobs=leaves[0], loss_mask=mask, **self._of(span))
        if last > first:
            inputs.trainer_support_logprobs, inputs.trainer_tail_logprobs = leaves[1], leaves[2]
            inputs.sampler_support_logprobs = self.support.sampler_logprobs[first:last]
            inputs.support_valid = out.valid[first:last]
            inputs.sampler_tail_mass = self.support.sampler_tail_mass[span]
            inputs.support_offsets = self.support.offsets[span.start : span.stop + 1] - first
            inputs.support_kind = self.support.kind[span]
        with torch.enable_grad():
            result = self.loss(inputs)
            slopes = torch.autograd.grad(result.loss, leaves, allow_unused=True)
        self.metrics.append((result.metrics, result.metric_counts))
        self.total = self.total + result.loss.detach()
        self.per_token[span] += result.per_token_loss.detach()
        whole = []
        for slope, like, at in zip(
            slopes,
            (out.logprobs, out.support_logprobs, out.tail_logprobs),
            (span, slice(first, last), span),
            strict=True,
        ):
            if slope is None or slope.shape == like.shape:
                whole.append(slope)
            else:
                whole.append(torch.zeros_like(like))
                whole[-1][at] = slope
        return (*whole, None)

    def _of(self, span: slice) -> dict[str, Any]:
        return {name: None if v is None else v[span] for name, v in self.values.items()}
