"""A Hugging Face model whose forward gives log-probabilities instead of logits."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, is_dataclass, make_dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from rl_loss.integrations.head_transform import measure, running_head, without_peft
from rl_loss.lm_head import LMHeadOutput, fused_lm_head
from rl_loss.support import Support


def patch_lm_head(model: Any) -> Any:
    """Gives a model's forward the keyword `aligned_labels`, in place: its head then computes
    log-probabilities of these, and no logits.

    `model(input_ids, ..., aligned_labels=labels)` returns the model's own output class with
    `logits` None and `head` an `LMHeadOutput` of shape `[B, L]`, beside whatever else the model
    gives (cache, hidden states, an auxiliary loss). The keywords are, beside the model's own:

        aligned_labels: `[B, L]` integer; row `[b, t]` is the token sampled behind `input_ids[b,
            t]` (`aligned_rows`), where Hugging Face's `labels` are shifted inside. With
            `logits_to_keep` the labels of the positions that are kept.
        support, temperature, active, entropy: as in `fused_lm_head`, `support` of `B * L` rows.
        head_options: a dict of its other options (`impl`, `logits_dtype`, `workspace_mib`, ...).

    Everything else is as before: calls without `aligned_labels`, `generate`, parameter names and
    checkpoints, tied weights, and modules that wrap the model or its head (FSDP2 on the root, or
    on the head apart, DDP, `PeftModel`), whether they come before or after. Bias, soft cap and
    scale are the model's own, measured when it is patched (`logit_options`), for which its
    weights have to be there; of a model sharded by FSDP2 every rank calls. It is the head that
    runs in a call that counts: with PEFT's `modules_to_save` the active copy.

    Args:
        model: a causal language model of transformers, or a `PeftModel` of one, whose own model
            is patched. Patched already it is left as it is.

    Returns:
        the model.

    Raises:
        ValueError: what `logit_options` refuses but for changed hidden states; a forward with
            arguments of these names; weights on meta. In a call `aligned_labels` with `labels` or
            `return_dict=False`, any other of the keywords without `aligned_labels`, LoRA on the
            head, and what `fused_lm_head` refuses.

    Source: models and outputs of transformers 4.56 and later.

    Example:
        >>> model = patch_lm_head(model)  # doctest: +SKIP
        >>> out = model(  # doctest: +SKIP
        ...     input_ids, aligned_labels=rows.labels, support=rows.support, active=rows.active
        ... )
        >>> inputs = LossInputs.from_head(out.head, ...)  # doctest: +SKIP
    """
    target = without_peft(model)
    if _patch_of(target) is not None:
        return model
    taken = sorted(_OURS & inspect.signature(target.forward).parameters.keys())
    if taken:
        raise ValueError(f"model: the forward of {type(target).__name__} has its own {taken}")
    transform = measure(target)
    target.forward = _PatchedForward(target, transform.softcap, transform.scale)
    return model


def unpatch_lm_head(model: Any) -> None:
    """Takes back what `patch_lm_head` did.

    Raises:
        ValueError: a model that is not patched, or whose patched forward was wrapped since.
    """
    target = without_peft(model)
    patch = _patch_of(target)
    if patch is None:
        raise ValueError(f"model: {type(target).__name__} is not patched")
    if getattr(target.forward, "__func__", target.forward) is not patch:
        raise ValueError(
            f"model: the patched forward of {type(target).__name__} was wrapped since: undo that "
            "first (Accelerator.unwrap_model(model, keep_fp32_wrapper=False))"
        )
    if patch.before is None:
        del target.forward
    else:
        target.forward = patch.before


def _patch_of(model: Any) -> "_PatchedForward | None":
    """Ours among the wrappers around a model's forward."""
    forward = model.forward
    while forward is not None:
        forward = getattr(forward, "__func__", forward)
        if isinstance(forward, _PatchedForward):
            return forward
        forward = getattr(forward, "__wrapped__", None)
    return None


_OURS = {"aligned_labels", "support", "temperature", "active", "entropy", "head_options"}
_HEAD_OPTIONS = inspect.signature(fused_lm_head).parameters.keys() - (
    _OURS | {"hidden", "weight", "labels", "bias", "softcap", "logit_scale"}
)


class _PatchedForward:
    """The forward of a patched model: an attribute of it, copied and pickled with it, through
    which DDP, FSDP2, PEFT and accelerate all call."""

    def __init__(self, model: Any, softcap: float | None, logit_scale: float) -> None:
        self.model = model
        self.before = vars(model).get("forward")  # of another wrapper; None: the class's
        self.transform = {"softcap": softcap, "logit_scale": logit_scale}
        self.stand_in = _StandIn()

    @property
    def __signature__(self) -> inspect.Signature:
        """The model's own, which `generate` and trainers look at."""
        return inspect.signature(self._own(self.model))

    def _own(self, model: Any) -> Any:
        return self.before or type(model).forward.__get__(model)  # FSDP2 changes the class

    def __call__(
        self,
        *args: Any,
        aligned_labels: Tensor | None = None,
        support: Support | None = None,
        temperature: float | Tensor = 1.0,
        active: Tensor | None = None,
        entropy: str | None = None,
        head_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        model = self.model
        if args and isinstance(args[0], nn.Module):  # accelerate has bound it once more
            model, args = args[0], args[1:]
        forward = self._own(model)
        options = {"temperature": temperature, "active": active, "entropy": entropy}
        if aligned_labels is None:
            _refuse_without_labels({"support": support, **options, "head_options": head_options})
            if not self.stand_in.calls:
                return forward(*args, **kwargs)
            with self.stand_in.during(None, running_head(model)):  # inside a call with labels
                return forward(*args, **kwargs)
        named = zip(inspect.signature(forward).parameters, args, strict=False)
        _check_with_labels(dict(named) | kwargs, head_options or {})
        call = _Call(aligned_labels, support, options | self.transform | (head_options or {}))
        with self.stand_in.during(call, running_head(model)):
            output = forward(*args, **kwargs)
        return _with_head(output, call.output)


def _refuse_without_labels(options: dict[str, Any]) -> None:
    if not isinstance(options["temperature"], Tensor) and options["temperature"] == 1:
        del options["temperature"]
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name} needs aligned_labels, which are None")


def _check_with_labels(given: dict[str, Any], head_options: dict[str, Any]) -> None:
    if given.get("labels") is not None:
        raise ValueError(
            "labels and aligned_labels must not both be given: the model shifts its labels itself "
            "and takes its loss from logits, of which there are none here"
        )
    if given.get("return_dict") is False:
        raise ValueError("return_dict must be True with aligned_labels, got False")
    if not isinstance(head_options, dict):
        raise ValueError(f"head_options must be a dict, got {type(head_options).__name__}")
    unknown = head_options.keys() - _HEAD_OPTIONS
    if unknown:
        raise ValueError(
            f"head_options may hold {sorted(_HEAD_OPTIONS)}, got {sorted(unknown, key=str)}"
        )


@dataclass
class _Call:
    """What one call of a model asks of its head, and gets."""

    labels: Any
    support: Support | None
    options: dict[str, Any]
    output: LMHeadOutput | None = None


_CALL: ContextVar[_Call | None] = ContextVar("call", default=None)  # that this thread is in


class _StandIn:
    """What a head runs instead of its own forward during calls with aligned labels.

    It runs inside whatever wraps the head: FSDP2 has made the weight whole for it, and finds in
    its output the tensors before whose gradients it has to do so again. Behind all wrappers the
    model is given logits of no ids. Calls may overlap, one within another or of several threads;
    when none runs, the head is as it was.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.head: Any = None  # in a call, and what it had for a forward of its own
        self.own: Any = None
        self.hook: Any = None
        # What `torch.compile` has traced holds while a module's forward does, whatever hooks it
        # has by then: with this one no graph of a call without labels does, and new ones end here.
        self.outside_graphs = torch.compiler.disable(self.forward)

    def __reduce__(self) -> Any:
        return _StandIn, ()  # of a model that is copied or pickled

    @contextmanager
    def during(self, call: _Call | None, head: Any) -> Iterator[None]:
        if not self.calls:
            self.head, self.own = head, vars(head).get("forward")
            self.hook = head.register_forward_hook(torch.compiler.disable(self.hide))  # the last
            head.forward = self.outside_graphs
        self.calls += 1
        before = _CALL.set(call)
        try:
            yield
        finally:
            _CALL.reset(before)
            self.calls -= 1
            if not self.calls:
                self.hook.remove()
                del self.head.forward
                if self.own is not None:
                    self.head.forward = self.own
                self.head = self.own = self.hook = None

    def forward(self, hidden: Tensor) -> Any:
        call, head = _CALL.get(), self.head
        if call is None:  # of another thread, or within one with labels
            return (self.own or type(head).forward.__get__(head))(hidden)
        shape = getattr(call.labels, "shape", None)
        if shape != hidden.shape[:-1]:
            raise ValueError(
                f"aligned_labels must be {tuple(hidden.shape[:-1])}, as the hidden states that the "
                f"head reads, got {type(call.labels).__name__ if shape is None else tuple(shape)}"
            )
        if call.output is not None:
            raise ValueError("model must call its head once a forward, not twice")
        given = hidden, head.weight, call.labels, call.support
        return fused_lm_head(*given, bias=getattr(head, "bias", None), **call.options)

    def hide(self, head: Any, args: tuple[Any, ...], output: Any) -> Any:
        call = _CALL.get()
        if call is None:
            return None
        call.output = output
        return args[0].new_empty(*call.labels.shape, 0)


def _with_head(output: Any, head: LMHeadOutput | None) -> Any:
    """The model's output without logits, the head's beside the rest."""
    if not (isinstance(output, dict) and is_dataclass(output)):
        raise ValueError(
            f"model must return an output object (return_dict), got {type(output).__name__}"
        )
    if head is None:
        raise ValueError("model must call its head once a forward, not at all")
    rest = {name: value for name, value in output.items() if name != "logits"}
    return _class_with_head(type(output))(**rest, head=head)


@cache
def _class_with_head(kind: type) -> type:
    """The class with a field `head`: a tree to torch, as FSDP2 and DDP want an output to be."""
    field = ("head", LMHeadOutput | None, None)
    return make_dataclass(kind.__name__, [field], bases=(kind,), namespace={"__module__": __name__})
