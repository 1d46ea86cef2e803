"""Log-probabilities that know their rows, through what trainers do to lists of floats."""

import pickle

import pytest
import torch
from factory import random_support

from rl_loss import RowKind, Support
from rl_loss.integrations.sampled_logprobs import SampledLogprob, sampled_logprobs, support_of

KINDS = (RowKind.REPLAY, RowKind.HEAD, RowKind.DRAWS, RowKind.NONE)


def made(seed, rows=6):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 50, (rows,), generator=generator)
    support = random_support(labels, 50, KINDS, generator)
    return support, sampled_logprobs(support, (-torch.arange(rows) / 4).tolist())


def same(got, wanted):
    """All that a support is made of, in its bits."""
    for one, other in zip(got.to_packed(), wanted.to_packed(), strict=True):
        assert torch.equal(one, other)


def test_they_are_floats_that_come_back_as_their_rows():
    support, carried = made(0)
    assert carried == [0.0, -0.25, -0.5, -0.75, -1.0, -1.25]
    assert torch.equal(torch.tensor(carried), -torch.arange(6) / 4)
    same(support_of(carried), support)


def test_lists_are_cut_and_joined_as_a_tool_loop_does():
    (one, first), (other, second) = made(0), made(1)
    carried = first[:4]
    carried += [0.0] * 3 + second[1:5]
    same(support_of(carried), Support.cat([one[:4], Support.empty(3), other[1:5]]))
    same(support_of(carried[::-1]), support_of(carried).select(range(10, -1, -1)))
    same(support_of([first[3], second[3], first[3]]), Support.cat([one[3:4], other[3:4], one[3:4]]))


def test_they_are_sent_with_their_support_once():
    support, carried = made(0)
    sent = pickle.loads(pickle.dumps(carried))
    assert all(isinstance(one, SampledLogprob) for one in sent)
    assert all(one.support is sent[0].support for one in sent)
    assert sent == carried
    same(support_of(sent), support)


def test_what_knows_no_row_has_none():
    _, carried = made(0)
    for plain in ([], [0.0, -1.0], [one + 0.0 for one in carried], [float(one) for one in carried]):
        got = support_of(plain)
        assert got.host.kind.tolist() == [RowKind.NONE] * len(plain)
    assert support_of([None, 3]).host.kind.tolist() == [RowKind.NONE] * 2


def test_one_a_row():
    support, _ = made(0)
    with pytest.raises(ValueError, match=r"one a row \(6\), got 5"):
        sampled_logprobs(support, [0.0] * 5)
    assert sampled_logprobs(Support.empty(0), []) == []
