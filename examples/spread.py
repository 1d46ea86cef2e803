"""Mean and spread of `reverse_text.py` over seeds; options are passed on.

python examples/spread.py --seeds 0 1 2 --top-k 16
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev


def rewards(seed: int, options: list[str]) -> tuple[float, float]:
    """The rewards that one run prints: after the warm-up and at the end."""
    script = Path(__file__).with_name("reverse_text.py")
    command = [sys.executable, str(script), "--seed", str(seed), *options]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    first, last = re.findall(r"^reward .*: ([0-9.]+)$", printed, re.MULTILINE)
    return float(first), float(last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    known, options = parser.parse_known_args()
    runs = []
    for seed in known.seeds:
        runs.append(rewards(seed, options))
        print(f"seed {seed}: after the warm-up {runs[-1][0]:.3f}, at the end {runs[-1][1]:.3f}")
    for when, values in zip(
        ("after the warm-up", "at the end"), zip(*runs, strict=True), strict=True
    ):
        spread = stdev(values) if len(values) > 1 else 0.0
        print(f"{when}: mean {mean(values):.3f}, standard deviation {spread:.3f}")


if __name__ == "__main__":
    main()
