"""SupportRecorder: what `generate` samples from is recorded, and replayed to a ratio of 1."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from factory import TINY_MODEL

from rl_loss import LossInputs, RowKind, Support, aligned_rows, fused_lm_head, icepop_loss
from rl_loss.integrations.huggingface import SupportRecorder, logit_options

transformers = pytest.importorskip("transformers", minversion="4.56")

V, PAD, EOS = (TINY_MODEL[name] for name in ("vocab_size", "pad_token_id", "eos_token_id"))
PROMPTS = torch.randint(3, V, (6, 5), generator=torch.Generator().manual_seed(1))
FLOOR = 8 * torch.finfo(torch.float32).eps  # of log-probabilities, beside twice torch's own error
RATIO_ERROR = 1e-5  # how near to 1 a ratio of equal weights is promised to be
SAMPLERS = {
    "top_p": {"temperature": 0.8, "top_p": 0.9, "top_k": 0},
    "top_k": {"temperature": 0.8, "top_p": 1.0, "top_k": 7},
    "both, with a penalty": {"top_p": 0.9, "top_k": 30, "repetition_penalty": 1.3},
    "full": {"temperature": 0.8, "top_p": 1.0, "top_k": 0},
}


def make(family="Qwen3", ends=0.0):
    """A tiny model of random weights; with `ends` its head favours the end of the sequence."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**TINY_MODEL, initializer_range=0.2)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    if ends:
        model.lm_head = torch.nn.Linear(32, V)
        torch.nn.init.normal_(model.lm_head.weight, std=0.3)
        torch.nn.init.zeros_(model.lm_head.bias)
        model.lm_head.bias.data[EOS] = ends
    return model


def sample(model, recorder, **options):
    torch.manual_seed(2)
    options = {"max_new_tokens": 9, "do_sample": True, **options}
    return model.generate(PROMPTS, custom_generate=recorder.sample, **options)


def with_scores(model, recorder, **options):
    """The sequences, and the logits `[steps, B, V]` that they were sampled from."""
    output = sample(model, recorder, return_dict_in_generate=True, output_scores=True, **options)
    return output.sequences, torch.stack(output.scores)


# --- what is recorded ---


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_recorded_sets_are_those_sampled_from(family, sampler):
    recorder = SupportRecorder()
    sequences, scores = with_scores(make(family), recorder, **SAMPLERS[sampler])
    recorded = recorder.finish(sequences)
    exact = scores.double().log_softmax(-1)
    kept = exact.isfinite()
    bound = 2 * float((scores.log_softmax(-1).double() - exact)[kept].abs().max()) + FLOOR
    assert recorded.loss_mask[:, 5:].any()
    for b, t in recorded.loss_mask.nonzero().tolist():
        row = b * sequences.shape[1] + t
        entry = recorded.support[row : row + 1]
        ids = kept[t - 5, b].nonzero()[:, 0]
        assert entry.kind.tolist() == [RowKind.REPLAY]
        assert entry.sampler_tail_mass.tolist() == [0.0]
        assert entry.ids.tolist() == ids.tolist()
        assert (entry.sampler_logprobs - exact[t - 5, b, ids]).abs().max() <= bound
        own = exact[t - 5, b, sequences[b, t]]
        assert abs(float(recorded.inference_logprobs[b, t] - own)) <= bound


def test_recording_does_not_change_what_is_sampled():
    model, options = make(), {"do_sample": True, "top_p": 0.9, "max_new_tokens": 9}
    torch.manual_seed(2)
    plain = model.generate(PROMPTS, **options)
    assert torch.equal(sample(model, SupportRecorder(), **options), plain)


@pytest.mark.parametrize("kind", [RowKind.REPLAY, RowKind.HEAD, RowKind.DRAWS])
def test_what_follows_the_end_of_a_sequence_is_not_recorded(kind):
    recorder = SupportRecorder(kind, top=4, draws=3)
    sequences, scores = with_scores(make(ends=4.0), recorder, **SAMPLERS["full"])
    support, logprobs, mask = recorder.finish(sequences)
    generated = sequences[:, 5:]
    before = (generated == EOS).cumsum(1) - (generated == EOS).long()
    expected = torch.cat([torch.zeros_like(PROMPTS).bool(), before == 0], 1)
    assert torch.equal(mask, expected)
    assert 0 < int((~mask[:, 5:]).sum()) < generated.numel()  # some ended early, not all at once
    assert torch.equal(support.kind.view(mask.shape) == kind, mask)
    assert (support.kind.view(mask.shape)[~mask] == RowKind.NONE).all()
    assert (logprobs[~mask] == 0).all()
    widths = support.offsets.diff().view(mask.shape)
    assert (widths[~mask] == 0).all()
    if kind == RowKind.DRAWS:
        assert (widths[mask] == 3).all()
    if kind == RowKind.HEAD:
        logits = scores.transpose(0, 1)[mask[:, 5:]]
        rows = support.select(mask.flatten())
        for row, q in enumerate(logits.double().softmax(-1)):
            entry = rows[row : row + 1]
            assert set(q.topk(4).indices.tolist()) <= set(entry.ids.tolist())
            rest = torch.ones(V, dtype=torch.bool).index_fill(0, entry.ids.long(), False)
            tail, plain = q[rest].sum(), logits[row].softmax(-1)[rest].sum()
            bound = 2 * float((plain.double() - tail).abs()) + FLOOR
            assert abs(float(entry.sampler_tail_mass - tail)) <= bound


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", [RowKind.REPLAY, RowKind.HEAD, RowKind.DRAWS])
def test_the_default_dtype_does_not_matter(kind, default):
    """Bit for bit: where sequences end early, too."""
    model, records = make(ends=4.0), []
    sampler = SAMPLERS["top_p" if kind == RowKind.REPLAY else "full"]
    for dtype in (torch.float32, default):
        torch.set_default_dtype(dtype)
        try:
            recorder = SupportRecorder(kind, top=4, draws=3)
            sequences = sample(model, recorder, **sampler)
            support, logprobs, mask = recorder.finish(sequences)
        finally:
            torch.set_default_dtype(torch.float32)
        assert logprobs.dtype == torch.float32
        packed = support.to_packed()
        records.append([sequences, logprobs, mask, support.ids, support.known, *packed])
    assert not records[0][2][:, 5:].all()
    for expected, got in zip(*records, strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", [RowKind.REPLAY, RowKind.HEAD, RowKind.DRAWS])
@pytest.mark.parametrize("checked", [True, False])
def test_completions_are_the_rows_of_finish_without_prompt_and_padding(kind, checked):
    recorder = SupportRecorder(kind, top=4, draws=3)
    sequences = sample(make(ends=4.0), recorder, **SAMPLERS["full"])
    recorded, (batch, length) = recorder.finish(sequences), sequences.shape
    completions = recorder.completions(sequences if checked else None)
    assert len(completions) == batch
    lengths = recorded.loss_mask.sum(1).tolist()
    assert len(set(lengths)) > 1  # some ended early
    for b, (token_ids, support, inference_logprobs) in enumerate(completions):
        own = slice(5, 5 + lengths[b])
        assert token_ids.tolist() == sequences[b, own].tolist()
        assert (token_ids[:-1] != EOS).all()
        assert torch.equal(inference_logprobs, recorded.inference_logprobs[b, own])
        expected = recorded.support[b * length : (b + 1) * length][own]
        assert (support.kind == kind).all()
        for one, other in zip(support.to_packed(), expected.to_packed(), strict=True):
            assert torch.equal(one, other)
        for tensor in (token_ids, inference_logprobs):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
    # And back: as rows of all tokens, and of the completions alone.
    supports = [one.support for one in completions]
    for rows, mask in [
        (Support.stack(supports, length, start=5), recorded.loss_mask),
        (Support.stack(supports), recorded.loss_mask[:, 5 : 5 + max(lengths)]),
    ]:
        assert torch.equal(rows.kind.view(mask.shape) == kind, mask)
        held, wanted = rows.select(mask.flatten()), Support.cat(supports)
        for one, other in zip(held.to_packed(), wanted.to_packed(), strict=True):
            assert torch.equal(one, other)


def test_completions_of_a_step_that_generate_took_back():
    """What follows the end of all sequences belongs to none of them."""
    recorder = SupportRecorder()
    sequences = sample(make(ends=4.0), recorder, max_new_tokens=40, **SAMPLERS["full"])
    assert sequences.shape[1] < 45  # all ended
    expected = [one.token_ids.tolist() for one in recorder.completions(sequences)]
    assert all(ids[-1] == EOS for ids in expected)
    recorder._scores = torch.zeros(len(sequences), V)
    ended = torch.ones(len(sequences), dtype=torch.bool)
    recorder.record(torch.cat([sequences, sequences[:, -1:]], 1), ended)
    for completions in (recorder.completions(sequences), recorder.completions()):
        assert [one.token_ids.tolist() for one in completions] == expected
        assert [len(one.support) for one in completions] == [len(ids) for ids in expected]


class StopsAt(transformers.StoppingCriteria):
    """Ends a row at one token, as a stop string does."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 3 == 0


def test_rows_that_another_criterion_ends():
    recorder = SupportRecorder()
    sequences = sample(make(), recorder, top_p=0.9, stopping_criteria=[StopsAt()])
    recorded = recorder.finish(sequences)
    ended = ((sequences[:, 5:] % 3 == 0) | (sequences[:, 5:] == EOS)).long()
    assert torch.equal(recorded.loss_mask[:, 5:], ended.cumsum(1) - ended == 0)


def test_several_sequences_a_prompt_and_a_second_call():
    recorder, model = SupportRecorder(), make()
    sample(model, recorder, top_p=0.9)
    sequences = sample(model, recorder, top_p=0.9, num_return_sequences=3, max_new_tokens=4)
    recorded = recorder.finish(sequences)
    assert recorded.loss_mask.shape == (18, 9)
    # A loop that looks for the end late takes steps back.
    shorter = recorder.finish(sequences[:, :-1])
    assert torch.equal(shorter.inference_logprobs, recorded.inference_logprobs[:, :-1])
    assert len(shorter.support) == 18 * 8


def test_a_row_that_does_not_fit_is_failed():
    recorder = SupportRecorder(capacity=20)
    sequences = sample(make(), recorder, top_k=0, max_new_tokens=2)
    recorded = recorder.finish(sequences)
    assert (recorded.support.kind.view(6, 7)[:, 5:] == RowKind.FAILED).any()
    rows = aligned_rows(sequences, recorded.loss_mask, support=recorded.support)
    with pytest.raises(ValueError, match="is active but the sampler failed to record it"):
        rows.support.validate(rows.labels, V, active=rows.active)


# --- misuse ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_sample": False}, "do_sample must be True"),
        ({"num_beams": 2}, "num_beams must be 1, got 2"),
    ],
)
def test_other_searches_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        sample(make(), SupportRecorder(), **options)


def test_among_the_logits_processors_it_is_refused():
    """There, `generate` would truncate behind it."""
    recorder = SupportRecorder()
    processors = transformers.LogitsProcessorList([recorder])
    message = "logits_processor must not hold the SupportRecorder"
    with pytest.raises(ValueError, match=message):
        make().generate(PROMPTS, logits_processor=processors, do_sample=True, top_p=0.9)
    with pytest.raises(ValueError, match=message):  # in both places
        sample(make(), recorder, logits_processor=processors)


def test_sequences_that_were_not_recorded_are_refused():
    recorder = SupportRecorder()
    with pytest.raises(ValueError, match=r"sequences: nothing was recorded"):
        recorder.finish(PROMPTS)
    with pytest.raises(ValueError, match=r"sequences: nothing was recorded"):
        recorder.completions()
    sequences = sample(make(), recorder, max_new_tokens=3)
    changed = sequences.clone()
    changed[3, 6] += 1
    for read in (recorder.finish, recorder.completions):
        with pytest.raises(ValueError, match=r"sequences\[3\] is not the sequence"):
            read(changed)
        with pytest.raises(ValueError, match=r"sequences must be \[6, 8\].*got \(5, 8\)"):
            read(sequences[:5])
        with pytest.raises(ValueError, match=r"sequences must be \[6, 8\].*got \(6, 5\)"):
            read(PROMPTS)
        with pytest.raises(ValueError, match=r"sequences must be .*got list"):
            read([1])


@pytest.mark.parametrize("kind", [RowKind.HEAD, RowKind.DRAWS])
def test_rows_over_the_vocabulary_are_refused_where_the_sampler_truncates(kind):
    # A processor of the caller's own, of which no option tells.
    few = transformers.LogitsProcessorList([transformers.TopKLogitsWarper(9)])
    with pytest.raises(ValueError, match=f"kind must be REPLAY .* got {kind.name}, .*step 0 keeps"):
        sample(make(), SupportRecorder(kind), top_p=1.0, top_k=0, logits_processor=few)


def test_options_of_another_name_are_refused():
    with pytest.raises(ValueError, match=r"options of capture_support, got \['capcity'\]"):
        SupportRecorder(capcity=3)


@pytest.mark.parametrize("kind", [RowKind.NONE, RowKind.FAILED, "replay"])
def test_kinds_that_record_nothing_are_refused(kind):
    with pytest.raises(ValueError, match="kind must be REPLAY, HEAD or DRAWS"):
        SupportRecorder(kind)


# --- the closed loop: sample, record, replay ---


def train(model, sequences, recorded, temperature=0.8):
    rows = aligned_rows(
        sequences,
        recorded.loss_mask,
        support=recorded.support,
        inference_logprobs=recorded.inference_logprobs,
    )
    rows.support.validate(rows.labels, V, rows.active, rows.per_token["inference_logprobs"])
    own = model.get_base_model() if hasattr(model, "get_base_model") else model
    hidden = own.base_model(sequences, use_cache=False).last_hidden_state
    output = fused_lm_head(
        hidden,
        model.get_output_embeddings().weight,
        rows.labels,
        rows.support,
        temperature=temperature,
        active=rows.active,
        **logit_options(model),
    )
    advantages = torch.randn(sequences.shape, generator=torch.Generator().manual_seed(3))
    inputs = LossInputs.from_head(output, advantages=advantages, **rows.per_token)
    return icepop_loss(inputs, kl_tau=1e-3), inputs


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
@pytest.mark.parametrize(
    ("sampler", "kind"),
    [
        ("top_p", RowKind.REPLAY),
        ("top_k", RowKind.REPLAY),
        ("full", RowKind.HEAD),
        ("full", RowKind.DRAWS),
    ],
)
def test_the_closed_loop(family, sampler, kind):
    """Equal weights: every importance ratio is 1, whatever the sampler left out."""
    model, recorder = make(family), SupportRecorder(kind)
    sequences = sample(model, recorder, **SAMPLERS[sampler])
    out, inputs = train(model, sequences, recorder.finish(sequences))
    mask = inputs.loss_mask
    ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).exp()[mask]
    assert len(ratio) > 20
    assert (ratio - 1).abs().max() < RATIO_ERROR
    metrics = out.metrics
    assert abs(metrics["importance_ratio_mean"] - 1) < RATIO_ERROR
    assert abs(metrics["importance_ratio_max"] - 1) < RATIO_ERROR
    assert metrics["is_masked"] == 0
    assert metrics["mismatch_kl"] < RATIO_ERROR**2  # r - 1 - log r
    assert metrics["score_centering/uncentered"] == 0
    out.loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert model.get_output_embeddings().weight.grad.abs().max() > 0


def test_the_closed_loop_of_a_head_that_peft_trains_whole():
    """LoRA below, `modules_to_save` on the head: both get a gradient, the frozen head none."""
    peft = pytest.importorskip("peft", minversion="0.19")
    options = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    torch.manual_seed(3)
    model = peft.get_peft_model(make(), peft.LoraConfig(**options, init_lora_weights=False))
    head = model.get_output_embeddings()
    head.weight.data += torch.randn_like(head.weight) / 10  # no longer the frozen one's
    recorder = SupportRecorder()
    sequences = sample(model, recorder, **SAMPLERS["top_p"])
    out, inputs = train(model, sequences, recorder.finish(sequences))
    ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).exp()[inputs.loss_mask]
    assert len(ratio) > 20
    assert (ratio - 1).abs().max() < RATIO_ERROR
    out.loss.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert head.modules_to_save["default"].weight.grad.abs().max() > 0
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}


def test_the_closed_loop_of_a_trainer_that_carries_lists():
    """Completions shuffled one by one, then the rows of their tokens alone: nothing is shifted."""
    model, recorder = make(ends=2.0), SupportRecorder()
    sequences = sample(model, recorder, **SAMPLERS["top_p"])
    completions, order = recorder.completions(sequences), [4, 0, 5, 2, 1, 3]
    completions, sequences = [completions[i] for i in order], sequences[order]
    length = sequences.shape[1] - 5
    lengths = torch.tensor([len(one.token_ids) for one in completions])
    active = torch.arange(length) < lengths[:, None]
    assert not active.all()
    hidden = model.base_model(sequences, use_cache=False).last_hidden_state[:, 4:-1]
    out = fused_lm_head(
        hidden,
        model.get_output_embeddings().weight,
        sequences[:, 5:],
        Support.stack([one.support for one in completions], length),
        temperature=0.8,
        active=active,
        **logit_options(model),
    )
    q = torch.nn.utils.rnn.pad_sequence([one.inference_logprobs for one in completions], True)
    ratio = (out.logprobs - q).exp()[active]
    assert len(ratio) > 20
    assert (ratio - 1).abs().max() < RATIO_ERROR


def test_without_replay_or_at_another_temperature_the_loop_does_not_close():
    """What the test above would miss if the sampler left nothing out."""
    model, recorder = make(), SupportRecorder()
    sequences = sample(model, recorder, **SAMPLERS["top_p"])
    recorded = recorder.finish(sequences)
    hotter, _ = train(model, sequences, recorded, temperature=1.0)
    assert abs(hotter.metrics["importance_ratio_mean"] - 1) > 1e-2
    support = recorded.support.empty(len(recorded.support))
    rows = aligned_rows(sequences, recorded.loss_mask, support=support)
    hidden = model.base_model(sequences, use_cache=False).last_hidden_state
    weight, labels = model.get_output_embeddings().weight, rows.labels
    over_v = fused_lm_head(hidden, weight, labels, temperature=0.8, active=rows.active).logprobs
    gap = over_v[:, :-1] - recorded.inference_logprobs[:, 1:]
    assert gap[rows.active[:, :-1]].exp().mean() < 0.99


def test_the_example(monkeypatch, capsys, tmp_path):
    path = Path(__file__).parents[1] / "examples" / "generate.py"
    spec = importlib.util.spec_from_file_location("generate", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    make("Llama").save_pretrained(tmp_path / "model")
    for options in ([], ["--model", str(tmp_path / "model"), "--top-k", "9"]):
        monkeypatch.setattr(sys, "argv", ["generate.py", *options])
        module.main()
        printed = dict(re.findall(r"^(\S+) +(\S+)$", capsys.readouterr().out, re.MULTILINE))
        assert float(printed["importance_ratio_mean"]) == pytest.approx(1, abs=RATIO_ERROR)
        assert float(printed["importance_ratio_max"]) == pytest.approx(1, abs=RATIO_ERROR)
        assert float(printed["score_centering/uncentered"]) == 0
        assert 1 < float(printed["score_centering/support_size"]) < 512


@pytest.mark.parametrize("kind", [RowKind.HEAD, RowKind.DRAWS])
@pytest.mark.parametrize(
    ("option", "value"), [("top_p", 0.999), ("top_k", 90), ("min_p", 0.01), ("top_h", 0.99)]
)
def test_a_truncation_is_refused_where_rows_are_normalised_over_v(kind, option, value):
    if not hasattr(transformers.GenerationConfig(), option):
        pytest.skip(f"this transformers has no {option}")
    options = {"top_p": 1.0, "top_k": 0, option: value}
    with pytest.raises(ValueError, match=rf"{option} must be .* with {kind.name} rows.* {value}"):
        sample(make(), SupportRecorder(kind), **options)
    sample(make(), SupportRecorder(kind), top_p=1.0, top_k=0)


def test_another_decoding_loop_is_refused():
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens must be left out"):
        sample(make(), SupportRecorder(), prompt_lookup_num_tokens=2)
