"""What a Hugging Face model does to its logits, measured on the model itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rl_loss.arguments import active_module, class_path
from rl_loss.logits import LogitTransform

_PROBED_IDS = 8192  # rows of a weight that are taken to float64 at once
_TOKENS = 8


def logit_options(model: Any) -> dict[str, Any]:
    """The `bias`, `softcap` and `logit_scale` of a model's head, proved on the model itself.

    The bias is the head's. Cap and scale are measured: the model is run with known numbers in
    the place of its head's output, and what it makes of them is
    `softcap * tanh(scale * x / softcap)` or `scale * x`, to the last digits, or refused. No
    config is read, so it does not matter how a model names or applies them (Gemma 2's
    `final_logit_softcapping`, Granite's `logits_scaling`, which divides, HyperCLOVA-X's, which
    multiplies). Then its own logits of a few tokens are compared with those of the options.

    A head that PEFT trains whole (`modules_to_save`) is its active copy, the original where
    adapters are off; `get_output_embeddings().weight` is that one's weight. Ask again after
    another adapter was set. Every rank calls where FSDP2 has sharded the model.

    Args:
        model: any causal language model whose `base_model` gives the hidden states that its
            output embeddings read (where it has one apart), or a `PeftModel` of one
            (`get_base_model()` is the model).

    Returns:
        keyword arguments for `fused_lm_head`, beside `weight = get_output_embeddings().weight`.

    Raises:
        ValueError: a model whose logits come out otherwise: a transform that is not one of
            these, or adapters on its head (LoRA, even where it still adds nothing: it would get
            no gradient); no output embeddings; hidden states that are changed on their way to
            the head (`patch_lm_head` takes those); a model on meta, which has no logits.

    Source: `ModulesToSaveWrapper` of PEFT 0.19 and later.

    Example:
        >>> options = logit_options(model)  # doctest: +SKIP
        >>> hidden = model.base_model(input_ids).last_hidden_state  # doctest: +SKIP
    """
    model = without_peft(model)
    measured = measure(model, base=True)
    return {
        "bias": getattr(model.get_output_embeddings(), "bias", None),
        "softcap": measured.softcap,
        "logit_scale": measured.scale,
    }


def without_peft(model: Any) -> Any:
    """The model of a `PeftModel`, whose own base_model is another thing; any other model itself."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    for name in ("get_output_embeddings", "config"):
        if not hasattr(model, name):
            raise ValueError(
                f"model must be a model of transformers, got {class_path(model)} without {name}"
            )
    return model


def running_head(model: Any) -> Any:
    """The module that multiplies hidden states with a weight: of PEFT's copies the active one."""
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"model: {type(model).__name__} has no output embeddings")
    running = active_module(head)
    more = {name for name, _ in running.named_parameters()} - {"weight", "bias"}
    if more:
        raise ValueError(
            f"model: its head, a {class_path(running)}, has parameters beside weight and bias: "
            f"{sorted(more)}. Merge an adapter into the weight (merge_and_unload), or train the "
            "whole head (modules_to_save)"
        )
    return running


@torch.no_grad()
def measure(model: Any, *, base: bool = False) -> LogitTransform:
    """What the model does to the output of its head; with `base`, `base_model` must give what
    that head reads."""
    head = running_head(model)
    if head.weight.is_meta:
        raise ValueError(f"model: {type(model).__name__} is on meta: load its weights first")
    tokens = torch.arange(_TOKENS, device=head.weight.device)[None] % len(head.weight)
    below = model.base_model if base and model.base_model is not model else None
    states: list[Tensor] = []
    hooks = []
    if below is not None:
        hooks = [below.register_forward_hook(lambda _, args, out: states.append(out[0]))]
    with _in_eval_mode(model), _hooked(*hooks):
        transform = _fit(model, head, tokens)
        states.clear()
        read = _compare(model, head, tokens, transform)
        if below is not None and not states:  # the model calls a part of it
            below(input_ids=tokens, use_cache=False)
    if below is not None:
        _compare_states(model, states[0], read.hidden)
    return transform


def _fit(model: Any, head: Any, tokens: Tensor) -> LogitTransform:
    """The transform by which known numbers come out as they do, in float64 if the model lets
    them be: tiny ones, which no cap bends, and ones so large that any cap has stopped them."""
    given: list[Tensor] = []

    def known(_: Any, args: Any, logits: Tensor) -> Tensor:
        powers = 2.0 ** torch.arange(-40, 42, dtype=torch.float64)
        x = torch.cat([powers.flip(0), -powers])  # the largest first, its half behind it
        x = x.repeat(-(-logits.numel() // len(x)))[: logits.numel()].reshape(logits.shape)
        given.append(x.to(logits.device))
        return given[-1].clone()

    with _hooked(head.register_forward_hook(known)):
        got = _logits(model, tokens)
    _require_one_call(model, len(given))
    x = given[0]
    if got.shape != x.shape or got.dtype.itemsize < 4:
        raise _unknown(model, f"{tuple(got.shape)} {got.dtype} of {tuple(x.shape)} {x.dtype}")
    eps, smallest = torch.finfo(got.dtype).eps, int(x.abs().argmin())
    top, half = got.flatten()[:2].tolist()
    scale = float(got.flatten()[smallest] / x.flatten()[smallest])
    if abs(scale - 1) <= 8 * eps:  # of x / softcap * softcap, say
        scale = 1.0
    transform = LogitTransform(abs(top) if top == half != 0 else None, scale)
    expected = transform(x, None, x.new_ones(()))
    worst = float(((got - expected) / expected).abs().max())
    if not worst <= 16 * eps:
        raise _unknown(model, f"by {worst:.3g} of their size from {_words(transform)}")
    return transform


class _Read(NamedTuple):
    """What a head was given, and what follows of it."""

    hidden: Tensor  # [1, T, H]
    logits: Tensor  # [1, T, V] float64
    rounding: float  # by how much the products in the dtype of the head do
    dtype: torch.dtype  # of those products


def _compare(model: Any, head: Any, tokens: Tensor, transform: LogitTransform) -> _Read:
    """Refuses a model whose own logits are not those of its weight, bias and the transform."""
    read: list[_Read] = []

    def look(head: Any, args: Any) -> None:  # the last hook before it runs: FSDP2 has gathered
        hidden, weight, bias = args[0], head.weight, getattr(head, "bias", None)
        parts = weight.split(_PROBED_IDS)  # in float64 all of them would take four times as much
        raw = torch.cat([hidden.double() @ part.double().T for part in parts], -1)
        logits = transform(raw, bias, raw.new_ones(()))
        # The model rounds its products as this one is rounded (to bfloat16 under autocast, to
        # fewer bits where float32 products may be).
        product = functional.linear(hidden.to(weight.dtype), weight)
        read.append(_Read(hidden, logits, float((product - raw).abs().max()), product.dtype))

    with _hooked(head.register_forward_pre_hook(look)):
        expected = _logits(model, tokens)
    _require_one_call(model, len(read))
    _, logits, rounding, dtype = read[0]
    # Each of five steps after the product rounds to the dtype of products, or of logits.
    eps = max(torch.finfo(dtype).eps, torch.finfo(expected.dtype).eps)
    allowed = 2 * abs(transform.scale) * rounding + 4 * eps * float(logits.abs().max())
    worst = _distance(logits, expected)
    if not worst <= allowed:
        raise _unknown(model, f"by {worst:.3g} from {_words(transform)}")
    return read[0]


def _compare_states(model: Any, given: Tensor, read: Tensor) -> None:
    """Refuses a model that changes hidden states on their way to its head."""
    eps = max(torch.finfo(tensor.dtype).eps for tensor in (given, read))
    off = _distance(given, read)
    if not off <= 2 * eps * float(read.abs().max()):
        raise ValueError(
            f"model: the head of {type(model).__name__} does not read the hidden states that its "
            f"base_model gives (they differ by {off:.3g}): call the model through patch_lm_head"
        )


# --- running a model for a look at it ---


@contextmanager
def _in_eval_mode(model: Any) -> Iterator[None]:
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode


@contextmanager
def _hooked(*handles: Any) -> Iterator[None]:
    """Takes hooks away when done."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _logits(model: Any, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, use_cache=False).logits


def _distance(one: Tensor, other: Tensor) -> float:
    """The largest difference; infinity where the shapes differ."""
    return float((one.double() - other).abs().max()) if one.shape == other.shape else torch.inf


def _require_one_call(model: Any, calls: int) -> None:
    if calls != 1:
        raise ValueError(
            f"model: {type(model).__name__} must call its output embeddings once a forward, "
            f"not {calls} times"
        )


def _words(transform: LogitTransform) -> str:
    return f"those of softcap {transform.softcap} and logit_scale {transform.scale:.3g}"


def _unknown(model: Any, how: str) -> ValueError:
    return ValueError(
        f"model: {type(model).__name__} transforms its logits in a way that is not known here "
        f"(they differ: {how})"
    )
