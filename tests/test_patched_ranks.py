"""A patched model under DDP and FSDP2: the numbers of one process that has the whole batch."""

import copy
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from factory import TINY_MODEL
from ranks import Calls, on_gpus, rank_device, run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from rl_loss import Support
from rl_loss.integrations.huggingface import logit_options, patch_lm_head, unpatch_lm_head

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"
)
V, B, L = TINY_MODEL["vocab_size"], 4, 5
EXACT = 1e-11  # of float64 sums over ranks, in another order
BF16 = torch.bfloat16


class Case(NamedTuple):
    wrap: str = "root"  # "ddp"; the "root" with all in it, the head "apart" from it, or as "parts"
    family: str = "Gemma2"  # with a soft cap, and tied; or "Qwen3"
    patched: str = "before"  # it is wrapped, or "after"
    mixed: bool = False  # bfloat16
    checkpointed: bool = False
    gathers: int | None = None  # of all groups of parameters, in a step


CASES = {
    "DDP": Case("ddp"),
    "DDP, patched after": Case("ddp", "Qwen3", "after", checkpointed=True),
    "in the root": Case(gathers=6),
    "in the root, patched after": Case(patched="after", gathers=6),
    "apart": Case("apart", "Qwen3", gathers=8),
    "apart, patched after": Case("apart", "Qwen3", "after", gathers=8),
    "parts": Case("parts", "Qwen3", gathers=8),
    "apart, checkpointed": Case("apart", "Qwen3", checkpointed=True),
    "apart, mixed precision": Case("apart", "Qwen3", mixed=True, gathers=8),
    "in the root, mixed precision": Case(mixed=True, patched="after", gathers=6),
}


def make(case: Case):
    config = getattr(transformers, f"{case.family}Config")
    config = config(**TINY_MODEL, tie_word_embeddings=case.family == "Gemma2")
    torch.manual_seed(0)
    model = getattr(transformers, f"{case.family}ForCausalLM")(config)
    torch.nn.init.normal_(model.get_output_embeddings().weight)
    return model.to(torch.float32 if case.mixed else torch.float64)


class Step(NamedTuple):
    tokens: Tensor  # [B, L]
    labels: Tensor  # [B, L]
    support: Support
    upstream: Tensor  # [B, L]

    def cut(self, rank: int, ranks: int) -> "Step":
        at = slice(B * rank // ranks, B * (rank + 1) // ranks)
        rows = slice(at.start * L, at.stop * L)
        return Step(self.tokens[at], self.labels[at], self.support[rows], self.upstream[at])


def make_step(device) -> Step:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(3, V, (B, L), generator=generator) for _ in range(2))
    ids = torch.stack([labels.flatten() + 7 * k for k in range(3)], 1) % V
    support = Support.from_rows([(row, None) if i % 2 else None for i, row in enumerate(ids)])
    upstream = torch.randn(B, L, generator=generator)
    return Step(*(part.to(device) for part in (tokens, labels, support, upstream)))


def logprobs(model, step: Step) -> Tensor:
    options = {"aligned_labels": step.labels, "support": step.support, "temperature": 0.7}
    return model(input_ids=step.tokens, use_cache=False, **options).head.logprobs


def wrapped(model, case: Case, mesh):
    if case.wrap == "ddp":
        return DistributedDataParallel(model)
    options = {"mesh": mesh, "reshard_after_forward": True}
    if case.mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    for layer in model.base_model.layers:
        fully_shard(layer, **options)
    if case.wrap in ("apart", "parts"):
        fully_shard(model.get_output_embeddings(), **options)
    if case.wrap == "parts":
        fully_shard(model.base_model, **options)
        return model
    return fully_shard(model, **options)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check(case: Case, rank: int, mesh) -> None:
    device, ranks = rank_device(rank), dist.get_world_size()
    step, model = make_step(device), make(case).to(device)
    own = step.cut(rank, ranks)
    plain = patch_lm_head(copy.deepcopy(model))
    if case.mixed:
        for parameter in plain.parameters():
            parameter.data = parameter.data.to(BF16)
    wanted = logprobs(plain, step)
    (step.upstream * wanted).sum().backward()
    if case.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    if case.patched == "before":
        patch_lm_head(model)
    outer = wrapped(model, case, mesh)
    if case.patched == "after":
        patch_lm_head(model)
    for _ in range(2):
        with Calls() as calls:
            got = logprobs(outer, own)
            (ranks * (own.upstream * got).sum()).backward()
        if case.gathers is not None:
            gathers = sum("allgather" in name for name in calls.collectives)
            assert gathers == case.gathers, calls.collectives
        at = slice(len(own.tokens) * rank, len(own.tokens) * (rank + 1))
        exact = 2**-22 if case.mixed else EXACT
        assert (got - wanted[at]).abs().max() <= exact * wanted.abs().max()
        for (name, parameter), peer in zip(
            model.named_parameters(), plain.parameters(), strict=True
        ):
            grad, most = whole(parameter.grad), float(peer.grad.abs().max())
            # bfloat16 gradients of two halves are rounded each, and of the whole once; Gemma 2
            # adds up those of its norms in float32.
            near = 2**-6 if case.mixed else 2**-22 if "norm" in name else EXACT
            assert float((grad - peer.grad).abs().max()) <= near * most, name
            assert most > 0
            parameter.grad = None
        with torch.no_grad():
            outer(input_ids=own.tokens)
    options = logit_options(model)
    assert options["softcap"] == (30.0 if case.family == "Gemma2" else None)
    unpatch_lm_head(model)
    assert model(input_ids=own.tokens).logits.shape == (len(own.tokens), L, V)


def both_ranks(rank: int) -> None:
    mesh = init_device_mesh(rank_device(rank).type, (dist.get_world_size(),))
    for name, case in CASES.items():
        try:
            check(case, rank, mesh)
        except Exception as error:
            raise AssertionError(name) from error


def test_the_numbers_of_one_process():
    run_ranks(both_ranks, 2, interpreted=not on_gpus(2))
