"""Reductions over the entries of each row."""

import torch
from torch import Tensor


def segment_sum(values: Tensor, rows: Tensor, n: int) -> Tensor:
    """Sums `values [nnz]` by `rows [nnz]` into `[n]`."""
    return values.new_zeros(n).index_add(0, rows, values)


def segment_logsumexp(values: Tensor, rows: Tensor, n: int) -> Tensor:
    """Log-sum-exp of `values [nnz]` by `rows [nnz]`, `[n]`; -inf where a row has no entry."""
    top = values.new_full((n,), -torch.inf)
    top = top.scatter_reduce(0, rows, values.detach(), "amax")
    some = top > -torch.inf
    shift = torch.where(some | top.isnan(), top, 0.0)
    total = segment_sum((values - shift[rows]).exp(), rows, n)
    # An empty row is kept out of the logarithm, whose gradient there would be NaN.
    empty = total == 0
    return torch.where(empty, -torch.inf, shift + torch.where(empty, 1.0, total).log())
