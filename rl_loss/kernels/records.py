"""What the kernels of a head are given and give: tensors, scalars, and bundles of them."""

from typing import Any, NamedTuple

import torch
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
    draws: bool  # some row is DRAWS: an id may stand in it twice
    want_entropy: int  # 0: none, 1: of what the row is normalised over, 2: over the vocabulary
    workspace: int  # bytes of a block of logits


class Entries(NamedTuple):
    """The rows' labels and supports, as every kernel reads them."""

    labels: Tensor  # [N]
    ids: Tensor  # [nnz] int32
    known: Tensor  # [nnz] bool
    offsets: Tensor  # [N + 1] int64
    kind: Tensor  # [N] int8


class Rows(NamedTuple):
    """What the forward gives: the four outputs, and what the backward reads beside them."""

    logprobs: Tensor  # [N]
    support_logprobs: Tensor  # [nnz]
    tail_logprobs: Tensor  # [N]
    entropy: Tensor  # [N], empty where not asked for
    valid: Tensor  # [nnz] bool
    lse: Tensor  # [N]
    lse_v: Tensor  # [N], empty where no row is over the vocabulary
    state: Tensor  # [N] uint8: see `_rows_kernel`

    @classmethod
    def new(cls, like: Tensor, dtype: torch.dtype, n: int, nnz: int, entropy: bool, over_v: bool):
        """Outputs of N rows, not written yet."""
        new = like.new_empty
        return cls(
            logprobs=new(n, dtype=dtype),
            support_logprobs=new(nnz, dtype=dtype),
            tail_logprobs=new(n, dtype=dtype),
            entropy=new(n if entropy else 0, dtype=dtype),
            valid=new(nnz, dtype=torch.bool),
            lse=new(n, dtype=dtype),
            lse_v=new(n if over_v else 0, dtype=dtype),
            state=new(n, dtype=torch.uint8),
        )


def head_logits(t: HeadTensors, s: HeadScalars) -> Any:  # kernels.logits.Logit
    from rl_loss.kernels.logits import make_logit

    dtype = accumulation_dtype(t.hidden, t.weight)
    options = s.temperature, s.softcap, s.scale, s.rounded
    return make_logit(t.bias, t.temperatures, *options, t.hidden, dtype)


def head_entries(t: HeadTensors) -> Entries:
    return Entries(t.labels, t.ids, t.known, t.offsets, t.kind)
