"""The Triton kernels against the reference: in the interpreter on the CPU, compiled on a GPU."""

from dataclasses import replace

import pytest
import torch
from factory import outputs, random_batch, relative_error, weighted_sum
from interpreter import DEVICE, INTERPRETED, run_interpreted

from rl_loss import LossInputs, RowKind, Support, fused_lm_head, icepop_loss
from rl_loss.csr import HostFacts

kernels = pytest.mark.skipif(
    not INTERPRETED and DEVICE == "cpu",
    reason="no GPU; the interpreter runs these tests in test_in_the_interpreter",
)
MIXED = (RowKind.REPLAY, RowKind.NONE, RowKind.HEAD, RowKind.DRAWS)


def test_in_the_interpreter():
    run_interpreted(__file__)


def on_device(batch):
    moved = {
        name: getattr(batch, name).to(DEVICE)
        for name in ("hidden", "weight", "bias", "labels", "temperature", "support")
    }
    return replace(batch, **moved)


def spied(monkeypatch, module, name):
    """The calls of a function, one after another, so that a test sees that its path was taken."""
    calls, function = [], getattr(module, name)

    def spy(*args, **kwargs):
        calls.append(args)
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, spy)
    return calls


def head(batch, impl, **options):
    options = {"temperature": batch.temperature, "bias": batch.bias, **options}
    return fused_lm_head(
        batch.hidden, batch.weight, batch.labels, batch.support, impl=impl, **options
    )


def compare(batch, dtype, rounding=0.0, **options):
    """Values and gradients of the kernels against the reference in float64."""
    batch = on_device(batch)
    fast, exact = batch.leaves(), batch.leaves(torch.float64)
    got, expected = head(fast, "triton", **options), head(exact, "reference", **options)
    assert torch.equal(got.support_valid, expected.support_valid)
    assert torch.equal(got.active, expected.active)
    tolerance = 1e-12 if dtype == torch.float64 else 3e-5
    for value, wanted in zip(outputs(got), outputs(expected), strict=True):
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        finite = ~wanted.isneginf()
        assert torch.equal(value.isneginf(), ~finite)
        if finite.any():
            assert (value - wanted)[finite].abs().max() < tolerance
    weighted_sum([part.cpu() for part in outputs(got)]).backward()
    weighted_sum([part.cpu() for part in outputs(expected)]).backward()
    rounding = max(rounding, torch.finfo(dtype).eps, 1e-12 if dtype == torch.float64 else 2e-5)
    for grad, wanted in zip(fast.grads(), exact.grads(), strict=True):
        assert grad.dtype == dtype
        assert relative_error(grad, wanted) < rounding


@kernels
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("entropy", "options"),
    [(None, {}), ("support", {"softcap": 4.0, "logit_scale": 0.6})],
    ids=str,
)
def test_replay_rows(dtype, entropy, options):
    batch = random_batch(11, 19, 37, kinds=(RowKind.REPLAY,), dtype=dtype, widths=(1, 2, 5, 36))
    compare(batch, dtype, entropy=entropy, **options)


@kernels
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("entropy", [None, "support", "full"])
def test_mixed_rows(dtype, entropy):
    compare(random_batch(13, 7, 31, dtype=dtype, kinds=MIXED), dtype, entropy=entropy, softcap=6.0)


@kernels
@pytest.mark.parametrize(
    "options", [{"bias": None}, {"temperature": 0.7}, {"bias": None, "temperature": 1.0}], ids=str
)
def test_options_left_out(options):
    batch = on_device(random_batch(6, 9, 23, kinds=(RowKind.REPLAY,), dtype=torch.float64))
    fast, exact = batch.leaves(), batch.leaves()
    got, expected = head(fast, "triton", **options), head(exact, "reference", **options)
    torch.testing.assert_close(got.logprobs, expected.logprobs)
    got.logprobs.sum().backward()
    expected.logprobs.sum().backward()
    torch.testing.assert_close(fast.weight.grad, exact.weight.grad)
    torch.testing.assert_close(fast.hidden.grad, exact.hidden.grad)


@kernels
@pytest.mark.parametrize(
    "which", ["logprobs", "support_logprobs", "trainer_tail_logprobs", "entropy"]
)
def test_each_output_alone(which):
    batch = on_device(random_batch(9, 5, 17, kinds=(RowKind.REPLAY,)))
    fast, exact = batch.leaves(), batch.leaves()
    for leaves, impl in ((fast, "triton"), (exact, "reference")):
        out = head(leaves, impl, entropy="support")
        weighted_sum([getattr(out, which).cpu()]).backward()
    for grad, wanted in zip(fast.grads(), exact.grads(), strict=True):
        assert relative_error(grad, wanted) < 1e-12


@kernels
def test_wide_rows_and_frequent_ids_take_the_narrow_blocks(monkeypatch):
    """Rows of more entries than a light program takes, ids in every row, one tile and many."""
    import rl_loss.kernels.entry_sums as entry_sums
    import rl_loss.kernels.gradient_sums as gradient_sums

    monkeypatch.setattr(entry_sums, "HEAVY", 4)
    monkeypatch.setattr(gradient_sums, "_HEAVY_ROW", 1)
    monkeypatch.setattr(entry_sums, "_HEAVY_BLOCK", {"BLOCK_H": 16, "R": 4})
    for widths in ((3, 40, 1, 7), (9,)):
        batch = random_batch(7, 21, 44, kinds=(RowKind.REPLAY,), widths=widths)
        compare(batch, torch.float64, entropy="support")


@kernels
def test_hot_ids_on_the_tensor_cores(monkeypatch):
    """The dense product of the most frequent ids, inactive rows holding NaN."""
    import rl_loss.kernels.gradient_sums as gradient_sums
    import rl_loss.kernels.hot_ids as hot_ids

    monkeypatch.setattr(hot_ids, "HOT", 16)
    monkeypatch.setattr(gradient_sums, "_WEIGHT_PROGRAMS", 3)
    # The interpreter multiplies the bits of bfloat16 matrices as integers.
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    batch = on_device(random_batch(9, 20, 60, kinds=(RowKind.REPLAY,), dtype=dtype, widths=(25, 3)))
    batch.hidden[4] = torch.nan
    active = torch.arange(9) != 4
    grads, products = [], spied(monkeypatch, gradient_sums, "hot_product")
    monkeypatch.setattr(hot_ids, "_ROWS", 5)
    for hot in (True, False):
        monkeypatch.setattr(gradient_sums, "use_hot_ids", lambda call, hot=hot: hot)
        leaves = batch.leaves()
        out = head(leaves, "triton", active=active)
        weighted_sum([part.cpu() for part in outputs(out)]).backward()
        grads.append(leaves.weight.grad)
        assert len(products) == 1
    assert grads[1].isfinite().all()
    # The same float32 sums in another order, then one rounding: a unit in the last place at most.
    torch.testing.assert_close(*grads, rtol=torch.finfo(dtype).eps, atol=1e-5)
    assert (grads[0] == grads[1]).float().mean() > 0.95


@kernels
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kinds", [(RowKind.REPLAY,), MIXED], ids=["replay", "mixed"])
@pytest.mark.parametrize("entropy", ["support", "full"])
def test_wide_rows_through_products_over_the_vocabulary(dtype, kinds, entropy, monkeypatch):
    """Rows of all of V, of most of it, and narrow ones; two rows a block."""
    import rl_loss.plan as plan

    monkeypatch.setattr(plan, "ENTRIES_A_PRODUCT", 0.4)
    monkeypatch.setattr(plan, "ENTRIES_A_READ", 0.0)
    batch = random_batch(12, 9, 29, kinds=kinds, dtype=dtype, widths=(29, 1, 20, 3, 14))
    assert len(batch.support.plan_for(29).wide) >= 2
    workspace = 2 * 29 * 8 / 2**20
    compare(batch, dtype, entropy=entropy, softcap=5.0, workspace_mib=workspace)


@kernels
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kinds", [MIXED, (RowKind.NONE,), (RowKind.HEAD,)], ids=str)
def test_blocks_of_ids_and_of_rows(dtype, kinds, monkeypatch):
    """V no multiple of a block; a block of 7 ids for 3 rows."""
    import rl_loss.kernels.blocks as blocks

    monkeypatch.setattr(blocks, "_LEAST_IDS", 7)
    batch = random_batch(13, 6, 31, kinds=kinds, dtype=dtype)
    compare(batch, dtype, entropy="support", workspace_mib=21 * 8 / 2**20)
    compare(batch, dtype, workspace_mib=13 * 11 * 8 / 2**20)


@kernels
@pytest.mark.parametrize("options", [{}, {"softcap": 4.0, "logit_scale": 0.6}], ids=str)
def test_logits_rounded_as_a_sampler_does(options):
    batch = random_batch(13, 7, 31, kinds=MIXED)
    # Under a cap the kernels take the slope at the rounded logit, autograd at what it came of.
    rounding = 5e-3 if options else 0.0
    options = {"entropy": "support", "logits_dtype": torch.bfloat16, **options}
    compare(batch, torch.float64, rounding, **options)


@kernels
def test_full_vocabulary_logits_far_below_zero():
    """Every logit at -20 and a cap of 30: what lies behind V adds no mass."""
    hidden, weight = torch.full((3, 4), -1.0, device=DEVICE), torch.full((48, 4), 5.0).to(DEVICE)
    labels = torch.tensor([0, 20, 47], device=DEVICE)
    for softcap, want in ((None, -3.8712), (30.0, -3.8712)):
        out = fused_lm_head(hidden, weight, labels, impl="triton", softcap=softcap)
        assert torch.allclose(out.logprobs.cpu(), torch.full((3,), want), atol=1e-4)


@kernels
def test_a_masked_logit_above_the_support_does_not_overflow(monkeypatch):
    """A wide row is normalised over its support, whatever the ids outside it have."""
    import rl_loss.plan as plan

    monkeypatch.setattr(plan, "ENTRIES_A_PRODUCT", 0.1)
    monkeypatch.setattr(plan, "ENTRIES_A_READ", 0.0)
    hidden = torch.ones(2, 1, device=DEVICE, requires_grad=True)
    weight = torch.arange(12.0, device=DEVICE)[:, None].requires_grad_()
    with torch.no_grad():
        weight[11] = 3e4
    support = Support.from_rows([(list(range(8)), None), ([3, 4, 5], None)]).to(DEVICE)
    labels = torch.tensor([7, 4], device=DEVICE)
    out = fused_lm_head(hidden, weight, labels, support, impl="triton")
    expected = torch.arange(8.0).log_softmax(0)[7], torch.arange(3.0).log_softmax(0)[1]
    torch.testing.assert_close(out.logprobs.detach().cpu(), torch.stack(expected))
    out.logprobs.sum().backward()
    assert hidden.grad.isfinite().all()
    assert torch.equal(weight.grad[8:], torch.zeros_like(weight.grad[8:]))


@kernels
def test_an_id_that_is_drawn_more_often_than_there_are_rows():
    """Its row of the weight gradient has more entries than a light program takes."""
    draws = [0] * 1200 + [2, 5]
    rows = [(draws, [-0.1] * len(draws)), ([1, 1, 3], [-0.5] * 3)]
    batch = random_batch(2, 8, 7, kinds=(RowKind.NONE,))
    batch.support = Support.from_rows(rows, kind=RowKind.DRAWS)
    compare(batch, torch.float64)


@kernels
def test_repeated_draws_of_a_hot_id_all_count(monkeypatch):
    import rl_loss.kernels.gradient_sums as gradient_sums
    import rl_loss.kernels.hot_ids as hot_ids

    monkeypatch.setattr(hot_ids, "HOT", 16)
    monkeypatch.setattr(gradient_sums, "use_hot_ids", lambda call: True)
    products = spied(monkeypatch, gradient_sums, "hot_product")
    batch = random_batch(4, 8, 7, kinds=(RowKind.NONE,), dtype=torch.float16)
    row = ([3, 3, 3, 1], [-0.5] * 4)
    batch.support = Support.from_rows([row] * 4, kind=RowKind.DRAWS)
    compare(batch, torch.float16)
    assert not products  # where two entries would share a cell there is none


@kernels
@pytest.mark.parametrize("kinds", [(RowKind.HEAD,), (RowKind.REPLAY,)], ids=str)
def test_a_backward_under_autocast_keeps_its_products(kinds, monkeypatch):
    import rl_loss.plan as plan

    monkeypatch.setattr(plan, "ENTRIES_A_PRODUCT", 0.1)
    monkeypatch.setattr(plan, "ENTRIES_A_READ", 0.0)
    batch = on_device(random_batch(5, 8, 31, kinds=kinds, dtype=torch.float32, widths=(9, 12)))
    plain, other = batch.leaves(), batch.leaves()
    head(plain, "triton").logprobs.sum().backward()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        head(other, "triton").logprobs.sum().backward()
    for grad, wanted in zip(other.grads(), plain.grads(), strict=True):
        assert torch.equal(grad, wanted)


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
    """One input frozen, a mask on the host, a wide row whose plan was made before."""
    import rl_loss.plan as plan

    monkeypatch.setattr(plan, "ENTRIES_A_PRODUCT", 0.4)
    monkeypatch.setattr(plan, "ENTRIES_A_READ", 0.0)
    batch = random_batch(9, 6, 21, kinds=(RowKind.REPLAY,), dtype=torch.float32, widths=(15, 3))
    batch, active = on_device(batch), torch.arange(9) != 4 if masked else None
    assert len(batch.support.plan_for(21).wide)

    def logprobs(hidden, weight):
        rows = hidden, weight, batch.labels, batch.support
        return fused_lm_head(*rows, active=active, impl="triton").logprobs

    leaves, fresh = batch.leaves(), batch.leaves()
    for some in (leaves, fresh):
        getattr(some, frozen).requires_grad_(False)
    expected = logprobs(leaves.hidden, leaves.weight)
    expected.sum().backward()
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    got = torch.compile(logprobs, fullgraph=True, backend=backend)(fresh.hidden, fresh.weight)
    got.sum().backward()
    torch.testing.assert_close(got, expected)
    for name in {"hidden", "weight"} - {frozen}:
        torch.testing.assert_close(getattr(fresh, name).grad, getattr(leaves, name).grad)


@kernels
def test_hidden_sizes_beyond_one_block(monkeypatch):
    import rl_loss.kernels.rows as rows

    shape = {"WHOLE_H": False, "R": 2, "BLOCK_H": 16, "num_warps": 2}
    monkeypatch.setattr(rows, "_logits_shape", lambda h, width: shape)
    compare(random_batch(5, 37, 29, kinds=(RowKind.REPLAY,)), torch.float64)


@kernels
@pytest.mark.parametrize("poison", [float("nan"), 1e30])
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("kinds", [(RowKind.REPLAY,), MIXED], ids=["replay", "mixed"])
def test_inactive_rows_may_hold_anything(poison, where, kinds):
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
    results = []
    for batch in (on_device(clean).leaves(), on_device(dirty).leaves()):
        flags = active if where == "host" else active.to(DEVICE)
        out = head(batch, "triton", active=flags, entropy="support")
        weighted_sum([part.cpu() for part in outputs(out)]).backward()
        results.append([*outputs(out), *batch.grads(), out.support_valid])
    for value, wanted in zip(*results, strict=True):
        assert torch.equal(value, wanted)
    for value in results[1][:5]:
        if len(value) == 8:
            assert (value[off.to(DEVICE)] == 0).all()


@kernels
def test_rows_that_break_a_rule_are_nan(monkeypatch):
    """A label outside its row, an id outside V, a temperature of 0: value and hidden gradient."""
    import rl_loss.flat_rows as flat_rows

    monkeypatch.setattr(flat_rows, "host_sees", lambda device: False)
    batch = random_batch(8, 6, 21, kinds=(RowKind.REPLAY,), widths=(4, 1))
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
    out = head(leaves, "triton", entropy="support")
    broken = torch.zeros(8, dtype=torch.bool)
    broken[bad] = True
    for value in (out.logprobs, out.trainer_tail_logprobs, out.entropy):
        assert torch.equal(value.isnan().cpu(), broken)
    rows = batch.support.entry_rows
    assert torch.equal(out.support_logprobs.isnan().cpu(), broken[rows])
    assert not out.support_valid.cpu()[broken[rows]].any()
    out.logprobs.sum().backward()
    assert torch.equal(leaves.hidden.grad.isnan().all(1).cpu(), broken)
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
    batch = random_batch(4, 6, 21, kinds=(RowKind.REPLAY,), widths=(5,))
    batch.hidden[2, 3] = torch.nan
    leaves = on_device(batch).leaves()
    out = head(leaves, "triton")
    assert out.logprobs.isnan().nonzero()[:, 0].tolist() == [2]
    out.logprobs.sum().backward()
    assert leaves.hidden.grad.isnan().any(1).nonzero()[:, 0].tolist() == [2]


@kernels
def test_frozen_inputs_and_a_second_backward():
    batch = on_device(random_batch(7, 6, 21, kinds=(RowKind.REPLAY,)))
    full = batch.leaves()
    loss = weighted_sum([part.cpu() for part in outputs(head(full, "triton"))])
    loss.backward(retain_graph=True)
    once = [grad.clone() for grad in full.grads()]
    loss.backward()
    for grad, wanted in zip(full.grads(), once, strict=True):
        assert torch.equal(grad, 2 * wanted)
    for frozen in ("hidden", "weight", "bias"):
        part = batch.leaves()
        getattr(part, frozen).requires_grad_(False)
        weighted_sum([p.cpu() for p in outputs(head(part, "triton"))]).backward()
        for name, wanted in zip(("hidden", "weight", "bias"), once, strict=True):
            grad = getattr(part, name).grad
            assert grad is None if name == frozen else torch.equal(grad, wanted)


@kernels
def test_strided_inputs():
    batch = on_device(random_batch(9, 6, 21, kinds=(RowKind.REPLAY,)))
    wide = torch.randn(9, 12, dtype=torch.float64, device=DEVICE)
    wide[:, ::2] = batch.hidden
    strided = replace(batch, hidden=wide[:, ::2], weight=batch.weight.T.contiguous().T)
    plain, other = batch.leaves(), strided
    other.hidden.requires_grad_()
    other.weight.requires_grad_()
    out, expected = head(other, "triton"), head(plain, "triton")
    torch.testing.assert_close(out.logprobs, expected.logprobs)
    upstream = torch.ones((), dtype=torch.float64, device=DEVICE).expand(9)
    out.logprobs.backward(upstream)
    expected.logprobs.backward(upstream)
    torch.testing.assert_close(other.hidden.grad, plain.hidden.grad)
    torch.testing.assert_close(other.weight.grad, plain.weight.grad)


@kernels
@pytest.mark.parametrize("kinds", [(RowKind.REPLAY,), MIXED], ids=["replay", "mixed"])
@pytest.mark.parametrize("what", ["strided", "expanded", "transposed"])
def test_arguments_of_any_stride(what, kinds):
    """Labels, temperatures, active and bias as columns of a matrix, or one value expanded."""
    batch = on_device(random_batch(9, 6, 21, kinds=kinds))
    active = torch.tensor([True, True, False, True, True, True, True, False, True]).to(DEVICE)

    def column(tensor):
        return torch.stack([tensor, torch.zeros_like(tensor)], 1)[:, 0]

    plain, other, options = batch.leaves(), batch.leaves(), {"active": active}
    odd = {"active": active}
    if what == "strided":
        other.labels, other.temperature = column(batch.labels), column(batch.temperature)
        other.bias = column(batch.bias).requires_grad_()
        odd = {"active": column(active)}
    elif what == "expanded":
        plain.temperature = torch.full((9,), 0.7, device=DEVICE)
        other.temperature = torch.tensor(0.7, device=DEVICE)
        options = {"active": torch.ones(9, dtype=torch.bool, device=DEVICE)}
        odd = {"active": torch.ones(1, dtype=torch.bool, device=DEVICE).expand(9)}
    else:
        other.weight = batch.weight.T.contiguous().T.requires_grad_()
        other.hidden = batch.hidden.T.contiguous().T.requires_grad_()
    results = []
    for leaves, more in ((plain, options), (other, odd)):
        out = head(leaves, "triton", entropy="support", **more)
        weighted_sum([part.cpu() for part in outputs(out)]).backward()
        results.append([*outputs(out), leaves.hidden.grad, leaves.weight.grad, leaves.bias.grad])
    for value, wanted in zip(*reversed(results), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)


@kernels
def test_ids_outside_the_vocabulary_touch_nothing(monkeypatch):
    """So many of one id that the weight gradient takes them for a frequent one's run."""
    import rl_loss.kernels.entry_sums as entry_sums

    monkeypatch.setattr(entry_sums, "HEAVY", 4)
    support = Support.from_rows([([3, 2**31 - 1], None)] * 12 + [([3, 1], None)] * 2)
    labels = torch.full((14,), 3, device=DEVICE)
    active = torch.arange(14) >= 12
    hidden = torch.randn(14, 16, device=DEVICE, requires_grad=True)
    weight = torch.randn(7, 16, device=DEVICE, requires_grad=True)
    out = fused_lm_head(
        hidden, weight, labels, support.to(DEVICE), active=active.to(DEVICE), impl="triton"
    )
    out.logprobs.sum().backward()
    fewer = hidden.detach()[12:].requires_grad_(), weight.detach().requires_grad_()
    expected = fused_lm_head(*fewer, labels[12:], support[12:].to(DEVICE), impl="reference")
    expected.logprobs.sum().backward()
    torch.testing.assert_close(weight.grad, fewer[1].grad, rtol=1e-5, atol=1e-6)
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


@kernels
def test_no_rows_and_no_entries():
    for n in (0, 3):
        labels = torch.zeros(n, dtype=torch.int64)
        support = Support.from_rows([([0], None)] * n)
        hidden = torch.randn(n, 4, device=DEVICE, requires_grad=True)
        weight = torch.randn(5, 4, device=DEVICE, requires_grad=True)
        out = fused_lm_head(hidden, weight, labels.to(DEVICE), support.to(DEVICE), impl="triton")
        out.logprobs.sum().backward()
        assert torch.equal(out.logprobs, torch.zeros(n, device=DEVICE))
        assert torch.equal(weight.grad, torch.zeros_like(weight))
        assert torch.equal(hidden.grad, torch.zeros_like(hidden))


# --- on the GPU alone ---


def big_batch(n=512, h=256, v=5000, width=40, dtype=torch.bfloat16, **more):
    batch = random_batch(
        n, h, v, kinds=(RowKind.REPLAY,), dtype=dtype, widths=(width, 3), incomplete=False, **more
    )
    batch.support = batch.support.pin_memory().to("cuda", non_blocking=True)
    moved = {
        name: getattr(batch, name).cuda()
        for name in ("hidden", "weight", "bias", "labels", "temperature")
    }
    return replace(batch, **moved)


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
def test_no_sync_in_a_step_of_mixed_rows():
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
            out = head(leaves, "auto", active=active, entropy="support")
            sum(part.sum() for part in (out.logprobs, out.support_logprobs)).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kinds", [(RowKind.REPLAY,), MIXED], ids=["replay", "mixed"])
def test_tensors_on_another_gpu_than_the_current_one(kinds):
    batch = random_batch(9, 6, 21, kinds=kinds, dtype=torch.float32)
    names = ("hidden", "weight", "bias", "labels", "temperature", "support")
    results = []
    for device in ("cuda:0", "cuda:1"):
        moved = replace(batch, **{name: getattr(batch, name).to(device) for name in names}).leaves()
        assert torch.cuda.current_device() == 0
        out = head(moved, "auto", entropy="support")
        weighted_sum([part.cpu() for part in outputs(out)]).backward()
        results.append([part.cpu() for part in (*outputs(out), *moved.grads())])
    for value, wanted in zip(*results, strict=True):
        torch.testing.assert_close(value, wanted)


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
    """torch.compile takes head and loss in one graph, and gives the eager gradients."""
    if DEVICE == "cuda":
        batch = big_batch().leaves()
    else:
        batch = random_batch(9, 6, 21, kinds=(RowKind.REPLAY,), dtype=torch.float32, widths=(5, 3))
        batch = batch.leaves()

    def loss(hidden, weight, bias):
        out = fused_lm_head(
            hidden,
            weight,
            batch.labels,
            batch.support,
            bias=bias,
            entropy="support",
            impl="triton",
        )
        inputs = LossInputs.from_head(
            out,
            batch.support,
            inference_logprobs=out.logprobs.detach() - 0.01,
            advantages=torch.ones_like(out.logprobs),
        )
        return icepop_loss(inputs, kl_tau=0.1).loss + out.entropy.sum()

    fresh = batch.leaves()
    if frozen is not None:
        getattr(batch, frozen).requires_grad_(False)
        getattr(fresh, frozen).requires_grad_(False)
    loss(batch.hidden, batch.weight, batch.bias).backward()
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    compiled(fresh.hidden, fresh.weight, fresh.bias).backward()
    for grad, wanted in zip(fresh.grads(), batch.grads(), strict=True):
        assert (grad is None) == (wanted is None)
        assert grad is None or relative_error(grad, wanted) < 5e-3


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
    batch = big_batch().leaves()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            head(batch, "auto").logprobs.sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    expected = batch.weight.grad.clone() / 3
    batch.hidden.grad = batch.weight.grad = batch.bias.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        head(batch, "auto").logprobs.sum().backward()
    graph.replay()
    assert relative_error(batch.weight.grad, expected) < 1e-2


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
    exact = hidden.detach()[rows].double().requires_grad_()
    logp = (exact @ weight[:width].double().T).log_softmax(1).gather(1, labels[rows, None])
    logp.sum().backward()
    assert (out.logprobs[rows] - logp[:, 0]).abs().max() < 1e-4
    assert relative_error(hidden.grad[rows], exact.grad) < 8e-3
