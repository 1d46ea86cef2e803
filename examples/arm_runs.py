"""One arm of `arms.py`: how a model is warmed up, and how it is trained from there."""

import argparse
import copy
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import islice
from statistics import median

import torch
from reverse_text import (
    LOSSES,
    ReverseText,
    Rollouts,
    coarse_weights,
    completion_hidden,
    group_advantages,
    model_and_symbols_of,
    rollout,
    tiny_model_and_symbols,
    tokenizer_of,
)
from torch import Tensor, nn
from transformers import TopKLogitsWarper, TopPLogitsWarper

from rl_loss import LossInputs, fused_lm_head
from rl_loss.integrations.huggingface import logit_options

TOP_P = 0.95


@dataclass(frozen=True)
class Arm:
    about: str
    loss: str = "icepop"
    replay: bool = True  # else log-probabilities over the vocabulary, and no evidence
    centering: bool = True
    top_k: int = 0
    sampler: str = "bfloat16"
    stale: int = 0  # steps that the sampler's weights are behind
    kl_tau: float = 0.0  # of the sampler KL


ARMS = {
    "replay": Arm("(a) replay, exact centering"),
    "top-k": Arm("(b) the same, top_k 2048 added", top_k=2048),
    "no-replay": Arm("(c) no replay", replay=False),
    "stale": Arm("(e) sampler 4 steps behind", stale=4),
    "stale-ipo": Arm("(e) 4 steps behind, ipo", "ipo", stale=4),
    "stale-kl": Arm("(e) 4 steps behind, kl_tau 0.1", stale=4, kl_tau=0.1),
    "fp8": Arm("(d) fp8 sampler", sampler="fp8"),
    "fp8-plain": Arm("(d) fp8 sampler, no centering", sampler="fp8", centering=False),
    "fp8-reinforce": Arm("(d) fp8 sampler, reinforce", "reinforce", sampler="fp8"),
    "fp8-reinforce-plain": Arm(
        "(d) fp8 sampler, reinforce, no centering", "reinforce", centering=False, sampler="fp8"
    ),
    "fp8-kl": Arm("(d) fp8 sampler, kl_tau 0.1", sampler="fp8", kl_tau=0.1),
}
METRICS = {  # of the loss, by the names of the curves
    "mismatch_kl": "mismatch_kl",
    "ratio": "importance_ratio_mean",
    "ratio_max": "importance_ratio_max",
    "ratio_clipped": "log_ratio_clipped",
    "masked": "is_masked",
    "masked_kl": "masked_mismatch_kl",
    "unmasked_kl": "unmasked_mismatch_kl",
    "uncentered": "score_centering/uncentered",
    "tail_mass": "score_centering/tail_mass",
    "head_mass": "score_centering/head_mass",
    "tail_inexact": "score_centering/tail_inexact",
    "mask_tv": "score_centering/mask_tv",
    "correction_l1": "score_centering/correction_l1",
}


def words_of(model: str, count: int) -> list[int]:
    """The first (about the most frequent) tokens that are a word of three letters or more."""
    tokenizer = tokenizer_of(model)
    texts = ((id, tokenizer.decode([id])) for id in range(len(tokenizer)))
    words = (id for id, text in texts if re.fullmatch(" [a-z]{3,}", text))
    return list(islice(words, count))


class Parts:
    """Seconds of steps by part, the device's work included, and the most memory each held."""

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.gib: dict[str, float] = defaultdict(float)
        self.restart()

    def restart(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.start = time.perf_counter()

    def done(self, part: str) -> None:
        if self.cuda:
            torch.cuda.synchronize()
            self.gib[part] = max(self.gib[part], torch.cuda.max_memory_allocated() / 2**30)
        self.seconds[part].append(time.perf_counter() - self.start)
        self.restart()

    def milliseconds(self) -> dict[str, float]:
        """The median step's: some steps compile kernels for a shape that is new."""
        return {part: 1e3 * median(seconds) for part, seconds in self.seconds.items()}


class Trainer:
    """The model of a seed, warmed up; every arm begins where the warm-up ended."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, options.device
        torch.manual_seed(0)  # of a model that is made here
        made = tiny_model_and_symbols() if options.model == "tiny" else None
        self.model, ids = made or model_and_symbols_of(options.model)
        self.model = self.model.to(self.device)
        self.begun = copy.deepcopy(self.model.state_dict())
        self.sampler = copy.deepcopy(self.model)
        self.head_options = logit_options(self.model)
        if options.words and not made:
            ids = [*words_of(options.model, options.words), ids[-1]]
        self.task = ReverseText(torch.tensor(ids[:-1], device=self.device), ids[-1], options.length)

    def hidden(self, prompts: Tensor, completions: Tensor) -> Tensor:
        enabled = self.device.startswith("cuda")
        with torch.autocast(self.device.partition(":")[0], torch.bfloat16, enabled=enabled):
            hidden = completion_hidden(self.model, prompts, completions)
        return hidden.bfloat16() if enabled else hidden

    def head(self, hidden: Tensor, labels: Tensor, support=None, **given):
        weight = self.model.get_output_embeddings().weight.to(hidden.dtype)
        return fused_lm_head(hidden, weight, labels, support, **given, **self.head_options)

    def loss_inputs(self, hidden: Tensor, data: Rollouts, support, advantages: Tensor):
        """What a loss takes, and each token's entropy; `advantages` [B] of the sequences."""
        out = self.head(hidden, data.completions, support, entropy="support")
        inputs = LossInputs.from_head(
            out,
            inference_logprobs=data.logprobs,
            advantages=advantages[:, None].expand_as(data.logprobs),
        )
        return inputs, out.entropy

    def optimizer(self, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.0)

    def sample(self, prompts: Tensor, arm: Arm):
        warpers = [TopKLogitsWarper(arm.top_k)] if arm.top_k else []
        return rollout(self.sampler, prompts, self.task.length, [*warpers, TopPLogitsWarper(TOP_P)])

    def publish(self, sampler: str) -> None:
        """Gives the sampler the present weights."""
        self.sampler.load_state_dict(coarse_weights(self.model, sampler), assign=True)

    def reward(self, arm: Arm) -> float:
        """Of the present weights, in the arm's sampler."""
        self.publish(arm.sampler)
        prompts = self.task.prompts(self.options.evaluated)
        return self.task.rewards(prompts, self.sample(prompts, arm).completions).mean().item()

    def warm_up(self, seed: int) -> dict:
        """Imitates right answers until the reward is near 0.2: what it is, and after how long."""
        torch.manual_seed(seed)
        self.model.load_state_dict(self.begun)
        optimizer = self.optimizer(self.options.warmup_lr)
        reward = self.reward(ARMS["replay"])
        for step in range(1, self.options.warmup_steps + 1):
            prompts = self.task.prompts(self.options.prompts * self.options.samples)
            answers = self.task.answers(prompts)
            loss = -self.head(self.hidden(prompts, answers), answers).logprobs.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 2 == 0:
                reward = self.reward(ARMS["replay"])
                if reward >= self.options.warmup_reward:
                    break
        self.warm = copy.deepcopy(self.model.state_dict())
        return {"seed": seed, "steps": step, "reward": reward}

    def run(self, arm: Arm, seed: int, after: Callable[[int], None] = lambda _: None) -> dict:
        """An arm from the warm-up on: its curves, its times, its last reward.

        `after` is called with the number of steps that are done.
        """
        start = time.perf_counter()
        torch.manual_seed(1000 + seed)
        self.model.load_state_dict(self.warm)
        optimizer = self.optimizer(self.options.lr)
        published = deque([coarse_weights(self.model, arm.sampler)], maxlen=arm.stale + 1)
        curves: dict[str, list[float]] = defaultdict(list)
        parts = Parts(self.device)
        for step in range(1, self.options.steps + 1):
            self.sampler.load_state_dict(published[0], assign=True)
            self.step(arm, optimizer, parts, curves)
            published.append(coarse_weights(self.model, arm.sampler))
            parts.done("publish")
            after(step)
            parts.restart()
        return {
            **asdict(arm),
            "seed": seed,
            "curves": {name: [round(x, 7) for x in values] for name, values in curves.items()},
            "last": self.reward(arm),
            "last_bfloat16": self.reward(replace(arm, sampler="bfloat16")),
            "seconds": round(time.perf_counter() - start, 1),
            "milliseconds": parts.milliseconds(),
            "gib": dict(parts.gib),
        }

    def step(self, arm: Arm, optimizer, parts: Parts, curves: dict) -> None:
        options = self.options
        prompts = self.task.prompts(options.prompts).repeat_interleave(options.samples, 0)
        data = self.sample(prompts, arm)
        parts.done("rollout")
        labels, rows = data.completions, data.support
        curves["support"].append(rows.nnz / len(rows))
        if arm.replay:
            rows.validate(
                labels.flatten().cpu(),
                self.model.config.vocab_size,
                inference_logprobs=data.logprobs.flatten().cpu(),
            )
            support = rows.to(self.device, non_blocking=True)
        else:
            support = None
        rewards = self.task.rewards(prompts, labels)
        advantages = group_advantages(rewards, options.samples)
        parts.done("validate, move")
        hidden = self.hidden(prompts, labels)
        parts.done("trunk")
        inputs, entropy = self.loss_inputs(hidden, data, support, advantages)
        loss = LOSSES[arm.loss](inputs, score_centering=arm.centering, kl_tau=arm.kl_tau)
        parts.done("head, loss")
        optimizer.zero_grad()
        (loss.loss / labels.numel()).backward()
        parts.done("backward")
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()
        parts.done("optimizer")
        curves["reward"].append(rewards.mean().item())
        curves["entropy"].append(entropy.mean().item())
        for name, metric in METRICS.items():
            curves[name].append(loss.metrics[metric].item())
        parts.restart()  # reading the metrics is no part of a step
