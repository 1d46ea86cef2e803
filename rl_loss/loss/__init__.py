"""The losses, as functions of log-probabilities: tensors alone, never the head."""
