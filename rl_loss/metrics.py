"""Kept for `from rl_loss.metrics import combine_metrics`; the metrics are in loss/."""

from rl_loss.loss.metrics import combine_metrics

__all__ = ["combine_metrics"]
