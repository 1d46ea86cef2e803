"""The sampler's evidence about each token: ragged supports that stay with their rows."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data._utils.collate import default_collate_fn_map

from rl_loss.packing import pack_entries, unpack_entries

# How far probabilities that a sampler reports may be from adding up to 1, and a sampled token's
# entry from the log-probability reported for it.
TOLERANCE = 1e-3


class RowKind(IntEnum):
    """What a row's ids are, and so over what the trainer normalises it."""

    FAILED = -1  # the sampler could not record the row: an error where a loss reads it
    NONE = 0  # no evidence: normalised over the vocabulary, not centered
    REPLAY = 1  # the whole kept set, unique, with the label: normalised over the set
    HEAD = 2  # the top ids of an untruncated distribution, unique: over the vocabulary
    DRAWS = 3  # i.i.d. draws from the sampler, repeats kept: over the vocabulary


class HostFacts(NamedTuple):
    """What the host knows of a support wherever its tensors are (CPU tensors)."""

    offsets: Tensor  # [N + 1] int64
    kind: Tensor  # [N] int8
    complete: Tensor  # [N] bool: the row has entries and q is known for each


class GatherPlan(NamedTuple):
    """How the kernels of REPLAY rows are launched: known on the host, so without a sync."""

    tiles: Tensor  # [T] int64: row << 32 | number of the tile in its row; rows of one id have none
    max_width: int  # entries of the widest row, rounded up to a power of two
    only_replay: bool  # every row is REPLAY and has an entry


TILE = 32  # entries of a tile


def _plan(host: HostFacts, device: torch.device) -> GatherPlan:
    widths = host.offsets.diff()
    counts = torch.where(
        (host.kind == RowKind.REPLAY) & (widths > 1), (widths + TILE - 1) // TILE, 0
    )
    total = int(counts.sum())
    rows = torch.repeat_interleave(torch.arange(len(counts)), counts, output_size=total)
    number = torch.arange(total) - (counts.cumsum(0) - counts)[rows]
    widest = int(widths.max()) if len(widths) else 0
    only = bool(((host.kind == RowKind.REPLAY) & (widths > 0)).all())
    tiles = (rows << 32 | number).to(device, non_blocking=True)
    return GatherPlan(tiles, 1 << max(0, widest - 1).bit_length(), only)


def first_row(bad: Tensor) -> int:
    """The index of the first True of a host mask."""
    return int(bad.to(torch.uint8).argmax())


def rows_of_entries(offsets: Tensor, nnz: int) -> Tensor:
    """The row of each entry, `[nnz]` int64, without a sync."""
    rows = torch.arange(len(offsets) - 1, device=offsets.device)
    return torch.repeat_interleave(rows, offsets.diff(), output_size=nnz)


def _offsets_of(counts: Tensor) -> Tensor:
    zero = torch.zeros(1, dtype=torch.int64, device=counts.device)
    return torch.cat([zero, counts.to(torch.int64).cumsum(0)])


def _per_row(name: str, value: Any, n: int, dtype: torch.dtype, device: Any) -> Tensor:
    """One value or one a row, as a tensor `[n]`."""
    tensor = torch.as_tensor(value)
    if tensor.numel() == 0:
        tensor = tensor.to(dtype)  # torch takes an empty list for float32
    if tensor.dtype == torch.bool or (not dtype.is_floating_point and tensor.is_floating_point()):
        raise ValueError(f"{name} must convert to {dtype}, got {tensor.dtype}")
    if tensor.dim() == 0:
        tensor = tensor.expand(n)
    if tensor.shape != (n,):
        raise ValueError(f"{name} must be one value or one a row [{n}], got {tuple(tensor.shape)}")
    if dtype == torch.int8 and tensor.dtype != dtype:
        _check_kind(tensor.cpu())  # before the conversion, which wraps around
    return tensor.to(device, dtype).contiguous()


def _check_kind(kind: Tensor) -> None:
    bad = (kind < RowKind.FAILED) | (kind > RowKind.DRAWS)
    if bad.any():
        row = first_row(bad)
        raise ValueError(f"kind must be a RowKind (-1 to 3), got {int(kind[row])} in row {row}")


@dataclass(frozen=True, eq=False)
class Support:
    """The supports of N rows in CSR form: what the sampler kept and with which probability.

    Entry `e` of row `i` stands at `offsets[i] <= e < offsets[i + 1]`. The object is immutable
    and owns slicing, concatenation and selection, so that rows keep their evidence. It carries
    the host's view of its widths and kinds along, also to a GPU, so that a training step needs
    no device-to-host sync; building one from device tensors costs one sync.

    Args:
        ids: `[nnz]` int32 token ids.
        sampler_logprobs: `[nnz]` float32 log q of each id; never read where not `known`.
        known: `[nnz]` bool, whether the sampler recorded q there.
        offsets: `[N + 1]` int64 row bounds, from 0 to nnz.
        kind: `[N]` int8, a `RowKind` a row.
        sampler_tail_mass: `[N]` float32, what q puts on everything but the known ids.
        host: the host's facts; left out, they are read off the tensors and the ids checked.
        plan: derived from the host's facts.

    Raises:
        ValueError: a shape, dtype or device that does not fit, offsets that do not fit the ids,
            an unknown kind, ids in a row of kind NONE or FAILED, a negative id, an id that
            stands twice in a REPLAY or HEAD row.

    Example:
        >>> support = Support.from_rows([([5, 2], [-0.7, -0.7]), None])
        >>> support.kind.tolist(), support.offsets.tolist()
        ([1, 0], [0, 2, 2])
    """

    ids: Tensor
    sampler_logprobs: Tensor
    known: Tensor
    offsets: Tensor
    kind: Tensor
    sampler_tail_mass: Tensor
    host: HostFacts = None  # type: ignore[assignment]  # filled in where left out
    plan: GatherPlan = None  # type: ignore[assignment]  # derived from the host's facts

    def __post_init__(self) -> None:
        if self.host is None:
            self._check_form()
            facts = HostFacts(self.offsets.cpu(), self.kind.cpu(), self._complete().cpu())
            object.__setattr__(self, "host", facts)
            self._check_ids()
        if self.plan is None:
            object.__setattr__(self, "plan", _plan(self.host, self.device))

    # --- what it is ---

    def __len__(self) -> int:
        return self.kind.shape[0]

    def __repr__(self) -> str:
        kinds = ", ".join(
            f"{int((self.host.kind == kind).sum())} {kind.name}"
            for kind in RowKind
            if (self.host.kind == kind).any()
        )
        return f"Support({len(self)} rows: {kinds or 'none'}; nnz={self.nnz}, device={self.device})"

    @property
    def nnz(self) -> int:
        """The number of entries."""
        return self.ids.shape[0]

    @property
    def device(self) -> torch.device:
        return self.ids.device

    @property
    def entry_rows(self) -> Tensor:
        """The row of each entry, `[nnz]` int64."""
        return rows_of_entries(self.offsets, self.nnz)

    # --- constructors ---

    @classmethod
    def empty(cls, n: int, *, device: torch.device | str = "cpu") -> "Support":
        """N rows of kind NONE: no evidence.

        Example:
            >>> len(Support.empty(3))
            3
        """
        return cls.from_packed(
            torch.empty(0, dtype=torch.int64, device=device),
            torch.zeros(n, dtype=torch.int64, device=device),
            kind=RowKind.NONE,
        )

    @classmethod
    def from_rows(
        cls,
        rows: Iterable[tuple | None],
        kind: int | Sequence[int] | Tensor = RowKind.REPLAY,
        tail_mass: float | Sequence[float] | Tensor | None = None,
    ) -> "Support":
        """A support from a Python sequence of rows, on the CPU.

        A tail mass left out is 0 on complete REPLAY and on DRAWS rows, elsewhere
        `max(0, 1 - sum of the known q)`, summed in float64.

        Args:
            rows: per row `(ids, logprobs)`, `(ids, logprobs, known)` or None for a row without
                evidence (kind NONE, unless `kind` says FAILED there). `logprobs` None: the ids
                alone; a NaN in it: q unknown there.
            kind: one `RowKind` or one a row.
            tail_mass: one value or one a row.

        Raises:
            ValueError: as `Support`, and for a row that is none of these, naming it.

        Example:
            >>> Support.from_rows([([3, 4], None)]).sampler_tail_mass.tolist()
            [1.0]
        """
        rows = list(rows)
        kind = _per_row("kind", kind, len(rows), torch.int8, None).clone()
        parts = [_row_tensors(i, row) for i, row in enumerate(rows)]
        for i, row in enumerate(rows):
            if row is None and kind[i] != RowKind.FAILED:
                kind[i] = RowKind.NONE
        counts = torch.tensor([len(ids) for ids, _, _ in parts], dtype=torch.int64)
        columns = [torch.cat(column) for column in zip(*parts, strict=True)]
        ids, logprobs, known = columns or _row_tensors(0, None)
        return cls._build(ids, logprobs, known, counts, kind, tail_mass)

    @classmethod
    def from_packed(
        cls,
        packed: Tensor,
        counts: Tensor,
        kind: int | Sequence[int] | Tensor = RowKind.REPLAY,
        tail_mass: float | Sequence[float] | Tensor | None = None,
    ) -> "Support":
        """A support from the wire format (`pack_entries`): one flat buffer and counts.

        Args:
            packed: `[nnz]` int64 entries, row after row; a NaN log-probability: q unknown.
            counts: `[N]` integer entries a row; -1: the sampler failed to record the row.
            kind: one `RowKind` or one a row (a count of -1 makes it FAILED).
            tail_mass: as in `from_rows`.

        Raises:
            ValueError: as `Support`, and for counts that do not add up to the buffer.

        Example:
            >>> Support.from_packed(torch.empty(0, dtype=torch.int64), torch.tensor([-1])).kind
            tensor([-1], dtype=torch.int8)
        """
        if packed.dim() != 1:
            raise ValueError(f"packed must be [nnz], got {tuple(packed.shape)}")
        if counts.dim() != 1 or counts.is_floating_point() or counts.dtype == torch.bool:
            raise ValueError(
                f"counts must be integers [N], got {counts.dtype} {tuple(counts.shape)}"
            )
        if packed.device != counts.device:
            raise ValueError(
                f"packed and counts must be on one device, got {packed.device}, {counts.device}"
            )
        kind = _per_row("kind", kind, len(counts), torch.int8, packed.device)
        kind = torch.where(counts == -1, int(RowKind.FAILED), kind).to(torch.int8)
        bad = (counts < -1).cpu()
        if bad.any():
            row = first_row(bad)
            raise ValueError(f"counts must be -1 or more, got {int(counts[row])} in row {row}")
        ids, logprobs = unpack_entries(packed)
        counts = counts.clamp(min=0)
        return cls._build(ids, logprobs, ~logprobs.isnan(), counts, kind, tail_mass)

    @classmethod
    def from_padded(
        cls,
        ids: Tensor,
        logprobs: Tensor | None,
        kind: int | Sequence[int] | Tensor = RowKind.REPLAY,
        tail_mass: float | Sequence[float] | Tensor | None = None,
    ) -> "Support":
        """A support from ids padded to one width (on a GPU it costs a sync more).

        Args:
            ids: `[..., K]` integer ids, -1 where a row has no entry; N is the leading
                dimensions flattened.
            logprobs: `[..., K]` log q, NaN where unknown, never read at padding; None: the ids
                alone.
            kind: one `RowKind` or one a row.
            tail_mass: as in `from_rows`.

        Raises:
            ValueError: as `Support`.

        Example:
            >>> Support.from_padded(torch.tensor([[4, -1], [1, 2]]), None).offsets.tolist()
            [0, 1, 3]
        """
        if ids.dim() < 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"ids must be integers [..., K], got {ids.dtype} {tuple(ids.shape)}")
        if logprobs is None:
            logprobs = torch.full(ids.shape, math.nan, device=ids.device)
        if logprobs.shape != ids.shape:
            raise ValueError(
                f"logprobs must have the shape of ids {tuple(ids.shape)}, "
                f"got {tuple(logprobs.shape)}"
            )
        n = ids.shape[:-1].numel()
        ids, logprobs = ids.reshape(n, ids.shape[-1]), logprobs.reshape(n, ids.shape[-1])
        held = ids != -1
        kind = _per_row("kind", kind, n, torch.int8, ids.device)
        tokens, logprobs = ids[held].to(torch.int64), logprobs[held].float()
        bad = _outside_int32(tokens).cpu()
        if bad.any():
            at = first_row(bad)
            raise ValueError(
                f"ids must be in [0, 2**31), or -1 at padding, got {int(tokens[at])} "
                f"in row {int(held.nonzero()[at, 0])}"
            )
        known = ~logprobs.isnan()
        tokens = tokens.to(torch.int32)
        return cls._build(tokens, logprobs, known, held.sum(-1), kind, tail_mass)

    @classmethod
    def from_vllm(cls, mask: Any, logprobs: Any = None) -> "Support":
        """REPLAY rows from vLLM's sampling mask; see `rl_loss.integrations.engines`."""
        from rl_loss.integrations.engines import support_from_vllm

        return support_from_vllm(mask, logprobs)

    @classmethod
    def from_sglang(cls, mask: Any, logprobs: Any = None) -> "Support":
        """REPLAY rows from SGLang's sampling mask; see `rl_loss.integrations.engines`."""
        from rl_loss.integrations.engines import support_from_sglang

        return support_from_sglang(mask, logprobs)

    @classmethod
    def _build(
        cls,
        ids: Tensor,
        logprobs: Tensor,
        known: Tensor,
        counts: Tensor,
        kind: Tensor,
        tail_mass: Any,
    ) -> "Support":
        n, offsets = len(counts), _offsets_of(counts)
        last = int(offsets[-1])
        if last != len(ids):
            raise ValueError(f"counts add up to {last} entries, got {len(ids)}")
        if tail_mass is None:
            q = torch.where(known, logprobs.double().exp(), 0.0)
            rows = rows_of_entries(offsets, len(ids))
            zeros = torch.zeros(n, dtype=torch.float64, device=ids.device)
            missing = (1 - zeros.index_add(0, rows, q)).clamp(min=0)
            unknown = zeros.index_add(0, rows, (~known).double())
            whole = (kind == RowKind.DRAWS) | ((kind == RowKind.REPLAY) & (unknown == 0))
            tail_mass = torch.where(whole & (counts > 0), 0.0, missing)
        tail_mass = _per_row("tail_mass", tail_mass, n, torch.float32, ids.device)
        return cls(ids, logprobs, known, offsets, kind, tail_mass)

    # --- operations ---

    def __getitem__(self, rows: slice) -> "Support":
        """The rows `i:j` as a support of their own (views, no copies of entries)."""
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            raise ValueError(f"a Support is sliced as support[i:j], got [{rows!r}]; see select")
        start, stop, _ = rows.indices(len(self))
        stop = max(start, stop)
        lo, hi = int(self.host.offsets[start]), int(self.host.offsets[stop])
        bounds, inner = slice(start, stop + 1), slice(start, stop)
        return Support(
            ids=self.ids[lo:hi],
            sampler_logprobs=self.sampler_logprobs[lo:hi],
            known=self.known[lo:hi],
            offsets=self.offsets[bounds] - lo,
            kind=self.kind[inner],
            sampler_tail_mass=self.sampler_tail_mass[inner],
            host=HostFacts(
                self.host.offsets[bounds] - lo, self.host.kind[inner], self.host.complete[inner]
            ),
        )

    @staticmethod
    def cat(supports: Iterable["Support"]) -> "Support":
        """The rows of several supports, one after another.

        Example:
            >>> len(Support.cat([Support.empty(2), Support.empty(3)]))
            5
        """
        supports = list(supports)
        if not supports:
            return Support.empty(0)
        devices = {support.device for support in supports}
        if len(devices) > 1:
            raise ValueError(f"supports must be on one device, got {sorted(map(str, devices))}")
        fields = ("ids", "sampler_logprobs", "known", "kind", "sampler_tail_mass")
        joined: dict[str, Any] = {
            name: torch.cat([getattr(s, name) for s in supports]) for name in fields
        }
        host = HostFacts(
            _offsets_of(torch.cat([s.host.offsets.diff() for s in supports])),
            torch.cat([s.host.kind for s in supports]),
            torch.cat([s.host.complete for s in supports]),
        )
        offsets = _offsets_of(torch.cat([s.offsets.diff() for s in supports]))
        return Support(**joined, offsets=offsets, host=host)

    def select(self, rows: Tensor | Sequence[int]) -> "Support":
        """The given rows in the given order, repeats allowed.

        Args:
            rows: row numbers, or a bool mask `[N]`; from the host it costs no sync.

        Raises:
            ValueError: a row outside `[0, N)` or a mask of another length.

        Example:
            >>> Support.from_rows([([1], [0.0]), ([2], [0.0])]).select([1, 0]).ids.tolist()
            [2, 1]
        """
        rows = torch.as_tensor(rows).cpu()
        if rows.dtype == torch.bool:
            if rows.shape != (len(self),):
                raise ValueError(f"rows must be a mask [{len(self)}], got {tuple(rows.shape)}")
            rows = rows.nonzero()[:, 0]
        if rows.numel() == 0:
            rows = rows.to(torch.int64)
        if rows.dim() != 1 or rows.is_floating_point():
            raise ValueError(f"rows must be row numbers [M], got {rows.dtype} {tuple(rows.shape)}")
        bad = (rows < 0) | (rows >= len(self))
        if bad.any():
            at = first_row(bad)
            raise ValueError(
                f"rows must be in [0, {len(self)}), got {int(rows[at])} at position {at}"
            )
        counts = self.host.offsets.diff()[rows]
        offsets = _offsets_of(counts)
        nnz = int(offsets[-1])
        start = self.host.offsets[:-1][rows] - offsets[:-1]
        entries = torch.arange(nnz) + torch.repeat_interleave(start, counts, output_size=nnz)
        entries = entries.to(self.device, non_blocking=True)
        moved = rows.to(self.device, non_blocking=True)
        return Support(
            ids=self.ids[entries],
            sampler_logprobs=self.sampler_logprobs[entries],
            known=self.known[entries],
            offsets=offsets.to(self.device, non_blocking=True),
            kind=self.kind[moved],
            sampler_tail_mass=self.sampler_tail_mass[moved],
            host=HostFacts(offsets, self.host.kind[rows], self.host.complete[rows]),
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Support":
        """The same support with its tensors on `device`; the host facts stay on the host."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Support":
        """The same support in page-locked host memory, as a `DataLoader` asks for it."""
        return self._map(lambda tensor: tensor.pin_memory())

    def to_packed(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`(packed, counts, kind, tail_mass)`: the arguments of `from_packed`."""
        logprobs = torch.where(self.known, self.sampler_logprobs, math.nan)
        counts = torch.where(self.kind == RowKind.FAILED, -1, self.offsets.diff())
        return pack_entries(self.ids, logprobs), counts, self.kind, self.sampler_tail_mass

    def to_padded(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`(ids [N, K], logprobs [N, K], kind, tail_mass)`: the arguments of `from_padded`.

        K is the widest row; ids are -1 and log-probabilities NaN where a row has no entry.
        """
        n, width = len(self), int(self.host.offsets.diff().max()) if len(self) else 0
        rows = self.entry_rows
        columns = torch.arange(self.nnz, device=self.device) - self.offsets[rows]
        ids = self.ids.new_full((n, width), -1)
        logprobs = self.sampler_logprobs.new_full((n, width), math.nan)
        ids[rows, columns] = self.ids
        logprobs[rows, columns] = torch.where(self.known, self.sampler_logprobs, math.nan)
        return ids, logprobs, self.kind, self.sampler_tail_mass

    def validate(
        self,
        labels: Tensor,
        vocab_size: int,
        active: Tensor | None = None,
        inference_logprobs: Tensor | None = None,
    ) -> "Support":
        """Checks the values of the rows that a loss will read (on a GPU it costs syncs).

        Args:
            labels: `[...]` N integer labels.
            vocab_size: V, the rows of the LM-head weight.
            active: `[...]` N bool, the rows that a loss reads; all by default.
            inference_logprobs: `[...]` N, log q of each label as the sampler reported it.

        Returns:
            The support itself.

        Raises:
            ValueError: the first bad row and what is wrong with it: a label outside the
                vocabulary or its REPLAY row; a row that the sampler failed to record or left
                empty; an id outside the vocabulary; a known q that is not finite or above 1; a
                draw without q; probabilities that do not add up to 1 within 1e-3; rows that are
                uniform over the vocabulary (an engine without weights); a label's entry that
                disagrees with `inference_logprobs` by more than 1e-3.

        Example:
            >>> support = Support.from_rows([([1, 2], [-0.6931, -0.6931])])
            >>> support.validate(torch.tensor([5]), vocab_size=8)
            Traceback (most recent call last):
            ValueError: labels[0] is 5, which its REPLAY row (2 ids) does not hold
        """
        from rl_loss.validation import validate_support

        validate_support(self, labels, vocab_size, active, inference_logprobs)
        return self

    # --- inside ---

    def __getstate__(self) -> dict[str, Any]:
        owned = self._map(_without_the_rest)
        return owned.__dict__ | {"host": HostFacts(*map(_without_the_rest, self.host))}

    def _map(self, move: Callable[[Tensor], Tensor]) -> "Support":
        fields = ("ids", "sampler_logprobs", "known", "offsets", "kind", "sampler_tail_mass")
        changes: dict[str, Any] = {name: move(getattr(self, name)) for name in fields}
        plan = self.plan._replace(tiles=move(self.plan.tiles))
        return replace(self, **changes, plan=plan)

    def _complete(self) -> Tensor:
        unknown = torch.zeros(len(self), dtype=torch.int64, device=self.device)
        unknown.index_add_(0, self.entry_rows, (~self.known).long())
        return (unknown == 0) & (self.offsets.diff() > 0)

    def _check_form(self) -> None:
        nnz, n = self.ids.numel(), self.kind.numel()
        wanted = {
            "ids": (torch.int32, (nnz,)),
            "sampler_logprobs": (torch.float32, (nnz,)),
            "known": (torch.bool, (nnz,)),
            "kind": (torch.int8, (n,)),
            "offsets": (torch.int64, (n + 1,)),
            "sampler_tail_mass": (torch.float32, (n,)),
        }
        for name, (dtype, shape) in wanted.items():
            tensor = getattr(self, name)
            if tensor.dtype != dtype or tensor.shape != shape:
                raise ValueError(
                    f"{name} must be {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}"
                )
            if tensor.device != self.ids.device:
                raise ValueError(f"{name} must be on {self.ids.device}, got {tensor.device}")
        offsets = self.offsets.cpu()
        if offsets[0] != 0 or offsets[-1] != nnz:
            raise ValueError(
                f"offsets must run from 0 to nnz = {nnz}, got {int(offsets[0])} to "
                f"{int(offsets[-1])}"
            )
        falling = offsets.diff() < 0
        if falling.any():
            row = first_row(falling)
            raise ValueError(
                f"offsets must not fall, got {int(offsets[row])}, {int(offsets[row + 1])} "
                f"in row {row}"
            )

    def _check_ids(self) -> None:
        kind, widths = self.host.kind, self.host.offsets.diff()
        _check_kind(kind)
        bad = (kind <= RowKind.NONE) & (widths > 0)
        if bad.any():
            row = first_row(bad)
            raise ValueError(
                f"ids must be empty in a row of kind {RowKind(int(kind[row])).name}, "
                f"got {int(widths[row])} in row {row}"
            )
        ids, rows = self.ids.cpu(), rows_of_entries(self.host.offsets, self.nnz)
        if (ids < 0).any():
            at = first_row(ids < 0)
            raise ValueError(f"ids must not be negative, got {int(ids[at])} in row {int(rows[at])}")
        unique = (kind == RowKind.REPLAY) | (kind == RowKind.HEAD)
        # Rows in ascending order are seen to be unique without a sort.
        order = (ids[1:] <= ids[:-1]) & (rows[1:] == rows[:-1]) & unique[rows[1:]]
        if order.any():
            keys = (rows << 31 | ids)[unique[rows]].sort().values
            twice = keys[1:] == keys[:-1]
            if twice.any():
                key = int(keys[first_row(twice)])
                raise ValueError(
                    f"ids must be unique in a {RowKind(int(kind[key >> 31])).name} row, "
                    f"got {key & 0x7FFFFFFF} twice in row {key >> 31}"
                )


def _without_the_rest(tensor: Tensor) -> Tensor:
    """A copy where a view would take along, pickled, the whole buffer that it looks into."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def _outside_int32(ids: Tensor) -> Tensor:
    """Where int64 ids are no ids: negative, or too large for int32."""
    return (ids < 0) | (ids > 2**31 - 1)


def _row_tensors(i: int, row: Any) -> tuple[Tensor, Tensor, Tensor]:
    if row is None:
        row = ((), ())
    if not isinstance(row, (tuple, list)) or len(row) not in (2, 3):
        raise ValueError(
            f"rows[{i}] must be (ids, logprobs), (ids, logprobs, known) or None, got {row!r}"
        )
    ids = torch.as_tensor(row[0])
    if ids.numel() == 0:
        ids = ids.reshape(0).to(torch.int64)  # torch takes an empty list for float32
    if ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"rows[{i}]: ids must be integers [K], got {ids.dtype} {list(ids.shape)}")
    ids = ids.to(torch.int64)
    bad = _outside_int32(ids)
    if bad.any():
        at = first_row(bad)
        raise ValueError(f"rows[{i}]: ids must be in [0, 2**31), got {int(ids[at])}")
    if row[1] is None:
        logprobs = torch.full(ids.shape, math.nan)
    else:
        logprobs = torch.as_tensor(row[1], dtype=torch.float32)
    known = ~logprobs.isnan() if len(row) == 2 else torch.as_tensor(row[2])
    if known.numel() == 0:
        known = known.to(torch.bool)
    if logprobs.shape != ids.shape or known.shape != ids.shape or known.dtype != torch.bool:
        raise ValueError(
            f"rows[{i}]: logprobs and known (bool) must be {list(ids.shape)} as ids, got "
            f"{list(logprobs.shape)} and {known.dtype} {list(known.shape)}"
        )
    return ids.to(torch.int32), logprobs, known


def _collate(batch: list[Support], *, collate_fn_map: Any = None) -> Support:
    return Support.cat(batch)


default_collate_fn_map[Support] = _collate
