"""Tests over several ranks: a function of a file run in processes of its own, one a rank.

On the CPU they speak gloo; with as many GPUs as ranks, NCCL. A worker runs all its cases, for
starting the processes takes longer than any of them.
"""

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode


def on_gpus(ranks: int) -> bool:
    return torch.cuda.device_count() >= ranks and os.environ.get("TRITON_INTERPRET") != "1"


def run_ranks(function: Callable, ranks: int, *args, interpreted: bool = False) -> None:
    """`function(rank, *args)` on every rank, inside its process group; an exception fails."""
    with tempfile.TemporaryDirectory() as folder:
        before = {name: os.environ.get(name) for name in ("TRITON_INTERPRET", "OMP_NUM_THREADS")}
        os.environ["OMP_NUM_THREADS"] = "1"
        if interpreted:
            os.environ["TRITON_INTERPRET"] = "1"
        try:
            store = str(Path(folder) / "store")
            mp.spawn(_start, (function, ranks, store, args), nprocs=ranks)
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def _start(rank: int, function: Callable, ranks: int, store: str, args: tuple) -> None:
    torch.set_num_threads(1)
    backend = "nccl" if on_gpus(ranks) else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
    )
    try:
        function(rank, *args)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def rank_device(rank: int) -> torch.device:
    return torch.device("cuda", rank) if dist.get_backend() == "nccl" else torch.device("cpu")


def alike_on_all(*tensors: torch.Tensor) -> None:
    """Asserts that they are bitwise the same on every rank."""
    for tensor in tensors:
        tensor = tensor.detach().contiguous()
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor)
        for part in parts:
            same = (part == tensor) | (part.isnan() & tensor.isnan())
            assert same.all()


class Calls(TorchDispatchMode):
    """Records the operations called, and the collectives among them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.collectives: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.names.append(name)
        if func.namespace == "c10d":
            self.collectives.append(name)
        return func(*args, **(kwargs or {}))
