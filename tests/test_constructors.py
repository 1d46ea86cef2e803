"""Supports from flat bytes, as prime-rl sends them; what all constructors share is tested with
`Support` itself, and what engines answer in test_engines.py."""

import math
import struct
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY, assert_dtypes, assert_host_facts, assert_rows, build, tagged_rows

from rl_loss.csr import RowKind
from rl_loss.packing import pack_entries
from rl_loss.support import Support

FAILED, NONE, REPLAY, HEAD, DRAWS = RowKind
IDS = [5, 9, 2, 4, 2**31 - 1, 0]
COUNTS = [3, 0, 2, 1]
LOGPROBS = [math.log(p) for p in (0.5, 0.25, 0.25, 0.75, 0.25, 1.0)]


def ints(*values):
    return struct.pack(f"={len(values)}i", *values)


def floats(*values):
    return struct.pack(f"={len(values)}f", *values)


def fields_of(support):
    return support.ids, support.sampler_logprobs, support.known, support.offsets, support.kind


def refused(message):
    return pytest.raises(ValueError, match=message)


def test_bytes_are_read_as_the_same_rows_in_another_form_are():
    support = Support.from_bytes(ints(*IDS), ints(*COUNTS), floats(*LOGPROBS))
    packed = pack_entries(torch.tensor(IDS), torch.tensor(LOGPROBS))
    kind = [REPLAY, NONE, REPLAY, REPLAY]
    expected = Support.from_packed(packed, torch.tensor(COUNTS), kind=kind)
    for one, other in zip(fields_of(support), fields_of(expected), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(support.sampler_tail_mass, expected.sampler_tail_mass)
    assert support.sampler_tail_mass.tolist() == [0, 1, 0, 0]
    assert support.ids.tolist() == IDS
    assert_dtypes(support)
    assert_host_facts(support)


def test_ids_alone():
    for logprobs in (None, floats(*[math.nan] * len(IDS))):
        support = Support.from_bytes(ints(*IDS), ints(*COUNTS), logprobs)
        assert support.ids.tolist() == IDS
        assert not support.known.any()
        assert support.sampler_tail_mass.tolist() == [1, 1, 1, 1]
        assert support.to_bytes()[2] is None


@PROPERTY
@given(tagged_rows(), st.integers(0, 4))
def test_byte_round_trips(rows, cut):
    for support, expected in ((build(rows), rows), (build(rows)[cut:], rows[cut:])):
        ids, counts, logprobs, kind, tail_mass = support.to_bytes()
        assert ids == ints(*[token for row in expected for token in row.ids])
        assert counts == ints(*[-1 if row.kind == FAILED else len(row.ids) for row in expected])
        known = [
            value if known else -9999.0
            for row in expected
            for value, known in zip(row.logprobs, row.known, strict=True)
        ]
        assert logprobs == (floats(*known) if support.known.any() else None)
        assert_rows(Support.from_bytes(ids, counts, logprobs, kind, tail_mass), expected)


def test_a_kind_for_all_is_that_of_the_rows_with_ids():
    """prime-rl counts 0 where a token has no mask: such a row is no empty kept set."""
    ids, counts = ints(7, 8), ints(1, 0, -1, 1)
    assert Support.from_bytes(ids, counts).kind.tolist() == [REPLAY, NONE, FAILED, REPLAY]
    assert Support.from_bytes(ids, counts, kind=HEAD).kind.tolist() == [HEAD, NONE, FAILED, HEAD]
    assert Support.from_bytes(b"", ints(0, -1), kind=FAILED).kind.tolist() == [FAILED, FAILED]
    # Said row by row it is what it is said to be, and an error where a loss reads it.
    each = Support.from_bytes(ids, counts, kind=[DRAWS, REPLAY, NONE, HEAD])
    assert each.kind.tolist() == [DRAWS, REPLAY, FAILED, HEAD]


def test_what_is_unknown_and_what_is_refused_later():
    least = torch.finfo(torch.float32).min
    q = floats(-0.5, math.nan, -9999.0, -10000.0, least, -9998.0, -math.inf)
    support = Support.from_bytes(ints(*range(7)), [7], q)
    assert support.known.tolist() == [True, False, False, False, False, True, True]
    with refused(r"sampler_logprobs of id 6 in row 0 must be finite and at most 0, got -inf"):
        support.validate(torch.tensor([0]), 8)


def test_every_form_of_a_buffer_is_copied_without_a_word():
    numpy = pytest.importorskip("numpy")
    ids, counts, q = ints(*IDS), ints(*COUNTS), floats(*LOGPROBS)
    expected = Support.from_bytes(ids, counts, q)

    def array(data, dtype):
        return numpy.frombuffer(data, dtype=dtype)  # read-only

    forms = [
        (bytearray(ids), bytearray(counts), bytearray(q)),
        (memoryview(ids), memoryview(counts), memoryview(q)),
        (array(ids, "int32"), array(counts, "int32"), array(q, "float32")),
        (array(ids, "uint8"), array(counts, "uint8"), array(q, "uint8")),
        (array(ids, "int32").repeat(2)[::2], COUNTS, array(q, "float32").repeat(2)[::2]),
        (ids, tuple(COUNTS), q),
        (ids, torch.tensor(COUNTS, dtype=torch.uint8), q),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for form in forms:
            support = Support.from_bytes(*form)
            for one, other in zip(fields_of(support), fields_of(expected), strict=True):
                assert torch.equal(one, other)
    buffers = bytearray(ids), bytearray(counts), bytearray(q)
    support = Support.from_bytes(*buffers)
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))  # the sender's next message
    for one, other in zip(fields_of(support), fields_of(expected), strict=True):
        assert torch.equal(one, other)


def test_no_bytes():
    for counts in (b"", [], torch.empty(0)):
        for logprobs in (b"", None):
            assert_rows(Support.from_bytes(b"", counts, logprobs), [])
    assert Support.from_bytes(b"", ints(0, 0)).kind.tolist() == [NONE, NONE]
    assert Support.empty(0).to_bytes()[:3] == (b"", b"", None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": ints(*IDS)[:-1]}, "ids must be bytes of torch.int32, 4 each, got 23"),
        ({"counts": b"abc"}, "counts must be bytes of torch.int32, 4 each, got 3"),
        ({"logprobs": b"abcde"}, "logprobs must be bytes of torch.float32, 4 each, got 5"),
        ({"ids": IDS}, r"ids must be bytes of torch.int32, got \[5, 9, 2, "),
        ({"ids": "abcd"}, "ids must be bytes of torch.int32, got 'abcd'"),
        ({"ids": torch.tensor(IDS)}, "ids must be bytes of torch.int32, got tensor"),
        ({"ids": np.array(IDS, ">i4")}, "ids must .* got items of >i4: cast them"),
        ({"ids": np.zeros(4, np.int8)}, "ids must .* got items of int8: cast them"),
        ({"ids": memoryview(ints(*IDS)).cast("f")}, "ids must .* got items of format 'f'"),
        ({"ids": memoryview(bytes(48)).cast("q")}, "ids must .* got items of format 'q'"),
        ({"logprobs": memoryview(ints(*IDS)).cast("i")}, "logprobs must .* of format 'i'"),
        ({"logprobs": memoryview(bytes(48)).cast("d")}, "logprobs must .* of format 'd'"),
        ({"logprobs": floats(*LOGPROBS[1:])}, "logprobs must be 6 as ids, got 5"),
        ({"counts": ints(3, 0, 2, 2)}, "counts add up to 7 entries, got 6"),
        ({"counts": [3, 0, 2]}, "counts add up to 5 entries, got 6"),
        ({"counts": ints(3, 0, -2, 2)}, "counts must be -1 or more, got -2 in row 2"),
        ({"counts": [3, 0, None, 2]}, "counts must be numbers, got None in row 2"),
        ({"counts": [3.0, 0.0, 2.0]}, r"counts must be integers \[N\], got torch.float32 \(3,\)"),
        ({"counts": torch.tensor([[6]])}, r"counts must be integers \[N\], got .*\(1, 1\)"),
        ({"counts": 6}, "counts must be bytes of torch.int32, got 6"),
        ({"ids": ints(5, 9, 2, 4, -7, 0)}, "ids must not be negative, got -7 in row 2"),
        ({"ids": ints(5, 9, 5, 4, 1, 0)}, "ids must be unique in a REPLAY row, got 5 twice in row"),
        ({"kind": [1, 1]}, r"kind must be one value or one a row \[4\], got \(2,\)"),
        ({"kind": NONE}, "ids must be empty in a row of kind NONE, got 3 in row 0"),
        ({"tail_mass": [0.5]}, r"tail_mass must be one value or one a row \[4\], got \(1,\)"),
    ],
)
def test_malformed_bytes_are_refused(changes, message):
    good = {"ids": ints(*IDS), "counts": ints(*COUNTS), "logprobs": floats(*LOGPROBS)}
    Support.from_bytes(**good)
    with refused(message):
        Support.from_bytes(**good | changes)
