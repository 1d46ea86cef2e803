"""One GPU against several that split the vocabulary: `python -m benchmarks.scaling`.

It starts a process a GPU; under `torchrun` it is one. TP n splits the vocabulary over all of
them. For TP 1 each computes the whole by itself, all at the same time: the same cards, and as much
asked of the host. A step begins with a barrier, and the slowest rank's time counts. `--preset tiny`
runs on a CPU, and shows that it runs; `--model` prints what docs/scaling.md expects of more GPUs.
"""

import argparse
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.measure import environment, extra_mib, relative_error, synchronize, write_json
from benchmarks.scaling_model import Machine, expected, forward_sum, shares
from benchmarks.scaling_results import Row, Side, Sum, draw, tables
from benchmarks.tables import pyplot
from benchmarks.workloads import (
    LOGIT_STD,
    H,
    N,
    V,
    Workload,
    dealt,
    even_ids,
    renumbered,
    zipf_rows,
)
from rl_loss import Support, fused_lm_head, fused_lm_head_loss, icepop_loss

TARGETS = {"full": 1.9, "K = 512, even": 1.7}  # wall times TP 1 over TP 2, of the preset h200


class Size(NamedTuple):
    n: int
    h: int
    v: int
    widths: tuple[int, ...]


PRESETS = {"h200": Size(N, H, V, (20, 128, 512)), "tiny": Size(24, 16, 509, (4, 16))}


# --- the work ---


def batches(size: Size, ranks: int) -> Iterator[tuple[str, Workload]]:
    """Rows over the vocabulary, and replayed ones by width and by how their ids are spread;
    without hidden states and weight."""
    n, _, v, widths = size
    work = zipf_rows("full", torch.ones(n, dtype=torch.int64), 1, v)
    nothing = work.d_support_logprobs[:0]
    full = replace(work, support=Support.empty(n), d_support_logprobs=nothing)
    yield "full", full
    yield "full, one pass", full
    for width in widths:
        work = zipf_rows(f"K = {width}", torch.full((n,), width), 1, v)
        yield f"{work.name}, Zipf", work
        yield f"{work.name}, dealt", renumbered(work, dealt(v, ranks)[work.support.ids.long()])
        yield f"{work.name}, even", renumbered(work, even_ids(n, width, v))


class Way:
    """A step of one side."""

    def __init__(self, work: Workload, group: Any, sampled: Tensor | None = None) -> None:
        """`group`: over which the vocabulary is split; `sampled` `[N]`: log q, for one pass."""
        self.work, self.sampled, self.options = work, sampled, {}
        weight = work.weight.detach()
        if group is not None:
            self.options = {"process_group": group, "vocab_size": len(weight)}
            rows = -(-len(weight) // dist.get_world_size(group))
            own = weight[rows * dist.get_rank(group) :][:rows]
            weight = torch.nn.functional.pad(own, (0, 0, 0, rows - len(own)))
        self.hidden = work.hidden.detach().requires_grad_()
        self.weight = weight.requires_grad_()

    def outputs(self) -> tuple[Tensor, ...]:
        work = self.work
        rows = self.hidden, self.weight, work.labels, work.support
        if self.sampled is not None:
            values = {"inference_logprobs": self.sampled, "advantages": -work.d_logprobs}
            out = fused_lm_head_loss(*rows, loss=icepop_loss, **values, **self.options)
            return out.loss, out.per_token_loss
        out = fused_lm_head(*rows, **self.options)
        return (out.logprobs, out.support_logprobs) if work.support.nnz else (out.logprobs,)

    def forward(self) -> None:
        with torch.no_grad():
            self.outputs()

    def both(self) -> tuple[Tensor, ...]:
        self.hidden.grad = self.weight.grad = None
        outputs = self.outputs()
        if self.sampled is not None:
            outputs[0].backward()
        else:
            upstreams = self.work.d_logprobs, self.work.d_support_logprobs
            torch.autograd.backward(outputs, upstreams[: len(outputs)])
        return tuple(part.detach() for part in outputs)

    def logprobs(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Of a step's outputs; in one pass from the loss of each token, `-A p / q`."""
        if self.sampled is None:
            return outputs
        return ((outputs[1] / self.work.d_logprobs).log() + self.sampled,)


# --- measuring, on every rank at once ---


def over_ranks(value: float, op: Any = dist.ReduceOp.MAX) -> float:
    device = torch.cuda.current_device() if dist.get_backend() == "nccl" else "cpu"
    shared = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(shared, op=op)
    return float(shared)


def by_turns(functions: list[Callable[[], object]], repeats: int, warm_up: int = 2) -> list[float]:
    """The median wall time of each, of which every call's is the slowest rank's."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(warm_up + repeats):
        for function, taken in zip(functions, times, strict=True):
            synchronize()
            dist.barrier()
            synchronize()
            start = time.perf_counter()
            function()
            synchronize()
            taken.append(over_ranks(1e3 * (time.perf_counter() - start)))
    return [median(taken[warm_up:]) for taken in times]


def kernel_milliseconds(function: Callable[[], object], calls: int = 3) -> tuple[float, int]:
    """As `measure.gpu_milliseconds`, without what waits for other ranks: the collectives."""
    from torch.profiler import ProfilerActivity, profile

    times, launches = [], 0
    for _ in range(calls):
        dist.barrier()
        synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as run:
            function()
            synchronize()
        on_gpu = [e for e in run.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        kernels = [e for e in on_gpu if "nccl" not in e.name.lower()]
        times.append(over_ranks(sum(e.device_time_total for e in kernels) / 1e3))
        launches = len(kernels)
    return median(times), launches


def sides(alone: Way, split: Way, repeats: int) -> tuple[Side, Side]:
    ways = alone, split
    forward = by_turns([way.forward for way in ways], repeats)
    both = by_turns([way.both for way in ways], repeats)
    found = [Side(wall, ahead) for wall, ahead in zip(both, forward, strict=True)]
    if split.hidden.is_cuda:
        for side, way in zip(found, ways, strict=True):
            side.kernel_ms, side.launches = kernel_milliseconds(way.both)
            way.hidden.grad = way.weight.grad = None
            gradients = sum(t.numel() * t.element_size() for t in (way.hidden, way.weight))
            side.extra_mib = over_ranks(extra_mib(way.both, gradients))
    return found[0], found[1]


def sum_alone(floats: int, like: Tensor, group: Any, repeats: int, calls: int = 10) -> Sum:
    """An all-reduce of so many float32, of which some follow one another."""
    buffer = torch.zeros(floats, device=like.device)

    def several() -> None:
        for _ in range(calls):
            dist.all_reduce(buffer, group=group)

    return Sum(4 * floats, by_turns([several], repeats)[0] / calls)


def step_and_sums(way: Way) -> tuple[tuple[Tensor, ...], list[int]]:
    """The outputs of a step, and how many numbers each of its all-reduces had."""
    sizes, all_reduce = [], dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(tensor.numel())
        return all_reduce(tensor, *args, **options)

    with mock.patch.object(dist, "all_reduce", counted):
        return way.both(), sizes


def compare(name: str, work: Workload, group: Any, repeats: int) -> Row:
    v, n, nnz = len(work.weight), len(work.labels), work.support.nnz
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    sampled = None
    if name.endswith("one pass"):
        with torch.no_grad():
            sampled = Way(work, None).outputs()[0] - 0.01  # near p: icepop rejects no token
    alone, split = Way(work, None, sampled), Way(work, group, sampled)
    wanted = alone.both()
    got, sizes = step_and_sums(split)
    assert 4 * sum(sizes[:-1]) == forward_sum(nnz, 0 if nnz else n, ranks, len(sizes) - 1)
    pairs = zip(split.logprobs(got), alone.logprobs(wanted), strict=True)
    apart = torch.stack([(mine - whole).abs().max() for mine, whole in pairs]).max()
    rows = len(split.weight)
    d_weight = alone.weight.grad[rows * rank :][:rows].double()
    hidden_apart = relative_error(split.hidden.grad, alone.hidden.grad.double())
    weight_apart = relative_error(split.weight.grad[: len(d_weight)], d_weight)
    return Row(
        name,
        shares(work.support.ids if nnz else torch.arange(v), v, ranks),
        *sides(alone, split, repeats),
        [sum_alone(size, work.hidden, group, repeats) for size in sizes],
        over_ranks(float(apart)),
        max(over_ranks(hidden_apart), over_ranks(weight_apart)),
        over_ranks(float(alike(*got, split.hidden.grad)), dist.ReduceOp.MIN) == 1.0,
    )


def alike(*tensors: Tensor) -> bool:
    """Whether they are bitwise the first rank's."""
    same = True
    for tensor in tensors:
        first = tensor.clone()
        dist.broadcast(first, 0)
        same = same and torch.equal(first, tensor)
    return same


def run(size: Size, group: Any, device: torch.device, repeats: int) -> Iterator[Row]:
    """A row a workload, on all ranks the same."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    g = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(size.n, size.h, generator=g, device=device).to(dtype)
    weight = torch.randn(size.v, size.h, generator=g, device=device) * LOGIT_STD
    weight = (weight / math.sqrt(size.h)).to(dtype)
    for tensor in (hidden, weight):
        dist.broadcast(tensor, 0)
    for name, work in batches(size, dist.get_world_size(group)):
        work = replace(work.to(str(device), dtype), hidden=hidden, weight=weight)
        row = compare(name, work, group, repeats)
        if size == PRESETS["h200"] and dist.get_world_size(group) == 2:
            row.target = TARGETS.get(name)
        yield row


def report(rows: list[Row], size: Size, dtype: str, save: str | None) -> None:
    ranks = dist.get_world_size()
    facts = {"ranks": ranks, "N": size.n, "H": size.h, "V": size.v, "dtype": dtype}
    print(", ".join(f"{name} {value}" for name, value in {**environment(), **facts}.items()))
    print(f"\n{tables(rows, ranks)}\n", flush=True)
    if save:
        ratios = [{"ratio": row.ratio, "kernel_ratio": row.kernel_ratio} for row in rows]
        made = [{**asdict(row), **more} for row, more in zip(rows, ratios, strict=True)]
        write_json(save, {**facts, "rows": made})
        print(f"written: results/{save}.json", flush=True)
        draw(save)


# --- the processes ---


def one_rank(rank: int, ranks: int, options: argparse.Namespace, store: str) -> None:
    """Runs all workloads as one rank; the first one reports."""
    size, on_gpu = PRESETS[options.preset], options.preset != "tiny"
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    environment()
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=store,
        rank=rank,
        world_size=ranks,
        device_id=device if on_gpu else None,
    )
    try:
        rows = []
        for row in run(size, dist.group.WORLD, device, options.repeats):
            rows.append(row)
            if rank == 0:
                print(f"{row.name}: {row.ratio:.2f} times TP 1", flush=True)
        if rank == 0:
            report(rows, size, "bfloat16" if on_gpu else "float32", options.save)
        if not all(row.sound for row in rows):
            raise SystemExit(f"TP {ranks} is not what TP 1 is: see the last columns")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="h200")
    parser.add_argument("--ranks", type=int, help="all GPUs by default, with `tiny` two processes")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json and NAME.png")
    parser.add_argument("--model", action="store_true", help="print the model, and run nothing")
    options = parser.parse_args()
    if options.model:
        print(expected(Machine()))
        return
    if options.save:
        pyplot()  # says before minutes of measuring that it will not draw
    if "RANK" in os.environ:
        one_rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), options, "env://")
        return
    tiny = options.preset == "tiny"
    ranks = options.ranks or (2 if tiny else torch.cuda.device_count())
    if ranks < 2 or not (tiny or ranks <= torch.cuda.device_count()):
        parser.error(f"{ranks} ranks on {torch.cuda.device_count()} GPUs; --preset tiny needs none")
    with tempfile.TemporaryDirectory() as folder:
        store = (Path(folder) / "store").as_uri()
        mp.spawn(one_rank, (ranks, options, store), nprocs=ranks)


if __name__ == "__main__":
    main()
