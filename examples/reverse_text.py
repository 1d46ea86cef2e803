"""Reinforcement learning of a tiny language model on its own sampler's supports.

The task: read `>abcde>` and write `edcba`. A short supervised warm-up on poor answers (one symbol
in four is right) teaches a little of it. Then a separate copy of the model samples completions
with coarser weights and a truncated distribution (top-p, top-k), as a rollout engine does, and the
trainer learns from them. `rl_loss` makes that exact: the sampler records what it kept
(`capture_support`), the trainer normalises over the same set (`fused_lm_head`) and takes the
expected score off every token's update (`icepop_loss`).

    python examples/reverse_text.py
    python examples/reverse_text.py --sampler int8 --stale 4 --no-centering --out stale.png

`arms.py` takes a real model, and compares ways to train it over seeds.
"""

import argparse
import copy
import inspect
import string
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import matplotlib
import torch
from rich.progress import Progress
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rl_loss import (
    LossInputs,
    RowKind,
    Support,
    capture_support,
    fused_lm_head,
    icepop_loss,
    ipo_loss,
    reinforce_loss,
)
from rl_loss.integrations.huggingface import logit_options

matplotlib.use("Agg")
from matplotlib import pyplot

LOSSES = {"icepop": icepop_loss, "ipo": ipo_loss, "reinforce": reinforce_loss}
LARGEST = {"int8": 127, "fp8": 448}  # numbers of the sampler's weights
CURVES = {  # what a step prints and the picture shows: the name of the loss's metric
    "mismatch_kl": "mismatch_kl",
    "is_masked": "is_masked",
    "uncentered": "score_centering/uncentered",
    "support": "score_centering/support_size",
    "tail_mass": "score_centering/tail_mass",
    "mask_tv": "score_centering/mask_tv",
}


# --- the task ---


@dataclass
class ReverseText:
    """Strings of `length` random symbols between separators, and the same symbols backwards.

    The first separator is there to be attended to: large models rest their attention on a text's
    first token, whatever it is, and cannot copy it.
    """

    symbols: Tensor  # [S] token ids
    separator: int
    length: int

    def prompts(self, count: int) -> Tensor:  # [count, length + 2]
        at = torch.randint(len(self.symbols), (count, self.length)).to(self.symbols.device)
        return nn.functional.pad(self.symbols[at], (1, 1), value=self.separator)

    def answers(self, prompts: Tensor) -> Tensor:  # [B, length]
        return prompts[:, 1:-1].flip(1)

    def rewards(self, prompts: Tensor, completions: Tensor) -> Tensor:  # [B]
        return (completions == self.answers(prompts)).float().mean(1)


def tiny_model_and_symbols() -> tuple[nn.Module, list[int]]:
    characters = string.ascii_lowercase + ">"
    config = Qwen3Config(
        vocab_size=len(characters),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        initializer_range=0.08,
    )
    return Qwen3ForCausalLM(config), list(range(len(characters)))


def folder_of(model: str) -> tuple[Path, dict[str, str]]:
    """The folder of a model, and what its `from_pretrained` has to be told."""
    path = Path(model)
    return (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})


@cache
def tokenizer_of(model: str):
    path, given = folder_of(model)
    return AutoTokenizer.from_pretrained(path, **given)


def model_and_symbols_of(directory: str) -> tuple[nn.Module, list[int]]:
    """Any causal language model on disk, a GGUF file too; letters where its tokenizer has them."""
    path, given = folder_of(directory)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **given)
    try:
        tokenizer = tokenizer_of(directory)
        characters = string.ascii_lowercase + ">"
        encoded = [tokenizer.encode(c, add_special_tokens=False) for c in characters]
        found = dict.fromkeys(ids[0] for ids in encoded if len(ids) == 1)
        symbols = [id for id in found if id != tokenizer.unk_token_id]
    except (OSError, ValueError):
        symbols = []
    return model, symbols if len(symbols) > 16 else list(range(min(27, model.config.vocab_size)))


# --- the sampler: a copy of the model with coarser weights, some steps behind ---


def coarse_weights(model: nn.Module, sampler: str) -> dict[str, Tensor]:
    """The model's weights as the sampler sees them: bfloat16, those of Linear layers but the head
    rounded to int8 or fp8 (e4m3) if asked, with a scale a row."""
    weights = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor.clone()
        for name, tensor in model.state_dict().items()
    }
    if sampler in LARGEST:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
                weight = module.weight.detach()
                scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-8) / LARGEST[sampler]
                coarse = weight / scale
                coarse = coarse.round() if sampler == "int8" else coarse.to(torch.float8_e4m3fn)
                weights[f"{name}.weight"] = (coarse.float() * scale).bfloat16()
    return weights


@dataclass
class Rollouts:
    completions: Tensor  # [B, L] token ids
    logprobs: Tensor  # [B, L] log q of each token
    support: Support  # B * L rows, on the host: what the sampler kept at each token


@torch.no_grad()
def rollout(sampler: nn.Module, prompts: Tensor, length: int, warpers: list) -> Rollouts:
    """Sample a completion of each prompt and record every token's kept set."""
    # transformers renames this argument; the model knows by which name it goes.
    known = inspect.signature(sampler.forward).parameters
    cache_name = "cache" if "cache" in known else "past_key_values"
    tokens, cache, completions, logprobs, supports = prompts, None, [], [], []
    for _ in range(length):
        output = sampler(tokens, use_cache=True, logits_to_keep=1, **{cache_name: cache})
        cache, logits = output[cache_name], output.logits[:, -1].float()
        for warper in warpers:
            logits = warper(None, logits)  # excluded tokens become -inf
        sampled = logits.softmax(-1).multinomial(1)[:, 0]
        rows = capture_support(logits, sampled, kind=RowKind.REPLAY)
        completions.append(sampled)
        logprobs.append(rows.sampled_logprobs)
        supports.append(rows.to_support().to("cpu"))
        tokens = sampled[:, None]
    # The rows were recorded token by token; the trainer wants them sequence by sequence.
    by_sequence = torch.arange(length * len(prompts)).view(length, -1).T.flatten()
    support = Support.cat(supports).select(by_sequence)
    return Rollouts(torch.stack(completions, 1), torch.stack(logprobs, 1), support)


# --- the trainer ---


def completion_hidden(model: nn.Module, prompts: Tensor, completions: Tensor) -> Tensor:
    """The hidden states [B, L, H] that predict the completion's tokens: one position before."""
    tokens = torch.cat([prompts, completions[:, :-1]], 1)
    hidden = model.base_model(tokens, use_cache=False).last_hidden_state
    return hidden[:, prompts.shape[1] - 1 :]


def warm_up(model: nn.Module, head, task: ReverseText, steps: Iterable) -> None:
    """Imitate a poor teacher, whose symbols are right one time in four and else random."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    for _ in steps:
        prompts = task.prompts(256)
        right = (torch.rand(len(prompts), task.length) < 0.25).to(prompts.device)
        taught = torch.where(right, task.answers(prompts), task.answers(task.prompts(len(prompts))))
        logprobs = head(completion_hidden(model, prompts, taught), labels=taught).logprobs
        optimizer.zero_grad()
        (-logprobs.mean()).backward()
        optimizer.step()


def group_advantages(rewards: Tensor, samples: int) -> Tensor:
    """Rewards [B] relative to the other samples of the same prompt."""
    groups = rewards.view(-1, samples)
    spread = groups.std(1, keepdim=True) + 1e-4
    return ((groups - groups.mean(1, keepdim=True)) / spread).flatten()


def train(args: argparse.Namespace, bar: Progress) -> dict[str, list[float]]:
    torch.manual_seed(args.seed)
    model, ids = model_and_symbols_of(args.model) if args.model else tiny_model_and_symbols()
    model = model.to(args.device)
    task = ReverseText(torch.tensor(ids[:-1], device=args.device), ids[-1], args.length)
    weight = model.get_output_embeddings().weight
    head = partial(fused_lm_head, weight=weight, **logit_options(model))
    loss = partial(LOSSES[args.loss], score_centering=args.centering)
    warpers = [TopKLogitsWarper(args.top_k)] if args.top_k else []
    warpers += [TopPLogitsWarper(args.top_p)] if args.top_p < 1 else []
    sampler = copy.deepcopy(model)

    def report_reward(when: str) -> None:
        sampler.load_state_dict(coarse_weights(model, args.sampler), assign=True)
        prompts = task.prompts(512)
        completions = rollout(sampler, prompts, task.length, warpers).completions
        bar.console.print(f"reward {when}: {task.rewards(prompts, completions).mean():.3f}")

    warm_up(model, head, task, bar.track(range(args.warmup_steps), description="warm-up"))
    report_reward("after the warm-up")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    published = deque([coarse_weights(model, args.sampler)], maxlen=args.stale + 1)
    curves = {name: [] for name in ("reward", *CURVES)}
    for step in bar.track(range(args.steps), description="RL"):
        sampler.load_state_dict(published[0], assign=True)  # the oldest: `--stale` steps behind
        prompts = task.prompts(args.prompts).repeat_interleave(args.samples, 0)
        data = rollout(sampler, prompts, task.length, warpers)
        rewards = task.rewards(prompts, data.completions)
        advantages = group_advantages(rewards, args.samples)

        hidden = completion_hidden(model, prompts, data.completions)
        support = data.support.to(args.device)
        output = head(hidden, labels=data.completions, support=support)
        inputs = LossInputs.from_head(
            output,
            inference_logprobs=data.logprobs,
            advantages=advantages[:, None].expand_as(data.logprobs),
        )
        out = loss(inputs)
        optimizer.zero_grad()
        (out.loss / data.completions.numel()).backward()  # every completion token counts
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        published.append(coarse_weights(model, args.sampler))

        curves["reward"].append(rewards.mean().item())
        for name, metric in CURVES.items():
            curves[name].append(out.metrics[metric].item())
        line = "  ".join(f"{name} {values[-1]:.3g}" for name, values in curves.items())
        bar.console.print(f"step {step:3d}  {line}", highlight=False, soft_wrap=True)
    report_reward("at the end")
    return curves


def draw(curves: dict[str, list[float]], args: argparse.Namespace) -> None:
    figure, axes = pyplot.subplots(2, 4, figsize=(16, 6), layout="constrained")
    for axis, (name, values) in zip(axes.flat, curves.items(), strict=False):
        axis.plot(values)
        axis.set(title=name, xlabel="step")
    axes.flat[-1].set_axis_off()
    shown = ("loss", "centering", "top_p", "top_k", "sampler", "stale", "seed")
    figure.suptitle("  ".join(f"{name} {getattr(args, name)}" for name in shown))
    figure.savefig(args.out, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--loss", choices=LOSSES, default="icepop")
    add("--no-centering", dest="centering", action="store_false", help="no score centering")
    add("--top-p", type=float, default=0.95)
    add("--top-k", type=int, default=0, help="0: none")
    add("--sampler", choices=("bfloat16", *LARGEST), default="bfloat16", help="its weights")
    add("--stale", type=int, default=0, help="steps that the sampler's weights are behind")
    add("--model", metavar="DIR", help="a Hugging Face causal LM on disk; else a tiny Qwen3")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seed", type=int, default=0)
    add("--steps", type=int, default=80)
    add("--length", type=int, default=5, help="symbols to reverse")
    add("--prompts", type=int, default=32, help="prompts a step")
    add("--samples", type=int, default=8, help="samples a prompt")
    add("--lr", type=float, default=2e-3)
    add("--warmup-steps", type=int, default=400)
    add("--out", default="reverse_text.png", help="the picture of the curves")
    args = parser.parse_args()
    with Progress() as bar:
        curves = train(args, bar)
    draw(curves, args)
    print(f"curves: {args.out}")


if __name__ == "__main__":
    main()
