"""The LM head that computes the logits a loss reads, and no others."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rl_loss.csr import RowKind
from rl_loss.dense import Dense, dense_bwd, dense_fwd
from rl_loss.flat_rows import (
    FlatRows,
    active_wide,
    check_options,
    check_temperature,
    check_temperatures,
    check_tensors,
    flat_rows,
    local_tensor,
    logit_transform,
    rows_over_v,
    use_kernels,
)
from rl_loss.gathered import SparseRows
from rl_loss.kernels.operators import kernel_head
from rl_loss.kernels.records import HeadScalars, HeadTensors
from rl_loss.logits import LogitTransform, accumulation_dtype
from rl_loss.reference import reference_lm_head
from rl_loss.support import Support
from rl_loss.validation import check_recorded


@dataclass(frozen=True)
class LMHeadOutput:
    """The trainer's log-probabilities, in float32 (float64 for float64 inputs).

    Inactive rows hold 0. `logprobs`, `support_logprobs`, `trainer_tail_logprobs` and `entropy`
    carry gradient to hidden, weight and bias.
    """

    logprobs: Tensor  # [...] log p of the label: over the support on REPLAY rows, else over V
    support_logprobs: Tensor  # [nnz] log p of every support id
    trainer_tail_logprobs: Tensor  # [...] log of what p puts outside the known ids, -inf if none
    entropy: Tensor | None  # [...]
    support_valid: Tensor  # [nnz] bool: q is known there and the row active and usable
    active: Tensor  # [...] bool
    support: Support | None = field(default=None, repr=False)  # as it was given


def fused_lm_head(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    support: Support | None = None,
    *,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    active: Tensor | None = None,
    entropy: Literal["support", "full"] | None = None,
    impl: Literal["auto", "reference", "triton"] = "auto",
    logits_dtype: torch.dtype | None = None,
    workspace_mib: float = 512,
    process_group: Any = None,
) -> LMHeadOutput:
    """The trainer's log-probabilities of the labels and of every support id.

    Logits are `z = softcap * tanh((hidden @ weight.T + bias) * logit_scale / softcap) / T`. A
    REPLAY row is normalised over its support, whose logits alone are computed: neither the
    forward nor the backward touches the rest of the vocabulary. All other rows are normalised
    over the vocabulary, a block of logits at a time, as are rows whose support is so wide that
    a matrix product costs less than gathering. Rows of all kinds may stand in one batch.

    Args:
        hidden: `[..., H]` the states that predict the labels; N rows are its leading dimensions
            flattened.
        weight: `[V, H]` the LM-head weight.
        labels: `[...]` integer, the sampled tokens (aligned: the function never shifts).
        support: the sampler's evidence, N rows; None: no row has any.
        temperature: one value, or one a row `[...]`.
        bias: `[V]`.
        softcap: the bound of tanh-capped logits (Gemma 2).
        logit_scale: a factor of the logits (Cohere; Granite divides, so 1 over its divisor).
        active: `[...]` bool, the rows that a loss reads, all by default. The others cost
            nothing, are not checked, hold 0 and give no gradient, whatever their inputs hold. A
            tensor on the host never costs a sync; on the device it may cost one, for rows over
            the vocabulary alone.
        entropy: "support": of the replayed distribution on REPLAY rows, elsewhere over V;
            "full": over V on every row, which computes the logits of REPLAY rows as well.
        impl: "reference" (autograd of plain PyTorch), "triton", or "auto": Triton on a GPU,
            sparse products of torch on the CPU. What cannot run raises.
        logits_dtype: torch.bfloat16 rounds the logits as an engine with a bfloat16 head does,
            before they are divided by T; by default they stay in the accumulation dtype. Rounded,
            log-probabilities match such an engine's but for products that its own order of
            summation rounds the other way; the gradient is that of the logits not rounded.
        workspace_mib: MiB that a block of logits over the vocabulary may take on a GPU, in the
            forward and in the backward; smaller is slower (on 16384 rows: below 256).
        process_group: the group over which `weight` is split by vocabulary: not supported yet,
            and refused.

    Returns:
        LMHeadOutput. The gradient keeps the dtype of each input, is accumulated in float32 (or
        float64), and is rounded once.

    Raises:
        ValueError: a shape, dtype or device that does not fit; a sharded `weight`; on CPU tensors
            also a label outside the vocabulary or its REPLAY row, an id outside the vocabulary, a
            temperature that is not above 0; and wherever the host can see it an active row that
            the sampler failed to record or left empty. On a GPU such a row is NaN throughout.

    Source: replay over the sampler's kept set is "keep sampling mask" of DeepSeek-V3.2, arXiv
    2512.02556, section 3.1.

    Example:
        >>> hidden, weight = torch.randn(2, 4), torch.randn(9, 4)
        >>> support = Support.from_rows([([5, 2], [-0.6931, -0.6931]), None])
        >>> out = fused_lm_head(hidden, weight, torch.tensor([2, 7]), support)
        >>> bool((out.support_logprobs.exp().sum() - 1).abs() < 1e-6)
        True
    """
    weight, bias = local_tensor("weight", weight), local_tensor("bias", bias)
    check_tensors(hidden, weight, labels, support, bias, active)
    kernels = use_kernels(impl, hidden.device)
    transform = check_options(
        softcap, logit_scale, entropy, logits_dtype, workspace_mib, process_group
    )
    if kernels:
        workspace = int(workspace_mib * 2**20)
        return _on_kernels(
            hidden,
            weight,
            labels,
            support,
            temperature,
            bias,
            active,
            transform,
            entropy,
            workspace,
        )
    flat, rows = flat_rows(hidden, weight, labels, support, temperature, bias, active)
    with torch.autocast(hidden.device.type, enabled=False):
        if impl == "reference":
            out = reference_lm_head(flat, weight, bias, rows, transform, entropy)
        else:
            out = _FusedLMHead.apply(flat, weight, bias, rows, transform, entropy)
    logprobs, support_logprobs, tail, uncertainty = out
    usable = rows.active & ~rows.broken & (rows.support.kind > RowKind.NONE)
    return LMHeadOutput(
        logprobs=logprobs.reshape(labels.shape),
        support_logprobs=support_logprobs,
        trainer_tail_logprobs=tail.reshape(labels.shape),
        entropy=None if uncertainty is None else uncertainty.reshape(labels.shape),
        support_valid=usable[rows.support.entry_rows] & rows.support.known,
        active=rows.active.reshape(labels.shape),
        support=support,
    )


def head_inputs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    support: Support | None,
    temperature: float | Tensor,
    bias: Tensor | None,
    active: Tensor | None,
    transform: LogitTransform,
    entropy: str | None,
    workspace: int,
) -> tuple[HeadTensors, HeadScalars, Tensor]:
    """Arguments as the kernels take them, and `active` on the device; what only the device can
    see is left to them."""
    shape, n, v = labels.shape, labels.numel(), len(weight)
    if support is None:
        support = Support.empty(n).to(hidden.device, non_blocking=True)
    plan = support.plan_for(v)
    if not plan.sound and (active is None or active.device.type == "cpu"):
        check_recorded(support, active)
    temperatures = None
    if isinstance(temperature, Tensor):
        check_temperatures(temperature, hidden, shape)
        temperatures, temperature = temperature.expand(shape).reshape(n).contiguous(), 1.0
    else:
        temperature = check_temperature(temperature)
    if active is None:
        on = torch.ones(shape, dtype=torch.bool, device=hidden.device)
    else:
        on = active.to(hidden.device, non_blocking=True)
    tensors = HeadTensors(
        hidden=hidden.reshape(n, hidden.shape[-1]),
        weight=weight,
        bias=bias,
        labels=labels.reshape(n).contiguous(),
        temperatures=temperatures,
        active=None if active is None else on.reshape(n).contiguous(),
        ids=support.ids,
        known=support.known,
        offsets=support.offsets,
        kind=support.kind,
        tiles=plan.tiles,
        wide=active_wide(support, plan, active),
        over_v=rows_over_v(support, plan, active, entropy == "full"),
    )
    scalars = HeadScalars(
        temperature=temperature,
        softcap=transform.softcap or 0.0,
        scale=transform.scale,
        rounded=transform.rounded,
        max_width=plan.max_width,
        head=plan.head,
        draws=plan.draws,
        want_entropy=("support", "full").index(entropy) + 1 if entropy else 0,
        workspace=workspace,
    )
    return tensors, scalars, on


def _on_kernels(hidden: Tensor, weight: Tensor, labels: Tensor, *options: Any) -> LMHeadOutput:
    tensors, scalars, on = head_inputs(hidden, weight, labels, *options)
    logprobs, support_logprobs, tails, uncertainty, valid = kernel_head(tensors, scalars)
    shape = labels.shape
    return LMHeadOutput(
        logprobs=logprobs.reshape(shape),
        support_logprobs=support_logprobs,
        trainer_tail_logprobs=tails.reshape(shape),
        entropy=uncertainty.reshape(shape) if scalars.want_entropy else None,
        support_valid=valid,
        active=on,
        support=options[0],
    )


class FusedLMHead(nn.Linear):
    """The module form of `fused_lm_head`: an `nn.Linear` that holds the LM-head weight.

    It can stand where a model's own head stood (tied, frozen or wrapped by FSDP2). Called
    without labels it gives `nn.Linear`'s logits.

    Args:
        in_features, out_features, bias, device, dtype: as `nn.Linear`.
        softcap, logit_scale: the model's own, as in `fused_lm_head`.

    Example:
        >>> head = FusedLMHead.from_linear(nn.Linear(4, 9, bias=False), softcap=30.0)
        >>> head(torch.randn(3, 4), torch.tensor([1, 2, 8])).logprobs.shape
        torch.Size([3])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        logit_transform(softcap, logit_scale)
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.softcap, self.logit_scale = softcap, logit_scale

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, softcap: float | None = None, logit_scale: float = 1.0
    ) -> "FusedLMHead":
        """A head that shares the parameters of `linear`, so that tied weights stay tied."""
        if type(linear) is not nn.Linear:
            raise ValueError(f"linear must be a plain nn.Linear, got {type(linear).__name__}")
        head = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            softcap=softcap,
            logit_scale=logit_scale,
            device="meta",
        )
        head.weight, head.bias = linear.weight, linear.bias
        return head

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        support: Support | None = None,
        **options: Any,
    ) -> Tensor | LMHeadOutput:
        if labels is None:
            return super().forward(hidden)
        options = {"softcap": self.softcap, "logit_scale": self.logit_scale, **options}
        return fused_lm_head(hidden, self.weight, labels, support, bias=self.bias, **options)


# --- where there are no kernels ---


class _FusedLMHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, rows, transform, entropy):
        ctx.set_materialize_grads(False)
        gathered = SparseRows(hidden, weight, bias, rows, transform, entropy == "support")
        dense = dense_fwd(hidden, weight, bias, rows, rows.dense, transform, entropy is not None)
        full = None
        if entropy == "full":
            none = Support.empty(len(rows), device=hidden.device)
            plain = replace(rows, support=none)
            full = plain, dense_fwd(hidden, weight, bias, plain, rows.gathered, transform, True)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.rows, ctx.transform = rows, transform
        ctx.gathered, ctx.dense, ctx.full = gathered, dense, full
        return _outputs(rows, gathered, dense, full and full[1], entropy)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_logprobs, d_support, d_tail, d_entropy):
        upstreams = d_logprobs, d_support, d_tail, d_entropy
        if all(upstream is None for upstream in upstreams):
            return (None,) * 6
        with torch.autocast(ctx.saved_tensors[0].device.type, enabled=False):
            return _FusedLMHead._grads(ctx, upstreams)

    @staticmethod
    def _grads(ctx, upstreams):
        hidden, weight, bias = ctx.saved_tensors
        rows, transform = ctx.rows, ctx.transform
        d_entropy = upstreams[3]
        inputs, needs = (hidden, weight, bias), ctx.needs_input_grad[:3]
        dtype, into = accumulation_dtype(hidden, weight), []
        dense_rows = len(ctx.dense.chosen) + (0 if ctx.full is None else len(ctx.full[1].chosen))
        for tensor, need in zip(inputs, needs, strict=True):
            # Nothing over the vocabulary: no accumulator beside the gathered rows' own.
            needed = need and dense_rows > 0
            into.append(tensor.new_zeros(tensor.shape, dtype=dtype) if needed else None)
        dense_bwd(ctx.dense, *inputs, rows, transform, *upstreams, *into)
        if ctx.full is not None and d_entropy is not None:
            plain, full = ctx.full
            only = None, None, None, d_entropy
            dense_bwd(full, *inputs, plain, transform, *only, *into)
        grads = ctx.gathered.backward(*inputs, rows, transform, upstreams, needs, into)
        if grads[0] is not None:
            grads[0].masked_fill_(rows.broken[:, None], torch.nan)
        return *grads, None, None, None


def _outputs(
    rows: FlatRows,
    gathered: SparseRows,
    dense: Dense,
    full: Dense | None,
    entropy: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Puts the rows of every path where they stood in the batch."""
    logprobs, support_logprobs, tail, uncertainty = gathered.outputs()
    logprobs[dense.chosen] = dense.logprobs
    tail[dense.chosen] = dense.tail_logprobs
    support_logprobs[dense.entries] = dense.support_logprobs
    if dense.entropy is not None:
        uncertainty[dense.chosen] = dense.entropy
    if full is not None and full.entropy is not None:
        uncertainty[full.chosen] = full.entropy
    for out in (logprobs, tail, uncertainty):
        out.masked_fill_(rows.broken, torch.nan)
    support_logprobs.masked_fill_(rows.broken[rows.support.entry_rows], torch.nan)
    return logprobs, support_logprobs, tail, uncertainty if entropy else None
