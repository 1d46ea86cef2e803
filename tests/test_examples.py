"""The examples run with every option, and on several ranks alike; slow: they learn."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

for package in ("transformers", "matplotlib", "rich"):
    pytest.importorskip(package)

EXAMPLE = Path(__file__).parents[1] / "examples" / "reverse_text.py"
LOOP = EXAMPLE.with_name("fsdp_loop.py")


def run(monkeypatch, capsys, tmp_path, *options: str) -> str:
    spec = importlib.util.spec_from_file_location("reverse_text", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    out = tmp_path / "curves.png"
    monkeypatch.setattr(sys, "argv", ["reverse_text.py", "--out", str(out), *options])
    module.main()
    assert out.stat().st_size > 10_000
    return capsys.readouterr().out


QUICK = ("--steps", "2", "--warmup-steps", "2", "--prompts", "4", "--samples", "2")


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--loss", "ipo", "--no-centering"),
        ("--loss", "reinforce", "--sampler", "int8", "--stale", "1"),
        ("--top-k", "16"),
        ("--top-p", "1.0"),
    ],
    ids=str,
)
def test_options(monkeypatch, capsys, tmp_path, options):
    printed = run(monkeypatch, capsys, tmp_path, *QUICK, *options)
    steps = re.findall(r"^step +\d+ .*uncentered (\S+) .*tail_mass (\S+)", printed, re.MULTILINE)
    assert steps == [("0", "0")] * 2


def test_any_model_on_disk(monkeypatch, capsys, tmp_path):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        pad_token_id=0,
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "model")
    printed = run(monkeypatch, capsys, tmp_path, *QUICK, "--model", str(tmp_path / "model"))
    assert "reward at the end" in printed


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns(monkeypatch, capsys, tmp_path, seed):
    printed = run(monkeypatch, capsys, tmp_path, "--seed", str(seed))
    first, last = map(float, re.findall(r"^reward .*: (\S+)$", printed, re.MULTILINE))
    assert first < 0.35
    assert last > 0.75
    steps = re.findall(r"^step +\d+ .*uncentered (\S+) .*tail_mass (\S+)", printed, re.MULTILINE)
    assert steps == [("0", "0")] * 80


# --- in TRL's trainer ---


def replay(monkeypatch, capsys, *options: str) -> tuple[list[str], float, float]:
    """What `trl_replay.py` prints of its steps, and the rewards before and after."""
    pytest.importorskip("trl")
    path = EXAMPLE.with_name("trl_replay.py")
    spec = importlib.util.spec_from_file_location("trl_replay", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["trl_replay.py", *options])
    module.main()
    printed = capsys.readouterr().out
    first, last = map(float, re.findall(r"^reward .*: (\S+)$", printed, re.MULTILINE))
    return re.findall(r"^step .*$", printed, re.MULTILINE), first, last


@pytest.mark.parametrize("options", [(), ("--loss", "trl"), ("--loss", "ipo", "--top-k", "4")])
def test_replay_in_trl(monkeypatch, capsys, options):
    steps, *_ = replay(monkeypatch, capsys, "--steps", "2", "--length", "4", *options)
    assert len(steps) == 2
    for step in steps:
        ratio = re.search(r"importance_ratio_mean (\S+)", step)
        assert ratio is None if "trl" in options else ratio[1] == "1.000"


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["icepop", "trl"])
def test_it_learns_in_trl(monkeypatch, capsys, loss):
    _, first, last = replay(monkeypatch, capsys, "--loss", loss, "--iterations", "2")
    assert first < 0.15
    assert last > 0.8


# --- on several ranks ---

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"
)
RANKS = [(2, 1), (2, 2)]  # ranks, and how many of them split the vocabulary


def curve(ranks: int, tp: int, *options: str, gpus: bool = False) -> list[str]:
    """The lines that `fsdp_loop.py` prints; 0 ranks: one process without torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(launcher if ranks else []), str(LOOP), "--tp", str(tp), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
    assert done.returncode == 0, done.stderr
    return re.findall(r"^(?:reward|step) .*$", done.stdout, re.MULTILINE)


def alike(cases: list[tuple[int, int]], *options: str, gpus: bool = False) -> list[str]:
    """What one process prints, and asserts that ranks print the same."""
    one = curve(0, 1, *options, gpus=gpus)
    assert one[-1].startswith("reward at the end")
    for ranks, tp in cases:
        assert curve(ranks, tp, *options, gpus=gpus) == one
    return one


QUICK_RANKS = ("--steps", "3", "--warmup-steps", "3", "--prompts", "4", "--samples", "4")


@needs_gloo
def test_ranks_print_the_curve_of_one_process():
    alike(RANKS, *QUICK_RANKS)


@pytest.mark.slow
@needs_gloo
def test_one_rank_and_ranks_of_both_kinds_print_it_too():
    alike([(1, 1), (3, 1), (4, 2)], *QUICK_RANKS)


@pytest.mark.slow
@needs_gloo
def test_ranks_learn_as_one_process_does():
    first, *_, last = (float(line.rpartition(" ")[2]) for line in alike(RANKS))
    assert first < 0.35
    assert last > 0.9


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_ranks_on_gpus_print_the_curve_of_one():
    alike([(1, 1), *RANKS], "--steps", "10", "--warmup-steps", "50", gpus=True)
