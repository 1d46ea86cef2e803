"""The vocabulary split over ranks: the numbers of one process, bitwise alike on every rank."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from factory import ALL_KINDS, outputs, random_batch, relative_error, weighted_sum
from ranks import alike_on_all, on_gpus, rank_device, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from rl_loss import (
    LossInputs,
    RowKind,
    fused_lm_head,
    fused_lm_head_loss,
    icepop_loss,
    ipo_loss,
)

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"
)
REPLAY = (RowKind.REPLAY,)
EXACT = 1e-11  # of float64 sums over ranks, in another order


class Case(NamedTuple):
    """A batch, and how its vocabulary is split."""

    kinds: tuple = ALL_KINDS
    n: int = 13
    v: int = 31
    entropy: str | None = "support"
    cut: str = "padded"  # equal shards with poison behind V, or "dtensor": as torch cuts them
    options: dict = {}  # noqa: RUF012
    sequence_parallel: bool = False
    masked: bool = False
    one_shard: bool = False  # all ids and labels on the first rank
    frozen: str | None = None


CASES = {
    "mixed": Case(),
    "mixed, full entropy": Case(entropy="full", options={"softcap": 6.0, "logit_scale": 0.7}),
    "no entropy, cut by torch": Case(entropy=None, cut="dtensor"),
    "full entropy, cut by torch": Case(entropy="full", cut="dtensor", masked=True),
    "an empty shard": Case(v=4, cut="dtensor"),
    "an empty shard behind padding": Case(v=3),
    "replayed rows": Case(kinds=REPLAY),
    "ids on one shard": Case(kinds=REPLAY, one_shard=True),
    "mixed ids on one shard": Case(one_shard=True),
    "over the vocabulary alone": Case(kinds=(RowKind.NONE,), entropy="full"),
    "no rows": Case(n=0),
    "one row": Case(n=1),
    "one row over the vocabulary": Case(n=1, kinds=(RowKind.HEAD,)),
    "sequence-parallel": Case(n=12, sequence_parallel=True),
    "sequence-parallel, replayed": Case(n=6, kinds=REPLAY, sequence_parallel=True),
    "inactive rows": Case(masked=True),
    "one temperature": Case(options={"temperature": 0.7, "bias": None}),
    "frozen hidden": Case(frozen="hidden"),
    "frozen weight": Case(frozen="weight"),
    "rounded logits": Case(options={"logits_dtype": torch.bfloat16}),
    "small blocks": Case(options={"workspace_mib": 40 * 8 / 2**20}),
}


def make(case: Case, device):
    batch = random_batch(case.n, 7, case.v, kinds=case.kinds)
    if case.one_shard:
        few = random_batch(case.n, 7, 5, kinds=case.kinds)
        batch = replace(batch, labels=few.labels, support=few.support)
    names = ("hidden", "weight", "bias", "labels", "support", "temperature")
    return replace(batch, **{name: getattr(batch, name).to(device) for name in names})


def cut(tensor, how: str, rank: int, ranks: int):
    """This rank's rows of a tensor, as a leaf, and where they stand in it."""
    v = len(tensor)
    rows = -(-v // ranks)
    start, stop = min(rank * rows, v), min(rank * rows + rows, v)
    own = tensor.detach()[start:stop]
    if how == "dtensor":
        mesh = init_device_mesh(tensor.device.type, (ranks,))
        whole = DTensor.from_local(
            own, mesh, [Shard(0)], shape=tensor.shape, stride=tensor.stride(), run_check=False
        )
        return whole.requires_grad_(), slice(start, stop)
    poison = torch.full((rows - len(own), *tensor.shape[1:]), torch.nan, dtype=tensor.dtype)
    return torch.cat([own, poison.to(own)]).requires_grad_(), slice(start, stop)


def near(got, wanted, of) -> bool:
    """Within rounding of the largest value of `of`, which `wanted` is a part of."""
    if not got.numel():
        return got.shape == wanted.shape
    return bool((got - wanted).abs().max() < EXACT * of.abs().max().clamp(min=1))


def gradient(leaf):
    grad = leaf.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad


def check_head(case: Case, rank: int, impl: str) -> None:
    ranks, device = dist.get_world_size(), rank_device(rank)
    batch = make(case, device)
    options = {"temperature": batch.temperature, "entropy": case.entropy, **case.options}
    active = torch.arange(case.n) % 4 != 1 if case.masked else None
    whole = batch.leaves()
    bias = {"bias": whole.bias, **options}
    expected = fused_lm_head(
        whole.hidden, whole.weight, whole.labels, whole.support,
        active=active, impl="reference", **bias,
    )  # fmt: skip
    weight, at = cut(batch.weight, case.cut, rank, ranks)
    own_bias = None if bias["bias"] is None else cut(batch.bias, case.cut, rank, ranks)[0]
    hidden = batch.hidden.detach()
    if case.sequence_parallel:
        hidden = hidden.chunk(ranks)[rank]
    hidden = hidden.clone().requires_grad_()
    leaves = {"hidden": hidden, "weight": weight, "bias": own_bias}
    if case.frozen:
        leaves[case.frozen].requires_grad_(False)
    vocab_size = case.v if case.cut == "padded" else None
    got = fused_lm_head(
        hidden, weight, batch.labels, batch.support, active=active, impl=impl,
        process_group=dist.group.WORLD, vocab_size=vocab_size,
        sequence_parallel=case.sequence_parallel, **{**options, "bias": own_bias},
    )  # fmt: skip
    assert torch.equal(got.support_valid, expected.support_valid)
    alike_on_all(*outputs(got))
    for value, wanted in zip(outputs(got), outputs(expected), strict=True):
        finite = ~wanted.isneginf()
        assert torch.equal(value.isneginf(), ~finite)
        assert relative_error(value[finite], wanted[finite]) < EXACT
    weighted_sum([part.cpu() for part in outputs(expected)]).backward()
    weighted_sum([part.cpu() for part in outputs(got)]).backward()
    if case.frozen != "hidden":
        wanted = whole.hidden.grad
        wanted = wanted.chunk(ranks)[rank] if case.sequence_parallel else wanted
        assert near(hidden.grad, wanted, whole.hidden.grad)
        if not case.sequence_parallel:
            alike_on_all(hidden.grad)
    for name, leaf in (("weight", weight), ("bias", own_bias)):
        if leaf is None or case.frozen == name:
            continue
        wanted, grad = getattr(whole, name).grad, gradient(leaf)
        own = at.stop - at.start
        assert near(grad[:own], wanted[at], wanted)
        assert (grad[own:] == 0).all()


LOSSES = {"icepop": icepop_loss, "ipo": partial(ipo_loss, eps=0.2, kl_tau=0.1)}


def check_one_pass(case: Case, rank: int, impl: str, loss) -> None:
    ranks, device = dist.get_world_size(), rank_device(rank)
    batch = make(case, device)
    generator = torch.Generator().manual_seed(3)
    values = {
        "inference_logprobs": -torch.randn(case.n, generator=generator).abs().to(device),
        "advantages": torch.randn(case.n, generator=generator).to(device),
    }
    active = torch.arange(case.n) % 4 != 1 if case.masked else None
    whole = batch.leaves()
    out = fused_lm_head(
        whole.hidden, whole.weight, whole.labels, whole.support, bias=whole.bias,
        temperature=batch.temperature, active=active, impl="reference",
    )  # fmt: skip
    expected = loss(LossInputs.from_head(out, **values))
    expected.loss.backward()
    weight, at = cut(batch.weight, case.cut, rank, ranks)
    bias, _ = cut(batch.bias, case.cut, rank, ranks)
    hidden = batch.hidden.detach()
    hidden = hidden.chunk(ranks)[rank] if case.sequence_parallel else hidden
    hidden = hidden.clone().requires_grad_()
    got = fused_lm_head_loss(
        hidden, weight, batch.labels, batch.support, loss=loss, bias=bias,
        temperature=batch.temperature, active=active, impl=impl, workspace_mib=2 * 31 * 8 / 2**20,
        process_group=dist.group.WORLD, vocab_size=case.v if case.cut == "padded" else None,
        sequence_parallel=case.sequence_parallel, **values,
    )  # fmt: skip
    alike_on_all(got.loss, got.per_token_loss, *got.metrics.values())
    assert (got.loss - expected.loss).abs() < EXACT * (1 + expected.loss.abs())
    for name, value in expected.metrics.items():
        assert (got.metrics[name] - value).abs() < 1e-4 * (1 + value.abs()), name
    got.loss.backward()
    wanted = whole.hidden.grad
    wanted = wanted.chunk(ranks)[rank] if case.sequence_parallel else wanted
    assert near(hidden.grad, wanted, whole.hidden.grad)
    own = at.stop - at.start
    for leaf, exact in ((weight, whole.weight.grad), (bias, whole.bias.grad)):
        grad = gradient(leaf)
        assert near(grad[:own], exact[at], exact)
        assert (grad[own:] == 0).all()


def all_cases(rank: int, impl: str) -> None:
    for name, case in CASES.items():
        if case.sequence_parallel and case.n % dist.get_world_size():
            continue
        try:
            check_head(case, rank, impl)
            if not case.options and case.frozen is None and case.entropy != "full":
                for loss in LOSSES.values():
                    check_one_pass(case, rank, impl, loss)
        except Exception as error:
            raise AssertionError(f"{name}, impl {impl}") from error


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("impl", ["reference", "auto", "triton"])
def test_the_numbers_of_one_process(impl, ranks):
    if impl == "triton" and not on_gpus(ranks):
        pytest.importorskip("triton")
        run_ranks(all_cases, ranks, impl, interpreted=True)
    else:
        run_ranks(all_cases, ranks, impl)
