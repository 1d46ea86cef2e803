"""From what callers hold - Python rows, wire entries, padded ids - to the columns of a support."""

import math
from array import array
from collections.abc import Iterable, Mapping
from reprlib import repr as short
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from rl_loss.arguments import is_integral, numbers, refuse_half, require_tensor
from rl_loss.csr import (
    HostFacts,
    RowKind,
    count_by_row,
    first_row,
    rows_at,
    rows_of_entries,
    selected_entries,
)
from rl_loss.packing import UNKNOWN_LOGPROB, numbers_of_bytes, unpack_entries


class Columns(NamedTuple):
    """The entries of N rows, one row after another, and what is said of each row."""

    ids: Tensor  # [nnz] int32
    logprobs: Tensor  # [nnz] float32
    known: Tensor  # [nnz] bool
    counts: Tensor  # [N] int64 entries
    kind: Tensor  # [N] int8


# --- one form each ---


def read_rows(rows: Iterable[Any], kind: Any) -> Columns:
    """See `Support.from_rows`."""
    try:
        rows = list(rows)
    except TypeError as error:
        raise ValueError(f"rows must be a sequence of rows, got {short(rows)}") from error
    kind = per_row("kind", kind, len(rows), torch.int8, "cpu").clone()
    none = torch.tensor([row is None for row in rows], dtype=torch.bool)
    kind[none & (kind != RowKind.FAILED)] = int(RowKind.NONE)
    at_once = _from_lists(rows)
    if at_once is not None:
        ids, logprobs, counts = at_once
        return Columns(ids, logprobs, ~logprobs.isnan(), counts, kind)
    parts = [_row_tensors(f"rows[{i}]", row) for i, row in enumerate(rows)]
    counts = torch.tensor([len(ids) for ids, _, _ in parts], dtype=torch.int64)
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    ids, logprobs, known = columns or _row_tensors("rows", None)
    return Columns(ids, logprobs, known, counts, kind)


def _from_lists(rows: list[Any]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Ids, log-probabilities and counts of well-formed rows of lists, ten times as fast as row by
    row; None where any row is something else, or not well-formed."""
    ids, logprobs, counts = array("i"), array("d"), []
    for row in rows:
        kept, q = ((), None) if row is None else row if _is_pair(row) else (None, None)
        if not isinstance(kept, (list, tuple)) or not isinstance(q, (list, tuple, type(None))):
            return None
        # An array takes what its numbers can be made of, but for a row of bools, or of halves.
        if kept and (type(kept[0]) is not int or (q and type(q[0]) not in (float, int))):
            return None
        try:
            ids.fromlist(list(kept))
            logprobs.fromlist([math.nan] * len(kept) if q is None else list(q))
        except (TypeError, ValueError, OverflowError, RuntimeError):
            return None
        if len(logprobs) != len(ids):
            return None
        counts.append(len(kept))
    widths = torch.tensor(counts, dtype=torch.int64)
    if not ids:  # of which torch makes no tensor
        return torch.empty(0, dtype=torch.int32), torch.empty(0), widths
    tokens = torch.frombuffer(ids, dtype=torch.int32)
    if tokens.amin() < 0:
        return None
    return tokens, torch.frombuffer(logprobs, dtype=torch.float64).float(), widths


def _is_pair(row: Any) -> bool:
    return isinstance(row, (tuple, list)) and len(row) == 2


def _row_tensors(name: str, row: Any) -> tuple[Tensor, Tensor, Tensor]:
    if row is None:
        row = ((), ())
    if not isinstance(row, (tuple, list)) or len(row) not in (2, 3):
        raise ValueError(
            f"{name} must be (ids, logprobs), (ids, logprobs, known) or None, got {short(row)}"
        )
    ids = numbers(f"{name}: ids", row[0]).cpu()
    if ids.numel() == 0:
        ids = ids.reshape(0).to(torch.int64)  # torch takes an empty list for float32
    if ids.dim() != 1 or not is_integral(ids):
        raise ValueError(f"{name}: ids must be integers [K], got {ids.dtype} {list(ids.shape)}")
    ids = ids.to(torch.int64)
    bad = _outside_int32(ids)
    if bad.any():
        raise ValueError(f"{name}: ids must be in [0, 2**31), got {int(ids[first_row(bad)])}")
    if row[1] is None:
        logprobs = torch.full(ids.shape, math.nan, dtype=torch.float32)
    else:
        logprobs = _reals(f"{name}: logprobs", row[1]).cpu()
    known = ~logprobs.isnan() if len(row) == 2 else numbers(f"{name}: known", row[2]).cpu()
    if known.numel() == 0:
        known = known.to(torch.bool)
    if logprobs.shape != ids.shape or known.shape != ids.shape or known.dtype != torch.bool:
        raise ValueError(
            f"{name}: logprobs and known (bool) must be {list(ids.shape)} as ids, got "
            f"{list(logprobs.shape)} and {known.dtype} {list(known.shape)}"
        )
    return ids.to(torch.int32), logprobs, known


def read_packed(packed: Tensor, counts: Tensor, kind: Any) -> Columns:
    """See `Support.from_packed`."""
    if require_tensor("packed", packed).dim() != 1:
        raise ValueError(f"packed must be [nnz], got {tuple(packed.shape)}")
    _check_counts(require_tensor("counts", counts))
    if packed.device != counts.device:
        raise ValueError(
            f"packed and counts must be on one device, got {packed.device}, {counts.device}"
        )
    counts, kind = _counts_and_kind(counts, kind)
    ids, logprobs = unpack_entries(packed)
    return Columns(ids, logprobs, ~logprobs.isnan(), counts, kind)


def read_bytes(ids: Any, counts: Any, logprobs: Any, kind: Any) -> Columns:
    """See `Support.from_bytes`."""
    ids = numbers_of_bytes("ids", ids, torch.int32)
    if logprobs is None:
        logprobs = torch.full(ids.shape, math.nan, dtype=torch.float32)
    else:
        logprobs = numbers_of_bytes("logprobs", logprobs, torch.float32)
    if logprobs.shape != ids.shape:
        raise ValueError(f"logprobs must be {len(ids)} as ids, got {len(logprobs)}")
    # -inf is no such mark: it says that the row is another request's, which `validate` refuses.
    known = (logprobs > UNKNOWN_LOGPROB) | (logprobs == -math.inf)
    array = getattr(counts, "itemsize", 1) > 1 and hasattr(counts, "copy")  # one of bytes is bytes
    if isinstance(counts, (Tensor, list, tuple)) or array:
        counts = counts.copy() if array else counts  # which need not be writable
        counts = numbers("counts", counts, place="row").cpu()
        counts = counts.to(torch.int64) if counts.numel() == 0 else counts
        _check_counts(counts)
    else:
        counts = numbers_of_bytes("counts", counts, torch.int32)
    one_for_all = numbers("kind", kind).dim() == 0
    counts, kind = _counts_and_kind(counts, kind)
    if one_for_all:  # a row without a count brings nothing that could be of that kind
        kind = kind.masked_fill((counts == 0) & (kind != RowKind.FAILED), int(RowKind.NONE))
    return Columns(ids, logprobs, known, counts, kind)


def _check_counts(counts: Tensor) -> None:
    if counts.dim() != 1 or not is_integral(counts):
        raise ValueError(f"counts must be integers [N], got {counts.dtype} {tuple(counts.shape)}")


def _counts_and_kind(counts: Tensor, kind: Any) -> tuple[Tensor, Tensor]:
    """Counts of 0 or more, and the kinds, with those rows FAILED whose count is -1."""
    counts = counts.to(torch.int64)  # a uint8 255 would compare equal to -1
    kind = per_row("kind", kind, len(counts), torch.int8, counts.device)
    kind = torch.where(counts == -1, int(RowKind.FAILED), kind).to(torch.int8)
    bad = (counts < -1).cpu()
    if bad.any():
        row = first_row(bad)
        raise ValueError(f"counts must be -1 or more, got {int(counts[row])} in row {row}")
    return counts.clamp(min=0), kind


def read_padded(ids: Tensor, logprobs: Tensor | None, kind: Any) -> Columns:
    """See `Support.from_padded`."""
    if require_tensor("ids", ids).dim() < 2 or not is_integral(ids):
        raise ValueError(f"ids must be integers [..., K], got {ids.dtype} {tuple(ids.shape)}")
    if logprobs is None:
        logprobs = torch.full(ids.shape, math.nan, dtype=torch.float32, device=ids.device)
    if require_tensor("logprobs", logprobs).shape != ids.shape:
        raise ValueError(
            f"logprobs must have the shape of ids {tuple(ids.shape)}, got {tuple(logprobs.shape)}"
        )
    refuse_half("logprobs", logprobs)
    if logprobs.device != ids.device:
        raise ValueError(f"logprobs must be on {ids.device} as ids, got {logprobs.device}")
    ids = rearrange(ids.to(torch.int64), "... k -> (...) k")  # a uint8 255 would be padding
    logprobs = rearrange(logprobs, "... k -> (...) k")
    held = ids != -1
    kind = per_row("kind", kind, len(ids), torch.int8, ids.device)
    tokens, logprobs = ids[held], logprobs[held].float()
    bad = _outside_int32(tokens).cpu()
    if bad.any():
        at = first_row(bad)
        raise ValueError(
            f"ids must be in [0, 2**31), or -1 at padding, got {int(tokens[at])} "
            f"in row {int(held.nonzero()[at, 0])}"
        )
    return Columns(tokens.to(torch.int32), logprobs, ~logprobs.isnan(), held.sum(-1), kind)


def _reals(name: str, value: Any) -> Tensor:
    """Real numbers as float32."""
    tensor = refuse_half(name, numbers(name, value))
    if not tensor.is_floating_point() and not is_integral(tensor):
        raise ValueError(f"{name} must be real numbers, got {tensor.dtype}")
    return tensor.to(torch.float32)


def _outside_int32(ids: Tensor) -> Tensor:
    """Where int64 ids are no ids: negative, or too large for int32."""
    return (ids < 0) | (ids > 2**31 - 1)


# --- what every form has ---


def per_row(name: str, value: Any, n: int, dtype: torch.dtype, device: Any) -> Tensor:
    """One value or one a row, as a tensor `[n]` without gradient."""
    tensor = numbers(name, value, place="row").detach()
    if dtype.is_floating_point:
        refuse_half(name, tensor)
    if tensor.numel() == 0:
        tensor = tensor.to(dtype)  # torch takes an empty list for float32
    if not is_integral(tensor) and not (dtype.is_floating_point and tensor.is_floating_point()):
        raise ValueError(f"{name} must convert to {dtype}, got {tensor.dtype}")
    if tensor.dim() == 0:
        tensor = tensor.expand(n)
    if tensor.shape != (n,):
        raise ValueError(f"{name} must be one value or one a row [{n}], got {tuple(tensor.shape)}")
    if dtype == torch.int8 and tensor.dtype != dtype:
        _check_kind(tensor.cpu().to(torch.int64))  # before the conversion, which wraps around
    return tensor.to(device, dtype).contiguous()


def default_tail_mass(columns: Columns, offsets: Tensor) -> Tensor:
    """`[N]` float64: 0 on complete REPLAY and on DRAWS rows, else what q leaves over."""
    ids, logprobs, known, counts, kind = columns
    zeros = torch.zeros(len(counts), dtype=torch.float64, device=ids.device)
    complete = count_by_row(known, offsets) == counts
    whole = (kind == RowKind.DRAWS) | ((kind == RowKind.REPLAY) & complete)
    if ids.device.type == "cpu":  # on the host only the entries that are summed are looked at
        some = torch.repeat_interleave(~whole, counts, output_size=len(ids))
        at = (some & known).nonzero()[:, 0]
        rows, q = rows_at(offsets, at), logprobs[at].double().exp()
    else:
        rows = rows_of_entries(offsets, len(ids))
        q = torch.where(known, logprobs.double().exp(), 0.0)
    missing = (1 - zeros.index_add(0, rows, q)).clamp(min=0)
    return torch.where(whole & (counts > 0), 0.0, missing)


# --- checks of a support's own fields ---


def check_form(fields: Mapping[str, Tensor]) -> None:
    """Refuses fields of a wrong type, dtype, shape or device, and offsets that do not fit."""
    for name, tensor in fields.items():
        require_tensor(name, tensor)
    nnz, n, device = fields["ids"].numel(), fields["kind"].numel(), fields["ids"].device
    wanted = {
        "ids": (torch.int32, (nnz,)),
        "sampler_logprobs": (torch.float32, (nnz,)),
        "known": (torch.bool, (nnz,)),
        "kind": (torch.int8, (n,)),
        "offsets": (torch.int64, (n + 1,)),
        "sampler_tail_mass": (torch.float32, (n,)),
    }
    for name, (dtype, shape) in wanted.items():
        tensor = fields[name]
        if dtype.is_floating_point:
            refuse_half(name, tensor)
        if tensor.dtype != dtype or tensor.shape != shape:
            raise ValueError(
                f"{name} must be {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}"
            )
        if tensor.device != device:
            raise ValueError(f"{name} must be on {device}, got {tensor.device}")
    offsets = fields["offsets"].cpu()
    if offsets[0] != 0 or offsets[-1] != nnz:
        raise ValueError(
            f"offsets must run from 0 to nnz = {nnz}, got {int(offsets[0])} to {int(offsets[-1])}"
        )
    falling = offsets.diff() < 0
    if falling.any():
        row = first_row(falling)
        raise ValueError(
            f"offsets must not fall, got {int(offsets[row])}, {int(offsets[row + 1])} in row {row}"
        )


def check_kinds_and_ids(ids: Tensor, host: HostFacts) -> None:
    """Refuses unknown kinds, and ids that their row's kind does not allow (host tensors)."""
    kind, widths = host.kind, host.offsets.diff()
    _check_kind(kind)
    bad = (kind <= RowKind.NONE) & (widths > 0)
    if bad.any():
        row = first_row(bad)
        raise ValueError(
            f"ids must be empty in a row of kind {RowKind(int(kind[row])).name}, "
            f"got {int(widths[row])} in row {row}"
        )
    if len(ids) and ids.amin() < 0:
        at = torch.tensor(first_row(ids < 0))
        row = int(rows_at(host.offsets, at))
        raise ValueError(f"ids must not be negative, got {int(ids[at])} in row {row}")
    # Rows in ascending order are seen to be unique without a sort.
    falls = ids[1:] <= ids[:-1]
    starts = host.offsets[1:-1]
    falls[starts[(starts > 0) & (starts < len(ids))] - 1] = False  # from one row to the next
    if falls.any():
        unique = (kind == RowKind.REPLAY) | (kind == RowKind.HEAD)
        rows = rows_at(host.offsets, falls.nonzero()[:, 0]).unique_consecutive()
        rows = rows[unique[rows]]
        entries, offsets = selected_entries(host.offsets, rows)
        of_row = torch.repeat_interleave(rows << 31, offsets.diff(), output_size=len(entries))
        keys = (of_row | ids[entries]).sort().values
        twice = keys[1:] == keys[:-1]
        if twice.any():
            key = int(keys[first_row(twice)])
            raise ValueError(
                f"ids must be unique in a {RowKind(int(kind[key >> 31])).name} row, "
                f"got {key & 0x7FFFFFFF} twice in row {key >> 31}"
            )


def _check_kind(kind: Tensor) -> None:
    bad = (kind < RowKind.FAILED) | (kind > RowKind.DRAWS)
    if bad.any():
        row = first_row(bad)
        raise ValueError(f"kind must be a RowKind (-1 to 3), got {int(kind[row])} in row {row}")
