"""Exact score centering: the sampler-expected score of every row, from its evidence.

Source: score centering, arXiv 2609.20807. The tail enters as one more entry: the published
form, `alpha * p_v` taken from each known id, equals it by `sum(p grad log p) = 0`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rl_loss.loss.rows import Evidence
from rl_loss.loss.weighting import Rule


class Centering(NamedTuple):
    """The expected score of every row: what to multiply each `grad log p` with."""

    entries: Tensor  # [E]
    tails: Tensor  # [N]
    l1: Tensor  # [N] the L1 norm of grad mu by the row's logits, on rows with known q
    inexact: Tensor  # [N] bool: the tail's model may differ from the rule token by token


def expected_score(rule: Rule, evidence: Evidence) -> Centering:
    """`grad mu = sum_C sg(q w) grad log p + sg(q_tail w_tail) grad log p_tail`, 0 without evidence.

    On DRAWS rows of M draws `grad mu = mean of sg(w) grad log p` instead.
    """
    log_p, log_q = evidence.log_p, evidence.log_q
    if evidence.layout.size == 0:
        return Centering(log_p, evidence.p_tail, evidence.p_tail, evidence.has_tail)
    share = torch.where(
        evidence.at(evidence.drawn), evidence.at(1 / evidence.size.clamp(min=1)), log_q.exp()
    )
    entries = torch.where(evidence.valid, share * rule.weigh(log_p, log_q).weight, 0.0)
    tail = evidence.log_p_tail, evidence.log_q_tail
    tails = torch.where(evidence.has_tail, evidence.q_tail * rule.tail(*tail).weight, 0.0)
    total = evidence.sum(entries) + tails
    on_logits = torch.where(evidence.valid, entries - log_p.exp() * evidence.at(total), 0.0)
    return Centering(
        entries=entries,
        tails=tails,
        l1=evidence.sum(on_logits.abs()) + (tails - evidence.p_tail * total).abs(),
        inexact=evidence.has_tail & rule.inexact(*tail),
    )
