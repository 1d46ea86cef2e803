"""The head as its users call it: dtypes, edges, poison, autograd modes, errors."""

import itertools
from dataclasses import replace

import pytest
import torch
from factory import (
    LargestTensor,
    naive_head,
    outputs,
    random_batch,
    relative_error,
    weighted_sum,
)
from torch import nn

from rl_loss import FusedLMHead, LossInputs, RowKind, Support, fused_lm_head, icepop_loss

IMPLS = ["reference", "auto"]


def head(batch, impl="auto", **options):
    options = {"temperature": batch.temperature, "bias": batch.bias, **options}
    return fused_lm_head(
        batch.hidden, batch.weight, batch.labels, batch.support, impl=impl, **options
    )


# --- precision ---


@pytest.mark.parametrize("impl", IMPLS)
def test_logits_rounded_as_an_engine_with_a_bfloat16_head_leaves_them(impl):
    """The product with its bias, the scale, each step of the cap; not the division by T."""
    batch = random_batch(9, 5, 23, kinds=(RowKind.NONE,))

    def rounded(x):
        return x.bfloat16().double()

    raw = rounded(batch.hidden @ batch.weight.T + batch.bias)
    z = rounded(5.0 * rounded(torch.tanh(rounded(rounded(raw * 0.7) / 5.0))))
    expected = (z / batch.temperature.double()[:, None]).log_softmax(1)
    expected = expected.gather(1, batch.labels[:, None])[:, 0]
    options = {"softcap": 5.0, "logit_scale": 0.7}
    got = head(batch, impl, logits_dtype=torch.bfloat16, **options).logprobs
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert (got - head(batch, impl, **options).logprobs).abs().max() > 1e-3


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("entropy", ["support", "full"])
def test_low_precision_is_within_the_error_of_float32_products(impl, dtype, entropy):
    """Inputs of any dtype: outputs as of float32 products, gradients rounded once."""
    batch = random_batch(17, 33, 61, dtype=dtype).leaves()
    exact = batch.leaves(torch.float64)
    got = outputs(head(batch, impl, entropy=entropy))
    expected = naive_head(exact, entropy=entropy)
    for value, wanted in zip(got, expected, strict=True):
        assert value.dtype == torch.float32
        finite = ~wanted.isneginf()
        assert torch.equal(value.isneginf(), ~finite)
        assert (value - wanted)[finite].abs().max() < 2e-5  # 2 * H * 2^-24 * |logit| of about 12
    weighted_sum(got).backward()
    weighted_sum(expected).backward()
    rounding = max(torch.finfo(dtype).eps, 1e-5)
    for grad, wanted in zip(batch.grads(), exact.grads(), strict=True):
        assert grad.dtype == dtype
        assert relative_error(grad, wanted) < rounding


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_changes_nothing(impl):
    batch, inside = random_batch(dtype=torch.float32).leaves(), random_batch(dtype=torch.float32)
    inside = inside.leaves()
    expected = outputs(head(batch, impl, entropy="full"))
    weighted_sum(expected).backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = outputs(head(inside, impl, entropy="full"))
        weighted_sum(got).backward()
    for value, wanted in zip((*got, *inside.grads()), (*expected, *batch.grads()), strict=True):
        assert value.dtype == torch.float32
        assert torch.equal(value, wanted)


@pytest.mark.parametrize("impl", IMPLS)
def test_compiled_on_the_cpu_the_graph_breaks_and_the_numbers_stay(impl):
    batch, compiled = random_batch(dtype=torch.float32).leaves(), random_batch(dtype=torch.float32)
    compiled = compiled.leaves()

    def total(batch):
        return weighted_sum(outputs(head(batch, impl)))

    total(batch).backward()
    torch.compile(total, backend="eager")(compiled).backward()
    for grad, wanted in zip(compiled.grads(), batch.grads(), strict=True):
        torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize("impl", IMPLS)
def test_mixed_dtypes_are_not_rounded_to_the_lower(impl):
    batch = random_batch(dtype=torch.float32)
    mixed = replace(batch, hidden=batch.hidden.bfloat16())
    expected = naive_head(mixed)
    torch.testing.assert_close(
        outputs(head(mixed, impl))[0].double(), expected[0], rtol=0, atol=2e-5
    )


def test_bitwise_equal_logprobs_have_ratio_one_and_no_kl():
    batch = random_batch(dtype=torch.bfloat16, kinds=(RowKind.REPLAY, RowKind.NONE))
    out = head(batch)
    inputs = LossInputs.from_head(
        out,
        batch.support,
        inference_logprobs=out.logprobs.detach().clone(),
        advantages=torch.ones(len(batch.labels)),
    )
    metrics = icepop_loss(inputs).metrics
    assert metrics["importance_ratio_mean"] == 1
    assert metrics["importance_ratio_max"] == 1
    assert metrics["mismatch_kl"] == 0


# --- excluded values never matter ---


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_inactive_rows_may_hold_anything(impl, poison):
    clean = random_batch(9, seed=5)
    active = torch.tensor([True, True, False, True, False, True, True, False, True])
    off = ~active

    def poisoned():
        batch = replace(clean, temperature=clean.temperature.clone())
        batch.hidden = torch.where(off[:, None], poison, clean.hidden)
        batch.labels = torch.where(off, -100, clean.labels)
        batch.temperature[off] = 0.0
        rows = off[batch.support.entry_rows]
        batch.support = batch.support.replace(
            host=batch.support.host,  # not checked
            ids=torch.where(rows, 10**6, batch.support.ids).int(),
            sampler_logprobs=torch.where(rows, poison, batch.support.sampler_logprobs),
            sampler_tail_mass=torch.where(off, poison, batch.support.sampler_tail_mass),
        )
        return batch.leaves()

    results = []
    for batch in (clean.leaves(), poisoned()):
        out = head(batch, impl, active=active, entropy="full")
        inputs = LossInputs.from_head(
            out,
            batch.support,
            inference_logprobs=torch.where(off & (batch.labels < 0), poison, -1.0),
            advantages=torch.where(off & (batch.labels < 0), poison, 0.5),
        )
        loss = icepop_loss(inputs, kl_tau=0.1)
        (loss.loss + weighted_sum(outputs(out))).backward()
        results.append([*outputs(out), *batch.grads(), loss.per_token_loss, loss.loss])
        results[-1] += loss.metrics.values()
    for value, wanted in zip(*results, strict=True):
        assert torch.equal(value, wanted)
    for value in results[1][:4]:
        if value.shape == active.shape:
            assert (value[off] == 0).all()
    assert (results[1][4][off] == 0).all()  # the gradient of hidden


@pytest.mark.parametrize("impl", IMPLS)
def test_a_batch_without_the_inactive_rows_gives_the_same(impl):
    batch = random_batch(9, seed=5).leaves()
    active = torch.tensor([True, True, False, True, False, True, True, False, True])
    rows = active.nonzero()[:, 0]
    small = replace(
        batch,
        hidden=batch.hidden[rows],
        labels=batch.labels[rows],
        temperature=batch.temperature[rows],
        support=batch.support.select(rows),
    ).leaves()
    out, fewer = head(batch, impl, active=active), head(small, impl)
    torch.testing.assert_close(out.logprobs[rows], fewer.logprobs, rtol=1e-13, atol=0)
    out.logprobs.sum().backward()
    fewer.logprobs.sum().backward()
    torch.testing.assert_close(batch.hidden.grad[rows], small.hidden.grad)
    torch.testing.assert_close(batch.weight.grad, small.weight.grad)


@pytest.mark.parametrize("impl", IMPLS)
def test_nan_in_an_active_row_is_not_hidden(impl):
    batch = random_batch(8, kinds=(RowKind.REPLAY, RowKind.NONE), widths=(5,))
    batch.hidden[2] = torch.nan
    batch.hidden[3] = torch.nan
    out = head(batch, impl)
    assert out.logprobs.isnan().nonzero()[:, 0].tolist() == [2, 3]


@pytest.mark.parametrize("impl", IMPLS)
def test_what_only_a_device_can_see_is_nan_in_value_and_gradient(impl, monkeypatch):
    """The path of GPU tensors: no check on the host, so the row itself has to tell."""
    import rl_loss.flat_rows as flat_rows

    batch = random_batch(8, kinds=(RowKind.REPLAY, RowKind.HEAD), widths=(4,)).leaves()
    # A label outside its REPLAY row, one outside V, an id outside V, a temperature of 0.
    batch.labels[0] = next(v for v in range(31) if v not in batch.support[0:1].ids.tolist())
    batch.labels[1] = 31
    ids = batch.support.ids.clone()
    ids[batch.support.offsets[2]] = 31
    batch.support = batch.support.replace(ids=ids)
    batch.temperature[3] = 0.0
    monkeypatch.setattr(flat_rows, "host_sees", lambda device: False)
    broken = torch.arange(8) < 4
    out = head(batch, impl, entropy="support")
    for value in (out.logprobs, out.trainer_tail_logprobs, out.entropy):
        assert value[:4].isnan().all()
        assert not value[4:].isnan().any()
    assert torch.equal(out.support_logprobs.isnan(), broken[batch.support.entry_rows])
    assert not out.support_valid[broken[batch.support.entry_rows]].any()
    out.logprobs.sum().backward()
    assert torch.equal(batch.hidden.grad.isnan().all(1), broken)
    assert not batch.hidden.grad[4:].isnan().any()


# --- shapes and layouts ---


@pytest.mark.parametrize("impl", IMPLS)
def test_strided_inputs_equal_contiguous_ones(impl):
    plain = random_batch(10, 6, 19).leaves()
    wide = torch.randn(10, 12, dtype=torch.float64)
    wide[:, ::2] = plain.hidden.detach()
    labels = torch.full((20,), -7)
    labels[::2] = plain.labels
    strided = replace(
        plain,
        hidden=wide[:, ::2].requires_grad_(),
        weight=plain.weight.detach().T.contiguous().T.requires_grad_(),
        labels=labels[::2],
        temperature=plain.temperature,
    )
    upstream = torch.ones((), dtype=torch.float64).expand(10)  # stride 0
    got, expected = head(strided, impl), head(plain, impl)
    torch.testing.assert_close(got.logprobs, expected.logprobs, rtol=1e-14, atol=1e-14)
    got.logprobs.backward(upstream)
    expected.logprobs.backward(upstream.contiguous())
    torch.testing.assert_close(strided.hidden.grad, plain.hidden.grad)
    torch.testing.assert_close(strided.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("impl", IMPLS)
def test_leading_dimensions_are_rows(impl):
    batch = random_batch(12)
    flat = head(batch, impl, entropy="support")
    shaped = fused_lm_head(
        batch.hidden.reshape(3, 4, -1),
        batch.weight,
        batch.labels.reshape(3, 4),
        batch.support,
        bias=batch.bias,
        temperature=batch.temperature.reshape(3, 4),
        entropy="support",
        impl=impl,
    )
    for name in ("logprobs", "trainer_tail_logprobs", "entropy", "active"):
        assert torch.equal(getattr(shaped, name), getattr(flat, name).reshape(3, 4))
    assert torch.equal(shaped.support_logprobs, flat.support_logprobs)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("entropy", [None, "support", "full"])
def test_no_rows_no_active_row_no_entries_one_id(impl, entropy):
    none = random_batch(0, 4, 7).leaves()
    out = head(none, impl, entropy=entropy)
    assert out.logprobs.shape == (0,)
    out.logprobs.sum().backward()
    assert torch.equal(none.weight.grad, torch.zeros_like(none.weight))

    idle = random_batch(5, 4, 7).leaves()
    out = head(idle, impl, entropy=entropy, active=torch.zeros(5, dtype=torch.bool))
    assert all(part.requires_grad for part in outputs(out))
    weighted_sum(outputs(out)).backward()
    for value in (*outputs(out), *idle.grads()):
        assert torch.equal(value, torch.zeros_like(value))

    single = replace(random_batch(4, 3, 1, kinds=(RowKind.NONE, RowKind.REPLAY))).leaves()
    out = head(single, impl, entropy=entropy)
    weighted_sum(outputs(out)).backward()
    assert torch.equal(out.logprobs, torch.zeros(4, dtype=torch.float64))
    assert torch.equal(single.hidden.grad, torch.zeros_like(single.hidden))


@pytest.mark.parametrize("impl", IMPLS)
def test_head_rows_that_hold_the_whole_vocabulary_have_no_tail(impl):
    labels = torch.tensor([1, 3])
    support = Support.from_rows(
        [([3, 0, 2, 1], [-1.3863] * 4), ([0, 1, 2, 3], [-1.3863] * 4)], kind=RowKind.HEAD
    )
    hidden = torch.randn(2, 3, requires_grad=True)
    out = fused_lm_head(hidden, torch.randn(4, 3), labels, support, impl=impl)
    assert out.trainer_tail_logprobs.isneginf().all()
    weighted_sum(outputs(out)).backward()
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("impl", IMPLS)
def test_the_order_of_a_rows_ids_does_not_matter(impl):
    batch = random_batch(12, kinds=(RowKind.REPLAY, RowKind.HEAD), widths=(5,), incomplete=False)
    turned = batch.support
    order = torch.arange(turned.nnz).reshape(-1, 5).flip(1).reshape(-1)
    other = replace(
        batch,
        support=turned.replace(
            ids=turned.ids[order],
            sampler_logprobs=turned.sampler_logprobs[order],
            known=turned.known[order],
        ),
    )
    one, two = head(batch, impl), head(other, impl)
    torch.testing.assert_close(one.logprobs, two.logprobs, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(
        one.support_logprobs[order], two.support_logprobs, rtol=1e-14, atol=1e-14
    )


@pytest.mark.parametrize("impl", IMPLS)
def test_far_logits(impl):
    """All logits -20 on an odd V; a soft cap of 30 over logits of -200."""
    hidden, weight = torch.full((1, 1), -20.0), torch.ones(48, 1)
    out = fused_lm_head(hidden, weight, torch.tensor([5]), impl=impl)
    assert abs(float(out.logprobs) + 3.8712) < 1e-4
    capped = fused_lm_head(hidden * 10, weight, torch.tensor([5]), softcap=30.0, impl=impl)
    assert abs(float(capped.logprobs) + 3.8712) < 1e-4


# --- autograd ---


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)), ids=str)
def test_frozen_inputs_get_no_gradient(impl, needs):
    full, batch = random_batch().leaves(), random_batch().leaves()
    for leaf, need in zip((batch.hidden, batch.weight, batch.bias), needs, strict=True):
        leaf.requires_grad_(need)
    expected = weighted_sum(outputs(head(full, impl, entropy="full")))
    expected.backward()
    got = weighted_sum(outputs(head(batch, impl, entropy="full")))
    assert torch.equal(got, expected)
    if any(needs):
        got.backward()
    for grad, need, wanted in zip(batch.grads(), needs, full.grads(), strict=True):
        assert (grad is None) != need
        if need:
            torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=1e-13)
    with torch.no_grad():
        assert torch.equal(head(batch, impl).logprobs, head(full, impl).logprobs)
    with torch.inference_mode():
        assert torch.equal(head(batch, impl).logprobs, head(full, impl).logprobs.detach())


@pytest.mark.parametrize("impl", IMPLS)
def test_a_second_backward_and_unused_outputs(impl):
    batch = random_batch().leaves()
    out = head(batch, impl, entropy="support")
    loss = weighted_sum([out.logprobs])
    loss.backward(retain_graph=True)
    first = [grad.clone() for grad in batch.grads()]
    loss.backward()
    for grad, once in zip(batch.grads(), first, strict=True):
        assert torch.equal(grad, 2 * once)


@pytest.mark.parametrize("impl", IMPLS)
def test_micro_batches_add_up(impl):
    whole, parts = random_batch(14).leaves(), random_batch(14).leaves()
    out = head(whole, impl)
    out.logprobs.sum().backward()
    for rows in (slice(0, 5), slice(5, 6), slice(6, 14)):
        part = fused_lm_head(
            parts.hidden[rows],
            parts.weight,
            parts.labels[rows],
            parts.support[rows],
            temperature=parts.temperature[rows],
            bias=parts.bias,
            impl=impl,
        )
        torch.testing.assert_close(part.logprobs, out.logprobs[rows], rtol=1e-13, atol=1e-14)
        part.logprobs.sum().backward()
    for grad, wanted in zip(parts.grads(), whole.grads(), strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=1e-13)


# --- memory ---


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replay_rows_never_make_logits_over_the_vocabulary(impl, dtype, monkeypatch):
    import rl_loss.gathered
    import rl_loss.reference

    n, h, v = 64, 8, 4096
    monkeypatch.setattr(rl_loss.gathered, "_BLOCK", 2**12)
    monkeypatch.setattr(rl_loss.reference, "_BLOCK", 2**12)
    batch = random_batch(n, h, v, kinds=(RowKind.REPLAY,), dtype=dtype, widths=(40,)).leaves()
    with LargestTensor(batch.weight) as seen:
        out = head(batch, impl, entropy="support")
        (out.logprobs.sum() + out.support_logprobs.sum() + out.entropy.sum()).backward()
    # The weight gradient itself is the largest; N x V would be 262144 and nnz x H 20480.
    assert seen.numel <= v * h, seen.shape
    batch.weight.requires_grad_(False)
    batch.bias.requires_grad_(False)
    with LargestTensor(batch.weight) as seen:
        out = head(batch, impl, entropy="support")
        (out.logprobs.sum() + out.support_logprobs.sum() + out.entropy.sum()).backward()
    if impl == "auto":
        assert seen.numel < v * h, seen.shape  # a frozen weight has no gradient buffer


# --- errors ---


def test_errors_name_the_argument_the_row_and_the_value():
    batch = random_batch(6, kinds=(RowKind.REPLAY, RowKind.NONE), widths=(3,))
    hidden, weight, labels, support = batch.hidden, batch.weight, batch.labels, batch.support

    def fails(match, *args, **options):
        with pytest.raises(ValueError, match=match):
            fused_lm_head(*args, **options)

    good = (hidden, weight, labels, support)
    far = labels.clone()
    far[3] = 31
    fails(r"labels\[3\] is 31, outside \[0, 31\)", hidden, weight, far, support)
    far[3], far[2] = 0, next(i for i in range(31) if i not in support[2:3].ids.tolist())
    fails(r"labels\[2\] is \d+, which its REPLAY row \(3 ids\)", hidden, weight, far, support)
    fails(r"hidden and weight must be", hidden[:, :3], weight, labels, support)
    fails(r"labels must be \(6,\)", hidden, weight, labels[:5], support)
    fails(r"labels must be a tensor, got list", hidden, weight, labels.tolist(), support)
    fails(r"support must be a Support, got list", hidden, weight, labels, [None] * 6)
    fails(r"labels must be integers", hidden, weight, labels.float(), support)
    fails(r"labels must be integers", hidden, weight, labels.to(torch.complex64), support)
    fails(r"hidden must be floating point", hidden.long(), weight, labels, support)
    fails(r"support must have 6 rows, got 5", hidden, weight, labels, support[:5])
    fails(r"bias must be \[31\]", *good, bias=torch.zeros(3))
    fails(r"active must be bool", *good, active=torch.ones(6))
    temperature = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    fails(
        r"temperature must be above 0 and finite, got 0.0 in row 2", *good, temperature=temperature
    )
    fails(r"temperature must be above 0", *good, temperature=0.0)
    fails(r"temperature must not require", *good, temperature=torch.ones(6, requires_grad=True))
    fails(r"temperature must be one value or \(6,\)", *good, temperature=torch.ones(5))
    fails(r"softcap must be above 0", *good, softcap=0.0)
    fails(r"softcap must be a number, got '30'", *good, softcap="30")
    fails(r"logit_scale must be finite", *good, logit_scale=float("nan"))
    fails(r"entropy must be", *good, entropy="all")
    fails(r"impl must be", *good, impl="fast")
    fails(r"impl=.triton. ", *good, impl="triton")
    fails(r"process_group", *good, process_group=object())
    fails(r"logits_dtype must be None or torch.bfloat16", *good, logits_dtype=torch.float16)
    fails(r"workspace_mib must be above 0", *good, workspace_mib=0)
    small = weight[: int(support.ids.max())]
    ok = labels.clamp(max=len(small) - 1)
    fails(r"support: id \d+ in row \d is outside", hidden, small, ok, support)
    failed = Support.from_packed(
        torch.empty(0, dtype=torch.int64), torch.tensor([0, -1, 0]), kind=[0, 0, 1]
    )
    fails(r"row 1 is active but the sampler failed", hidden[:3], weight, labels[:3], failed)
    on = torch.tensor([True, False, True])
    fails(
        r"row 2 is active, of kind REPLAY, and empty",
        hidden[:3],
        weight,
        labels[:3],
        failed,
        active=on,
    )
    on = torch.tensor([True, False, False])
    assert fused_lm_head(hidden[:3], weight, labels[:3], failed, active=on).logprobs[1] == 0
    meta = weight.to("meta")
    fails(r"weight must be on cpu as hidden, got meta", hidden, meta, labels, support)


def test_a_harmless_temperature_and_a_real_one():
    """[.5, 1, 2] a row with 1 / T in the gradient; 0 in an inactive row."""
    z = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    labels, temperature = torch.tensor([1, 2, 3, 0]), torch.tensor([0.5, 1.0, 2.0, 0.0])
    active = torch.tensor([True, True, True, False])
    eye = torch.eye(6, dtype=torch.float64)
    out = fused_lm_head(z, eye, labels, temperature=temperature, active=active)
    expected = (z[:3] / temperature[:3, None]).log_softmax(-1)[torch.arange(3), labels[:3]]
    torch.testing.assert_close(out.logprobs[:3], expected)
    out.logprobs.sum().backward()
    p = (z[:3] / temperature[:3, None]).softmax(-1).detach()
    grad = (nn.functional.one_hot(labels[:3], 6) - p) / temperature[:3, None]
    torch.testing.assert_close(z.grad[:3], grad)
    assert torch.equal(z.grad[3], torch.zeros(6, dtype=torch.float64))


# --- the module ---


def test_module_shares_its_weight_and_gives_plain_logits_without_labels():
    linear = nn.Linear(7, 31, bias=True)
    module = FusedLMHead.from_linear(linear, softcap=20.0, logit_scale=0.5)
    assert module.weight is linear.weight
    assert module.bias is linear.bias
    batch = random_batch(dtype=torch.float32)
    assert torch.equal(module(batch.hidden), linear(batch.hidden))
    out = module(batch.hidden, batch.labels, batch.support, temperature=batch.temperature)
    expected = fused_lm_head(
        batch.hidden,
        linear.weight,
        batch.labels,
        batch.support,
        bias=linear.bias,
        softcap=20.0,
        logit_scale=0.5,
        temperature=batch.temperature,
    )
    assert torch.equal(out.logprobs, expected.logprobs)
    out.logprobs.sum().backward()
    assert linear.weight.grad is not None
    assert linear.bias.grad is not None

    class Adapted(nn.Linear):
        pass

    with pytest.raises(ValueError, match=r"plain nn\.Linear"):
        FusedLMHead.from_linear(Adapted(7, 31))


def test_a_sharded_weight_is_refused_and_a_replicated_one_is_not():
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        batch = random_batch()
        sharded = distribute_tensor(batch.weight, mesh, [Shard(0)])
        with pytest.raises(ValueError, match="weight must not be a sharded DTensor"):
            head(replace(batch, weight=sharded))
        whole = distribute_tensor(batch.weight, mesh, [Replicate()]).requires_grad_()
        out = head(replace(batch, weight=whole))
        assert torch.equal(out.logprobs, head(batch).logprobs)
        out.logprobs.sum().backward()
        assert whole.grad.to_local().abs().max() > 0
    finally:
        dist.destroy_process_group()
