"""The Triton kernels against the reference: in the interpreter on the CPU, compiled on a GPU."""

from dataclasses import replace

import pytest
import torch
from factory import (
    MadeMemory,
    Results,
    as_they_are,
    assert_exact,
    hot_ids_everywhere,
    naive_head,
    naive_output,
    outputs,
    padded,
    random_batch,
    results,
    spied,
    tensors_of,
    tolerance,
    weighted_sum,
)
from interpreter import (
    DEVICE,
    HALVES,
    INTERPRETED,
    kernels,
    rounded_twice,
    run_interpreted,
    truncated,
)
from torch.utils.checkpoint import checkpoint

from rl_loss import LossInputs, RowKind, Support, fused_lm_head, icepop_loss
from rl_loss.csr import HostFacts

pytestmark = pytest.mark.usefixtures("unwritten_is_nan", "rows_are_gathered")
REPLAY = (RowKind.REPLAY,)
MIXED = (RowKind.REPLAY, RowKind.NONE, RowKind.HEAD, RowKind.DRAWS)
EPS = torch.finfo(torch.float32).eps


def test_in_the_interpreter():
    run_interpreted(__file__)


def on_device(batch):
    names = ("hidden", "weight", "bias", "labels", "temperature", "support")
    return replace(batch, **{name: getattr(batch, name).to(DEVICE) for name in names})


def head(batch, impl, **options):
    options = {"temperature": batch.temperature, "bias": batch.bias, **options}
    return fused_lm_head(
        batch.hidden, batch.weight, batch.labels, batch.support, impl=impl, **options
    )


def kernel_results(batch, read=as_they_are, **options):
    """Of the batch as it is, moved to the device."""
    leaves = on_device(batch).leaves()
    return results(leaves, outputs(head(leaves, "triton", **options)), read)


def allowed_for(batch, read=as_they_are, **options):
    plain = ("entropy", "full", "active", "softcap", "logit_scale")
    plain = {name: options[name] for name in plain if name in options}
    allowed, support = tolerance(batch, read, **plain), batch.support
    gathered = not len(support.plan.over_v) and not len(support.plan_for(len(batch.weight)).wide)
    gathered = gathered and not options.get("full") and options.get("entropy") != "full"
    return allowed if gathered else rounded_twice(allowed, batch.hidden.dtype)


def compare(batch, read=as_they_are, exact_impl="reference", **options):
    """Values and gradients of the kernels against the head without kernels in float64."""
    fast, exact = on_device(batch).leaves(), batch.leaves(torch.float64)
    got, wanted = head(fast, "triton", **options), head(exact, exact_impl, **options)
    assert torch.equal(got.support_valid.cpu(), wanted.support_valid)
    assert torch.equal(got.active.cpu(), wanted.active)
    dtype = batch.hidden.dtype
    for value in outputs(got):
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_exact(
        results(fast, outputs(got), read),
        results(exact, outputs(wanted), read),
        allowed_for(batch, read, **options),
        units=truncated(dtype),
    )
    assert {grad.dtype for grad in fast.grads() if grad is not None} == {dtype}


def wide_from(monkeypatch, share):
    """REPLAY rows of so many ids of the vocabulary go through products with all of it."""
    import rl_loss.plan as plan

    monkeypatch.setattr(plan, "ENTRIES_A_PRODUCT", share)
    monkeypatch.setattr(plan, "ENTRIES_A_READ", 0.0)


@kernels
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("entropy", "options"),
    [(None, {}), ("support", {"softcap": 4.0, "logit_scale": 0.6})],
    ids=str,
)
def test_replay_rows(dtype, entropy, options, monkeypatch):
    import rl_loss.kernels.gathered as gathered_kernels

    gathered = spied(monkeypatch, gathered_kernels, "_logits_kernel")
    batch = random_batch(11, 19, 37, kinds=REPLAY, dtype=dtype, widths=(1, 2, 5, 36))
    compare(batch, entropy=entropy, **options)
    assert len(gathered) == 1


@kernels
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("entropy", [None, "support", "full"])
@pytest.mark.parametrize("full", [False, True])
def test_mixed_rows(dtype, entropy, full):
    options = {"entropy": entropy, "full": full, "softcap": 6.0}
    compare(random_batch(9, 7, 31, dtype=dtype, kinds=MIXED), **options)


@kernels
@pytest.mark.parametrize(
    "options", [{"bias": None}, {"temperature": 0.7}, {"bias": None, "temperature": 1.0}], ids=str
)
def test_options_left_out(options):
    batch = random_batch(6, 9, 23, kinds=REPLAY)
    given = replace(batch)
    if "bias" in options:
        given.bias = torch.zeros(23, dtype=torch.float64)
    if "temperature" in options:
        given.temperature = torch.full((6,), options["temperature"], dtype=torch.float64)
    exact = given.leaves()
    wanted = results(exact, outputs(head(exact, "reference")))
    if "bias" in options:
        wanted.grads[2] = None
    assert_exact(kernel_results(batch, **options), wanted, tolerance(given))


@kernels
@pytest.mark.parametrize("which", range(4))
def test_each_output_alone(which):
    def read(parts):
        return [parts[which]], weighted_sum([parts[which]])

    compare(random_batch(9, 5, 17, kinds=REPLAY), read, entropy="support")


@kernels
@pytest.mark.parametrize("kinds", [REPLAY, MIXED], ids=["replay", "mixed"])
@pytest.mark.parametrize("entropy", ["support", "full"])
@pytest.mark.parametrize("which", [*range(5), "mass"])
def test_each_output_alone_beside_full_log_probabilities(which, entropy, kinds):
    """Rows of one id, of some, of all of V; and what is made of two of them, the kept mass."""

    def read(parts):
        if which == "mass":  # beside one of the two, for its gradient is a small difference of both
            mass = (parts[4] - parts[0]).exp()
            return [mass], weighted_sum([mass, parts[4]])
        return [parts[which]], weighted_sum([parts[which]])

    batch = random_batch(9, 5, 17, kinds=kinds, widths=(3, 1, 17, 9, 2))
    compare(batch, read, entropy=entropy, full=True, logit_scale=0.7)


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("active", [None, "host", "device"])
def test_full_log_probabilities_of_some_rows_are_the_log_probabilities(dtype, active):
    """Bit for bit where a row is over the vocabulary; of inactive rows they are 0, the mass 1."""
    batch = random_batch(12, 7, 31, kinds=MIXED, dtype=dtype)
    on = torch.arange(12) % 5 != 1
    batch.hidden[~on] = batch.hidden[~on] if active is None else torch.nan
    mask = {None: None, "host": on, "device": on.to(DEVICE)}[active]
    out = head(on_device(batch), "triton", active=mask, full=True)
    over_v = (batch.support.kind != RowKind.REPLAY).to(DEVICE)
    assert torch.equal(out.full_logprobs[over_v], out.logprobs[over_v])
    assert (out.kept_mass[over_v] == 1).all()
    assert (out.full_logprobs < 0)[out.active].all()
    if active is not None:
        assert (out.full_logprobs[~out.active] == 0).all()
        assert (out.kept_mass[~out.active] == 1).all()
    without = head(on_device(batch), "triton", active=mask)
    assert without.full_logprobs is without.kept_mass is None


@kernels
def test_all_that_is_full_comes_of_the_same_blocks(monkeypatch):
    """Entropy and log-probabilities together take no more of them than either alone."""
    import rl_loss.kernels.blocks as blocks

    monkeypatch.setattr(blocks, "_LEAST_IDS", 5)
    forward = spied(monkeypatch, blocks, "add_stats")
    backward = spied(monkeypatch, blocks, "to_grads")
    batch, seen = random_batch(7, 6, 17, kinds=MIXED), []
    for entropy, full in ((None, True), ("full", False), ("full", True)):
        kernel_results(batch, entropy=entropy, full=full, workspace_mib=7 * 6 * 8 / 2**20)
        for calls in (forward, backward):
            cells = [(call.args[1].ids.start, len(call.args[1].rows)) for call in calls]
            seen.append(cells)
            calls.clear()
    assert seen == [[(0, 7), (6, 7), (12, 7)]] * 6


@kernels
@pytest.mark.parametrize("kinds", [REPLAY, MIXED], ids=["replay", "mixed"])
@pytest.mark.parametrize("given", [(None, True), ("full", False), ("support", True)], ids=str)
@pytest.mark.parametrize("where", ["cpu", DEVICE] if DEVICE == "cuda" else ["cpu"])
def test_what_is_but_logged_of_replayed_rows_costs_no_block_in_the_backward(
    kinds, given, where, monkeypatch
):
    """Its one product is the forward's; the gradient is of what was read."""
    import rl_loss.kernels.blocks as blocks

    monkeypatch.setattr(blocks, "_LEAST_IDS", 17)
    backward = spied(monkeypatch, blocks, "to_grads")
    batch, on = random_batch(9, 6, 17, kinds=kinds), torch.arange(9) != 5
    options = {"entropy": given[0], "full": given[1]}

    def logged(parts):
        return parts, weighted_sum(parts[:3])

    def rows_in_blocks(read):
        backward.clear()
        got = kernel_results(batch, read, active=on.to(where), **options)
        exact = batch.leaves(torch.float64)
        wanted = results(exact, naive_head(exact, active=on, **options), read)
        assert_exact(got, wanted, allowed_for(batch, read, active=on, **options))
        return torch.cat([on[:0].long(), *(call.args[1].rows.cpu() for call in backward)]).tolist()

    over_v, every = on & (batch.support.kind != RowKind.REPLAY), on.nonzero()[:, 0].tolist()
    # Behind a mask on the device it would take a second sync to tell them apart.
    told = where == "cpu" or kinds == REPLAY
    assert rows_in_blocks(logged) == (over_v.nonzero()[:, 0].tolist() if told else every)
    assert rows_in_blocks(as_they_are) == every


@kernels
@pytest.mark.parametrize("widths", [(40, 1, 2, 1, 1, 1, 1), (5,)], ids=["rows", "ids"])
def test_heavy_rows_and_frequent_ids_take_the_narrow_blocks(widths, monkeypatch):
    """A row of many times the mean width, in one tile and in two; ids that are in most rows."""
    import rl_loss.kernels.entry_sums as entry_sums
    import rl_loss.kernels.gradient_sums as gradient_sums

    monkeypatch.setattr(entry_sums, "HEAVY", 4)
    monkeypatch.setattr(gradient_sums, "_HEAVY_ROW", 1)
    monkeypatch.setattr(entry_sums, "_HEAVY_BLOCK", {"BLOCK_H": 16, "R": 4})
    launched = spied(monkeypatch, entry_sums, "_heavy_kernel")
    v = 44 if len(widths) > 1 else 7
    batch = random_batch(7, 21, v, kinds=REPLAY, widths=widths)
    compare(batch, entropy="support")
    shared = {len(call.args[0]): call.kwargs["HEAVY"] for call in launched}
    if v == 7:
        assert batch.support.ids.bincount().max() > shared[7] == 4
    else:
        assert batch.support.offsets.diff().max() > shared[7]


@kernels
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kinds", [REPLAY, MIXED], ids=["replay", "mixed"])
@pytest.mark.parametrize(
    ("entropy", "full"), [("support", False), ("full", False), ("support", True), ("full", True)]
)
def test_wide_rows_through_products_over_the_vocabulary(dtype, kinds, entropy, full, monkeypatch):
    """Rows of all of V, of most of it, and narrow ones; two rows a block."""
    import rl_loss.kernels.blocks as blocks
    import rl_loss.kernels.gradient_sums as gradient_sums

    wide_from(monkeypatch, 0.4)
    forward = spied(monkeypatch, blocks, "_wide_logits")
    backward = spied(monkeypatch, gradient_sums, "wide_hidden_grads")
    runs = spied(monkeypatch, blocks, "put_entries")
    batch = random_batch(8, 9, 29, kinds=kinds, dtype=dtype, widths=(29, 1, 20, 3, 14))
    wide = len(batch.support.plan_for(29).wide)
    size = 8 if dtype == torch.float64 else 4
    options = {"entropy": entropy, "full": full, "softcap": 5.0}
    compare(batch, workspace_mib=2 * 29 * size / 2**20, **options)
    assert len(forward) == len(backward) == 1
    # A gradient in bfloat16, as a GPU has it, takes half of the room.
    assert len(runs) == -(-wide // (4 if DEVICE == "cuda" and size == 4 else 2))
    assert wide == (5 if kinds == REPLAY else 2)


@kernels
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kinds", [MIXED, (RowKind.NONE,), (RowKind.HEAD,)], ids=str)
def test_blocks_of_ids_and_of_rows(dtype, kinds, monkeypatch):
    """V no multiple of a block: 5 ids for 2 rows, then 6 ids for all."""
    import rl_loss.kernels.blocks as blocks

    monkeypatch.setattr(blocks, "_LEAST_IDS", 5)
    forward = spied(monkeypatch, blocks, "add_stats")
    backward = spied(monkeypatch, blocks, "to_grads")
    at_once = spied(monkeypatch, blocks.BlockSums, "_writes_at_once")
    batch = random_batch(7, 6, 17, kinds=kinds, dtype=dtype)
    d = len(batch.support.plan.over_v)
    size = 8 if dtype == torch.float64 else 4
    for rows, ids, entropy in ((2, 5, "support"), (d, 6, None)):
        compare(batch, entropy=entropy, workspace_mib=rows * ids * size / 2**20)
        wanted = [(row, id) for id in range(0, 17, ids) for row in range(0, d, rows)]
        for calls in (forward, backward):
            blocks_seen = [call.args[1] for call in calls]
            assert [(block.run.start, block.ids.start) for block in blocks_seen] == wanted
            calls.clear()
    # Without entries a block of all rows is all of its ids' weight gradient.
    native = dtype == torch.float64 or DEVICE == "cuda"
    assert any(call.result for call in at_once) == (native and kinds == (RowKind.NONE,))


@kernels
@pytest.mark.parametrize("options", [{}, {"softcap": 4.0, "logit_scale": 0.6}], ids=str)
def test_logits_rounded_as_a_sampler_does(options):
    batch = random_batch(9, 7, 31, kinds=MIXED)
    # Under a cap autograd of the reference takes the slope at what was rounded, not at the result.
    exact_impl = "auto" if options else "reference"
    options = {"entropy": "support", "full": True, "logits_dtype": torch.bfloat16, **options}
    compare(batch, exact_impl=exact_impl, **options)


@kernels
def test_full_vocabulary_logits_far_below_zero():
    """Every logit at -20 and a cap of 30: what lies behind V adds no mass."""
    hidden, weight = torch.full((3, 4), -1.0, device=DEVICE), torch.full((48, 4), 5.0).to(DEVICE)
    labels = torch.tensor([0, 20, 47], device=DEVICE)
    for softcap in (None, 30.0):
        out = fused_lm_head(hidden, weight, labels, impl="triton", softcap=softcap)
        wanted = -torch.tensor(48.0).log().expand(3)  # within two units of a logit of 20
        assert (out.logprobs.cpu() - wanted).abs().max() <= 2 * EPS * 20


@kernels
def test_a_masked_logit_above_the_support_does_not_overflow(monkeypatch):
    """A wide row is normalised over its support, whatever the ids outside it have."""
    wide_from(monkeypatch, 0.1)
    hidden = torch.ones(2, 1, device=DEVICE, requires_grad=True)
    weight = torch.arange(12.0, device=DEVICE)[:, None].requires_grad_()
    with torch.no_grad():
        weight[11] = 3e4
    support = Support.from_rows([(list(range(8)), None), ([3, 4, 5], None)]).to(DEVICE)
    assert len(support.plan_for(12).wide) == 2
    labels = torch.tensor([7, 4], device=DEVICE)
    out = fused_lm_head(hidden, weight, labels, support, impl="triton")
    expected = torch.arange(8.0).log_softmax(0)[7], torch.arange(3.0).log_softmax(0)[1]
    assert (out.logprobs.detach().cpu() - torch.stack(expected)).abs().max() <= 2 * EPS * 8
    out.logprobs.sum().backward()
    assert hidden.grad.isfinite().all()
    assert torch.equal(weight.grad[8:], torch.zeros_like(weight.grad[8:]))


@kernels
def test_an_id_that_is_drawn_more_often_than_there_are_rows(monkeypatch):
    """Its row of the weight gradient has more entries than a light program takes."""
    import rl_loss.kernels.entry_sums as entry_sums

    monkeypatch.setattr(entry_sums, "HEAVY", 64)
    launched = spied(monkeypatch, entry_sums, "_heavy_kernel")
    draws = [0] * 80 + [2, 5]
    rows = [(draws, [-0.1] * len(draws)), ([1, 1, 3], [-0.5] * 3)]
    batch = random_batch(2, 8, 7, kinds=(RowKind.NONE,))
    batch.support = Support.from_rows(rows, kind=RowKind.DRAWS)
    compare(batch)
    assert 7 in [len(call.args[0]) for call in launched]


@kernels
@pytest.mark.parametrize("kinds", [(RowKind.HEAD,), REPLAY], ids=str)
def test_a_backward_under_autocast_keeps_its_products(kinds, monkeypatch):
    import rl_loss.kernels.blocks as blocks

    wide_from(monkeypatch, 0.1)
    products = spied(monkeypatch, blocks, "_product")
    batch = random_batch(5, 8, 31, kinds=kinds, dtype=torch.float32, widths=(9, 12))
    plain = kernel_results(batch)
    assert products
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        other = kernel_results(batch)
    for value, wanted in zip(other.values + other.grads, plain.values + plain.grads, strict=True):
        assert torch.equal(value, wanted)


@kernels
def test_a_nan_upstream_spoils_the_bias_of_its_own_ids_alone():
    support = Support.from_rows([([0, 1], None), ([5, 6], None)]).to(DEVICE)
    hidden, weight = torch.randn(2, 4, device=DEVICE), torch.randn(9, 4, device=DEVICE)
    bias = torch.zeros(9, device=DEVICE, requires_grad=True)
    labels = torch.tensor([1, 5], device=DEVICE)
    out = fused_lm_head(hidden, weight, labels, support, bias=bias, impl="triton")
    out.logprobs.backward(torch.tensor([torch.nan, 1.0], device=DEVICE))
    assert bias.grad.isnan().nonzero()[:, 0].tolist() == [0, 1]


@kernels
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
@pytest.mark.parametrize("masked", [False, True])
def test_compiled_without_a_bias(frozen, masked, monkeypatch):
    """One input frozen, a mask on the host, a wide row whose plan was made before, padding."""
    import rl_loss.kernels.blocks as blocks

    wide_from(monkeypatch, 0.4)
    forward = spied(monkeypatch, blocks, "_wide_logits")
    batch = random_batch(5, 6, 21, kinds=REPLAY, dtype=torch.float32, widths=(15, 3))
    batch, active = on_device(padded(batch)), torch.arange(5) != 4 if masked else None
    assert len(batch.support.plan_for(21).wide)

    def logprobs(hidden, weight):
        rows = hidden, weight, batch.labels, batch.support
        return fused_lm_head(*rows, active=active, vocab_size=21, impl="triton").logprobs

    leaves, fresh = batch.leaves(), batch.leaves()
    for some in (leaves, fresh):
        getattr(some, frozen).requires_grad_(False)
    expected = logprobs(leaves.hidden, leaves.weight)
    expected.sum().backward()
    assert forward
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    got = torch.compile(logprobs, fullgraph=True, backend=backend)(fresh.hidden, fresh.weight)
    got.sum().backward()
    assert torch.equal(got, expected)
    for name in {"hidden", "weight"} - {frozen}:
        assert torch.equal(getattr(fresh, name).grad, getattr(leaves, name).grad)


@kernels
@pytest.mark.parametrize("given", [("full", False), (None, True)], ids=str)
def test_compiled_what_is_full_breaks_the_graph_and_the_numbers_stay(given):
    """Which rows are over the vocabulary depends on values that a compiler does not see."""
    batch = on_device(random_batch(5, 6, 21, kinds=MIXED, dtype=torch.float32))
    entropy, full = given

    def total(hidden, weight):
        some = replace(batch, hidden=hidden, weight=weight)
        return weighted_sum(outputs(head(some, "triton", entropy=entropy, full=full)))

    plain, fresh = batch.leaves(), batch.leaves()
    total(plain.hidden, plain.weight).backward()
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        torch.compile(total, fullgraph=True, backend="eager")(fresh.hidden, fresh.weight)
    torch._dynamo.reset()
    torch.compile(total, backend="aot_eager")(fresh.hidden, fresh.weight).backward()
    assert torch.equal(fresh.hidden.grad, plain.hidden.grad)
    assert torch.equal(fresh.weight.grad, plain.weight.grad)


@kernels
def test_hidden_sizes_beyond_one_block(monkeypatch):
    import rl_loss.kernels.entry_sums as entry_sums
    import rl_loss.kernels.gathered as gathered_kernels

    shape = {"WHOLE_H": False, "R": 2, "BLOCK_H": 16, "REST_H": 0, "num_warps": 2}
    monkeypatch.setattr(gathered_kernels, "_logits_shape", lambda h, width: shape)
    logits = spied(monkeypatch, gathered_kernels, "_logits_kernel")
    compare(random_batch(5, 37, 29, kinds=REPLAY))
    assert [call.kwargs["WHOLE_H"] for call in logits] == [False]
    sums = spied(monkeypatch, entry_sums, "_light_kernel")
    monkeypatch.setattr(
        gathered_kernels, "_logits_shape", lambda h, width: {**shape, "BLOCK_H": 512}
    )
    compare(random_batch(2, 1030, 5, kinds=REPLAY, widths=(3, 2)))
    assert [call.kwargs["BLOCK_H"] for call in sums] == [1024, 1024]


@kernels
@pytest.mark.parametrize(("h", "rest"), [(256, 0), (261, 8), (400, 256), (512, 256), (513, 0)])
@pytest.mark.parametrize("widths", [(3, 2), (40, 3)])
def test_a_hidden_row_in_two_blocks(h, rest, widths, monkeypatch):
    import rl_loss.kernels.gathered as gathered_kernels

    monkeypatch.setattr(gathered_kernels, "_MOST_COLUMNS", 256)
    logits = spied(monkeypatch, gathered_kernels, "_logits_kernel")
    compare(random_batch(3, h, 53, kinds=REPLAY, widths=widths))
    (call,) = logits
    assert call.kwargs["REST_H"] == rest
    assert call.kwargs["WHOLE_H"] == (h <= 512)


# --- what is checkpointed, padded, or under another default dtype ---


@kernels
def test_checkpointed_the_gradients_are_the_same_and_the_memory_is_free():
    batch = on_device(random_batch(5, 6, 17, kinds=MIXED, dtype=torch.float32))
    plain, other = batch.leaves(), batch.leaves()

    def function(leaves):
        def parts(hidden, weight, bias):
            given = replace(leaves, hidden=hidden, weight=weight, bias=bias)
            return outputs(head(given, "triton", full=True))

        return parts

    wanted = results(plain, function(plain)(plain.hidden, plain.weight, plain.bias))
    inputs = other.hidden, other.weight, other.bias
    known = *inputs, other.labels, other.temperature, *tensors_of(other.support)
    options = {"use_reentrant": False, "preserve_rng_state": False}
    with MadeMemory() as memory:
        parts = checkpoint(function(other), *inputs, **options)
    assert memory.held(*parts, *known) == []
    got = results(other, parts)
    for value, exact in zip(got.values + got.grads, wanted.values + wanted.grads, strict=True):
        assert torch.equal(value, exact)


def small_blocks(monkeypatch):
    import rl_loss.kernels.blocks as blocks

    monkeypatch.setattr(blocks, "_LEAST_IDS", 5)
    calls = spied(monkeypatch, blocks, "add_stats")
    return {"workspace_mib": 3 * 5 * 4 / 2**20}, lambda: calls[-1].args[1].ids == slice(15, 17)


def wide_rows(monkeypatch):
    import rl_loss.kernels.blocks as blocks

    wide_from(monkeypatch, 0.4)
    calls = spied(monkeypatch, blocks, "_wide_logits")
    return {"entropy": "full", "full": True}, lambda: len(calls) == 2


def hot_rows(monkeypatch):
    import rl_loss.kernels.gradient_sums as gradient_sums

    hot_ids_everywhere(monkeypatch)
    calls = [spied(monkeypatch, gradient_sums, name) for name in ("hot_hidden", "write_hot_rows")]
    return {}, lambda: [len(some) for some in calls] == [2, 2]


def any_rows(monkeypatch):
    return {"entropy": "support"}, lambda: True


@kernels
@pytest.mark.parametrize(
    ("path", "kinds", "dtype"),
    [
        (any_rows, MIXED, torch.float32),
        (small_blocks, MIXED[1:], torch.float32),
        (wide_rows, MIXED, torch.float32),
        (hot_rows, REPLAY, torch.float16 if INTERPRETED else torch.bfloat16),
    ],
    ids=["any", "blocks", "wide", "hot"],
)
def test_padding_behind_the_vocabulary_is_not_there(path, kinds, dtype, monkeypatch):
    batch = random_batch(6, 8, 17, kinds=kinds, dtype=dtype, widths=(9, 2, 11))
    options, taken = path(monkeypatch)
    wanted = kernel_results(batch, **options)
    got = kernel_results(padded(batch), vocab_size=17, **options)
    assert taken()
    for value, exact in zip(got.values, wanted.values, strict=True):
        assert torch.equal(value, exact)
    for grad, exact in zip(got.grads, wanted.grads, strict=True):
        assert torch.equal(grad[: len(exact)], exact)
        assert torch.equal(grad[len(exact) :], torch.zeros_like(grad[len(exact) :]))
    assert [len(grad) for grad in got.grads] == [6, 22, 22]


@kernels
def test_an_id_in_the_padding_is_nan():
    """As one behind the weight: in a label, in a REPLAY row and in a HEAD row."""
    batch = random_batch(6, 8, 17, kinds=(RowKind.REPLAY, RowKind.HEAD), dtype=torch.float32)
    ids, offsets = batch.support.ids.clone(), batch.support.offsets
    ids[offsets[2]], ids[offsets[3]] = 17, 21
    batch.labels[1], batch.labels[2] = 17, 17
    batch.support = batch.support.replace(ids=ids, host=batch.support.host)
    leaves = on_device(padded(batch)).leaves()
    out = head(leaves, "triton", vocab_size=17)
    broken = torch.tensor([False, True, True, True, False, False])
    assert torch.equal(out.logprobs.isnan().cpu(), broken)
    out.logprobs.sum().backward()
    assert torch.equal(leaves.hidden.grad.isnan().all(1).cpu(), broken)
    assert torch.equal(leaves.weight.grad[17:], torch.zeros(5, 8, device=DEVICE))


@kernels
def test_no_result_depends_on_the_default_dtype(default_dtype):
    batch = random_batch(6, 7, 17, kinds=MIXED, dtype=torch.bfloat16)
    options = {"entropy": "full", "full": True, "softcap": 9.0}
    wanted = kernel_results(batch, **options)
    torch.set_default_dtype(default_dtype)
    got = kernel_results(batch, **options)
    for value, exact in zip(got.values + got.grads, wanted.values + wanted.grads, strict=True):
        assert value.dtype == exact.dtype
        assert torch.equal(value, exact)


@kernels
@pytest.mark.parametrize("poison", [float("nan"), 1e30])
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("kinds", [REPLAY, MIXED], ids=["replay", "mixed"])
@pytest.mark.parametrize("full", [False, True])
def test_inactive_rows_may_hold_anything(poison, where, kinds, full):
    clean = random_batch(8, 6, 21, kinds=kinds, dtype=torch.float32)
    active = torch.tensor([True, False, True, True, False, True, True, False])
    off, rows = ~active, (~active)[clean.support.entry_rows]
    dirty = replace(
        clean,
        hidden=torch.where(off[:, None], poison, clean.hidden),
        labels=torch.where(off, -100, clean.labels),
        temperature=torch.where(off, 0.0, clean.temperature),
        support=clean.support.replace(
            ids=torch.where(rows, 2**30, clean.support.ids).int(), host=clean.support.host
        ),
    )
    found = []
    for batch in (on_device(clean).leaves(), on_device(dirty).leaves()):
        flags = active if where == "host" else active.to(DEVICE)
        out = head(batch, "triton", active=flags, entropy="support", full=full)
        weighted_sum(outputs(out)).backward()
        found.append([*outputs(out), *batch.grads(), out.support_valid])
    for value, wanted in zip(*found, strict=True):
        assert torch.equal(value, wanted)
    for value in found[1][: 6 if full else 5]:
        if len(value) == 8:
            assert (value[off.to(DEVICE)] == 0).all()


@kernels
@pytest.mark.parametrize("full", [False, True])
def test_rows_that_break_a_rule_are_nan(full, monkeypatch):
    """A label outside its row, an id outside V, a temperature of 0: value and hidden gradient."""
    import rl_loss.flat_rows as flat_rows

    monkeypatch.setattr(flat_rows, "host_sees", lambda device: False)
    batch = random_batch(8, 6, 21, kinds=REPLAY, widths=(4, 1))
    held = batch.support[0:1].ids.tolist()
    batch.labels[0] = next(v for v in range(21) if v not in held)
    batch.labels[1] = (batch.labels[1] + 1) % 21
    batch.labels[2] = 21
    ids = batch.support.ids.clone()
    ids[batch.support.offsets[4]] = 21
    batch.support = batch.support.replace(ids=ids)
    batch.temperature[5] = 0.0
    batch.temperature[6] = float("nan")
    bad = torch.tensor([0, 1, 2, 4, 5, 6])
    leaves = on_device(batch).leaves()
    out = head(leaves, "triton", entropy="support", full=full)
    broken = torch.zeros(8, dtype=torch.bool)
    broken[bad] = True
    read = out.full_logprobs if full else out.logprobs
    for value in (out.logprobs, out.trainer_tail_logprobs, out.entropy, read):
        assert torch.equal(value.isnan().cpu(), broken)
    rows = batch.support.entry_rows
    assert torch.equal(out.support_logprobs.isnan().cpu(), broken[rows])
    assert not out.support_valid.cpu()[broken[rows]].any()
    read.sum().backward()
    assert torch.equal(leaves.hidden.grad.isnan().all(1).cpu(), broken)
    assert not leaves.hidden.grad[~broken].isnan().any()
    assert not leaves.weight.grad.isnan().any()


@kernels
def test_a_failed_row_behind_a_device_mask_is_nan():
    packed, counts = Support.from_rows([([1, 2], None), ([3, 4], None)]).to_packed()[:2]
    support = Support.from_packed(packed[:2], torch.tensor([2, -1]), kind=[1, 1])
    hidden, weight = torch.randn(2, 4, device=DEVICE), torch.randn(6, 4, device=DEVICE)
    labels = torch.tensor([1, 3], device=DEVICE)
    with pytest.raises(ValueError, match="row 1 is active but the sampler failed"):
        fused_lm_head(hidden, weight, labels, support.to(DEVICE), impl="triton")
    assert counts.tolist() == [2, 2]


@kernels
def test_nan_in_an_active_row_is_not_hidden():
    batch = random_batch(4, 6, 21, kinds=REPLAY, widths=(5,))
    batch.hidden[2, 3] = torch.nan
    leaves = on_device(batch).leaves()
    out = head(leaves, "triton")
    assert out.logprobs.isnan().nonzero()[:, 0].tolist() == [2]
    out.logprobs.sum().backward()
    assert leaves.hidden.grad.isnan().any(1).nonzero()[:, 0].tolist() == [2]


@kernels
@pytest.mark.parametrize("full", [False, True])
def test_frozen_inputs_and_a_second_backward(full):
    batch = on_device(random_batch(7, 6, 21, kinds=REPLAY))
    whole = batch.leaves()
    loss = weighted_sum(outputs(head(whole, "triton", full=full)))
    loss.backward(retain_graph=True)
    once = [grad.clone() for grad in whole.grads()]
    loss.backward()
    for grad, wanted in zip(whole.grads(), once, strict=True):
        assert torch.equal(grad, 2 * wanted)
    for frozen in ("hidden", "weight", "bias"):
        part = batch.leaves()
        getattr(part, frozen).requires_grad_(False)
        weighted_sum(outputs(head(part, "triton", full=full))).backward()
        for name, wanted in zip(("hidden", "weight", "bias"), once, strict=True):
            grad = getattr(part, name).grad
            assert grad is None if name == frozen else torch.equal(grad, wanted)


@kernels
@pytest.mark.parametrize("kinds", [REPLAY, MIXED], ids=["replay", "mixed"])
@pytest.mark.parametrize("what", ["strided", "expanded", "transposed"])
def test_arguments_of_any_stride(what, kinds):
    """Labels, temperatures, active and bias as columns of a matrix, or one value expanded; so the
    hidden states, the weight and the upstream gradient."""
    on_host = random_batch(9, 6, 21, kinds=kinds)
    batch = on_device(on_host)
    active = torch.tensor([True, True, False, True, True, True, True, False, True]).to(DEVICE)

    def column(tensor):
        return torch.stack([tensor, torch.zeros_like(tensor)], 1)[:, 0]

    def read(parts):
        one = torch.ones((), dtype=torch.float64, device=parts[0].device)
        total = (parts[0] * one.expand(9)).sum() if what == "expanded" else 0.0
        return parts, total + weighted_sum(parts)

    asked = {"entropy": "support", "full": kinds == MIXED}
    plain, other, options = batch.leaves(), batch.leaves(), {"active": active}
    odd = {"active": active}
    if what == "strided":
        other.labels, other.temperature = column(batch.labels), column(batch.temperature)
        other.bias = column(batch.bias).requires_grad_()
        other.hidden = batch.hidden.repeat_interleave(2, 1)[:, ::2].requires_grad_()
        odd = {"active": column(active)}
    elif what == "expanded":
        plain.temperature = torch.full((9,), 0.7, device=DEVICE)
        other.temperature = torch.tensor(0.7, device=DEVICE)
        options = {"active": torch.ones(9, dtype=torch.bool, device=DEVICE)}
        odd = {"active": torch.ones(1, dtype=torch.bool, device=DEVICE).expand(9)}
    else:
        other.weight = batch.weight.T.contiguous().T.requires_grad_()
        other.hidden = batch.hidden.T.contiguous().T.requires_grad_()
    wanted, got = (
        results(leaves, outputs(head(leaves, "triton", **asked, **more)), read)
        for leaves, more in ((plain, options), (other, odd))
    )
    assert_exact(got, wanted, tolerance(on_host, read, **asked))


@kernels
def test_ids_outside_the_vocabulary_touch_nothing(monkeypatch):
    """So many of one id that the weight gradient takes them for a frequent one's run."""
    import rl_loss.kernels.entry_sums as entry_sums

    monkeypatch.setattr(entry_sums, "HEAVY", 4)
    launched = spied(monkeypatch, entry_sums, "_heavy_kernel")
    support = Support.from_rows([([3, 2**31 - 1], None)] * 12 + [([3, 1], None)] * 2)
    labels = torch.full((14,), 3, device=DEVICE)
    active = torch.arange(14) >= 12
    hidden = torch.randn(14, 16, device=DEVICE, requires_grad=True)
    weight = torch.randn(7, 16, device=DEVICE, requires_grad=True)
    rows = hidden, weight, labels, support.to(DEVICE)
    fused_lm_head(*rows, active=active.to(DEVICE), impl="triton").logprobs.sum().backward()
    heavy = [call for call in launched if len(call.args[0]) == 7]
    assert heavy
    fewer = hidden.detach()[12:].requires_grad_(), weight.detach().requires_grad_()
    rows = *fewer, labels[12:], support[12:].to(DEVICE)
    fused_lm_head(*rows, impl="triton").logprobs.sum().backward()
    # In blocks of entries that begin elsewhere, and so in another order.
    tolerance = {"rtol": 8 * torch.finfo(torch.float32).eps, "atol": 1e-6}
    torch.testing.assert_close(weight.grad, fewer[1].grad, **tolerance)
    torch.testing.assert_close(hidden.grad[12:], fewer[0].grad, **tolerance)
    assert torch.equal(hidden.grad[:12], torch.zeros(12, 16, device=DEVICE))


@kernels
def test_what_is_nan_upstream_does_not_end_at_a_row_of_one_id():
    support = Support.from_rows([([3], None), ([2], None), ([1, 4], None)])
    labels = torch.tensor([3, 2, 4], device=DEVICE)
    for impl in ("triton", "reference", "auto"):
        hidden = torch.randn(3, 4, device=DEVICE, requires_grad=True)
        weight = torch.randn(6, 4, device=DEVICE)
        out = fused_lm_head(hidden, weight, labels, support.to(DEVICE), impl=impl)
        out.logprobs.backward(torch.tensor([torch.nan, 1.0, 1.0], device=DEVICE))
        assert hidden.grad[0].isnan().all()
        assert torch.equal(hidden.grad[1], torch.zeros(4, device=DEVICE))
        assert hidden.grad[2].isfinite().all()
        hidden.grad = None
        out = fused_lm_head(hidden, weight, labels, support.to(DEVICE), impl=impl, full=True)
        out.full_logprobs.backward(torch.tensor([torch.nan, 1.0, 1.0], device=DEVICE))
        assert hidden.grad[0].isnan().all()
        assert hidden.grad[1:].isfinite().all()
        assert (hidden.grad[1] != 0).any()


@kernels
def test_no_rows_and_no_entries():
    for n in (0, 3):
        labels = torch.zeros(n, dtype=torch.int64)
        support = Support.from_rows([([0], None)] * n)
        hidden = torch.randn(n, 4, device=DEVICE, requires_grad=True)
        weight = torch.randn(5, 4, device=DEVICE, requires_grad=True)
        rows = hidden, weight, labels.to(DEVICE), support.to(DEVICE)
        out = fused_lm_head(*rows, impl="triton")
        out.logprobs.sum().backward()
        assert torch.equal(out.logprobs, torch.zeros(n, device=DEVICE))
        assert torch.equal(weight.grad, torch.zeros_like(weight))
        assert torch.equal(hidden.grad, torch.zeros_like(hidden))
        off = torch.zeros(n, dtype=torch.bool)
        for active in (off, off.to(DEVICE)):
            out = fused_lm_head(*rows, impl="triton", full=True, active=active)
            weighted_sum(outputs(out)).backward()
            assert torch.equal(out.full_logprobs, torch.zeros(n, device=DEVICE))
            assert torch.equal(weight.grad, torch.zeros_like(weight))


# --- on the GPU alone ---


def big_rows(n=512, h=256, v=5000, width=40):
    return random_batch(
        n, h, v, kinds=REPLAY, dtype=torch.bfloat16, widths=(width, 3), incomplete=False
    )


def big_batch(**sizes):
    batch = big_rows(**sizes)
    support = batch.support.pin_memory()
    return replace(on_device(batch), support=support.to("cuda", non_blocking=True))


def step(batch):
    out = head(batch, "auto", entropy="support")
    inputs = LossInputs.from_head(
        out,
        batch.support,
        inference_logprobs=out.logprobs.detach() - 0.01,
        advantages=torch.ones_like(out.logprobs),
    )
    loss = icepop_loss(inputs, kl_tau=0.1)
    loss.loss.backward()
    return loss


@pytest.mark.gpu
def test_no_sync_in_a_step():
    batch = big_batch().leaves()
    step(batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize(("entropy", "full"), [("support", False), ("full", True)])
def test_no_sync_in_a_step_of_mixed_rows(entropy, full):
    """Which rows are over the vocabulary the host knows, also behind a mask that lies there."""
    batch = random_batch(64, 32, 500, kinds=MIXED, dtype=torch.bfloat16)
    support = batch.support.pin_memory()
    batch = on_device(batch)
    batch.support = support.to("cuda", non_blocking=True)
    leaves, active = batch.leaves(), torch.arange(64) % 5 > 0
    for mode in ("default", "error"):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            out = head(leaves, "auto", active=active, entropy=entropy, full=full)
            read = out.kept_mass if full else out.logprobs
            (read.sum() + out.support_logprobs.sum()).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kinds", [REPLAY, MIXED], ids=["replay", "mixed"])
def test_tensors_on_another_gpu_than_the_current_one(kinds):
    batch = random_batch(9, 6, 21, kinds=kinds, dtype=torch.float32)
    names = ("hidden", "weight", "bias", "labels", "temperature", "support")
    found = []
    for device in ("cuda:0", "cuda:1"):
        moved = replace(batch, **{name: getattr(batch, name).to(device) for name in names}).leaves()
        assert torch.cuda.current_device() == 0
        out = head(moved, "auto", entropy="support", full=True)
        weighted_sum(outputs(out)).backward()
        found.append([part.cpu() for part in (*outputs(out), *moved.grads())])
    for value, wanted in zip(*found, strict=True):
        assert torch.equal(value, wanted)


@pytest.mark.gpu
def test_the_weight_gradient_is_bitwise_the_same_twenty_times():
    batch, first = big_batch(n=2048, v=300), None
    for _ in range(20):
        leaves = batch.leaves()
        step(leaves)
        first = leaves.weight.grad if first is None else first
        assert torch.equal(leaves.weight.grad, first)


@kernels
@pytest.mark.parametrize("frozen", [None, "hidden", "weight", "bias"])
def test_compiled_whole(frozen):
    """torch.compile takes head and loss in one graph, and gives the gradients of float64."""
    if DEVICE == "cuda":
        on_host = big_rows()
    else:
        on_host = random_batch(5, 6, 21, kinds=REPLAY, dtype=torch.float32, widths=(5, 3))
    on_host.temperature = torch.ones_like(on_host.temperature)

    def loss(out):
        given = LossInputs.from_head(
            out,
            inference_logprobs=out.logprobs.detach() - 0.01,
            advantages=torch.ones_like(out.logprobs),
        )
        return icepop_loss(given, kl_tau=0.1).loss

    def total(batch, hidden, weight, bias, impl):
        rows = hidden, weight, batch.labels, batch.support
        out = fused_lm_head(*rows, bias=bias, entropy="support", impl=impl)
        return loss(out) + out.entropy.sum()

    def read(parts):
        return [], loss(naive_output(on_host, parts, None)) + parts[3].sum()

    fast, exact = on_device(on_host).leaves(), on_host.leaves(torch.float64)
    for leaves in (fast, exact):
        if frozen is not None:
            getattr(leaves, frozen).requires_grad_(False)
    total(exact, exact.hidden, exact.weight, exact.bias, "reference").backward()
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(total, fullgraph=True, backend=backend)
    compiled(fast, fast.hidden, fast.weight, fast.bias, "triton").backward()
    got, wanted = Results([], list(fast.grads())).cpu(), Results([], list(exact.grads()))
    assert_exact(got, wanted, tolerance(on_host, read, entropy="support"))


@pytest.mark.gpu
def test_checkpointed_and_under_autocast():
    from torch.utils.checkpoint import checkpoint

    plain, other = big_batch().leaves(), big_batch().leaves()
    head(plain, "auto").logprobs.sum().backward()

    def logprobs(hidden, weight):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return head(replace(other, hidden=hidden, weight=weight), "auto").logprobs

    checkpoint(logprobs, other.hidden, other.weight, use_reentrant=False).sum().backward()
    assert torch.equal(other.weight.grad, plain.weight.grad)
    assert torch.equal(other.hidden.grad, plain.hidden.grad)


@pytest.mark.gpu
def test_in_a_cuda_graph():
    batch, eager = big_batch().leaves(), big_batch().leaves()
    head(eager, "auto").logprobs.sum().backward()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            head(batch, "auto").logprobs.sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    batch.hidden.grad = batch.weight.grad = batch.bias.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        head(batch, "auto").logprobs.sum().backward()
    graph.replay()
    for grad, wanted in zip(batch.grads(), eager.grads(), strict=True):
        assert torch.equal(grad, wanted)


@pytest.mark.gpu
def test_more_than_2_to_the_31_entries():
    """Addresses that int32 cannot hold, at a small H; some rows against float64."""
    n, width, v = 16384, 135_000, 140_000
    nnz, offsets = n * width, torch.arange(n + 1) * width
    assert nnz > 2**31
    host = HostFacts(offsets, torch.ones(n, dtype=torch.int8), torch.ones(n, dtype=torch.bool))
    support = Support(
        ids=torch.arange(width, dtype=torch.int32, device="cuda").repeat(n),
        sampler_logprobs=torch.zeros(1, device="cuda").expand(nnz),
        known=torch.ones(nnz, dtype=torch.bool, device="cuda"),
        offsets=offsets.cuda(),
        kind=torch.ones(n, dtype=torch.int8, device="cuda"),
        sampler_tail_mass=torch.zeros(n, device="cuda"),
        host=host,
    )
    g = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(n, 16, device="cuda", generator=g).bfloat16().requires_grad_()
    weight = torch.randn(v, 16, device="cuda", generator=g).bfloat16()
    labels = torch.randint(width, (n,), device="cuda", generator=g)
    out = fused_lm_head(hidden, weight, labels, support)
    out.logprobs.sum().backward()
    rows = torch.tensor([0, 1, n // 2, n - 2, n - 1], device="cuda")
    some = replace(
        random_batch(1, 1, 1, kinds=(RowKind.NONE,)),
        hidden=hidden.detach()[rows].cpu(),
        weight=weight[:width].cpu(),
        bias=torch.zeros(width, dtype=torch.bfloat16),
        labels=labels[rows].cpu(),
        support=Support.empty(len(rows)),
        temperature=torch.ones(len(rows)),
    )

    def read(parts):
        return parts[:1], parts[0].sum()

    exact = some.leaves(torch.float64)
    wanted, allowed = results(exact, naive_head(exact), read), tolerance(some, read)
    allowed = rounded_twice(allowed, torch.bfloat16)
    got = Results([out.logprobs[rows]], [hidden.grad[rows]]).cpu()
    wanted, allowed = (part._replace(grads=part.grads[:1]) for part in (wanted, allowed))
    assert_exact(got, wanted, allowed)


def on_fused_products(monkeypatch):
    """Whether or not this is a GPU that takes them."""
    import rl_loss.kernels.fused_products as fused_products

    monkeypatch.setattr(fused_products, "_on_hopper", lambda device: True)


@kernels
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 5.0, "logit_scale": 0.7}, {"temperature": 0.8, "bias": None}],
    ids=["plain", "capped", "alone"],
)
@pytest.mark.parametrize(
    ("kinds", "entropy"),
    [
        ((RowKind.NONE,), None),
        ((RowKind.NONE,), "support"),
        ((RowKind.NONE, RowKind.REPLAY), None),
        ((RowKind.NONE, RowKind.REPLAY), "full"),
    ],
    ids=str,
)
def test_rows_over_the_vocabulary_on_fused_products(kinds, entropy, options, dtype, monkeypatch):
    """Odd numbers of rows and ids; the gradient of all at once, of a run of ids after another."""
    import rl_loss.kernels.blocks as blocks

    on_fused_products(monkeypatch)
    monkeypatch.setattr(blocks, "_LEAST_IDS", 256)
    passes = [spied(monkeypatch, blocks, name) for name in ("add_stats", "to_grads")]
    forward = spied(monkeypatch, blocks, "add_row_stats")
    backward = spied(monkeypatch, blocks, "product_grads")
    batch = random_batch(21, 24, 300, kinds=kinds, dtype=dtype)
    for cells, ids in ((21 * 300, 300), (21 * 256, 256)):
        forward.clear(), backward.clear()
        compare(batch, entropy=entropy, workspace_mib=cells * 2 / 2**20, **options)
        assert len(forward) == 1
        if entropy == "full" or RowKind.REPLAY not in kinds:
            starts = [call.args[1].ids.start for call in backward]
            assert starts == list(range(0, 300, ids))
    assert passes == [[], []]


@kernels
@pytest.mark.parametrize(
    "why", ["width", "columns", "start", "head", "draws", "float32", "rounded"]
)
def test_what_fused_products_do_not_take_goes_through_blocks(why, monkeypatch):
    """Rows of no whole 16 bytes, columns apart, a matrix that begins elsewhere, entries over V."""
    import rl_loss.kernels.blocks as blocks

    on_fused_products(monkeypatch)
    fused = [spied(monkeypatch, blocks, name) for name in ("add_row_stats", "product_grads")]
    passes = [spied(monkeypatch, blocks, name) for name in ("add_stats", "to_grads")]
    kind = {"head": RowKind.HEAD, "draws": RowKind.DRAWS}.get(why, RowKind.NONE)
    dtype = torch.float32 if why == "float32" else HALVES[0]
    batch = random_batch(9, 20 if why == "width" else 24, 45, kinds=(kind,), dtype=dtype)
    if why == "columns":
        batch.weight = batch.weight.T.contiguous().T
    fast = on_device(batch).leaves()
    if why == "start":
        fast.hidden = torch.cat([fast.hidden[:, :1], fast.hidden], dim=1)[:, 1:]
    rounded = {"logits_dtype": torch.bfloat16} if why == "rounded" else {}
    got = outputs(head(fast, "triton", **rounded))
    exact = batch.leaves(torch.float64)
    wanted = outputs(head(exact, "reference", **rounded))
    for value, right in zip(got, wanted, strict=True):
        finite = ~right.isneginf()
        room = 0.2 if rounded else 1e-4  # a logit between two bfloat16 numbers may go to either
        assert torch.allclose(value.cpu().double()[finite], right[finite], atol=room)
    weighted_sum([part.cpu() for part in got]).backward()
    assert fused == [[], []]
    assert [len(calls) for calls in passes] == [1, 1]
