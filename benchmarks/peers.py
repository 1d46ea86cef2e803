"""The ways that the microbenchmark compares, by short names."""

import importlib.util
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.own_ways import (
    added_to_float32,
    added_to_grad,
    graphed,
    into_float32,
    one_pass,
    ours,
    with_loss,
)
from benchmarks.package_ways import cut_cross_entropy, liger, liger_scaled, trl
from benchmarks.padded_ways import padded_dense_replay, padded_online_replay
from benchmarks.torch_ways import chunked_torch, csr_pairs, cusparse, full_log_softmax
from benchmarks.workloads import Way, Workload


@dataclass(frozen=True)
class Peer:
    """A way, what rows it can compute, where it runs, and about what it costs."""

    title: str
    way: Way
    replay: bool = True
    full: bool = False
    kinds: bool = False  # rows of all kinds in one batch
    active: bool = False  # leaves out the rows that no loss reads
    only: tuple[str, ...] = ()  # run on these presets alone
    whole: bool = False  # does its own backward
    adds: bool = False  # the weight's gradient to `Workload.kept`
    float32: bool = False  # computes in float32 alone
    on: str = ""  # "cuda", "hopper" or "cpu"
    packages: tuple[str, ...] = ()  # that it imports
    install: str = ""  # what pip is asked for
    dense: bool = False  # makes logits over the vocabulary on replayed rows too
    share: float = 0.2  # of the time of eager pairs, where it does not
    compiles: float = 4.0  # seconds on a GPU

    def takes(self, key: str, work: Workload) -> bool:
        if self.only and key not in self.only:
            return False
        if work.active is not None:
            return self.active
        kinds = work.kinds
        return self.full if kinds == {0} else self.replay if kinds == {1} else self.kinds

    def elsewhere(self) -> str | None:
        """Where it runs, if not here."""
        cuda = torch.cuda.is_available()
        if self.on == "hopper" and not (cuda and torch.cuda.get_device_capability() == (9, 0)):
            return "only on a Hopper GPU"
        if self.on in ("cuda", "cpu") and (self.on == "cuda") != cuda:
            return "only on a GPU" if self.on == "cuda" else "only on a CPU"
        return None

    def uninstalled(self) -> str | None:
        """What installs it, if nothing has."""
        if all(importlib.util.find_spec(package) for package in self.packages):
            return None
        return f'not installed: pip install "{self.install}"'


FULL = {"replay": False, "full": True}
LIGER = {**FULL, "packages": ("liger_kernel",), "install": "liger-kernel>=0.8.5", "on": "cuda"}

PEERS: dict[str, Peer] = {
    "ours": Peer("rl_loss", ours, full=True, kinds=True, active=True),
    "256mib": Peer("rl_loss, 256 MiB", partial(ours, workspace_mib=256), **FULL),
    "graph": Peer("rl_loss, CUDA graph", graphed, whole=True, on="cuda"),
    "icepop": Peer("rl_loss + icepop", with_loss(True), full=True, kinds=True, active=True),
    "icepop-kl": Peer(
        "rl_loss + icepop, KL", with_loss(True, kl_tau=1e-3), full=True, kinds=True, active=True
    ),
    "one-pass": Peer("rl_loss + icepop, one pass", one_pass, **FULL, kinds=True, active=True),
    "plain": Peer("rl_loss + icepop, no evidence", with_loss(False)),
    "compiled": Peer(
        "rl_loss + icepop, compiled",
        with_loss(True, compiled=True),
        only=("k128",),
        on="cuda",
        compiles=40.0,
    ),
    "compiled-plain": Peer(
        "rl_loss + icepop, no evidence, compiled",
        with_loss(False, compiled=True),
        only=("k128",),
        on="cuda",
        compiles=20.0,
    ),
    "add-grad": Peer(
        "rl_loss, added to .grad", added_to_grad, only=("micro", "tiny"), whole=True, adds=True
    ),
    "add-float32": Peer(
        "rl_loss, added to a float32 buffer",
        added_to_float32,
        only=("micro", "tiny"),
        whole=True,
        adds=True,
    ),
    "into": Peer(
        "rl_loss, grad_into a float32 buffer",
        into_float32,
        only=("micro", "tiny"),
        whole=True,
        adds=True,
    ),
    "sparse": Peer("torch.sparse", cusparse, float32=True),
    "pairs": Peer("eager CSR pairs", csr_pairs, share=1.0),
    "padded": Peer("padded dense replay", padded_dense_replay, dense=True),
    "padded-online": Peer(
        "padded replay with V's entropy, recomputed", padded_online_replay, dense=True
    ),
    "logits": Peer("full log_softmax", full_log_softmax, full=True, on="cpu", dense=True),
    "chunked": Peer("chunked torch", chunked_torch, **FULL),
    "trl": Peer(
        "TRL, chunked head", trl, **FULL, active=True, packages=("trl",), install="trl>=1.16"
    ),
    "liger": Peer("Liger, none", liger("none"), **LIGER),
    "liger-mean": Peer("Liger, mean", liger("mean"), **LIGER),
    "liger-hopper": Peer(
        "Liger, Hopper",
        liger_scaled,
        **FULL,
        packages=("liger_kernel", "cutlass"),
        install="liger-kernel[cutedsl]>=0.8.5",
        on="hopper",
        compiles=40.0,
    ),
    "cce": Peer(
        "CCE, unfiltered",
        cut_cross_entropy,
        **FULL,
        packages=("cut_cross_entropy",),
        install="cut-cross-entropy",
        on="cuda",
    ),
}
