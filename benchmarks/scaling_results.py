"""What `benchmarks.scaling` finds, printed and drawn."""

import json
from dataclasses import dataclass

from benchmarks.measure import RESULTS
from benchmarks.tables import markdown, pyplot

# Of what TP n may differ from TP 1 by, in bfloat16.
LOGPROB_BOUND, GRADIENT_BOUND = 1e-4, 2.5e-3


@dataclass
class Side:
    """TP 1 or TP n on one workload: times in milliseconds, the most of any rank."""

    wall_ms: float
    forward_ms: float
    kernel_ms: float | None = None  # the kernels' own times, summed, without the collectives'
    launches: int | None = None
    extra_mib: float | None = None  # beyond inputs and their gradients, outputs included


@dataclass
class Sum:
    """An all-reduce of a step: alone, on the same group."""

    bytes: int
    ms: float


@dataclass
class Row:
    """One workload."""

    name: str
    shares: list[float]  # of the entries (of the vocabulary where there are none), a rank
    alone: Side
    split: Side
    sums: list[Sum]  # in their order: the last is the hidden gradient's
    logprobs_apart: float  # the largest difference of TP n from TP 1
    gradients_apart: float  # the norm of theirs, as a share of the norm
    alike: bool  # TP n's outputs and hidden gradient, bitwise on all ranks
    target: float | None = None

    @property
    def ratio(self) -> float:
        return self.alone.wall_ms / self.split.wall_ms

    @property
    def kernel_ratio(self) -> float | None:
        times = self.alone.kernel_ms, self.split.kernel_ms
        return times[0] / times[1] if times[0] and times[1] else None

    @property
    def sound(self) -> bool:
        near = self.logprobs_apart < LOGPROB_BOUND and self.gradients_apart < GRADIENT_BOUND
        return near and self.alike


def tables(rows: list[Row], ranks: int) -> str:
    """Times, and what stands beside them."""

    def text(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    times, beside = [], []
    for row in rows:
        alone, split, name = row.alone, row.split, f"TP {ranks}"
        largest = sorted(row.shares, reverse=True)[:4]
        columns = {
            "rows": row.name,
            "largest shares": ", ".join(text(share, 3) for share in largest),
            "TP 1 wall ms": text(alone.wall_ms, 2),
            f"{name} wall ms": text(split.wall_ms, 2),
            "wall, times": text(row.ratio, 2),
            "target": text(row.target, 1),
            "TP 1 kernels ms": text(alone.kernel_ms, 2),
            f"{name} kernels ms": text(split.kernel_ms, 2),
            "kernels, times": text(row.kernel_ratio, 2),
            "forward's sums ms": text(sum(s.ms for s in row.sums[:-1]), 3),
            "hidden sum ms": text(row.sums[-1].ms, 3),
        }
        times.append(columns)
        columns = {
            "rows": row.name,
            "TP 1 forward ms": text(alone.forward_ms, 2),
            f"{name} forward ms": text(split.forward_ms, 2),
            "TP 1 launches": text(alone.launches, 0),
            f"{name} launches": text(split.launches, 0),
            "TP 1 extra MiB": text(alone.extra_mib, 0),
            f"{name} extra MiB": text(split.extra_mib, 0),
            "sums MB": ", ".join(text(s.bytes / 1e6, 1) for s in row.sums),
            "logprobs apart": f"{row.logprobs_apart:.1e}",
            "gradients apart": f"{row.gradients_apart:.1e}",
            "ranks alike": "yes" if row.alike else "NO",
        }
        beside.append(columns)
    return f"{markdown(times)}\n\n{markdown(beside)}"


def draw(name: str) -> None:
    """Draws `results/<name>.json` beside it."""
    plt = pyplot()
    if plt is None:
        return
    result = json.loads((RESULTS / f"{name}.json").read_text())
    rows, ranks = result["rows"], result["ranks"]
    at = range(len(rows))
    figure, axis = plt.subplots(figsize=(max(8, 0.95 * len(rows)), 4.2))
    for label, field, shift, color in (
        ("wall", "ratio", -0.2, "#c8553d"),
        ("kernels", "kernel_ratio", 0.2, "#4878a8"),
    ):
        heights = [row[field] or 0.0 for row in rows]
        if any(heights):
            bars = axis.bar([x + shift for x in at], heights, 0.38, label=label, color=color)
            axis.bar_label(bars, [f"{height:.2f}" for height in heights], padding=2, fontsize=7)
    bounds = [1 / max(row["shares"]) for row in rows]
    axis.scatter(at, bounds, marker="_", s=700, color="black", label="1 / largest share", zorder=3)
    targets = [(x, row["target"]) for x, row in zip(at, rows, strict=True) if row["target"]]
    if targets:
        axis.scatter(*zip(*targets, strict=True), marker="x", color="black", label="target")
    axis.axhline(ranks, color="black", linewidth=0.8, linestyle="--", label=f"ideal: {ranks}")
    axis.axhline(1, color="black", linewidth=0.5)
    axis.set_xticks(at, [row["name"].replace(", ", "\n") for row in rows], fontsize=8)
    axis.set_ylim(0, 1.25 * max(ranks, *bounds))
    axis.set_ylabel("times one")
    axis.legend(fontsize=8, ncols=5, loc="upper right")
    n, h, v = (result[key] for key in "NHV")
    figure.suptitle(
        f"The vocabulary over {ranks} ranks against one, forward and backward: N {n}, H {h}, "
        f"V {v}, {result['dtype']}\n{result['device']}, torch {result['torch']}, "
        f"{result['date']}, commit {result['commit']}",
        fontsize=9,
    )
    figure.tight_layout()
    figure.savefig(RESULTS / f"{name}.png", dpi=110)
    print(f"drawn: results/{name}.png")
