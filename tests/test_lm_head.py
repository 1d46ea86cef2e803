"""The head as its users call it: dtypes, edges, poison, autograd modes, errors."""

import itertools
from dataclasses import replace

import pytest
import torch
from factory import (
    LargestTensor,
    MadeMemory,
    Results,
    as_they_are,
    assert_exact,
    naive_head,
    naive_logits,
    outputs,
    padded,
    random_batch,
    relative_error,
    results,
    spied,
    tensors_of,
    tolerance,
    weighted_sum,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from rl_loss import FusedLMHead, LossInputs, RowKind, Support, fused_lm_head, icepop_loss

pytestmark = pytest.mark.usefixtures("unwritten_is_nan")
IMPLS = ["reference", "auto"]
EPS = torch.finfo(torch.float32).eps


def head(batch, impl="auto", **options):
    options = {"temperature": batch.temperature, "bias": batch.bias, **options}
    return fused_lm_head(
        batch.hidden, batch.weight, batch.labels, batch.support, impl=impl, **options
    )


def results_of(batch, impl="auto", read=as_they_are, **options):
    """Of the batch as it is."""
    leaves = batch.leaves()
    return results(leaves, outputs(head(leaves, impl, **options)), read)


def by_definition(batch, read=as_they_are, **options):
    leaves = batch.leaves(torch.float64)
    return results(leaves, naive_head(leaves, **options), read)


def assert_same(got, wanted):
    """Bitwise."""
    for value, exact in zip(got.values + got.grads, wanted.values + wanted.grads, strict=True):
        assert value.dtype == exact.dtype
        assert torch.equal(value, exact)


# --- precision ---


@pytest.mark.parametrize("impl", IMPLS)
def test_logits_rounded_as_an_engine_with_a_bfloat16_head_leaves_them(impl):
    """The product with its bias, the scale, each step of the cap; not the division by T."""
    batch = random_batch(9, 5, 23, kinds=(RowKind.NONE,))

    def rounded(x):
        return x.bfloat16().double()

    options = {"softcap": 5.0, "logit_scale": 0.7}
    raw = rounded(batch.hidden @ batch.weight.T + batch.bias)
    z = rounded(5.0 * rounded(torch.tanh(rounded(rounded(raw * 0.7) / 5.0))))
    expected = (z / batch.temperature.double()[:, None]).log_softmax(1)
    expected = expected.gather(1, batch.labels[:, None])[:, 0]
    got = head(batch, impl, logits_dtype=torch.bfloat16, **options).logprobs
    assert (got - expected).abs().max() <= tolerance(batch, **options).values[0]
    assert (got - head(batch, impl, **options).logprobs).abs().max() > 1e-3


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("entropy", ["support", "full"])
def test_low_precision_is_within_the_error_of_float32_products(impl, dtype, entropy):
    """Inputs of any dtype: outputs as of float32 products, gradients rounded once."""
    batch, options = random_batch(17, 33, 61, dtype=dtype), {"entropy": entropy, "full": True}
    got = results_of(batch, impl, **options)
    assert {value.dtype for value in got.values} == {torch.float32}
    assert {grad.dtype for grad in got.grads} == {dtype}
    assert_exact(got, by_definition(batch, **options), tolerance(batch, **options))


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_changes_nothing(impl):
    batch, options = random_batch(dtype=torch.float32), {"entropy": "full", "full": True}
    wanted = results_of(batch, impl, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(results_of(batch, impl, **options), wanted)


@pytest.mark.parametrize("impl", IMPLS)
def test_compiled_on_the_cpu_the_graph_breaks_and_the_numbers_stay(impl):
    batch = random_batch(5, dtype=torch.float32)
    plain, compiled = batch.leaves(), batch.leaves()

    def total(batch):
        return weighted_sum(outputs(head(batch, impl, full=True)))

    total(plain).backward()
    torch.compile(total, backend="eager")(compiled).backward()
    for grad, wanted in zip(compiled.grads(), plain.grads(), strict=True):
        assert torch.equal(grad, wanted)


@pytest.mark.parametrize("impl", IMPLS)
def test_mixed_dtypes_are_not_rounded_to_the_lower(impl):
    batch = random_batch(dtype=torch.float32)
    mixed = replace(batch, hidden=batch.hidden.bfloat16())
    got = results_of(mixed, impl)
    assert [grad.dtype for grad in got.grads] == [torch.bfloat16, torch.float32, torch.float32]
    assert_exact(got, by_definition(mixed), tolerance(mixed))


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
        out = head(batch, impl, active=active, entropy="full", full=True)
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
        assert (out.kept_mass[off] == 1).all()
    for value, wanted in zip(*results, strict=True):
        assert torch.equal(value, wanted)
    for value in results[1][:5]:
        if value.shape == active.shape:
            assert (value[off] == 0).all()
    assert (results[1][5][off] == 0).all()  # the gradient of hidden


@pytest.mark.parametrize("impl", IMPLS)
def test_a_batch_without_the_inactive_rows_gives_the_same(impl):
    batch = random_batch(9, seed=5)
    active = torch.tensor([True, True, False, True, False, True, True, False, True])
    rows = active.nonzero()[:, 0]
    small = replace(
        batch,
        hidden=batch.hidden[rows],
        labels=batch.labels[rows],
        temperature=batch.temperature[rows],
        support=batch.support.select(rows),
    )

    def logprobs(parts):
        return [parts[0][rows] if len(parts[0]) == 9 else parts[0]], parts[0].sum()

    got = results_of(batch, impl, logprobs, active=active)
    assert torch.equal(got.grads[0][~active], torch.zeros(3, 7, dtype=torch.float64))
    got = Results(got.values, [got.grads[0][rows], *got.grads[1:]])
    assert_exact(got, results_of(small, impl, logprobs), tolerance(small, logprobs))


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
    out = head(batch, impl, entropy="support", full=True)
    for value in (
        out.logprobs, out.trainer_tail_logprobs, out.entropy, out.full_logprobs, out.kept_mass
    ):  # fmt: skip
        assert value[:4].isnan().all()
        assert not value[4:].isnan().any()
    assert torch.equal(out.support_logprobs.isnan(), broken[batch.support.entry_rows])
    assert not out.support_valid[broken[batch.support.entry_rows]].any()
    for part in (out.logprobs, out.full_logprobs):
        batch.hidden.grad = None
        part.sum().backward(retain_graph=True)
        assert torch.equal(batch.hidden.grad.isnan().all(1), broken)
        assert not batch.hidden.grad[4:].isnan().any()


# --- shapes and layouts ---


@pytest.mark.parametrize("impl", IMPLS)
def test_strided_inputs_equal_contiguous_ones(impl):
    plain = random_batch(10, 6, 19)
    labels = torch.full((20,), -7)
    labels[::2] = plain.labels
    strided = replace(
        plain,
        hidden=plain.hidden.repeat_interleave(2, 1)[:, ::2].requires_grad_(),
        weight=plain.weight.T.contiguous().T.requires_grad_(),
        bias=plain.bias.clone().requires_grad_(),
        labels=labels[::2],
    )

    def read(parts):  # an upstream of stride 0
        return parts[:1], (parts[0] * torch.ones((), dtype=torch.float64).expand(10)).sum()

    assert strided.hidden.stride(1) == 2
    got = results(strided, outputs(head(strided, impl)), read)
    assert_exact(got, results_of(plain, impl, read), tolerance(plain, read))


@pytest.mark.parametrize("impl", IMPLS)
def test_leading_dimensions_are_rows(impl):
    batch = random_batch(12)
    flat = head(batch, impl, entropy="support", full=True)
    shaped = fused_lm_head(
        batch.hidden.reshape(3, 4, -1),
        batch.weight,
        batch.labels.reshape(3, 4),
        batch.support,
        bias=batch.bias,
        temperature=batch.temperature.reshape(3, 4),
        entropy="support",
        full=True,
        impl=impl,
    )
    rows = "logprobs", "trainer_tail_logprobs", "entropy", "full_logprobs", "kept_mass", "active"
    for name in rows:
        assert torch.equal(getattr(shaped, name), getattr(flat, name).reshape(3, 4))
    assert torch.equal(shaped.support_logprobs, flat.support_logprobs)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("entropy", [None, "support", "full"])
@pytest.mark.parametrize("full", [False, True])
def test_no_rows_no_active_row_no_entries_one_id(impl, entropy, full):
    options = {"entropy": entropy, "full": full}
    none = random_batch(0, 4, 7).leaves()
    out = head(none, impl, **options)
    assert out.logprobs.shape == (0,)
    weighted_sum(outputs(out)).backward()
    assert torch.equal(none.weight.grad, torch.zeros_like(none.weight))

    idle = random_batch(5, 4, 7).leaves()
    out = head(idle, impl, **options, active=torch.zeros(5, dtype=torch.bool))
    assert all(part.requires_grad for part in outputs(out))
    weighted_sum(outputs(out)).backward()
    for value in (*outputs(out), *idle.grads()):
        assert torch.equal(value, torch.zeros_like(value))

    single = replace(random_batch(4, 3, 1, kinds=(RowKind.NONE, RowKind.REPLAY))).leaves()
    out = head(single, impl, **options)
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

    def in_order(parts):
        """The entries sorted by their values."""
        entries = parts[1].reshape(-1, 5).sort(1).values.reshape(-1)
        parts = [parts[0], entries, parts[2]]
        return parts, weighted_sum(parts)

    other = replace(
        batch,
        support=turned.replace(
            ids=turned.ids[order],
            sampler_logprobs=turned.sampler_logprobs[order],
            known=turned.known[order],
        ),
    )
    one, two = results_of(batch, impl, in_order), results_of(other, impl, in_order)
    assert_exact(two, one, tolerance(batch, in_order))


@pytest.mark.parametrize("impl", IMPLS)
def test_far_logits(impl):
    """All logits -20 on an odd V; a soft cap of 30 over logits of -200."""
    hidden, weight = torch.full((1, 1), -20.0), torch.ones(48, 1)
    wanted = -torch.tensor(48.0).log()  # within two units of the logits
    out = fused_lm_head(hidden, weight, torch.tensor([5]), impl=impl)
    assert abs(out.logprobs - wanted) <= 2 * EPS * 20
    capped = fused_lm_head(hidden * 10, weight, torch.tensor([5]), softcap=30.0, impl=impl)
    assert abs(capped.logprobs - wanted) <= 2 * EPS * 30


# --- autograd ---


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)), ids=str)
def test_frozen_inputs_get_no_gradient(impl, needs):
    batch, options = random_batch(), {"entropy": "full", "full": True}
    wanted = results_of(batch, impl, **options)
    leaves = batch.leaves()
    for leaf, need in zip((leaves.hidden, leaves.weight, leaves.bias), needs, strict=True):
        leaf.requires_grad_(need)
    parts = outputs(head(leaves, impl, **options))
    for value, exact in zip(parts, wanted.values, strict=True):
        assert torch.equal(value, exact)
        assert value.requires_grad == any(needs)
    if any(needs):
        got = results(leaves, parts)
        for i, need in enumerate(needs):
            wanted.grads[i] = wanted.grads[i] if need else None
        assert_exact(got, wanted, tolerance(batch, **options))
    with torch.no_grad():
        assert torch.equal(head(leaves, impl).logprobs, wanted.values[0])
    with torch.inference_mode():
        assert torch.equal(head(leaves, impl).logprobs, wanted.values[0])


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
    batch = random_batch(14)
    parts, found = batch.leaves(), []
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
        part.logprobs.sum().backward()
        found.append(part.logprobs.detach())

    def logprobs(parts):
        return parts[:1], parts[0].sum()

    got = Results([torch.cat(found)], list(parts.grads()))
    assert_exact(got, results_of(batch, impl, logprobs), tolerance(batch, logprobs))


# --- over the vocabulary, beside what is replayed ---


ALONE = ["logprobs", "support", "tails", "entropy", "full"]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", ["support", "full"])
@pytest.mark.parametrize("which", range(5), ids=ALONE)
def test_each_output_alone(impl, dtype, entropy, which):
    batch = random_batch(dtype=dtype, widths=(3, 31, 1, 20))
    options = {"entropy": entropy, "full": True, "softcap": 9.0, "logit_scale": 0.7}

    def read(parts):
        return [parts[which]], weighted_sum([parts[which]])

    got, wanted = results_of(batch, impl, read, **options), by_definition(batch, read, **options)
    assert_exact(got, wanted, tolerance(batch, read, **options))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("entropy", [None, "support", "full"])
def test_over_the_vocabulary_the_full_logprobs_are_the_logprobs(impl, entropy):
    """Bit for bit, and so for the gradient of both; where nothing is asked for nothing is given."""
    batch = random_batch(dtype=torch.float32, kinds=(RowKind.NONE, RowKind.HEAD, RowKind.DRAWS))
    active = torch.arange(13) != 4
    out = head(batch, impl, entropy=entropy, full=True, active=active)
    assert torch.equal(out.full_logprobs, out.logprobs)
    assert torch.equal(out.kept_mass, torch.ones(13))
    twice = [
        results_of(batch, impl, read, entropy=entropy, full=True, active=active)
        for read in (
            lambda parts: (parts[:1], 2 * weighted_sum(parts[:1])),
            lambda parts: (parts[-1:], weighted_sum(parts[:1]) + weighted_sum(parts[-1:])),
        )
    ]
    assert_same(*twice)
    without = head(batch, impl, entropy=entropy, active=active)
    assert without.full_logprobs is without.kept_mass is None
    for part, other in zip(outputs(without), outputs(out), strict=False):
        assert torch.equal(part, other)


@pytest.mark.parametrize("impl", IMPLS)
def test_what_is_replayed_stays_as_it_is(impl):
    """Full log-probabilities leave the other outputs alone, bit for bit, and their gradients."""
    batch = random_batch(dtype=torch.float32)

    def others(parts):
        return parts[:4], weighted_sum(parts[:4])

    wanted = results_of(batch, impl, others, entropy="support")
    assert_same(results_of(batch, impl, others, entropy="support", full=True), wanted)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_kept_mass_is_the_sum_of_the_probabilities_that_are_kept(impl, dtype):
    """From next to nothing to all of V, value and gradient; of rows of one id its probability."""
    batch = random_batch(23, 17, 61, dtype=dtype, widths=(61, 1, 3, 9, 30), std=2.0)
    support, replayed = batch.support, batch.support.kind == RowKind.REPLAY
    kept = torch.zeros(23, 61, dtype=torch.bool)
    kept[support.entry_rows, support.ids.long()] = True
    kept |= ~replayed[:, None]

    def parts_in(dtype):
        leaves = batch.leaves(dtype)
        p = naive_logits(leaves, dtype).softmax(1)
        return results(leaves, [torch.where(kept, p, 0.0).sum(1)])

    wanted, plain = parts_in(torch.float64), parts_in(torch.float32)
    mass = wanted.values[0]
    assert mass[replayed].min() < 0.02
    assert (mass[replayed] > 1 - 1e-12).any()

    leaves = batch.leaves()
    got = results(leaves, [head(leaves, impl, full=True).kept_mass])
    assert (got.values[0][~replayed] == 1).all()
    error = (got.values[0].double() - mass).abs()
    # The mass is a quotient of two probabilities, each as far off as its logits: relative to it.
    allowed = tolerance(batch, full=True)
    ratio = allowed.values[0] + allowed.values[3]
    assert (error <= ratio * mass).all(), (error / mass).max()
    unit = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    shares = [
        2 * relative_error(*pair) * unit / EPS + 2 * ratio
        for pair in zip(plain.grads, wanted.grads, strict=True)
    ]
    assert_exact(got, wanted, allowed._replace(values=[ratio], grads=shares))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_row_of_one_id_has_a_log_probability_over_the_vocabulary(impl):
    batch = random_batch(5, kinds=(RowKind.REPLAY,), widths=(1,), incomplete=False)
    got = results_of(batch, impl, lambda parts: (parts, weighted_sum(parts[3:])), full=True)
    assert torch.equal(got.values[0], torch.zeros(5, dtype=torch.float64))
    exact = batch.leaves()
    logp = naive_logits(exact, torch.float64).log_softmax(1).gather(1, batch.labels[:, None])[:, 0]
    assert (logp < -0.01).any()
    wanted = results(exact, [logp])
    allowed = tolerance(batch, lambda parts: (parts[3:], weighted_sum(parts[3:])), full=True)
    assert_exact(got._replace(values=got.values[3:]), wanted, allowed)
    assert got.grads[0].abs().max(1).values.min() > 0


@pytest.mark.parametrize("impl", IMPLS)
def test_what_is_nan_upstream_of_a_full_log_probability_is_seen(impl):
    """In a row of one id, of several, and over the vocabulary; the others keep theirs."""
    support = Support.from_rows([([3], None), ([1, 4], None), None, ([2], None), ([1, 4], None)])
    for row in range(3):
        hidden = torch.randn(5, 4, requires_grad=True)
        labels = torch.tensor([3, 4, 0, 2, 1])
        out = fused_lm_head(hidden, torch.randn(6, 4), labels, support, full=True, impl=impl)
        out.full_logprobs.backward(torch.ones(5).index_fill(0, torch.tensor(row), torch.nan))
        assert torch.equal(hidden.grad.isnan().all(1), torch.arange(5) == row)
        assert torch.equal(hidden.grad.isnan().any(1), torch.arange(5) == row)


@pytest.mark.parametrize("which", ["logprobs", "full", "entropy"])
def test_the_backward_of_replayed_rows_takes_the_vocabulary_where_it_is_read(which, monkeypatch):
    import rl_loss.dense as dense

    chunks = spied(monkeypatch, dense, "_logits")
    batch = random_batch(kinds=(RowKind.REPLAY,)).leaves()
    out = head(batch, full=True, entropy="full")
    assert len(chunks) == 1
    parts = {"logprobs": out.logprobs, "full": out.full_logprobs, "entropy": out.entropy}
    parts[which].sum().backward()
    assert len(chunks) == (1 if which == "logprobs" else 2)


# --- paths on the CPU ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_products_where_the_library_has_them_else_bounded_gathers(dtype, monkeypatch):
    import rl_loss.gathered as gathered

    monkeypatch.setattr(gathered, "_BLOCK", 40)
    sparse = spied(monkeypatch, gathered, "_sparse")
    blocks = spied(monkeypatch, gathered, "_entry_blocks")
    batch = random_batch(dtype=dtype, kinds=(RowKind.REPLAY,))
    got = results_of(batch, entropy="support")
    assert_exact(got, by_definition(batch, entropy="support"), tolerance(batch, entropy="support"))
    library = dtype == torch.float32 and torch.backends.mkl.is_available()
    assert [len(sparse), len(blocks)] == ([3, 0] if library else [0, 3])
    assert all(len(call.result) > 5 for call in blocks)


# --- checkpointing ---


def checkpointed(batch, function, *known):
    """`function(hidden, weight, bias)` through a checkpoint, and what memory is held of it."""
    inputs = batch.hidden, batch.weight, batch.bias
    with MadeMemory() as memory:
        parts = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    known = *known, *inputs, batch.labels, batch.temperature, *tensors_of(batch.support)
    return parts, memory.held(*parts, *known)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("entropy", ["support", "full"])
def test_checkpointed_the_gradients_are_the_same_and_the_memory_is_free(impl, entropy):
    """In bfloat16, of which both make copies in float32."""
    batch, options = random_batch(dtype=torch.bfloat16), {"entropy": entropy, "full": True}
    wanted, leaves = results_of(batch, impl, **options), batch.leaves()

    def function(hidden, weight, bias):
        given = replace(leaves, hidden=hidden, weight=weight, bias=bias)
        return outputs(head(given, impl, **options))

    parts, held = checkpointed(leaves, function)
    assert held == []
    assert_same(results(leaves, parts), wanted)


@pytest.mark.parametrize("impl", IMPLS)
def test_head_and_loss_in_one_checkpoint(impl):
    batch = random_batch(dtype=torch.bfloat16)
    values = {"inference_logprobs": -torch.rand(13), "advantages": torch.randn(13)}

    def losses(leaves):
        def function(hidden, weight, bias):
            out = head(replace(leaves, hidden=hidden, weight=weight, bias=bias), impl)
            loss = icepop_loss(LossInputs.from_head(out, **values), kl_tau=0.1)
            return loss.loss, loss.per_token_loss

        return function

    def read(parts):
        return parts, parts[0]

    plain, leaves = batch.leaves(), batch.leaves()
    parts = losses(plain)(plain.hidden, plain.weight, plain.bias)
    wanted = results(plain, parts, read)
    parts, held = checkpointed(leaves, losses(leaves), *values.values())
    assert held == []
    assert_same(results(leaves, parts, read), wanted)


@pytest.mark.parametrize("impl", IMPLS)
def test_what_a_forward_holds_without_a_checkpoint_is_seen(impl):
    """The measure of the tests above: intermediates that are held show."""
    leaves = random_batch(dtype=torch.bfloat16).leaves()
    with MadeMemory() as memory:
        parts = outputs(head(leaves, impl))
    inputs = leaves.hidden, leaves.weight, leaves.bias, leaves.labels, leaves.temperature
    assert len(memory.held(*parts, *inputs, *tensors_of(leaves.support))) > 5


# --- padding behind the vocabulary ---


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("entropy", ["support", "full"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_padding_behind_the_vocabulary_is_not_there(impl, entropy, dtype):
    batch = random_batch(dtype=dtype)
    options = {"entropy": entropy, "full": True, "softcap": 9.0}
    got = results_of(padded(batch), impl, vocab_size=31, **options)
    for grad in got.grads[1:]:
        assert torch.equal(grad[31:], torch.zeros_like(grad[31:]))
        assert len(grad) == 36
    cut = Results(got.values, [got.grads[0], *(grad[:31] for grad in got.grads[1:])])
    assert_same(cut, results_of(batch, impl, **options))


@pytest.mark.parametrize("impl", IMPLS)
def test_an_id_or_a_label_in_the_padding_is_refused(impl):
    batch = random_batch(6, kinds=(RowKind.NONE, RowKind.HEAD))
    big = padded(batch)
    for bad in (31, 35):
        labels = batch.labels.clone()
        labels[2] = bad
        with pytest.raises(ValueError, match=rf"labels\[2\] is {bad}, outside \[0, 31\)"):
            head(replace(big, labels=labels), impl, vocab_size=31)
        assert (
            head(
                replace(big, labels=labels),
                impl,
                active=batch.labels == batch.labels[0],
                vocab_size=31,
            ).logprobs[2]
            == 0
        )
        ids = batch.support.ids.clone()
        ids[batch.support.offsets[3]] = bad
        other = replace(big, support=batch.support.replace(ids=ids))
        with pytest.raises(ValueError, match=rf"id {bad} in row 3 is outside"):
            head(other, impl, vocab_size=31)


@pytest.mark.parametrize("impl", IMPLS)
def test_an_id_or_a_label_in_the_padding_that_only_a_device_can_see_is_nan(impl, monkeypatch):
    import rl_loss.flat_rows as flat_rows

    batch = random_batch(6, kinds=(RowKind.NONE, RowKind.HEAD, RowKind.REPLAY))
    batch.labels[0], ids = 31, batch.support.ids.clone()
    ids[batch.support.offsets[1]], ids[batch.support.offsets[2]] = 35, 31
    batch.support = batch.support.replace(ids=ids)
    monkeypatch.setattr(flat_rows, "host_sees", lambda device: False)
    leaves = padded(batch).leaves()
    out = head(leaves, impl, vocab_size=31)
    broken = torch.arange(6) < 3
    assert torch.equal(out.logprobs.isnan(), broken)
    out.logprobs.sum().backward()
    assert torch.equal(leaves.hidden.grad.isnan().all(1), broken)
    assert torch.equal(leaves.weight.grad[31:], torch.zeros(5, 7, dtype=torch.float64))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (0, "vocab_size must be an int of at least 1, got 0"),
        (-3, "vocab_size must be an int of at least 1, got -3"),
        (32, "vocab_size must be at most the weight's 31 rows, got 32"),
        (True, "vocab_size must be an int of at least 1, got True"),
        (31.0, r"vocab_size must be an int of at least 1, got 31\.0"),
        ("31", "vocab_size must be an int of at least 1, got '31'"),
    ],
)
def test_a_vocabulary_that_the_weight_does_not_hold_is_refused(impl, given, message):
    batch = random_batch(4)
    with pytest.raises(ValueError, match=message):
        head(batch, impl, vocab_size=given)
    if given == 32:  # a module may hold one rank's rows of more
        with pytest.raises(ValueError, match=message):
            FusedLMHead(7, 31, vocab_size=given)(batch.hidden.float(), batch.labels)
        return
    with pytest.raises(ValueError, match=message):
        FusedLMHead(7, 31, vocab_size=given)
    with pytest.raises(ValueError, match=message):
        FusedLMHead.from_linear(nn.Linear(7, 31), vocab_size=given)


# --- the default dtype ---


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_result_depends_on_the_default_dtype(impl, dtype, default_dtype):
    batch = random_batch(dtype=dtype)
    options = {"entropy": "full", "full": True, "softcap": 9.0}
    wanted = results_of(batch, impl, **options)
    torch.set_default_dtype(default_dtype)
    assert_same(results_of(batch, impl, **options), wanted)
    one = head(batch, impl, temperature=0.7).logprobs
    torch.set_default_dtype(torch.float32)
    assert torch.equal(one, head(batch, impl, temperature=0.7).logprobs)


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
    for half in (torch.bfloat16, torch.float16):
        told = rf"temperature must be float32 or float64, got {half}.* cast_forward_inputs=False"
        fails(told, *good, temperature=torch.ones(6, dtype=half))
    fails(r"softcap must be above 0", *good, softcap=0.0)
    fails(r"softcap must be a number, got '30'", *good, softcap="30")
    fails(r"logit_scale must be finite", *good, logit_scale=float("nan"))
    fails(r"entropy must be", *good, entropy="all")
    fails(r"full must be True or False, got 'support'", *good, full="support")
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
    unit = torch.finfo(torch.float64).eps * float(z.detach().abs().max() / 0.5)  # of a logit
    assert (out.logprobs[:3] - expected).abs().max() <= 4 * unit
    out.logprobs.sum().backward()
    p = (z[:3] / temperature[:3, None]).softmax(-1).detach()
    grad = (nn.functional.one_hot(labels[:3], 6) - p) / temperature[:3, None]
    assert (z.grad[:3] - grad).abs().max() <= 4 * unit / 0.5
    assert torch.equal(z.grad[3], torch.zeros(6, dtype=torch.float64))


# --- the module ---


def test_module_shares_its_weight_and_gives_plain_logits_without_labels():
    linear = nn.Linear(7, 31, bias=True)
    module = FusedLMHead.from_linear(linear, softcap=20.0, logit_scale=0.5)
    batch = random_batch(dtype=torch.float32)
    full = module(batch.hidden, batch.labels, batch.support, full=True)
    assert full.kept_mass.shape == full.logprobs.shape
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


def test_the_modules_vocabulary_holds_unless_the_call_gives_another():
    batch = padded(random_batch(dtype=torch.float32))
    linear = nn.Linear(7, 36)
    with torch.no_grad():
        linear.weight.copy_(batch.weight)
        linear.bias.copy_(batch.bias)
    built = FusedLMHead(7, 36, bias=True, vocab_size=31)
    built.load_state_dict(linear.state_dict())
    expected = head(batch, vocab_size=31).logprobs
    assert expected.isfinite().all()
    rows = batch.hidden, batch.labels, batch.support
    for module in (built, FusedLMHead.from_linear(linear, vocab_size=31)):
        assert module.vocab_size == 31
        assert torch.equal(module(*rows, temperature=batch.temperature).logprobs, expected)
        assert module(batch.hidden).shape == (13, 36)  # without labels nn.Linear's
        # An id of 30 is none in a smaller vocabulary; all 36 rows hold NaN.
        with pytest.raises(ValueError, match=r"outside \[0, 20\)"):
            module(*rows, vocab_size=20)
        whole = module(*rows, vocab_size=None).logprobs
        assert whole[batch.support.kind == RowKind.NONE].isnan().all()


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


@pytest.mark.parametrize("impl", IMPLS)
def test_a_tail_that_p_puts_nothing_on_has_no_gradient(impl):
    """The one id of unknown q has a bias of -inf."""
    support = Support.from_rows([([5, 2], [-0.1, torch.nan])])
    hidden = torch.randn(1, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(9, dtype=torch.float64)
    bias[2] = -torch.inf
    out = fused_lm_head(hidden, weight, torch.tensor([5]), support, bias=bias, impl=impl)
    assert out.trainer_tail_logprobs.tolist() == [-torch.inf]
    values = {"inference_logprobs": torch.tensor([-0.1]), "advantages": torch.ones(1)}
    icepop_loss(LossInputs.from_head(out, **values)).loss.backward()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_temperature_whose_inverse_overflows_is_none(impl):
    hidden, weight = torch.randn(2, 4), torch.randn(9, 4)
    temperature = torch.tensor([1.0, 1e-40])
    with pytest.raises(
        ValueError, match=r"temperature must be above 0 and finite, got .* in row 1"
    ):
        fused_lm_head(hidden, weight, torch.tensor([1, 2]), temperature=temperature, impl=impl)
    with pytest.raises(ValueError, match=r"weight must be \[V, H\], got \(\)"):
        fused_lm_head(hidden, torch.tensor(1.0), torch.tensor([1, 2]), impl=impl)
