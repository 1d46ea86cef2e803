"""From token-aligned sequences to rows that each describe the token they predict; their cuts."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.serialization import add_safe_globals

from rl_loss.arguments import is_integral, numbers, require_count, require_tensor
from rl_loss.csr import first_row
from rl_loss.support import Support


class AlignedRows(NamedTuple):
    """Rows that each describe one predicted token; see `aligned_rows`."""

    labels: Tensor  # [...] the token that row t predicts, 0 where inactive
    active: Tensor  # [...] bool
    support: Support  # N rows
    per_token: dict[str, Tensor]  # [..., *]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "AlignedRows":
        """The rows on a device; `active` stays where it is: on the host it costs no sync."""
        return AlignedRows(
            self.labels.to(device, non_blocking=non_blocking),
            self.active,
            self.support.to(device, non_blocking=non_blocking),
            {
                name: tensor.to(device, non_blocking=non_blocking)
                for name, tensor in self.per_token.items()
            },
        )

    def select(self, rows: Tensor | Sequence[int]) -> "AlignedRows":
        """The given rows in the given order, repeats allowed, in the shape of `rows`.

        Rows are numbered as in the support, over the flattened leading dimensions: those of
        `[B, L]` transposed are `torch.arange(B * L).view(B, L).T`, for hidden states `[L, B, H]`.

        Args:
            rows: row numbers of any shape, or a bool mask of N; from the host it costs no sync.

        Returns:
            Labels and `active` of the shape of `rows` (`[M]` where that is a mask), per-token
            tensors `[*rows.shape, ...]`, the support of its rows flattened.

        Raises:
            ValueError: as `Support.select`.

        Example:
            >>> ids, mask = torch.tensor([[3, 4, 5, 6]]), torch.ones(1, 4, dtype=torch.bool)
            >>> aligned_rows(ids, mask, support=None).select([[2, 0]]).labels
            tensor([[6, 4]])
        """
        chosen = numbers("rows", rows).cpu()
        support = self.support.select(chosen.reshape(-1))
        if chosen.dtype == torch.bool:
            chosen = chosen.reshape(-1).nonzero()[:, 0]
        chosen = chosen.to(torch.int64)  # as in Support.select, which has checked them
        n, leading = self.labels.numel(), self.labels.dim()

        def pick(tensor: Tensor) -> Tensor:
            flat = tensor.reshape(n, *tensor.shape[leading:])
            return flat[chosen.to(tensor.device, non_blocking=True)]

        return AlignedRows(
            pick(self.labels),
            pick(self.active),
            support,
            {name: pick(tensor) for name, tensor in self.per_token.items()},
        )


add_safe_globals([AlignedRows])


def aligned_rows(
    input_ids: Tensor,
    loss_mask: Tensor,
    *,
    support: Support | None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    **per_token: Tensor,
) -> AlignedRows:
    """Shifts token-aligned data so that row t describes token t + 1 of the same sequence.

    The last row of each sequence is inactive, as is every row whose token is outside the loss
    mask; an inactive label is 0, and the last row of a sequence gets 0 of every per-token value
    and no evidence.

    Args:
        input_ids: `[T]` tokens of one sequence or, with `cu_seqlens`, of packed ones, as `[T]` or
            `[1, T]`; `[B, L]` padded sequences.
        loss_mask: the shape of `input_ids`, bool: the tokens that were sampled.
        support: one row a token: the evidence about that very token. None: no evidence.
        cu_seqlens: `[S + 1]` integer bounds of the packed sequences, from 0 to T, as a tensor or
            a sequence (from the host it costs no sync).
        **per_token: token-aligned tensors `[*input_ids.shape, ...]` to shift along, such as
            `inference_logprobs` and `advantages`.

    Raises:
        ValueError: types, dtypes, shapes or bounds that do not fit.

    Example:
        >>> rows = aligned_rows(
        ...     torch.tensor([10, 11, 12, 20, 21]), torch.ones(5, dtype=torch.bool),
        ...     support=None, cu_seqlens=torch.tensor([0, 3, 5]),
        ... )
        >>> rows.labels.tolist(), rows.active.tolist()
        ([11, 12, 0, 21, 0], [True, True, False, True, False])
    """
    for name, tensor in {"input_ids": input_ids, "loss_mask": loss_mask, **per_token}.items():
        require_tensor(name, tensor)
    if support is not None and not isinstance(support, Support):
        raise ValueError(f"support must be a Support or None, got {type(support).__name__}")
    shape, n = input_ids.shape, input_ids.numel()
    if not is_integral(input_ids):
        raise ValueError(f"input_ids must be integers, got {input_ids.dtype}")
    if input_ids.dim() not in (1, 2):
        raise ValueError(f"input_ids must be [T] or [B, L], got {tuple(shape)}")
    if loss_mask.dtype != torch.bool:
        raise ValueError(f"loss_mask must be bool, got {loss_mask.dtype}")
    if loss_mask.shape != shape:
        raise ValueError(
            f"loss_mask must have the shape of input_ids {tuple(shape)}, "
            f"got {tuple(loss_mask.shape)}"
        )
    for name, tensor in per_token.items():
        if tensor.shape[: len(shape)] != shape:
            raise ValueError(
                f"{name} must begin with the shape of input_ids {tuple(shape)}, "
                f"got {tuple(tensor.shape)}"
            )
    support = Support.empty(n, device=input_ids.device) if support is None else support
    if len(support) != n:
        raise ValueError(f"support must have one row a token ({n}), got {len(support)}")
    last = _last_rows(shape, cu_seqlens)  # on the host
    rows = torch.arange(1, n + 1)
    rows[last] = n  # the row of kind NONE that is put behind the others
    support = Support.cat([support, Support.empty(1, device=support.device)]).select(rows)
    rows[last] = 0  # any row will do: what it brings is replaced

    def shift(tensor: Tensor) -> Tensor:
        flat = tensor.reshape(n, *tensor.shape[len(shape) :])
        moved = flat[rows.to(tensor.device, non_blocking=True)]
        gone = last.to(tensor.device, non_blocking=True)
        gone = gone.reshape(n, *([1] * (moved.dim() - 1)))
        return torch.where(gone, torch.zeros_like(moved), moved).reshape(tensor.shape)

    active = shift(loss_mask)
    labels = shift(input_ids)
    labels = torch.where(active.to(labels.device), labels, torch.zeros_like(labels))
    shifted = {name: shift(tensor) for name, tensor in per_token.items()}
    return AlignedRows(labels, active, support, shifted)


def context_parallel_rows(
    shape: Sequence[int],
    rank: int,
    ranks: int,
    *,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    zigzag: bool = True,
) -> Tensor:
    """The numbers of the rows that one context-parallel rank has, in their order.

    A sequence is cut into `2 * ranks` equal chunks, of which rank r has the chunks r and
    `2 * ranks - 1 - r`: under causal attention each rank then has as much to do. Without `zigzag`
    it is cut into `ranks` chunks, of which rank r has chunk r.

    Align first, cut afterwards: the row before a cut predicts a token behind it, which
    `aligned_rows` finds on whole sequences alone. Input ids and positions are cut by the same
    numbers, `input_ids.flatten()[rows]`.

    Args:
        shape: of the input ids: `[T]`, `[1, T]` or `[B, L]`.
        rank, ranks: this rank in the context-parallel group, and the size of the group.
        cu_seqlens: `[S + 1]` bounds of packed sequences that are cut one by one, as in
            `aligned_rows`. None: the last dimension is cut as one sequence, whatever stands in
            it; packed sequences then straddle ranks.

    Returns:
        int64 row numbers on the host, `[T / ranks]`, `[1, T / ranks]` or `[B, L / ranks]`, for
        `AlignedRows.select` and, flattened, `Support.select`.

    Raises:
        ValueError: a sequence that does not divide into so many chunks, naming it; ranks or
            bounds that do not fit.

    Source: the cut of Megatron-LM and Transformer Engine, and of PyTorch's `context_parallel`.

    Example:
        >>> [context_parallel_rows([8], rank, 2).tolist() for rank in range(2)]
        [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    require_count("ranks", ranks, 1)
    require_count("rank", rank, 0)
    if rank >= ranks:
        raise ValueError(f"rank must be below ranks ({ranks}), got {rank}")
    sizes = numbers("shape", shape)
    if not is_integral(sizes) or sizes.shape not in ((1,), (2,)) or (sizes < 0).any():
        raise ValueError(f"shape must be that of input_ids, [T] or [B, L], got {shape}")
    whole = torch.Size(sizes.tolist())
    length, chunks = whole[-1], 2 * ranks if zigzag else ranks
    bounds = torch.tensor([0, length])
    if cu_seqlens is not None:
        bounds = _sequence_bounds(whole, cu_seqlens)
    lengths = bounds.diff()
    uneven = lengths % chunks != 0
    if uneven.any():
        at = first_row(uneven)
        raise ValueError(
            f"a sequence must divide into {chunks} chunks to be cut over {ranks} ranks: pad it, "
            f"got {int(lengths[at])} rows in sequence {at}"
        )
    within = torch.arange(length) - bounds[:-1].repeat_interleave(lengths)
    chunk = within // (lengths // chunks).repeat_interleave(lengths)
    owner = chunk.minimum(chunks - 1 - chunk) if zigzag else chunk
    own = (owner == rank).nonzero()[:, 0]
    starts = torch.arange(whole[:-1].numel()) * length
    return (starts[:, None] + own).reshape(*whole[:-1], len(own))


def _last_rows(shape: torch.Size, cu_seqlens: Tensor | Sequence[int] | None) -> Tensor:
    """Bool `[N]` on the host: the rows that end a sequence."""
    last = torch.zeros(shape.numel(), dtype=torch.bool)
    if cu_seqlens is None:
        last.reshape(shape)[..., -1:] = True
        return last
    bounds = _sequence_bounds(shape, cu_seqlens)
    last[bounds[1:][bounds.diff() > 0] - 1] = True
    return last


def _sequence_bounds(shape: torch.Size, cu_seqlens: Tensor | Sequence[int]) -> Tensor:
    """Int64 `[S + 1]` on the host, checked."""
    bounds = numbers("cu_seqlens", cu_seqlens).cpu()
    if bounds.numel() and not is_integral(bounds):  # torch takes an empty list for float32
        raise ValueError(f"cu_seqlens must be integers [S + 1], got {bounds.dtype}")
    bounds = bounds.to(torch.int64)
    if len(shape) == 2 and shape[0] != 1:
        raise ValueError(f"cu_seqlens needs packed input_ids [T] or [1, T], got {tuple(shape)}")
    n = shape.numel()
    if bounds.dim() != 1 or bounds.numel() == 0 or bounds[0] != 0 or bounds[-1] != n:
        raise ValueError(f"cu_seqlens must run from 0 to {n}, got {bounds.tolist()}")
    if (bounds.diff() < 0).any():
        at = first_row(bounds.diff() < 0)
        raise ValueError(
            f"cu_seqlens must not fall, got {bounds[at : at + 2].tolist()} in sequence {at}"
        )
    return bounds
