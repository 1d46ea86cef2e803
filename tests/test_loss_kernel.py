"""The losses on kernels against their definition in plain PyTorch: values, gradients, metrics."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from factory import spied
from interpreter import DEVICE, INTERPRETED, kernels, run_interpreted, truncated
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import rl_loss.losses as door
from rl_loss import LossInputs, LossOutputs, RowKind, icepop_loss, ipo_loss, policy_loss
from rl_loss import reinforce_loss as reinforce

pytestmark = pytest.mark.usefixtures("unwritten_is_nan")
# The widest that they take: a compiled kernel's options are float32.
EXACT = torch.float64 if INTERPRETED else torch.float32
LEAVES = ("trainer_logprobs", "trainer_support_logprobs", "trainer_tail_logprobs")
SUPPORT = (
    "trainer_support_logprobs", "sampler_support_logprobs", "support_valid", "support_offsets",
    "support_kind", "sampler_tail_mass", "trainer_tail_logprobs",
)  # fmt: skip
KINDS = (
    "replay", "incomplete", "head", "draws", "none", "ids only", "tail of p", "tail of q",
)  # fmt: skip
CODES = {"draws": RowKind.DRAWS, "none": RowKind.NONE}
CODES |= dict.fromkeys(("replay", "incomplete", "ids only"), RowKind.REPLAY)
LOSSES = {
    "ipo": partial(ipo_loss, eps=0.12, max_importance_ratio=1.6),
    "icepop": partial(icepop_loss, ratio_low=0.6, ratio_high=1.7),
    "reinforce": reinforce,
}
SHORT = (3, 0, 1, 5, 2, 9, 4, 7, 0, 6, 1)  # as many as never match the kinds
WIDER = (20, 33, 31, 1, 64, 257, 0, 256, 40)  # to both sides of a turn and of a row by itself


def test_in_the_interpreter():
    run_interpreted(__file__)


def test_by_hand_in_the_interpreter():
    """The kernels too are held to formulas, by the tests of the definition."""
    picked = "(gradient_and_value_by_hand and icepop and centered and forward) or stay_finite"
    picked += " or equal_logprobs or vanishing or one_sided or small_tail or recombine"
    picked += " or breaks_a_rule or without_q or errors or above_one or no_tokens"
    run_interpreted(str(Path(__file__).with_name("test_losses.py")), "-k", picked)


# --- batches ---


def random_inputs(
    seed: int = 0, n: int = 17, widths: Sequence[int] = SHORT, kinds: Sequence[str] = KINDS
) -> LossInputs:
    """Rows whose kinds and widths cycle, in float64, every number one that float32 holds."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    log_p, log_q, valid, kind, mass, tail, counts = [], [], [], [], [], [], []
    for i in range(n):
        name, width = kinds[i % len(kinds)], widths[i % len(widths)]
        z = 1.5 * normal(width + 4)
        p, q = z.softmax(0), (z + 0.6 * normal(width + 4)).softmax(0)
        ids, known = torch.arange(width), torch.ones(width, dtype=torch.bool)
        if name in ("replay", "incomplete", "ids only"):
            p, q = (x[:width] / x[:width].sum() for x in (p, q))
        if name == "incomplete":
            known = torch.rand(width, generator=g) < 0.6
        if name in ("none", "ids only"):
            known[:] = False
        if name == "draws" and width:
            ids = torch.multinomial(q, width, replacement=True, generator=g)
        if name == "tail of p" and width:
            q = q[:width] / q[:width].sum()
        if name == "tail of q" and width:
            p = p[:width] / p[:width].sum()
        outside = torch.ones(len(p), dtype=torch.bool).index_fill(0, ids[known], False)
        tail.append(p[outside[: len(p)]].sum().log())
        outside = torch.ones(len(q), dtype=torch.bool).index_fill(0, ids[known], False)
        mass.append(0.0 if name == "draws" else float(q[outside].sum()))
        log_p.append(p[ids].log())
        log_q.append(q[ids].log())
        valid.append(known)
        kind.append(
            {"draws": RowKind.DRAWS, "none": RowKind.NONE}.get(
                name,
                RowKind.REPLAY if name in ("replay", "incomplete", "ids only") else RowKind.HEAD,
            )
        )
        counts.append(width)
    near = -1.5 * normal(n).abs()
    inputs = LossInputs(
        trainer_logprobs=near,
        inference_logprobs=(near + 0.6 * normal(n)).clamp(max=0),
        advantages=normal(n),
        loss_mask=torch.rand(n, generator=g) < 0.8,
        loss_weights=normal(n) * 0.3 + 1,
        ref_logprobs=(near + 0.6 * normal(n)).clamp(max=0),
        trainer_support_logprobs=torch.cat(log_p),
        sampler_support_logprobs=torch.cat(log_q),
        support_valid=torch.cat(valid),
        sampler_tail_mass=torch.tensor(mass, dtype=torch.float64),
        trainer_tail_logprobs=torch.stack(tail),
        support_offsets=torch.tensor([0, *counts]).cumsum(0),
        support_kind=torch.tensor(kind, dtype=torch.int8),
    )
    return mapped(inputs, lambda value: value.float().double())


def mapped(inputs: LossInputs, change: Callable[[Tensor], Tensor]) -> LossInputs:
    """The inputs with every floating-point tensor changed."""

    def new(value: Any) -> Any:
        return change(value) if torch.is_tensor(value) and value.is_floating_point() else value

    return LossInputs(**{field.name: new(getattr(inputs, field.name)) for field in fields(inputs)})


def moved(inputs: LossInputs, device: str = DEVICE) -> LossInputs:
    """New leaves on the device."""
    found = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    found = {
        name: None if v is None else v.detach().clone().to(device) for name, v in found.items()
    }
    return LossInputs(
        **{n: v if v is None else v.requires_grad_(n in LEAVES) for n, v in found.items()}
    )


def random_options(seed: int) -> tuple[str, dict[str, Any]]:
    """A rule and options of every sort, all of them met in a dozen seeds."""
    pick = random.Random(seed)
    options: dict[str, Any] = {
        "score_centering": seed % 5 > 0,
        "adv_tau": pick.choice([1.0, 0.7, 0.0]),
        "kl": ("forward", "reverse", "squared")[seed % 3],
        "kl_tau": pick.choice([0.4, 0.4, 0.0]),
        "kl_on": ("all", "kept")[seed // 3 % 2],
        "kl_max_ratio": pick.choice([1.2, 10.0, math.inf]),
        "ref_tau": pick.choice([0.0, 0.3]),
    }
    return list(LOSSES)[seed // 2 % 3], options


class Run(NamedTuple):
    out: LossOutputs
    grads: list[Tensor | None]

    def numbers(self) -> dict[str, Tensor]:
        """By name, on the host."""
        parts = {"loss": self.out.loss, "per token": self.out.per_token_loss, **self.out.metrics}
        found = {f"by {n}": g for n, g in zip(LEAVES, self.grads, strict=True) if g is not None}
        return {name: value.detach().cpu() for name, value in {**parts, **found}.items()}


def run(loss: Callable, inputs: LossInputs, upstream: Tensor | None = None) -> Run:
    """With the gradients of new leaves; the upstream is by token, and 1 of the loss."""
    leaves = moved(inputs, inputs.loss_mask.device)
    out = loss(leaves)
    total = out.loss if upstream is None else out.loss + (out.per_token_loss * upstream).sum()
    total.backward()
    found = (getattr(leaves, name) for name in LEAVES)
    return Run(out, [None if leaf is None else leaf.grad for leaf in found])


def by_definition(loss: Callable, inputs: LossInputs, upstream: Tensor | None = None) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(door, "_on_kernels", lambda *_: False)
        return run(loss, inputs, upstream)


# Units in the last place of the largest log-probability, of which p and ratios are made: some
# numbers are small differences of those.
FLOOR = 4


def agree(loss: Callable, inputs: LossInputs, dtype: torch.dtype = EXACT) -> Run:
    """Every number is the definition's in float64, within twice what the definition in `dtype` is
    off by and a floor; where it is not finite, exactly so. In float64 it is taken to be off by
    what it is in float32, 2^29 times less."""
    upstream = torch.randn(inputs.loss_mask.shape, dtype=torch.float64)
    exact = by_definition(loss, inputs, upstream)
    single = by_definition(loss, mapped(inputs, Tensor.float), upstream.float()).numbers()
    narrow = mapped(inputs, lambda value: value.to(dtype))
    got = run(loss, moved(narrow), upstream.to(dtype).to(DEVICE))
    logs = [getattr(inputs, name) for name in LEAVES[:2] if getattr(inputs, name) is not None]
    seen = torch.cat([value.flatten() for value in logs])
    largest = float(seen[seen.isfinite()].abs().max()) if seen.numel() else 1.0
    unit = torch.finfo(dtype).eps * max(1.0, largest)
    less = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
    assert list(got.out.metrics) == list(exact.out.metrics)
    for name, count in exact.out.metric_counts.items():
        assert torch.equal(got.out.metric_counts[name].cpu(), count), name
    wanted, found = exact.numbers(), got.numbers()
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        there, is_nan = found[name].double(), value.isnan()
        assert found[name].dtype == dtype
        assert found[name].shape == value.shape
        assert torch.equal(there.isnan(), is_nan), name
        assert torch.equal(there.isinf(), value.isinf()), name
        some = value.isfinite()
        if some.any():
            size = max(1.0, float(value[some].abs().max()))
            off = less * float((single[name].double() - value)[some].abs().max())
            assert math.isfinite(off)
            error = float((there - value)[some].abs().max())
            assert error <= 2 * off + FLOOR * unit * size, (name, error, off)
    return got


# --- the definition's numbers ---


@kernels
@pytest.mark.parametrize("seed", range(24))
def test_random_batches(seed):
    name, options = random_options(seed)
    widths = WIDER if seed % 4 == 3 else SHORT
    agree(partial(LOSSES[name], **options), random_inputs(seed, widths=widths))


@kernels
@pytest.mark.parametrize("seed", range(24, 42))
def test_random_batches_in_float32(seed):
    name, options = random_options(seed)
    widths = WIDER if seed % 4 == 3 else SHORT
    agree(partial(LOSSES[name], **options), random_inputs(seed, widths=widths), torch.float32)


@kernels
@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LOSSES)
def test_each_kind_by_itself(name, kind, direction):
    loss = partial(LOSSES[name], kl_tau=0.4, kl=direction, kl_on="kept", ref_tau=0.1)
    agree(loss, random_inputs(3, n=9, kinds=(kind,)))


@kernels
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    "missing",
    [
        ["loss_weights", "ref_logprobs"],
        ["support_kind"],
        ["support_kind", "sampler_tail_mass"],
        ["sampler_tail_mass", "trainer_tail_logprobs"],
        ["trainer_tail_logprobs"],
        ["trainer_tail_logprobs", "support_kind"],
        ["support_valid"],
        SUPPORT,
    ],
    ids=" and ".join,
)
def test_fields_that_are_not_given(name, missing):
    """A tail that is formed from the known ids among them."""
    inputs = replace(random_inputs(5), **dict.fromkeys(missing))
    agree(partial(LOSSES[name], kl_tau=0.3, kl="reverse"), inputs)


@kernels
@pytest.mark.parametrize("widths", [(0,), (1,), (300, 5), (5000, 3, 20)])
def test_widths(widths):
    agree(partial(icepop_loss, kl_tau=0.3), random_inputs(1, n=5, widths=widths))


@kernels
def test_a_row_of_150000_entries_beside_short_ones():
    inputs = random_inputs(2, n=6, widths=(4, 2, 150_000, 0, 1, 33), kinds=("head",))
    inputs.loss_mask[:] = True
    agree(partial(reinforce, kl_tau=0.3), inputs, torch.float32)


@kernels
@pytest.mark.parametrize("programs", [1, 3])
def test_few_programs_with_many_rows_each(programs, monkeypatch):
    """As a batch of more rows than programs has it; among them wide ones."""
    import rl_loss.kernels.loss_passes as passes

    monkeypatch.setattr(passes, "PROGRAMS", programs)
    launched = spied(monkeypatch, passes, "row_losses")
    monkeypatch.setattr("rl_loss.kernels.loss.row_losses", passes.row_losses)
    agree(partial(icepop_loss, kl_tau=0.3), random_inputs(7, n=67, widths=(2, 0, 5, 300, 1)))
    assert [call.result.sums.shape[1] for call in launched] == [programs]


@kernels
@pytest.mark.parametrize("n", [0, 1, 3])
def test_no_rows_and_no_loss_tokens(n):
    inputs = random_inputs(0, n=n) if n else empty()
    inputs.loss_mask[:] = False
    got = agree(partial(ipo_loss, kl_tau=1.0, ref_tau=1.0), inputs)
    assert got.out.loss == 0
    assert all(value == 0 for value in got.out.metrics.values())
    for grad in got.grads:
        assert torch.equal(grad, torch.zeros_like(grad))


def empty() -> LossInputs:
    inputs = random_inputs(0, n=1)
    found = {f.name: getattr(inputs, f.name)[:0] for f in fields(inputs)}
    return LossInputs(**{**found, "support_offsets": torch.zeros(1, dtype=torch.int64)})


@kernels
def test_far_apart():
    """Log-ratios far beyond what an exponential holds, of tokens, of entries and of tails."""
    inputs = random_inputs(4, n=24)
    far = torch.tensor([-91.0, 0.0, 0.0, 0.0, -40.0, 0.0]).double()
    inputs.trainer_logprobs += far.repeat(4)
    inputs.inference_logprobs += far.roll(1).repeat(4)
    inputs.trainer_support_logprobs[::5] -= 95
    inputs.trainer_tail_logprobs[::4] -= 103
    for name, loss in LOSSES.items():
        for direction in ("forward", "reverse", "squared"):
            for bound in (10.0, math.inf):
                got = agree(partial(loss, kl_tau=0.3, kl=direction, kl_max_ratio=bound), inputs)
                assert got.out.loss.isfinite(), name


@kernels
def test_bitwise_equal_logprobs_have_no_divergence():
    inputs = random_inputs(0, kinds=("replay", "none"))
    same = replace(
        inputs,
        inference_logprobs=inputs.trainer_logprobs,
        ref_logprobs=inputs.trainer_logprobs,
        sampler_support_logprobs=inputs.trainer_support_logprobs,
        advantages=torch.zeros(17),
    )
    same = moved(mapped(same, Tensor.float))
    for direction in ("forward", "reverse", "squared"):
        out = icepop_loss(same, kl_tau=1.0, kl=direction, ref_tau=1.0)
        assert torch.equal(out.per_token_loss, torch.zeros_like(out.per_token_loss))
        for name in ("mismatch_kl", "sampler_kl", "ref_kl", "is_masked"):
            assert out.metrics[name] == 0
        assert out.metrics["importance_ratio_mean"] == out.metrics["importance_ratio_max"] == 1


# --- what must not matter, and what must not pass for a number ---


@kernels
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("name", LOSSES)
def test_what_no_loss_reads_never_matters(name, poison):
    inputs = random_inputs(6, widths=(3, 0, 300, 5, 2, 9, 40))
    mask = inputs.loss_mask
    rows = torch.repeat_interleave(torch.arange(17), inputs.support_offsets.diff())
    unread = ~inputs.support_valid | ~mask[rows]
    no_tail = (inputs.support_kind == RowKind.DRAWS) | (inputs.support_kind == RowKind.NONE)
    off = ~mask
    spoilt = {
        field: torch.where(off, poison, getattr(inputs, field))
        for field in ("trainer_logprobs", "inference_logprobs", "advantages", "loss_weights",
                      "ref_logprobs")
    }  # fmt: skip
    for field in ("sampler_tail_mass", "trainer_tail_logprobs"):
        spoilt[field] = torch.where(off | no_tail, poison, getattr(inputs, field))
    for field in ("trainer_support_logprobs", "sampler_support_logprobs"):
        spoilt[field] = torch.where(unread, poison, getattr(inputs, field))
    spoilt["support_kind"] = torch.where(off, 99, inputs.support_kind).to(torch.int8)
    loss = partial(LOSSES[name], kl_tau=0.5, kl="reverse", ref_tau=0.2)
    clean, dirty = (run(loss, moved(x)).numbers() for x in (inputs, replace(inputs, **spoilt)))
    for field, value in clean.items():
        assert torch.equal(value, dirty[field]), field
        assert value.isfinite().all()
    assert (dirty["per token"][off] == 0).all()
    assert (dirty["by trainer_support_logprobs"][unread] == 0).all()


def broken(inputs: LossInputs, how: str) -> LossInputs:
    """One number of row 0, the first whose loss is read, is not what it has to be."""
    name, _, what = how.partition(" ")
    value = getattr(inputs, name).clone()
    value[0] = float(what) if value.is_floating_point() else int(what)
    return replace(inputs, **{name: value})


@kernels
@pytest.mark.parametrize("kind", ["head", "draws", "none"])
@pytest.mark.parametrize(
    "how",
    [
        *(f"trainer_logprobs {x}" for x in ("nan", "inf", "-inf")),
        *(f"inference_logprobs {x}" for x in ("nan", "inf", "-inf", "0.5", "0.0005")),
        *(f"ref_logprobs {x}" for x in ("nan", "-inf", "0.5")),
        *(f"advantages {x}" for x in ("nan", "inf")),
        *(f"loss_weights {x}" for x in ("nan", "-inf")),
        *(f"trainer_support_logprobs {x}" for x in ("nan", "inf", "-inf", "0.5")),
        *(f"sampler_support_logprobs {x}" for x in ("nan", "inf", "-inf", "0.5", "-0.3")),
        *(f"sampler_tail_mass {x}" for x in ("nan", "inf", "-0.5", "0.3", "-0.0005")),
        *(f"trainer_tail_logprobs {x}" for x in ("nan", "inf", "-inf")),
        *(f"support_kind {x}" for x in ("-1", "4", "-7")),
        "support_valid 0",
    ],
)
def test_evidence_that_breaks_a_rule_is_as_defined(how, kind):
    """NaN where the definition has NaN, in value, gradients and metrics, and nowhere else."""
    inputs = random_inputs(8, n=3, widths=(4, 2, 3), kinds=(kind, "replay"))
    inputs.loss_mask[:] = True
    inputs.support_valid[0] = kind != "none"
    for name, options in (("icepop", {"kl": "reverse"}), ("ipo", {"ref_tau": 0.2})):
        got = agree(partial(LOSSES[name], kl_tau=0.3, **options), broken(inputs, how))
        assert got.out.per_token_loss[1:].isfinite().all()
    if how in ("support_kind -1", "trainer_logprobs nan", "inference_logprobs 0.5"):
        assert got.out.per_token_loss[0].isnan()


@pytest.mark.gpu
@pytest.mark.parametrize("offsets", [[0, 9, 2], [1, 4, 7], [0, 4, 6], [0, 4, 2**40], [-5, 4, 7]])
def test_offsets_that_break_a_rule_are_nan_on_a_gpu(offsets):
    """Where looking at them would wait for the device; no address leaves the entries."""
    inputs = mapped(random_inputs(0, n=2, widths=(4, 3), kinds=("replay",)), Tensor.float)
    inputs.loss_mask[:] = True
    out = icepop_loss(moved(replace(inputs, support_offsets=torch.tensor(offsets))))
    assert out.per_token_loss.isnan().any()
    assert out.loss.isnan()


# --- dtypes, layouts, gradients ---


@kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("leaf", LEAVES)
def test_gradients_are_rounded_once_to_each_leafs_dtype(leaf, dtype):
    inputs = mapped(random_inputs(9), Tensor.float)
    half = replace(inputs, **{leaf: getattr(inputs, leaf).to(dtype)})
    loss = partial(reinforce, kl_tau=0.3)  # no test that a rounding could flip
    wanted = by_definition(loss, mapped(half, Tensor.double))
    got = run(loss, moved(half))
    at = LEAVES.index(leaf)
    for i, (grad, exact) in enumerate(zip(got.grads, wanted.grads, strict=True)):
        assert grad.dtype == (dtype if i == at else torch.float32)
        kind, units = torch.finfo(grad.dtype), truncated(grad.dtype)
        rounding = units * kind.eps * exact.abs().clamp(min=kind.tiny)
        # What is added up in float32 has its own error, in units of the largest term.
        near = 2**-20 * float(exact.abs().max())
        assert ((grad.cpu().double() - exact).abs() <= rounding + near).all()
    wide = torch.float64 if (leaf, dtype) == (LEAVES[0], torch.float64) else torch.float32
    assert got.out.loss.dtype == got.out.metrics["is_masked"].dtype == wide


@kernels
def test_strides_and_integers():
    """Every tensor as a stretch of another, numbers as integers where a loss takes them."""
    inputs = random_inputs(10, n=12)
    inputs.advantages = torch.arange(12) - 5
    inputs.loss_weights = torch.ones(1).expand(12)
    loss = partial(LOSSES["icepop"], kl_tau=0.3)
    wanted = by_definition(loss, inputs).numbers()

    def apart(name: str) -> Tensor:
        value = getattr(inputs, name).to(DEVICE)
        return torch.stack([value, value], -1)[..., 0].requires_grad_(name in LEAVES)

    spread = LossInputs(**{field.name: apart(field.name) for field in fields(inputs)})
    assert not any(getattr(spread, f.name).is_contiguous() for f in fields(spread))
    spread.support_offsets = spread.support_offsets.int()
    spread.support_kind = spread.support_kind.long()
    out = loss(spread)
    out.loss.backward()
    got = Run(out, [getattr(spread, name).grad for name in LEAVES]).numbers()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12)


@kernels
def test_in_two_dimensions_and_no_view():
    inputs = random_inputs(11, n=12)
    rows = [f.name for f in fields(inputs) if f.name not in (*SUPPORT[:4],)]
    shaped = replace(inputs, **{name: getattr(inputs, name).reshape(3, 4) for name in rows})
    flat, got = run(icepop_loss, moved(inputs)), run(icepop_loss, moved(shaped))
    assert got.out.per_token_loss.shape == (3, 4)
    assert not got.out.per_token_loss._is_view()
    assert not got.out.loss._is_view()
    assert torch.equal(got.out.per_token_loss.flatten(), flat.out.per_token_loss)
    for grad, wanted in zip(got.grads, flat.grads, strict=True):
        assert torch.equal(grad.flatten(), wanted)
    assert got.grads[0].shape == (3, 4)


@kernels
def test_upstreams():
    """Of the loss, of tokens, of both; expanded; twice."""
    inputs, loss = random_inputs(12), partial(icepop_loss, kl_tau=0.2)
    weights = torch.randn(17, dtype=torch.float64)
    cases = {
        "loss": lambda out, w: 0.3 * out.loss,
        "tokens": lambda out, w: (w * out.per_token_loss).sum(),
        "mean": lambda out, w: out.per_token_loss.mean(),
        "both": lambda out, w: out.loss - (w * out.per_token_loss).sum(),
    }
    for name, total in cases.items():
        exact, fast = moved(inputs, "cpu"), moved(inputs)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(door, "_on_kernels", lambda *_: False)
            total(loss(exact), weights).backward()
        scalar = total(loss(fast), weights.to(DEVICE))
        scalar.backward(retain_graph=True)
        once = [getattr(fast, leaf).grad.clone() for leaf in LEAVES]
        for grad, leaf in zip(once, LEAVES, strict=True):
            wanted = getattr(exact, leaf).grad
            torch.testing.assert_close(grad.cpu(), wanted, rtol=1e-12, atol=1e-12, msg=name)
        scalar.backward()
        for grad, leaf in zip(once, LEAVES, strict=True):
            assert torch.equal(getattr(fast, leaf).grad, 2 * grad)


@kernels
@pytest.mark.parametrize("frozen", [LEAVES[:1], LEAVES[1:2], LEAVES[1:], LEAVES[:2]])
def test_frozen_leaves(frozen):
    inputs = random_inputs(13)
    full, part = moved(inputs), moved(inputs)
    for name in frozen:
        getattr(part, name).requires_grad_(False)
    for case in (full, part):
        icepop_loss(case, kl_tau=0.2).loss.backward()
    for name in LEAVES:
        grad, wanted = getattr(part, name).grad, getattr(full, name).grad
        assert grad is None if name in frozen else torch.equal(grad, wanted)


@kernels
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_no_slope_is_kept(mode, monkeypatch):
    import rl_loss.kernels.loss as loss

    inputs = moved(mapped(random_inputs(14), lambda value: value.to(EXACT)))
    passes = spied(monkeypatch, loss, "row_losses")
    wanted = icepop_loss(inputs).per_token_loss
    with mode():
        out = icepop_loss(inputs)
    assert not out.loss.requires_grad
    assert torch.equal(out.per_token_loss, wanted.detach())
    assert [call.result.slopes.numel() > 0 for call in passes] == [True, False]


@kernels
def test_checkpointed():
    """The forward is run again in the backward, and its gradients are the same bits."""
    inputs, grads = random_inputs(14), []
    for again in (False, True):
        leaves = moved(inputs)

        def total(*given, leaves=leaves):
            given = replace(leaves, **dict(zip(LEAVES, given, strict=True)))
            return icepop_loss(given, kl_tau=0.3).loss

        given = [getattr(leaves, name) for name in LEAVES]
        loss = checkpoint(total, *given, use_reentrant=False) if again else total(*given)
        loss.backward()
        grads.append([getattr(leaves, name).grad for name in LEAVES])
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


@kernels
def test_support_without_a_part_in_the_loss_has_no_gradient():
    """As in the definition: neither centering nor a divergence of distributions."""
    leaves = moved(random_inputs(15))
    icepop_loss(leaves, score_centering=False, kl_tau=0.3, kl="squared").loss.backward()
    assert leaves.trainer_support_logprobs.grad is None
    assert leaves.trainer_tail_logprobs.grad is None
    assert leaves.trainer_logprobs.grad is not None


@kernels
def test_a_row_does_not_depend_on_its_neighbours():
    """Its numbers are the same bits in any batch; and twice the same in one."""
    inputs = mapped(random_inputs(16, n=11, widths=WIDER), Tensor.float)
    loss = partial(icepop_loss, kl_tau=0.3)
    whole, again = (run(loss, moved(inputs)) for _ in range(2))
    for name, value in whole.numbers().items():
        assert torch.equal(value, again.numbers()[name])
    for rows in (slice(0, 3), slice(3, 4), slice(4, 11)):
        bounds = inputs.support_offsets[rows.start : rows.stop + 1]
        entries = slice(int(bounds[0]), int(bounds[-1]))
        cut = {f.name: getattr(inputs, f.name)[rows] for f in fields(inputs)}
        cut |= {name: getattr(inputs, name)[entries] for name in SUPPORT[:3]}
        part = run(loss, moved(LossInputs(**{**cut, "support_offsets": bounds - bounds[0]})))
        assert torch.equal(part.out.per_token_loss, whole.out.per_token_loss[rows])
        for grad, full, at in zip(part.grads, whole.grads, (rows, entries, rows), strict=True):
            assert torch.equal(grad, full[at])


# --- who goes there, and what it costs ---


@kernels
def test_named_losses_of_flat_rows_go_to_the_kernels(monkeypatch):
    import rl_loss.kernels.loss_passes as passes
    import rl_loss.kernels.loss_sums as sums

    launches = {
        name: spied(monkeypatch, owner, name)
        for owner, name in (
            (passes, "_loss_kernel"),
            (sums, "_totals_kernel"),
            (passes, "_grads_kernel"),
        )
    }

    def counted(loss, inputs):
        for calls in launches.values():
            calls.clear()
        run(loss, moved(inputs))
        return [len(calls) for calls in launches.values()]

    inputs = random_inputs(0, n=4, widths=(3,), kinds=("replay", "head"))
    inputs = mapped(inputs, lambda value: value.to(EXACT))
    for loss in LOSSES.values():
        assert counted(loss, inputs) == [1, 1, 1]
    tokens = replace(inputs, **dict.fromkeys(SUPPORT))
    assert counted(icepop_loss, tokens) == [1, 1, 1]
    padded = {name: getattr(inputs, name).reshape(4, 3) for name in SUPPORT[:3]}
    assert counted(icepop_loss, replace(inputs, **padded, support_offsets=None)) == [0, 0, 0]
    rule = partial(policy_loss, rule=lambda log_p, log_q, advantages: torch.ones_like(log_p))
    assert counted(rule, inputs) == [0, 0, 0]
    leaves, made = moved(inputs), torch.compile(icepop_loss, backend="aot_eager", fullgraph=True)
    for calls in launches.values():
        calls.clear()
    made(leaves).loss.backward()
    assert not any(launches.values())


class Operations(TorchDispatchMode):
    """Counts what torch itself is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_host_has_little_to_do(monkeypatch):
    """Memory is taken and seen in other shapes; nothing is computed but by three kernels."""
    pytest.importorskip("triton")
    import rl_loss.kernels.loss_passes as passes
    import rl_loss.kernels.loss_sums as sums

    class Unlaunched:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: None

    for owner, name in (
        (passes, "_loss_kernel"), (passes, "_grads_kernel"), (sums, "_totals_kernel")
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, Unlaunched())
    monkeypatch.setattr(door, "_on_kernels", lambda *_: True)
    monkeypatch.setattr("rl_loss.loss.tensors.host_sees", lambda device: False)
    leaves = moved(random_inputs(0), "cpu")
    with Operations() as seen:
        out = icepop_loss(leaves, kl_tau=0.1)
    assert len(seen.names) <= 14, seen.names
    allowed = ("empty", "new_empty", "view", "unbind", "detach")
    assert {name.split(".")[1] for name in seen.names} <= set(allowed)
    with Operations() as seen:
        out.loss.backward()
    assert len(seen.names) <= 8, seen.names


@pytest.mark.gpu
def test_no_sync_and_in_a_cuda_graph():
    inputs = mapped(random_inputs(0, n=40, widths=WIDER), Tensor.float)
    stream = torch.cuda.Stream()  # of which autograd knows the leaves
    with torch.cuda.stream(stream):
        leaves = moved(inputs, "cuda")
    torch.cuda.current_stream().wait_stream(stream)
    loss = partial(icepop_loss, kl_tau=0.1, ref_tau=0.1)

    def step():
        found = [getattr(leaves, name) for name in LEAVES]
        out = loss(leaves)
        return out, torch.autograd.grad(out.loss, found)

    with torch.cuda.stream(stream):
        wanted, grads = step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured, captured_grads = step()
    graph.replay()
    assert torch.equal(captured.per_token_loss, wanted.per_token_loss)
    for name, value in wanted.metrics.items():
        assert torch.equal(captured.metrics[name], value)
    for grad, expected in zip(captured_grads, grads, strict=True):
        assert torch.equal(grad, expected)


@pytest.mark.gpu
def test_three_launches_forward_and_backward():
    from torch.profiler import ProfilerActivity, profile

    leaves = moved(mapped(random_inputs(0, n=40), Tensor.float), "cuda")
    icepop_loss(leaves).loss.backward()
    torch.cuda.synchronize()
    found = [getattr(leaves, name) for name in LEAVES]
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        torch.autograd.grad(icepop_loss(leaves).loss, found)
        torch.cuda.synchronize()
    on_device = [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    # One more makes the 1 that the backward begins with.
    assert sum("kernel" in name for name in on_device) <= 4, on_device


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_gpu_than_the_current_one():
    inputs = random_inputs(1)
    wanted, got = (run(icepop_loss, moved(inputs, f"cuda:{i}")).numbers() for i in (0, 1))
    for name, value in wanted.items():
        assert torch.equal(got[name], value)


@pytest.mark.gpu
def test_more_than_2_to_the_31_entries():
    """Addresses that int32 cannot hold; the last rows against the definition."""
    n, width = 16384, 135_000
    nnz, offsets = n * width, torch.arange(n + 1, device="cuda") * width
    assert nnz > 2**31
    last = random_inputs(0, n=2, widths=(width,), kinds=("replay",))
    some = mapped(last, Tensor.float)
    log_p = torch.full((nnz,), -math.log(width), device="cuda")
    log_q = log_p.clone()
    log_p[-2 * width :] = some.trainer_support_logprobs.cuda()
    log_q[-2 * width :] = some.sampler_support_logprobs.cuda()
    ones = torch.ones(n, device="cuda")
    inputs = LossInputs(
        trainer_logprobs=-ones,
        inference_logprobs=-ones,
        advantages=ones,
        loss_mask=ones > 0,
        trainer_support_logprobs=log_p.requires_grad_(),
        sampler_support_logprobs=log_q,
        support_offsets=offsets,
        support_kind=ones.to(torch.int8),
    )
    reinforce(inputs).loss.backward()
    few = LossInputs(
        *(-torch.ones(2, dtype=torch.float64),) * 2,
        torch.ones(2, dtype=torch.float64),
        torch.ones(2) > 0,
        trainer_support_logprobs=last.trainer_support_logprobs,
        sampler_support_logprobs=last.sampler_support_logprobs,
        support_offsets=torch.tensor([0, width, 2 * width]),
        support_kind=torch.ones(2, dtype=torch.int8),
    )
    wanted = by_definition(reinforce, few).grads[1]
    got = log_p.grad[-2 * width :].cpu().double()
    largest = float(last.trainer_support_logprobs.abs().max())
    assert (got - wanted).abs().max() <= FLOOR * 2**-23 * largest * wanted.abs().max()
