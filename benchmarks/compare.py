"""Two checkouts on one card: `python -m benchmarks.compare OLD [NEW]`, folders that hold `rl_loss`.

Cards differ by a tenth, and one card by its heat, so that only times of one run may be compared.
Each checkout is timed in processes of its own, by turns; the workloads and the timer are those of
this checkout. Printed is the median over a checkout's turns, and new over old.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.measure import environment, gpu_milliseconds, middle, milliseconds, write_json

HERE = Path(__file__).parent.parent


def steps() -> Iterator[tuple[str, Callable[[], object]]]:
    """What is timed: head, head and loss, one pass, capture."""
    from benchmarks.capture import capture_support, processed_logits
    from benchmarks.own_ways import one_pass, ours, with_loss
    from benchmarks.presets import PRESETS

    for key in ("k8", "k20", "k128", "k512", "chat", "forced", "full", "prompts", "mixed"):
        work = PRESETS[key].make(device="cuda").to("cuda", torch.bfloat16)
        work.hidden = work.hidden.detach().requires_grad_()
        work.weight = work.weight.detach().requires_grad_()
        upstreams = [work.d_logprobs, work.d_support_logprobs]

        def step(way, whole, work=work, upstreams=upstreams):
            work.hidden.grad = work.weight.grad = None
            outputs = way(work)
            torch.autograd.backward(outputs, None if whole else upstreams[: len(outputs)])

        yield f"{key}: head", partial(step, ours, False)
        if key in ("k20", "mixed"):
            yield f"{key}: head + icepop", partial(step, with_loss(True), True)
        if key in ("full", "mixed"):
            yield f"{key}: one pass", partial(step, one_pass, True)
    logits, sampled = processed_logits(512, 151936, 9_300_000, "cuda")
    for name, kind in {"REPLAY": 1, "HEAD": 2, "DRAWS": 3}.items():
        yield f"capture: {name}", partial(capture_support, logits, sampled, kind=kind)


def measure(repeats: int) -> dict[str, tuple[float, float, int]]:
    """Kernel and wall time in ms, and launches, of each step."""
    found = {}
    for name, step in steps():
        for _ in range(3):
            step()
        kernels, launches = gpu_milliseconds(step, calls=repeats)
        found[name] = kernels, middle(milliseconds(step, repeats))[0], launches
        torch.cuda.empty_cache()
    return found


def turn(checkout: Path, repeats: int) -> dict[str, list[float]]:
    """One process with the `rl_loss` of that checkout."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "rl_loss").symlink_to((checkout / "rl_loss").resolve())
        paths = [folder, str(HERE), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command = [sys.executable, "-m", "benchmarks.compare", "--turn", "--repeats", str(repeats)]
        done = subprocess.run(command, env=environment, cwd=folder, stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(f"{checkout} failed")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, nargs="?")
    parser.add_argument("new", type=Path, nargs="?", default=HERE)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json")
    parser.add_argument("--turn", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turn:
        print(json.dumps(measure(options.repeats)))
        return
    if options.old is None:
        parser.error("which checkout is the old one?")
    checkouts = {"old": options.old, "new": options.new}
    turns: dict[str, list[dict]] = {"old": [], "new": []}
    for _ in range(options.turns):
        for name, checkout in checkouts.items():
            turns[name].append(turn(checkout, options.repeats))
    print(", ".join(f"{name} {value}" for name, value in environment().items()))
    print(f"{'ms':24} {'kernels old':>12} {'new':>8} {'ratio':>6} {'wall old':>9} {'new':>8} "
          f"{'ratio':>6} {'launches':>10}")  # fmt: skip
    table = {}
    for step in turns["old"][0]:
        old, new = (
            [median(turn[step][i] for turn in turns[name]) for i in range(3)] for name in checkouts
        )
        table[step] = {"old": old, "new": new}
        print(f"{step:24} {old[0]:12.3f} {new[0]:8.3f} {new[0] / old[0]:6.3f} {old[1]:9.3f} "
              f"{new[1]:8.3f} {new[1] / old[1]:6.3f} {old[2]:5.0f} {new[2]:4.0f}")  # fmt: skip
    if options.save:
        write_json(options.save, {"kernels_wall_launches": table})


if __name__ == "__main__":
    main()
