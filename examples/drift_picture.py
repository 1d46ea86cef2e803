"""Draws what `drift.py` found, and the tables of the examples."""

from pathlib import Path
from statistics import mean, stdev

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

CENTERED, PLAIN = "#2a6fa8", "#c8553d"
SHOWN = {  # a row of panels: what is drawn, its scale, and what it says
    "drift": ("drift: KL from the start, where there is nothing to learn", (-0.05, 2.9)),
    "p_best": (
        "p of the best action, which pays 0.2 more (start: 1/16); where top_p cuts: q of it",
        (-0.03, 1.03),
    ),
}


def markdown(lines: list[dict[str, str]]) -> str:
    """Lines of the same columns, as a table."""
    table = [list(lines[0]), ["---"] * len(lines[0]), *(list(line.values()) for line in lines)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in table
    )


def spread(values: list[float], digits: int = 3) -> str:
    """Mean and standard deviation over seeds."""
    if not values:
        return ""
    apart = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{round(mean(values), digits) + 0.0:.{digits}f}{apart}"  # no -0


def draw(made: dict, path: Path) -> None:
    """`made`: what the JSON holds, of all groups."""
    rows = made["arms"]
    figure = pyplot.figure(figsize=(15, 11), layout="constrained")
    upper, middle, lower = figure.subfigures(3, 1, height_ratios=[1.15, 1.15, 1])
    samplers = {
        "p = q (sigma 0)": ("controls", 0.0, False),
        "b anew each step, sigma 0.3": ("controls", 0.3, True),
        "b fixed, sigma 0.3": ("rules", 0.3, False),
        "b fixed, sigma 1": ("rules", 1.0, False),
    }
    for part, (name, (title, limits)) in zip((upper, middle), SHOWN.items(), strict=True):
        part.suptitle(title, fontsize=11, x=0.01, ha="left")
        axes = part.subplots(1, 6, sharey=True)
        for axis, (sampler, key) in zip(axes, samplers.items(), strict=False):
            some = [r for r in rows if (r["group"], r["sigma"], r["redrawn"]) == key]
            _dots(axis, some, name, {True: "centered", False: "not centered"})
            axis.set_title(sampler, fontsize=9)
        for axis, sigma in zip(axes[4:], (0.0, 0.3), strict=True):
            some = [r for r in rows if r["group"] == "kept set" and r["sigma"] == sigma]
            # A replayed policy stops where the sampler has one id left: q says what was learned.
            own = "q_best" if name == "p_best" else name
            _dots(axis, [r for r in some if r["kind"] == "REPLAY"], own, {})
            _dots(axis, [r for r in some if r["kind"] != "REPLAY"], own, {}, hollow=True)
            axis.set_title(f"top_p 0.9, b fixed, sigma {sigma:g}", fontsize=9)
        for axis in axes:
            axis.set_xlim(limits)
            axis.grid(alpha=0.3)
    marks = [
        pyplot.Line2D([], [], color=color, marker="o", linestyle="", markerfacecolor=face)
        for color in (PLAIN, CENTERED)
        for face in (color, "white")
    ]
    names = ["not centered", "not centered, not replayed", "centered", "centered, not replayed"]
    upper.legend(marks, names, loc="upper right", ncols=4, fontsize=8, frameon=False)
    _evidence(lower, rows)
    figure.suptitle(
        "What moves a policy whose sampler is q = softmax(theta + b), and not p = softmax(theta): "
        f"16 actions, {made['steps']} steps of {made['batch']} sampled actions, {made['seeds']} "
        "seeds: mean, least and most\n(every advantage 0.2 too high; top_p: full circles "
        "replay the kept set, empty ones normalise over all 16)",
        fontsize=10,
    )
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _reach(columns: list[list[float]]) -> list[list[float]]:
    """From the mean to the least and to the most, for bars of errors."""
    below = [mean(values) - min(values) for values in columns]
    return [below, [max(values) - mean(values) for values in columns]]


def _dots(axis, rows: list[dict], name: str, labels: dict, hollow: bool = False) -> None:
    """A line a rule; the centered a little above the others."""
    rules = list(dict.fromkeys(row["way"]["rule"] for row in rows))[::-1]
    for centered, color in ((False, PLAIN), (True, CENTERED)):
        some = {r["way"]["rule"]: r["sampled"][name] for r in rows if is_centered(r) == centered}
        heights = [rules.index(rule) + (0.13 if centered else -0.13) for rule in some]
        axis.errorbar(
            [mean(values) for values in some.values()],
            heights,
            xerr=_reach(list(some.values())),
            fmt="o",
            color=color,
            markerfacecolor="white" if hollow else color,
            markersize=6 if not hollow else 8,
            zorder=2 if hollow else 3,
            label=labels.get(centered),
        )
    axis.set_yticks(range(len(rules)), rules, fontsize=9)
    axis.set_ylim(-0.5, len(rules) - 0.5)


def is_centered(row: dict) -> bool:
    return row["way"]["centering"]


def _evidence(part, rows: list[dict]) -> None:
    """How much evidence centering needs."""
    part.suptitle(
        "how much evidence centering needs (full vocabulary, no truncation)",
        fontsize=11,
        x=0.01,
        ha="left",
    )
    axes = part.subplots(1, 4, sharey=False)
    panels = [(rule, sigma) for rule in ("reinforce", "icepop") for sigma in (0.3, 1.0)]
    for axis, (rule, sigma) in zip(axes, panels, strict=True):
        own = [r for r in rows if r["way"]["rule"] == rule and r["sigma"] == sigma]
        ends = [r for r in own if r["group"] == "rules"]
        bars = {"none": [r for r in ends if not is_centered(r)]}
        bars |= {f"top {r['way']['size']}": [r] for r in own if r["group"] == "head"}
        bars |= {"all 16": [r for r in ends if is_centered(r)]}
        bars |= {f"{r['way']['size']} draw{'s'[:r['way']['size'] - 1]}": [r]
                 for r in own if r["group"] == "draws"}  # fmt: skip
        other = axis.twinx()
        places = range(len(bars))
        for one, name, color, shift in (
            (axis, "drift", PLAIN, -0.2),
            (other, "p_best", "#6aa84f", 0.2),
        ):
            values = [some[0]["sampled"][name] for some in bars.values()]
            one.bar(
                [at + shift for at in places],
                [mean(v) for v in values],
                0.38,
                yerr=_reach(values),
                color=color,
                error_kw={"linewidth": 0.8},
            )
            one.tick_params(axis="y", labelcolor=color, labelsize=8)
            one.set_ylim(0, {"drift": 2.9, "p_best": 1.05}[name])
        axis.set_xticks(list(places), list(bars), rotation=55, fontsize=8)
        axis.set_title(f"{rule}, sigma {sigma:g}: drift KL (red), p(best) (green)", fontsize=9)
