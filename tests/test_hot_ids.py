"""The products of the most frequent ids: in the interpreter on the CPU, compiled on a GPU."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from factory import (
    as_they_are,
    assert_exact,
    hot_ids_everywhere,
    outputs,
    random_batch,
    results,
    spied,
    tolerance,
)
from interpreter import DEVICE, HALVES, kernels, rounded_twice, run_interpreted
from ranks import alike_on_all, on_gpus, rank_device, run_ranks

from rl_loss import RowKind, Support, fused_lm_head, fused_lm_head_loss, icepop_loss

pytestmark = pytest.mark.usefixtures("unwritten_is_nan", "rows_are_gathered")
REPLAY = (RowKind.REPLAY,)
HALF = HALVES[0]
SLOTS = 16  # of `hot_ids_everywhere`


def test_in_the_interpreter():
    run_interpreted(__file__)


def products(patch):
    """The launches of the three products from here on."""
    import rl_loss.kernels.hot_products as hot_products

    names = ("_hot_logits_kernel", "_hot_hidden_kernel", "_hot_weight_kernel")
    return [spied(patch, hot_products, name) for name in names]


def on_device(batch):
    names = ("hidden", "weight", "bias", "labels", "temperature", "support")
    return replace(batch, **{name: getattr(batch, name).to(DEVICE) for name in names})


def head(batch, impl, **options):
    options = {"temperature": batch.temperature, "bias": batch.bias, **options}
    rows = batch.hidden, batch.weight, batch.labels, batch.support
    return fused_lm_head(*rows, impl=impl, **options)


def allowed_for(batch, read=as_they_are, **options):
    """Of each of a sum's terms 16 bits are kept."""
    plain = ("entropy", "full", "active", "softcap", "logit_scale")
    plain = {name: options[name] for name in plain if name in options}
    allowed, support = tolerance(batch, read, **plain), batch.support
    if len(support.plan.over_v):
        allowed = rounded_twice(allowed, batch.hidden.dtype)
    hidden, weight, bias = allowed.grads
    terms = int(support.ids.bincount(minlength=1).max()), int(support.offsets.diff().max())
    return allowed._replace(
        grads=[hidden + terms[1] * 2**-17, weight + terms[0] * 2**-17, bias],
    )


def got_of(batch, read=as_they_are, **options):
    leaves = on_device(batch).leaves()
    return results(leaves, outputs(head(leaves, "triton", **options)), read)


def compare(batch, read=as_they_are, exact_impl="reference", **options):
    exact = batch.leaves(torch.float64)
    wanted = results(exact, outputs(head(exact, exact_impl, **options)), read)
    assert_exact(got_of(batch, read, **options), wanted, allowed_for(batch, read, **options))


def counts_of(batch):
    return batch.support.ids.bincount(minlength=len(batch.weight))


@kernels
@pytest.mark.parametrize("forward", [True, False], ids=["three", "weight"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"entropy": "support", "softcap": 4.0, "logit_scale": 0.6},
        {"temperature": 0.7, "bias": None},
    ],
    ids=str,
)
def test_hot_and_cold_ids_in_one_row(forward, options, monkeypatch):
    hot_ids_everywhere(monkeypatch, forward=forward)
    launched = products(monkeypatch)
    batch = random_batch(9, 140, 60, kinds=REPLAY, dtype=HALF, widths=(25, 3, 1))
    counts = counts_of(batch)
    assert (counts > 1).any()
    assert (counts == 1).any()
    if "temperature" in options:
        batch.bias, batch.temperature = torch.zeros_like(batch.bias), torch.full((9,), 0.7)
        exact = batch.leaves(torch.float64)
        wanted = results(exact, outputs(head(exact, "reference")))
        wanted.grads[2] = None
        assert_exact(got_of(batch, **options), wanted, allowed_for(batch))
    else:
        compare(batch, **options)
    assert [len(calls) for calls in launched] == [forward, forward, 1]


@kernels
@pytest.mark.parametrize("forward", [True, False], ids=["three", "weight"])
@pytest.mark.parametrize("which", ["all", "none", "more than slots"])
def test_how_many_are_hot(which, forward, monkeypatch):
    slots = 32 if which == "all" else SLOTS
    hot_ids_everywhere(monkeypatch, slots=slots, least=99 if which == "none" else 1)
    launched = products(monkeypatch)
    v = 40 if which == "more than slots" else 11
    batch = random_batch(7, 21, v, kinds=REPLAY, dtype=HALF, widths=(10, 3))
    compare(batch, entropy="support")
    hot = launched[0][0].args[2]
    used = {"all": int((counts_of(batch) > 0).sum()), "none": 0, "more than slots": slots}[which]
    assert int((hot >= 0).sum()) == used
    assert (hot[used:] == -1).all()


@kernels
@pytest.mark.parametrize("from_bounds", [True, False])
@pytest.mark.parametrize(("slots", "least"), [(16, 2), (128, 2), (16, 9), (16, 1000)])
def test_the_most_frequent_ids_have_the_slots_whatever_ran_first(slots, least, from_bounds):
    """Of ids whose counts are in one bin the first ones; over several programs of ids."""
    import rl_loss.kernels.hot_ids as hot_ids

    g, v, n = torch.Generator().manual_seed(0), 2500, 48 * least
    draws = (torch.rand(6000, generator=g) ** 3 * (v + 40)).int()  # the last are no ids
    counts = draws[draws < v].long().bincount(minlength=v)
    found = hot_ids.new_hot_ids(slots, v, torch.device(DEVICE))
    least = hot_ids.least_count(n)
    if from_bounds:
        bounds = hot_ids.id_bounds(draws.sort().values.to(DEVICE), v, n, found).cpu()
        assert torch.equal(bounds.diff(), counts)
        assert bounds[0] == 0
    else:
        hot_ids.find_hot_ids(draws.to(DEVICE), v, n, found)
    slot_of, ids, used = (tensor.cpu() for tensor in found)
    mantissa, exponent = torch.cat([counts, torch.tensor([least])]).double().frexp()
    steps = 4 * exponent + (8 * mantissa).floor()  # four an octave
    bins = torch.where(counts >= least, 1 + steps[:-1] - steps[-1], 0)
    order = (-bins).argsort(stable=True)  # the highest bins, in each the lowest ids
    wanted = order[: int((bins > 0).sum())][:slots]
    assert used == len(wanted) == (slot_of >= 0).sum()
    assert set(ids[: len(wanted)].tolist()) == set(wanted.tolist())
    assert (ids[len(wanted) :] == -1).all()
    assert torch.equal(ids[slot_of[wanted].long()], wanted.int())
    # In the order of the ids, those of the last bin behind the others.
    last = bins[wanted].min() if len(wanted) == slots else 0
    key = torch.where(bins[ids[: len(wanted)].long()] > last, 0, v) + ids[: len(wanted)]
    assert (key.diff() > 0).all()


@kernels
def test_no_id_without_a_slot_has_more_entries_than_is_said():
    """So none needs a list of its own entries' owners."""
    import rl_loss.kernels.gradient_sums as gradient_sums
    import rl_loss.kernels.hot_ids as hot_ids

    for seed, power in enumerate((1, 2, 8)):
        g, v, n = torch.Generator().manual_seed(seed), 60, 40
        draws = (torch.rand(900, generator=g) ** power * v).int()
        found = hot_ids.new_hot_ids(16, v, torch.device(DEVICE))
        hot_ids.find_hot_ids(draws.to(DEVICE), v, n, found)
        left = draws.bincount(minlength=v)[found.slots.cpu() < 0].max()
        assert left <= gradient_sums.most_of_the_others(n, 900, 16) < 900


@kernels
@pytest.mark.parametrize("forward", [True, False], ids=["three", "weight"])
def test_what_is_nan_in_an_inactive_row_stays_there(forward, monkeypatch):
    hot_ids_everywhere(monkeypatch, forward=forward)
    launched = products(monkeypatch)
    batch = random_batch(9, 33, 60, kinds=REPLAY, dtype=HALF, widths=(25, 3, 1))
    active = torch.arange(9) % 5 != 2  # one of them of one id
    batch.hidden[~active] = 0.0
    allowed = allowed_for(batch, active=active)
    batch.hidden[~active] = torch.nan
    exact = batch.leaves(torch.float64)
    wanted = results(exact, outputs(head(exact, "reference", active=active)))
    for where in ("cpu", DEVICE):
        assert_exact(got_of(batch, active=active.to(where)), wanted, allowed)
    assert launched[2]


@kernels
def test_a_nan_in_an_active_row_is_its_own():
    with pytest.MonkeyPatch.context() as patch:
        hot_ids_everywhere(patch)
        batch = random_batch(5, 16, 12, kinds=REPLAY, dtype=HALF, widths=(9,))
        batch.hidden[2] = torch.nan
        got = got_of(batch)
    assert got.values[0].isnan().nonzero()[:, 0].tolist() == [2]
    assert got.grads[0].isnan().any(1).nonzero()[:, 0].tolist() == [2]


@kernels
@pytest.mark.parametrize("entropy", ["support", "full"])
@pytest.mark.parametrize("full", [False, True])
def test_beside_rows_over_the_vocabulary(entropy, full, monkeypatch):
    """HEAD rows have hot entries too, rows without evidence none."""
    hot_ids_everywhere(monkeypatch)
    launched = products(monkeypatch)
    kinds = RowKind.REPLAY, RowKind.HEAD, RowKind.NONE
    batch = random_batch(10, 18, 31, kinds=kinds, dtype=HALF, widths=(12, 9, 1, 20))
    compare(batch, entropy=entropy, full=full)
    assert [len(calls) for calls in launched] == [1, 1, 1]


@kernels
def test_beside_wide_rows(monkeypatch):
    import rl_loss.kernels.gradient_sums as gradient_sums
    import rl_loss.plan as plan

    hot_ids_everywhere(monkeypatch)
    monkeypatch.setattr(plan, "ENTRIES_A_PRODUCT", 0.4)
    monkeypatch.setattr(plan, "ENTRIES_A_READ", 0.0)
    launched = products(monkeypatch)
    wide = spied(monkeypatch, gradient_sums, "wide_hidden_grads")
    batch = random_batch(8, 18, 29, kinds=(RowKind.REPLAY, RowKind.HEAD), dtype=HALF,
                         widths=(29, 1, 20, 3, 9))  # fmt: skip
    batch = replace(batch, support=batch.support)
    options = {"softcap": 5.0}
    exact = batch.leaves(torch.float64)
    wanted = results(exact, outputs(head(exact, "reference", **options)))
    allowed = rounded_twice(allowed_for(batch, **options), HALF)
    assert_exact(got_of(batch, **options), wanted, allowed)
    assert [len(calls) for calls in (*launched, wide)] == [1, 1, 1, 1]


@kernels
def test_logits_rounded_as_a_sampler_does(monkeypatch):
    """Where sums are exact in any order: else one may fall on the other side of a rounding."""
    hot_ids_everywhere(monkeypatch)
    launched = products(monkeypatch)
    batch = random_batch(6, 16, 20, kinds=REPLAY, dtype=torch.float32, widths=(12, 5))
    batch.hidden = (batch.hidden * 4).round().div(4).to(HALF)
    batch.weight = (batch.weight * 4).round().div(4).to(HALF)
    batch.bias = batch.bias.to(HALF)
    compare(batch, logits_dtype=torch.bfloat16, entropy="support")
    assert launched[0]


@kernels
def test_runs_of_rows_and_parts_of_the_weight_gradient(monkeypatch):
    import rl_loss.kernels.gradient_sums as gradient_sums
    import rl_loss.kernels.hot_products as hot_products

    hot_ids_everywhere(monkeypatch, least=20)
    monkeypatch.setattr(gradient_sums, "_BASE_BYTES", 0)
    monkeypatch.setattr(hot_products, "_LEAST_RUN", 65)
    launched = products(monkeypatch)
    kinds = (*REPLAY * 4, RowKind.HEAD)
    batch = random_batch(131, 16, 40, kinds=kinds, dtype=HALF, widths=(7, 2), incomplete=False)
    compare(batch)
    assert [len(calls) for calls in launched] == [1, 2, 1]
    assert [len(call.args[5]) for call in launched[1]] == [128, 3]
    assert len(launched[2][0].args[4]) == 2


@kernels
def test_more_columns_than_a_tile_has(monkeypatch):
    import rl_loss.kernels.hot_products as hot_products

    hot_ids_everywhere(monkeypatch, slots=32)
    for name in ("LOGITS_TILE", "HIDDEN_TILE", "WEIGHT_TILE", "NARROW_TILE"):
        blocks = {block: 16 for block in getattr(hot_products, name) if block.startswith("BLOCK")}
        monkeypatch.setattr(hot_products, name, {**blocks, "num_warps": 2, "num_stages": 2})
    compare(random_batch(19, 37, 40, kinds=REPLAY, dtype=HALF, widths=(19, 4)))


@kernels
@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_frozen_inputs_and_a_second_backward(frozen, monkeypatch):
    hot_ids_everywhere(monkeypatch)
    batch = on_device(random_batch(7, 16, 21, kinds=REPLAY, dtype=HALF, widths=(9, 4)))
    whole = batch.leaves()
    total = head(whole, "triton").logprobs.sum()
    total.backward(retain_graph=True)
    once = [grad.clone() for grad in whole.grads()]
    total.backward()
    part = batch.leaves()
    getattr(part, frozen).requires_grad_(False)
    head(part, "triton").logprobs.sum().backward()
    for name, twice, wanted in zip(("hidden", "weight", "bias"), whole.grads(), once, strict=True):
        assert torch.equal(twice, 2 * wanted)
        grad = getattr(part, name).grad
        assert grad is None if name == frozen else torch.equal(grad, wanted)


@kernels
@pytest.mark.parametrize("kinds", [REPLAY, (RowKind.REPLAY, RowKind.HEAD)], ids=["replay", "mixed"])
def test_one_pass(kinds, monkeypatch):
    """As the two steps, its rows over the vocabulary in chunks."""
    hot_ids_everywhere(monkeypatch)
    launched = products(monkeypatch)
    batch = random_batch(9, 16, 23, kinds=kinds, dtype=HALF, widths=(11, 2, 6))
    g = torch.Generator().manual_seed(3)
    values = {
        "inference_logprobs": -torch.randn(9, generator=g).abs(),
        "advantages": torch.randn(9, generator=g),
    }

    def gradients(leaves, impl):
        rows = leaves.hidden, leaves.weight, leaves.labels, leaves.support
        given = {name: value.to(leaves.hidden.device) for name, value in values.items()}
        out = fused_lm_head_loss(
            *rows, loss=icepop_loss, impl=impl, bias=leaves.bias, temperature=leaves.temperature,
            workspace_mib=3 * 23 * 4 / 2**20, **given,
        )  # fmt: skip
        return results(leaves, [out.loss], lambda parts: (parts, parts[0]))

    wanted = gradients(batch.leaves(torch.float64), "reference")
    got = gradients(on_device(batch).leaves(), "triton")
    assert [len(calls) for calls in launched] == [1, 1, 1]
    assert (got.values[0] - wanted.values[0]).abs() < 1e-4 * (1 + wanted.values[0].abs())
    # Each chunk's gradient over the vocabulary is rounded before it is added up.
    share = 4 * torch.finfo(HALF).eps
    for grad, exact in zip(got.grads, wanted.grads, strict=True):
        assert (grad.double() - exact).abs().max() <= share * exact.abs().max()


@kernels
def test_repeated_draws_have_no_cell_of_their_own(monkeypatch):
    hot_ids_everywhere(monkeypatch)
    launched = products(monkeypatch)
    batch = random_batch(4, 8, 7, kinds=(RowKind.NONE,), dtype=HALF)
    row = ([3, 3, 3, 1], [-0.5] * 4)
    batch.support = Support.from_rows([row] * 4, kind=RowKind.DRAWS)
    compare(batch)
    assert not any(launched)


@kernels
@pytest.mark.parametrize("hot", [True, False])
def test_compiled_whole(hot, monkeypatch):
    """The graph knows the sizes of what the forward hands to the backward."""
    if hot:
        hot_ids_everywhere(monkeypatch)
    launched = products(monkeypatch)
    batch = on_device(random_batch(5, 16, 21, kinds=REPLAY, dtype=HALF, widths=(9, 3)))

    def total(hidden, weight):
        out = fused_lm_head(hidden, weight, batch.labels, batch.support, impl="triton")
        return out.logprobs.sum() + out.support_logprobs.square().sum()

    plain, fresh = batch.leaves(), batch.leaves()
    total(plain.hidden, plain.weight).backward()
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(total, fullgraph=True, backend=backend)
    compiled(fresh.hidden, fresh.weight).backward()
    assert torch.equal(fresh.hidden.grad, plain.hidden.grad)
    assert torch.equal(fresh.weight.grad, plain.weight.grad)
    assert [len(calls) for calls in launched] == [2 * hot] * 3


def split_vocabulary(rank: int) -> None:
    """Each rank its own hot ids; one has none at all."""
    with pytest.MonkeyPatch.context() as patch:
        interpreted = rank_device(rank).type == "cpu"
        patch.setattr("rl_loss.plan.ENTRIES_A_PRODUCT", 1.0)
        hot_ids_everywhere(patch)
        launched = products(patch)
        dtype = torch.float16 if interpreted else torch.bfloat16
        for v, kinds in ((30, REPLAY), (30, (RowKind.REPLAY, RowKind.HEAD)), (2, REPLAY)):
            batch = random_batch(8, 16, v, kinds=kinds, dtype=dtype, widths=(13, 4, 1, 8))
            rows = 15 if v == 30 else 2
            allowed = allowed_for(batch)
            exact = batch.leaves(torch.float64)
            wanted = results(exact, outputs(head(exact, "reference")))
            named = ("hidden", "weight", "bias", "labels", "temperature", "support")
            batch = replace(batch, **{x: getattr(batch, x).to(rank_device(rank)) for x in named})
            own = slice(rank * rows, rank * rows + rows)
            behind = batch.weight.new_full((2 * rows - v, 16), torch.nan)
            leaves = replace(
                batch,
                weight=torch.cat([batch.weight, behind])[own],
                bias=torch.cat([batch.bias, behind[:, 0]])[own],
            ).leaves()
            out = head(leaves, "triton", process_group=dist.group.WORLD, vocab_size=v)
            got = results(leaves, outputs(out))
            alike_on_all(*outputs(out))
            here = slice(rank * rows, min(v, rank * rows + rows))
            parts = [wanted.grads[0], *(grad[here] for grad in wanted.grads[1:])]
            scales = [
                float(g.abs().max() / max(part.abs().max() if part.numel() else 0.0, 1e-30))
                for g, part in zip(wanted.grads, parts, strict=True)
            ]
            shares = [a * scale for a, scale in zip(allowed.grads, scales, strict=True)]
            got = got._replace(
                grads=[g[: len(part)] for g, part in zip(got.grads, parts, strict=True)]
            )
            assert_exact(got, wanted._replace(grads=parts), allowed._replace(grads=shares))
        assert [len(calls) for calls in launched] == [3, 3, 3]


def test_a_split_vocabulary():
    if not on_gpus(2):
        pytest.importorskip("triton")
    run_ranks(split_vocabulary, 2, interpreted=not on_gpus(2))


@pytest.mark.gpu
def test_bitwise_the_same_twenty_times_without_a_sync():
    from benchmarks.workloads import fixed

    work = fixed(512, 2560, 2048, 60_000, device="cuda").to("cuda", torch.bfloat16)
    first = None
    with pytest.MonkeyPatch.context() as patch:
        launched = products(patch)
        for turn in range(20):
            leaves = [t.detach().requires_grad_() for t in (work.hidden, work.weight)]
            torch.cuda.set_sync_debug_mode("error" if turn else "default")
            try:
                out = fused_lm_head(*leaves, work.labels, work.support)
                upstreams = work.d_logprobs, work.d_support_logprobs
                torch.autograd.backward((out.logprobs, out.support_logprobs), upstreams)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            got = [out.logprobs, out.support_logprobs, *(leaf.grad for leaf in leaves)]
            first = got if first is None else first
            for value, wanted in zip(got, first, strict=True):
                assert torch.equal(value, wanted)
    assert [len(calls) for calls in launched] == [20] * 3
