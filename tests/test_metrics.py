"""The metrics against numbers written out by hand."""

import math

import pytest
import torch
import torch.distributed as dist
from ranks import Calls, alike_on_all, rank_device, run_ranks

import rl_loss.metrics
from rl_loss import (
    LossInputs,
    LossOutputs,
    Support,
    combine_metrics,
    fused_lm_head,
    global_token_count,
    icepop_loss,
    ipo_loss,
    metric_floats,
    metric_sums,
    reduce_metrics,
)

# Formulas of a dozen terms below 10 in float64, each within two units of rounding.
NEAR = {"rel": 1e-13, "abs": 1e-13}


def run(loss=icepop_loss, **options):
    """Three loss tokens and one outside: a REPLAY row, a HEAD row, a NONE row.

    Returns the result, the head's output with the support, and log q of the tokens.
    """
    z = torch.tensor([[0.0, 1.0, 2.0, 0.5]] * 4, dtype=torch.float64)
    q = torch.tensor([0.5, 0.3])
    support = Support.from_rows(
        [([1, 2], torch.tensor([0.4, 0.6]).log()), ([2, 1], q.log()), None, None],
        kind=[1, 2, 0, 0],
    )
    labels = torch.tensor([2, 1, 0, 0])
    active = torch.tensor([True, True, True, False])
    out = fused_lm_head(z, torch.eye(4, dtype=torch.float64), labels, support, active=active)
    log_q = torch.tensor([math.log(0.6), math.log(0.3), -9.0, 0.0], dtype=torch.float64)
    inputs = LossInputs.from_head(
        out,
        support,
        inference_logprobs=log_q,
        advantages=torch.ones(4, dtype=torch.float64),
    )
    return loss(inputs, **options), out, log_q


def test_token_metrics():
    result, out, log_q = run()
    x = (out.logprobs - log_q)[:3].detach()
    mismatch = x.exp() - 1 - x
    rejected = (x < math.log(0.2)) | (x > math.log(5))
    assert rejected.tolist() == [False, False, True]
    expected = {
        "mismatch_kl": mismatch.mean(),
        "masked_mismatch_kl": mismatch[2],
        "unmasked_mismatch_kl": mismatch[:2].mean(),
        "is_masked": 1 / 3,
        "importance_ratio_mean": x.exp().mean(),
        "importance_ratio_max": x.exp().max(),
        "log_ratio_clipped": 0.0,
        "sampler_kl": 0.0,
    }
    for name, value in expected.items():
        assert float(result.metrics[name]) == pytest.approx(float(value), **NEAR), name
    counts = {"mismatch_kl": 3, "masked_mismatch_kl": 1, "unmasked_mismatch_kl": 2, "sampler_kl": 0}
    for name, count in counts.items():
        assert int(result.metric_counts[name]) == count


def test_centering_metrics():
    result, out, _ = run()
    p = torch.tensor([0.0, 1.0, 2.0, 0.5], dtype=torch.float64).softmax(0)
    replay = p[[1, 2]] / p[[1, 2]].sum()
    q_replay, q_head = out.support.sampler_logprobs.double().exp().split(2)  # 0.4, 0.6; 0.5, 0.3
    p_head, p_tail = p[[2, 1]], float(1 - p[[2, 1]].sum())
    q_tail = float(out.support.sampler_tail_mass[1])
    assert q_tail == pytest.approx(0.2, rel=2**-22)

    def l1(p, q):
        c = torch.where((p / q >= 0.2) & (p / q <= 5), p, 0.0)  # q w = p where kept
        return (c - p * c.sum()).abs().sum()

    values = {
        "uncentered": 1 / 3,
        "support_size": 2.0,
        "head_mass": (1 + float(p_head.sum())) / 2,
        "tail_mass": q_tail / 2,
        "mask_tv": (
            float((replay - q_replay).abs().sum())
            + float((p_head - q_head).abs().sum())
            + abs(p_tail - q_tail)
        )
        / 4,
        "correction_l1": float(
            l1(replay, q_replay)
            + l1(
                torch.cat([p_head, torch.tensor([p_tail], dtype=torch.float64)]),
                torch.cat([q_head, torch.tensor([q_tail], dtype=torch.float64)]),
            )
        )
        / 2,
        "tail_inexact": 0.0,
    }
    for name, value in values.items():
        got = float(result.metrics[f"score_centering/{name}"])
        assert got == pytest.approx(value, **NEAR), name
    assert int(result.metric_counts["score_centering/uncentered"]) == 3
    assert int(result.metric_counts["score_centering/mask_tv"]) == 2


def test_correction_l1_is_the_norm_of_the_correction_on_the_logits():
    z = torch.tensor([[0.0, 1.0, 2.0, 0.5]], dtype=torch.float64, requires_grad=True)
    support = Support.from_rows([([1, 2, 3], torch.tensor([0.1, 0.6, 0.3]).log())])
    grads = []
    for centering in (True, False):
        out = fused_lm_head(z, torch.eye(4, dtype=torch.float64), torch.tensor([2]), support)
        inputs = LossInputs.from_head(
            out,
            support,
            inference_logprobs=torch.tensor([math.log(0.6)]),
            advantages=torch.ones(1),
        )
        result = ipo_loss(inputs, eps=0.1, score_centering=centering)
        grads.append(torch.autograd.grad(result.loss, z)[0])
    norm = (grads[0] - grads[1]).abs().sum()
    assert norm > 0.01
    l1 = float(result.metrics["score_centering/correction_l1"])
    assert l1 == pytest.approx(float(norm), **NEAR)


def test_rows_whose_tail_model_may_be_inexact_are_counted():
    result, _, _ = run(ipo_loss, eps=0.005)
    p = torch.tensor([0.0, 1.0, 2.0, 0.5], dtype=torch.float64).softmax(0)
    assert abs(float(p[0] + p[3]) - 0.2) > 0.005
    assert float(result.metrics["score_centering/tail_inexact"]) == 0.5
    assert float(run(ipo_loss, eps=0.5)[0].metrics["score_centering/tail_inexact"]) == 0
    assert float(run(icepop_loss)[0].metrics["score_centering/tail_inexact"]) == 0


def test_parts_combine_by_their_counts():
    """A mean over 1 row and one over 3, a part without rows, and a maximum."""

    def part(mean, most, count):
        n = torch.tensor(count)
        return {"a": torch.tensor(mean), "a_max": torch.tensor(most)}, {"a": n, "a_max": n}

    metrics, counts = combine_metrics([part(1.0, 4.0, 1), part(0.0, 0.0, 0), part(5.0, 2.0, 3)])
    assert {name: float(value) for name, value in metrics.items()} == {"a": 4.0, "a_max": 4.0}
    assert {name: int(count) for name, count in counts.items()} == {"a": 4, "a_max": 4}
    assert rl_loss.metrics.combine_metrics is combine_metrics


def test_floats_for_a_logger_and_sums_for_a_trainer_that_adds_up():
    one, two = (run(loss)[0] for loss in (icepop_loss, ipo_loss))
    assert metric_floats(one.metrics) == {name: float(x) for name, x in one.metrics.items()}
    found = metric_floats(one.metric_counts)
    assert found == {name: float(count) for name, count in one.metric_counts.items()}
    assert all(type(value) is float for value in found.values())
    parts = [metric_sums(out.metrics, out.metric_counts) for out in (one, two)]
    wanted, rows = combine_metrics([(out.metrics, out.metric_counts) for out in (one, two)])
    assert set(parts[0][0]) == {name for name in wanted if not name.endswith("_max")}
    for name in parts[0][0]:
        total, count = (sum(part[i][name] for part in parts) for i in (0, 1))
        assert int(count) == int(rows[name])
        mean = float(total / count.clamp(min=1))
        assert mean == pytest.approx(float(wanted[name]), **NEAR)
    assert metric_floats({}) == {}
    assert metric_sums({}, {}) == ({}, {})


def test_sampler_kl_is_over_the_tokens_it_acts_on():
    """The NONE row's token is rejected: its bounded estimate is in the mean of all alone."""
    everywhere, out, log_q = run(kl_tau=1.0)
    kept = run(kl_tau=1.0, kl_on="kept")[0]
    x = float((out.logprobs.detach() - log_q)[2])
    assert x > math.log(10)
    rejected = 9 - math.log(10) + 9 * (x - math.log(10))
    total = 3 * float(everywhere.metrics["sampler_kl"])
    assert total - 2 * float(kept.metrics["sampler_kl"]) == pytest.approx(rejected, **NEAR)
    assert int(everywhere.metric_counts["sampler_kl"]) == 3
    assert int(kept.metric_counts["sampler_kl"]) == 2
    assert float(everywhere.metrics["mismatch_kl"]) > float(everywhere.metrics["sampler_kl"])


def test_parts_with_other_metrics_are_refused():
    one = torch.ones(())
    with pytest.raises(ValueError, match=r"parts\[1\] must have the metrics of parts\[0\].*'b'"):
        combine_metrics([({"a": one}, {"a": one}), ({"a": one, "b": one}, {"a": one, "b": one})])
    assert combine_metrics([]) == ({}, {})


# --- over ranks ---


def outputs_of(metrics, counts):
    """What a loss gives, of these metrics."""
    zero = torch.zeros(())
    return LossOutputs(zero, metrics, counts, zero)


def parts_of_ranks(ranks, dtype):
    """Two micro-batches a rank, of unlike counts; of some metrics the first rank has no row."""
    generator = torch.Generator().manual_seed(0)
    names = ["a", "z/b", "a_max", "c", "b_max"]

    def part(rank):
        values = torch.rand(5, generator=generator, dtype=torch.float64).to(dtype) + rank
        counts = torch.randint(1, 2**26, (5,), generator=generator)
        if rank == 0:
            values[:3], counts[:3] = 0, 0
        order = names[rank:] + names[:rank]  # no two ranks' alike
        return outputs_of(
            {name: values[names.index(name)] for name in order},
            {name: counts[names.index(name)] for name in order},
        )

    return [[part(rank) for _ in range(2)] for rank in range(ranks)]


def combined_exactly(parts):
    """In Python's integers and float64."""
    metrics, counts = {}, {}
    for name in parts[0].metrics:
        values = [float(part.metrics[name]) for part in parts]
        rows = [int(part.metric_counts[name]) for part in parts]
        total = math.fsum(v * n for v, n in zip(values, rows, strict=True))
        metrics[name] = max(values) if name.endswith("_max") else total / max(1, sum(rows))
        counts[name] = sum(rows)
    return metrics, counts


def on(device, parts):
    return [
        outputs_of(*({k: v.to(device) for k, v in part.items()} for part in pair))
        for pair in ((one.metrics, one.metric_counts) for one in parts)
    ]


def reduced_over_ranks(rank):
    ranks, device = dist.get_world_size(), rank_device(rank)
    for dtype in (torch.float32, torch.float64):
        by_rank = parts_of_ranks(ranks, dtype)
        wanted, rows = combined_exactly([part for parts in by_rank for part in parts])
        with Calls() as calls:
            metrics, counts = reduce_metrics(on(device, by_rank[rank]))
        assert calls.collectives == ["allreduce_", "allreduce_"]
        assert "_local_scalar_dense" not in calls.names
        alike_on_all(*metrics.values(), *counts.values())
        assert {name: int(count) for name, count in counts.items()} == rows
        for name, value in metrics.items():
            assert value.dtype == dtype
            assert counts[name].dtype == torch.int64
            # What is rounded: a rank's products, their sum and mean, and the mean of the whole.
            assert abs(float(value) - wanted[name]) <= 4 * torch.finfo(dtype).eps * wanted[name]
            if name.endswith("_max"):
                assert float(value) == wanted[name]
    nothing = {"a": torch.zeros((), device=device), "a_max": torch.zeros((), device=device)}
    assert reduce_metrics(outputs_of(nothing, nothing)) == (nothing, nothing)  # on any rank
    for bad in range(ranks):  # a maximum that is no number on one rank, in any place
        for place in range(9):
            parts = {f"{i}_max": torch.tensor(float(i), device=device) for i in range(9)}
            ones = {name: torch.ones_like(value) for name, value in parts.items()}
            if rank == bad:
                parts[f"{place}_max"] = torch.tensor(torch.nan, device=device)
            found = reduce_metrics(outputs_of(parts, ones))[0]
            for i in range(9):
                value = float(found[f"{i}_max"])
                assert math.isnan(value) if i == place else value == i
    groups = [dist.new_group([i]) for i in range(ranks)]
    alone, _ = reduce_metrics(on(device, by_rank[rank]), groups[rank])
    wanted, _ = combined_exactly(by_rank[rank])
    assert {name: float(value) for name, value in alone.items()} == pytest.approx(wanted)
    counted_over_ranks(rank, groups[rank])


def counted_over_ranks(rank, own):
    ranks, device = dist.get_world_size(), rank_device(rank)
    masks = [torch.arange(8).reshape(2, 4) < 3 * rank, torch.arange(5) % 2 == 0]
    wanted = sum(3 * r for r in range(ranks) if r < 3) + 3 * ranks
    for home in (device, torch.device("cpu")):
        moved = [mask.to(home) for mask in masks]
        with Calls() as calls:
            count = global_token_count(moved)
        assert calls.collectives == ["allreduce_"]
        assert "_local_scalar_dense" not in calls.names
        assert (count.dtype, count.shape, count.device) == (torch.int64, (), device)
        assert int(count) == wanted
        assert int(global_token_count(moved[0])) == wanted - 3 * ranks
        assert int(global_token_count(moved, own)) == 3 * rank + 3
        assert int(global_token_count(moved[0][:0])) == 1
        assert int(global_token_count([])) == 1


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
def test_over_ranks_as_one_batch():
    run_ranks(reduced_over_ranks, 2)


def test_one_process_is_one_rank():
    one, two = (run(loss)[0] for loss in (icepop_loss, ipo_loss))
    wanted, rows = combine_metrics([(out.metrics, out.metric_counts) for out in (one, two)])
    assert reduce_metrics([one, two]) == (wanted, rows)
    assert reduce_metrics(iter([one, two])) == (wanted, rows)
    metrics, counts = reduce_metrics(one)
    for name, value in one.metrics.items():
        assert float(metrics[name]) == pytest.approx(float(value), **NEAR)
    assert counts == one.metric_counts


def test_outputs_that_do_not_fit_are_refused():
    one = torch.ones(())
    with pytest.raises(ValueError, match="outputs must be one LossOutputs or more, got none"):
        reduce_metrics([])
    with pytest.raises(ValueError, match=r"parts\[1\] must have the metrics of parts\[0\].*'b'"):
        reduce_metrics([outputs_of({"a": one}, {"a": one}), outputs_of({"b": one}, {"b": one})])


def test_tokens_of_one_process():
    mask = torch.tensor([[True, False], [True, True]])
    count = global_token_count(mask)
    assert (count.dtype, count.shape, int(count)) == (torch.int64, (), 3)
    assert int(global_token_count([mask, mask[0]])) == 4
    assert int(global_token_count(torch.zeros(3, dtype=torch.bool))) == 1
    for dtype in (torch.float32, torch.float64):
        assert (torch.ones((), dtype=dtype) / count).dtype == dtype


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(3), "loss_mask must be bool, got torch.float32"),
        ([torch.ones(3).bool(), torch.ones(3).long()], "loss_mask must be bool, got torch.int64"),
        ([True, False], "loss_mask must be a tensor, got bool"),
    ],
)
def test_masks_that_are_none_are_refused(mask, message):
    with pytest.raises(ValueError, match=message):
        global_token_count(mask)
