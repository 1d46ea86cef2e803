"""From which width a row's product over V is cheaper than gathering: `python -m benchmarks.threshold`.

Replayed rows of several numbers and widths take both ways, forward and backward; what a gathered
entry, a row's product and the reading of the weight cost is fitted to the difference, and printed
as the two constants of `rl_loss/csr.py`.
"""

import argparse

import torch
from torch import Tensor

import rl_loss.csr as csr
from benchmarks.measure import environment, gpu_milliseconds, write_json
from benchmarks.workloads import Workload, zipf_rows
from rl_loss import fused_lm_head


def milliseconds(work: Workload, widest: float) -> float:
    """Kernel time of one forward and backward, rows above `widest` times V through products."""
    csr.ENTRIES_A_PRODUCT, csr.ENTRIES_A_READ = widest, 0.0
    work.support.__dict__.pop("_plan_for", None)
    hidden, weight = work.hidden.requires_grad_(), work.weight.requires_grad_()

    def both() -> None:
        hidden.grad = weight.grad = None
        out = fused_lm_head(hidden, weight, work.labels, work.support)
        upstreams = [work.d_logprobs, work.d_support_logprobs]
        torch.autograd.backward([out.logprobs, out.support_logprobs], upstreams)

    both()
    return gpu_milliseconds(both)[0]


def fit(points: list[tuple[int, int, float]]) -> Tensor:
    """Least squares of `gathered - product = a * rows * width - b * rows - c`; `[a, b, c]`."""
    made = [[rows * width, -rows, -1.0] for rows, width, _ in points]
    gaps = [[gap] for *_, gap in points]
    made, gaps = (torch.tensor(part, dtype=torch.float64) for part in (made, gaps))
    return torch.linalg.lstsq(made, gaps).solution[:, 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json")
    options = parser.parse_args()
    h, v = options.hidden, options.vocab
    points, kept = [], (csr.ENTRIES_A_PRODUCT, csr.ENTRIES_A_READ)
    print(", ".join(f"{name} {value}" for name, value in environment().items()))
    print(
        f"H {h}, V {v}, bfloat16\n{'rows':>6} {'width':>7} {'gathered ms':>12} {'product ms':>11}"
    )
    for rows in (32, 256, 1024):
        for width in (1000, 2000, 4000, 16000):
            if rows * width > 5_000_000:
                continue
            work = zipf_rows("rows", torch.full((rows,), width), h, v).to("cuda", torch.bfloat16)
            gathered, product = milliseconds(work, 2.0), milliseconds(work, 0.0)
            points.append((rows, width, gathered - product))
            print(f"{rows:6} {width:7} {gathered:12.3f} {product:11.3f}")
    a, b, c = fit(points).tolist()
    print(f"a product takes as long as V / {v * a / b:.0f} entries, a reading as {c / a / v:.2f} V")
    csr.ENTRIES_A_PRODUCT, csr.ENTRIES_A_READ = kept
    if options.save:
        made = {"points": points, "entries_a_product": b / a / v, "entries_a_read": c / a / v}
        write_json(options.save, {"H": h, "V": v, **made})


if __name__ == "__main__":
    main()
