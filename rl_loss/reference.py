"""The head in plain PyTorch and autograd: the definition every fast path is held to."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rl_loss.csr import HEAD, segment_logsumexp, segment_sum
from rl_loss.flat_rows import FlatRows, HeadArguments, HeadInputs, next_record
from rl_loss.logits import LogitTransform, p_log_p

# The most elements of a gathered block of weight rows, or of a block of logits.
_BLOCK = 2**23


def reference_lm_head(
    inputs: HeadInputs,
    rows: FlatRows,
    transform: LogitTransform,
    entropy: str | None,
    full: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities `[N]`, of support entries `[nnz]`, of tails `[N]`, entropy `[N]`, and
    log-probabilities over the vocabulary `[N]` (the last two 0 where not asked for).

    Blocks of rows are computed one after another and again in the backward, so that neither
    holds logits over the vocabulary, or gathered weight rows, of more than one block.
    """
    dtype = inputs.dtype
    # Converted once and whole: autograd then adds up in this dtype and rounds once, at the end.
    bias = None if inputs.bias is None else inputs.bias.to(dtype)
    inputs = HeadInputs(inputs.hidden.to(dtype), inputs.weight.to(dtype), bias)
    hidden, weight, _ = inputs
    replayed, over_v = rows.replayed(), rows.over_v()
    n, nnz, entry_rows = rows.n, len(rows.ids), rows.entry_rows
    new = torch.zeros(n, dtype=dtype, device=hidden.device)
    out = {
        "logprobs": new,
        "support": new.new_zeros(nnz).masked_fill(rows.broken[entry_rows], torch.nan),
        "tail": new.masked_fill(rows.active, -torch.inf).masked_fill(rows.broken, torch.nan),
        "entropy": new.masked_fill(rows.broken, torch.nan),
        "full": new,
    }

    def put(name: str, at: Tensor, value: Tensor) -> None:
        out[name] = out[name].index_copy(0, at, value)

    def block(function, chosen: Tensor) -> tuple[Tensor, ...]:
        # Tensors one by one: what stands in a record a checkpoint around the head could not free.
        args = *inputs, *rows, chosen

        def of_tensors(*args):
            given = iter(args)
            records = next_record(HeadInputs, given), next_record(FlatRows, given)
            return function(*records, transform, next(given))

        if not torch.is_grad_enabled():
            return of_tensors(*args)
        return checkpoint(of_tensors, *args, use_reentrant=False)

    if not len(replayed) and not len(over_v):
        # Nothing is computed: the inputs get zeros and not None, from whatever output.
        given = [tensor[:0].reshape(-1) for tensor in inputs if tensor is not None]
        nothing = torch.cat([tensor.to(dtype) for tensor in given]).sum()
        out = {name: value + nothing for name, value in out.items()}
    # Broken rows are NaN in value and, through the product, in gradient.
    broken = rows.broken.nonzero()[:, 0]
    for name in ("logprobs", "full") if full else ("logprobs",):
        put(name, broken, hidden[broken].sum(-1) * torch.nan)
    widths = rows.offsets.diff()
    for chosen in _row_blocks(replayed, widths[replayed] * hidden.shape[1]):
        entries, _ = rows.entries(chosen)
        logprobs, support, tail, uncertainty = block(_gathered, chosen)
        put("logprobs", chosen, logprobs)
        put("support", entries, support)
        put("tail", chosen, tail)
        if entropy == "support":
            put("entropy", chosen, uncertainty)
    sizes = torch.full((n,), weight.shape[0])
    for chosen in _row_blocks(over_v, sizes[: len(over_v)]):
        entries, _ = rows.entries(chosen)
        logprobs, support, tail, uncertainty = block(_dense, chosen)
        put("logprobs", chosen, logprobs)
        put("support", entries, support)
        put("tail", chosen, tail)
        if entropy is not None:
            put("entropy", chosen, uncertainty)
        if full:
            put("full", chosen, logprobs)
    if full or entropy == "full":
        for chosen in _row_blocks(replayed, sizes[: len(replayed)]):
            logprobs, _, _, uncertainty = block(_dense, chosen)
            if entropy == "full":
                put("entropy", chosen, uncertainty)
            if full:
                put("full", chosen, logprobs)
    assert out["support"].shape == (nnz,)
    return out["logprobs"], out["support"], out["tail"], out["entropy"], out["full"]


def whole_inputs(given: HeadArguments) -> HeadInputs:
    """Without padding, and of a weight that is split over ranks all of it: the rows of every rank
    are brought together, so that each computes the whole head, and keeps its own gradient."""
    inputs, shard = given.inputs, given.shard
    if given.into is not None:  # before anything rounds, or brings other ranks' rows
        inputs = inputs._replace(weight=given.into.behind(inputs.weight, inputs.dtype))
    if shard.alone:
        return inputs.cut(shard.vocab_size)
    hidden, weight, bias = inputs
    if shard.sequence_parallel:
        hidden = _AllRows.apply(hidden, shard, len(hidden))
    weight = _AllRows.apply(weight, shard, shard.most)
    bias = None if bias is None else _AllRows.apply(bias, shard, shard.most)
    return HeadInputs(hidden, weight, bias).cut(shard.vocab_size)


class _AllRows(torch.autograd.Function):
    """The rows of all ranks, `most` of each; the gradient of this rank's own goes back to it."""

    @staticmethod
    def forward(ctx, part, shard, most):
        ctx.own = dist.get_rank(shard.group) * most, len(part)
        padded = torch.cat([part, part.new_zeros(most - len(part), *part.shape[1:])])
        parts = [torch.empty_like(padded) for _ in range(shard.ranks)]
        dist.all_gather(parts, padded, group=shard.group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, upstream):
        start, n = ctx.own
        return upstream[start : start + n], None, None


def _row_blocks(rows: Tensor, sizes: Tensor) -> Iterator[Tensor]:
    """Cuts rows into runs of at most `_BLOCK` elements, one row at the least."""
    block = (sizes.cpu().cumsum(0) - sizes.cpu()) // _BLOCK
    return iter(rows.split(torch.unique_consecutive(block, return_counts=True)[1].tolist()))


def _gathered(inputs, rows, transform, chosen) -> tuple[Tensor, ...]:
    """Rows normalised over their supports."""
    hidden, weight, bias = inputs
    n = len(chosen)
    entries, place = rows.entries(chosen)
    ids = rows.ids[entries].long()
    products = hidden[chosen][place] * weight[ids]
    at_ids = None if bias is None else bias[ids]
    z = transform(products.sum(-1), at_ids, rows.temperature[chosen][place])
    logprobs = z - segment_logsumexp(z, place, n)[place]
    label = ids == rows.labels[chosen][place]
    unknown = ~rows.known[entries]
    return (
        segment_sum(torch.where(label, logprobs, 0.0), place, n),
        logprobs,
        segment_logsumexp(logprobs[unknown], place[unknown], n),
        -segment_sum(p_log_p(logprobs), place, n),
    )


def _dense(inputs, rows, transform, chosen) -> tuple[Tensor, ...]:
    """Rows normalised over the vocabulary."""
    hidden, weight, bias = inputs
    n = len(chosen)
    entries, place = rows.entries(chosen)
    ids = rows.ids[entries].long()
    raw = _Product.apply(hidden[chosen], weight)
    z = transform(raw, bias, rows.temperature[chosen, None])
    logprobs = z.log_softmax(-1)
    known = rows.known[entries]
    outside = torch.ones_like(logprobs, dtype=torch.bool)
    outside[place[known], ids[known]] = False
    outside &= (rows.kind[chosen] == HEAD)[:, None]
    row, column = outside.nonzero(as_tuple=True)
    return (
        logprobs.gather(1, rows.labels[chosen, None])[:, 0],
        logprobs[place, ids],
        segment_logsumexp(logprobs[row, column], row, n),
        -p_log_p(logprobs).sum(-1),
    )


class _Product(torch.autograd.Function):
    """`a @ b.T`, whose backward autocast leaves alone, wherever it is called."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b.T

    @staticmethod
    def backward(ctx, upstream):
        a, b = ctx.saved_tensors
        need_a, need_b = ctx.needs_input_grad
        with torch.autocast(a.device.type, enabled=False):
            d_a = _Product.apply(upstream, b.T) if need_a else None
            d_b = _Product.apply(upstream.T, a.T) if need_b else None
        return d_a, d_b
