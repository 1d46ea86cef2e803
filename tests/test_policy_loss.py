"""Any rule of a token: those of docs/rules.md, their centering; a reference's divergence."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_losses import (
    FLOAT64,
    KINDS,
    Row,
    V,
    as_leaves,
    batch_inputs,
    left_over,
    make_row,
    run,
)

from rl_loss import (
    LossInputs,
    RowKind,
    fused_lm_head_loss,
    icepop_loss,
    ipo_loss,
    policy_loss,
    reinforce_loss,
)

PAGE = (Path(__file__).parent.parent / "docs" / "rules.md").read_text()
ON_PAGE: dict[str, Any] = {}
for block in PAGE.split("```python\n")[1:]:
    exec(block.split("```")[0], ON_PAGE)

# Limits at which the rows of these tests have tokens on both sides.
RULES = {
    "ppo clip": partial(ON_PAGE["ppo_clip"], low=0.3, high=0.4),
    "cispo": partial(ON_PAGE["cispo"], low=0.3, high=0.4),
    "kpop": partial(ON_PAGE["kpop"], limit=0.02),
    "dppo": partial(ON_PAGE["dppo"], limit=0.05),
    "truncated": partial(ON_PAGE["truncated"], cap=1.4),
}
OURS = {
    "icepop": (
        partial(icepop_loss, ratio_low=0.6, ratio_high=1.7),
        lambda p, q, a: torch.where(
            (p - q >= math.log(0.6)) & (p - q <= math.log(1.7)), p - q, -torch.inf
        ).exp(),
    ),
    "ipo": (
        partial(ipo_loss, eps=0.12, max_importance_ratio=1.6),
        lambda p, q, a: torch.where(
            (p.exp() - q.exp()).abs() <= 0.12, (p - q).clamp(max=math.log(1.6)).exp(), 0.0
        ),
    ),
    "reinforce": (reinforce_loss, lambda p, q, a: torch.ones_like(p)),
}


def hand_weight(name: str, log_p: float, log_q: float, advantage: float) -> float:
    """The rules above, a token at a time, as their papers put them."""
    p, q, ratio = math.exp(log_p), math.exp(log_q), math.exp(log_p - log_q)
    if name == "ppo clip":
        clipped = min(max(ratio, 0.7), 1.4)
        return ratio if ratio * advantage <= clipped * advantage else 0.0
    if name == "cispo":
        return min(max(ratio, 0.7), 1.4)
    if name == "truncated":
        return min(ratio, 1.4)
    if name == "dppo":
        worse = ratio > 1 if advantage > 0 else ratio < 1
        return 0.0 if worse and abs(p - q) > 0.05 else ratio
    p, q = (min(max(x, 1e-6), 1 - 1e-6) for x in (p, q))

    def binary(a: float, b: float) -> float:
        return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))

    return ratio if binary(p, q) <= 0.02 and binary(q, p) <= 0.02 else 0.0


def hand_mean_score(row: Row, name: str, advantage: float) -> torch.Tensor:
    """grad mu of a row whose q is known for every id, or whose tail the rule weighs by ratio."""
    logp, p, total = row.logp(), row.logp().exp(), torch.zeros(V, dtype=torch.float64)
    if row.kind == RowKind.DRAWS:
        for v in row.ids:
            weight = hand_weight(name, logp[v], row.q[v].log(), advantage)
            total += weight * row.score(v) / len(row.ids)
        return total
    known = [v for v, k in zip(row.ids, row.known, strict=True) if k]
    for v in known:
        total += row.q[v] * hand_weight(name, logp[v], row.q[v].log(), advantage) * row.score(v)
    tail = row.tail() if known else []
    if tail:
        p_tail, q_tail = p[tail].sum(), row.tail_mass()
        # Many ids of the tail's ratio and of hardly any mass each.
        weight = hand_weight(name, p_tail.log() - 25, math.log(q_tail) - 25, advantage)
        if name == "kpop":  # whose probabilities end at 1e-6 on the page
            weight = float(p_tail / q_tail)
        total += q_tail * weight * sum(p[v] / p_tail * row.score(v) for v in tail)
    return total


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("advantage", [-1.3, 0.8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RULES)
def test_gradient_and_value_by_hand(name, kind, advantage, seed):
    row, weight = make_row(kind, seed), 0.7
    log_p, log_q = float(row.logp()[row.label]), float(row.q[row.label].log())
    w = hand_weight(name, log_p, log_q, advantage)
    wanted = w * row.score(row.label) - hand_mean_score(row, name, advantage)
    loss = partial(policy_loss, rule=RULES[name])
    out, got = run(row, loss, row.label, log_q=log_q, advantage=advantage, weight=weight)
    torch.testing.assert_close(got, -advantage * weight * wanted, **FLOAT64)
    assert float(out.loss.detach()) == pytest.approx(-advantage * weight * w, rel=1e-13)
    assert float(out.metrics["is_masked"]) == float(w == 0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("name", RULES)
def test_expected_gradient_is_zero(name, advantage, seed):
    """Every label of a complete support under q, the advantage constant: the law of centering."""
    row, loss = make_row("replay", seed), partial(policy_loss, rule=RULES[name])
    while nothing_moved(row, name, advantage):
        row = make_row("replay", seed := seed + 10)
    total, plain = torch.zeros(V, dtype=torch.float64), torch.zeros(V, dtype=torch.float64)
    for label in row.ids:
        given = {"log_q": float(row.q[label].log()), "advantage": advantage}
        total += row.q[label] * run(row, loss, label, **given)[1]
        bare = partial(loss, score_centering=False)
        plain += row.q[label] * run(row, bare, label, **given)[1]
    assert float(total.abs().max()) < left_over(row.q)
    assert float(plain.abs().max()) > 1e-3  # what centering has taken off


def nothing_moved(row: Row, name: str, advantage: float) -> bool:
    """Whether every weight is the ratio: then there is nothing to center."""
    logp = row.logp()
    pairs = [(float(logp[v]), float(row.q[v].log())) for v in row.ids]
    return all(abs(hand_weight(name, p, q, advantage) - math.exp(p - q)) < 0.05 for p, q in pairs)


@pytest.mark.parametrize("kind", ["incomplete", "head"])
@pytest.mark.parametrize("name", ["ppo clip", "cispo", "truncated"])
def test_rules_of_the_ratio_are_exact_under_the_tail_model(name, kind):
    row, loss = make_row(kind, 1), partial(policy_loss, rule=RULES[name])
    q, total = row.modelled_q(), torch.zeros(V, dtype=torch.float64)
    for label in range(V):
        if q[label] > 0:
            out, grad = run(row, loss, label, log_q=float(q[label].log()))
            total += q[label] * grad
            assert out.metrics["score_centering/tail_inexact"] == 0
    assert float(total.abs().max()) < left_over(q)


def test_a_tail_that_a_rule_may_see_otherwise_is_counted():
    """A rule of differences rejects an id that held the whole tail, and no small one."""
    row = make_row("head", 2)
    tail = row.tail()
    gap = abs(float(row.logp().exp()[tail].sum()) - row.tail_mass())
    for limit, inexact in ((gap * 0.9, 1), (gap * 1.1, 0)):
        loss = partial(policy_loss, rule=partial(ON_PAGE["dppo"], limit=limit))
        sign = 1.0 if row.logp().exp()[tail].sum() > row.tail_mass() else -1.0
        out, _ = run(row, loss, row.label, log_q=float(row.q[row.label].log()), advantage=sign)
        assert out.metrics["score_centering/tail_inexact"] == inexact


@pytest.mark.parametrize("name", OURS)
def test_the_named_losses_are_such_rules(name):
    named, rule = OURS[name]
    inputs, _ = batch_inputs()
    grads = []
    for loss in (named, partial(policy_loss, rule=rule)):
        leaves = as_leaves(inputs)
        out = loss(leaves, kl_tau=0.3, kl_on="kept")
        out.loss.backward()
        found = [leaves.trainer_logprobs.grad, leaves.trainer_support_logprobs.grad]
        grads.append([*found, out.metrics["is_masked"], out.metrics["sampler_kl"]])
    for ours, custom in zip(*grads, strict=True):
        torch.testing.assert_close(custom, ours, **FLOAT64)


@pytest.mark.parametrize("given", [torch.nan, torch.inf])
def test_what_a_rule_gives_where_no_loss_reads_never_matters(given):
    """Places outside the mask, padding and absent tails hold log p = log q = A = 0."""
    inputs, _ = batch_inputs()
    kept = as_leaves(inputs)
    mask = kept.loss_mask.clone()
    mask.view(-1)[1] = False
    grads = []
    for rule in (
        lambda p, q, a: (p - q).exp(),
        lambda p, q, a: torch.where((p == 0) & (q == 0), given, (p - q).exp()),
    ):
        leaves = replace(as_leaves(inputs), loss_mask=mask)
        out = policy_loss(leaves, rule=rule)
        out.loss.backward()
        grads.append([out.per_token_loss, leaves.trainer_logprobs.grad])
        grads[-1].append(leaves.trainer_support_logprobs.grad)
    for one, other in zip(*grads, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)


def test_a_rule_may_write_into_what_it_is_given():
    inputs, _ = batch_inputs()
    found = []
    for rule in (lambda p, q, a: (p - q).exp(), lambda p, q, a: p.sub_(q).exp_().add_(a.mul_(0))):
        leaves = as_leaves(inputs)
        out = policy_loss(leaves, rule=rule, kl_tau=0.5)
        out.loss.backward()
        found.append([out.per_token_loss, leaves.trainer_support_logprobs.grad])
        found[-1] += out.metrics.values()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (0.5, "rule must be a function of tokens, got float"),
        (lambda p, q, a: 1.0, "one weight a token, .* got float"),
        (lambda p, q, a: p.sum(), r"one weight a token, \(2,\) as its log_p, got \(\)"),
    ],
)
def test_what_is_no_rule_is_refused(rule, message):
    logp, on = torch.zeros(2), torch.ones(2, dtype=torch.bool)
    with pytest.raises(ValueError, match=message):
        policy_loss(LossInputs(logp, logp, logp, on), rule=rule)


def test_in_one_pass():
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 5, generator=g, dtype=torch.float64) for n in (6, 11))
    given = {
        "inference_logprobs": -torch.rand(6, generator=g, dtype=torch.float64) * 3,
        "advantages": torch.randn(6, generator=g, dtype=torch.float64),
        "ref_logprobs": -torch.rand(6, generator=g, dtype=torch.float64) * 3,
    }
    labels, leaf = torch.randint(11, (6,), generator=g), hidden.clone().requires_grad_()
    loss = partial(policy_loss, rule=RULES["ppo clip"], ref_tau=0.2, kl_max_ratio=math.inf)
    out = fused_lm_head_loss(leaf, weight, labels, loss=loss, **given)
    out.loss.backward()
    plain = hidden.clone().requires_grad_()
    log_p = (plain @ weight.T).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    ratio, a = (log_p - given["inference_logprobs"]).exp(), given["advantages"]
    x = given["ref_logprobs"] - log_p
    surrogate = torch.minimum(ratio * a, ratio.clamp(0.7, 1.4) * a)
    (-surrogate + 0.2 * (x.exp() - 1 - x)).sum().backward()
    torch.testing.assert_close(leaf.grad, plain.grad, **FLOAT64)


def test_gspo_through_loss_weights():
    """Against the gradient of its loss, taken by autograd through the sequence ratio."""
    g = torch.Generator().manual_seed(1)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    log_q = -torch.rand(4, 4, generator=g, dtype=torch.float64) * 3
    log_p = log_q + 3e-4 * torch.randn(4, 4, generator=g, dtype=torch.float64)
    advantages = torch.tensor([1.0, -0.5, 2.0, 1.0]).double()[:, None].expand(4, 4)
    leaf, plain = (log_p.clone().requires_grad_() for _ in range(2))
    ON_PAGE["gspo"](LossInputs(leaf, log_q, advantages, mask)).loss.backward()
    length = mask.sum(-1).clamp(min=1)
    ratio = (((plain - log_q) * mask).sum(-1) / length).exp()
    a = advantages[:, 0]
    (-torch.minimum(ratio * a, ratio.clamp(1 - 3e-4, 1 + 4e-4) * a))[:3].sum().backward()
    torch.testing.assert_close(leaf.grad, plain.grad, **FLOAT64)
    assert (leaf.grad != 0).any()


# --- the reference ---


@pytest.mark.parametrize("max_ratio", [1.5, 10.0, math.inf])
@pytest.mark.parametrize("loss", [icepop_loss, ipo_loss, reinforce_loss])
def test_the_divergence_from_a_reference(loss, max_ratio):
    """Value and gradient of `e^x - 1 - x`, rejected tokens included, with its tangent beyond the
    bound."""
    log_p = torch.tensor([-1.0, -2.0, -4.0, -0.3], dtype=torch.float64)
    ref = torch.tensor([-1.2, -0.5, -1.0, -9.0], dtype=torch.float64)
    log_q = torch.tensor([-1.0, -9.0, -4.1, -0.4], dtype=torch.float64)  # the second is rejected
    on = torch.tensor([True, True, True, False])
    weights = torch.tensor([1.0, 0.5, 2.0, 3.0], dtype=torch.float64)
    zero = torch.zeros(4, dtype=torch.float64)
    leaf, plain = (log_p.clone().requires_grad_() for _ in range(2))
    inputs = LossInputs(leaf, log_q, zero, on, weights, ref_logprobs=ref)
    out = loss(inputs, ref_tau=0.3, kl_max_ratio=max_ratio)
    out.loss.backward()
    x = ref - plain
    bound = math.log(max_ratio) if max_ratio < math.inf else 20.0
    at = x.clamp(max=bound)
    beyond = (x - at.detach()) * at.detach().expm1()
    k3 = torch.where(x > bound, at.detach().expm1() - at.detach() + beyond, x.expm1() - x)
    wanted = 0.3 * weights * k3 * on
    wanted.sum().backward()
    torch.testing.assert_close(out.per_token_loss, wanted, **FLOAT64)
    torch.testing.assert_close(leaf.grad, plain.grad, **FLOAT64)
    assert float(out.metrics["ref_kl"]) == pytest.approx(float(k3[:3].mean()), rel=1e-6)
    assert int(out.metric_counts["ref_kl"]) == 3


def test_a_reference_is_read_or_refused():
    log_p, on = torch.tensor([-1.0, -2.0]), torch.ones(2, dtype=torch.bool)
    inputs = LossInputs(log_p.requires_grad_(), log_p.detach(), torch.ones(2), on)
    with pytest.raises(ValueError, match=r"ref_logprobs must be given with ref_tau 0\.1, got None"):
        icepop_loss(inputs, ref_tau=0.1)
    with pytest.raises(ValueError, match="ref_tau must be finite, at least 0, got -1"):
        icepop_loss(inputs, ref_tau=-1)
    assert icepop_loss(inputs).metric_counts["ref_kl"] == 0
    ref = replace(inputs, ref_logprobs=torch.tensor([-1.5, -torch.inf]))
    out = icepop_loss(ref, ref_tau=0.1)
    assert out.per_token_loss.isnan().tolist() == [False, True]
    assert not icepop_loss(ref).per_token_loss.isnan().any()
    for wrong, message in (
        (torch.zeros(3), r"ref_logprobs must be \(2,\) as loss_mask, got \(3,\)"),
        (torch.zeros(2, dtype=torch.bfloat16), "ref_logprobs must be in float32"),
        ([0.0, 0.0], "ref_logprobs must be a tensor, got list"),
    ):
        with pytest.raises(ValueError, match=message):
            icepop_loss(replace(inputs, ref_logprobs=wrong))
