"""What log-probabilities say of kept ids, against a loop over the ids."""

import math

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_loss.kept_ids import kept_logprobs, known_logprobs, looked_up, read_kept

NAN = math.nan
ROWS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 9), max_size=6, unique=True),  # kept, in any order
        st.dictionaries(st.integers(0, 9), st.sampled_from([-0.5, -2.0, NAN, -9999.0]), max_size=6),
    ),
    max_size=5,
)


@given(ROWS)
def test_top_log_probabilities_find_their_ids(rows):
    kept = read_kept("mask", [ids for ids, _ in rows])
    found, logprobs = looked_up("x", [top for _, top in rows], kept)
    columns = (found.at.tolist(), found.rows.tolist(), logprobs.tolist())
    got = {at: (row, q) for at, row, q in zip(*columns, strict=True)}
    wanted = [(row, top.get(token)) for row, (ids, top) in enumerate(rows) for token in ids]
    for entry, (row, q) in enumerate(wanted):
        if q is None:
            assert entry not in got
        else:
            of_row, value = got[entry]
            assert of_row == row
            assert math.isnan(value) if not q > -9999 else value == q
    assert len(found.at) == sum(q is not None for _, q in wanted)


@pytest.mark.parametrize("of", [list, numpy.float32, numpy.float64, torch.tensor])
@pytest.mark.parametrize("flat", [False, True])
def test_log_probabilities_of_the_kept_ids(of, flat):
    """Lists or arrays, rows of them or flat ones: what is unknown is NaN, in float32."""
    rows = [[-0.5, NAN], [], [-9999.0, -1e30, -0.25]]
    mask = [[5, 1], [], [7, 3, 2]]
    if flat:
        mask = {"token_ids": [5, 1, 7, 3, 2], "offsets": [0, 2, 2, 5]}
    values = [*rows[0], *rows[2]] if flat else rows
    if of is torch.tensor:
        values = torch.tensor(values) if flat else [torch.tensor(row) for row in values]
    elif of is not list:
        values = numpy.array(values, of) if flat else [numpy.array(row, of) for row in values]
    q = kept_logprobs("x", values, read_kept("mask", mask))
    assert q.dtype == torch.float32
    torch.testing.assert_close(
        q, torch.tensor([-0.5, NAN, NAN, NAN, -0.25]), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [-math.inf, math.inf])
@pytest.mark.parametrize("beside", [-0.5, NAN, -9999.0])
def test_an_infinite_log_probability_names_its_id(dtype, bad, beside):
    kept = read_kept("mask", [[4, 6], [], [8, 9, 7]])
    q = torch.tensor([-0.5, beside, -0.5, bad, bad], dtype=dtype)
    with pytest.raises(ValueError, match=f"^x: kept id 9 of row 2 has log-probability {bad}: the"):
        known_logprobs("x", q, kept)
    at = torch.tensor([0, 4, 1, 3, 2])  # what stands there is named, the first of the kept ones
    with pytest.raises(ValueError, match=f"^x: kept id 8 of row 2 has log-probability {bad}: the"):
        known_logprobs("x", q, kept, at)
    assert known_logprobs("x", q[:0], kept).shape == (0,)
