"""ReplayGRPOTrainer on two processes (DDP, gloo): the steps are those of one."""

import os
from functools import partial

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("peft")

import torch.distributed as dist
from ranks import run_ranks
from trl_runs import ENDS, prompts, tiny_model, tokenizer, trainer

from rl_loss import RowKind
from rl_loss.integrations.huggingface import SupportRecorder

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

LOSSES = (None, "ipo", "reinforce")


def rollouts():
    """Two completions of each prompt, recorded once, with what they were sampled from."""
    model, words, made = tiny_model().eval(), tokenizer(), {}
    torch.manual_seed(3)
    for prompt in prompts()["prompt"]:
        ids, recorder = torch.tensor([words(prompt)["input_ids"]] * 2), SupportRecorder()
        options = {"do_sample": True, "top_k": 8, "max_new_tokens": 7, "eos_token_id": ENDS}
        sequences = model.generate(ids, custom_generate=recorder.sample, **options)
        made[prompt] = [
            (one.token_ids.tolist(), one.inference_logprobs.tolist(), one.support)
            for one in recorder.completions(sequences)
        ]
    return made


def recorded(made, given, run):
    """A rollout_func that gives the k-th completion where a prompt comes for the k-th time."""
    found = [made[prompt][given[:i].count(prompt)] for i, prompt in enumerate(given)]
    ids, logprobs, supports = zip(*found, strict=True)
    return {
        "prompt_ids": tokenizer()(text=given)["input_ids"],
        "completion_ids": [list(one) for one in ids],
        "logprobs": list(logprobs),
        "supports": list(supports),
    }


def run_of(folder, loss, batch, made, **options):
    run = trainer(
        folder,
        loss=loss,
        rollout_func=partial(recorded, made),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=2,
        max_steps=2,
        num_iterations=2,
        **options,
    )
    run.train()
    return run


def own(logs):
    """What a run logged of its tokens, which does not depend on how they were spread."""
    names = (
        "importance_ratio_mean",
        "importance_ratio_max",
        "mismatch_kl",
        "score_centering/mask_tv",
    )
    return [
        {name: log[name] for name in (*names, "entropy")} for log in logs if "mismatch_kl" in log
    ]


def on_a_rank(rank, folder, wanted):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    expected, made = torch.load(wanted), rollouts()
    for loss in LOSSES:
        run = run_of(folder, loss, 2, made)
        assert run.accelerator.num_processes == 2
        assert isinstance(run.model_wrapped, torch.nn.parallel.DistributedDataParallel)
        assert len(run.watch.steps) == 2
        for step, (grads, _) in zip(run.watch.steps, expected[loss][0], strict=True):
            assert len(step.micro) == 2
            largest = max(float(grad.abs().max()) for grad in grads.values())
            for name, grad in grads.items():
                torch.testing.assert_close(step.grads[name], grad, atol=1e-5 * largest, rtol=1e-4)
        for got, one in zip(own(run.state.log_history), expected[loss][1], strict=True):
            assert got == pytest.approx(one, rel=1e-4, abs=1e-7)
    # With generations of their own: each rank other tokens, over their own kept sets; and as the
    # ranks of a sharded model would, which call it equally often, whichever has come to its ends.
    options = {"per_device_train_batch_size": 2, "learning_rate": 0.0, "max_steps": 4}
    run = trainer(folder, loss="ipo", max_completion_length=20, seed=5, **options)
    run._dist.fsdp_version = 2
    calls, forward = [], run.model.model.forward

    def counted(*args, **kwargs):
        calls.append(run.model.training)
        return forward(*args, **kwargs)

    run.model.model.forward = counted
    run.train()
    widths = [step.micro[0]["completion_ids"].shape[1] for step in run.watch.steps]
    both = [None, None]
    dist.all_gather_object(both, (len(calls), sum(widths)))
    assert both[0][0] == both[1][0]
    assert both[0][1] != both[1][1]
    for step in run.watch.steps:
        [inputs] = step.micro
        assert all((one.kind == RowKind.REPLAY).all() for one in inputs["supports"])
    assert run.state.log_history[0]["importance_ratio_max"] == pytest.approx(1, abs=1e-4)
    tokens = [None, None]
    dist.all_gather_object(tokens, inputs["completion_ids"].tolist())
    assert tokens[0] != tokens[1]


def test_two_processes_and_accumulation_are_one_process(tmp_path):
    made, wanted = rollouts(), {}
    for loss in LOSSES:
        run = run_of(tmp_path, loss, 4, made)
        steps = [(step.grads, step.weights) for step in run.watch.steps]
        wanted[loss] = steps, own(run.state.log_history)
    torch.save(wanted, tmp_path / "wanted.pt")
    run_ranks(on_a_rank, 2, str(tmp_path), str(tmp_path / "wanted.pt"))
