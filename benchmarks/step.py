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

SEQUENCE = 4096
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
    peak_gib: float | None = None  # weights, gradients and AdamW's moments included
    held_gib: float | None = None  # these alone
    longest: int | None = None  # tokens of one step
    stopped: bool = False  # at the most that are tried: more may fit
    note: str = ""


class Batch:
    """As many aligned rows as are asked for, with the real rows' supports by turns."""

    def __init__(self, preset: Preset, device: str) -> None:
        folder, tiny = data_folder(), preset.tokens < SEQUENCE
        if folder is None or tiny:
            work = as_sampled(real_like(n=61, h=8, v=600) if tiny else real_like())
            self.name, self.v = work.name, len(work.weight)
            support, labels = work.support, work.labels
        else:
            support, arrays = real_support(folder)
            self.name, self.v = "SmolLM2-135M's own of top_p 0.95", 49152
            labels = torch.from_numpy(arrays["labels"]).long()
        rows = torch.arange(preset.most) % len(labels)
        self.logprobs = label_logprobs(support, labels)[rows].to(device)
        self.labels, self.support = labels[rows].to(device), support.to(device).select(rows)
        g = torch.Generator().manual_seed(0)
        self.advantages = torch.randn(preset.most, generator=g).to(device)

    def rows(self, n: int) -> Rows:
        return Rows(self.labels[:n], self.support[:n], self.logprobs[:n], self.advantages[:n])

    def tokens(self, n: int) -> Tensor:  # [n / sequence, sequence]
        return self.labels[:n].roll(1).view(-1, min(SEQUENCE, n))


class Model:
    """Trunk and head weight, in bfloat16 on a GPU, and a step of training them."""

    def __init__(self, v: int, h: int, layers: int, device: str) -> None:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.trunk = Trunk(v, h, layers).to(device, dtype)
        self.weight = nn.Parameter(torch.randn(v, h, device=device, dtype=dtype) * 4 / h**0.5)
        self.parameters = [*self.trunk.parameters(), self.weight]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-6, fused=device == "cuda")

    def step(self, head: str, tokens: Tensor, rows: Rows) -> None:
        hidden = self.trunk(tokens)
        if head == TRUNK_ALONE:
            loss = hidden.float().square().sum()
        else:
            loss = HEADS[head].loss(hidden, self.weight, rows)
        (loss / len(rows.labels)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(model: Model, batch: Batch, row: Row, n: int, repeats: int) -> None:
    """Time and memory of a step of n tokens."""
    rows, tokens = batch.rows(n), batch.tokens(n)
    times = milliseconds(lambda: model.step(row.head, tokens, rows), repeats)
    row.step_ms = median(times)
    row.tokens_a_second = 1e3 * n / row.step_ms
    if torch.cuda.is_available():
        row.held_gib = torch.cuda.memory_allocated() / 2**30
        row.peak_gib = peak(lambda: model.step(row.head, tokens, rows)) / 2**30


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
        try:
            rows, tokens = batch.rows(n), batch.tokens(n)
            found = peak(lambda: model.step(row.head, tokens, rows))
        except torch.OutOfMemoryError:
            pass
        rows = tokens = None
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
    over = None
    for _ in range(10):
        n = min(guess // SEQUENCE * SEQUENCE, most)
        if fits(n):
            best = n
        else:
            over = n
        if best == most or (over and over - best <= max(0.03 * over, SEQUENCE)):
            break
        guess = int(1.03 * best) + SEQUENCE if over is None else (best + over) // 2
    return best


def run(preset: Preset, heads: list[str], repeats: int, find: bool) -> tuple[list[Row], Batch]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch, found = Batch(preset, device), []
    for h in preset.widths:
        for head in heads:
            title = "no head" if head == TRUNK_ALONE else HEADS[head].title
            row, model = Row(h, head, title), Model(batch.v, h, preset.layers, device)
            try:
                measure(model, batch, row, preset.tokens, repeats)
                if find and device == "cuda" and head != "one-pass":  # its rows are those of "ours"
                    row.longest = longest(model, batch, row, preset)
                    row.stopped = row.longest == preset.most
            except torch.OutOfMemoryError:
                row.note = "out of memory"
            print(", ".join(f"{k} {v}" for k, v in line(row).items() if v), flush=True)
            found.append(row)
            del model
            if device == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
    return found, batch


def line(row: Row) -> dict[str, str]:
    def text(value: float | None, how: str) -> str:
        return "" if value is None else how.format(value)

    return {
        "H": str(row.h),
        "head": row.title + (f" ({row.note})" if row.note else ""),
        "step ms": text(row.step_ms, "{:.1f}"),
        "tokens/s": text(row.tokens_a_second, "{:,.0f}"),
        "peak GiB": text(row.peak_gib, "{:.2f}"),
        "beside weights": text(row.peak_gib and row.peak_gib - (row.held_gib or 0), "{:.2f}"),
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
        "peak memory, GiB": lambda row: row.peak_gib,
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
                labels = [line(row)["longest"] or row.note or "not looked for" for row in own]
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
    widths = batch.support.host.offsets.diff().double()
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
