"""The sparse products that REPLAY rows are made of."""

import pytest
import torch
from factory import outputs, random_batch, relative_error, weighted_sum

import rl_loss.gathered as gathered
from rl_loss import RowKind, fused_lm_head


def entries(n: int = 9, v: int = 23, nnz: int = 50):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(n, (nnz,), generator=generator).sort().values
    return rows, torch.randint(v, (nnz,), generator=generator).int()


@pytest.mark.parametrize("library", [True, False], ids=["sparse", "blocks"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_products(library, dtype, monkeypatch):
    """Sampled and scattered products against full matrices, ids repeated and unordered."""
    if not library:
        monkeypatch.setattr(gathered, "_has_sparse_products", lambda *dense: False)
    monkeypatch.setattr(gathered, "_BLOCK", 33)
    rows, ids = entries()
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(9, 5, generator=generator).to(dtype)
    weight = torch.randn(23, 5, generator=generator).to(dtype)
    exact = hidden.double() @ weight.double().T
    got = gathered.sampled_products(hidden, weight, rows, ids)
    torch.testing.assert_close(got.double(), exact[rows, ids.long()], rtol=1e-5, atol=1e-5)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    grad = torch.randn(50, generator=generator).to(got.dtype)
    full = torch.zeros(9, 23, dtype=torch.float64)
    full.index_put_((rows, ids.long()), grad.double(), accumulate=True)
    d_hidden = gathered.scattered_products(grad, weight, rows, ids, 9, ordered=True)
    d_weight = gathered.scattered_products(grad, hidden, ids, rows, 23, ordered=False)
    torch.testing.assert_close(d_hidden.double(), full @ weight.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(d_weight.double(), full.T @ hidden.double(), rtol=1e-5, atol=1e-5)


def test_the_weight_gradient_is_the_same_every_time():
    batch = random_batch(40, 6, 17, kinds=(RowKind.REPLAY,), dtype=torch.float32, widths=(9,))
    grads = []
    for _ in range(5):
        leaves = batch.leaves()
        out = fused_lm_head(leaves.hidden, leaves.weight, leaves.labels, leaves.support)
        weighted_sum(outputs(out)).backward()
        grads.append(leaves.weight.grad)
    assert all(torch.equal(grad, grads[0]) for grad in grads)


def test_a_row_of_one_id_costs_no_product_and_gives_no_gradient(monkeypatch):
    batch = random_batch(4, kinds=(RowKind.REPLAY,), widths=(1,), incomplete=False).leaves()

    def never(hidden, weight, rows, ids):
        assert len(ids) == 0
        return hidden.new_empty(0)

    monkeypatch.setattr(gathered, "sampled_products", never)
    out = fused_lm_head(
        batch.hidden, batch.weight, batch.labels, batch.support, softcap=2.0, entropy="support"
    )
    weighted_sum(outputs(out)).backward()
    for value in (out.logprobs, out.entropy, *batch.grads()[:2]):
        assert torch.equal(value, torch.zeros_like(value))


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize("kind", [RowKind.REPLAY, RowKind.NONE])
def test_weight_gradient_error_does_not_grow_with_the_entries_of_an_id(impl, kind):
    """bf16 in, thousands of entries of one id, one rounding."""
    n = 3000
    batch = random_batch(
        n, 8, 5, kinds=(kind,), dtype=torch.bfloat16, widths=(3,), incomplete=False
    ).leaves()
    exact = batch.leaves(torch.float64)
    for leaves in (batch, exact):
        out = fused_lm_head(leaves.hidden, leaves.weight, leaves.labels, leaves.support, impl=impl)
        out.logprobs.sum().backward()
    assert relative_error(batch.weight.grad, exact.weight.grad) < torch.finfo(torch.bfloat16).eps
