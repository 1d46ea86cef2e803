"""The losses against formulas written out by hand, token by token, in float64."""

import math
from dataclasses import dataclass, fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from factory import relative_error
from torch.utils.checkpoint import checkpoint

from rl_loss import (
    LossInputs,
    RowKind,
    Support,
    combine_metrics,
    fused_lm_head,
    icepop_loss,
    ipo_loss,
    reinforce_loss,
)

LOSSES = {
    "ipo": partial(ipo_loss, eps=0.12, max_importance_ratio=1.6),
    "icepop": partial(icepop_loss, ratio_low=0.6, ratio_high=1.7),
    "reinforce": reinforce_loss,
}
KINDS = ["replay", "incomplete", "ids only", "head", "draws", "none"]
V = 7
# Two ways to one number in float64: sums of at most a hundred terms of size 10 at most, each
# within two units of rounding (2e-16), are 4e-13 apart at most.
FLOAT64 = {"rtol": 1e-13, "atol": 4e-13}


def hand_weight(name: str, log_p: float, log_q: float, tail: bool = False) -> float:
    """The rules of the losses above."""
    ratio = math.exp(log_p - log_q)
    if name == "reinforce":
        return 1.0
    if name == "icepop":
        return ratio if 0.6 <= ratio <= 1.7 else 0.0
    if not tail and abs(math.exp(log_p) - math.exp(log_q)) > 0.12:
        return 0.0
    return min(ratio, 1.6)


@dataclass
class Row:
    """One row with its logits and the sampler's whole distribution q over V.

    The q of recorded ids is the one that float32 log-probabilities hold, as is the tail's mass,
    so that a formula written out in float64 reads the numbers that the loss reads.
    """

    z: torch.Tensor
    q: torch.Tensor
    ids: list[int]
    known: list[bool]
    kind: RowKind
    label: int = 0

    def support(self) -> Support:
        if self.kind == RowKind.NONE:
            return Support.empty(1)
        return Support.from_rows(
            [(self.ids, self.q[self.ids].log(), self.known)],
            kind=self.kind,
            tail_mass=self.tail_mass(),
        )

    def tail_mass(self) -> float:
        """What q puts outside the known ids, as float32 holds it."""
        if self.kind == RowKind.DRAWS or not self.tail():
            return 0.0
        known = [v for v, known in zip(self.ids, self.known, strict=True) if known]
        return float((1 - self.q[known].sum()).float())

    def logp(self) -> torch.Tensor:
        """log p over the row's normaliser, -inf outside it."""
        kept = self.ids if self.kind == RowKind.REPLAY else list(range(V))
        out = torch.full((V,), -torch.inf, dtype=torch.float64)
        out[kept] = self.z[kept].log_softmax(0)
        return out

    def score(self, v: int) -> torch.Tensor:
        """grad log p_v by the logits."""
        grad = -self.logp().exp()
        grad[v] += 1
        return grad

    def tail(self) -> list[int]:
        kept = self.ids if self.kind == RowKind.REPLAY else range(V)
        known = {v for v, k in zip(self.ids, self.known, strict=True) if k}
        return [v for v in kept if v not in known]

    def modelled_q(self) -> torch.Tensor:
        """q with its tail replaced by p's tail rescaled."""
        q, tail = self.q.clone(), self.tail()
        if tail and self.kind in (RowKind.REPLAY, RowKind.HEAD):
            p = self.logp().exp()[tail]
            q[tail] = self.tail_mass() * p / p.sum()
        return q


def make_row(name: str, seed: int) -> Row:
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(V, generator=g, dtype=torch.float64) * 1.5
    q = (z + 0.6 * torch.randn(V, generator=g, dtype=torch.float64)).softmax(0)
    ids = torch.randperm(V, generator=g)[:5].tolist()
    known = [True] * 5
    kind = RowKind.REPLAY
    if name in ("replay", "incomplete", "ids only"):
        inside = torch.zeros(V, dtype=torch.float64)
        inside[ids] = q[ids] / q[ids].sum()
        q = inside
    if name == "incomplete":
        known = [True, False, True, False, True]
    if name == "ids only":
        known = [False] * 5
    if name == "head":
        kind, ids, known = RowKind.HEAD, ids[:3], [True] * 3
    if name == "draws":
        kind = RowKind.DRAWS
        ids = torch.multinomial(q, 4, replacement=True, generator=g).tolist()
        known = [True] * 4
    if name == "none":
        kind, ids, known = RowKind.NONE, [], []
    q[ids] = q[ids].log().float().double().exp()
    row = Row(z, q, ids, known, kind)
    row.label = int(torch.multinomial(q, 1, generator=g))
    return row


def hand_centering(row: Row, rule: str) -> torch.Tensor:
    logp, logq, total = row.logp(), row.q.log(), torch.zeros(V, dtype=torch.float64)
    known = [v for v, k in zip(row.ids, row.known, strict=True) if k]
    if row.kind == RowKind.DRAWS:
        for v in row.ids:
            total += hand_weight(rule, logp[v], logq[v]) * row.score(v) / len(row.ids)
        return total
    if not known:
        return total
    for v in known:
        total += row.q[v] * hand_weight(rule, logp[v], logq[v]) * row.score(v)
    tail = row.tail()
    if tail:
        q_tail, p = row.tail_mass(), logp.exp()
        p_tail = p[tail].sum()
        score = sum(p[v] / p_tail * row.score(v) for v in tail)
        weight = hand_weight(rule, p_tail.log(), math.log(q_tail), tail=True)
        total += q_tail * weight * score
    return total


def hand_estimate(x: float, direction: str, max_ratio: float) -> tuple[float, float]:
    """Value and slope at the log-ratio x: beyond the bound, those of the tangent there."""
    if direction == "squared":
        return x * x, 2 * x
    at = min(x, math.log(max_ratio))
    slope = math.exp(at) - 1 if direction == "forward" else at * math.exp(at)
    value = math.exp(at) - 1 - at
    if direction == "reverse":
        value = at * math.exp(at) - math.exp(at) + 1
    return value + slope * (x - at), slope


def hand_kl(row: Row, direction: str, max_ratio: float = 10.0) -> tuple[float, torch.Tensor]:
    """Value and gradient by the logits."""
    logp, logq, grad = row.logp(), row.q.log(), torch.zeros(V, dtype=torch.float64)
    known = [v for v, k in zip(row.ids, row.known, strict=True) if k]
    if direction == "squared" or row.kind in (RowKind.NONE, RowKind.DRAWS) or not known:
        drawn, value = [row.label], 0.0
        if row.kind == RowKind.DRAWS and direction != "squared":
            drawn = row.ids
        for v in drawn:
            one, slope = hand_estimate(float(logp[v] - logq[v]), direction, max_ratio)
            value += one / len(drawn)
            grad += slope * row.score(v) / len(drawn)
        return value, grad
    tail, p, value = row.tail(), logp.exp(), 0.0
    entries = [(p[v], row.q[v], row.score(v)) for v in known]
    if tail:
        p_tail = p[tail].sum()
        score = sum(p[v] / p_tail * row.score(v) for v in tail)
        entries.append((p_tail, torch.tensor(row.tail_mass(), dtype=torch.float64), score))
    for p_v, q_v, score in entries:
        if direction == "forward":
            value += float(q_v * (q_v / p_v).log())
            grad -= q_v * score
        else:
            value += float(p_v * (p_v / q_v).log())
            grad += p_v * (p_v / q_v).log() * score
    return value, grad


def run(row: Row, loss, label: int, *, log_q: float, advantage: float = 1.0, weight: float = 1.0):
    z = row.z[None].clone().requires_grad_()
    support = row.support()
    out = fused_lm_head(z, torch.eye(V, dtype=torch.float64), torch.tensor([label]), support)
    inputs = LossInputs.from_head(
        out,
        support,
        inference_logprobs=torch.tensor([log_q], dtype=torch.float64),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        loss_weights=torch.tensor([weight], dtype=torch.float64),
    )
    result = loss(inputs)
    result.loss.backward()
    return result, z.grad[0]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("direction", [None, "forward", "reverse", "squared"])
@pytest.mark.parametrize("centering", [True, False], ids=["centered", "plain"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", LOSSES)
def test_gradient_and_value_by_hand(rule, kind, centering, direction, seed):
    row = make_row(kind, seed)
    advantage, weight, adv_tau, kl_tau = -1.3, 0.7, 0.9, 0.4
    log_p, log_q = float(row.logp()[row.label]), float(row.q[row.label].log())
    w = hand_weight(rule, log_p, log_q)
    grad = w * row.score(row.label)
    if centering:
        grad = grad - hand_centering(row, rule)
    scale = adv_tau * advantage * weight
    grad, value = -scale * grad, -scale * (log_p if rule == "reinforce" else w)
    kl = {}
    if direction is not None:
        kl = {"kl_tau": kl_tau, "kl": direction}
        kl_value, kl_grad = hand_kl(row, direction)
        grad, value = grad + kl_tau * weight * kl_grad, value + kl_tau * weight * kl_value
    loss = partial(LOSSES[rule], adv_tau=adv_tau, score_centering=centering, **kl)
    result, got = run(row, loss, row.label, log_q=log_q, advantage=advantage, weight=weight)
    torch.testing.assert_close(got, grad, **FLOAT64)
    assert float(result.loss.detach()) == pytest.approx(value, rel=1e-13, abs=4e-13)


def tail_gap(row: Row) -> float:
    return float((row.logp().exp() - row.modelled_q()).abs()[row.tail()].max())


def left_over(q: torch.Tensor) -> float:
    """How far from 0 an expectation under q may be: in float32 q adds up to 1 within 1e-7, and
    grad mu, at most 2 under the rules above, is taken off once, not sum(q) times."""
    return 2 * abs(1 - float(q.sum())) + FLOAT64["atol"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["replay", "incomplete", "head"])
@pytest.mark.parametrize("rule", LOSSES)
def test_expected_gradient_is_zero(rule, kind, seed):
    """Every label under the modelled q, constant advantage: the law of centering."""
    row = make_row(kind, seed)
    while rule == "ipo" and row.tail() and tail_gap(row) > 0.12:
        row = make_row(kind, seed := seed + 10)  # exact only where no tail token is rejected
    q, loss = row.modelled_q(), LOSSES[rule]
    total, size = torch.zeros(V, dtype=torch.float64), 0.0
    for label in range(V):
        if q[label] > 0:
            _, grad = run(row, loss, label, log_q=float(q[label].log()))
            total += q[label] * grad
            size += float(q[label] * grad.abs().max())
    assert float(total.abs().max()) < left_over(q)
    if rule == "reinforce":
        assert size > 0.01


@pytest.mark.parametrize("rule", LOSSES)
def test_expected_gradient_of_draws_is_zero(rule):
    """Every label and every pair of draws, each under q."""
    row = make_row("draws", 1)
    row = replace(row, q=row.q.log().float().double().exp())  # any id may be drawn
    total = torch.zeros(V, dtype=torch.float64)
    for label in range(V):
        _, grad = run(
            replace(row, kind=RowKind.NONE, ids=[], known=[]),
            LOSSES[rule],
            label,
            log_q=float(row.q[label].log()),
        )
        total += row.q[label] * grad
    for one in range(V):
        for two in range(V):
            pair = replace(row, ids=[one, two], known=[True, True])
            _, centered = run(pair, LOSSES[rule], 0, log_q=float(row.q[0].log()))
            _, plain = run(
                pair,
                partial(LOSSES[rule], score_centering=False),
                0,
                log_q=float(row.q[0].log()),
            )
            total += row.q[one] * row.q[two] * (centered - plain)
    assert float(total.abs().max()) < left_over(row.q)


def test_a_row_with_nothing_rejected_needs_no_centering():
    """Where w = r on every kept entry, grad mu is minus the rejected share of p."""
    row = make_row("replay", 0)
    loss = partial(icepop_loss, ratio_low=0.0, ratio_high=1e9)
    _, centered = run(row, loss, row.label, log_q=float(row.q[row.label].log()))
    _, plain = run(
        row, partial(loss, score_centering=False), row.label, log_q=float(row.q[row.label].log())
    )
    torch.testing.assert_close(centered, plain, **FLOAT64)


# --- far apart, small tails, excluded values ---


def tokens(log_p, log_q, *, dtype=torch.float32, **more) -> LossInputs:
    log_p = torch.tensor(log_p, dtype=dtype, requires_grad=True)
    defaults = {
        "advantages": torch.ones(len(log_p), dtype=dtype),
        "loss_mask": torch.ones(len(log_p), dtype=torch.bool),
    }
    return LossInputs(log_p, torch.tensor(log_q, dtype=dtype), **{**defaults, **more})


@pytest.mark.parametrize("centering", [True, False])
@pytest.mark.parametrize("direction", ["forward", "reverse", "squared"])
@pytest.mark.parametrize("loss", [ipo_loss, icepop_loss, reinforce_loss])
def test_log_ratios_of_90_stay_finite(loss, direction, centering):
    log_p, log_q = [-2.0, -0.5, -91.0, -1.0], [-91.0, -91.0, -1.0, -1.1]
    options = {"score_centering": centering, "kl": direction}
    for kl_tau in (0.0, 1.0):
        inputs = tokens(log_p, log_q)
        out = loss(inputs, kl_tau=kl_tau, **options)
        out.loss.backward()
        grad = inputs.trainer_logprobs.grad
        assert out.loss.isfinite()
        assert grad.isfinite().all()
        assert all(value.isfinite() for value in out.metrics.values())
        assert out.metrics["log_ratio_clipped"] == 0.5
        if kl_tau == 0:
            kept = {
                ipo_loss: [1e4, 0, 0, math.exp(0.1)],
                icepop_loss: [0, 0, 0, math.exp(0.1)],
                reinforce_loss: [1, 1, 1, 1],
            }[loss]
            if loss is ipo_loss:  # |e^-91 - e^-1| is above eps, e^-2 is not
                kept[2] = 0
            for value, weight in zip(grad.tolist(), kept, strict=True):
                # The largest x, log(1e4), has a unit of 2**-20, and exp(x) that share of itself.
                assert value == pytest.approx(-weight, rel=2**-20)
                assert weight or value == 0.0
            alone = tokens(log_p[3:], log_q[3:])
            loss(alone, **options).loss.backward()
            assert torch.equal(grad[3:], alone.trainer_logprobs.grad)


@pytest.mark.parametrize("centering", [True, False])
@pytest.mark.parametrize("direction", ["forward", "reverse", "squared"])
@pytest.mark.parametrize("kind", [RowKind.REPLAY, RowKind.HEAD, RowKind.DRAWS])
@pytest.mark.parametrize("loss", [ipo_loss, icepop_loss, reinforce_loss])
def test_support_entries_90_apart_stay_finite(loss, kind, direction, centering):
    """One entry that p all but excludes, one that q does, and a tail that both disagree about."""
    logp = torch.tensor([-0.01, -91.0, -5.0], requires_grad=True)
    tail = torch.tensor([-95.0], requires_grad=True)
    inputs = LossInputs(
        logp[:1],
        torch.tensor([-91.0]),
        torch.ones(1),
        torch.ones(1, dtype=torch.bool),
        trainer_support_logprobs=logp,
        sampler_support_logprobs=torch.tensor([-91.0, math.log(0.6), math.log(0.3)]),
        sampler_tail_mass=torch.tensor([0.1]) if kind != RowKind.DRAWS else torch.zeros(1),
        trainer_tail_logprobs=tail,
        support_offsets=torch.tensor([0, 3]),
        support_kind=torch.tensor([kind], dtype=torch.int8),
    )
    out = loss(inputs, kl_tau=1.0, kl=direction, score_centering=centering)
    out.loss.backward()
    assert out.loss.isfinite()
    assert logp.grad.isfinite().all()
    assert tail.grad is None or tail.grad.isfinite().all()
    assert all(value.isfinite() for value in out.metrics.values())


@pytest.mark.parametrize("direction", ["forward", "reverse", "squared"])
@pytest.mark.parametrize("rule", LOSSES)
def test_bitwise_equal_logprobs_have_no_divergence(rule, direction):
    """Ratio exactly 1, nothing rejected, KL exactly 0 in value and gradient on every kind."""
    inputs, _ = batch_inputs()
    valid = inputs.support_valid
    same = as_leaves(
        replace(
            inputs,
            inference_logprobs=inputs.trainer_logprobs.detach().clone(),
            sampler_support_logprobs=torch.where(
                valid, inputs.trainer_support_logprobs.detach(), torch.nan
            ),
            sampler_tail_mass=inputs.trainer_tail_logprobs.detach().exp(),
            advantages=torch.zeros(12, dtype=torch.float64),
        )
    )
    # exp and log do not invert each other bitwise: the tail's log has to be q's own.
    same.trainer_tail_logprobs = same.sampler_tail_mass.log().requires_grad_()
    out = LOSSES[rule](same, kl_tau=1.0, kl=direction)
    assert torch.equal(out.per_token_loss, torch.zeros(12, dtype=torch.float64))
    assert out.metrics["importance_ratio_mean"] == 1
    assert out.metrics["is_masked"] == 0
    assert out.metrics["mismatch_kl"] == 0
    assert out.metrics["sampler_kl"] == 0


def test_bounds_are_inclusive():
    log_q = [-3.0, -3.0, -3.0, -3.0]
    low, high = math.log(0.2), math.log(5.0)
    inputs = tokens([0.0, 0.0, 0.0, 0.0], log_q)
    inputs.trainer_logprobs = torch.tensor(
        [-3 + high - 1e-5, -3 + high + 1e-5, -3 + low + 1e-5, -3 + low - 1e-5]
    )
    masked = [icepop_loss(replace_rows(inputs, i)).metrics["is_masked"] for i in range(4)]
    assert [float(m) for m in masked] == [0, 1, 0, 1]
    exact = tokens([math.log(0.5)], [math.log(0.5)])
    assert icepop_loss(exact, ratio_low=1.0, ratio_high=1.0).metrics["is_masked"] == 0
    assert ipo_loss(exact, eps=0.0).metrics["is_masked"] == 0


def replace_rows(inputs: LossInputs, i: int) -> LossInputs:
    return replace(
        inputs,
        **{
            name: getattr(inputs, name)[i : i + 1]
            for name in ("trainer_logprobs", "inference_logprobs", "advantages", "loss_mask")
        },
    )


def test_kl_gradient_is_a_sum_of_products():
    """Advantages 0, kl_tau 1, log-ratios .3 and -.2, sampled tokens alone."""
    x = torch.tensor([0.3, -0.2], dtype=torch.float64)
    expected = {
        "forward": (x.exp() - 1 - x, x.exp() - 1),
        "reverse": (x * x.exp() - x.exp() + 1, x * x.exp()),
        "squared": (x**2, 2 * x),
    }
    for direction, (value, grad) in expected.items():
        inputs = tokens([-1.0, -1.0], [-1.3, -0.8], dtype=torch.float64, advantages=torch.zeros(2))
        out = ipo_loss(inputs, kl_tau=1.0, kl=direction)
        out.loss.backward()
        torch.testing.assert_close(out.per_token_loss, value, **FLOAT64)
        torch.testing.assert_close(inputs.trainer_logprobs.grad, grad, **FLOAT64)
        assert out.metrics["sampler_kl"] == pytest.approx(float(value.mean()), rel=1e-13)


# --- on which tokens KL acts, and how far an estimate reaches ---


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kl_on", ["all", "kept"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "squared"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", LOSSES)
def test_bounded_kl_of_chosen_tokens_by_hand(rule, kind, direction, kl_on, seed):
    """Every label that q can draw, so rejected and kept ones; ratios above 1.2 are many."""
    row = make_row(kind, seed)
    loss = partial(
        LOSSES[rule], kl_tau=0.4, kl=direction, kl_on=kl_on, kl_max_ratio=1.2, adv_tau=0.0
    )
    for label in range(V):
        if row.q[label] == 0:
            continue
        row.label, log_q = label, float(row.q[label].log())
        value, grad = hand_kl(row, direction, 1.2)
        kept = rule == "reinforce" or hand_weight(rule, float(row.logp()[label]), log_q) > 0
        acts = kept or kl_on == "all"
        result, got = run(row, loss, label, log_q=log_q, weight=0.7)
        torch.testing.assert_close(got, 0.4 * 0.7 * acts * grad, **FLOAT64)
        assert float(result.loss.detach()) == pytest.approx(0.28 * acts * value, abs=4e-13)
        assert float(result.metrics["sampler_kl"]) == pytest.approx(acts * value, abs=4e-13)
        assert int(result.metric_counts["sampler_kl"]) == acts
        if not acts:
            assert (got == 0).all()
            assert result.loss == 0


@pytest.mark.parametrize("direction", ["forward", "reverse", "squared"])
@pytest.mark.parametrize("rule", LOSSES)
def test_kl_on_kept_tokens_leaves_rejected_rows_as_without_kl(rule, direction):
    """A batch of every kind, its sampled tokens moved so that one in two is rejected."""
    inputs, _ = batch_inputs()
    near = inputs.trainer_logprobs.detach()
    far = torch.arange(12) % 4 < 2
    inputs = replace(inputs, inference_logprobs=torch.where(far, near - 4, near - 0.1))
    results = {}
    for name, options in {"all": {}, "kept": {"kl_on": "kept"}, "none": {"kl_tau": 0.0}}.items():
        case = as_leaves(inputs)
        out = LOSSES[rule](case, **{"kl_tau": 0.3, "kl": direction, **options})
        out.loss.backward()
        grads = [
            case.trainer_logprobs.grad,
            case.trainer_support_logprobs.grad,
            case.trainer_tail_logprobs.grad,
        ]
        results[name] = out, grads
    kept = torch.full((12,), rule == "reinforce") | ~far
    if rule == "ipo":
        q = inputs.inference_logprobs.exp()
        kept = (near.exp() - q).abs() <= 0.12
    assert rule == "reinforce" or 0 < int(kept.sum()) < 12
    rows = torch.repeat_interleave(torch.arange(12), inputs.support_offsets.diff())
    out, grads = results["kept"]
    for name, where in (("all", kept), ("none", ~kept)):
        other, wanted = results[name]
        assert torch.equal(out.per_token_loss[where], other.per_token_loss[where])
        for grad, expected, at in zip(grads, wanted, (where, where[rows], where), strict=True):
            assert torch.equal(grad[at], expected[at])
    assert not torch.equal(results["all"][0].per_token_loss, results["none"][0].per_token_loss)
    term = (results["all"][0].per_token_loss - results["none"][0].per_token_loss).detach()
    values = term / (0.3 * inputs.loss_weights)
    # A difference of losses below 10, divided by weights above 0.01.
    expected = pytest.approx(float(values[kept].mean()), abs=1e-12)
    assert float(out.metrics["sampler_kl"]) == expected
    assert int(out.metric_counts["sampler_kl"]) == int(kept.sum())


@pytest.mark.parametrize("max_ratio", [1.0, 1.2, 10.0, 1e4, math.inf])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_an_estimate_goes_on_along_its_tangent(direction, max_ratio):
    """To both sides of the bound, the slope as the derivative of the value."""
    bound = min(math.log(max_ratio), 20.0)
    steps = [-90.0, -3.0, -0.1, 0.0, 0.3, bound - 1e-3, bound, bound + 1e-3, bound + 3.0, 90.0]
    x = torch.tensor(sorted(steps), dtype=torch.float64, requires_grad=True)
    at = x.clamp(max=bound)
    most = math.expm1(bound) if direction == "forward" else bound * math.exp(bound)
    wanted = at.exp() - 1 - at if direction == "forward" else at * at.exp() - at.exp() + 1
    wanted = wanted + most * (x - x.detach().clamp(max=bound)) * (x > bound)
    wanted.sum().backward()
    log_p = (x.detach() - 95).tolist()
    inputs = tokens(log_p, [-95.0] * len(x), dtype=torch.float64, advantages=torch.zeros(len(x)))
    out = reinforce_loss(inputs, kl_tau=1.0, kl=direction, kl_max_ratio=max_ratio)
    out.loss.backward()
    values, slopes = out.per_token_loss.detach(), inputs.trainer_logprobs.grad
    # A unit of x - 95 is 1.4e-14, times a slope and its growth of at most that.
    near = {"rtol": 1e-13, "atol": 1e-13 * max(1.0, 2 * most)}
    torch.testing.assert_close(values, wanted.detach(), **near)
    torch.testing.assert_close(slopes, x.grad, **near)
    assert (values >= 0).all()
    assert (values[x >= 0].diff() >= 0).all()
    assert (values[x <= 0].diff() <= 0).all()
    assert float(slopes.max()) == pytest.approx(most, rel=1e-13, abs=1e-13)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("loss", [ipo_loss, icepop_loss])
def test_a_rejected_token_far_off_does_not_outweigh_its_batch(loss, direction):
    """A log-ratio of 15: e**15 - 1 is 3e6, which kl_tau=1e-3 does not make small."""
    slope = {"forward": 9.0, "reverse": 10 * math.log(10)}[direction]
    options = {"kl_tau": 1e-3, "kl": direction, "score_centering": False}
    for more, wanted in (({}, 1e-3 * slope), ({"kl_on": "kept"}, 0.0)):
        inputs = tokens([-1.0, -1.0], [-16.0, -1.1])
        out = loss(inputs, **options, **more)
        out.loss.backward()
        assert out.metrics["is_masked"] == 0.5
        assert float(inputs.trainer_logprobs.grad[0]) == pytest.approx(wanted, rel=2**-20)
        alone = tokens([-1.0], [-1.1])
        loss(alone, **options, **more).loss.backward()
        assert torch.equal(inputs.trainer_logprobs.grad[1:], alone.trainer_logprobs.grad)
    # Among the draws of a row too: the mean of 0 and of the slope at the bound.
    drawn = torch.tensor([-1.0, -1.0], requires_grad=True)
    inputs = tokens(
        [-1.0],
        [-16.0],
        trainer_support_logprobs=drawn,
        sampler_support_logprobs=torch.tensor([-1.0, -16.0]),
        support_offsets=torch.tensor([0, 2]),
        support_kind=torch.tensor([RowKind.DRAWS], dtype=torch.int8),
    )
    loss(inputs, **options).loss.backward()
    assert inputs.trainer_logprobs.grad.tolist() == [0.0]
    assert drawn.grad.tolist() == pytest.approx([0.0, 1e-3 * slope / 2], rel=2**-20)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_the_bound_costs_what_the_ids_beyond_it_hold(direction, seed):
    """Every label under q: unbiased where no ratio is beyond, else low by the stated amount."""
    row = make_row("none", seed)
    row.q = (row.z + 2 * torch.randn(V, generator=torch.Generator().manual_seed(seed))).softmax(0)
    p, q = row.logp().exp(), row.q
    r, scores = p / q, torch.stack([row.score(v) for v in range(V)])
    exact = (q * (q / p).log()).sum() if direction == "forward" else (p * r.log()).sum()
    grad = -(q[:, None] * scores).sum(0)
    if direction == "reverse":
        grad = ((p * r.log())[:, None] * scores).sum(0)

    def expected(bound):
        value, total = 0.0, torch.zeros(V, dtype=torch.float64)
        loss = partial(reinforce_loss, adv_tau=0.0, kl_tau=1.0, kl=direction, kl_max_ratio=bound)
        for v in range(V):
            result, one = run(row, loss, v, log_q=float(q[v].log()))
            value, total = value + float(q[v] * result.loss.detach()), total + q[v] * one
        return value, total

    value, total = expected(2 * float(r.max()))
    assert value == pytest.approx(float(exact), rel=1e-13, abs=4e-13)
    torch.testing.assert_close(total, grad, **FLOAT64)
    c = 1.5
    beyond, log_r = r > c, r.log()
    assert beyond.any()
    value, total = expected(c)
    if direction == "forward":
        lost = (p - c * q * (1 + (r / c).log()))[beyond]
        slope, most = p - c * q, p[beyond].sum()
    else:
        b = math.log(c)
        lost = (p * (log_r - 1) - c * q * (b - 1 + b * (log_r - b)))[beyond]
        slope, most = p * log_r - c * b * q, (p * log_r)[beyond].sum()
    assert (lost > 0).all()
    assert lost.sum() < most
    assert value == pytest.approx(float(exact - lost.sum()), rel=1e-13, abs=4e-13)
    short = (slope[beyond, None] * scores[beyond]).sum(0)
    torch.testing.assert_close(total, grad - short, **FLOAT64)
    assert short.abs().sum() < 2 * most


@pytest.mark.parametrize("loss_mask", [[True] * 5, [True, True, False, True, True]])
def test_squared_ipo_is_prime_rls(loss_mask):
    """Its policy and KL terms by autograd; tokens far off are neither bounded nor left out."""
    log_q, mask = [-1.0, -0.4, -2.0, -16.0, -3.0], torch.tensor(loss_mask)
    x = torch.tensor([-1.2, -2.4, -1.0, -1.0, -3.1], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5, 1.5, -1.0], dtype=torch.float64)
    weights = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.25], dtype=torch.float64)
    q = torch.tensor(log_q, dtype=torch.float64)
    keep = (x.exp() - q.exp()).abs() <= 0.3
    log_ratio = torch.where(mask, x - q, 0.0)
    terms = -torch.where(keep, advantages * log_ratio.exp(), 0.0) + 1e-3 * log_ratio**2
    wanted = torch.where(mask, weights * terms, 0.0)
    wanted.sum().backward()
    inputs = tokens(
        x.tolist(), log_q, dtype=torch.float64, advantages=advantages, loss_mask=mask,
        loss_weights=weights,
    )  # fmt: skip
    out = ipo_loss(inputs, eps=0.3, kl="squared", kl_tau=1e-3)
    out.loss.backward()
    torch.testing.assert_close(out.per_token_loss, wanted.detach(), **FLOAT64)
    torch.testing.assert_close(inputs.trainer_logprobs.grad, x.grad, **FLOAT64)


@pytest.mark.parametrize("mass", [0.0, -1e-7, 1e-9])
@pytest.mark.parametrize("kind", [RowKind.REPLAY, RowKind.HEAD])
@pytest.mark.parametrize("loss", [ipo_loss, icepop_loss, reinforce_loss])
def test_vanishing_tails_give_finite_losses_and_gradients(loss, kind, mass):
    for log_p_tail in (-torch.inf, -103.0, -1.0):
        leaf = torch.tensor([-0.7, -0.7], requires_grad=True)
        tail = torch.tensor([log_p_tail], requires_grad=True)
        inputs = LossInputs(
            leaf[:1],
            torch.tensor([-0.6931]),
            torch.ones(1),
            torch.ones(1, dtype=torch.bool),
            trainer_support_logprobs=leaf,
            sampler_support_logprobs=torch.tensor([-0.6931, -0.6931]),
            support_valid=torch.ones(2, dtype=torch.bool),
            sampler_tail_mass=torch.tensor([mass]),
            trainer_tail_logprobs=tail,
            support_offsets=torch.tensor([0, 2]),
            support_kind=torch.tensor([kind], dtype=torch.int8),
        )
        for direction in ("forward", "reverse"):
            out = loss(inputs, kl_tau=1.0, kl=direction)
            leaf.grad = tail.grad = None
            out.loss.backward()
            assert out.loss.isfinite()
            assert leaf.grad.isfinite().all()
            assert tail.grad is None or tail.grad.isfinite().all()


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_kl_of_a_one_sided_tail_is_not_negative_and_pulls_back(direction):
    """q's tail rounded to 0, p's is 0.3: the known ids alone would sum to a negative number."""
    tail = torch.tensor([math.log(0.3)], requires_grad=True)
    leaf = torch.tensor([math.log(0.35), math.log(0.35)], requires_grad=True)
    inputs = LossInputs(
        leaf[:1],
        torch.tensor([math.log(0.5)]),
        torch.zeros(1),
        torch.ones(1, dtype=torch.bool),
        trainer_support_logprobs=leaf,
        sampler_support_logprobs=torch.full((2,), math.log(0.5)),
        sampler_tail_mass=torch.zeros(1),
        trainer_tail_logprobs=tail,
        support_offsets=torch.tensor([0, 2]),
        support_kind=torch.tensor([2], dtype=torch.int8),
    )
    out = reinforce_loss(inputs, kl_tau=1.0, kl=direction)
    out.loss.backward()
    assert out.loss.detach() > 0.02
    # By the logits: descending moves mass from the tail to the ids that q knows.
    upstream = torch.stack([*leaf.grad, torch.zeros(()) if tail.grad is None else tail.grad[0]])
    grad = upstream - torch.tensor([0.35, 0.35, 0.3]) * upstream.sum()
    assert (grad[:2] < 0).all()
    assert grad[2] > 0


@pytest.mark.parametrize("rule", LOSSES)
def test_a_small_tail_is_exact_in_float32(rule):
    """p_tail of 1e-9: gradient by the logits as near to float64 as log p_tail itself."""
    z = torch.full((1, 9), -22.0, dtype=torch.float64)
    z[0, 4], z[0, 2] = 1.0, 0.3
    p = z[0].softmax(0)
    q = torch.stack([p[4] * 0.97, 1 - p[4] * 0.97 - 2e-9])
    support = Support.from_rows([([4, 2], q.log())], kind=RowKind.HEAD, tail_mass=2e-9)
    grads = []
    for dtype in (torch.float32, torch.float64):
        hidden = z.to(dtype).clone().requires_grad_()
        out = fused_lm_head(hidden, torch.eye(9, dtype=dtype), torch.tensor([4]), support)
        assert out.trainer_tail_logprobs.exp() < 2e-9
        inputs = LossInputs.from_head(
            out,
            support,
            inference_logprobs=q[:1].log().to(dtype),
            advantages=torch.ones(1, dtype=dtype),
        )
        LOSSES[rule](inputs).loss.backward()
        grads.append(hidden.grad[0])
    tail = [v for v in range(9) if v not in (2, 4)]
    # A unit of log p_tail, near -20, is 2**-19: half of one in log p and log q of the tail and in
    # two exponentials. The other log-probabilities are above -2: units of 2**-23.
    assert relative_error(grads[0], grads[1]) < 4 * 2**-23
    assert relative_error(grads[0][tail], grads[1][tail]) < 4 * 2**-20


def batch_inputs(seed: int = 0) -> tuple[LossInputs, Support]:
    """Twelve rows of every kind through the head, in float64."""
    rows = [make_row(KINDS[i % len(KINDS)], seed + i) for i in range(12)]
    support = Support.cat([row.support() for row in rows])
    z = torch.stack([row.z for row in rows]).requires_grad_()
    labels = torch.tensor([row.label for row in rows])
    out = fused_lm_head(z, torch.eye(V, dtype=torch.float64), labels, support)
    g = torch.Generator().manual_seed(seed)
    inputs = LossInputs.from_head(
        out,
        support,
        inference_logprobs=torch.stack([row.q[row.label].log() for row in rows]),
        advantages=torch.randn(12, generator=g, dtype=torch.float64),
        loss_weights=torch.rand(12, generator=g, dtype=torch.float64),
    )
    return inputs, support


def as_leaves(inputs: LossInputs) -> LossInputs:
    names = ("trainer_logprobs", "trainer_support_logprobs", "trainer_tail_logprobs")
    return replace(
        inputs, **{name: getattr(inputs, name).detach().clone().requires_grad_() for name in names}
    )


def padded(inputs: LossInputs) -> LossInputs:
    """The same evidence padded to one width, with poison at the padding."""
    offsets = inputs.support_offsets
    n, width = len(offsets) - 1, int(offsets.diff().max()) + 1
    at = torch.repeat_interleave(torch.arange(n), offsets.diff())
    at = at, torch.arange(int(offsets[-1])) - offsets[at]

    def pad(flat, fill):
        return torch.full((n, width), fill, dtype=flat.dtype).index_put(at, flat)

    return replace(
        inputs,
        trainer_support_logprobs=pad(inputs.trainer_support_logprobs, torch.nan),
        sampler_support_logprobs=pad(inputs.sampler_support_logprobs, -torch.inf),
        support_valid=pad(inputs.support_valid, False),
        support_offsets=None,
    )


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("rule", LOSSES)
def test_flat_and_padded_layouts_are_one(rule, direction):
    inputs, _ = batch_inputs()
    loss = partial(LOSSES[rule], kl_tau=0.3, kl=direction)
    flat = as_leaves(inputs)
    wide = as_leaves(inputs)
    one, two = loss(flat), loss(padded(wide))
    one.loss.backward()
    two.loss.backward()
    # One sum of at most six numbers below 1, perhaps in another order.
    torch.testing.assert_close(one.per_token_loss, two.per_token_loss, rtol=1e-13, atol=1e-14)
    for name in ("trainer_logprobs", "trainer_support_logprobs", "trainer_tail_logprobs"):
        torch.testing.assert_close(getattr(flat, name).grad, getattr(wide, name).grad, **FLOAT64)
    for name, value in one.metrics.items():
        torch.testing.assert_close(value, two.metrics[name], rtol=1e-13, atol=1e-14)
        assert one.metric_counts[name] == two.metric_counts[name]


@pytest.mark.parametrize("rule", LOSSES)
def test_without_trainer_tails_the_published_form_gives_the_same_gradient(rule):
    row = make_row("head", 5)
    support = row.support()
    grads = []
    for given in (True, False):
        z = row.z[None].clone().requires_grad_()
        out = fused_lm_head(
            z, torch.eye(V, dtype=torch.float64), torch.tensor([row.label]), support
        )
        inputs = LossInputs.from_head(
            out,
            support,
            inference_logprobs=row.q[row.label].log()[None],
            advantages=torch.ones(1, dtype=torch.float64),
        )
        if not given:
            inputs = padded(inputs)
            inputs.trainer_tail_logprobs = inputs.support_kind = None
        for direction in ("forward", "reverse"):
            result = LOSSES[rule](inputs, kl_tau=0.2, kl=direction)
            grads.append(
                (torch.autograd.grad(result.loss, z, retain_graph=True)[0], result.metrics)
            )
    for (got, metrics), (expected, wanted) in zip(grads[2:], grads[:2], strict=True):
        torch.testing.assert_close(got, expected, **FLOAT64)
        for name, value in metrics.items():
            torch.testing.assert_close(value, wanted[name], **FLOAT64)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("rule", LOSSES)
def test_values_outside_the_mask_never_matter(rule, poison):
    inputs, _ = batch_inputs()
    mask = torch.tensor([True, False, True] * 4)
    rows = torch.repeat_interleave(torch.arange(12), inputs.support_offsets.diff())
    unread = ~inputs.support_valid | ~mask[rows]
    clean = as_leaves(replace(inputs, loss_mask=mask))
    dirty = as_leaves(
        replace(
            inputs,
            loss_mask=mask,
            trainer_logprobs=torch.where(mask, inputs.trainer_logprobs, poison),
            inference_logprobs=torch.where(mask, inputs.inference_logprobs, poison),
            advantages=torch.where(mask, inputs.advantages, poison),
            loss_weights=torch.where(mask, inputs.loss_weights, poison),
            trainer_support_logprobs=torch.where(unread, poison, inputs.trainer_support_logprobs),
            sampler_support_logprobs=torch.where(unread, poison, inputs.sampler_support_logprobs),
            sampler_tail_mass=torch.where(mask, inputs.sampler_tail_mass, poison),
            trainer_tail_logprobs=torch.where(mask, inputs.trainer_tail_logprobs, poison),
            support_kind=torch.where(mask, inputs.support_kind, -1).to(torch.int8),
        )
    )
    results = []
    for case in (clean, dirty):
        out = LOSSES[rule](case, kl_tau=0.5, kl="reverse")
        out.loss.backward()
        results.append(
            [
                out.loss,
                out.per_token_loss,
                case.trainer_logprobs.grad,
                case.trainer_support_logprobs.grad,
                case.trainer_tail_logprobs.grad,
                *out.metrics.values(),
            ]
        )
    for value, wanted in zip(*results, strict=True):
        assert torch.equal(value, wanted)
    assert (results[1][1][~mask] == 0).all()
    assert (results[1][3][unread] == 0).all()


def test_micro_batches_recombine_exactly():
    inputs, _ = batch_inputs()
    whole = LOSSES["icepop"](inputs, kl_tau=0.3)
    grad_whole = torch.autograd.grad(
        whole.loss, (inputs.trainer_logprobs, inputs.trainer_support_logprobs), retain_graph=True
    )
    offsets, parts, losses, grads = inputs.support_offsets, [], [], []
    for rows in (slice(0, 5), slice(5, 6), slice(6, 12)):
        entries = slice(int(offsets[rows.start]), int(offsets[rows.stop]))
        cut = {
            field.name: getattr(inputs, field.name)[rows]
            for field in fields(inputs)
            if getattr(inputs, field.name) is not None
        }
        for name in ("trainer_support_logprobs", "sampler_support_logprobs", "support_valid"):
            cut[name] = getattr(inputs, name)[entries]
        cut["support_offsets"] = offsets[rows.start : rows.stop + 1] - offsets[rows.start]
        out = LOSSES["icepop"](LossInputs(**cut), kl_tau=0.3)
        parts.append((out.metrics, out.metric_counts))
        losses.append(out.loss)
        grads.append(
            torch.autograd.grad(
                out.loss,
                (cut["trainer_logprobs"], cut["trainer_support_logprobs"]),
                retain_graph=True,
            )
        )
    # Sums over twelve rows in another order; a row's own numbers are the same bits.
    torch.testing.assert_close(sum(losses), whole.loss, rtol=1e-13, atol=1e-13)
    for i, wanted in enumerate(grad_whole):
        assert torch.equal(torch.cat([grad[i] for grad in grads]), wanted)
    metrics, counts = combine_metrics(parts)
    for name, value in whole.metrics.items():
        torch.testing.assert_close(metrics[name], value, rtol=1e-13, atol=1e-13)
        assert counts[name] == whole.metric_counts[name]


# --- what must not pass for a number ---


def test_evidence_that_breaks_a_rule_is_nan_in_value_and_gradient():
    inputs, _ = batch_inputs()
    offsets = inputs.support_offsets
    q, mass, kind = (
        inputs.sampler_support_logprobs.clone(),
        inputs.sampler_tail_mass.clone(),
        inputs.support_kind.clone(),
    )
    q[offsets[0]] = -torch.inf  # row 0: a known q of 0
    mass[1] += 0.01  # row 1: does not add up
    mass[3] = torch.nan  # row 3: no number
    q[offsets[4]] = 0.5  # row 4: a draw above 1
    kind[2], mass[2] = RowKind.FAILED, 1.0  # row 2: not recorded
    bad = as_leaves(
        replace(inputs, sampler_support_logprobs=q, sampler_tail_mass=mass, support_kind=kind)
    )
    bad.inference_logprobs = bad.inference_logprobs.clone()
    bad.inference_logprobs[5] = -torch.inf
    out = reinforce_loss(bad)
    assert out.per_token_loss.isnan().nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    out.per_token_loss.sum().backward()
    assert torch.equal(bad.trainer_logprobs.grad.isnan(), torch.arange(12) < 6)
    rows = torch.repeat_interleave(torch.arange(12), offsets.diff())
    assert torch.equal(bad.trainer_support_logprobs.grad.isnan(), rows < 6)
    good = reinforce_loss(inputs)
    assert torch.equal(out.per_token_loss[6:], good.per_token_loss[6:])


def test_evidence_without_a_kind_or_a_whole_mass_is_nan():
    inputs, _ = batch_inputs()
    kind = inputs.support_kind.clone()
    kind[0], kind[1] = 4, -2
    out = reinforce_loss(replace(inputs, support_kind=kind))
    assert out.per_token_loss.isnan().nonzero()[:, 0].tolist() == [0, 1]
    # Without tail masses every row has none: those with a tail do not add up.
    out = reinforce_loss(replace(inputs, sampler_tail_mass=None))
    assert out.per_token_loss.isnan().nonzero()[:, 0].tolist() == [1, 3, 7, 9]


def test_a_draw_without_q_is_nan():
    inputs, _ = batch_inputs()
    valid = inputs.support_valid.clone()
    valid[inputs.support_offsets[4]] = False
    out = reinforce_loss(replace(inputs, support_valid=valid))
    assert out.per_token_loss.isnan().nonzero()[:, 0].tolist() == [4]


def test_errors_name_the_argument():
    inputs, support = batch_inputs()
    full = replace(inputs, loss_weights=torch.ones(12))

    def fails(match, **changes):
        with pytest.raises(ValueError, match=match):
            icepop_loss(replace(inputs, **changes))

    fails(r"loss_mask must be bool", loss_mask=torch.ones(12))
    fails(r"advantages must be \(12,\)", advantages=torch.ones(3))
    fails(r"trainer_support_logprobs and support_offsets", support_offsets=torch.zeros(3).long())
    fails(r"trainer_support_logprobs must be \[", support_offsets=None)
    fails(r"must be given together", sampler_support_logprobs=None)
    fails(r"loss_mask must be a tensor, got NoneType", loss_mask=None)
    fails(r"support_valid must be bool", support_valid=inputs.support_valid.float())
    offsets = inputs.support_offsets
    fails(
        r"support_offsets must not fall, got 5, 4 in row 1",
        support_offsets=offsets.index_fill(0, torch.tensor([2]), 4),
    )
    fails(
        r"support_offsets must run from 0 to \d+, got 1",
        support_offsets=offsets.index_fill(0, torch.tensor([0]), 1),
    )
    fails(r"support_offsets must be integers", support_offsets=offsets.float())
    fails(r"support_valid must be", support_valid=torch.ones(2, dtype=torch.bool))
    fails(r"sampler_tail_mass must be \(12,\) as loss_mask", sampler_tail_mass=torch.ones(2))
    for name in (
        "trainer_logprobs", "advantages", "loss_weights", "trainer_support_logprobs",
        "support_valid", "support_offsets", "sampler_tail_mass", "support_kind",
        "trainer_tail_logprobs",
    ):  # fmt: skip
        fails(f"{name} must be a tensor, got list", **{name: [0.0] * 12})
        fails(f"{name} must be on cpu .* got meta", **{name: getattr(full, name).to("meta")})
    fails(r"support_kind must be integers", support_kind=torch.full((12,), 2.5))
    fails(r"inference_logprobs must be floating point", inference_logprobs=torch.zeros(12).long())
    fails(r"trainer_tail_logprobs must be \(12,\)", trainer_tail_logprobs=torch.ones(2))
    with pytest.raises(ValueError, match="kl must be"):
        icepop_loss(inputs, kl="both")
    with pytest.raises(ValueError, match='kl_on must be "all" or "kept", got \'masked\''):
        icepop_loss(inputs, kl_on="masked")
    for bound in (0.99, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"kl_max_ratio must be at least 1, got {bound}"):
            reinforce_loss(inputs, kl_max_ratio=bound)
    with pytest.raises(ValueError, match="kl_max_ratio must be a number, got '10'"):
        reinforce_loss(inputs, kl_max_ratio="10")
    with pytest.raises(ValueError, match="ratio_low and ratio_high"):
        icepop_loss(inputs, ratio_low=3.0, ratio_high=2.0)
    with pytest.raises(ValueError, match="eps must be"):
        ipo_loss(inputs, eps=-0.1)
    with pytest.raises(ValueError, match="kl_tau must be finite, at least 0"):
        ipo_loss(inputs, kl_tau=-1.0)
    with pytest.raises(ValueError, match="adv_tau must be finite"):
        ipo_loss(inputs, adv_tau=math.nan)
    with pytest.raises(ValueError, match="max_importance_ratio"):
        ipo_loss(inputs, max_importance_ratio=0.0)
    for name in ("adv_tau", "kl_tau", "eps", "max_importance_ratio"):
        ipo_loss(inputs, **{name: np.float32(0.5)})
    ipo_loss(inputs, kl_max_ratio=np.float32(2))
    with pytest.raises(ValueError, match="adv_tau must be a number, got '1'"):
        ipo_loss(inputs, adv_tau="1")
    with pytest.raises(ValueError, match="eps must be a number, got None"):
        ipo_loss(inputs, eps=None)
    z, labels = torch.randn(12, V), torch.zeros(12, dtype=torch.int64)
    active = torch.arange(12) != 7
    out = fused_lm_head(z, torch.eye(V), labels, active=active)
    given = {"inference_logprobs": torch.zeros(12), "advantages": torch.zeros(12)}
    with pytest.raises(ValueError, match="loss_mask is True in row 7"):
        LossInputs.from_head(out, None, **given, loss_mask=torch.ones(12, dtype=torch.bool))
    with pytest.raises(ValueError, match="support must be the head's"):
        LossInputs.from_head(out, support, **given)
    with pytest.raises(ValueError, match="loss_mask must be a tensor, got list"):
        LossInputs.from_head(out, None, **given, loss_mask=[True] * 12)
    with pytest.raises(ValueError, match="output must be an LMHeadOutput, got Tensor"):
        LossInputs.from_head(z, None, **given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["inference_logprobs", "sampler_support_logprobs", "sampler_tail_mass"]
)
def test_what_the_sampler_reported_must_not_be_in_half_precision(name, dtype):
    inputs, _ = batch_inputs()
    half = replace(inputs, **{name: getattr(inputs, name).to(dtype)})
    with pytest.raises(ValueError, match=rf"{name} must be .*float32.* got {dtype}") as error:
        ipo_loss(half)
    assert "cast_forward_inputs=False" in str(error.value)
    for other in ("advantages", "loss_weights"):
        ipo_loss(replace(inputs, **{other: getattr(inputs, other).to(dtype)}))


def test_the_support_is_the_heads_own_by_default():
    inputs, support = batch_inputs()
    z = torch.randn(12, V, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([int(ids[0]) if len(ids) else 0 for ids in rows_of_ids(support)])
    out = fused_lm_head(z, torch.eye(V, dtype=torch.float64), labels, support)
    given = {"inference_logprobs": inputs.inference_logprobs, "advantages": inputs.advantages}
    one, two = LossInputs.from_head(out, **given), LossInputs.from_head(out, support, **given)
    assert one.trainer_support_logprobs is not None
    for field in fields(one):
        assert getattr(one, field.name) is getattr(two, field.name)
    # An output without a support of its own, as others may build it.
    names = ("logprobs", "active", "support_valid", "support_logprobs", "trainer_tail_logprobs")
    bare = SimpleNamespace(**{name: getattr(out, name) for name in names})
    with pytest.raises(ValueError, match=r"support must be the one .* got None"):
        LossInputs.from_head(bare, **given)
    again = LossInputs.from_head(bare, support, **given)
    assert again.sampler_support_logprobs is two.sampler_support_logprobs
    plain = fused_lm_head(z, torch.eye(V, dtype=torch.float64), labels)
    assert LossInputs.from_head(plain, **given).trainer_support_logprobs is None


def rows_of_ids(support: Support) -> list[torch.Tensor]:
    return list(support.ids.split(support.offsets.diff().tolist()))


def test_another_support_of_the_same_size_is_refused():
    rows = [([5, 2], [-0.7, -0.7]), None, ([1], [0.0])]
    support, turned = Support.from_rows(rows), Support.from_rows([rows[1], rows[0], rows[2]])
    out = fused_lm_head(torch.randn(3, 4), torch.randn(9, 4), torch.tensor([5, 0, 1]), support)
    given = {"inference_logprobs": torch.zeros(3), "advantages": torch.zeros(3)}
    with pytest.raises(ValueError, match="support must be the one that the head was called with"):
        LossInputs.from_head(out, turned, **given)
    # Rows of one width, as a top-k without a top-p keeps them: only the ids tell.
    wide = Support.from_rows([([5, 2], [-0.7, -0.7]), ([1, 3], [-0.7, -0.7])])
    headed = fused_lm_head(torch.randn(2, 4), torch.randn(9, 4), torch.tensor([5, 1]), wide)
    two = {name: value[:2] for name, value in given.items()}
    with pytest.raises(ValueError, match="support must be the one that the head was called with"):
        LossInputs.from_head(headed, wide.select(torch.tensor([1, 0])), **two)
    LossInputs.from_head(out, Support.from_rows(rows), **given)


def test_rows_turned_against_the_mask_are_refused():
    """A transposed tensor has as many values, of other rows."""
    inputs, _ = batch_inputs()
    shaped = {
        name: getattr(inputs, name).reshape(3, 4)
        for name in (
            "trainer_logprobs",
            "inference_logprobs",
            "advantages",
            "loss_weights",
            "loss_mask",
        )
    }
    rows = ("sampler_tail_mass", "support_kind", "trainer_tail_logprobs")
    same = {name: getattr(inputs, name).reshape(3, 4) for name in rows}
    out = reinforce_loss(replace(inputs, **shaped, **same))
    assert torch.equal(out.per_token_loss.flatten(), reinforce_loss(inputs).per_token_loss)
    for name in rows:
        with pytest.raises(ValueError, match=rf"{name} must be \(3, 4\).* got \(4, 3\)"):
            reinforce_loss(replace(inputs, **shaped, **{name: same[name].reshape(4, 3)}))


def test_a_sampled_token_with_a_probability_above_one_is_nan():
    """As a negated log-probability, or the probability itself, would be."""
    inputs, _ = batch_inputs()
    logq = inputs.inference_logprobs.clone()
    logq[0], logq[1] = 0.5, 5e-4  # the second is rounding
    out = icepop_loss(replace(inputs, inference_logprobs=logq))
    assert out.per_token_loss.isnan().nonzero()[:, 0].tolist() == [0]


# --- who calls it ---


def test_an_object_with_prime_rls_fields_alone():
    """trainer, inference, advantages, mask, weights and reference; none of the later fields."""
    own = SimpleNamespace(
        trainer_logprobs=torch.tensor([-1.0, -2.0, -3.0], requires_grad=True),
        inference_logprobs=torch.tensor([-1.1, -1.9, -3.0]),
        ref_logprobs=None,
        advantages=torch.tensor([1.0, -1.0, 5.0]),
        loss_mask=torch.tensor([True, True, False]),
        loss_weights=None,
    )
    out = icepop_loss(own)
    out.loss.backward()
    r = (torch.tensor([-1.0, -2.0]) - torch.tensor([-1.1, -1.9])).exp()
    wanted = -torch.tensor([1.0, -1.0]) * r
    # Two exponentials of one float32, each within two units of rounding.
    torch.testing.assert_close(own.trainer_logprobs.grad[:2], wanted, rtol=2**-21, atol=0.0)
    assert own.trainer_logprobs.grad[2] == 0
    assert out.loss.dim() == 0
    assert out.metrics["score_centering/uncentered"] == 1
    assert all(value.dim() == 0 for value in out.metrics.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_logprobs_are_computed_in_float32(dtype):
    """The trainer's, advantages and weights alone: what the sampler reported is float32."""
    logp = torch.tensor([-1.2, -7.3], dtype=dtype, requires_grad=True)
    on, ones = torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=dtype)
    out = ipo_loss(LossInputs(logp, logp.detach().float(), ones, on, ones), kl_tau=1.0)
    assert out.loss.dtype == torch.float32
    assert out.per_token_loss.tolist() == [-1.0, -1.0]
    assert out.metrics["importance_ratio_mean"] == 1
    out.loss.backward()
    assert logp.grad.tolist() == [-1.0, -1.0]


@pytest.fixture
def default_dtype():
    """Sets torch's default dtype for the length of a test."""
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rule", LOSSES)
def test_no_result_depends_on_the_default_dtype(rule, dtype, default_dtype):
    """Float32 inputs: flat, padded with the tail from the known ids, and tokens alone."""
    inputs, _ = batch_inputs()
    single = LossInputs(**{f.name: as_float32(getattr(inputs, f.name)) for f in fields(inputs)})

    def everything() -> list[torch.Tensor]:
        found = []
        for kl in ("forward", "reverse", "squared"):
            flat = as_leaves(single)
            wide = replace(padded(flat), trainer_tail_logprobs=None, support_kind=None)
            alone = [flat.trainer_logprobs, flat.inference_logprobs, flat.advantages]
            for case in (flat, wide, LossInputs(*alone, flat.loss_mask)):
                out = LOSSES[rule](case, kl_tau=0.5, kl=kl, kl_on="kept")
                leaves = flat.trainer_logprobs, flat.trainer_support_logprobs
                grads = torch.autograd.grad(out.loss, leaves, allow_unused=True)
                both = combine_metrics([(out.metrics, out.metric_counts)] * 2)
                found += [out.loss, out.per_token_loss, *(g for g in grads if g is not None)]
                for part in (out.metrics, out.metric_counts, *both):
                    found += part.values()
        return found

    expected = everything()
    default_dtype(dtype)
    for value, wanted in zip(everything(), expected, strict=True):
        assert value.dtype == wanted.dtype
        assert torch.equal(value.nan_to_num(7.0), wanted.nan_to_num(7.0))


def as_float32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@pytest.mark.parametrize("rule", LOSSES)
def test_compiled_whole_and_checkpointed(rule):
    """One graph without a break, and a forward that is run again in the backward."""
    inputs, _ = batch_inputs()
    names = ("trainer_logprobs", "trainer_support_logprobs", "trainer_tail_logprobs")
    loss = partial(LOSSES[rule], kl_tau=0.3, kl_on="kept")

    def of_leaves(*leaves: torch.Tensor) -> torch.Tensor:
        return loss(replace(inputs, **dict(zip(names, leaves, strict=True)))).loss

    grads = []
    for call in (
        of_leaves,
        torch.compile(of_leaves, backend="aot_eager", fullgraph=True),
        partial(checkpoint, of_leaves, use_reentrant=False),
    ):
        leaves = [getattr(inputs, name).detach().clone().requires_grad_() for name in names]
        call(*leaves).backward()
        grads.append([leaf.grad for leaf in leaves])
    for other in grads[1:]:
        assert all(torch.equal(grad, wanted) for grad, wanted in zip(other, grads[0], strict=True))


def test_no_tokens_and_no_rows():
    for n, mask in ((0, torch.ones(0, dtype=torch.bool)), (3, torch.zeros(3, dtype=torch.bool))):
        logp = torch.zeros(n, requires_grad=True)
        out = ipo_loss(LossInputs(logp, torch.zeros(n), torch.ones(n), mask), kl_tau=1.0)
        out.loss.backward()
        assert out.loss == 0
        assert all(value == 0 for value in out.metrics.values())
        assert all(count == 0 for count in out.metric_counts.values())


def test_only_trainer_values_carry_gradient():
    inputs, _ = batch_inputs()
    inputs = as_leaves(inputs)
    names = ("inference_logprobs", "advantages", "loss_weights", "sampler_support_logprobs")
    for name in names:
        setattr(inputs, name, getattr(inputs, name).detach().clone().requires_grad_())
    icepop_loss(inputs, kl_tau=0.5).loss.backward()
    assert all(getattr(inputs, name).grad is None for name in names)
    assert inputs.trainer_logprobs.grad is not None
