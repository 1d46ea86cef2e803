"""One training step of a small model with each head: `python -m benchmarks.step`.

A trunk of Qwen3's shape, the head, icepop centered over each row's support, the backward and AdamW,
on a real model's supports (its rows over and over; of the folder RL_LOSS_DATA, else rows of such
widths). The hidden states are the trunk's own, of random weights: times and memory are those of a
run, log-probabilities are not. Attention goes over 4096 tokens, so that many tokens do not take
hours; its memory is that of one sequence as long as the batch.
"""

import argparse
import gc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks.coverage import as_sampled, label_logprobs
from benchmarks.measure import RESULTS, environment, milliseconds, write_json
from benchmarks.step_heads import HEADS, Rows
from benchmarks.step_trunk import Trunk
from benchmarks.tables import markdown, pyplot
from benchmarks.workloads import data_folder, real_like, real_support
from rl_loss import Support
from rl_loss.csr import count_by_row, offsets_of, segment_logsumexp

SEQUENCE = 4096
TOP_K = 2048
TRUNK_ALONE = "trunk"  # without any head: what no head can be faster than


@dataclass(frozen=True)
class Preset:
    widths: tuple[int, ...]  # H
    tokens: int  # of a step that is timed
    most: int  # tokens that are tried
    layers: int = 4


PRESETS = {
    "tiny": Preset((32,), 64, 1024, 1),
    "h200": Preset((1024, 2048), 16384, 3 * 2**19),
}


@dataclass
class Row:
    """One head in one model."""

    h: int
    head: str
    title: str
    step_ms: float | None = None
    tokens_a_second: float | None = None
    peak_gib: float | None = None  # with all below and the evidence of its tokens
    held_gib: float | None = None  # weights and AdamW's moments alone
    longest: int | None = None  # tokens of one step
    stopped: bool = False  # at the most that are tried: more may fit


class Batch:
    """Rows of a model's own supports by turns, as many as are asked for, moved as a trainer does.

    The sampler also had top_k 2048: what it kept beyond is left out, as the padded way needs it.
    """

    def __init__(self, preset: Preset, device: str) -> None:
        folder, tiny = data_folder(), preset.tokens < SEQUENCE
        if folder is None or tiny:
            work = as_sampled(real_like(n=61, h=8, v=600) if tiny else real_like())
            self.name, self.v = work.name, len(work.weight)
            support, labels = work.support, work.labels
        else:
            support, arrays = real_support(folder)
            self.name, self.v = "SmolLM2-135M's own of top_p 0.95 and top_k 2048", 49152
            labels = torch.from_numpy(arrays["labels"]).long()
        support = at_most(support, labels, TOP_K)
        self.widths = support.offsets.diff()
        self.labels, self.support = labels.to(device), support.to(device)
        self.logprobs = label_logprobs(support, labels).to(device)

    def rows(self, n: int) -> Rows:
        at = torch.arange(n) % len(self.labels)
        support, at = self.support.select(at), at.to(self.labels.device)
        advantages = torch.randn(n, generator=torch.Generator().manual_seed(0)).to(at.device)
        return Rows(self.labels[at], support, self.logprobs[at], advantages)


def at_most(support: Support, labels: Tensor, k: int) -> Support:
    """What a sampler keeps that also takes the k likeliest ids alone; a label stays in any case."""
    rows, logprobs = support.entry_rows, support.sampler_logprobs
    key = logprobs.where(support.ids != labels[rows], torch.inf)
    by_row = key.argsort(descending=True, stable=True)
    by_row = by_row[rows[by_row].argsort(stable=True)]
    place = torch.empty_like(by_row)
    place[by_row] = torch.arange(len(by_row)) - support.offsets[:-1][rows[by_row]]
    kept = place < k
    rows, logprobs = rows[kept], logprobs[kept]
    return Support(
        ids=support.ids[kept],
        sampler_logprobs=logprobs - segment_logsumexp(logprobs, rows, len(support))[rows],
        known=support.known[kept],
        offsets=offsets_of(count_by_row(kept, support.offsets)),
        kind=support.kind,
        sampler_tail_mass=support.sampler_tail_mass,
    )


class Model:
    """Trunk and head weight, in bfloat16 on a GPU, and a step of training them."""

    def __init__(self, v: int, h: int, layers: int, device: str) -> None:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.trunk = Trunk(v, h, layers).to(device, dtype)
        self.weight = nn.Parameter(torch.randn(v, h, device=device, dtype=dtype) * 4 / h**0.5)
        self.parameters = [*self.trunk.parameters(), self.weight]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-6, fused=device == "cuda")

    def step(self, head: str, rows: Rows) -> None:
        n = len(rows.labels)
        hidden = self.trunk(rows.labels.roll(1).view(-1, min(SEQUENCE, n)))
        if head == TRUNK_ALONE:
            loss = hidden.float().square().sum()
        else:
            loss = HEADS[head].loss(hidden, self.weight, rows)
        (loss / n).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(model: Model, batch: Batch, rows: list[Row], n: int, repeats: int) -> None:
    """Time and memory of a step of n tokens with each head."""
    given = {row.head: batch.rows(n) for row in rows}
    times = {row.head: [] for row in rows}
    for _ in range(repeats):  # by turns: a host is faster at times than at others
        for head, own in given.items():
            times[head] += milliseconds(lambda head=head, own=own: model.step(head, own), 1)
    given.clear()
    for row in rows:
        row.step_ms = median(times[row.head])
        row.tokens_a_second = 1e3 * n / row.step_ms
        if torch.cuda.is_available():
            gc.collect()
            row.held_gib = torch.cuda.memory_allocated() / 2**30
            row.peak_gib = peak(lambda row=row: model.step(row.head, batch.rows(n))) / 2**30


def peak(function: Callable[[], object]) -> int:
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def longest(model: Model, batch: Batch, row: Row, preset: Preset) -> int:
    """The most tokens of a step that fit, to 3 %: memory is about a line, whose end is looked for.

    `preset.most`, where that many fit.
    """

    def held(n: int) -> int | None:
        """The peak of n tokens; None where they do not fit."""
        found = None
        with suppress(torch.OutOfMemoryError):
            found = peak(lambda: model.step(row.head, batch.rows(n)))
        model.optimizer.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()
        return found

    sizes = preset.tokens, 4 * preset.tokens
    low, high = (held(n) for n in sizes)
    if low is None or high is None:
        return sizes[0] if low is not None else 0
    a_token = (high - low) / (sizes[1] - sizes[0])
    room = torch.cuda.mem_get_info()[1] - high
    guess = int(sizes[1] + 0.985 * room / a_token)
    return end(lambda n: held(n) is not None, sizes[1], guess, preset.most)


def end(fits: Callable[[int], bool], best: int, guess: int, most: int) -> int:
    """The largest n that fits, to 3 % and whole sequences, where `best` does."""
    over, more = None, best // 32
    for _ in range(16):
        n = min(guess // SEQUENCE * SEQUENCE, most)
        if fits(n):
            best = n
        else:
            over = n
        if best == most or (over and over - best <= max(0.03 * over, SEQUENCE)):
            break
        if over is None:
            guess, more = n + max(more, SEQUENCE), 2 * more
        else:
            guess = (best + over) // 2
    return best


def run(preset: Preset, heads: list[str], repeats: int, find: bool) -> tuple[list[Row], Batch]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch, found = Batch(preset, device), []
    for h in preset.widths:
        model = Model(batch.v, h, preset.layers, device)
        rows = [Row(h, head, title_of(head)) for head in heads]
        measure(model, batch, rows, preset.tokens, repeats)
        for row in rows:
            if find and device == "cuda" and row.head != "one-pass":  # its rows are those of "ours"
                row.longest = longest(model, batch, row, preset)
                row.stopped = row.longest == preset.most
            print(", ".join(f"{k} {v}" for k, v in line(row).items() if v), flush=True)
        found += rows
        del model
    return found, batch


def title_of(head: str) -> str:
    return "no head" if head == TRUNK_ALONE else HEADS[head].title


def beside(row: Row) -> float | None:
    """The peak without what is held all the time."""
    return None if row.peak_gib is None else row.peak_gib - row.held_gib


def line(row: Row) -> dict[str, str]:
    def text(value: float | None, how: str) -> str:
        return "" if value is None else how.format(value)

    return {
        "H": str(row.h),
        "head": row.title,
        "step ms": text(row.step_ms, "{:.1f}"),
        "tokens/s": text(row.tokens_a_second, "{:,.0f}"),
        "peak GiB": text(row.peak_gib, "{:.2f}"),
        "beside weights": text(beside(row), "{:.2f}"),
        "longest": text(row.longest, ("≥ " if row.stopped else "") + "{:,}"),
    }


def draw(name: str, title: str, rows: list[Row]) -> None:
    """Draws `results/<name>.png`: a row of panels an H."""
    plt = pyplot()
    if plt is None:
        return
    widths = list(dict.fromkeys(row.h for row in rows))
    panels = {
        "tokens a second": lambda row: row.tokens_a_second,
        "peak memory beside weights and AdamW, GiB": beside,
        "tokens that fit in one step": lambda row: row.longest,
    }
    figure, axes = plt.subplots(
        len(widths), 3, figsize=(14, 2.6 * len(widths) + 0.8), squeeze=False, layout="constrained"
    )
    for line_of, h in zip(axes, widths, strict=True):
        own = [row for row in rows if row.h == h][::-1]
        colors = ["#c8553d" if row.title.startswith("rl_loss") else "#4878a8" for row in own]
        colors = [
            "#999999" if row.head == TRUNK_ALONE else c for row, c in zip(own, colors, strict=True)
        ]
        for axis, (what, value) in zip(line_of, panels.items(), strict=True):
            values = [value(row) or 0 for row in own]
            bars = axis.barh([row.title for row in own], values, color=colors)
            labels = [f"{v:,.0f}" if v > 999 else f"{v:.1f}" if v else "" for v in values]
            if what.startswith("tokens that fit"):
                labels = [line(row)["longest"] or "not looked for" for row in own]
            axis.bar_label(bars, labels, padding=3, fontsize=8)
            axis.set_xlim(0, 1.4 * max([*values, 1e-9]))
            axis.set_title(f"{what}, H {h}", fontsize=9)
            axis.tick_params(labelsize=8)
            axis.locator_params(axis="x", nbins=4)
    figure.suptitle(title, fontsize=9)
    figure.savefig(RESULTS / f"{name}.png", dpi=110)
    print(f"drawn: results/{name}.png")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    usual = "h200" if torch.cuda.is_available() else "tiny"
    ways = [TRUNK_ALONE, *HEADS]
    parser.add_argument("--preset", choices=PRESETS, default=usual)
    parser.add_argument("--heads", nargs="+", choices=ways, default=ways)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-longest", dest="longest", action="store_false")
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json and NAME.png")
    options = parser.parse_args(argv)
    preset = PRESETS[options.preset]
    told = ", ".join(f"{name} {value}" for name, value in environment().items())
    rows, batch = run(preset, options.heads, options.repeats, options.longest)
    widths = batch.widths.double()
    shape = (
        f"{preset.tokens} tokens a step, {preset.layers} layers, V {batch.v}, supports: "
        f"{batch.name}, mean {widths.mean():.0f} ids, most {int(widths.max())}"
    )
    print(f"\n{told}\n{shape}\n{markdown([line(row) for row in rows])}")
    if options.save:
        made = {"shape": shape, "preset": asdict(preset), "rows": [asdict(row) for row in rows]}
        write_json(options.save, made)
        print(f"written: results/{options.save}.json")
        draw(options.save, f"A training step: {shape}\n{told}", rows)


if __name__ == "__main__":
    main()
