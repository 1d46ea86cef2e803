"""aligned_rows against a loop over the tokens of each sequence."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    PROPERTY,
    STRIDE,
    assert_rows,
    build,
    mixed_rows,
    tagged_row,
    tagged_rows,
    tags,
)

from rl_loss.alignment import AlignedRows, aligned_rows, context_parallel_rows
from rl_loss.csr import RowKind
from rl_loss.support import Support

NO_EVIDENCE = tagged_row(1024, RowKind.NONE, 0, 0, 0)


def with_tail(row):
    """What `aligned_rows` puts in the last row of a sequence."""
    return type(row)(row.tag, row.kind, row.ids, row.logprobs, row.known, 1.0)


def check_against_loop(rows, loss_mask, bounds, shape=None, cu_seqlens=None):
    """Every output of aligned_rows, worked out token by token; `rows[t]` is token t's."""
    n = len(rows)
    generator = torch.Generator().manual_seed(n)
    tokens = torch.tensor([row.tag for row in rows], dtype=torch.int64)
    scalar = torch.randn(n, generator=generator)
    wide = torch.randn(n, 2, 3, generator=generator, dtype=torch.float64)
    counts = torch.randint(1, 99, (n,), generator=generator)
    mask = torch.tensor(loss_mask, dtype=torch.bool)
    shape = (n,) if shape is None else shape
    out = aligned_rows(
        tokens.reshape(shape),
        mask.reshape(shape),
        support=build(rows),
        cu_seqlens=cu_seqlens,
        scalar=scalar.reshape(shape),
        wide=wide.reshape(*shape, 2, 3),
        counts=counts.reshape(shape),
    )
    labels, active, expected_rows = [], [], []
    last = {stop - 1 for start, stop in pairwise(bounds) if stop > start}
    for t in range(n):
        on = t not in last and bool(mask[t + 1])
        active.append(on)
        labels.append(int(tokens[t + 1]) if on else 0)
        expected_rows.append(with_tail(NO_EVIDENCE) if t in last else rows[t + 1])
        for name, tensor in {"scalar": scalar, "wide": wide, "counts": counts}.items():
            got = out.per_token[name].reshape(tensor.shape)[t]
            expected = torch.zeros_like(tensor[t]) if t in last else tensor[t + 1]
            assert torch.equal(got, expected)
    assert out.labels.shape == out.active.shape == shape
    assert out.labels.flatten().tolist() == labels
    assert out.active.flatten().tolist() == active
    assert out.active.dtype == torch.bool
    assert out.per_token["wide"].shape == (*shape, 2, 3)
    assert [out.per_token[name].dtype for name in ("scalar", "wide", "counts")] == [
        torch.float32,
        torch.float64,
        torch.int64,
    ]
    assert_rows(out.support, expected_rows)


def test_two_packed_sequences():
    """[10, 11, 12] [20, 21]."""
    support = Support.from_rows([([token], [0.0]) for token in (10, 11, 12, 20, 21)])
    out = aligned_rows(
        torch.tensor([10, 11, 12, 20, 21]),
        torch.tensor([False, True, True, False, True]),
        support=support,
        cu_seqlens=torch.tensor([0, 3, 5]),
        inference_logprobs=torch.tensor([9.0, -1.0, -2.0, 9.0, -3.0]),
    )
    assert out.labels.tolist() == [11, 12, 0, 21, 0]
    assert out.active.tolist() == [True, True, False, True, False]
    assert out.per_token["inference_logprobs"].tolist() == [-1, -2, 0, -3, 0]
    assert out.support.ids.tolist() == [11, 12, 21]
    assert out.support.offsets.tolist() == [0, 1, 2, 2, 3, 3]
    assert out.support.kind.tolist() == [1, 1, 0, 1, 0]
    out.support.validate(out.labels, 22, active=out.active)


def test_prompt_rows_are_inactive_but_the_one_that_predicts_the_first_sampled_token_is_not():
    ids = torch.tensor([[1, 2, 3, 4, 5, 0], [6, 7, 8, 0, 0, 0]])
    sampled = torch.tensor([[0, 0, 0, 1, 1, 0], [0, 1, 1, 0, 0, 0]], dtype=torch.bool)
    out = aligned_rows(ids, sampled, support=None)
    assert out.labels.tolist() == [[0, 0, 4, 5, 0, 0], [7, 8, 0, 0, 0, 0]]
    assert out.active.tolist() == [
        [False, False, True, True, False, False],
        [True, True, False, False, False, False],
    ]
    assert out.per_token == {}
    assert out.support.kind.tolist() == [RowKind.NONE] * 12


def test_the_first_token_of_a_sequence_is_no_ones_label():
    """A first token inside the loss mask has no row before it in its own sequence."""
    out = aligned_rows(
        torch.tensor([5, 6, 7, 8]),
        torch.tensor([True, False, True, False]),
        support=None,
        cu_seqlens=torch.tensor([0, 2, 4]),
    )
    assert out.active.tolist() == [False] * 4
    assert out.labels.tolist() == [0] * 4


@PROPERTY
@given(tagged_rows(start=1, max_rows=12), st.data())
def test_packed_sequences_of_any_lengths(rows, data):
    """Empty sequences among them, at either end too."""
    n = len(rows)
    cuts = data.draw(st.lists(st.integers(0, n), max_size=5))
    mask = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    bounds = [0, *sorted(cuts), n]
    for dtype in (torch.uint8, torch.int32, torch.int64):
        check_against_loop(rows, mask, bounds, cu_seqlens=torch.tensor(bounds, dtype=dtype))
    for sequence in (bounds, tuple(bounds)):
        check_against_loop(rows, mask, bounds, cu_seqlens=sequence)
    check_against_loop(rows, mask, bounds, shape=(1, n), cu_seqlens=torch.tensor(bounds))
    check_against_loop(rows, mask, [0, n])


@pytest.mark.parametrize("shape", [(3, 4), (1, 5), (5, 1), (0, 4), (3, 0), (0,), (1,), (7,)])
def test_padded_sequences(shape):
    n = torch.Size(shape).numel()
    mask = [i % 3 != 1 for i in range(n)]
    width = shape[-1]
    bounds = list(range(0, n + 1, width)) if width else [0]
    check_against_loop(mixed_rows(n, start=1), mask, bounds, shape=shape)


def test_packed_and_padded_agree():
    rows, mask = mixed_rows(12, start=1), torch.arange(12) % 4 != 0
    values = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(12)
    packed = aligned_rows(
        tokens, mask, support=build(rows), cu_seqlens=torch.tensor([0, 4, 8, 12]), values=values
    )
    padded = aligned_rows(
        tokens.reshape(3, 4),
        mask.reshape(3, 4),
        support=build(rows),
        values=values.reshape(3, 4, 2),
    )
    assert torch.equal(packed.labels, padded.labels.flatten())
    assert torch.equal(packed.active, padded.active.flatten())
    assert torch.equal(packed.per_token["values"], padded.per_token["values"].flatten(0, 1))
    for got, expected in zip(padded.support.to_packed(), packed.support.to_packed(), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("length", [0, 1, 4])
def test_what_stands_in_one_sequence_leaves_the_others_untouched(length):
    """B between A and C, of any length and with any content, bitwise."""

    def align(b_rows, poison):
        a, c = mixed_rows(5, start=1), mixed_rows(4, start=50)
        rows = [*a, *b_rows, *c]
        n = len(rows)
        values = torch.arange(n, dtype=torch.float32)
        values[9 - 4 : n - 4] = poison
        values[n - 4 :] = torch.arange(4) + 100.0
        mask = torch.ones(n, dtype=torch.bool)
        mask[5 : n - 4] = poison == poison
        out = aligned_rows(
            torch.tensor([row.tag for row in rows]),
            mask,
            support=build(rows),
            cu_seqlens=torch.tensor([0, 5, n - 4, n]),
            values=values,
        )
        keep = torch.cat([torch.arange(5), torch.arange(n - 4, n)])
        kept = out.labels[keep], out.active[keep], out.per_token["values"][keep]
        return *kept, *out.support.select(keep).to_packed()

    expected = align(mixed_rows(length, start=20), 0.0)
    for other in (length, length + 3):
        for poison in (float("nan"), float("inf"), 1e30):
            got = align(mixed_rows(other, start=30), poison)
            for one, two in zip(got, expected, strict=True):
                assert torch.equal(one, two)


def test_the_last_row_is_replaced_and_not_multiplied():
    """NaN and infinities at the first token of a sequence do not reach the row before it."""
    values = torch.tensor([float("nan"), 1.0, float("inf"), 2.0])
    out = aligned_rows(
        torch.arange(4),
        torch.ones(4, dtype=torch.bool),
        support=None,
        cu_seqlens=torch.tensor([0, 2, 4]),
        values=values,
    )
    assert out.per_token["values"].tolist() == [1, 0, 2, 0]


def test_gradient_flows_through_the_shift():
    values = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mask = torch.ones(2, 3, dtype=torch.bool)
    out = aligned_rows(torch.ones(2, 3).long(), mask, support=None, values=values)
    upstream = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    (grad,) = torch.autograd.grad(out.per_token["values"], values, upstream)
    assert grad.tolist() == [[0, 1, 2], [0, 4, 5]]


def test_a_failed_row_moves_with_its_token():
    support = Support.from_rows([None, None, ([2], [0.0])], kind=[0, -1, 1])
    mask = torch.tensor([False, True, True])
    out = aligned_rows(torch.tensor([0, 1, 2]), mask, support=support)
    assert out.support.kind.tolist() == [RowKind.FAILED, RowKind.REPLAY, RowKind.NONE]
    with pytest.raises(ValueError, match="row 0 is active but the sampler failed"):
        out.support.validate(out.labels, 4, active=out.active)
    out.support.validate(out.labels, 4, active=torch.tensor([False, True, False]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": torch.tensor(3)}, r"input_ids must be \[T\] or \[B, L\], got \(\)"),
        ({"input_ids": torch.ones(1, 2, 2).long()}, r"input_ids must be .*, got \(1, 2, 2\)"),
        ({"input_ids": [0, 1, 2, 3]}, "^input_ids must be a tensor, got list$"),
        ({"input_ids": torch.arange(4.0)}, "input_ids must be integers, got torch.float32"),
        ({"input_ids": torch.ones(4).bool()}, "input_ids must be integers, got torch.bool"),
        ({"loss_mask": [True] * 4}, "^loss_mask must be a tensor, got list$"),
        ({"support": [None] * 4}, "^support must be a Support or None, got list$"),
        ({"advantages": [0.0] * 4}, "^advantages must be a tensor, got list$"),
        ({"advantages": None}, "^advantages must be a tensor, got NoneType$"),
        ({"loss_mask": torch.ones(4)}, "loss_mask must be bool, got torch.float32"),
        ({"loss_mask": torch.ones(3).bool()}, r"loss_mask must .* \(4,\), got \(3,\)"),
        ({"loss_mask": torch.ones(4, 1).bool()}, r"loss_mask must .* \(4,\), got \(4, 1\)"),
        ({"advantages": torch.ones(3)}, r"advantages must .* \(4,\), got \(3,\)"),
        ({"advantages": torch.ones(())}, r"advantages must .* \(4,\), got \(\)"),
        ({"advantages": torch.ones(2, 4)}, r"advantages must .* \(4,\), got \(2, 4\)"),
        ({"support": Support.empty(3)}, r"support must have one row a token \(4\), got 3"),
        ({"support": Support.empty(5)}, r"support must have one row a token \(4\), got 5"),
        (
            {"cu_seqlens": torch.tensor([0.0, 1.9, 4.0])},
            r"cu_seqlens must be integers \[S \+ 1\], got torch.float32",
        ),
        ({"cu_seqlens": [0.0, 4.0]}, "cu_seqlens must be integers .*, got torch.float32"),
        ({"cu_seqlens": torch.ones(2).bool()}, "cu_seqlens must be integers .*, got torch.bool"),
        ({"cu_seqlens": [0, None, 4]}, "cu_seqlens must be numbers, got None in position 1"),
        ({"cu_seqlens": [0, 3]}, r"cu_seqlens must run from 0 to 4, got \[0, 3\]"),
        ({"cu_seqlens": torch.tensor([0, 3])}, r"cu_seqlens must run from 0 to 4, got \[0, 3\]"),
        ({"cu_seqlens": torch.tensor([1, 4])}, r"cu_seqlens must run from 0 to 4, got \[1, 4\]"),
        ({"cu_seqlens": torch.tensor([0, 2, 5])}, "cu_seqlens must run from 0 to 4"),
        ({"cu_seqlens": torch.tensor([])}, r"cu_seqlens must run from 0 to 4, got \[\]"),
        ({"cu_seqlens": torch.tensor([[0, 4]])}, "cu_seqlens must run from 0 to 4"),
        (
            {"cu_seqlens": torch.tensor([0, 3, 1, 4])},
            r"cu_seqlens must not fall, got \[3, 1\] in sequence 1",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    good = {
        "input_ids": torch.arange(4),
        "loss_mask": torch.ones(4, dtype=torch.bool),
        "support": None,
    }
    with pytest.raises(ValueError, match=message):
        aligned_rows(**good | changes)


def test_packed_sequences_as_collators_give_them():
    """[1, T] with its bounds: the rows of [T], in the shape that was given."""
    ids, mask = torch.tensor([10, 11, 12, 20, 21]), torch.tensor([True, True, True, False, True])
    values, bounds = torch.arange(10.0).reshape(5, 2), torch.tensor([0, 3, 5], dtype=torch.int32)
    support = build(mixed_rows(5, start=1))
    flat = aligned_rows(ids, mask, support=support, cu_seqlens=bounds, values=values)
    one = aligned_rows(
        ids[None], mask[None], support=support, cu_seqlens=bounds, values=values[None]
    )
    assert one.labels.tolist() == [[11, 12, 0, 21, 0]]
    assert torch.equal(one.labels, flat.labels[None])
    assert torch.equal(one.active, flat.active[None])
    assert torch.equal(one.per_token["values"], flat.per_token["values"][None])
    for got, wanted in zip(one.support.to_packed(), flat.support.to_packed(), strict=True):
        assert torch.equal(got, wanted)
    with pytest.raises(ValueError, match=r"cu_seqlens must run from 0 to 5, got \[0, 1\]"):
        aligned_rows(ids[None], mask[None], support=None, cu_seqlens=[0, 1])


@pytest.mark.parametrize("shape", [(2, 2), (0, 4)])
def test_bounds_of_padded_sequences_are_refused(shape):
    mask = torch.ones(shape, dtype=torch.bool)
    with pytest.raises(
        ValueError, match=r"needs packed input_ids \[T\] or \[1, T\], got \(\d, \d\)"
    ):
        aligned_rows(mask.long(), mask, support=None, cu_seqlens=torch.tensor([0, 2, 4]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_no_result_depends_on_the_default_dtype(dtype):
    ids, mask = torch.arange(12), torch.arange(12) % 4 != 0
    values, support = torch.rand(12), build(mixed_rows(12, start=1))

    def everything() -> list[torch.Tensor]:
        found = []
        for evidence in (support, None):
            for bounds in ([0, 5, 12], torch.tensor([0, 5, 12]), None):
                rows = aligned_rows(ids, mask, support=evidence, cu_seqlens=bounds, values=values)
                found += [rows.labels, rows.active, rows.per_token["values"]]
                found += rows.support.to_packed()
        return found

    expected, before = everything(), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        got = everything()
    finally:
        torch.set_default_dtype(before)
    for value, wanted in zip(got, expected, strict=True):
        assert value.dtype == wanted.dtype
        assert torch.equal(value, wanted)


def test_rows_move_to_a_device_and_the_mask_stays():
    ids, mask = torch.tensor([[3, 4, 5]]), torch.ones(1, 3, dtype=torch.bool)
    rows = aligned_rows(ids, mask, support=None, advantages=torch.ones(1, 3))
    moved = rows.to("meta")
    assert moved.labels.device.type == moved.support.device.type == "meta"
    assert moved.per_token["advantages"].device.type == "meta"
    assert moved.active is rows.active


# --- rows chosen, and cut over ranks ---


@PROPERTY
@given(tagged_rows(start=1, min_rows=1, max_rows=12), st.data())
def test_chosen_rows_keep_everything_of_theirs(rows, data):
    """In any order, with repeats, of any shape, out of rows of any shape."""
    n = len(rows)
    at = data.draw(st.lists(st.integers(0, n - 1), max_size=12))
    chosen = torch.tensor(at, dtype=torch.int64)
    if data.draw(st.booleans()):
        at, chosen = at + at, torch.stack([chosen, chosen])
    shape = data.draw(st.sampled_from([(n,), (1, n), (n, 1)]))
    values = torch.arange(3.0 * n).reshape(*shape, 3)
    whole = AlignedRows(
        tags(rows).reshape(shape),
        torch.arange(n).reshape(shape) % 3 != 1,
        build(rows),
        {"values": values},
    )
    out = whole.select(chosen)
    assert out.labels.shape == out.active.shape == chosen.shape
    assert out.per_token["values"].shape == (*chosen.shape, 3)
    assert out.labels.flatten().tolist() == [rows[i].tag for i in at]
    assert out.active.flatten().tolist() == [i % 3 != 1 for i in at]
    expected = [[3.0 * i, 3.0 * i + 1, 3.0 * i + 2] for i in at]
    assert out.per_token["values"].reshape(-1, 3).tolist() == expected
    assert_rows(out.support, [rows[i] for i in at])
    masked = whole.select(whole.active)
    kept = [row for i, row in enumerate(rows) if i % 3 != 1]
    assert masked.labels.tolist() == [row.tag for row in kept]
    assert_rows(masked.support, kept)


def test_rows_chosen_from_a_list():
    rows = aligned_rows(torch.arange(5), torch.ones(5).bool(), support=None)
    assert rows.select([3, 0]).labels.tolist() == [4, 1]
    assert rows.select([]).labels.shape == (0,)
    assert len(rows.select([]).support) == 0


def test_rows_in_the_order_of_hidden_states_whose_first_dimension_is_the_sequence():
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    support = build([tagged_row(int(token), RowKind.REPLAY, 2, 3, 0) for token in ids.flatten()])
    rows = aligned_rows(ids, torch.ones(2, 3).bool(), support=support)
    turned = rows.select(torch.arange(6).view(2, 3).T)
    assert turned.labels.tolist() == [[2, 5], [3, 6], [0, 0]]
    labels = turned.labels.flatten()
    assert (turned.support.ids // STRIDE).tolist() == labels[turned.support.entry_rows].tolist()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0, 4]], r"rows must be in \[0, 4\), got 4 at position 1"),
        ([-1], r"rows must be in \[0, 4\), got -1 at position 0"),
        ([0.0], "rows must be row numbers"),
        (torch.ones(3).bool(), r"rows must be a mask \[4\], got \(3,\)"),
    ],
)
def test_rows_that_are_not_there_are_refused(rows, message):
    whole = aligned_rows(torch.arange(4), torch.ones(4).bool(), support=None)
    with pytest.raises(ValueError, match=message):
        whole.select(rows)


def cut_plainly(rows, rank, ranks, bounds, zigzag):
    """Each sequence in equal chunks, and this rank's of them."""
    own = []
    for start, stop in pairwise(bounds):
        chunks = rows[start:stop].chunk(2 * ranks if zigzag else ranks)
        if start < stop:
            own += [chunks[rank]] + ([chunks[2 * ranks - 1 - rank]] if zigzag else [])
    return torch.cat(own) if own else rows[:0]


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_row_is_on_one_rank(ranks, zigzag):
    for bounds in ([0, 12], [0, 12, 12, 36, 48], [0, 0, 24], [0, 0], [0]):
        n = bounds[-1]
        for form in (torch.tensor(bounds), bounds):
            parts = [
                context_parallel_rows([n], rank, ranks, cu_seqlens=form, zigzag=zigzag)
                for rank in range(ranks)
            ]
            for rank, part in enumerate(parts):
                wanted = cut_plainly(torch.arange(n), rank, ranks, bounds, zigzag)
                assert part.dtype == torch.int64
                assert torch.equal(part, wanted)
            assert torch.cat(parts).sort().values.tolist() == list(range(n))
    for shape in [(3, 12), (1, 24), (0, 12), (2, 0)]:
        rows = torch.arange(shape[0] * shape[1]).reshape(shape)
        for rank in range(ranks):
            got = context_parallel_rows(rows.shape, rank, ranks, zigzag=zigzag)
            each = [cut_plainly(row, rank, ranks, [0, shape[1]], zigzag) for row in rows]
            assert got.shape == (shape[0], shape[1] // ranks)
            assert got.tolist() == [row.tolist() for row in each]
    one = context_parallel_rows([1, 24], ranks - 1, ranks, cu_seqlens=[0, 12, 24], zigzag=zigzag)
    flat = context_parallel_rows([24], ranks - 1, ranks, cu_seqlens=[0, 12, 24], zigzag=zigzag)
    assert torch.equal(one, flat[None])


def test_a_sequence_that_straddles_ranks_is_predicted_across_the_cut():
    """[10 .. 14] [20 .. 26]: the last row before each cut has its label on the other rank."""
    ids = torch.tensor([10, 11, 12, 13, 14, 20, 21, 22, 23, 24, 25, 26])
    support = build([tagged_row(int(token), RowKind.REPLAY, 2, 3, 0) for token in ids])
    rows = aligned_rows(
        ids, torch.ones(12).bool(), support=support, cu_seqlens=[0, 5, 12], logq=-ids.float()
    )
    wanted = {
        True: [[11, 12, 13, 25, 26, 0], [14, 0, 21, 22, 23, 24]],
        False: [[11, 12, 13, 14, 0, 21], [22, 23, 24, 25, 26, 0]],
    }
    for zigzag, labels in wanted.items():
        for rank in range(2):
            own = context_parallel_rows([12], rank, 2, zigzag=zigzag)
            part = rows.select(own)
            assert part.labels.tolist() == labels[rank]
            assert part.active.tolist() == [label > 0 for label in labels[rank]]
            assert part.per_token["logq"].tolist() == (-part.labels.float()).tolist()
            found = part.labels[part.support.entry_rows]
            assert (part.support.ids // STRIDE).tolist() == found.tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([6], 0, 2), r"must divide into 4 chunks .* 2 ranks: pad it, got 6 rows in sequence 0"),
        (([5], 0, 2, None, False), "must divide into 2 chunks .* got 5 rows in sequence 0"),
        (([12], 0, 2, [0, 4, 10, 12]), "divide into 4 chunks .* got 6 rows in sequence 1"),
        (([12], 0, 2, [0, 4]), r"cu_seqlens must run from 0 to 12, got \[0, 4\]"),
        (([2, 4], 0, 2, [0, 8]), r"cu_seqlens needs packed input_ids \[T\] or \[1, T\]"),
        (([8], 2, 2), r"rank must be below ranks \(2\), got 2"),
        (([8], -1, 2), "rank must be an int of at least 0, got -1"),
        (([8], 0, 0), "ranks must be an int of at least 1, got 0"),
        (([], 0, 1), r"shape must be that of input_ids, \[T\] or \[B, L\], got \[\]"),
        (([1, 2, 4], 0, 1), "shape must be that of input_ids"),
        (([4.0], 0, 1), "shape must be that of input_ids"),
        (([-4], 0, 1), "shape must be that of input_ids"),
        ((8, 0, 1), "shape must be that of input_ids"),
    ],
)
def test_cuts_that_do_not_fit_are_refused(arguments, message):
    shape, rank, ranks, *rest = arguments
    options = dict(zip(("cu_seqlens", "zigzag"), rest, strict=False))
    with pytest.raises(ValueError, match=message):
        context_parallel_rows(shape, rank, ranks, **options)
