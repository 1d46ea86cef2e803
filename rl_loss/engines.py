"""Supports from what vLLM and SGLang return of a request, joined with its log-probabilities.

Nothing is imported from either engine: their objects, and the plain dicts of their JSON, are
read by attribute or key.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from itertools import pairwise
from reprlib import repr as short
from typing import Any

from rl_loss.csr import TOLERANCE
from rl_loss.support import Support

# JSON cannot hold -inf: what vLLM's server writes in its place.
_JSON_MINUS_INF = -9999.0


def _read(source: Any, name: str) -> Any:
    if isinstance(source, Mapping):
        return source.get(name)
    return getattr(source, name, None)


def _id_rows(mask: Any, argument: str) -> list[list[int]]:
    """One list of kept ids a position, from nested lists or from flat ids with offsets."""
    ids, offsets = _read(mask, "token_ids"), _read(mask, "offsets")
    if ids is None and isinstance(mask, Sequence) and not isinstance(mask, str):
        ids = mask
    if ids is None:
        raise ValueError(
            f"{argument} must hold the kept ids of each token, got {type(mask).__name__}: "
            "was the engine asked for its sampling mask?"
        )
    if offsets is None:
        return [_ids(f"{argument}[{row}]", kept) for row, kept in enumerate(ids)]
    bounds = _ids(f"{argument}: offsets", offsets)
    if not bounds or bounds[0] != 0 or bounds[-1] != len(ids) or sorted(bounds) != bounds:
        raise ValueError(f"{argument}: offsets must rise from 0 to {len(ids)}, got {bounds}")
    flat = _ids(argument, ids)
    return [flat[start:stop] for start, stop in pairwise(bounds)]


def _ids(name: str, values: Any) -> list[int]:
    """A row of ids, from a list, tuple, array or tensor."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise ValueError(f"{name} must be a list of ids, got {short(values)}")
    try:
        return list(map(operator.index, values))
    except TypeError as error:
        at = next(i for i, value in enumerate(values) if not _is_index(value))
        raise ValueError(f"{name}[{at}] must be an id, got {short(values[at])}") from error


def _is_index(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _float(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be a float, got {short(value)}") from error


def _finite(logprob: float, row: int, token: int) -> float:
    if not _JSON_MINUS_INF < logprob < math.inf:
        raise ValueError(
            f"logprobs: kept id {token} of row {row} has log-probability {logprob}: the mask and "
            "the log-probabilities are not of one request"
        )
    return logprob


def _join(kept: list[int], known: Mapping[int, float], row: int) -> tuple[list[int], list[float]]:
    """The kept ids with the log-probabilities that are known of them, NaN elsewhere."""
    return kept, [
        _finite(known[token], row, token) if token in known else math.nan for token in kept
    ]


def _of_dict(name: str, given: Mapping[Any, Any]) -> dict[int, float]:
    """Log-probabilities by id: of floats, of objects with `logprob`, or of their dicts."""
    known = {}
    for token, entry in given.items():
        has_fields = isinstance(entry, Mapping) or hasattr(entry, "logprob")
        logprob = _read(entry, "logprob") if has_fields else entry
        try:
            known[int(token)] = float(logprob)  # JSON keys are strings
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{name} must hold a log-probability an id, got {short(logprob)} for {short(token)}"
            ) from error
    return known


def _in_order(name: str, kept: list[int], given: Any) -> dict[int, float]:
    """Log-probabilities by id, given in the order of the kept ids."""
    _same_length(name, given, len(kept))
    return {
        token: _float(f"{name}[{at}]", value)
        for at, (token, value) in enumerate(zip(kept, given, strict=True))
    }


def _same_length(argument: str, rows: Any, n: int) -> None:
    got = len(rows) if hasattr(rows, "__len__") else repr(rows)
    if got != n:
        raise ValueError(f"{argument} must have one entry a token ({n}), got {got}")


def _token(name: str, entry: Any) -> int:
    """The id of SGLang's `(logprob, id, text)`."""
    try:
        return operator.index(entry[1])
    except (TypeError, IndexError, KeyError) as error:
        raise ValueError(f"{name} must be (logprob, id, text), got {short(entry)}") from error


def support_from_vllm(mask: Any, logprobs: Any = None) -> Support:
    """REPLAY rows from vLLM's sampling mask and the request's processed log-probabilities.

    The engine is started with `return_sampling_mask` and `logprobs_mode="processed_logprobs"`
    and asked for a finite `top_k` and, say, `logprobs=20`. A row whose kept ids are all among
    those log-probabilities is complete, and its centering exact; on the others the missing ids
    are the tail inside the kept set. Raw log-probabilities do not add up to 1 over the kept set:
    `Support.validate` finds them.

    Args:
        mask: `CompletionOutput.sampling_mask` (`token_ids`, a list of id lists, or flat ids with
            `offsets`), its dict, a list of id lists, or a choice of the generate endpoint's JSON
            (`sampling_mask`, and `sampling_mask_logprobs` where it was asked for).
        logprobs: `CompletionOutput.logprobs`: per token a dict from id to `Logprob`, its dict or
            a float; or per token the log-probabilities of the kept ids, in their order. None:
            the ids alone (or those that the JSON holds).

    Raises:
        ValueError: no mask, lengths that do not fit, a token without either, a kept id with
            probability 0.

    Source: vLLM, pull request 49577.

    Example:
        >>> support_from_vllm([[5, 9]], [{9: -0.6931, 5: -0.6931}]).host.complete.tolist()
        [True]
    """
    nested = _read(mask, "sampling_mask")
    if nested is not None:
        logprobs = _read(mask, "sampling_mask_logprobs") if logprobs is None else logprobs
        mask = nested
    rows = _id_rows(mask, "mask")
    if logprobs is None:
        return Support.from_rows([(ids, None) for ids in rows])
    _same_length("logprobs", logprobs, len(rows))
    joined = []
    for row, ids in enumerate(rows):
        name, given = f"logprobs[{row}]", logprobs[row]
        known = _of_dict(name, given) if isinstance(given, Mapping) else _in_order(name, ids, given)
        joined.append(_join(ids, known, row))
    return Support.from_rows(joined)


def support_from_sglang(mask: Any, logprobs: Any = None) -> Support:
    """REPLAY rows from SGLang's sampling mask and the log-probabilities of its `meta_info`.

    SGLang's top log-probabilities are over the whole vocabulary, and only the sampled token's is
    given over the kept set as well. The difference of the two is minus the log of the kept mass:
    it shifts the top ids onto the kept set. (The engine's log-probabilities must be those of the
    logits it sampled from, after temperature.)

    Args:
        mask: `meta_info` of a request with `return_sampling_mask`
            (`output_token_sampling_mask`), or that list of id lists itself.
        logprobs: a dict with `output_token_sampling_logprobs` (a float a token, or in its
            support mode a list a token: then nothing else is needed), `output_token_logprobs`
            and `output_top_logprobs` (`(logprob, id, text)`); by default those that `mask`
            holds. Without any, the ids alone.

    Raises:
        ValueError: no mask, lengths that do not fit, a token that is not scored, a kept id with
            probability 0, top log-probabilities without what shifts them; what one request
            cannot hold: a sampled token outside its kept set, or one whose log-probability over
            the kept set is below that over the vocabulary.

    Source: SGLang, pull requests 27408 and 36630.

    Example:
        >>> support_from_sglang([[5, 9]], {"output_token_sampling_logprobs": [[-0.7, -0.7]]}).nnz
        2
    """
    logprobs = mask if logprobs is None else logprobs
    nested = _read(mask, "output_token_sampling_mask")
    rows = _id_rows(mask if nested is None else nested, "mask")
    replayed = _read(logprobs, "output_token_sampling_logprobs")
    sampled = _read(logprobs, "output_token_logprobs")
    top = _read(logprobs, "output_top_logprobs")
    if replayed is None:
        if top is not None or sampled is not None:
            raise ValueError(
                "logprobs: output_token_sampling_logprobs is missing: without the sampled "
                "token's log-probability over the kept set the others cannot be shifted onto it"
            )
        return Support.from_rows([(ids, None) for ids in rows])
    _same_length("output_token_sampling_logprobs", replayed, len(rows))
    if sampled is not None:
        _same_length("output_token_logprobs", sampled, len(rows))
    if len(rows) and isinstance(replayed[0], Sequence):
        return _of_support_mode(rows, replayed, sampled)
    if sampled is None:
        raise ValueError("logprobs: output_token_logprobs is missing: it names the sampled token")
    if top is not None:
        _same_length("output_top_logprobs", top, len(rows))
    joined = []
    for row, ids in enumerate(rows):
        over_kept = _float(f"output_token_sampling_logprobs[{row}]", replayed[row])
        name = f"output_token_logprobs[{row}]"
        token = _token(name, sampled[row])
        raw = _float(f"{name}[0]", sampled[row][0])
        _check_kept(ids, token, row)
        known = {token: _finite(over_kept, row, token)}
        shift = over_kept - raw  # minus the log of the kept mass
        if not -TOLERANCE <= shift < math.inf:
            raise ValueError(
                f"output_token_sampling_logprobs[{row}] must be at least the token's "
                f"log-probability over the vocabulary, {raw:.6f}, got {over_kept:.6f}: the kept "
                "mass would not be in (0, 1]"
            )
        entries = top[row] if top is not None and top[row] is not None else ()
        for at, entry in enumerate(entries):
            name = f"output_top_logprobs[{row}][{at}]"
            known.setdefault(_token(name, entry), _float(f"{name}[0]", entry[0]) + shift)
        joined.append(_join(ids, known, row))
    return Support.from_rows(joined)


def _of_support_mode(rows: list[list[int]], replayed: Any, sampled: Any) -> Support:
    """SGLang's log-probabilities of all kept ids, in their order."""
    joined = []
    for row, ids in enumerate(rows):
        if sampled is not None:
            _check_kept(ids, _token(f"output_token_logprobs[{row}]", sampled[row]), row)
        known = _in_order(f"output_token_sampling_logprobs[{row}]", ids, replayed[row])
        joined.append(_join(ids, known, row))
    return Support.from_rows(joined)


def _check_kept(kept: list[int], token: int, row: int) -> None:
    if token not in kept:
        raise ValueError(
            f"output_token_logprobs[{row}] must be of a kept id, got token {token}, which the "
            f"mask's row ({len(kept)} ids) does not hold"
        )
