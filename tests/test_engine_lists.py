"""Numbers and top log-probabilities in whatever list an engine has them."""

import math
import warnings
from array import array
from collections import UserList

import numpy
import pytest
import torch

from rl_loss import engine_lists
from rl_loss.engine_lists import (
    INTS,
    REALS,
    check_range,
    column,
    content_id,
    end_to_end,
    is_flat,
    is_list,
    lengths,
    ragged,
    read_top,
    same_length,
    top_entries,
    triples,
    vector,
)

VALUES = [7, 0, 2**23]


@pytest.mark.parametrize("sort", [INTS, REALS])
@pytest.mark.parametrize(
    "of",
    [
        list,
        tuple,
        UserList,
        numpy.array,
        torch.tensor,
        lambda values: numpy.array([*values, None], dtype=object)[:-1],
        lambda values: [*map(numpy.int64, values)],
        lambda values: [*map(torch.tensor, values)],
        lambda values: numpy.array(values)[::-1][::-1],
    ],
)
def test_a_vector_of_any_list(of, sort):
    given = of(VALUES)
    if sort is REALS and hasattr(given, "dtype") and given.dtype != object:
        given = given * 1.0
    got = vector("x", given, sort)
    assert got.dtype == sort.dtype
    assert got.tolist() == VALUES


def test_a_vector_of_what_array_holds_and_of_narrow_arrays():
    assert vector("x", array("q", VALUES), INTS).tolist() == VALUES
    for dtype in (numpy.uint8, numpy.int16, numpy.uint32):
        assert vector("x", numpy.array([7, 200], dtype), INTS).tolist() == [7, 200]
    half = math.log(0.3)
    assert vector("x", numpy.array([half], numpy.float32), REALS).item() == numpy.float32(half)
    assert vector("x", [half, 0, -math.inf], REALS).tolist() == [half, 0, -math.inf]


def test_a_vector_is_the_hosts_and_its_own():
    """It has no gradient, and an array that may not be written to warns of nothing."""
    source = torch.tensor([0.5], requires_grad=True)
    assert not vector("x", source, REALS).requires_grad
    frozen = numpy.array([1, 2])
    frozen.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert vector("x", frozen, INTS).tolist() == [1, 2]


@pytest.mark.parametrize("empty", [[], (), numpy.zeros(0), torch.zeros(0)])
def test_nothing_is_a_vector_of_reals(empty):
    assert vector("x", empty, REALS).shape == (0,)


@pytest.mark.parametrize(
    ("values", "sort", "message"),
    [
        (None, INTS, "x must be a list of ids, got None"),
        ("12", INTS, "x must be a list of ids, got '12'"),
        (b"12", INTS, "x must be a list of ids, got b'12'"),
        (bytearray(8), INTS, "x must be a list of ids, got bytearray"),
        ({1: 2}, REALS, "x must be a list of floats, got {1: 2}"),
        (torch.tensor(1), INTS, r"x must be a list of ids, got tensor\(1\)"),
        ([1, 2.0], INTS, r"x\[1\] must be an int, got 2.0"),
        ([1, None], REALS, r"x\[1\] must be a float, got None"),
        ([0.5, "1"], REALS, r"x\[1\] must be a float, got '1'"),
        ([0.5, torch.zeros(2)], REALS, r"x\[1\] must be a float, got tensor"),
        ([2**63], INTS, r"x\[0\] must be an int, got 9223372036854775808"),
        (numpy.zeros(2), INTS, r"x must be a list of ids, got torch.float64 \[2\]"),
        (torch.tensor([True]), INTS, r"x must be a list of ids, got torch.bool \[1\]"),
        (numpy.zeros((2, 1), int), INTS, r"x must be a list of ids, got torch.int64 \[2, 1\]"),
        (torch.zeros(1, dtype=torch.int64), REALS, r"x must be a list of floats, got torch.int64"),
        (torch.zeros(1, dtype=torch.float16), REALS, "x must be in float32 or float64, got"),
    ],
)
def test_what_is_no_vector_is_named(values, sort, message):
    with pytest.raises(ValueError, match=message):
        vector("x", values, sort)


@pytest.mark.parametrize(
    "rows",
    [
        [[3, 1], [], [2]],
        ((3, 1), (), (2,)),
        [[3, 1], (), numpy.array([2])],
        [torch.tensor([3, 1]), numpy.zeros(0, int), [2]],
        numpy.array([[3, 1], [], [2]], dtype=object),
    ],
)
def test_ragged_rows_of_any_lists(rows):
    values, counts = ragged("x", rows, INTS)
    assert values.tolist() == [3, 1, 2]
    assert counts.tolist() == lengths(rows).tolist() == [2, 0, 1]
    assert counts.dtype == torch.int64


def one_by_one(monkeypatch):
    """Makes `ragged` and `column` fail where they leave the way that reads many at once."""

    def no(name, *_):
        raise AssertionError(f"{name} was read by itself")

    monkeypatch.setattr(engine_lists, "vector", no)


@pytest.mark.parametrize("sort", [INTS, REALS])
@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("frozen", [False, True])
def test_arrays_of_one_format_are_read_at_once_and_copied(sort, size, frozen, monkeypatch):
    """Also arrays that may not be written to, of which torch would warn."""
    dtype = numpy.dtype(f"{'i' if sort is INTS else 'f'}{size}")
    rows = [numpy.array(row, dtype) for row in ([3, 1], [], [2])]
    for row in rows:
        row.flags.writeable = not frozen
    one_by_one(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values, counts = ragged("x", rows, sort)
        whole = column("x", rows[0], sort)
    assert values.dtype == whole.dtype == torch.from_numpy(numpy.zeros(0, dtype)).dtype
    assert (values.tolist(), counts.tolist()) == ([3, 1, 2], [2, 0, 1])
    rows[0].flags.writeable = True
    rows[0][:] = 9
    assert values.tolist() == [3, 1, 2]
    assert whole.tolist() == [3, 1]
    shown = [array("i" if sort is INTS else "f", row) for row in ([3, 1], [2])]
    assert ragged("x", shown, sort)[0].tolist() == [3, 1, 2]
    assert column("x", numpy.zeros(0, dtype), sort).shape == (0,)


def test_lists_are_read_at_once(monkeypatch):
    one_by_one(monkeypatch)
    ids, counts = ragged("x", [[3, True], (), (numpy.int64(2),), []], INTS)
    assert (ids.dtype, ids.tolist(), counts.tolist()) == (torch.int32, [3, 1, 2], [2, 0, 1, 0])
    values, _ = ragged("x", [[0.1, -1], [numpy.float32(0.5), -1e300]], REALS)
    assert (values.dtype, values.tolist()) == (torch.float64, [0.1, -1, 0.5, -1e300])


def test_arrays_that_differ_are_read_one_by_one():
    """Of two formats, in another byte order, with gaps, of narrow integers, of objects."""
    for rows in (
        [numpy.array([3, 1], numpy.int32), numpy.array([2])],
        [numpy.array([3, 1], numpy.uint8), numpy.array([2], numpy.int16)],
        [numpy.array([3, 1, 2], numpy.uint32)],
        [numpy.array([3, 0, 1, 0], numpy.int32)[::2], numpy.array([2], numpy.int32)],
        [numpy.array([3, 0, 1, 0, 2, 0], numpy.int32)[::2]],
        [numpy.array([3, 1], object), [2]],
        [torch.tensor([3, 1]), torch.tensor([2], dtype=torch.int32)],
    ):
        assert ragged("x", rows, INTS)[0].tolist() == [3, 1, 2]
    swapped = [numpy.array([3, 1], ">i4")]
    with pytest.raises(ValueError, match=r"x\[0\] must be numbers, got array"):
        ragged("x", swapped, INTS)
    half = [numpy.array([0.5], numpy.float32), numpy.array([0.5], numpy.float16)]
    for rows, sort, message in [
        (half, REALS, r"x\[1\] must be in float32 or float64, got torch.float16"),
        (half[1:], REALS, r"x\[0\] must be in float32 or float64, got torch.float16"),
        ([numpy.array([True])], INTS, r"x\[0\] must be a list of ids, got torch.bool"),
        ([numpy.zeros((1, 2), numpy.int32)], INTS, r"x\[0\] must be a list of ids, got .* \[1, 2"),
        ([numpy.zeros(1, numpy.int32)], REALS, r"x\[0\] must be a list of floats, got torch.int32"),
    ]:
        with pytest.raises(ValueError, match=message):
            ragged("x", rows, sort)


def test_ids_out_of_range_are_named_in_any_width():
    bounds = torch.tensor([0, 2, 2, 4])
    check_range("x", torch.tensor([0, 1, 2, 2**31 - 1]), bounds)
    check_range("x", torch.tensor([0, 1, 2, 2**31 - 1], dtype=torch.int32), bounds)
    check_range("x", torch.tensor([], dtype=torch.int32), torch.tensor([0, 0]))
    for ids, row, got in [
        (torch.tensor([0, 1, 2**31, -1]), 2, 2**31),
        (torch.tensor([0, 1, -1, 2**31]), 2, -1),
        (torch.tensor([5, -7, 2, 3], dtype=torch.int32), 0, -7),
        (torch.tensor([5, 7, 2, -2], dtype=torch.int32), 2, -2),
    ]:
        with pytest.raises(ValueError, match=rf"x\[{row}\]: ids must be in .*, got {got}"):
            check_range("x", ids, bounds)


def test_no_rows_and_rows_of_a_matrix():
    for rows in ([], (), [[]], numpy.zeros((0, 3))):
        values, counts = ragged("x", rows, REALS)
        assert (values.shape, len(counts)) == ((0,), len(rows))
    assert ragged("x", numpy.eye(2), REALS)[0].tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1], [2, None]], r"x\[1\]\[1\] must be an int, got None"),
        ([numpy.array([1]), [2, None]], r"x\[1\]\[1\] must be an int, got None"),
        ([[1], None], r"x\[1\] must be a list of ids, got None"),
    ],
)
def test_a_row_that_is_none_is_named(rows, message):
    with pytest.raises(ValueError, match=message):
        ragged("x", rows, INTS)


def test_lists_numbers_and_rows_are_told_apart():
    for value in ([], (), numpy.zeros(1), torch.zeros(1), UserList(), array("q")):
        assert is_list(value)
    for value in (None, "a", b"a", {}, 1, numpy.float32(1), torch.tensor(1), iter([]), {1}):
        assert not is_list(value)
    for values in ([], [1], [None, 0.5], numpy.zeros(2), torch.zeros(2), [torch.tensor(1)]):
        assert is_flat(values)
    for values in ([[1]], [None, ()], numpy.zeros((2, 1)), [torch.zeros(1)], [{}], ["a"]):
        assert not is_flat(values)


def test_a_length_is_asked_of_lists_alone():
    same_length("x", numpy.zeros(2), 2)
    for values, got in (([1], "1"), (None, "None"), (2, "2"), ({1: 1, 2: 2}, "{1: 1, 2: 2}")):
        with pytest.raises(ValueError, match=rf"x must have one entry a row \(3\), got {got}"):
            same_length("x", values, 3, "row")


def test_top_entries_end_to_end():
    rows = [
        {5: -1, "7": numpy.float32(-0.5), "token_id:9": {"logprob": -2.0}},
        {"token_id": 3, "logprob": -1.5, "top_logprobs": [{"token": "token_id:4", "logprob": -1}]},
        {},
        [(-0.25, 6, None), [-4.0, numpy.int32(2)]],
    ]
    entries = top_entries("x", rows)
    assert entries == [{5: -1, 7: -0.5, 9: -2}, {3: -1.5, 4: -1}, {}, {6: -0.25, 2: -4}]
    ids, of_row, logprobs = end_to_end("x", entries)
    assert of_row.tolist() == [0, 0, 0, 1, 1, 3, 3]
    assert [{int(i): float(q)} for i, q in zip(ids, logprobs, strict=True)] == [
        {token: q} for row in entries for token, q in row.items()
    ]


class Entry:
    def __init__(self, logprob):
        self.logprob = logprob


def content(ids, logprobs, name):
    """A server's entry: the sampled token, and it again with the others."""
    top = [name(token) | {"logprob": q} for token, q in zip(ids, logprobs, strict=True)]
    return top[0] | {"top_logprobs": top}


PLAIN = {
    "objects": lambda ids, q: dict(zip(ids, map(Entry, q), strict=True)),
    "floats": lambda ids, q: dict(zip(ids, q, strict=True)),
    "dicts": lambda ids, q: {t: {"logprob": v, "rank": 1} for t, v in zip(ids, q, strict=True)},
    "triples": lambda ids, q: [(v, t, None) for t, v in zip(ids, q, strict=True)],
    "lists": lambda ids, q: tuple([v, t] for t, v in zip(ids, q, strict=True)),
    "content": lambda ids, q: content(ids, q, lambda t: {"token_id": t, "token": "the"}),
    "texts": lambda ids, q: content(ids, q, lambda t: {"token_id": None, "token": f"token_id:{t}"}),
    "the sampled one alone": lambda ids, q: {"token_id": ids[0], "logprob": q[0]},
    "the sampled one apart": lambda ids, q: (
        content(ids, q, lambda t: {"token_id": t}) | {"token_id": 99, "logprob": -9}
    ),
}


def same_top(rows, monkeypatch):
    """Read at once they are what they are one by one, bit for bit."""
    expected = end_to_end("x", top_entries("x", rows))
    with monkeypatch.context() as patch:
        patch.setattr(engine_lists, "top_entries", None)
        got = read_top("x", rows)
    for one, two in zip(got, expected, strict=True):
        assert one.dtype == two.dtype
        assert one.tolist() == two.tolist()


@pytest.mark.parametrize("form", PLAIN)
def test_plain_top_log_probabilities_are_read_at_once(form, monkeypatch):
    of = PLAIN[form]
    rows = [of([5, 3, 8], [-0.5, -1, -math.inf]), of([2**31 - 1], [-0.25]), of([0, 5], [-1e300, 0])]
    same_top(rows, monkeypatch)
    same_top([], monkeypatch)
    if form not in ("content", "texts", "the sampled one alone", "the sampled one apart"):
        same_top([of([], []), of([4], [-1.0]), of([], [])], monkeypatch)


def test_the_last_of_a_tokens_entries_counts(monkeypatch):
    """In content it is the sampled token's own; a token twice among the top is read by itself."""
    row = content([5, 3], [-0.5, -1.0], lambda token: {"token_id": token})
    same_top([row | {"logprob": -0.75}], monkeypatch)
    ids, _, logprobs = read_top("x", [row | {"logprob": -0.75}])
    assert dict(zip(ids.tolist(), logprobs.tolist(), strict=True)) == {5: -0.75, 3: -1.0}
    for rows in ([[(-1.0, 5), (-2.0, 5)]], [{"1": -1.0, "token_id:1": -2.0}]):
        ids, _, logprobs = read_top("x", rows)
        assert (len(ids), logprobs.tolist()) == (1, [-2.0])


def test_a_tokens_id_counts_before_its_text():
    own = {"token_id": 5, "token": "token_id:6", "logprob": -1.0}
    for row in (own, {"token": "token_id:7", "logprob": -2.0, "top_logprobs": [own]}):
        assert read_top("x", [row])[0][0] == 5


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({5: Entry(-1.0), 6: Entry(None)}, r"x\[1\] must hold .*, got None for 6"),
        ({5: Entry(-1.0), 6.0: Entry(-1.0)}, r"x\[1\] must hold .*, got -1.0 for 6.0"),
        ({5: -1.0, "the": -1.0}, r"x\[1\] must hold .*, got -1.0 for 'the'"),
        ({5: {"logprob": -1.0}, 6: {}}, r"x\[1\] must hold .*, got None for 6"),
        ([(-1.0, 5), (-1.0, None)], r"x\[1\]\[1\] must be \(logprob, id, text\), got"),
        ([(-1.0, 5), ("a", 6)], r"x\[1\]\[1\]\[0\] must be a float, got 'a'"),
        ([(-1.0, 1), (-2.0, 1.0)], r"x\[1\]\[1\] must be \(logprob, id, text\), got"),
        ({"token": "5", "logprob": -1.0}, r"x\[1\] must name its tokens by id, got '5'"),
        ({"token": "the year 1984", "logprob": -1.0}, r"x\[1\] must name .*, got 'the year 1984'"),
        ({"token_id": 5, "logprob": None}, r"x\[1\]: logprob must be a float, got None"),
        (
            {"token_id": 5.0, "logprob": -1.0, "top_logprobs": [{"token_id": 5, "logprob": -1.0}]},
            r"x\[1\] must name its tokens by id, got 5.0",
        ),
        ({2**31: -1.0}, r"x\[1\]: ids must be in \[0, 2\*\*31\), got 2147483648"),
        ({5: Entry(-1.0), -6: Entry(-1.0)}, r"x\[1\]: ids must be in \[0, 2\*\*31\), got -6"),
        (None, r"x\[1\] must hold log-probabilities by id, got None"),
        (0.5, r"x\[1\] must hold log-probabilities by id, got 0.5"),
        ("ab", r"x\[1\] must hold log-probabilities by id, got 'ab'"),
    ],
)
def test_a_bad_row_of_top_log_probabilities_is_named(row, message):
    with pytest.raises(ValueError, match=message):
        read_top("x", [{7: Entry(-0.5)}, row, {8: Entry(-0.5)}])


def test_an_entry_of_content_is_known_by_its_id_alone():
    assert content_id("x", {"token_id": 5, "token": "the"}) == 5
    assert content_id("x", {"token": "token_id:12"}) == 12
    for entry in ({"token": "12"}, {"token": " token_id:1"}, {"token": "token_id:"}, {}):
        with pytest.raises(
            ValueError, match=r"x must name its tokens by id, got .*: ask the server"
        ):
            content_id("x", entry)


def test_triples_name_what_is_missing():
    assert triples("x", [(-0.5, 3, "a"), [0, 4]]) == ([3, 4], [-0.5, 0])
    for given, message in [
        (None, r"x must be a list of \(logprob, id, text\), got None"),
        ([(0.0, 1), 5], r"x\[1\] must be \(logprob, id, text\), got 5"),
        ([(0.0,)], r"x\[0\] must be \(logprob, id, text\), got \(0.0,\)"),
        ([{"logprob": 0.0}], r"x\[0\] must be \(logprob, id, text\), got {"),
        ([(0.0, "1")], r"x\[0\] must be \(logprob, id, text\), got"),
        ([(None, 1)], r"x\[0\]\[0\] must be a float, got None"),
    ]:
        with pytest.raises(ValueError, match=message):
            triples("x", given)
