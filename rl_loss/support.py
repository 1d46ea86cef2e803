"""The sampler's evidence about each token: ragged supports that stay with their rows."""

import math
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.serialization import add_safe_globals
from torch.utils.data._utils.collate import default_collate_fn_map

from rl_loss.arguments import is_integral, numbers
from rl_loss.csr import (
    HostFacts,
    RowKind,
    first_row,
    offsets_of,
    rows_of_entries,
    selected_entries,
)
from rl_loss.engines import (
    answer_columns,
    label_logprobs,
    sglang_columns,
    top_columns,
    vllm_columns,
)
from rl_loss.packing import pack_entries
from rl_loss.plan import HeadPlan, head_plan, widest_gathered
from rl_loss.row_parsing import (
    Columns,
    check_form,
    check_kinds_and_ids,
    default_tail_mass,
    per_row,
    read_packed,
    read_padded,
    read_rows,
)
from rl_loss.validation import validate_support

_FIELDS = ("ids", "sampler_logprobs", "known", "offsets", "kind", "sampler_tail_mass")
_HOST = "host_"  # before the names of the host's facts in a pickled state


class Support:
    """The supports of N rows in CSR form: what the sampler kept and with which probability.

    Entry `e` of row `i` stands at `offsets[i] <= e < offsets[i + 1]`. The object is immutable
    and owns slicing, concatenation and selection, so that rows keep their evidence. It carries
    the host's view of its widths and kinds along, also to a GPU, so that a training step needs
    no device-to-host sync; building one from device tensors costs one sync.

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
        return cls._build(read_rows(rows, kind), tail_mass)

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
        return cls._build(read_packed(packed, counts, kind), tail_mass)

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
        return cls._build(read_padded(ids, logprobs, kind), tail_mass)

    @classmethod
    def from_vllm(cls, mask: Any, logprobs: Any = None) -> "Support":
        """REPLAY rows from vLLM's sampling mask and the request's processed log-probabilities.

        A row whose kept ids all have a log-probability is complete, and its centering exact; on
        the others the missing ids are the tail inside the kept set. Log-probabilities are taken
        from `logprobs`, the mask's own, `sampling_mask_logprobs` and the answer's `logprobs`, the
        first that knows an id; what none of them says of it, and -9999 or less, is unknown.

        Args:
            mask: a `CompletionOutput`, a choice of the generate endpoint's JSON, or a request of
                one of them; or its `sampling_mask` alone: a list of ids a token, lists or arrays,
                or flat ids with `offsets` (`token_ids`, with `logprobs` or without).
            logprobs: per token a dict from id to `Logprob`, its dict or a float, an entry of
                `logprobs.content`, or the log-probabilities of the kept ids in their order, flat
                where the kept ids are.

        Raises:
            ValueError: no mask, lengths that do not fit, a token named by its text, a kept id
                with probability 0 (-inf).

        Source: vLLM, pull request 49577; docs/sampler.md says what to ask the engine for.

        Example:
            >>> mask = {"token_ids": [[5, 9], [4]], "logprobs": [[-0.7, -0.7], [0.0]]}
            >>> Support.from_vllm(mask).host.complete.tolist()
            [True, True]
        """
        return cls._build(vllm_columns(mask, logprobs), None)

    @classmethod
    def from_sglang(cls, mask: Any, logprobs: Any = None) -> "Support":
        """REPLAY rows from SGLang's sampling mask and the log-probabilities of its `meta_info`.

        SGLang's top log-probabilities are over the whole vocabulary, and only the sampled token's
        is given over the kept set as well. The difference of the two is minus the log of the kept
        mass: it shifts the top ids onto the kept set. (They must be those of the logits sampled
        from, after temperature: SGLang's default.) In its support mode nothing else is needed.

        Args:
            mask: a response or its `meta_info`, of a request with `return_sampling_mask`; or the
                `output_token_sampling_mask` alone, a list of ids a token, lists or arrays; or the
                engine's own chunk (flat `token_ids` with `lengths`).
            logprobs: what holds `output_token_sampling_logprobs` (a float a token, or in support
                mode the log-probabilities of its kept ids), `output_token_logprobs` and
                `output_top_logprobs` (`(logprob, id, text)`); by default the `mask`. Without any,
                the ids alone.

        Raises:
            ValueError: no mask, lengths that do not fit, a token that is not scored, a kept id
                with probability 0, top log-probabilities without what shifts them; what one
                request cannot hold: a sampled token outside its kept set, or one whose
                log-probability over the kept set is below that over the vocabulary.

        Source: SGLang, pull requests 27408 and 36630.

        Example:
            >>> Support.from_sglang(
            ...     [[5, 9]], {"output_token_sampling_logprobs": [[-0.7, -0.7]]}
            ... ).nnz
            2
        """
        return cls._build(sglang_columns(mask, logprobs), None)

    @classmethod
    def from_top_logprobs(cls, logprobs: Any, sampled: Any = None) -> "Support":
        """HEAD rows from an engine's top log-probabilities, of an untruncated request alone.

        No top_p, top_k or min_p may be set, for the trainer normalises over the vocabulary; a
        temperature may, if the log-probabilities are after it (vLLM: processed ones). The tail
        mass is `max(0, 1 - sum of q)`.

        Args:
            logprobs: vLLM's, per token a dict from id to `Logprob`, its dict or a float, or an
                entry of `logprobs.content`; SGLang's `output_top_logprobs`, per token a list of
                `(logprob, id, text)`; or the answer that holds either.
            sampled: per token `(logprob, id)` of the sampled token, added where it is not among
                the top; by default SGLang's `output_token_logprobs`. vLLM's lists hold it.

        Raises:
            ValueError: an answer with a sampling mask or without log-probabilities, lengths that
                do not fit, a token named by its text, an id with probability 0 or unknown.

        Example:
            >>> top = [{5: -0.7, 9: -1.2}, {4: -0.1}]
            >>> Support.from_top_logprobs(top).sampler_tail_mass
            tensor([0.2022, 0.0952])
        """
        return cls._build(top_columns(logprobs, sampled), None)

    @classmethod
    def read_answer(cls, answer: Any, kind: int = RowKind.REPLAY) -> "AnswerRows":
        """The rows of a whole answer of vLLM or SGLang, with its sampled tokens and their log q.

        Args:
            answer: vLLM's `CompletionOutput` or a choice of its JSON; SGLang's response, its
                `meta_info`, or a choice with one.
            kind: REPLAY for a request with a sampling mask (`from_vllm`, `from_sglang`), HEAD for
                an untruncated one (`from_top_logprobs`).

        Returns:
            The support; the sampled tokens' log-probabilities as it holds them, `[N]` float32;
            their ids, `[N]` int64.

        Raises:
            ValueError: as those, and for a sampled token whose log-probability is not known.

        Example:
            >>> mask = {"token_ids": [[5, 9]], "logprobs": [[-0.2, -1.7]]}
            >>> Support.read_answer({"token_ids": [9], "sampling_mask": mask}).inference_logprobs
            tensor([-1.7000])
        """
        columns, tokens = answer_columns(answer, kind)
        return AnswerRows(cls._build(columns, None), label_logprobs(columns, tokens), tokens)

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
        for i, support in enumerate(supports):
            if not isinstance(support, Support):
                raise ValueError(f"supports[{i}] must be a Support, got {type(support).__name__}")
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


class AnswerRows(NamedTuple):
    """What an engine's answer says of its N sampled tokens."""

    support: Support
    inference_logprobs: Tensor  # [N] float32, log q of the sampled token
    token_ids: Tensor  # [N] int64, the sampled tokens


def _complete(known: Tensor, offsets: Tensor) -> Tensor:
    """Bool `[N]`: the row has entries, and q is known for each."""
    counts = offsets.diff()
    unknown = torch.zeros_like(counts)
    unknown.index_add_(0, rows_of_entries(offsets, len(known)), (~known).long())
    return (unknown == 0) & (counts > 0)


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
