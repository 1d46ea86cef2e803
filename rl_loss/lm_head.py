"""The LM head that computes the logits a loss reads, and no others."""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import register_dataclass

from rl_loss.arguments import active_module, class_path
from rl_loss.dense import Dense, dense_bwd, dense_fwd, dense_logits
from rl_loss.flat_rows import (
    FlatRows,
    HeadArguments,
    HeadInputs,
    Needs,
    Sums,
    Upstreams,
    check_vocab_size,
    flat_rows,
    logit_transform,
    next_record,
)
from rl_loss.gathered import (
    Gathered,
    gathered_bwd,
    gathered_fwd,
    gathered_logits_of,
    replayed_entries,
)
from rl_loss.grad_into import GradInto
from rl_loss.logits import LogitTransform
from rl_loss.reference import reference_lm_head, whole_inputs
from rl_loss.support import Support
from rl_loss.vocab_parallel import (
    RankLogits,
    Shard,
    fingerprint,
    outside_graphs,
    outside_graphs_with,
)


@dataclass(frozen=True)
class LMHeadOutput:
    """The trainer's log-probabilities, in float32 (float64 for float64 inputs).

    Inactive rows hold 0. `logprobs`, `support_logprobs`, `trainer_tail_logprobs`, `entropy` and
    `full_logprobs` carry gradient to hidden, weight and bias.
    """

    logprobs: Tensor  # [...] log p of the label: over the support on REPLAY rows, else over V
    support_logprobs: Tensor  # [nnz] log p of every support id
    trainer_tail_logprobs: Tensor  # [...] log of what p puts outside the known ids, -inf if none
    entropy: Tensor | None  # [...]
    support_valid: Tensor  # [nnz] bool: q is known there and the row active and usable
    active: Tensor  # [...] bool
    support: Support | None = field(default=None, repr=False)  # as it was given
    full_logprobs: Tensor | None = None  # [...] log p of the label over V, on every row

    @property
    def kept_mass(self) -> Tensor | None:
        """`[...]` what p over V puts on the ids that `logprobs` is normalised over, with gradient.

        `exp(full_logprobs - logprobs)`: of REPLAY rows the mass on the kept set, which replay takes
        no notice of; 1 elsewhere and on inactive rows. Rounding may put it above 1. NaN where the
        label itself has no mass. None without `full`.
        """
        if self.full_logprobs is None:
            return None
        return (self.full_logprobs - self.logprobs).exp()


# FSDP2 looks for a module's outputs, which tell it when the backward begins, in what is a tree.
register_dataclass(LMHeadOutput)


@outside_graphs_with("process_group", "grad_into")
def fused_lm_head(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    support: Support | None = None,
    *,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    active: Tensor | None = None,
    entropy: Literal["support", "full"] | None = None,
    full: bool = False,
    impl: Literal["auto", "reference", "triton"] = "auto",
    logits_dtype: torch.dtype | None = None,
    workspace_mib: float = 512,
    vocab_size: int | None = None,
    process_group: Any = None,
    sequence_parallel: bool = False,
    grad_into: Tensor | None = None,
) -> LMHeadOutput:
    """The trainer's log-probabilities of the labels and of every support id.

    Logits are `z = softcap * tanh((hidden @ weight.T + bias) * logit_scale / softcap) / T`. A
    REPLAY row is normalised over its support, whose logits alone are computed: neither the
    forward nor the backward touches the rest of the vocabulary. All other rows are normalised
    over the vocabulary, a block of logits at a time, as are rows whose support is so wide that
    a matrix product costs less than gathering. Rows of all kinds may stand in one batch.

    Args:
        hidden: `[..., H]` the states that predict the labels; N rows are its leading dimensions
            flattened.
        weight: `[V, H]` the LM-head weight.
        labels: `[...]` integer, the sampled tokens (aligned: the function never shifts).
        support: the sampler's evidence, N rows; None: no row has any.
        temperature: one value, or one a row `[...]`.
        bias: `[V]`.
        softcap: the bound of tanh-capped logits (Gemma 2).
        logit_scale: a factor of the logits (Cohere; Granite divides, so 1 over its divisor).
        active: `[...]` bool, the rows that a loss reads, all by default. The others cost
            nothing, are not checked, hold 0 and give no gradient, whatever their inputs hold. A
            tensor on the host never costs a sync; on the device it may cost one, for rows over
            the vocabulary alone.
        entropy: "support": of the replayed distribution on REPLAY rows, elsewhere over V;
            "full": over V on every row, which computes the logits of REPLAY rows as well.
        full: gives `full_logprobs` too, log p of the label over V on every row, and `kept_mass`:
            for a reference model, for distillation, and to see what replay hides. REPLAY rows then
            cost the products over V that all others do, which `entropy="full"` asks for as well:
            both together cost them once. Elsewhere they are `logprobs`, bit for bit, at no cost.
        impl: "reference" (autograd of plain PyTorch), "triton", or "auto": Triton on a GPU,
            sparse products of torch on the CPU. What cannot run raises.
        logits_dtype: torch.bfloat16 rounds the logits as an engine with a bfloat16 head does,
            before they are divided by T; by default they stay in the accumulation dtype. Rounded,
            log-probabilities match such an engine's but for products that its own order of
            summation rounds the other way; the gradient is that of the logits not rounded.
        workspace_mib: MiB that a block of logits over the vocabulary may take on a GPU, in the
            forward and in the backward; smaller is slower (on 16384 rows: below 256).
        vocab_size: the number of ids V where `weight` has more rows than that: padding to a
            multiple of a tile or of the ranks. The rows behind it have no mass and no gradient,
            whatever they hold, and no id or label may be among them. None: every row is an id.
        process_group: the group over whose ranks the vocabulary is split. `weight` (and `bias`) is
            then this rank's part: as many consecutive rows as every rank has, in the order of the
            ranks, those behind `vocab_size` being padding; or a DTensor cut by its rows over that
            very group, as torch cuts it. All else is whole and the same on every rank, and so are
            the outputs, bit for bit; gradients of `hidden` are summed over the ranks, those of
            `weight` and `bias` stay where their rows are. One sum over the ranks in the forward
            and one in the backward, whatever the rows. Numbers of rows or entries that differ
            between ranks cannot be told before that sum, whose sizes then do not fit.
        sequence_parallel: `hidden` holds this rank's rows alone, `[N / ranks, ...]` along its
            first dimension, in the order of the ranks: gathered in the forward, and kept for the
            backward; their gradient is summed and scattered.
        grad_into: `[V, H]` as `weight` (as this rank's part of it), float32 or the weight's dtype:
            every backward adds the weight's gradient to it, and autograd gives the weight none.
            Micro-batches add up there without a gradient of `[V, H]` each: where all rows are
            replayed, the rows of ids that have a gradient alone are read and written. What is
            added is rounded once a backward, from a float32 sum and what the buffer held.

    Returns:
        LMHeadOutput. The gradient keeps the dtype of each input, is accumulated in float32 (or
        float64), and is rounded once.

    Raises:
        ValueError: a shape, dtype or device that does not fit; a `weight` sharded in another way;
            a `grad_into` for a frozen weight, or that shares its memory; labels or supports that
            differ between ranks (NaN on a GPU); on CPU tensors also a label outside the vocabulary
            or its REPLAY row, an id outside the vocabulary, a temperature that is not above 0; and
            wherever the host can see it an active row that the sampler failed to record or left
            empty. On a GPU such a row is NaN throughout.

    Source: replay over the sampler's kept set is "keep sampling mask" of DeepSeek-V3.2, arXiv
    2512.02556, section 3.1.

    Example:
        >>> hidden, weight = torch.randn(2, 4), torch.randn(9, 4)
        >>> support = Support.from_rows([([5, 2], [-0.6931, -0.6931]), None])
        >>> out = fused_lm_head(hidden, weight, torch.tensor([2, 7]), support)
        >>> bool((out.support_logprobs.exp().sum() - 1).abs() < 1e-6)
        True
    """
    given = HeadArguments(
        hidden=hidden,
        weight=weight,
        labels=labels,
        support=support,
        temperature=temperature,
        bias=bias,
        softcap=softcap,
        logit_scale=logit_scale,
        active=active,
        entropy=entropy,
        full=full,
        impl=impl,
        logits_dtype=logits_dtype,
        workspace_mib=workspace_mib,
        vocab_size=vocab_size,
        process_group=process_group,
        sequence_parallel=sequence_parallel,
        grad_into=grad_into,
    )
    if given.on_kernels:
        from rl_loss.kernels.operators import kernel_head

        on = given.active_on_device()
        *parts, valid = kernel_head(given, on)
    else:
        rows = flat_rows(given)
        valid, on = rows.usable_entries(), rows.active.reshape(labels.shape)
        head = _reference if impl == "reference" else _without_kernels
        parts = [*head(given, rows)]
    logprobs, support_logprobs, tails, uncertainty, full_logprobs = parts
    return LMHeadOutput(
        logprobs=logprobs,
        support_logprobs=support_logprobs,
        trainer_tail_logprobs=tails,
        entropy=uncertainty if entropy else None,
        support_valid=valid,
        active=on,
        support=support,
        full_logprobs=full_logprobs if full else None,
    )


class FusedLMHead(nn.Linear):
    """The module form of `fused_lm_head`: an `nn.Linear` that holds the LM-head weight.

    It can stand where a model's own head stood (tied, frozen or wrapped by FSDP2). Called with
    labels it takes the options of `fused_lm_head`, without them it gives `nn.Linear`'s logits.

    Args:
        in_features, out_features, bias, device, dtype: as `nn.Linear`.
        softcap, logit_scale, vocab_size: the model's own, as in `fused_lm_head`.

    Example:
        >>> head = FusedLMHead.from_linear(nn.Linear(4, 9, bias=False), softcap=30.0)
        >>> head(torch.randn(3, 4), torch.tensor([1, 2, 8])).logprobs.shape
        torch.Size([3])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        vocab_size: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        logit_transform(softcap, logit_scale)
        check_vocab_size(vocab_size)  # of all ranks, where out_features are one rank's
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.softcap, self.logit_scale, self.vocab_size = softcap, logit_scale, vocab_size

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        vocab_size: int | None = None,
    ) -> "FusedLMHead":
        """A head that shares the parameters of `linear`, so that tied weights stay tied."""
        linear = active_module(linear)
        if type(linear) is not nn.Linear:
            raise ValueError(
                f"linear must be a plain nn.Linear, got {class_path(linear)}, of which only the "
                "weight would be taken: merge an adapter into it (merge_and_unload), or train the "
                "whole head (modules_to_save)"
            )
        head = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            softcap=softcap,
            logit_scale=logit_scale,
            vocab_size=vocab_size,
            device="meta",
        )
        head.weight, head.bias = linear.weight, linear.bias
        return head

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        support: Support | None = None,
        **options: Any,
    ) -> Tensor | LMHeadOutput:
        if labels is None:
            return super().forward(hidden)
        own = "softcap", "logit_scale", "vocab_size"
        options = {**{name: getattr(self, name) for name in own}, **options}
        return fused_lm_head(hidden, self.weight, labels, support, bias=self.bias, **options)


# --- where there are no kernels ---

# logprobs, of entries, of tails, entropy, full_logprobs
Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _reference(given: HeadArguments, rows: FlatRows) -> Outputs:
    with torch.autocast(given.hidden.device.type, enabled=False):
        inputs = whole_inputs(given)
        options = given.transform, given.entropy, given.full
        logprobs, entries, *rest = reference_lm_head(inputs, rows, *options)
    logprobs, tails, entropy, full = (_shaped(part, given) for part in (logprobs, *rest))
    return logprobs, entries, tails, entropy, full


def _shaped(flat: Tensor, given: HeadArguments) -> Tensor:
    """`[N]` to `[...]`, no view: FSDP2 warns of a module that returns one."""
    shape = given.labels.shape
    return flat if flat.shape == shape else flat.reshape(shape).clone()


def _without_kernels(given: HeadArguments, rows: FlatRows) -> Outputs:
    shape = tuple(given.labels.shape)
    options = _Options(given.transform, given.entropy, given.full, shape, given.shard, given.into)
    with torch.autocast(given.hidden.device.type, enabled=False):
        return _FusedLMHead.apply(*given.inputs, rows, options)


class _Options(NamedTuple):
    """What is no tensor."""

    transform: LogitTransform
    entropy: str | None
    full: bool
    shape: tuple[int, ...]  # of the labels
    shard: Shard
    into: GradInto | None


class _Saved(NamedTuple):
    """What the forward computed of each path, and the backward reads."""

    gathered: Gathered
    dense: Dense
    full: Dense | None  # of the replayed rows over V, where something of them is asked for


class _FusedLMHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, rows, options):
        ctx.set_materialize_grads(False)
        inputs = HeadInputs(options.shard.gather_rows(hidden), weight, bias)
        outputs, saved = plain_fwd(inputs.cut(options.shard.rows), rows, options)
        full = () if saved.full is None else saved.full
        ctx.save_for_backward(*inputs, *rows, *saved.gathered, *saved.dense, *full)
        ctx.options = options
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *upstreams):
        if all(upstream is None for upstream in upstreams):
            return (None,) * 5
        tensors = iter(ctx.saved_tensors)
        inputs, rows = next_record(HeadInputs, tensors), next_record(FlatRows, tensors)
        gathered, dense = next_record(Gathered, tensors), next_record(Dense, tensors)
        saved = _Saved(gathered, dense, next_record(Dense, tensors))
        needs = Needs(*ctx.needs_input_grad[:3])
        shaped = (None if u is None else u.reshape(-1) for u in upstreams)
        given = inputs, rows, ctx.options, saved, Upstreams(*shaped), needs
        with torch.autocast(inputs.hidden.device.type, enabled=False):
            alone = ctx.options.shard.alone
            grads = plain_bwd(*given) if alone else outside_graphs(plain_bwd, *given)
        if ctx.options.into is not None and needs.weight:
            grads[1] = ctx.options.into.instead()
        return *grads, None, None


def plain_fwd(inputs: HeadInputs, rows: FlatRows, options: _Options) -> tuple[Outputs, _Saved]:
    """The outputs, each row written by its path, and what the backward reads."""
    transform, entropy, want_full, shape, shard, _ = options
    replayed = replayed_entries(rows)
    z = gathered_logits_of(inputs, rows, transform, replayed, shard)
    sources = [(rows, rows.over_v(), entropy is not None)]
    if want_full or entropy == "full":  # the replayed rows over V, without their entries
        sources.append((rows.without_entries(), rows.replayed(), entropy == "full"))
    logits = [
        dense_logits(inputs, source, chosen, transform, want, shard)
        for source, chosen, want in sources
    ]
    z, *wholes = _of_all_ranks(shard, z, [part.own for part in logits], rows)
    gathered = gathered_fwd(z, rows, replayed, entropy == "support")
    dense, *more = (
        dense_fwd(part, source, whole, want)
        for part, (source, _, want), whole in zip(logits, sources, wholes, strict=True)
    )
    full = more[0] if more else None
    new = gathered.z.new_zeros
    outputs = new(shape), new(len(rows.ids)), new(shape), new(shape), new(shape)
    support_logprobs = outputs[1]
    logprobs, tails, uncertainty, full_logprobs = (outputs[i].view(-1) for i in (0, 2, 3, 4))
    tails[gathered.single] = _tail_of_one(rows, gathered.single, tails.dtype)
    for part in (gathered, dense):
        logprobs[part.chosen] = part.logprobs
        tails[part.chosen] = part.tail_logprobs
        uncertainty[part.chosen] = part.entropy
        support_logprobs[part.entries] = part.support_logprobs
    full_logprobs[dense.chosen] = dense.logprobs
    if full is not None:
        full_logprobs[full.chosen] = full.logprobs
        if entropy == "full":
            uncertainty[full.chosen] = full.entropy
    for out in (logprobs, tails, uncertainty, full_logprobs):
        out.masked_fill_(rows.broken, torch.nan)
    support_logprobs.masked_fill_(rows.broken[rows.entry_rows], torch.nan)
    return outputs, _Saved(gathered, dense, full)


def _of_all_ranks(shard: Shard, z: Tensor, parts: list[RankLogits], rows: FlatRows) -> list[Any]:
    """Logits of entries `[E]`, and each part, as all ranks together have them: one sum."""
    if shard.alone:
        return [z, *parts]
    whole = shard.sum_logits(
        RankLogits(
            torch.cat([z, *(part.entries for part in parts)]),
            torch.cat([part.labels for part in parts]),
            torch.cat([part.stats for part in parts], 1),
            fingerprint(rows, shard, z.dtype),
        )
    )
    z, *entries = whole.entries.split([len(z), *(len(part.entries) for part in parts)])
    sizes = [len(part.labels) for part in parts]
    columns = zip(entries, whole.labels.split(sizes), whole.stats.split(sizes, 1), strict=True)
    return [z, *(RankLogits(*column, whole.batch) for column in columns)]


def _tail_of_one(rows: FlatRows, single: Tensor, dtype: torch.dtype) -> Tensor:
    """Log p of the tail of rows of one id: all or nothing."""
    known = rows.known[rows.offsets[single]]
    return torch.where(known, -torch.inf, 0.0).to(dtype)


def plain_bwd(
    inputs: HeadInputs,
    rows: FlatRows,
    options: _Options,
    saved: _Saved,
    upstreams: Upstreams,
    needs: Needs,
) -> list[Tensor | None]:
    """The gradients of hidden, weight and bias, added up wide and rounded once; None of a weight
    whose gradient was added to the buffer of the options."""
    transform, entropy, shard, into = (
        options.transform,
        options.entropy,
        options.shard,
        options.into,
    )
    ids = inputs.cut(shard.rows)
    replayed = upstreams
    if entropy != "support":  # else that of replayed rows is another path's, or none
        replayed = upstreams._replace(entropy=None)
    of_full = upstreams.entropy if entropy == "full" else None
    only = Upstreams(upstreams.full_logprobs, None, None, of_full)
    full = None if only.none else saved.full
    buffer = None if into is None else into.buffer[: shard.rows]
    over_v = [part for part in (saved.dense, full) if part is not None and len(part.chosen)]
    if buffer is not None and buffer.dtype != inputs.dtype and over_v:
        buffer = None  # chunks of rows add up wide first
    gathered = saved.gathered, ids, rows, transform, replayed, needs, shard
    sums = gathered_bwd(*gathered, buffer)
    dense_bwd(saved.dense, ids, rows, transform, upstreams.over_v(), sums, shard)
    if full is not None:
        dense_bwd(full, ids, rows.without_entries(), transform, only, sums, shard)
    if into is not None and sums.weight is not None:
        if buffer is None:
            into.add(sums.weight)
        sums = sums._replace(weight=None)
    if sums.hidden is not None:
        sums.hidden.masked_fill_(rows.broken[:, None], torch.nan)
        sums = sums._replace(hidden=shard.sum_hidden(sums.hidden)())
    return [
        None if total is None or tensor is None else total.to(tensor.dtype)
        for total, tensor in zip(_padded(sums, inputs), inputs, strict=True)
    ]


def _padded(sums: Sums, inputs: HeadInputs) -> Sums:
    """With 0 for the padding behind the ids."""

    def pad(total: Tensor | None, like: Tensor | None) -> Tensor | None:
        if total is None or like is None or len(total) == len(like):
            return total
        return torch.cat([total, total.new_zeros(len(like) - len(total), *like.shape[1:])])

    return sums._replace(weight=pad(sums.weight, inputs.weight), bias=pad(sums.bias, inputs.bias))
