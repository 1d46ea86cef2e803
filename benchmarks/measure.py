"""The one timer, the one memory meter, the one error measure, and how results are written."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

RESULTS = Path(__file__).parent / "results"


@dataclass
class Row:
    """One way on one workload; times in milliseconds (wall: median, least, most), memory in MiB."""

    name: str
    note: str = ""  # why there are no numbers
    forward_ms: float | None = 0.0
    both_ms: float = 0.0
    both_min_ms: float = 0.0
    both_max_ms: float = 0.0
    gpu_ms: float | None = None  # the sum of the kernels' own times, forward and backward
    launches: int | None = None
    cpu_ms: float | None = None  # the process's own time, the least of the runs
    extra_mib: float | None = 0.0  # beyond inputs and their gradients, outputs included
    logprob_error: float | None = None
    gradient_error: float | None = None
    ratio: float = 1.0
    key: str = ""  # by which it is chosen


def milliseconds(
    function: Callable[[], object],
    repeats: int,
    warm_up: int = 2,
    clock: Callable[[], float] | None = None,
) -> list[float]:
    """Wall time of each call, the device's work included; of one over a second just two."""
    times: list[float] = []
    clock = time.perf_counter if clock is None else clock
    for call in range(warm_up + repeats):
        if len(times) == 2 and min(times) > 1e3:
            break
        if call == warm_up:
            times.clear()
        synchronize()
        start = clock()
        function()
        synchronize()
        times.append(1e3 * (clock() - start))
    return times


def middle(times: list[float]) -> tuple[float, float, float]:
    """Median, least and most."""
    return median(times), min(times), max(times)


def gpu_milliseconds(function: Callable[[], object], calls: int = 3) -> tuple[float, int]:
    """The kernels' own times of one call, summed (median of some calls), and their number."""
    from torch.profiler import ProfilerActivity, profile

    times, launches = [], 0
    for _ in range(calls):
        with profile(activities=[ProfilerActivity.CUDA]) as run:
            function()
            synchronize()
        kernels = [e for e in run.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        times.append(sum(e.device_time_total for e in kernels) / 1e3)
        launches = len(kernels)
    return median(times), launches


def extra_mib(function: Callable[[], object], gradients: int) -> float | None:
    """The most memory that a call holds beyond what was held before and its gradients' bytes; None
    where the system does not tell."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before - gradients) / 2**20
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of the resident set
    except OSError:
        return None
    before = _status("VmRSS")
    function()
    return (_status("VmHWM") - before - gradients / 2**10) / 2**10


def relative_error(got: Tensor, exact: Tensor) -> float:
    """The norm of the error as a share of the norm."""
    return float((got.double() - exact).norm() / exact.norm().clamp(min=1e-300))


def write(name: str, tables: dict[str, dict]) -> None:
    """Writes the tables to `results/<name>.json`."""
    tables = {
        work: {**table, "rows": [asdict(row) for row in table["rows"]]}
        for work, table in tables.items()
    }
    write_json(name, {"tables": tables})


def write_json(name: str, made: dict) -> None:
    """Writes `results/<name>.json` with everything that a number depends on."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({**environment(), **made}, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n")


@cache
def environment() -> dict[str, str]:
    """As the program began: device, versions, commit and date."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    facts = {
        "device": gpu or f"{platform.machine()} CPU{_model()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for package in ("triton", "trl", "liger-kernel", "nvidia-cutlass-dsl", "cut-cross-entropy"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    return {**facts, "commit": _commit(), "date": date.today().isoformat()}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _model() -> str:
    """The processor's name, where Linux tells it."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f" ({names[0]})" if names else ""


def _commit() -> str:
    """`GIT_COMMIT` where it is set, for a copy without its `.git`; else what git says."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
        said = done.stdout.strip()
    except FileNotFoundError:
        said = ""
    return os.environ.get("GIT_COMMIT") or said or "unknown"


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")
