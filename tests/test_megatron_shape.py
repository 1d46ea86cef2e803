"""The head over a column-parallel output layer as Megatron has it, against one of our own.

Rank r holds rows r of equal shards of the padded weight `[V padded / ranks, H]` and rows r of the
hidden states `[s / ranks, b, H]`; labels are `[s, b]`, and the hidden gradients are summed over
ranks and scattered back.
"""

from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from factory import ALL_KINDS, random_support
from ranks import alike_on_all, rank_device, run_ranks

from rl_loss import (
    AlignedRows,
    LossInputs,
    RowKind,
    aligned_rows,
    fused_lm_head,
    fused_lm_head_loss,
    icepop_loss,
)
from rl_loss.csr import HEAD, NONE, REPLAY

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"
)
S, B, H, V = 6, 2, 5, 29
EXACT = 1e-11  # of float64 sums over ranks, in another order
CASES = {
    "replayed": (RowKind.REPLAY,),
    "over the vocabulary": (RowKind.NONE,),
    "all kinds": ALL_KINDS,
}


# --- the layer, with the collectives written out ---


class _GatherSequence(torch.autograd.Function):
    """`[s / ranks, ...]` to `[s, ...]`; the gradients of all ranks are summed, and scattered."""

    @staticmethod
    def forward(ctx, part):
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class _SumOverRanks(torch.autograd.Function):
    """Of parts of one number that all ranks then compute the same with."""

    @staticmethod
    def forward(ctx, part):
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad


def log_sum_exp(z, kept):
    """Over the kept cells of all ranks' `z [N, V padded / ranks]`; -inf where there are none."""
    z = torch.where(kept, z, -torch.inf)
    top = z.detach().amax(1)
    dist.all_reduce(top, dist.ReduceOp.MAX)
    shift = torch.where(top.isneginf(), 0.0, top)
    total = _SumOverRanks.apply((z - shift[:, None]).exp().sum(1))
    none = total == 0
    return torch.where(none, -torch.inf, shift + torch.where(none, 1.0, total).log())


def plain_inputs(hidden, weight, bias, rows: AlignedRows) -> LossInputs:
    """What a loss reads, of logits `[N, V padded / ranks]` that are all there."""
    values = dict(rows.per_token)
    temperature = values.pop("temperature").reshape(-1, 1)
    z = _GatherSequence.apply(hidden).flatten(0, 1) @ weight.T
    z = (z if bias is None else z + bias) / temperature
    support, n = rows.support, len(z)
    at, kind = support.entry_rows, support.kind
    first = dist.get_rank() * len(weight)
    ids = first + torch.arange(len(weight), device=z.device)

    def own(of):
        return (of >= first) & (of < first + len(weight))

    def cells(chosen):
        found = torch.zeros_like(z, dtype=torch.bool)
        chosen = chosen & own(support.ids)
        found[at[chosen], support.ids[chosen].long() - first] = True
        return found

    def logits(of, rows_of):
        here = own(of)
        part = z[rows_of, torch.where(here, of - first, 0).long()]
        return _SumOverRanks.apply(torch.where(here, part, 0.0))

    everything = torch.ones_like(support.known)
    kept = torch.where((kind == REPLAY)[:, None], cells(everything), ids < V)
    tailed = kept & ~cells(support.known) & ((kind == REPLAY) | (kind == HEAD))[:, None]
    norm = log_sum_exp(z, kept)
    logprobs = logits(rows.labels.reshape(-1), torch.arange(n, device=z.device)) - norm
    return LossInputs(
        trainer_logprobs=logprobs.reshape(rows.labels.shape),
        loss_mask=rows.active.to(z.device),
        trainer_support_logprobs=logits(support.ids, at) - norm[at],
        sampler_support_logprobs=support.sampler_logprobs,
        support_valid=support.known & (kind > NONE)[at] & rows.active.reshape(-1).to(z.device)[at],
        sampler_tail_mass=support.sampler_tail_mass,
        trainer_tail_logprobs=(log_sum_exp(z, tailed) - norm).reshape(rows.labels.shape),
        support_offsets=support.offsets,
        support_kind=kind,
        **values,
    )


def plain_loss(hidden, weight, bias, rows: AlignedRows):
    return icepop_loss(plain_inputs(hidden, weight, bias, rows), kl_tau=0.1)


# --- ours ---


class Layer(NamedTuple):
    """This rank's parameters."""

    weight: torch.Tensor  # [V padded / ranks, H]
    bias: torch.Tensor | None  # [V padded / ranks]


def head_options(layer: Layer, rows: AlignedRows):
    return {
        "bias": layer.bias,
        "temperature": rows.per_token["temperature"],
        "active": rows.active,
        "process_group": dist.group.WORLD,
        "vocab_size": V,
        "sequence_parallel": True,
    }


def two_steps(hidden, layer: Layer, rows: AlignedRows):
    out = fused_lm_head(
        hidden, layer.weight, rows.labels, rows.support, **head_options(layer, rows)
    )
    values = {name: rows.per_token[name] for name in ("inference_logprobs", "advantages")}
    return icepop_loss(LossInputs.from_head(out, **values), kl_tau=0.1)


def one_pass(hidden, layer: Layer, rows: AlignedRows):
    values = {name: rows.per_token[name] for name in ("inference_logprobs", "advantages")}
    return fused_lm_head_loss(
        hidden, layer.weight, rows.labels, rows.support,
        loss=partial(icepop_loss, kl_tau=0.1), **values, **head_options(layer, rows),
    )  # fmt: skip


# --- both, on the same micro-batches ---


def padded_layer(rank: int, with_bias: bool, device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """This rank's rows of a weight and bias padded to a multiple of 4 rows a rank; what pads
    them is large, as an embedding's unused rows may be."""
    ranks = dist.get_world_size()
    padded = -(-V // (4 * ranks)) * 4 * ranks
    generator = torch.Generator().manual_seed(11)
    weight = torch.randn(padded, H, generator=generator, dtype=torch.float64) * 2
    bias = torch.randn(padded, generator=generator, dtype=torch.float64)
    weight[V:], bias[V:] = 30.0, 50.0
    weight, bias = (part.chunk(ranks)[rank].to(device) for part in (weight, bias))
    return weight, bias if with_bias else None


def micro_batch(seed: int, kinds, device) -> tuple[torch.Tensor, AlignedRows]:
    """Hidden states `[s, b, H]` and rows in their order, of sequences `[b, s]`."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(V, (B, S), generator=generator)
    sampled = torch.arange(S).expand(B, S) > torch.tensor([[0], [2]])
    rows = aligned_rows(
        tokens,
        sampled,
        support=random_support(tokens.flatten(), V, kinds, generator),
        inference_logprobs=-torch.randn(B, S, generator=generator).abs(),
        advantages=torch.randn(B, S, generator=generator),
        temperature=torch.rand(B, S, generator=generator) + 0.5,
    )
    rows = rows.select(torch.arange(B * S).view(B, S).T)
    # The last row of a sequence has temperature 0, and no loss.
    temperature = torch.where(rows.active, rows.per_token["temperature"], 1.0)
    rows = rows._replace(per_token=rows.per_token | {"temperature": temperature})
    hidden = torch.randn(S, B, H, generator=generator, dtype=torch.float64)
    return hidden.to(device), rows.to(device)


def check(kinds, with_bias: bool, step, rank: int) -> None:
    ranks, device = dist.get_world_size(), rank_device(rank)
    batches = [micro_batch(seed, kinds, device) for seed in (1, 2)]
    tokens = sum(rows.active.sum() for _, rows in batches)
    assert 8 <= tokens < 2 * S * B
    found = []
    for ours in (False, True):
        weight, bias = padded_layer(rank, with_bias, device)
        layer = Layer(weight.requires_grad_(), None if bias is None else bias.requires_grad_())
        results, states = [], []
        for hidden, rows in batches:  # the layer's gradients are accumulated
            states.append(hidden.chunk(ranks)[rank].clone().requires_grad_())
            out = step(states[-1], layer, rows) if ours else plain_loss(states[-1], *layer, rows)
            (out.loss / tokens).backward()
            results.append(out)
        found.append((results, states, layer))
    (wanted, plain_states, plain), (got, own_states, own) = found
    for exact, value in zip(wanted, got, strict=True):
        alike_on_all(value.loss, value.per_token_loss)
        assert near(value.loss, exact.loss)
        assert near(value.per_token_loss, exact.per_token_loss)
        assert value.metrics.keys() == exact.metrics.keys()
        for name, metric in exact.metrics.items():
            assert near(value.metrics[name], metric), name
            assert value.metric_counts[name] == exact.metric_counts[name], name
    own, plain = (
        [*states, *(tensor for tensor in layer if tensor is not None)]
        for states, layer in ((own_states, own), (plain_states, plain))
    )
    for value, exact in zip(own, plain, strict=True):
        largest = exact.grad.abs().max()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        assert largest > 1e-3
        assert (value.grad - exact.grad).abs().max() <= EXACT * largest
    ids = max(0, V - rank * len(own[2]))  # that are no padding
    assert rank < ranks - 1 or ids < len(own[2])
    assert all((tensor.grad[ids:] == 0).all() for tensor in own[2:])


def near(value, exact) -> bool:
    return bool((value - exact).abs().max() <= EXACT * exact.abs().max().clamp(min=1))


def all_cases(rank: int) -> None:
    for name, kinds in CASES.items():
        for with_bias in (False, True):
            for step in (two_steps, one_pass):
                try:
                    check(kinds, with_bias, step, rank)
                except Exception as error:
                    raise AssertionError(f"{name}, bias {with_bias}, {step.__name__}") from error


def test_the_gradients_of_a_column_parallel_output_layer():
    run_ranks(all_cases, 2)
