"""Batches of mixed rows, and the head's definition written out over the whole vocabulary."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from rl_loss import LMHeadOutput, RowKind, Support

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
        given = {name: getattr(self, name).detach() for name in ("hidden", "weight", "bias")}
        made = {name: tensor.to(dtype or tensor.dtype) for name, tensor in given.items()}
        return replace(self, **{name: tensor.requires_grad_() for name, tensor in made.items()})

    def grads(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden.grad, self.weight.grad, self.bias.grad


def random_support(
    labels: Tensor,
    vocab_size: int,
    kinds,
    generator: torch.Generator,
    *,
    widths=(3, 2, 5, 9, 1),  # as many as never match the kinds
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
    widths=(3, 2, 5, 9, 1),  # as many as never match the kinds
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


def padded(batch: Batch, rows: int = 5) -> Batch:
    """The batch with rows behind the vocabulary that hold what must not be read."""
    poison = torch.tensor([torch.nan, torch.inf, 1e30, -torch.inf]).repeat(rows)[:rows, None]
    behind = poison.to(batch.weight)
    return replace(
        batch,
        weight=torch.cat([batch.weight, behind.expand(rows, batch.weight.shape[1])]),
        bias=torch.cat([batch.bias, behind[:, 0].to(batch.bias)]),
    )


def naive_logits(batch: Batch, dtype: torch.dtype, *, softcap=None, logit_scale=1.0) -> Tensor:
    """`[N, V]` by plain PyTorch in `dtype`."""
    hidden, weight, bias = (t.to(dtype) for t in (batch.hidden, batch.weight, batch.bias))
    z = (hidden @ weight.T + bias) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z / batch.temperature.to(dtype)[:, None]


def naive_head(
    batch: Batch,
    *,
    entropy=None,
    full=False,
    active=None,
    dtype: torch.dtype = torch.float64,
    **transform,
) -> list[Tensor]:
    """Every output from a masked log_softmax over V, by autograd, in `dtype`.

    Gives logprobs [N], support_logprobs [nnz], tails [N], and where they are asked for entropy [N]
    and full_logprobs [N].
    """
    support, n, entry_rows = batch.support, len(batch.labels), batch.support.entry_rows
    on = torch.ones(n, dtype=torch.bool) if active is None else active
    rows, held = on.nonzero()[:, 0], on[entry_rows].nonzero()[:, 0]
    some = replace(batch, hidden=batch.hidden[rows], temperature=batch.temperature[rows])
    z = naive_logits(some, dtype, **transform)
    kind, ids, known = support.kind[rows], support.ids[held].long(), support.known[held]
    place = (on.cumsum(0) - 1)[entry_rows[held]]
    kept, told = (torch.zeros(z.shape, dtype=torch.bool) for _ in range(2))
    kept[place, ids], told[place[known], ids[known]] = True, True
    kept |= (kind != RowKind.REPLAY)[:, None]
    logp = z.masked_fill(~kept, -torch.inf).log_softmax(1)
    outside = kept & ~told & ((kind == RowKind.REPLAY) | (kind == RowKind.HEAD))[:, None]
    tailed = outside.any(1).nonzero()[:, 0]
    tail = logp[tailed].masked_fill(~outside[tailed], -torch.inf).logsumexp(1)
    over = z.log_softmax(1) if entropy == "full" else logp
    disorder = -(over.exp() * over.masked_fill(over.isneginf(), 0.0)).sum(1)

    def spread(size: int, at: Tensor, values: Tensor) -> Tensor:
        return torch.zeros(size, dtype=dtype).index_put((at,), values)

    labels = batch.labels[rows, None]
    found = [
        spread(n, rows, logp.gather(1, labels)[:, 0]),
        spread(support.nnz, held, logp[place, ids]),
        spread(n, rows, spread(len(rows), tailed, tail).masked_fill(~outside.any(1), -torch.inf)),
    ]
    if entropy is not None:
        found.append(spread(n, rows, disorder))
    if full:
        found.append(spread(n, rows, z.log_softmax(1).gather(1, labels)[:, 0]))
    return found


def naive_output(batch: Batch, parts: Sequence[Tensor], active: Tensor | None) -> LMHeadOutput:
    """What `naive_head` gives as a loss takes it."""
    support = batch.support
    on = torch.ones(len(batch.labels), dtype=torch.bool) if active is None else active
    valid = support.known & (on & (support.kind > RowKind.NONE))[support.entry_rows]
    return LMHeadOutput(*parts[:3], entropy=None, support_valid=valid, active=on, support=support)


def outputs(out) -> list[Tensor]:
    """The differentiable outputs of a head, the last two only where they were asked for."""
    found = [out.logprobs, out.support_logprobs, out.trainer_tail_logprobs]
    return found + [part for part in (out.entropy, out.full_logprobs) if part is not None]


def weighted_sum(parts, seed: int = 1) -> Tensor:
    """A scalar with a different upstream for each element; absent tails (-inf) are left out."""
    generator = torch.Generator().manual_seed(seed)
    total = 0.0
    for part in parts:
        upstream = torch.randn(part.shape, generator=generator, dtype=torch.float64)
        upstream = upstream.to(part.device)
        finite = torch.where(part.isneginf(), 0.0, part)
        total = total + (finite * upstream).sum()
    return total


def relative_error(got: Tensor, expected: Tensor) -> float:
    """The largest error as a share of the largest value."""
    if expected.numel() == 0:
        return 0.0
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


# --- how close is close ---


class Results(NamedTuple):
    """What a head or a loss gave, and the gradients of hidden, weight and bias."""

    values: list[Tensor]
    grads: list[Tensor | None]

    def cpu(self) -> "Results":
        return Results(*([t if t is None else t.detach().cpu() for t in part] for part in self))


# Of a head's outputs makes the values to be compared and the scalar to be differentiated.
Read = Callable[[Sequence[Tensor]], tuple[Sequence[Tensor], Tensor]]


def as_they_are(parts: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor]:
    return parts, weighted_sum(parts)


def results(leaves: Batch, parts: Sequence[Tensor], read: Read = as_they_are) -> Results:
    values, total = read(parts)
    total.backward()
    return Results(list(values), list(leaves.grads())).cpu()


class Tolerance(NamedTuple):
    """The largest error that passes."""

    values: list[float]  # of each
    grads: list[float]  # as a share of the gradient's largest value, before it is rounded


# For batches of so few numbers that PyTorch happens to be right in all of them: another order of a
# sum, another exponential. In units in the last place of the largest logit, of which log p and p
# are made.
_FLOOR = 4


def tolerance(batch: Batch, read: Read = as_they_are, **options) -> Tolerance:
    """Twice the error against float64 that plain PyTorch over the whole vocabulary makes in the
    dtype that the head adds up in, and a floor.

    That dtype is float32 for inputs in half precision, not theirs: products rounded to bfloat16
    are off by a thousand times as much. What float64 is off by nothing here could tell: it is
    taken to be what float32 is, 2^29 times smaller.
    """
    names = "hidden", "weight", "bias"
    single = replace(batch, **{name: getattr(batch, name).detach().float() for name in names})
    narrow, wide = (
        results(leaves, naive_head(leaves, dtype=dtype, **options), read)
        for dtype in (torch.float32, torch.float64)
        for leaves in (single.leaves(dtype),)
    )
    transform = {name: options[name] for name in ("softcap", "logit_scale") if name in options}
    z = naive_logits(single, torch.float64, **transform)
    if options.get("active") is not None:
        z = z[options["active"]]
    z = z[z.isfinite()].abs()
    double = torch.float64 in (batch.hidden.dtype, batch.weight.dtype)
    unit = torch.finfo(torch.float64 if double else torch.float32).eps
    floor = _FLOOR * unit * max(1.0, float(z.max()) if len(z) else 0.0)
    twice = 2 * unit / torch.finfo(torch.float32).eps
    values = zip(narrow.values, wide.values, strict=True)
    grads = zip(narrow.grads, wide.grads, strict=True)
    return Tolerance(
        [twice * _largest_error(*pair) + floor for pair in values],
        [twice * relative_error(*pair) + floor for pair in grads],
    )


def assert_exact(got: Results, wanted: Results, allowed: Tolerance, *, units: float = 0.5) -> None:
    """Values and gradients are those of float64; a gradient was rounded to its dtype once, by so
    many units in its last place at most."""
    for value, exact, most in zip(got.values, wanted.values, allowed.values, strict=True):
        assert torch.equal(value.isneginf(), exact.isneginf())
        assert _largest_error(value, exact) <= most
    for grad, exact, share in zip(got.grads, wanted.grads, allowed.grads, strict=True):
        if exact is None:
            assert grad is None
            continue
        exact, kind = exact.double(), torch.finfo(grad.dtype)
        rounding = units * kind.eps * exact.abs().clamp(min=kind.tiny)
        beyond = (grad.double() - exact).abs() - rounding
        if beyond.numel():
            assert float(beyond.max()) <= share * float(exact.abs().max())


def _largest_error(got: Tensor, exact: Tensor) -> float:
    """Of the elements that are not -inf in float64."""
    some = ~exact.isneginf()
    error = (got.double() - exact.double())[some].abs()
    return float(error.max()) if error.numel() else 0.0


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


class MadeMemory(TorchDispatchMode):
    """Follows the memory that operations make, and tells what of it is still held."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, str]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in tree_flatten(result)[0]:
            # A checkpoint keeps empty tensors of its own.
            if isinstance(value, Tensor) and value.layout == torch.strided and value.numel():
                held = StorageWeakRef(value.untyped_storage())
                self.made[held.cdata] = held, f"{func} {tuple(value.shape)}"
        return result

    def held(self, *known: Tensor) -> list[str]:
        """What made the memory that is alive and not that of `known`."""
        gc.collect()
        own = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in known}
        return [
            name for at, (held, name) in self.made.items() if at not in own and not held.expired()
        ]


def tensors_of(support: Support) -> list[Tensor]:
    """Its own, and those of its plans."""
    found, todo = [], [vars(support)]
    while todo:
        value = todo.pop()
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, dict):
            todo.extend(value.values())
        elif isinstance(value, tuple):
            todo.extend(value)
    return found


# --- that a test took the path it is about ---


class Call(NamedTuple):
    args: tuple
    kwargs: dict
    result: object  # None of a kernel


def spied(monkeypatch, owner, name) -> list[Call]:
    """The calls of a function, or the launches of a kernel, from here on."""
    calls, function = [], getattr(owner, name)

    def recorded(of):
        def spy(*args, **kwargs):
            calls.append(Call(args, kwargs, of(*args, **kwargs)))
            return calls[-1].result

        return spy

    class Launched:
        def __getitem__(self, grid):
            return recorded(function[grid])

    is_kernel = hasattr(function, "__getitem__")
    monkeypatch.setattr(owner, name, Launched() if is_kernel else recorded(function))
    return calls


# --- that a test takes the path it is about ---


def hot_ids_everywhere(monkeypatch, *, slots=16, least=2, forward=True):
    """From so many entries on an id is frequent, in batches of any size and any half precision."""
    import rl_loss.kernels.gradient_sums as gradient_sums
    import rl_loss.kernels.records as records
    import rl_loss.plan as plan

    for name in ("_WHOLE_SLOTS", "_FEWEST_SLOTS", "_MOST_SLOTS"):
        monkeypatch.setattr(plan, name, slots)
    monkeypatch.setattr(plan, "LEAST_COUNT", least)
    for name in ("LEAST_ENTRIES", "LEAST_A_ROW", "FORWARD_NUMBERS"):
        monkeypatch.setattr(plan, name, 0)
    monkeypatch.setattr(plan, "FORWARD_A_ROW", 0 if forward else 10**9)
    for module in (records, gradient_sums):
        monkeypatch.setattr(module, "may_be_hot", lambda inputs, scalars: not scalars.any_draws)
