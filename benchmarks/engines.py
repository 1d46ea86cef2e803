"""Reading an engine's answer: `python -m benchmarks.engines [--save NAME]`.

One answer of 16359 tokens whose top-p supports hold 3.85 million ids, in every form in which vLLM
and SGLang hand it out, and what else makes a support of it, on one CPU core. The time is the
process's own (`time.process_time`), the least of the runs: other programs take no part of it, but
they share the caches. JSON is decoded before, as the client's library has it.
"""

import argparse
import gc
import json
import math
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import Row, milliseconds, write
from benchmarks.tables import show
from benchmarks.workloads import V, zipf_rows
from rl_loss import Support
from rl_loss.packing import UNKNOWN_LOGPROB

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


def content(given: Answer, name: Callable[[int], dict[str, Any]]) -> dict:
    """`logprobs` of vLLM's server, which has no -inf."""
    rows = []
    for row, token in zip(given.top, given.sampled, strict=True):
        entries = {t: name(t) | {"logprob": max(q, -9999.0), "rank": 1} for t, q in row.items()}
        rows.append(entries[token] | {"top_logprobs": list(entries.values())})
    return {"content": rows}


def flat_answers(given: Answer) -> dict[str, Any]:
    """Masks as vLLM has them inside the engine: flat arrays with offsets."""
    ids, q, offsets = given.support.ids, given.support.sampler_logprobs, given.support.offsets
    rows = given.support.entry_rows
    order = q.argsort(descending=True)
    order = order[rows[order].argsort(stable=True)]
    partly = torch.where(offsets.diff()[rows] > 2048, UNKNOWN_LOGPROB, q)

    def mask(ids: Tensor, q: Tensor | None) -> SimpleNamespace:
        logprobs = None if q is None else q.numpy()
        return SimpleNamespace(token_ids=ids.numpy(), offsets=offsets.numpy(), logprobs=logprobs)

    return {
        "flat arrays": mask(ids, q),
        "flat arrays, the widest rows -9999": mask(ids, partly),
        "flat arrays, by probability": mask(ids[order], q[order]),
        "flat arrays of ids": mask(ids, None),
    }


def vllm_answers(given: Answer) -> dict[str, Any]:
    """What `from_vllm` reads."""
    tokens, bounds, flat = given.sampled, given.support.offsets[1:-1].numpy(), flat_answers(given)
    arrays = flat["flat arrays"]
    parts = [np.split(values, bounds) for values in (arrays.token_ids, arrays.logprobs)]
    top = [{token: Logprob(q) for token, q in row.items()} for row in given.top]
    choice = {"token_ids": tokens, "sampling_mask": given.ids}
    by_id = content(given, lambda token: {"token_id": token})
    by_text = content(given, lambda token: {"token": f"token_id:{token}"})

    def output(mask: Any, logprobs: Any = None) -> SimpleNamespace:
        return SimpleNamespace(token_ids=tokens, sampling_mask=mask, logprobs=logprobs)

    def lists(ids: list, logprobs: list | None) -> SimpleNamespace:
        return SimpleNamespace(token_ids=ids, logprobs=logprobs)

    return {
        **{form: output(mask) for form, mask in flat.items()},
        "lists": output(lists(given.ids, given.logprobs)),
        "lists of ids": output(lists(given.ids, None)),
        "lists of arrays": output(lists(*parts)),
        "JSON, lists": from_json(choice | {"sampling_mask_logprobs": given.logprobs}),
        "lists, top-20 dictionaries": output(lists(given.ids, None), top),
        "flat arrays, top-20 dictionaries": output(flat["flat arrays of ids"], top),
        "JSON, lists, top-20 content": from_json(choice | {"logprobs": by_id}),
        "JSON, lists, top-20 content of texts": from_json(choice | {"logprobs": by_text}),
    }


def sglang_answers(given: Answer) -> dict[str, Any]:
    """What `from_sglang` reads: the engine's chunk, its support mode, and the top 20 over V."""
    support, shift = given.support, math.log(KEPT_MASS)
    arrays = (support.offsets.diff(), support.ids, support.sampler_logprobs)
    chunk = Chunk(*(values.numpy() for values in arrays))
    own = [row[token] for row, token in zip(given.top, given.sampled, strict=True)]
    pairs = zip(own, given.sampled, strict=True)
    scored = {
        "output_token_sampling_mask": given.ids,
        "output_token_logprobs": [(q + shift, token, None) for q, token in pairs],
    }
    top = [[(max(q, -30.0) + shift, t, None) for t, q in row.items()] for row in given.top]
    every = scored | {"output_token_sampling_logprobs": given.logprobs}
    some = scored | {"output_token_sampling_logprobs": own, "output_top_logprobs": top}
    return {
        "chunk": {
            "output_ids": given.sampled,
            "meta_info": {"output_token_sampling_mask": chunk},
        },
        "JSON, support mode": from_json({"meta_info": every}),
        "JSON, top 20": from_json({"meta_info": some}),
    }


def floors(given: Answer) -> dict[str, Callable[[], object]]:
    """What the entries alone take: copied, and turned from lists into arrays."""
    ids, q = given.support.ids, given.support.sampler_logprobs

    def joined(code: str, rows: list[list]) -> array:
        flat = array(code)
        for row in rows:
            flat.fromlist(row)
        return flat

    return {
        "floor: arrays copied": lambda: (ids.clone(), q.clone()),
        "floor: lists to arrays": lambda: (joined("i", given.ids), joined("d", given.logprobs)),
    }


def ways(given: Answer) -> dict[str, Callable[[], object]]:
    """Each way to a support by name."""
    support = given.support
    packed, counts, *_ = support.to_packed()
    ids, widths, logprobs, *_ = support.to_bytes()
    rows = list(zip(given.ids, given.logprobs, strict=True))
    kept = [{t: Logprob(q) for t, q in row.items() if q > -torch.inf} for row in given.top]
    labels = torch.tensor(given.sampled)
    made: dict[str, Callable[[], object]] = floors(given)
    made |= {
        "from_packed": lambda: Support.from_packed(packed, counts),
        "from_bytes": lambda: Support.from_bytes(ids, widths, logprobs),
        "from_rows, lists": lambda: Support.from_rows(rows),
        "from_top_logprobs, dictionaries": lambda: Support.from_top_logprobs(kept),
    }
    vllm, sglang = vllm_answers(given), sglang_answers(given)
    for form, one in vllm.items():
        made[f"from_vllm, {form}"] = lambda one=one: Support.from_vllm(one)
    for form, one in sglang.items():
        made[f"from_sglang, {form}"] = lambda one=one: Support.from_sglang(one)
    for form in ("flat arrays", "lists", "lists, top-20 dictionaries"):
        made[f"read_answer, vLLM, {form}"] = lambda one=vllm[form]: Support.read_answer(one)
    for form, one in sglang.items():
        made[f"read_answer, SGLang, {form}"] = lambda one=one: Support.read_answer(one)
    own = Support.read_answer(vllm["lists"]).inference_logprobs
    made["validate"] = lambda: support.validate(labels, V, inference_logprobs=own)
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
        if only in name:
            gc.collect()  # of what the last way left
            times = milliseconds(way, repeats, clock=time.process_time)
            made.append(Row(name, cpu_ms=min(times), ratio=0.0))
    return {"engines": {"shape": shape, "dtype": "least process time", "rows": made}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16359)
    parser.add_argument("--kept", type=int, default=3_852_009)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", default="", help="the ways whose names hold this text")
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tables = run(options.rows, options.kept, options.repeats, options.only)
    show("engines", tables["engines"])
    if options.save:
        write(options.save, tables)


if __name__ == "__main__":
    main()
