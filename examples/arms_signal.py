"""How much of a step's gradient is signal, by sampler and rule, at one policy of `arms.py`.

Each rule's gradient of the whole model on the same batches of rollouts. Over pairs of *different*
batches the inner product of two gradients has the mean |E g|^2, of the signal alone; of one with
itself it also has the noise. A step along g of a given length improves the policy, to first
order and where |g| varies little, by

    E<g, d> / sqrt(E|g|^2),    d the mean gradient of arm (a): bfloat16 sampler, icepop

which is printed as a share of what it is for arm (a) itself. All inner products are over every
61st parameter (a prime: no width is a multiple of it).

    python examples/arms_signal.py --steps 10      # after ten steps of arm (a)
    python examples/arms_signal.py --samplers bfloat16 stale --out signal_stale.json
"""

import json
from pathlib import Path

import torch
from arm_runs import ARMS, Trainer
from arms import chosen, made_with, settings
from drift import LOSSES
from drift_picture import markdown
from reverse_text import coarse_weights, group_advantages
from rich.progress import track
from torch import Tensor

RESULTS = Path(__file__).parent / "results"
STRIDE = 61
BEHIND = 4  # steps of the sampler "stale"
WAYS = {  # of a sampler: rules and whether they are centered; the first of all is arm (a)
    "bfloat16": (("icepop", True), ("reinforce", True)),
    "fp8": tuple((rule, centered) for rule in LOSSES for centered in (True, False)),
    "stale": tuple((rule, True) for rule in LOSSES),
}


def train(trainer: Trainer, samplers: list[str], seed: int) -> dict[str, dict[str, Tensor]]:
    """Trains arm (a); the weights of each sampler after it."""
    weights = {}

    def keep(step: int) -> None:
        if step == trainer.options.steps - BEHIND:
            weights["stale"] = coarse_weights(trainer.model, "bfloat16")

    trainer.run(ARMS["replay"], seed, keep)
    return {
        name: weights[name] if name == "stale" else coarse_weights(trainer.model, name)
        for name in samplers
    }


def gradients(
    trainer: Trainer, samplers: dict[str, dict[str, Tensor]], seed: int
) -> tuple[list[Tensor], dict[str, float]]:
    """Of every way on one batch of prompts, and the rewards of the samplers."""
    options, found, rewards = trainer.options, [], {}
    parameters = list(trainer.model.parameters())
    for sampler, weights in samplers.items():
        torch.manual_seed(seed)
        trainer.sampler.load_state_dict(weights, assign=True)
        prompts = trainer.task.prompts(options.prompts).repeat_interleave(options.samples, 0)
        data = trainer.sample(prompts, ARMS["replay"])
        reward = trainer.task.rewards(prompts, data.completions)
        rewards[sampler] = reward.mean().item()
        advantages = group_advantages(reward, options.samples)
        hidden = trainer.hidden(prompts, data.completions)
        support = data.support.to(trainer.device)
        inputs, _ = trainer.loss_inputs(hidden, data, support, advantages)
        for rule, centered in WAYS[sampler]:
            loss = LOSSES[rule](inputs, score_centering=centered).loss / inputs.loss_mask.sum()
            made = torch.autograd.grad(loss, parameters, retain_graph=True)
            found.append(torch.cat([g.flatten()[::STRIDE].float() for g in made]))
    return found, rewards


def signals(gram: Tensor, beside: list[int]) -> list[dict[str, float]]:
    """Of inner products [ways, batches, ways, batches]: a line a way, against the first.

    `beside[i]` is the way whose progress that of `i` is also divided by: on the same rollouts,
    so that most of their noise is in both.
    """
    batches = gram.shape[1]
    apart = ~torch.eye(batches, dtype=torch.bool)
    signal = gram.permute(0, 2, 1, 3)[:, :, apart].mean(-1)  # [ways, ways]: E g . E g
    size = gram.diagonal(dim1=1, dim2=3).diagonal(dim1=0, dim2=1).mean(0)  # [ways]: E|g|^2
    own, along = signal.diagonal(), signal[:, 0]
    # Too few batches may find less than no signal: then there is no direction, and it says nan.
    lengths = own.where(own > 0, torch.nan).sqrt()
    progress = along / lengths[0] ** 2 * (size[0] / size).sqrt()
    columns = {
        "signal": own / size,
        "cosine": along / lengths / lengths[0],
        "progress": progress,
        "of icepop's": progress / progress[beside],
    }
    return [{name: float(column[i]) for name, column in columns.items()} for i in range(len(gram))]


def jackknife(gram: Tensor, beside: list[int]) -> list[dict[str, dict[str, float]]]:
    """The same, each with its standard error: of what it is without one batch after another."""
    batches = torch.arange(gram.shape[1])
    less = [signals(gram[:, batches != b][..., batches != b], beside) for b in batches]
    lines = []
    for at, line in enumerate(signals(gram, beside)):
        found = {}
        for name, value in line.items():
            others = torch.tensor([one[at][name] for one in less])
            error = ((len(others) - 1) * others.var(correction=0)).sqrt()
            found[name] = {"value": value, "error": float(error)}
        lines.append(found)
    return lines


def printed(table: list[dict]) -> str:
    def text(cell: object) -> str:
        return "{value:.3f} ± {error:.3f}".format(**cell) if isinstance(cell, dict) else str(cell)

    return markdown([{name: text(cell) for name, cell in row.items()} for row in table])


def main() -> None:
    parser = settings(__doc__.split("\n")[0])
    parser.set_defaults(steps=10)
    parser.add_argument("--batches", type=int, default=32)
    parser.add_argument("--samplers", nargs="+", choices=WAYS, default=["bfloat16", "fp8"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=str(RESULTS / "arms_signal.json"))
    options = chosen(parser)
    if options.batches < 4:
        parser.error("--batches must be 4 or more: errors are of leaving out one of them")
    if options.samplers[0] != "bfloat16":
        parser.error("--samplers must begin with bfloat16: all is compared with its icepop")
    if "stale" in options.samplers and options.steps <= BEHIND:
        parser.error(f"--steps must be more than the {BEHIND} that the sampler is behind")
    names = [(sampler, *way) for sampler in options.samplers for way in WAYS[sampler]]
    trainer = Trainer(options)
    warm = trainer.warm_up(options.seed)
    samplers = train(trainer, options.samplers, options.seed)
    made, rewards = [], []
    for batch in track(range(options.batches), description="batches"):
        found, reward = gradients(trainer, samplers, 10_000 + batch)
        made.append(torch.stack(found))
        rewards.append(reward)
    flat = torch.stack(made, 1).flatten(0, 1)
    gram = (flat @ flat.T).double().cpu().unflatten(0, (len(names), -1))
    gram = gram.unflatten(2, (len(names), -1))
    beside = [names.index((sampler, "icepop", True)) for sampler, *_ in names]
    keys = ("sampler", "rule", "centered")
    table = [
        dict(zip(keys, name, strict=True)) | line
        for name, line in zip(names, jackknife(gram, beside), strict=True)
    ]
    mean = {name: sum(r[name] for r in rewards) / len(rewards) for name in samplers}
    print(f"warm-up {warm}, then {options.steps} steps; rewards {mean}\n{printed(table)}")
    used = {name: value for name, value in vars(options).items() if name != "out"}
    used["model"] = Path(options.model).name
    found = {**made_with(options.device), "options": used, "rewards": mean, "rows": table}
    Path(options.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
