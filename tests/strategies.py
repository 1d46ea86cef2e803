"""Ragged batches of which every entry names its row, so that a row that moves is seen to move."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from hypothesis import settings
from hypothesis import strategies as st

from rl_loss.csr import RowKind
from rl_loss.support import Support

# The same examples in every run.
PROPERTY = settings(derandomize=True, deadline=None, max_examples=40)

# Tags and columns are told apart in an id: id = tag * STRIDE + column.
STRIDE = 64


@dataclass(frozen=True)
class TaggedRow:
    """One row and what a support must say of it; `tag` is the label that it belongs to."""

    tag: int
    kind: RowKind
    ids: list[int]
    logprobs: list[float]
    known: list[bool]
    tail_mass: float


def tagged_row(tag: int, kind: RowKind, width: int, known_bits: int, rotation: int) -> TaggedRow:
    """A row whose ids, log-probabilities and tail mass all follow from its tag.

    Its numbers are multiples of 2**-10, so float32 holds them exactly. What stands where q is
    unknown is a number that no one may read.
    """
    width = 0 if kind in (RowKind.FAILED, RowKind.NONE) else width
    columns = [(column + rotation) % width for column in range(width)]
    if kind == RowKind.DRAWS:
        columns = [column // 2 for column in columns]  # draws repeat
    known = [bool(known_bits >> column & 1) for column in range(width)]
    return TaggedRow(
        tag=tag,
        kind=kind,
        ids=[tag * STRIDE + column for column in columns],
        logprobs=[-(tag * 16 + at + 1) / 1024 if known[at] else 1e30 for at in range(width)],
        known=known,
        tail_mass=(tag % 1024) / 1024,
    )


@st.composite
def tagged_rows(draw, start=0, min_rows=0, max_rows=8, max_width=5, kinds=tuple(RowKind)):
    """A list of `TaggedRow`s of random kinds and widths, tagged `start, start + 1, ...`."""
    spec = st.tuples(
        st.sampled_from(kinds),
        st.integers(0, max_width),
        st.integers(0, 2**max_width - 1),
        st.integers(0, max_width),
    )
    specs = draw(st.lists(spec, min_size=min_rows, max_size=max_rows))
    return [tagged_row(start + i, *spec) for i, spec in enumerate(specs)]


def mixed_rows(n: int, start: int = 0) -> list[TaggedRow]:
    """n rows of all kinds and widths 0 to 4, complete and incomplete, without randomness."""
    kinds = [RowKind.REPLAY, RowKind.NONE, RowKind.HEAD, RowKind.DRAWS, RowKind.FAILED]
    return [
        tagged_row(start + i, kinds[i % 5], i * 3 % 5, (i * 7 + 9 * (i % 2)) % 32 | i % 3, i)
        for i in range(n)
    ]


def build(rows: list[TaggedRow]) -> Support:
    """The support of `rows`."""
    return Support.from_rows(
        [(row.ids, row.logprobs, row.known) for row in rows],
        kind=[int(row.kind) for row in rows],
        tail_mass=[row.tail_mass for row in rows],
    )


def tags(rows: list[TaggedRow]) -> torch.Tensor:
    """The labels that stand beside the rows."""
    return torch.tensor([row.tag for row in rows], dtype=torch.int64)


def assert_rows(support: Support, rows: list[TaggedRow]) -> None:
    """Every row says what its tag says it must, on the tensors and in the host's facts."""
    bounds = [0, *accumulate(len(row.ids) for row in rows)]
    assert len(support) == len(rows)
    assert support.offsets.tolist() == bounds
    assert support.nnz == bounds[-1]
    assert support.kind.tolist() == [row.kind for row in rows]
    assert support.sampler_tail_mass.tolist() == [row.tail_mass for row in rows]
    assert support.ids.tolist() == [token for row in rows for token in row.ids]
    assert support.known.tolist() == [known for row in rows for known in row.known]
    logprobs = [value for row in rows for value in row.logprobs]
    assert support.sampler_logprobs[support.known].tolist() == [
        value for value, known in zip(logprobs, support.known.tolist(), strict=True) if known
    ]
    assert support.entry_rows.tolist() == [i for i, row in enumerate(rows) for _ in row.ids]
    assert_dtypes(support)
    assert_host_facts(support)


def assert_dtypes(support: Support) -> None:
    assert support.ids.dtype == torch.int32
    assert support.sampler_logprobs.dtype == torch.float32
    assert support.known.dtype == torch.bool
    assert support.offsets.dtype == torch.int64
    assert support.kind.dtype == torch.int8
    assert support.sampler_tail_mass.dtype == torch.float32


def assert_host_facts(support: Support) -> None:
    """The host's facts are those that the tensors give."""
    host, bounds, known = support.host, support.offsets.tolist(), support.known.tolist()
    complete = [stop > start and all(known[start:stop]) for start, stop in pairwise(bounds)]
    for fact in host:
        assert fact.device.type == "cpu"
    assert (host.offsets.dtype, host.kind.dtype) == (torch.int64, torch.int8)
    assert host.offsets.tolist() == bounds
    assert host.kind.tolist() == support.kind.tolist()
    assert host.complete.tolist() == complete
