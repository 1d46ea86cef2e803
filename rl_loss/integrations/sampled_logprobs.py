"""Log-probabilities of sampled tokens that know the rows of their evidence.

A trainer that carries one float a token through its rollouts (TRL, say, whose tool loop cuts and
joins lists of them) carries the evidence along without knowing it: no second list has to be cut
and joined in the same way.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from rl_loss.support import Support


class SampledLogprob(float):
    """log q of one sampled token: a float that knows which row of which support is its evidence.

    It stays what it is in lists, through their cuts and joins, and pickled; arithmetic makes a
    plain float of it.
    """

    __slots__ = ("row", "support")

    support: Support
    row: int

    def __new__(cls, logprob: float, support: Support, row: int) -> "SampledLogprob":
        self = super().__new__(cls, logprob)
        self.support, self.row = support, row
        return self

    def __reduce__(self) -> tuple[type, tuple[float, Support, int]]:
        return SampledLogprob, (float(self), self.support, self.row)


def sampled_logprobs(support: Support, logprobs: Iterable[float]) -> list[SampledLogprob]:
    """The N log-probabilities `logprobs`, each with its row of `support`.

    Raises:
        ValueError: more or fewer log-probabilities than rows.

    Example:
        >>> support = Support.from_rows([([1, 2], None), ([3], None)])
        >>> carried = [0.0] + sampled_logprobs(support, [-0.7, 0.0])[:1]
        >>> carried, support_of(carried)
        ([0.0, -0.7], Support(2 rows: 1 NONE, 1 REPLAY; nnz=2, device=cpu))
    """
    logprobs = list(logprobs)
    if len(logprobs) != len(support):
        raise ValueError(f"logprobs must be one a row ({len(support)}), got {len(logprobs)}")
    return [SampledLogprob(logprob, support, row) for row, logprob in enumerate(logprobs)]


def support_of(logprobs: Iterable[Any]) -> Support:
    """The rows that `sampled_logprobs` gave these floats, in their order; NONE for others."""
    parts = []
    for _, group in groupby(logprobs, key=lambda logprob: id(getattr(logprob, "support", None))):
        run = list(group)
        source = getattr(run[0], "support", None)
        if source is None:
            parts.append(Support.empty(len(run)))
        else:
            parts.append(source.select([logprob.row for logprob in run]))
    return Support.cat(parts)
