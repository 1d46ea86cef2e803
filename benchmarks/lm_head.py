"""Microbenchmark of the LM head: `python -m benchmarks.lm_head [--preset h200]`.

Each way computes the log-probability of every label (on replayed rows over the row's support, and
that of every support entry) and the gradients of hidden and weight for one upstream a value: what
a policy loss with score centering sends back. Errors are against float64 of the same inputs.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

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
from benchmarks.peers import PEERS, Peer
from benchmarks.tables import draw, show
from benchmarks.workloads import (
    Workload,
    chat_like,
    data_folder,
    fixed,
    forced_length,
    full_vocabulary,
    mixed_rows,
    prompts,
    real_like,
    real_rows,
)

WORKLOADS: dict[str, Callable[[], Workload]] = {
    "real-like": real_like,
    "k8": lambda: fixed(8),
    "k20": lambda: fixed(20),
    "k128": lambda: fixed(128),
    "k512": lambda: fixed(512),
    "chat": chat_like,
    "forced": forced_length,
    "full": full_vocabulary,
    "prompts": prompts,
    "mixed": mixed_rows,
}
H200 = ["k8", "k20", "k128", "k512", "chat", "forced", "full", "prompts", "mixed"]


def workloads() -> dict[str, Callable[[], Workload]]:
    folder = data_folder()
    if folder is None:
        return WORKLOADS
    return {"real": lambda: real_rows(folder)[0], **WORKLOADS}


def exact(work: Workload) -> tuple[Tensor, Tensor, Tensor] | None:
    """Log-probabilities of the labels and both gradients in float64; None for rows of several
    kinds, whose errors the tests measure."""
    kinds = set(work.support.host.kind.tolist())
    if kinds == {1}:
        return exact_replay(work)
    return exact_full(work) if kinds == {0} else None


def exact_replay(work: Workload, block: int = 2**15) -> tuple[Tensor, Tensor, Tensor]:
    """A block of entries at a time."""
    rows, ids, n = work.support.entry_rows, work.support.ids.long(), len(work.labels)
    spans = [slice(at, at + block) for at in range(0, len(ids), block)]
    hidden, weight = work.hidden.detach(), work.weight.detach()
    z = torch.cat([(hidden[rows[s]].double() * weight[ids[s]].double()).sum(-1) for s in spans])
    zeros = torch.zeros(n, dtype=torch.float64, device=z.device)
    top = torch.full_like(zeros, -torch.inf).scatter_reduce(0, rows, z, "amax")
    logp = z - top[rows]
    logp -= zeros.index_add(0, rows, logp.exp()).log()[rows]
    label = ids == work.labels[rows]
    upstream = work.d_support_logprobs + label * work.d_logprobs[rows].double()
    grad = upstream - logp.exp() * zeros.index_add(0, rows, upstream)[rows]
    d_hidden = torch.zeros_like(hidden, dtype=torch.float64)
    d_weight = torch.zeros_like(weight, dtype=torch.float64)
    for s in spans:
        d_hidden.index_add_(0, rows[s], grad[s, None] * weight[ids[s]].double())
        d_weight.index_add_(0, ids[s], grad[s, None] * hidden[rows[s]].double())
    return zeros.index_add(0, rows, torch.where(label, logp, 0.0)), d_hidden, d_weight


def exact_full(work: Workload, block: int = 1024) -> tuple[Tensor, Tensor, Tensor]:
    """A block of rows at a time."""
    hidden, weight = work.hidden.detach().double(), work.weight.detach().double()
    d_hidden, d_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
    logprobs = []
    for start in range(0, len(hidden), block):
        rows = slice(start, start + block)
        logp = (hidden[rows] @ weight.T).log_softmax(-1)
        label, upstream = work.labels[rows, None], work.d_logprobs[rows, None].double()
        logprobs.append(logp.gather(1, label)[:, 0])
        dz = logp.exp_().mul_(-upstream).scatter_add_(1, label, upstream)
        d_hidden[rows] = dz @ weight
        d_weight.addmm_(dz.T, hidden[rows])
    return torch.cat(logprobs), d_hidden, d_weight


def measure(
    name: str,
    peer: Peer,
    work: Workload,
    truth: tuple[Tensor, Tensor, Tensor] | None,
    repeats: int,
) -> Row:
    if not peer.available:
        return Row(name, f"unavailable: no {peer.package}")
    if peer.float32:
        work = work.to(str(work.hidden.device), torch.float32)
    work.hidden = work.hidden.detach().requires_grad_()
    work.weight = work.weight.detach().requires_grad_()
    upstreams = [work.d_logprobs, work.d_support_logprobs]

    def forward() -> None:
        with torch.no_grad():
            peer.way(work)

    def both() -> None:
        work.hidden.grad = work.weight.grad = None
        outputs = peer.way(work)
        if peer.whole:
            return
        if outputs[0].dim() == 0:
            outputs[0].backward()
        else:
            torch.autograd.backward(outputs, upstreams[: len(outputs)])

    try:
        both()  # compiles
        work.hidden.grad = work.weight.grad = None
        sizes = sum(t.numel() * t.element_size() for t in (work.hidden, work.weight))
        # A graph holds its memory in a pool of its own.
        row = Row(name, extra_mib=None if peer.whole else extra_mib(both, sizes))
        gradients = work.hidden.grad, work.weight.grad
        logprobs = peer.way(work)[0].detach()
        if logprobs.dim() and truth is not None:
            wrong = (logprobs.double() - truth[0]).abs()
            row.logprob_error = float((wrong if work.active is None else wrong[work.active]).max())
            pairs = zip(gradients, truth[1:], strict=True)
            row.gradient_error = max(relative_error(got, want) for got, want in pairs)
        del gradients, logprobs
        row.forward_ms = middle(milliseconds(forward, repeats))[0]
        row.both_ms, row.both_min_ms, row.both_max_ms = middle(milliseconds(both, repeats))
        if work.hidden.is_cuda:
            row.gpu_ms, row.launches = gpu_milliseconds(both)
    except torch.OutOfMemoryError:
        row = Row(name, "out of memory")
    except Exception as error:  # a peer's own limit is a result, not the end of the table
        row = Row(name, f"failed: {type(error).__name__}: {error}"[:90])
    work.hidden.grad = work.weight.grad = work.graph = None
    return row


def run(key: str, work: Workload, dtype: str, peers: list[str], repeats: int) -> dict:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    work = work.to(device, getattr(torch, dtype))
    truth, rows = exact(work), []
    for name in peers:
        peer = PEERS[name]
        if not peer.takes(key, work):
            continue
        if device == "cpu" and (peer.whole or peer.only):
            continue  # a graph, a compiled step: ways to launch on a GPU
        if device == "cuda" and name == "full log_softmax":
            continue  # 10 GB of logits and as many again: chunked torch stands for it
        rows.append(measure(name, peer, work, truth, repeats))
        if device == "cuda":
            torch.cuda.empty_cache()
    first = rows[0]
    for row in rows:
        times = (row.gpu_ms, first.gpu_ms) if device == "cuda" else (row.both_ms, first.both_ms)
        row.ratio = (times[0] or 0.0) / times[1] if times[1] else 0.0
    return {"shape": work.shape, "dtype": dtype, "rows": rows}


def main() -> None:
    known = workloads()
    default = [next(iter(known))]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--preset", nargs="*", choices=[*WORKLOADS, "real", "h200"], default=default
    )
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32", "float64"))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json and NAME.png")
    options = parser.parse_args()
    environment()
    import rich  # noqa: F401  # before minutes of measuring: `pip install -e ".[bench]"`

    if "real" in options.preset and "real" not in known:
        parser.error("--preset real: smollm2_top_p95.npz is not in the folder RL_LOSS_DATA")
    if data_folder() is None:
        print("The real supports are not here (set RL_LOSS_DATA); running synthetic ones.")
    dtype = options.dtype or ("bfloat16" if torch.cuda.is_available() else "float32")
    tables = {}
    for key in [k for name in options.preset for k in (H200 if name == "h200" else [name])]:
        tables[key] = run(key, known[key](), dtype, options.peers, options.repeats)
        show(key, tables[key])
        if options.save:
            write(options.save, tables)
    if options.save:
        draw(options.save, "LM head, forward and backward")
        print(f"written: results/{options.save}.json and .png")


if __name__ == "__main__":
    main()
