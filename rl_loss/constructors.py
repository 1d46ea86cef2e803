"""The ways to a support: from rows, from what was sent or padded, from an engine's answer."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rl_loss.csr import RowKind
from rl_loss.engines import (
    answer_columns,
    label_logprobs,
    sglang_columns,
    top_columns,
    vllm_columns,
)
from rl_loss.row_parsing import Columns, read_bytes, read_packed, read_padded, read_rows

if TYPE_CHECKING:
    from rl_loss.support import Support


class AnswerRows(NamedTuple):
    """What an engine's answer says of its N sampled tokens."""

    support: "Support"
    inference_logprobs: Tensor  # [N] float32, log q of the sampled token
    token_ids: Tensor  # [N] int64, the sampled tokens


class SupportConstructors:
    """The constructors of `Support`, which all go through its `_build`."""

    @classmethod
    def _build(cls, columns: Columns, tail_mass: Any) -> "Support":
        raise NotImplementedError

    @classmethod
    def empty(cls, n: int, *, device: torch.device | str = "cpu") -> "Support":
        """N rows of kind NONE: no evidence.

        Example:
            >>> from rl_loss import Support
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
            >>> from rl_loss import Support
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
            >>> from rl_loss import Support
            >>> Support.from_packed(torch.empty(0, dtype=torch.int64), torch.tensor([-1])).kind
            tensor([-1], dtype=torch.int8)
        """
        return cls._build(read_packed(packed, counts, kind), tail_mass)

    @classmethod
    def from_bytes(
        cls,
        ids: Any,
        counts: Any,
        logprobs: Any = None,
        kind: int | Sequence[int] | Tensor = RowKind.REPLAY,
        tail_mass: float | Sequence[float] | Tensor | None = None,
    ) -> "Support":
        """A support from flat bytes, as prime-rl's transport has them, on the CPU.

        There a `SamplingMask` holds `ids`, `counts` (one a token of the whole sequence, 0 without
        a mask) and `logprobs`: `Support.from_bytes(mask.ids, mask.counts, mask.logprobs)` are the
        rows that `aligned_rows` takes with those tokens.

        Args:
            ids: `nnz` int32 ids, row after row, as a bytes-like object in the machine's byte
                order (little-endian on x86 and ARM), or an int32 array; copied.
            counts: entries of each of the N rows, the same way or as integers; -1: the sampler
                failed to record the row.
            logprobs: `nnz` float32 log q, the same way; NaN, or -9999 and less: q unknown. None:
                the ids alone.
            kind: one `RowKind` for the rows that have ids (those without are NONE), or one a row
                (a count of -1 makes it FAILED).
            tail_mass: as in `from_rows`.

        Raises:
            ValueError: as `from_packed`, and for bytes that are no such numbers.

        Source: prime-rl, `SamplingMask` in `src/prime_rl/transports/batch/types.py`, which writes
        -9999 where a packed sample came without log-probabilities.

        Example:
            >>> import struct
            >>> from rl_loss import Support
            >>> support = Support.from_bytes(struct.pack("3i", 5, 9, 4), struct.pack("3i", 2, 0, 1))
            >>> support.kind.tolist(), support.ids.tolist()
            ([1, 0, 1], [5, 9, 4])
        """
        return cls._build(read_bytes(ids, counts, logprobs, kind), tail_mass)

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
            >>> from rl_loss import Support
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
            >>> from rl_loss import Support
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
            >>> from rl_loss import Support
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
            >>> from rl_loss import Support
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
            >>> from rl_loss import Support
            >>> mask = {"token_ids": [[5, 9]], "logprobs": [[-0.2, -1.7]]}
            >>> Support.read_answer({"token_ids": [9], "sampling_mask": mask}).inference_logprobs
            tensor([-1.7000])
        """
        columns, tokens = answer_columns(answer, kind)
        return AnswerRows(cls._build(columns, None), label_logprobs(columns, tokens), tokens)
