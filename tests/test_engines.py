"""Supports from what vLLM and SGLang return, simulated from logits that the test knows."""

import json
import math
import warnings
from collections.abc import MutableSequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_loss import LossInputs, icepop_loss
from rl_loss.csr import RowKind
from rl_loss.lm_head import fused_lm_head
from rl_loss.support import Support

V, N = 64, 12
NAN = math.nan


@dataclass
class Logprob:
    """vLLM's `Logprob`."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class SamplingMask:
    """vLLM's `SamplingMask` of a request."""

    token_ids: list
    logprobs: list | None = None


class SamplingMaskLists(NamedTuple):
    """What vLLM holds inside the engine: arrays."""

    token_ids: object
    offsets: object
    cu_num_generated_tokens: object = None
    logprobs: object = None


@dataclass
class CompletionOutput:
    """vLLM's `CompletionOutput`."""

    token_ids: list
    sampling_mask: object = None
    logprobs: object = None
    index: int = 0
    text: str = ""
    finish_reason: str = "stop"


@dataclass
class FlatLogprobs(MutableSequence):
    """vLLM's flat form: it gives a dict a position, made when it is asked for."""

    start_indices: list = field(default_factory=list)
    token_ids: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)

    @classmethod
    def of(cls, rows):
        flat = cls()
        for row in rows:
            flat.start_indices.append(len(flat.token_ids))
            flat.token_ids += row.keys()
            flat.logprobs += [entry.logprob for entry in row.values()]
        return flat

    def __len__(self):
        return len(self.start_indices)

    def __getitem__(self, i):
        stop = [*self.start_indices[1:], len(self.token_ids)][i]
        entries = range(self.start_indices[i], stop)
        return {self.token_ids[e]: Logprob(self.logprobs[e], rank=e) for e in entries}

    def __setitem__(self, i, row):
        raise NotImplementedError

    def __delitem__(self, i):
        raise NotImplementedError

    def insert(self, i, row):
        raise NotImplementedError


class SamplingMaskChunk(NamedTuple):
    """What SGLang holds inside the engine: arrays, one row an output token."""

    lengths: object
    token_ids: object
    logprobs: object


def as_json(value):
    """What a server's answer is to its client."""
    return json.loads(json.dumps(value))


def end_to_end(rows):
    """One list and the bounds of its rows."""
    flat = [value for row in rows for value in row]
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + len(row))
    return flat, offsets


@dataclass
class Request:
    """N sampled tokens of an engine: the logits after temperature, and what follows from them."""

    logits: torch.Tensor  # [N, V] float64
    kept: torch.Tensor  # [N, V] bool
    sampled: torch.Tensor  # [N]

    @property
    def raw(self):
        return self.logits.log_softmax(1)

    @property
    def processed(self):
        """log_softmax over the kept set, -inf elsewhere: what the engine sampled from."""
        return self.logits.masked_fill(~self.kept, -math.inf).log_softmax(1)

    @property
    def widths(self):
        return self.kept.sum(1)

    def mask(self):
        """Ascending ids, as both engines give them."""
        return [row.nonzero()[:, 0].tolist() for row in self.kept]

    def kept_logprobs(self):
        """Of the kept ids, in their order."""
        return [row[ids].tolist() for ids, row in zip(self.mask(), self.processed, strict=True)]

    def content(self, source, k=20, name=lambda token: {"token_id": token}):
        """`logprobs.content` of vLLM's server: the sampled token, and it again with the top k."""
        rows = []
        for row, token in zip(self.vllm_logprobs(source, k), self.sampled.tolist(), strict=True):
            entries = {t: name(t) | {"logprob": max(e.logprob, -9999.0)} for t, e in row.items()}
            rows.append(entries[token] | {"top_logprobs": list(entries.values())})
        return rows

    def vllm_logprobs(self, source, k=20):
        """Per token a dict of the sampled token and the top k, so k or k + 1 entries."""
        rows = []
        for row, token in zip(source, self.sampled.tolist(), strict=True):
            top = row.topk(k)
            entries = {token: Logprob(float(row[token]), rank=99, decoded_token="?")}
            for rank, (value, at) in enumerate(zip(*top, strict=True)):
                entries[int(at)] = Logprob(float(value), rank + 1, str(int(at)))
            rows.append(entries)
        return rows

    def full(self):
        """The support with q known for every kept id."""
        rows = zip(self.mask(), self.processed, strict=True)
        return Support.from_rows([(ids, logq[ids].float()) for ids, logq in rows])


def sampled_request(seed=0, top_k=40, top_p=0.9):
    """Rows from peaked to flat, so that top_p keeps few ids on some and top_k binds on others."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-1.3, 1.2, N, dtype=torch.float64)[:, None]
    logits = spread * torch.randn(N, V, generator=generator, dtype=torch.float64)
    order = logits.argsort(1, descending=True)
    ranked = logits.gather(1, order)
    ranked[:, top_k:] = -math.inf
    q = ranked.softmax(1)
    within = (q.cumsum(1) - q < top_p) & (torch.arange(V) < top_k)
    kept = torch.zeros(N, V, dtype=torch.bool).scatter(1, order, within)
    # The least likely kept id: on a wide row it is not among the top 20.
    last = order.gather(1, within.sum(1, keepdim=True) - 1)[:, 0]
    masked = logits.masked_fill(~kept, -math.inf)
    sampled = masked.softmax(1).multinomial(1, generator=generator)[:, 0]
    sampled[::3] = last[::3]
    return Request(logits, kept, sampled)


REQUEST = sampled_request()


def same(got, expected):
    """The same rows, bit for bit."""
    for one, two in zip(got.to_packed(), expected.to_packed(), strict=True):
        assert torch.equal(one, two)


def test_the_request_is_worth_testing():
    """Wide and narrow rows, single ids, rows that top_k cuts, sampled ids outside the top 20."""
    widths = REQUEST.widths.tolist()
    assert min(widths) == 1
    assert max(widths) > 30
    assert sum(width > 20 for width in widths) >= 3
    assert sum(width <= 20 for width in widths) >= 5
    counts = [len(row) for row in REQUEST.vllm_logprobs(REQUEST.processed)]
    assert set(counts) == {20, 21}


# --- vLLM ---


def test_every_form_of_vllms_mask_gives_the_same_support():
    nested = REQUEST.mask()
    flat, offsets = end_to_end(nested)
    expected = Support.from_rows([(row, None) for row in nested])
    assert not expected.known.any()
    assert expected.sampler_tail_mass.tolist() == [1] * N
    for mask in (
        nested,
        tuple(map(tuple, nested)),
        [numpy.array(row, dtype=numpy.int32) for row in nested],
        SamplingMask(nested),
        {"token_ids": nested},
        CompletionOutput(REQUEST.sampled.tolist(), SamplingMask(nested)),
        {"token_ids": flat, "offsets": offsets},
        {"token_ids": tuple(flat), "offsets": torch.tensor(offsets)},
        SamplingMaskLists(numpy.array(flat, dtype=numpy.int32), numpy.array(offsets)),
        json.loads(json.dumps({"token_ids": nested, "offsets": None})),
        json.loads(json.dumps({"sampling_mask": {"token_ids": flat, "offsets": offsets}})),
        json.loads(json.dumps({"sampling_mask": nested, "sampling_mask_logprobs": None})),
    ):
        same(Support.from_vllm(mask), expected)


def test_every_form_of_vllms_logprobs_gives_the_same_support():
    entries = REQUEST.vllm_logprobs(REQUEST.processed)
    floats = [{token: entry.logprob for token, entry in row.items()} for row in entries]
    expected = Support.from_vllm(REQUEST.mask(), entries)
    # JSON keeps ids as strings and has no -inf: vLLM's server writes -9999 for it.
    plain = json.loads(json.dumps([{t: max(v, -9999.0) for t, v in row.items()} for row in floats]))
    assert any(value == -9999.0 for row in plain for value in row.values())
    # The fields of a Logprob as JSON has them.
    dicts = [
        {str(t): {"logprob": v, "rank": 1, "decoded_token": "a"} for t, v in row.items()}
        for row in floats
    ]
    for logprobs in (floats, tuple(floats), plain, FlatLogprobs.of(entries), dicts):
        same(Support.from_vllm(SamplingMask(REQUEST.mask()), logprobs), expected)


def test_a_finite_top_k_with_twenty_logprobs():
    """Rows of up to 20 kept ids are complete and exact, wider ones know what they do not know."""
    support = Support.from_vllm(REQUEST.mask(), REQUEST.vllm_logprobs(REQUEST.processed))
    assert support.kind.tolist() == [RowKind.REPLAY] * N
    assert support.ids.tolist() == [token for row in REQUEST.mask() for token in row]
    bounds = support.offsets.tolist()
    for row, width in enumerate(REQUEST.widths.tolist()):
        entries = slice(bounds[row], bounds[row + 1])
        ids, known = support.ids[entries].long(), support.known[entries]
        exact = REQUEST.processed[row, ids]
        assert torch.equal(support.sampler_logprobs[entries][known], exact[known].float())
        top = set(REQUEST.processed[row].topk(20).indices.tolist()) | {int(REQUEST.sampled[row])}
        assert set(ids[known].tolist()) == top & set(ids.tolist())
        assert support.host.complete[row] == (width <= len(top))
        tail = 0.0 if width <= len(top) else 1 - float(exact[known].exp().sum())
        assert support.sampler_tail_mass[row] == pytest.approx(tail, rel=1e-5, abs=0)
    reported = REQUEST.processed.gather(1, REQUEST.sampled[:, None])[:, 0]
    support.validate(REQUEST.sampled, V, inference_logprobs=reported)


def test_raw_logprobs_of_vllm_are_found_by_validate():
    support = Support.from_vllm(REQUEST.mask(), REQUEST.vllm_logprobs(REQUEST.raw))
    with pytest.raises(ValueError, match="must add up to 1"):
        support.validate(REQUEST.sampled, V)


def test_log_probabilities_of_the_kept_ids_in_their_order():
    logprobs = [
        row[ids].tolist() for ids, row in zip(REQUEST.mask(), REQUEST.processed, strict=True)
    ]
    expected = REQUEST.full()
    assert expected.host.complete.all()
    same(Support.from_vllm(REQUEST.mask(), logprobs), expected)
    choice = {"sampling_mask": REQUEST.mask(), "sampling_mask_logprobs": logprobs, "text": "..."}
    same(Support.from_vllm(json.loads(json.dumps(choice))), expected)
    same(
        Support.from_vllm(SamplingMask(REQUEST.mask()), [torch.tensor(r) for r in logprobs]),
        expected,
    )


@pytest.mark.parametrize(
    ("mask", "logprobs", "message"),
    [
        (
            None,
            None,
            "mask must hold the kept ids of each token, got NoneType: was the sampling mask asked",
        ),
        ({"text": "..."}, None, "mask must hold the kept ids of each token, got dict"),
        ("[[1]]", None, "mask must hold the kept ids of each token, got str"),
        ({"token_ids": [1, 2], "offsets": [0, 1]}, None, r"offsets must rise from 0 to 2, got"),
        ({"token_ids": [1, 2], "offsets": [1, 2]}, None, r"offsets must rise .*got \[1, 2\]"),
        ({"token_ids": [1, 2], "offsets": [0, 2, 1, 2]}, None, "offsets must rise from 0 to 2"),
        ({"token_ids": [1, 2], "offsets": []}, None, r"offsets must rise from 0 to 2, got \[\]"),
        ([[1], [2]], [{1: 0.0}], r"logprobs must have one entry a token \(2\), got 1"),
        (
            [[1], [2, 3]],
            [[0.0], [0.0]],
            r"logprobs\[1\] must have one entry a kept id \(2\), got 1",
        ),
        ([[1], [2, 3]], [-0.5, -0.5], r"logprobs\[0\] must be a list of floats, got -0.5"),
        ([[1]], [1.0], r"logprobs\[0\] must be a list of floats, got 1.0"),
        ([[1], [2, 3]], [[0.0], None], r"logprobs\[1\] must .*, got None"),
        ([[1], [2, 3]], [{1: 0.0}, None], r"logprobs\[1\] must .*, got None"),
        ([[1], [2, 3]], [{1: 0.0}, {2: 0.0, 3: -math.inf}], "kept id 3 of row 1 has .* -inf"),
        ([[1], [2, 3]], [[0.0], [0.0, -math.inf]], "kept id 3 of row 1 has .* -inf"),
        ([[1], [2, 3]], [{1: 0.0}, {2: math.inf, 3: 0.0}], "kept id 2 of row 1 has .* inf"),
        ([[1], None], None, r"mask\[1\] must be a list of ids, got None"),
        ([[1], "ab"], None, r"mask\[1\] must be a list of ids, got 'ab'"),
        ([[1], 2], None, r"mask\[1\] must be a list of ids, got 2"),
        ({"token_ids": [[1], None]}, [{1: 0.0}, {}], r"mask\[1\] must be a list of ids, got None"),
        ([[1], [2, None]], None, r"mask\[1\]\[1\] must be an int, got None"),
        ([[1.5]], None, r"mask\[0\]\[0\] must be an int, got 1.5"),
        (
            {"token_ids": [1, 2], "offsets": [0, None]},
            None,
            r"offsets\[1\] must be an int, got None",
        ),
        ([[1], [2, 3]], [[0.0], [0.0, None]], r"logprobs\[1\]\[1\] must be a float, got None"),
        ([[1], [2]], [{1: 0.0}, {2: None}], r"logprobs\[1\] must hold .*, got None for 2"),
        ([[3]], [{"3": {"rank": 1}}], r"logprobs\[0\] must hold .*, got None for '3'"),
        ([[3]], [{"x": 0.0}], r"logprobs\[0\] must hold .*, got 0.0 for 'x'"),
        ([[1, 1]], [{1: 0.0}], "ids must be unique in a REPLAY row, got 1 twice in row 0"),
        ([[1], [2**31]], None, r"mask\[1\]: ids must be in \[0, 2\*\*31\), got 2147483648"),
        ([[1], [2**63]], None, r"mask\[1\]\[0\] must be an int, got 9223372036854775808"),
        ([numpy.array([1.0])], None, r"mask\[0\] must be a list of ids, got torch.float64 \[1\]"),
        (numpy.array([1, 2]), None, "mask must hold the kept ids of each token, got one id of"),
        ({"token_ids": [1, 2], "lengths": [1, 2]}, None, r"lengths must add up to 2, got \[1, 2\]"),
        ({"token_ids": [1, 2], "lengths": [3, -1]}, None, r"lengths must add up to 2, got"),
        (
            {"token_ids": [1, 2], "offsets": [0, 2]},
            [0.0],
            r"logprobs must .* a kept id \(2\), got 1",
        ),
        (
            {"token_ids": [1, 2], "offsets": [0, 1, 2]},
            [[0.0]],
            r"logprobs must have one entry a token \(2\), got 1",
        ),
        ([[1]], 0.5, "logprobs must be a row a token, or hold them as content, got 0.5"),
        ([[1]], [torch.zeros(1, dtype=torch.bfloat16)], r"logprobs\[0\] must be in float32 or"),
        (
            [[1]],
            {"tokens": ["a"], "top_logprobs": [{"a": 0.0}]},
            r"logprobs .* got \['tokens', 'top",
        ),
        (
            [[1]],
            {"content": None, "sampled": [0.0]},
            r"logprobs must .* content, got \['sampled'\]",
        ),
        ([[1]], [{"token": "the", "logprob": 0.0}], r"logprobs\[0\] .* by id, got 'the': ask"),
        ([[1]], [{"token": "1", "logprob": 0.0}], r"logprobs\[0\] .* by id, got '1': ask"),
        ([[1]], [{"logprob": 0.0}], r"logprobs\[0\] must name its tokens by id, got None"),
        ([[1]], [{"token_id": 1, "logprob": None}], r"logprobs\[0\]: logprob must be a float, got"),
        ([[1]], [{"token_id": 2**31, "logprob": 0.0}], r"logprobs\[0\]: ids must be in \[0, 2"),
        ([[1, -1]], None, r"mask\[0\]: ids must be in \[0, 2\*\*31\), got -1"),
    ],
)
def test_what_vllm_cannot_have_meant_is_refused(mask, logprobs, message):
    with pytest.raises(ValueError, match=message):
        Support.from_vllm(mask, logprobs)


@pytest.mark.parametrize("ascending", [True, False])
def test_kept_ids_in_any_order(ascending, monkeypatch):
    """Engines list them in ascending order, and then none is sorted."""
    mask, top = REQUEST.mask(), REQUEST.vllm_logprobs(REQUEST.processed)
    expected = Support.from_vllm(mask, top)
    assert 0 < int(expected.known.sum()) < expected.nnz
    if ascending:
        monkeypatch.setattr(torch.Tensor, "sort", None)
        same(Support.from_vllm(mask, top), expected)
        return
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(len(row), generator=generator) for row in mask]
    shuffled = [[row[i] for i in order] for row, order in zip(mask, orders, strict=True)]
    starts = expected.offsets[:-1].tolist()
    moved = torch.cat([start + order for start, order in zip(starts, orders, strict=True)])
    flat, offsets = end_to_end(shuffled)
    for form in (shuffled, {"token_ids": numpy.array(flat, numpy.int32), "offsets": offsets}):
        got = Support.from_vllm(form, top)
        assert torch.equal(got.ids, expected.ids[moved])
        assert torch.equal(got.known, expected.known[moved])
        known = got.known
        assert torch.equal(got.sampler_logprobs[known], expected.sampler_logprobs[moved][known])
        tails = expected.sampler_tail_mass
        torch.testing.assert_close(got.sampler_tail_mass, tails, rtol=0, atol=1e-6)


def test_of_several_impossible_ids_the_first_kept_one_is_named():
    """In the order of the mask, whatever that of the log-probabilities."""
    top = [{7: 0.0}, {9: math.inf, 4: -math.inf, 2: 0.0}, {1: -math.inf}]
    with pytest.raises(ValueError, match=r"^logprobs: kept id 4 of row 1 has .* -inf"):
        Support.from_vllm([[7], [2, 4, 9], [1]], top)
    with pytest.raises(ValueError, match=r"^logprobs: kept id 9 of row 1 has .* inf: the mask"):
        Support.from_vllm([[7], [9, 4, 2], [1]], top)


@pytest.mark.parametrize("dtype", [numpy.float32, numpy.float64])
@pytest.mark.parametrize("bad", [-math.inf, math.inf])
def test_an_impossible_id_among_flat_arrays_is_named(dtype, bad):
    """Beside others that are unknown, and beyond a row without any."""
    q = numpy.array([-0.7, -0.7, NAN, bad, -9999.0], dtype)
    arrays = {"token_ids": numpy.array([5, 9, 4, 9, 11], numpy.int32), "offsets": [0, 2, 2, 5]}
    with pytest.raises(ValueError, match=f"kept id 9 of row 2 has log-probability {bad}: the mask"):
        Support.from_vllm(arrays | {"logprobs": q})
    q[3] = -1.5
    support = Support.from_vllm(arrays | {"logprobs": q})
    assert support.known.tolist() == [True, True, False, True, False]
    assert support.sampler_logprobs[3] == -1.5


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [(numpy.int32, -1), (numpy.int64, -1), (numpy.int64, 2**31), (numpy.uint32, 2**31)],
)
def test_an_id_out_of_range_among_arrays_is_named(dtype, bad):
    ids = numpy.array([5, 9, 4, bad, 11], dtype)
    with pytest.raises(ValueError, match=rf"^mask\[2\]: ids must be in \[0, 2.*, got {bad}$"):
        Support.from_vllm({"token_ids": ids, "offsets": [0, 2, 2, 5]})
    with pytest.raises(ValueError, match=rf"^mask\[1\]: ids must be in \[0, 2.*, got {bad}$"):
        Support.from_vllm([ids[:2], ids[2:]])


def test_an_engine_may_use_its_memory_again():
    ids, q = numpy.array([5, 9, 4], numpy.int32), numpy.array([-0.7, -0.7, 0.0], numpy.float32)
    offsets, widths = numpy.array([0, 2, 3]), numpy.array([2, 1])
    made = [
        Support.from_vllm({"token_ids": ids, "offsets": offsets, "logprobs": q}),
        Support.from_vllm([ids[:2], ids[2:]], [q[:2], q[2:]]),
        Support.from_sglang(SamplingMaskChunk(widths, ids, q)),
    ]
    expected = Support.from_rows([([5, 9], [-0.7, -0.7]), ([4], [0.0])])
    for values in (ids, q, offsets, widths):
        values[:] = 7
    for support in made:
        same(support, expected)


def test_where_nothing_was_kept_nothing_is_read():
    """Of an aborted request, whose empty arrays may be of any sort."""
    nothing = {"token_ids": [], "sampling_mask": {"token_ids": [], "offsets": [0]}}
    for logprobs in (None, [], numpy.zeros(0, numpy.int64), numpy.zeros(0, numpy.float16)):
        rows = Support.read_answer(nothing | {"logprobs": logprobs})
        assert [len(part) for part in rows] == [0, 0, 0]


def test_a_dict_that_knows_none_of_the_kept_ids():
    """Prefill-style rows: the ids alone, as without log-probabilities."""
    support = Support.from_vllm([[1, 2], [3]], [{}, {3: 0.0}])
    assert support.known.tolist() == [False, False, True]
    assert support.sampler_tail_mass.tolist() == [1, 0]


def vllm_answers(request=REQUEST):
    """The whole answers that hold log-probabilities of every kept id."""
    mask, logprobs, tokens = request.mask(), request.kept_logprobs(), request.sampled.tolist()
    choice = {"token_ids": tokens, "sampling_mask": mask, "sampling_mask_logprobs": logprobs}
    held = {"token_ids": mask, "logprobs": logprobs}
    flat, offsets = end_to_end(mask)
    values, _ = end_to_end(logprobs)
    arrays = SamplingMaskLists(
        numpy.array(flat, numpy.int32),
        numpy.array(offsets),
        logprobs=numpy.array(values, numpy.float32),
    )
    rows = [numpy.array(row, numpy.float32) for row in logprobs]
    return {
        "object": CompletionOutput(tokens, SamplingMask(mask, logprobs)),
        "object of arrays": CompletionOutput(tokens, arrays),
        "object of flat ids": CompletionOutput(tokens, arrays._replace(logprobs=rows)),
        "object of rows of arrays": CompletionOutput(
            tokens, SamplingMask([numpy.array(row) for row in mask], rows)
        ),
        "dict": {"token_ids": tokens, "sampling_mask": held},
        "JSON": as_json({"token_ids": tokens, "sampling_mask": held}),
        "choice": choice | {"logprobs": None},
        "choice of JSON": as_json(choice | {"logprobs": {"content": request.content(request.raw)}}),
        "response": as_json({"choices": [choice | {"logprobs": {"content": None}}]}),
        "request": SimpleNamespace(
            prompt_token_ids=[1], outputs=[CompletionOutput(tokens, SamplingMask(mask, logprobs))]
        ),
    }


@pytest.mark.parametrize("form", vllm_answers())
def test_the_masks_own_log_probabilities_are_not_dropped(form):
    answer = vllm_answers()[form]
    expected = REQUEST.full()
    same(Support.from_vllm(answer), expected)
    expected.validate(REQUEST.sampled, V)
    if form == "object":  # the mask alone
        same(Support.from_vllm(answer.sampling_mask), expected)


def vllm_top_answers(request=REQUEST):
    """The whole answers whose log-probabilities are the top 20 and the sampled token's."""
    mask, top = request.mask(), request.vllm_logprobs(request.processed)
    tokens = request.sampled.tolist()
    flat, offsets = end_to_end(mask)
    texts = request.content(request.processed, name=lambda t: {"token": f"token_id:{t}"})
    objects = [
        SimpleNamespace(
            **row | {"top_logprobs": [SimpleNamespace(**e) for e in row["top_logprobs"]]}
        )
        for row in texts
    ]
    choice = {"token_ids": tokens, "sampling_mask": mask}
    content = {"content": request.content(request.processed)}
    return {
        "object": CompletionOutput(tokens, SamplingMask(mask), top),
        "flat log-probabilities": CompletionOutput(
            tokens, SamplingMask(mask), FlatLogprobs.of(top)
        ),
        "flat ids": CompletionOutput(
            tokens, SamplingMaskLists(numpy.array(flat), numpy.array(offsets)), top
        ),
        "content": as_json(choice | {"logprobs": content}),
        "content of texts": as_json(choice | {"logprobs": {"content": texts}}),
        "content of objects": choice | {"logprobs": SimpleNamespace(content=objects)},
        "nothing but -9999 of its own": CompletionOutput(
            tokens, SamplingMask(mask, [[-9999.0] * len(row) for row in mask]), top
        ),
    }


@pytest.mark.parametrize("form", vllm_top_answers())
def test_an_answers_own_top_log_probabilities_are_taken(form):
    mask, top = REQUEST.mask(), REQUEST.vllm_logprobs(REQUEST.processed)
    same(Support.from_vllm(vllm_top_answers()[form]), Support.from_vllm(mask, top))


def test_content_as_an_argument():
    content = REQUEST.content(REQUEST.processed)
    expected = Support.from_vllm(REQUEST.mask(), REQUEST.vllm_logprobs(REQUEST.processed))
    for logprobs in (content, {"content": content}):
        same(Support.from_vllm(REQUEST.mask(), logprobs), expected)


def test_the_first_source_that_knows_an_id_wins():
    answer = {
        "token_ids": [5, 6],
        "sampling_mask": {"token_ids": [[5, 9], [6, 7]], "logprobs": [[-2.0, -2.5], [-2.0, NAN]]},
        "sampling_mask_logprobs": [[-3.0, -3.5], [-3.0, -9999.0]],
        "logprobs": [{5: -4.0, 9: -4.5}, {6: -4.0, 7: -4.5}],
    }
    assert Support.from_vllm(answer).sampler_logprobs.tolist() == [-2, -2.5, -2, -4.5]
    support = Support.from_vllm(answer, [{9: -1.0}, {}])
    assert support.sampler_logprobs.tolist() == [-2, -1, -2, -4.5]
    del answer["logprobs"]
    assert Support.from_vllm(answer).known.tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"logprobs": [{5: 0.0}]}, "mask.logprobs"),
        ({"logprobs": {"content": [{"token_id": 5, "logprob": 0.0}]}}, "mask.logprobs"),
        ({"sampling_mask_logprobs": [[0.0]]}, "mask.sampling_mask_logprobs"),
        (
            {"sampling_mask": {"token_ids": [[5], [6]], "logprobs": [[0.0]]}},
            "mask.sampling_mask.logprobs",
        ),
    ],
)
def test_sources_of_another_length_are_refused_though_another_knows_all(changes, name):
    answer = {"token_ids": [5, 6], "sampling_mask": [[5], [6]]} | changes
    with pytest.raises(ValueError, match=rf"^{name} must have one entry a token \(2\), got 1"):
        Support.from_vllm(answer, [[0.0], [0.0]])


@pytest.mark.parametrize(
    "unknown", [NAN, -9999.0, -10000.0, -1e30, float(torch.finfo(torch.float32).min)]
)
def test_what_an_engine_does_not_know_is_unknown(unknown):
    """In a row of kept ids, flat, and among the top ones: the tail inside the kept set."""
    q = [math.log(0.25), unknown, math.log(0.5)]
    expected = Support.from_rows([([2, 3, 4], [q[0], NAN, q[2]]), ([5], [0.0]), ([6, 7], None)])
    assert expected.sampler_tail_mass.tolist() == [0.25, 0, 1]
    mask, rows = [[2, 3, 4], [5], [6, 7]], [q, [0.0], [unknown, unknown]]
    flat, offsets = end_to_end(mask)
    for logprobs in (
        rows,
        [numpy.array(row) for row in rows],
        [dict(zip(ids, row, strict=True)) for ids, row in zip(mask, rows, strict=True)],
        [
            [{"token_id": i, "logprob": v} for i, v in zip(ids, row, strict=True)]
            for ids, row in zip(mask, rows, strict=True)
        ],
    ):
        if isinstance(logprobs[0], list) and isinstance(logprobs[0][0], dict):
            logprobs = [row[0] | {"top_logprobs": row} for row in logprobs]
        same(Support.from_vllm(mask, logprobs), expected)
    arrays = {"token_ids": numpy.array(flat), "offsets": offsets}
    same(Support.from_vllm(arrays, numpy.array(end_to_end(rows)[0])), expected)
    meta = {"output_token_sampling_mask": mask, "output_token_sampling_logprobs": rows}
    same(Support.from_sglang(meta), expected)


@pytest.mark.parametrize(
    "answer",
    [
        {"token_ids": [5, 9], "sampling_mask": None},
        {"token_ids": [5, 9], "sampling_mask": None, "logprobs": {"content": None}},
        {"token_ids": [5, 9], "finish_reason": "stop"},
        {"token_ids": [], "sampling_mask": None},
        CompletionOutput([5, 9]),
        CompletionOutput(numpy.array([5, 9])),
        SimpleNamespace(token_ids=[5, 9], logprobs=None),
        SimpleNamespace(outputs=[CompletionOutput([5, 9])]),
        [5, 9],
    ],
)
def test_an_answer_without_a_mask_asks_whether_it_was_asked_for(answer):
    message = "^mask must hold the kept ids .*: was the sampling mask asked for"
    with pytest.raises(ValueError, match=message):
        Support.from_vllm(answer)
    with pytest.raises(ValueError, match=message.replace("mask", "answer", 1)):
        Support.read_answer(answer)


def test_one_output_of_several_must_be_chosen():
    one = CompletionOutput([5], SamplingMask([[5]]))
    for several in ({"choices": [{}, {}]}, SimpleNamespace(outputs=[one, one])):
        with pytest.raises(ValueError, match=r"mask must be one output, got 2 (choices|outputs)"):
            Support.from_vllm(several)


ROWS = st.lists(
    st.lists(
        st.tuples(
            st.integers(0, 2**31 - 1),
            st.one_of(st.floats(-30, 0, width=32), st.sampled_from([NAN, -9999.0])),
        ),
        max_size=5,
        unique_by=lambda entry: entry[0],
    ),
    max_size=6,
)


@given(ROWS)
def test_any_rows_in_any_form(rows):
    ids = [[token for token, _ in row] for row in rows]
    q = [[NAN if value == -9999.0 else value for _, value in row] for row in rows]
    given_q = [[value for _, value in row] for row in rows]
    expected = Support.from_rows(zip(ids, q, strict=True))
    flat, offsets = end_to_end(ids)
    values = numpy.array(end_to_end(given_q)[0], numpy.float32)
    arrays = {"token_ids": numpy.array(flat, numpy.int32), "offsets": numpy.array(offsets)}
    widths = torch.tensor(offsets).diff()
    chunk = SamplingMaskChunk(widths, torch.tensor(flat, dtype=torch.int32), values)
    for support in (
        Support.from_vllm(ids, given_q),
        Support.from_vllm(ids, [dict(row) for row in rows]),
        Support.from_vllm(ids, [dict(reversed(row)) for row in rows]),
        Support.from_vllm({"token_ids": ids, "logprobs": given_q}),
        Support.from_vllm([torch.tensor(row, dtype=torch.int64) for row in ids], given_q),
        Support.from_vllm(arrays | {"logprobs": values}),
        Support.from_vllm(arrays, given_q),
        Support.from_vllm(arrays, [dict(row) for row in rows]),
        Support.from_sglang(chunk),
    ):
        same(support, expected)


# --- SGLang ---


def sglang_meta(request, *, top=20, support_mode=False, mask=True):
    """`meta_info`: log-probabilities over V, and the sampled token's over the kept set."""
    sampled = request.sampled.tolist()
    raw, processed = request.raw, request.processed
    meta = {
        "output_token_sampling_logprobs": [float(processed[i, t]) for i, t in enumerate(sampled)],
        "output_token_logprobs": [(float(raw[i, t]), t, "?") for i, t in enumerate(sampled)],
    }
    if top:
        meta["output_top_logprobs"] = [
            [(float(v), int(t), None) for v, t in zip(*row.topk(top), strict=True)] for row in raw
        ]
    if support_mode:
        meta["output_token_sampling_logprobs"] = [
            row[ids].tolist() for ids, row in zip(request.mask(), processed, strict=True)
        ]
    if mask:
        meta["output_token_sampling_mask"] = request.mask()
    return meta


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sglangs_top_log_probabilities_are_shifted_onto_the_kept_set(seed):
    request = sampled_request(seed)
    support = Support.from_sglang(json.loads(json.dumps(sglang_meta(request))))
    assert support.ids.tolist() == [token for row in request.mask() for token in row]
    bounds = support.offsets.tolist()
    for row in range(N):
        entries = slice(bounds[row], bounds[row + 1])
        ids, known = support.ids[entries].long(), support.known[entries]
        expected = request.logits[row, ids].log_softmax(0)  # over the kept set alone
        top = set(request.raw[row].topk(20).indices.tolist()) | {int(request.sampled[row])}
        assert set(ids[known].tolist()) == top & set(ids.tolist())
        got = support.sampler_logprobs[entries][known].double()
        torch.testing.assert_close(got, expected[known], rtol=0, atol=1e-6)
        tail = max(0.0, 1 - float(expected[known].exp().sum()))
        assert support.sampler_tail_mass[row] == pytest.approx(tail, abs=1e-6)
    # The shift is real: over V these log-probabilities would have been others.
    assert (
        float(
            (
                request.raw.gather(1, request.sampled[:, None])
                - request.processed.gather(1, request.sampled[:, None])
            )
            .abs()
            .max()
        )
        > 0.05
    )
    reported = request.processed.gather(1, request.sampled[:, None])[:, 0]
    support.validate(request.sampled, V, inference_logprobs=reported)


def test_sglangs_support_mode_needs_nothing_else():
    meta = sglang_meta(REQUEST, support_mode=True)
    same(Support.from_sglang(meta), REQUEST.full())
    only = {"output_token_sampling_logprobs": meta["output_token_sampling_logprobs"]}
    same(Support.from_sglang(REQUEST.mask(), only), REQUEST.full())


def sglang_chunk(request, values):
    flat, _ = end_to_end(request.mask())
    arrays = (
        numpy.array(request.widths.tolist(), numpy.int32),
        numpy.array(flat, numpy.int32),
        numpy.array(values, numpy.float32),
    )
    for one in arrays:  # as they come out of another process
        one.flags.writeable = False
    return SamplingMaskChunk(*arrays)


@pytest.mark.parametrize(
    "rows",
    [
        lambda rows: rows,
        lambda rows: as_json(rows),
        lambda rows: [tuple(row) for row in rows],
        lambda rows: tuple(rows),
        lambda rows: [numpy.array(row, numpy.float32) for row in rows],
        lambda rows: [torch.tensor(row, dtype=torch.float64) for row in rows],
        lambda rows: numpy.array([*rows, None], dtype=object)[:-1],
    ],
)
@pytest.mark.parametrize("scored", [False, True])
def test_support_mode_takes_rows_of_any_sort(rows, scored):
    meta = sglang_meta(REQUEST, support_mode=True, top=0)
    meta["output_token_sampling_logprobs"] = rows(meta["output_token_sampling_logprobs"])
    if not scored:
        del meta["output_token_logprobs"]
    same(Support.from_sglang(meta), REQUEST.full())
    meta["output_token_sampling_mask"] = [numpy.array(row) for row in REQUEST.mask()]
    same(Support.from_sglang({"text": "...", "meta_info": meta}), REQUEST.full())


def test_chunks_of_the_engine():
    values, _ = end_to_end(REQUEST.kept_logprobs())
    chunk = sglang_chunk(REQUEST, values)
    meta = sglang_meta(REQUEST, mask=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(Support.from_sglang(chunk), REQUEST.full())
        same(Support.from_sglang({"output_token_sampling_mask": chunk}), REQUEST.full())
    # Selected mode: one value a row, the sampled token's.
    selected = sglang_chunk(REQUEST, meta["output_token_sampling_logprobs"])
    meta["output_token_sampling_logprobs"] = selected.logprobs.tolist()
    expected = Support.from_sglang(REQUEST.mask(), meta)
    del meta["output_token_sampling_logprobs"]
    same(Support.from_sglang({"output_token_sampling_mask": selected, **meta}), expected)
    same(Support.from_sglang(selected, meta), expected)
    with pytest.raises(ValueError, match="output_token_logprobs is missing"):
        Support.from_sglang(selected)
    short = sglang_chunk(REQUEST, values[:-1])
    message = r"output_token_sampling_logprobs must have one entry a token \(12\), got"
    with pytest.raises(ValueError, match=message):
        Support.from_sglang(short)


def test_selected_mode_takes_arrays_and_the_tokens_of_the_response():
    meta = sglang_meta(REQUEST, top=0)
    expected = Support.from_sglang(meta)
    name = "output_token_sampling_logprobs"
    for values in (numpy.array(meta[name]), torch.tensor(meta[name], dtype=torch.float64)):
        same(Support.from_sglang(meta | {name: values}), expected)
    del meta["output_token_logprobs"]
    tokens = REQUEST.sampled.tolist()
    same(Support.from_sglang({"output_ids": tokens, "meta_info": meta}), expected)
    same(Support.from_sglang({"response_token_ids": tokens, "meta_info": meta}), expected)
    with pytest.raises(ValueError, match=r"output_ids must have one entry a token \(12\), got 1"):
        Support.from_sglang({"output_ids": tokens[:1], "meta_info": meta})
    # A list of top log-probabilities cannot be shifted by it.
    meta["output_top_logprobs"] = sglang_meta(REQUEST)["output_top_logprobs"]
    with pytest.raises(ValueError, match="output_token_logprobs is missing"):
        Support.from_sglang({"output_ids": tokens, "meta_info": meta})


def test_flat_top_log_probabilities_are_refused_not_dropped():
    meta = sglang_meta(REQUEST, top=0)
    meta |= {"output_top_logprobs_shape": [12, 1], "output_top_logprobs_val_flat": [0.0] * 12}
    message = "ask without return_flat_raw_output_top_logprobs"
    with pytest.raises(ValueError, match=message):
        Support.from_sglang(meta)
    del meta["output_token_sampling_mask"]
    with pytest.raises(ValueError, match=message):
        Support.from_top_logprobs(meta)


def test_sglang_without_top_log_probabilities_knows_the_sampled_token():
    support = Support.from_sglang(sglang_meta(REQUEST, top=0))
    labels = REQUEST.sampled[support.entry_rows]
    assert torch.equal(support.known, support.ids == labels)
    expected = REQUEST.processed.gather(1, REQUEST.sampled[:, None])[:, 0]
    assert torch.equal(support.sampler_logprobs[support.known], expected.float())
    torch.testing.assert_close(
        support.sampler_tail_mass.double(), 1 - expected.exp(), rtol=0, atol=1e-6
    )
    meta = sglang_meta(REQUEST)
    meta["output_top_logprobs"] = [None, *meta["output_top_logprobs"][1:]]
    one = Support.from_sglang(meta)[:1]
    assert int(one.known.sum()) == 1
    assert one.ids[one.known].tolist() == [int(REQUEST.sampled[0])]


def test_sglangs_mask_alone_and_beside_its_meta_info():
    alone = Support.from_sglang(REQUEST.mask())
    same(alone, Support.from_rows([(row, None) for row in REQUEST.mask()]))
    same(Support.from_sglang({"output_token_sampling_mask": REQUEST.mask()}), alone)
    meta = sglang_meta(REQUEST)
    without = sglang_meta(REQUEST, mask=False)
    same(Support.from_sglang(REQUEST.mask(), without), Support.from_sglang(meta))


def test_missing_fields_of_sglang_are_named():
    for gone, message in [
        (
            "output_token_sampling_mask",
            "mask must hold the kept ids of each token, got dict: was the sampling mask asked for",
        ),
        ("output_token_sampling_logprobs", "output_token_sampling_logprobs is missing"),
        ("output_token_logprobs", "output_token_logprobs is missing"),
    ]:
        meta = sglang_meta(REQUEST)
        del meta[gone]
        with pytest.raises(ValueError, match=message):
            Support.from_sglang(meta)
    nothing = sglang_meta(REQUEST) | {"output_token_sampling_mask": None}
    with pytest.raises(ValueError, match="got NoneType: was the sampling mask asked for"):
        Support.from_sglang({"output_ids": REQUEST.sampled.tolist(), "meta_info": nothing})
    for name in ("output_token_sampling_logprobs", "output_token_logprobs", "output_top_logprobs"):
        meta = sglang_meta(REQUEST)
        meta[name] = meta[name][:-1]
        message = rf"{name} must have one entry a token \(12\), got 11"
        with pytest.raises(ValueError, match=message):
            Support.from_sglang(meta)


@pytest.mark.parametrize("row", [0, 3])
def test_a_token_that_sglang_did_not_score_is_named(row):
    meta = sglang_meta(REQUEST)
    meta["output_token_sampling_logprobs"][row] = None
    message = rf"output_token_sampling_logprobs\[{row}\] must be a float, got None"
    with pytest.raises(ValueError, match=message):
        Support.from_sglang(meta)


def test_rows_of_another_request_are_refused():
    meta = sglang_meta(REQUEST)
    token, kept = int(REQUEST.sampled[0]), REQUEST.mask()[0]
    meta["output_token_sampling_logprobs"][0] = -math.inf
    assert token in kept
    with pytest.raises(ValueError, match=r"of row 0 has log-probability -inf"):
        Support.from_sglang(meta)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "output_token_logprobs",
            None,
            r"output_token_logprobs\[2\] must be \(logprob, id, text\)",
        ),
        ("output_token_logprobs", (-1.0,), r"\[2\] must be \(logprob, id, text\), got \(-1.0,\)"),
        ("output_token_logprobs", 7.0, r"output_token_logprobs\[2\] must be .*, got 7.0"),
        (
            "output_token_logprobs",
            (None, 0, ""),
            r"output_token_logprobs\[2\]\[0\] must be a float",
        ),
        ("output_top_logprobs", [None], r"output_top_logprobs\[2\]\[0\] must be .*, got None"),
        (
            "output_top_logprobs",
            [(None, 1, "")],
            r"output_top_logprobs\[2\]\[0\]\[0\] must be a float",
        ),
        ("output_token_sampling_mask", None, r"mask\[2\] must be a list of ids, got None"),
    ],
)
def test_fields_that_sglang_left_empty_are_named(name, value, message):
    meta = sglang_meta(REQUEST)
    if name == "output_token_logprobs" and isinstance(value, tuple) and value[0] is None:
        value = (None, int(REQUEST.sampled[2]), "")
    meta[name][2] = value
    with pytest.raises(ValueError, match=message):
        Support.from_sglang(meta)


@pytest.mark.parametrize("support_mode", [False, True])
def test_a_sampled_token_outside_its_kept_set_is_refused(support_mode):
    meta = sglang_meta(REQUEST, support_mode=support_mode)
    outside = int((~REQUEST.kept[4]).nonzero()[0])
    meta["output_token_logprobs"][4] = (meta["output_token_logprobs"][4][0], outside, "?")
    width = len(REQUEST.mask()[4])
    message = rf"output_token_logprobs\[4\] must be .* token {outside}, .* row \({width} ids\) does"
    with pytest.raises(ValueError, match=message):
        Support.from_sglang(meta)


def test_a_kept_mass_above_one_is_refused():
    """Over the kept set a token is at least as likely as over the vocabulary."""
    for below, fits in ((0.9e-3, True), (1.1e-3, False), (1.0, False)):
        meta = sglang_meta(REQUEST)
        raw, token, text = meta["output_token_logprobs"][4]
        meta["output_token_sampling_logprobs"][4] = raw - below
        if fits:
            Support.from_sglang(meta)
            continue
        with pytest.raises(
            ValueError, match=r"output_token_sampling_logprobs\[4\] must be at least"
        ):
            Support.from_sglang(meta)
    for raw in (-math.inf, NAN):
        meta["output_token_logprobs"][4] = (raw, token, text)
        with pytest.raises(
            ValueError, match=r"output_token_sampling_logprobs\[4\] must be at least"
        ):
            Support.from_sglang(meta)


# --- untruncated requests ---


def head_answers(request, k):
    """What answers without a mask hold: the top k of an untruncated distribution."""
    top = request.vllm_logprobs(request.raw, k)
    floats = [{token: entry.logprob for token, entry in row.items()} for row in top]
    content = request.content(request.raw, k)
    texts = request.content(request.raw, k, name=lambda t: {"token": f"token_id:{t}"})
    meta = sglang_meta(request, top=k, mask=False)
    del meta["output_token_sampling_logprobs"]
    tokens = request.sampled.tolist()
    return {
        "objects": top,
        "floats": floats,
        "JSON": as_json(floats),
        "flat": FlatLogprobs.of(top),
        "completion": CompletionOutput(tokens, None, top),
        "request": SimpleNamespace(outputs=[CompletionOutput(tokens, None, FlatLogprobs.of(top))]),
        "content": as_json({"content": content}),
        "choice": as_json({"token_ids": tokens, "logprobs": {"content": content}}),
        "chat": as_json({"choices": [{"index": 0, "logprobs": {"content": texts}}]}),
        "SGLang": meta,
        "SGLang's JSON": as_json({"text": "...", "meta_info": meta}),
    }


@pytest.mark.parametrize("k", [1, 5, V])
@pytest.mark.parametrize("form", head_answers(REQUEST, 2))
def test_top_log_probabilities_become_head_rows(form, k):
    """At V every id is known and nothing is left; else the sampled token may be one more."""
    support = Support.from_top_logprobs(head_answers(REQUEST, k)[form])
    assert support.kind.tolist() == [RowKind.HEAD] * N
    assert support.known.all()
    ids, q, *_ = support.to_padded()
    for row, token in enumerate(REQUEST.sampled.tolist()):
        held = ids[row][ids[row] >= 0].tolist()
        assert sorted(held) == sorted({*REQUEST.raw[row].topk(k).indices.tolist(), token})
        exact = REQUEST.raw[row, held]
        assert torch.equal(q[row, : len(held)], exact.float())
        rest = max(0.0, 1 - float(exact.float().double().exp().sum()))
        assert support.sampler_tail_mass[row] == pytest.approx(rest, rel=1e-6, abs=1e-12)
    assert (support.offsets.diff() > k).any() == (k < V)
    support.validate(REQUEST.sampled, V, inference_logprobs=label_q(REQUEST.raw))


def test_sglangs_top_log_probabilities_with_and_without_the_sampled_token():
    meta = sglang_meta(REQUEST, top=3)
    top, sampled = meta["output_top_logprobs"], meta["output_token_logprobs"]
    pairs = [entry[:2] for entry in sampled]
    whole = Support.from_top_logprobs(head_answers(REQUEST, 3)["SGLang"])
    same(Support.from_top_logprobs(top, sampled), whole)
    same(Support.from_top_logprobs(as_json(top), pairs), whole)
    alone = Support.from_top_logprobs(top)
    assert alone.offsets.diff().tolist() == [3] * N
    assert not torch.equal(alone.offsets, whole.offsets)
    alone.validate(REQUEST.sampled, V)


@pytest.mark.parametrize(
    ("logprobs", "sampled", "message"),
    [
        (CompletionOutput([1]), None, "logprobs must hold top .*, got CompletionOutput: were they"),
        ({"token_ids": [1], "logprobs": None}, None, r"top .* of each token, got dict: were they"),
        ({"meta_info": {"id": "x"}}, None, "top .* of each token, got dict: were they asked for"),
        (None, None, "top log-probabilities of each token, got NoneType"),
        ({"logprobs": {"tokens": ["a"]}}, None, r"logprobs must be .* content, got \['tokens'\]"),
        ({"sampling_mask": [[1]], "logprobs": [{1: 0.0}]}, None, "holds a sampling mask"),
        (sglang_meta(REQUEST), None, "logprobs holds a sampling mask: its request was truncated"),
        ([{1: 0.0}, {1: -0.1, 2: -math.inf}], None, r"logprobs\[1\]: id 2 has .* -inf: of the top"),
        (
            [{1: 0.0}, {1: -0.1, 2: -9999.0}],
            None,
            r"logprobs\[1\]: id 2 has .* -9999.0: of the top",
        ),
        ([{1: NAN}], None, r"logprobs\[0\]: id 1 has log-probability nan"),
        ([{1: 0.0}, None], None, r"logprobs\[1\] must hold log-probabilities by id, got None"),
        ([{1: 0.0}, 0.5], None, r"logprobs\[1\] must hold log-probabilities by id, got 0.5"),
        ([[(0.0, 1, None)], [(0.0,)]], None, r"logprobs\[1\]\[0\] must be \(logprob, id, text\)"),
        ([{" the": -0.1}], None, r"logprobs\[0\] must hold a log-probability an id, got -0.1 for"),
        ([{"token": "the", "logprob": 0.0}], None, "by id, got 'the': ask the server for return_t"),
        ([{2**31: -0.1}], None, r"logprobs\[0\]: ids must be in \[0, 2\*\*31\), got 2147483648"),
        ([{1: -0.1}], [], r"sampled must have one entry a token \(1\), got 0"),
        ([{1: -0.1}], [None], r"sampled\[0\] must be \(logprob, id, text\), got None"),
        ([{1: -0.1}], [(-math.inf, 3)], r"logprobs\[0\]: id 3 has log-probability -inf"),
    ],
)
def test_top_log_probabilities_that_cannot_be_are_refused(logprobs, sampled, message):
    with pytest.raises(ValueError, match=message):
        Support.from_top_logprobs(logprobs, sampled)


def test_no_tokens_of_an_untruncated_request():
    same(Support.from_top_logprobs([]), Support.from_rows([], kind=RowKind.HEAD))


# --- the sampled tokens' log-probabilities ---


def label_q(source, request=REQUEST):
    return source.gather(1, request.sampled[:, None])[:, 0].float()


def replay_answers():
    """Whole answers in which the sampled tokens are scored over the kept set."""
    meta, every = sglang_meta(REQUEST), sglang_meta(REQUEST, support_mode=True, top=0)
    tokens = REQUEST.sampled.tolist()
    unscored = {k: v for k, v in every.items() if k != "output_token_logprobs"}
    content = {"content": REQUEST.content(REQUEST.processed)}
    values, _ = end_to_end(REQUEST.kept_logprobs())
    return {
        **{f"vLLM, {form}": answer for form, answer in vllm_answers().items()},
        **{f"vLLM, top, {form}": answer for form, answer in vllm_top_answers().items()},
        "vLLM, tokens in the content alone": as_json(
            {"sampling_mask": REQUEST.mask(), "logprobs": content}
        ),
        "SGLang, meta_info": meta,
        "SGLang, response": as_json({"text": "...", "meta_info": meta}),
        "SGLang, support mode": every,
        "SGLang, chat": as_json(
            {"choices": [{"message": {}, "response_token_ids": tokens, "meta_info": unscored}]}
        ),
        "SGLang, tokens apart": {"output_ids": numpy.array(tokens), "meta_info": unscored},
        "SGLang, chunk": {
            "output_ids": tokens,
            "meta_info": {"output_token_sampling_mask": sglang_chunk(REQUEST, values)},
        },
    }


@pytest.mark.parametrize("form", replay_answers())
def test_a_whole_answer_gives_the_sampled_tokens_log_probabilities_as_well(form):
    answer = replay_answers()[form]
    support, inference_logprobs, token_ids = Support.read_answer(answer)
    read = Support.from_sglang if form.startswith("SGLang") else Support.from_vllm
    same(support, read(answer))
    assert token_ids.dtype == torch.int64
    assert torch.equal(token_ids, REQUEST.sampled)
    assert torch.equal(inference_logprobs, label_q(REQUEST.processed))
    support.validate(token_ids, V, inference_logprobs=inference_logprobs)


@pytest.mark.parametrize(
    "form", ["completion", "request", "choice", "chat", "SGLang", "SGLang's JSON"]
)
def test_an_untruncated_answer_gives_them_over_the_vocabulary(form):
    answer = head_answers(REQUEST, 5)[form]
    rows = Support.read_answer(answer, kind=RowKind.HEAD)
    same(rows.support, Support.from_top_logprobs(answer))
    assert torch.equal(rows.token_ids, REQUEST.sampled)
    assert torch.equal(rows.inference_logprobs, label_q(REQUEST.raw))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            CompletionOutput([5], SamplingMask([[5, 9]])),
            "token 5 of row 0 has no known .*asked for",
        ),
        (
            CompletionOutput(
                [5, 9], SamplingMask([[5, 9], [5, 9]], [[-0.7, -0.7], [-0.7, -9999.0]])
            ),
            "answer: token 9 of row 1 has no known log-probability",
        ),
        (
            CompletionOutput([5, 7], SamplingMask([[5], [9, 5]], [[0.0], [-0.7, -0.7]])),
            "answer: token 7 of row 1 is not among the 2 ids of its row",
        ),
        (
            CompletionOutput([5], SamplingMask([[5], [9]], [[0.0], [0.0]])),
            r"answer: the sampled tokens must have one entry a token \(2\), got 1",
        ),
        (SamplingMask([[5]], [[0.0]]), r"token_ids\[0\] must be an int, got \[5\]"),
        ({"sampling_mask": [[5]], "sampling_mask_logprobs": [[0.0]]}, r"sampled tokens .*, got 0"),
        (
            {"output_token_sampling_mask": [[5]], "output_token_sampling_logprobs": [[0.0]]},
            r"sampled tokens must have one entry a token \(1\), got 0",
        ),
        (
            {"output_token_sampling_mask": [[5]], "output_token_logprobs": [(0.0, 5, None)]},
            "output_token_sampling_logprobs is missing",
        ),
        ({"choices": [{}, {}]}, "answer must be one output, got 2 choices"),
    ],
)
def test_answers_that_do_not_score_their_tokens_are_refused(answer, message):
    with pytest.raises(ValueError, match=message):
        Support.read_answer(answer)


def test_other_kinds_are_no_answers():
    for kind in (RowKind.DRAWS, "HEAD", None):
        with pytest.raises(ValueError, match="kind must be REPLAY or HEAD, got"):
            Support.read_answer(vllm_answers()["object"], kind=kind)


def test_no_tokens_sampled():
    rows = Support.read_answer({"token_ids": [], "sampling_mask": []})
    assert [len(part) for part in rows] == [0, 0, 0]
    assert rows.inference_logprobs.dtype == torch.float32


# --- from the engine to the gradient ---


def gradients(support, request, hidden, weight, active):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    reported = request.processed.gather(1, request.sampled[:, None])[:, 0]
    support.validate(request.sampled, V, active, reported)
    head = fused_lm_head(hidden, weight, request.sampled, support, active=active)
    advantages = torch.linspace(-2, 2, N, dtype=torch.float64)
    inputs = LossInputs.from_head(head, support, inference_logprobs=reported, advantages=advantages)
    out = icepop_loss(inputs)
    return out, *torch.autograd.grad(out.loss, (hidden, weight))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_unpatched_engine_gives_centering_on_every_token(engine):
    """Sampler logits a little off the trainer's, top_k 40, top_p 0.9, 20 log-probabilities."""
    generator = torch.Generator().manual_seed(3)
    request = REQUEST
    if engine == "vllm":
        support = Support.from_vllm(
            SamplingMask(request.mask()), request.vllm_logprobs(request.processed)
        )
    else:
        support = Support.from_sglang(sglang_meta(request))
    # A head whose logits are the sampler's plus noise, some of it beyond icepop's bounds.
    weight = torch.randn(V, V, generator=generator, dtype=torch.float64) / 8
    noise = torch.randn(N, V, generator=generator, dtype=torch.float64)
    noise[1::4] *= 10
    hidden = torch.linalg.solve(weight, (request.logits + 0.3 * noise).T).T.contiguous()
    covered = support.host.complete
    everything = torch.ones(N, dtype=torch.bool)
    assert 5 <= int(covered.sum()) < N

    out, d_hidden, _ = gradients(support, request, hidden, weight, everything)
    exact, d_exact, _ = gradients(request.full(), request, hidden, weight, everything)
    for one in (out, exact):
        assert one.metrics["score_centering/uncentered"] == 0
        assert one.metric_counts["score_centering/uncentered"] == N
    assert exact.metrics["score_centering/tail_mass"] == 0
    assert out.metrics["score_centering/tail_mass"] > 0
    assert 0 < out.metrics["is_masked"] < 1
    torch.testing.assert_close(d_hidden[covered], d_exact[covered], rtol=1e-6, atol=1e-6)
    assert d_hidden.isfinite().all()
    # Elsewhere the modelled tail stands for what is not known: near, and not the same.
    apart = (d_hidden - d_exact).abs().amax(1)
    assert (apart[~covered] > 1e-6).any()
    assert (d_exact[covered].abs().amax(1) > 1e-3).any()

    # The weight gradient of the covered rows alone is the same as well.
    _, d_hidden, d_weight = gradients(support, request, hidden, weight, covered)
    _, d_exact, d_exact_weight = gradients(request.full(), request, hidden, weight, covered)
    torch.testing.assert_close(d_weight, d_exact_weight, rtol=1e-6, atol=1e-6)
    assert (d_hidden[~covered] == 0).all()

    # Without the log-probabilities the ids alone replay, and no token is centered.
    ids_only = Support.from_vllm(request.mask())
    bare, _, _ = gradients(ids_only, request, hidden, weight, everything)
    assert bare.metrics["score_centering/uncentered"] == 1
