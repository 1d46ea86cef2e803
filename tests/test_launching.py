"""Launches of what was compiled already: never for other facts than it was compiled for."""

from types import SimpleNamespace

import pytest
import torch
from interpreter import DEVICE

pytest.importorskip("triton")

import triton
import triton.language as tl

from rl_loss.kernels.launching import launched

gpu = pytest.mark.gpu
NAMES = ("out", "values", "number", "rate", "SHIFT", "BLOCK")


class Compiled:
    """What Triton gives for a launch."""

    run = True

    def __init__(self) -> None:
        self.launches: list[tuple] = []

    def __getitem__(self, grid):
        return lambda *args: self.launches.append((grid, args))


class Kernel:
    """In the place of Triton's: counts what it is asked to compile."""

    params = tuple(SimpleNamespace(name=name) for name in NAMES)

    def __init__(self, compiles: bool = True) -> None:
        self.compiled: list[Compiled] = []
        self.compiles, self.calls = compiles, 0

    def __getitem__(self, grid):
        def run(*args, **options):
            self.calls += 1
            if self.compiles:
                self.compiled.append(Compiled())
                return self.compiled[-1]
            return None  # as the interpreter

        return run


def arguments(**changed):
    values = {"out": torch.zeros(9), "values": torch.zeros(9), "number": 7, "rate": 0.5}
    values |= {"SHIFT": 2, "BLOCK": 8, **changed}
    names = [name for name in values if name.isupper()]
    return [values[name] for name in NAMES[:4]], {name: values[name] for name in names}


def test_what_was_compiled_is_launched_with_all_its_arguments():
    kernel = Kernel()
    run = launched(kernel)
    for grid in ((3,), (4, 2), (5, 2, 2)):
        positional, named = arguments()
        run[grid](*positional, **named)
    (compiled,) = kernel.compiled
    assert kernel.calls == 1
    assert [grid for grid, _ in compiled.launches] == [(4, 2, 1), (5, 2, 2)]
    assert compiled.launches[-1][1] == (*positional, 2, 8)


@pytest.mark.parametrize(
    "changed",
    [
        {"values": torch.zeros(9, dtype=torch.bfloat16)},
        {"values": torch.zeros(9)[1:]},  # begins at 4 bytes
        {"values": None},
        {"number": 1},
        {"number": 32},
        {"number": 2**31},
        {"number": 2**31 + 16},
        {"rate": 3},
        {"SHIFT": 3},
        {"num_warps": 2},
    ],
    ids=str,
)
def test_other_facts_are_compiled_apart(changed):
    kernel = Kernel()
    run = launched(kernel)
    for one in ({}, changed, {}, changed):
        if "num_warps" in one:
            positional, named = arguments()
            named |= one
        else:
            positional, named = arguments(**one)
        run[(1,)](*positional, **named)
    assert kernel.calls == 2
    assert [len(compiled.launches) for compiled in kernel.compiled] == [1, 1]


def test_the_interpreter_launches_itself():
    kernel = Kernel(compiles=False)
    run, (positional, named) = launched(kernel), arguments()
    for _ in range(3):
        run[(1,)](*positional, **named)
    assert kernel.calls == 3


@launched
@triton.jit
def _shifted_kernel(out, values, number, rate, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values + at, mask=at < number, other=0.0)
    tl.store(out + at, x * rate + SHIFT, mask=at < number)


@gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="no GPU")
@pytest.mark.parametrize("start", [0, 1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_every_launch_is_that_of_its_arguments(start, dtype):
    for number in (1, 16, 17, 160, 1, 17, 16):
        for shift in (0, 3):
            values = torch.randn(200, device="cuda").to(dtype)[start:]
            out = torch.zeros(200, device="cuda")[start:]
            _shifted_kernel[(triton.cdiv(number, 32),)](
                out, values, number, 0.5, SHIFT=shift, BLOCK=32
            )
            wanted = torch.zeros_like(out)
            wanted[:number] = values[:number].float() * 0.5 + shift
            assert torch.equal(out, wanted)
