"""The sampler's evidence about each token: ragged supports that stay with their rows."""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.serialization import add_safe_globals
from torch.utils.data._utils.collate import default_collate_fn_map

from rl_loss.arguments import is_integral, numbers, require_count
from rl_loss.constructors import AnswerRows as AnswerRows
from rl_loss.constructors import SupportConstructors
from rl_loss.csr import (
    HostFacts,
    RowKind,
    count_by_row,
    first_row,
    offsets_of,
    rows_of_entries,
    selected_entries,
)
from rl_loss.packing import UNKNOWN_LOGPROB, bytes_of_numbers, pack_entries
from rl_loss.plan import HeadPlan, head_plan, widest_gathered
from rl_loss.row_parsing import (
    Columns,
    check_form,
    check_kinds_and_ids,
    default_tail_mass,
    per_row,
)
from rl_loss.validation import validate_support

_FIELDS = ("ids", "sampler_logprobs", "known", "offsets", "kind", "sampler_tail_mass")
_HOST = "host_"  # before the names of the host's facts in a pickled state


class Support(SupportConstructors):
    """The supports of N rows in CSR form: what the sampler kept and with which probability.

    Entry `e` of row `i` stands at `offsets[i] <= e < offsets[i + 1]`. The object is immutable
    and owns slicing, concatenation and selection, so that rows keep their evidence. It carries
    the host's view of its widths and kinds along, also to a GPU, so that a training step needs
    no device-to-host sync; building one from device tensors costs one sync.

    One object may also stand for one sequence: lists of them, and NumPy's arrays of dtype object,
    are shuffled, cut and joined as any others, `stack` makes rows of a batch of them and `split`
    sequences of rows. It is no iterable: there is no loop over rows.

    The tensors given here are taken as they are and not copied, as a slice views its source:
    whoever writes to them later changes the evidence behind the checks that were made.

    FSDP2, which casts the floating tensors in a module's arguments and outputs and in their
    dataclasses, leaves a `Support` as it is. Once `rl_loss` is imported, `torch.load` reads one
    with its default `weights_only=True`.

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
        ValueError: a shape, dtype or device that does not fit, half precision of q or of a tail
            mass among them; offsets that do not fit the ids, an unknown kind, ids in a row of
            kind NONE or FAILED, a negative id, an id that stands twice in a REPLAY or HEAD row.

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
    host: HostFacts
    plan: HeadPlan

    # No dataclass: into those, and into what torch knows as a container, FSDP2 looks for tensors
    # to cast.
    def __init__(
        self,
        ids: Tensor,
        sampler_logprobs: Tensor,
        known: Tensor,
        offsets: Tensor,
        kind: Tensor,
        sampler_tail_mass: Tensor,
        host: HostFacts | None = None,
        plan: HeadPlan | None = None,
    ) -> None:
        values = ids, sampler_logprobs, known, offsets, kind, sampler_tail_mass
        fields = dict(zip(_FIELDS, values, strict=True))
        if host is None:
            check_form(fields)
            for name, tensor in fields.items():  # the kernels count entries and rows, not strides
                fields[name] = tensor.contiguous()
            offsets, complete = fields["offsets"], _complete(known, offsets)
            host = HostFacts(offsets.cpu(), fields["kind"].cpu(), complete.cpu())
            check_kinds_and_ids(fields["ids"].cpu(), host)
        if plan is None:
            plan = head_plan(host, ids.device)
        self.__dict__.update(fields, host=host, plan=plan)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Support is immutable, {name} cannot be set: see Support.replace")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Support is immutable, {name} cannot be deleted")

    # --- what it is ---

    def __len__(self) -> int:
        return self.kind.shape[0]

    # Without this, `iter` would try support[0], support[1], ...
    __iter__ = None

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Itself as one object, for NumPy would take what has a length and items for a sequence."""
        one = sys.modules["numpy"].empty((), dtype=object)  # it is what calls
        one[()] = self
        return one

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
        _require_supports(supports)
        if not supports:
            return Support.empty(0)
        devices = {support.device for support in supports}
        if len(devices) > 1:
            raise ValueError(f"supports must be on one device, got {sorted(map(str, devices))}")
        joined: dict[str, Any] = {
            name: torch.cat([getattr(s, name) for s in supports])
            for name in _FIELDS
            if name != "offsets"
        }
        host = HostFacts(
            offsets_of(torch.cat([s.host.offsets.diff() for s in supports])),
            torch.cat([s.host.kind for s in supports]),
            torch.cat([s.host.complete for s in supports]),
        )
        offsets = offsets_of(torch.cat([s.offsets.diff() for s in supports]))
        return Support(**joined, offsets=offsets, host=host)

    @staticmethod
    def stack(
        supports: Iterable["Support | None"],
        length: int | None = None,
        *,
        start: int | Sequence[int] | Tensor = 0,
    ) -> "Support":
        """The supports of B sequences as B * L rows: one a token of `[B, L]`, flattened.

        Sequence b has L rows, from row `b * L`: `start` of kind NONE, its own, and again NONE up
        to L. Of completions padded to C tokens behind prompts padded to P, `stack(supports, C)`
        has the rows of the completions, `stack(supports, P + C, start=P)` those of all tokens.

        Args:
            supports: one a sequence; None: a sequence without evidence. (All None: on the CPU.)
            length: L; by default what the longest sequence takes.
            start: the row at which each sequence begins, one for all or one a sequence: those
                padded on the left begin at `L` minus their length.

        Raises:
            ValueError: a sequence that does not fit into L rows, naming it; as `cat`.

        Example:
            >>> one = Support.from_rows([([1], [0.0]), ([2], [0.0])])
            >>> Support.stack([one, None, one[:1]], 3, start=1).kind.view(3, 3).tolist()
            [[0, 1, 1], [0, 0, 0], [0, 1, 0]]
        """
        if isinstance(supports, Support):
            raise ValueError("supports must be a list of them, one a sequence, got one Support")
        supports = list(supports)
        _require_supports(supports, or_none=True)
        given = [s for s in supports if s is not None]
        sizes = [0 if s is None else len(s) for s in supports]
        lengths, first = torch.tensor(sizes, dtype=torch.int64), _per_sequence("start", start)
        if first.dim() == 1 and first.shape != lengths.shape:
            raise ValueError(
                f"start must be one for all or one a sequence [{len(lengths)}], got {len(first)}"
            )
        first = first.expand(len(lengths))
        ends = first + lengths
        if length is None:
            length = int(ends.max()) if len(ends) else 0
        require_count("length", length, 0)
        length = int(length)  # of NumPy's, perhaps
        bad = (first < 0) | (ends > length)
        if bad.any():
            at = first_row(bad)
            raise ValueError(
                f"supports[{at}] must fit into length {length} from start {int(first[at])} on, "
                f"got {int(lengths[at])} rows"
            )
        joined = Support.cat(given)
        shift = first + length * torch.arange(len(lengths)) - offsets_of(lengths)[:-1]
        rows = torch.arange(len(joined)) + shift.repeat_interleave(lengths)
        return joined._spread(rows, length * len(lengths))

    def split(self, lengths: int | Sequence[int] | Tensor) -> list["Support"]:
        """The rows of each sequence as a support of its own (views, no copies of entries).

        Args:
            lengths: rows of each sequence, or one number for all; from the host it costs no sync.

        Raises:
            ValueError: lengths that do not add up to N.

        Example:
            >>> [len(support) for support in Support.empty(5).split([2, 0, 3])]
            [2, 0, 3]
        """
        sizes, n = _per_sequence("lengths", lengths), len(self)
        if sizes.dim() == 0:
            require_count("lengths", int(sizes), 1)
            sizes = sizes.expand(n // int(sizes))
        if (sizes < 0).any():
            at = first_row(sizes < 0)
            raise ValueError(f"lengths must be 0 or more, got {int(sizes[at])} of sequence {at}")
        if int(sizes.sum()) != n:
            raise ValueError(f"lengths must add up to {n} rows, got {int(sizes.sum())}")
        return [self[start:stop] for start, stop in pairwise(offsets_of(sizes).tolist())]

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
        rows = numbers("rows", rows).cpu()
        if rows.dtype == torch.bool:
            if rows.shape != (len(self),):
                raise ValueError(f"rows must be a mask [{len(self)}], got {tuple(rows.shape)}")
            rows = rows.nonzero()[:, 0]
        if rows.numel() == 0:
            rows = rows.to(torch.int64)
        if rows.dim() != 1 or not is_integral(rows):
            raise ValueError(f"rows must be row numbers [M], got {rows.dtype} {tuple(rows.shape)}")
        rows = rows.to(torch.int64)  # torch would index with uint8 as with a mask
        bad = (rows < 0) | (rows >= len(self))
        if bad.any():
            at = first_row(bad)
            raise ValueError(
                f"rows must be in [0, {len(self)}), got {int(rows[at])} at position {at}"
            )
        entries, offsets = selected_entries(self.host.offsets, rows)
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

    def replace(self, **fields: Any) -> "Support":
        """The same support with the given fields instead of its own, checked as a new one.

        Example:
            >>> support = Support.from_rows([([1, 2], [-0.6931, -0.6931])])
            >>> support.replace(known=torch.tensor([True, False])).host.complete
            tensor([False])
        """
        return Support(**({name: getattr(self, name) for name in _FIELDS} | fields))

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

    def to_bytes(self) -> tuple[bytes, bytes, bytes | None, Tensor, Tensor]:
        """`(ids, counts, logprobs, kind, tail_mass)`: the arguments of `from_bytes`, on the host.

        Log-probabilities are -9999 where q is unknown, and None where no q is known. From a GPU
        it costs syncs. The first three are prime-rl's `SamplingMask`, where each row is NONE or
        REPLAY with ids.
        """
        known = self.known.cpu()
        counts = torch.where(self.host.kind == RowKind.FAILED, -1, self.host.offsets.diff())
        logprobs = None
        if known.any():
            logprobs = self.sampler_logprobs.cpu().masked_fill(~known, UNKNOWN_LOGPROB)
        return (
            bytes_of_numbers(self.ids),
            bytes_of_numbers(counts.to(torch.int32)),
            None if logprobs is None else bytes_of_numbers(logprobs),
            self.host.kind,
            self.sampler_tail_mass.cpu(),
        )

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
                draw without q; probabilities that do not add up to 1 within 1e-3; a label's entry
                that disagrees with `inference_logprobs` by more than 1e-3; the marks of an engine
                without weights (a row or all `inference_logprobs` uniform over the vocabulary,
                or every REPLAY row of more than 8 known ids uniform over its kept set), and of
                one that truncates though its rows are given as HEAD (several of them hold a few
                ids, none of a small q, and leave no tail). Also an argument of a wrong type,
                size or precision.

        Example:
            >>> support = Support.from_rows([([1, 2], [-0.6931, -0.6931])])
            >>> support.validate(torch.tensor([5]), vocab_size=8)
            Traceback (most recent call last):
            ValueError: labels[0] is 5, which its REPLAY row (2 ids) does not hold
        """
        validate_support(self, labels, vocab_size, active, inference_logprobs)
        return self

    # --- inside ---

    @classmethod
    def _build(cls, columns: Columns, tail_mass: Any) -> "Support":
        columns = columns._replace(logprobs=columns.logprobs.detach())
        ids, logprobs, known, counts, kind = columns
        offsets = offsets_of(counts)
        if int(offsets[-1]) != len(ids):
            raise ValueError(f"counts add up to {int(offsets[-1])} entries, got {len(ids)}")
        if tail_mass is None:
            tail_mass = default_tail_mass(columns, offsets)
        tail_mass = per_row("tail_mass", tail_mass, len(counts), torch.float32, ids.device)
        return cls(ids, logprobs, known, offsets, kind, tail_mass)

    def __getstate__(self) -> dict[str, Tensor]:
        """Tensors alone, which `torch.load` trusts, and no plan: it is of one version of this."""
        state = {name: getattr(self, name) for name in _FIELDS}
        state |= {_HOST + name: fact for name, fact in self.host._asdict().items()}
        return {name: _without_the_rest(tensor) for name, tensor in state.items()}

    def __setstate__(self, state: dict[str, Tensor]) -> None:
        # What was saved may be loaded to a device, the host's facts with it.
        host = HostFacts(*(state[_HOST + name].cpu() for name in HostFacts._fields))
        fields: dict[str, Any] = {name: state[name] for name in _FIELDS}
        Support.__init__(self, **fields, host=host)

    def _spread(self, rows: Tensor, n: int) -> "Support":
        """n rows, of which row `rows[i]` (host, ascending) is row i of this, the others NONE: all
        entries stay where they stand."""

        def spread(values: Tensor, elsewhere: float) -> Tensor:
            places = rows.to(values.device, non_blocking=True)
            return values.new_full((n,), elsewhere).index_copy(0, places, values)

        host = HostFacts(
            offsets_of(spread(self.host.offsets.diff(), 0)),
            spread(self.host.kind, int(RowKind.NONE)),
            spread(self.host.complete, False),
        )
        return Support(
            ids=self.ids,
            sampler_logprobs=self.sampler_logprobs,
            known=self.known,
            offsets=host.offsets.to(self.device, non_blocking=True),
            kind=spread(self.kind, int(RowKind.NONE)),
            sampler_tail_mass=spread(self.sampler_tail_mass, 1.0),
            host=host,
        )

    def _map(self, move: Callable[[Tensor], Tensor]) -> "Support":
        fields: dict[str, Any] = {name: move(getattr(self, name)) for name in _FIELDS}
        plan = self.plan
        plan = plan._replace(tiles=move(plan.tiles), wide=move(plan.wide), over_v=move(plan.over_v))
        return Support(**fields, host=self.host, plan=plan)

    def plan_for(self, vocab_size: int) -> HeadPlan:
        """The kernels' plan for a head of V ids; made once for the V of the last call.

        Inside `torch.compile`, which cannot make it, one that was not made before has no wide
        rows: the same numbers, by gathering.
        """
        if self.plan.max_width <= widest_gathered(vocab_size):
            return self.plan
        made = self.__dict__.get("_plan_for")
        if made is not None and made[0] == vocab_size:
            return made[1]
        if torch.compiler.is_compiling():
            return self.plan
        plan = head_plan(self.host, self.device, vocab_size)
        self.__dict__["_plan_for"] = vocab_size, plan
        return plan


def _require_supports(supports: list[Any], or_none: bool = False) -> None:
    for i, support in enumerate(supports):
        if not isinstance(support, Support) and not (or_none and support is None):
            wanted = "a Support or None" if or_none else "a Support"
            raise ValueError(f"supports[{i}] must be {wanted}, got {type(support).__name__}")


def _per_sequence(name: str, value: Any) -> Tensor:
    """One integer for all sequences, or one for each, as int64 on the host."""
    given = numbers(name, value, place="sequence").cpu()
    given = given.to(torch.int64) if given.numel() == 0 else given
    if given.dim() > 1 or not is_integral(given):
        raise ValueError(
            f"{name} must be an int or one a sequence, got {given.dtype} {tuple(given.shape)}"
        )
    return given.to(torch.int64)


def _complete(known: Tensor, offsets: Tensor) -> Tensor:
    """Bool `[N]`: the row has entries, and q is known for each."""
    counts = offsets.diff()
    return (count_by_row(known, offsets) == counts) & (counts > 0)


def _without_the_rest(tensor: Tensor) -> Tensor:
    """A copy where a view would take along, pickled, the whole buffer that it looks into."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def _collate(batch: list[Support], *, collate_fn_map: Any = None) -> Support:
    return Support.cat(batch)


def _sent(support: Support) -> tuple[type, tuple]:
    """What another process of the same run makes it of: there the plan holds as well."""
    owned = support._map(_without_the_rest)
    fields = (getattr(owned, name) for name in _FIELDS)
    return Support, (*fields, HostFacts(*map(_without_the_rest, owned.host)), owned.plan)


ForkingPickler.register(Support, _sent)
default_collate_fn_map[Support] = _collate
add_safe_globals([Support])
