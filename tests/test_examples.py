"""The examples run with every option, and on several ranks alike; slow: they learn."""

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from math import isnan
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_it_runs_on_a_gpu(monkeypatch, capsys, tmp_path):
    printed = run(monkeypatch, capsys, tmp_path, *QUICK, "--device", "cuda", "--sampler", "fp8")
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


# --- where a policy drifts ---


def example(monkeypatch, name: str):
    """A module of the examples, which find each other as scripts do."""
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    return importlib.import_module(name)


def drift(monkeypatch, tmp_path, *options: str) -> dict[tuple, dict[str, dict[str, list[float]]]]:
    """What `drift.py` writes, by rule, kind of rows, centering, sigma and top_p."""
    module = example(monkeypatch, "drift")
    out = tmp_path / "drift"
    monkeypatch.setattr(sys, "argv", ["drift.py", "--out", str(out), *options])
    module.main()
    arms = json.loads(out.with_suffix(".json").read_text())["arms"]
    names = ("rule", "centering", "size", "kl_tau", "ref_tau")
    return {
        (arm["group"], *(arm["way"][name] for name in names), arm["kind"], arm["sigma"]): arm
        for arm in arms
        if not arm["redrawn"]
    }


def test_the_expected_drift_is_what_theory_says(monkeypatch, tmp_path, capsys):
    arms = drift(monkeypatch, tmp_path, "--seeds", "2", "--steps", "4", "--batch", "8")
    assert (tmp_path / "drift.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert printed.count("| reinforce ") == 4 + 4 + 8 + 8 + 6 + 24
    moved = {key: max(arm["expected"]["drift"]) for key, arm in arms.items() if "expected" in arm}
    for (group, rule, centering, _, kl_tau, _, kind, sigma), kl in moved.items():
        if kl_tau:
            continue
        replayed = kind == "REPLAY"
        biased = {
            "rules": rule == "reinforce" or (sigma == 1 and rule in ("TIS", "icepop")),
            "controls": False,  # p = q
            "kept set": not replayed or (rule == "reinforce" and sigma > 0),
            "head": rule == "reinforce" or sigma == 1,  # icepop rejects at 1, and in the tail
            "KL": rule == "reinforce" or sigma == 1,
        }
        if (centering and group != "head") or not biased[group]:
            assert kl < 2e-6, (group, rule, centering, kind, sigma)
        elif group not in ("head", "KL") and rule == "reinforce" and sigma > 0:
            assert kl > 5e-5, (group, rule, centering, kind, sigma)
    # The sampler KL pulls p after a sampler that goes before it: a way that grows with kl_tau, so
    # that the drift grows with its square, under any rule and for all centering.
    for rule in ("reinforce", "icepop"):
        for sigma, taus in ((0.3, (0.1, 1.0)), (1.0, (0.01, 0.1))):
            one, ten = (moved["KL", rule, True, 16, tau, 0.0, "REPLAY", sigma] for tau in taus)
            assert one > 4e-6
            assert 90 < ten / one < 120
    # More top ids leave less; draws leave noise alone, the less of it the more there are.
    tops = [moved["head", "reinforce", True, size, 0.0, 0.0, "HEAD", 1.0] for size in (1, 2, 4, 8)]
    assert tops == sorted(tops, reverse=True)


def test_the_part_of_a_seed_does_not_depend_on_the_others(monkeypatch, tmp_path, capsys):
    quick = ("--groups", "rules", "--steps", "3", "--batch", "8")
    one, two = (drift(monkeypatch, tmp_path, *quick, "--seeds", n) for n in ("1", "2"))
    for key, arm in one.items():
        assert arm["sampled"]["drift"] == two[key]["sampled"]["drift"][:1]


@pytest.mark.slow
def test_what_is_told_of_drift(monkeypatch, tmp_path, capsys):
    arms = drift(monkeypatch, tmp_path, "--groups", "rules")

    def ends(centering: bool, kind: str, name: str) -> float:
        size = 16 if centering else 0
        values = arms["rules", "reinforce", centering, size, 0.0, 0.0, kind, 0.3]["sampled"][name]
        return sum(values) / len(values)

    assert ends(False, "NONE", "drift") > 1.5
    assert ends(False, "NONE", "p_best") < 0.05
    assert ends(True, "REPLAY", "drift") < 0.005
    assert ends(True, "REPLAY", "p_best") > 0.98


# --- arms side by side ---

SMALL = ("--model", "tiny", "--device", "cpu", "--prompts", "4", "--samples", "2", "--steps", "3")
SMALL += ("--warmup-steps", "2", "--evaluated", "4", "--length", "3")


def arms(monkeypatch, out: Path, *options: str) -> dict:
    """What `arms.py` writes."""
    module = example(monkeypatch, "arms")
    monkeypatch.setattr(sys, "argv", ["arms.py", *SMALL, "--out", str(out), *options])
    module.main()
    return json.loads(out.read_text()) if out.exists() else {}


def test_arms_are_what_they_say(monkeypatch, tmp_path, capsys):
    out = tmp_path / "arms.json"
    made = arms(monkeypatch, out, "--seeds", "0")
    runs = {run["arm"]: run for run in made["runs"]}
    assert list(runs) == list(example(monkeypatch, "arm_runs").ARMS)
    for name, run in runs.items():
        curves = run["curves"]
        assert all(len(values) == 3 for values in curves.values())
        assert curves["uncentered"] == [1.0 if name == "no-replay" else 0.0] * 3
        assert all(run["milliseconds"][part] > 0 for part in ("rollout", "trunk", "head, loss"))
    # One warm-up, one seed: the first rollout of equal samplers is the same.
    first = {name: run["curves"]["reward"][0] for name, run in runs.items()}
    assert first["replay"] == first["top-k"] == first["no-replay"] == first["stale"]
    # Without replay every ratio is low by the kept mass, and a coarser sampler is further off.
    ratios = {name: run["curves"]["ratio"][0] for name, run in runs.items()}
    assert abs(ratios["replay"] - 1) < 0.01
    assert ratios["no-replay"] < 0.98
    mismatch = {name: run["curves"]["mismatch_kl"][0] for name, run in runs.items()}
    assert mismatch["fp8"] > 3 * mismatch["replay"]
    assert list(made["heads"]) == ["ours", "one-pass", "padded", "full"]

    picture = example(monkeypatch, "arms_picture")
    monkeypatch.setattr(sys, "argv", ["arms_picture.py", str(out)])
    picture.main()
    assert (tmp_path / "arms.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert all(printed.count(f"| {run['about']} ") == 2 for run in runs.values())
    # Differences are of equal seeds, and ranges of all steps.
    (table, *_), (line,) = (
        [text for text in printed.splitlines() if start in text]
        for start in ("| (d) fp8 sampler  ", "| reward ")
    )
    fp8, base = (sum(runs[name]["curves"]["reward"]) / 3 for name in ("fp8", "replay"))
    assert f"| {fp8:.3f}" in table
    assert f"| {fp8 - base:.3f} " in table
    (pair,) = (text for text in printed.splitlines() if "| fp8-kl - fp8 " in text)
    kl = sum(runs["fp8-kl"]["curves"]["reward"]) / 3
    assert f"| {kl - fp8:.3f} " in pair
    assert f"| {int(kl > fp8)} of 1 " in pair
    steps = runs["replay"]["curves"]["reward"]
    assert f"| {min(steps):.4g}, {max(steps):.4g} " in line


def test_samplers_are_told_by_how_far_off_they_are(monkeypatch):
    b = torch.zeros(1, 2, 16, dtype=torch.float64)
    b[0, 1, 3] = -1.0
    q = 1 / (15 + torch.tensor(-1.0, dtype=torch.float64).exp())  # of the others, at sigma 1
    ratio, kl = 1 / 16 / (1 - 15 * q), 15 * q * (16 * q).log()
    kl += (1 - 15 * q) * (16 * (1 - 15 * q)).log()
    one, ten = example(monkeypatch, "drift").samplers(b)
    assert ten["mismatch_kl"] == f"{kl / 2:.3f}"  # nothing in the other context
    assert ten["p / q of the best action"] == f"{ratio:.1f} to {ratio:.1f}"
    assert float(one["mismatch_kl"]) < float(ten["mismatch_kl"])


def test_every_arm_trains_its_own_way(monkeypatch, tmp_path):
    options = "--seeds 0 --no-heads --steps 6 --prompts 16 --samples 4 --lr 0.01"
    options += " --warmup-steps 10 --warmup-lr 2e-3"
    made = arms(monkeypatch, tmp_path / "arms.json", *options.split())
    curves = {run["arm"]: run["curves"] for run in made["runs"]}
    mismatch = {arm: own["mismatch_kl"] for arm, own in curves.items()}

    def apart(one: str, other: str) -> int:
        """The first step at which two arms differ; 6 if none does."""
        pairs = zip(mismatch[one], mismatch[other], strict=True)
        return next((step for step, (a, b) in enumerate(pairs) if a != b), 6)

    # What differs in the sampler or the support shows at once, what differs in the loss thereafter.
    assert apart("fp8", "replay") == apart("no-replay", "replay") == 0
    assert apart("fp8-reinforce", "fp8") == apart("fp8-reinforce", "fp8-reinforce-plain") == 1
    assert apart("fp8-kl", "fp8") == apart("stale-kl", "stale") == 1
    assert 1 <= apart("stale-ipo", "stale") < 6  # at the first nothing is masked
    # A stale sampler is what the trainer began with, and soon far from it.
    assert apart("stale", "replay") == 1
    assert min(mismatch["stale"][1:]) > 10 * max(mismatch["replay"])
    assert max(curves["stale"]["masked"]) > 0
    # Reinforce masks nothing, and has the more to center.
    correction = curves["fp8"]["correction_l1"][0]
    for arm in ("fp8-reinforce", "fp8-reinforce-plain"):
        assert curves[arm]["masked"] == [0.0] * 6
        assert curves[arm]["correction_l1"][0] > 100 * correction


def test_arms_are_labelled_as_they_are(monkeypatch):
    for arm in example(monkeypatch, "arm_runs").ARMS.values():
        about = arm.about
        assert arm.loss == next((x for x in ("reinforce", "ipo") if f" {x}" in about), "icepop")
        assert arm.replay == ("no replay" not in about)
        assert arm.centering == ("no centering" not in about)
        assert arm.top_k == (2048 if "top_k 2048" in about else 0)
        assert arm.sampler == ("fp8" if "fp8" in about else "bfloat16")
        assert arm.stale == (4 if "4 steps behind" in about else 0)
        assert arm.kl_tau == (0.1 if "kl_tau 0.1" in about else 0.0)


def test_a_stale_sampler_has_the_weights_of_so_many_steps_before(monkeypatch):
    runs, signal = example(monkeypatch, "arm_runs"), example(monkeypatch, "arms_signal")
    parser = example(monkeypatch, "arms").settings("")
    options = [*SMALL, "--steps", "7", "--samples", "4", "--prompts", "16", "--lr", "0.01"]
    trainer = runs.Trainer(parser.parse_args(options))
    trainer.warm_up(0)

    def norm(model) -> float:
        return float(sum(x.detach().float().square().sum() for x in model.parameters()))

    bfloat16 = runs.coarse_weights(trainer.model, "bfloat16")
    trainer.sampler.load_state_dict(bfloat16, assign=True)
    made, used = [norm(trainer.sampler)], []

    def look(step: int) -> None:
        used.append(norm(trainer.sampler))
        trainer.sampler.load_state_dict(runs.coarse_weights(trainer.model, "bfloat16"), assign=True)
        made.append(norm(trainer.sampler))

    trainer.run(runs.ARMS["stale"], 0, look)
    assert len(set(made)) == 8
    assert used == [made[max(0, step - 4)] for step in range(7)]
    # And so the stale sampler of signals, beside arm (a).
    weights = signal.train(trainer, ["bfloat16", "stale"], 0)
    trainer.options.steps = 3
    trainer.run(runs.ARMS["replay"], 0)
    for name, tensor in runs.coarse_weights(trainer.model, "bfloat16").items():
        torch.testing.assert_close(weights["stale"][name], tensor, rtol=0, atol=0)
    assert list(weights) == ["bfloat16", "stale"]


def test_arms_are_compared_at_the_seeds_that_all_have(monkeypatch, tmp_path, capsys):
    out = tmp_path / "arms.json"
    arms(monkeypatch, out, "--arms", "replay", "fp8", "--no-heads", "--seeds", "0")
    made = arms(monkeypatch, out, "--arms", "replay", "--no-heads", "--seeds", "1")
    made["runs"][0]["curves"]["reward"] = [0.25, 0.5, 0.75]
    made["runs"][1]["curves"]["reward"] = [0.5, 0.5, 0.5]
    out.write_text(json.dumps(made))
    capsys.readouterr()
    picture = example(monkeypatch, "arms_picture")
    monkeypatch.setattr(sys, "argv", ["arms_picture.py", str(out)])
    picture.main()
    printed = capsys.readouterr().out.splitlines()
    cells = [line.split() for line in printed if line.startswith("| (a) replay, exact centering ")]
    assert cells[0][6:9] == ["1", "|", "0.500"]
    (line,) = (line for line in printed if line.startswith("| reward "))
    assert line.split("|")[2].strip() == "0.25, 0.75"  # of seed 0 alone
    (line,) = (line for line in printed if line.startswith("| replay "))
    assert line.count(", ") == 2  # every seed's own rewards are there


def test_an_arm_of_top_k_keeps_as_many(monkeypatch):
    module, options = example(monkeypatch, "arm_runs"), example(monkeypatch, "arms")
    parser = options.settings("")
    trainer = module.Trainer(parser.parse_args(list(SMALL)))
    prompts = trainer.task.prompts(4)
    widths = [
        trainer.sample(prompts, module.Arm("", top_k=k)).support.offsets.diff().max()
        for k in (0, 3)
    ]
    assert widths[0] > 3
    assert widths[1] == 3


def test_arms_go_on_where_they_were_cut(monkeypatch, tmp_path, capsys):
    out, cut, whole = tmp_path / "arms.json", ("--arms", "replay", "fp8"), ("--seeds", "0", "1")
    arms(monkeypatch, out, "--arms", "replay", "--no-heads", "--seeds", "0")
    made = arms(monkeypatch, out, *cut, "--no-heads", *whole)
    keys = [(run["seed"], run["arm"]) for run in made["runs"]]
    assert keys == [(0, "replay"), (0, "fp8"), (1, "replay"), (1, "fp8")]
    # In one go they are the same.
    again = arms(monkeypatch, tmp_path / "again.json", *cut, "--no-heads", *whole)
    for one, other in zip(made["runs"], again["runs"], strict=True):
        assert one["curves"] == other["curves"]
        assert one["last"] == other["last"]
    with pytest.raises(SystemExit, match="other settings"):
        arms(monkeypatch, out, "--lr", "1")
    made["warm_ups"][0]["reward"] += 0.1
    out.write_text(json.dumps(made))
    with pytest.raises(SystemExit, match="warmed up otherwise"):
        arms(monkeypatch, out, "--arms", "stale", "--no-heads", "--seeds", "0")
    capsys.readouterr()
    late = ("--arms", "replay", "--no-heads", "--minutes", "0")
    assert arms(monkeypatch, tmp_path / "none.json", *late) == {}
    assert "run it again" in capsys.readouterr().out


def test_the_signal_of_gradients_is_told_from_their_noise(monkeypatch):
    torch.manual_seed(0)
    signal = torch.zeros(3, 1, 4000)
    signal[0, 0, :100], signal[1, 0, :100], signal[2, 0, 50:150] = 1.0, 2.0, 1.0
    noise = torch.tensor([0.1, 0.2, 0.3])[:, None, None]
    flat = (signal + noise * torch.randn(3, 200, 4000)).flatten(0, 1)
    gram = (flat @ flat.T).double().unflatten(0, (3, 200)).unflatten(2, (3, 200))
    lines = example(monkeypatch, "arms_signal").signals(gram, [0, 0, 1])
    for line, size, noises, cosine in zip(
        lines, (100, 400, 100), (40, 160, 360), (1.0, 1.0, 0.5), strict=True
    ):
        assert line["signal"] == pytest.approx(size / (size + noises), abs=0.02)
        assert line["cosine"] == pytest.approx(cosine, abs=0.02)
    # The second is the first, twice as large; the third half in its direction, and noisier.
    expected = (1.0, 1.0, 0.5 * (140 / 460) ** 0.5)
    assert [line["progress"] for line in lines] == pytest.approx(expected, abs=0.02)
    assert [line["of icepop's"] for line in lines] == pytest.approx(expected, abs=0.02)
    # Where batches that differ have products below 0, no direction is told.
    nothing = example(monkeypatch, "arms_signal").signals(gram - 1e4, [0, 0, 1])
    assert all(isnan(line["progress"]) and isnan(line["cosine"]) for line in nothing)


def test_errors_of_signals_are_what_repeated_draws_scatter_by(monkeypatch):
    module = example(monkeypatch, "arms_signal")
    torch.manual_seed(0)
    signal = torch.zeros(2, 1, 400)
    signal[0, 0, :100], signal[1, 0, 50:150] = 1.0, 1.0
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(60):
        shared = torch.randn(1, 24, 400)  # of the same rollouts
        flat = (signal + shared + 0.5 * torch.randn(2, 24, 400)).flatten(0, 1)
        gram = (flat @ flat.T).double().unflatten(0, (2, 24)).unflatten(2, (2, 24))
        for name, told in module.jackknife(gram, [0, 0])[1].items():
            found.setdefault(name, []).append((told["value"], told["error"]))
    for name, draws in found.items():
        values, errors = torch.tensor(draws).T
        assert 0.7 < errors.mean() / values.std() < 1.5, name


def test_the_signal_of_every_way(monkeypatch, tmp_path, capsys):
    module, out = example(monkeypatch, "arms_signal"), tmp_path / "signal.json"
    options = [*SMALL, "--steps", "5", "--batches", "4", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["arms_signal.py", *options])
    module.main()
    rows = json.loads(out.read_text())["rows"]
    names = [(sampler, *way) for sampler in ("bfloat16", "fp8") for way in module.WAYS[sampler]]
    assert [tuple(row.values())[:3] for row in rows] == names
    assert capsys.readouterr().out.count("| fp8 ") == 10
    # The stale sampler is what the trainer was: its rewards are others.
    stale = [*options, "--samplers", "bfloat16", "stale"]
    monkeypatch.setattr(sys, "argv", ["arms_signal.py", *stale, "--lr", "0.1"])
    module.main()
    found = json.loads(out.read_text())
    assert found["options"]["steps"] == 5
    assert [row["sampler"] for row in found["rows"]] == ["bfloat16"] * 2 + ["stale"] * 5
    assert found["rewards"]["bfloat16"] != found["rewards"]["stale"]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--samplers", "fp8"), "begin with bfloat16"),
        (("--samplers", "bfloat16", "stale", "--steps", "4"), "more than the 4"),
        (("--batches", "3"), "4 or more"),
    ],
)
def test_signals_that_cannot_be_told_are_refused(monkeypatch, capsys, options, what):
    module = example(monkeypatch, "arms_signal")
    monkeypatch.setattr(sys, "argv", ["arms_signal.py", *SMALL, *options])
    with pytest.raises(SystemExit):
        module.main()
    assert what in capsys.readouterr().err


def test_the_words_of_a_tokenizer(monkeypatch, tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["a", "b", ">", "Ġ", "Ġthe", "Ġof", "Ġand", "the", "ĠThe", "Ġcat", "Ġc4t", "Ġdogs"]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(tmp_path)
    found = example(monkeypatch, "arm_runs").words_of(str(tmp_path), 3)
    assert [tokens[i] for i in found] == ["Ġthe", "Ġand", "Ġcat"]


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
