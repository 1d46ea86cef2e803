"""float16 rows over the vocabulary: upstreams of any size, against float64 and PyTorch's own."""

from functools import partial

import pytest
import torch
from interpreter import DEVICE, kernels, run_interpreted, truncated
from torch import Tensor

from rl_loss import RowKind, Support, fused_lm_head

N, H, V = 12, 33, 301
HALF = torch.float16
TINY = torch.finfo(HALF).smallest_normal * torch.finfo(HALF).eps  # the smallest number of all
UPSTREAMS = {
    "1e-8": [1e-8],
    "1e-3": [1e-3],
    "1e4": [1e4],
    "one large": [1e4] + [1e-3] * (N - 1),
    "far apart": [1e4, 1e-8, -1.0, 1e-4],
    "some none": [0.0, 1.0, 0.0, -1e-5],
    "none": [0.0],
}


def test_in_the_interpreter():
    run_interpreted(__file__)


def make() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=g).half()
    weight = (torch.randn(V, H, generator=g) * 0.7).half()  # logits of standard deviation 4
    return hidden.to(DEVICE), weight.to(DEVICE), torch.randint(V, (N,), generator=g).to(DEVICE)


def grads(call, *leaves: Tensor, upstream: Tensor) -> list[Tensor]:
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    return torch.autograd.grad(call(*leaves), leaves, upstream)


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """PyTorch's own: float32 logits of half products, whose gradient is rounded to half."""
    logits = (hidden @ weight.T).float() if hidden.dtype == HALF else hidden @ weight.T
    return logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]


def ours(hidden: Tensor, weight: Tensor, labels: Tensor, **options) -> Tensor:
    return fused_lm_head(hidden, weight, labels, impl="triton", **options).logprobs


@kernels
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("name", UPSTREAMS)
def test_no_upstream_overflows_or_is_lost(name, blocks):
    hidden, weight, labels = make()
    values = UPSTREAMS[name]
    upstream = torch.tensor([values[i % len(values)] for i in range(N)], device=DEVICE)
    exact = grads(
        partial(plain, labels=labels), hidden.double(), weight.double(), upstream=upstream.double()
    )
    room = {"workspace_mib": 4 * N * V / blocks / 2**20}
    got = grads(partial(ours, labels=labels, **room), hidden, weight, upstream=upstream)
    theirs = grads(partial(plain, labels=labels), hidden, weight, upstream=upstream)
    cut = 2 * truncated(HALF)
    for found, other, wanted in zip(got, theirs, exact, strict=True):
        off = (found.double() - wanted).abs()
        size = wanted.abs().amax(1, keepdim=True)
        # The rounding of N cells, a share of the largest; the result's own; the smallest number.
        allowed = 2**-9 * size + cut * 2**-11 * wanted.abs() + cut * TINY / 2
        assert (off <= allowed).all()
        assert off.norm() <= (other.double() - wanted).norm() * 1.05 + TINY * off.numel() ** 0.5


@kernels
def test_a_row_that_is_not_finite_spoils_no_other():
    hidden, weight, labels = make()
    upstream = torch.ones(N, device=DEVICE)
    call = partial(ours, labels=labels)
    wanted, _ = grads(call, hidden, weight, upstream=upstream)
    upstream[4] = torch.inf
    found, _ = grads(call, hidden, weight, upstream=upstream)
    keep = torch.arange(N, device=DEVICE) != 4
    assert torch.equal(found[keep], wanted[keep])
    assert not found[4].isfinite().any()


@kernels
def test_every_output_of_head_rows_with_bias_cap_and_temperature():
    """Of rows scaled apart, each output alone."""
    hidden, weight, labels = make()
    g = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(V, generator=g)[:5] for _ in range(N)])
    logq = torch.randn(N, V, generator=g).log_softmax(1).gather(1, ids)
    support = Support.from_padded(ids.int(), logq, kind=RowKind.HEAD).to(DEVICE)
    bias = torch.randn(V, generator=g).half().to(DEVICE)
    options = {"softcap": 6.0, "logit_scale": 0.8, "entropy": "support"}
    options["temperature"] = (torch.rand(N, generator=g) + 0.5).to(DEVICE)
    scale = (10.0 ** torch.arange(-4, 8))[:N].to(DEVICE)
    for name in ("logprobs", "support_logprobs", "trainer_tail_logprobs", "entropy"):
        found = []
        for dtype, impl in ((HALF, "triton"), (torch.float64, "reference")):

            def call(hidden, weight, bias, impl=impl, name=name):
                given = hidden, weight, labels, support
                out = getattr(fused_lm_head(*given, bias=bias, impl=impl, **options), name)
                return out * (scale[:, None].expand(N, 5).flatten() if len(out) > N else scale)

            leaves = [leaf.to(dtype) for leaf in (hidden, weight, bias)]
            like = call(*leaves)
            found.append(grads(call, *leaves, upstream=torch.ones_like(like) * 1e-3))
        for got, wanted in zip(*found, strict=True):
            size = wanted.abs().amax(-1, keepdim=True) if wanted.dim() > 1 else wanted.abs().max()
            off = (got.double() - wanted).abs()
            assert (off <= 2**-9 * size + 2 * TINY).all(), name
