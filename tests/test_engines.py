"""Supports from what vLLM and SGLang return, simulated from logits that the test knows."""

import json
import math
from collections.abc import MutableSequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch

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
    """vLLM's `SamplingMask` of a request: nested lists, or flat ids with offsets."""

    token_ids: list
    offsets: list | None = None


class SamplingMaskLists(NamedTuple):
    """What vLLM holds inside the engine: arrays."""

    token_ids: object
    offsets: object
    other: object = None


@dataclass
class FlatLogprobs(MutableSequence):
    """vLLM's flat form: it gives a dict a position, made when it is asked for."""

    starts: list = field(default_factory=list)
    tokens: list = field(default_factory=list)
    values: list = field(default_factory=list)

    @classmethod
    def of(cls, rows):
        flat = cls()
        for row in rows:
            flat.starts.append(len(flat.tokens))
            flat.tokens += row.keys()
            flat.values += [entry.logprob for entry in row.values()]
        return flat

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, i):
        stop = [*self.starts[1:], len(self.tokens)][i]
        entries = range(self.starts[i], stop)
        return {self.tokens[e]: Logprob(self.values[e], rank=e) for e in entries}

    def __setitem__(self, i, row):
        raise NotImplementedError

    def __delitem__(self, i):
        raise NotImplementedError

    def insert(self, i, row):
        raise NotImplementedError


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
    numpy = pytest.importorskip("numpy")
    nested = REQUEST.mask()
    flat = [token for row in nested for token in row]
    offsets = [0]
    for row in nested:
        offsets.append(offsets[-1] + len(row))
    expected = Support.from_rows([(row, None) for row in nested])
    assert not expected.known.any()
    assert expected.sampler_tail_mass.tolist() == [1] * N
    for mask in (
        nested,
        tuple(map(tuple, nested)),
        [numpy.array(row, dtype=numpy.int32) for row in nested],
        SamplingMask(nested),
        {"token_ids": nested},
        SamplingMask(flat, offsets),
        {"token_ids": flat, "offsets": offsets},
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
        (None, None, "mask must hold the kept ids of each token, got NoneType: was the engine"),
        ({"text": "..."}, None, "mask must hold the kept ids of each token, got dict"),
        ("[[1]]", None, "mask must hold the kept ids of each token, got str"),
        ({"token_ids": [1, 2], "offsets": [0, 1]}, None, r"offsets must rise from 0 to 2, got"),
        ({"token_ids": [1, 2], "offsets": [1, 2]}, None, r"offsets must rise .*got \[1, 2\]"),
        ({"token_ids": [1, 2], "offsets": [0, 2, 1, 2]}, None, "offsets must rise from 0 to 2"),
        ({"token_ids": [1, 2], "offsets": []}, None, r"offsets must rise from 0 to 2, got \[\]"),
        ([[1], [2]], [{1: 0.0}], r"logprobs must have one entry a token \(2\), got 1"),
        ([[1], [2, 3]], [[0.0], [0.0]], r"logprobs\[1\] must have one entry a token \(2\), got 1"),
        ([[1], [2, 3]], [-0.5, -0.5], r"logprobs\[0\] must have one entry a token \(1\), got -0.5"),
        ([[1]], [1.0], r"logprobs\[0\] must have one entry a token \(1\), got 1.0"),
        ([[1], [2, 3]], [[0.0], None], r"logprobs\[1\] must .*, got None"),
        ([[1], [2, 3]], [{1: 0.0}, None], r"logprobs\[1\] must .*, got None"),
        ([[1], [2, 3]], [{1: 0.0}, {2: 0.0, 3: -math.inf}], "kept id 3 of row 1 has .* -inf"),
        ([[1], [2, 3]], [{1: 0.0}, {2: 0.0, 3: -9999.0}], "kept id 3 of row 1 has .* -9999.0"),
        ([[1], [2, 3]], [{1: 0.0}, {2: NAN, 3: 0.0}], "kept id 2 of row 1 has .* nan"),
        ([[1], None], None, r"mask\[1\] must be a list of ids, got None"),
        ([[1], "ab"], None, r"mask\[1\] must be a list of ids, got 'ab'"),
        ([[1], 2], None, r"mask\[1\] must be a list of ids, got 2"),
        ({"token_ids": [[1], None]}, [{1: 0.0}, {}], r"mask\[1\] must be a list of ids, got None"),
        ([[1], [2, None]], None, r"mask\[1\]\[1\] must be an id, got None"),
        ([[1.5]], None, r"mask\[0\]\[0\] must be an id, got 1.5"),
        (
            {"token_ids": [1, 2], "offsets": [0, None]},
            None,
            r"offsets\[1\] must be an id, got None",
        ),
        ([[1], [2, 3]], [[0.0], [0.0, None]], r"logprobs\[1\]\[1\] must be a float, got None"),
        ([[1], [2]], [{1: 0.0}, {2: None}], r"logprobs\[1\] must hold .*, got None for 2"),
        ([[3]], [{"3": {"rank": 1}}], r"logprobs\[0\] must hold .*, got None for '3'"),
        ([[3]], [{"x": 0.0}], r"logprobs\[0\] must hold .*, got 0.0 for 'x'"),
        ([[1, 1]], [{1: 0.0}], "ids must be unique in a REPLAY row, got 1 twice in row 0"),
        ([[1, -1]], None, r"rows\[0\]: ids must be in \[0, 2\*\*31\), got -1"),
    ],
)
def test_what_vllm_cannot_have_meant_is_refused(mask, logprobs, message):
    with pytest.raises(ValueError, match=message):
        Support.from_vllm(mask, logprobs)


def test_a_dict_that_knows_none_of_the_kept_ids():
    """Prefill-style rows: the ids alone, as without log-probabilities."""
    support = Support.from_vllm([[1, 2], [3]], [{}, {3: 0.0}])
    assert support.known.tolist() == [False, False, True]
    assert support.sampler_tail_mass.tolist() == [1, 0]


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
        ("output_token_sampling_mask", "mask must hold the kept ids of each token, got dict"),
        ("output_token_sampling_logprobs", "output_token_sampling_logprobs is missing"),
        ("output_token_logprobs", "output_token_logprobs is missing"),
    ]:
        meta = sglang_meta(REQUEST)
        del meta[gone]
        with pytest.raises(ValueError, match=message):
            Support.from_sglang(meta)
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
