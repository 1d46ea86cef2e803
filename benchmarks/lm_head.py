"""Microbenchmark of the LM head on replayed rows: `python -m benchmarks.lm_head`.

Each way computes the log-probability of every label and of every support entry over the row's
support, and the gradients of hidden and weight for one upstream a value (what a policy loss with
score centering sends back). Errors are against float64 of the same inputs.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.measure import (
    RESULTS,
    Row,
    environment,
    extra_mib,
    middle,
    milliseconds,
    relative_error,
    write,
)
from benchmarks.peers import PEERS, Peer
from benchmarks.workloads import Workload, data_folder, real_like, real_rows, zipf_rows


def presets() -> dict[str, Callable[[], Workload]]:
    folder = data_folder()
    made = {
        "real-like": real_like,
        "k20": lambda: zipf_rows("k20", torch.full((2048,), 20), 576, 49152),
    }
    if folder is not None:
        made = {"real": lambda: real_rows(folder)[0], **made}
    return made


def exact_gradients(work: Workload) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the labels and both gradients, in float64, a block of rows at a time."""
    hidden, weight = work.hidden.double(), work.weight.double()
    offsets, ids = work.support.offsets.tolist(), work.support.ids.long()
    logprobs = hidden.new_empty(len(hidden))
    d_hidden, d_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
    for i in range(len(hidden)):
        span = slice(offsets[i], offsets[i + 1])
        kept = weight[ids[span]]
        logp = (kept @ hidden[i]).log_softmax(0)
        label = ids[span] == work.labels[i]
        logprobs[i] = logp[label].sum()
        upstream = work.d_support_logprobs[span] + label * work.d_logprobs[i].double()
        grad = upstream - logp.exp() * upstream.sum()
        d_hidden[i] = grad @ kept
        d_weight.index_add_(0, ids[span], grad[:, None] * hidden[i])
    return logprobs, d_hidden, d_weight


def measure(name: str, peer: Peer, work: Workload, exact, repeats: int) -> Row:
    work.hidden.requires_grad_()
    work.weight.requires_grad_()
    upstream = [work.d_logprobs, work.d_support_logprobs]

    def forward() -> None:
        with torch.no_grad():
            peer(work)

    def both() -> None:
        work.hidden.grad = work.weight.grad = None
        torch.autograd.backward(peer(work), upstream)

    memory = extra_mib(both)
    gradients = (work.hidden.grad, work.weight.grad)
    error = float((peer(work)[0].detach().double() - exact[0]).abs().max())
    errors = [relative_error(got, want) for got, want in zip(gradients, exact[1:], strict=True)]
    work.hidden.grad = work.weight.grad = None
    forward_ms = middle(milliseconds(forward, repeats))[0]
    return Row(name, forward_ms, *middle(milliseconds(both, repeats)), memory, error, max(errors))


def show(title: str, rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in ("way", "forward ms", "both ms", "min", "max", "extra MiB", "logprob err"):
        table.add_column(column, justify="left" if column == "way" else "right")
    table.add_column("grad err", justify="right")
    table.add_column("x ours", justify="right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.forward_ms:.1f}",
            f"{row.both_ms:.1f}",
            f"{row.both_min_ms:.1f}",
            f"{row.both_max_ms:.1f}",
            f"{row.extra_mib:.0f}",
            f"{row.logprob_error:.1e}",
            f"{row.gradient_error:.1e}",
            f"{row.ratio:.1f}",
        )
    Console(width=110).print(table)


def draw(name: str, tables: dict[str, dict]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(tables), figsize=(5.2 * len(tables), 3.2), squeeze=False)
    for axis, (work, table) in zip(axes[0], tables.items(), strict=True):
        rows = table["rows"][::-1]
        bars = axis.barh([row.name for row in rows], [row.both_ms for row in rows], color="#4878a8")
        axis.bar_label(bars, [f"{row.both_ms:.0f} ms" for row in rows], padding=3, fontsize=8)
        axis.set_xscale("log")
        axis.set_xlim(right=max(row.both_ms for row in rows) * 4)
        axis.set_title(work, fontsize=10)
        axis.set_xlabel("forward and backward, ms (log scale)")
    facts = environment()
    figure.suptitle(f"{facts['device']}, torch {facts['torch']}, {facts['date']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(RESULTS / f"{name}.png", dpi=130)


def main() -> None:
    available = presets()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", nargs="*", choices=available, default=list(available)[:1])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--dtype", choices=("float32", "float64", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json and NAME.png")
    options = parser.parse_args()
    if data_folder() is None:
        print("The real supports are not here (set RL_LOSS_DATA); running synthetic ones.")
    title = ", ".join(f"{key} {value}" for key, value in environment().items())
    tables = {}
    for preset in options.preset:
        work = available[preset]().to("cpu", getattr(torch, options.dtype))
        exact, rows = exact_gradients(work), []
        for name in options.peers:
            rows.append(measure(name, PEERS[name], work, exact, options.repeats))
        for row in rows:
            row.ratio = row.both_ms / rows[0].both_ms
        tables[preset] = {"shape": work.shape, "dtype": options.dtype, "rows": rows}
        show(f"{preset}: {work.shape}, {options.dtype}\n{title}", rows)
    if options.save:
        print(f"written: {write(options.save, title, tables).name}")
        draw(options.save, tables)


if __name__ == "__main__":
    main()
