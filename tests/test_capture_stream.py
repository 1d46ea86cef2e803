"""Captured rows to the host: what arrives is what was captured, whatever arrives when."""

import pytest
import torch

import rl_loss.capture_stream as capture_stream
from rl_loss import CaptureStream, RowKind, capture_support

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def steps(device, n=5, capacity=None):
    g = torch.Generator().manual_seed(0)
    for i in range(n):
        logits = torch.randn(i + 1, 40, generator=g)
        logits[torch.rand(i + 1, 40, generator=g) < 0.5] = -torch.inf
        token = logits.softmax(1).multinomial(1, generator=g)[:, 0].to(device)
        kind = torch.tensor([1, 2, 0, 1, 2])[: i + 1].to(torch.int8)
        yield capture_support(logits.to(device), token, kind=kind, capacity=capacity, top=3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("late", [False, True], ids=["at-once", "late"])
def test_every_step_arrives_as_it_was(device, late, monkeypatch):
    if late:  # no counts have ever arrived when the next step is added
        monkeypatch.setattr(capture_stream._Step, "arrived", lambda step: False)
    stream, expected = CaptureStream(), []
    for rows in steps(device):
        stream.add(rows)
        expected.append((rows.to_support(), rows.sampled_logprobs.cpu()))
    got = stream.collect()
    assert len(got) == len(expected) == 5
    for step, (support, logprobs) in zip(got, expected, strict=True):
        for name in ("ids", "sampler_logprobs", "known", "offsets", "kind", "sampler_tail_mass"):
            assert torch.equal(getattr(step.support, name), getattr(support, name).cpu()), name
        torch.testing.assert_close(step.sampled_logprobs, logprobs, rtol=0, atol=0, equal_nan=True)
        assert step.support.device.type == "cpu"
    assert stream.collect() == []


@pytest.mark.parametrize("device", DEVICES)
def test_the_most_that_was_needed_is_kept_for_a_log_line(device):
    stream = CaptureStream()
    for rows in steps(device, capacity=20):
        stream.add(rows)
    assert [RowKind.FAILED in step.support.kind for step in stream.collect()][-1]
    assert stream.most_needed > 20


@pytest.mark.gpu
def test_adding_does_not_wait():
    stream, made = CaptureStream(), list(steps("cuda"))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for rows in made:
            stream.add(rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(stream.collect()) == 5


@pytest.mark.gpu
def test_rows_that_are_made_late_and_dropped_at_once():
    """The copies wait for the rows, and their memory for the copies."""
    g = torch.Generator("cuda").manual_seed(0)
    batches = [torch.randn(64, 4000, generator=g, device="cuda") for _ in range(5)]
    token = torch.zeros(64, dtype=torch.int64, device="cuda")
    expected = [capture_support(z, token, kind=RowKind.REPLAY).to_support() for z in batches]
    torch.cuda.synchronize()
    stream = CaptureStream()
    for logits in batches:
        torch.cuda._sleep(50_000_000)
        rows = capture_support(logits, token, kind=RowKind.REPLAY)
        shape = rows.packed.shape
        stream.add(rows)
        del rows
        for _ in range(3):  # what the allocator hands out next is written to
            torch.full(shape, 7, dtype=torch.int64, device="cuda")
    for step, support in zip(stream.collect(), expected, strict=True):
        assert torch.equal(step.support.ids, support.ids.cpu())
        assert torch.equal(step.support.sampler_logprobs, support.sampler_logprobs.cpu())


@pytest.mark.gpu
def test_a_cuda_graph_is_refused():
    rows, stream = next(iter(steps("cuda"))), CaptureStream()
    refused = pytest.raises(ValueError, match="rows cannot be added in a CUDA graph")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        stream.add(rows)


def test_a_step_that_was_written_again_is_named_and_stops_no_other(monkeypatch):
    monkeypatch.setattr(capture_stream._Step, "arrived", lambda step: False)
    stream, made = CaptureStream(), list(steps("cpu"))
    for rows in made:
        stream.add(rows)
    made[3].packed.fill_(-1)
    with pytest.raises(ValueError, match=r"step 3: .* was it written again before collect"):
        stream.collect()
    stream.add(made[0])
    assert len(stream.collect()) == 1


def test_what_is_no_captured_rows_is_refused():
    with pytest.raises(ValueError, match="rows must be CapturedRows, got str"):
        CaptureStream().add("rows")
