"""The heads of a training step: from hidden states to icepop, centered over each row's support."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.padded_ways import padded_online_replay
from benchmarks.torch_ways import full_log_softmax
from benchmarks.workloads import Way, Workload
from rl_loss import LossInputs, Support, fused_lm_head, fused_lm_head_loss, icepop_loss


@dataclass
class Rows:
    """What stands beside the hidden states of N tokens."""

    labels: Tensor  # [N]
    support: Support  # on the labels' device
    inference_logprobs: Tensor  # [N]
    advantages: Tensor  # [N]
    kept: Tensor | None = None  # the padded ids, made once, as a loader would

    @property
    def given(self) -> dict[str, Tensor]:
        return {"inference_logprobs": self.inference_logprobs, "advantages": self.advantages}


@dataclass(frozen=True)
class Head:
    title: str
    loss: Callable[[Tensor, Tensor, Rows], Tensor]  # of hidden [N, H], weight [V, H], rows


def ours(hidden: Tensor, weight: Tensor, rows: Rows) -> Tensor:
    out = fused_lm_head(hidden, weight, rows.labels, rows.support)
    return icepop_loss(LossInputs.from_head(out, **rows.given)).loss


def one_pass(hidden: Tensor, weight: Tensor, rows: Rows) -> Tensor:
    args = hidden, weight, rows.labels, rows.support
    return fused_lm_head_loss(*args, loss=icepop_loss, **rows.given).loss


def through(way: Way) -> Callable[[Tensor, Tensor, Rows], Tensor]:
    """One of the benchmark's ways to the log-probabilities of labels and supports, and our loss."""

    def loss(hidden: Tensor, weight: Tensor, rows: Rows) -> Tensor:
        work = Workload("step", hidden, weight, rows.labels, rows.support, rows.advantages, hidden)
        work.kept = rows.kept
        logprobs, entries = way(work)
        rows.kept = work.kept
        inputs = LossInputs(
            trainer_logprobs=logprobs,
            loss_mask=torch.ones_like(rows.labels, dtype=torch.bool),
            trainer_support_logprobs=entries,
            sampler_support_logprobs=rows.support.sampler_logprobs,
            sampler_tail_mass=rows.support.sampler_tail_mass,
            support_offsets=rows.support.offsets,
            support_kind=rows.support.kind,
            **rows.given,
        )
        return icepop_loss(inputs).loss

    return loss


HEADS = {
    "ours": Head("rl_loss", ours),
    "one-pass": Head("rl_loss, one pass", one_pass),
    "padded": Head("padded, logits in blocks over V", through(padded_online_replay)),
    "full": Head("full logits, log_softmax", through(full_log_softmax)),
}
