"""What engines list, as tensors: numbers, rows of numbers, and top log-probabilities.

Numbers in lists and arrays become tensors at once, top log-probabilities, which come as objects or
as dicts of JSON, a row at a time. What cannot be read so is read one by one, and named where bad.
"""

import operator
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from numbers import Real
from reprlib import repr as short
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_loss.arguments import is_integral, numbers, refuse_half
from rl_loss.csr import first_row, offsets_of, rows_at, rows_of_entries


class Numbers(NamedTuple):
    """A sort of numbers: what `array` and torch call it, and what errors do; what many of them
    are read as, and in which formats arrays show them."""

    code: str
    dtype: torch.dtype
    one: str
    several: str
    many: str
    formats: str
    half: torch.dtype  # of four bytes


INTS = Numbers("q", torch.int64, "an int", "ids", "i", "ilq", torch.int32)
# Many floats stay in float64 until they are checked.
REALS = Numbers("d", torch.float64, "a float", "floats", "d", "fd", torch.float32)

_DICTS = (dict, Mapping)  # to know the most common one takes a tenth of the time

_BY_ID = "token_id:"  # before a token's number where a server has texts for tokens

_NO_NUMBER = (TypeError, ValueError, OverflowError, RuntimeError)
_NO_TRIPLE = (*_NO_NUMBER, IndexError, KeyError)


def read(source: Any, name: str) -> Any:
    """A field of an object or a dict, None where it has none."""
    return source.get(name) if isinstance(source, _DICTS) else getattr(source, name, None)


def has(source: Any, name: str) -> bool:
    """Whether an object or a dict has the field, be it None."""
    return name in source if isinstance(source, _DICTS) else hasattr(source, name)


# --- lists ---


def is_list(value: Any) -> bool:
    """Whether it is a list of any sort: a tuple, an array, a tensor, vLLM's `FlatLogprobs`."""
    if isinstance(value, (str, bytes, bytearray, Mapping)) or getattr(value, "ndim", 1) == 0:
        return False
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def is_flat(values: Any) -> bool:
    """Whether a list holds numbers, not rows of any sort."""
    first = next((value for value in values if value is not None), 0)
    return isinstance(first, Real) or getattr(first, "ndim", None) == 0


def same_length(name: str, values: Any, n: int, what: str = "token") -> None:
    """Refuses what is no list of n."""
    got = len(values) if is_list(values) else short(values)
    if got != n:
        raise ValueError(f"{name} must have one entry a {what} ({n}), got {got}")


def vector(name: str, values: Any, sort: Numbers) -> Tensor:
    """A list, an array or a tensor of numbers as int64 or float64 on the host."""
    if not is_list(values):
        raise ValueError(f"{name} must be a list of {sort.several}, got {short(values)}")
    if not hasattr(values, "dtype") or values.dtype == object:
        try:
            return _tensor(array(sort.code, values), 8, sort)
        except _NO_NUMBER as error:
            raise _no_number(name, values, sort) from error
    if not getattr(getattr(values, "flags", None), "writeable", True):
        values = values.copy()  # torch warns of an array that it may not write to
    tensor = numbers(name, values).detach().cpu()
    real = sort.dtype.is_floating_point
    if tensor.dim() != 1 or not (tensor.is_floating_point() if real else is_integral(tensor)):
        raise ValueError(
            f"{name} must be a list of {sort.several}, got {tensor.dtype} {list(tensor.shape)}"
        )
    return refuse_half(name, tensor).to(sort.dtype)


def column(name: str, values: Any, sort: Numbers) -> Tensor:
    """As `vector`, but in four bytes a number where an array has them so; copied, for the engine
    may use its memory again."""
    copied = _buffers([values], sort)
    return vector(name, values, sort) if copied is None else copied


def ragged(name: str, rows: Iterable[Any], sort: Numbers) -> tuple[Tensor, Tensor]:
    """Rows of numbers one after another, as `column` has them, and how many each has, `[N]`
    int64."""
    lists = all(isinstance(row, (list, tuple)) for row in rows)
    joined = _lists(rows, sort) if lists else _buffers(rows, sort)
    if joined is not None:
        return joined, lengths(rows)
    parts = [vector(f"{name}[{row}]", values, sort) for row, values in enumerate(rows)]
    return torch.cat(parts), lengths(parts)


def _lists(rows: Iterable[Any], sort: Numbers) -> Tensor | None:
    """What lists hold, end to end; None where one holds what is no such number, or an id that
    no int32 holds."""
    flat = array(sort.many)
    try:
        for values in rows:
            flat.fromlist(values if isinstance(values, list) else list(values))
    except _NO_NUMBER:
        return None
    return _tensor(flat, flat.itemsize, sort)


def lengths(rows: Iterable[Any]) -> Tensor:
    """How many each row has, `[N]` int64."""
    return _tensor(array(INTS.code, map(len, rows)), 8, INTS)


def check_range(name: str, ids: Tensor, offsets: Tensor) -> None:
    """Refuses ids that no int32 holds or that are negative, naming their row."""
    if len(ids) and (int(ids.amin()) < 0 or int(ids.amax()) >= 2**31):
        ids = ids.to(torch.int64)  # an int32 would be compared with the bound's own lower bits
        at = torch.tensor(first_row((ids < 0) | (ids >= 2**31)))
        row = int(rows_at(offsets, at))
        raise ValueError(f"{name}[{row}]: ids must be in [0, 2**31), got {int(ids[at])}")


def _buffers(parts: Iterable[Any], sort: Numbers) -> Tensor | None:
    """What arrays of one format hold, end to end and copied; None where any is something else.

    NumPy's arrays show their memory, and torch need not know of each."""
    try:
        views = [memoryview(part) for part in parts]
    except (TypeError, ValueError, BufferError):
        return None
    forms = {(view.format, view.itemsize, view.ndim, view.c_contiguous) for view in views}
    if len(forms) != 1:
        return None
    ((code, size, dims, contiguous),) = forms
    if code not in sort.formats or dims != 1 or not contiguous:
        return None
    return _tensor(bytearray().join(views), size, sort)


def _tensor(data: Any, itemsize: int, sort: Numbers) -> Tensor:
    """The numbers that fill a buffer, which is not copied."""
    dtype = sort.dtype if itemsize == 8 else sort.half
    return torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)


def _no_number(name: str, values: Iterable[Any], sort: Numbers) -> ValueError:
    for at, value in enumerate(values):
        try:
            array(sort.code, [value])
        except _NO_NUMBER:
            return ValueError(f"{name}[{at}] must be {sort.one}, got {short(value)}")
    raise AssertionError("every value is a number")


# --- top log-probabilities ---


def read_top(name: str, rows: Iterable[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """`end_to_end` of the `top_entries`, several times as fast where all are well-formed."""
    ids, logprobs, counts = array(INTS.code), array(REALS.code), array(INTS.code)
    try:
        for given in rows:
            tokens, values = _plain(given)
            ids.fromlist(tokens)
            logprobs.fromlist(values)
            counts.append(len(tokens))
    except (*_NO_TRIPLE, AttributeError):  # read one by one, what is wrong is named
        return end_to_end(name, top_entries(name, rows))
    q = _tensor(logprobs, 8, REALS)
    return _with_rows(name, _tensor(ids, 8, INTS), q, _tensor(counts, 8, INTS))


def top_entries(name: str, rows: Iterable[Any]) -> list[dict[int, float]]:
    """Each token's top log-probabilities by id."""
    return [_entries(f"{name}[{row}]", given) for row, given in enumerate(rows)]


def end_to_end(name: str, entries: Sequence[dict[int, float]]) -> tuple[Tensor, Tensor, Tensor]:
    """The ids of each row, the row of each id, its log-probability, `[K]` each."""
    ids = vector(name, list(chain.from_iterable(entries)), INTS)
    logprobs = vector(name, list(chain.from_iterable(map(dict.values, entries))), REALS)
    return _with_rows(name, ids, logprobs, lengths(entries))


def _with_rows(
    name: str, ids: Tensor, logprobs: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    offsets = offsets_of(counts)
    check_range(name, ids, offsets)
    return ids, rows_of_entries(offsets, len(ids)), logprobs


def triples(name: str, given: Any) -> tuple[list[int], list[float]]:
    """Ids and log-probabilities of SGLang's `(logprob, id, text)`."""
    try:
        return [operator.index(one[1]) for one in given], [float(one[0]) for one in given]
    except _NO_TRIPLE as error:
        raise _no_triple(name, given) from error


def content_id(name: str, entry: Any) -> int:
    """The id of an entry of a server's `logprobs.content`: its `token_id`, or its `token` where
    that is one (`token_id:5`)."""
    token = read(entry, "token_id")
    token = read(entry, "token") if token is None else token
    try:
        if isinstance(token, str) and not token.startswith(_BY_ID):
            raise ValueError("a text")  # also where it is a digit
        return _id(token)
    except _NO_NUMBER as error:
        raise ValueError(
            f"{name} must name its tokens by id, got {short(token)}: ask the server for "
            "return_tokens_as_token_ids"
        ) from error


def _plain(given: Any) -> tuple[list[Any], list[Any]]:
    """The ids and log-probabilities of `_entries`, where all are of one sort and as engines make
    them; where they are not, an error of some sort, or what no `array` takes."""
    if isinstance(given, (list, tuple)):
        ids, logprobs = [one[1] for one in given], [one[0] for one in given]
    elif "logprob" in given:
        top = given.get("top_logprobs") or ()
        (own, *ids), logprobs = _plain_ids([given, *top]), [one["logprob"] for one in top]
        if own in ids:  # a server counts the sampled one among the top ones as well
            logprobs[ids.index(own)] = given["logprob"]
        else:
            ids.append(own)
            logprobs.append(given["logprob"])
    else:
        logprobs = list(given.values())
        if logprobs and isinstance(logprobs[0], dict):
            logprobs = [entry["logprob"] for entry in logprobs]
        elif logprobs and hasattr(logprobs[0], "logprob"):
            logprobs = [entry.logprob for entry in logprobs]
        return list(given), logprobs
    if len({*ids}) != len(ids):
        raise ValueError("an id twice, of which the last would count")
    return ids, logprobs


def _plain_ids(entries: list[dict[str, Any]]) -> list[Any]:
    """What `content_id` makes of each, all being named in one way."""
    ids = [one.get("token_id") for one in entries]
    if ids.count(None) == len(ids):
        texts = [one["token"] for one in entries]
        if not all(text.startswith(_BY_ID) for text in texts):
            raise ValueError("a text")
        return [int(text[len(_BY_ID) :]) for text in texts]
    if type(ids[0]) is not int:
        raise ValueError("no id")
    return ids


def _entries(name: str, given: Any) -> dict[int, float]:
    """vLLM's dict from id to `Logprob`, its dict or a float; an entry of a server's `content`;
    SGLang's list of `(logprob, id, text)`."""
    if has(given, "logprob"):
        top = (*(read(given, "top_logprobs") or ()), given)
        return {content_id(name, one): _logprob(name, read(one, "logprob")) for one in top}
    if is_list(given):
        return dict(zip(*triples(name, given), strict=True))
    if not isinstance(given, _DICTS):
        raise ValueError(f"{name} must hold log-probabilities by id, got {short(given)}")
    known = {}
    for token, entry in given.items():
        fields = isinstance(entry, _DICTS) or hasattr(entry, "logprob")
        logprob = read(entry, "logprob") if fields else entry
        try:
            known[token if type(token) is int else _id(token)] = float(logprob)
        except _NO_NUMBER as error:
            raise ValueError(
                f"{name} must hold a log-probability an id, got {short(logprob)} for {short(token)}"
            ) from error
    return known


def _id(token: Any) -> int:
    """An id, or the string that JSON makes of it."""
    return int(token.removeprefix(_BY_ID)) if isinstance(token, str) else operator.index(token)


def _logprob(name: str, value: Any) -> float:
    try:
        return float(value)
    except _NO_NUMBER as error:
        raise ValueError(f"{name}: logprob must be a float, got {short(value)}") from error


def _no_triple(name: str, given: Any) -> ValueError:
    if not is_list(given):
        return ValueError(f"{name} must be a list of (logprob, id, text), got {short(given)}")
    for at, one in enumerate(given):
        try:
            operator.index(one[1])
        except _NO_TRIPLE:
            return ValueError(f"{name}[{at}] must be (logprob, id, text), got {short(one)}")
        try:
            float(one[0])
        except _NO_NUMBER:
            return ValueError(f"{name}[{at}][0] must be a float, got {short(one[0])}")
    raise AssertionError("every entry is well-formed")
