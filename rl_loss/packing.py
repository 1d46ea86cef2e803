"""The wire formats of support entries: one int64 for an id and its log-probability, or bytes."""

from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from rl_loss.arguments import require_tensor

_LOW_32_BITS = 0xFFFFFFFF

# From here down a log-probability is unknown. vLLM's server writes -9999 for what it does not
# know, for NaN and, as JSON has no -inf, for a probability of 0, prime-rl for what it was not
# told; SGLang clamps -inf to the least float32. Which of these was meant cannot be told, and no id
# that was kept is so unlikely.
UNKNOWN_LOGPROB = -9999.0

# Of the struct module, in the machine's own order: as items of 4 bytes, or as plain bytes.
_FORMATS = {torch.int32: ("i", "l", "@i", "=i"), torch.float32: ("f", "@f", "=f")}
_BYTES = ("B", "c", "@B", "@c")


def pack_entries(ids: Tensor, logprobs: Tensor) -> Tensor:
    """Packs ids and float32 log-probabilities into int64, bit for bit.

    `packed = bits(logprob) << 32 | id`. A NaN log-probability says that q is unknown there.

    Args:
        ids: `[...]` integer token ids in `[0, 2**31)`.
        logprobs: `[...]` float32 natural log-probabilities.

    Returns:
        `[...]` int64 entries.

    Raises:
        ValueError: no tensors, a shape or dtype that does not fit.

    Example:
        >>> pack_entries(torch.tensor([7]), torch.tensor([-0.0])).tolist()
        [-9223372036854775801]
    """
    if require_tensor("ids", ids).shape != require_tensor("logprobs", logprobs).shape:
        raise ValueError(
            f"ids and logprobs must have one shape, got {tuple(ids.shape)} and "
            f"{tuple(logprobs.shape)}"
        )
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids must be int32 or int64, got {ids.dtype}")
    if logprobs.dtype != torch.float32:
        raise ValueError(f"logprobs must be float32, got {logprobs.dtype}")
    bits = logprobs.contiguous().view(torch.int32).to(torch.int64)
    return (bits << 32) | (ids.to(torch.int64) & _LOW_32_BITS)


def unpack_entries(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpacks int64 entries into int32 ids and float32 log-probabilities, bit for bit.

    Args:
        packed: `[...]` int64 entries as `pack_entries` makes them.

    Returns:
        ids `[...]` int32 and logprobs `[...]` float32 (NaN: q unknown).

    Raises:
        ValueError: `packed` is no int64 tensor.

    Example:
        >>> unpack_entries(pack_entries(torch.tensor([7]), torch.tensor([-0.5])))
        (tensor([7], dtype=torch.int32), tensor([-0.5000]))
    """
    if require_tensor("packed", packed).dtype != torch.int64:
        raise ValueError(f"packed must be int64, got {packed.dtype}")
    return packed.to(torch.int32), (packed >> 32).to(torch.int32).view(torch.float32)


def numbers_of_bytes(name: str, data: Any, dtype: torch.dtype) -> Tensor:
    """The int32 or float32 numbers `[n]` of a bytes-like object, or of an array of that dtype,
    in the machine's own byte order; copied, for the sender may use its buffer again."""
    try:
        view = memoryview(data)
    except TypeError as error:
        raise ValueError(f"{name} must be bytes of {dtype}, got {short(data)}") from error
    items = view.itemsize == 4 and view.format in _FORMATS[dtype]
    if not items and view.format not in _BYTES:
        kind = getattr(data, "dtype", None) or f"format {view.format!r}"
        raise ValueError(
            f"{name} must be bytes of {dtype}, or an array of it, got items of {kind}: cast them"
        )
    if view.nbytes % 4:
        raise ValueError(f"{name} must be bytes of {dtype}, 4 each, got {view.nbytes}")
    if view.nbytes == 0:  # of which torch makes no tensor
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(view), dtype=dtype)


def bytes_of_numbers(numbers: Tensor) -> bytes:
    """The bytes of a tensor in the machine's own byte order; from a GPU it costs a sync."""
    data = bytearray(numbers.numel() * numbers.element_size())
    if data:
        torch.frombuffer(data, dtype=numbers.dtype).copy_(numbers.flatten())
    return bytes(data)
