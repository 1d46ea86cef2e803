"""Draws and prints what `arms.py` found: `python examples/arms_picture.py [results/arms.json]`."""

import json
import sys
from pathlib import Path
from statistics import mean, stdev

import matplotlib

matplotlib.use("Agg")
from drift_picture import markdown
from matplotlib import pyplot

RESULTS = Path(__file__).parent / "results"
PANELS = {  # a curve: its title, and whether its scale is logarithmic
    "reward": ("reward: share that is right", False),
    "mismatch_kl": ("mismatch_kl, trainer and sampler", True),
    "ratio": ("importance ratio, mean over tokens", False),
    "uncentered": ("share of tokens without evidence to center", False),
    "support": ("ids that the sampler kept, a token", True),
    "entropy": ("entropy (kept set; no replay: vocabulary)", False),
}
PARTS = ("rollout", "validate, move", "trunk", "head, loss", "backward", "optimizer", "publish")
AT_ENDS = 5  # steps of a mean


def told(values: list[float], digits: int = 3) -> str:
    """Mean and standard deviation over seeds."""
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}"


def by_arm(made: dict) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {}
    for run in made["runs"]:
        found.setdefault(run["arm"], []).append(run)
    return dict(sorted(found.items(), key=lambda item: item[1][0]["about"]))


def ends(runs: list[dict], against: list[dict]) -> dict[str, str]:
    """A line of the table of arms; its last rewards also less those of `against`, seed by seed."""

    def of(name: str, part: slice = slice(None)) -> list[float]:
        return [mean(run["curves"][name][part]) for run in runs]

    first, last = slice(0, AT_ENDS), slice(-AT_ENDS, None)
    base = {run["seed"]: run for run in against}
    pairs = [(run, base[run["seed"]]) for run in runs if run["seed"] in base]
    apart = [
        mean(a["curves"]["reward"][last]) - mean(b["curves"]["reward"][last]) for a, b in pairs
    ]
    after = [a["last"] - b["last"] for a, b in pairs]
    own = [run["last_bfloat16"] for run in runs if "last_bfloat16" in run]
    return {
        "arm": runs[0]["about"],
        "seeds": str(len(runs)),
        f"reward, first {AT_ENDS}": told(of("reward", first)),
        f"last {AT_ENDS}": told(of("reward", last)),
        "less (a)'s": told(apart) if apart else "",
        "after": told([run["last"] for run in runs]),
        "after, less": told(after) if after else "",
        "in bfloat16": told(own) if own else "",
        "ratio": told(of("ratio"), 4),
        "mismatch_kl": told(of("mismatch_kl"), 5),
        "mask_tv": told(of("mask_tv"), 4),
        "masked": told(of("masked"), 4),
        "uncentered": f"{mean(of('uncentered')):.0%}",
        "kept ids": f"{mean(of('support')):.0f}",
        "entropy, last": told(of("entropy", last)),
    }


def by_seed(made: dict) -> list[dict[str, str]]:
    """Of every arm and seed the reward in the last steps, and after them."""
    lines = []
    for arm, runs in by_arm(made).items():
        found = {run["seed"]: run for run in runs}
        line = {"last, after": arm}
        for seed in sorted({run["seed"] for run in made["runs"]}):
            line[f"seed {seed}"] = ""
            if run := found.get(seed):
                last = mean(run["curves"]["reward"][-AT_ENDS:])
                line[f"seed {seed}"] = f"{last:.3f}, {run['last']:.3f}"
        lines.append(line)
    return lines


def ranges(made: dict) -> list[dict[str, str]]:
    """The least and the most of any step of any seed, by metric and arm."""
    arms, lines = by_arm(made), []
    for name in made["runs"][0]["curves"]:
        line = {"least, most": name}
        for arm, runs in arms.items():
            steps = [value for run in runs for value in run["curves"][name]]
            line[arm] = f"{min(steps):.4g}, {max(steps):.4g}"
        lines.append(line)
    return lines


def times(runs: list[dict]) -> dict[str, str]:
    """Of a step, by part."""
    parts = {p: mean(run["milliseconds"].get(p, 0.0) for run in runs) for p in PARTS}
    peak = max((max(run["gib"].values(), default=0.0) for run in runs), default=0.0)
    line = {part: f"{ms:.0f}" for part, ms in parts.items()}
    return {"arm, ms": runs[0]["about"], **line, "step": f"{sum(parts.values()):.0f}",
            "peak GiB": f"{peak:.2f}"}  # fmt: skip


def heads(made: dict) -> list[dict[str, str]]:
    """The same rows through each head."""
    names = ("trunk", "head, loss", "backward")
    return [
        {
            "head, ms": one["title"],
            "tokens": f"{one['tokens']:,}",
            **{part: f"{one['milliseconds'][part]:.1f}" for part in names},
            "all": f"{sum(one['milliseconds'][part] for part in names):.1f}",
            **{f"peak GiB, {part}": f"{one['gib'].get(part, 0.0):.2f}" for part in names},
        }
        for one in made["heads"].values()
    ]


def draw(made: dict, path: Path) -> None:
    figure, axes = pyplot.subplots(2, 4, figsize=(18, 8.5), layout="constrained")
    colors = pyplot.get_cmap("tab10")
    for place, (arm, runs) in enumerate(by_arm(made).items()):
        style = "--" if not runs[0]["centering"] else "-"
        for axis, name in zip(axes[:, :3].flat, PANELS, strict=True):
            columns = list(zip(*(run["curves"][name] for run in runs), strict=True))
            middle = [mean(column) for column in columns]
            axis.plot(middle, style, color=colors(place), label=f"{runs[0]['about']} [{arm}]")
            low, high = [min(c) for c in columns], [max(c) for c in columns]
            axis.fill_between(range(len(columns)), low, high, color=colors(place), alpha=0.12)
    for axis, (name, (title, log)) in zip(axes[:, :3].flat, PANELS.items(), strict=True):
        axis.set(title=title, xlabel="step", yscale="log" if log else "linear")
        if name == "uncentered":
            axis.set_ylim(-0.05, 1.05)
        axis.grid(alpha=0.3)
    lines = axes[0, 0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=4, fontsize=9)
    _bars(axes[0, 3], {runs[0]["arm"]: runs[0]["milliseconds"] for runs in by_arm(made).values()})
    axes[0, 3].set_title("a step, ms by part (first seed)")
    compared = {one["title"]: one["milliseconds"] for one in made["heads"].values()}
    if compared:
        _bars(axes[1, 3], compared)
        (tokens,) = {one["tokens"] for one in made["heads"].values()}
        axes[1, 3].set_title(f"{tokens:,} tokens by head, ms")
    else:
        axes[1, 3].set_axis_off()
    settings = ", ".join(f"{name} {value}" for name, value in made["settings"].items())
    figure.suptitle(
        f"Reversing words or letters, top_p 0.95: mean over seeds, least and most of them\n"
        f"{settings}; {made['device']}, torch {made['torch']}",
        fontsize=10,
    )
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _bars(axis, rows: dict[str, dict[str, float]]) -> None:
    """A bar a row, of its parts."""
    left = [0.0] * len(rows)
    for part in PARTS:
        widths = [parts.get(part, 0.0) for parts in rows.values()]
        if any(widths):
            axis.barh(list(rows), widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.invert_yaxis()
    axis.tick_params(labelsize=8)
    if rows:
        axis.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.4, -0.08))


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "arms.json"
    made = json.loads(path.read_text())
    print(f"{made['device']}, torch {made['torch']}, {made['settings']}")
    warm = [f"seed {w['seed']}: {w['reward']:.3f} in {w['steps']} steps" for w in made["warm_ups"]]
    print(f"warm-up: {'; '.join(warm)}")
    print(f"all runs: {sum(run.get('seconds', 0) for run in made['runs']):.0f} s\n")
    arms = by_arm(made)
    against = arms.get("replay", [])
    print(markdown([ends(runs, against) for runs in arms.values()]), end="\n\n")
    print(markdown(by_seed(made)), end="\n\n")
    print(markdown(ranges(made)), end="\n\n")
    print(markdown([times(runs) for runs in arms.values()]))
    if made["heads"]:
        print(f"\n{markdown(heads(made))}")
    draw(made, path.with_suffix(".png"))
    print(f"drawn: {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
