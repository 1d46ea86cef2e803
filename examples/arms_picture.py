"""Draws and prints what `arms.py` found: `python examples/arms_picture.py [results/arms.json]`."""

import json
import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from statistics import mean

import matplotlib

matplotlib.use("Agg")
from drift_picture import markdown, spread
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
HEAD_PARTS = ("trunk", "head, loss", "backward")
AT_ENDS = 5  # steps of a mean
PAIRS = (  # arms that are compared at equal seeds
    ("top-k", "replay"),
    ("no-replay", "replay"),
    ("fp8", "fp8-plain"),
    ("fp8-reinforce", "fp8-reinforce-plain"),
    ("fp8-reinforce", "fp8"),
    ("fp8-reinforce", "replay"),
    ("fp8-kl", "fp8"),
    ("stale-ipo", "stale"),
    ("stale-kl", "stale"),
)


def by_arm(made: dict) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {}
    for run in made["runs"]:
        found.setdefault(run["arm"], []).append(run)
    return dict(sorted(found.items(), key=lambda item: item[1][0]["about"]))


def at_common_seeds(arms: dict[str, list[dict]]) -> dict[str, list[dict]]:
    """Runs of the seeds that all arms have, so that means compare; all where there are none."""
    seeds = set.intersection(*({run["seed"] for run in runs} for runs in arms.values()))
    return {a: [run for run in runs if run["seed"] in seeds] or runs for a, runs in arms.items()}


def first_step(run: dict) -> float:
    return run["curves"]["reward"][0]


def last_steps(run: dict) -> float:
    return mean(run["curves"]["reward"][-AT_ENDS:])


def after(run: dict) -> float:
    return run["last"]


def in_bfloat16(run: dict) -> float:
    return run["last_bfloat16"]


def less(runs: list[dict], against: list[dict], of: Callable[[dict], float]) -> list[float]:
    """What is apart at equal seeds."""
    base = {run["seed"]: of(run) for run in against}
    return [of(run) - base[run["seed"]] for run in runs if run["seed"] in base]


def ends(runs: list[dict], against: list[dict]) -> dict[str, str]:
    """A line of the table of arms; its last rewards also less those of `against`."""

    def of(name: str, part: slice = slice(None)) -> list[float]:
        return [mean(run["curves"][name][part]) for run in runs]

    first, last = slice(0, AT_ENDS), slice(-AT_ENDS, None)
    return {
        "arm": runs[0]["about"],
        "seeds": str(len(runs)),
        f"reward, first {AT_ENDS}": spread(of("reward", first)),
        f"last {AT_ENDS}": spread(of("reward", last)),
        "less (a)'s": spread(less(runs, against, last_steps)),
        "after": spread([after(run) for run in runs]),
        "after, less": spread(less(runs, against, after)),
        "in bfloat16": spread([in_bfloat16(run) for run in runs]),
        "ratio": spread(of("ratio"), 4),
        "mismatch_kl": spread(of("mismatch_kl"), 5),
        "mask_tv": spread(of("mask_tv"), 4),
        "masked": spread(of("masked"), 4),
        "uncentered": f"{mean(of('uncentered')):.0%}",
        "kept ids": f"{mean(of('support')):.0f}",
        "entropy, last": spread(of("entropy", last)),
    }


def pairs(arms: dict[str, list[dict]]) -> list[dict[str, str]]:
    """Of two arms at equal seeds: rewards apart, and at how many seeds the first is above."""
    lines = []
    rewards = {"first step": first_step, f"last {AT_ENDS}": last_steps}
    rewards |= {"after": after, "in bfloat16": in_bfloat16}
    for one, other in PAIRS:
        line = {"less": f"{one} - {other}"}
        for name, of in rewards.items():
            apart = less(arms.get(one, []), arms.get(other, []), of)
            line[name] = spread(apart)
            line[f"{name}: above"] = f"{sum(x > 0 for x in apart)} of {len(apart)}"
        lines.append(line)
    return lines


def by_seed(made: dict) -> list[dict[str, str]]:
    """Of every arm and seed the reward in the last steps, and after them."""
    lines = []
    for arm, runs in by_arm(made).items():
        line = {"last, after": arm}
        line |= {f"seed {seed}": "" for seed in sorted({run["seed"] for run in made["runs"]})}
        line |= {f"seed {run['seed']}": f"{last_steps(run):.3f}, {after(run):.3f}" for run in runs}
        lines.append(line)
    return lines


def ranges(arms: dict[str, list[dict]]) -> list[dict[str, str]]:
    """The least and the most of any step of any seed, by metric and arm."""
    lines = []
    first, *_ = arms.values()
    for name in first[0]["curves"]:
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
    return [
        {
            "head, ms": one["title"],
            "tokens": f"{one['tokens']:,}",
            **{part: f"{one['milliseconds'][part]:.1f}" for part in HEAD_PARTS},
            "all": f"{sum(one['milliseconds'][part] for part in HEAD_PARTS):.1f}",
            **{f"peak GiB, {part}": f"{one['gib'].get(part, 0.0):.2f}" for part in HEAD_PARTS},
        }
        for one in made["heads"].values()
    ]


def draw(made: dict, path: Path) -> None:
    """A row a letter, beside arm (a) in black."""
    arms = by_arm(made)
    letters: dict[str, list[str]] = {}
    for arm, runs in arms.items():
        letter = runs[0]["about"][1]
        letters.setdefault("abc" if letter in "abc" else letter, []).append(arm)
    count = max(2, len(letters))
    size = (24, 3.6 * count + 0.8)
    figure, axes = pyplot.subplots(count, 7, figsize=size, squeeze=False, layout="constrained")
    colors = dict(zip(arms, cycle(("black", *pyplot.get_cmap("tab10").colors))))
    common = at_common_seeds(arms)
    for row, names in zip(axes, letters.values(), strict=False):
        own = {arm: common[arm] for arm in dict.fromkeys(("replay", *names)) if arm in arms}
        for axis, name in zip(row, PANELS, strict=False):
            _curves(axis, name, own, colors)
        row[0].legend(fontsize=7, loc="lower right")
    _rewards(axes[0, -1], arms, common, colors)
    for axis in axes[1:, -1]:
        axis.set_axis_off()
    if made["heads"]:
        axes[1, -1].set_axis_on()
        _heads(axes[1, -1], list(made["heads"].values()))
    settings = ", ".join(f"{name} {value}" for name, value in made["settings"].items())
    figure.suptitle(
        f"Reversing words or letters, top_p 0.95: mean over seeds, least and most of them\n"
        f"{settings}; {made['device']}, torch {made['torch']}",
        fontsize=10,
    )
    figure.savefig(path, dpi=75)
    pyplot.close(figure)


def _curves(axis, name: str, arms: dict[str, list[dict]], colors: dict) -> None:
    for arm, runs in arms.items():
        columns = list(zip(*(run["curves"][name] for run in runs), strict=True))
        style = "-" if runs[0]["centering"] else "--"
        axis.plot([mean(c) for c in columns], style, color=colors[arm], label=runs[0]["about"])
        low, high = [min(c) for c in columns], [max(c) for c in columns]
        axis.fill_between(range(len(columns)), low, high, color=colors[arm], alpha=0.08)
    title, log = PANELS[name]
    axis.set(yscale="log" if log else "linear", xlabel="step")
    axis.set_title(title, fontsize=9)
    axis.tick_params(labelsize=8)
    if name == "uncentered":
        axis.set_ylim(-0.05, 1.05)
    axis.grid(alpha=0.3)


def _rewards(axis, arms: dict, common: dict, colors: dict) -> None:
    """A dot a seed, hollow if not all arms have it, and a bar at the mean of the others."""
    base = arms.get("replay", [])
    for arm, color in colors.items():
        if arm == "replay":
            continue
        more = [run for run in arms[arm] if run not in common[arm]]
        for runs, face in ((common[arm], color), (more, "none")):
            apart = less(runs, base, last_steps)
            axis.plot(apart, [arm] * len(apart), "o", color=color, mfc=face, alpha=0.45, ms=5)
        if apart := less(common[arm], base, last_steps):
            axis.plot(mean(apart), arm, "|", color=color, ms=14, mew=3)
    axis.invert_yaxis()
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.3)
    axis.axvline(0.0, color="black", linewidth=0.8)
    title = f"reward less (a)'s, last {AT_ENDS} steps\n(hollow: seeds of some arms alone)"
    axis.set_title(title, fontsize=9)


def _heads(axis, compared: list[dict]) -> None:
    """A bar a head, of its parts."""
    titles, left = [one["title"].replace(", ", ",\n") for one in compared], [0.0] * len(compared)
    for part in HEAD_PARTS:
        widths = [one["milliseconds"][part] for one in compared]
        axis.barh(titles, widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.invert_yaxis()
    axis.tick_params(labelsize=8)
    axis.set_title(f"{compared[0]['tokens']:,} tokens by head, ms", fontsize=9)
    axis.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.4, -0.08))


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "arms.json"
    made = json.loads(path.read_text())
    print(f"{made['device']}, torch {made['torch']}, {made['settings']}")
    warm = [f"seed {w['seed']}: {w['reward']:.3f} in {w['steps']} steps" for w in made["warm_ups"]]
    print(f"warm-up: {'; '.join(warm)}")
    print(f"all runs: {sum(run['seconds'] for run in made['runs']):.0f} s\n")
    arms = by_arm(made)
    against, common = arms.get("replay", []), at_common_seeds(arms)
    print(markdown([ends(runs, against) for runs in common.values()]), end="\n\n")
    print(markdown(pairs(arms)), end="\n\n")
    print(markdown(by_seed(made)), end="\n\n")
    print(markdown(ranges(common)), end="\n\n")
    print(markdown([times(runs) for runs in common.values()]))
    if made["heads"]:
        print(f"\n{markdown(heads(made))}")
    draw(made, path.with_suffix(".png"))
    print(f"drawn: {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
