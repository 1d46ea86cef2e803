"""The LM head that computes the logits a loss reads, and no others."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rl_loss.dense import Dense, dense_bwd, dense_fwd
from rl_loss.gathered import Gathered, gathered_bwd, gathered_fwd, scattered_products
from rl_loss.head_rows import HeadRows, check_options, flat_rows, local_tensor
from rl_loss.reference import reference_lm_head
from rl_loss.segments import segment_sum
from rl_loss.support import RowKind, Support


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
    process_group: Any = None,
) -> LMHeadOutput:
    """The trainer's log-probabilities of the labels and of every support id.

    Logits are `z = softcap * tanh((hidden @ weight.T + bias) * logit_scale / softcap) / T`. A
    REPLAY row is normalised over its support, whose logits alone are computed: neither the
    forward nor the backward touches the rest of the vocabulary. All other rows are normalised
    over the vocabulary, in chunks of rows. Rows of all kinds may stand in one batch.

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
        process_group: the group over which `weight` is split by vocabulary.

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
        >>> bool(out.support_logprobs.exp().sum() - 1 < 1e-6)
        True
    """
    weight, bias = local_tensor("weight", weight), local_tensor("bias", bias)
    transform = check_options(hidden, softcap, logit_scale, entropy, impl, process_group)
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


# --- the fused path ---


class _FusedLMHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, rows, transform, entropy):
        ctx.set_materialize_grads(False)
        gathered = gathered_fwd(hidden, weight, bias, rows, transform, entropy == "support")
        dense = dense_fwd(hidden, weight, bias, rows, rows.dense, transform, entropy is not None)
        full = None
        if entropy == "full":
            plain = HeadRows(
                rows.labels,
                rows.inv_temperature,
                rows.active,
                rows.broken,
                Support.empty(len(rows), device=hidden.device),
            )
            full = plain, dense_fwd(hidden, weight, bias, plain, rows.gathered, transform, True)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.rows, ctx.transform = rows, transform
        ctx.gathered, ctx.dense, ctx.full = gathered, dense, full
        return _outputs(rows, gathered, dense, full and full[1], entropy)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_logprobs, d_support, d_tail, d_entropy):
        hidden, weight, bias = ctx.saved_tensors
        rows, transform, gathered = ctx.rows, ctx.transform, ctx.gathered
        upstreams = d_logprobs, d_support, d_tail, d_entropy
        if all(upstream is None for upstream in upstreams):
            return (None,) * 6
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        over_support = None if gathered.entropy is None else d_entropy
        grad = gathered_bwd(gathered, rows, transform, d_logprobs, d_support, d_tail, over_support)
        at, ids = gathered.chosen[gathered.place], rows.support.ids[gathered.entries]
        d_hidden = d_weight = d_bias = None
        if need_hidden:
            d_hidden = scattered_products(grad, weight, at, ids, len(hidden), ordered=True)
        if need_weight:
            d_weight = scattered_products(grad, hidden, ids, at, len(weight), ordered=False)
        if need_bias:
            d_bias = segment_sum(grad, ids, len(bias))
        into = d_hidden, d_weight, d_bias
        dense_bwd(ctx.dense, hidden, weight, bias, rows, transform, *upstreams, *into)
        if ctx.full is not None and d_entropy is not None:
            plain, full = ctx.full
            only = None, None, None, d_entropy
            dense_bwd(full, hidden, weight, bias, plain, transform, *only, *into)
        if d_hidden is not None:
            d_hidden.masked_fill_(rows.broken[:, None], torch.nan)
            d_hidden = d_hidden.to(hidden.dtype)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None, None


def _outputs(
    rows: HeadRows, gathered: Gathered, dense: Dense, full: Dense | None, entropy: str | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Puts the rows of every path where they stood in the batch."""
    new = gathered.z.new_zeros
    logprobs, tail, uncertainty = new(len(rows)), new(len(rows)), new(len(rows))
    support_logprobs = new(rows.support.nnz)
    for part in (gathered, dense):
        logprobs[part.chosen] = part.logprobs
        tail[part.chosen] = part.tail_logprobs
        support_logprobs[part.entries] = part.support_logprobs
        if part.entropy is not None:
            uncertainty[part.chosen] = part.entropy
    if full is not None and full.entropy is not None:
        uncertainty[full.chosen] = full.entropy
    for out in (logprobs, tail, uncertainty):
        out.masked_fill_(rows.broken, torch.nan)
    support_logprobs.masked_fill_(rows.broken[rows.support.entry_rows], torch.nan)
    return logprobs, support_logprobs, tail, uncertainty if entropy else None
