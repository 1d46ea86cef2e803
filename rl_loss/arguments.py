"""Arguments as tensors, or a ValueError that names the argument and the place."""

from collections.abc import Sequence
from numbers import Integral, Real
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor


def require_tensor(name: str, value: Any) -> Tensor:
    """The value itself, which must be a tensor."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")
    return value


def require_number(name: str, value: Any) -> float:
    """A real number as a float (a bool or a tensor is none, a NumPy scalar is one)."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, got {short(value)}")
    return float(value)


def require_count(name: str, value: Any, least: int) -> None:
    """Refuses what is no integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name} must be an int of at least {least}, got {short(value)}")


def is_integral(tensor: Tensor) -> bool:
    """Whether the dtype holds integers (bool is none)."""
    dtype = tensor.dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def numbers(
    name: str, value: Any, dtype: torch.dtype | None = None, place: str = "position"
) -> Tensor:
    """What `torch.as_tensor` makes of one number, a sequence of them, an array or a tensor."""
    try:
        return torch.as_tensor(value, dtype=dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        got = short(value)
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            at = next((i for i, item in enumerate(value) if not _is_number(item)), None)
            got = got if at is None else f"{short(value[at])} in {place} {at}"
        raise ValueError(f"{name} must be numbers, got {got}") from error


def _is_number(item: Any) -> bool:
    try:
        return torch.as_tensor(item).dim() == 0
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False
