"""Ways of packages that others publish, each by a door of theirs."""

from torch import Tensor

from benchmarks.workloads import Way, Workload


def trl(work: Workload) -> tuple[Tensor, ...]:
    """TRL's chunked head, as `add_fused_lm_head` calls it: on the rows that a loss reads."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    hidden, labels, mask = work.hidden, work.labels, work.active
    if mask is not None:
        mask = mask.to(hidden.device, non_blocking=True)
        hidden, labels = hidden[mask], labels[mask]
    size = _CHUNKED_LOGPROB_CHUNK_SIZE
    outputs = ChunkedLogProbFunction.apply(
        hidden, work.weight, None, labels, 1.0, size, None, 1.0, ("log_probs",)
    )
    if mask is None:
        return (outputs[0],)
    return (outputs[0].new_zeros(len(mask)).masked_scatter(mask, outputs[0]),)


def liger(reduction: str) -> Way:
    """liger-kernel's fused linear cross entropy over the vocabulary."""

    def way(work: Workload) -> tuple[Tensor, ...]:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        loss = liger_fused_linear_cross_entropy(
            work.hidden, work.weight, work.labels, reduction=reduction
        )
        return (-loss.float(),)

    return way


def liger_scaled(work: Workload) -> tuple[Tensor, ...]:
    """liger-kernel's scaled cross entropy, an upstream a token: on Hopper a kernel in CuTe,
    elsewhere chunks in PyTorch."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    loss = LigerFusedLinearScaledCrossEntropyFunction.apply(work.hidden, work.weight, work.labels)
    return (-loss.float(),)


def cut_cross_entropy(work: Workload) -> tuple[Tensor, ...]:
    """Apple's cut cross entropy, its gradient filter off."""
    from cut_cross_entropy import linear_cross_entropy

    loss = linear_cross_entropy(
        work.hidden, work.weight, work.labels, reduction="none", filter_eps=None
    )
    return (-loss.float(),)
