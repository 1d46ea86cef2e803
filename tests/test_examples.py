"""The example runs with every option; slow: it learns, for three seeds."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

for package in ("transformers", "matplotlib", "rich"):
    pytest.importorskip(package)

EXAMPLE = Path(__file__).parents[1] / "examples" / "reverse_text.py"


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
