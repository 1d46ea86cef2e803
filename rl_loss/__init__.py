"""The trainer's half of off-policy RL for language models."""

from rl_loss.alignment import AlignedRows, aligned_rows
from rl_loss.capture import CapturedRows, capture_support
from rl_loss.capture_stream import CaptureStream
from rl_loss.csr import RowKind
from rl_loss.lm_head import FusedLMHead, LMHeadOutput, fused_lm_head
from rl_loss.loss.inputs import LossInputs, LossOutputs
from rl_loss.loss.losses import icepop_loss, ipo_loss, reinforce_loss
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
    "fused_lm_head",
    "fused_lm_head_loss",
    "icepop_loss",
    "ipo_loss",
    "reinforce_loss",
]
