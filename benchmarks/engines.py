"""Reading an engine's answer: `python -m benchmarks.engines [--save NAME]`.

One answer of 16359 tokens whose top-p supports hold 3.85 million ids, in every form in which
vLLM and SGLang hand it out, and what else makes a support, on one CPU core. The time is the
process's own (`time.process_time`), the least of the runs: what else runs on the machine does not
count. A JSON answer is read when the time begins, as the client's library has it.
"""

import argparse
import gc
import json
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.measure import Row, milliseconds, write
from benchmarks.tables import draw, show
from benchmarks.workloads import V, zipf_rows
from rl_loss import Support

KEPT_MASS = 0.95  # of the vocabulary, in every row
TOP = 20


@dataclass
class Logprob:
    """vLLM's `Logprob`."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class Chunk(NamedTuple):
    """What SGLang holds inside the engine."""

    lengths: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray


@dataclass
class Answer:
    """N sampled tokens with their kept sets, complete: arrays, and the same as lists."""

    support: Support
    sampled: list[int]
    ids: list[list[int]]
    logprobs: list[list[float]]
    top: list[dict[int, float]]  # of each token the sampled one and the top 20, -inf if not kept

    @property
    def own(self) -> list[float]:
        """Of the sampled tokens."""
        return [row[token] for row, token in zip(self.top, self.sampled, strict=True)]


def answer(n: int, nnz: int, seed: int = 0) -> Answer:
    """Widths with the quantiles of SmolLM2's top-p 0.95 supports: a tenth of one id, median 44,
    the widest of thousands; ids ascend, as engines have them."""
    g = torch.Generator().manual_seed(seed)
    widths = (44 * (1.83 * torch.randn(n, generator=g, dtype=torch.float64)).exp()).clamp(1, 5092)
    widths[torch.rand(n, generator=g) < 0.06] = 1  # of the others 4 in 100 have one
    widths = (widths * (nnz / widths.sum())).clamp(1, V // 2).long()
    support = zipf_rows("answer", widths, 1, V, seed).support
    bounds = list(pairwise(support.offsets.tolist()))
    flat, values = support.ids.tolist(), support.sampler_logprobs.tolist()
    ids, logprobs = ([column[a:b] for a, b in bounds] for column in (flat, values))
    noise = -(-torch.rand(support.nnz, generator=g).log()).log()  # Gumbel's: the most is a sample
    score, sampled, top = support.sampler_logprobs + noise, [], []
    for (a, b), kept, q in zip(bounds, ids, logprobs, strict=True):
        own = int(score[a:b].argmax())
        best = support.sampler_logprobs[a:b].topk(min(TOP, b - a)).indices.tolist()
        row = {kept[at]: q[at] for at in (own, *best)}
        others = (token for token in range(V) if token not in row and token not in kept)
        row |= {next(others): -torch.inf for _ in range(TOP - len(best))}
        sampled.append(kept[own])
        top.append(row)
    return Answer(support, sampled, ids, logprobs, top)


def from_json(value: Any) -> Any:
    """What a client has of a server's answer."""
    return json.loads(json.dumps(value))


def content(given: Answer, name: Callable[[int], dict]) -> dict:
    """`logprobs` of vLLM's server, which has no -inf."""
    rows = []
    for row, token in zip(given.top, given.sampled, strict=True):
        entries = {t: name(t) | {"logprob": max(q, -9999.0), "rank": 1} for t, q in row.items()}
        rows.append(entries[token] | {"top_logprobs": list(entries.values())})
    return {"content": rows}


def vllm_answers(given: Answer) -> dict[str, Any]:
    """What `from_vllm` reads; complete, but for those with the top 20 and those with the mask."""
    support, tokens = given.support, given.sampled
    ids, offsets = support.ids.numpy(), support.offsets.numpy()
    values = support.sampler_logprobs.numpy()
    flat = SimpleNamespace(token_ids=ids, offsets=offsets, logprobs=values)
    lists = SimpleNamespace(token_ids=given.ids, logprobs=given.logprobs)
    of_arrays = SimpleNamespace(
        token_ids=np.split(ids, offsets[1:-1]), logprobs=np.split(values, offsets[1:-1])
    )
    top = [{token: Logprob(q) for token, q in row.items()} for row in given.top]
    mask = SimpleNamespace(token_ids=given.ids, logprobs=None)
    flat_mask = SimpleNamespace(token_ids=ids, offsets=offsets, logprobs=None)
    choice = {"token_ids": tokens, "sampling_mask": given.ids}
    by_id = {"logprobs": content(given, lambda token: {"token_id": token})}
    by_text = {"logprobs": content(given, lambda token: {"token": f"token_id:{token}"})}

    def output(mask: Any, logprobs: Any = None) -> SimpleNamespace:
        return SimpleNamespace(token_ids=tokens, sampling_mask=mask, logprobs=logprobs)

    return {
        "flat arrays with offsets": output(flat),
        "lists of lists": output(lists),
        "lists of arrays": output(of_arrays),
        "JSON, lists of lists": from_json(choice | {"sampling_mask_logprobs": given.logprobs}),
        "lists, top-20 dictionaries": output(mask, top),
        "flat arrays, top-20 dictionaries": output(flat_mask, top),
        "JSON, lists, top-20 content": from_json(choice | by_id),
        "JSON, lists, top-20 content of texts": from_json(choice | by_text),
        "lists, mask alone": output(mask),
    }


def sglang_answers(given: Answer) -> dict[str, Any]:
    """What `from_sglang` reads: the engine's chunk, its support mode, and the top 20 over V."""
    support, shift = given.support, float(np.log(KEPT_MASS))
    arrays = (support.offsets.diff(), support.ids, support.sampler_logprobs)
    own = list(zip(given.own, given.sampled, strict=True))
    mask = {"output_token_sampling_mask": given.ids}
    scored = {"output_token_logprobs": [(q + shift, token, None) for q, token in own]}
    every = mask | scored | {"output_token_sampling_logprobs": given.logprobs}
    top = [[(max(q, -30.0) + shift, t, None) for t, q in row.items()] for row in given.top]
    selected = mask | scored | {"output_token_sampling_logprobs": given.own}
    return {
        "the engine's chunk": {
            "output_ids": given.sampled,
            "meta_info": {"output_token_sampling_mask": Chunk(*(a.numpy() for a in arrays))},
        },
        "JSON, support mode": from_json({"meta_info": every}),
        "JSON, top 20": from_json({"meta_info": selected | {"output_top_logprobs": top}}),
    }


def ways(given: Answer) -> dict[str, Callable[[], object]]:
    """Each form by name; floors first: what arrays and lists cost without a support."""
    vllm, sglang, support = vllm_answers(given), sglang_answers(given), given.support
    flat = vllm["flat arrays with offsets"].sampling_mask
    offsets = torch.from_numpy(flat.offsets)
    packed, counts, *_ = support.to_packed()
    ids, widths, logprobs, *_ = support.to_bytes()
    rows = list(zip(given.ids, given.logprobs, strict=True))
    top = vllm["lists, top-20 dictionaries"].logprobs
    floors: dict[str, Callable[[], object]] = {
        "floor: two arrays copied": lambda: (flat.token_ids.copy(), flat.logprobs.copy()),
        "floor: lists of ids as one array": lambda: array("q", chain.from_iterable(given.ids)),
        "rl_loss: from_packed": lambda: Support.from_packed(packed, counts),
        "rl_loss: from_bytes": lambda: Support.from_bytes(ids, widths, logprobs),
        "rl_loss: from_rows, lists": lambda: Support.from_rows(rows),
        "rl_loss: validate": lambda: support.validate(sampled, V, inference_logprobs=own),
        "rl_loss: from_top_logprobs": lambda: Support.from_top_logprobs(kept),
    }
    sampled, own = torch.tensor(given.sampled), torch.tensor(given.own)
    kept = [{t: e for t, e in row.items() if e.logprob > -torch.inf} for row in top]
    made = dict(floors)
    for engine, answers in (("vLLM", vllm), ("SGLang", sglang)):
        read = Support.from_vllm if engine == "vLLM" else Support.from_sglang
        for form, one in answers.items():
            made[f"rl_loss: {engine}, {form}"] = lambda read=read, one=one: read(one)
    for engine, form in (
        ("vLLM", "flat arrays with offsets"),
        ("vLLM", "lists of lists"),
        ("vLLM", "lists, top-20 dictionaries"),
        ("SGLang", "the engine's chunk"),
    ):
        one = (vllm if engine == "vLLM" else sglang)[form]
        made[f"rl_loss: read_answer, {engine}, {form}"] = lambda one=one: Support.read_answer(one)
    assert int(offsets[-1]) == len(flat.token_ids)
    return made


def run(n: int, nnz: int, repeats: int, only: str) -> dict[str, dict]:
    given = answer(n, nnz)
    widths = given.support.offsets.diff()
    shape = (
        f"N {n}, V {V}, {given.support.nnz} kept, width median {int(widths.median())}, "
        f"max {int(widths.max())}, {float((widths == 1).float().mean()):.0%} of one id"
    )
    made = []
    for name, way in ways(given).items():
        if only not in name:
            continue
        gc.collect()
        times = milliseconds(way, repeats, clock=time.process_time)
        made.append(Row(name, cpu_ms=min(times)))
    return {"engines": {"shape": shape, "dtype": "one core, least process time", "rows": made}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16359)
    parser.add_argument("--kept", type=int, default=3_852_009)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="the ways whose names hold this text")
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json and NAME.png")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tables = run(options.rows, options.kept, options.repeats, options.only)
    show("engines", tables["engines"])
    if options.save:
        write(options.save, tables)
        draw(options.save, "Reading an engine's answer")


if __name__ == "__main__":
    main()
