"""logit_options: the head gives each architecture's own log-probabilities and gradients."""

import pytest
import torch
from factory import TINY_MODEL, LargestTensor
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

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
FLOAT64_ROUNDING = 64 * torch.finfo(torch.float64).eps  # of the largest value
TOKENS = torch.randint(V, (2, 5), generator=torch.Generator().manual_seed(4))


def make(name, dtype=torch.float32, **more):
    """A tiny model of random weights, with logits large enough for a soft cap to bend them."""
    family, settings, _ = CASES[name]
    config = getattr(transformers, f"{family}Config")(**TINY_MODEL | settings | more)
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
    parameters = [p for p in (head.weight, head.bias) if p is not None and p.requires_grad]

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
    """In float64: equal within the rounding of sums over H and V."""
    model = make(name, torch.float64)
    softcap, scale = CASES[name][2]
    options = logit_options(model)
    assert options["softcap"] == softcap
    assert options["logit_scale"] == pytest.approx(scale)
    assert (options["bias"] is not None) == name.endswith("bias")
    for ours, own in zip(*compare(model, states(model), support), strict=True):
        assert (ours - own).abs().max() <= FLOAT64_ROUNDING * own.abs().max()
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


def with_transform(model, transform):
    """The model, its logits transformed in a way that no config names."""
    forward = type(model).forward

    def transformed(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        out.logits = transform(out.logits)
        return out

    model.__class__ = type("Odd", (type(model),), {"forward": transformed})
    return model


UNKNOWN = r"model: Odd transforms its logits .* not known here"


BENT = {
    "shifted": lambda logits: logits + 0.5,
    "of one sign": lambda logits: logits + 1e-3 * logits.relu(),
    "clamped": lambda logits: logits.clamp(-20, 20),
    "capped otherwise": lambda logits: 10 * torch.asinh(logits / 10),
    "bent": lambda logits: logits + 1e-3 * logits.sin(),
    "of some ids": lambda logits: logits * torch.linspace(1, 1.001, V, dtype=torch.float64),
    "of its rows": lambda logits: logits - logits.mean(-1, keepdim=True),
    "nothing": lambda logits: logits * 0,
    "coarse": lambda logits: logits.bfloat16(),
}


@pytest.mark.parametrize("how", BENT)
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_unknown_transform_is_refused(name, how, dtype):
    with pytest.raises(ValueError, match=UNKNOWN):
        logit_options(with_transform(make(name, dtype), BENT[how]))


@pytest.mark.parametrize("factor", [1.25, 0.3, -1.0, 1.0001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_factor_is_read_wherever_it_stands(factor, dtype):
    """No config names it."""
    model = with_transform(make("qwen3", dtype), lambda logits: logits * factor)
    assert logit_options(model) == {"bias": None, "softcap": None, "logit_scale": factor}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cap_and_a_factor_are_read_in_float32_as_well(dtype):
    """Where the model makes float32 of its logits, to the last digits of that."""

    def transform(logits):
        return 7.3 * torch.tanh(0.3 * logits.float() / 7.3)

    options = logit_options(with_transform(make("qwen3", dtype), transform))
    for got, wanted in ((options["softcap"], 7.3), (options["logit_scale"], 0.3)):
        assert abs(got - wanted) <= 4 * torch.finfo(torch.float32).eps * wanted


def test_what_is_no_model_is_refused():
    with pytest.raises(ValueError, match=r"model must be a model of transformers, got .*Linear"):
        logit_options(nn.Linear(2, 2))


@pytest.mark.parametrize("masked", [-torch.inf, torch.finfo(torch.float32).min])
def test_a_model_that_excludes_ids_is_refused(masked):
    def last_ones_masked(logits):
        return torch.where(torch.arange(V) < V - 3, logits, masked)

    with pytest.raises(ValueError, match=UNKNOWN):
        logit_options(with_transform(make("qwen3"), last_ones_masked))


def test_a_model_that_gives_fewer_logits_than_its_weight_has_rows_is_refused():
    with pytest.raises(ValueError, match=UNKNOWN):
        logit_options(with_transform(make("qwen3"), lambda logits: logits[..., :-3]))


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_a_weight_with_more_rows_than_the_vocabulary(name):
    """Padded to a multiple of 64; the model gives logits of the padding as well."""
    model = make(name)
    expected = logit_options(model)
    model.resize_token_embeddings(V, pad_to_multiple_of=64, mean_resizing=False)
    assert model.get_output_embeddings().weight.shape == (128, 32)
    assert logit_options(model) == expected


def test_a_model_without_a_head_is_refused():
    with pytest.raises(ValueError, match="model: Qwen3Model has no output embeddings"):
        logit_options(make("qwen3").base_model)


def test_a_named_setting_that_the_model_does_not_apply_is_not_read():
    model = make("qwen3")
    model.config.final_logit_softcapping = 30.0
    assert logit_options(model)["softcap"] is None


def test_a_model_that_changes_its_states_before_the_head_is_refused():
    """They are not those of its `base_model`."""
    model = make("qwen3")
    model.lm_head.register_forward_pre_hook(lambda _, args: (args[0] / 2,))
    with pytest.raises(ValueError, match="does not read the hidden states that its base_model"):
        logit_options(model)


def test_a_model_that_calls_its_head_twice_is_refused():
    model = make("qwen3")
    forward = type(model).forward

    def twice(self, *args, **kwargs):
        forward(self, *args, **kwargs)
        return forward(self, *args, **kwargs)

    model.__class__ = type("Odd", (type(model),), {"forward": twice})
    with pytest.raises(ValueError, match=r"must call its output embeddings once .* not 2 times"):
        logit_options(model)


def test_a_model_on_meta_is_refused():
    with torch.device("meta"):
        model = make("gemma2")
    with pytest.raises(ValueError, match="Gemma2ForCausalLM is on meta: load its weights first"):
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
    """Also at B = 0, where the logits are right but the adapter gets no gradient."""
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


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["gemma2", "qwen3 with bias"])
def test_the_default_dtype_does_not_matter(name, default, default_dtype):
    model = make(name)
    expected = logit_options(model)
    default_dtype(default)
    assert logit_options(model) == expected


@pytest.fixture
def default_dtype():
    """Sets it for one test."""
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def coarse_products():
    """float32 products of bfloat16's bits, as TF32 has fewer on a GPU."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("coarse_products")
def test_coarse_float32_products_are_no_transform(name):
    softcap, scale = CASES[name][2]
    options = logit_options(make(name))
    assert (options["softcap"], options["logit_scale"]) == (softcap, pytest.approx(scale))
    with pytest.raises(ValueError, match=UNKNOWN):
        logit_options(with_transform(make(name), BENT["of one sign"]))


@pytest.mark.parametrize("name", CASES)
def test_autocast_is_no_transform(name):
    softcap, scale = CASES[name][2]
    with torch.autocast("cpu", torch.bfloat16):
        options = logit_options(make(name))
        assert (options["softcap"], options["logit_scale"]) == (softcap, pytest.approx(scale))
        with pytest.raises(ValueError, match=UNKNOWN):
            logit_options(with_transform(make(name), BENT["of one sign"]))


def test_the_weight_is_not_taken_to_float64_as_a_whole():
    model = make("qwen3", vocab_size=40_000)
    with LargestTensor(*model.parameters()) as largest:
        logit_options(model)
    assert largest.numel < model.lm_head.weight.numel() / 2


@pytest.fixture
def one_rank():
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_a_model_that_is_sharded(one_rank):
    model = make("qwen3 with bias")
    fully_shard(model.lm_head, mesh=one_rank)
    fully_shard(model, mesh=one_rank)
    options = logit_options(model)
    assert (options["softcap"], options["logit_scale"]) == (None, 1.0)
    assert options["bias"] is model.lm_head.bias
    with pytest.raises(ValueError, match="transforms its logits"):
        logit_options(with_transform(model, BENT["of one sign"]))


# --- PEFT ---


@pytest.fixture
def peft():
    return pytest.importorskip("peft", minversion="0.19")


def adapted(peft, name, **more):
    """A model in float64 with LoRA that adds something to its attention, and what else is asked."""
    options = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False} | more
    torch.manual_seed(1)
    return peft.get_peft_model(make(name, torch.float64), peft.LoraConfig(**options))


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings", "ignore:.*active which is now deleted")
@pytest.mark.parametrize("state", ["default", "another", "one without a head", "off", "deleted"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3 with bias", "gemma2"])
def test_a_head_that_peft_trains_whole(peft, name, state):
    """`modules_to_save`: weight and options are those of the copy that runs, if one does."""
    head_name = ["lm_head"]
    model = adapted(peft, name, modules_to_save=head_name)
    options = {"r": 2, "target_modules": ["q_proj"]}
    model.add_adapter("another", peft.LoraConfig(**options, modules_to_save=head_name))
    model.add_adapter("one without a head", peft.LoraConfig(**options))
    head = model.get_output_embeddings()
    heads = dict(head.modules_to_save) | {"original": head.original_module}
    for module in heads.values():  # all different from each other
        for parameter in module.parameters():
            parameter.data += torch.randn_like(parameter)
    if state == "off":
        model.base_model.disable_adapter_layers()
    elif state == "deleted":
        model.delete_adapter("default")
        model.delete_adapter("another")
    else:
        model.set_adapter(state)
    running = state if state in ("default", "another") else "original"

    assert head.weight is heads[running].weight
    assert head.weight.requires_grad == (running != "original")
    assert logit_options(model) == {
        "bias": heads[running].bias,
        "softcap": CASES[name][2][0],
        "logit_scale": 1.0,
    }
    got, own = compare(model, states(model.get_base_model()), True)
    assert len(got) == 2 + len(list(heads[running].parameters())) * (running != "original")
    for ours, theirs in zip(got, own, strict=True):
        assert (ours - theirs).abs().max() <= FLOAT64_ROUNDING * theirs.abs().max()


def test_a_fused_head_that_peft_trains_whole(peft):
    """Called through PEFT's module, with the model's own cap."""
    model = make("gemma2", torch.float64, tie_word_embeddings=False)
    options = logit_options(model)
    model.lm_head = FusedLMHead.from_linear(model.lm_head, softcap=options["softcap"])
    adapter = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(model, adapter)
    head, hidden = model.get_output_embeddings(), states(model.get_base_model())
    head.weight.data += torch.randn_like(head.weight)
    assert logit_options(model) == options
    got = head(hidden, TOKENS).logprobs
    own = own_logprobs(model, hidden).gather(-1, TOKENS[..., None])[..., 0]
    assert (got - own).abs().max() <= FLOAT64_ROUNDING * own.abs().max()
    ours, theirs = (torch.autograd.grad(logprobs.sum(), head.weight)[0] for logprobs in (got, own))
    assert (ours - theirs).abs().max() <= FLOAT64_ROUNDING * theirs.abs().max()


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, r"peft\.tuners\.lora\.layer\.Linear"),
        ({"target_parameters": ["lm_head.weight"]}, r"peft\.tuners\.lora\.layer\.ParamWrapper"),
    ],
    ids=["module", "parameter"],
)
@pytest.mark.parametrize("adds", [True, False], ids=["trained", "fresh"])
def test_a_head_with_lora_is_refused_until_it_is_merged(peft, options, where, adds):
    model = adapted(peft, "qwen3", init_lora_weights=not adds, **options)
    message = rf"model: its head, a {where}, has parameters beside weight and bias: .*lora_A.*"
    with pytest.raises(ValueError, match=rf"{message}\(merge_and_unload\).*\(modules_to_save\)"):
        logit_options(model)
    if adds:  # what the head would miss
        weight, hidden = model.get_output_embeddings().weight, states(model.get_base_model())
        missed = fused_lm_head(hidden, weight, TOKENS).logprobs
        logprobs = model(input_ids=TOKENS).logits.log_softmax(-1)
        own = logprobs.gather(-1, TOKENS[..., None])[..., 0]
        assert (missed - own).abs().max() > 1e-2
    merged = model.merge_and_unload()
    assert logit_options(merged) == {"bias": None, "softcap": None, "logit_scale": 1.0}
    for ours, own in zip(*compare(merged, states(merged), True), strict=True):
        assert (ours - own).abs().max() <= FLOAT64_ROUNDING * own.abs().max()


def test_a_head_of_which_peft_trains_some_tokens_is_refused(peft):
    """Tied to embeddings whose rows 3 and 4 are trained."""
    config = transformers.Qwen3Config(**TINY_MODEL, tie_word_embeddings=True)
    options = peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3, 4])
    model = peft.get_peft_model(transformers.Qwen3ForCausalLM(config), options)
    with pytest.raises(ValueError, match=r"TrainableTokensWrapper, has parameters beside"):
        logit_options(model)


def test_a_head_that_peft_leaves_alone(peft):
    model = adapted(peft, "gemma2")
    assert logit_options(model) == logit_options(make("gemma2"))


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
    with pytest.raises(ValueError, match="transforms"):
        logit_options(with_transform(model, BENT["bent"]))
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_from_linear_of_a_head_that_peft_adapts(peft):
    model = adapted(peft, "qwen3 with bias", modules_to_save=["lm_head"])
    head = model.get_output_embeddings()
    copy = head.modules_to_save["default"]
    fused = FusedLMHead.from_linear(head)
    assert fused.weight is copy.weight
    assert fused.bias is copy.bias
    with model.disable_adapter():
        assert FusedLMHead.from_linear(head).weight is head.original_module.weight
    lora = adapted(peft, "qwen3", target_modules=["lm_head"]).get_output_embeddings()
    with pytest.raises(ValueError, match=r"got peft\.tuners\.lora\.layer\.Linear, .*merge"):
        FusedLMHead.from_linear(lora)
