"""Head and loss in one pass against the two steps, on the CPU and on the kernels."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from factory import ALL_KINDS, random_batch, relative_error
from interpreter import DEVICE, INTERPRETED, run_interpreted

from rl_loss import (
    LossInputs,
    RowKind,
    fused_lm_head,
    fused_lm_head_loss,
    icepop_loss,
    ipo_loss,
    reinforce_loss,
)

IMPL = "triton" if INTERPRETED or DEVICE == "cuda" else "auto"
LOSSES = [
    icepop_loss,
    partial(ipo_loss, eps=0.2, kl_tau=0.1),
    partial(reinforce_loss, kl_tau=0.3, kl="reverse"),
    partial(icepop_loss, score_centering=False, kl_tau=0.2, kl="squared", adv_tau=0.5),
]


def test_in_the_interpreter():
    run_interpreted(__file__)


def make(kinds, n=14, v=31, dtype=torch.float64, **more):
    batch = random_batch(n, 7, v, kinds=kinds, dtype=dtype, **more)
    moved = {
        name: getattr(batch, name).to(DEVICE)
        for name in ("hidden", "weight", "bias", "labels", "temperature", "support")
    }
    batch = replace(batch, **moved)
    g = torch.Generator().manual_seed(3)

    def normal(scale):
        return (scale * torch.randn(n, generator=g)).to(DEVICE)

    values = {
        "inference_logprobs": -normal(1.0).abs(),
        "advantages": normal(1.0),
        "loss_weights": normal(0.3) + 1,
    }
    return batch, values


def two_steps(batch, values, loss, active=None, **options):
    options = {"temperature": batch.temperature, "bias": batch.bias, "active": active, **options}
    out = fused_lm_head(
        batch.hidden, batch.weight, batch.labels, batch.support, impl="reference", **options
    )
    return loss(LossInputs.from_head(out, batch.support, **values))


def one_pass(batch, values, loss, active=None, impl=IMPL, **options):
    options = {"temperature": batch.temperature, "bias": batch.bias, "active": active, **options}
    rows = batch.hidden, batch.weight, batch.labels, batch.support
    return fused_lm_head_loss(*rows, loss=loss, impl=impl, **values, **options)


def agree(batch, values, loss, tolerance=1e-11, workspace=1e4, **options):
    fast, exact = batch.leaves(), batch.leaves(torch.float64)
    got = one_pass(fast, values, loss, workspace_mib=workspace / 2**20, **options)
    want = two_steps(exact, values, loss, **options)
    assert relative_error(got.loss, want.loss) < tolerance
    assert not got.per_token_loss.requires_grad
    assert (got.per_token_loss - want.per_token_loss).abs().max() < 10 * tolerance
    assert got.metrics.keys() == want.metrics.keys()
    for name, value in want.metrics.items():
        assert torch.equal(got.metric_counts[name], want.metric_counts[name]), name
        assert (got.metrics[name] - value).abs() < 1e-4 * (1 + value.abs()), name
    (0.37 * got.loss).backward()
    (0.37 * want.loss).backward()
    for grad, wanted in zip(fast.grads(), exact.grads(), strict=True):
        assert relative_error(grad, wanted) < max(tolerance, 2 * torch.finfo(grad.dtype).eps)


@pytest.mark.parametrize("loss", LOSSES, ids=range(len(LOSSES)))
@pytest.mark.parametrize(
    "kinds",
    [ALL_KINDS, (RowKind.NONE,), (RowKind.REPLAY,), (RowKind.HEAD, RowKind.DRAWS)],
    ids=["mixed", "none", "replay", "sampled"],
)
def test_the_numbers_of_the_two_steps(loss, kinds):
    agree(*make(kinds), loss)


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("where", ["cpu", DEVICE])
def test_chunks_of_any_size_with_inactive_rows(rows, where):
    batch, values = make(ALL_KINDS)
    active = torch.tensor([True, False, True, True] * 3 + [False, True])
    off = ~active.to(DEVICE)
    batch.hidden[off] = torch.nan
    values["advantages"][off] = torch.inf
    fast = batch.leaves()
    got = one_pass(fast, values, icepop_loss, active.to(where), workspace_mib=rows * 31 * 8 / 2**20)
    got.loss.backward()
    clean = replace(batch, hidden=torch.where(off[:, None], 0.0, batch.hidden)).leaves()
    want = two_steps(clean, values, icepop_loss, active.to(DEVICE))
    want.loss.backward()
    assert relative_error(got.loss, want.loss) < 1e-11
    for grad, wanted in zip(fast.grads(), clean.grads(), strict=True):
        assert relative_error(grad, wanted) < 1e-11


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(dtype):
    loss = partial(reinforce_loss, kl_tau=0.1)  # no test that a rounded logit could flip
    agree(*make(ALL_KINDS, dtype=dtype), loss, tolerance=2e-4, softcap=9.0, logit_scale=0.7)


def test_frozen_inputs_and_no_grad():
    batch, values = make(ALL_KINDS)
    full = batch.leaves()
    one_pass(full, values, icepop_loss).loss.backward()
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
    torch.testing.assert_close(quiet.loss, one_pass(full, values, icepop_loss).loss.detach())


def test_a_second_backward_adds_the_same():
    batch, values = make(ALL_KINDS)
    leaves = batch.leaves()
    out = one_pass(leaves, values, icepop_loss)
    out.loss.backward(retain_graph=True)
    once = [grad.clone() for grad in leaves.grads()]
    out.loss.backward()
    for grad, wanted in zip(leaves.grads(), once, strict=True):
        assert torch.equal(grad, 2 * wanted)


def test_without_a_support_and_in_two_dimensions():
    batch, values = make((RowKind.NONE,), n=12)
    leaves = batch.leaves()
    shaped = {name: value.reshape(3, 4) for name, value in values.items()}
    got = fused_lm_head_loss(
        leaves.hidden.reshape(3, 4, 7), leaves.weight, batch.labels.reshape(3, 4),
        loss=ipo_loss, impl=IMPL, **shaped,
    )  # fmt: skip
    want = two_steps(replace(batch, bias=None), values, ipo_loss, temperature=1.0)
    assert got.per_token_loss.shape == (3, 4)
    torch.testing.assert_close(got.per_token_loss.reshape(-1), want.per_token_loss)


@pytest.mark.parametrize("n", [0, 2])
def test_no_active_row(n):
    batch, values = make(ALL_KINDS, n=n)
    leaves = batch.leaves()
    out = one_pass(leaves, values, icepop_loss, torch.zeros(n, dtype=torch.bool))
    out.loss.backward()
    assert out.loss == 0
    assert (leaves.weight.grad == 0).all()


@pytest.mark.parametrize("name", ["inference_logprobs", "advantages", "loss_weights"])
def test_values_of_another_shape_are_refused(name):
    batch, values = make(ALL_KINDS)
    for wrong, got in ((torch.zeros(15, device=DEVICE), r"\(15,\)"), ([0.0] * 14, "list")):
        with pytest.raises(ValueError, match=rf"{name} must be \(14,\) as labels, got {got}"):
            one_pass(batch, {**values, name: wrong}, icepop_loss)


@pytest.mark.skipif(IMPL == "auto", reason="two steps have no gradient to scale")
@pytest.mark.parametrize("scale", [1 / 257, 131072.0])
def test_the_upstream_is_not_rounded(scale):
    """Nor is it too large for the gradients' dtype."""
    batch, values = make((RowKind.REPLAY, RowKind.NONE), dtype=torch.bfloat16)
    plain, scaled = batch.leaves(), batch.leaves()
    one_pass(plain, values, icepop_loss).loss.backward()
    (one_pass(scaled, values, icepop_loss).loss * scale).backward()
    for grad, unscaled in zip(scaled.grads(), plain.grads(), strict=True):
        wanted = (unscaled.double() * scale).bfloat16()
        assert torch.equal(grad, wanted)


@pytest.mark.parametrize("loss", [torch.sum, partial(icepop_loss, None), partial(torch.sum)])
def test_other_losses_are_refused(loss):
    batch, values = make(ALL_KINDS)
    with pytest.raises(ValueError, match="loss must be ipo_loss"):
        one_pass(batch, values, loss)


@pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="wide rows are the kernels'")
def test_wide_rows(monkeypatch):
    import rl_loss.plan as plan

    monkeypatch.setattr(plan, "ENTRIES_A_PRODUCT", 0.4)
    monkeypatch.setattr(plan, "ENTRIES_A_READ", 0.0)
    batch, values = make(ALL_KINDS, widths=(31, 1, 20, 3, 14))
    assert len(batch.support.plan_for(31).wide)
    agree(batch, values, icepop_loss, workspace=3 * 31 * 8)
