"""What the host may look at."""

import torch


def host_sees(device: torch.device) -> bool:
    """Whether values on `device` can be checked here and now: on the CPU, outside a compiler."""
    return device.type == "cpu" and not torch.compiler.is_compiling()
