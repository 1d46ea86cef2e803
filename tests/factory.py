"""Batches of mixed rows, and the head's definition written out over the whole vocabulary."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from rl_loss import RowKind, Support

ALL_KINDS = (RowKind.REPLAY, RowKind.NONE, RowKind.HEAD, RowKind.DRAWS)
TINY_MODEL = {  # of a transformers config
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass
class Batch:
    hidden: Tensor
    weight: Tensor
    bias: Tensor
    labels: Tensor
    support: Support
    temperature: Tensor

    def leaves(self, dtype: torch.dtype | None = None) -> "Batch":
        """The same values as new leaves."""
        made = {
            name: getattr(self, name).detach().to(dtype or self.hidden.dtype).requires_grad_()
            for name in ("hidden", "weight", "bias")
        }
        return replace(self, **made)

    def grads(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden.grad, self.weight.grad, self.bias.grad


def random_support(
    labels: Tensor,
    vocab_size: int,
    kinds,
    generator: torch.Generator,
    *,
    widths=(1, 2, 5, 9),
    incomplete: bool = True,
) -> Support:
    """Rows whose kinds cycle through `kinds` and whose q is a proper distribution."""
    rows, row_kinds, tails = [], [], []
    for i, label in enumerate(labels.tolist()):
        kind = kinds[i % len(kinds)]
        row_kinds.append(kind)
        width = min(widths[i % len(widths)], vocab_size)
        q = torch.randn(vocab_size, generator=generator, dtype=torch.float64).mul(2).softmax(0)
        if kind == RowKind.NONE:
            rows.append(None)
            tails.append(1.0)
        elif kind == RowKind.DRAWS:
            ids = torch.multinomial(q, width, replacement=True, generator=generator)
            rows.append((ids, q[ids].log()))
            tails.append(0.0)
        else:
            ids = torch.randperm(vocab_size, generator=generator)[:width]
            if kind == RowKind.REPLAY and label not in ids.tolist():
                ids[0] = label
            mass = q[ids] / q[ids].sum() if kind == RowKind.REPLAY else q[ids]
            known = torch.ones(width, dtype=torch.bool)
            if incomplete and kind == RowKind.REPLAY and i % 3 == 2:
                known = torch.rand(width, generator=generator) < 0.6
            rows.append((ids, mass.log(), known))
            tails.append(float((1 - mass[known].sum()).clamp(min=0)))
    return Support.from_rows(rows, kind=row_kinds, tail_mass=tails)


def random_batch(
    n: int = 13,
    h: int = 7,
    v: int = 31,
    *,
    kinds=ALL_KINDS,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    std: float = 4.0,
    widths=(1, 2, 5, 9),
    incomplete: bool = True,
) -> Batch:
    """A batch with logits of standard deviation `std`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    labels = torch.randint(v, (n,), generator=generator)
    support = random_support(labels, v, kinds, generator, widths=widths, incomplete=incomplete)
    return Batch(
        hidden=normal(n, h).to(dtype),
        weight=(normal(v, h) * std / h**0.5).to(dtype),
        bias=normal(v).to(dtype),
        labels=labels,
        support=support,
        temperature=(torch.rand(n, generator=generator, dtype=torch.float64) + 0.5).float(),
    )


def naive_head(batch: Batch, *, softcap=None, logit_scale=1.0, entropy=None, active=None):
    """Every output from a masked log_softmax over V, row by row, by autograd, in float64.

    Returns logprobs [N], support_logprobs [nnz], tails [N] and entropy [N].
    """
    hidden, weight, bias = (t.double() for t in (batch.hidden, batch.weight, batch.bias))
    z = (hidden @ weight.T + bias) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z = z / batch.temperature.double()[:, None]
    support, offsets = batch.support, batch.support.offsets.tolist()
    logprobs, tails, entropies, entries = [], [], [], []
    for i, label in enumerate(batch.labels.tolist()):
        span = slice(offsets[i], offsets[i + 1])
        ids, known, kind = support.ids[span].long(), support.known[span], int(support.kind[i])
        if active is not None and not active[i]:
            zero = torch.zeros((), dtype=torch.float64)
            logprobs.append(zero)
            tails.append(zero)
            entropies.append(zero)
            entries.append(torch.zeros(len(ids), dtype=torch.float64))
            continue
        kept = torch.arange(z.shape[1])
        if kind == RowKind.REPLAY:
            kept = ids.sort().values
        logp = torch.full_like(z[i], -torch.inf).index_put((kept,), z[i][kept].log_softmax(0))
        over = z[i].log_softmax(0) if entropy == "full" else logp[kept]
        logprobs.append(logp[label])
        entries.append(logp[ids])
        entropies.append(-(over.exp() * over).sum())
        outside = sorted(set(kept.tolist()) - set(ids[known].tolist()))
        if kind not in (RowKind.REPLAY, RowKind.HEAD) or not outside:
            tails.append(torch.tensor(-torch.inf, dtype=torch.float64))
        else:
            tails.append(logp[outside].logsumexp(0))
    empty = torch.zeros(0, dtype=torch.float64)
    return (
        torch.stack(logprobs) if logprobs else empty,
        torch.cat(entries) if entries else empty,
        torch.stack(tails) if tails else empty,
        torch.stack(entropies) if entropies else empty,
    )


def outputs(out) -> list[Tensor]:
    """The differentiable outputs of a head, entropy only where it was asked for."""
    found = [out.logprobs, out.support_logprobs, out.trainer_tail_logprobs]
    return found if out.entropy is None else [*found, out.entropy]


def weighted_sum(parts, seed: int = 1) -> Tensor:
    """A scalar with a different upstream for each element; absent tails (-inf) are left out."""
    generator = torch.Generator().manual_seed(seed)
    total = 0.0
    for part in parts:
        upstream = torch.randn(part.shape, generator=generator, dtype=torch.float64)
        finite = torch.where(part.isneginf(), 0.0, part)
        total = total + (finite * upstream).sum()
    return total


def relative_error(got: Tensor, expected: Tensor) -> float:
    """The largest error as a share of the largest value."""
    if expected.numel() == 0:
        return 0.0
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any operation's result had, views of `inputs` left out."""

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self.given = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        self.numel = 0
        self.shape: tuple[int, ...] = ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in tree_flatten(result)[0]:
            if isinstance(value, Tensor) and value.layout == torch.strided:
                if value.untyped_storage().data_ptr() in self.given:
                    continue
                own = value.untyped_storage().nbytes() // max(1, value.element_size())
                if own > self.numel:
                    self.numel, self.shape = own, tuple(value.shape)
        return result
