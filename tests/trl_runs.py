"""Runs of TRL's trainer on tiny models, watched, and the same steps computed plainly."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from factory import TINY_MODEL
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig
from trl.trainer import grpo_trainer as grpo_trainer

from rl_loss import RowKind
from rl_loss.integrations.trl import ReplayGRPOTrainer

V, PAD, EOS = (TINY_MODEL[name] for name in ("vocab_size", "pad_token_id", "eos_token_id"))
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} "
    "{% for call in m.tool_calls or [] %}{{ call.function.name }} "
    "{% for key, value in call.function.arguments.items() %}{{ key }} {{ value }} {% endfor %}"
    "{% endfor %}</s> {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word: w3 is token 3, and any other word is an unknown one."""
    words = {f"w{i}": i for i in range(V)}
    words = {"<pad>": PAD, "</s>": EOS} | {w: i for w, i in words.items() if i not in (PAD, EOS)}
    vocabulary = Tokenizer(models.WordLevel(words, unk_token="w3"))
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, pad_token="<pad>", eos_token="</s>", unk_token="w3"
    )
    made.padding_side, made.chat_template = "left", TEMPLATE
    return made


FLOOR = 16 * torch.finfo(torch.float32).eps  # of a gradient's largest, beside twice torch's own
ENDS = [EOS, *range(20, 40)]  # that completions may be of all lengths


def tiny_model(
    config: Any = Qwen3Config, kind: Any = Qwen3ForCausalLM, *, ends: Any = ENDS, **options: Any
) -> Any:
    torch.manual_seed(0)
    model = kind(config(**(TINY_MODEL | {"initializer_range": 0.2} | options)))
    model.generation_config.eos_token_id = ends
    return model


def reward(completions: list, **_: Any) -> list[float]:
    """Something that tells completions apart."""
    return [float(sum(map(ord, str(text))) % 7) for text in completions]


def prompts(n: int = 16) -> Dataset:
    """Of one to three words."""
    return Dataset.from_dict(
        {"prompt": [" ".join(["w5"] * (i % 3) + [f"w{i + 6}"]) for i in range(n)]}
    )


@dataclass
class Step:
    """An optimizer step: the weights before it, its gradients, and what its micro-batches had."""

    weights: dict[str, Tensor]
    grads: dict[str, Tensor]
    micro: list[dict[str, Any]]


@dataclass
class Watch(TrainerCallback):
    """What a run did."""

    steps: list[Step] = field(default_factory=list)
    micro: list[dict[str, Any]] = field(default_factory=list)  # of the step under way

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        weights = {name: one.detach().clone() for name, one in model.state_dict().items()}
        grads = {
            name: one.grad.clone() for name, one in model.named_parameters() if one.requires_grad
        }
        self.steps.append(Step(weights, grads, self.micro))
        self.micro = []


class WatchedTrainer(ReplayGRPOTrainer):
    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        self.watch.micro.append(
            {
                **inputs,
                "loss": loss.detach(),
                "training": self.model.training,
                "checkpointing": any(
                    getattr(module, "gradient_checkpointing", False) for module in model.modules()
                ),
            }
        )
        return loss


def trainer(folder: Any, model: Any = None, *, kind: Any = WatchedTrainer, **options: Any) -> Any:
    """A trainer of four completions a step and two a prompt; `options` its own or its config's."""
    own = {
        "reward_funcs": reward,
        "train_dataset": prompts(),
        "processing_class": tokenizer(),
    }
    names = ("loss", "recorder", "peft_config", "rollout_func", "tools", "eval_dataset", *own)
    own |= {name: options.pop(name) for name in names if name in options}
    config = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 7,
        "max_steps": 1,
        "learning_rate": 0.02,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,  # gradients as they are
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "top_k": 8,
        **options,
    }
    watch = Watch()
    made = kind(tiny_model() if model is None else model, args=GRPOConfig(**config), **own)
    made.watch = watch
    made.add_callback(watch)
    return made


# --- the same, plainly ---


@dataclass
class Kept:
    """Log-probabilities over the kept sets, of every position of the completions `[B, C]`."""

    all: Tensor  # [B, C, V], -inf outside
    token: Tensor  # [B, C]
    mask: Tensor  # [B, C] bool


def kept_logprobs(model: Any, inputs: dict[str, Any], temperature: float = 1.0) -> Kept:
    """From the model's own logits, masked to the kept sets of the micro-batch's supports."""
    completions, mask = inputs["completion_ids"], inputs["completion_mask"]
    ids = torch.cat([inputs["prompt_ids"], completions], 1)
    attention = torch.cat([inputs["prompt_mask"], mask], 1)
    options = (
        {"output_router_logits": True} if hasattr(model.config, "router_aux_loss_coef") else {}
    )
    out = model(input_ids=ids, attention_mask=attention, use_cache=False, **options)
    logits = out.logits[:, -completions.shape[1] - 1 : -1] / temperature
    keep = torch.ones_like(logits, dtype=torch.bool)
    for i, support in enumerate(inputs["supports"]):
        for row in range(len(support)):
            if support.kind[row] == RowKind.REPLAY:
                keep[i, row] = False
                keep[i, row, support[row : row + 1].ids.long()] = True
    logprobs = logits.masked_fill(~keep, -torch.inf).log_softmax(-1)
    mask = (mask * inputs.get("tool_mask", 1)).bool()
    token = logprobs.gather(-1, completions[..., None])[..., 0].masked_fill(~mask, 0.0)
    kept = Kept(logprobs, token, mask)
    kept.aux_loss = getattr(out, "aux_loss", None)
    return kept


def sampler_probabilities(inputs: dict[str, Any], like: Tensor) -> Tensor:
    """q `[B, C, V]` of the micro-batch's supports, 0 where they say nothing."""
    q = torch.zeros_like(like)
    for i, support in enumerate(inputs["supports"]):
        for row in range(len(support)):
            one = support[row : row + 1]
            q[i, row, one.ids.long()] = one.sampler_logprobs.exp().to(q.dtype)
    return q


def trls_loss(kept: Kept, inputs: dict[str, Any], ref: Tensor | None = None, beta=0.0) -> Tensor:
    """The sum over tokens of TRL's default loss."""
    old = inputs.get("old_per_token_logps")
    old = kept.token.detach() if old is None else old.to(kept.token.dtype)
    advantages = inputs["advantages"][:, None].to(kept.token.dtype)
    ratio = (kept.token - old).exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    if "importance_sampling_ratio" in inputs:
        loss = loss * inputs["importance_sampling_ratio"]
    if beta:
        x = ref - kept.token
        loss = loss + beta * (x.exp() - x - 1) * ratio
    return (loss * kept.mask).sum()


def our_loss(
    name: str, kept: Kept, inputs: dict[str, Any], ref: Tensor | None = None, beta: float = 0.0
) -> Tensor:
    """What has the gradient of the sum over tokens of the loss of that name, centered."""
    q = sampler_probabilities(inputs, kept.all)
    log_q = inputs["sampling_per_token_logps"].to(kept.token.dtype)
    advantages = inputs["advantages"][:, None].to(kept.token.dtype)
    logprobs = kept.all.masked_fill(q == 0, 0.0)

    def weight(log_p: Tensor, q: Tensor) -> Tensor:
        p = log_p.detach().exp()
        if name == "reinforce":
            return torch.ones_like(p)
        ratio = p / q
        keeps = (p - q).abs() <= 0.3 if name == "ipo" else (ratio >= 0.2) & (ratio <= 5.0)
        return torch.where(keeps, ratio, 0.0)

    expected = torch.where(q > 0, q * weight(logprobs, q.clamp(min=1e-30)), 0.0) * logprobs
    score = weight(kept.token, log_q.exp()) * kept.token - expected.sum(-1)
    loss = -advantages * score
    if beta:
        x = ref - kept.token
        loss = loss + beta * (x.exp() - x - 1)
    return (loss * kept.mask).sum()


def plain(step, make, loss, dtype, *, tokens=None, temperature=1.0, beta=0.0, ref=None, aux=0.0):
    """The gradients of an optimizer step, from the logits of an unpatched model."""
    model = make().to(dtype).train()
    model.load_state_dict(step.weights)
    of_one = trls_loss if loss is None else partial(our_loss, loss)
    tokens = tokens or sum(sampled_tokens(one) for one in step.micro)
    total = torch.zeros((), dtype=dtype)
    for inputs in step.micro:
        kept = kept_logprobs(model, inputs, temperature)
        other = None
        if beta:
            with torch.no_grad():
                other = ref(model, dtype, inputs).token
        total = total + of_one(kept, inputs, other, beta) / tokens
        if aux:
            total = total + aux * kept.aux_loss / len(step.micro)
    total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def sampled_tokens(inputs):
    return int((inputs["completion_mask"] * inputs.get("tool_mask", 1)).sum())


def assert_plain(step, make, loss, **options):
    wide, narrow = (plain(step, make, loss, t, **options) for t in (torch.float64, torch.float32))
    largest = max(float(grad.abs().max()) for grad in wide.values())
    assert step.grads.keys() == wide.keys()
    assert largest > 1e-4
    for name, exact in wide.items():
        allowed = 2 * float((narrow[name] - exact).abs().max()) + FLOOR * largest
        assert float((step.grads[name] - exact).abs().max()) <= allowed, name
