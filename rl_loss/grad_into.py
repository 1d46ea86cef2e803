"""A buffer to which the backward adds the weight's gradient, in the place of autograd.

What goes into it is rounded once a backward, from a sum in the accumulation dtype and what the
buffer held; where that sum is 0 nothing is written, so that rows which no id touches keep their
bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_loss.arguments import require_tensor

_BLOCK = 2**22  # elements that are added at a time


@dataclass(frozen=True, eq=False)
class GradInto:
    """The buffer, and the weight whose gradient goes there."""

    buffer: Tensor  # [rows of the weight, H]; of several ranks, this one's
    weight: Tensor  # as the head was given it

    def add(self, total: Tensor) -> None:
        """Adds the gradient `[rows, H]` of the first rows of the weight."""
        step = max(1, _BLOCK // max(1, total.shape[1]))
        for some, part in zip(
            self.buffer[: len(total)].split(step), total.split(step), strict=True
        ):
            some.copy_(torch.where(part == 0, some, (part + some).to(some.dtype)))

    def instead(self) -> Tensor | None:
        """What autograd is told of the weight's gradient once it is in the buffer: nothing.

        In Megatron's DDP, where the buffer is the weight's `main_grad`, its flag says so, and the
        hook behind the weight wants a gradient to fire safely: one without any entry, that holds
        no memory, and is added to the embedding's where the two are tied.
        """
        weight, main = self.weight, getattr(self.weight, "main_grad", None)
        if main is None or not hasattr(weight, "grad_added_to_main_grad"):
            return None
        if main.data_ptr() != self.buffer.data_ptr() or main.dtype != self.buffer.dtype:
            return None
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        nowhere = torch.empty(1, 0, dtype=torch.int64, device=weight.device)
        nothing = weight.new_empty(0, weight.shape[1])
        shape = tuple(weight.shape)
        return torch.sparse_coo_tensor(nowhere, nothing, shape, check_invariants=False)

    def behind(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight in `dtype`, the gradient of which goes into the buffer and no further."""
        return _Into.apply(weight, self, dtype)


class _Into(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, into, dtype):
        ctx.set_materialize_grads(False)
        ctx.into = into
        return weight.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        if upstream is None:
            return None, None, None
        ctx.into.add(upstream)
        return ctx.into.instead(), None, None


def check_grad_into(buffer: Tensor, weight: Tensor, trained: bool) -> None:
    """Refuses what cannot hold the gradient of `weight` `[rows, H]`, or that of one which is not
    `trained`."""
    require_tensor("grad_into", buffer)
    if torch.is_grad_enabled() and not trained:
        raise ValueError("grad_into needs a weight that requires a gradient, got a frozen one")
    if buffer.shape != weight.shape:
        raise ValueError(
            f"grad_into must be {tuple(weight.shape)} as weight, got {tuple(buffer.shape)}"
        )
    if buffer.dtype not in (torch.float32, weight.dtype):
        dtypes = " or ".join(map(str, dict.fromkeys((torch.float32, weight.dtype))))
        raise ValueError(f"grad_into must be in {dtypes}, got {buffer.dtype}")
    if buffer.device != weight.device:
        raise ValueError(f"grad_into must be on {weight.device} as weight, got {buffer.device}")
    if buffer.requires_grad:
        raise ValueError("grad_into must not require a gradient: it holds one")
    rows, h = buffer.shape
    if (h > 1 and buffer.stride(1) != 1) or (rows > 1 and buffer.stride(0) < h):
        raise ValueError(
            "grad_into must have rows of contiguous elements that do not overlap, got strides "
            f"{buffer.stride()}"
        )
    if _overlap(buffer, weight):
        raise ValueError("grad_into must not share memory with weight")


def _overlap(a: Tensor, b: Tensor) -> bool:
    if not a.numel() or not b.numel():
        return False
    spans = []
    for tensor in (a, b):
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in pairs)
        start = tensor.data_ptr()
        spans.append((start, start + (last + 1) * tensor.element_size()))
    return spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1]
