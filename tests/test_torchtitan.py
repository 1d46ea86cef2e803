"""The loss in torchtitan's place for its chunked one, against torchtitan's own losses."""

import copy
import importlib.util
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from factory import random_support
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from rl_loss import (
    LossInputs,
    RowKind,
    Support,
    aligned_rows,
    fused_lm_head,
    icepop_loss,
    policy_loss,
)

torchtitan = pytest.importorskip("torchtitan", reason="needs torchtitan")
ChunkedLossWrapper = importlib.import_module("torchtitan.components.loss").ChunkedLossWrapper
Linear = importlib.import_module("torchtitan.models.common.linear").Linear
ReplayLoss = importlib.import_module("rl_loss.integrations.torchtitan").ReplayLoss

B, L, D, V = 2, 8, 6, 31


def dapo_loss():
    """torchtitan's own: its package wants vLLM, the file does not."""
    path = Path(torchtitan.__file__).parent / "experiments" / "rl" / "losses" / "dapo.py"
    spec = importlib.util.spec_from_file_location("dapo", path)
    sys.modules["dapo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["dapo"])
    return sys.modules["dapo"].DAPOLoss


def clip_higher(log_p: Tensor, log_q: Tensor, advantages: Tensor) -> Tensor:
    ratio = (log_p - log_q).exp()
    clipped = torch.where(advantages > 0, ratio > 1.28, ratio < 0.8)
    return torch.where(clipped, 0.0, ratio)


class Trunk(nn.Module):
    """A decoder that leaves out its head, as the trainer asks for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(V, D)
        self.mix = nn.Linear(D, D)
        self.lm_head = Linear.Config(in_features=D, out_features=V).build()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.mix(self.embed(tokens)).tanh()


def make_batch(seed: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(V, (B, L), generator=g)
    rows = aligned_rows(
        tokens,
        torch.rand(B, L, generator=g) < 0.8,
        support=random_support(tokens.flatten(), V, (RowKind.REPLAY,), g, incomplete=False),
        generator_logprobs=-2.5 - torch.rand(B, L, generator=g) * 2,
        advantages=torch.randn(B, L, generator=g),
    )
    return {"tokens": tokens, "labels": rows.labels, "loss_mask": rows.active,
            "support": rows.support, **rows.per_token}  # fmt: skip


def call(loss, model: nn.Module, batch: dict[str, Any], count: int, **more: Any):
    loss.set_lm_head(model.lm_head)
    names = ("generator_logprobs", "advantages", "loss_mask")
    given = {name: batch[name] for name in names}
    return loss(model(batch["tokens"]), batch["labels"], count, **given, **more)


def grads_of(model: nn.Module) -> list[Tensor]:
    found = [p.grad for p in model.parameters()]
    assert all(grad is not None for grad in found)
    return [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in found]


def test_dapo_as_a_rule_is_torchtitans_own():
    """Over the vocabulary and without centering: its chunked head and loss, and ours."""
    model, batch = Trunk(), make_batch()
    other, count = copy.deepcopy(model), int(batch["loss_mask"].sum())
    loss = dapo_loss().Config(ratio_clip_low=0.2, ratio_clip_high=0.28)
    theirs = ChunkedLossWrapper.Config(num_chunks=4, loss_fn=loss).build()
    rule = partial(policy_loss, rule=clip_higher, score_centering=False)
    ours = ReplayLoss.Config(loss=rule).build()
    wanted, found = call(theirs, model, batch, count), call(ours, other, batch, count)
    wanted[0].backward()
    found[0].backward()
    for got, grad in zip(grads_of(other), grads_of(model), strict=True):
        torch.testing.assert_close(got, grad, rtol=1e-5, atol=1e-7)
    share = {"loss/ratio_mean": "loss/importance_ratio/mean"}
    for name, our in share.items():
        torch.testing.assert_close(found[1][our], wanted[1][name], rtol=1e-5, atol=0)
    assert float(found[1]["loss/tokens/mean"]) == 1
    assert all(name.endswith(("/mean", "/max")) for name in found[1])


def test_replayed_it_is_head_and_loss():
    model, batch = Trunk(), make_batch()
    batch["generator_logprobs"][0, 1] = torch.nan  # of an engine that has none for a token
    count = int(batch["loss_mask"].sum())
    loss = ReplayLoss.Config(loss=partial(icepop_loss, kl_tau=0.1)).build()
    out, metrics = call(loss, model, batch, count, support=batch["support"], temperature=0.7)
    out.backward()
    plain = copy.deepcopy(model)
    plain.zero_grad()
    active = batch["loss_mask"] & batch["generator_logprobs"].isfinite()
    head = fused_lm_head(
        plain(batch["tokens"]), plain.lm_head.weight, batch["labels"], batch["support"],
        temperature=0.7, active=active, impl="reference",
    )  # fmt: skip
    given = {"inference_logprobs": batch["generator_logprobs"], "advantages": batch["advantages"]}
    wanted = icepop_loss(LossInputs.from_head(head, **given), kl_tau=0.1)
    (wanted.loss / count).backward()
    torch.testing.assert_close(out, wanted.loss / count, rtol=1e-5, atol=1e-7)
    for got, grad in zip(grads_of(model), grads_of(plain), strict=True):
        torch.testing.assert_close(got, grad, rtol=1e-5, atol=1e-6)
    assert float(metrics["loss/score_centering/uncentered/mean"]) == 0
    assert "forward" not in vars(model.lm_head)


def test_an_error_leaves_the_head_as_it_was():
    model, batch = Trunk(), make_batch()
    loss = ReplayLoss.Config().build()
    with pytest.raises(ValueError, match="lm_head must be set"):
        loss(model(batch["tokens"]), batch["labels"], 1, generator_logprobs=batch["advantages"],
             advantages=batch["advantages"], loss_mask=batch["loss_mask"])  # fmt: skip
    with pytest.raises(ValueError, match="loss must not have a ref_tau"):
        ReplayLoss.Config(loss=partial(icepop_loss, ref_tau=0.1)).build()
    with pytest.raises(ValueError, match="loss_mask must be bool"):
        call(loss, model, batch | {"loss_mask": batch["loss_mask"].float()}, 1)
    with pytest.raises(ValueError, match="support must have 16 rows, got 3"):
        call(loss, model, batch, 1, support=Support.empty(3))
    assert "forward" not in vars(model.lm_head)
    assert model.lm_head(torch.zeros(1, D)).shape == (1, V)


def sharded(rank: int) -> None:
    """Two ranks of one row of the batch each, the head apart and in the root."""
    batch = make_batch()
    count = int(batch["loss_mask"].sum())
    loss = ReplayLoss.Config(loss=partial(icepop_loss, kl_tau=0.1)).build()
    whole = Trunk()
    call(loss, whole, batch, count, support=batch["support"])[0].backward()
    mine = {n: v[rank : rank + 1] for n, v in batch.items() if isinstance(v, Tensor)}
    support = batch["support"][rank * L : (rank + 1) * L]
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for apart, policy in ((True, None), (False, None), (True, half)):
        model, options = Trunk(), {"mesh": init_device_mesh("cpu", (2,))}
        options |= {} if policy is None else {"mp_policy": policy}
        if apart:
            fully_shard(model.lm_head, **options)
        fully_shard(model, **options)
        out, _ = call(loss, model, mine, count, support=support)
        (2 * out).backward()  # of the average over ranks
        for got, grad in zip(grads_of(model), grads_of(whole), strict=True):
            size = float(grad.abs().max())
            near = 1e-5 if policy is None else 3e-2
            torch.testing.assert_close(got, grad, rtol=0, atol=near * size)


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
def test_under_fsdp2():
    run_ranks(sharded, 2)
