"""Every kernel of a few heads, lowered for a Hopper GPU without one, nothing launched.

The interpreter takes what the compiler refuses: above all numbers of 1, which the compiler makes
constants of. Run as a script, for it puts a driver of its own in the place of Triton's; prints what
was lowered, a line a kernel.
"""

import os

os.environ.pop("TRITON_INTERPRET", None)

import torch
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

import rl_loss.kernels.fused_products as fused_products
from rl_loss import Support, fused_lm_head
from rl_loss.flat_rows import HeadArguments


class NoGpu:
    """What Triton asks a driver before it compiles."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def lower(kernel, key, signature, device, constexprs, options, attrs, warmup):
    """In the place of compiling: to Triton's own language, which is where kernels are refused."""
    backend = kernel.device_caches[device][3]
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = kernel.ASTSource(kernel, signature, constexprs, attrs)
    functions = backend.get_codegen_implementation(options)
    source.make_ir(
        NoGpu().get_current_target(), options, functions, backend.get_module_map(), context
    )
    print(kernel.fn.__module__.removeprefix("rl_loss.kernels."), kernel.fn.__name__)


def main() -> None:
    driver.set_active(NoGpu())
    jit.JITFunction._do_compile = lower
    run = jit.JITFunction.run
    jit.JITFunction.run = lambda self, *args, grid, warmup, **options: run(
        self, *args, grid=grid, warmup=True, **options
    )
    HeadArguments.on_kernels = property(lambda self: True)
    fused_products._on_hopper = lambda device: True
    for n, v, h in ((5, 300, 16), (1, 300, 16), (5, 256, 16), (2, 1, 8), (1, 1, 1)):
        for dtype in (torch.bfloat16, torch.float32):
            hidden = torch.zeros(n, h, dtype=dtype, requires_grad=True)
            weight = torch.zeros(v, h, dtype=dtype, requires_grad=True)
            labels = torch.zeros(n, dtype=torch.int64)
            replayed = Support.from_rows([([0, 1], [-0.6931] * 2)] * n) if v > 1 else None
            for support, entropy in ((None, None), (None, "full"), (replayed, "support")):
                out = fused_lm_head(hidden, weight, labels, support, entropy=entropy)
                (out.logprobs.sum() + out.support_logprobs.sum()).backward()


if __name__ == "__main__":
    main()
