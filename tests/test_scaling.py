"""The scaling benchmark runs on two ranks, and its model is the one that docs/scaling.md shows."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import rank_device, run_ranks

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks stand beside the tests

from benchmarks.scaling import PRESETS, run
from benchmarks.scaling_model import Machine, Rows, expected, forward_sum, hidden_sum
from benchmarks.scaling_results import tables
from benchmarks.workloads import dealt, even_ids, renumbered, zipf_rows

ROOT = Path(__file__).parents[1]


def run_tiny(rank: int) -> None:
    size, ranks = PRESETS["tiny"], dist.get_world_size()
    rows = {row.name: row for row in run(size, dist.group.WORLD, rank_device(rank), repeats=1)}
    assert len(rows) == 2 + 3 * len(size.widths)
    for name, row in rows.items():
        assert row.sound, row
        assert sum(row.shares) == pytest.approx(1)
        nnz = 0 if name.startswith("full") else size.n * int(name.partition(",")[0][4:])
        *forward, hidden = (one.bytes for one in row.sums)
        assert sum(forward) == forward_sum(nnz, 0 if nnz else size.n, ranks, len(forward))
        assert hidden == hidden_sum(size.n, size.h)
        assert min(row.ratio, *(one.ms for one in row.sums)) > 0
    largest = {name: max(row.shares) for name, row in rows.items()}
    assert largest["K = 16, Zipf"] > 0.8
    assert largest["K = 16, even"] < 0.55
    assert largest["K = 16, dealt"] < 0.55
    if rank == 0:
        table = tables(list(rows.values()), ranks)
        assert all(table.count(f"| {name} ") == 2 for name in rows)


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
def test_it_runs_on_two_ranks():
    run_ranks(run_tiny, 2)


def test_the_document_shows_the_model():
    text = (ROOT / "docs" / "scaling.md").read_text()
    head, *printed = expected(Machine()).split("\n\n")
    assert head.partition("; ")[2] in text
    for table in printed:
        assert table in text


def test_a_ring():
    machine = Machine(nvlink_gbs=100.0, network_gbs=10.0, host_gpus=4)
    assert machine.ring_ms(1e8, 4) == pytest.approx(0.75)  # of 1 ms
    assert machine.ring_ms(1e8, 2, turns=2) == pytest.approx(1.0)
    assert machine.ring_ms(1e8, 8) == pytest.approx(0.875 * 100 / 40)  # four adapters a host
    assert machine.ring_ms(1e8, 4, stride=4) == pytest.approx(0.75 * 10)  # one
    assert machine.ring_ms(1e8, 1) == 0


def test_work_over_rates():
    machine = Machine(tflops=100.0, gather_gbs=1000.0)
    products = 4 * 2 * 16384 * 2048 * 151936
    full = Rows("", products=4).milliseconds(0.5, machine)
    assert full == pytest.approx(1e3 * 0.5 * products / 100e12)
    gathered = 3 * 2 * 2048 * 16384 * 20
    assert Rows("", width=20).milliseconds(1.0, machine) == pytest.approx(1e3 * gathered / 1e12)


def test_even_ids_are_unique_in_their_rows():
    ids = even_ids(50, 13, 101).view(50, 13)
    assert (ids.diff() > 0).all()
    assert ids.min() >= 0
    assert ids.max() < 101
    assert len(ids.unique()) == 101


def test_other_numbers_for_the_same_rows():
    work = zipf_rows("", torch.full((9,), 5), 3, 101)
    numbers = dealt(101, 4)
    assert sorted(numbers.tolist()) == list(range(101))
    assert (numbers[:4] // 26).tolist() == [0, 1, 2, 3]  # shards of 26 ids
    other = renumbered(work, numbers[work.support.ids.long()])
    assert torch.equal(other.labels, numbers[work.labels])
    assert torch.equal(other.support.sampler_logprobs, work.support.sampler_logprobs)
