"""What a vocabulary split over GPUs costs each of them: `python -m benchmarks.scaling --model`.

Operations, bytes and shares follow from the algorithm (docs/scaling.md has the formulas). Times
are these over the rates of a `Machine`: no latency, no launches, nothing hidden behind anything.
"""

import json
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from benchmarks.measure import RESULTS
from benchmarks.tables import markdown
from benchmarks.workloads import H, N, V, dealt, zipf_rows

GPUS = (2, 8, 64, 512)


@dataclass(frozen=True)
class Machine:
    """Rates of one GPU."""

    tflops: float = 637.0  # of rows over the vocabulary: 8 N H V operations in 64.0 ms of kernels,
    # as one H200 took them when docs/scaling.md was measured
    gather_gbs: float = 8050.0  # of replayed rows: 6 H bytes an entry in its 12.8 ms at K = 512
    nvlink_gbs: float = 450.0  # a direction, within a host: nominal, an assumption
    network_gbs: float = 50.0  # a direction, between hosts: nominal (400 Gb/s), an assumption
    host_gpus: int = 8

    def ring_ms(self, size: float, ranks: int, turns: int = 1, stride: int = 1) -> float:
        """Of a ring over `ranks` GPUs, every `stride`-th one: 1 turn for a gather or a
        reduce-scatter of `size` bytes in all, 2 for an all-reduce."""
        here = max(1, self.host_gpus // stride)  # of the ring in a host: each brings its adapter
        between = min(self.nvlink_gbs, self.network_gbs * here)
        gbs = self.nvlink_gbs if ranks <= here else between
        return turns * (ranks - 1) / ranks * size / gbs / 1e6

    def __str__(self) -> str:
        return (
            f"{self.tflops:g} TFLOP/s over the vocabulary, {self.gather_gbs:g} GB/s of gathers, "
            f"links of {self.nvlink_gbs:g} GB/s in a host of {self.host_gpus} and "
            f"{self.network_gbs:g} GB/s a GPU between hosts"
        )


# --- what a step moves, in all ---


def forward_sum(nnz: int, over_v: int, ranks: int, calls: int = 1) -> int:
    """Bytes of the forward's all-reduce: logits of entries and labels; of every row over the
    vocabulary three numbers a rank; four of a rank's whole batch in each call."""
    return 4 * (nnz + over_v + (3 * over_v + 4 * calls) * ranks)


def hidden_sum(n: int, h: int) -> int:
    """Bytes of the backward's all-reduce: the hidden gradient in float32."""
    return 4 * n * h


# --- how ids fall on equal shards ---


def shares(ids: Tensor, v: int, ranks: int) -> list[float]:
    """Of the entries, a rank."""
    counts = torch.bincount(ids.long() // -(-v // ranks), minlength=ranks)
    return (counts.double() / len(ids)).tolist()


@cache
def _zipf_ids(width: int, rows: int = 1024) -> Tensor:
    return zipf_rows("", torch.full((rows,), width), 1, V).support.ids


# --- the tables ---


@dataclass(frozen=True)
class Rows:
    """A batch of N rows of one sort."""

    name: str
    products: int = 0  # with the whole vocabulary: 4 in two steps, 3 in one pass
    width: int = 0  # ids of a replayed row
    zipf: bool = False

    def share(self, ranks: int) -> float:
        """Of the rank that has most."""
        return max(shares(_zipf_ids(self.width), V, ranks)) if self.zipf else 1 / ranks

    def work(self, share: float) -> str:
        if self.products:
            return f"{share * self.products * 2e-12 * N * H * V:.3g} TFLOP"
        return f"{share * 6e-9 * H * N * self.width:.3g} GB"

    def milliseconds(self, share: float, machine: Machine) -> float:
        products = self.products * 2e-9 * N * H * V / machine.tflops
        return share * (products + 6e-6 * H * N * self.width / machine.gather_gbs)

    def sums(self, ranks: int, n: int = N) -> tuple[int, int]:
        """Bytes of both all-reduces."""
        return forward_sum(n * self.width, n if self.products else 0, ranks), hidden_sum(n, H)


BATCHES = (
    Rows("full", products=4),
    Rows("full, one pass", products=3),
    Rows("K = 128, even", width=128),
    Rows("K = 128, Zipf", width=128, zipf=True),
    Rows("K = 512, even", width=512),
    Rows("K = 512, Zipf", width=512, zipf=True),
)


def split_row(rows: Rows, ranks: int, machine: Machine) -> dict[str, str]:
    share, sums = rows.share(ranks), rows.sums(ranks)
    here = rows.milliseconds(share, machine)
    between = sum(machine.ring_ms(size, ranks, turns=2) for size in sums)
    ratio = rows.milliseconds(1.0, machine) / (here + between)
    return _columns(rows, str(ranks), share, (here, between, ratio), sums)


def measured_rows(rows: Rows, ranks: int) -> list[dict[str, str]]:
    """The same of `results/scaling.json`, where it has these rows on so many GPUs."""
    path = RESULTS / "scaling.json"
    run = json.loads(path.read_text()) if path.exists() else {"rows": [], "ranks": 0}
    found = []
    for row in run["rows"]:
        if row["name"] == rows.name and run["ranks"] == ranks:
            *forward, hidden = row["sums"]
            times = row["split"]["kernel_ms"], sum(s["ms"] for s in row["sums"]), row["ratio"]
            sums = sum(s["bytes"] for s in forward), hidden["bytes"]
            found.append(_columns(rows, f"{ranks} (measured)", max(row["shares"]), times, sums))
    return found


def _columns(
    rows: Rows,
    gpus: str,
    share: float,
    times: tuple[float, float, float],  # of the work, of the sums, and of one GPU over several
    sums: tuple[int, int],
) -> dict[str, str]:
    return {
        "rows": rows.name,
        "GPUs": gpus,
        "largest share": f"{share:.3f}",
        "its work": rows.work(share),
        "ms": f"{times[0]:.2f}",
        "forward sum, MB": f"{sums[0] / 1e6:.1f}",
        "hidden sum, MB": f"{sums[1] / 1e6:.1f}",
        "sums, ms": f"{times[1]:.2f}",
        "times one GPU": f"{times[2]:.2f}",
    }


def layout_row(tp: int, dp: int, machine: Machine) -> dict[str, str]:
    """The vocabulary over `tp` neighbours, rows and FSDP2 over `dp` such groups; N rows a GPU."""
    moved = 6 * V * H / tp  # bytes: two gathers of the weight, one reduce-scatter of its gradient
    row = {"vocabulary over": str(tp), "rows over": str(dp), "GPUs": str(tp * dp)}
    row["weight kept, MB"] = f"{2e-6 * V * H / (tp * dp):.1f}"
    row["weight moved, MB"] = f"{1e-6 * moved * (dp - 1) / dp:.0f}"
    weight_ms = machine.ring_ms(moved, dp, stride=tp)
    row["its ms"] = f"{weight_ms:.2f}"
    for rows in (BATCHES[0], BATCHES[-1]):
        sums = sum(machine.ring_ms(size, tp, turns=2) for size in rows.sums(tp, tp * N))
        whole = tp * rows.milliseconds(rows.share(tp), machine) + sums + weight_ms
        row[f"{rows.name}: a GPU keeps"] = f"{rows.milliseconds(1.0, machine) / whole:.0%}"
    return row


LAYOUTS = ((1, 8), (2, 4), (8, 1), (1, 64), (2, 32), (8, 8), (64, 1), (1, 512), (8, 64), (512, 1))


def share_row(width: int, how: str) -> dict[str, str]:
    """The largest share of replayed entries, by the number of ranks."""
    ids, row = _zipf_ids(width).long(), {"K": str(width), "ids": how}
    for ranks in (2, 4, 8, 64):
        some = ids if how == "Zipf" else dealt(V, ranks)[ids]
        row[f"{ranks} GPUs"] = f"{max(shares(some, V, ranks)):.3f}"
    return row


def expected(machine: Machine) -> str:
    """What `--model` prints: shares, the split alone, and the split beside FSDP2."""
    split = []
    for rows in BATCHES:
        for ranks in GPUS:
            split += [split_row(rows, ranks, machine), *measured_rows(rows, ranks)]
    layouts = [layout_row(*layout, machine) for layout in LAYOUTS]
    uneven = [share_row(width, how) for width in (20, 128, 512) for how in ("Zipf", "dealt")]
    head = f"N {N}, H {H}, V {V}, bfloat16; {machine}"
    return "\n\n".join([head, markdown(split), markdown(uneven), markdown(layouts)])
