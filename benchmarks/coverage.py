"""What the top log-probabilities of an engine are worth: `python -m benchmarks.coverage`.

An engine that returns every kept id, but the log-probabilities of the top K alone, leaves q
unknown on the rest of each kept set: `Support.from_vllm` makes that rest one tail. Here the real
rows go through it as such an engine would return them (per token a list of kept ids and a dict
with the K likeliest ids and the sampled one). For each K the gradient of a centered loss is
compared with that of the complete supports, and so is the gradient without any centering.

The trainer is the recorded one with noise on its hidden states, two sizes of it. `icepop_loss`
weighs a token by its ratio, whose expected score is 0 as long as no token is rejected: where none
is, its centering has nothing to do, and what is shown is the rounding. `reinforce_loss` weighs all
alike, and every difference of trainer and sampler has to be centered.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from benchmarks.measure import RESULTS, environment, relative_error, write_json
from benchmarks.tables import markdown, pyplot
from benchmarks.workloads import Workload, data_folder, real_like, real_rows
from rl_loss import LossInputs, Support, fused_lm_head, icepop_loss, reinforce_loss

TOPS = (5, 20, 64)
NOISES = (0.01, 0.1)  # of the hidden states, relative to their norm
LOSSES = {"icepop": icepop_loss, "reinforce": reinforce_loss}


@dataclass
class Row:
    """One way to center: how much of the sampler's evidence it has, and how wrong it is."""

    name: str
    covered: float | None = None  # share of rows whose every q is known
    known: float | None = None  # mean ids of a row whose q is known
    tail_mass: float | None = None  # mean sampler mass outside the known ids
    # By loss and noise: relative error of the gradient by the hidden states, and by the weight.
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)


def as_sampled(work: Workload) -> Workload:
    """Synthetic rows whose sampler is the head itself, their labels drawn from it."""
    support, g = work.support, torch.Generator().manual_seed(2)
    with torch.no_grad():
        out = fused_lm_head(work.hidden, work.weight, work.labels, support)
    q, rows = out.support_logprobs, support.entry_rows
    keys = q - torch.empty_like(q).exponential_(generator=g).log()  # the largest: a draw from q
    best = torch.full((len(support),), -torch.inf).scatter_reduce_(0, rows, keys, "amax")
    labels = torch.empty_like(work.labels)
    drawn = keys == best[rows]
    labels[rows[drawn]] = support.ids[drawn].long()
    return replace(work, labels=labels, support=support.replace(sampler_logprobs=q))


def label_logprobs(support: Support, labels: Tensor) -> Tensor:
    """The sampler's log q of each label, `[N]`."""
    rows = support.entry_rows
    own = support.ids == labels[rows]
    return torch.empty(len(support)).scatter_(0, rows[own], support.sampler_logprobs[own])


def returned(support: Support, labels: Tensor, top: int) -> Support:
    """The support as it comes back with every kept id, and log q of the `top` and the label."""
    offsets = support.offsets.tolist()
    mask, logprobs = [], []
    for row, label in enumerate(labels.tolist()):
        entries = slice(offsets[row], offsets[row + 1])
        ids, q = support.ids[entries].tolist(), support.sampler_logprobs[entries]
        best = q.topk(min(top, len(ids))).indices.tolist()
        mask.append(ids)
        logprobs.append({ids[at]: float(q[at]) for at in [*best, ids.index(label)]})
    return Support.from_vllm(mask, logprobs)


def gradients(
    loss: Callable, work: Workload, hidden: Tensor, support: Support, centering: bool = True
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """By hidden states and weight, of one loss, and its metrics."""
    hidden = hidden.clone().requires_grad_()
    weight = work.weight.detach().requires_grad_()
    output = fused_lm_head(hidden, weight, work.labels, support)
    inputs = LossInputs.from_head(
        output,
        support,
        inference_logprobs=label_logprobs(work.support, work.labels),
        advantages=-work.d_logprobs,  # N(0, 1), seeded
    )
    out = loss(inputs, score_centering=centering)
    by_hidden, by_weight = torch.autograd.grad(out.loss, (hidden, weight))
    return by_hidden, by_weight, {name: float(value) for name, value in out.metrics.items()}


def run(work: Workload) -> tuple[list[Row], dict[str, dict[str, float]]]:
    """The ways to center, and of each loss and noise what the loss says of the mismatch."""
    n, h = work.hidden.shape
    rows, supports = [Row("no centering")], [work.support]
    for top in TOPS:
        part = returned(work.support, work.labels, top)
        covered = float(part.host.complete.double().mean())
        tail_mass = float(part.sampler_tail_mass.double().mean())
        rows.append(Row(f"top {top}", covered, float(part.known.sum()) / n, tail_mass))
        supports.append(part)
    noise = torch.randn(n, h, generator=torch.Generator().manual_seed(3))
    noise *= work.hidden.norm(dim=1, keepdim=True) / math.sqrt(h)
    mismatch = {}
    for size in NOISES:
        hidden = work.hidden + size * noise
        for name, loss in LOSSES.items():
            *exact, metrics = gradients(loss, work, hidden, work.support)
            case = f"{name}, {100 * size:g} %"
            mismatch[case] = {key: metrics[key] for key in ("mismatch_kl", "is_masked")}
            for row, support in zip(rows, supports, strict=True):
                *got, _ = gradients(loss, work, hidden, support, row.covered is not None)
                errors = [relative_error(*pair) for pair in zip(got, exact, strict=True)]
                row.errors[case] = (errors[0], errors[1])
    return rows, mismatch


def show(title: str, rows: list[Row]) -> None:
    def told(value: float | None, how: str) -> str:
        return "" if value is None else how.format(value)

    lines = [
        {
            "log q known of": row.name,
            "rows covered": told(row.covered, "{:.1%}"),
            "ids known a row": told(row.known, "{:.1f}"),
            "tail mass": told(row.tail_mass, "{:.4f}"),
            **{case: f"{hidden:.1e} {weight:.1e}" for case, (hidden, weight) in row.errors.items()},
        }
        for row in rows
    ]
    print(f"{title}\n{markdown(lines)}")
    print("By loss and noise: relative error of the gradient by the hidden states, by the weight.")


def draw(name: str, title: str, rows: list[Row]) -> None:
    """Draws `results/<name>.png`: coverage on the left, errors on the right."""
    plt = pyplot()
    if plt is None:
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    some = rows[1:]
    bars = left.bar([row.name for row in some], [100 * (row.covered or 0) for row in some])
    left.bar_label(bars, fmt="%.0f %%", fontsize=8)
    left.set(title="rows whose every log q is known", ylim=(0, 100), ylabel="%")
    for case in rows[0].errors:
        errors = [row.errors[case][0] for row in rows]
        right.plot([row.name for row in rows], errors, marker="o", label=case)
    right.set(title="relative error of the gradient by the hidden states", yscale="log")
    right.legend(fontsize=7)
    for axis in (left, right):
        axis.title.set_fontsize(9)
        axis.tick_params(labelsize=8)
    figure.suptitle(title, fontsize=8)
    figure.savefig(RESULTS / f"{name}.png", dpi=110)
    print(f"drawn: results/{name}.png")


def capacity_margins(work: Workload, steps: int = 20_000) -> dict[int, float]:
    """By rows a step: the entries that all but one step in a thousand need, over the mean."""
    g = torch.Generator().manual_seed(0)
    widths, margins = work.support.host.offsets.diff().double(), {}
    for rows in (16, 64, 256, 512):
        drawn = torch.randint(len(widths), (steps, rows), generator=g)
        margins[rows] = float(widths[drawn].sum(1).quantile(0.999) / (rows * widths.mean()))
    return margins


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json and NAME.png")
    options = parser.parse_args()
    folder = data_folder()
    if folder is None:
        print("The real supports are not here (set RL_LOSS_DATA); running synthetic ones.")
        work = as_sampled(real_like())
    else:
        work, _ = real_rows(folder)
    rows, mismatch = run(work)
    print(", ".join(f"{name} {value}" for name, value in environment().items()))
    for case, metrics in mismatch.items():
        print(f"{case}:", ", ".join(f"{name} {value:.3g}" for name, value in metrics.items()))
    title = f"{work.name}: {work.shape}, float32"
    show(title, rows)
    margins = capacity_margins(work)
    print("capacity margins:", ", ".join(f"{n} rows {x:.2f}" for n, x in margins.items()))
    if options.save:
        table = {"shape": work.shape, "dtype": "float32", "mismatch": mismatch}
        table["capacity_margins"] = margins
        write_json(options.save, {"work": work.name, **table, "rows": [vars(row) for row in rows]})
        print(f"written: results/{options.save}.json")
        draw(options.save, title, rows)


if __name__ == "__main__":
    main()
