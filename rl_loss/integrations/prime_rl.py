"""prime-rl: our losses through its hook for custom losses, our head in the shape of its own.

Nothing of prime-rl is imported: both sides are told by their names and shapes. Source: prime-rl's
`LossInputs`, `FusedOutputLinear` and `CustomLossConfig` of September 2026 (pull requests 3431 and
4176); older forms of the inputs, without the two fields of support log-probabilities, are taken.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from rl_loss.csr import NONE, REPLAY
from rl_loss.lm_head import FusedLMHead, fused_lm_head
from rl_loss.loss import losses
from rl_loss.loss.inputs import LossInputs, LossOutputs
from rl_loss.packing import UNKNOWN_LOGPROB
from rl_loss.support import Support

_IGNORED = -100  # the label that torch's cross entropy leaves out


def ipo_loss(inputs: Any, **options: Any) -> LossOutputs:
    """`rl_loss.ipo_loss` of one sample of prime-rl's; `loss_inputs` says how it is read."""
    return losses.ipo_loss(loss_inputs(inputs), **options)


def icepop_loss(inputs: Any, **options: Any) -> LossOutputs:
    """`rl_loss.icepop_loss` of one sample of prime-rl's."""
    return losses.icepop_loss(loss_inputs(inputs), **options)


def reinforce_loss(inputs: Any, **options: Any) -> LossOutputs:
    """`rl_loss.reinforce_loss` of one sample of prime-rl's."""
    return losses.reinforce_loss(loss_inputs(inputs), **options)


def policy_loss(inputs: Any, **options: Any) -> LossOutputs:
    """`rl_loss.policy_loss` of one sample of prime-rl's."""
    return losses.policy_loss(loss_inputs(inputs), **options)


def loss_inputs(inputs: Any) -> LossInputs:
    """The inputs of a loss from one sample of prime-rl's, its mask log-probabilities as supports.

    `inference_mask_logprobs [seq, K]` is -inf at padding, and -9999 where a sample came without:
    unknown, a part of the tail. `trainer_mask_logprobs [seq, K]` is a constant 0 at padding and on
    rows that its head did not replay (a label outside its mask), whose label's is not: those have
    no evidence, and are normalised over the vocabulary. Without the two fields no row has.

    Raises:
        ValueError: one of the two fields without the other; shapes that do not fit.
    """
    names = ("trainer_mask_logprobs", "inference_mask_logprobs")
    trainer, sampler = (getattr(inputs, name, None) for name in names)
    if (trainer is None) != (sampler is None):
        raise ValueError(f"{names[0]} and {names[1]} must be given together")
    own = ("trainer_logprobs", "inference_logprobs", "advantages", "loss_mask")
    read = LossInputs(
        **{name: getattr(inputs, name) for name in own},
        loss_weights=getattr(inputs, "loss_weights", None),
        ref_logprobs=getattr(inputs, "ref_logprobs", None),
    )
    if trainer is None or sampler is None:
        return read
    if trainer.shape != sampler.shape or trainer.shape[:-1] != inputs.loss_mask.shape:
        raise ValueError(
            f"{names[0]} and {names[1]} must be [*{tuple(inputs.loss_mask.shape)}, K], got "
            f"{tuple(trainer.shape)} and {tuple(sampler.shape)}"
        )
    padding = sampler == -torch.inf
    constant = ((trainer == 0) | padding).all(-1) & (read.trainer_logprobs != 0)
    known = ~(sampler <= UNKNOWN_LOGPROB) & ~constant[..., None]  # NaN, which the loss refuses
    rest = 1 - torch.where(known, sampler.detach().double().exp(), 0.0).sum(-1)
    some_unknown = (~padding & ~known).any(-1) & known.any(-1)
    read.trainer_support_logprobs, read.sampler_support_logprobs = trainer, sampler
    read.support_valid = known
    read.sampler_tail_mass = torch.where(some_unknown, rest.clamp(min=0), 0.0).to(torch.float32)
    read.support_kind = torch.full_like(inputs.loss_mask, REPLAY, dtype=torch.int8)
    return read


class ReplayOutputLinear(FusedLMHead):
    """An LM head in the shape of prime-rl's `FusedOutputLinear`, which gathers what is replayed.

    Called with `temperature` it gives a dict of `logprobs [b, s]`, `entropy [b, s]` without
    gradient, and, with `return_mask_logprobs` and a sampling mask, `mask_logprobs [b, s, K]`: log p
    of every kept id over the kept set, 0 at padding and on rows without a mask. Called without,
    the summed cross entropy of the labels other than -100 as `loss`.

    Differs from prime-rl's head: a label outside its sampling mask is an error (NaN on a GPU) and
    no fallback; `entropy` of replayed rows is that over the kept set, unless it is set to "full",
    which costs the products over the vocabulary that replay saves.

    Attributes:
        return_mask_logprobs: as in prime-rl, for score centering.
        entropy: "support" or "full".

    Example:
        >>> head = ReplayOutputLinear.from_linear(nn.Linear(4, 9, bias=False))
        >>> mask = torch.tensor([[[5, 2, -1], [-1, -1, -1]]], dtype=torch.int32)
        >>> labels, temperature = torch.tensor([[2, 7]]), torch.ones(1, 2)
        >>> head.return_mask_logprobs = True
        >>> out = head(torch.randn(1, 2, 4), labels, temperature, mask)
        >>> out["logprobs"].shape, out["mask_logprobs"].shape
        (torch.Size([1, 2]), torch.Size([1, 2, 3]))
    """

    return_mask_logprobs: bool = False
    entropy: Literal["support", "full"] = "support"

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> "ReplayOutputLinear":
        """A head that shares the weight of a plain `nn.Linear`, or of prime-rl's own head, whose
        `return_mask_logprobs` it keeps; `options` as `FusedLMHead.from_linear`."""
        given = linear
        if type(linear).__name__ == "FusedOutputLinear":
            linear = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
            linear.weight = given.weight
        head = super().from_linear(linear, **options)
        assert isinstance(head, cls)
        head.return_mask_logprobs = getattr(given, "return_mask_logprobs", False)
        return head

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        labels: Tensor,
        temperature: Tensor | None = None,
        sampling_mask: Tensor | Support | None = None,
        *,
        active: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """See the class.

        Args:
            hidden_states: `[b, s, H]`.
            labels: `[b, s]`.
            temperature: `[b, s]`.
            sampling_mask: `[b, s, K]` int32 ids, -1 at padding; on a GPU its widths cost a sync.
                A `Support` of `b * s` rows costs none, and needs no padding.
            active: `[b, s]` bool, the rows that a loss reads: the others (prompts) cost nothing.

        Raises:
            ValueError: as `fused_lm_head`; a sampling mask without a temperature.
        """
        options: dict[str, Any] = {"softcap": self.softcap, "logit_scale": self.logit_scale}
        options |= {"bias": self.bias, "vocab_size": self.vocab_size}
        if temperature is None:
            if sampling_mask is not None:
                raise ValueError("temperature must be given with a sampling_mask, got None")
            read = labels != _IGNORED if active is None else active & (labels != _IGNORED)
            head = fused_lm_head(hidden_states, self.weight, labels, active=read, **options)
            return {"loss": -head.logprobs.sum()}
        support = _support(sampling_mask) if isinstance(sampling_mask, Tensor) else sampling_mask
        head = fused_lm_head(
            hidden_states,
            self.weight,
            labels,
            support,
            temperature=temperature,
            active=active,
            entropy=self.entropy,
            **options,
        )
        assert head.entropy is not None
        output = {"logprobs": head.logprobs, "entropy": head.entropy.detach()}
        if self.return_mask_logprobs and isinstance(sampling_mask, Tensor):
            output["mask_logprobs"] = _padded(head.support_logprobs, sampling_mask)
        elif self.return_mask_logprobs and support is not None:
            output["mask_logprobs"] = head.support_logprobs
        return output


def _support(ids: Tensor) -> Support:
    """Of a sampling mask, `[..., K]`: a row without an id has no evidence."""
    kind = torch.where((ids >= 0).any(-1).flatten(), REPLAY, NONE)
    return Support.from_padded(ids, None, kind=kind.to(torch.int8))


def _padded(flat: Tensor, ids: Tensor) -> Tensor:
    """`[nnz]` to where the ids stand, `[..., K]`, 0 at padding."""
    kept = (ids >= 0).flatten()
    places = kept.cumsum(0) - 1
    if len(flat) == 0:
        return flat.new_zeros(ids.shape)
    return torch.where(kept, flat[places.clamp(min=0)], 0.0).reshape(ids.shape)
