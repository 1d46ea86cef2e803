"""Rows cut over ranks, packed sequences across the cuts: the numbers of one process."""

from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from factory import random_batch, relative_error
from ranks import Calls, alike_on_all, rank_device, run_ranks

from rl_loss import (
    AlignedRows,
    LossInputs,
    aligned_rows,
    context_parallel_rows,
    fused_lm_head,
    fused_lm_head_loss,
    global_token_count,
    icepop_loss,
    ipo_loss,
    reduce_metrics,
)

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"
)
EXACT = 1e-11  # of float64 sums over ranks, in another order


class Cut(NamedTuple):
    """Sequences of 24 tokens in all, and how they are cut over ranks."""

    shape: tuple = (24,)
    sequences: tuple | None = (0, 5, 14, 24)
    one_by_one: bool = False
    zigzag: bool = True
    prompt: int = 1  # tokens at the head of each sequence that were not sampled


CUTS = {
    "zigzag, straddling": Cut(),
    "zigzag, [1, T]": Cut(shape=(1, 24)),
    "zigzag, each sequence": Cut(shape=(1, 24), sequences=(0, 12, 12, 24), one_by_one=True),
    "zigzag, padded": Cut(shape=(2, 12), sequences=None),
    "runs, straddling": Cut(zigzag=False),
    "runs, padded": Cut(shape=(2, 12), sequences=None, zigzag=False),
    "runs, the prompt on a rank of its own": Cut(sequences=(0, 24), zigzag=False, prompt=13),
    "nothing sampled": Cut(prompt=24),
}


def sampled(cut: Cut):
    """Bool [T]: tokens behind the prompt of their sequence."""
    bounds = cut.sequences or (0, 12, 24)
    at = torch.arange(24)
    starts = torch.tensor([max(b for b in bounds if b <= t) for t in range(24)])
    return at - starts >= cut.prompt


def batch_of(cut: Cut, device):
    """The head's inputs, with poison where a row is inactive, and the rows of all ranks."""
    batch = random_batch(24)
    generator = torch.Generator().manual_seed(5)
    rows = aligned_rows(
        batch.labels.reshape(cut.shape),
        sampled(cut).reshape(cut.shape),
        support=batch.support,
        cu_seqlens=cut.sequences,
        inference_logprobs=-torch.randn(cut.shape, generator=generator).abs(),
        advantages=torch.randn(cut.shape, generator=generator),
        temperature=batch.temperature.reshape(cut.shape),
    )
    hidden = torch.where(rows.active.reshape(-1, 1), batch.hidden, torch.nan)
    hidden = hidden.reshape(*cut.shape, -1).to(device)
    return hidden, batch.weight.to(device), batch.bias.to(device), rows.to(device)


def two_steps(hidden, weight, bias, rows: AlignedRows, loss):
    values = dict(rows.per_token)
    out = fused_lm_head(
        hidden, weight, rows.labels, rows.support,
        bias=bias, active=rows.active, temperature=values.pop("temperature"),
    )  # fmt: skip
    return loss(LossInputs.from_head(out, **values))


def one_pass(hidden, weight, bias, rows: AlignedRows, loss):
    return fused_lm_head_loss(
        hidden, weight, rows.labels, rows.support,
        loss=loss, bias=bias, active=rows.active, **rows.per_token,
    )  # fmt: skip


def leaves(*tensors):
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def check_cut(cut: Cut, rank: int, step, loss) -> None:
    ranks = dist.get_world_size()
    hidden, weight, bias, rows = batch_of(cut, rank_device(rank))
    whole = leaves(hidden, weight, bias)
    expected = step(*whole, rows, loss)
    wanted = rows.active.sum().clamp(min=1)
    assert wanted > 1 or cut.prompt == 24
    (expected.loss / wanted).backward()

    bounds = cut.sequences if cut.one_by_one else None
    own = context_parallel_rows(cut.shape, rank, ranks, cu_seqlens=bounds, zigzag=cut.zigzag)
    flat = own.reshape(-1).to(hidden.device)
    mine = leaves(hidden.flatten(0, -2)[flat].reshape(*own.shape, -1), weight, bias)
    got = step(*mine, rows.select(own), loss)
    tokens = global_token_count(rows.select(own).active)
    assert int(tokens) == wanted
    (got.loss / tokens).backward()

    total = got.loss.detach().clone()
    for value in (total, mine[1].grad, mine[2].grad):
        dist.all_reduce(value)
    assert relative_error(total, expected.loss) < EXACT
    parts = [(mine[0].grad.flatten(0, -2), whole[0].grad.flatten(0, -2)[flat], whole[0].grad)]
    parts += [(one.grad, two.grad, two.grad) for one, two in zip(mine[1:], whole[1:], strict=True)]
    parts.append((got.per_token_loss.flatten(), expected.per_token_loss.flatten()[flat], total))
    for value, exact, of in parts:
        assert (value - exact).abs().max() <= EXACT * of.abs().max()
    metrics, counts = reduce_metrics(got)
    alike_on_all(*metrics.values())
    assert metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        assert int(counts[name]) == int(expected.metric_counts[name])
        assert (metrics[name] - value).abs() <= EXACT * (1 + value.abs()), name


def all_cuts(rank: int) -> None:
    for name, cut in CUTS.items():
        for step, loss in ((two_steps, partial(ipo_loss, kl_tau=0.1)), (one_pass, icepop_loss)):
            try:
                check_cut(cut, rank, step, loss)
            except Exception as error:
                raise AssertionError(f"{name}, {step.__name__}") from error
    for step in (two_steps, one_pass):
        check_a_rank_without(rank, step)


def all_masked(rows: AlignedRows) -> AlignedRows:
    return rows._replace(active=torch.zeros_like(rows.active))


def no_rows(rows: AlignedRows) -> AlignedRows:
    return rows.select([])


def hidden_of(rows: AlignedRows, hidden):
    """The hidden states of the first rows, poisoned where a row is inactive."""
    active = rows.active[:, None].to(hidden.device)
    return torch.where(active, hidden[: len(active)], torch.nan)


def check_a_rank_without(rank: int, step) -> None:
    """One rank of a data-parallel group has a micro-batch without loss tokens, or without rows."""
    hidden, weight, bias, rows = batch_of(Cut(), rank_device(rank))
    for nothing in (all_masked, no_rows):
        for empty in range(dist.get_world_size()):
            mine = nothing(rows) if rank == empty else rows
            own = leaves(hidden_of(mine, hidden), weight, bias)
            with Calls() as calls:
                tokens = global_token_count(mine.active)
                out = step(*own, mine, ipo_loss)
                (out.loss / tokens).backward()
                metrics, counts = reduce_metrics(out)
            assert calls.collectives == ["allreduce_"] * 3
            assert int(tokens) == (dist.get_world_size() - 1) * int(rows.active.sum())
            assert metrics.keys() == counts.keys() == out.metrics.keys()
            alike_on_all(*metrics.values(), *counts.values())
            if rank == empty:
                check_nothing(out, own)
            else:
                for name, value in out.metrics.items():
                    assert (metrics[name] - value).abs() <= EXACT * (1 + value.abs())


def check_nothing(out, inputs) -> None:
    """A loss of 0 with a graph, and gradients of 0."""
    assert float(out.loss.detach()) == 0
    assert out.loss.grad_fn is not None
    assert not any(float(count) for count in out.metric_counts.values())
    for tensor in inputs:
        assert tensor.grad.shape == tensor.shape
        assert (tensor.grad == 0).all()


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_rows_of_all_ranks_are_the_whole(ranks):
    run_ranks(all_cuts, ranks)


# --- replicas of a vocabulary that is split ---


def replicas(rank: int) -> None:
    """Two replicas of two ranks each; one of them has a micro-batch without loss tokens."""
    shard, replica = rank % 2, rank // 2
    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])][replica]
    peers = [dist.new_group([0, 2]), dist.new_group([1, 3])][shard]
    hidden, weight, bias, rows = batch_of(Cut(), rank_device(rank))
    weight, bias = (torch.cat([part, part[:1]]).chunk(2)[shard] for part in (weight, bias))
    for split in (False, True):  # the hidden states, too
        options = {"process_group": shards, "vocab_size": 31, "sequence_parallel": split}
        for fused, impl in ((False, "reference"), (False, "auto"), (True, "auto")):
            seen = []
            for empty in (None, 1):
                mine = all_masked(rows) if replica == empty else rows
                states = hidden_of(mine, hidden)
                own = leaves(states.chunk(2)[shard] if split else states, weight, bias)
                with Calls() as calls:
                    out = step_over(own, mine, fused, impl=impl, **options)
                    tokens = global_token_count(mine.active, peers)
                    (out.loss / tokens).backward()
                    metrics, counts = reduce_metrics(out, peers)
                assert int(tokens) == (1 if empty else 2) * int(rows.active.sum())
                assert int(counts["mismatch_kl"]) == int(tokens)
                if impl == "auto" or not weight.is_cuda:  # the reference adds up in any order there
                    alike_on_all(*metrics.values(), *counts.values())
                if replica == empty:
                    check_nothing(out, own)
                seen.append(calls.collectives)
            if fused and weight.is_cuda:  # one a chunk of active rows, so fewer where none is
                continue
            assert seen[0] == seen[1]
            assert len(seen[0]) == 3 + (3 if split else 2)


def step_over(own, rows: AlignedRows, fused: bool, **options):
    hidden, weight, bias = own
    values = dict(rows.per_token, active=rows.active)
    options |= {"bias": bias, "temperature": values.pop("temperature")}
    if fused:
        return fused_lm_head_loss(
            hidden, weight, rows.labels, rows.support, loss=ipo_loss, **values, **options
        )
    out = fused_lm_head(
        hidden, weight, rows.labels, rows.support, active=values.pop("active"), **options
    )
    return ipo_loss(LossInputs.from_head(out, **values))


def test_a_replica_without_loss_tokens_makes_the_same_calls():
    run_ranks(replicas, 4)
