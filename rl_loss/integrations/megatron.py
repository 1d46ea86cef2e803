"""Megatron-core: the head as a `GPTModel`'s output processor, over its column-parallel layer.

Of megatron-core 0.19, which calls `output_processor` behind its decoder; nothing of it is imported
here, and only what the layer itself says is read: its weight, its group, its sequence parallelism.
"""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rl_loss.arguments import require_tensor
from rl_loss.lm_head import LMHeadOutput, fused_lm_head
from rl_loss.support import Support


@dataclass(frozen=True)
class OutputContext:
    """What a batch asks of the head; rows in the order of `labels`, the same on every rank of the
    tensor-parallel group.

    Attributes:
        labels: `[b, s]` integer; row `[i, t]` is the token sampled behind `input_ids[i, t]`
            (`aligned_rows`); with packed sequences `[1, s]`.
        support, temperature, active, entropy: as in `fused_lm_head`; per-row tensors `[b, s]`.
        vocab_size: the tokens of the model where its weight is padded to a multiple of the
            ranks; None: every row of the weight is an id.
        options: further keywords of `fused_lm_head` (`impl`, `full`, `logits_dtype`, ...).
    """

    labels: Tensor
    support: Support | None = None
    temperature: float | Tensor = 1.0
    active: Tensor | None = None
    entropy: Literal["support", "full"] | None = None
    vocab_size: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


def output_processor(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    context: OutputContext,
    scale_logits: Any = None,
    **_: Any,
) -> LMHeadOutput:
    """For `GPTModel.forward(..., output_processor=output_processor, output_processor_context=...)`,
    which then returns an `LMHeadOutput` of shape `[b, s]` on its last pipeline stage.

    Raises:
        ValueError: a context that is no `OutputContext`; as `fused_lm_head`.

    Example:
        >>> out = model(  # doctest: +SKIP
        ...     input_ids, position_ids, attention_mask, output_processor=output_processor,
        ...     output_processor_context=OutputContext(rows.labels, rows.support, vocab_size=V),
        ... )
        >>> inputs = LossInputs.from_head(out, ...)  # doctest: +SKIP
    """
    scale = 1.0
    if scale_logits is not None:  # of muP: a factor
        scale = float(scale_logits(torch.ones(())))
    return parallel_head(
        hidden_states, output_layer, context, weight=output_weight, logit_scale=scale
    )


def parallel_head(
    hidden_states: Tensor,
    output_layer: Any,
    context: OutputContext,
    *,
    weight: Tensor | None = None,
    logit_scale: float = 1.0,
) -> LMHeadOutput:
    """The head over Megatron's output layer, for models without an output processor.

    Where the layer fuses gradient accumulation, the weight's gradient is added to its `main_grad`
    in the backward (`grad_into`), as the layer itself would; `options` of the context may name
    another buffer, or None.

    Args:
        hidden_states: `[s, b, H]` as the layer is given them; `[s / ranks, b, H]` where it is
            sequence-parallel. Their gradient is summed over ranks (and scattered) here.
        output_layer: a `ColumnParallelLinear`.
        context: what the batch asks.
        weight: the embedding's where the two are tied; None: the layer's own.
        logit_scale: a factor of the logits.

    Raises:
        ValueError: as `fused_lm_head`; a layer that has no weight and is given none.
    """
    if not isinstance(context, OutputContext):
        raise ValueError(f"context must be an OutputContext, got {type(context).__name__}")
    weight = output_layer.weight if weight is None else weight
    if weight is None:
        raise ValueError("weight must be the embedding's where output_layer has none of its own")
    labels, group = context.labels, output_layer.tp_group
    if require_tensor("context.labels", labels).dim() != 2:
        raise ValueError(f"context.labels must be [b, s], got {tuple(labels.shape)}")
    group = group if group is not None and dist.get_world_size(group) > 1 else None
    packed = len(labels) == 1
    split = group is not None and output_layer.sequence_parallel
    if split and not packed:  # rows of several sequences are scattered in another order
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        # The head sums the gradient over ranks; each takes its part of that.
        hidden_states = gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=False, group=group
        )
        split = False

    def turned(value: Any) -> Any:  # to rows of [s, 1], in the order of the scattered ones
        return value.T if packed and isinstance(value, Tensor) and value.dim() == 2 else value

    options = {"grad_into": _main_grad(output_layer, weight), **context.options}
    head = fused_lm_head(
        hidden_states if packed else hidden_states.transpose(0, 1),
        weight,
        turned(labels),
        context.support,
        temperature=turned(context.temperature),
        active=turned(context.active),
        entropy=context.entropy,
        bias=getattr(output_layer, "bias", None),
        logit_scale=logit_scale,
        vocab_size=context.vocab_size,
        process_group=group,
        sequence_parallel=split,
        **options,
    )
    values = {f.name: getattr(head, f.name) for f in fields(head)}
    return LMHeadOutput(**{name: turned(value) for name, value in values.items()})


def _main_grad(output_layer: Any, weight: Tensor) -> Tensor | None:
    """The buffer that the layer itself would add the weight's gradient to, if any.

    Megatron-FSDP makes its own in the backward, to be written and not added to: there autograd
    keeps the gradient.
    """
    fused = getattr(output_layer, "gradient_accumulation_fusion", False)
    if not fused or not weight.requires_grad or hasattr(weight, "__fsdp_param__"):
        return None
    return getattr(weight, "main_grad", None)
