"""The reference head against a masked log_softmax over the whole vocabulary, in float64."""

import pytest
import torch
from factory import naive_head, outputs, random_batch, relative_error, weighted_sum
from torch.autograd import gradcheck

import rl_loss.reference
from rl_loss import RowKind, fused_lm_head

TRANSFORMS = [{}, {"softcap": 3.0}, {"logit_scale": 0.3}, {"softcap": 5.0, "logit_scale": 0.7}]
IMPLS = ["reference", "auto"]


def head(batch, impl, **options):
    options = {"temperature": batch.temperature, "bias": batch.bias, **options}
    return fused_lm_head(
        batch.hidden, batch.weight, batch.labels, batch.support, impl=impl, **options
    )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("entropy", [None, "support", "full"])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
def test_values_and_gradients_are_the_definitions(impl, entropy, transform):
    batch, naive = random_batch().leaves(), random_batch().leaves()
    got = outputs(head(batch, impl, entropy=entropy, **transform))
    expected = naive_head(naive, entropy=entropy, **transform)[: len(got)]
    for value, wanted in zip(got, expected, strict=True):
        assert torch.equal(value.isneginf(), wanted.isneginf())
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)
    weighted_sum(got).backward()
    weighted_sum(expected).backward()
    for grad, wanted in zip(batch.grads(), naive.grads(), strict=True):
        assert relative_error(grad, wanted) < 1e-12


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("which", ["logprobs", "support", "tail", "entropy", "full", "all"])
def test_gradcheck_of_each_output_alone_and_together(impl, which):
    batch = random_batch(6, 3, 5, seed=3, std=1.0, widths=(2, 1, 3)).leaves()
    entropy = {"entropy": "support", "all": "support", "full": "full"}.get(which)

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
            impl=impl,
        )
        parts = {
            "logprobs": out.logprobs,
            "support": out.support_logprobs,
            "tail": torch.where(out.trainer_tail_logprobs.isneginf(), 0, out.trainer_tail_logprobs),
            "entropy": out.entropy,
            "full": out.entropy,
        }
        if which == "all":
            return tuple(parts[name] for name in ("logprobs", "support", "tail", "entropy"))
        return parts[which]

    assert set(batch.support.kind.tolist()) == {0, 1, 2, 3}
    assert gradcheck(function, (batch.hidden, batch.weight, batch.bias))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_zero_first_upstream_does_not_zero_the_rest(impl):
    """The upstream [0, 1, -2, .5, 3] on N = 5, H = 4, V = 7 (a fault others have shipped)."""
    batch = random_batch(5, 4, 7, kinds=(RowKind.NONE, RowKind.REPLAY)).leaves()
    naive = random_batch(5, 4, 7, kinds=(RowKind.NONE, RowKind.REPLAY)).leaves()
    upstream = torch.tensor([0, 1, -2, 0.5, 3], dtype=torch.float64)
    head(batch, impl).logprobs.backward(upstream)
    naive_head(naive)[0].backward(upstream)
    for grad, wanted in zip(batch.grads(), naive.grads(), strict=True):
        assert relative_error(grad, wanted) < 1e-12
        assert grad.abs().max() > 0


def test_blocks_of_rows_change_nothing(monkeypatch):
    whole, cut = random_batch().leaves(), random_batch().leaves()
    expected = outputs(head(whole, "reference", entropy="full"))
    weighted_sum(expected).backward()
    monkeypatch.setattr(rl_loss.reference, "_BLOCK", 40)  # a row or two at a time
    got = outputs(head(cut, "reference", entropy="full"))
    weighted_sum(got).backward()
    for value, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-13, atol=1e-13)
    for grad, wanted in zip(cut.grads(), whole.grads(), strict=True):
        assert relative_error(grad, wanted) < 1e-13


@pytest.mark.parametrize("impl", IMPLS)
def test_ids_with_a_bias_of_minus_infinity_are_as_if_not_there(impl):
    """A head padded to more ids, -inf in its bias: every output and gradient of the others."""
    small = random_batch(12, 6, 20).leaves()
    big = random_batch(12, 6, 20)
    more = torch.randn(5, 6, dtype=torch.float64)
    big.weight = torch.cat([big.weight, more])
    big.bias = torch.cat([big.bias, torch.full((5,), -torch.inf, dtype=torch.float64)])
    big = big.leaves()
    results = []
    for batch in (small, big):
        out = outputs(head(batch, impl, entropy="full"))
        weighted_sum(out).backward()
        results.append([*out, batch.hidden.grad, batch.weight.grad[:20], batch.bias.grad[:20]])
    for value, wanted in zip(*results, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(big.weight.grad[20:], torch.zeros(5, 6, dtype=torch.float64))
