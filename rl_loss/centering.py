"""Exact score centering: the sampler-expected score of every row, from its evidence.

Source: score centering, arXiv 2609.20807. The tail enters as one more entry: the published
form, `alpha * p_v` taken from each known id, equals it by `sum(p grad log p) = 0`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rl_loss.evidence import Evidence, score
from rl_loss.weighting import Rule


class Centering(NamedTuple):
    """The expected score of every row."""

    term: Tensor  # [N] no value, the gradient of mu
    l1: Tensor  # [N] the L1 norm of that gradient by the row's logits, on rows with known q
    inexact: Tensor  # [N] bool: the tail's model may differ from the rule token by token


def expected_score(rule: Rule, evidence: Evidence) -> Centering:
    """`grad mu = sum_C sg(q w) grad log p + sg(q_tail w_tail) grad log p_tail`, 0 without evidence.

    On DRAWS rows of M draws `grad mu = mean of sg(w) grad log p` instead.
    """
    log_p, log_q = evidence.log_p.detach(), evidence.log_q
    share = torch.where(
        evidence.at(evidence.drawn), 1 / evidence.at(evidence.size).clamp(min=1), log_q.exp()
    )
    coefficient = torch.where(evidence.valid, share * rule.weigh(log_p, log_q).weight, 0.0)
    tail = evidence.log_p_tail.detach(), evidence.log_q_tail
    tail_coefficient = torch.where(
        evidence.has_tail, evidence.q_tail * rule.tail(*tail).weight, 0.0
    )
    total = evidence.sum(coefficient) + tail_coefficient
    on_logits = torch.where(evidence.valid, coefficient - log_p.exp() * evidence.at(total), 0.0)
    return Centering(
        term=evidence.sum(coefficient * score(evidence.log_p))
        + tail_coefficient * score(evidence.log_p_tail),
        l1=evidence.sum(on_logits.abs()) + (tail_coefficient - evidence.p_tail * total).abs(),
        inexact=evidence.has_tail & rule.inexact(*tail),
    )
