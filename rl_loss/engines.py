"""From what vLLM and SGLang return of a request to the columns of a support.

Nothing is imported from either engine: their objects, and the plain dicts of their JSON, are
read by attribute or key.
"""

import math
from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from rl_loss.csr import TOLERANCE, RowKind, entries_of, first_row, offsets_of
from rl_loss.engine_lists import (
    INTS,
    REALS,
    content_id,
    end_to_end,
    has,
    is_flat,
    is_list,
    read,
    read_top,
    same_length,
    top_entries,
    triples,
    vector,
)
from rl_loss.kept_ids import (
    Entries,
    KeptIds,
    kept_logprobs,
    known_logprobs,
    looked_up,
    nothing_known,
    read_kept,
)
from rl_loss.packing import UNKNOWN_LOGPROB
from rl_loss.row_parsing import Columns

_SGLANG_TOKENS = ("output_ids", "response_token_ids")  # of generate and of chat


# --- answers ---


def vllm_columns(mask: Any, logprobs: Any = None, argument: str = "mask") -> Columns:
    """See `Support.from_vllm`."""
    answer = _only(argument, mask)
    sources = [("logprobs", logprobs)]
    held = answer
    if has(answer, "sampling_mask"):
        held = read(answer, "sampling_mask")
        sources += [
            (f"{argument}.sampling_mask.logprobs", read(held, "logprobs")),
            (f"{argument}.sampling_mask_logprobs", read(answer, "sampling_mask_logprobs")),
        ]
    sources.append((f"{argument}.logprobs", read(answer, "logprobs")))
    kept = read_kept(argument, held)
    given = [(name, _rows(name, source, kept)) for name, source in sources]
    q = None
    for name, rows in given:
        if rows is None or not len(kept.ids):  # no id is to be known
            continue
        if q is None:
            q = kept_logprobs(name, rows, kept)
        elif (unknown := q.isnan()).any():  # the first source that knows an id wins
            q = torch.where(unknown, kept_logprobs(name, rows, kept), q)
    return _replay(kept, nothing_known(kept) if q is None else q)


def sglang_columns(mask: Any, logprobs: Any = None, argument: str = "mask") -> Columns:
    """See `Support.from_sglang`."""
    answer = _only(argument, mask)
    meta, field = _meta(answer), "output_token_sampling_mask"
    held = read(meta, field) if has(meta, field) else meta
    kept = read_kept(argument, held)
    source = meta if logprobs is None else _meta(logprobs)
    name = "output_token_sampling_logprobs"
    given, sampled, top = read(source, name), read(source, "output_token_logprobs"), _top(source)
    given = read(held, "logprobs") if given is None and kept.flat else given
    if given is None:
        if top is not None or sampled is not None:
            raise ValueError(
                f"logprobs: {name} is missing: without the sampled token's log-probability over "
                "the kept set the others cannot be shifted onto it"
            )
        return _replay(kept, nothing_known(kept))
    n, nnz = len(kept.counts), len(kept.ids)
    every = kept.flat and is_list(given) and len(given) == nnz and is_flat(given)
    if not every:
        same_length(name, given, n)
        every = not is_flat(given)
    scored, tokens, raw = "output_ids", _generated(answer, *_SGLANG_TOKENS), None
    if sampled is not None:
        scored = "output_token_logprobs"
        same_length(scored, sampled, n)
        ids, values = triples(scored, sampled)
        tokens, raw = vector(scored, ids, INTS), vector(scored, values, REALS)
    own = None if tokens is None else _own(scored, tokens, kept)
    if every:
        return _replay(kept, kept_logprobs(name, given, kept))
    if own is None or (top is not None and raw is None):
        raise ValueError("logprobs: output_token_logprobs is missing: it names the sampled token")
    over_kept, q = vector(name, given, REALS), nothing_known(kept)
    sampled_q = known_logprobs(name, over_kept[own.rows], kept, own.at)
    shift = None if raw is None else _shift(name, over_kept, raw)
    if shift is not None and top is not None:
        same_length("output_top_logprobs", top, n)
        found, others = looked_up("output_top_logprobs", [row or [] for row in top], kept)
        q[found.at] = (others + shift[found.rows]).float()
    q[own.at] = sampled_q.float()
    return _replay(kept, q)


def top_columns(logprobs: Any, sampled: Any = None, argument: str = "logprobs") -> Columns:
    """See `Support.from_top_logprobs`."""
    rows = logprobs
    if not is_list(rows):
        answer = _only(argument, logprobs)
        meta = _meta(answer)
        for held in (read(answer, "sampling_mask"), read(meta, "output_token_sampling_mask")):
            if held is not None:
                raise ValueError(
                    f"{argument} holds a sampling mask: its request was truncated, and its rows "
                    "are REPLAY (from_vllm, from_sglang)"
                )
        sampled = read(meta, "output_token_logprobs") if sampled is None else sampled
        rows = _top(meta)
        rows = read(answer, "logprobs") if rows is None else rows
        rows = _content(argument, answer if rows is None and has(answer, "content") else rows)
    if not is_list(rows):
        raise ValueError(
            f"{argument} must hold top log-probabilities of each token, got "
            f"{type(logprobs).__name__}: were they asked for (vLLM: logprobs, SGLang: "
            "top_logprobs_num)?"
        )
    if sampled is None:
        ids, of_row, q = read_top(argument, rows)
    else:
        entries = top_entries(argument, rows)
        same_length("sampled", sampled, len(entries))
        for known, token, logprob in zip(entries, *triples("sampled", sampled), strict=True):
            known.setdefault(token, logprob)
        ids, of_row, q = end_to_end(argument, entries)
    bad = ~((q > UNKNOWN_LOGPROB) & (q < math.inf))
    if bad.any():
        at = first_row(bad)
        raise ValueError(
            f"{argument}[{int(of_row[at])}]: id {int(ids[at])} has log-probability "
            f"{float(q[at])}: of the top ids of an untruncated request none is impossible or "
            "unknown"
        )
    return _columns(ids, q, of_row.bincount(minlength=len(rows)), RowKind.HEAD)


def answer_columns(answer: Any, kind: Any) -> tuple[Columns, Tensor]:
    """The columns of a whole answer, and its sampled tokens `[N]`; see `Support.read_answer`."""
    name, answer = "answer", _only("answer", answer)
    meta = _meta(answer)
    scored = read(meta, "output_token_logprobs")
    sglang = meta is not answer or scored is not None or has(meta, "output_token_sampling_mask")
    if kind == RowKind.HEAD:
        columns = top_columns(answer, argument=name)
    elif kind == RowKind.REPLAY:
        columns = (sglang_columns if sglang else vllm_columns)(answer, argument=name)
    else:
        raise ValueError(f"kind must be REPLAY or HEAD, got {short(kind)}")
    tokens = _generated(answer, *(_SGLANG_TOKENS if sglang else ("token_ids",)))
    if scored is not None:
        tokens = vector(name, triples("output_token_logprobs", scored)[0], INTS)
    if tokens is None:  # chat answers of vLLM's server name them in their log-probabilities alone
        rows = _content(name, read(answer, "logprobs")) or ()
        tokens = vector(name, [content_id(name, row) for row in rows], INTS)
    return columns, tokens


def label_logprobs(columns: Columns, labels: Tensor) -> Tensor:
    """`[N]` float32: the log-probability that each row holds of its label."""
    ids, logprobs, known, counts, _ = columns
    same_length("answer: the sampled tokens", labels, len(counts))
    own = Entries(*entries_of(labels, ids, offsets_of(counts)))
    found = torch.full(counts.shape, math.nan, dtype=torch.float32)
    found[own.rows] = torch.where(known[own.at], logprobs[own.at], math.nan)
    missing = found.isnan()
    if missing.any():
        row = first_row(missing)
        why = "has no known log-probability: were log-probabilities asked for?"
        if not (own.rows == row).any():
            why = f"is not among the {int(counts[row])} ids of its row"
        raise ValueError(f"answer: token {int(labels[row])} of row {row} {why}")
    return found


# --- where things stand in an answer ---


def _only(argument: str, answer: Any) -> Any:
    """The one output of a request, or what is an output itself."""
    for name in ("outputs", "choices"):
        outputs = read(answer, name)
        if is_list(outputs):
            if len(outputs) != 1:
                raise ValueError(f"{argument} must be one output, got {len(outputs)} {name}")
            return outputs[0]
    return answer


def _meta(answer: Any) -> Any:
    """SGLang's `meta_info`, where the answer is around it."""
    meta = read(answer, "meta_info")
    return answer if meta is None else meta


def _top(meta: Any) -> Any:
    """SGLang's top log-probabilities."""
    if read(meta, "output_top_logprobs_shape") is not None:
        raise ValueError(
            "output_top_logprobs must be lists of (logprob, id, text), got them flat: ask without "
            "return_flat_raw_output_top_logprobs"
        )
    return read(meta, "output_top_logprobs")


def _generated(answer: Any, *names: str) -> Tensor | None:
    """The sampled tokens, where the answer lists them under one of the names."""
    for name in names:
        tokens = read(answer, name)
        if tokens is not None:
            return vector(name, tokens, INTS)
    return None


def _content(name: str, given: Any) -> Any:
    """The rows of log-probabilities, out of the `content` of a server's JSON."""
    if given is None or is_list(given):
        return given
    rows = read(given, "content")
    fields = given.items() if isinstance(given, Mapping) else ()
    others = [key for key, value in fields if key != "content" and value is not None]
    if rows is None and (others or not has(given, "content")):
        raise ValueError(
            f"{name} must be a row a token, or hold them as content, got {others or short(given)}"
        )
    return rows


def _rows(name: str, given: Any, kept: KeptIds) -> Any:
    """Log-probabilities for N tokens, a row each, or flat where the kept ids are."""
    rows = _content(name, given)
    if rows is not None:
        flat = kept.flat and is_list(rows) and is_flat(rows)
        n, what = (len(kept.ids), "kept id") if flat else (len(kept.counts), "token")
        same_length(name, rows, n, what)
    return rows


# --- what SGLang says of its sampled tokens ---


def _shift(name: str, over_kept: Tensor, raw: Tensor) -> Tensor:
    """`[N]` float64: minus the log of the mass that SGLang's sampler kept of each token."""
    shift = over_kept - raw
    bad = ~((shift >= -TOLERANCE) & (shift < math.inf))
    if bad.any():
        row = first_row(bad)
        raise ValueError(
            f"{name}[{row}] must be at least the token's log-probability over the vocabulary, "
            f"{float(raw[row]):.6f}, got {float(over_kept[row]):.6f}: the kept mass would not be "
            "in (0, 1]"
        )
    return shift


def _own(name: str, tokens: Tensor, kept: KeptIds) -> Entries:
    """The sampled tokens' entries, of which each of SGLang's rows must hold one."""
    same_length(name, tokens, len(kept.counts))
    own = Entries(*entries_of(tokens, kept.ids, kept.offsets))
    held = torch.zeros(len(tokens), dtype=torch.bool)
    held[own.rows] = True
    if not held.all():
        row = first_row(~held)
        raise ValueError(
            f"{name}[{row}] must be of a kept id, got token {int(tokens[row])}, "
            f"which the mask's row ({int(kept.counts[row])} ids) does not hold"
        )
    return own


def _replay(kept: KeptIds, q: Tensor) -> Columns:
    return _columns(kept.ids, q, kept.counts, RowKind.REPLAY)


def _columns(ids: Tensor, q: Tensor, counts: Tensor, kind: RowKind) -> Columns:
    kinds = torch.full(counts.shape, int(kind), dtype=torch.int8)
    return Columns(ids.to(torch.int32), q.to(torch.float32), ~q.isnan(), counts, kinds)
