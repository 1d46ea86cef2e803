"""The sampler's side: record what a sampler's distribution was, row by row, without a host sync.

Two passes over the logits in chunks of rows: the first decides what each row needs, the second
writes the kept sets. Kept sets alone are as wide as the vocabulary; top ids and draws are formed
in the first pass already. The buffer is addressed by a running total of the counts, and whatever
is not recorded goes to one slot behind its end, so no shape ever depends on a value.
"""

from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from rl_loss.packing import pack_entries
from rl_loss.support import RowKind, Support

_MAX_DEFAULT_CAPACITY = 16 * 2**20  # entries: a buffer of 128 MiB
_CHUNK_ELEMENTS = 2**22  # logits of one chunk: about 200 MiB of temporaries
_UNUSED = -1  # all bits set: the id -1 with the log-probability NaN


@dataclass(frozen=True, eq=False)
class CapturedRows:
    """What `capture_support` recorded of R rows, on the device of the logits.

    Attributes:
        packed: int64 `[capacity]`, the entries of all recorded rows one after the other; behind
            them every slot is -1 (id -1, log-probability NaN).
        counts: int64 `[R]`, entries of each row; -1 where the row could not be recorded.
        kind: int8 `[R]`, the `RowKind` asked for, `FAILED` where the row could not be recorded.
        tail_mass: float32 `[R]`, what the sampler puts outside the row's entries.
        sampled_logprobs: float32 `[R]`, log q of the sampled token: the `inference_logprobs` of
            the losses. NaN where nothing was asked for or the logits were unusable.
    """

    packed: Tensor
    counts: Tensor
    kind: Tensor
    tail_mass: Tensor
    sampled_logprobs: Tensor

    def to_support(self) -> Support:
        """Trim the buffer to the recorded entries and build the `Support` of these rows.

        The trimming costs one device-to-host sync, beside what `Support.from_packed` costs.
        """
        recorded = int(self.counts.clamp(min=0).sum())
        return Support.from_packed(
            self.packed[:recorded], self.counts, kind=self.kind, tail_mass=self.tail_mass
        )


@torch.no_grad()
def capture_support(
    processed_logits: Tensor,  # [R, V]
    sampled: Tensor,  # [R]
    *,
    kind: RowKind | int | Tensor,  # or int8 [R]
    capacity: int | None = None,
    top: int = 20,
    draws: int = 8,
    generator: torch.Generator | None = None,
) -> CapturedRows:
    """Record each row's evidence about the distribution `q` that its token was sampled from.

    With S the ids whose processed logit is finite, `log q_v = z_v - log Σ_{u in S} exp z_u`, and

    - `REPLAY`: all of S, ids ascending; tail mass 0;
    - `HEAD`: the sampled token, then the `top` likeliest other ids of S (`top` of them, or one
      less where the sampled token is among the likeliest); tail mass `Σ q_v` over the rest of S,
      summed from the logits left out and not as 1 minus the recorded mass;
    - `DRAWS`: `draws` i.i.d. draws from q, apart from the sampled token, repeats kept; tail mass 0;
    - `NONE`: no entry, tail mass 1; the row is not looked at.

    A row is `FAILED` (count -1, tail mass 1) if it holds NaN or +inf or nothing finite, if its
    sampled token is excluded or outside `[0, V)`, if its logits lie so far apart that the log q of
    an id in S is -inf in float32 (the sampled log-probability is NaN in these cases), if its kind
    is unknown, or if it does not fit into the buffer. Where not all rows fit, the widest are given
    up first, so that most rows survive; those are whole and lie one after the other in row order.

    No device-to-host sync, no shape that depends on a value.

    Args:
        processed_logits: `[R, V]`, any floating dtype, after temperature and truncation: an
            excluded token is -inf. bfloat16 and float16 are computed in float32.
        sampled: int64 or int32 `[R]`, the tokens sampled from these rows.
        kind: one `RowKind` for all rows, or an int8 tensor `[R]`.
        capacity: entries that the buffer holds; None for all that the rows can need, at most
            16 Mi entries.
        top: likeliest ids of a `HEAD` row.
        draws: draws of a `DRAWS` row.
        generator: of the draws, on the device of the logits.

    Raises:
        ValueError: an argument has a wrong type, shape, dtype, device or range.

    Example:
        >>> import torch
        >>> from rl_loss import RowKind, capture_support
        >>> logits = torch.tensor([[0.0, -torch.inf, 0.0], [1.0, 2.0, 3.0]])
        >>> rows = capture_support(logits, torch.tensor([2, 1]), kind=RowKind.REPLAY)
        >>> rows.counts.tolist()
        [2, 3]
        >>> rows.to_support().ids.tolist()
        [0, 2, 0, 1, 2]
    """
    _check_arguments(processed_logits, sampled, kind, capacity, top, draws)
    num_rows, vocab_size = processed_logits.shape
    device = processed_logits.device
    top = min(top, vocab_size)
    if isinstance(kind, Tensor):
        possible = {RowKind.REPLAY, RowKind.HEAD, RowKind.DRAWS}
        asked = kind.to(device, non_blocking=True)
    else:
        possible = {RowKind(kind)}
        asked = torch.full((num_rows,), int(kind), dtype=torch.int8, device=device)
    if capacity is None:
        capacity = min(
            _MAX_DEFAULT_CAPACITY, num_rows * _widest_row(possible, vocab_size, top, draws)
        )
    chunk_rows = max(1, _CHUNK_ELEMENTS // vocab_size)
    starts_of_chunks = range(0, num_rows, chunk_rows)

    healthy = torch.empty(num_rows, dtype=torch.bool, device=device)
    sampled_logprobs = torch.empty(num_rows, dtype=torch.float32, device=device)
    needed = torch.zeros(num_rows, dtype=torch.int64, device=device)
    tail_mass = torch.zeros(num_rows, dtype=torch.float32, device=device)
    narrow = []  # (kind, ids, logprobs, recorded) of each chunk's HEAD and DRAWS entries
    for start in starts_of_chunks:
        chunk = slice(start, start + chunk_rows)
        logprobs, kept, labels, healthy[chunk] = _sampler_logprobs(
            processed_logits[chunk], sampled[chunk]
        )
        sampled_logprobs[chunk] = logprobs.gather(1, labels[:, None])[:, 0]
        entries: list[tuple[RowKind, Tensor, Tensor, Tensor]] = []
        if RowKind.HEAD in possible:
            ids, head, recorded, tail = _head_entries(logprobs, kept, labels, top)
            entries.append((RowKind.HEAD, ids, head, recorded))
            tail_mass[chunk] = torch.where(asked[chunk] == RowKind.HEAD, tail, 0.0)
        if RowKind.DRAWS in possible:
            entries.append((RowKind.DRAWS, *_draw_entries(logprobs, draws, generator)))
        for row_kind, _, _, recorded in entries:
            needed[chunk] += (recorded & (asked[chunk] == row_kind)[:, None]).sum(1)
        if RowKind.REPLAY in possible:
            needed[chunk] += (kept & (asked[chunk] == RowKind.REPLAY)[:, None]).sum(1)
        narrow.append(entries)

    looked_at = (asked >= RowKind.REPLAY) & (asked <= RowKind.DRAWS)
    usable = looked_at & healthy
    recorded_rows = usable & _fits(torch.where(usable, needed, 0), capacity)
    counts = torch.where(recorded_rows, needed, 0)
    starts = counts.cumsum(0) - counts

    buffer = torch.full((capacity + 1,), _UNUSED, dtype=torch.int64, device=device)
    for start, entries in zip(starts_of_chunks, narrow, strict=True):
        chunk = slice(start, start + chunk_rows)
        for row_kind, ids, logprobs, recorded in entries:
            mine = recorded_rows[chunk] & (asked[chunk] == row_kind)
            _write(buffer, starts[chunk], recorded & mine[:, None], ids, logprobs)
        if RowKind.REPLAY in possible:
            logprobs, kept, _, _ = _sampler_logprobs(processed_logits[chunk], sampled[chunk])
            mine = recorded_rows[chunk] & (asked[chunk] == RowKind.REPLAY)
            ids = torch.arange(vocab_size, device=device).expand_as(logprobs)
            _write(buffer, starts[chunk], kept & mine[:, None], ids, logprobs)

    answered = recorded_rows | (asked == RowKind.NONE)
    return CapturedRows(
        packed=buffer[:capacity],
        counts=torch.where(answered, counts, -1),
        kind=torch.where(answered, asked, int(RowKind.FAILED)),
        tail_mass=torch.where(recorded_rows, tail_mass, 1.0),
        sampled_logprobs=torch.where(usable, sampled_logprobs, torch.nan),
    )


def _sampler_logprobs(logits: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log q and what is kept `[r, V]`, labels inside `[0, V)` and which rows are usable `[r]`.

    A row with unusable logits or label holds neutral values: a uniform distribution, the label 0.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    in_vocab = (sampled >= 0) & (sampled < logits.shape[1])
    labels = torch.where(in_vocab, sampled, 0).long()
    # The maximum is NaN, +inf or -inf exactly where the row holds NaN, +inf or nothing finite.
    usable = logits.amax(1).isfinite() & logits.gather(1, labels[:, None])[:, 0].isfinite()
    usable &= in_vocab
    logits = torch.where(usable[:, None], logits, 0.0)
    kept = logits > -torch.inf
    labels = torch.where(usable, labels, 0)
    # On the CPU torch's float32 log_softmax is off by 3e-5 over 151936 ids: it adds one by one.
    shifted = logits - logits.amax(1, keepdim=True)
    logprobs = shifted - shifted.exp().sum(1, keepdim=True).log()
    # Finite logits may lie further apart than float32 reaches: q is 0 then on a kept id.
    overflown = kept & (logprobs.float() == -torch.inf)
    return logprobs, kept, labels, usable & ~overflown.any(1)


def _head_entries(
    logprobs: Tensor, kept: Tensor, labels: Tensor, top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, log q and which of them to record, each `[r, top + 1]`, and the tail mass `[r]`."""
    top_ids = logprobs.topk(top, dim=1).indices
    ids = torch.cat([labels[:, None], top_ids], 1)
    chosen, recorded = logprobs.gather(1, ids), kept.gather(1, ids)
    recorded[:, 1:] &= top_ids != labels[:, None]
    tail = logprobs.scatter(1, ids, -torch.inf).exp().sum(1)
    return ids, chosen.float(), recorded, tail.float()


def _draw_entries(
    logprobs: Tensor, draws: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, log q and which of them to record (all), each `[r, draws]`."""
    # One draw a row takes multinomial's other path, which checks its input with a host sync.
    ids = logprobs.exp().multinomial(max(draws, 2), replacement=True, generator=generator)
    ids = ids[:, :draws]
    return ids, logprobs.gather(1, ids).float(), torch.ones_like(ids, dtype=torch.bool)


def _fits(needed: Tensor, capacity: int) -> Tensor:
    """Which rows `[R]` fit into the buffer, narrow rows first and equal ones in row order."""
    order = needed.argsort(stable=True)
    return torch.empty_like(needed, dtype=torch.bool).scatter_(
        0, order, needed[order].cumsum(0) <= capacity
    )


def _write(buffer: Tensor, starts: Tensor, recorded: Tensor, ids: Tensor, logprobs: Tensor) -> None:
    """Write the recorded entries of `[r, w]` to the buffer, each row's from its start on."""
    positions = starts[:, None] + recorded.cumsum(1) - 1
    positions = torch.where(recorded, positions, buffer.numel() - 1)
    entries = pack_entries(ids.reshape(-1), logprobs.float().reshape(-1))
    buffer.scatter_(0, positions.reshape(-1), entries)


def _widest_row(possible: set[RowKind], vocab_size: int, top: int, draws: int) -> int:
    widths = {
        RowKind.REPLAY: vocab_size,
        RowKind.HEAD: min(top + 1, vocab_size),
        RowKind.DRAWS: draws,
    }
    return max((widths.get(kind, 0) for kind in possible), default=0)


def _check_arguments(
    logits: Any, sampled: Any, kind: Any, capacity: Any, top: Any, draws: Any
) -> None:
    if not isinstance(logits, Tensor) or logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(
            f"processed_logits must be a floating-point tensor [R, V], got {_describe(logits)}"
        )
    if logits.shape[1] == 0:
        raise ValueError("processed_logits must have at least one column, got V = 0")
    num_rows = logits.shape[0]
    _check_rows("sampled", sampled, num_rows, (torch.int64, torch.int32))
    if sampled.device != logits.device:
        raise ValueError(
            f"sampled must be on {logits.device} as processed_logits, got {sampled.device}"
        )
    if isinstance(kind, Tensor):
        _check_rows("kind", kind, num_rows, (torch.int8,))
    elif isinstance(kind, bool) or not isinstance(kind, int) or kind not in tuple(RowKind):
        raise ValueError(f"kind must be a RowKind or an int8 tensor [R], got {kind!r}")
    for name, value, least in (("capacity", capacity, 0), ("top", top, 0), ("draws", draws, 1)):
        if name == "capacity" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")


def _check_rows(name: str, value: Any, num_rows: int, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(value, Tensor) or value.dtype not in dtypes or value.shape != (num_rows,):
        names = " or ".join(map(str, dtypes))
        raise ValueError(f"{name} must be {names} [{num_rows}], got {_describe(value)}")


def _describe(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else short(value)
