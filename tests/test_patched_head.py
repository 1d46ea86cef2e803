"""patch_lm_head: the unpatched model's log-probabilities and gradients, nothing else changed."""

import copy
import inspect
import pickle
import re
import threading
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from factory import TINY_MODEL, LargestTensor
from torch import nn
from torch.utils.checkpoint import checkpoint

from rl_loss import FusedLMHead, LMHeadOutput, LossInputs, Support, fused_lm_head, icepop_loss
from rl_loss.integrations.huggingface import logit_options, patch_lm_head, unpatch_lm_head

transformers = pytest.importorskip("transformers")

V = TINY_MODEL["vocab_size"]
B, L = 2, 7
ROUNDING = 1e-11  # of the largest value: float64 sums in another order, through a whole backward
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}  # which knows float64
MIXTURE = EXPERTS | {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 16}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
MULTI_LATENT = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 2,
}
STATE_SPACE = {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 8}
MODELS = {  # the config's class, its own settings, soft cap and scale
    "Llama": ("LlamaConfig", {}, (None, 1.0)),
    "Qwen3": ("Qwen3Config", {}, (None, 1.0)),
    "Qwen3Moe": ("Qwen3MoeConfig", MIXTURE | {"output_router_logits": True}, (None, 1.0)),
    "Gemma2": ("Gemma2Config", {}, (30.0, 1.0)),
    "Gemma3": ("Gemma3TextConfig", {"final_logit_softcapping": 20.0}, (20.0, 1.0)),
    "Cohere": ("CohereConfig", {"logit_scale": 0.3}, (None, 0.3)),
    "Granite": ("GraniteConfig", {"logits_scaling": 4.0}, (None, 0.25)),
    "GPT2": ("GPT2Config", GPT2, (None, 1.0)),
    "Phi": ("PhiConfig", {}, (None, 1.0)),
    "Mistral": ("MistralConfig", {}, (None, 1.0)),
    "DeepseekV3": ("DeepseekV3Config", MIXTURE | MULTI_LATENT, (None, 1.0)),
    "Glm4": ("Glm4Config", {}, (None, 1.0)),
    "GptOss": ("GptOssConfig", MIXTURE | {"output_router_logits": True}, (None, 1.0)),
    "RecurrentGemma": ("RecurrentGemmaConfig", {"num_hidden_layers": 3}, (30.0, 1.0)),
    "FalconH1": (
        "FalconH1Config",
        STATE_SPACE | {"mamba_n_groups": 1, "lm_head_multiplier": 0.3},
        (None, 0.3),
    ),
    "HyperCLOVAX": ("HyperCLOVAXConfig", {"logits_scaling": 0.3}, (None, 0.3)),
    "Llama4": (
        "Llama4TextConfig",
        MIXTURE | {"intermediate_size_mlp": 48, "interleave_moe_layer_step": 1},
        (None, 1.0),
    ),
}


def make(name, dtype=torch.float64, **more):
    """A tiny model of random weights, with logits large enough for a soft cap to bend them."""
    config, settings, _ = MODELS[name]
    config = getattr(transformers, config)(**TINY_MODEL | settings | more)
    torch.manual_seed(0)
    kind = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    model = getattr(transformers, kind)(config)
    head = model.get_output_embeddings()
    nn.init.normal_(head.weight, std=2.0)
    if head.bias is not None:
        nn.init.normal_(head.bias)
    return model.to(dtype).eval()


def draw(kind, seed, *shape):
    return kind(*shape, generator=torch.Generator().manual_seed(seed))


class Rows(NamedTuple):
    """What a labelled call is given: rows over a support and over V by turns, padding inactive."""

    input_ids: torch.Tensor  # [B, L]
    attention_mask: torch.Tensor  # [B, L]
    labels: torch.Tensor  # [B, L]
    support: Support
    kept: torch.Tensor  # [B, L, V] bool, what each row is normalised over
    temperature: torch.Tensor  # [B, L]
    active: torch.Tensor  # [B, L] bool
    upstream: torch.Tensor  # [B, L]

    @property
    def model(self):
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask}

    @property
    def head(self):
        names = "support", "temperature", "active"
        return {"aligned_labels": self.labels} | {name: getattr(self, name) for name in names}


def make_rows(b=B, seed=0):
    labels = torch.randint(V, (b, L), generator=torch.Generator().manual_seed(seed))
    ids = torch.stack([labels.flatten() + 7 * k for k in range(4)], 1) % V
    kept = torch.zeros(b * L, V, dtype=torch.bool).scatter(1, ids, True)
    kept[::2] = True
    active = torch.ones(b, L, dtype=torch.bool)
    active[-1, -2:] = False
    return Rows(
        torch.randint(3, V, (b, L), generator=torch.Generator().manual_seed(seed + 1)),
        active.long(),
        labels,
        Support.from_rows([(row, None) if i % 2 else None for i, row in enumerate(ids)]),
        kept.reshape(b, L, V),
        torch.rand(b, L, generator=torch.Generator().manual_seed(seed + 2)) + 0.5,
        active,
        torch.randn(b, L, generator=torch.Generator().manual_seed(seed + 3)),
    )


ROWS = make_rows()


def own_logprobs(logits, rows=ROWS):
    """Of the unpatched model's logits."""
    logits = logits / rows.temperature[..., None]
    logprobs = logits.masked_fill(~rows.kept, -torch.inf).log_softmax(-1)
    return logprobs.gather(-1, rows.labels[..., None])[..., 0].where(rows.active, 0)


def gradients(model, output, logprobs, rows=ROWS):
    """Of every parameter, of log-probabilities and the auxiliary loss; None where there is none."""
    loss = (rows.upstream * logprobs).sum()
    if getattr(output, "aux_loss", None) is not None:
        loss = loss + 0.3 * output.aux_loss
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return dict(zip(trained, grads, strict=True))


def assert_near(got, wanted, rounding=ROUNDING):
    """Values and gradients, each within rounding of its largest."""
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        if value is None:
            assert got[name] is None, name
            continue
        assert got[name].dtype == value.dtype, name
        assert (got[name] - value).abs().max() <= rounding * value.abs().max(), name
    assert max(float(v.detach().abs().max()) for v in wanted.values() if v is not None) > 1e-2


def both(model, rows=ROWS, **more):
    """(patched, unpatched): output, and log-probabilities and gradients by name."""
    plain = model(**rows.model, **more)
    logprobs = own_logprobs(plain.logits, rows)
    wanted = {"logprobs": logprobs.detach()} | gradients(model, plain, logprobs, rows)
    patch_lm_head(model)
    out = model(**rows.model, **rows.head, **more)
    got = {"logprobs": out.head.logprobs.detach()}
    got |= gradients(model, out, out.head.logprobs, rows)
    return (out, got), (plain, wanted)


@pytest.mark.parametrize("name", MODELS)
def test_the_models_own_logprobs_and_gradients_and_nothing_else_changed(name):
    model = make(name)
    assert (logit_options(model)["softcap"], logit_options(model)["logit_scale"]) == MODELS[name][2]
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    text = model.generate(ROWS.input_ids, **options)
    keys, signature = list(model.state_dict()), inspect.signature(model.forward)

    (out, got), (plain, wanted) = both(model)
    assert_near(got, wanted)
    assert isinstance(out, type(plain))
    assert isinstance(out.head, LMHeadOutput)
    assert out.logits is None
    assert list(out) == [key for key in plain if key != "logits"] + ["head"]
    if "aux_loss" in plain:
        assert torch.equal(out.aux_loss, plain.aux_loss)
    assert ("aux_loss" in plain) == ("Moe" in name or name == "GptOss")

    assert torch.equal(model(**ROWS.model).logits, plain.logits)
    assert torch.equal(model.generate(ROWS.input_ids, **options), text)
    assert list(model.state_dict()) == keys
    assert inspect.signature(model.forward) == signature
    unpatch_lm_head(model)
    untouched(model)
    assert torch.equal(model(**ROWS.model).logits, plain.logits)


def untouched(model):
    """No trace of a patch, or of a call that was broken off."""
    assert "forward" not in vars(model)
    for head in model.get_output_embeddings().modules():
        assert "forward" not in vars(head)
        assert not head._forward_hooks
        assert not head._forward_pre_hooks


def test_the_lines_of_the_document():
    """The loss and its gradient are those of the model's own logits."""
    text = (Path(__file__).parent.parent / "docs" / "trainers.md").read_text()
    lines = re.findall(r"```python\n(.*?)```", text, re.S)[0]
    sequences = ROWS.input_ids
    kept = torch.stack([sequences.flatten(), (sequences.flatten() + 7) % V], 1)
    logprobs = torch.full((B, L), 0.5).log()
    rows = [(row, torch.full((2,), 0.5).log()) for row in kept]
    advantages = draw(torch.randn, 3, B, L)
    names = {
        "model": make("Gemma2"),
        "sequences": sequences,
        "attention_mask": torch.ones_like(sequences),
        "loss_mask": torch.arange(L).expand(B, L) > 2,
        "support": Support.from_rows(rows),
        "inference_logprobs": logprobs,
        "advantages": advantages,
    }
    peer = copy.deepcopy(names["model"])
    exec(lines, names)
    text = (Path(__file__).parent.parent / "README.md").read_text()
    (brief,) = (c for c in re.findall(r"```python\n(.*?)```", text, re.S) if "patch_lm" in c)
    found = names | {"model": copy.deepcopy(peer)}
    exec(brief, found)
    assert torch.equal(found["loss"].loss, names["loss"].loss)
    logits = peer(sequences).logits[:, :-1]
    over = logits.gather(-1, kept.reshape(B, L, 2)[:, 1:]).log_softmax(-1)
    inputs = LossInputs(
        trainer_logprobs=over[..., 0],
        inference_logprobs=logprobs[:, 1:],
        advantages=advantages[:, 1:],
        loss_mask=names["loss_mask"][:, 1:],
        trainer_support_logprobs=over,
        sampler_support_logprobs=torch.full_like(over, 0.5).log(),
        support_valid=torch.ones_like(over, dtype=torch.bool),
    )
    loss = icepop_loss(inputs).loss / names["loss_mask"].sum()
    loss.backward()
    pairs = zip(names["model"].named_parameters(), peer.parameters(), strict=True)
    pairs = [(name, own.grad, other.grad) for (name, own), other in pairs]
    got, wanted = ({name: pair[at] for name, *pair in pairs} for at in (0, 1))
    assert_near(got, wanted, 1e-6)  # losses are in float32


# --- which logits, and whose head ---


@pytest.mark.parametrize("name", ["Qwen3", "Gemma2"])
def test_no_logits_over_the_vocabulary(name):
    model, v = patch_lm_head(make(name, vocab_size=5000)), 5000
    support = Support.from_rows([([int(label), 4321], None) for label in ROWS.labels.flatten()])
    with LargestTensor(*model.parameters()) as largest, torch.no_grad():
        out = model(**ROWS.model, aligned_labels=ROWS.labels, support=support, use_cache=False)
    assert largest.numel < B * L * v / 10
    assert out.head.logprobs.shape == (B, L)
    with LargestTensor(*model.parameters()) as largest, torch.no_grad():
        model(**ROWS.model)
    assert largest.numel >= B * L * v


def test_tied_weights():
    model = make("Llama", tie_word_embeddings=True)
    (_, got), (_, wanted) = both(model)
    assert_near(got, wanted)
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_a_head_that_is_replaced_after_the_patch():
    """By another size, or by ours."""
    model = patch_lm_head(make("Gemma2"))
    model.resize_token_embeddings(V + 7, mean_resizing=False)
    weight, rows = model.lm_head.weight, ROWS._replace(support=None)
    states = model.base_model(**rows.model).last_hidden_state
    wanted = fused_lm_head(states, weight, rows.labels, softcap=30.0).logprobs
    out = model(**rows.model, aligned_labels=rows.labels)
    assert torch.equal(out.head.logprobs, wanted)
    model.set_output_embeddings(FusedLMHead.from_linear(model.lm_head))
    out = model(**rows.model, aligned_labels=rows.labels)
    assert torch.equal(out.head.logprobs, wanted)


def test_a_model_that_changes_its_states_before_the_head():
    """`logit_options` refuses it; here the head reads what it is given."""
    model = make("Qwen3")
    handle = model.lm_head.register_forward_pre_hook(lambda _, args: (args[0] / 3,))
    (_, got), (_, wanted) = both(model)
    assert_near(got, wanted)
    handle.remove()


# --- what a call is given ---


def test_the_options_of_the_head():
    model = patch_lm_head(make("Gemma2", torch.float32))
    states = model.base_model(**ROWS.model).last_hidden_state
    given = states, model.lm_head.weight, ROWS.labels, ROWS.support
    more = {"impl": "reference", "logits_dtype": torch.bfloat16}
    wanted = fused_lm_head(*given, softcap=30.0, temperature=0.7, entropy="full", **more)
    options = {"aligned_labels": ROWS.labels, "support": ROWS.support, "temperature": 0.7}
    out = model(**ROWS.model, **options, entropy="full", head_options=more).head
    for name in ("logprobs", "support_logprobs", "trainer_tail_logprobs", "entropy"):
        assert torch.equal(getattr(out, name), getattr(wanted, name)), name
    assert out.support is ROWS.support
    assert model(**ROWS.model, **options).head.entropy is None


def test_the_rest_of_the_output_stays():
    model = patch_lm_head(make("Qwen3"))
    more = {"output_hidden_states": True, "use_cache": True}
    plain, out = model(**ROWS.model, **more), model(**ROWS.model, **ROWS.head, **more)
    assert list(out) == [*[name for name in plain if name != "logits"], "head"]
    for ours, own in zip(out.hidden_states, plain.hidden_states, strict=True):
        assert torch.equal(ours, own)
    assert out.cache.get_seq_length() == L
    leaves, spec = torch.utils._pytree.tree_flatten(out)  # DDP and FSDP2 look for tensors so
    assert any(leaf is out.head.logprobs for leaf in leaves)
    again = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert type(again) is type(out)
    assert again.head.logprobs is out.head.logprobs


@pytest.mark.parametrize("keep", [3, torch.tensor([1, 4])], ids=["last", "some"])
def test_logits_to_keep_are_the_labels_rows(keep):
    model = patch_lm_head(make("Cohere"))
    kept = slice(-keep, None) if isinstance(keep, int) else keep
    whole = model(**ROWS.model, aligned_labels=ROWS.labels).head.logprobs
    part = model(**ROWS.model, aligned_labels=ROWS.labels[:, kept], logits_to_keep=keep)
    assert (part.head.logprobs - whole[:, kept]).abs().max() <= ROUNDING * whole.abs().max()
    message = r"aligned_labels must be \(2, \d\), as the hidden states .* got \(2, 7\)"
    with pytest.raises(ValueError, match=message):
        model(**ROWS.model, aligned_labels=ROWS.labels, logits_to_keep=keep)


REFUSED = {
    "labels": ({"labels": ROWS.labels}, "labels and aligned_labels must not both be given"),
    "return_dict": ({"return_dict": False}, "return_dict must be True"),
    "shape": ({"aligned_labels": ROWS.labels[:1]}, r"aligned_labels must be \(2, 7\).*\(1, 7\)"),
    "type": ({"aligned_labels": [1, 2]}, r"aligned_labels must be \(2, 7\).*list"),
    "option": (
        {"head_options": {"bias": None}},
        r"head_options may hold \['full', 'grad_into', 'impl'.*\['bias'\]",
    ),
    "rows": ({"support": Support.empty(3)}, "support must have 14 rows, got 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_call_that_is_refused_leaves_nothing_behind(case):
    model = patch_lm_head(make("Qwen3"))
    wanted = model(**ROWS.model, **ROWS.head).head.logprobs
    more, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        model(**ROWS.model, **ROWS.head | more)
    assert torch.equal(model(**ROWS.model, **ROWS.head).head.logprobs, wanted)
    assert model(**ROWS.model).logits.shape == (B, L, V)
    unpatch_lm_head(model)
    untouched(model)


def test_labels_by_position_are_seen():
    model = patch_lm_head(make("Qwen3"))
    names = list(inspect.signature(model.forward).parameters)
    given = [ROWS.labels if name == "labels" else None for name in names]
    given = [ROWS.input_ids, *given[1 : names.index("labels") + 1]]
    with pytest.raises(ValueError, match="must not both be given"):
        model(*given, aligned_labels=ROWS.labels)


def test_a_model_that_returns_a_tuple():
    model = make("Qwen3")
    patch_lm_head(model)
    forward = type(model).forward

    def as_tuple(self, *args, **kwargs):
        return forward(self, *args, **kwargs).to_tuple()

    model.__class__ = type("Odd", (type(model),), {"forward": as_tuple})
    with pytest.raises(ValueError, match=r"model must return an output object .* got tuple"):
        model(**ROWS.model, **ROWS.head)


@pytest.mark.parametrize("name", ["support", "temperature", "active", "entropy", "head_options"])
def test_a_keyword_without_labels_is_refused(name):
    model = patch_lm_head(make("Qwen3"))
    values = ROWS.head | {"entropy": "full", "head_options": {}}
    with pytest.raises(ValueError, match=f"{name} needs aligned_labels"):
        model(**ROWS.model, **{name: values[name]})
    with pytest.raises(ValueError, match="temperature needs aligned_labels"):
        model(**ROWS.model, temperature=0.5)
    model(**ROWS.model, temperature=1.0)


def test_an_exception_in_the_model_leaves_nothing_behind():
    model = patch_lm_head(make("Qwen3"))

    def fail(*_):
        raise RuntimeError("out of memory, say")

    handle = model.base_model.layers[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(**ROWS.model, **ROWS.head)
    handle.remove()
    assert model(**ROWS.model).logits.shape == (B, L, V)
    unpatch_lm_head(model)
    untouched(model)


@pytest.mark.parametrize("calls", [0, 2])
def test_a_model_that_does_not_call_its_head_once(calls):
    model = patch_lm_head(make("Qwen3"))
    head = model.lm_head

    class Other(nn.Module):
        def forward(self, hidden):
            return [head(hidden) for _ in range(calls)][-1] if calls else hidden

    model.get_output_embeddings = lambda: head
    model.lm_head = Other()
    with pytest.raises(ValueError, match=r"must call its head once .*, not (at all|twice)"):
        model(**ROWS.model, **ROWS.head)


def test_calls_within_calls():
    """One with other labels and one without inside the body of one, as a hook might make them."""
    model, rows = patch_lm_head(make("Qwen3")), make_rows(b=3, seed=9)
    inner, wanted = model(**rows.model, **rows.head), model(**ROWS.model, **ROWS.head)
    seen = []

    def call(*_):
        if not seen:
            seen.append(None)
            seen.append(model(**rows.model, **rows.head))
            seen.append(model(**ROWS.model))

    handle = model.base_model.layers[0].register_forward_hook(call)
    out = model(**ROWS.model, **ROWS.head)
    handle.remove()
    assert torch.equal(out.head.logprobs, wanted.head.logprobs)
    assert torch.equal(seen[1].head.logprobs, inner.head.logprobs)
    assert torch.equal(seen[2].logits, model(**ROWS.model).logits)
    unpatch_lm_head(model)
    untouched(model)


def test_threads_do_not_see_each_others_calls():
    """One without labels and one with others, while one with labels is in the body."""
    model, rows = patch_lm_head(make("Qwen3")), make_rows(b=3, seed=9)
    logits, other = model(**rows.model).logits, model(**rows.model, **rows.head).head.logprobs
    wanted = model(**ROWS.model, **ROWS.head).head.logprobs
    got = {}

    def elsewhere():
        got["logits"] = model(**rows.model).logits
        got["logprobs"] = model(**rows.model, **rows.head).head.logprobs

    def wait(*_):
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join(timeout=60)

    handle = model.base_model.layers[0].register_forward_hook(wait)
    out = model(**ROWS.model, **ROWS.head)
    handle.remove()
    assert torch.equal(out.head.logprobs, wanted)
    assert torch.equal(got["logits"], logits)
    assert torch.equal(got["logprobs"], other)
    unpatch_lm_head(model)
    untouched(model)


# --- patching and copying ---


def test_patched_twice_and_unpatched_twice():
    model = patch_lm_head(make("Qwen3"))
    forward = model.forward
    assert patch_lm_head(model) is model
    assert model.forward is forward
    unpatch_lm_head(model)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM is not patched"):
        unpatch_lm_head(model)


def test_a_forward_of_an_object_is_kept():
    """As some libraries patch a model."""
    model = make("Qwen3")
    calls = []

    def forward(*args, **kwargs):
        calls.append(kwargs)
        return type(model).forward(model, *args, **kwargs)

    model.forward = forward
    patch_lm_head(model)
    out = model(**ROWS.model, **ROWS.head)
    assert calls[-1].keys() == ROWS.model.keys()
    assert out.head.logprobs.shape == (B, L)
    unpatch_lm_head(model)
    assert model.forward is forward


def test_a_forward_of_the_head_is_kept():
    """Which some libraries give a module; in a call with labels it does not run."""
    model = make("Qwen3")
    head, calls = model.lm_head, []

    def forward(hidden):
        calls.append(hidden)
        return type(head).forward(head, hidden)

    head.forward = forward
    patch_lm_head(model)
    before = len(calls)
    model(**ROWS.model, **ROWS.head)
    assert len(calls) == before
    assert head.forward is forward
    model(**ROWS.model)
    assert len(calls) == before + 1


def test_a_model_with_such_arguments_of_its_own_is_refused():
    model = make("Qwen3")
    model.forward = lambda input_ids=None, temperature=1.0, **more: None
    with pytest.raises(ValueError, match=r"forward of Qwen3ForC.* has its own \['temperature'"):
        patch_lm_head(model)


@pytest.mark.parametrize("how", ["copied", "pickled"])
def test_a_copy_is_patched_by_itself(how):
    model = patch_lm_head(make("Gemma2"))
    wanted = model(**ROWS.model, **ROWS.head).head.logprobs
    other = copy.deepcopy(model) if how == "copied" else pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert torch.equal(other(**ROWS.model, **ROWS.head).head.logprobs, wanted)
    unpatch_lm_head(other)
    untouched(other)
    assert not torch.equal(model(**ROWS.model, **ROWS.head).head.logprobs, wanted)


def test_a_checkpoint_is_an_unpatched_models(tmp_path):
    model = make("Qwen3")
    model.save_pretrained(tmp_path / "before")
    patch_lm_head(model)
    model(**ROWS.model, **ROWS.head)
    model.save_pretrained(tmp_path / "after")
    for file in ("model.safetensors", "config.json"):
        before, after = ((tmp_path / part / file).read_bytes() for part in ("before", "after"))
        assert before == after
    untouched(type(model).from_pretrained(tmp_path / "after"))


# --- how models are trained ---


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_the_model(reentrant):
    model = make("Qwen3").train()
    (_, got), _ = both(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    out = model(**ROWS.model, **ROWS.head, use_cache=False)
    again = {"logprobs": out.head.logprobs.detach()} | gradients_by_backward(model, out)
    assert_near(again, got)


def gradients_by_backward(model, out):
    (ROWS.upstream * out.head.logprobs).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_the_model(reentrant):
    """Which calls the patched forward again in the backward."""
    model = make("Qwen3")
    (_, got), _ = both(model)
    states = model.get_input_embeddings()(ROWS.input_ids)

    def run(states):
        mask = ROWS.attention_mask
        return model(inputs_embeds=states, attention_mask=mask, **ROWS.head).head.logprobs

    logprobs = checkpoint(run, states, use_reentrant=reentrant)
    (ROWS.upstream * logprobs).sum().backward()
    again = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_near({"logprobs": logprobs.detach()} | again, got)
    unpatch_lm_head(model)
    untouched(model)


@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
@pytest.mark.parametrize("name", ["Qwen3", "Gemma2", "Granite"])
def test_low_precision(name, how):
    """At least as near to float64 of the same hidden states as the model's own logits."""
    model = make(name, torch.bfloat16 if how == "bfloat16" else torch.float32)
    patch_lm_head(model)
    states = []
    handle = model.lm_head.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        plain = model(**ROWS.model)
        out = model(**ROWS.model, **ROWS.head)
        (ROWS.upstream * out.head.logprobs).sum().backward()
    handle.remove()
    assert torch.equal(states[0], states[1])
    assert out.head.logprobs.dtype == torch.float32
    softcap, scale = MODELS[name][2]
    given = states[0].detach().double(), model.lm_head.weight.detach().double(), ROWS.labels
    options = ROWS.head | {"softcap": softcap, "logit_scale": scale}
    del options["aligned_labels"]
    exact = fused_lm_head(*given, **options, impl="reference").logprobs
    error = (out.head.logprobs - exact).abs().max()
    own = (own_logprobs(plain.logits.float()) - exact).abs().max()
    assert error <= 2 * own + 1e-6 * exact.abs().max()
    for parameter in model.parameters():
        assert parameter.grad.isfinite().all()
        assert parameter.grad.dtype == parameter.dtype


@pytest.mark.parametrize("order", ["before", "after"])
def test_accelerate(order):
    """Its mixed precision wraps a model's forward, as the patch does."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of another test's
    model = make("Gemma2", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(**ROWS.model)
        patch_lm_head(model)
        wanted = model(**ROWS.model, **ROWS.head).head.logprobs
    unpatch_lm_head(model)
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    if order == "before":
        model = accelerator.prepare_model(patch_lm_head(model))
    else:
        model = patch_lm_head(accelerator.prepare_model(model))
    out = model(**ROWS.model, **ROWS.head)
    assert torch.equal(out.head.logprobs, wanted)
    assert torch.equal(model(**ROWS.model).logits, plain.logits.float())
    assert patch_lm_head(model) is model
    if order == "before":
        with pytest.raises(ValueError, match="was wrapped since: undo that"):
            unpatch_lm_head(model)
    model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    out = model(**ROWS.model, **ROWS.head)
    assert out.head.logprobs.shape == (B, L)
    unpatch_lm_head(model)
    assert model(**ROWS.model).logits.shape == (B, L, V)


def test_a_compiled_model():
    """Traced with and without labels by turns: no graph forgets that a call has labels."""
    model = make("Qwen3", num_hidden_layers=1)
    (_, got), (plain, _) = both(model)
    rows = make_rows(seed=5)
    other = model(**rows.model, **rows.head).head.logprobs
    compiled, frames = torch.compile(model, backend="eager"), []
    for _ in range(3):  # what it computes in float32 inside the model comes out otherwise
        assert_near({"logits": compiled(**ROWS.model).logits}, {"logits": plain.logits}, 1e-6)
        out = compiled(**ROWS.model, **ROWS.head)
        again = {"logprobs": out.head.logprobs} | gradients(model, out, out.head.logprobs)
        assert_near(again, got, 1e-6)
        logprobs = compiled(**rows.model, **rows.head).head.logprobs
        assert_near({"logprobs": logprobs}, {"logprobs": other}, 1e-6)
        frames.append(torch._dynamo.utils.counters["frames"]["total"])
    assert 0 < frames[1] == frames[2]  # the third time nothing is compiled anew


def test_a_model_patched_by_liger():
    """Its forward in the place of the model's, with those of its layers that run on a CPU."""
    monkey_patch = pytest.importorskip("liger_kernel.transformers")
    model = make("Qwen3")
    wanted = both(copy.deepcopy(model))[0][1]
    off = {"rope": False, "rms_norm": False, "swiglu": False}
    monkey_patch.apply_liger_kernel_to_qwen3(model=model, **off)
    before = vars(model)["forward"]
    (out, got), _ = both(model)
    assert_near(got, wanted)
    assert out.logits is None
    unpatch_lm_head(model)
    assert vars(model)["forward"] is before


# --- PEFT ---


@pytest.fixture
def peft():
    return pytest.importorskip("peft", minversion="0.19")


def lora(peft, model, **more):
    options = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False} | more
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(**options))


@pytest.mark.parametrize("first", ["patch", "peft"])
def test_adapters_below_the_head(peft, first):
    model = make("Gemma2")
    wanted = both(lora(peft, copy.deepcopy(model)))[1][1]
    if first == "patch":
        model = lora(peft, patch_lm_head(model))
    else:
        model = patch_lm_head(lora(peft, model))
    out = model(**ROWS.model, **ROWS.head)
    got = {"logprobs": out.head.logprobs.detach()} | gradients(model, out, out.head.logprobs)
    assert_near(got, wanted)
    assert sum("lora" in name for name in got) == 4
    assert patch_lm_head(model) is model
    unpatch_lm_head(model)
    untouched(model.get_base_model())


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
@pytest.mark.parametrize("first", ["patch", "peft"])
def test_a_head_that_peft_trains_whole(peft, first):
    """The copy that is active in a call, the original where adapters are off."""
    model = make("Phi")
    model = patch_lm_head(model) if first == "patch" else model
    model = lora(peft, model, modules_to_save=["lm_head"])
    options = {"r": 2, "target_modules": ["q_proj"]}
    model.add_adapter("another", peft.LoraConfig(**options, modules_to_save=["lm_head"]))
    patch_lm_head(model)
    head = model.get_output_embeddings()
    for number, module in enumerate([*head.modules_to_save.values(), head.original_module]):
        for parameter in module.parameters():
            parameter.data += draw(torch.randn, number, *parameter.shape)
    seen = []
    for adapter in ("default", "another"):
        model.set_adapter(adapter)
        (_, got), (_, wanted) = both(model)
        assert_near(got, wanted)
        assert got[f"base_model.model.lm_head.modules_to_save.{adapter}.weight"] is not None
        seen.append(got["logprobs"])
    with model.disable_adapter():
        seen.append(own_logprobs(model(**ROWS.model).logits))
        out = model(**ROWS.model, **ROWS.head).head.logprobs
        assert_near({"logprobs": out}, {"logprobs": seen[-1]})
    assert not torch.allclose(seen[0], seen[1])
    assert not torch.allclose(seen[0], seen[2])


@pytest.mark.parametrize("first", ["patch", "peft"])
def test_lora_on_the_head_is_refused(peft, first):
    message = r"its head, a peft.*has parameters beside weight and bias: .*lora_A"
    model, targets = make("Qwen3"), ["q_proj", "lm_head"]
    if first == "patch":  # then by the call
        model = lora(peft, patch_lm_head(model), target_modules=targets)
        with pytest.raises(ValueError, match=message):
            model(**ROWS.model, **ROWS.head)
        assert model(**ROWS.model).logits.shape == (B, L, V)
    else:
        model = lora(peft, model, target_modules=targets)
        with pytest.raises(ValueError, match=message):
            patch_lm_head(model)
    (_, got), (_, wanted) = both(model.merge_and_unload().requires_grad_())
    assert_near(got, wanted)


@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_gradient_in_a_buffer(tied):
    """The head's alone: the embedding's stays where autograd puts it."""
    model = make("Llama", tie_word_embeddings=tied)
    patch_lm_head(model)
    weight = model.lm_head.weight
    buffer = torch.zeros_like(weight).detach()

    def backward(**options):
        out = model(**ROWS.model, **ROWS.head, head_options=options)
        (out.head.logprobs * ROWS.upstream).sum().backward()

    backward()
    wanted, weight.grad = weight.grad, None
    backward(grad_into=buffer)
    assert (weight.grad is not None) == tied
    found = buffer + weight.grad if tied else buffer
    assert (found - wanted).abs().max() <= ROUNDING * wanted.abs().max()
    assert buffer.any()
