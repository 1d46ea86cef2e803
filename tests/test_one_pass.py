"""Head and loss in one pass against the two steps, on the CPU and on the kernels."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from factory import (
    ALL_KINDS,
    MadeMemory,
    Results,
    assert_exact,
    naive_head,
    naive_output,
    padded,
    random_batch,
    results,
    spied,
    tensors_of,
    tolerance,
)
from interpreter import DEVICE, INTERPRETED, rounded_twice, run_interpreted, truncated
from torch.utils.checkpoint import checkpoint

from rl_loss import (
    LossInputs,
    RowKind,
    fused_lm_head_loss,
    icepop_loss,
    ipo_loss,
    policy_loss,
    reinforce_loss,
)

pytestmark = pytest.mark.usefixtures("unwritten_is_nan", "rows_are_gathered")
IMPL = "triton" if INTERPRETED or DEVICE == "cuda" else "auto"
IMPLS = ["triton"] if IMPL == "triton" else ["auto", "reference"]
on_the_kernels = pytest.mark.skipif(IMPL == "auto", reason="the kernels'")


def clipped(log_p, log_q, advantages):
    """A rule that looks at the advantage."""
    ratio = (log_p - log_q).exp()
    return torch.where(torch.where(advantages > 0, ratio > 1.2, ratio < 0.8), 0.0, ratio)


LOSSES = [
    icepop_loss,
    partial(ipo_loss, eps=0.2, kl_tau=0.1),
    partial(reinforce_loss, kl_tau=0.3, kl="reverse"),
    partial(icepop_loss, score_centering=False, kl_tau=0.2, kl="squared", adv_tau=0.5),
    partial(policy_loss, rule=clipped, ref_tau=0.2),
]


def test_in_the_interpreter():
    run_interpreted(__file__)


def make(kinds, n=10, v=23, dtype=torch.float64, **more):
    batch = random_batch(n, 7, v, kinds=kinds, dtype=dtype, **more)
    g = torch.Generator().manual_seed(3)
    values = {
        "inference_logprobs": -torch.randn(n, generator=g).abs(),
        "advantages": torch.randn(n, generator=g),
        "loss_weights": torch.randn(n, generator=g) * 0.3 + 1,
        "ref_logprobs": -torch.randn(n, generator=g).abs(),
    }
    return batch, values


def on_device(batch):
    names = ("hidden", "weight", "bias", "labels", "temperature", "support")
    return replace(batch, **{name: getattr(batch, name).to(DEVICE) for name in names})


def one_pass(batch, values, loss, active=None, impl=IMPL, **options):
    """Of leaves on the device; `values` and `active` are moved there."""
    options = {"temperature": batch.temperature, "bias": batch.bias, "active": active, **options}
    values = {name: value.to(DEVICE) for name, value in values.items()}
    rows = batch.hidden, batch.weight, batch.labels, batch.support
    return fused_lm_head_loss(*rows, loss=loss, impl=impl, **values, **options)


def gradients(batch, values, loss, **options):
    """The loss as `results` gives it, of the batch as it is."""
    leaves = on_device(batch).leaves()
    out = one_pass(leaves, values, loss, **options)
    return results(leaves, [out.loss, out.per_token_loss], lambda parts: (parts, parts[0]))


def cells(rows, batch):
    """The MiB that so many rows of logits take."""
    return rows * len(batch.weight) * (8 if batch.hidden.dtype == torch.float64 else 4) / 2**20


def agree(batch, values, loss, rows=3, active=None, given=None, where="cpu", **options):
    """Loss, metrics and gradients are the two steps' in float64; so many rows in a chunk.

    `given` is the batch and the values with which one pass is called, where they are others.
    """
    reading = {name: options[name] for name in ("softcap", "logit_scale") if name in options}

    clean = values

    def two_steps(leaves, parts):
        return loss(LossInputs.from_head(naive_output(leaves, parts, active), **clean))

    exact = batch.leaves(torch.float64)
    want = two_steps(exact, naive_head(exact, active=active, **reading))
    names = list(want.metrics)

    def numbers(out):
        """As shares of what each should be: the mean of a ratio is as large as it likes."""
        found = [out.loss, out.per_token_loss, *(out.metrics[name] for name in names)]
        sizes = [want.loss, want.per_token_loss, *(want.metrics[name] for name in names)]
        return [
            x.cpu() / (1 + size.abs().max().detach()) for x, size in zip(found, sizes, strict=True)
        ]

    def read(parts):
        out = two_steps(batch, parts)
        return numbers(out), 0.5 * out.loss

    called, values = (batch, values) if given is None else given
    fast = on_device(called).leaves()
    on = None if active is None else active.to(where)
    got = one_pass(fast, values, loss, on, workspace_mib=cells(rows, batch), **options)
    assert not got.per_token_loss.requires_grad
    assert got.metrics.keys() == want.metrics.keys()
    for name, count in want.metric_counts.items():
        assert torch.equal(got.metric_counts[name].cpu(), count), name
    found, wanted = (
        results(leaves, [out], lambda parts: (numbers(parts[0]), 0.5 * parts[0].loss))
        for leaves, out in ((fast, got), (exact, want))
    )
    dtype = batch.hidden.dtype
    allowed = rounded_twice(tolerance(batch, read, active=active, **reading), dtype)
    assert_exact(found, wanted, allowed, units=truncated(dtype))


@pytest.mark.parametrize("loss", LOSSES, ids=range(len(LOSSES)))
@pytest.mark.parametrize(
    "kinds",
    [ALL_KINDS, (RowKind.NONE,), (RowKind.REPLAY,), (RowKind.HEAD, RowKind.DRAWS)],
    ids=["mixed", "none", "replay", "sampled"],
)
def test_the_numbers_of_the_two_steps(loss, kinds):
    agree(*make(kinds), loss)


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("where", sorted({"cpu", DEVICE}))
def test_chunks_of_any_size_with_inactive_rows(rows, where, monkeypatch):
    if IMPL == "triton":
        import rl_loss.kernels.one_pass as on_kernels

        taken = spied(monkeypatch, on_kernels, "take_stats")
    batch, values = make(ALL_KINDS)
    active = torch.tensor([True, False, True, True, True, True, True, True, False, True])
    off = ~active
    poisoned = replace(batch, hidden=torch.where(off[:, None], torch.nan, batch.hidden))
    spoilt = {**values, "advantages": torch.where(off, torch.inf, values["advantages"])}
    agree(batch, values, icepop_loss, rows, active, (poisoned, spoilt), where)
    if IMPL == "triton":  # in runs of about one length: six rows over the vocabulary are active
        runs = [len(call.args[1].rows) for call in taken]
        assert runs == {1: [1] * 6, 3: [3, 3], 5: [3, 3]}[rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(dtype):
    loss = partial(reinforce_loss, kl_tau=0.1)  # no test that a rounded logit could flip
    agree(*make(ALL_KINDS, dtype=dtype), loss, softcap=9.0, logit_scale=0.7)


def test_frozen_inputs_and_no_grad():
    batch, values = make(ALL_KINDS, n=4)
    batch = on_device(batch)
    full = batch.leaves()
    loss = one_pass(full, values, icepop_loss).loss
    loss.backward()
    for frozen in ("hidden", "weight", "bias"):
        part = batch.leaves()
        getattr(part, frozen).requires_grad_(False)
        one_pass(part, values, icepop_loss).loss.backward()
        for name in ("hidden", "weight", "bias"):
            grad, wanted = getattr(part, name).grad, getattr(full, name).grad
            assert grad is None if name == frozen else torch.equal(grad, wanted)
    with torch.no_grad():
        quiet = one_pass(batch.leaves(), values, icepop_loss)
    assert not quiet.loss.requires_grad
    assert torch.equal(quiet.loss, loss)


def test_a_second_backward_adds_the_same():
    batch, values = make(ALL_KINDS, n=4)
    leaves = on_device(batch).leaves()
    out = one_pass(leaves, values, icepop_loss)
    out.loss.backward(retain_graph=True)
    once = [grad.clone() for grad in leaves.grads()]
    out.loss.backward()
    for grad, wanted in zip(leaves.grads(), once, strict=True):
        assert torch.equal(grad, 2 * wanted)


def test_without_a_support_and_in_two_dimensions():
    batch, values = make((RowKind.NONE,), n=6)
    leaves = on_device(batch).leaves()
    flat = one_pass(replace(leaves, support=None), values, ipo_loss)
    shaped = replace(
        leaves,
        hidden=leaves.hidden.reshape(2, 3, 7),
        labels=leaves.labels.reshape(2, 3),
        temperature=leaves.temperature.reshape(2, 3),
        support=None,
    )
    values = {name: value.reshape(2, 3) for name, value in values.items()}
    out = one_pass(shaped, values, ipo_loss)
    assert out.per_token_loss.shape == (2, 3)
    assert torch.equal(out.per_token_loss.reshape(-1), flat.per_token_loss)
    assert torch.equal(out.loss, flat.loss)
    agree(batch, *make((RowKind.NONE,), n=6)[1:], ipo_loss)


@pytest.mark.parametrize("n", [0, 2])
def test_no_active_row(n):
    batch, values = make(ALL_KINDS, n=n)
    leaves = on_device(batch).leaves()
    out = one_pass(leaves, values, icepop_loss, torch.zeros(n, dtype=torch.bool))
    out.loss.backward()
    assert out.loss == 0
    for leaf in (leaves.hidden, leaves.weight, leaves.bias):
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("name", ["inference_logprobs", "advantages", "loss_weights"])
def test_values_of_another_shape_are_refused(name):
    batch, values = make(ALL_KINDS)
    batch = on_device(batch)
    values = {other: value.to(DEVICE) for other, value in values.items()}
    rows = batch.hidden, batch.weight, batch.labels, batch.support
    for wrong, got in ((torch.zeros(15, device=DEVICE), r"\(15,\)"), ([0.0] * 10, "list")):
        with pytest.raises(ValueError, match=rf"{name} must be \(10,\) as labels, got {got}"):
            fused_lm_head_loss(*rows, loss=icepop_loss, impl=IMPL, **{**values, name: wrong})


@on_the_kernels
@pytest.mark.parametrize("scale", [1 / 257, 131072.0])
def test_the_upstream_is_not_rounded(scale):
    """Nor is it too large for the gradients' dtype."""
    batch, values = make((RowKind.REPLAY, RowKind.NONE), n=4, dtype=torch.bfloat16)
    plain, scaled = on_device(batch).leaves(), on_device(batch).leaves()
    one_pass(plain, values, icepop_loss).loss.backward()
    (one_pass(scaled, values, icepop_loss).loss * scale).backward()
    for grad, unscaled in zip(scaled.grads(), plain.grads(), strict=True):
        wanted = (unscaled.double() * scale).bfloat16()
        assert torch.equal(grad, wanted)


@pytest.mark.parametrize("loss", [torch.sum, partial(icepop_loss, None), partial(torch.sum)])
def test_other_losses_are_refused(loss):
    batch, values = make(ALL_KINDS)
    with pytest.raises(ValueError, match="loss must be ipo_loss"):
        one_pass(on_device(batch), values, loss)


@on_the_kernels
def test_wide_rows(monkeypatch):
    import rl_loss.kernels.blocks as blocks
    import rl_loss.plan as plan

    monkeypatch.setattr(plan, "ENTRIES_A_PRODUCT", 0.4)
    monkeypatch.setattr(plan, "ENTRIES_A_READ", 0.0)
    wide = spied(monkeypatch, blocks, "_wide_logits")
    agree(*make(ALL_KINDS, widths=(23, 1, 15, 3, 11)), icepop_loss)
    assert len(wide) == 1


# --- what is checkpointed, padded, or under another default dtype ---


@pytest.mark.parametrize("impl", IMPLS)
def test_checkpointed_the_gradients_are_the_same_and_the_memory_is_free(impl):
    batch, values = make(ALL_KINDS, n=4, dtype=torch.bfloat16)
    wanted = gradients(batch, values, icepop_loss, impl=impl)
    leaves = on_device(batch).leaves()
    values = {name: value.to(DEVICE) for name, value in values.items()}

    def losses(hidden, weight, bias):
        given = replace(leaves, hidden=hidden, weight=weight, bias=bias)
        out = one_pass(given, values, icepop_loss, impl=impl)
        return out.loss, out.per_token_loss

    inputs = leaves.hidden, leaves.weight, leaves.bias
    with MadeMemory() as memory:
        parts = checkpoint(losses, *inputs, use_reentrant=False, preserve_rng_state=False)
    known = leaves.labels, leaves.temperature, *tensors_of(leaves.support), *values.values()
    assert memory.held(*inputs, *parts, *known) == []
    got = results(leaves, parts, lambda parts: (parts, parts[0]))
    assert_same(got, wanted)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kinds", [ALL_KINDS, (RowKind.NONE,)], ids=["mixed", "none"])
def test_padding_behind_the_vocabulary_is_not_there(impl, kinds):
    batch, values = make(kinds, n=4, dtype=torch.float32)
    options = {"impl": impl, "softcap": 9.0, "workspace_mib": cells(2, batch)}
    wanted = gradients(batch, values, icepop_loss, **options)
    got = gradients(padded(batch), values, icepop_loss, vocab_size=23, **options)
    for grad in got.grads[1:]:
        assert torch.equal(grad[23:], torch.zeros_like(grad[23:]))
    cut = Results(got.values, [got.grads[0], *(grad[:23] for grad in got.grads[1:])])
    assert_same(cut, wanted)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_label_in_the_padding_is_refused_or_nan(impl):
    batch, values = make((RowKind.NONE,), n=4)
    batch.labels[2] = 23
    big = on_device(padded(batch)).leaves()
    if impl == "triton":  # only the device sees it
        out = one_pass(big, values, icepop_loss, impl=impl, vocab_size=23)
        assert out.per_token_loss.isnan().tolist() == [False, False, True, False]
        out.loss.backward()
        assert big.hidden.grad.isnan().all(1).tolist() == [False, False, True, False]
        return
    with pytest.raises(ValueError, match=r"labels\[2\] is 23, outside \[0, 23\)"):
        one_pass(big, values, icepop_loss, impl=impl, vocab_size=23)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_result_depends_on_the_default_dtype(impl, default_dtype):
    batch, values = make(ALL_KINDS, n=4, dtype=torch.bfloat16)
    loss = partial(icepop_loss, kl_tau=0.1)
    wanted = gradients(batch, values, loss, impl=impl)
    torch.set_default_dtype(default_dtype)
    assert_same(gradients(batch, values, loss, impl=impl), wanted)


def assert_same(got, wanted):
    for value, exact in zip(got.values + got.grads, wanted.values + wanted.grads, strict=True):
        assert value.dtype == exact.dtype
        assert torch.equal(value, exact)
