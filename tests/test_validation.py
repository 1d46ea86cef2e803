"""Support.validate: what it refuses, what it says, and which rows it never reads."""

import math
import re

import pytest
import torch

from rl_loss.capture import capture_support
from rl_loss.csr import TOLERANCE, RowKind
from rl_loss.support import Support

FAILED, NONE, REPLAY, HEAD, DRAWS = RowKind
INF, NAN = math.inf, math.nan
V = 12


def log(*probabilities):
    return [math.log(p) for p in probabilities]


GOOD = [
    # (row, kind, label, log q of the label): every kind, complete and not.
    (([5, 2, 7], log(0.5, 0.3, 0.2)), REPLAY, 2, math.log(0.3)),
    (([5, 2, 7], [math.log(0.5), NAN, math.log(0.3)]), REPLAY, 2, math.log(0.1)),
    (([5, 2, 7], None), REPLAY, 7, math.log(0.4)),
    (([9, 1], log(0.5, 0.25)), HEAD, 11, math.log(0.01)),  # the label may be in the tail
    (([3, 3, 8], log(0.6, 0.6, 0.1)), DRAWS, 4, math.log(0.2)),
    (None, NONE, 0, math.log(0.7)),
    (([11], [0.0]), REPLAY, 11, 0.0),
]


def batch(rows=GOOD, tail_mass=None):
    """(support, labels, inference_logprobs) of rows as in GOOD."""
    support = Support.from_rows(
        [row for row, _, _, _ in rows],
        kind=[int(kind) for _, kind, _, _ in rows],
        tail_mass=tail_mass,
    )
    labels = torch.tensor([label for _, _, label, _ in rows])
    return support, labels, torch.tensor([logprob for _, _, _, logprob in rows])


def after_good(row, kind, label, logprob=-1.0):
    """The good rows with one more, number 7, behind them."""
    return batch([*GOOD, (row, kind, label, logprob)])


def refused(message):
    return pytest.raises(ValueError, match=message)


def test_good_rows_of_every_kind_pass():
    support, labels, reported = batch()
    assert support.validate(labels, V) is support
    assert support.validate(labels, V, inference_logprobs=reported) is support
    for shape in ((7,), (1, 7), (7, 1)):
        support.validate(
            labels.reshape(shape).int(),
            V,
            active=torch.ones(shape, dtype=torch.bool),
            inference_logprobs=reported.reshape(shape).double(),
        )
    Support.empty(0).validate(torch.empty(0, dtype=torch.int64), V)


# --- one error a row ---

ERRORS = [
    (None, FAILED, 3, "support: row 7 is active but the sampler failed to record it"),
    (([], []), REPLAY, 3, "support: row 7 is active, of kind REPLAY, and empty"),
    (([], []), HEAD, 3, "support: row 7 is active, of kind HEAD, and empty"),
    (([], []), DRAWS, 3, "support: row 7 is active, of kind DRAWS, and empty"),
    # FAULTS 5: the label is not in the kept set.
    (([1, 2], log(0.5, 0.5)), REPLAY, 5, r"labels\[7\] is 5, which its REPLAY row \(2 ids\) does"),
    (None, NONE, V, rf"labels\[7\] is {V}, outside \[0, {V}\)"),
    (([1], [0.0]), HEAD, -1, rf"labels\[7\] is -1, outside \[0, {V}\)"),
    (([1], [0.0]), DRAWS, -100, r"labels\[7\] is -100, outside"),
    # FAULTS 6 and 21: an id of V, a sampler with another vocabulary.
    (([1, V], log(0.5, 0.5)), REPLAY, 1, f"id {V} in row 7 is outside .* another vocabulary"),
    (([2**31 - 1], [0.0]), HEAD, 1, f"id {2**31 - 1} in row 7 is outside"),
    (([1, V + 3], log(0.5, 0.5)), DRAWS, 1, f"id {V + 3} in row 7 is outside"),
    (
        ([1, 2], [-INF, 0.0]),
        REPLAY,
        2,
        "sampler_logprobs of id 1 in row 7 must be finite and at most 0, got -inf",
    ),
    (([1, 2], [INF, 0.0]), HEAD, 2, "sampler_logprobs of id 1 in row 7 .* got inf"),
    (([1, 2], [0.0, 0.5]), DRAWS, 2, "sampler_logprobs of id 2 in row 7 .* got 0.5"),
    (([1, 2], [0.0, NAN], [True] * 2), HEAD, 1, "sampler_logprobs of id 2 in row 7 .* got nan"),
    (([1, 2], [-1.0, NAN]), DRAWS, 1, "known must be True for every draw, got False in row 7"),
    (([1, 2], None), DRAWS, 1, "known must be True for every draw, got False in row 7"),
    # Raw log-probabilities of a kept set do not add up to 1.
    (
        ([1, 2], log(0.5, 0.4)),
        REPLAY,
        2,
        r"known q and sampler_tail_mass of row 7 must add up to 1 .* got 0.900000 \+ 0.000000",
    ),
    (([1, 2], log(0.9, 0.4)), HEAD, 2, r"of row 7 must add up to 1 .* got 1.300000 \+ 0.000000"),
    # FAULTS 21: an engine whose weights were never loaded.
    (
        ([1, 2, 3], [-math.log(V)] * 3),
        HEAD,
        1,
        f"sampler_logprobs of row 7 all are -log V = -{math.log(V):.4f}: has the engine loaded",
    ),
    (([1, 1, 3], [-math.log(V)] * 3), DRAWS, 1, "sampler_logprobs of row 7 all are -log V"),
    ((list(range(V)), [-math.log(V)] * V), REPLAY, 1, "sampler_logprobs of row 7 all are -log V"),
]


@pytest.mark.parametrize(("row", "kind", "label", "message"), ERRORS)
def test_each_malformed_row_is_refused_where_it_is_active(row, kind, label, message):
    support, labels, _ = after_good(row, kind, label)
    with refused(message):
        support.validate(labels, V)
    active = torch.ones(8, dtype=torch.bool)
    with refused(message):
        support.validate(labels[None], V, active=active[None])
    active[7] = False
    support.validate(labels, V, active=active)


def test_the_first_bad_row_is_named():
    rows = [GOOD[0], *[(row, kind, label, -1.0) for row, kind, label, _ in ERRORS[4:5] * 3]]
    support, labels, _ = batch(rows)
    with refused(r"labels\[1\] is 5"):
        support.validate(labels, V)
    with refused(r"labels\[3\] is 5"):
        support.validate(labels, V, active=torch.tensor([True, False, False, True]))


def test_inactive_rows_may_hold_anything():
    """All malformed rows at once, and NaN, infinities and wrong tails beside the good ones."""
    bad = [
        (row, kind, label, value)
        for (row, kind, label, _), value in zip(
            ERRORS, [NAN, INF, -INF, 1e30, 7.0] * 5, strict=False
        )
    ]
    rows = [row for pair in zip(bad, GOOD * 4, strict=False) for row in pair]
    support, labels, reported = batch(rows)
    active = torch.arange(len(rows)) % 2 == 1
    tail = torch.where(active, support.sampler_tail_mass, NAN)
    tail = torch.where(torch.arange(len(rows)) % 4 == 0, -INF, tail)
    support = Support(
        support.ids, support.sampler_logprobs, support.known, support.offsets, support.kind, tail
    )
    support.validate(labels, V, active=active, inference_logprobs=reported)
    # Each of them is seen again once it is active.
    for i in range(0, len(rows), 2):
        alone = torch.zeros(len(rows), dtype=torch.bool)
        alone[i] = True
        with refused(rf"row {i}\b|\[{i}\]"):
            support.validate(labels, V, active=alone, inference_logprobs=reported)
    support.validate(labels, V, active=torch.zeros_like(active), inference_logprobs=reported)


def test_what_stands_where_q_is_unknown_is_never_read():
    for poison in (NAN, INF, -INF, 1e30, 5.0, -math.log(V)):
        row = ([5, 2, 7], [math.log(0.5), poison, math.log(0.3)], [True, False, True])
        for kind in (REPLAY, HEAD):
            # The label's own entry is among them, so there is nothing to compare it with.
            support, labels, reported = batch([(row, kind, 2, math.log(0.1))])
            support.validate(labels, V, inference_logprobs=reported)


def test_empty_rows_by_their_offsets():
    """FAULTS 7: offsets [0, 2, 2, 5, 5] with row 1 active raise, naming the row."""
    support = Support(
        ids=torch.tensor([1, 2, 3, 4, 5], dtype=torch.int32),
        sampler_logprobs=torch.tensor(log(0.5, 0.5, 0.5, 0.25, 0.25)),
        known=torch.ones(5, dtype=torch.bool),
        offsets=torch.tensor([0, 2, 2, 5, 5]),
        kind=torch.ones(4, dtype=torch.int8),
        sampler_tail_mass=torch.zeros(4),
    )
    labels = torch.tensor([2, 1, 3, 1])
    with refused("row 1 is active, of kind REPLAY, and empty"):
        support.validate(labels, V)
    with refused("row 3 is active, of kind REPLAY, and empty"):
        support.validate(labels, V, active=torch.tensor([True, False, True, True]))
    support.validate(labels, V, active=torch.tensor([True, False, True, False]))


def test_the_order_of_ids_is_irrelevant():
    """FAULTS 6: the same verdict and the same message whatever the order."""
    q = {5: 0.5, 2: 0.3, 7: 0.2}
    for order in ([5, 2, 7], [7, 5, 2], [2, 7, 5]):
        row = (order, log(*[q[token] for token in order]))
        for label, logq in q.items():
            support, labels, reported = batch([(row, REPLAY, label, math.log(logq))])
            support.validate(labels, V, inference_logprobs=reported)
            with refused(r"inference_logprobs\[0\] is .* of its label says"):
                support.validate(labels, V, inference_logprobs=reported - 0.01)
        support, labels, _ = batch([(row, REPLAY, 3, 0.0)])
        with refused(r"labels\[0\] is 3, which its REPLAY row \(3 ids\) does not hold"):
            support.validate(labels, V)


# --- the edges of the tolerance ---


@pytest.mark.parametrize("kind", [REPLAY, HEAD])
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_sum_may_be_off_by_the_tolerance(kind, sign):
    for off, fits in ((0.95, True), (1.05, False)):
        total = 1 + sign * off * TOLERANCE
        support, labels, _ = batch([(([5, 2], log(0.5, total - 0.5)), kind, 2, 0.0)], tail_mass=0.0)
        with_tail, _, _ = batch([(([5, 2], log(0.5, 0.2)), kind, 2, 0.0)], tail_mass=total - 0.7)
        for case in (support, with_tail):
            if fits:
                case.validate(labels, V)
                continue
            with refused(r"row 0 must add up to 1 within 0.001, got "):
                case.validate(labels, V)


def test_a_tail_a_little_below_zero_is_rounding():
    """FAULTS 11."""
    row = [(([5, 2], log(0.5, 0.5)), HEAD, 2, 0.0)]
    for tail in (0.0, -0.0, -1e-7, -0.9 * TOLERANCE):
        support, labels, _ = batch(row, tail_mass=tail)
        support.validate(labels, V)
    row = [(([5, 2], log(0.5, 0.5014)), HEAD, 2, 0.0)]
    support, labels, _ = batch(row, tail_mass=-1.4 * TOLERANCE)
    with refused(r"sampler_tail_mass must be in \[0, 1\], got -0.0014 in row 0"):
        support.validate(labels, V)
    for tail in (NAN, INF, -INF, 2.0):
        support, labels, _ = batch(row, tail_mass=tail)
        with refused("sampler_tail_mass of row 0 must add up to 1"):
            support.validate(labels, V)


def test_a_probability_may_exceed_one_by_the_tolerance():
    for logprob, fits in ((0.9 * TOLERANCE, True), (1.1 * TOLERANCE, False)):
        for kind in (REPLAY, HEAD, DRAWS):
            support, labels, reported = batch([(([5], [logprob]), kind, 5, logprob)])
            if fits:
                support.validate(labels, V, inference_logprobs=reported)
                continue
            with refused(
                "sampler_logprobs of id 5 in row 0 must be finite and at most 0, got 0.00"
            ):
                support.validate(labels, V)


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_labels_entry_may_differ_by_the_tolerance(sign):
    for row, kind, label, logprob in (
        GOOD[0],
        (([5, 2], log(0.5, 0.2)), HEAD, 2, math.log(0.2)),
        (([3, 8, 3], log(0.6, 0.1, 0.6)), DRAWS, 3, math.log(0.6)),
    ):
        near = logprob + sign * 0.9 * TOLERANCE
        far = logprob + sign * 1.1 * TOLERANCE
        support, labels, reported = batch([(row, kind, label, near)])
        support.validate(labels, V, inference_logprobs=reported)
        support, labels, reported = batch([(row, kind, label, far)])
        with refused("raw instead of processed log-probabilities"):
            support.validate(labels, V, inference_logprobs=reported)
        support.validate(labels, V, torch.tensor([False]), reported)


def test_raw_log_probabilities_are_told_from_processed_ones():
    """A sampler that reports log_softmax over V beside a kept set over which it renormalised."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(5, V, generator=generator)
    kept = logits.topk(4).indices
    raw = logits.log_softmax(1).gather(1, kept)
    processed = raw.log_softmax(1)
    labels = kept[:, 1]
    good = Support.from_padded(kept, processed)
    good.validate(labels, V, inference_logprobs=processed[:, 1])
    says, got = f"{float(processed[0, 1]):.6f}", f"{float(raw[0, 1]):.6f}"
    with refused(
        re.escape(f"inference_logprobs[0] is {got}, but the row's entry of its label says {says}: ")
        + "raw instead of processed log-probabilities"
    ):
        good.validate(labels, V, inference_logprobs=raw[:, 1])
    with refused("row 0 must add up to 1"):
        Support.from_padded(kept, raw).validate(labels, V)


def peaked_logits(n, vocab, temperature=1.0, seed=0):
    """Logits peaked like a model's."""
    generator = torch.Generator().manual_seed(seed)
    return 4 * torch.randn(n, vocab, generator=generator, dtype=torch.float64) / temperature


def rows_of(logits, top, labels=None):
    """(support, labels, log q of the labels): the top ids and the sampled one, as HEAD rows."""
    generator = torch.Generator().manual_seed(1)
    if labels is None:
        labels = logits.softmax(1).multinomial(1, generator=generator)[:, 0]
    logq = logits.log_softmax(1)
    ids = logits.topk(top, 1).indices
    ids = torch.where(ids == labels[:, None], -1, ids)
    ids = torch.cat([labels[:, None], ids], 1)
    logprobs = logq.gather(1, ids.clamp(min=0)).float()
    ids = torch.where(logprobs.isneginf(), -1, ids)
    return Support.from_padded(ids, logprobs, kind=HEAD), labels, logprobs[:, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [REPLAY, HEAD])
def test_log_probabilities_kept_in_half_precision_are_named(dtype, kind):
    """By their dtype, and by their digits once they were made float32 again."""
    logits = peaked_logits(40, 64)
    labels = logits.argsort(1)[:, -9]  # unlikely: their log q are large
    support, labels, exact = rows_of(logits, 63, labels)
    support = support.replace(kind=torch.full_like(support.kind, kind))
    support.validate(labels, 64, inference_logprobs=exact)
    half = exact.to(dtype)
    name = str(dtype)
    with refused(f"^inference_logprobs must be in float32 .* got {name}, .*cast_forward_inputs"):
        support.validate(labels, 64, inference_logprobs=half)
    with refused(rf"^inference_logprobs\[\d+\] is .* label says .*: rounded to {name} on the way"):
        support.validate(labels, 64, inference_logprobs=half.float())
    with refused(f": rounded to {name} on the way"):  # one row
        far = (half.float() - exact).abs() == (half.float() - exact).abs().max()
        support.validate(labels, 64, far, half.float())
    # Whichever of the two was rounded.
    label = support.ids == labels[support.entry_rows]
    q = torch.where(label, support.sampler_logprobs.to(dtype).float(), support.sampler_logprobs)
    with refused(f": rounded to {name} on the way"):
        support.replace(sampler_logprobs=q).validate(labels, 64, inference_logprobs=exact)


def test_rows_whose_sum_half_precision_put_off_are_named():
    support, labels, _ = rows_of(peaked_logits(400, 64), 63)
    half = support.sampler_logprobs.bfloat16().float()
    half = support.replace(sampler_logprobs=half, sampler_tail_mass=torch.zeros(400))
    sums = torch.zeros(400).index_add(0, half.entry_rows, half.sampler_logprobs.exp())
    worst = int((sums - 1).abs().argmax())
    with refused(r"row 0 must add up to 1 .*: rounded to torch.bfloat16 on the way\? Keep"):
        half[worst:].validate(labels[worst:], 64)
    # Numbers of half precision, but further off than it puts them; and others.
    for logprobs in ([-0.5, -1.0], log(0.5, 0.49)):
        bad = Support.from_rows([([1, 2], logprobs)])
        with refused(r"row 0 must add up to 1 within 0.001, got 0.9\d+ \+ 0.000000$"):
            bad.validate(torch.tensor([1]), 64)


def test_only_what_rounding_explains_is_laid_to_it():
    logits = peaked_logits(40, 64)
    labels = logits.argsort(1)[:, -9]
    support, labels, exact = rows_of(logits, 63, labels)
    half = exact.bfloat16().float()
    # Values that are raw, and rounded beside; one row that is far off; values of other digits.
    for reported in (half - 0.5, torch.where(labels == labels[3], half - 0.5, half)):
        with refused(r"raw instead of processed log-probabilities\?$"):
            support.validate(labels, 64, inference_logprobs=reported)
    with refused(r"raw instead of processed log-probabilities, or computed in half precision\?$"):
        support.validate(labels, 64, inference_logprobs=exact * (1 - 1e-3))


# --- HEAD rows of an engine that truncates ---


@pytest.mark.parametrize("vocab", [1000, 32000])
@pytest.mark.parametrize("top", [3, 5, 8, 20, 50])
def test_truncated_rows_given_as_head_are_told(vocab, top):
    """The top k ids, renormalised, however many of them were asked for."""
    logits = peaked_logits(32, vocab)
    least = logits.topk(top, 1).values[:, -1:]
    kept = torch.where(logits < least, -INF, logits)
    support, labels, reported = rows_of(kept, top)
    assert float(support.sampler_tail_mass.max()) < 1e-6
    with refused(
        r"known ids of HEAD row \d+, each of q 0.001 or more, leave no tail, nor .* REPLAY"
    ):
        support.validate(labels, vocab, inference_logprobs=reported)
    support.replace(kind=torch.ones_like(support.kind)).validate(labels, vocab)
    support, labels, reported = rows_of(logits, top)  # the same sampler untruncated
    support.validate(labels, vocab, inference_logprobs=reported)


@pytest.mark.parametrize("kept_mass", [0.8, 0.9, 0.95])
def test_truncation_shows_where_some_rows_keep_more_than_is_recorded(kept_mass):
    """Rows of a nucleus wider than the 20 recorded ids have a tail; the narrower ones tell."""
    logits = peaked_logits(64, 2000) * torch.linspace(0.5, 2, 64)[:, None]
    ordered, order = logits.sort(1, descending=True)
    q = ordered.softmax(1)
    cut = torch.where(q.cumsum(1) - q < kept_mass, ordered, -INF)
    support, labels, _ = rows_of(torch.empty_like(cut).scatter(1, order, cut), 20)
    assert (support.sampler_tail_mass > 0.01).any()
    with refused("known ids of HEAD row .* leave no tail"):
        support.validate(labels, 2000)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.3, 0.1, 0.01])
@pytest.mark.parametrize("top", [1, 2, 5, 20, 50])
def test_peaked_rows_without_truncation_pass(temperature, top):
    """Most of their tails are below 1e-6 at low temperatures."""
    for seed in range(4):
        support, labels, reported = rows_of(peaked_logits(64, 2000, temperature, seed), top)
        support.validate(labels, 2000, inference_logprobs=reported)


def test_what_says_nothing_of_truncation():
    vocab = 1000
    labels = torch.zeros(12, dtype=torch.int64)
    wide = list(range(8)), [-math.log(8)] * 8
    three, two, one = ([0, 1, 2], log(0.5, 0.3, 0.2)), ([0, 1], log(0.7, 0.3)), ([0], [0.0])
    tail = [0, 1, 2], log(0.5, 0.3, 0.1)
    for rows, told in [
        ([wide] * 2, True),
        ([wide] * 2 + [tail], True),
        ([wide], False),
        ([three] * 2, True),
        ([three] * 2 + [one, two, None], True),
        ([three] * 11 + [tail], False),
        ([three, wide, tail], False),
        ([two] * 12, False),  # yes or no
        ([one] * 12, False),
        ([wide, tail, (list(range(8)), log(0.9995, *[0.0005 / 7] * 7))], False),
    ]:
        support = Support.from_rows(rows, kind=HEAD)
        n = len(rows)
        if told:
            with refused(r"leave no tail, nor do those of \d+ other active rows"):
                support.validate(labels[:n], vocab)
        else:
            support.validate(labels[:n], vocab)
        if n == 2:  # one of them inactive; the whole of a vocabulary; another kind; a tail given
            support.validate(labels[:2], vocab, torch.tensor([True, False]))
            support.validate(labels[:2], 2 * len(rows[0][0]) - 1)
            support.replace(kind=torch.ones_like(support.kind)).validate(labels[:2], vocab)
            support.replace(sampler_tail_mass=torch.full((2,), 5e-4)).validate(labels[:2], vocab)


def test_uniform_rows_are_told_from_short_ones():
    """Only two or more known ids that all stand at -log V say that weights are missing."""
    vocab = 151936
    uniform = -math.log(vocab)
    single = Support.from_rows([([5], [uniform]), ([5, 2], None)], kind=HEAD)
    single.validate(torch.tensor([5, 5]), vocab)
    close = Support.from_rows([([5, 2, 7], [uniform, uniform, uniform + 1e-3])], kind=HEAD)
    close.validate(torch.tensor([5]), vocab)
    row = ([5, 2, 7], [uniform] * 3)
    with refused(r"row 1 all are -log V = -11.9312"):
        Support.from_rows([None, row], kind=HEAD).validate(torch.tensor([0, 5]), vocab)
    # Wherever the unknown one stands; and one row of many, between rows that begin alike.
    for at in range(3):
        q = [NAN if i == at else uniform for i in range(3)]
        with refused(r"row 0 all are -log V"):
            Support.from_rows([(row[0], q)], kind=HEAD).validate(torch.tensor([5]), vocab)
    rows = [(row[0], [uniform, uniform, -1.0]), row, (row[0], [uniform, -1.0, uniform])]
    with refused(r"row 1 all are -log V"):
        Support.from_rows(rows, kind=HEAD).validate(torch.tensor([5, 5, 5]), vocab)
    # A kept set that is uniform over itself is none: its q is -log K.
    kept = Support.from_rows([([5, 2, 7, 1], [-math.log(4)] * 4)])
    kept.validate(torch.tensor([7]), vocab)


def uniform_row(width, start=0):
    return list(range(start, start + width)), [-math.log(width)] * width


PEAKED = (list(range(9)), log(0.6, *[0.05] * 8))


def test_an_engine_without_weights_behind_top_k():
    """FAULTS 21: every wide kept set is uniform, at -log of its own width and not of V."""
    vocab = 151936
    rows = [uniform_row(40), None, uniform_row(9), uniform_row(3), ([7], [0.0])]
    kinds = [REPLAY, NONE, REPLAY, REPLAY, REPLAY]
    support, labels = Support.from_rows(rows, kinds), torch.tensor([5, 5, 8, 0, 7])
    with refused(
        r"REPLAY row of more than 8 known ids are uniform .* -log 40 = -3.6889 in row 0: has the"
    ):
        support.validate(labels, vocab)
    off = torch.tensor([False, True, True, True, True])
    with refused(r"-log 9 = -2.1972 in row 2: has the engine loaded its weights"):
        support.validate(labels, vocab, active=off)
    # Half of the ids known: they stand at -log of the whole kept set.
    ids, logprobs = uniform_row(40)
    half = Support.from_rows([(ids, [*logprobs[:20], *[NAN] * 20])])
    with refused("-log 40 = -3.6889 in row 0"):
        half.validate(labels[:1], vocab)


def test_a_uniform_row_among_others_is_honest():
    vocab = 151936
    mixed = Support.from_rows([uniform_row(40), PEAKED, uniform_row(9)])
    mixed.validate(torch.tensor([5, 5, 5]), vocab)
    with refused("-log 9 = -2.1972 in row 2"):
        mixed.validate(torch.tensor([5] * 3), vocab, active=torch.tensor([False, False, True]))
    # Narrow rows, other kinds, and rows of which little is known say nothing.
    ids, logprobs = uniform_row(12)
    for row, kind in [
        (uniform_row(8), REPLAY),
        ((ids, logprobs), HEAD),
        ((ids, logprobs), DRAWS),
        ((ids, [*logprobs[:8], *[NAN] * 4]), REPLAY),
        ((ids, None), REPLAY),
    ]:
        Support.from_rows([row], kind).validate(torch.tensor([5]), vocab)
    near = [*logprobs[:11], logprobs[11] + 1e-4]
    Support.from_rows([(ids, near)]).validate(torch.tensor([5]), vocab)


def test_inference_logprobs_that_all_are_minus_log_v():
    vocab = 151936
    support, labels = Support.from_rows([PEAKED, None, ([5, 6], None)]), torch.tensor([5, 5, 5])
    reported = torch.full((3,), -math.log(vocab))
    active = torch.tensor([False, True, True])
    with refused(
        r"inference_logprobs of all active rows are -log V = -11.9312, from row 1 on: has the"
    ):
        support.validate(labels, vocab, active=active, inference_logprobs=reported)
    support.validate(labels, 9, active, torch.full((3,), -math.log(8)))
    with refused("-log V = -2.1972, from row 1 on"):
        support.validate(labels, 9, active, torch.full((3,), -math.log(9)))
    # Honest: one row, another value among them, a vocabulary of a few ids, no row at all.
    one = torch.tensor([False, True, False])
    support.validate(labels, vocab, one, reported)
    support.validate(labels, vocab, active, reported + torch.tensor([0, 0, 1e-3]))
    empty = Support.empty(3)
    empty.validate(labels, 8, active, torch.full((3,), -math.log(8)))
    support.validate(labels, vocab, torch.zeros(3, dtype=torch.bool), reported)


def test_a_vocabulary_of_one_id_is_always_uniform():
    rows = [([0], [0.0]), ([0], [0.0]), ([0, 0, 0], [0.0] * 3), None]
    support = Support.from_rows(rows, [REPLAY, HEAD, DRAWS, NONE])
    support.validate(torch.zeros(4).long(), 1, inference_logprobs=torch.zeros(4))


# --- the arguments themselves ---


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
def test_the_verdict_does_not_depend_on_the_default_dtype(default):
    """The same message or none, for good rows and for each malformed one."""
    cases = [batch(), *[after_good(row, kind, label) for row, kind, label, _ in ERRORS]]
    cases = [(support, labels, reported.float()) for support, labels, reported in cases]
    logits = peaked_logits(16, 64)
    kept = torch.where(logits < logits.topk(9, 1).values[:, -1:], -INF, logits)
    cases += [rows_of(logits, 20), rows_of(kept, 9)]
    cases += [(*rows_of(logits, 63)[:2], rows_of(logits, 63)[2].bfloat16().float())]
    cases += [(build, labels, reported - 0.5) for build, labels, reported in cases]

    def verdicts():
        for support, labels, reported in cases:
            try:
                support.validate(labels, 64, inference_logprobs=reported)
                yield None
            except ValueError as error:
                yield str(error)

    expected = list(verdicts())
    assert 0 < expected.count(None) < len(expected)
    torch.set_default_dtype(default)
    try:
        assert list(verdicts()) == expected
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 0.002])
@pytest.mark.parametrize("row", range(len(GOOD)))
def test_a_bad_inference_logprob_of_any_kind_of_row(bad, row):
    support, labels, reported = batch()
    reported[row] = bad
    with refused(rf"inference_logprobs\[{row}\] must be finite and at most 0, got "):
        support.validate(labels, V, inference_logprobs=reported)
    active = torch.arange(len(GOOD)) != row
    support.validate(labels, V, active=active, inference_logprobs=reported)


def test_arguments_that_do_not_fit():
    support, labels, reported = batch()
    on = torch.ones(7, dtype=torch.bool)
    for arguments, message in [
        ((labels[:6], V), r"labels must have 7 rows, got \(6,\)"),
        ((labels, V, on[:3]), r"active must have 7 rows, got \(3,\)"),
        ((labels, V, on, reported[None, :5]), r"inference_logprobs must have 7 rows, got \(1, 5\)"),
        ((labels.tolist(), V), "^labels must be a tensor, got list$"),
        ((labels, V, on.tolist()), "^active must be a tensor, got list$"),
        ((labels, V, on, reported.tolist()), "^inference_logprobs must be a tensor, got list$"),
        ((None, V), "^labels must be a tensor, got NoneType$"),
        ((labels, None), "vocab_size must be an int of at least 1, got None"),
        ((labels, 12.0), "vocab_size must be an int of at least 1, got 12.0"),
        ((labels, 0), "vocab_size must be an int of at least 1, got 0"),
        ((labels.float(), V), "labels must be integers, got torch.float32"),
        ((on, V), "labels must be integers, got torch.bool"),
        ((labels, V, on.int()), "active must be bool, got torch.int32"),
    ]:
        with refused(message):
            support.validate(*arguments)


def test_small_labels_do_not_wrap_around():
    support = Support.empty(1)
    with refused(r"labels\[0\] is 200, outside \[0, 150\)"):
        support.validate(torch.tensor([200], dtype=torch.uint8), 150)
    for vocab in (256, 300, 70_000):
        support.validate(torch.tensor([200], dtype=torch.uint8), vocab)
        support.validate(torch.tensor([100], dtype=torch.int8), vocab)


@pytest.mark.parametrize("filler", [-1e9, torch.finfo(torch.float32).min])
def test_a_mask_that_is_no_minus_infinity_is_told(filler):
    logits = torch.randn(2, 12, generator=torch.Generator().manual_seed(0))
    logits[:, 3:9] = filler
    rows = capture_support(logits, torch.tensor([0, 1]), kind=RowKind.REPLAY)
    with pytest.raises(ValueError, match=r"id 3 in row 0 is -.*finite value instead of -inf"):
        rows.to_support().validate(torch.tensor([0, 1]), 12)


def test_shapes_that_are_turned_against_each_other():
    support, labels = Support.empty(6), torch.zeros(2, 3, dtype=torch.int64)
    support.validate(labels, 4, active=torch.ones(6, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"active must be \(2, 3\) as labels, or \[6\], got"):
        support.validate(labels, 4, active=torch.ones(3, 2, dtype=torch.bool))


def test_nothing_is_changed():
    support, labels, reported = batch()
    before = [t.clone() for t in (*support.to_packed(), labels, reported)]
    support.validate(labels, V, inference_logprobs=reported.requires_grad_())
    for tensor, copy in zip((*support.to_packed(), labels, reported), before, strict=True):
        assert torch.equal(tensor, copy)
