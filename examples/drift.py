"""Where a policy drifts when its sampler is a little off: sixteen actions, every rule, on the CPU.

The trainer's policy is `p = softmax(theta)`, its sampler's `q = softmax(theta + b)` with a fixed
b ~ N(0, sigma^2), as quantised weights or other kernels leave it. In one context every action has
the advantage 0.2, as a baseline that is too low gives it: there is nothing to learn, and all
movement is drift. In the other the action that the sampler most underweights pays 0.2 more.

A step goes the way of a training step: `capture_support` records, `fused_lm_head` (the state is
theta, the weight the identity) normalises, a public loss gives the gradient, and theta moves by
plain gradient descent. An arm runs twice: on sampled actions, and (`expected`) on all of them,
weighted by their probabilities, where nothing but the mean of the update moves theta.

    python examples/drift.py                                    # some minutes on one CPU core
    python examples/drift.py --groups head --seeds 2 --steps 100 --out head
"""

import argparse
import json
import math
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from drift_picture import draw, markdown, spread
from rich.progress import track
from torch import Tensor
from transformers import TopPLogitsWarper

from rl_loss import (
    LossInputs,
    RowKind,
    capture_support,
    fused_lm_head,
    icepop_loss,
    ipo_loss,
    policy_loss,
    reinforce_loss,
)

RESULTS = Path(__file__).parent / "results"
GROUPS = ("rules", "controls", "kept set", "head", "draws", "KL")
ACTIONS = 16
ADVANTAGE, BONUS = 0.2, 0.2
TAUS = (0.01, 0.1, 1.0)  # of the KL terms
TOP_P = 0.9  # of the samplers that truncate
WORLDS = ("sampled", "expected")
TITLES = {"drift": "drift KL", "p_best": "p(best)", "q_best": "q(best)"}


def truncated(log_p: Tensor, log_q: Tensor, advantages: Tensor) -> Tensor:
    return (log_p - log_q).exp().clamp(max=2.0)


def ratio(log_p: Tensor, log_q: Tensor, advantages: Tensor) -> Tensor:
    return (log_p - log_q).exp()


LOSSES = {
    "reinforce": reinforce_loss,
    "TIS": partial(policy_loss, rule=truncated),
    "icepop": icepop_loss,
    "ipo": ipo_loss,
    "ratio": partial(policy_loss, rule=ratio),
}


@dataclass(frozen=True)
class Way:
    """What a trainer does with its rows."""

    rule: str
    kind: RowKind = RowKind.REPLAY
    size: int = ACTIONS  # top ids of HEAD rows, draws of DRAWS rows
    centering: bool = True
    kl_tau: float = 0.0  # of the sampler KL
    ref_tau: float = 0.0  # of the KL to where the policy began


@dataclass(frozen=True)
class Arm:
    """A way to train, and the sampler that it meets."""

    group: str
    way: Way
    sigma: float = 0.3
    top_p: float = 1.0
    redrawn: bool = False  # b anew at every step


def arms() -> list[Arm]:
    found = []
    for rule in LOSSES:
        plain, centered = Way(rule, RowKind.NONE, 0, False), Way(rule)
        for sigma in (0.3, 1.0):
            found += [Arm("rules", way, sigma) for way in (plain, centered)]
        found += [Arm("controls", way, 0.0) for way in (plain, centered)]
        found += [Arm("controls", way, redrawn=True) for way in (plain, centered)]
        # Over the vocabulary without evidence and with the kept ids' q; replayed without and with.
        kept = (plain, Way(rule, RowKind.HEAD), Way(rule, centering=False), centered)
        found += [Arm("kept set", way, sigma, TOP_P) for sigma in (0.0, 0.3) for way in kept]
    for rule in ("reinforce", "icepop"):
        for sigma in (0.3, 1.0):
            heads = [Way(rule, RowKind.HEAD, size) for size in (1, 2, 4, 8)]
            found += [Arm("head", way, sigma) for way in heads]
            draws = [Way(rule, RowKind.DRAWS, size) for size in (1, 4, 16)]
            found += [Arm("draws", way, sigma) for way in draws]
            pulled = [Way(rule, centering=c, kl_tau=tau) for tau in TAUS for c in (False, True)]
            pulled += [Way(rule, centering=c, ref_tau=tau) for tau in TAUS for c in (False, True)]
            found += [Arm("KL", way, sigma) for way in pulled]
    return found


class Runs:
    """All arms of one way, seeds and both contexts at once: theta `[arms, seeds, 2, 16]`."""

    def __init__(self, way: Way, arms: list[Arm], b: Tensor, lr: float) -> None:
        self.way, self.arms, self.b, self.lr = way, arms, b, lr
        self.theta = torch.zeros(len(arms), *b.shape, dtype=torch.float64)
        self.head, self.loss = torch.eye(ACTIONS, dtype=torch.float64), LOSSES[way.rule]
        # The action that the sampler most underweights, of those that it keeps.
        logits = self.sampler_logits(self.theta, b)
        self.best = logits.where(logits.isfinite(), torch.inf).argmin(-1, keepdim=True)
        self.advantages = torch.full_like(self.theta, ADVANTAGE)
        self.advantages[:, :, 1].scatter_add_(
            -1, self.best[:, :, 1], torch.full_like(self.theta[:, :, 1, :1], BONUS)
        )

    def sampler_logits(self, theta: Tensor, b: Tensor) -> Tensor:
        """-inf where the sampler excludes an action."""
        rows = []
        for arm, own in zip(self.arms, theta, strict=True):
            logits = (own + arm.sigma * b).flatten(0, 1)
            warped = TopPLogitsWarper(arm.top_p)(None, logits) if arm.top_p < 1 else logits
            rows.append(warped.view_as(own))
        return torch.stack(rows)

    def step(self, noise: Tensor | None, b: Tensor) -> None:
        """`noise [seeds, 2, B]` in [0, 1) samples B actions; None takes all that may be drawn."""
        redrawn = torch.tensor([arm.redrawn for arm in self.arms])[:, None, None, None]
        logits = self.sampler_logits(self.theta, self.b)
        if redrawn.any():
            logits = logits.where(~redrawn, self.sampler_logits(self.theta, b))
        q = logits.softmax(-1)
        context, labels, weights = taken(q, noise, repeats=self.way.kind == RowKind.DRAWS)
        theta = self.theta.requires_grad_()
        sampler = logits.flatten(0, -2)[context]
        rows = capture_support(
            sampler, labels, kind=self.way.kind, top=max(1, self.way.size), draws=self.way.size or 1
        )
        out = fused_lm_head(theta.flatten(0, -2)[context], self.head, labels, rows.to_support())
        inputs = LossInputs.from_head(
            out,
            inference_logprobs=sampler.log_softmax(-1).gather(1, labels[:, None])[:, 0],
            advantages=self.advantages.flatten(0, -2)[context, labels],
            loss_weights=weights,
            ref_logprobs=torch.full_like(weights, -math.log(ACTIONS)),
        )
        way = self.way
        terms = {"kl_tau": way.kl_tau, "ref_tau": way.ref_tau}
        loss = self.loss(inputs, score_centering=way.centering, **terms).loss
        (gradient,) = torch.autograd.grad(loss, theta)
        self.theta = theta.detach() - self.lr * gradient

    def ends(self) -> dict[Arm, dict[str, list[float]]]:
        """A number a seed: how far p has gone where nothing is to be learnt, and p and q of the
        best action where there is one."""
        p, q = self.theta.softmax(-1), self.sampler_logits(self.theta, self.b).softmax(-1)
        ends = {
            "drift": (p * (p * ACTIONS).log()).sum(-1)[:, :, 0],  # KL(p || start)
            "p_best": p.gather(-1, self.best)[:, :, 1, 0],
            "q_best": q.gather(-1, self.best)[:, :, 1, 0],
        }
        return {
            arm: {name: [round(x, 6) for x in values[i].tolist()] for name, values in ends.items()}
            for i, arm in enumerate(self.arms)
        }


def taken(q: Tensor, noise: Tensor | None, repeats: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of q `[..., 16]` the rows of a batch: their context, their action, and what each weighs.

    Equal actions of a context are one row, unless `repeats`.
    """
    weights = q
    if noise is not None:
        edges = q.cumsum(-1) / q.sum(-1, keepdim=True)
        noise = noise.expand(len(q), -1, -1, -1).contiguous()
        drawn = torch.searchsorted(edges, noise, right=True)
        share = torch.full(drawn.shape, 1 / drawn.shape[-1], dtype=q.dtype)
        if repeats:
            context = torch.arange(q[..., 0].numel()).repeat_interleave(drawn.shape[-1])
            return context, drawn.flatten(), share.flatten()
        weights = torch.zeros_like(q).scatter_add(-1, drawn, share)
    context, action = weights.flatten(0, -2).nonzero(as_tuple=True)
    return context, action, weights.flatten(0, -2)[context, action]


def run(options: argparse.Namespace) -> tuple[list[dict], Tensor]:
    """Of every arm its setting, and under `sampled` and `expected` its ends, a number a seed; and
    b at sigma 1, `[seeds, 2, 16]`."""
    by_way: dict[Way, list[Arm]] = defaultdict(list)
    for arm in arms():
        if arm.group in options.groups:
            by_way[arm.way].append(arm)
    generators = [torch.Generator().manual_seed(seed) for seed in range(options.seeds)]

    def drawn(draw, *shape: int) -> Tensor:  # the same for every arm, and for any number of seeds
        return torch.stack([draw(shape, generator=g, dtype=torch.float64) for g in generators])

    b = drawn(torch.randn, 2, ACTIONS)
    runs = [
        (world, Runs(way, some, b, options.lr))
        for way, some in by_way.items()
        for world in WORLDS
        if way.kind != RowKind.DRAWS or world == "sampled"
    ]
    torch.manual_seed(0)  # of the draws of DRAWS rows
    for _ in track(range(options.steps), description="steps"):
        noise, other = drawn(torch.rand, 2, options.batch), drawn(torch.randn, 2, ACTIONS)
        for world, one in runs:
            one.step(noise if world == "sampled" else None, other)
    found: dict[Arm, dict] = {arm: {**asdict(arm), "kind": arm.way.kind.name} for arm in arms()}
    for world, one in runs:
        for arm, ends in one.ends().items():
            found[arm][world] = ends
    return [row for row in found.values() if "sampled" in row], b


def samplers(b: Tensor) -> list[dict[str, str]]:
    """How far they are from the policy that all begin with, which is uniform."""
    lines = []
    for sigma in (0.3, 1.0):
        log_q = (sigma * b).log_softmax(-1)
        kl = (log_q.exp() * (log_q + math.log(ACTIONS))).sum(-1)
        ratios = (log_q[:, 1].amin(-1) + math.log(ACTIONS)).neg().exp()
        cells = {"sampler at first": f"sigma {sigma:g}", "mismatch_kl": f"{kl.mean():.3f}"}
        cells["p / q of the best action"] = f"{ratios.min():.1f} to {ratios.max():.1f}"
        lines.append(cells)
    return lines


def line(row: dict) -> dict[str, str]:
    """A line of the table."""
    way, replay = row["way"], row["kind"] == "REPLAY"
    kind = {"NONE": "over V", "HEAD": f"HEAD {way['size']}", "DRAWS": f"DRAWS {way['size']}"}
    if row["group"] == "kept set" and row["kind"] == "HEAD":
        kind["HEAD"] = "over V, the kept ids' q"
    sampler = f"sigma {row['sigma']:g}" + (", b anew each step" if row["redrawn"] else "")
    cells = {
        "rule": way["rule"],
        "rows": "replayed" if replay and row["top_p"] < 1 else kind.get(row["kind"], "all ids"),
        "centered": "yes" if way["centering"] else "no",
        "kl_tau, ref_tau": f"{way['kl_tau']:g}, {way['ref_tau']:g}",
        "sampler": sampler + (f", top_p {row['top_p']:g}" if row["top_p"] < 1 else ""),
    }
    for world in WORLDS:
        for name, title in TITLES.items():
            values = row.get(world, {}).get(name, [])
            cells[f"{title}, {world}"] = spread(values)
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--groups", nargs="+", choices=GROUPS, default=list(GROUPS), help="which arms")
    add("--seeds", type=int, default=6)
    add("--steps", type=int, default=400)
    add("--batch", type=int, default=256, help="actions sampled a step in each context")
    add("--lr", type=float, default=1.0)
    add("--out", default=str(RESULTS / "drift"), help="where .json and .png go")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the tensors are small
    start = time.process_time()
    rows, b = run(options)
    seconds = time.process_time() - start
    for group in options.groups:
        print(f"\n{group}\n{markdown([line(row) for row in rows if row['group'] == group])}")
    print(f"\n{markdown(samplers(b))}")
    print(f"\n{options.seeds} seeds, mean ± standard deviation; {seconds:.0f} s of one core")
    settings = {name: getattr(options, name) for name in ("seeds", "steps", "batch", "lr")}
    made = {"torch": torch.__version__, "seconds": round(seconds), **settings, "arms": rows}
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(made) + "\n")
    print(f"written: {out.with_suffix('.json')}")
    if set(options.groups) == set(GROUPS):
        draw(made, out.with_suffix(".png"))
        print(f"drawn: {out.with_suffix('.png')}")


if __name__ == "__main__":
    main()
