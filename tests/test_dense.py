"""Rows over the vocabulary: chunks and blocks change nothing, small tails stay exact."""

import pytest
import torch
from factory import (
    Batch,
    assert_exact,
    naive_head,
    outputs,
    random_batch,
    results,
    spied,
    tolerance,
)

import rl_loss.dense as dense
from rl_loss import RowKind, Support, fused_lm_head

pytestmark = pytest.mark.usefixtures("unwritten_is_nan")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("given", [("full", False), (None, True), ("full", True)], ids=str)
def test_chunks_of_rows_and_blocks_of_the_vocabulary_change_nothing(
    rows, dtype, given, monkeypatch
):
    """Full entropy and full log-probabilities together take no more of them than either alone."""
    monkeypatch.setattr(dense, "_CHUNK", rows * 31 + 3)
    monkeypatch.setattr(dense, "_VOCAB_BLOCK", 7)
    chunks = spied(monkeypatch, dense, "_logits")
    entropy, full = given
    batch, options = random_batch(dtype=dtype), {"softcap": 9.0, "entropy": entropy, "full": full}
    leaves, exact = batch.leaves(), batch.leaves(torch.float64)
    out = fused_lm_head(
        leaves.hidden,
        leaves.weight,
        leaves.labels,
        leaves.support,
        bias=leaves.bias,
        temperature=leaves.temperature,
        **options,
    )
    got, wanted = results(leaves, outputs(out)), results(exact, naive_head(exact, **options))
    assert_exact(got, wanted, tolerance(batch, **options))
    # Nine rows over the vocabulary, and four replayed ones there as well; there and back.
    widths = [min(rows, n - start) for n in (9, 4) for start in range(0, n, rows)]
    assert [len(call.args[2]) for call in chunks] == 2 * widths
    # What has the accumulation dtype already is not converted, and so not in blocks.
    blocks = list(dense._in_dtype(batch.weight, chunks[0].result.dtype))
    assert len(blocks) == (1 if dtype == torch.float64 else 5)


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_a_tail_of_1e_9_is_exact_in_float32(impl):
    """As 1 - sum(p) it would be rounding noise: value and gradient against float64."""
    z = torch.full((1, 9), -22.0)
    z[0, 4], z[0, 2] = 1.0, 0.3
    batch = Batch(
        hidden=z,
        weight=torch.eye(9),
        bias=torch.zeros(9),
        labels=torch.tensor([4]),
        support=Support.from_rows([([4, 2], [-0.4, -1.2])], kind=RowKind.HEAD),
        temperature=torch.ones(1),
    )

    def tail(parts):
        return parts[2:], parts[2].sum()

    leaves, exact = batch.leaves(), batch.leaves(torch.float64)
    rows = leaves.hidden, leaves.weight, leaves.labels, leaves.support
    out = fused_lm_head(*rows, bias=leaves.bias, impl=impl)
    got, wanted = results(leaves, outputs(out), tail), results(exact, naive_head(exact), tail)
    assert wanted.values[0].exp() < 1e-9
    assert_exact(got, wanted, tolerance(batch, tail))
