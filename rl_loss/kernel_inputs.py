"""What the kernels of a head are given: tensors, scalars, and two bundles made of them."""

from typing import Any, NamedTuple

from torch import Tensor

from rl_loss.logits import accumulation_dtype


class HeadTensors(NamedTuple):
    """What the operators read; N rows, nnz entries."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    labels: Tensor  # [N]
    temperatures: Tensor | None  # [N]
    active: Tensor | None  # [N] bool
    ids: Tensor  # [nnz] int32
    known: Tensor  # [nnz] bool
    offsets: Tensor  # [N + 1] int64
    kind: Tensor  # [N] int8
    tiles: Tensor  # [T] int64: of the REPLAY rows whose logits are gathered
    wide: Tensor  # [W] int64: the REPLAY rows whose logits come of blocks over the vocabulary
    over_v: Tensor  # [D] int64: the rows of which something is taken over the vocabulary


class HeadScalars(NamedTuple):
    """What is no tensor."""

    temperature: float  # where it is one value
    softcap: float  # 0: none
    scale: float
    rounded: bool  # logits to bfloat16
    max_width: int  # of the support's rows, or more
    head: bool  # some row is HEAD
    want_entropy: int  # 0: none, 1: of what the row is normalised over, 2: over the vocabulary
    workspace: int  # bytes of a block of logits


def head_logits(t: HeadTensors, s: HeadScalars) -> Any:  # kernels.logits.Logit
    from rl_loss.kernels.logits import make_logit

    dtype = accumulation_dtype(t.hidden, t.weight)
    options = s.temperature, s.softcap, s.scale, s.rounded
    return make_logit(t.bias, t.temperatures, *options, t.hidden, dtype)


def head_entries(t: HeadTensors) -> Any:  # kernels.gathered.Entries
    from rl_loss.kernels.gathered import Entries

    return Entries(t.labels, t.ids, t.known, t.offsets, t.kind)
