"""The loop of `reverse_text.py` on several ranks, by FSDP2 or with the head split by vocabulary.

Under FSDP2 the ranks share the weights out, and each learns from its part of the batch. With
`--tp 2` two ranks have half of the vocabulary each, and learn from the same rows; on four ranks
`--tp 2` is both. The weights are gathered once a step for the sampler. All ranks draw with one
seed, so that they sample the same completions, and train in float64, so that the order in which
ranks are added up does not show: every way of running it prints the curve of one process.

    python examples/fsdp_loop.py
    torchrun --nproc-per-node 2 examples/fsdp_loop.py
    torchrun --nproc-per-node 2 examples/fsdp_loop.py --tp 2
"""

import argparse
import copy
import os
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from reverse_text import (
    CURVES,
    ReverseText,
    completion_hidden,
    group_advantages,
    rollout,
    tiny_model_and_symbols,
    warm_up,
)
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import TopPLogitsWarper

from rl_loss import (
    FusedLMHead,
    LossInputs,
    global_token_count,
    icepop_loss,
    reduce_metrics,
)

# --- the ranks ---


def start_ranks(tp: int) -> DeviceMesh | None:
    """The ranks of `torchrun`, [parts of the batch, parts of the vocabulary]; None: no ranks."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks % tp:
        raise ValueError(f"--tp must divide the number of ranks, {ranks}, got {tp}")
    on_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if on_gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        torch.set_default_device("cuda")
    else:
        torch.set_num_threads(1)  # the matrices are small
    if not dist.is_torchelastic_launched():
        return None
    dist.init_process_group("nccl" if on_gpus else "gloo")
    shape, names = (ranks // tp, tp), ("batch", "vocabulary")
    return init_device_mesh("cuda" if on_gpus else "cpu", shape, mesh_dim_names=names)


def shard(model: nn.Module, mesh: DeviceMesh | None) -> Callable:
    """Shards the model in place; the head, as it is to be called."""
    head = model.lm_head = FusedLMHead.from_linear(model.lm_head)
    options = {}
    if mesh is not None and mesh["vocabulary"].size() > 1:
        rows = distribute_tensor(head.weight.detach(), mesh["vocabulary"], [Shard(0)])
        head.weight = nn.Parameter(rows)
        options["process_group"] = mesh["vocabulary"].get_group()
    if mesh is not None and mesh["batch"].size() > 1:
        # The trunk and the head are called one after the other: each is a root of its own.
        for module in (*model.base_model.layers, model.base_model, head):
            fully_shard(module, mesh=mesh["batch"])
    return partial(head, **options)


def whole(tensor: Tensor) -> Tensor:
    """All of what each rank may hold a part of: every rank calls."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_gradients(parts: list[nn.Module], limit: float) -> None:
    """`clip_grad_norm_` of modules that are not sharded alike."""
    parameters = [list(part.parameters()) for part in parts]
    norms = [nn.utils.get_total_norm([one.grad for one in own]) for own in parameters]
    norm = torch.stack([whole(norm) for norm in norms]).norm()
    for own in parameters:
        nn.utils.clip_grads_with_norm_(own, limit, norm)


# --- the loop ---


def train(args: argparse.Namespace, mesh: DeviceMesh | None, bar: Progress) -> None:
    torch.manual_seed(args.seed)
    model, ids = tiny_model_and_symbols()
    sampler = copy.deepcopy(model)
    head = shard(model.double(), mesh)
    task = ReverseText(torch.tensor(ids[:-1]), ids[-1], args.length)
    warpers = [TopPLogitsWarper(0.95)]
    group, part, parts = None, 0, 1  # of the batch
    if mesh is not None:
        batch = mesh["batch"]
        group, part, parts = batch.get_group(), batch.get_local_rank(), batch.size()

    def publish() -> None:
        weights = {name: whole(tensor.bfloat16()) for name, tensor in model.state_dict().items()}
        sampler.load_state_dict(weights, assign=True)

    def report_reward(when: str) -> None:
        prompts = task.prompts(512)
        completions = rollout(sampler, prompts, task.length, warpers).completions
        bar.console.print(f"reward {when}: {task.rewards(prompts, completions).mean():.3f}")

    # Here every rank learns from the whole batch: the mean of its gradients is each rank's.
    warm_up(model, head, task, bar.track(range(args.warmup_steps), description="warm-up"))
    publish()
    report_reward("after the warm-up")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    for step in bar.track(range(args.steps), description="RL"):
        prompts = task.prompts(args.prompts).repeat_interleave(args.samples, 0)
        data = rollout(sampler, prompts, task.length, warpers)
        rewards = task.rewards(prompts, data.completions)
        advantages = group_advantages(rewards, args.samples)[:, None].expand_as(data.logprobs)

        first, last = (len(prompts) * i // parts for i in (part, part + 1))
        own, rows = slice(first, last), slice(first * task.length, last * task.length)
        labels = data.completions[own]
        hidden = completion_hidden(model, prompts[own], labels)
        output = head(hidden, labels=labels, support=data.support[rows])
        inputs = LossInputs.from_head(
            output,
            inference_logprobs=data.logprobs[own],
            advantages=advantages[own],
        )
        out = icepop_loss(inputs)
        tokens = global_token_count(output.active, group)
        optimizer.zero_grad()
        (out.loss / tokens * parts).backward()  # FSDP2 takes the mean over its ranks
        clip_gradients([model.base_model, model.lm_head], 1.0)
        optimizer.step()
        publish()

        metrics, _ = reduce_metrics(out, group)
        points = {"reward": rewards.mean(), **{n: metrics[m] for n, m in CURVES.items()}}
        line = "  ".join(f"{name} {value.item():.3g}" for name, value in points.items())
        bar.console.print(f"step {step:3d}  {line}", highlight=False, soft_wrap=True)
    report_reward("at the end")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--tp", type=int, default=1, help="ranks that split the head by vocabulary")
    add("--seed", type=int, default=0)
    add("--steps", type=int, default=80)
    add("--length", type=int, default=5, help="symbols to reverse")
    add("--prompts", type=int, default=32, help="prompts a step")
    add("--samples", type=int, default=8, help="samples a prompt")
    add("--lr", type=float, default=2e-3)
    add("--warmup-steps", type=int, default=400)
    args = parser.parse_args()
    mesh = start_ranks(args.tp)
    with Progress(console=Console(quiet=mesh is not None and dist.get_rank() > 0)) as bar:
        train(args, mesh, bar)
    if mesh is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
