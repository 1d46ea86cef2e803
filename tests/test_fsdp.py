"""Under FSDP2, whose mixed precision casts the floating tensors that a module is called with."""

import warnings
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from factory import random_batch
from torch import Tensor, nn

from rl_loss import FusedLMHead, LossInputs, Support, aligned_rows, icepop_loss

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"
)
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def sharded():
    """`fully_shard` over a mesh of this one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))

    def shard(module, **policy):
        return fully_shard(
            module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, **policy)
        )

    yield shard
    dist.destroy_process_group()


def fields_of(support):
    names = ("ids", "sampler_logprobs", "known", "offsets", "kind", "sampler_tail_mass")
    return {name: getattr(support, name).clone() for name in names}


def head_and_batch(bias=False):
    """A head and a batch in float32, of values that bfloat16 holds, but for q."""
    batch = random_batch(9, dtype=torch.float32)
    head = FusedLMHead(7, 31, bias=bias)
    with torch.no_grad():
        head.weight.copy_(batch.weight.bfloat16())
    batch.hidden = batch.hidden.bfloat16().float()
    return head, batch.leaves()


# --- the support is let through ---


@dataclass
class Held:
    scores: Tensor
    support: Support


class Named(NamedTuple):
    scores: Tensor
    support: Support


class Passes(nn.Module):
    """Keeps what reaches it, and gives it back."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, *args, **kwargs):
        self.seen = args, kwargs
        return args, kwargs, self.linear(torch.ones(1, 2, dtype=self.linear.weight.dtype))


@pytest.mark.parametrize("output_dtype", [None, BF16, torch.float16])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda scores, support: (scores, support),
        lambda scores, support: [scores, support],
        lambda scores, support: {"scores": scores, "support": support},
        Held,
        Named,
        lambda scores, support: {"a": [Held(scores, support), (Named(scores, support),)]},
    ],
    ids=["tuple", "list", "dict", "dataclass", "named tuple", "nested"],
)
def test_a_support_arrives_and_leaves_as_it_was(sharded, wrap, output_dtype):
    _, batch = head_and_batch()
    support, before = batch.support, fields_of(batch.support)
    plan = support.plan
    module = sharded(Passes(), output_dtype=output_dtype)
    scores = torch.rand(9)
    out = module(wrap(scores, support), kept=wrap(scores, support))
    found, tensors = [], []

    def search(value):
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, Support):
            found.append(value)
        elif isinstance(value, dict):
            search(list(value.values()))
        elif isinstance(value, Held):
            search([value.scores, value.support])
        elif isinstance(value, (list, tuple)):
            for item in value:
                search(item)

    search(module.seen)
    assert {tensor.dtype for tensor in tensors} == {BF16}  # it does cast
    search(out)
    assert tensors[-1].dtype == (output_dtype or BF16)
    assert len(found) in (4, 8)
    assert all(one is support for one in found)
    assert support.plan is plan
    for name, tensor in fields_of(support).items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name])


def test_aligned_rows_keep_their_support(sharded):
    """Of their per-token values those in floating point are cast, as any tensor is."""
    support = Support.from_rows([([5, 2], [-0.3, -1.4]), ([7], [-0.1]), None], kind=[1, 2, 0])
    rows = aligned_rows(
        torch.tensor([5, 7, 3]),
        torch.ones(3, dtype=torch.bool),
        support=support,
        inference_logprobs=torch.tensor([-0.3, -0.1, -1.0]),
    )
    module = sharded(Passes())
    module(rows)
    (seen,), _ = module.seen
    assert seen.support is rows.support
    assert seen.per_token["inference_logprobs"].dtype == BF16
    assert torch.equal(seen.labels, rows.labels)
    assert torch.equal(seen.active, rows.active)


# --- the head ---


@pytest.mark.parametrize("output_dtype", [None, BF16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_wrapped_head_gives_what_one_in_bfloat16_gives(sharded, output_dtype, bias):
    head, batch = head_and_batch(bias)
    plain = FusedLMHead(7, 31, bias=bias, dtype=BF16)
    plain.load_state_dict(head.state_dict())
    hidden = batch.hidden.detach().bfloat16().requires_grad_()
    before = fields_of(batch.support)
    wanted = plain(hidden, batch.labels, batch.support, temperature=0.7)
    wanted.logprobs.sum().backward()
    head = sharded(head, output_dtype=output_dtype)
    out = head(batch.hidden, batch.labels, batch.support, temperature=0.7)
    assert out.support is batch.support
    for name, tensor in fields_of(out.support).items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name])
    out_dtype = output_dtype or torch.float32
    for name in ("logprobs", "support_logprobs", "trainer_tail_logprobs"):
        value, expected = getattr(out, name), getattr(wanted, name).to(out_dtype)
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-5)
    out.logprobs.sum().backward()
    for param, expected in zip(head.parameters(), plain.parameters(), strict=True):
        assert param.grad.dtype == torch.float32
        grad = param.grad.full_tensor()
        assert grad.abs().max() > 0
        torch.testing.assert_close(grad, expected.grad.float(), rtol=2**-7, atol=1e-6)
    assert batch.hidden.grad.abs().max() > 0
    torch.testing.assert_close(batch.hidden.grad, hidden.grad.float(), rtol=2**-7, atol=1e-6)


def test_a_temperature_that_was_cast_is_refused(sharded):
    head, batch = head_and_batch()
    head = sharded(head)
    with pytest.raises(ValueError, match=r"^temperature .*cast_forward_inputs=False"):
        head(batch.hidden, batch.labels, batch.support, temperature=batch.temperature.float())


@pytest.mark.parametrize("shape", [(9,), (3, 3)])
def test_no_output_of_a_step_is_a_view(sharded, shape):
    """FSDP2 warns of views, at every step, for an in-place operation would drop its hooks."""
    head, batch = head_and_batch()
    head = sharded(head)
    hidden, labels = batch.hidden.reshape(*shape, 7), batch.labels.reshape(shape)
    for entropy, full in ((None, False), ("support", False), ("full", False), (None, True)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = head(hidden, labels, batch.support, entropy=entropy, full=full)
            (out.logprobs.sum() + out.support_logprobs.sum()).backward()
        assert not [warning for warning in caught if "view" in str(warning.message)]


def test_every_torch_finds_the_outputs_that_it_hooks():
    """Up to 2.11 FSDP2 looks for them as a pytree, and gathers no weight again for a dataclass."""
    from torch.utils._pytree import tree_flatten

    head, batch = head_and_batch()
    out = head(batch.hidden, batch.labels, batch.support)
    loss = HeadAndLoss(head)(step_of(batch))
    for held, tensor in ((out, out.logprobs), (loss, loss.loss)):
        assert any(leaf is tensor for leaf in tree_flatten(held)[0])


# --- head and loss in one module ---


@dataclass
class Step:
    hidden: Tensor
    labels: Tensor
    support: Support
    inference_logprobs: Tensor
    advantages: Tensor


class HeadAndLoss(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, step):
        hidden = step.hidden.to(self.head.weight.dtype)
        out = self.head(hidden, step.labels, step.support)
        inputs = LossInputs.from_head(
            out,
            step.support,
            inference_logprobs=step.inference_logprobs,
            advantages=step.advantages,
        )
        return icepop_loss(inputs, kl_tau=0.1)


def step_of(batch):
    generator = torch.Generator().manual_seed(3)
    return Step(
        batch.hidden,
        batch.labels,
        batch.support,
        inference_logprobs=-3 * torch.rand(9, generator=generator),
        advantages=torch.rand(9, generator=generator) - 0.5,
    )


def test_head_and_loss_in_one_module(sharded):
    """Not cast, they give what a module in bfloat16 gives; cast, they say what to set."""
    head, batch = head_and_batch()
    plain = FusedLMHead(7, 31, dtype=BF16)
    plain.load_state_dict(head.state_dict())
    step, hidden = step_of(batch), batch.hidden
    wanted = HeadAndLoss(plain)(step).loss
    wanted.backward()
    expected, hidden.grad = hidden.grad, None
    module = sharded(HeadAndLoss(head), cast_forward_inputs=False)
    loss = module(step).loss
    loss.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
    assert hidden.grad.isfinite().all()
    assert hidden.grad.abs().max() > 0
    torch.testing.assert_close(hidden.grad, expected, rtol=2**-7, atol=1e-6)
    grad = module.head.weight.grad.full_tensor()
    torch.testing.assert_close(grad, plain.weight.grad.float(), rtol=2**-7, atol=1e-6)

    module = sharded(HeadAndLoss(head_and_batch()[0]))
    with pytest.raises(ValueError, match=r"^inference_logprobs .*cast_forward_inputs=False"):
        module(step)


def test_no_output_of_head_and_loss_is_a_view(sharded):
    head, batch = head_and_batch()
    module = sharded(HeadAndLoss(head), cast_forward_inputs=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module(step_of(batch)).loss.backward()
    assert not [warning for warning in caught if "view" in str(warning.message)]
