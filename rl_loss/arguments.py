"""Arguments as tensors, or a ValueError that names the argument and the place."""

from collections.abc import Sequence
from numbers import Integral, Real
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor, nn


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


def refuse_half(name: str, tensor: Tensor) -> Tensor:
    """The tensor itself, which must not be in half precision: bfloat16 moves a log-probability
    of -8 by up to 0.03, and the ratio that is made of it by 3 %."""
    dtype = tensor.dtype
    if dtype.is_floating_point and dtype.itemsize < 4:
        raise ValueError(
            f"{name} must be in float32 or float64, got {dtype}, which rounds it too coarsely; "
            "under FSDP2 set MixedPrecisionPolicy(cast_forward_inputs=False), for it casts what a "
            "module is called with"
        )
    return tensor


def numbers(name: str, value: Any, place: str = "position") -> Tensor:
    """What `torch.as_tensor` makes of one number, a sequence of them, an array or a tensor;
    Python's floats become float32 whatever torch's default dtype is."""
    try:
        tensor = torch.as_tensor(value)
        if not hasattr(value, "dtype") and tensor.dtype == torch.get_default_dtype():
            tensor = torch.as_tensor(value, dtype=torch.float32)
        return tensor
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        got = short(value)
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            at = next((i for i, item in enumerate(value) if not _is_number(item)), None)
            got = got if at is None else f"{short(value[at])} in {place} {at}"
        raise ValueError(f"{name} must be numbers, got {got}") from error


def active_module(module: Any) -> Any:
    """What runs where PEFT keeps a module and its trained copies (`modules_to_save`): the active
    copy, the original if there is none; any other module itself. Told by their attributes."""
    copies = getattr(module, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):
        return module
    names = [] if module.disable_adapters else module.active_adapter
    names = [names] if isinstance(names, str) else names
    return next((copies[name] for name in names if name in copies), module.original_module)


def class_path(value: Any) -> str:
    """Its class with the module it comes from: there are many a `Linear`."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _is_number(item: Any) -> bool:
    try:
        return torch.as_tensor(item).dim() == 0
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False
