"""What the head has to know of a Hugging Face causal language model."""

from typing import Any

import torch

from rl_loss.logits import LogitTransform


@torch.no_grad()
def logit_options(model: Any) -> dict[str, Any]:
    """The `bias`, `softcap` and `logit_scale` of a model's head, proved on the model itself.

    They are read off the model and its config (Gemma 2's `final_logit_softcapping`, Cohere's
    `logit_scale`, Granite's `logits_scaling`, which divides); then the model's own logits of a
    few tokens are compared with those that the options give.

    Args:
        model: any causal language model whose `base_model` gives the hidden states that its
            output embeddings read.

    Returns:
        keyword arguments for `fused_lm_head`, beside `weight = get_output_embeddings().weight`.

    Raises:
        ValueError: a model whose logits come out otherwise: a transform that is not one of
            these, or adapters on its head.

    Example:
        >>> options = logit_options(model)  # doctest: +SKIP
        >>> hidden = model.base_model(input_ids).last_hidden_state  # doctest: +SKIP
    """
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    more = {name for name, _ in head.named_parameters()} - {"weight", "bias"}
    if more:  # even where an adapter still adds nothing, it would get no gradient
        raise ValueError(f"model: its head has parameters beside weight and bias: {sorted(more)}")
    bias = getattr(head, "bias", None)
    softcap = getattr(config, "final_logit_softcapping", None)
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    tokens = torch.arange(8, device=head.weight.device)[None] % len(head.weight)
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        expected = model(input_ids=tokens, use_cache=False).logits.double()
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    finally:
        for module, mode in training.items():
            module.training = mode
    raw = hidden.double() @ head.weight.double().T
    got = LogitTransform(softcap, scale)(raw, bias, torch.ones((), device=raw.device))
    # The model rounds its products, and each step of its transform, to its own dtype.
    rounding = 16 * torch.finfo(hidden.dtype).eps * max(1.0, float(expected.abs().max()))
    worst = float((got - expected).abs().max()) if got.shape == expected.shape else torch.inf
    if not worst <= rounding:
        raise ValueError(
            f"model: {type(model).__name__} transforms its logits in a way that is not known here "
            f"(they differ by {worst:.3g} with softcap {softcap} and logit_scale {scale:.3g})"
        )
    return {"bias": bias, "softcap": softcap, "logit_scale": scale}
