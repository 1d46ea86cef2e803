"""Microbenchmark of the LM head: `python -m benchmarks.lm_head`.

Each way computes the log-probability of every label (on replayed rows over the row's support, and
that of every support entry) and the gradients of hidden and weight for one upstream a value: what
a policy loss with score centering sends back. Errors are against float64 of the same inputs.
"""

import argparse
from functools import cache

import torch
from torch import Tensor

from benchmarks.exact import exact
from benchmarks.measure import (
    Row,
    environment,
    extra_mib,
    gpu_milliseconds,
    middle,
    milliseconds,
    relative_error,
    write,
)
from benchmarks.peers import PEERS
from benchmarks.presets import GROUPS, PRESETS, usual
from benchmarks.progress import Progress, expected_seconds
from benchmarks.tables import columns, draw, pyplot, show
from benchmarks.workloads import NotRun, Workload, data_folder

Truth = tuple[Tensor, Tensor, Tensor]


def measure(key: str, work: Workload, truth: Truth | None, repeats: int) -> Row:
    """One way on one workload."""
    peer = PEERS[key]
    row = Row(peer.title, key=key)
    if peer.float32:
        work = work.to(str(work.hidden.device), torch.float32)
    work.hidden = work.hidden.detach().requires_grad_()
    work.weight = work.weight.detach().requires_grad_()
    upstreams = [work.d_logprobs, work.d_support_logprobs]

    def forward() -> None:
        with torch.no_grad():
            peer.way(work)

    def both() -> tuple[Tensor, ...]:
        work.hidden.grad = work.weight.grad = None
        outputs = peer.way(work)
        if peer.whole:
            return outputs
        if outputs[0].dim() == 0:
            outputs[0].backward()
        else:
            torch.autograd.backward(outputs, upstreams[: len(outputs)])
        return outputs

    try:
        logprobs = both()[0].detach()  # compiles
        if logprobs.dim() and truth is not None:
            wrong = (logprobs.double() - truth[0]).abs()
            row.logprob_error = float((wrong if work.active is None else wrong[work.active]).max())
            gradients = work.hidden.grad, work.kept if peer.adds else work.weight.grad
            pairs = zip(gradients, truth[1:], strict=True)
            row.gradient_error = max(relative_error(got, want) for got, want in pairs)
            del gradients, pairs, wrong
        del logprobs
        work.hidden.grad = work.weight.grad = None
        held = (work.hidden,) if peer.adds else (work.hidden, work.weight)
        sizes = sum(t.numel() * t.element_size() for t in held)
        # A graph holds its memory in a pool of its own.
        row.extra_mib = extra_mib(both, sizes) if peer.adds or not peer.whole else None
        row.forward_ms = None if peer.whole else middle(milliseconds(forward, repeats))[0]
        row.both_ms, row.both_min_ms, row.both_max_ms = middle(milliseconds(both, repeats))
        if work.hidden.is_cuda:
            row.gpu_ms, row.launches = gpu_milliseconds(both)
    except NotRun as why:
        row = Row(peer.title, f"not run: {why}", key=key)
    except torch.OutOfMemoryError:
        row = Row(peer.title, "out of memory", key=key)
    except Exception as error:  # a peer's own limit is a result, not the end of the table
        row = Row(peer.title, f"failed: {type(error).__name__}: {error}"[:90], key=key)
    work.hidden.grad = work.weight.grad = work.kept = None
    return row


def run(key: str, ways: list[str], dtype: str, repeats: int) -> dict:
    """One preset: its table."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    work = PRESETS[key].make(device=device).to(device, getattr(torch, dtype))
    ways = [way for way in ways if PEERS[way].takes(key, work)]
    for way in ways:
        if absent(way):
            once(f"left out: {way} ({PEERS[way].title}), {absent(way)}")
    ways = [way for way in ways if not absent(way)]
    seconds = expected_seconds(work, [PEERS[way] for way in ways], repeats)
    progress = Progress(key, len(ways), seconds)
    truth, rows = exact(work) if ways else None, []
    for way in ways:
        progress.now(PEERS[way].title)
        rows.append(measure(way, work, truth, repeats))
        if device == "cuda":
            torch.cuda.empty_cache()
    progress.end()
    for row in rows:
        times = [one.gpu_ms if device == "cuda" else one.both_ms for one in (row, rows[0])]
        row.ratio = (times[0] or 0.0) / times[1] if times[1] else 0.0
    return {"shape": work.shape, "dtype": dtype, "rows": rows}


def absent(way: str) -> str | None:
    """Why it does not run here."""
    return PEERS[way].elsewhere() or PEERS[way].uninstalled()


@cache
def once(line: str) -> None:
    print(line)


def arguments() -> argparse.ArgumentParser:
    presets = {key: preset.about for key, preset in PRESETS.items()}
    groups = {name: "all of " + ", ".join(keys) for name, keys in GROUPS.items()}
    ways = {
        key: f"{peer.title}, {absent(key)}" if absent(key) else peer.title
        for key, peer in PEERS.items()
    }
    lists = {"presets": presets, "names for several": groups, "ways": ways}
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="\n\n".join(f"{name}:\n{columns(listed)}" for name, listed in lists.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--preset", nargs="+", metavar="KEY", default=[usual()], help=f"here {usual()} if left out"
    )
    parser.add_argument("--ways", nargs="+", metavar="KEY", help="all that run here if left out")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32", "float64"))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json and NAME.png")
    return parser


def chosen(parser: argparse.ArgumentParser, keys: list[str], known: dict, option: str) -> list[str]:
    """The keys, groups spelt out; an unknown one is an error that lists the known."""
    keys = [key for given in keys for key in GROUPS.get(given, [given] if given else [])]
    for key in keys:
        if key not in known:
            parser.error(f"{option}: there is no {key!r}, there are {', '.join(known)}")
    return list(dict.fromkeys(keys))


def main(argv: list[str] | None = None) -> None:
    parser = arguments()
    options = parser.parse_args(argv)
    presets = chosen(parser, options.preset, PRESETS, "--preset")
    asked = chosen(parser, options.ways or [], PEERS, "--ways")
    if "real" in presets and data_folder() is None:
        parser.error("--preset real: smollm2_top_p95.npz is not in the folder RL_LOSS_DATA")
    if presets == ["real-like"]:
        print("The real supports are not here (set RL_LOSS_DATA); running synthetic ones.")
    environment()
    if options.save:
        pyplot()  # says before minutes of measuring that it will not draw
    tables = {}
    for key in presets:
        preset = PRESETS[key]
        usual_ways = [way for way in preset.ways or PEERS if not PEERS[way].elsewhere()]
        usual_dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        dtype = options.dtype or preset.dtype or usual_dtype
        tables[key] = run(key, asked or usual_ways, dtype, options.repeats)
        show(key, tables[key])
        if options.save:
            write(options.save, tables)
    if options.save:
        print(f"written: results/{options.save}.json")
        draw(options.save, "LM head, forward and backward")


if __name__ == "__main__":
    main()
