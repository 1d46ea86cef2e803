"""The trainer's half of off-policy RL for language models.

The rooms, from the ground up; each imports from its own line and those above it alone:

    arguments host                      checks of what comes in; what the host may look at
    csr plan                            rows, kinds and bounds; how a head is launched
    packing row_parsing                 the sampler's evidence: its wire formats, its rows, what
      engine_lists kept_ids engines       engines list, keep and answer, the ways to a `Support`,
      constructors validation             its rules, itself, aligned rows
      support alignment
    loss/                               a loss's definition, of tensors alone: weighting tensors
                                          rows centering divergences inputs metrics definition
    logits vocab_parallel grad_into     what a logit is; the vocabulary split over ranks; where a
      flat_rows                           weight's gradient goes; what a head is given, row by row
    reference gathered dense            the head without kernels: its definition, and on the CPU
    kernels/                            head, losses and capture on a GPU: all that needs triton
    capture capture_stream              the sampler's side: evidence recorded, and brought home
    lm_head losses one_pass             the doors: the head, the losses, and both together
    integrations/                       bridges to other libraries, loaded when used

(`metrics` is the old address of `combine_metrics`, `loss.losses` of the losses.)
"""

from rl_loss.alignment import AlignedRows, aligned_rows, context_parallel_rows
from rl_loss.capture import CapturedRows, capture_support
from rl_loss.capture_stream import CaptureStream
from rl_loss.csr import RowKind
from rl_loss.lm_head import FusedLMHead, LMHeadOutput, fused_lm_head
from rl_loss.loss.inputs import LossInputs, LossOutputs
from rl_loss.loss.metrics import (
    combine_metrics,
    global_token_count,
    metric_floats,
    metric_sums,
    reduce_metrics,
)
from rl_loss.losses import icepop_loss, ipo_loss, policy_loss, reinforce_loss
from rl_loss.one_pass import fused_lm_head_loss
from rl_loss.support import Support

__all__ = [
    "AlignedRows",
    "CaptureStream",
    "CapturedRows",
    "FusedLMHead",
    "LMHeadOutput",
    "LossInputs",
    "LossOutputs",
    "RowKind",
    "Support",
    "aligned_rows",
    "capture_support",
    "combine_metrics",
    "context_parallel_rows",
    "fused_lm_head",
    "fused_lm_head_loss",
    "global_token_count",
    "icepop_loss",
    "ipo_loss",
    "metric_floats",
    "metric_sums",
    "policy_loss",
    "reduce_metrics",
    "reinforce_loss",
]

__version__ = "0.1.0"
