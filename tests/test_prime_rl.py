"""prime-rl's two contracts, written out plainly: its losses of one sample, and its head."""

import math
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import rank_device, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from rl_loss import Support
from rl_loss.integrations import prime_rl
from rl_loss.integrations.prime_rl import ReplayOutputLinear

FLOAT64 = {"rtol": 1e-12, "atol": 1e-12}  # sums of at most fifty terms of size 10, another order
SEQ, K, V, H = 9, 5, 23, 7


# --- the losses ---


@dataclass
class Sample:
    """What a custom loss of prime-rl's is called with, in its newest form."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = field(default=None)
    trainer_mask_logprobs: Tensor | None = field(default=None)
    inference_mask_logprobs: Tensor | None = field(default=None)


def make_sample(seed: int = 0) -> Sample:
    """Rows of 1 to K kept ids, one without a mask, one whose label is outside its mask; the last
    token is no loss token. Padding: 0 on the trainer's side, -inf on the sampler's."""
    g = torch.Generator().manual_seed(seed)
    counts = torch.tensor([K, 1, 3, 0, 2, K, 4, K, 3])
    held = torch.arange(K) < counts[:, None]
    z = torch.randn(SEQ, K, generator=g, dtype=torch.float64).masked_fill(~held, -torch.inf)
    noise = 0.4 * torch.randn(SEQ, K, generator=g, dtype=torch.float64)
    trainer, sampler = (torch.where(held, x.log_softmax(-1), -torch.inf) for x in (z, z + noise))
    label = (torch.rand(SEQ, generator=g) * counts.clamp(min=1)).long()[:, None]
    log_p, log_q = (x.gather(1, label)[:, 0] for x in (trainer, sampler))
    log_p[3], log_q[3] = -2.0, -2.2
    log_p[7], log_q[7] = -3.0, -2.9
    trainer = torch.where(held, trainer, 0.0)
    trainer[7] = 0.0
    return Sample(
        trainer_logprobs=log_p.requires_grad_(),
        inference_logprobs=log_q,
        ref_logprobs=None,
        advantages=torch.full((SEQ,), 0.7, dtype=torch.float64),
        loss_mask=torch.arange(SEQ) < SEQ - 1,
        loss_weights=torch.rand(SEQ, generator=g, dtype=torch.float64),
        trainer_mask_logprobs=trainer.requires_grad_(),
        inference_mask_logprobs=sampler,
    )


def plain_ipo(sample: Sample, eps: float, cap: float, tau: float, centering: bool) -> Tensor:
    """IPO with exact centering, on the tokens of the loss: gradient alone is meant."""
    on = sample.loss_mask
    weight = sample.loss_weights[on] * sample.advantages[on] * tau
    log_p, log_q = sample.trainer_logprobs[on], sample.inference_logprobs[on]
    near = (log_p.exp() - log_q.exp()).abs() <= eps
    ratio = (log_p - log_q).detach().clamp(max=math.log(cap)).exp()
    total = -(weight * near.detach() * ratio * log_p).sum()
    if not centering:
        return total
    p, q = sample.trainer_mask_logprobs[on], sample.inference_mask_logprobs[on]
    held = q.isfinite()
    close = held & ((p.exp() - q.exp()).abs() <= eps)
    each = (p - q).detach().clamp(max=math.log(cap)).exp() * q.exp()
    return total + (weight[:, None] * torch.where(close, each, 0.0).detach() * p).sum()


@pytest.mark.parametrize("centering", [True, False])
def test_ipo_with_centering_over_its_mask(centering):
    ours, plain = make_sample(), make_sample()
    options = {"eps": 0.1, "max_importance_ratio": 1.3, "adv_tau": 0.9}
    out = prime_rl.ipo_loss(ours, score_centering=centering, **options)
    out.loss.backward()
    plain_ipo(plain, 0.1, 1.3, 0.9, centering).backward()
    torch.testing.assert_close(ours.trainer_logprobs.grad, plain.trainer_logprobs.grad, **FLOAT64)
    wanted = plain.trainer_mask_logprobs.grad
    if centering:
        got, gone = ours.trainer_mask_logprobs.grad, torch.tensor([7])
        assert (got[gone] == 0).all()  # a constant there: prime-rl's own gradient goes nowhere
        keep = torch.arange(SEQ) != 7
        torch.testing.assert_close(got[keep], wanted[keep], **FLOAT64)
        assert wanted[keep].abs().max() > 0.01
    assert float(out.metrics["score_centering/uncentered"]) == pytest.approx(2 / (SEQ - 1))


def test_the_four_losses_take_the_hooks_options():
    for name, options in (
        ("ipo_loss", {"eps": 0.2, "kl": "squared", "kl_tau": 1e-3}),
        ("icepop_loss", {"ratio_low": 0.5, "ratio_high": 2.0, "kl_tau": 1e-3}),
        ("reinforce_loss", {}),
        ("policy_loss", {"rule": lambda p, q, a: (p - q).exp().clamp(max=2)}),
    ):
        sample = make_sample()
        out = getattr(prime_rl, name)(sample, **options)
        out.loss.backward()
        assert out.loss.isfinite()
        assert sample.trainer_logprobs.grad[:-1].abs().min() > 0
        assert sample.trainer_logprobs.grad[-1] == 0
        assert all(value.dim() == 0 for value in out.metrics.values())


def test_older_inputs_have_no_evidence():
    sample = make_sample()
    del sample.trainer_mask_logprobs, sample.inference_mask_logprobs
    out = prime_rl.icepop_loss(sample)
    assert out.metrics["score_centering/uncentered"] == 1


def test_what_a_sample_came_without_is_unknown():
    """-9999 for all ids of a row: no evidence; for some: they are the tail."""
    sample, whole = make_sample(), make_sample()
    held = sample.inference_mask_logprobs > -torch.inf
    sample.inference_mask_logprobs[0, held[0]] = -9999.0
    sample.inference_mask_logprobs[2, 0] = -9999.0
    out, before = (prime_rl.icepop_loss(x, ratio_high=1.05) for x in (sample, whole))
    assert out.per_token_loss.isfinite().all()
    more = out.metrics["score_centering/uncentered"] - before.metrics["score_centering/uncentered"]
    assert float(more) == pytest.approx(1 / (SEQ - 1))
    out.loss.backward()
    assert (sample.trainer_mask_logprobs.grad[0] == 0).all()
    # A tail of one id is that id: on the logits nothing differs.
    before.loss.backward()
    p = whole.trainer_mask_logprobs.detach()[2, :3].exp()
    on_logits = []
    for each in (sample, whole):
        grad = each.trainer_mask_logprobs.grad[2, :3]
        on_logits.append(grad - p * grad.sum())
    torch.testing.assert_close(*on_logits, rtol=0, atol=1e-7)  # of a tail's mass in float32
    assert on_logits[1].abs().max() > 0.01


def test_one_id_that_is_not_the_labels_is_no_evidence():
    """What prime-rl's head did not replay has a log-probability over the vocabulary."""
    losses = []
    for ids in (1, 2, 0):
        log_q = torch.full((1, 2), -torch.inf, dtype=torch.float64)
        log_q[0, :ids] = -math.log(max(ids, 1))
        sample = Sample(
            trainer_logprobs=torch.tensor([0.1], dtype=torch.float64).log().requires_grad_(),
            inference_logprobs=torch.tensor([0.5], dtype=torch.float64).log(),
            ref_logprobs=None,
            advantages=torch.zeros(1, dtype=torch.float64),
            loss_mask=torch.ones(1, dtype=torch.bool),
            trainer_mask_logprobs=torch.zeros(1, 2, dtype=torch.float64),
            inference_mask_logprobs=log_q,
        )
        out = prime_rl.icepop_loss(sample, kl_tau=1.0)
        assert out.metrics["score_centering/uncentered"] == 1
        losses.append(float(out.loss.detach()))
    assert losses[0] == losses[1] == losses[2] > 0.5
    sample = make_sample()
    alone = prime_rl.icepop_loss(sample, kl_tau=1.0)  # its row 1, of one id, was replayed
    assert float(alone.per_token_loss[1].detach()) == pytest.approx(
        -0.7 * float(sample.loss_weights[1])
    )


def test_fields_that_do_not_fit_are_refused():
    sample = make_sample()
    whole, sample.inference_mask_logprobs = sample.inference_mask_logprobs, None
    with pytest.raises(ValueError, match="must be given together"):
        prime_rl.ipo_loss(sample)
    sample.inference_mask_logprobs = whole[:, :-1]
    with pytest.raises(ValueError, match=r"must be \[\*\(9,\), K\], got \(9, 5\) and \(9, 4\)"):
        prime_rl.ipo_loss(sample)
    sample.inference_mask_logprobs = whole.clone()
    sample.inference_mask_logprobs[2, 1] = torch.nan
    assert prime_rl.ipo_loss(sample).per_token_loss.isnan().tolist() == [i == 2 for i in range(SEQ)]


# --- the head ---


def plain_head(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Tensor, mask: Tensor):
    """The contract: log-probabilities over the mask, elsewhere over V; entropy over V."""
    z = hidden.float() @ weight.float().T if hidden.dtype == torch.bfloat16 else hidden @ weight.T
    z = z / temperature[..., None]
    held = mask >= 0
    at = z.gather(-1, mask.clamp(min=0).long()).masked_fill(~held, -torch.inf)
    replayed = held.any(-1)
    over = torch.where(replayed, at.masked_fill(~replayed[..., None], 0.0).logsumexp(-1), 0.0)
    logz = torch.where(replayed, over, z.logsumexp(-1))
    logp = z.log_softmax(-1)
    kept = torch.where(held, at.masked_fill(~held, 0.0) - logz[..., None], 0.0)
    return {
        "logprobs": z.gather(-1, labels[..., None])[..., 0] - logz,
        "entropy": -(logp.exp() * logp).sum(-1).detach(),
        "mask_logprobs": kept,
    }


def make_head(dtype: torch.dtype = torch.float64):
    g = torch.Generator().manual_seed(2)
    hidden = torch.randn(2, 4, H, generator=g, dtype=dtype)
    weight = torch.randn(V, H, generator=g, dtype=dtype)
    mask = torch.stack([torch.randperm(V, generator=g)[:K] for _ in range(8)]).view(2, 4, K).int()
    labels = mask[..., 1].long().clone()
    mask[0, 1, 2:], mask[0, 2], mask[1, 3, 0] = -1, -1, -1  # padding, no mask, a gap in front
    temperature = torch.rand(2, 4, generator=g) + 0.5
    return hidden, weight, labels, temperature, mask


def heads_linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(H, V, bias=False, dtype=weight.dtype)
    linear.weight = nn.Parameter(weight.clone())
    return linear


def test_the_head_is_the_contract():
    hidden, weight, labels, temperature, mask = make_head()
    head = ReplayOutputLinear.from_linear(heads_linear(weight))
    head.return_mask_logprobs, head.entropy = True, "full"
    leaf, plain, matrix = (x.clone().requires_grad_() for x in (hidden, hidden, weight))
    out = head(leaf, labels, temperature=temperature, sampling_mask=mask)
    wanted = plain_head(plain, matrix, labels, temperature, mask)
    assert out.keys() == wanted.keys()
    g = torch.Generator().manual_seed(0)
    up = torch.randn(2, 4, K, generator=g, dtype=torch.float64)
    for given in (out, wanted):
        (given["logprobs"] * up[..., 0] + (given["mask_logprobs"] * up).sum(-1)).sum().backward()
    for name in wanted:
        torch.testing.assert_close(out[name], wanted[name], **FLOAT64)
    assert not out["entropy"].requires_grad
    torch.testing.assert_close(leaf.grad, plain.grad, **FLOAT64)
    torch.testing.assert_close(head.weight.grad, matrix.grad, **FLOAT64)


def test_a_support_instead_of_a_padded_mask():
    hidden, weight, labels, temperature, mask = make_head()
    head = ReplayOutputLinear.from_linear(heads_linear(weight))
    head.return_mask_logprobs = True
    support = Support.from_rows([(row[row >= 0], None) if (row >= 0).any() else None
                                 for row in mask.view(-1, K)])  # fmt: skip
    padded = head(hidden, labels, temperature, mask)
    flat = head(hidden, labels, temperature, support)
    assert torch.equal(flat["logprobs"], padded["logprobs"])
    assert torch.equal(flat["entropy"], padded["entropy"])
    assert torch.equal(flat["mask_logprobs"], padded["mask_logprobs"][mask >= 0])
    replayed = (mask >= 0).any(-1)
    p = padded["mask_logprobs"].exp()
    inside = -torch.where(mask >= 0, p * padded["mask_logprobs"], 0.0).sum(-1)
    torch.testing.assert_close(padded["entropy"][replayed], inside[replayed], **FLOAT64)


def test_without_a_mask_and_of_rows_that_a_loss_reads():
    hidden, weight, labels, temperature, mask = make_head()
    head = ReplayOutputLinear.from_linear(heads_linear(weight))
    head.return_mask_logprobs = True
    none = torch.full_like(mask, -1)
    wanted = plain_head(hidden, weight, labels, temperature, none)
    for given in (None, none):
        out = head(hidden, labels, temperature, given)
        torch.testing.assert_close(out["logprobs"], wanted["logprobs"], **FLOAT64)
        torch.testing.assert_close(out["entropy"], wanted["entropy"], **FLOAT64)
        assert ("mask_logprobs" in out) == (given is not None)
    on = torch.zeros(2, 4, dtype=torch.bool)
    on[1] = True
    out = head(hidden, labels, temperature, mask, active=on)
    wanted = plain_head(hidden, weight, labels, temperature, mask)
    torch.testing.assert_close(out["logprobs"][1], wanted["logprobs"][1], **FLOAT64)
    assert (out["logprobs"][0] == 0).all()


def test_the_cross_entropy_of_labels_without_a_temperature():
    hidden, weight, labels, _, mask = make_head()
    labels[0, 1] = -100
    head = ReplayOutputLinear.from_linear(heads_linear(weight))
    plain = heads_linear(weight)
    out = head(hidden, labels)["loss"]
    wanted = nn.functional.cross_entropy(
        plain(hidden).view(-1, V), labels.view(-1), reduction="sum"
    )
    out.backward()
    wanted.backward()
    torch.testing.assert_close(out, wanted, **FLOAT64)
    torch.testing.assert_close(head.weight.grad, plain.weight.grad, **FLOAT64)
    with pytest.raises(ValueError, match="temperature must be given with a sampling_mask"):
        head(hidden, labels, sampling_mask=mask)


def test_a_label_outside_its_mask_is_no_fallback():
    hidden, weight, labels, temperature, mask = make_head()
    labels[0, 3] = next(i for i in range(V) if i not in mask[0, 3])
    head = ReplayOutputLinear.from_linear(heads_linear(weight))
    with pytest.raises(ValueError, match=r"labels\[3\] is .*, which its REPLAY row"):
        head(hidden, labels, temperature, mask)


def test_it_takes_the_place_of_prime_rls_own():
    class FusedOutputLinear(nn.Linear):
        return_mask_logprobs = True

    own = FusedOutputLinear(H, V, bias=False)
    head = ReplayOutputLinear.from_linear(own)
    assert head.weight is own.weight
    assert head.return_mask_logprobs
    assert list(head.state_dict()) == ["weight"]
    with pytest.raises(ValueError, match=r"linear must be a plain nn\.Linear"):
        ReplayOutputLinear.from_linear(type("Other", (nn.Linear,), {})(H, V))


def sharded(rank: int) -> None:
    """The weight in float32, bfloat16 where it computes, as prime-rl shards it."""
    hidden, weight, labels, temperature, mask = (x.to(rank_device(rank)) for x in make_head())
    device, mine = rank_device(rank), slice(rank, rank + 1)
    half = torch.bfloat16
    grads = []
    for policy in (
        MixedPrecisionPolicy(half, torch.float32, cast_forward_inputs=False),
        MixedPrecisionPolicy(half, torch.float32),
    ):
        linear = heads_linear(weight.float()).to(device)
        head = ReplayOutputLinear.from_linear(linear)
        head.return_mask_logprobs = True
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        fully_shard(head, mesh=mesh, mp_policy=policy)
        call = partial(head, hidden[mine].to(half), labels[mine], temperature[mine], mask[mine])
        if policy.cast_forward_inputs:
            with pytest.raises(ValueError, match="cast_forward_inputs=False"):
                call()
            continue
        out = call()
        (out["logprobs"].sum() + out["mask_logprobs"].square().sum()).backward()
        grads.append(head.weight.grad.full_tensor())
    matrix = weight.to(half).requires_grad_()
    plain = plain_head(hidden.to(half), matrix, labels, temperature, mask)
    (plain["logprobs"].sum() + plain["mask_logprobs"].square().sum()).backward()
    torch.testing.assert_close(out["logprobs"], plain["logprobs"][mine], rtol=1e-5, atol=1e-5)
    size = float(matrix.grad.abs().max())
    mean = matrix.grad.float() / dist.get_world_size()
    torch.testing.assert_close(grads[0], mean, rtol=0, atol=2**-7 * size)


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
def test_bfloat16_parameters_under_fsdp2():
    run_ranks(sharded, 2)
