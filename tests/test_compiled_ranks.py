"""Under torch.compile a head over ranks breaks the graph, and the numbers stay."""

import pytest
import torch
import torch.distributed as dist
from factory import outputs, random_batch
from ranks import on_gpus, rank_device, run_ranks
from torch._dynamo.utils import counters

from rl_loss import fused_lm_head, fused_lm_head_loss, icepop_loss

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"
)
RANKS, N, V = 2, 8, 32


class Step:
    """Head and loss with what is computed before and after them, in two steps or in one pass."""

    def __init__(self, rank: int, impl: str, one_pass: bool) -> None:
        batch, device = random_batch(N, 7, V), rank_device(rank)
        generator = torch.Generator().manual_seed(3)
        self.impl, self.one_pass = impl, one_pass
        self.labels, self.support = batch.labels.to(device), batch.support.to(device)
        self.values = torch.randn(N, generator=generator).to(device)
        own = slice(rank * V // RANKS, (rank + 1) * V // RANKS)
        whole = batch.hidden, batch.weight[own], batch.bias[own]
        self.whole = [tensor.to(device) for tensor in whole]

    def total(self, hidden, weight, bias):
        given = 1.5 * hidden, weight, self.labels, self.support
        options = {"bias": bias, "impl": self.impl, "process_group": dist.group.WORLD}
        if self.one_pass:
            values = {"inference_logprobs": -self.values.abs(), "advantages": self.values}
            return 2 * fused_lm_head_loss(*given, loss=icepop_loss, **values, **options).loss
        out = fused_lm_head(*given, entropy="full", full=True, **options)
        parts = (torch.where(part.isneginf(), 0.0, part).sin() for part in outputs(out))
        return 2 * sum(part.sum() for part in parts)

    def with_backward(self, hidden, weight, bias):
        total = self.total(hidden, weight, bias)
        total.backward()
        return total

    def run(self, step, *, then_backward: bool):
        leaves = [tensor.clone().requires_grad_() for tensor in self.whole]
        total = step(*leaves)
        if then_backward:
            total.backward()
        return [total.detach(), *(leaf.grad for leaf in leaves)]


def check(rank: int, impl: str, one_pass: bool, inside: bool) -> None:
    step = Step(rank, impl, one_pass)
    wanted = step.run(step.total, then_backward=True)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(step.with_backward if inside else step.total, backend="aot_eager")
    for _ in range(2):
        got = step.run(compiled, then_backward=not inside)
        for value, expected in zip(got, wanted, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    assert counters["graph_break"], "it did not compile"


CASES = {
    # impl, in one pass, the backward in what is compiled
    "without kernels": ("auto", False, True),
    "kernels": ("triton", False, False),
    "kernels, backward inside": ("triton", False, True),
    "one pass": ("triton", True, False),
}


def all_cases(rank: int) -> None:
    for name, case in CASES.items():
        try:
            check(rank, *case)
        except Exception as error:
            raise AssertionError(name) from error


def test_the_numbers_of_a_step_that_is_not_compiled():
    pytest.importorskip("triton")
    run_ranks(all_cases, RANKS, interpreted=not on_gpus(RANKS))
