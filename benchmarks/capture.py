"""Recording supports on the sampler's side: `python -m benchmarks.capture [--save NAME]`.

512 rows over 151936 ids, 9.3 million of them kept, peaked logits. Peers: the same in plain
PyTorch (what the library does elsewhere), and what engines return: the log-probabilities of a fixed
number of top ids, which loses every support that is wider.
"""

import argparse
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor

import rl_loss.capture
from benchmarks.measure import (
    Row,
    extra_mib,
    gpu_milliseconds,
    middle,
    milliseconds,
    write,
)
from benchmarks.tables import draw, show
from rl_loss import CapturedRows, RowKind, capture_support


def processed_logits(rows: int, vocab: int, kept: int, device: str) -> tuple[Tensor, Tensor]:
    """Logits of standard deviation 4, `kept` finite ones in rows of uneven width, and tokens."""
    g = torch.Generator(device).manual_seed(0)
    logits = 4 * torch.randn(rows, vocab, generator=g, device=device)
    share = torch.rand(rows, 1, generator=g, device=device).square() + 1e-3
    share *= kept / vocab / rows / share.mean()
    logits[torch.rand(rows, vocab, generator=g, device=device) >= share] = -torch.inf
    logits[:, 0] = 0.0
    return logits, logits.softmax(1).multinomial(1, generator=g)[:, 0]


def fixed_width(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest ids of every row and their log-probabilities."""
    values, ids = logits.topk(min(k, logits.shape[1]))
    return ids.int(), values - logits.logsumexp(1, keepdim=True)


def eager(logits: Tensor, sampled: Tensor, **options) -> CapturedRows:
    """`capture_support` in plain PyTorch, chunk by chunk."""
    with patch.object(rl_loss.capture, "_has_kernels", lambda logits: False):
        return capture_support(logits, sampled, **options)


def run(rows: int, vocab: int, kept: int, repeats: int) -> dict[str, dict]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits, sampled = processed_logits(rows, vocab, kept, device)
    total = int(logits.isfinite().sum())
    mixed = torch.tensor([1, 0, 2, 3], dtype=torch.int8).repeat(-(-rows // 4))[:rows].to(device)
    none = torch.zeros(rows, dtype=torch.int8, device=device)
    ways: dict[str, Callable[[], object]] = {
        "rl_loss, REPLAY": lambda: capture_support(logits, sampled, kind=RowKind.REPLAY),
        "rl_loss, REPLAY, bfloat16": lambda: capture_support(low, sampled, kind=RowKind.REPLAY),
        "rl_loss, HEAD 20": lambda: capture_support(logits, sampled, kind=RowKind.HEAD),
        "rl_loss, DRAWS 8": lambda: capture_support(logits, sampled, kind=RowKind.DRAWS),
        "rl_loss, a quarter of each kind": lambda: capture_support(logits, sampled, kind=mixed),
        "rl_loss, nothing asked for": lambda: capture_support(logits, sampled, kind=none),
        "eager PyTorch, REPLAY": lambda: eager(logits, sampled, kind=RowKind.REPLAY),
        "top 2048 of every row": lambda: fixed_width(logits, 2048),
        "top 20 of every row": lambda: fixed_width(logits, 20),
        "one copy of the logits": lambda: logits.clone(),
    }
    low, made = logits.bfloat16(), []
    for name, way in ways.items():
        way()
        row = Row(name, extra_mib=extra_mib(way, 0))
        row.both_ms, row.both_min_ms, row.both_max_ms = middle(milliseconds(way, repeats))
        if device == "cuda":
            row.gpu_ms, row.launches = gpu_milliseconds(way)
        made.append(row)
    first = made[0]
    for row in made:
        row.ratio = (row.gpu_ms or row.both_ms) / (first.gpu_ms or first.both_ms)
    widths = logits.isfinite().sum(1)
    lost = float((widths > 2048).float().mean())
    shape = f"R {rows}, V {vocab}, {total} kept, {lost:.0%} of the rows wider than 2048"
    return {"capture": {"shape": shape, "dtype": "float32", "rows": made}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--kept", type=int, default=9_300_000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json and NAME.png")
    options = parser.parse_args()
    tables = run(options.rows, options.vocab, options.kept, options.repeats)
    show("capture", tables["capture"], more_digits=1)
    if options.save:
        write(options.save, tables)
        print(f"written: results/{options.save}.json")
        draw(options.save, "Recording supports")


if __name__ == "__main__":
    main()
