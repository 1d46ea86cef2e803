"""The sampler's side: capture_support against plain arithmetic on each row.

In plain PyTorch on the CPU; on the kernels in Triton's interpreter, in a process of their own, and
on a GPU.
"""

import math
from dataclasses import fields

import pytest
import torch
from interpreter import DEVICE, INTERPRETED, run_interpreted
from torch._subclasses.fake_tensor import FakeTensorMode

import rl_loss.capture as capture_module
from rl_loss.capture import CapturedRows
from rl_loss.csr import RowKind
from rl_loss.packing import unpack_entries

INF = math.inf
ASKED = (RowKind.NONE, RowKind.REPLAY, RowKind.HEAD, RowKind.DRAWS)


@pytest.fixture(autouse=True)
def _on_the_kernels(monkeypatch, unwritten_is_nan):
    """Small blocks, so that small rows have many."""
    if INTERPRETED:
        import rl_loss.kernels.capture as kernels

        narrow = (torch.float32, torch.bfloat16, torch.float16)
        monkeypatch.setattr(capture_module, "_has_kernels", lambda logits: logits.dtype in narrow)
        for name, value in {"_BLOCK": 32, "_GROUP": 2, "_LIST": 32, "_ROWS": 16}.items():
            monkeypatch.setattr(kernels, name, value)


def test_in_the_interpreter():
    run_interpreted(__file__)


def capture_support(processed_logits, sampled, **options):
    """The function itself, on the device and back."""

    def moved(value):
        if isinstance(value, torch.Generator) and DEVICE != "cpu":
            return torch.Generator(DEVICE).manual_seed(value.initial_seed())
        here = isinstance(value, torch.Tensor) and value.device.type == "cpu"
        return value.to(DEVICE) if here and DEVICE != "cpu" else value

    rows = capture_module.capture_support(
        moved(processed_logits),
        moved(sampled),
        # A kind stays on the host, which may see which kinds there are.
        **{name: v if name == "kind" else moved(v) for name, v in options.items()},
    )
    if DEVICE == "cpu":
        return rows
    return CapturedRows(*(getattr(rows, field.name).cpu() for field in fields(rows)))


def masked_logits(rows, vocab, *, keep=0.3, seed=0, dtype=torch.float32):
    """Peaked logits with a random kept set a row, and a token sampled from each."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 4
    sampled = logits.softmax(1).multinomial(1, generator=generator)[:, 0]
    kept = torch.rand(rows, vocab, generator=generator) < keep
    kept[torch.arange(rows), sampled] = True
    return logits.masked_fill(~kept, -INF).to(dtype), sampled


def entries_of(rows):
    """(ids, logprobs) of each row as lists, None for a row that was not recorded."""
    ids, logprobs = unpack_entries(rows.packed)
    counts = rows.counts.tolist()
    result, position = [], 0
    for count in counts:
        if count < 0:
            result.append(None)
            continue
        row = slice(position, position + count)
        result.append((ids[row].tolist(), logprobs[row]))
        position += count
    assert (rows.packed[position:] == -1).all()
    return result


def log_q(row):
    """log_softmax over the kept set of one row, in float64."""
    return row.double().log_softmax(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (17, 131), (3, 1031)])
def test_replay_rows_hold_the_whole_kept_set(shape, dtype):
    logits, sampled = masked_logits(*shape, dtype=dtype)
    rows = capture_support(logits, sampled, kind=RowKind.REPLAY)
    for i, (ids, logprobs) in enumerate(entries_of(rows)):
        assert ids == logits[i].isfinite().nonzero()[:, 0].tolist()
        torch.testing.assert_close(logprobs.double(), log_q(logits[i])[ids], atol=1e-6, rtol=1e-6)
        assert rows.sampled_logprobs[i] == logprobs[ids.index(int(sampled[i]))]
    assert (rows.tail_mass == 0).all()
    assert (rows.kind == RowKind.REPLAY).all()


@pytest.mark.parametrize("vocab", [257, 151936])
def test_replay_is_as_good_as_log_softmax_in_float64_rounded(vocab, monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr("rl_loss.kernels.capture._BLOCK", 512)
    logits, sampled = masked_logits(3, vocab)
    rows = capture_support(logits, sampled, kind=RowKind.REPLAY)
    recorded = torch.cat([logprobs for _, logprobs in entries_of(rows)])
    expected = logits.double().log_softmax(1)[logits.isfinite()]
    # Three roundings of numbers up to 32 (spacing 1.9e-6) stand between logits and log q.
    torch.testing.assert_close(recorded.double(), expected, atol=1e-6, rtol=2e-7)


def test_one_finite_entry_has_probability_one():
    logits = torch.full((2, 9), -INF)
    logits[0, 4], logits[1, 8] = 3e4, -3e4
    for kind in (RowKind.REPLAY, RowKind.HEAD):
        rows = capture_support(logits, torch.tensor([4, 8]), kind=kind)
        assert [(ids, q.tolist()) for ids, q in entries_of(rows)] == [([4], [0.0]), ([8], [0.0])]
        assert rows.tail_mass.tolist() == [0, 0]
        assert rows.sampled_logprobs.tolist() == [0, 0]


def test_all_of_the_vocabulary_kept():
    logits = torch.randn(3, 33, generator=torch.Generator().manual_seed(0))
    sampled = torch.tensor([0, 32, 16])
    replay = capture_support(logits, sampled, kind=RowKind.REPLAY)
    head = capture_support(logits, sampled, kind=RowKind.HEAD, top=50)
    for i in range(3):
        assert entries_of(replay)[i][0] == list(range(33))
        ids, logprobs = entries_of(head)[i]
        assert sorted(ids) == list(range(33))
        torch.testing.assert_close(logprobs.double(), log_q(logits[i])[ids], atol=1e-6, rtol=0)
    assert replay.counts.tolist() == head.counts.tolist() == [33] * 3
    assert head.tail_mass.tolist() == [0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top", [0, 1, 5, 130])
def test_head_rows_hold_the_sampled_and_the_top_ids_once(top, dtype):
    logits, sampled = masked_logits(9, 131, keep=1.1, dtype=dtype)
    likeliest = torch.argmax(logits.float(), 1)
    sampled[::2] = likeliest[::2]
    rows = capture_support(logits, sampled, kind=RowKind.HEAD, top=top)
    for i, (ids, logprobs) in enumerate(entries_of(rows)):
        q = log_q(logits[i])
        assert len(set(ids)) == len(ids)
        assert int(sampled[i]) in ids
        others = [v for v in ids if v != sampled[i]]
        assert len(ids) in (max(top, 1), top + 1)
        assert ids[0] == sampled[i]
        assert others == sorted(others)
        outside = sorted(set(range(131)) - set(ids))
        if others and outside:
            assert q[others].min() >= q[outside].max()
        torch.testing.assert_close(logprobs.double(), q[ids], atol=1e-6, rtol=1e-6)
        expected = q[outside].exp().sum()
        torch.testing.assert_close(rows.tail_mass[i].double(), expected, atol=0, rtol=2e-5)


@pytest.mark.parametrize("top", [1, 3, 40, 300])
@pytest.mark.parametrize("level", [False, True], ids=["distinct", "ties"])
def test_the_likeliest_ids_of_a_row_of_many_blocks(top, level):
    ninth = 70 if INTERPRETED else 1030  # and so many blocks
    vocab = 9 * ninth + 2
    logits, sampled = masked_logits(4, vocab, keep=1.1)
    if level:
        logits = logits.mul(0.5).round()
    logits[1, ninth : 8 * ninth] = -INF  # blocks without a kept id
    logits[2, 100:] = -INF
    logits[3, 5 : 4 * ninth] += 40  # all the likeliest in a few blocks
    sampled = torch.tensor([vocab - 1, 8 * ninth, 99, 9 * ninth])  # far from the likeliest
    rows = capture_support(logits, sampled, kind=RowKind.HEAD, top=top)
    for i, (ids, logprobs) in enumerate(entries_of(rows)):
        q = log_q(logits[i])
        kept = logits[i].isfinite().nonzero()[:, 0].tolist()
        assert ids[0] == sampled[i]
        assert ids[1:] == sorted(set(ids[1:]) - {int(sampled[i])})
        others = sorted((v for v in kept if v != sampled[i]), key=lambda v: (-logits[i, v], v))
        likeliest = sorted(others[: len(ids) - 1])
        if level:  # which of equal ids is taken is open
            assert torch.equal(logits[i, ids[1:]].sort().values, logits[i, likeliest].sort().values)
        else:
            assert ids[1:] == likeliest
        assert len(ids) in (min(top, len(kept)), min(top + 1, len(kept)))
        torch.testing.assert_close(logprobs.double(), q[ids], atol=1e-6, rtol=1e-6)
        expected = q[sorted(set(kept) - set(ids))].exp().sum()
        torch.testing.assert_close(rows.tail_mass[i].double(), expected, atol=0, rtol=2e-5)


def test_the_tail_mass_is_summed_from_the_logits_left_outside():
    logits = torch.full((1, 1000), -25.0)
    logits[0, 3] = 0.0
    rows = capture_support(logits, torch.tensor([3]), kind=RowKind.HEAD, top=1)
    expected = 999 * math.exp(-25)  # 1.4e-8: nothing of it is left in 1 - sum in float32
    assert rows.tail_mass.item() == pytest.approx(expected, rel=1e-5)


def test_excluded_ids_never_enter_a_head_row():
    logits, sampled = masked_logits(19, 67, keep=0.1)
    rows = capture_support(logits, sampled, kind=RowKind.HEAD, top=20)
    for i, (ids, _) in enumerate(entries_of(rows)):
        assert sorted(ids) == logits[i].isfinite().nonzero()[:, 0].tolist()
    assert (rows.tail_mass == 0).all()


def test_ties_are_recorded_once():
    logits = torch.zeros(4, 12)
    logits[2:, 6:] = -INF
    sampled = torch.tensor([0, 11, 0, 5])
    head = capture_support(logits, sampled, kind=RowKind.HEAD, top=3)
    for i, (ids, logprobs) in enumerate(entries_of(head)):
        assert len(set(ids)) == len(ids) in (3, 4)
        assert int(sampled[i]) in ids
        kept = 12 if i < 2 else 6
        torch.testing.assert_close(logprobs, torch.full((len(ids),), -math.log(kept)))
        assert head.tail_mass[i].item() == pytest.approx(1 - len(ids) / kept, rel=1e-6)
    replay = capture_support(logits, sampled, kind=RowKind.REPLAY)
    assert replay.counts.tolist() == [12, 12, 6, 6]


def chi_square(ids, q):
    observed = torch.bincount(torch.tensor(ids), minlength=len(q)).double()
    assert (observed[q == 0] == 0).all()
    kept = q > 0
    expected = q[kept] * len(ids)
    return ((observed[kept] - expected) ** 2 / expected).sum().item(), int(kept.sum()) - 1


def test_draws_follow_q_whatever_was_sampled():
    row = torch.tensor([1.0, 0.0, -INF, 2.0, -1.0, -INF, 0.5])
    q = log_q(row).exp()
    logits = row.expand(2, 7)
    rows = capture_support(
        logits,
        torch.tensor([4, 3]),  # an unlikely and the likeliest token
        kind=RowKind.DRAWS,
        draws=200 if INTERPRETED else 20000,
        generator=torch.Generator().manual_seed(0),
    )
    (first, _), (second, _) = entries_of(rows)
    for ids in (first, second):
        statistic, freedom = chi_square(ids, q)
        assert statistic < freedom + 5 * math.sqrt(2 * freedom)
    # Independent of each other within a row: pairs of neighbouring draws follow q x q.
    pairs = [a * 7 + b for a, b in zip(first[::2], first[1::2], strict=True)]
    statistic, freedom = chi_square(pairs, (q[:, None] * q).flatten())
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_draws_reach_every_block_that_q_puts_something_on():
    row = torch.full((150,), -INF)
    row[55:70] = torch.arange(15) / 5  # across the bound of two blocks, blocks of nothing around
    row[[100, 149]] = 2.0
    q = log_q(row).exp()
    rows = capture_support(
        row[None],
        torch.tensor([149]),
        kind=RowKind.DRAWS,
        draws=200 if INTERPRETED else 20000,
        generator=torch.Generator().manual_seed(1),
    )
    statistic, freedom = chi_square(entries_of(rows)[0][0], q)
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.skipif(not (INTERPRETED or DEVICE == "cuda"), reason="the kernels'")
def test_no_draw_of_an_excluded_id_however_the_sums_are_rounded(monkeypatch):
    logits = torch.full((20, 72), -INF)
    logits[:, 1:16] = torch.randn(20, 15, generator=torch.Generator().manual_seed(0))
    logits[:, 64:] = -100.0  # nothing of it is left in a sum
    largest = 1 - 2**-24
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, largest).to(DEVICE))
    rows = capture_support(logits, torch.full((20,), 1), kind=RowKind.DRAWS, draws=1)
    for i, (ids, logprobs) in enumerate(entries_of(rows)):
        assert logits[i, ids[0]] > -INF
        assert logprobs[0] > -INF


@pytest.mark.parametrize("draws", [1, 2, 9])
def test_draws_keep_their_number_repeats_and_logprobs(draws):
    logits, sampled = masked_logits(11, 47)
    logits[0] = -INF
    logits[0, sampled[0]] = 1.0
    generator = torch.Generator().manual_seed(3)
    rows = capture_support(logits, sampled, kind=RowKind.DRAWS, draws=draws, generator=generator)
    assert rows.counts.tolist() == [draws] * 11
    assert (rows.tail_mass == 0).all()
    for i, (ids, logprobs) in enumerate(entries_of(rows)):
        torch.testing.assert_close(logprobs.double(), log_q(logits[i])[ids], atol=1e-6, rtol=1e-6)
    assert entries_of(rows)[0][0] == [int(sampled[0])] * draws
    again = capture_support(
        logits, sampled, kind=RowKind.DRAWS, draws=draws, generator=generator.manual_seed(3)
    )
    assert torch.equal(rows.packed, again.packed)


@pytest.mark.parametrize("kind", [RowKind.REPLAY, RowKind.HEAD, RowKind.DRAWS])
def test_unusable_rows_are_failed_and_harm_no_neighbour(kind):
    logits, sampled = masked_logits(9, 29)

    def capture(logits, sampled):
        generator = torch.Generator().manual_seed(0)
        return capture_support(logits, sampled, kind=kind, generator=generator)

    good = entries_of(capture(logits, sampled))
    logits, sampled = logits.clone(), sampled.clone()
    logits[0, 3] = math.nan
    logits[2, 28] = INF
    logits[3] = -INF
    logits[5, sampled[5]] = -INF
    sampled[6], sampled[8], sampled[1] = 29, -1, 2**32 + int(sampled[1])
    rows = capture(logits, sampled)
    failed = [0, 1, 2, 3, 5, 6, 8]
    for i, (entries, unharmed) in enumerate(zip(entries_of(rows), good, strict=True)):
        if i in failed:
            assert rows.counts[i] == -1
            assert rows.kind[i] == RowKind.FAILED
            assert rows.sampled_logprobs[i].isnan()
            assert rows.tail_mass[i] == 1
        else:
            assert rows.kind[i] == kind
            assert entries[0] == unharmed[0]
            assert torch.equal(entries[1], unharmed[1])


@pytest.mark.parametrize("kind", [RowKind.REPLAY, RowKind.HEAD, RowKind.DRAWS])
def test_finite_logits_too_far_apart_for_float32_fail_their_row(kind):
    """What is kept is what is finite, though the difference of two logits may overflow."""
    far = torch.full((3, 40), -INF)  # of ids 0, 1 and 39: in the first and the last block
    far[:, [0, 1, 39]] = torch.tensor([[1e38, 3e38, -1e38], [1e38, 3e38, -INF], [0.0, 2.0, 1.0]])
    rows = capture_support(far, torch.tensor([1, 1, 1]), kind=kind, top=2)
    assert rows.kind.tolist() == [RowKind.FAILED, kind, kind]
    assert rows.counts[0] == -1
    assert rows.tail_mass[0] == 1
    assert rows.sampled_logprobs[0].isnan()
    if kind == RowKind.REPLAY:
        kept = [entries and entries[0] for entries in entries_of(rows)]
        assert kept == [None, [0, 1], [0, 1, 39]]
        assert entries_of(rows)[1][1].tolist() == pytest.approx([-2e38, 0.0])
    # The same gap in float64, which only the recorded float32 cannot hold.
    wide = torch.tensor([[0.0, -1e300], [0.0, -INF]], dtype=torch.float64)
    rows = capture_support(wide, torch.tensor([0, 0]), kind=kind, top=1)
    assert rows.kind.tolist() == [RowKind.FAILED, kind]


def test_none_rows_ask_for_nothing():
    logits = torch.full((3, 5), math.nan)
    rows = capture_support(logits, torch.tensor([0, 7, -1]), kind=RowKind.NONE)
    assert rows.counts.tolist() == [0, 0, 0]
    assert rows.packed.shape == (0,)
    assert rows.kind.tolist() == [0, 0, 0]
    assert rows.tail_mass.tolist() == [1, 1, 1]
    assert rows.sampled_logprobs.isnan().all()


def rows_of_widths(widths, vocab=16):
    logits = torch.full((len(widths), vocab), -INF)
    for i, width in enumerate(widths):
        logits[i, vocab - width :] = torch.arange(width).float()
    return logits, torch.full((len(widths),), vocab - 1)


@pytest.mark.parametrize(
    ("widths", "capacity", "recorded"),
    [
        ([3, 5, 2], 10, [True, True, True]),
        ([3, 5, 2], 9, [True, False, True]),
        ([3, 5, 2], 5, [True, False, True]),
        ([16, 1, 1], 4, [False, True, True]),
        ([2, 2, 2], 5, [True, True, False]),
        ([2, 2, 2], 0, [False, False, False]),
    ],
)
def test_rows_that_do_not_fit_are_failed_and_the_others_whole(widths, capacity, recorded):
    logits, sampled = rows_of_widths(widths)
    rows = capture_support(logits, sampled, kind=RowKind.REPLAY, capacity=capacity)
    assert rows.packed.shape == (capacity,)
    for i, entries in enumerate(entries_of(rows)):
        if recorded[i]:
            assert entries[0] == list(range(16 - widths[i], 16))
            expected = log_q(logits[i])[16 - widths[i] :].float()
            torch.testing.assert_close(entries[1], expected, atol=1e-6, rtol=0)
        else:
            assert entries is None
            assert rows.kind[i] == RowKind.FAILED
            assert rows.tail_mass[i] == 1
    expected = logits.log_softmax(1)[:, -1]  # known all the same
    torch.testing.assert_close(rows.sampled_logprobs, expected, atol=1e-6, rtol=0)


def test_of_more_rows_than_are_compared_at_once_the_narrow_ones_fit():
    widths = [3 if i % 4 else 5 for i in range(60 if INTERPRETED else 1100)]
    logits, sampled = rows_of_widths(widths, vocab=5)
    narrow = 3 * sum(width == 3 for width in widths)
    rows = capture_support(logits, sampled, kind=RowKind.REPLAY, capacity=narrow + 5 * 10)
    expected = [width if width == 3 or i // 4 < 10 else -1 for i, width in enumerate(widths)]
    assert rows.counts.tolist() == expected
    assert rows.needed == sum(widths)


def test_unusable_rows_take_no_room():
    logits, sampled = rows_of_widths([3, 5, 2])
    logits[1, 0] = math.nan
    rows = capture_support(logits, sampled, kind=RowKind.REPLAY, capacity=5)
    assert rows.counts.tolist() == [3, -1, 2]


@pytest.mark.parametrize("chunk_elements", [200] if INTERPRETED else [1, 200, 2**22])
@pytest.mark.parametrize("draws", [3, 300])  # narrower and wider than what a HEAD row takes
def test_mixed_kinds_in_one_call_equal_each_kind_alone(chunk_elements, draws, monkeypatch):
    monkeypatch.setattr(capture_module, "_CHUNK_ELEMENTS", chunk_elements)
    logits, sampled = masked_logits(12, 53)
    logits[7, 2] = math.nan
    kind = torch.arange(12).remainder(4).to(torch.int8)
    rows = capture_support(logits, sampled, kind=kind, top=4, draws=draws)
    alone = {k: entries_of(capture_support(logits, sampled, kind=k, top=4)) for k in ASKED}
    for i, entries in enumerate(entries_of(rows)):
        if i == 7:
            assert entries is None
            assert rows.kind[i] == RowKind.FAILED
            continue
        assert rows.kind[i] == kind[i]
        if kind[i] == RowKind.DRAWS:
            assert len(entries[0]) == draws
            torch.testing.assert_close(entries[1], log_q(logits[i])[entries[0]].float())
        else:
            assert entries[0] == alone[int(kind[i])][i][0]
            assert torch.equal(entries[1], alone[int(kind[i])][i][1])


@pytest.mark.skipif(not (INTERPRETED or DEVICE == "cuda"), reason="the kernels'")
def test_kinds_on_the_device_are_those_on_the_host():
    """There the host does not know which kinds there are, nor whether they are any."""
    from rl_loss.kernels.capture import capture_rows

    logits, sampled = (part.to(DEVICE) for part in masked_logits(14, 70))
    kind = torch.tensor([0, 1, 2, 3, 9, -1, -5] * 2, dtype=torch.int8)
    uniform = torch.rand(14, 5, device=DEVICE)

    def capture(kind):
        packed = torch.full((2000,), -1, device=DEVICE)
        return CapturedRows(
            *capture_rows(logits, sampled, kind.to(DEVICE), packed, True, 4, uniform)
        )

    mixed = capture(kind)
    assert mixed.kind.tolist() == [0, 1, 2, 3, -1, -1, -1] * 2
    assert (mixed.counts.cpu()[(kind < 0) | (kind > 3)] == -1).all()
    entries = entries_of(mixed)
    for asked in (RowKind.REPLAY, RowKind.HEAD, RowKind.DRAWS):
        alone = capture(torch.tensor([asked], dtype=torch.int8).expand(14))
        for i in (kind == asked).nonzero()[:, 0].tolist():
            ids, logprobs = entries_of(alone)[i]
            assert entries[i][0] == ids
            assert torch.equal(entries[i][1], logprobs)
            assert mixed.tail_mass[i] == alone.tail_mass[i]
            assert mixed.sampled_logprobs[i] == alone.sampled_logprobs[i]


@pytest.mark.gpu
def test_a_pinned_kind_may_be_written_again_at_once():
    logits, sampled = (part.cuda() for part in masked_logits(8, 4099))
    kind = torch.full((8,), int(RowKind.REPLAY), dtype=torch.int8).pin_memory()
    expected = capture_module.capture_support(logits, sampled, kind=kind)
    torch.cuda._sleep(200_000_000)  # the copy of the kinds has to wait
    rows = capture_module.capture_support(logits, sampled, kind=kind)
    kind.fill_(RowKind.HEAD)
    assert torch.equal(rows.kind, expected.kind)
    assert torch.equal(rows.packed, expected.packed)


def test_the_default_capacity_is_what_the_rows_can_need_up_to_a_bound(monkeypatch):
    logits, sampled = masked_logits(6, 50)

    def capacity(**options):
        return capture_support(logits, sampled, **options).packed.numel()

    assert capacity(kind=RowKind.REPLAY) == 6 * 50
    assert capacity(kind=RowKind.HEAD, top=7) == 6 * 8
    assert capacity(kind=RowKind.DRAWS, draws=7) == 6 * 7
    assert capacity(kind=torch.tensor([0, 1, 0, 2, 3, 0], dtype=torch.int8)) == 6 * 50
    assert capacity(kind=torch.zeros(6, dtype=torch.int8)) == 0  # what the host can see
    monkeypatch.setattr(capture_module, "_MAX_DEFAULT_CAPACITY", 100)
    assert capacity(kind=RowKind.REPLAY) == 100


@pytest.mark.parametrize("kind", ASKED)
def test_no_rows(kind):
    rows = capture_support(torch.empty(0, 5), torch.empty(0, dtype=torch.int64), kind=kind)
    assert rows.packed.shape == rows.counts.shape == rows.kind.shape == (0,)
    assert rows.tail_mass.shape == rows.sampled_logprobs.shape == (0,)


@pytest.mark.parametrize("kind", ASKED)
@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="a kernel reads real memory")
def test_no_value_is_read_on_the_host(kind, draws):
    # Fake tensors have no values: reading one, or a shape that depends on one, raises.
    with FakeTensorMode():
        sampled = torch.zeros(4, dtype=torch.int64)
        rows = capture_support(torch.randn(4, 9), sampled, kind=kind, draws=draws)
        assert rows.packed.dtype == torch.int64


@pytest.mark.gpu
def test_no_sync():
    logits, sampled = (part.cuda() for part in masked_logits(5, 4099))
    kinds = torch.tensor([1, 2, 3, 0, 1], dtype=torch.int8)
    for kind in (kinds, kinds.cuda(), RowKind.REPLAY):
        capture_module.capture_support(logits, sampled, kind=kind)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            capture_module.capture_support(logits, sampled, kind=kind)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_logits_on_another_gpu_than_the_current_one():
    logits, sampled = masked_logits(8, 1500)
    kinds = torch.tensor([1, 2, 3, 0] * 2, dtype=torch.int8)
    assert torch.cuda.current_device() == 0
    here, there = (
        capture_module.capture_support(
            logits.to(device),
            sampled.to(device),
            kind=kinds,
            generator=torch.Generator(device).manual_seed(0),
        )
        for device in ("cuda:0", "cuda:1")
    )
    for field in fields(here):
        one, other = getattr(here, field.name), getattr(there, field.name)
        assert other.device == torch.device("cuda:1")
        torch.testing.assert_close(other.cpu(), one.cpu(), rtol=0, atol=0, equal_nan=True)


def test_views_expanded_rows_and_int32_tokens():
    logits, sampled = masked_logits(1, 21)
    wide = torch.full((21, 3), math.nan)
    wide[:, 1] = logits[0]
    rows = capture_support(wide.T[1:2].expand(4, 21), sampled.int().expand(4), kind=RowKind.REPLAY)
    expected = entries_of(capture_support(logits, sampled, kind=RowKind.REPLAY))[0]
    for ids, logprobs in entries_of(rows):
        assert ids == expected[0]
        assert torch.equal(logprobs, expected[1])


def test_logits_that_need_gradient_give_rows_without():
    logits, sampled = masked_logits(3, 9)
    rows = capture_support(logits.requires_grad_(), sampled, kind=RowKind.REPLAY)
    assert not rows.sampled_logprobs.requires_grad
    assert not rows.packed.requires_grad


def test_to_support_keeps_rows_kinds_and_tails():
    logits, sampled = masked_logits(12, 40, keep=0.6)
    kind = torch.tensor([1, 2, 3, 0] * 3, dtype=torch.int8)
    logits[4, 0] = math.nan
    rows = capture_support(logits, sampled, kind=kind, top=3, draws=2, capacity=400)
    support = rows.to_support()
    assert torch.equal(support.kind, rows.kind)
    assert torch.equal(support.sampler_tail_mass, rows.tail_mass)
    for i, entries in enumerate(entries_of(rows)):
        span = slice(int(support.offsets[i]), int(support.offsets[i + 1]))
        if entries is None:
            assert span.start == span.stop
            continue
        assert support.ids[span].tolist() == entries[0]
        assert torch.equal(support.sampler_logprobs[span], entries[1])
        assert support.known[span].all()
    usable = [i for i in range(12) if i != 4]
    support.select(torch.tensor(usable)).validate(
        sampled[usable],
        40,
        # A row without evidence has no log q here: the engine's own number stands for it.
        inference_logprobs=torch.where(
            rows.kind == RowKind.NONE,
            logits.log_softmax(1)[range(12), sampled],
            rows.sampled_logprobs,
        )[usable],
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"processed_logits": torch.zeros(3)}, "processed_logits must be float64, .* \\[R, V\\]"),
        (
            {"processed_logits": torch.zeros(2, 4).to(torch.float8_e4m3fn)},
            "processed_logits must be .* got torch.float8_e4m3fn",
        ),
        ({"processed_logits": torch.zeros(2, 4, dtype=torch.int64)}, "got torch.int64 \\[2, 4\\]"),
        ({"processed_logits": torch.zeros(2, 0)}, "processed_logits must .* got V = 0"),
        (
            {"sampled": torch.zeros(3, dtype=torch.int64)},
            "sampled must be .* got torch.int64 \\[3\\]",
        ),
        (
            {"sampled": torch.zeros(2)},
            r"sampled must be torch.int64 or torch.int32 \[2\], got torch.float32 \[2\]",
        ),
        (
            {"sampled": torch.zeros(2, dtype=torch.int64, device="meta")},
            f"sampled must be on {DEVICE}.* got meta",
        ),
        (
            {"kind": torch.zeros(2, dtype=torch.int64)},
            "kind must be torch.int8 \\[2\\], got .*int64",
        ),
        ({"kind": torch.zeros(1, dtype=torch.int8)}, "kind must be torch.int8 \\[2\\], got"),
        ({"kind": 4}, "kind must be NONE, REPLAY, HEAD or DRAWS, .* got 4"),
        ({"kind": RowKind.FAILED}, "kind must .* got <RowKind.FAILED"),
        (
            {"kind": torch.tensor([1, 7], dtype=torch.int8)},
            "kind must be NONE, REPLAY, HEAD or DRAWS, got 7 in row 1",
        ),
        ({"generator": 3}, "generator must be a torch.Generator, got int"),
        ({"kind": "replay"}, "kind must .* got 'replay'"),
        ({"kind": True}, "kind must .* got True"),
        ({"capacity": -1}, "capacity must be an int of at least 0, got -1"),
        ({"capacity": 1.5}, "capacity must .* got 1.5"),
        ({"top": -1}, "top must be an int of at least 0, got -1"),
        ({"draws": 0}, "draws must be an int of at least 1, got 0"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = {
        "processed_logits": torch.zeros(2, 4),
        "sampled": torch.zeros(2, dtype=torch.int64),
        "kind": RowKind.REPLAY,
    }
    with pytest.raises(ValueError, match=message):
        capture_support(**arguments | change)
