"""logit_options: the head gives each architecture's own log-probabilities and gradients."""

import pytest
import torch
from factory import TINY_MODEL
from torch import nn

from rl_loss.integrations.huggingface import logit_options
from rl_loss.lm_head import FusedLMHead, fused_lm_head
from rl_loss.support import Support

transformers = pytest.importorskip("transformers")

V = TINY_MODEL["vocab_size"]
CASES = {
    # name: (config, its own settings, what the options must say)
    "gemma2": ("Gemma2", {"final_logit_softcapping": 30.0}, (30.0, 1.0)),
    "cohere": ("Cohere", {"logit_scale": 0.0625}, (None, 0.0625)),
    "granite": ("Granite", {"logits_scaling": 4.0}, (None, 0.25)),
    "qwen3": ("Qwen3", {}, (None, 1.0)),
    "qwen3 with bias": ("Qwen3", {}, (None, 1.0)),
}
TOKENS = torch.randint(V, (2, 5), generator=torch.Generator().manual_seed(4))


def make(name, dtype=torch.float32):
    """A tiny model of random weights, with logits large enough for a soft cap to bend them."""
    family, settings, _ = CASES[name]
    config = getattr(transformers, f"{family}Config")(**TINY_MODEL | settings)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    if name.endswith("bias"):
        model.lm_head = nn.Linear(32, V, bias=True)
        nn.init.normal_(model.lm_head.bias)
    nn.init.normal_(model.get_output_embeddings().weight, std=5.0 if family == "Cohere" else 2.0)
    return model.to(dtype).eval()


def own_logprobs(model, hidden):
    """log_softmax of the model's own logits, its head reading `hidden`."""
    head = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda module, inputs: (hidden,))
    try:
        return model(input_ids=TOKENS, use_cache=False).logits.log_softmax(-1)
    finally:
        handle.remove()


def states(model):
    """The hidden states that the model's head reads."""
    with torch.no_grad():
        return model.base_model(input_ids=TOKENS, use_cache=False).last_hidden_state


def compare(model, hidden, support):
    """(ours, the model's own): label log-probabilities, hidden, weight and bias gradients."""
    labels = torch.randint(V, TOKENS.shape, generator=torch.Generator().manual_seed(5))
    upstream = torch.randn(TOKENS.shape, generator=torch.Generator().manual_seed(6))
    upstream = upstream.to(hidden.dtype)
    head = model.get_output_embeddings()
    hidden = hidden.clone().requires_grad_()
    parameters = [p for p in (head.weight, head.bias) if p is not None]

    options = logit_options(model)
    rows = None
    if support:
        # Every second row replays the label and three more ids.
        ids = torch.stack([labels.flatten() + 7 * k for k in range(4)], dim=1) % V
        rows = Support.from_rows([(r, None) if i % 2 else None for i, r in enumerate(ids)])
    ours = fused_lm_head(hidden, head.weight, labels, rows, **options).logprobs
    ours_grad = torch.autograd.grad(ours, (hidden, *parameters), upstream)

    logprobs = own_logprobs(model, hidden)
    if support:
        kept = torch.zeros(labels.numel(), V, dtype=torch.bool).scatter(1, ids, True)
        kept[::2] = True
        logprobs = logprobs.masked_fill(~kept.reshape(logprobs.shape), -torch.inf).log_softmax(-1)
    own = logprobs.gather(-1, labels[..., None])[..., 0]
    own_grad = torch.autograd.grad(own, (hidden, *parameters), upstream)
    return [ours.detach(), *ours_grad], [own.detach(), *own_grad]


@pytest.mark.parametrize("support", [False, True], ids=["vocabulary", "replay"])
@pytest.mark.parametrize("name", CASES)
def test_the_models_own_logits_and_gradients(name, support):
    """FAULTS 14, in float64."""
    model = make(name, torch.float64)
    softcap, scale = CASES[name][2]
    options = logit_options(model)
    assert options["softcap"] == softcap
    assert options["logit_scale"] == pytest.approx(scale)
    assert (options["bias"] is not None) == name.endswith("bias")
    for ours, own in zip(*compare(model, states(model), support), strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-10, atol=1e-10)
        assert own.abs().max() > 1e-2
    # Without its options the head would give something else.
    if softcap or scale != 1 or options["bias"] is not None:
        hidden = states(model)
        weight = model.get_output_embeddings().weight
        plain = fused_lm_head(hidden, weight, TOKENS).logprobs
        own = own_logprobs(model, hidden).gather(-1, TOKENS[..., None])[..., 0]
        assert (plain - own).abs().max() > 1e-2


@pytest.mark.parametrize("name", CASES)
def test_the_models_own_logits_in_float32(name):
    """As near to float64 as the model itself, twice over, and 1e-6 of the largest value."""
    model = make(name)
    hidden = states(model)
    ours, own = compare(model, hidden, True)
    _, exact = compare(make(name).double(), hidden.double(), True)
    for got, peer, truth in zip(ours, own, exact, strict=True):
        floor = 1e-6 * float(truth.abs().max())
        error = float((got.double() - truth).abs().max())
        assert error <= 2 * float((peer.double() - truth).abs().max()) + floor


class Multiplied:
    """A forward that transforms its logits in a way that no config names."""

    factor = 1.25

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * self.factor
        return out


@pytest.mark.parametrize("factor", [1.25, 0.5, -1.0, 1.0001])
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_an_unknown_transform_is_refused(name, factor):
    model = make(name)
    model.__class__ = type("Odd", (Multiplied, type(model)), {"factor": factor})
    with pytest.raises(ValueError, match=r"model: Odd transforms its logits .* not known here"):
        logit_options(model)


def test_a_named_setting_that_the_model_does_not_apply_is_refused():
    model = make("qwen3")
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match=r"transforms its logits .* softcap 30\.0"):
        logit_options(model)


class AdaptedLinear(nn.Linear):
    """A LoRA of rank 2 on a linear layer."""

    def __init__(self, linear, scale):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight = linear.weight
        self.lora_a = nn.Parameter(torch.randn(2, linear.in_features))
        self.lora_b = nn.Parameter(scale * torch.randn(linear.out_features, 2))

    def forward(self, hidden):
        return super().forward(hidden) + hidden @ self.lora_a.T @ self.lora_b.T


@pytest.mark.parametrize("scale", [1.0, 1e-3, 0.0])
def test_an_adapted_head_is_refused(scale):
    """FAULTS 17: also at B = 0, where the logits are right but the adapter gets no gradient."""
    model = make("qwen3")
    torch.manual_seed(1)
    model.lm_head = AdaptedLinear(model.lm_head, scale)
    with pytest.raises(
        ValueError, match=r"parameters beside weight and bias: \['lora_a', 'lora_b'\]"
    ):
        logit_options(model)


def test_a_head_that_hides_its_adapter_is_refused():
    """An adapter that is no parameter of the head still shows in the logits."""
    model = make("qwen3")
    generator = torch.Generator().manual_seed(1)
    delta = torch.randn(V, 32, generator=generator) / 10
    model.lm_head.register_forward_hook(lambda _, inputs, out: out + inputs[0] @ delta.T)
    with pytest.raises(ValueError, match="transforms its logits"):
        logit_options(model)


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_a_fused_head_in_place_of_the_models_own(name):
    model = make(name)
    expected = logit_options(model)
    model.lm_head = FusedLMHead.from_linear(model.lm_head)
    got = logit_options(model)
    assert got == expected


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_without_labels_a_patched_model_is_the_unpatched_one(name):
    """Its logits, and the text that it generates."""
    model = make(name)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    logits, text = model(input_ids=TOKENS).logits, model.generate(TOKENS, **options)
    model.lm_head = FusedLMHead.from_linear(model.lm_head)
    assert torch.equal(model(input_ids=TOKENS).logits, logits)
    assert torch.equal(model.generate(TOKENS, **options), text)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_low_precision_models_are_recognised(name, dtype):
    """The model rounds its logits to its own dtype; that is no unknown transform."""
    softcap, scale = CASES[name][2]
    options = logit_options(make(name, dtype))
    assert options["softcap"] == softcap
    assert options["logit_scale"] == pytest.approx(scale)


def test_the_model_is_left_as_it_was():
    """Modes, a frozen part's eval mode included, and gradients."""
    model = make("qwen3")
    model.train()
    model.base_model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    assert True in modes
    assert False in modes
    logit_options(model)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="transforms"):
        logit_options(model)
    assert [module.training for module in model.modules()] == modes
