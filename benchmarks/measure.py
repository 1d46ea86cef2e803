"""The one timer, the one memory meter, the one error measure, and how results are written."""

import json
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

RESULTS = Path(__file__).parent / "results"


@dataclass
class Row:
    """One way on one workload; times in milliseconds, memory in MiB."""

    name: str
    forward_ms: float
    both_ms: float
    both_min_ms: float
    both_max_ms: float
    extra_mib: float
    logprob_error: float
    gradient_error: float
    ratio: float = 1.0


def milliseconds(function: Callable[[], object], repeats: int, warm_up: int = 1) -> list[float]:
    """Wall time of each call, the device's work included."""
    for _ in range(warm_up):
        function()
    times = []
    for _ in range(repeats):
        _synchronize()
        start = time.perf_counter()
        function()
        _synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def extra_mib(function: Callable[[], object]) -> float:
    """The most memory that a call holds beyond what was held before it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak of the resident set
    before = _status("VmRSS")
    function()
    return (_status("VmHWM") - before) / 2**10


def relative_error(got: Tensor, exact: Tensor) -> float:
    """The norm of the error as a share of the norm."""
    return float((got.double() - exact).norm() / exact.norm().clamp(min=1e-300))


def write(name: str, title: str, tables: dict[str, dict]) -> Path:
    """Writes `results/<name>.json` with everything that a number depends on."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    tables = {
        work: {**table, "rows": [asdict(row) for row in table["rows"]]}
        for work, table in tables.items()
    }
    path.write_text(
        json.dumps({"title": title, **environment(), "tables": tables}, indent=1) + "\n"
    )
    return path


def environment() -> dict[str, str]:
    """Device, versions, commit and date."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    threads = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {
        "device": gpu or threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
        "date": date.today().isoformat(),
    }


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip() or "unknown"


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def middle(times: list[float]) -> tuple[float, float, float]:
    """Median, least and most."""
    return median(times), min(times), max(times)
