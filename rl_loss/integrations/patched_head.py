"""A Hugging Face model whose forward gives log-probabilities instead of logits."""

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass, make_dataclass
from functools import cache
from typing import Any

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
    """The forward of a patched model: an attribute of the model, which is copied and pickled
    with it, and through which DDP, FSDP2, PEFT and accelerate all call."""

    def __init__(self, model: Any, softcap: float | None, logit_scale: float) -> None:
        self.model = model
        self.before = vars(model).get("forward")  # of another wrapper; None: the class's
        self.transform = {"softcap": softcap, "logit_scale": logit_scale}

    @property
    def __signature__(self) -> inspect.Signature:
        """The model's own, which `generate` and trainers look at."""
        return inspect.signature(self.before or type(self.model).forward.__get__(self.model))

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
        forward = self.before or type(model).forward.__get__(model)  # FSDP2 changes the class
        options = {"temperature": temperature, "active": active, "entropy": entropy}
        if aligned_labels is None:
            given = {"support": support, **options, "head_options": head_options}
            if isinstance(temperature, float) and temperature == 1.0:
                del given["temperature"]
            for name, value in given.items():
                if value is not None:
                    raise ValueError(f"{name} needs aligned_labels, which are None")
            return forward(*args, **kwargs)
        own = dict(zip(inspect.signature(forward).parameters, args, strict=False)) | kwargs
        if own.get("labels") is not None:
            raise ValueError(
                "labels and aligned_labels must not both be given: the model shifts its labels "
                "itself and takes its loss from logits, of which there are none here"
            )
        if own.get("return_dict") is False:
            raise ValueError("return_dict must be True with aligned_labels, got False")
        unknown = (head_options or {}).keys() - _HEAD_OPTIONS
        if unknown:
            known = sorted(_HEAD_OPTIONS)
            raise ValueError(f"head_options may hold {known}, got {sorted(unknown)}")
        options |= self.transform | (head_options or {})
        call = _HeadCall(aligned_labels, support, options)
        with call.of(running_head(model)):
            output = forward(*args, **kwargs)
        return _with_head(output, call)


class _HeadCall:
    """Stands in for one call of a head, inside a call of its model.

    Hooks see hidden states and weight where a wrapper of the head (FSDP2) has made them whole.
    The head itself runs on no rows. Its wrapper is given our output, for whose gradients it
    will make the weight whole again, and the model, behind all wrappers, logits of no ids.
    """

    def __init__(self, labels: Any, support: Support | None, options: dict[str, Any]) -> None:
        self.labels, self.support, self.options = labels, support, options
        self.output: LMHeadOutput | None = None
        self._thread = threading.get_ident()  # another one may run the model meanwhile

    @contextmanager
    def of(self, head: nn.Module) -> Iterator[None]:
        hooks = [
            head.register_forward_pre_hook(self._compute),
            head.register_forward_hook(self._give, prepend=True),
            head.register_forward_hook(self._hide),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _compute(self, head: Any, args: tuple[Any, ...]) -> Any:
        if threading.get_ident() != self._thread:
            return None
        hidden, shape = args[0], getattr(self.labels, "shape", None)
        if shape != hidden.shape[:-1]:
            raise ValueError(
                f"aligned_labels must be {tuple(hidden.shape[:-1])}, as the hidden states that the "
                f"head reads, got {type(self.labels).__name__ if shape is None else tuple(shape)}"
            )
        if self.output is not None:
            raise ValueError("model must call its head once a forward, not twice")
        bias = getattr(head, "bias", None)
        self.output = fused_lm_head(
            hidden, head.weight, self.labels, self.support, bias=bias, **self.options
        )
        return (hidden.detach().flatten(0, -2)[:0],)

    def _give(self, head: Any, args: Any, output: Any) -> Any:
        return self.output if threading.get_ident() == self._thread else None

    def _hide(self, head: Any, args: tuple[Any, ...], output: Any) -> Any:
        if threading.get_ident() != self._thread:
            return None
        self.output = output
        return args[0].new_empty(*self.labels.shape, 0)


def _with_head(output: Any, call: _HeadCall) -> Any:
    """The model's output without logits, the head's beside the rest."""
    if not (isinstance(output, dict) and is_dataclass(output)):
        raise ValueError(
            f"model must return an output object (return_dict), got {type(output).__name__}"
        )
    if call.output is None:
        raise ValueError("model must call its head once a forward, not at all")
    rest = {name: value for name, value in output.items() if name != "logits"}
    return _class_with_head(type(output))(**rest, head=call.output)


@cache
def _class_with_head(kind: type) -> type:
    """The class with a field `head`: a tree to torch, as FSDP2 and DDP want an output to be."""
    field = ("head", LMHeadOutput | None, None)
    return make_dataclass(kind.__name__, [field], bases=(kind,), namespace={"__module__": __name__})
