"""Replay over ids padded to one width, with logits over the vocabulary: two ways to do it."""

import torch
from torch import Tensor

from benchmarks.workloads import NotRun, Workload

IDS, TOKENS = 8192, 8192  # of a block of logits
WIDEST = 16384


def padded_dense_replay(work: Workload) -> tuple[Tensor, ...]:
    """All rows by a block of ids at a time; the backward makes no logits, for what it needs of
    them is at the padded ids."""
    ids = _padded_ids(work)
    logits = _PaddedDense.apply(work.hidden, work.weight, ids)
    logprobs = logits - logits.logsumexp(-1, keepdim=True)
    label = ids == work.labels[:, None]
    return torch.where(label, logprobs, 0.0).sum(-1), logprobs[ids >= 0]


def padded_online_replay(work: Workload) -> tuple[Tensor, ...]:
    """Blocks of tokens by blocks of ids: a running log-sum-exp over the vocabulary, with its
    moment for the entropy, beside the logits at the padded ids; the backward computes every block
    again, empties what is not kept, and scatters the upstreams into it. prime-rl's fused output
    linear does these steps."""
    ids, inverse_temperature = _padded_ids(work), torch.ones_like(work.d_logprobs)[:, None]
    rows = work.hidden, work.weight, work.labels, ids, inverse_temperature
    logprobs, kept, _ = _PaddedOnline.apply(*rows)
    return logprobs, kept[ids >= 0]


def _padded_ids(work: Workload) -> Tensor:
    """`[N, K]`, -1 in the padding; made once, as a loader would."""
    width = int(work.support.host.offsets.diff().max())
    if width > WIDEST:
        raise NotRun(f"padded to {width} ids a row")
    if work.kept is None:
        work.kept = work.support.to_padded()[0].long()
    return work.kept


def _place(ids: Tensor, block: range) -> tuple[Tensor, Tensor]:
    """Whether an id is in the block, and its column there (of the others, any)."""
    column = ids - block.start
    return (column >= 0) & (column < len(block)), column.clamp(0, len(block) - 1)


def _blocks(n: int, size: int) -> list[range]:
    return [range(start, min(start + size, n)) for start in range(0, n, size)]


class _PaddedDense(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, ids):
        ctx.save_for_backward(hidden, weight, ids)
        out = torch.full(ids.shape, -torch.inf, device=ids.device)
        for block in _blocks(len(weight), IDS):
            logits = (hidden @ weight[block.start : block.stop].T).float()
            inside, column = _place(ids, block)
            out = torch.where(inside, logits.gather(1, column), out)
        return out

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, ids = ctx.saved_tensors
        d_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        d_weight = torch.empty_like(weight)
        for block in _blocks(len(weight), IDS):
            some = slice(block.start, block.stop)
            inside, column = _place(ids, block)
            dz = torch.zeros(len(hidden), len(block), device=hidden.device)
            dz.scatter_add_(1, column, torch.where(inside, grad, 0.0))
            dz = dz.to(hidden.dtype)
            d_hidden += dz @ weight[some]
            d_weight[some] = dz.T @ hidden
        return d_hidden.to(hidden.dtype), d_weight, None


class _PaddedOnline(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, ids, inverse_temperature):
        parts = []
        for tokens in _blocks(len(hidden), TOKENS):
            at = slice(tokens.start, tokens.stop)
            rows, own, y = hidden[at], ids[at], labels[at, None]
            top = torch.full((len(rows), 1), -torch.inf, device=ids.device)
            total, moment, label = (torch.zeros_like(top) for _ in range(3))
            logits = torch.full(own.shape, -torch.inf, device=ids.device)
            for block in _blocks(len(weight), IDS):
                z = (rows @ weight[block.start : block.stop].T).float() * inverse_temperature[at]
                highest = z.amax(-1, keepdim=True).maximum(top)
                old, e = (top - highest).exp(), (z - highest).exp()
                total = total * old + e.sum(-1, keepdim=True)
                moment = moment * old + (e * z).sum(-1, keepdim=True)
                top = highest
                for found, wanted in ((logits, own), (label, y)):
                    inside, column = _place(wanted, block)
                    found.copy_(torch.where(inside, z.gather(1, column), found))
            norm = logits.logsumexp(-1, keepdim=True)
            logprobs = torch.where(own >= 0, logits - norm, 0.0)
            entropy = top + total.log() - moment / total
            parts.append((label, logprobs, entropy, norm))
        label, logprobs, entropy, norm = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, labels, ids, inverse_temperature, norm)
        entropy = entropy[:, 0]
        ctx.mark_non_differentiable(entropy)
        return (label - norm)[:, 0], logprobs, entropy

    @staticmethod
    def backward(ctx, d_label, d_logprobs, _):
        hidden, weight, labels, ids, inverse_temperature, norm = ctx.saved_tensors
        d_hidden, d_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        upstream = torch.where(ids >= 0, d_logprobs, 0.0)
        spread = d_label[:, None] + upstream.sum(-1, keepdim=True)
        for tokens in _blocks(len(hidden), TOKENS):
            at = slice(tokens.start, tokens.stop)
            for block in _blocks(len(weight), IDS):
                some = slice(block.start, block.stop)
                z = (hidden[at] @ weight[some].T).float() * inverse_temperature[at]
                inside, column = _place(ids[at], block)
                kept = torch.zeros(len(z), len(block) + 1, dtype=torch.bool, device=z.device)
                kept.scatter_(1, torch.where(inside, column, len(block)), True)  # others: behind
                z.masked_fill_(~kept[:, :-1], -torch.inf)
                dz = (z - norm[at]).exp() * -spread[at]
                dz.scatter_add_(1, column, torch.where(inside, upstream[at], 0.0))
                inside, column = _place(labels[at, None], block)
                dz.scatter_add_(1, column, torch.where(inside, d_label[at, None], 0.0))
                dz = (dz * inverse_temperature[at]).to(hidden.dtype)
                d_hidden[at] += dz @ weight[some]
                d_weight[some] += dz.T @ hidden[at]
        return d_hidden, d_weight, None, None, None
