"""TRL's own vLLM generation and client, asked for the kept sets, before engines of vLLM's shapes.

No engine of vLLM runs here. `VLLMGeneration`, `VLLMClient` (over HTTP) and the trainer are TRL's;
`vllm_fakes` stands for what they import of vllm.
"""

import os

import pytest
import torch

from rl_loss import RowKind

pytest.importorskip("trl")

import vllm_fakes
from transformers import Qwen3ForCausalLM
from trl.generation import vllm_client, vllm_generation
from trl_runs import ENDS, assert_plain, kept_logprobs, tiny_model, trainer

from rl_loss.integrations import trl_vllm

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def environment_of_its_own():
    """TRL tells a colocated engine its rank through the environment."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def vllm(monkeypatch):
    """As if vllm 0.31 were installed."""
    for module in (vllm_generation, vllm_client, trl_vllm):
        monkeypatch.setattr(module, "is_vllm_available", lambda min_version=None: True)
    for name in ("LLM", "SamplingParams"):
        monkeypatch.setattr(vllm_generation, name, getattr(vllm_fakes, name), raising=False)
    monkeypatch.setattr(vllm_fakes.LLM, "made", [])
    monkeypatch.setattr(vllm_fakes.LLM, "ends", ENDS)


@pytest.fixture
def policy(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    return Qwen3ForCausalLM.from_pretrained(tmp_path / "model")


@pytest.fixture
def served(monkeypatch, policy):
    """A server's engine, and the options of a trainer that asks it; weights go by hand."""
    pytest.importorskip("requests")
    engine = vllm_fakes.Engine(tiny_model().eval(), ENDS)

    def update(self, metadata, named_params):
        named = list(named_params)
        assert [(name, list(one.shape)) for name, one in named] == [
            (name, shape) for name, _, shape in metadata
        ]
        engine.load_weights(named)

    monkeypatch.setattr(vllm_client.VLLMClient, "init_communicator", lambda self, device: None)
    monkeypatch.setattr(vllm_client.VLLMClient, "update_named_params", update)
    with vllm_fakes.server(engine) as address:
        yield engine, {"vllm_mode": "server", "vllm_server_base_url": address}


COLOCATED = {"vllm_mode": "colocate", "vllm_max_model_length": 64}


def check(run, loss, synced):
    """Two generations, each gone through twice: gradients, ratios and what goes with them."""
    run.train()
    assert len(run.watch.steps) == 4
    for i, step in enumerate(run.watch.steps):
        assert_plain(step, tiny_model, loss, temperature=0.7)
        [inputs] = step.micro
        assert all((one.kind == RowKind.REPLAY).all() for one in inputs["supports"])
        assert ("importance_sampling_ratio" in inputs) == (loss is None)
        if i % 2 == 0:  # on policy: the weights went over
            model = tiny_model()
            model.load_state_dict(step.weights)
            with torch.no_grad():
                kept = kept_logprobs(model, inputs, 0.7)
            torch.testing.assert_close(
                kept.token, inputs["sampling_per_token_logps"], atol=1e-4, rtol=0
            )
            if loss is None:  # TRL's correction is left nothing but rounding
                ratio = inputs["importance_sampling_ratio"]
                torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-4, rtol=0)
    assert synced() == 2 * len(list(run.model.named_parameters()))


OPTIONS = {
    "use_vllm": True,
    "num_iterations": 2,
    "max_steps": 4,
    "temperature": 0.7,
    "top_k": 8,
    "top_p": 0.95,
}


@pytest.mark.parametrize("loss", [None, "ipo"])
def test_colocated(vllm, policy, tmp_path, loss):
    run = trainer(tmp_path, policy, loss=loss, **OPTIONS, **COLOCATED)
    [engine] = vllm_fakes.LLM.made
    assert engine.options["return_sampling_mask"]
    assert engine.options["logprobs_mode"] == "processed_logprobs"
    check(run, loss, lambda: engine.engine.synced)
    assert {asked.logprobs for asked in engine.engine.asked} == {0 if loss is None else 20}
    assert {asked.top_k for asked in engine.engine.asked} == {8}
    assert vllm_generation.LLM is vllm_fakes.LLM  # as it was


@pytest.mark.parametrize("loss", [None, "ipo"])
def test_a_server(vllm, served, policy, tmp_path, loss):
    engine, where = served
    run = trainer(tmp_path, policy, loss=loss, **OPTIONS, **where)
    assert isinstance(run.vllm_generation.vllm_client, trl_vllm.ReplayVLLMClient)
    check(run, loss, lambda: engine.synced)
    assert {asked.logprobs for asked in engine.asked} == {0 if loss is None else 20}
    assert {asked.n for asked in engine.asked} == {2}  # a prompt once


def test_what_the_engine_knows_of_the_kept_ids_is_what_the_trainer_asks_for(vllm, policy, tmp_path):
    more = {"generation_kwargs": {"logprobs": 3}, "top_p": 1.0}
    run = trainer(tmp_path, policy, loss="ipo", **(OPTIONS | more), **COLOCATED)
    run.train()
    for step in run.watch.steps:
        for support in step.micro[0]["supports"]:
            known = {int(support[i : i + 1].known.sum()) for i in range(len(support))}
            assert known <= {3, 4}  # the sampled token may be another
            assert support.offsets.diff().tolist() == [8] * len(support)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (
            {"returns_mask": False, "told": {"return_sampling_mask": False}},
            "return_sampling_mask is",
        ),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode is 'raw_logprobs'"),
    ],
    ids=str,
)
def test_a_server_without_its_options_is_refused(vllm, served, policy, tmp_path, wrong, match):
    engine, where = served
    vars(engine).update(wrong)
    with pytest.raises(ValueError, match=match):
        trainer(tmp_path, policy, **OPTIONS, **where)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"returns_mask": False}, "return_sampling_mask"),
        ({"logprobs_mode": "raw_logprobs", "told": {"model": "tiny"}}, "must add up to 1"),
    ],
    ids=str,
)
def test_and_so_is_its_answer(vllm, served, policy, tmp_path, wrong, match):
    engine, where = served
    vars(engine).update(wrong)
    options = OPTIONS | {"vllm_importance_sampling_correction": False}  # TRL would ask once more
    run = trainer(tmp_path, policy, loss="ipo", **options, **where)
    with pytest.raises(ValueError, match=match):
        run.train()


def test_an_old_vllm_is_refused(vllm, monkeypatch, policy, tmp_path):
    monkeypatch.setattr(trl_vllm, "is_vllm_available", lambda min_version=None: not min_version)
    with pytest.raises(ValueError, match=r"0\.28"):
        trainer(tmp_path, policy, **OPTIONS, **COLOCATED)
    assert vllm_fakes.LLM.made == []


def test_without_vllm_trl_says_so(policy, tmp_path):
    with pytest.raises(ImportError, match="vLLM is not available"):
        trainer(tmp_path, policy, **OPTIONS, **COLOCATED)
