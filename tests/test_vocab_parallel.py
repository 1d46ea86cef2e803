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
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

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
    full: bool = False
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
    "full log-probabilities": Case(entropy=None, full=True, options={"softcap": 6.0}),
    "all that is full, cut by torch": Case(entropy="full", full=True, cut="dtensor", masked=True),
    "full log-probabilities of replayed rows": Case(kinds=REPLAY, full=True),
    "full log-probabilities, sequence-parallel": Case(n=12, full=True, sequence_parallel=True),
    "an empty shard": Case(v=4, cut="dtensor"),
    "an empty shard behind padding": Case(v=3, full=True),
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
    options["full"] = case.full
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
    # On a GPU the reference adds up by atomics, in an order of its own on every rank.
    bitwise = impl != "reference" or device.type == "cpu"
    if bitwise:
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
        if bitwise and not case.sequence_parallel:
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
    if impl != "reference" or device.type == "cpu":
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
            over_v_too = case.full or case.entropy == "full"
            if not case.options and case.frozen is None and not over_v_too:
                for loss in LOSSES.values():
                    check_one_pass(case, rank, impl, loss)
        except Exception as error:
            raise AssertionError(f"{name}, impl {impl}") from error


def fused_products_of_shards(rank: int) -> None:
    """In half precision, of a Hopper GPU's ways: each rank has its own part of every row."""
    from rl_loss.kernels import blocks, fused_products

    used = []
    launch = blocks.product_grads

    def seen(*args):
        used.append(args)
        return launch(*args)

    blocks.product_grads = seen
    device, fused_products._on_hopper = rank_device(rank), lambda device: True
    half = torch.bfloat16 if device.type == "cuda" else torch.float16
    batch = random_batch(21, 24, 301, kinds=(RowKind.NONE, RowKind.REPLAY), dtype=half)
    names = ("hidden", "weight", "bias", "labels", "support", "temperature")
    batch = replace(batch, **{name: getattr(batch, name).to(device) for name in names})
    exact = batch.leaves(torch.float64)
    options = {"temperature": batch.temperature, "entropy": "full"}
    wanted = fused_lm_head(
        exact.hidden, exact.weight, exact.labels, exact.support, bias=exact.bias,
        impl="reference", **options,
    )  # fmt: skip
    weight, at = cut(batch.weight, "padded", rank, 2)
    bias, _ = cut(batch.bias, "padded", rank, 2)
    hidden = batch.hidden.detach().clone().requires_grad_()
    got = fused_lm_head(
        hidden, weight, batch.labels, batch.support, bias=bias, impl="triton",
        process_group=dist.group.WORLD, vocab_size=301, **options,
    )  # fmt: skip
    alike_on_all(*outputs(got))
    for value, right in zip(outputs(got), outputs(wanted), strict=True):
        finite = ~right.isneginf()
        assert relative_error(value[finite], right[finite]) < 1e-5
    weighted_sum([part.cpu() for part in outputs(wanted)]).backward()
    weighted_sum([part.cpu() for part in outputs(got)]).backward()
    own = at.stop - at.start
    pairs = [(hidden.grad, exact.hidden.grad)]
    pairs += [(weight.grad[:own], exact.weight.grad[at]), (bias.grad[:own], exact.bias.grad[at])]
    for grad, right in pairs:
        assert (grad - right).abs().max() < 4e-3 * right.abs().max()
    assert len(used) == 1


@pytest.mark.parametrize("ranks", [2])
def test_fused_products_of_shards(ranks):
    pytest.importorskip("triton")
    run_ranks(fused_products_of_shards, ranks, interpreted=not on_gpus(ranks))


def other_batches(rank: int, impl: str) -> None:
    """Ranks that were given other labels, or other ids: an error on every one, or NaN."""
    device = rank_device(rank)
    for what in ("labels", "ids"):
        batch = make(Case(), device)
        if rank == 1 and what == "labels":
            batch.labels[1] = (batch.labels[1] + 1) % 31  # of a row without a support
        if rank == 1 and what == "ids":
            ids = batch.support.ids.clone()
            at = int(batch.support.host.offsets[2])  # of a HEAD row
            held = ids[at : int(batch.support.host.offsets[3])].tolist()
            ids[at] = next(v for v in range(31) if v not in held)
            batch.support = batch.support.replace(ids=ids)
        weight, _ = cut(batch.weight, "padded", rank, dist.get_world_size())
        given = batch.hidden, weight, batch.labels, batch.support
        options = {"process_group": dist.group.WORLD, "vocab_size": 31, "impl": impl}
        if device.type == "cpu":
            with pytest.raises(ValueError, match="labels and support must be the same on every"):
                fused_lm_head(*given, **options)
        else:
            several = batch.support.offsets.diff() > 1  # log p of one id is 0 whatever its logit
            lost = several | (batch.support.kind != RowKind.REPLAY)
            assert torch.equal(fused_lm_head(*given, **options).logprobs.isnan(), lost)


@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_ranks_with_other_labels_or_supports(impl):
    interpreted = impl == "triton" and not on_gpus(2)
    if interpreted:
        pytest.importorskip("triton")
    run_ranks(other_batches, 2, impl, interpreted=interpreted)


def unequal_parts(rank: int, impl: str) -> None:
    """`chunk` of 31 rows is 16 and 15: no equal shards, and no padding that makes them so."""
    device = rank_device(rank)
    batch = make(Case(), device)
    weight = batch.weight.chunk(2)[rank]
    given = batch.hidden, weight, batch.labels.clamp(max=14), None
    options = {"process_group": dist.group.WORLD, "impl": impl}
    if device.type == "cpu":
        with pytest.raises(ValueError, match="the weight split alike"):
            fused_lm_head(*given, **options)
    else:
        assert fused_lm_head(*given, **options).logprobs.isnan().all()


@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_unequal_parts_are_told(impl):
    interpreted = impl == "triton" and not on_gpus(2)
    if interpreted:
        pytest.importorskip("triton")
    run_ranks(unequal_parts, 2, impl, interpreted=interpreted)


def refusals(rank: int) -> None:
    group, ranks = dist.group.WORLD, dist.get_world_size()
    batch = make(Case(), rank_device(rank))
    weight, _ = cut(batch.weight, "padded", rank, ranks)
    given = batch.hidden, weight, batch.labels, batch.support
    for options, message in (
        ({"process_group": "tp"}, "process_group must be a ProcessGroup, got str"),
        ({"process_group": group, "vocab_size": 33}, "vocab_size must be at most the weight's 32"),
        ({"sequence_parallel": True}, "sequence_parallel needs a process_group"),
        (
            {"process_group": group, "sequence_parallel": True},
            r"labels must be \(26,\) as hidden, got \(13,\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            fused_lm_head(*given, **options)
    whole, _ = cut(batch.weight, "dtensor", rank, ranks)
    with pytest.raises(ValueError, match="weight must not be a sharded DTensor"):
        fused_lm_head(batch.hidden, whole, batch.labels, batch.support)
    alone = dist.new_group([0]), dist.new_group([1])
    with pytest.raises(ValueError, match="weight must be cut by its rows over process_group"):
        fused_lm_head(batch.hidden, whole, batch.labels, batch.support, process_group=alone[rank])
    columns = distribute_tensor(batch.weight, whole.device_mesh, [Shard(1)])
    with pytest.raises(ValueError, match="weight must be cut by its rows over process_group"):
        fused_lm_head(batch.hidden, columns, batch.labels, batch.support, process_group=group)


def test_what_cannot_be_split_is_refused():
    run_ranks(refusals, 2)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("impl", ["reference", "auto", "triton"])
def test_the_numbers_of_one_process(impl, ranks):
    if impl == "triton" and not on_gpus(ranks):
        pytest.importorskip("triton")
        run_ranks(all_cases, ranks, impl, interpreted=True)
    else:
        run_ranks(all_cases, ranks, impl)
