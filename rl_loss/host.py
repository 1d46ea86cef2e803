"""What the host may look at, and on which device it launches."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def host_sees(device: torch.device) -> bool:
    """Whether values on `device` can be checked here and now: on the CPU, outside a compiler."""
    return device.type == "cpu" and not torch.compiler.is_compiling()


def launching_on(tensor: Tensor) -> AbstractContextManager:
    """Makes the tensor's GPU the current one: a Triton kernel is launched on whichever that is."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
