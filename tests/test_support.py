"""Support: what its constructors make, and that rows never part from what belongs to them."""

import copy
import io
import math
import pickle
import re
import unittest.mock
from collections.abc import Iterable
from itertools import pairwise
from multiprocessing.reduction import ForkingPickler

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    PROPERTY,
    STRIDE,
    TaggedRow,
    assert_dtypes,
    assert_host_facts,
    assert_rows,
    build,
    mixed_rows,
    tagged_row,
    tagged_rows,
    tags,
)
from torch.utils.data import DataLoader, Dataset

from rl_loss.alignment import aligned_rows
from rl_loss.capture import capture_support
from rl_loss.capture_stream import CaptureStream
from rl_loss.csr import RowKind, rows_of_entries, selected_entries
from rl_loss.packing import pack_entries
from rl_loss.support import Support

FAILED, NONE, REPLAY, HEAD, DRAWS = RowKind
NAN = math.nan


def log(*probabilities):
    return [math.log(p) for p in probabilities]


def fields(**changes):
    """Three good rows - REPLAY of two ids, NONE, HEAD of one - with the given changes."""
    good = {
        "ids": torch.tensor([4, 2, 9], dtype=torch.int32),
        "sampler_logprobs": torch.tensor(log(0.25, 0.75, 0.5)),
        "known": torch.ones(3, dtype=torch.bool),
        "offsets": torch.tensor([0, 2, 2, 3]),
        "kind": torch.tensor([1, 0, 2], dtype=torch.int8),
        "sampler_tail_mass": torch.tensor([0.0, 1.0, 0.5]),
    }
    return good | changes


def refused(message):
    return pytest.raises(ValueError, match=message)


# --- row kinds and constructors ---


def test_row_kinds_are_those_of_the_wire_format():
    assert [(kind.name, int(kind)) for kind in RowKind] == [
        ("FAILED", -1),
        ("NONE", 0),
        ("REPLAY", 1),
        ("HEAD", 2),
        ("DRAWS", 3),
    ]


def test_all_kinds_in_one_batch_from_rows():
    support = Support.from_rows(
        [
            ([5, 2, 7], log(0.5, 0.3, 0.2)),
            ([5, 2, 7], [math.log(0.5), 77.0, math.log(0.2)], [True, False, True]),
            ([5, 2, 7], None),
            ([9, 1], log(0.5, 0.25)),
            ([3, 3, 8], log(0.5, 0.5, 0.1)),
            None,
            None,
        ],
        kind=[REPLAY, REPLAY, REPLAY, HEAD, DRAWS, HEAD, FAILED],
    )
    # A row without evidence is NONE whatever `kind` says, unless it says FAILED.
    assert support.kind.tolist() == [REPLAY, REPLAY, REPLAY, HEAD, DRAWS, NONE, FAILED]
    assert support.ids.tolist() == [5, 2, 7, 5, 2, 7, 5, 2, 7, 9, 1, 3, 3, 8]
    assert support.offsets.tolist() == [0, 3, 6, 9, 11, 14, 14, 14]
    assert support.known.tolist() == [*[True] * 4, False, True, *[False] * 3, *[True] * 5]
    assert support.host.complete.tolist() == [True, False, False, True, True, False, False]
    torch.testing.assert_close(
        support.sampler_tail_mass, torch.tensor([0, 0.3, 1, 0.25, 0, 1, 1]), rtol=1e-6, atol=0
    )
    # Where q is known for every id, the tail of a REPLAY row, and that of draws, is exactly 0.
    assert support.sampler_tail_mass[[0, 4]].tolist() == [0, 0]
    assert_dtypes(support)
    assert_host_facts(support)
    assert repr(support) == (
        "Support(7 rows: 1 FAILED, 1 NONE, 3 REPLAY, 1 HEAD, 1 DRAWS; nnz=14, device=cpu)"
    )


def test_the_default_tail_is_summed_in_float64():
    """A tail of 1e-6 survives 4096 known ids, which a float32 sum would bury; none is negative."""
    generator = torch.Generator().manual_seed(0)
    q = torch.rand(4096, generator=generator, dtype=torch.float64)
    logprobs = (q / q.sum() * (1 - 1e-6)).log().float()
    exact = 1 - logprobs.double().exp().sum()
    over = [0.0, math.log(1e-3)]
    support = Support.from_rows(
        [(torch.arange(4096), logprobs), ([3, 5], over), ([3, 5], over)], kind=[HEAD, HEAD, DRAWS]
    )
    tail = support.sampler_tail_mass
    torch.testing.assert_close(tail[0].double(), exact, rtol=1e-6, atol=0)
    assert 5e-7 < tail[0] < 1.5e-6
    assert tail[1:].tolist() == [0, 0]


@PROPERTY
@given(tagged_rows(kinds=(REPLAY, DRAWS, NONE, FAILED)), st.booleans())
def test_the_default_tail_of_a_row_is_the_same_beside_any_other(rows, complete):
    """Where all rows are whole nothing is summed, and among others each is."""
    pairs = [(row.ids, row.logprobs, [True if complete else k for k in row.known]) for row in rows]
    kinds = [int(row.kind) for row in rows]
    alone = Support.from_rows(pairs, kind=kinds).sampler_tail_mass
    beside = Support.from_rows([*pairs, ([1, 2], [-1.0, -1.0])], kind=[*kinds, HEAD])
    assert torch.equal(beside.sampler_tail_mass[:-1], alone)


@pytest.mark.parametrize("tail_mass", [0.25, [0.25, 0.25], torch.tensor([0.25, 0.25])])
def test_a_given_tail_mass_is_kept(tail_mass):
    expected = [0.25, 0.25]
    rows = [([1], [-0.5]), ([2], [-0.5])]
    assert Support.from_rows(rows, tail_mass=tail_mass).sampler_tail_mass.tolist() == expected
    padded = torch.tensor([[1], [2]]), torch.full((2, 1), -0.5)
    assert Support.from_padded(*padded, tail_mass=tail_mass).sampler_tail_mass.tolist() == expected
    packed = pack_entries(padded[0][:, 0], padded[1][:, 0]), torch.ones(2, dtype=torch.int64)
    assert Support.from_packed(*packed, tail_mass=tail_mass).sampler_tail_mass.tolist() == expected


@pytest.mark.parametrize("kind", [2, RowKind.HEAD, [2, 2], torch.tensor([2, 2]), (2, RowKind.HEAD)])
def test_a_kind_is_one_value_or_one_a_row(kind):
    assert Support.from_rows([([1], [-0.5]), ([2], [-0.5])], kind=kind).kind.tolist() == [2, 2]


def test_from_rows_reads_tensors_arrays_tuples_and_generators():
    numpy = pytest.importorskip("numpy")
    rows = [
        (torch.tensor([4, 5], dtype=torch.int32), torch.tensor([-0.5, -1.0], dtype=torch.float64)),
        (numpy.array([6], dtype=numpy.int64), numpy.array([-2.0])),
        [(7, 8), (-0.25, NAN)],
        ([9, 10], [-0.25, NAN], [True, True]),
    ]
    support = Support.from_rows(row for row in rows)
    assert support.ids.tolist() == [4, 5, 6, 7, 8, 9, 10]
    assert support.sampler_logprobs.tolist()[:4] == [-0.5, -1, -2, -0.25]
    # NaN says unknown, unless `known` claims that it was recorded: then validate will object.
    assert support.known.tolist() == [True, True, True, True, False, True, True]
    assert_dtypes(support)


def test_from_packed_reads_what_is_unknown_and_what_failed():
    packed = pack_entries(torch.tensor([4, 2, 9, 9]), torch.tensor([-0.5, NAN, -1.0, -1.0]))
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8):
        counts = torch.tensor([2, -1, 0, 2], dtype=dtype)
        support = Support.from_packed(packed, counts, kind=[REPLAY, HEAD, NONE, DRAWS])
        assert support.kind.tolist() == [REPLAY, FAILED, NONE, DRAWS]
        assert support.offsets.tolist() == [0, 2, 2, 2, 4]
        assert support.ids.tolist() == [4, 2, 9, 9]
        assert support.known.tolist() == [True, False, True, True]
        tail = torch.tensor([1 - math.exp(-0.5), 1, 1, 0])
        torch.testing.assert_close(support.sampler_tail_mass, tail, rtol=1e-6, atol=0)
        assert_host_facts(support)


def test_from_padded_never_reads_at_padding():
    ids = torch.tensor([[[4, -1, 2], [-1, -1, -1]], [[-1, 7, -1], [1, 2, 3]]])
    logprobs = torch.tensor([[[-0.5, 9e9, NAN], [math.inf] * 3], [[NAN, -1, NAN], [-3, -2, -1]]])
    kind = [REPLAY, NONE, HEAD, REPLAY]
    support = Support.from_padded(ids, logprobs.double(), kind=kind)
    assert support.ids.tolist() == [4, 2, 7, 1, 2, 3]
    assert support.offsets.tolist() == [0, 2, 2, 3, 6]
    assert support.known.tolist() == [True, False, True, True, True, True]
    assert support.sampler_logprobs[support.known].tolist() == [-0.5, -1, -3, -2, -1]
    alone = Support.from_padded(ids.short(), None, kind=kind)
    assert alone.ids.tolist() == support.ids.tolist()
    assert not alone.known.any()
    assert alone.sampler_tail_mass.tolist() == [1, 1, 1, 1]
    assert_dtypes(support)


@pytest.mark.parametrize("n", [0, 1, 5])
def test_empty(n):
    support = Support.empty(n)
    assert support.kind.tolist() == [NONE] * n
    assert support.offsets.tolist() == [0] * (n + 1)
    assert support.sampler_tail_mass.tolist() == [1] * n
    assert support.nnz == 0
    assert_dtypes(support)
    assert_host_facts(support)
    support.validate(torch.zeros(n, dtype=torch.int64), 4)


def test_no_rows_from_any_constructor():
    none = torch.empty(0, dtype=torch.int64)
    for support in (
        Support.from_rows([]),
        Support.from_rows([], kind=[], tail_mass=[]),
        Support.from_packed(none, none),
        Support.from_padded(none.reshape(0, 3), torch.empty(0, 3)),
        Support.from_padded(none.reshape(0, 0), None),
        Support.cat([]),
        Support.from_vllm([]),
        Support.from_sglang([]),
    ):
        assert_rows(support, [])
    assert_rows(Support.cat([Support.empty(0), Support.from_rows([])])[0:0].select([]), [])


# --- what a constructor refuses ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": torch.tensor([4, 2, 9])}, r"ids must be torch.int32 \[3\], got torch.int64 \[3\]"),
        (
            {"ids": torch.zeros(1, 3, dtype=torch.int32)},
            r"ids must be torch.int32 \[3\], got torch.int32 \[1, 3\]",
        ),
        ({"ids": torch.tensor(4, dtype=torch.int32)}, r"ids must be .* got torch.int32 \[\]"),
        *[
            (
                {name: torch.zeros(3, dtype=dtype)},
                rf"^{name} must be in float32 .* got {dtype}, .*cast_forward_inputs=False",
            )
            for name in ("sampler_logprobs", "sampler_tail_mass")
            for dtype in (torch.bfloat16, torch.float16)
        ],
        (
            {"sampler_logprobs": torch.zeros(3).double()},
            r"sampler_logprobs must be torch.float32 \[3\], got torch.float64 \[3\]",
        ),
        (
            {"sampler_logprobs": torch.zeros(2)},
            r"sampler_logprobs must be torch.float32 \[3\], got torch.float32 \[2\]",
        ),
        ({"known": torch.ones(3)}, r"known must be torch.bool \[3\], got torch.float32 \[3\]"),
        (
            {"known": torch.ones(4).bool()},
            r"known must be torch.bool \[3\], got torch.bool \[4\]",
        ),
        (
            {"offsets": torch.tensor([0, 2, 2, 3]).int()},
            r"offsets must be torch.int64 \[4\], got torch.int32 \[4\]",
        ),
        (
            {"offsets": torch.tensor([0, 2, 3])},
            r"offsets must be torch.int64 \[4\], got torch.int64 \[3\]",
        ),
        (
            {"offsets": torch.tensor([0, 2, 2, 3, 3])},
            r"offsets must be torch.int64 \[4\], got torch.int64 \[5\]",
        ),
        (
            {"kind": torch.tensor([1, 0, 2])},
            r"kind must be torch.int8 \[3\], got torch.int64 \[3\]",
        ),
        ({"kind": torch.tensor(1, dtype=torch.int8)}, r"kind must be .*got torch.int8 \[\]"),
        (
            {"sampler_tail_mass": torch.zeros(3).double()},
            r"sampler_tail_mass must be torch.float32 \[3\], got torch.float64 \[3\]",
        ),
        (
            {"sampler_tail_mass": torch.zeros(3, 1)},
            r"sampler_tail_mass must be torch.float32 \[3\], got torch.float32 \[3, 1\]",
        ),
        ({"known": torch.ones(3, device="meta").bool()}, "known must be on cpu, got meta"),
        (
            {"offsets": torch.tensor([0, 2, 2, 2])},
            "offsets must run from 0 to nnz = 3, got 0 to 2",
        ),
        (
            {"offsets": torch.tensor([1, 2, 2, 3])},
            "offsets must run from 0 to nnz = 3, got 1 to 3",
        ),
        (
            {"offsets": torch.tensor([0, 2, 1, 3])},
            "offsets must not fall, got 2, 1 in row 1",
        ),
        (
            {"kind": torch.tensor([1, 0, 4], dtype=torch.int8)},
            r"kind must be a RowKind \(-1 to 3\), got 4 in row 2",
        ),
        (
            {"kind": torch.tensor([1, -2, 2], dtype=torch.int8)},
            r"kind must be a RowKind \(-1 to 3\), got -2 in row 1",
        ),
        (
            {"kind": torch.tensor([0, 0, 2], dtype=torch.int8)},
            "ids must be empty in a row of kind NONE, got 2 in row 0",
        ),
        (
            {"kind": torch.tensor([1, 0, -1], dtype=torch.int8)},
            "ids must be empty in a row of kind FAILED, got 1 in row 2",
        ),
        (
            {"ids": torch.tensor([4, 2, -7], dtype=torch.int32)},
            "ids must not be negative, got -7 in row 2",
        ),
        (
            {"ids": torch.tensor([4, 4, 9], dtype=torch.int32)},
            "ids must be unique in a REPLAY row, got 4 twice in row 0",
        ),
    ],
)
def test_malformed_fields_are_refused(changes, message):
    Support(**fields())
    with refused(message):
        Support(**fields(**changes))


@pytest.mark.parametrize("kind", [REPLAY, HEAD])
def test_repeats_are_refused_where_ids_are_a_set(kind):
    """FAULTS 6: [3, 3, 1] and a repeat that is not adjacent, at any place in the batch."""
    for ids in ([3, 3, 1], [3, 1, 3], [2**31 - 1, 3, 2**31 - 1]):
        logprobs = log(0.25, 0.5, 0.25)
        repeated = ids[0]
        with refused(f"unique in a {kind.name} row, got {repeated} twice in row 1"):
            Support.from_rows([([3, 1], log(0.5, 0.5)), (ids, logprobs)], kind=kind)
        Support.from_rows([([3, 1], log(0.5, 0.5)), (ids, logprobs)], kind=[kind, DRAWS])
    # The same id in two rows is no repeat, nor across a row bound.
    Support.from_rows([([1, 3], log(0.5, 0.5)), ([3, 1], log(0.5, 0.5))], kind=kind)


@PROPERTY
@given(
    st.lists(
        st.tuples(st.sampled_from([REPLAY, HEAD, DRAWS]), st.lists(st.integers(0, 4), max_size=4)),
        max_size=5,
    )
)
def test_repeats_are_found_exactly(rows):
    bad = [i for i, (kind, ids) in enumerate(rows) if kind != DRAWS and len(set(ids)) < len(ids)]
    pairs = [(ids, [-1.0] * len(ids)) for _, ids in rows]
    kinds = [int(kind) for kind, _ in rows]
    if not bad:
        built = Support.from_rows(pairs, kind=torch.tensor(kinds, dtype=torch.int64))
        assert built.ids.tolist() == [token for _, ids in rows for token in ids]
        return
    with refused(f"twice in row {bad[0]}$"):
        Support.from_rows(pairs, kind=kinds)


def test_rows_in_order_are_not_sorted(monkeypatch):
    """Ascending rows, empty ones between them, and draws, which may repeat, need no look."""
    rows = [([4, 7, 9], [-1.0] * 3), None, ([0, 4], [-1.0] * 2), ([3, 3, 1], [-1.0] * 3), None]
    kinds = [REPLAY, REPLAY, HEAD, DRAWS, REPLAY]
    sorted_rows = []

    def select(offsets, rows):
        sorted_rows.append(rows.tolist())
        return selected_entries(offsets, rows)

    monkeypatch.setattr("rl_loss.row_parsing.selected_entries", select)
    Support.from_rows(rows, kind=kinds)
    assert sorted_rows in ([], [[]])
    rows[2] = ([4, 0], [-1.0] * 2)
    Support.from_rows(rows, kind=kinds)
    assert sorted_rows[-1] == [2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_evidence_in_half_precision_is_refused_by_each_constructor(dtype):
    numpy = pytest.importorskip("numpy")
    ids, logprobs = torch.tensor([[1, 2]]), torch.tensor([[-0.5, -1.0]])
    half = logprobs.to(dtype)
    message = r"logprobs must be in float32 or float64, got .*16, .*cast_forward_inputs=False"
    rows = [(ids[0], half[0]), (ids[0].tolist(), list(half[0])), ([1, 2], half[0], [True, False])]
    if dtype == torch.float16:
        rows.append(([1, 2], half[0].numpy().astype(numpy.float16)))
    for row in rows:
        with refused(r"rows\[1\]: " + message):
            Support.from_rows([None, row])
    with refused("^" + message):
        Support.from_padded(ids, half)
    tail = torch.zeros(1, dtype=dtype)
    for make in (
        lambda: Support.from_rows([([1, 2], [-0.5, -1.0])], tail_mass=tail),
        lambda: Support.from_padded(ids, logprobs, tail_mass=tail[0]),
        lambda: Support.from_packed(
            pack_entries(ids[0], logprobs[0]), torch.tensor([2]), tail_mass=tail
        ),
        lambda: build(mixed_rows(1)).replace(sampler_tail_mass=tail),
    ):
        with refused(r"^(sampler_)?tail_mass must be in float32 .*cast_forward_inputs=False"):
            make()


def test_malformed_rows_are_refused():
    good = ([1, 2], log(0.5, 0.5))
    for row, message in [
        (7, r"rows\[1\] must be \(ids, logprobs\).* got 7"),
        (([1],), r"rows\[1\] must be \(ids, logprobs\)"),
        (([1], [0.0], [True], 0), r"rows\[1\] must be \(ids, logprobs\)"),
        (([1.5], [0.0]), r"rows\[1\]: ids must be integers \[K\], got torch.float32 \[1\]"),
        (([True], [0.0]), r"rows\[1\]: ids must be integers \[K\], got torch.bool \[1\]"),
        (([[1, 2]], [[0.0, 0.0]]), r"rows\[1\]: ids must be integers \[K\], got torch.int64"),
        (([1, -1], log(0.5, 0.5)), r"rows\[1\]: ids must be in \[0, 2\*\*31\), got -1"),
        (([2**31, 1], log(0.5, 0.5)), rf"rows\[1\]: ids must be in .*, got {2**31}"),
        (([2**32 + 1], [0.0]), rf"rows\[1\]: ids must be in .*, got {2**32 + 1}"),
        (([1, 2], [0.0]), r"rows\[1\]: logprobs .*must be \[2\] as ids, got \[1\]"),
        (([1], [0.0], [True, False]), r"rows\[1\]: .* must be \[1\] .* torch.bool \[2\]"),
        (([1], [0.0], [1]), r"rows\[1\]: .*known \(bool\) .* torch.int64 \[1\]"),
        ("ab", r"rows\[1\] must be \(ids, logprobs\).* got 'ab'"),
        (("ab", None), r"rows\[1\]: ids must be numbers, got 'ab'"),
        (([1, None], [0.0, 0.0]), r"rows\[1\]: ids must be numbers, got None in position 1"),
        (([1, 2], [-0.5, None]), r"rows\[1\]: logprobs must be numbers, got None in position 1"),
        (([1, 2], "ab"), r"rows\[1\]: logprobs must be numbers, got 'ab'"),
        (([1], [0.0], [None]), r"rows\[1\]: known must be numbers, got None in position 0"),
        (([1j], [0.0]), r"rows\[1\]: ids must be integers \[K\], got torch.complex64 \[1\]"),
        (([1], [1j]), r"rows\[1\]: logprobs must be real numbers, got torch.complex64"),
        (([1], [True]), r"rows\[1\]: logprobs must be real numbers, got torch.bool"),
    ]:
        with refused(message):
            Support.from_rows([good, row, good])
    with refused("rows must be a sequence of rows, got 5"):
        Support.from_rows(5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": [1]}, r"kind must be one value or one a row \[2\], got \(1,\)"),
        ({"kind": [1, 1, 1]}, r"kind must be one value or one a row \[2\], got \(3,\)"),
        ({"kind": [1.0, 2.0]}, "kind must convert to torch.int8, got torch.float32"),
        ({"kind": True}, "kind must convert to torch.int8, got torch.bool"),
        ({"kind": 4}, "kind must be a RowKind .* got 4 in row 0"),
        ({"kind": [1, -2]}, "kind must be a RowKind .* got -2 in row 1"),
        # What would wrap around to another kind in int8.
        ({"kind": [1, 257]}, "kind must be a RowKind .* got 257 in row 1"),
        ({"kind": 256}, "kind must be a RowKind .* got 256 in row 0"),
        ({"tail_mass": [0.0]}, r"tail_mass must be one value or one a row \[2\], got \(1,\)"),
        ({"tail_mass": torch.zeros(2, 1)}, r"tail_mass must be .* got \(2, 1\)"),
        ({"kind": "REPLAY"}, "kind must be numbers, got 'REPLAY'"),
        ({"kind": [1, "HEAD"]}, "kind must be numbers, got 'HEAD' in row 1"),
        ({"kind": None}, "kind must be numbers, got None"),
        ({"kind": torch.tensor([1, 200], dtype=torch.uint8)}, "kind must .* got 200 in row 1"),
        ({"tail_mass": [0.0, None]}, "tail_mass must be numbers, got None in row 1"),
        ({"tail_mass": "x"}, "tail_mass must be numbers, got 'x'"),
        ({"tail_mass": 1j}, "tail_mass must convert to torch.float32, got torch.complex64"),
        ({"tail_mass": [True, False]}, "tail_mass must convert to torch.float32, got torch.bool"),
        ({"kind": [1, 0]}, "ids must be empty in a row of kind NONE, got 1 in row 1"),
        ({"kind": [-1, 1]}, "ids must be empty in a row of kind FAILED, got 1 in row 0"),
    ],
)
def test_malformed_kinds_and_tails_are_refused_by_each_constructor(arguments, message):
    ids, logprobs = torch.tensor([[1], [2]]), torch.zeros(2, 1)
    with refused(message):
        Support.from_rows([([1], [0.0]), ([2], [0.0])], **arguments)
    with refused(message):
        Support.from_padded(ids, logprobs, **arguments)
    with refused(message):
        packed = pack_entries(ids[:, 0], logprobs[:, 0])
        Support.from_packed(packed, torch.tensor([1, 1]), **arguments)


@pytest.mark.parametrize(
    ("packed", "counts", "message"),
    [
        (torch.zeros(3, dtype=torch.int32), [3], "packed must be int64, got torch.int32"),
        (torch.zeros(3), [3], "packed must be int64, got torch.float32"),
        (torch.zeros(1, 3, dtype=torch.int64), [3], r"packed must be \[nnz\], got \(1, 3\)"),
        (None, [1, -2, 2], "counts must be -1 or more, got -2 in row 1"),
        (None, [1, -1, 1], "counts add up to 2 entries, got 3"),
        (None, [2, 2], "counts add up to 4 entries, got 3"),
        (None, [1.0, 2.0], r"counts must be integers \[N\], got torch.float32 \(2,\)"),
        (None, [True, True], r"counts must be integers \[N\], got torch.bool \(2,\)"),
        (None, [[3]], r"counts must be integers \[N\], got torch.int64 \(1, 1\)"),
    ],
)
def test_malformed_wire_rows_are_refused(packed, counts, message):
    if packed is None:
        packed = pack_entries(torch.tensor([1, 2, 3]), torch.zeros(3))
    with refused(message):
        Support.from_packed(packed, torch.tensor(counts))


def test_lists_where_tensors_are_needed_are_named():
    ids, logprobs = torch.tensor([[1], [2]]), torch.zeros(2, 1)
    packed, counts = pack_entries(ids[:, 0], logprobs[:, 0]), torch.tensor([1, 1])
    for make, name in [
        (lambda: Support.from_padded(ids.tolist(), logprobs), "ids"),
        (lambda: Support.from_padded(ids, logprobs.tolist()), "logprobs"),
        (lambda: Support.from_packed(packed.tolist(), counts), "packed"),
        (lambda: Support.from_packed(packed, [1, 1]), "counts"),
        *[(lambda n=n: Support(**fields(**{n: fields()[n].tolist()})), n) for n in fields()],
    ]:
        with refused(f"^{name} must be a tensor, got list$"):
            make()
    with refused(r"^supports\[1\] must be a Support, got list$"):
        Support.cat([Support.empty(1), [1]])


def test_packed_and_counts_on_two_devices_are_refused():
    with refused("packed and counts must be on one device, got meta, cpu"):
        Support.from_packed(
            torch.empty(0, dtype=torch.int64, device="meta"), torch.zeros(1, dtype=torch.int64)
        )


@pytest.mark.parametrize(
    ("ids", "logprobs", "message"),
    [
        (torch.tensor([1, 2]), torch.zeros(2), r"ids must be integers \[..., K\], got torch.int64"),
        (torch.zeros(1, 2), torch.zeros(1, 2), r"ids must be integers .*, got torch.float32"),
        (torch.zeros(1, 2).bool(), torch.zeros(1, 2), "ids must be integers .*, got torch.bool"),
        (torch.zeros(1, 2).cfloat(), None, "ids must be integers .*, got torch.complex64"),
        (torch.tensor([[1]]), torch.zeros(1, 1, device="meta"), "logprobs must be on cpu .* meta"),
        (torch.tensor([[1, 2]]), torch.zeros(1, 3), r"logprobs must .* \(1, 2\), got \(1, 3\)"),
        (torch.tensor([[1], [-2]]), torch.zeros(2, 1), "ids must .*, got -2 in row 1"),
        (torch.tensor([[1], [2**31]]), torch.zeros(2, 1), f"ids must .*, got {2**31} in row 1"),
        (torch.tensor([[1], [2**32 + 5]]), torch.zeros(2, 1), f"got {2**32 + 5} in row 1"),
    ],
)
def test_malformed_padded_rows_are_refused(ids, logprobs, message):
    with refused(message):
        Support.from_padded(ids, logprobs)


def test_a_wrong_slice_or_selection_is_refused():
    support = build(mixed_rows(4))
    for rows in (2, slice(0, 4, 2), slice(None, None, -1), [0, 1], torch.tensor([1])):
        with refused(re.escape(f"a Support is sliced as support[i:j], got [{rows!r}]")):
            support[rows]
    for rows, message in [
        ([0, 4], r"rows must be in \[0, 4\), got 4 at position 1"),
        ([1, 2, -1], r"rows must be in \[0, 4\), got -1 at position 2"),
        ([0.0], r"rows must be row numbers \[M\], got torch.float32 \(1,\)"),
        ([0, None], "rows must be numbers, got None in position 1"),
        (torch.tensor([1j]), r"rows must be row numbers \[M\], got torch.complex64"),
        (torch.tensor([[0]]), r"rows must be row numbers \[M\], got torch.int64 \(1, 1\)"),
        (torch.tensor([True, False]), r"rows must be a mask \[4\], got \(2,\)"),
    ]:
        with refused(message):
            support.select(rows)
    with refused("supports must be on one device, got .'cpu', 'meta'."):
        Support.cat([support, support.to("meta")])


SMALL = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", SMALL)
def test_row_numbers_and_counts_of_every_integer_dtype(dtype):
    """Torch takes a uint8 index for a mask, and refuses int8 and int16 ones."""
    rows = mixed_rows(6)
    for picks in ([1, 1, 0, 5, 0, 1], [4, 2]):
        chosen = build(rows).select(torch.tensor(picks, dtype=dtype))
        assert_rows(chosen, [rows[i] for i in picks])
    ids = torch.arange(200)
    packed = pack_entries(ids, torch.full((200,), -math.log(200)))
    many = torch.tensor([100, 0, 100], dtype=dtype)
    assert Support.from_packed(packed, many).offsets.tolist() == [0, 100, 100, 200]


def test_uint8_255_is_neither_padding_nor_a_failed_row():
    ids = torch.tensor([[255, 3], [7, 255]], dtype=torch.uint8)
    support = Support.from_padded(ids, torch.full((2, 2), math.log(0.5)))
    assert support.ids.tolist() == [255, 3, 7, 255]
    assert support.offsets.tolist() == [0, 2, 4]
    packed = pack_entries(torch.arange(256), torch.full((256,), -math.log(256)))
    support = Support.from_packed(packed, torch.tensor([255, 1], dtype=torch.uint8))
    assert support.offsets.tolist() == [0, 255, 256]
    assert support.kind.tolist() == [REPLAY, REPLAY]


@pytest.mark.parametrize("tail_mass", [None, [0.0, 0.5]])
def test_the_evidence_has_no_gradient(tail_mass):
    logprobs = torch.tensor([[-0.5, -1.0], [-0.7, -0.7]], requires_grad=True)
    if tail_mass is not None:
        tail_mass = torch.tensor(tail_mass, requires_grad=True)
    ids = torch.tensor([[1, 2], [3, 4]])
    for support in (
        Support.from_padded(ids, logprobs, tail_mass=tail_mass),
        Support.from_rows(list(zip(ids, logprobs, strict=True)), tail_mass=tail_mass),
    ):
        assert support.sampler_logprobs.tolist() == logprobs.flatten().tolist()
        assert not support.sampler_logprobs.requires_grad
        assert not support.sampler_tail_mass.requires_grad


def test_it_is_immutable():
    support = build(mixed_rows(4))
    for name in ("ids", "host", "plan", "new"):
        with pytest.raises(AttributeError, match=f"a Support is immutable, {name} cannot be set"):
            setattr(support, name, support.ids + 1)
    with pytest.raises(AttributeError, match="a Support is immutable, ids cannot be deleted"):
        del support.ids
    assert_rows(support, mixed_rows(4))


def test_fields_are_replaced_in_a_new_support():
    rows = [([5, 2], log(0.5, 0.5)), ([3], [-1.0])]
    support = Support.from_rows(rows, kind=[REPLAY, HEAD])
    other = support.replace(
        known=torch.tensor([True, False, True]), kind=torch.tensor([1, 3], dtype=torch.int8)
    )
    assert_host_facts(other)
    assert other.kind.tolist() == [REPLAY, DRAWS]
    assert (other.plan.any_head, other.plan.any_draws) == (False, True)
    assert other.ids is support.ids
    assert support.known.all()
    with refused("ids must be unique in a REPLAY row, got 5 twice in row 0"):
        support.replace(ids=torch.tensor([5, 5, 3], dtype=torch.int32))
    with pytest.raises(TypeError, match="unexpected keyword argument 'logprobs'"):
        support.replace(logprobs=support.sampler_logprobs)


# --- what does not depend on torch's default dtype ---


def built_everywhere():
    """A support from each constructor, and what its operations give."""
    numpy = pytest.importorskip("numpy")
    q, f32 = [-0.1, -2.4], torch.float32
    ids = torch.tensor([[4, 2], [9, -1]])
    logprobs = torch.tensor([q, [-0.3, NAN]], dtype=f32)
    packed, counts = pack_entries(ids.flatten()[:3], logprobs.flatten()[:3]), torch.tensor([2, 1])
    made = [
        Support.empty(2),
        Support.from_rows([([4, 2], q), ([9], [-0.3])], tail_mass=[0.1, 0.7]),
        Support.from_rows([([4, 2], q), ([9], [-0.3])], kind=[REPLAY, HEAD], tail_mass=0.1),
        Support.from_rows([([4, 2], None), None, ([], [])], kind=[HEAD, NONE, NONE]),
        Support.from_rows([(torch.tensor([4, 2]), None), ((7,), (-0.1,))]),
        Support.from_rows([([4, 2], q, [True, False]), ([], [], [])], kind=[HEAD, NONE]),
        Support.from_rows([(numpy.array([4, 2]), numpy.array(q)), ([1], [0])]),
        Support.from_rows([([4, 2], torch.tensor(q, dtype=torch.float64))], kind=HEAD),
        Support.from_packed(packed, counts, kind=HEAD),
        Support.from_packed(packed, counts, tail_mass=(0.1, 0.7)),
        Support.from_padded(ids, None),
        Support.from_padded(ids, logprobs, kind=[REPLAY, DRAWS]),
        Support.from_padded(ids, logprobs.double(), kind=HEAD),
    ]
    made += [Support.cat(made), made[1][1:], made[2].select([1, 1, 0]), made[1].replace()]
    made += [Support.stack([made[0], None, made[1]], 4, start=[0, 4, 1]), *made[2].split(1)]
    made += [Support.from_bytes(*s.to_bytes()) for s in made]
    made += [Support.from_padded(*s.to_padded()) for s in made]
    made += [Support.from_packed(*s.to_packed()) for s in made]
    return made + [pickle.loads(pickle.dumps(s)) for s in made]


def captured_everywhere():
    """Rows of each kind captured from logits of each dtype, at once and by a stream."""
    stream, made = CaptureStream(), []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        generator = torch.Generator().manual_seed(0)
        logits = 4 * torch.randn(5, 40, generator=generator, dtype=torch.float64)
        logits = torch.where(logits < -5, -math.inf, logits).to(dtype)
        logits[4] = math.nan
        for kind in (NONE, REPLAY, HEAD, DRAWS, torch.tensor([0, 1, 2, 3, 1], dtype=torch.int8)):
            rows = capture_support(
                logits, logits.argmax(1), kind=kind, top=3, draws=2, generator=generator
            )
            stream.add(rows)
            made += [rows.packed, rows.counts, rows.kind, rows.tail_mass, rows.sampled_logprobs]
            made += [rows.needed, *rows.to_support().to_packed()]
    for support, logprobs in stream.collect():
        made += [*support.to_packed(), *support.to_padded(), logprobs]
    return made


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float64], ids=str)
def default_dtype(request):
    before = torch.get_default_dtype()
    yield request.param
    torch.set_default_dtype(before)


def test_no_captured_row_depends_on_the_default_dtype(default_dtype):
    expected = captured_everywhere()
    torch.set_default_dtype(default_dtype)
    for got, wanted in zip(captured_everywhere(), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_no_result_depends_on_the_default_dtype(default_dtype):
    expected = built_everywhere()
    torch.set_default_dtype(default_dtype)
    for got, wanted in zip(built_everywhere(), expected, strict=True):
        assert_dtypes(got)
        assert_host_facts(got)
        for name in fields():
            one, other = getattr(got, name), getattr(wanted, name)
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        ids, logprobs, _, tail = got.to_padded()
        assert (ids.dtype, logprobs.dtype, tail.dtype) == (torch.int32, *[torch.float32] * 2)
    with refused("kind must convert to torch.int8, got torch.float32"):
        Support.from_rows([([1], [0.0])], kind=1.0)


# --- rows and what belongs to them move together ---


@PROPERTY
@given(tagged_rows())
def test_from_rows_keeps_every_row(rows):
    assert_rows(build(rows), rows)


@PROPERTY
@given(tagged_rows(), st.integers(-10, 10), st.integers(-10, 10), st.integers(-10, 10))
def test_slices(rows, start, stop, inner):
    support, labels = build(rows), tags(rows)
    part = support[start:stop]
    assert_rows(part, rows[start:stop])
    assert tags(rows[start:stop]).tolist() == labels[start:stop].tolist()
    assert_rows(part[inner:], rows[start:stop][inner:])
    assert_rows(support[:], rows)


@PROPERTY
@given(tagged_rows(), tagged_rows(start=100), tagged_rows(start=200, max_rows=2))
def test_concatenation(first, second, third):
    parts = [build(first), build(second), build(third)]
    assert_rows(Support.cat(parts), first + second + third)
    # Slices of slices are laid end to end as well: their offsets do not begin at 0.
    whole = Support.cat(parts)
    cut = len(whole) // 2
    assert_rows(
        Support.cat([whole[cut:], whole[:cut]]),
        (first + second + third)[cut:] + (first + second + third)[:cut],
    )


def filler(count):
    return [TaggedRow(0, NONE, [], [], [], tail_mass=1.0)] * count


def assert_same_bits(one, other):
    """Every field, and what the host knows, bit for bit; also what no one may read."""
    for name in fields():
        got, wanted = getattr(one, name), getattr(other, name)
        assert (got.dtype, got.device) == (wanted.dtype, wanted.device)
        if got.dtype == torch.float32:
            got, wanted = got.view(torch.int32), wanted.view(torch.int32)
        assert torch.equal(got, wanted), name
    for got, wanted in zip(one.host, other.host, strict=True):
        assert torch.equal(got, wanted)


@st.composite
def sequences(draw):
    """Rows of up to four sequences (None: without evidence), and where each begins."""
    count = draw(st.integers(0, 4))
    rows = [draw(st.none() | tagged_rows(start=100 * b, max_rows=4)) for b in range(count)]
    return rows, draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))


@PROPERTY
@given(sequences(), st.integers(0, 2), st.booleans())
def test_stacked_sequences(made, room, given_length):
    rows, starts = made
    supports = [None if one is None else build(one) for one in rows]
    rows = [one or [] for one in rows]
    longest = max((at + len(one) for at, one in zip(starts, rows, strict=True)), default=0)
    length = longest + room if given_length else longest
    expected = []
    for one, at in zip(rows, starts, strict=True):
        expected += [*filler(at), *one, *filler(length - at - len(one))]
    stacked = Support.stack(iter(supports), length if given_length else None, start=starts)
    assert_rows(stacked, expected)
    # The same by operations on single sequences.
    parts = [one if one is not None else Support.empty(0) for one in supports]
    each = [
        Support.cat([Support.empty(at), one, Support.empty(length - at - len(one))])
        for at, one in zip(starts, parts, strict=True)
    ]
    assert_same_bits(stacked, Support.cat(each))
    at = max(starts, default=0)
    together = Support.stack(supports, length + at, start=at)
    apart = Support.stack(supports, length + at, start=torch.full((len(rows),), at).byte())
    assert_same_bits(together, apart)


@PROPERTY
@given(tagged_rows(), st.integers(0, 4), st.data())
def test_split_undoes_cat_and_stack(rows, cut, data):
    """From a slice too, whose entries do not begin where their storage does."""
    support, rows = build(rows)[cut:], rows[cut:]
    cuts = data.draw(st.lists(st.integers(0, len(rows)), max_size=4))
    bounds = [0, *sorted(cuts), len(rows)]
    lengths = [stop - start for start, stop in pairwise(bounds)]
    for form in (lengths, tuple(lengths), torch.tensor(lengths, dtype=torch.int16)):
        parts = support.split(form)
        assert len(parts) == len(lengths)
        for part, (start, stop) in zip(parts, pairwise(bounds), strict=True):
            assert_rows(part, rows[start:stop])
            assert part.ids.data_ptr() == support[start:stop].ids.data_ptr()  # a view
        assert_same_bits(Support.cat(parts), support)
    longest = max(lengths) + 1
    padded = Support.stack(parts, longest)
    back = [one[:n] for one, n in zip(padded.split(longest), lengths, strict=True)]
    assert_same_bits(Support.cat(back), support)
    held = torch.arange(longest) < torch.tensor(lengths)[:, None]
    assert_same_bits(padded.select(held.flatten()), support)
    # Padded on the left.
    left = Support.stack(parts, longest, start=[longest - n for n in lengths])
    assert_same_bits(left.select(held.flip(1).flatten()), support)


def test_sequences_that_do_not_fit_are_named():
    two, three = build(mixed_rows(2)), build(mixed_rows(3))
    for supports, options, message in [
        (
            [two, three],
            {"length": 2},
            r"supports\[1\] must fit into length 2 from start 0 on.* 3 rows",
        ),
        (
            [two, None, two],
            {"length": 3, "start": [1, 4, 2]},
            r"supports\[1\] .* start 4 on, got 0",
        ),
        ([two, two], {"length": 3, "start": 2}, r"supports\[0\] .* from start 2 on, got 2 rows"),
        ([two, two], {"start": [0, -1]}, r"supports\[1\] must fit .* from start -1 on"),
        ([two, two], {"start": [0]}, r"start must be one for all or one a sequence \[2\], got 1"),
        ([two, two], {"start": 0.5}, "start must be an int or one a sequence, got torch.float32"),
        ([two, two], {"start": [0, None]}, "start must be numbers, got None in sequence 1"),
        ([two], {"length": -1}, "length must be an int of at least 0, got -1"),
        ([two], {"length": 2.0}, "length must be an int of at least 0, got 2.0"),
        ([None, 3, two], {}, r"supports\[1\] must be a Support or None, got int"),
        ([two, two.to("meta")], {}, "supports must be on one device, got .'cpu', 'meta'."),
    ]:
        with refused(message):
            Support.stack(supports, **options)
    support = build(mixed_rows(6))
    for lengths, message in [
        ([2, 3], "lengths must add up to 6 rows, got 5"),
        ([4, 3], "lengths must add up to 6 rows, got 7"),
        ([7, -1], "lengths must be 0 or more, got -1 of sequence 1"),
        ([], "lengths must add up to 6 rows, got 0"),
        (4, "lengths must add up to 6 rows, got 4"),
        (0, "lengths must be an int of at least 1, got 0"),
        (2.0, "lengths must be an int or one a sequence, got torch.float32"),
        ([[6]], r"lengths must be an int or one a sequence, got torch.int64 \(1, 1\)"),
        ([3, "b"], "lengths must be numbers, got 'b' in sequence 1"),
    ]:
        with refused(message):
            support.split(lengths)


def test_no_sequences_and_sequences_of_one_length():
    rows = mixed_rows(6)
    support = build(rows)
    for i, part in enumerate(support.split(2)):
        assert_rows(part, rows[2 * i : 2 * i + 2])
    assert [len(part) for part in support.split(6)] == [6]
    assert support[:0].split(3) == support[:0].split([]) == []
    assert_rows(Support.stack([]), [])
    assert_rows(Support.stack([], 5), [])
    assert_rows(Support.stack([None, None], 2), filler(4))
    assert_rows(Support.stack([None, support[:0]]), [])
    one = Support.stack([support])
    assert_same_bits(one, support)
    assert one.ids.data_ptr() != support.ids.data_ptr()


# --- supports as objects, one a sequence ---


def arrays(numpy, supports):
    """NumPy's ways to an array of objects."""
    by_slice, by_index = (numpy.empty(len(supports), dtype=object) for _ in range(2))
    by_slice[:] = supports
    for i, support in enumerate(supports):
        by_index[i] = support
    yield from (by_slice, by_index, numpy.array(supports, dtype=object), numpy.array(supports))
    yield numpy.fromiter(supports, dtype=object, count=len(supports))
    yield numpy.concatenate([numpy.array(supports[:2]), numpy.array(supports[2:], dtype=object)])
    yield numpy.array([supports] * 2, dtype=object)[1]


@pytest.mark.parametrize("sizes", [[3, 1, 0, 2], [2, 2, 2], [1], [5, 0]])
def test_an_array_of_objects_holds_supports(sizes):
    """As verl carries what is no tensor: cut, joined, reordered, repeated, sent."""
    numpy = pytest.importorskip("numpy")
    rows = [mixed_rows(size, start=100 * i) for i, size in enumerate(sizes)]
    supports = [build(one) for one in rows]
    for array in arrays(numpy, supports):
        assert array.shape == (len(sizes),)
        assert array.dtype == object
        assert all(got is support for got, support in zip(array, supports, strict=True))
    alone = numpy.asarray(supports[0])
    assert alone.shape == ()
    assert alone[()] is supports[0]
    assert all(one is supports[0] for one in numpy.full(3, supports[0]))
    picks = [i % len(sizes) for i in (2, 0, 3, 0)]
    for got, wanted in [
        (numpy.concatenate(numpy.array_split(array, 2)), range(len(sizes))),
        (array[numpy.array(picks)], picks),
        (array[::-1], range(len(sizes))[::-1]),
        (array[numpy.arange(len(sizes)) > 0], range(1, len(sizes))),
        (numpy.repeat(array, 2), [i // 2 for i in range(2 * len(sizes))]),
        (copy.copy(array), range(len(sizes))),
        (copy.deepcopy(array), range(len(sizes))),
        (pickle.loads(pickle.dumps(array)), range(len(sizes))),
        (pickle.loads(pickle.dumps(array[:1])), [0]),
    ]:
        assert got.dtype == object
        for support, i in zip(got, wanted, strict=True):
            assert_rows(support, rows[i])
    assert_rows(Support.cat(array), [row for one in rows for row in one])
    assert len(Support.stack(array, 6)) == 6 * len(sizes)
    padded = numpy.array([*supports, None], dtype=object)
    assert padded.shape == (len(sizes) + 1,)
    assert len(Support.stack(padded, 6)) == 6 * len(padded)
    with pytest.raises((TypeError, ValueError)):
        numpy.array(supports, dtype=float)


def test_a_support_is_no_iterable():
    """Row by row it would be a thousand small supports, each with a plan of its own."""
    support = build(mixed_rows(3))
    assert not isinstance(support, Iterable)
    for use in (iter, list, set, enumerate, lambda one: [*one], lambda one: 1 in one):
        with pytest.raises(TypeError, match="is not iterable"):
            use(support)
    with pytest.raises((TypeError, ValueError)):
        torch.as_tensor(support)


@PROPERTY
@given(tagged_rows(min_rows=1), st.data())
def test_selection(rows, data):
    support, labels = build(rows), tags(rows)
    picks = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=12))
    expected = [rows[i] for i in picks]
    assert_rows(support.select(picks), expected)
    assert labels[picks].tolist() == [row.tag for row in expected]
    assert_rows(support.select(torch.tensor(picks, dtype=torch.int32)), expected)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))))
    assert_rows(support.select(mask), [row for row, on in zip(rows, mask, strict=True) if on])
    cut = data.draw(st.integers(0, len(rows)))
    within = [i - cut for i in picks if i >= cut]
    assert_rows(support[cut:].select(within), [rows[cut:][i] for i in within])


@PROPERTY
@given(tagged_rows(), st.integers(0, 4))
def test_packed_and_padded_round_trips(rows, cut):
    for support, expected in ((build(rows), rows), (build(rows)[cut:], rows[cut:])):
        assert_rows(Support.from_packed(*support.to_packed()), expected)
        assert_rows(Support.from_padded(*support.to_padded()), expected)
        packed, counts, _, _ = support.to_packed()
        assert counts.tolist() == [-1 if row.kind == FAILED else len(row.ids) for row in expected]
        assert packed.shape == (support.nnz,)


@PROPERTY
@given(tagged_rows(), st.integers(0, 4))
def test_pickle_and_copies(rows, cut):
    support = build(rows)[cut:]
    assert_rows(pickle.loads(pickle.dumps(support)), rows[cut:])
    assert_rows(copy.copy(support), rows[cut:])
    assert_rows(copy.deepcopy(support), rows[cut:])


def test_a_pickled_slice_leaves_the_rest_behind():
    rows = mixed_rows(1000)
    support = build(rows)
    for i in (0, 500, 998):
        part = support[i : i + 2]
        assert part.kind.data_ptr() == support.kind[i:].data_ptr()  # a view
        assert len(pickle.dumps(part)) < 2 * len(pickle.dumps(build(rows[i : i + 2])))
        assert_rows(pickle.loads(pickle.dumps(part)), rows[i : i + 2])


def saved_and_loaded(value, **options):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


@PROPERTY
@given(tagged_rows(), st.integers(0, 4))
def test_torch_save_and_load(rows, cut):
    """With weights_only, its default, among other tensors, from a support that has a plan."""
    support = build(rows)[cut:]
    support.plan_for(31)
    for options in ({}, {"weights_only": True}, {"weights_only": False}):
        assert_rows(saved_and_loaded(support, **options), rows[cut:])
        assert_rows(saved_and_loaded(support, map_location="cpu", **options), rows[cut:])
    batch = saved_and_loaded({"step": 3, "rows": [support, torch.arange(4), (support[:1],)]})
    assert batch["step"] == 3
    assert batch["rows"][1].tolist() == [0, 1, 2, 3]
    assert_rows(batch["rows"][0], rows[cut:])
    assert_rows(batch["rows"][2][0], rows[cut:][:1])


def test_what_holds_supports_or_becomes_one_is_loaded_as_well():
    logits, labels = torch.tensor([[0.0, 1.0, -math.inf], [1.0, 2.0, 3.0]]), torch.tensor([1, 2])
    captured, stream = capture_support(logits, labels, kind=REPLAY), CaptureStream()
    stream.add(captured)
    (step,), support = stream.collect(), captured.to_support()
    rows = aligned_rows(labels, labels > 0, support=support, advantages=torch.rand(2))
    got = saved_and_loaded({"captured": captured, "step": step, "rows": rows, "kind": REPLAY})
    assert got["kind"] is REPLAY
    for name in ("packed", "counts", "kind", "tail_mass", "sampled_logprobs", "needed"):
        assert torch.equal(getattr(got["captured"], name), getattr(captured, name))
    assert torch.equal(got["step"].sampled_logprobs, step.sampled_logprobs)
    for one, other in ((got["step"].support, support), (got["rows"].support, rows.support)):
        for part, wanted in zip(one.to_packed(), other.to_packed(), strict=True):
            assert torch.equal(part, wanted)
    assert torch.equal(got["rows"].labels, rows.labels)
    assert torch.equal(got["rows"].active, rows.active)
    assert torch.equal(got["rows"].per_token["advantages"], rows.per_token["advantages"])


def test_a_loaded_support_is_planned_anew():
    """No plan of another version of the package, no facts on a device."""
    support = Support.from_rows([(list(range(900)), None), ([5], None), (list(range(900)), None)])
    assert support.plan_for(10_000).wide.tolist() == [0, 2]
    assert {type(value) for value in support.__getstate__().values()} == {torch.Tensor}
    for copied in (saved_and_loaded(support), copy.copy(support), copy.deepcopy(support)):
        for part, wanted in zip(copied.plan, support.plan, strict=True):
            assert torch.equal(part, wanted) if isinstance(part, torch.Tensor) else part == wanted
        assert copied.plan_for(10_000).wide.tolist() == [0, 2]
        assert copied.host.offsets.device.type == "cpu"


@pytest.mark.gpu
def test_what_is_loaded_to_a_device_keeps_its_facts_on_the_host():
    rows = mixed_rows(9)
    for support in (build(rows), build(rows).to("cuda")):
        for device in ("cuda", "cpu"):
            got = saved_and_loaded([support], map_location=device)[0]
            assert got.device.type == got.plan.tiles.device.type == device
            assert_host_facts(got)
            assert_rows(got, rows)
    loader = DataLoader(OneRow(rows), batch_size=9, num_workers=1, pin_memory=True)
    ((support, _),) = loader
    assert support.ids.is_pinned()
    assert support.plan.over_v.is_pinned()  # there are no tiles to pin
    assert_rows(support, rows)


def test_another_process_is_sent_the_plan(monkeypatch):
    support = build(mixed_rows(9))[2:]
    sent = ForkingPickler.dumps(support)
    monkeypatch.setattr("rl_loss.support.head_plan", None)
    got = ForkingPickler.loads(sent)
    assert_rows(got, mixed_rows(9)[2:])
    assert got.plan.tiles.tolist() == support.plan.tiles.tolist()
    assert got.plan.over_v.tolist() == support.plan.over_v.tolist()


@PROPERTY
@given(tagged_rows(), st.integers(0, 8), st.integers(0, 8))
def test_a_move_takes_the_rows_and_leaves_the_facts(rows, start, stop):
    support = build(rows)
    assert_rows(support.to("cpu", non_blocking=True), rows)
    # Nothing can be read from a meta tensor: an operation that asked the device would raise.
    far = support.to("meta")
    moved = Support.cat([far[start:stop], far]).select([0] if len(rows) else [])
    near = Support.cat([support[start:stop], support]).select([0] if len(rows) else [])
    stacked = Support.stack([far[start:stop], None, far], start=1)
    beside = Support.stack([support[start:stop], None, support], start=1)
    pairs = [(far, support), (moved, near), (far[start:stop], support[start:stop])]
    pairs += [(stacked, beside), *zip(far.split(1), support.split(1), strict=True)]
    for there, here in pairs:
        assert there.device.type == "meta"
        for fact, expected in zip(there.host, here.host, strict=True):
            assert fact.device.type == "cpu"
            assert torch.equal(fact, expected)
        for name in ("ids", "sampler_logprobs", "known", "offsets", "kind", "sampler_tail_mass"):
            assert getattr(there, name).shape == getattr(here, name).shape
            assert getattr(there, name).dtype == getattr(here, name).dtype
    assert far.entry_rows.shape == (support.nnz,)
    assert [part.shape for part in far.to_padded()] == [part.shape for part in support.to_padded()]
    assert [part.shape for part in far.to_packed()] == [part.shape for part in support.to_packed()]


class Rows(Dataset):
    """Groups of consecutive rows, each with its labels."""

    def __init__(self, rows, sizes):
        self.support, self.labels = build(rows), tags(rows)
        self.bounds = [0]
        for size in sizes:
            self.bounds.append(self.bounds[-1] + size)
        assert self.bounds[-1] == len(rows)

    def __len__(self):
        return len(self.bounds) - 1

    def __getitem__(self, i):
        group = slice(self.bounds[i], self.bounds[i + 1])
        return {"support": self.support[group], "labels": self.labels[group]}


class OneRow(Dataset):
    def __init__(self, rows):
        self.support, self.labels = build(rows), tags(rows)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.support[i : i + 1], self.labels[i]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_loader_collates_single_rows(num_workers):
    rows = mixed_rows(23)
    loader = DataLoader(
        OneRow(rows),
        batch_size=4,
        shuffle=True,
        generator=torch.Generator().manual_seed(0),
        num_workers=num_workers,
    )
    seen = []
    for support, labels in loader:
        assert_rows(support, [rows[tag] for tag in labels.tolist()])
        seen += labels.tolist()
    assert seen != sorted(seen)
    assert sorted(seen) == list(range(23))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_loader_joins_groups_of_rows(num_workers):
    """One group a step (batch_size None: nothing to collate), and two of one size."""
    rows = mixed_rows(16)
    loader = DataLoader(Rows(rows, [3, 0, 6, 1, 6]), batch_size=None, num_workers=num_workers)
    seen = []
    for group in loader:
        assert_rows(group["support"], [rows[tag] for tag in group["labels"].tolist()])
        seen += group["labels"].tolist()
    assert seen == list(range(16))
    loader = DataLoader(Rows(rows, [4] * 4), batch_size=2, num_workers=num_workers)
    for step, batch in enumerate(loader):
        assert batch["labels"].flatten().tolist() == list(range(8 * step, 8 * step + 8))
        assert_rows(batch["support"], rows[8 * step : 8 * step + 8])


def test_ids_tell_the_row():
    """The tests above lean on this: no two tags share an id."""
    rows = [tagged_row(tag, REPLAY, 5, 31, 2) for tag in range(20)]
    support = build(rows)
    assert torch.equal(support.ids // STRIDE, tags(rows)[support.entry_rows].int())


def test_entry_rows():
    offsets = torch.tensor([0, 0, 3, 3, 4])
    assert rows_of_entries(offsets, 4).tolist() == [1, 1, 1, 3]
    assert rows_of_entries(torch.zeros(1, dtype=torch.int64), 0).tolist() == []


# --- the kernels' plan ---


def test_wide_rows_take_no_tiles_and_only_where_enough_come_together():
    v = 10_000  # a row's product costs 100 entries, reading the weight 1000 more
    wide, narrow = list(range(900)), list(range(40))
    one = Support.from_rows([(wide, None), (narrow, None)])
    two = Support.from_rows([(wide, None), (narrow, None), (wide, None), None])
    assert one.plan_for(v).wide.tolist() == []
    assert one.plan_for(v).tiles.tolist() == one.plan.tiles.tolist()
    plan = two.plan_for(v)
    assert plan.wide.tolist() == [0, 2]
    assert (plan.tiles >> 32).tolist() == [1, 1]  # 40 entries: two tiles of 32
    assert plan.over_v.tolist() == [3]
    assert two.plan_for(v) is plan  # made once for this V
    assert two.plan_for(20 * v) is two.plan  # no row is wide there
    again = pickle.loads(pickle.dumps(two))
    assert again.plan_for(v).wide.tolist() == [0, 2]
    assert two[2:].plan_for(v).wide.tolist() == []


def ids_lists():
    return st.lists(st.integers(0, 40), unique=True, max_size=5)


@PROPERTY
@given(
    rows=st.lists(st.none() | ids_lists(), max_size=6),
    kind=st.sampled_from([RowKind.REPLAY, RowKind.HEAD, RowKind.DRAWS]),
    logprobs=st.sampled_from([-0.25, -1, math.nan, None]),
    form=st.sampled_from([list, tuple]),
)
def test_rows_of_lists_are_read_as_row_by_row(rows, kind, logprobs, form):
    """Lists take a faster way of their own."""

    def row(ids):
        return form(ids), None if logprobs is None else form([logprobs] * len(ids))

    rows = [None if ids is None else row(ids) for ids in rows]
    one = Support.from_rows(rows, kind=kind)
    with unittest.mock.patch("rl_loss.row_parsing._from_lists", return_value=None):
        other = Support.from_rows(rows, kind=kind)
    for name in ("ids", "sampler_logprobs", "known", "offsets", "kind", "sampler_tail_mass"):
        one_value, other_value = getattr(one, name), getattr(other, name)
        torch.testing.assert_close(one_value, other_value, rtol=0, atol=0, equal_nan=True)


def test_what_an_array_would_take_and_a_row_may_not():
    """Rows of bools and of halves are refused as they are alone, and integers are no floats."""
    half = numpy.float16(-0.5)
    for row, message in [
        (([True, False], [-0.7, -0.7]), "ids must be integers"),
        (([4, 2], [True, True]), "logprobs must be real numbers"),
        (([4, 2], [half, half]), "logprobs must be in float32 or float64"),
        (([4, 2.0], [-0.7, -0.7]), "ids must be integers"),
        (([4, 2**31], [-0.7, -0.7]), r"ids must be in \[0, 2\*\*31\), got 2147483648"),
        (([4, -2], [-0.7, -0.7]), r"ids must be in \[0, 2\*\*31\), got -2"),
        (([4, 2], [-0.7]), r"logprobs and known \(bool\) must be \[2\] as ids, got \[1\]"),
    ]:
        with pytest.raises(ValueError, match=rf"rows\[1\]: {message}"):
            Support.from_rows([([4, 2], [-0.7, -0.7]), row])
    rows = [([4, numpy.int32(2)], [numpy.float32(-0.5), 0]), None, ([5], None)]
    support = Support.from_rows(rows)
    assert support.ids.tolist() == [4, 2, 5]
    assert support.sampler_logprobs[:2].tolist() == [-0.5, 0]
    assert support.known.tolist() == [True, True, False]


@pytest.mark.parametrize(
    "row", [([True], [-1.0]), ([1.5], [-1.0]), ([-1], [-1.0]), ([2**31], [-1.0]), ([1], ["a"])]
)
def test_a_bad_row_among_lists_is_named(row):
    with pytest.raises(ValueError, match=r"rows\[1\]: (ids|logprobs) must be"):
        Support.from_rows([([1, 2], [-0.7, -0.7]), row])
