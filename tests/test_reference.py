"""The reference head against a masked log_softmax over the whole vocabulary, in float64."""

import pytest
import torch
from factory import (
    Results,
    as_they_are,
    assert_exact,
    naive_head,
    outputs,
    random_batch,
    results,
    spied,
    tolerance,
)
from torch.autograd import gradcheck

import rl_loss.reference
from rl_loss import RowKind, fused_lm_head

TRANSFORMS = [{}, {"softcap": 3.0}, {"logit_scale": 0.3}, {"softcap": 5.0, "logit_scale": 0.7}]
IMPLS = ["reference", "auto"]
pytestmark = pytest.mark.usefixtures("unwritten_is_nan")


def head(batch, impl, **options):
    options = {"temperature": batch.temperature, "bias": batch.bias, **options}
    return fused_lm_head(
        batch.hidden, batch.weight, batch.labels, batch.support, impl=impl, **options
    )


def results_of(batch, impl, read=as_they_are, **options):
    leaves = batch.leaves()
    return results(leaves, outputs(head(leaves, impl, **options)), read)


def by_definition(batch, read=as_they_are, **options):
    leaves = batch.leaves(torch.float64)
    return results(leaves, naive_head(leaves, **options), read)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("entropy", [None, "support", "full"])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
def test_values_and_gradients_are_the_definitions(impl, entropy, full, transform):
    batch, options = random_batch(), {"entropy": entropy, "full": full, **transform}
    got, wanted = results_of(batch, impl, **options), by_definition(batch, **options)
    assert_exact(got, wanted, tolerance(batch, **options))


# --- what the tolerance of all these tests lets through ---


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", range(3), ids=["hidden", "weight", "bias"])
def test_one_percent_in_one_entry_of_a_gradient_does_not_pass(dtype, which):
    batch = random_batch(dtype=dtype)
    got, wanted, allowed = results_of(batch, "auto"), by_definition(batch), tolerance(batch)
    assert_exact(got, wanted, allowed)
    flat = got.grads[which].view(-1)
    middle = flat.float().abs().argsort()[len(flat) // 2]  # half of the entries are smaller
    flat[middle] = flat[middle].double() * 1.01
    with pytest.raises(AssertionError):
        assert_exact(got, wanted, allowed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", range(5), ids=["logprobs", "support", "tails", "entropy", "full"])
def test_an_upstream_that_is_dropped_does_not_pass(dtype, which):
    """That of one element of one output; nor does a value that is off by 3e-5."""
    batch, options = random_batch(dtype=dtype), {"entropy": "support", "full": which == 4}

    def largest(part):
        return part.masked_fill(part.isneginf(), 0.0).abs().argmax()

    def without_one(parts):
        less = parts[which].index_fill(0, largest(parts[which]), 0.0)
        return parts, as_they_are([*parts[:which], less, *parts[which + 1 :]])[1]

    wanted = by_definition(batch, **options)
    allowed = tolerance(batch, **options)
    got = results_of(batch, "auto", without_one, **options)
    with pytest.raises(AssertionError):
        assert_exact(got, wanted, allowed)
    got = results_of(batch, "auto", **options)
    assert_exact(got, wanted, allowed)
    got.values[which][largest(got.values[which])] += 3e-5
    with pytest.raises(AssertionError):
        assert_exact(got, wanted, allowed)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "which",
    ["logprobs", "support", "tail", "entropy", "full entropy", "full logprobs", "mass", "all"],
)
def test_gradcheck_of_each_output_alone_and_together(impl, which):
    batch = random_batch(6, 3, 5, seed=3, std=1.0, widths=(2, 1, 3)).leaves()
    entropy = {"entropy": "support", "all": "support", "full entropy": "full"}.get(which)

    def function(hidden, weight, bias):
        out = fused_lm_head(
            hidden,
            weight,
            batch.labels,
            batch.support,
            bias=bias,
            temperature=batch.temperature,
            softcap=4.0,
            entropy=entropy,
            full=which in ("full logprobs", "mass", "all"),
            impl=impl,
        )
        parts = {
            "logprobs": out.logprobs,
            "support": out.support_logprobs,
            "tail": torch.where(out.trainer_tail_logprobs.isneginf(), 0, out.trainer_tail_logprobs),
            "entropy": out.entropy,
            "full entropy": out.entropy,
            "full logprobs": out.full_logprobs,
            "mass": out.kept_mass,
        }
        if which == "all":
            together = "logprobs", "support", "tail", "entropy", "full logprobs"
            return tuple(parts[name] for name in together)
        return parts[which]

    assert set(batch.support.kind.tolist()) == {0, 1, 2, 3}
    assert gradcheck(function, (batch.hidden, batch.weight, batch.bias))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_zero_first_upstream_does_not_zero_the_rest(impl):
    """The upstream [0, 1, -2, .5, 3] on N = 5, H = 4, V = 7 (a fault others have shipped)."""
    batch = random_batch(5, 4, 7, kinds=(RowKind.NONE, RowKind.REPLAY))

    def read(parts):
        upstream = torch.tensor([0, 1, -2, 0.5, 3], dtype=torch.float64)
        return parts[:1], (parts[0] * upstream).sum()

    got, wanted = results_of(batch, impl, read), by_definition(batch, read)
    assert_exact(got, wanted, tolerance(batch, read))
    assert all(grad.abs().max() > 0 for grad in got.grads)


def test_blocks_of_rows_change_nothing(monkeypatch):
    batch = random_batch()
    monkeypatch.setattr(rl_loss.reference, "_BLOCK", 20)  # a row or two at a time
    blocks = [spied(monkeypatch, rl_loss.reference, name) for name in ("_gathered", "_dense")]
    options = {"entropy": "full", "full": True}
    got = results_of(batch, "reference", **options)
    assert all(len(calls) > 1 for calls in blocks)
    assert_exact(got, by_definition(batch, **options), tolerance(batch, **options))


@pytest.mark.parametrize("impl", IMPLS)
def test_ids_with_a_bias_of_minus_infinity_are_as_if_not_there(impl):
    """A head padded to more ids, -inf in its bias: every output and gradient of the others."""
    small, big = random_batch(12, 6, 20), random_batch(12, 6, 20)
    big.weight = torch.cat([big.weight, torch.randn(5, 6, dtype=torch.float64)])
    big.bias = torch.cat([big.bias, torch.full((5,), -torch.inf, dtype=torch.float64)])
    options = {"entropy": "full", "full": True}
    got = results_of(big, impl, **options)
    hidden, weight, bias = got.grads
    assert torch.equal(weight[20:], torch.zeros(5, 6, dtype=torch.float64))
    wanted, allowed = by_definition(small, **options), tolerance(small, **options)
    assert_exact(Results(got.values, [hidden, weight[:20], bias[:20]]), wanted, allowed)
