"""TRL's GRPO over the supports that its sampler kept, with its own loss or one of ours."""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
import trl
from torch import Tensor
from torch.nn import functional

from rl_loss.csr import RowKind, first_row
from rl_loss.integrations.head_transform import without_peft
from rl_loss.integrations.huggingface import Completion, SupportRecorder, patch_lm_head
from rl_loss.integrations.replaced import replaced
from rl_loss.integrations.sampled_logprobs import sampled_logprobs, support_of
from rl_loss.integrations.trl_config import check_model, check_sampling, our_loss
from rl_loss.integrations.trl_vllm import generation_with_masks
from rl_loss.loss.inputs import LossInputs, LossOutputs
from rl_loss.loss.metrics import combine_metrics, metric_floats, reduce_metrics
from rl_loss.support import Support

_VLLM_TOP = 20  # log-probabilities a token, as many as vLLM gives unasked

_Trainer: Any = object  # what the mixin is put before


class ReplayMixin(_Trainer):
    """What makes a subclass of `trl.GRPOTrainer` a `ReplayGRPOTrainer`: put it before that."""

    def __init__(
        self,
        *args: Any,
        loss: str | Callable[..., LossOutputs] | None = None,
        recorder: SupportRecorder | None = None,
        **kwargs: Any,
    ) -> None:
        given = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        config = given.get("args") or trl.GRPOConfig  # whose attributes are the defaults
        if given.get("rollout_func") is None:
            check_sampling(config, recorder)
        self._loss = None if loss is None else our_loss(loss, config)
        self._recorder = SupportRecorder() if recorder is None else recorder
        self._supports: list[Support] = []  # of the batch at hand, one a sequence
        self._watched: dict[str, SimpleNamespace] = {}  # a mode's metrics until they are logged
        with generation_with_masks():
            super().__init__(*args, **kwargs)
        check_model(self)
        patch_lm_head(self.model)
        if self.ref_model is not None:
            patch_lm_head(self.accelerator.unwrap_model(self.ref_model))
        if self._loss is not None:
            self.vllm_importance_sampling_correction = False  # the loss weighs p by q itself
            if self.use_vllm:
                self.vllm_generation.logprobs = _VLLM_TOP

    # --- what the sampler kept ---

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if self.use_vllm:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        # The ranks of a sharded model go on together; of a loop it is given generate asks no such.
        together = self._dist.is_fsdp and self.accelerator.num_processes > 1
        sample = partial(self._recorder.sample, synced_gpus=together)
        model = without_peft(self.accelerator.unwrap_model(self.model))
        own: Callable[..., Any] = model.generate
        recorded: list[Completion] = []

        def generate(**inputs: Any) -> Any:
            sequences = own(**inputs, custom_generate=sample)
            recorded.extend(self._recorder.completions(sequences))
            return sequences

        with replaced(model, "generate", generate):
            completion_ids, _ = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        logprobs = []
        for ids, one in zip(completion_ids, recorded, strict=True):
            del ids[len(one.support) :]  # padding behind an end that TRL does not know
            n = len(ids)
            logprobs.append(sampled_logprobs(one.support[:n], one.inference_logprobs[:n].tolist()))
        return completion_ids, logprobs

    def _generate(self, prompts: Any) -> Any:
        generated = super()._generate(prompts)
        _, completion_ids, tool_mask, _, logprobs, extra_fields, *_ = generated
        supports = extra_fields.pop("supports", None)  # of a rollout_func
        if supports is None:
            supports = [support_of(one) for one in logprobs or completion_ids]
        self._check(supports, completion_ids, tool_mask, logprobs)
        self._supports = list(supports)
        return generated

    def _check(self, supports: Any, completion_ids: Any, tool_mask: Any, logprobs: Any) -> None:
        """Refuses supports without a row a token, with evidence for each that was sampled."""
        if not isinstance(supports, (list, tuple)) or not all(
            isinstance(one, Support) for one in supports
        ):
            raise ValueError("supports must be a list with a Support a completion (rollout_func)")
        widths, lengths = [len(one) for one in supports], [len(ids) for ids in completion_ids]
        if widths != lengths:
            raise ValueError(f"supports must have a row a token, {lengths}, got {widths}")
        rows, labels = Support.cat(supports), torch.tensor([*chain(*completion_ids)])
        sampled = torch.ones(len(rows), dtype=torch.bool)
        if tool_mask is not None:
            sampled = torch.tensor([*chain(*tool_mask)], dtype=torch.bool)
        for bad, why in (
            (
                sampled & (rows.kind == RowKind.NONE),
                "has no evidence. A rollout_func returns 'supports', or log-probabilities as the "
                "trainer gave them",
            ),
            (
                sampled & (rows.kind == RowKind.FAILED),
                "could not be recorded, a step having more kept ids than there was room for: give "
                "recorder=SupportRecorder(capacity=...)",
            ),
        ):
            if bad.any():
                at, place = first_row(bad), 0
                while at >= lengths[place]:
                    at, place = at - lengths[place], place + 1
                raise ValueError(f"supports: token {at} of completion {place} {why}")
        log_q, told = None, None if logprobs is None else [*chain(*logprobs)]
        if told is not None and (self._loss is not None or None not in told):
            log_q = torch.tensor([math.nan if q is None else q for q in told])
        if told is None and self._loss is not None:
            raise ValueError("rollout_func must return 'logprobs' for a loss of ours, got None")
        rows.validate(labels, self.model.config.get_text_config().vocab_size, sampled, log_q)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        output["supports"] = self._supports  # a list, which TRL shuffles and cuts as one
        return output

    # --- what the trainer makes of it ---

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Any,
        logits_to_keep: int,
        **options: Any,
    ) -> Any:
        if not isinstance(model, _Replayed):
            model = _Replayed(model, self._supports, self.temperature)
        if len(model.supports) != len(input_ids):
            raise ValueError(
                f"supports must be one a sequence, {len(input_ids)}, got {len(model.supports)}"
            )
        model.before = input_ids.shape[1] - logits_to_keep - 1
        model.entropy = "support" if options.get("compute_entropy") else None
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, **options
        )

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        self._supports = inputs["supports"]
        if self._loss is None:
            return super()._compute_loss(model, inputs)
        replayed = _Replayed(model, self._supports, self.temperature)
        completions, mask = inputs["completion_ids"], inputs["completion_mask"]
        known = inspect.signature(super()._get_per_token_logps_and_entropies).parameters
        _, entropies, aux_loss = self._get_per_token_logps_and_entropies(
            replayed,
            torch.cat([inputs["prompt_ids"], completions], 1),
            torch.cat([inputs["prompt_mask"], mask], 1),
            completions.shape[1],
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **{name: inputs[name] for name in known if name in inputs},  # images and their like
        )
        mask = mask * inputs.get("tool_mask", 1)
        advantages = inputs["advantages"]
        advantages = advantages if advantages.dim() == 2 else advantages[:, None].expand_as(mask)
        ref = inputs.get("ref_per_token_logps")
        out = self._loss(
            LossInputs.from_head(
                replayed.head,
                inference_logprobs=replayed.aligned(inputs["sampling_per_token_logps"]),
                advantages=replayed.aligned(advantages),
                loss_mask=replayed.aligned(mask.bool()),
                ref_logprobs=None if ref is None else replayed.aligned(ref),
            )
        )
        # The tokens of one step on all ranks, over whose gradients DDP takes the mean.
        tokens, steps = inputs["num_items_in_batch"].clamp(min=1), 1
        if self.model.training:
            steps = self.current_gradient_accumulation_steps
            tokens = tokens * steps / self.args.steps_per_generation
        loss = out.loss * self.accelerator.num_processes / tokens
        count = mask.sum()
        means = {"entropy": ((entropies.detach() * mask).sum() / count.clamp(min=1), count)}
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux_loss / steps
            means["aux_loss"] = aux_loss.detach(), torch.ones_like(count)
        self._watch(out, means)
        return loss

    # --- what is logged ---

    def _watch(self, out: LossOutputs, means: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Adds the metrics of a micro-batch to those that will be logged, without a sync."""
        metrics = out.metrics | {name: mean for name, (mean, _) in means.items()}
        counts = out.metric_counts | {name: count for name, (_, count) in means.items()}
        mode, parts = "train" if self.model.training else "eval", [(metrics, counts)]
        if mode in self._watched:
            before = self._watched[mode]
            parts.append((before.metrics, before.metric_counts))
        metrics, counts = combine_metrics(parts)
        self._watched[mode] = SimpleNamespace(metrics=metrics, metric_counts=counts)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        mode = "train" if self.model.training else "eval"
        if mode in self._watched:
            metrics, _ = reduce_metrics(self._watched.pop(mode))
            for name, value in metric_floats(metrics).items():
                self._metrics[mode][name].append(value)
        super().log(logs, *args, **kwargs)


class ReplayGRPOTrainer(ReplayMixin, trl.GRPOTrainer):
    """A `trl.GRPOTrainer` that takes log-probabilities over what its sampler kept.

    TRL samples with top_p, top_k or min_p and takes every log-probability over the whole
    vocabulary: each ratio to the sampler is off by the mass that was kept. Here the kept ids of
    every token are recorded where it is sampled, travel with it, and what TRL asks of the
    model, the reference and the model before the step is normalised over them.

    All other arguments and options are TRL's. With a loss of ours (score centering, the sampler
    KL; `args.beta` is its `ref_tau`) TRL's importance correction is off, for these losses weigh
    by p / q themselves; the sum over tokens is divided as in TRL's `loss_type="dapo"`.

    Args:
        *args, **kwargs: of `trl.GRPOTrainer`.
        loss: None for TRL's own loss; "ipo", "icepop", "reinforce", or a `functools.partial` of
            `ipo_loss`, `icepop_loss`, `reinforce_loss` or `policy_loss` with its options.
        recorder: what records with transformers' `generate`; by default REPLAY rows. A sampler
            that truncates nothing is recorded as HEAD or DRAWS, for the centering.

    Raises:
        ValueError: what cannot be recorded or replayed (continuous batching, a sampler that
            truncates nothing, with vLLM one without top_k, prompt learning, ZeRO-3), or an option
            of TRL's loss with one of ours. When it generates: a rollout_func without evidence,
            evidence that cannot be that of the tokens.

    Source: TRL 1.16, and no other version; https://github.com/huggingface/trl/issues/6789.

    Example:
        >>> trainer = ReplayGRPOTrainer(  # doctest: +SKIP
        ...     model, reward_funcs=reward, args=GRPOConfig(top_p=0.95), train_dataset=prompts,
        ...     loss=partial(icepop_loss, kl_tau=1e-3),
        ... )
        >>> trainer.train()  # doctest: +SKIP
    """


class _Replayed:
    """Stands for a model where TRL asks it for log-probabilities, and gives the replayed ones."""

    def __init__(self, model: Any, supports: Sequence[Support], temperature: float) -> None:
        self.model, self.supports, self.temperature = model, supports, temperature
        self.before = 0  # rows before the one that predicts a completion's first token
        self.entropy: str | None = None
        self.head: Any = None  # the last call's, [B, L]
        self._done = 0  # sequences

    def __call__(self, *, labels: Tensor, fused_lm_head: bool, **inputs: Any) -> SimpleNamespace:
        batch, length = labels.shape
        supports = self.supports[self._done : self._done + batch]
        self._done += batch
        support = Support.stack(supports, length, start=self.before)
        support = support.to(labels.device, non_blocking=True)
        labels = functional.pad(labels[:, 1:], (0, 1), value=-100)
        output = self.model(
            **inputs,
            use_cache=False,
            aligned_labels=labels,
            support=support,
            active=(labels != -100) & (support.kind != RowKind.NONE).view_as(labels),
            temperature=self.temperature,
            entropy=self.entropy,
        )
        self.head = output.head
        return SimpleNamespace(
            log_probs=self.head.logprobs[:, :-1],
            entropy=None if self.entropy is None else self.head.entropy[:, :-1],
            aux_loss=getattr(output, "aux_loss", None),
        )

    def aligned(self, values: Tensor) -> Tensor:
        """Values of the completions' tokens `[B, C]` at the rows that predict them, `[B, L]`."""
        return functional.pad(values, (self.before, 1))
