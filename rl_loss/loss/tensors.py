"""What a loss is given, checked for shape, dtype and device; no value is read on a GPU."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_loss.arguments import is_integral, refuse_half, require_tensor
from rl_loss.csr import first_row
from rl_loss.host import host_sees


class LossTensors(NamedTuple):
    """The tensors of a loss as they came; where not its mask, a value may be anything.

    N rows in the shape of the mask, `[...]`; what is one value a row may be `[N]` as well, if it
    describes the row's evidence. Entries are flat `[nnz]` with offsets, or padded `[..., K]`.
    """

    mask: Tensor  # [...] bool
    log_p: Tensor  # [...]
    log_q: Tensor  # [...]
    advantages: Tensor  # [...]
    weights: Tensor | None  # [...] W
    ref: Tensor | None  # [...] log-probabilities of a reference
    support_log_p: Tensor | None  # [nnz] or [..., K]
    support_log_q: Tensor | None  # as support_log_p, given if it is
    valid: Tensor | None  # as support_log_p, bool; None: all
    offsets: Tensor | None  # [N + 1] int64; None: padded, or no entries
    kind: Tensor | None  # [...] or [N], integers
    tail_mass: Tensor | None  # [...] or [N]
    tail_log_p: Tensor | None  # [...] or [N]

    @property
    def n(self) -> int:
        return self.mask.numel()

    @property
    def nnz(self) -> int:
        """The number of entries, padding included."""
        return 0 if self.support_log_p is None else self.support_log_p.numel()

    @property
    def dtype(self) -> torch.dtype:
        """What a loss is computed in."""
        return torch.float64 if self.log_p.dtype == torch.float64 else torch.float32

    @property
    def padded(self) -> bool:
        return self.support_log_p is not None and self.offsets is None


def loss_tensors(inputs: Any) -> LossTensors:
    """The tensors of `LossInputs`, or of any object with its fields; missing ones are None."""
    for name in ("loss_mask", "trainer_logprobs", "inference_logprobs", "advantages"):
        require_tensor(name, getattr(inputs, name, None))
    mask, log_p, log_q = inputs.loss_mask, inputs.trainer_logprobs, inputs.inference_logprobs
    for name, value in {"trainer_logprobs": log_p, "inference_logprobs": log_q}.items():
        if not value.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {value.dtype}")
    for name in ("inference_logprobs", "ref_logprobs"):
        if getattr(inputs, name, None) is not None:
            refuse_half(name, require_tensor(name, getattr(inputs, name)))
    if mask.dtype != torch.bool:
        raise ValueError(f"loss_mask must be bool, got {mask.dtype}")
    support_log_p, support_log_q, valid, offsets = _entries(inputs, mask)
    return LossTensors(
        mask=mask,
        log_p=_per_token("trainer_logprobs", log_p, mask),
        log_q=_per_token("inference_logprobs", log_q, mask),
        advantages=_per_token("advantages", inputs.advantages, mask),
        weights=_per_token("loss_weights", getattr(inputs, "loss_weights", None), mask),
        ref=_per_token("ref_logprobs", getattr(inputs, "ref_logprobs", None), mask),
        support_log_p=support_log_p,
        support_log_q=support_log_q,
        valid=valid,
        offsets=offsets,
        kind=_kind(inputs, mask),
        tail_mass=_tail_mass(inputs, mask),
        tail_log_p=_per_row(inputs, "trainer_tail_logprobs", mask),
    )


def _per_token(name: str, value: Any, mask: Tensor) -> Any:
    """A field of the shape of `loss_mask`, or None."""
    if value is not None and _on_device(name, value, mask).shape != mask.shape:
        raise ValueError(
            f"{name} must be {tuple(mask.shape)} as loss_mask, got {tuple(value.shape)}"
        )
    return value


def _per_row(inputs: Any, name: str, mask: Tensor) -> Tensor | None:
    """A field with one value a row: of the shape of `loss_mask`, or `[N]`."""
    value = getattr(inputs, name, None)
    if value is not None and _on_device(name, value, mask).shape not in (
        mask.shape,
        (mask.numel(),),
    ):
        raise ValueError(
            f"{name} must be {tuple(mask.shape)} as loss_mask, or [{mask.numel()}], got "
            f"{tuple(value.shape)}"
        )
    return value


def _kind(inputs: Any, mask: Tensor) -> Tensor | None:
    kind = _per_row(inputs, "support_kind", mask)
    if kind is not None and not is_integral(kind):
        raise ValueError(f"support_kind must be integers, got {kind.dtype}")
    return kind


def _tail_mass(inputs: Any, mask: Tensor) -> Tensor | None:
    mass = _per_row(inputs, "sampler_tail_mass", mask)
    return None if mass is None else refuse_half("sampler_tail_mass", mass)


def _entries(inputs: Any, mask: Tensor) -> tuple[Any, Any, Any, Any]:
    """log p, log q, what is valid and the offsets of the support entries."""
    log_p: Any = getattr(inputs, "trainer_support_logprobs", None)
    log_q: Any = getattr(inputs, "sampler_support_logprobs", None)
    valid: Any = getattr(inputs, "support_valid", None)
    if (log_p is None) != (log_q is None):
        raise ValueError(
            "trainer_support_logprobs and sampler_support_logprobs must be given together"
        )
    offsets, shape = None, torch.Size([0])
    if log_p is not None:
        offsets = _offsets(inputs, _on_device("trainer_support_logprobs", log_p, mask), mask)
        shape = log_p.shape
    for name, value in {"sampler_support_logprobs": log_q, "support_valid": valid}.items():
        if value is not None and _on_device(name, value, mask).shape != shape:
            raise ValueError(
                f"{name} must be {tuple(shape)} as trainer_support_logprobs, "
                f"got {tuple(value.shape)}"
            )
    if log_q is not None:
        refuse_half("sampler_support_logprobs", log_q)
    if valid is not None and valid.dtype != torch.bool:
        raise ValueError(f"support_valid must be bool, got {valid.dtype}")
    return log_p, log_q, valid, offsets


def _offsets(inputs: Any, log_p: Tensor, mask: Tensor) -> Tensor | None:
    """The bounds of flat entries `[N + 1]` int64, None where the entries are padded."""
    offsets = getattr(inputs, "support_offsets", None)
    if offsets is None:
        if log_p.dim() != mask.dim() + 1 or log_p.shape[:-1] != mask.shape:
            raise ValueError(
                f"trainer_support_logprobs must be [*{tuple(mask.shape)}, K] without "
                f"support_offsets, got {tuple(log_p.shape)}"
            )
        return None
    rows = mask.numel() + 1
    if log_p.dim() != 1 or _on_device("support_offsets", offsets, mask).shape != (rows,):
        raise ValueError(
            f"trainer_support_logprobs and support_offsets must be [nnz] and [{rows}], got "
            f"{tuple(log_p.shape)} and {tuple(offsets.shape)}"
        )
    if host_sees(offsets.device):
        _check_offsets(offsets, len(log_p))
    return offsets.to(torch.int64).contiguous()


def _check_offsets(offsets: Tensor, nnz: int) -> None:
    if offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise ValueError(f"support_offsets must be integers, got {offsets.dtype}")
    falling = offsets.diff() < 0
    if falling.any():
        row = first_row(falling)
        raise ValueError(
            f"support_offsets must not fall, got {int(offsets[row])}, {int(offsets[row + 1])} "
            f"in row {row}"
        )
    if offsets[0] != 0 or offsets[-1] != nnz:
        raise ValueError(
            f"support_offsets must run from 0 to {nnz}, got {int(offsets[0])} to {int(offsets[-1])}"
        )


def _on_device(name: str, value: Any, mask: Tensor) -> Tensor:
    if require_tensor(name, value).device != mask.device:
        raise ValueError(f"{name} must be on {mask.device} as loss_mask, got {value.device}")
    return value
