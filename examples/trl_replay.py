"""TRL's GRPO on a tiny language model with a truncated sampler, replayed; on the CPU, offline.

The task: read a letter and write it, over and over. A model that has never seen anything samples
with top-p, and TRL's trainer learns from that: `ReplayGRPOTrainer` takes every log-probability
over what the sampler kept of that token, so that the ratio to the sampler is 1 where nothing has
changed. `--loss trl` is TRL's own loss, the others are those of `rl_loss`, with score centering.

    python examples/trl_replay.py
    python examples/trl_replay.py --loss trl --iterations 2
"""

import argparse
import string
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig

from rl_loss.integrations.trl import ReplayGRPOTrainer

LETTERS = string.ascii_lowercase[:16]


def letters_tokenizer() -> PreTrainedTokenizerFast:
    """One token a letter."""
    words = {word: i for i, word in enumerate(["<pad>", "<end>", *LETTERS])}
    letters = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    letters.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )


def tiny_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        initializer_range=0.08,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Qwen3ForCausalLM(config)


def echoed(prompts: list[str], completions: list[str], length: int, **_) -> list[float]:
    """The share of `length` letters that are the prompt's."""
    pairs = zip(prompts, completions, strict=True)
    return [text.split().count(prompt) / length for prompt, text in pairs]


class Lines(TrainerCallback):
    """A line a step, instead of all that TRL logs."""

    def on_log(self, args, state, control, logs=None, **_):
        if "reward" in logs:
            names = ("reward", "entropy", "importance_ratio_mean", "score_centering/mask_tv")
            shown = {name: logs[name] for name in names if name in logs}
            line = "  ".join(f"{name} {value:.3f}" for name, value in shown.items())
            print(f"step {state.global_step:3d}  {line}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--loss", choices=("icepop", "ipo", "reinforce", "trl"), default="icepop")
    add("--top-p", type=float, default=0.9)
    add("--top-k", type=int, default=0, help="0: none")
    add("--steps", type=int, default=100)
    add("--iterations", type=int, default=1, help="steps on each batch of completions")
    add("--length", type=int, default=8, help="letters to write")
    add("--lr", type=float, default=1e-3)
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = letters_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=64,
            num_generations=8,
            num_iterations=args.iterations,
            max_completion_length=args.length,
            max_steps=args.steps,
            learning_rate=args.lr,
            lr_scheduler_type="constant",
            top_p=args.top_p,
            top_k=args.top_k,
            seed=args.seed,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
        )

        def reward(prompts, completions, **_):
            return echoed(prompts, completions, args.length)

        trainer = ReplayGRPOTrainer(
            tiny_model(tokenizer),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": list(LETTERS)}),
            processing_class=tokenizer,
            loss=None if args.loss == "trl" else args.loss,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Lines())
        trainer.train()
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    for when, some in {"at first": rewards[:5], "at the end": rewards[-5:]}.items():
        print(f"reward {when}: {sum(some) / len(some):.3f}")


if __name__ == "__main__":
    main()
