"""ReplayGRPOTrainer against the real TRL: what it records, replays, and makes gradients of."""

import importlib.util
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from rl_loss import RowKind, Support, ipo_loss, policy_loss

pytest.importorskip("trl")
pytest.importorskip("peft")

import peft
import transformers
import trl
import trl_runs
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl_runs import (
    FLOOR,
    assert_plain,
    kept_logprobs,
    plain,
    prompts,
    sampled_tokens,
    tiny_model,
    trainer,
    trls_loss,
)

from rl_loss.integrations import trl_config
from rl_loss.integrations.huggingface import SupportRecorder
from rl_loss.integrations.sampled_logprobs import support_of
from rl_loss.integrations.trl import ReplayMixin

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

# --- gradients ---

SETTINGS = {
    "as it is": {},
    "top_p and a temperature": {"top_k": 0, "top_p": 0.9, "temperature": 0.7},
    "several iterations": {"num_iterations": 3, "max_steps": 3},
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "accumulation over iterations": {
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 2,
        "num_iterations": 2,
        "max_steps": 3,
    },
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "truncated completions masked": {"mask_truncated_completions": True},
    "padding": {"pad_to_multiple_of": 8},
}


@pytest.mark.parametrize("loss", [None, "ipo"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_gradients_are_those_of_the_masked_logits(tmp_path, loss, setting):
    options = SETTINGS[setting]
    run = trainer(tmp_path, loss=loss, **options)
    run.train()
    assert len(run.watch.steps) == options.get("max_steps", 1)
    masked = run.watch.steps[0].micro[0]["completion_mask"].sum(1) == 0
    assert masked.any() == ("mask_truncated_completions" in options)
    for step in run.watch.steps:
        assert len(step.micro) == options.get("gradient_accumulation_steps", 1)
        assert all(one["checkpointing"] == ("checkpointing" in setting) for one in step.micro)
        assert_plain(step, tiny_model, loss, temperature=options.get("temperature", 1.0))


@pytest.mark.parametrize("loss", ["icepop", "reinforce"])
def test_gradients_of_the_other_losses(tmp_path, loss):
    run = trainer(tmp_path, loss=loss, num_iterations=2, max_steps=2, learning_rate=0.1)
    run.train()
    for step in run.watch.steps:
        assert_plain(step, tiny_model, loss)
    assert run.state.log_history[1]["score_centering/correction_l1"] > 1e-3  # not on policy


@pytest.mark.parametrize("loss", [None, "ipo"])
def test_each_step_of_a_generation_has_an_even_share_of_its_tokens(tmp_path, loss):
    """As in TRL's dapo: every token of a generation weighs the same, whatever step it is in."""
    run = trainer(tmp_path, loss=loss, steps_per_generation=4, max_steps=4)
    run.train()
    tokens = [sum(map(sampled_tokens, step.micro)) for step in run.watch.steps]
    assert len(set(tokens)) > 1
    for step in run.watch.steps:
        assert_plain(step, tiny_model, loss, tokens=sum(tokens) / 4)


# --- the reference ---

LORA = LoraConfig(
    r=4,
    lora_alpha=8,
    target_modules=["q_proj", "v_proj"],
    init_lora_weights=False,
    task_type="CAUSAL_LM",
)


def with_lora(config=LORA):
    return get_peft_model(tiny_model(), config)


def adapters_off(model, dtype, inputs):
    with model.disable_adapter():
        return kept_logprobs(model, inputs)


@pytest.mark.parametrize("loss", [None, "reinforce"])
def test_the_reference_is_over_the_kept_sets_too(tmp_path, loss):
    tiny_model().save_pretrained(tmp_path / "model")
    model = Qwen3ForCausalLM.from_pretrained(tmp_path / "model")
    run = trainer(tmp_path, model, loss=loss, beta=0.3, num_iterations=2, max_steps=2)
    run.train()
    assert run.ref_model is not None
    for step in run.watch.steps:

        def ref(model, dtype, inputs):
            return kept_logprobs(tiny_model().to(dtype), inputs)

        assert_plain(step, tiny_model, loss, beta=0.3, ref=ref)
    assert run.state.log_history[1]["kl" if loss is None else "ref_kl"] > 1e-3


@pytest.mark.parametrize("loss", [None, "reinforce"])
def test_the_reference_of_lora_is_the_model_with_its_adapters_off(tmp_path, loss):
    run = trainer(tmp_path, loss=loss, beta=0.3, peft_config=LORA)
    run.train()
    [step] = run.watch.steps
    assert all("lora" in name for name in step.grads)
    assert_plain(step, with_lora, loss, beta=0.3, ref=adapters_off)


@pytest.mark.parametrize("loss", [None, "reinforce"])
def test_the_reference_of_a_trained_adapter_is_its_copy(tmp_path, loss):
    run = trainer(tmp_path, with_lora(), loss=loss, beta=0.3, num_iterations=2, max_steps=2)
    first = {name: one.clone() for name, one in run.model.state_dict().items()}

    def make():
        model = with_lora()
        model.add_adapter("ref", LORA)
        return model

    def copied(model, dtype, inputs):
        other = make().to(dtype)
        other.load_state_dict(first)
        return kept_logprobs(other, inputs)

    run.train()
    for step in run.watch.steps:
        step.grads = {name: grad for name, grad in step.grads.items() if ".ref." not in name}
        assert_plain(step, make, loss, beta=0.3, ref=copied)


# --- other models and numbers ---

MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "router_aux_loss_coef": 0.2,
    "experts_implementation": "eager",  # the others have no float64
}


@pytest.mark.parametrize("loss", [None, "ipo"])
def test_the_auxiliary_loss_of_a_mixture_of_experts_is_kept(tmp_path, loss):
    def make():
        return tiny_model(Qwen3MoeConfig, Qwen3MoeForCausalLM, **MOE)

    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    run = trainer(tmp_path, make(), loss=loss, **options)
    run.train()
    [step] = run.watch.steps
    assert_plain(step, make, loss, aux=0.2)
    gates = [name for name in step.grads if name.endswith("mlp.gate.weight")]
    without = plain(step, make, loss, torch.float32)
    assert gates
    for name in gates:  # it would show
        assert relative(without[name], step.grads[name]) > 0.01
    assert run.state.log_history[0]["aux_loss"] > 1


def relative(got, wanted):
    return float((got - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("loss", [None, "ipo"])
def test_bfloat16_autocast(tmp_path, loss):
    run = trainer(tmp_path, loss=loss, bf16=True)
    run.train()
    [step] = run.watch.steps
    wide = plain(step, tiny_model, loss, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = plain(step, tiny_model, loss, torch.float32)
    for name, exact in wide.items():
        assert step.grads[name].dtype == torch.float32
        error = relative(step.grads[name], exact)
        assert 1e-5 < error < 2 * relative(narrow[name], exact) + FLOOR


@pytest.mark.parametrize("loss", [None, "ipo"])
def test_a_head_cast_to_float32(tmp_path, loss):
    """Of a bfloat16 model: its head, in the sampler and in the trainer, is of float32."""
    options = {"cast_lm_head_to_fp32": True, "max_completion_length": 12, "learning_rate": 0.0}
    run = trainer(tmp_path, tiny_model().bfloat16(), loss=loss, num_iterations=2, **options)
    run.train()
    assert run.model.lm_head.weight.dtype == torch.float32
    [inputs] = run.watch.steps[0].micro
    with torch.no_grad():
        own = kept_logprobs(run.model, inputs)  # from logits, of the same hidden states
    torch.testing.assert_close(own.token, inputs["old_per_token_logps"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_other_models(tmp_path, family):
    kinds = getattr(transformers, f"{family}Config"), getattr(transformers, f"{family}ForCausalLM")

    def make():
        return tiny_model(*kinds, attn_implementation="eager")

    run = trainer(tmp_path, make(), loss="ipo", num_iterations=2, max_steps=2)
    run.train()
    for step in run.watch.steps:
        assert_plain(step, make, "ipo")


@pytest.mark.parametrize("loss", [None, "ipo"])
def test_a_head_that_peft_trains_whole(tmp_path, loss):
    config = LoraConfig(
        r=4,
        target_modules=["q_proj"],
        modules_to_save=["lm_head"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    run = trainer(tmp_path, loss=loss, beta=0.3, num_iterations=2, max_steps=2, peft_config=config)
    run.train()
    for step in run.watch.steps:
        assert any("modules_to_save" in name for name in step.grads)
        assert_plain(step, partial(with_lora, config), loss, beta=0.3, ref=adapters_off)


def test_an_entropy_bonus_is_of_the_kept_sets(tmp_path):
    run = trainer(tmp_path, entropy_coef=0.3)
    run.train()
    [step] = run.watch.steps
    [inputs] = step.micro
    model = tiny_model()
    model.load_state_dict(step.weights)
    kept = kept_logprobs(model, inputs)
    entropies = -(kept.all.exp() * kept.all.clamp(min=-1e9)).sum(-1)
    bonus = (entropies * kept.mask).sum() / kept.mask.sum()
    (trls_loss(kept, inputs) / kept.mask.sum() - 0.3 * bonus).backward()
    for name, p in model.named_parameters():
        assert relative(step.grads[name], p.grad) < 1e-4, name


@pytest.mark.slow
@pytest.mark.parametrize("loss", [None, "ipo"])
def test_compiled(tmp_path, loss):
    run = trainer(tmp_path, loss=loss, torch_compile=True, num_iterations=2, max_steps=2)
    run.train()
    assert isinstance(run.model_wrapped, torch._dynamo.OptimizedModule)
    for step in run.watch.steps:
        assert_plain(step, tiny_model, loss)


# --- evaluation ---


@pytest.mark.parametrize("loss", [None, "ipo"])
def test_evaluation(tmp_path, loss):
    run = trainer(tmp_path, loss=loss, eval_dataset=prompts(5))  # five prompts, twice each
    logged = run.evaluate()
    assert run.watch.steps == []
    [*batches] = run.watch.micro
    assert [len(one["supports"]) for one in batches] == [4, 4, 2]
    for inputs in batches:
        assert not inputs["training"]
        kept = kept_logprobs(tiny_model(), inputs)
        # On policy both are minus the advantages, a token each.
        wanted = -(inputs["advantages"][:, None] * kept.mask).sum() / sampled_tokens(inputs)
        torch.testing.assert_close(inputs["loss"], wanted, atol=1e-5, rtol=0)
    entropy = sum(
        float(-(k.all.detach().exp() * k.all.detach().clamp(min=-1e30)).sum(-1)[k.mask].sum())
        for k in (kept_logprobs(tiny_model(), inputs) for inputs in batches)
    ) / sum(map(sampled_tokens, batches))
    if loss is not None:  # TRL's own is the mean of the batches' means
        assert run.state.log_history[-1]["eval_entropy"] == pytest.approx(entropy, rel=1e-4)
        assert run.state.log_history[-1]["eval_importance_ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert "eval_loss" in logged
    run.watch.micro.clear()
    run.train()  # goes on as ever
    assert_plain(run.watch.steps[0], tiny_model, loss)


def test_evaluation_between_the_steps_of_a_generation(tmp_path):
    options = {"eval_dataset": prompts(2), "eval_strategy": "steps", "eval_steps": 1}
    run = trainer(tmp_path, loss="ipo", steps_per_generation=4, max_steps=4, **options)
    run.train()
    tokens = 0
    for step in run.watch.steps:
        step.micro = [one for one in step.micro if one["training"]]
        assert len(step.micro) == 1
        tokens += sampled_tokens(step.micro[0])
    for step in run.watch.steps:
        assert_plain(step, tiny_model, "ipo", tokens=tokens / 4)
    assert sum("eval_loss" in log for log in run.state.log_history) == 4


# --- what replay cures: https://github.com/huggingface/trl/issues/6789 ---


class Unreplayed(trl_runs.WatchedTrainer):
    """Tells what the ratios are over the whole vocabulary, as TRL takes them."""

    def _compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        keep = inputs["completion_ids"].shape[1]
        self.logps = {}
        for kind in (trl.GRPOTrainer, trl_runs.ReplayGRPOTrainer):
            self._supports = inputs["supports"]
            logps = kind._get_per_token_logps_and_entropies
            with torch.no_grad():
                self.logps[kind] = logps(self, model, ids, attention, keep)[0]
        return super()._compute_loss(model, inputs)


@pytest.mark.parametrize(
    ("sampler", "least", "most"),
    [
        ({"top_p": 0.9, "top_k": 0}, 0.9, 0.91),
        ({"top_p": 0.8, "top_k": 0}, 0.8, 0.82),
        ({"top_k": 8}, 0.74, 0.82),
        ({"top_k": 0, "min_p": 0.1, "temperature": 0.8}, 0.75, 0.9),
    ],
)
def test_the_mean_ratio_is_1_and_without_replay_the_kept_mass(tmp_path, sampler, least, most):
    make = partial(tiny_model, ends=[2], initializer_range=0.45)  # peaked as a real one
    options = {"per_device_train_batch_size": 32, "max_completion_length": 32, **sampler}
    run = trainer(tmp_path, make(), kind=Unreplayed, **options)
    run.train()
    [inputs] = run.watch.steps[0].micro
    mask = inputs["completion_mask"].bool()
    full, replayed = (
        (logps - inputs["sampling_per_token_logps"]).masked_fill(~mask, 0.0)
        for logps in run.logps.values()
    )
    assert (replayed[mask].exp() - 1).abs().max() < 5e-5
    assert float(replayed[mask].exp().mean()) == pytest.approx(1, abs=1e-5)
    ratio = float(full[mask].exp().mean())
    assert least < ratio < most
    # To the digit: what the trainer's own distribution puts on the kept sets.
    with torch.no_grad():
        logprobs = kept_logprobs(make(), {**inputs, "supports": []}, run.temperature).all
    mass = [
        logprobs[i, t].exp()[one[t : t + 1].ids.long()].sum()
        for i, one in enumerate(inputs["supports"])
        for t in range(len(one))
    ]
    torch.testing.assert_close(full[mask].exp(), torch.stack(mass), atol=5e-5, rtol=0)
    # A sequence's ratio, which is what TRL cuts at 3 with vLLM, is lost altogether.
    whole = mask.all(1)
    assert full[whole].sum(1).exp().mean() < 0.1
    assert (replayed[whole].sum(1).exp() - 1).abs().max() < 1e-4


# --- supports on their way ---


def test_every_micro_batch_has_the_supports_of_its_own_tokens(tmp_path):
    """Through generations of several groups, shuffled, cut into steps, and gone through twice."""
    options = {"steps_per_generation": 4, "num_iterations": 2, "per_device_train_batch_size": 8}
    run = trainer(tmp_path, num_generations=4, max_steps=10, learning_rate=0.0, **options)
    run.train()
    seen = [one for step in run.watch.steps for one in step.micro]
    assert len(seen) == 10
    for inputs in seen:
        lengths = inputs["completion_mask"].sum(1).tolist()
        assert [len(one) for one in inputs["supports"]] == lengths
        # The sampler's probabilities of these very tokens are the trainer's over these very sets.
        kept = kept_logprobs(tiny_model(), inputs)
        torch.testing.assert_close(
            kept.token, inputs["sampling_per_token_logps"], atol=1e-4, rtol=0
        )
        torch.testing.assert_close(kept.token, inputs["old_per_token_logps"], atol=1e-5, rtol=0)
    order = [tuple(map(tuple, one["completion_ids"].tolist())) for one in seen]
    assert order[:4] == order[4:8]
    assert len(set(order)) == 6
    flat = torch.cat([one["prompt_ids"] for one in seen[:4]])[:, -1].tolist()
    assert flat != sorted(flat)  # they were shuffled


def test_padding_behind_a_stop_is_no_part_of_a_completion(tmp_path):
    """Ends that TRL has not heard of: it would take the padding behind them for sampled tokens."""
    options = {"generation_kwargs": {"eos_token_id": trl_runs.ENDS}}
    run = trainer(tmp_path, tiny_model(ends=[2]), loss="ipo", **options)
    run.train()
    [inputs] = run.watch.steps[0].micro
    lengths = inputs["completion_mask"].sum(1)
    assert lengths.min() < inputs["completion_ids"].shape[1]
    for ids, length in zip(inputs["completion_ids"], lengths, strict=True):
        assert 0 not in ids[:length]
    assert_plain(run.watch.steps[0], tiny_model, "ipo")
    assert "generate" not in vars(run.model)  # it is back


def test_what_cannot_have_been_sampled_is_noticed(tmp_path):
    run = trainer(tmp_path)
    completions = run._recorder.completions

    def off(sequences):
        found = completions(sequences)
        return [one._replace(inference_logprobs=one.inference_logprobs - 0.1) for one in found]

    run._recorder.completions = off
    with pytest.raises(ValueError, match="inference_logprobs"):
        run.train()


# --- tools ---


def look(word: str) -> str:
    """Looks a word up.

    Args:
        word: what to look up.
    """
    return "w50 w51 w52"


@pytest.mark.parametrize("loss", [None, "ipo"])
def test_a_tool_loop(tmp_path, monkeypatch, loss):
    """Several turns of several lengths, cut at the end; the tools' words are nobody's samples."""

    def parse(_, ids, prefix=None, tools=None):
        if len(ids) > 1 and ids[0] % 4:  # some completions call the tool, and some call it again
            call = {"name": "look", "arguments": {"word": "w5"}}
            return {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]}
        return {"role": "assistant", "content": "w7"}

    monkeypatch.setattr(trl_runs.grpo_trainer, "parse_response", parse)
    words = trl_runs.tokenizer()
    words.response_template = "any"
    chats = [[{"role": "user", "content": f"w{i + 6}"}] for i in range(16)]
    options = {"per_device_train_batch_size": 16, "num_iterations": 2, "max_steps": 2}
    run = trainer(
        tmp_path,
        tiny_model(max_position_embeddings=256),
        loss=loss,
        tools=[look],
        processing_class=words,
        train_dataset=Dataset.from_dict({"prompt": chats}),
        max_completion_length=24,
        generation_kwargs={"max_new_tokens": 9},
        **options,
    )
    run.train()
    [inputs] = run.watch.steps[0].micro
    sampled = inputs["tool_mask"].bool() & inputs["completion_mask"].bool()
    turns = (inputs["tool_mask"].diff(dim=1) > 0).sum(1)
    assert set(turns.tolist()) >= {0, 1, 2}
    for mask, support, length in zip(
        sampled, inputs["supports"], inputs["completion_mask"].sum(1), strict=True
    ):
        assert len(support) == length
        assert torch.equal(support.kind != RowKind.NONE, mask[:length])
    assert any(length == 24 for length in inputs["completion_mask"].sum(1))
    assert torch.equal(inputs["sampling_per_token_logps"] != 0, sampled)
    for step in run.watch.steps:
        assert_plain(step, partial(tiny_model, max_position_embeddings=256), loss)


# --- rollouts of one's own ---


def rollout(given, run, *, extra=None):
    """With `generate` outside of the trainer."""
    ids = run.processing_class(text=given)["input_ids"]
    completions, logprobs = run._generate_single_turn(ids, None, {}, run.num_generations)
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": logprobs}


@pytest.mark.parametrize("loss", [None, "ipo"])
@pytest.mark.parametrize("apart", [False, True])
def test_a_rollout_func_gives_its_supports_or_the_log_probabilities_that_know_them(
    tmp_path, loss, apart
):
    def own(given, run):
        output = rollout(given, run)
        if apart:
            output["supports"] = [support_of(one) for one in output["logprobs"]]
            output["logprobs"] = [[float(q) for q in one] for one in output["logprobs"]]
        return output

    options = {"num_iterations": 2, "max_steps": 2}
    run = trainer(tmp_path, loss=loss, rollout_func=own, **options)
    run.train()
    for step in run.watch.steps:
        assert_plain(step, tiny_model, loss)


def test_a_rollout_func_without_evidence_is_refused(tmp_path):
    def bare(given, run):
        output = rollout(given, run)
        return output | {"logprobs": [[float(q) for q in one] for one in output["logprobs"]]}

    def short(given, run):
        output = rollout(given, run)
        supports = [support_of(one) for one in output["logprobs"]]
        return output | {"supports": [supports[0][1:], *supports[1:]]}

    def none(given, run):
        return rollout(given, run) | {"logprobs": None}

    def alone(given, run):
        output = rollout(given, run)
        supports = [support_of(one) for one in output["logprobs"]]
        return output | {"supports": supports, "logprobs": None}

    trainer(tmp_path, rollout_func=alone).train()  # TRL's loss needs no more
    cases = (
        (bare, "no evidence"),
        (none, "no evidence"),
        (short, "a row a token"),
        (alone, "logprobs"),
        (lambda given, run: alone(given, run) | {"supports": Support.empty(3)}, "must be a list"),
    )
    for function, match in cases:
        run = trainer(tmp_path, rollout_func=function, loss="ipo" if function is alone else None)
        with pytest.raises(ValueError, match=match):
            run.train()


# --- losses ---


def test_a_loss_is_one_of_ours_or_a_partial_of_one(tmp_path):
    def clip(log_p, log_q, advantages):
        ratio = (log_p - log_q).exp()
        return torch.where((advantages > 0) & (ratio > 1.2), 0.0, ratio)

    grads = {}
    losses = {
        "name": "ipo",
        "function": ipo_loss,
        "partial": partial(ipo_loss, eps=1.0, max_importance_ratio=1e4),
        "other options": partial(ipo_loss, eps=0.0, score_centering=False),
        "any rule": partial(policy_loss, rule=clip, score_centering=False),
    }
    for name, loss in losses.items():
        run = trainer(tmp_path, loss=loss, num_iterations=2, max_steps=2, learning_rate=0.1)
        run.train()
        grads[name] = run.watch.steps[1].grads["model.embed_tokens.weight"]
    assert torch.equal(grads["name"], grads["function"])
    assert not torch.equal(grads["name"], grads["other options"])
    assert grads["any rule"].abs().sum() > 0
    for loss in ("ppo", trl.GRPOTrainer, partial(ipo_loss, 3), 1.0, partial(max)):
        with pytest.raises(ValueError, match="loss must be None"):
            trainer(tmp_path, loss=loss)
    with pytest.raises(ValueError, match=r"args\.beta"):
        trainer(tmp_path, loss=partial(ipo_loss, ref_tau=0.1))
    for loss, match in (
        (partial(ipo_loss, kl_tua=0.1), "loss: .*kl_tua"),
        (partial(ipo_loss, kl_tau=-1.0), "kl_tau must be finite, at least 0"),
        (policy_loss, "loss: .*rule"),
    ):
        with pytest.raises(ValueError, match=match):
            trainer(tmp_path, loss=loss)


def test_metrics_are_those_of_all_tokens_since_the_last_log(tmp_path):
    options = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2, "max_steps": 4}
    run = trainer(
        tmp_path, loss="icepop", num_iterations=2, logging_steps=2, learning_rate=0.1, **options
    )
    run.train()
    for log, steps in zip(run.state.log_history, (slice(0, 2), slice(2, 4)), strict=False):
        ratios, widths, entropies = [], [], []
        for step in run.watch.steps[steps]:
            model = tiny_model()
            model.load_state_dict(step.weights)
            for inputs in step.micro:
                with torch.no_grad():
                    kept = kept_logprobs(model, inputs)
                log_ratio = kept.token - inputs["sampling_per_token_logps"]
                ratios.append(log_ratio[kept.mask].exp())
                p = kept.all.exp()
                entropies.append(-(p * kept.all.clamp(min=-1e9)).sum(-1)[kept.mask])
                widths.append(kept.all.isfinite().sum(-1)[kept.mask].float())
        ratios, widths, entropies = map(torch.cat, (ratios, widths, entropies))
        close = partial(pytest.approx, rel=1e-4)
        assert log["importance_ratio_mean"] == close(float(ratios.mean()))
        assert log["importance_ratio_max"] == close(float(ratios.max()))
        assert log["importance_ratio_max"] > 1.01
        assert log["score_centering/support_size"] == close(float(widths.mean()))
        assert log["entropy"] == close(float(entropies.mean()))
        assert log["reward"] is not None  # TRL's own are there beside them


def test_a_sampler_that_keeps_all_is_centered_with_the_top_of_it(tmp_path):
    recorder = SupportRecorder(RowKind.HEAD, top=5)
    run = trainer(tmp_path, loss="reinforce", recorder=recorder, top_k=0, seed=1)
    run.train()
    [step] = run.watch.steps
    [inputs] = step.micro
    kinds = torch.cat([one.kind for one in inputs["supports"]])
    assert (kinds == RowKind.HEAD).all()
    model = tiny_model()
    model.load_state_dict(step.weights)
    kept = kept_logprobs(model, inputs)  # over the vocabulary
    torch.testing.assert_close(kept.token, inputs["sampling_per_token_logps"], atol=1e-4, rtol=0)
    # On policy the sampler-expected score, its tail modelled, is nothing.
    loss = -(inputs["advantages"][:, None] * kept.token * kept.mask).sum() / sampled_tokens(inputs)
    loss.backward()
    for name, p in model.named_parameters():
        assert relative(step.grads[name], p.grad) < 1e-4, name
    assert run.state.log_history[0]["score_centering/uncentered"] == 0


# --- what is refused ---

BATCHES = "use_transformers_continuous_batching"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({BATCHES: True}, BATCHES),
        ({"top_k": 0}, "nothing to replay"),
        ({"top_k": 0, "recorder": SupportRecorder()}, "nothing to replay"),
        ({"generation_kwargs": {"temperature": 0.5}}, "temperature"),
        ({"generation_kwargs": {"num_return_sequences": 2}}, "num_return_sequences"),
        ({"generation_kwargs": {"return_dict_in_generate": True}}, "return_dict_in_generate"),
        ({"use_vllm": True, "top_k": 0, "top_p": 0.9}, "top_k must be above 0"),
        ({"use_vllm": True, "recorder": SupportRecorder()}, "recorder must be None"),
        *(
            ({"loss": "ipo", name: value}, name)
            for name, value in {
                "loss_type": "grpo",
                "importance_sampling_level": "sequence",
                "epsilon": 0.1,
                "epsilon_high": 0.28,
                "delta": 2.0,
                "use_bias_correction_kl": False,
                "off_policy_mask_threshold": 0.5,
                "top_entropy_quantile": 0.5,
                "entropy_coef": 0.01,
                "use_adaptive_entropy": True,
            }.items()
        ),
    ],
    ids=lambda value: re.sub(r" object at \w+", "", str(value)),  # alike in all processes
)
def test_what_cannot_work_is_refused_at_construction(tmp_path, options, match):
    with pytest.raises(ValueError, match=match):
        trainer(tmp_path, **options)


def test_a_sampler_is_told_by_whatever_truncates_it(tmp_path):
    trainer(tmp_path, top_k=0, generation_kwargs={"top_p": 0.9})
    trainer(tmp_path, top_k=0, min_p=0.1)
    with pytest.raises(ValueError, match="nothing to replay"):
        trainer(tmp_path, generation_kwargs={"top_k": 0})
    with pytest.raises(ValueError, match="nothing to replay"):
        trl_runs.ReplayGRPOTrainer(tiny_model(), trl_runs.reward)  # GRPOConfig's defaults


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_prompt_learning_is_refused(tmp_path, kind):
    config = getattr(peft, kind)(num_virtual_tokens=3, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="prompt learning"):
        trainer(tmp_path, peft_config=config)


def test_lora_on_the_head_is_refused(tmp_path):
    config = LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="lm_head"):
        trainer(tmp_path, peft_config=config)


@pytest.mark.parametrize("version", ["1.15.3", "1.17.0", "2.0"])
def test_another_trl_is_refused(monkeypatch, version):
    monkeypatch.setattr(trl, "__version__", version)
    spec = importlib.util.spec_from_file_location("other", trl_config.__file__)
    with pytest.raises(ImportError, match=rf"TRL 1\.16, got {version}"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# --- what stays as it was ---


def test_a_trained_model_generates_and_is_saved_as_ever(tmp_path):
    run = trainer(tmp_path / "run", loss="ipo", save_strategy="steps", save_steps=1)
    run.train()
    saved = Qwen3ForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-1")
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(run.model(ids).logits, saved(ids).logits)
    options = {"do_sample": False, "max_new_tokens": 4}
    assert torch.equal(run.model.generate(ids, **options), saved.generate(ids, **options))
    again = trainer(tmp_path / "run", saved, loss="ipo", max_steps=2)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    [step] = again.watch.steps
    assert_plain(step, tiny_model, "ipo")


def test_any_grpo_trainer_takes_the_core(tmp_path):
    class Louder(trl.GRPOTrainer):
        def _calculate_rewards(self, *args, **kwargs):
            return 2 * super()._calculate_rewards(*args, **kwargs)

    class Both(ReplayMixin, Louder):
        pass

    run = trainer(tmp_path, kind=Both, loss="ipo")
    run.train()
    assert run.state.log_history[0]["importance_ratio_mean"] == pytest.approx(1, abs=1e-5)


def test_the_lines_of_the_page(tmp_path):
    page = (Path(__file__).parent.parent / "docs" / "trainers.md").read_text()
    [lines] = [
        code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "GRPOConfig" in code
    ]
    usual = trainer(tmp_path).args
    names = ("output_dir", "max_steps", "max_completion_length", "use_cpu", "bf16", "report_to")
    given = {
        "model": tiny_model(),
        "reward": trl_runs.reward,
        "config": {name: getattr(usual, name) for name in names},
        "prompts": prompts(),
        "tokenizer": trl_runs.tokenizer(),
    }
    exec(lines, given)
    [*_, log] = given["trainer"].state.log_history
    assert log["importance_ratio_mean"] == pytest.approx(1, abs=1e-5)
