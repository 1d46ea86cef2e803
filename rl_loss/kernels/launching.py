"""Launches of kernels in less of the host's time than Triton's own.

Triton looks at every argument of every launch, and at the kernel's constants, to find the code that
was compiled for it: much of what a step of small batches costs. Here the same facts are taken by a
shorter way, and what was compiled for them is launched at once. The first launch with new facts,
and every launch in the interpreter, is Triton's.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor


class launched:
    """Stands above `triton.jit`: the kernel is launched as before, `kernel[grid](...)`, its tensors
    and numbers by position, what it is compiled for by name."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[tuple, tuple[Any, tuple]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        # Of a tensor its type and whether it begins at 16 bytes, of an integer whether it is 1,
        # whether 16 divides it, and its width; of anything else its type: all that Triton compiles
        # a kernel for on CUDA.
        facts = (
            _device(),
            *[
                (a.dtype if a.data_ptr() & 15 == 0 else (a.dtype, 1))
                if isinstance(a, Tensor)
                else (1 if a == 1 else (a & 15 == 0, a.bit_length() > 31))
                if type(a) is int
                else type(a)
                for a in args
            ],
            *options,
            *options.values(),
        )
        known = self._compiled.get(facts)
        if known is None:
            compiled = self.kernel[grid](*args, **options)
            if hasattr(compiled, "run"):
                names = [parameter.name for parameter in self.kernel.params[len(args) :]]
                rest = tuple(options.get(name) for name in names)
                self._compiled[facts] = compiled, rest
            return
        compiled, rest = known
        compiled[(*grid, 1, 1)[:3]](*args, *rest)


def _device() -> int:
    return torch.cuda.current_device() if torch.cuda.is_initialized() else -1
