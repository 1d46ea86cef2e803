"""The microbenchmark runs anywhere, and each of its ways computes what it is compared for."""

import json
import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks stand beside the tests

from benchmarks import lm_head, measure, padded_ways, step, tables, torch_ways
from benchmarks.exact import exact
from benchmarks.package_ways import liger_scaled, trl
from benchmarks.peers import PEERS
from benchmarks.presets import GROUPS, PRESETS, usual
from benchmarks.progress import Progress, expected_seconds, told
from benchmarks.step_heads import HEADS, Rows
from benchmarks.workloads import NotRun, full_vocabulary, zipf_rows
from rl_loss import Support

ROOT = Path(__file__).parents[1]
TINY = ["tiny", "tiny-full", "tiny-mixed"]
EXTRAS = ["numpy", "rich", "matplotlib", "trl", "liger_kernel", "cut_cross_entropy", "transformers"]


@pytest.fixture(autouse=True)
def on_a_cpu(request, monkeypatch):
    """What follows is of the CPU, also where a GPU is."""
    if "gpu" not in request.keywords:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(step, "RESULTS", tmp_path)
    tables.pyplot.cache_clear()
    lm_head.once.cache_clear()
    yield tmp_path
    tables.pyplot.cache_clear()


def leaves(work):
    work.hidden = work.hidden.detach().requires_grad_()
    work.weight = work.weight.detach().requires_grad_()
    return work


def ran(way, work):
    """Outputs and both gradients."""
    outputs = way(leaves(work))
    upstreams = [work.d_logprobs, work.d_support_logprobs]
    torch.autograd.backward(outputs, upstreams[: len(outputs)])
    return [out.detach() for out in outputs], work.hidden.grad, work.weight.grad


def errors(way, work):
    """Of the labels' log-probabilities and of both gradients, against float64."""
    (logprobs, *_), *gradients = ran(way, work)
    truth = exact(work)
    off = (logprobs.double() - truth[0]).abs()
    pairs = zip(gradients, truth[1:], strict=True)
    wrong = [measure.relative_error(got, want) for got, want in pairs]
    return float((off if work.active is None else off[work.active]).max()), *wrong


def assert_as_right_as_torch(way, work):
    """Twice the error of plain PyTorch in the same dtype, and ten roundings."""
    plain = errors(torch_ways.full_log_softmax, work)
    for got, bound in zip(errors(way, work), plain, strict=True):
        assert got <= 2 * bound + 10 * torch.finfo(torch.float32).eps


def test_it_runs_and_saves(results, capsys):
    lm_head.main(["--preset", *TINY, "--repeats", "1", "--save", "made"])
    printed = capsys.readouterr()
    found = json.loads((results / "made.json").read_text())["tables"]
    assert list(found) == TINY
    for key, table in found.items():
        work = PRESETS[key].make()
        ways = [row["key"] for row in table["rows"]]
        assert ways == [k for k, p in PEERS.items() if p.takes(key, work) and not lm_head.absent(k)]
        assert not [row["note"] for row in table["rows"] if row["note"]]
        assert all(row["both_ms"] > 0 for row in table["rows"])
        assert all(f"| {way} " in printed.out for way in ways)
        assert f"{key}: {len(ways)} ways, about " in printed.err
        assert printed.err.count(f"{key}: ") == 1 + len(ways)
    assert (results / "made.png").exists() == (find_spec("matplotlib") is not None)


def test_it_runs_without_its_extras(tmp_path):
    start = (
        "import sys, runpy, pathlib\n"
        f"sys.modules.update(dict.fromkeys({EXTRAS}))\n"  # as if none were installed
        "from benchmarks import measure, tables\n"
        f"measure.RESULTS = tables.RESULTS = pathlib.Path({str(tmp_path)!r})\n"
        "sys.argv = ['lm_head', '--preset', *sys.argv[1:], '--repeats', '1', '--save', 'made']\n"
        "runpy.run_module('benchmarks.lm_head', run_name='__main__')\n"
    )
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", start, "tiny", "tiny-full"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.count("| ours ") == 2
    assert done.stdout.count("nothing will be drawn: pip install matplotlib") == 1
    assert done.stdout.count('left out: trl (TRL, chunked head), not installed: pip install "') == 1
    assert "| trl " not in done.stdout
    assert [made.name for made in tmp_path.iterdir()] == ["made.json"]


@pytest.mark.gpu
def test_it_runs_on_a_gpu(results):
    ways = ["ours", "256mib", "graph", "icepop", "one-pass", "add-grad", "add-float32", "sparse"]
    ways += ["into", "pairs", "padded", "padded-online", "chunked"]
    lm_head.main(["--preset", *TINY, "--ways", *ways, "--repeats", "1", "--save", "made"])
    for table in json.loads((results / "made.json").read_text())["tables"].values():
        for row in table["rows"]:
            assert not row["note"], row
            assert row["gpu_ms"] > 0
            assert row["logprob_error"] is None or row["logprob_error"] < 0.2
            assert row["gradient_error"] is None or row["gradient_error"] < 0.02


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--ways", "rl_loss"], "--ways: there is no 'rl_loss', there are ours, "),
        (["--preset", "k21"], "--preset: there is no 'k21', there are tiny, "),
    ],
)
def test_an_unknown_name(asked, said, capsys):
    with pytest.raises(SystemExit):
        lm_head.main(asked)
    assert said in capsys.readouterr().err


def test_help_lists_presets_and_ways(capsys):
    with pytest.raises(SystemExit):
        lm_head.main(["--help"])
    printed = capsys.readouterr().out
    for key, about in [(k, p.title) for k, p in PEERS.items()] + [
        (k, p.about) for k, p in PRESETS.items()
    ]:
        assert any(line.split() and line.split()[0] == key and about in line
                   for line in printed.splitlines())  # fmt: skip


def test_a_way_that_was_asked_for_and_runs_elsewhere(results, capsys):
    lm_head.main(["--preset", "tiny", "--ways", "graph", "--repeats", "1"])
    printed = capsys.readouterr().out
    assert "left out: graph (rl_loss, CUDA graph), only on a GPU" in printed
    assert "Nothing was measured." in printed


def test_the_usual_preset(monkeypatch):
    monkeypatch.delenv("RL_LOSS_DATA", raising=False)
    assert usual() == "real-like"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert usual() == "k20"


def test_names_are_known():
    assert all(key in PRESETS for keys in GROUPS.values() for key in keys)
    assert all(way in PEERS for preset in PRESETS.values() for way in preset.ways)
    assert all(key in PRESETS for peer in PEERS.values() for key in peer.only)
    keys = [*PRESETS, *GROUPS, *PEERS]
    assert all(key.isascii() and " " not in key and "," not in key for key in keys)
    assert len({peer.title for peer in PEERS.values()}) == len(PEERS)


def uneven():
    """Rows of 1 to 9 ids, whose upstreams do not cancel as those of a centered loss do."""
    work = zipf_rows("uneven", torch.arange(50) % 9 + 1, 24, 301)
    generator = torch.Generator().manual_seed(5)
    work.d_support_logprobs = torch.randn(work.support.nnz, generator=generator)
    return work


@pytest.mark.parametrize("key", ["ours", "sparse", "pairs", "padded", "padded-online"])
def test_ways_on_replayed_rows(key):
    check_replay(PEERS[key].way)


@pytest.mark.parametrize("key", ["padded", "padded-online"])
def test_padded_ways_in_blocks(key, monkeypatch):
    monkeypatch.setattr(padded_ways, "IDS", 64)
    monkeypatch.setattr(padded_ways, "TOKENS", 16)
    check_replay(PEERS[key].way)


def check_replay(way):
    work = uneven()
    assert_as_right_as_torch(way, work)
    entries = way(work)[1]
    plain = torch_ways.full_log_softmax(work.to("cpu", torch.float64))[1]
    torch.testing.assert_close(entries.double(), plain.double(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("key", ["add-grad", "add-float32", "into"])
def test_gradients_of_micro_batches_add_up(key):
    work, peer = leaves(uneven()), PEERS[key]
    _, d_hidden, d_weight = exact(work)
    for times in (1, 2, 3):
        work.hidden.grad = work.weight.grad = None
        peer.way(work)
        assert measure.relative_error(work.hidden.grad, d_hidden) < 1e-6
        assert measure.relative_error(work.kept, times * d_weight) < 1e-6
    row = lm_head.measure(key, uneven(), exact(uneven()), repeats=1)
    assert row.gradient_error < 1e-6
    assert row.forward_ms is None


def test_padded_online_under_a_temperature(monkeypatch):
    monkeypatch.setattr(padded_ways, "IDS", 64)
    monkeypatch.setattr(padded_ways, "TOKENS", 16)
    work = leaves(uneven())
    ids, inverse = padded_ways._padded_ids(work), torch.linspace(0.5, 2.0, 50)[:, None]
    rows = work.hidden, work.weight, work.labels, ids, inverse
    logprobs, kept, entropy = padded_ways._PaddedOnline.apply(*rows)
    torch.autograd.backward((logprobs, kept), (work.d_logprobs, torch.ones_like(kept)))

    hidden, weight = (t.detach().double().requires_grad_() for t in (work.hidden, work.weight))
    z = (hidden @ weight.T) * inverse
    over = torch.where(ids >= 0, z.gather(1, ids.clamp(min=0)), -torch.inf)
    norm = over.logsumexp(-1, keepdim=True)
    label = (z.gather(1, work.labels[:, None]) - norm)[:, 0]
    every = torch.where(ids >= 0, over - norm, 0.0)
    torch.autograd.backward((label, every), (work.d_logprobs.double(), torch.ones_like(every)))
    full = torch.distributions.Categorical(logits=z).entropy()
    for got, want in ((logprobs, label), (kept, every), (entropy, full)):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-5)
    assert not entropy.requires_grad
    assert measure.relative_error(work.hidden.grad, hidden.grad) < 1e-6
    assert measure.relative_error(work.weight.grad, weight.grad) < 1e-6


def test_what_is_too_wide_to_pad(monkeypatch):
    monkeypatch.setattr(padded_ways, "WIDEST", 8)
    for key in ("padded", "padded-online"):
        assert lm_head.measure(key, uneven(), None, 1).note == "not run: padded to 9 ids a row"


def test_what_does_not_fit_in_memory(monkeypatch):
    monkeypatch.setattr(torch_ways.os, "sysconf", lambda name: 2**5)  # 1 KiB
    for way in (torch_ways.full_log_softmax, torch_ways.csr_pairs):
        with pytest.raises(NotRun, match="takes 0 GiB, of 0 here"):
            way(uneven())


@pytest.mark.parametrize("key", ["ours", "256mib", "chunked"])
def test_ways_over_the_vocabulary(key):
    assert_as_right_as_torch(PEERS[key].way, full_vocabulary(70, 24, 301))


@pytest.mark.parametrize(
    ("way", "package"), [(trl, "trl"), (liger_scaled, "liger_kernel")], ids=["trl", "liger"]
)
def test_ways_of_packages(way, package):
    pytest.importorskip(package)
    assert_as_right_as_torch(way, full_vocabulary(70, 24, 301))


def test_trl_leaves_out_what_no_loss_reads():
    pytest.importorskip("trl")
    work = full_vocabulary(70, 24, 301)
    work.active = torch.arange(70) % 3 == 0
    work.d_logprobs[~work.active] = 0.0
    assert_as_right_as_torch(trl, work)
    assert (trl(work)[0][~work.active] == 0).all()


def test_a_slow_way_is_timed_twice(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])

    def way(seconds):
        clock[0] += seconds

    assert measure.milliseconds(partial(way, 2.0), repeats=7) == [2000.0, 2000.0]
    assert len(measure.milliseconds(partial(way, 0.5), repeats=7)) == 7


def test_what_is_said_of_time(capsys, monkeypatch):
    assert [told(s) for s in (0.2, 12.4, 89, 90, 150)] == ["1 s", "12 s", "89 s", "2 min", "2 min"]
    work = uneven()
    some = [expected_seconds(work, [PEERS[key] for key in keys], 7) for keys in ([], ["ours"])]
    assert 0 < some[0] < some[1] < 60
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = Progress("k8", 2, 10)
    progress.now("rl_loss")
    progress.end()
    lines = capsys.readouterr().err
    assert lines.startswith("k8: 2 ways, about 10 s\n\r")
    assert "k8: 1/2 rl_loss (1 s of 10 s)" in lines
    assert lines.endswith("\r\x1b[K")


def test_a_little_less_than_no_memory_is_none(capsys):
    row = measure.Row("way", both_ms=1.0, extra_mib=-0.3)
    tables.show("some", {"shape": "N 1", "dtype": "float32", "rows": [row]})
    assert "| -0" not in capsys.readouterr().out


def test_the_capture_benchmark_prints_plainly(capsys):
    from benchmarks.capture import run

    tables.show("capture", run(8, 300, 400, 1)["capture"], more_digits=1)
    assert "| rl_loss, REPLAY " in capsys.readouterr().out


# --- a training step ---


def test_a_step_runs_and_saves(results, capsys):
    step.main(["--preset", "tiny", "--repeats", "1", "--save", "made"])
    rows = json.loads((results / "made.json").read_text())["rows"]
    assert [row["head"] for row in rows] == ["trunk", *HEADS]
    assert all(row["tokens_a_second"] > 0 for row in rows)
    printed = capsys.readouterr().out
    assert all(f"| {head.title} " in printed for head in HEADS.values())
    assert (results / "made.png").exists() == (find_spec("matplotlib") is not None)


@pytest.mark.gpu
def test_a_step_on_a_gpu(results):
    step.main(["--preset", "tiny", "--repeats", "1", "--save", "made"])
    for row in json.loads((results / "made.json").read_text())["rows"]:
        assert row["peak_gib"] > row["held_gib"] > 0
        assert row["longest"] == (None if row["head"] == "one-pass" else 1024)


@pytest.mark.parametrize("room", [65_536, 70_000, 300_000, 815_000, 1_000_000, 2_000_000])
@pytest.mark.parametrize("off", [0.3, 0.9, 0.97, 1.0, 1.4, 9.0])
def test_the_longest_step_is_found_from_any_guess(room, off):
    tried = []
    most = 3 * 2**19

    def fits(n: int) -> bool:
        tried.append(n)
        return n <= room

    found = step.end(fits, 65_536, int(off * room), most)
    assert found in tried or found == 65_536
    assert 0.97 * min(room, most) - 2 * step.SEQUENCE < found <= min(room, most)
    assert len(tried) <= 16


def test_a_step_whose_search_stopped_says_so():
    row = step.Row(1024, "ours", "rl_loss", longest=1024, stopped=True)
    assert step.line(row)["longest"] == "≥ 1,024"
    assert step.line(row)["peak GiB"] == ""


def test_rows_of_a_step_are_those_of_a_sampler_with_top_k():
    ids = [[3, 5, 9], [1, 2, 4, 7, 8], [6]]
    q = [[0.5, 0.3, 0.2], [0.1, 0.4, 0.05, 0.3, 0.15], [1.0]]
    logprobs = [torch.tensor(row).log().tolist() for row in q]
    support = Support.from_rows(list(zip(ids, logprobs, strict=True)))
    cut = step.at_most(support, torch.tensor([5, 4, 6]), 2)
    assert cut.offsets.tolist() == [0, 2, 4, 5]
    assert cut.ids.tolist() == [3, 5, 2, 4, 6]  # 4 is the label, 2 the likeliest beside it
    expected = torch.tensor([0.5 / 0.8, 0.3 / 0.8, 0.4 / 0.45, 0.05 / 0.45, 1.0])
    torch.testing.assert_close(cut.sampler_logprobs.exp(), expected)
    cut.validate(torch.tensor([5, 4, 6]), 10)


def test_a_step_trains_with_every_head(results):
    preset = step.PRESETS["tiny"]
    batch = step.Batch(preset, "cpu")
    weights = {}
    for head in ("trunk", *HEADS):
        model = step.Model(batch.v, 32, preset.layers, "cpu")
        before = model.trunk.blocks[0].qkv.weight.detach().clone()
        model.step(head, batch.rows(preset.tokens))
        weights[head] = model.weight.detach()
        assert not torch.equal(model.trunk.blocks[0].qkv.weight, before)
    assert not torch.equal(weights["ours"], weights["trunk"])


@pytest.mark.parametrize("head", HEADS)
def test_the_heads_of_a_step_compute_one_loss(head):
    work = uneven()
    with torch.no_grad():
        logprobs = torch_ways.full_log_softmax(work)[0]
    q = logprobs - 0.1 * torch.rand(len(logprobs), generator=torch.Generator().manual_seed(3))
    rows = Rows(work.labels, work.support, q.clamp(max=0.0), -work.d_logprobs)

    def gradients(name, dtype):
        hidden, weight = (x.to(dtype).requires_grad_() for x in (work.hidden, work.weight))
        loss = HEADS[name].loss(hidden, weight, rows)
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))

    # What a head is held to is another's, so that none is its own measure.
    exact = gradients("ours" if head == "full" else "full", torch.float64)
    assert exact[1].norm() > 0.1
    for got, wanted in zip(gradients(head, torch.float32), exact, strict=True):
        assert measure.relative_error(got, wanted) <= 20 * torch.finfo(torch.float32).eps
