"""Exact score centering: the sampler-expected score of every row, from its support entries.

Source: score centering, arXiv 2609.20807. The tail enters as one more entry: the published
form, `alpha * p_v` taken from each known id, equals it by `sum(p grad log p) = 0`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rl_loss.loss.rows import SupportEntries
from rl_loss.loss.weighting import Rule


class Centering(NamedTuple):
    """The expected score of every row: what to multiply each `grad log p` with."""

    by_entry: Tensor  # [E]
    by_tail: Tensor  # [N]
    l1: Tensor  # [N] the L1 norm of grad mu by the row's logits, on rows with known q
    inexact: Tensor  # [N] bool: the tail's model may differ from the rule token by token


def expected_score(rule: Rule, entries: SupportEntries, advantages: Tensor) -> Centering:
    """`grad mu = sum_C sg(q w) grad log p + sg(q_tail w_tail) grad log p_tail`, 0 without entries.

    On DRAWS rows of M draws `grad mu = mean of sg(w) grad log p` instead. A rule that looks at
    the advantage weighs every id with that of its row, `advantages [N]`.
    """
    log_p, log_q = entries.log_p, entries.log_q
    if entries.layout.size == 0:
        return Centering(log_p, entries.p_tail, entries.p_tail, entries.has_tail)
    share = torch.where(
        entries.at(entries.drawn), entries.at(1 / entries.size.clamp(min=1)), log_q.exp()
    )
    at_entries = entries.at(advantages) if rule.by_advantage else advantages
    weight = rule.weigh(log_p, log_q, at_entries).weight
    by_entry = torch.where(entries.valid, share * weight, 0.0)
    tail = entries.log_p_tail, entries.log_q_tail, advantages
    by_tail = torch.where(entries.has_tail, entries.q_tail * rule.tail(*tail).weight, 0.0)
    total = entries.sum(by_entry) + by_tail
    on_logits = torch.where(entries.valid, by_entry - log_p.exp() * entries.at(total), 0.0)
    return Centering(
        by_entry=by_entry,
        by_tail=by_tail,
        l1=entries.sum(on_logits.abs()) + (by_tail - entries.p_tail * total).abs(),
        inexact=entries.has_tail & rule.inexact(*tail),
    )
