"""Captured rows to the host, step by step, while the sampler goes on."""

from typing import NamedTuple

import torch
from torch import Tensor

from rl_loss.capture import CapturedRows
from rl_loss.support import Support


class RecordedStep(NamedTuple):
    """One step's evidence on the host."""

    support: Support  # R rows
    sampled_logprobs: Tensor  # [R] float32


class _Pending:
    """A step whose row facts are on their way, and then its entries."""

    def __init__(self, rows: CapturedRows) -> None:
        self.packed: Tensor | None = rows.packed
        facts = rows.counts, rows.kind, rows.tail_mass, rows.sampled_logprobs, rows.needed
        self.counts, self.kind, self.tail_mass, self.sampled_logprobs, self.needed = (
            _to_host(fact) for fact in facts
        )
        self.entries: Tensor | None = None


class CaptureStream:
    """Copies what `capture_support` recorded to the host without stalling the sampling loop.

    In two phases, because only the counts say how many entries there are: first a step's counts
    (and kinds, tail masses, log-probabilities), then exactly its entries, not the whole buffer;
    both into pinned memory, on a stream of their own. The second phase of a step starts at the
    first `add` after its counts have arrived, so that nothing waits; a step's buffer is held on
    the device until then.

    Attributes:
        most_needed: the most entries that any step so far asked for, as far as counts have
            arrived: above the capacity of `capture_support`, rows were given up.

    Example:
        >>> from rl_loss import RowKind, capture_support
        >>> stream = CaptureStream()
        >>> for logits in torch.randn(3, 2, 5):
        ...     token = logits.softmax(1).multinomial(1)[:, 0]
        ...     stream.add(capture_support(logits, token, kind=RowKind.REPLAY))
        >>> [step.support.nnz for step in stream.collect()]
        [10, 10, 10]
    """

    def __init__(self) -> None:
        self.most_needed = 0
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._steps: list[tuple[_Pending, torch.cuda.Event | None]] = []
        self._copied = 0  # steps whose entries are on their way

    def add(self, rows: CapturedRows) -> None:
        """Starts the copy of one step's rows; does not wait.

        Raises:
            ValueError: what is no `CapturedRows`.
        """
        if not isinstance(rows, CapturedRows):
            raise ValueError(f"rows must be CapturedRows, got {type(rows).__name__}")
        self._steps.append(self._behind(rows.packed, lambda: _Pending(rows)))
        while self._copied < len(self._steps) and _arrived(self._steps[self._copied][1]):
            self._copy_entries()

    def collect(self) -> list[RecordedStep]:
        """All steps since the last call, in their order; waits for their copies."""
        while self._copied < len(self._steps):
            _wait(self._steps[self._copied][1])
            self._copy_entries()
        steps = []
        for step, event in self._steps:
            _wait(event)
            assert step.entries is not None
            support = Support.from_packed(
                step.entries, step.counts, kind=step.kind, tail_mass=step.tail_mass
            )
            steps.append(RecordedStep(support, step.sampled_logprobs))
        self._steps, self._copied = [], 0
        return steps

    def _copy_entries(self) -> None:
        """The second phase of the next step, whose counts are here."""
        step, _ = self._steps[self._copied]
        packed, total = step.packed, int(step.counts.clamp(min=0).sum())
        assert packed is not None
        self.most_needed = max(self.most_needed, int(step.needed))
        step.entries, event = self._behind(packed, lambda: _to_host(packed[:total]), wait=False)
        step.packed = None
        self._steps[self._copied] = step, event
        self._copied += 1

    def _behind(self, tensor: Tensor, copy, wait: bool = True):  # type: ignore[no-untyped-def]
        """What `copy` gives, run on a stream of its own, and its event; `wait`: behind the work
        of the current stream so far, which has made the tensor."""
        if not tensor.is_cuda:
            return copy(), None
        device = tensor.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        if wait:
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            made, event = copy(), torch.cuda.Event()
            event.record(stream)
        return made, event


def _to_host(tensor: Tensor) -> Tensor:
    """A copy on the host; of a tensor on a GPU pinned, made when the current stream gets there."""
    if not tensor.is_cuda:
        return tensor.clone()
    tensor.record_stream(torch.cuda.current_stream(tensor.device))
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _arrived(event: "torch.cuda.Event | None") -> bool:
    return event is None or event.query()


def _wait(event: "torch.cuda.Event | None") -> None:
    if event is not None:
        event.synchronize()
