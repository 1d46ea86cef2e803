"""The sampler's side: record what a sampler's distribution was, row by row, without a host sync.

Two readings of the logits: the first decides what each row needs, the second writes the kept
sets. Kept sets alone are as wide as the vocabulary; top ids and draws are formed in between. The
buffer is addressed by a running total of the counts, so no shape ever depends on a value. On a GPU
Triton kernels do it (`rl_loss.kernels.capture`); elsewhere, and for float64 logits, plain PyTorch
in chunks of rows.
"""

from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor
from torch.serialization import add_safe_globals

from rl_loss.arguments import require_count
from rl_loss.csr import RowKind, first_row
from rl_loss.host import launching_on
from rl_loss.packing import pack_entries
from rl_loss.support import Support

_MAX_DEFAULT_CAPACITY = 16 * 2**20  # entries: a buffer of 128 MiB
_CHUNK_ELEMENTS = 2**22  # logits of one chunk: about 200 MiB of temporaries
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ASKED = "NONE, REPLAY, HEAD or DRAWS"
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
        needed: int64, 0-dim, the entries that all usable rows together would have taken: above
            `capacity` some were given up.
    """

    packed: Tensor
    counts: Tensor
    kind: Tensor
    tail_mass: Tensor
    sampled_logprobs: Tensor
    needed: Tensor

    def to_support(self) -> Support:
        """Trim the buffer to the recorded entries and build the `Support` of these rows.

        The trimming costs one device-to-host sync, beside what `Support.from_packed` costs.
        """
        recorded = int(self.counts.clamp(min=0).sum())
        return Support.from_packed(
            self.packed[:recorded], self.counts, kind=self.kind, tail_mass=self.tail_mass
        )


add_safe_globals([CapturedRows])


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
    - `HEAD`: the sampled token, then the `top` likeliest ids of S without it, ascending (so `top`
      others, or one less where the sampled token is among the likeliest; which of equal ones is
      open); tail mass `Σ q_v` over the rest of S, summed from the logits left out and not as 1
      minus the recorded mass. The trainer normalises such a row, and one of draws, over the whole
      vocabulary: neither is for a sampler that truncates;
    - `DRAWS`: `draws` i.i.d. draws from q, apart from the sampled token, repeats kept; tail mass 0;
    - `NONE`: no entry, tail mass 1; the row is not looked at.

    A row is `FAILED` (count -1, tail mass 1) if it holds NaN or +inf or nothing finite, if its
    sampled token is excluded or outside `[0, V)`, if its logits lie so far apart that the log q of
    an id in S is -inf in float32 (the sampled log-probability is NaN in these cases), if `kind` on
    the device says anything else, or if it does not fit into the buffer. Where not all rows fit,
    the widest are given up first, so that most rows survive; those are whole and lie one after the
    other in row order.

    No device-to-host sync, no shape that depends on a value.

    Args:
        processed_logits: `[R, V]`, float64, float32, bfloat16 or float16 (computed in float32),
            after temperature and truncation: an excluded token is -inf, and only -inf.
        sampled: int64 or int32 `[R]`, the tokens sampled from these rows.
        kind: NONE, REPLAY, HEAD or DRAWS for all rows, or an int8 tensor `[R]` of them (on the
            host, and work for kinds that it does not hold is saved).
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
    _check_arguments(processed_logits, sampled, kind, capacity, top, draws, generator)
    num_rows, vocab_size = processed_logits.shape
    device = processed_logits.device
    top = min(top, vocab_size)
    if isinstance(kind, Tensor):
        possible = {RowKind.REPLAY, RowKind.HEAD, RowKind.DRAWS}
        if kind.device.type == "cpu":  # the host sees which of them there are
            possible &= set(kind.tolist())
            if kind.is_pinned():  # would be read later, when it may hold the next step's
                kind = kind.clone()
        asked = kind.to(device, non_blocking=True)
    else:
        possible = {RowKind(kind)}
        asked = torch.full((num_rows,), int(kind), dtype=torch.int8, device=device)
    if capacity is None:
        capacity = min(
            _MAX_DEFAULT_CAPACITY, num_rows * _widest_row(possible, vocab_size, top, draws)
        )
    replay, head = RowKind.REPLAY in possible, RowKind.HEAD in possible
    draws = draws if RowKind.DRAWS in possible else 0
    if num_rows and _has_kernels(processed_logits):
        from rl_loss.kernels.capture import capture_rows

        if processed_logits.stride(1) != 1:
            processed_logits = processed_logits.contiguous()
        packed = torch.full((capacity,), _UNUSED, dtype=torch.int64, device=device)
        uniform = None
        if draws:
            shape = num_rows, draws
            uniform = torch.rand(shape, generator=generator, dtype=torch.float32, device=device)
        rows = processed_logits, sampled, asked, packed
        with launching_on(processed_logits):
            fields = capture_rows(*rows, replay, top if head else None, uniform)
        return CapturedRows(*fields)
    options = replay, head, draws, top, generator
    return _record(_RowsLookedAt(processed_logits, sampled, asked, *options), capacity)


def _has_kernels(logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype != torch.float64


def _record(look: "_RowsLookedAt", capacity: int) -> CapturedRows:
    """The buffer and its index, in plain PyTorch."""
    asked = look.asked
    usable = (asked >= RowKind.REPLAY) & (asked <= RowKind.DRAWS) & look.healthy
    needed = torch.where(usable, look.needed, 0)
    recorded = usable & _fits(needed, capacity)
    counts = torch.where(recorded, needed, 0)
    answered = recorded | (asked == RowKind.NONE)
    return CapturedRows(
        packed=look.entries(recorded, counts.cumsum(0) - counts, capacity),
        counts=torch.where(answered, counts, -1),
        kind=torch.where(answered, asked, int(RowKind.FAILED)),
        tail_mass=torch.where(recorded, look.tail_mass, 1.0),
        sampled_logprobs=torch.where(usable, look.sampled_logprobs, torch.nan),
        needed=needed.sum(),
    )


class _RowsLookedAt:
    """The first reading in plain PyTorch: what each row needs; then its entries can be written."""

    def __init__(
        self,
        logits: Tensor,  # [R, V]
        sampled: Tensor,  # [R]
        asked: Tensor,  # [R] int8
        replay: bool,
        head: bool,
        draws: int,
        top: int,
        generator: torch.Generator | None,
    ) -> None:
        self.logits, self.sampled, self.asked, self.replay = logits, sampled, asked, replay
        rows, device = len(sampled), logits.device
        step = max(1, _CHUNK_ELEMENTS // logits.shape[1])
        self.chunks = [slice(start, start + step) for start in range(0, rows, step)]
        self.healthy = torch.empty(rows, dtype=torch.bool, device=device)
        self.sampled_logprobs = torch.empty(rows, dtype=torch.float32, device=device)
        self.needed = torch.zeros(rows, dtype=torch.int64, device=device)
        self.tail_mass = torch.zeros(rows, dtype=torch.float32, device=device)
        # (kind, ids, logprobs, recorded) of each chunk's HEAD and DRAWS entries
        self.narrow: list[list[tuple[RowKind, Tensor, Tensor, Tensor]]] = []
        for chunk in self.chunks:
            logprobs, kept, labels, self.healthy[chunk] = _sampler_logprobs(
                logits[chunk], sampled[chunk]
            )
            self.sampled_logprobs[chunk] = logprobs.gather(1, labels[:, None])[:, 0]
            entries = []
            if head:
                ids, likely, recorded, tail = _head_entries(
                    logits[chunk], logprobs, kept, labels, top
                )
                entries.append((RowKind.HEAD, ids, likely, recorded))
                self.tail_mass[chunk] = torch.where(asked[chunk] == RowKind.HEAD, tail, 0.0)
            if draws:
                entries.append((RowKind.DRAWS, *_draw_entries(logprobs, draws, generator)))
            for kind, _, _, recorded in entries:
                self.needed[chunk] += (recorded & (asked[chunk] == kind)[:, None]).sum(1)
            if self.replay:
                self.needed[chunk] += (kept & (asked[chunk] == RowKind.REPLAY)[:, None]).sum(1)
            self.narrow.append(entries)

    def entries(self, recorded: Tensor, starts: Tensor, capacity: int) -> Tensor:
        """The buffer `[capacity]` with the entries of the `recorded` `[R]` rows, each row's from
        its start on."""
        # What is not recorded goes to one more slot.
        buffer = torch.full((capacity + 1,), _UNUSED, dtype=torch.int64, device=starts.device)
        for chunk, narrow in zip(self.chunks, self.narrow, strict=True):
            for kind, ids, logprobs, mask in narrow:
                mine = recorded[chunk] & (self.asked[chunk] == kind)
                _write(buffer, starts[chunk], mask & mine[:, None], ids, logprobs)
            if self.replay:
                logprobs, kept, _, _ = _sampler_logprobs(self.logits[chunk], self.sampled[chunk])
                mine = recorded[chunk] & (self.asked[chunk] == RowKind.REPLAY)
                ids = torch.arange(logprobs.shape[1], device=starts.device).expand_as(logprobs)
                _write(buffer, starts[chunk], kept & mine[:, None], ids, logprobs)
        return buffer[:-1]


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
    logits: Tensor, logprobs: Tensor, kept: Tensor, labels: Tensor, top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, log q and which of them to record, each `[r, top + 1]`, and the tail mass `[r]`."""
    top_ids = logits.topk(top, dim=1).indices.sort(1).values
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
    logits: Any, sampled: Any, kind: Any, capacity: Any, top: Any, draws: Any, generator: Any
) -> None:
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.dtype not in _DTYPES:
        raise ValueError(
            "processed_logits must be float64, float32, bfloat16 or float16 [R, V], got "
            f"{_describe(logits)}"
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
        if kind.device.type == "cpu":
            wrong = (kind < RowKind.NONE) | (kind > RowKind.DRAWS)
            if wrong.any():
                row = first_row(wrong)
                raise ValueError(f"kind must be {_ASKED}, got {int(kind[row])} in row {row}")
    elif isinstance(kind, bool) or not isinstance(kind, int) or kind not in range(4):
        raise ValueError(f"kind must be {_ASKED}, or an int8 tensor [R] of them, got {kind!r}")
    if capacity is not None:
        require_count("capacity", capacity, 0)
    require_count("top", top, 0)
    require_count("draws", draws, 1)
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        raise ValueError(f"generator must be a torch.Generator, got {type(generator).__name__}")
    if generator.device.type != logits.device.type:
        raise ValueError(
            f"generator must be on {logits.device} as processed_logits, got {generator.device}"
        )


def _check_rows(name: str, value: Any, num_rows: int, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(value, Tensor) or value.dtype not in dtypes or value.shape != (num_rows,):
        names = " or ".join(map(str, dtypes))
        raise ValueError(f"{name} must be {names} [{num_rows}], got {_describe(value)}")


def _describe(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else short(value)
