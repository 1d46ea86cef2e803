"""FSDP2 over ranks: the losses and the gradients of one process that has the whole batch."""

import copy
import importlib.util
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from factory import TINY_MODEL, random_batch
from ranks import on_gpus, rank_device, run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from rl_loss import (
    FusedLMHead,
    LossInputs,
    Support,
    fused_lm_head,
    fused_lm_head_loss,
    icepop_loss,
)

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"
)
H, V = 7, 31
EXACT = 1e-11  # of float64 sums over ranks, in another order
LOSS = partial(icepop_loss, kl_tau=0.1)
BF16 = torch.bfloat16


class Case(NamedTuple):
    """What is sharded, and how it is trained."""

    wrap: str = "apart"  # see `shard`
    reshard: bool | None = True  # after the forward; None: of all but the root
    tied: bool = False
    frozen: tuple[str, ...] = ()
    micro_batches: int = 1
    mixed: bool = False  # bfloat16 for what is sharded
    cast: bool = False  # the inputs as well
    checkpoint: str | None = None  # around the sharded "head", the sharded "root", or "inside"
    offload: bool = False
    one_pass: bool = False
    impl: str = "auto"
    rows: tuple[int, int] = (6, 6)  # of each rank
    masked_rank: int | None = None  # none of whose rows a loss reads
    summed: bool = False  # gradients over the ranks, which FSDP2 averages by default
    hugging_face: bool = False
    tp: bool = False  # over a second dimension of the mesh, which splits the head's vocabulary
    sequence_parallel: bool = False  # over that one
    gathers: int | None = None  # of all groups of parameters, a micro-batch


CASES = {
    "head alone": Case("head", gathers=2),
    "head alone, kept": Case("head", reshard=False, gathers=1),
    "root alone": Case("root", gathers=2),
    "root alone, kept": Case("root", reshard=None, gathers=1),
    "apart": Case(gathers=4),
    "apart, root kept": Case(reshard=None, gathers=3),
    "apart, kept": Case(reshard=False, gathers=2),
    "summed": Case(summed=True),
    "tied": Case("root", tied=True, gathers=2),
    "tied, kept": Case("root", tied=True, reshard=False, gathers=1),
    "tied in a group of two": Case("tied", tied=True),
    "accumulation": Case(micro_batches=3, gathers=4),
    "accumulation, tied and kept": Case("root", tied=True, reshard=False, micro_batches=2),
    "accumulation of the head alone": Case("head", micro_batches=2),
    "frozen head": Case(frozen=("head.weight", "head.bias"), gathers=4),
    "frozen head, alone": Case("head", frozen=("head.weight", "head.bias")),
    "frozen head in its root": Case("root", frozen=("head.weight", "head.bias")),
    "frozen weight": Case(frozen=("head.weight",)),
    "frozen below the head": Case(frozen=("embed.weight", "body.weight", "body.bias")),
    "checkpoint around the head": Case(checkpoint="head", gathers=4),
    "checkpoint around the head, kept": Case(checkpoint="head", reshard=False, gathers=2),
    "checkpoint around a part of the root": Case("root", checkpoint="head", gathers=2),
    "checkpoint inside the head": Case(checkpoint="inside", gathers=4),
    "checkpoint around the root": Case("root", checkpoint="root"),
    "checkpoint and accumulation": Case(checkpoint="head", micro_batches=2),
    "checkpoint, reference": Case(checkpoint="head", impl="reference"),
    "parameters on the CPU": Case(offload=True, gathers=4),
    "one pass": Case("root", one_pass=True, gathers=2),
    "one pass, tied, accumulation": Case("root", one_pass=True, tied=True, micro_batches=2),
    "reference": Case(impl="reference", gathers=4),
    "reference, tied": Case("root", impl="reference", tied=True),
    "kernels": Case(impl="triton", gathers=4),
    "kernels, tied and checkpoint": Case("root", impl="triton", tied=True, checkpoint="head"),
    "kernels, one pass": Case("root", impl="triton", one_pass=True, gathers=2),
    "a rank without rows": Case(rows=(12, 0)),
    "a rank without rows, one pass": Case("root", rows=(0, 12), one_pass=True),
    "a rank without rows, kernels, one pass": Case(
        "root", rows=(12, 0), impl="triton", one_pass=True
    ),
    "a rank without active rows": Case(masked_rank=0),
    "a rank without active rows, kernels": Case(masked_rank=1, impl="triton"),
    "mixed precision": Case("root", mixed=True),
    "mixed precision, apart": Case(mixed=True, micro_batches=2),
    "mixed precision, inputs cast": Case("head", mixed=True, cast=True),
}


HUGGING_FACE = {
    "apart": Case(gathers=8),
    "apart, kept": Case(reshard=False, gathers=4),
    "root alone, tied": Case("root", tied=True, gathers=6),
    "parts": Case("parts", gathers=8),
    "accumulation": Case("parts", micro_batches=2, gathers=8),
    "accumulation, tied": Case("root", tied=True, micro_batches=2),
    "checkpoint around the head": Case(checkpoint="head", gathers=8),
    "one pass, tied": Case("root", tied=True, one_pass=True, gathers=6),
    "frozen head": Case("parts", frozen=("model.lm_head.weight",)),
}
TWO_DIMENSIONS = {
    "apart": Case(gathers=4),
    "apart, kept": Case(reshard=False, gathers=2),
    "root alone": Case("root", gathers=2),
    "accumulation": Case(micro_batches=2, gathers=4),
    "checkpoint around the head": Case(checkpoint="head", gathers=4),
    "one pass": Case("root", one_pass=True, gathers=2),
    "sequence-parallel": Case(sequence_parallel=True),
    "sequence-parallel, one pass": Case("root", one_pass=True, sequence_parallel=True),
    "frozen weight": Case(frozen=("head.weight",)),
    "kernels": Case(impl="triton", gathers=4),
}


@dataclass
class Step:
    """A batch, and what its loss reads beside: of B sequences of T tokens, or of N tokens."""

    tokens: Tensor
    labels: Tensor
    support: Support
    temperature: Tensor | float
    inference_logprobs: Tensor
    advantages: Tensor
    active: Tensor  # bool

    def __getitem__(self, at: slice) -> "Step":
        width = self.labels.shape[1:].numel()
        values = {k: v[at] for k, v in vars(self).items() if isinstance(v, Tensor)}
        support = self.support[at.start * width : at.stop * width]
        return Step(**{"temperature": self.temperature, **values}, support=support)

    def cut(self, parts: int) -> list["Step"]:
        n = len(self.labels)
        bounds = [n * i // parts for i in range(parts + 1)]
        return [self[start:stop] for start, stop in pairwise(bounds)]


def make_step(device, shape: tuple[int, ...], v: int) -> Step:
    batch = random_batch(torch.Size(shape).numel(), 1, v)
    generator = torch.Generator().manual_seed(3)
    return Step(
        torch.randint(v, shape, generator=generator).to(device),
        batch.labels.reshape(shape).to(device),
        batch.support.to(device),
        batch.temperature.reshape(shape).to(device),
        inference_logprobs=-torch.randn(shape, generator=generator).abs().to(device),
        advantages=torch.randn(shape, generator=generator).to(device),
        active=torch.ones(shape, dtype=torch.bool),
    )


class Policy(nn.Module):
    """Embedding, a layer and the head: what a training step runs, with the loss."""

    vocab_size = V

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.case, self.options = case, {"impl": case.impl}
        self.build()
        self.to(torch.float32 if case.mixed else torch.float64)
        for name in case.frozen:
            self.get_parameter(name).requires_grad_(False)

    def build(self) -> None:
        self.embed, self.body = nn.Embedding(V, H), nn.Linear(H, H)
        self.head = FusedLMHead(H, V, bias=True)
        if self.case.tied:
            self.head.weight = self.embed.weight
        nn.init.normal_(self.head.weight)
        nn.init.normal_(self.head.bias)

    def states(self, tokens: Tensor) -> Tensor:
        return self.body(self.embed(tokens)).tanh()

    def forward(self, step: Step) -> Tensor:
        tokens, group = step.tokens, self.options.get("process_group")
        if self.options.get("sequence_parallel"):
            tokens = tokens.chunk(dist.get_world_size(group))[dist.get_rank(group)]
        hidden = self.states(tokens)
        options = {"temperature": step.temperature, "active": step.active, **self.options}
        per_token = {
            "inference_logprobs": step.inference_logprobs,
            "advantages": step.advantages,
        }
        if self.case.one_pass:
            weight, options["bias"] = self.head.weight, self.head.bias
            given = hidden, weight, step.labels, step.support
            return fused_lm_head_loss(*given, loss=LOSS, **options, **per_token).loss
        head: Any = self.head
        if self.case.checkpoint == "head":
            head = partial(checkpoint, self.head, use_reentrant=False)
        out = head(hidden, step.labels, step.support, entropy="support", **options)
        return LOSS(LossInputs.from_head(out, **per_token)).loss - 0.1 * out.entropy.sum()


class PatchedModel(Policy):
    """A model of transformers whose head is ours."""

    vocab_size = TINY_MODEL["vocab_size"]

    def build(self) -> None:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(**TINY_MODEL, tie_word_embeddings=self.case.tied)
        self.model = Qwen3ForCausalLM(config)
        nn.init.normal_(self.model.lm_head.weight)
        self.model.set_output_embeddings(FusedLMHead.from_linear(self.model.lm_head))
        assert self.case.tied == (self.head.weight is self.model.get_input_embeddings().weight)

    @property
    def head(self) -> FusedLMHead:
        return self.model.lm_head

    def states(self, tokens: Tensor) -> Tensor:
        return self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state


class Collectives(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))

    def number(self, kind: str) -> int:
        return sum(n for name, n in self.counts.items() if kind in name)


def sharded_modules(policy: nn.Module) -> list[FSDPModule]:
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]


def shard(policy: Policy, case: Case, mesh) -> Policy:
    """`policy` with its head sharded, or its root, or both apart; or with head and embedding as
    one group in it; or of a model head and body, without their root."""
    options: dict[str, Any] = {"mesh": mesh["dp"], "reshard_after_forward": case.reshard}
    if case.mixed:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=BF16, reduce_dtype=torch.float32, cast_forward_inputs=case.cast
        )
    if case.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    if case.tp:
        split_vocabulary(policy.head, mesh["tp"])
        policy.options["process_group"] = mesh["tp"].get_group()
        policy.options["sequence_parallel"] = case.sequence_parallel
    if case.checkpoint == "inside":
        policy.head = checkpoint_wrapper(policy.head)
    if case.hugging_face:
        for layer in policy.model.base_model.layers:
            fully_shard(layer, **options)
    if case.wrap in ("head", "apart", "parts"):
        fully_shard(policy.head, **options)
    if case.wrap == "tied":
        fully_shard([policy.embed, policy.head], **options)
    if case.wrap == "parts":
        fully_shard(policy.model.base_model, **options)
    if case.wrap in ("root", "apart", "tied"):
        fully_shard(policy, **options)
    if case.summed:
        for module in sharded_modules(policy):
            module.set_gradient_divide_factor(1.0)
    return policy


def split_vocabulary(head: FusedLMHead, mesh) -> None:
    for name, parameter in list(head.named_parameters()):
        part = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
        setattr(head, name, part.requires_grad_(parameter.requires_grad))


def expected(policy: Policy, case: Case, parts: list[Step]) -> Tensor:
    """The loss of one process that has all parts, its gradients in `policy`."""
    total = torch.zeros(())
    for part in parts:
        low = {
            name: parameter.to(BF16)
            for name, parameter in policy.named_parameters()
            if case.mixed and (case.wrap != "head" or name.startswith("head"))
        }
        loss = functional_call(policy, low, (part,))
        loss.backward()
        total = total + loss.detach()
    return total


def train(policy: Policy, case: Case, parts: list[Step], ranks: int) -> Tensor:
    """The loss of this rank's micro-batches, their gradients in `policy`."""
    total, modules = torch.zeros(()), sharded_modules(policy)
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        for module in modules:
            module.set_requires_gradient_sync(last)
        with Collectives() as collectives:
            if case.checkpoint == "root":
                loss = checkpoint(policy, part, use_reentrant=False)
            else:
                loss = policy(part)
            (loss if case.summed else ranks * loss).backward()
        if case.gathers is not None:
            assert collectives.number("allgather") == case.gathers, collectives.counts
        if not case.sequence_parallel:
            allowed = len(modules) if last else 0
            assert collectives.number("reduce_scatter") <= allowed, collectives.counts
        total = total + loss.detach()
    return total


def reduce_the_rest(policy: Policy, case: Case, mesh) -> None:
    """The gradients that neither FSDP2 nor the head sees to."""
    for parameter in policy.parameters():
        grad = parameter.grad
        if grad is None:
            continue
        if not isinstance(grad, DTensor):
            dist.all_reduce(grad, group=mesh["dp"].get_group())
            grad /= mesh["dp"].size()
        elif case.sequence_parallel and grad.device_mesh.ndim == 1:  # of some rows alone
            dist.all_reduce(grad.to_local(), group=mesh["tp"].get_group())


def whole_gradient(parameter: Tensor, device) -> Tensor:
    grad = parameter.grad.to(device)
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def near(got: Tensor, wanted: Tensor, mixed: bool) -> bool:
    """Within rounding of the largest value: of float64, or of the float32 that sums bfloat16."""
    most = float(wanted.abs().max().clamp(min=1))
    return float((got - wanted).abs().max()) <= (2**-22 if mixed else EXACT) * most


def check(case: Case, rank: int, mesh) -> None:
    device, dp = rank_device(rank), mesh["dp"]
    kind = PatchedModel if case.hugging_face else Policy
    shape = (4, 5) if case.hugging_face else (sum(case.rows),)
    rows = (2, 2) if case.hugging_face else case.rows
    step = make_step(device, shape, kind.vocab_size)
    if case.cast:
        step.temperature = 0.7
    bounds = [0, rows[0], sum(rows)]
    if case.masked_rank is not None:
        step.active[bounds[case.masked_rank] : bounds[case.masked_rank + 1]] = False
    shares = [step[start:stop] for start, stop in pairwise(bounds)]
    parts = [share.cut(case.micro_batches) for share in shares]
    # Of what bfloat16 rounds, one process has the same parts; of float64 the whole batch.
    every = [part for own in parts for part in own] if case.mixed else [step]
    plain = kind(case).to(device)
    policy = copy.deepcopy(plain).to("cpu" if case.offload else device)
    policy = shard(policy, case, mesh)
    if case.cast:
        plain.head.register_forward_pre_hook(lambda _, given: (given[0].to(BF16), *given[1:]))
    if not case.mixed:
        plain.options["impl"] = "reference"
    optimizers = [torch.optim.SGD(p.parameters(), 0.01, foreach=False) for p in (plain, policy)]
    own = dp.get_local_rank()
    for _ in range(2):
        wanted = expected(plain, case, every)
        with torch.no_grad():  # as where log-probabilities of old weights are taken
            before = policy(shares[own])
            for module in sharded_modules(policy):
                module.reshard()
            if case.wrap == "parts":  # without labels it is the head that it replaced
                logits, own_logits = (p.model(shares[own].tokens).logits for p in (policy, plain))
                assert near(logits, own_logits, case.mixed)
        loss = train(policy, case, parts[own], dp.size())
        if case.micro_batches == 1:
            assert before == loss
        reduce_the_rest(policy, case, mesh)
        dist.all_reduce(loss, group=dp.get_group())
        assert near(loss, wanted, case.mixed)
        pairs = zip(plain.named_parameters(), policy.parameters(), strict=True)
        for (name, whole), parameter in pairs:
            assert isinstance(parameter, DTensor) == (case.wrap != "head" or "head" in name)
            if not whole.requires_grad:
                assert parameter.grad is None
                continue
            assert whole.grad.abs().max() > 0
            assert near(whole_gradient(parameter, device), whole.grad, case.mixed), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def check_all(rank: int, cases: dict[str, Case], mesh) -> None:
    for name, case in cases.items():
        try:
            check(case, rank, mesh)
        except Exception as error:
            raise AssertionError(name) from error


def one_dimension(rank: int, has_transformers: bool) -> None:
    ranks, kind = dist.get_world_size(), rank_device(rank).type
    mesh = init_device_mesh(kind, (ranks,), mesh_dim_names=("dp",))
    refused_outside_its_module(rank, mesh)
    check_all(rank, CASES, mesh)
    if has_transformers:
        cases = {name: case._replace(hugging_face=True) for name, case in HUGGING_FACE.items()}
        check_all(rank, cases, mesh)


def two_dimensions(rank: int) -> None:
    kind = rank_device(rank).type
    mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("dp", "tp"))
    refused_outside_its_module(rank, mesh)
    cases = {name: case._replace(tp=True) for name, case in TWO_DIMENSIONS.items()}
    check_all(rank, cases, mesh)


def refused_outside_its_module(rank: int, mesh) -> None:
    """Where the weight is a shard: before a step and after it, and beside its module in one."""
    step = make_step(rank_device(rank), (6,), V)
    hidden = torch.ones(6, H, dtype=torch.float64, device=rank_device(rank))
    tp = mesh.ndim == 2
    options = {"process_group": mesh["tp"].get_group()} if tp else {}
    message = "weight must be cut by its rows" if tp else "weight must not be a sharded DTensor"
    where = rf"^{message}.*call the head inside its FSDP module"
    for case in (Case(tp=tp), Case("root", tp=tp, reshard=True)):
        policy = shard(Policy(case).to(hidden.device), case, mesh)
        head = policy.head
        for _ in range(2):
            with pytest.raises(ValueError, match=where):
                fused_lm_head(hidden, head.weight, step.labels, step.support, **options)
            policy(step).backward()
    case = Case("apart", one_pass=True, tp=tp)  # in the root's forward the head is not gathered
    policy = shard(Policy(case).to(hidden.device), case, mesh)
    with pytest.raises(ValueError, match=where):
        policy(step)


def test_the_numbers_of_one_process():
    has_transformers = importlib.util.find_spec("transformers") is not None
    run_ranks(one_dimension, 2, has_transformers, interpreted=not on_gpus(2))


def test_a_vocabulary_that_is_split_as_well():
    run_ranks(two_dimensions, 4, interpreted=not on_gpus(4))
