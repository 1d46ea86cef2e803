"""The wire format of support entries: one int64 for an id and its log-probability."""

import torch
from torch import Tensor

from rl_loss.arguments import require_tensor

_LOW_32_BITS = 0xFFFFFFFF


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
    ids = (packed & _LOW_32_BITS).to(torch.int32)
    return ids, (packed >> 32).to(torch.int32).view(torch.float32)
