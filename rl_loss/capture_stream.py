"""Captured rows to the host, step by step, while the sampler goes on."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.serialization import add_safe_globals

from rl_loss.capture import CapturedRows
from rl_loss.support import Support

T = TypeVar("T")


class RecordedStep(NamedTuple):
    """One step's evidence on the host."""

    support: Support  # R rows
    sampled_logprobs: Tensor  # [R] float32


add_safe_globals([RecordedStep])


class _Step:
    """A step on its way to the host: its row facts, and then its entries, once `event` is past."""

    def __init__(self, rows: CapturedRows) -> None:
        facts = rows.counts, rows.kind, rows.tail_mass, rows.sampled_logprobs, rows.needed
        self.counts, self.kind, self.tail_mass, self.sampled_logprobs, self.needed = (
            _to_host(fact) for fact in facts
        )
        self.packed = rows.packed  # on the device, and then the entries on the host
        self.event: torch.cuda.Event | None = None

    def arrived(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()


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
        self._steps: list[_Step] = []
        self._copied = 0  # steps whose entries are on their way

    def add(self, rows: CapturedRows) -> None:
        """Starts the copy of one step's rows; does not wait.

        Nothing may write to the tensors of `rows` before `collect`: those that a CUDA graph
        writes again at its next replay are to be cloned first.

        Raises:
            ValueError: what is no `CapturedRows`, or a call inside the capture of a CUDA graph.
        """
        if not isinstance(rows, CapturedRows):
            raise ValueError(f"rows must be CapturedRows, got {type(rows).__name__}")
        if rows.packed.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError("rows cannot be added in a CUDA graph: add clones of its outputs")
        step, event = self._behind(rows.packed, lambda: _Step(rows))
        step.event = event
        self._steps.append(step)
        while self._copied < len(self._steps) and self._steps[self._copied].arrived():
            self._copy_entries()

    def collect(self) -> list[RecordedStep]:
        """All steps since the last call, in their order; waits for their copies.

        Raises:
            ValueError: a step whose entries are not those that were captured; it names the step,
                and all of them are dropped.
        """
        while self._copied < len(self._steps):
            self._steps[self._copied].wait()
            self._copy_entries()
        steps, self._steps, self._copied = self._steps, [], 0
        recorded = []
        for number, step in enumerate(steps):
            step.wait()
            try:
                support = Support.from_packed(
                    step.packed, step.counts, kind=step.kind, tail_mass=step.tail_mass
                )
            except ValueError as error:
                raise ValueError(
                    f"step {number}: {error}; was it written again before collect?"
                ) from error
            recorded.append(RecordedStep(support, step.sampled_logprobs))
        return recorded

    def _copy_entries(self) -> None:
        """The second phase of the next step, whose counts are here."""
        step = self._steps[self._copied]
        total = int(step.counts.clamp(min=0).sum())
        self.most_needed = max(self.most_needed, int(step.needed))
        packed = step.packed
        step.packed, step.event = self._behind(packed, lambda: _to_host(packed[:total]), wait=False)
        self._copied += 1

    def _behind(
        self, tensor: Tensor, copy: Callable[[], T], wait: bool = True
    ) -> tuple[T, torch.cuda.Event | None]:
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
