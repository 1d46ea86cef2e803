"""Kept for `from rl_loss.loss.losses import ipo_loss`; the losses' door lies above the kernels."""

from rl_loss.losses import icepop_loss, ipo_loss, policy_loss, reinforce_loss

__all__ = ["icepop_loss", "ipo_loss", "policy_loss", "reinforce_loss"]
