"""From which width a row's product over V beats gathering: `python -m benchmarks.threshold`.

Replayed rows of several numbers and widths take both ways, forward and backward. For each number
of rows the width at which both take the same time is interpolated: `ENTRIES_A_PRODUCT` of
`rl_loss/plan.py` is this width as a share of V.
"""

import argparse
from itertools import pairwise

import torch

import rl_loss.plan as plan
from benchmarks.measure import environment, gpu_milliseconds, write_json
from benchmarks.workloads import Workload, zipf_rows
from rl_loss import fused_lm_head


def milliseconds(work: Workload, widest: float) -> float:
    """Kernel time of one forward and backward, rows above `widest` times V through products."""
    plan.ENTRIES_A_PRODUCT, plan.ENTRIES_A_READ = widest, 0.0
    work.support.__dict__.pop("_plan_for", None)
    hidden, weight = work.hidden.requires_grad_(), work.weight.requires_grad_()

    def both() -> None:
        hidden.grad = weight.grad = None
        out = fused_lm_head(hidden, weight, work.labels, work.support)
        upstreams = [work.d_logprobs, work.d_support_logprobs]
        torch.autograd.backward([out.logprobs, out.support_logprobs], upstreams)

    both()
    return gpu_milliseconds(both)[0]


def crossing(widths: list[int], gaps: list[float]) -> float | None:
    """Where `gathered - product` passes 0."""
    for (low, below), (high, above) in pairwise(zip(widths, gaps, strict=True)):
        if below <= 0 < above:
            return low + (high - low) * below / (below - above)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json")
    options = parser.parse_args()
    h, v = options.hidden, options.vocab
    print(", ".join(f"{name} {value}" for name, value in environment().items()))
    print(f"H {h}, V {v}, bfloat16")
    print(f"{'rows':>6} {'width':>7} {'gathered ms':>12} {'product ms':>11}")
    tables = {}
    for rows in (4, 32, 256, 1024):
        widths, times = [], []
        for share in (400, 200, 100, 50, 12):
            width = v // share
            if rows * width > 5_000_000:
                continue
            work = zipf_rows("rows", torch.full((rows,), width), h, v).to("cuda", torch.bfloat16)
            widths.append(width)
            times.append((milliseconds(work, 2.0), milliseconds(work, 0.0)))
            print(f"{rows:6} {width:7} {times[-1][0]:12.3f} {times[-1][1]:11.3f}", flush=True)
        at = crossing(widths, [gathered - product for gathered, product in times])
        print(f"{rows:6} equal at " + ("no width tried" if at is None else f"V / {v / at:.0f}"))
        tables[rows] = {"widths": widths, "gathered_product_ms": times, "equal_at": at}
    if options.save:
        write_json(options.save, {"H": h, "V": v, "rows": tables})


if __name__ == "__main__":
    main()
