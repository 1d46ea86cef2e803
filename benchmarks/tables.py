"""How results are printed and drawn."""

import importlib.util
import json
from functools import cache
from typing import Any

from benchmarks.measure import RESULTS, environment

_COLUMNS = {  # of measure.Row: heading and digits
    "gpu_ms": ("gpu ms", 2),
    "launches": ("launches", 0),
    "cpu_ms": ("cpu ms", 1),
    "both_ms": ("wall ms", 2),
    "both_min_ms": ("min", 2),
    "both_max_ms": ("max", 2),
    "forward_ms": ("forward", 2),
    "extra_mib": ("extra MiB", 0),
    "logprob_error": ("logprob err", None),
    "gradient_error": ("grad err", None),
    "ratio": ("x ours", 1),
}


def show(key: str, table: dict, more_digits: int = 0) -> None:
    """Prints the rows of a table, without the columns that hold nothing; what has no numbers is
    told below."""
    rows = [row for row in table["rows"] if not row.note]
    print(f"\n{key}: {table['shape']}, {table['dtype']}")
    print(", ".join(f"{name} {value}" for name, value in environment().items()))

    def text(value: float | None, digits: int | None) -> str:
        if value is None:
            return ""
        if digits is None:
            return f"{value:.1e}"
        digits += more_digits if digits else 0
        return f"{round(value, digits) + 0.0:.{digits}f}"  # no -0

    fields = [field for field in _COLUMNS if any(getattr(row, field) for row in rows)]
    lines = [
        {
            **({"key": row.key} if row.key else {}),
            "way": row.name,
            **{_COLUMNS[f][0]: text(getattr(row, f), _COLUMNS[f][1]) for f in fields},
        }
        for row in rows
    ]
    print(markdown(lines) if lines else "Nothing was measured.")
    for row in table["rows"]:
        if row.note:
            print(f"{row.key or row.name}: {row.note}")


def columns(listed: dict[str, str]) -> str:
    """Keys and what they mean, as `--help` lists them."""
    width = max(map(len, listed))
    return "\n".join(f"  {key:{width}}  {about}" for key, about in listed.items())


@cache
def pyplot() -> Any | None:
    """matplotlib's, drawing to files; where it is not installed None, and once a line about it."""
    if importlib.util.find_spec("matplotlib") is None:
        print("nothing will be drawn: pip install matplotlib")
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw(name: str, what: str) -> None:
    """Draws `results/<name>.json` beside it."""
    plt = pyplot()
    if plt is None:
        return
    from matplotlib.ticker import NullFormatter

    result = json.loads((RESULTS / f"{name}.json").read_text())
    tables = result["tables"]
    width = min(len(tables), 4)
    height = -(-len(tables) // width)
    figure, axes = plt.subplots(
        height, width, figsize=(max(8, 5.4 * width), 3.0 * height), squeeze=False
    )
    for axis in axes.flat[len(tables) :]:
        axis.set_axis_off()
    for axis, (work, table) in zip(axes.flat, tables.items(), strict=False):
        rows = [row for row in table["rows"][::-1] if not row["note"]]
        times = [row["gpu_ms"] or row["both_ms"] for row in rows]
        names = [row["name"] for row in rows]
        colors = ["#c8553d" if name.startswith("rl_loss") else "#4878a8" for name in names]
        bars = axis.barh(names, times, color=colors)
        axis.bar_label(
            bars,
            [f"{t:.3g} ms" if t < 1e3 else f"{t:.0f} ms" for t in times],
            padding=3,
            fontsize=8,
        )
        axis.set_xscale("log")
        axis.set_xlim(min(times) / 3, max(times) * 5)
        shape = table["shape"].partition(", ")[2]
        axis.set_title(f"{work}, {table['dtype']}\n{shape}", fontsize=6.5)
        axis.tick_params(labelsize=8)
        axis.xaxis.set_minor_formatter(NullFormatter())
    how = f"{'kernel' if rows[0]['gpu_ms'] else 'wall'} time, log scale"
    figure.suptitle(
        f"{what}, {how}\n{result['device']}, torch {result['torch']}, "
        f"{result['date']}, commit {result['commit']}",
        fontsize=9,
    )
    figure.tight_layout()
    figure.savefig(RESULTS / f"{name}.png", dpi=110)
    print(f"drawn: results/{name}.png")


def markdown(rows: list[dict[str, str]]) -> str:
    """Rows of the same columns, as a table of Markdown that a terminal shows aligned too."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    padded = ([c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)
