"""The weight's gradient added to a buffer, by the head and by head and loss in one pass."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from factory import (
    ALL_KINDS,
    LargestTensor,
    MadeMemory,
    hot_ids_everywhere,
    naive_head,
    naive_output,
    outputs,
    padded,
    random_batch,
    results,
    spied,
    tolerance,
    weighted_sum,
)
from interpreter import DEVICE, INTERPRETED, rounded_twice, run_interpreted, truncated
from ranks import on_gpus, rank_device, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint

from rl_loss import FusedLMHead, LossInputs, RowKind, fused_lm_head, fused_lm_head_loss, icepop_loss

pytestmark = pytest.mark.usefixtures("unwritten_is_nan", "rows_are_gathered")
KERNELS = INTERPRETED or DEVICE == "cuda"
IMPLS = ["triton"] if KERNELS else ["auto", "reference"]
on_the_kernels = pytest.mark.skipif(not KERNELS, reason="the kernels'")
REPLAY = (RowKind.REPLAY,)
KINDS = {"replay": REPLAY, "none": (RowKind.NONE,), "mixed": ALL_KINDS}
DTYPES = [  # of the weight, of the buffer
    (torch.float64, torch.float32),
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
]
LOSS = partial(icepop_loss, kl_tau=0.1)
doors = pytest.mark.parametrize("door", ["two steps", "one pass"])
impls = pytest.mark.parametrize("impl", IMPLS)


def test_in_the_interpreter():
    run_interpreted(__file__)


def on_device(batch):
    names = ("hidden", "weight", "bias", "labels", "temperature", "support")
    return replace(batch, **{name: getattr(batch, name).to(DEVICE) for name in names})


def values_of(batch):
    g = torch.Generator().manual_seed(3)
    n, dtype = len(batch.labels), torch.promote_types(batch.hidden.dtype, torch.float32)
    names = "inference_logprobs", "advantages"
    drawn = -torch.randn(n, generator=g).abs(), torch.randn(n, generator=g)
    return {name: x.to(batch.hidden.device, dtype) for name, x in zip(names, drawn, strict=True)}


def scalar(batch, door, impl, values=None, **options):
    """What is differentiated, of the batch as it is."""
    rows = batch.hidden, batch.weight, batch.labels, batch.support
    options = {"bias": batch.bias, "temperature": batch.temperature, "impl": impl, **options}
    if door == "two steps":
        return weighted_sum(outputs(fused_lm_head(*rows, **options)))
    values = values_of(batch) if values is None else values
    return 0.5 * fused_lm_head_loss(*rows, loss=LOSS, **values, **options).loss


def read_of(door, batch, active=None):
    """The same of the definition's outputs."""

    def read(parts):
        if door == "two steps":
            return parts, weighted_sum(parts)
        head = naive_output(batch, parts, active)
        return [], 0.5 * LOSS(LossInputs.from_head(head, **values_of(batch))).loss

    return read


def pattern(shape, dtype):
    """What a buffer may hold, NaN and -0 among it."""
    g = torch.Generator().manual_seed(11)
    held = torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)
    held.view(-1)[::7], held.view(-1)[3::11] = torch.nan, -0.0
    return held.to(DEVICE)


def same_bits(a, b) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def touched_ids(batch, active=None):
    """Of rows that are replayed over several ids."""
    support, on = batch.support.to("cpu"), active
    on = torch.ones(len(batch.labels), dtype=torch.bool) if on is None else on
    several = (support.offsets.diff() > 1) & on
    return support.ids[several[support.entry_rows]].unique().long()


@impls
@doors
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("dtype", "kept_in"), DTYPES, ids=str)
def test_what_is_added_is_the_gradient(door, impl, kinds, dtype, kept_in):
    batch = random_batch(11, 7, 23, kinds=kinds, dtype=dtype)
    read = read_of(door, batch)
    exact = batch.leaves(torch.float64)
    wanted = results(exact, naive_head(exact), read)
    allowed = rounded_twice(tolerance(batch, read), dtype)
    kept = torch.randn(23, 7, generator=torch.Generator().manual_seed(2)).to(DEVICE, kept_in)
    before, plain, leaves = kept.clone(), on_device(batch).leaves(), on_device(batch).leaves()
    total = scalar(leaves, door, impl, grad_into=kept)
    assert same_bits(kept, before)  # a forward alone adds nothing
    total.backward()
    scalar(plain, door, impl).backward()
    assert leaves.weight.grad is None
    assert same_bits(leaves.hidden.grad, plain.hidden.grad)
    assert same_bits(leaves.bias.grad, plain.bias.grad)
    exact_sum = before.cpu().double() + wanted.grads[1]
    units = truncated(kept_in) * torch.finfo(kept_in).eps
    room = units * exact_sum.abs() + allowed.grads[1] * wanted.grads[1].abs().max()
    assert ((kept.cpu().double() - exact_sum).abs() <= room).all()


@impls
@doors
@pytest.mark.parametrize("kept_in", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("where", sorted({"cpu", DEVICE}))
def test_rows_that_no_id_touches_keep_their_bits(door, impl, kept_in, where):
    """Those of inactive rows and of rows of one id among them, padding, what is beside a row."""
    batch = random_batch(8, 6, 90, kinds=REPLAY, dtype=torch.bfloat16, widths=(3, 1, 5, 2))
    active = torch.arange(8) % 3 != 1
    touched = touched_ids(batch, active)
    beside = pattern((95, 11), kept_in)
    before, kept = beside.clone(), beside[:, 2:8]
    kept[touched.to(DEVICE)] = 0.25
    leaves = on_device(padded(batch)).leaves()
    on = active.to(where)
    options = {"active": on, "vocab_size": 90}
    scalar(leaves, door, impl, grad_into=kept, **options).backward()
    plain = on_device(padded(batch)).leaves()
    scalar(plain, door, impl, **options).backward()
    rest = torch.ones(95, dtype=torch.bool, device=DEVICE)
    rest[touched.to(DEVICE)] = False
    assert 0 < len(touched) < len(batch.support.ids.unique())
    assert same_bits(beside[rest], before[rest])
    assert same_bits(beside[:, :2], before[:, :2])
    assert same_bits(beside[:, 8:], before[:, 8:])
    want = 0.25 + plain.weight.grad[touched].double()
    error = (kept[touched].double() - want).abs()
    units = torch.finfo(torch.bfloat16).eps  # of the plain gradient's rounding, and of the sum's
    assert (error <= units * (2 * want.abs() + 0.25)).all()


@impls
@doors
def test_padding_keeps_its_bits_beside_rows_over_the_vocabulary(door, impl):
    batch = random_batch(7, 5, 19, kinds=ALL_KINDS, dtype=torch.float32)
    for kept_in in (torch.float32, torch.float64):
        given = batch if kept_in == torch.float32 else random_batch(7, 5, 19, kinds=ALL_KINDS)
        kept = pattern((24, 9), kept_in)[:, 2:7]  # of longer rows
        kept[:19] = 0
        before = kept.clone()
        leaves, plain = (on_device(padded(given)).leaves() for _ in range(2))
        scalar(leaves, door, impl, grad_into=kept, vocab_size=19).backward()
        scalar(plain, door, impl, vocab_size=19).backward()
        assert same_bits(kept[19:], before[19:])
        torch.testing.assert_close(kept[:19], plain.weight.grad[:19])


@impls
@doors
def test_no_buffer_of_the_vocabulary_is_made_for_replayed_rows(door, impl):
    n, h, v = 6, 40, 1000
    batch = on_device(random_batch(n, h, v, kinds=REPLAY, dtype=torch.bfloat16)).leaves()
    if impl == "reference":
        pytest.skip("the definition holds the weight in the accumulation dtype")
    batch.support.plan_for(v)
    kept = torch.zeros(v, h, device=DEVICE)
    sizes = []
    for into in (kept, None):
        with LargestTensor(batch.weight, kept) as seen:
            scalar(batch, door, impl, grad_into=into).backward()
        sizes.append(seen.numel)
    assert sizes[0] < v * h / 4
    assert sizes[1] >= v * h


@impls
@doors
def test_what_waits_for_the_backward_is_free_behind_it(door, impl):
    """Also while the loss is kept."""
    h, v = 8, 90
    batch = on_device(random_batch(6, h, v, dtype=torch.float32)).leaves()
    kept = torch.zeros(v, h, device=DEVICE)
    with MadeMemory() as made:
        total = scalar(batch, door, impl, grad_into=kept)
        total.backward()
    assert total.grad_fn is not None
    assert kept.any()
    assert [what for what in made.held(batch.weight, kept) if what.endswith(f"({v}, {h})")] == []


@impls
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_micro_batches_add_up_to_one_batch(impl, kinds):
    batch = on_device(random_batch(12, 7, 29, kinds=kinds, dtype=torch.bfloat16)).leaves()
    values = values_of(batch)
    for door in ("two steps", "one pass"):
        whole, parts = (torch.zeros(29, 7, device=DEVICE) for _ in range(2))
        for cuts, kept in (((0, 12), whole), ((0, 5, 6, 12), parts)):
            for start, stop in pairwise(cuts):
                some = slice(start, stop)
                names = "hidden", "labels", "support", "temperature"
                part = replace(batch, **{name: getattr(batch, name)[some] for name in names})
                if door == "one pass":
                    of_part = {name: value[some] for name, value in values.items()}
                    scalar(part, door, impl, of_part, grad_into=kept).backward()
                    continue
                rows = part.hidden, part.weight, part.labels, part.support
                options = {"temperature": part.temperature, "impl": impl, "grad_into": kept}
                out = fused_lm_head(*rows, **options)
                (out.logprobs.sum() + (out.support_logprobs**2).sum()).backward()
        # Rows over the vocabulary have gradients of products in bfloat16 on a GPU alone.
        units = 2**-6 if DEVICE == "cuda" and kinds != REPLAY else 2**-21
        assert (whole - parts).abs().max() <= units * whole.abs().max()
    assert whole.abs().max() > 0


@impls
@doors
@pytest.mark.parametrize("kinds", [REPLAY, ALL_KINDS], ids=["replay", "mixed"])
@pytest.mark.parametrize("kept_in", [torch.float32, torch.bfloat16], ids=str)
def test_every_backward_adds_the_same(door, impl, kinds, kept_in):
    """A graph twice, two graphs into one buffer, twenty times: bit by bit."""
    batch = on_device(random_batch(5, 7, 31, kinds=kinds, dtype=torch.bfloat16)).leaves()

    def after(*times: int):
        kept = torch.ones(31, 7, device=DEVICE, dtype=kept_in)
        for count in times:
            total = scalar(batch, door, impl, grad_into=kept)
            for _ in range(count):
                total.backward(retain_graph=True)
        return kept

    once = after(1)
    assert all(same_bits(after(1), once) for _ in range(1 if INTERPRETED else 20))
    twice = after(2)
    assert same_bits(after(1, 1), twice)
    assert not torch.equal(twice, once)
    both = torch.ones(31, 7, device=DEVICE, dtype=kept_in)
    pair = [scalar(batch, door, impl, grad_into=both) for _ in range(2)]
    sum(pair).backward()
    assert same_bits(both, twice)
    assert batch.weight.grad is None


@impls
@doors
def test_without_a_backward_nothing_is_added(door, impl):
    batch = on_device(random_batch(5, 7, 31)).leaves()
    kept = pattern((31, 7), torch.float64)
    before = kept.clone()
    scalar(batch, door, impl, grad_into=kept)
    with torch.no_grad():
        scalar(batch, door, impl, grad_into=kept)
        batch.weight.requires_grad_(False)
        scalar(batch, door, impl, grad_into=kept)
    assert same_bits(kept, before)


@impls
@doors
def test_the_upstream_counts(door, impl):
    """0 as well: then no row has a gradient, and none is written."""
    batch = on_device(random_batch(9, 7, 31, kinds=REPLAY)).leaves()
    once, thrice = (torch.zeros(31, 7, device=DEVICE, dtype=torch.float64) for _ in range(2))
    scalar(batch, door, impl, grad_into=once).backward()
    (3 * scalar(batch, door, impl, grad_into=thrice)).backward()
    torch.testing.assert_close(thrice, 3 * once)
    held = pattern((31, 7), torch.float64)
    before = held.clone()
    (0 * scalar(batch, door, impl, grad_into=held)).backward()
    assert same_bits(held, before)


@impls
@doors
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(door, impl, reentrant):
    batch = on_device(random_batch(9, 7, 31)).leaves()
    wanted, kept = (torch.zeros(31, 7, device=DEVICE, dtype=torch.float64) for _ in range(2))
    scalar(batch, door, impl, grad_into=wanted).backward()
    grads = batch.hidden.grad.clone()
    batch.hidden.grad = None

    def head(hidden, weight):
        return scalar(replace(batch, hidden=hidden, weight=weight), door, impl, grad_into=kept)

    checkpoint(head, batch.hidden, batch.weight, use_reentrant=reentrant).backward()
    assert same_bits(kept, wanted)
    assert same_bits(batch.hidden.grad, grads)
    assert batch.weight.grad is None


@impls
@doors
def test_tied_weights_keep_the_embeddings_gradient(door, impl):
    batch = on_device(random_batch(9, 7, 31)).leaves()
    tokens = torch.arange(9, device=DEVICE) * 3
    kept = torch.zeros(31, 7, device=DEVICE, dtype=torch.float64)

    def total(into):
        hidden = batch.hidden + embedding(tokens, batch.weight)
        return scalar(replace(batch, hidden=hidden), door, impl, grad_into=into)

    total(None).backward()
    whole, batch.weight.grad = batch.weight.grad, None
    total(kept).backward()
    torch.testing.assert_close(batch.weight.grad + kept, whole)
    assert not batch.weight.grad[1].any()  # of no token
    assert kept[1].any()
    batch.weight.grad.zero_()
    total(batch.weight.grad).backward()
    torch.testing.assert_close(batch.weight.grad, whole)


@impls
def test_the_module_takes_it(impl):
    batch = on_device(random_batch(6, 7, 31, dtype=torch.float32))
    head = FusedLMHead(7, 31, device=DEVICE)
    kept = torch.zeros_like(head.weight)
    out = head(batch.hidden, batch.labels, batch.support, grad_into=kept.detach(), impl=impl)
    weighted_sum(outputs(out)).backward()
    assert head.weight.grad is None
    assert kept.any()


@impls
@doors
def test_no_rows(door, impl):
    batch = on_device(random_batch(0, 7, 31)).leaves()
    kept = pattern((31, 7), torch.float64)
    before = kept.clone()
    scalar(batch, door, impl, grad_into=kept).backward()
    assert same_bits(kept, before)


@impls
@doors
def test_what_cannot_hold_it_is_refused(door, impl):
    batch = on_device(random_batch(6, 7, 31, dtype=torch.bfloat16)).leaves()
    right = torch.zeros(31, 7, device=DEVICE)
    both = torch.zeros(62, 7, device=DEVICE, dtype=torch.bfloat16)
    shared = replace(batch, weight=both[:31].requires_grad_())
    frozen = replace(batch, weight=batch.weight.detach())
    refused = [
        (batch, [1.0], "must be a tensor, got list"),
        (batch, right[:30], r"must be \(31, 7\) as weight, got \(30, 7\)"),
        (batch, right.double(), "must be in torch.float32 or torch.bfloat16, got torch.float64"),
        (batch, right.half(), "must be in torch.float32 or torch.bfloat16, got torch.float16"),
        (batch, right.to("meta"), "must be on .* as weight, got meta"),
        (batch, right.clone().requires_grad_(), "must not require a gradient"),
        (batch, right.T.contiguous().T, r".*got strides \(1, 31\)"),
        (batch, right[0].expand(31, 7), r".*got strides \(0, 1\)"),
        (batch, batch.weight.detach(), "must not share memory with weight"),
        (shared, both[30:61].detach(), "must not share memory with weight"),
        (frozen, right, "needs a weight that requires a gradient, got a frozen one"),
    ]
    for given, kept, message in refused:
        with pytest.raises(ValueError, match=f"grad_into {message}"):
            scalar(given, door, impl, grad_into=kept)
    scalar(shared, door, impl, grad_into=both[31:].detach()).backward()
    assert not right.any()


@impls
@doors
def test_compiled_the_graph_breaks_and_the_numbers_stay(door, impl):
    batch = on_device(random_batch(9, 7, 31)).leaves()
    wanted, kept = (torch.zeros(31, 7, device=DEVICE, dtype=torch.float64) for _ in range(2))
    scalar(batch, door, impl, grad_into=wanted).backward()
    torch._dynamo.reset()

    values = values_of(batch)

    def step(hidden, into):
        moved = replace(batch, hidden=1.5 * hidden / 1.5)
        return 2 * scalar(moved, door, impl, values, grad_into=into)

    torch.compile(step, backend="aot_eager")(batch.hidden, kept).backward()
    torch.testing.assert_close(kept, 2 * wanted)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="fused_lm_head"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(batch.hidden, kept)


# --- the ways of the kernels ---


def compared(door, kinds, dtype, kept_in, share=0.0, **batch_options):
    """Adds on the kernels, and holds it to float64."""
    batch = random_batch(**batch_options, kinds=kinds, dtype=dtype)
    read, exact = read_of(door, batch), batch.leaves(torch.float64)
    grad = results(exact, naive_head(exact), read).grads[1]
    allowed = rounded_twice(tolerance(batch, read), dtype)
    kept = torch.full(grad.shape, 0.5, dtype=kept_in, device=DEVICE)
    leaves = on_device(batch).leaves()
    scalar(leaves, door, "triton", grad_into=kept).backward()
    units = truncated(kept_in) * torch.finfo(kept_in).eps
    room = units * (0.5 + grad).abs() + (allowed.grads[1] + share) * grad.abs().max()
    assert ((kept.cpu().double() - 0.5 - grad).abs() <= room).all()


@on_the_kernels
@doors
def test_frequent_ids_in_narrow_blocks(door, monkeypatch):
    import rl_loss.kernels.entry_sums as entry_sums

    monkeypatch.setattr(entry_sums, "HEAVY", 4)
    monkeypatch.setattr(entry_sums, "_HEAVY_BLOCK", {"BLOCK_H": 16, "R": 4})
    launched = spied(monkeypatch, entry_sums, "_heavy_kernel")
    compared(door, REPLAY, torch.float64, torch.float64, n=7, h=21, v=7, widths=(5,))
    assert any(call.kwargs["INTO"] for call in launched)


@on_the_kernels
@doors
@pytest.mark.parametrize("kinds", [REPLAY, (RowKind.REPLAY, RowKind.HEAD)], ids=["replay", "head"])
@pytest.mark.parametrize("forward", [True, False])
def test_hot_ids(door, kinds, forward, monkeypatch):
    import rl_loss.kernels.gradient_sums as gradient_sums

    hot_ids_everywhere(monkeypatch, forward=forward)
    written = spied(monkeypatch, gradient_sums, "write_hot_rows")
    # The interpreter multiplies the bits of bfloat16 matrices as integers.
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    size = {"n": 9, "h": 20, "v": 60, "widths": (25, 3)}
    for kept_in in (torch.float32, dtype):
        compared(door, kinds, dtype, kept_in, share=9 * 2**-17, **size)
    assert written
    assert all(call.args[4] for call in written)


@on_the_kernels
@doors
@pytest.mark.parametrize("kinds", [ALL_KINDS, (RowKind.NONE,)], ids=["mixed", "none"])
@pytest.mark.parametrize(("dtype", "kept_in"), DTYPES[::2], ids=str)
def test_blocks_of_ids_and_of_rows(door, kinds, dtype, kept_in, monkeypatch):
    """Runs of rows for a block of ids, and one run; chunks of rows and of ids in one pass."""
    import rl_loss.kernels.blocks as blocks
    import rl_loss.kernels.late_weight as late_weight

    monkeypatch.setattr(blocks, "_LEAST_IDS", 5)
    monkeypatch.setattr(late_weight, "_IDS", 6)
    at_once = spied(monkeypatch, blocks.BlockSums, "_writes_at_once")
    size = 8 if dtype == torch.float64 else 4
    for cells in (10, 60):
        shapes = spied(monkeypatch, blocks, "to_grads")
        with monkeypatch.context() as context:
            given = partial(fused_lm_head, workspace_mib=cells * size / 2**20)
            in_one = partial(fused_lm_head_loss, workspace_mib=cells * size / 2**20)
            context.setitem(globals(), "fused_lm_head", given)
            context.setitem(globals(), "fused_lm_head_loss", in_one)
            compared(door, kinds, dtype, kept_in, n=7, h=6, v=17)
        assert len(shapes) > 1
    if door == "two steps" and dtype == kept_in == torch.bfloat16 and kinds != ALL_KINDS:
        assert any(call.result for call in at_once) == (DEVICE == "cuda")


# --- on the GPU alone ---


def on_the_gpu(kinds=REPLAY):
    batch = random_batch(64, 32, 500, kinds=kinds, dtype=torch.bfloat16, incomplete=False)
    support = batch.support.pin_memory()
    moved = replace(on_device(batch), support=support.to("cuda", non_blocking=True))
    return moved.leaves(), torch.zeros(500, 32, device="cuda")


def add_once(batch, kept) -> None:
    rows = batch.hidden, batch.weight, batch.labels, batch.support
    out = fused_lm_head(*rows, bias=batch.bias, grad_into=kept)
    (out.logprobs.sum() + out.support_logprobs.square().sum()).backward()


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", [REPLAY, ALL_KINDS], ids=["replay", "mixed"])
def test_no_sync(kinds):
    batch, kept = on_the_gpu(kinds)
    for mode in ("default", "error"):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            add_once(batch, kept)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert kept.any()


@pytest.mark.gpu
def test_every_replay_of_a_cuda_graph_adds():
    batch, kept = on_the_gpu()
    wanted = torch.zeros_like(kept)
    for _ in range(3):
        add_once(batch, wanted)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            add_once(batch, kept)
    torch.cuda.current_stream().wait_stream(stream)
    batch.hidden.grad = batch.bias.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_once(batch, kept)
    kept.zero_()
    for _ in range(3):
        graph.replay()
    assert same_bits(kept, wanted)


# --- ranks ---


def check_ranks(rank: int, impl: str) -> None:
    ranks, device = dist.get_world_size(), rank_device(rank)
    for kinds in (REPLAY, ALL_KINDS):
        for cut in ("padded", "dtensor", "empty"):
            for door in ("two steps", "one pass"):
                for split in (False, True):
                    check_rank(rank, ranks, device, (kinds, cut, door, split, impl))


def check_rank(rank, ranks, device, case) -> None:
    kinds, cut, door, split, impl = case
    v = 3 if cut == "empty" else 31
    batch = random_batch(12, 7, v, kinds=kinds)
    names = ("hidden", "weight", "bias", "labels", "temperature", "support")
    batch = replace(batch, **{name: getattr(batch, name).to(device) for name in names})
    whole = batch.leaves()
    scalar(whole, door, "reference").backward()
    rows = -(-v // ranks) + (cut == "empty")  # of 3 ids the last rank then has none
    own, at = batch.weight[rank * rows : (rank + 1) * rows], slice(rank * rows, (rank + 1) * rows)
    bias = batch.bias[at]
    if cut == "dtensor":
        mesh = init_device_mesh(device.type, (ranks,))
        shape = {"shape": batch.weight.shape, "stride": batch.weight.stride(), "run_check": False}
        weight = DTensor.from_local(own, mesh, [Shard(0)], **shape)
        flat = {"shape": batch.bias.shape, "stride": batch.bias.stride(), "run_check": False}
        bias = DTensor.from_local(bias, mesh, [Shard(0)], **flat)
    else:
        weight = torch.cat([own, own.new_full((rows - len(own), 7), torch.nan)])
        bias = torch.cat([bias, bias.new_full((rows - len(bias),), torch.nan)])
    hidden = batch.hidden.chunk(ranks)[rank] if split else batch.hidden
    hidden, weight = hidden.clone().requires_grad_(), weight.detach().requires_grad_()
    kept = torch.full((len(own) if cut == "dtensor" else rows, 7), 0.5, dtype=torch.float64)
    kept = kept.to(device)
    kept[len(own) :] = torch.nan
    given = replace(batch, hidden=hidden, weight=weight, bias=bias)
    options = {"process_group": dist.group.WORLD, "sequence_parallel": split, "grad_into": kept}
    options["vocab_size"] = v if cut != "dtensor" else None
    scalar(given, door, impl, values_of(batch), **options).backward()
    assert weight.grad is None
    wanted = 0.5 + whole.weight.grad[at]
    torch.testing.assert_close(kept[: len(own)], wanted, rtol=0, atol=1e-11, msg=str(case))
    assert kept[len(own) :].isnan().all()
    if cut == "dtensor":
        with pytest.raises(ValueError, match="grad_into must be a plain tensor"):
            scalar(given, door, impl, values_of(batch), **{**options, "grad_into": weight.detach()})


@pytest.mark.skipif(INTERPRETED, reason="starts its own processes")
@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
@pytest.mark.parametrize("impl", ["auto", "reference", "triton"])
def test_two_ranks_have_their_own_rows(impl):
    run_ranks(check_ranks, 2, impl, interpreted=impl == "triton" and not on_gpus(2))
