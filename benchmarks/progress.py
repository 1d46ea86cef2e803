"""How long a run will take, and how far it is: on stderr, so that the tables stay clean."""

import sys
import time

import torch

from benchmarks.measure import milliseconds
from benchmarks.peers import Peer
from benchmarks.torch_ways import csr_pairs
from benchmarks.workloads import Workload


def expected_seconds(work: Workload, peers: list[Peer], repeats: int) -> float:
    """Of all ways together, from two trials on a few rows: logits with their softmax, and eager
    pairs. It is right within a factor of two; on a GPU compilers make most of it."""
    logits, pairs = _trials(work)
    replay, cuda = work.kinds == {1}, work.hidden.is_cuda
    total = 8 * pairs if replay else 8 * logits  # the float64 truth
    for peer in peers:
        both = 4 * logits if peer.dense or not replay else 4 * pairs * peer.share
        calls = 2 if both > 1 else 2 + repeats
        total += both * (2 + calls + calls / 3) + cuda * (3 * both + peer.compiles)
    return total


def _trials(work: Workload) -> tuple[float, float]:
    """Seconds of the forward alone, scaled to all rows."""
    n, nnz = len(work.labels), work.support.nnz
    some = min(n, 256 if work.hidden.is_cuda else 32)
    hidden, weight = work.hidden.detach()[:some], work.weight.detach()
    logits = milliseconds(lambda: (hidden @ weight.T).float().log_softmax(-1), 3)
    if nnz == 0:
        return 1e-3 * min(logits) * n / some, 0.0
    enough = int((work.support.host.offsets < 20_000).sum())  # rows of so many entries
    few = range(max(1, min(n, enough - 1)))
    part = Workload(
        "", hidden=work.hidden.detach()[: len(few)], weight=weight, labels=work.labels[: len(few)],
        support=work.support[: len(few)], d_logprobs=work.d_logprobs,
        d_support_logprobs=work.d_support_logprobs,
    )  # fmt: skip
    with torch.no_grad():
        pairs = milliseconds(lambda: csr_pairs(part), 3)
    entries = max(1, part.support.nnz)
    return 1e-3 * min(logits) * n / some, 1e-3 * min(pairs) * nnz / entries


class Progress:
    """A line of its own a way, or one that is written over where a person looks on."""

    def __init__(self, what: str, ways: int, seconds: float) -> None:
        self.what, self.ways, self.done = what, ways, 0
        self.start, self.seconds = time.monotonic(), seconds
        self.screen = sys.stderr.isatty()
        plural = "way" if ways == 1 else "ways"
        print(f"{what}: {ways} {plural}, about {told(seconds)}", file=sys.stderr)

    def now(self, title: str) -> None:
        self.done += 1
        spent = time.monotonic() - self.start
        line = (
            f"{self.what}: {self.done}/{self.ways} {title} ({told(spent)} of {told(self.seconds)})"
        )
        end = "" if self.screen else "\n"
        print(f"\r\x1b[K{line}" if self.screen else line, end=end, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.screen:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def told(seconds: float) -> str:
    """No finer than it is known."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min"
