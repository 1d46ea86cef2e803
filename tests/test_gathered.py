"""The sparse products that REPLAY rows are made of."""

import pytest
import torch
from factory import (
    assert_exact,
    naive_head,
    outputs,
    random_batch,
    results,
    spied,
    tolerance,
    weighted_sum,
)

import rl_loss.gathered as gathered
from rl_loss import RowKind, fused_lm_head

pytestmark = pytest.mark.usefixtures("unwritten_is_nan")


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
    sampled = spied(monkeypatch, torch.sparse, "sampled_addmm")
    matrices = spied(monkeypatch, gathered, "_sparse")
    blocks = spied(monkeypatch, gathered, "_entry_blocks")
    rows, ids = entries()
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(9, 5, generator=generator).to(dtype)
    weight = torch.randn(23, 5, generator=generator).to(dtype)
    got = gathered.sampled_products(hidden, weight, rows, ids)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    grad = torch.randn(50, generator=generator).to(got.dtype)
    full = torch.zeros(9, 23, dtype=torch.float64)
    full.index_put_((rows, ids.long()), grad.double(), accumulate=True)
    d_hidden = gathered.scattered_products(grad, weight, rows, ids, 9, ordered=True)
    d_weight = gathered.scattered_products(grad, hidden, ids, rows, 23, ordered=False)
    by_entry = rows, ids.long()
    for product, (a, b), at in (
        (got, (hidden.double(), weight.double().T), by_entry),
        (d_hidden, (full, weight.double()), ...),
        (d_weight, (full.T, hidden.double()), ...),
    ):
        # A sum of n products is off by n roundings of their sizes at most.
        n = 5 if at is by_entry else 50
        bound = n * torch.finfo(got.dtype).eps * (a.abs() @ b.abs())[at]
        assert ((product.double() - (a @ b)[at]).abs() <= bound).all()
    by_library = library and dtype != torch.bfloat16 and torch.backends.mkl.is_available()
    assert [len(sampled), len(matrices), len(blocks)] == ([1, 3, 0] if by_library else [0, 0, 3])
    assert all(len(call.result) == 9 for call in blocks)  # of six entries


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
    batch = random_batch(
        3000, 8, 5, kinds=(kind,), dtype=torch.bfloat16, widths=(3,), incomplete=False
    )

    def read(parts):
        return parts[:1], parts[0].sum()

    leaves, exact = batch.leaves(), batch.leaves(torch.float64)
    rows = leaves.hidden, leaves.weight, leaves.labels, leaves.support
    out = fused_lm_head(*rows, bias=leaves.bias, temperature=leaves.temperature, impl=impl)
    got, wanted = results(leaves, outputs(out), read), results(exact, naive_head(exact), read)
    assert_exact(got, wanted, tolerance(batch, read))
