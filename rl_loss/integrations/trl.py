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
from packaging.version import Version
from torch import Tensor
from torch.nn import functional

from rl_loss.csr import RowKind, first_row
from rl_loss.integrations.head_transform import without_peft
from rl_loss.integrations.huggingface import _TRUNCATING as TRUNCATING
from rl_loss.integrations.huggingface import SupportRecorder, patch_lm_head
from rl_loss.integrations.sampled_logprobs import sampled_logprobs, support_of
from rl_loss.loss.inputs import LossInputs, LossOutputs
from rl_loss.loss.losses import icepop_loss, ipo_loss, policy_loss, reinforce_loss
from rl_loss.loss.metrics import combine_metrics, metric_floats, reduce_metrics
from rl_loss.support import Support

if not Version("1.16") <= Version(trl.__version__) < Version("1.17"):
    raise ImportError(f"rl_loss.integrations.trl is written for TRL 1.16, got {trl.__version__}")

from trl.trainer import grpo_trainer  # noqa: E402

from rl_loss.integrations.trl_vllm import ReplayVLLMGeneration, replaced  # noqa: E402

_LOSSES = {"ipo": ipo_loss, "icepop": icepop_loss, "reinforce": reinforce_loss}
_VLLM_TOP = 20  # log-probabilities a token, vLLM's own bound

# What TRL's own loss alone reads.
_OF_TRLS_LOSS = (
    "loss_type",
    "importance_sampling_level",
    "epsilon",
    "epsilon_high",
    "delta",
    "use_bias_correction_kl",
    "off_policy_mask_threshold",
    "top_entropy_quantile",
    "entropy_coef",
    "use_adaptive_entropy",
)

_Trainer: Any = object  # what the mixin comes before: grpo_trainer.GRPOTrainer


class ReplayMixin(_Trainer):
    """What makes a `trl.GRPOTrainer`, or a subclass of it, a `ReplayGRPOTrainer`."""

    def __init__(
        self,
        *args: Any,
        loss: str | Callable[..., LossOutputs] | None = None,
        recorder: SupportRecorder | None = None,
        **kwargs: Any,
    ) -> None:
        given = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        config = given.get("args") or trl.GRPOConfig
        self._loss = None if loss is None else _our_loss(loss, config)
        self._recorder = SupportRecorder() if recorder is None else recorder
        if given.get("rollout_func") is None:
            _check_sampling(config, recorder)
        self._supports: Sequence[Support] = ()  # of the batch at hand, one a sequence
        self._watched: dict[str, SimpleNamespace] = {}  # the metrics of a mode until it logs them
        with replaced(grpo_trainer, "VLLMGeneration", ReplayVLLMGeneration):
            super().__init__(*args, **kwargs)
        if self._dist.is_zero3:
            raise ValueError("args.deepspeed must be ZeRO stage 2 or less: 3 shards the head")
        patch_lm_head(self.model)
        if self.ref_model is not None:
            patch_lm_head(self.accelerator.unwrap_model(self.ref_model))
        if self._loss is not None:
            self.vllm_importance_sampling_correction = False  # our loss has its own
            if self.use_vllm:
                self.vllm_generation.logprobs = _VLLM_TOP

    # --- what the sampler kept ---

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if self.use_vllm:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        model, recorded = without_peft(self.accelerator.unwrap_model(self.model)), []
        # generate asks the ranks of a sharded model to go on together, but not a loop it is given
        together = self._dist.is_fsdp and self.accelerator.num_processes > 1
        sample, own = partial(self._recorder.sample, synced_gpus=together), model.generate

        def generate(**inputs: Any) -> Any:
            sequences = own(**inputs, custom_generate=sample)
            recorded.append((inputs["input_ids"].shape[1], self._recorder.finish(sequences)))
            return sequences

        with replaced(model, "generate", generate):
            completion_ids, _ = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        [(prompt, rows)] = recorded
        logprobs = []
        for i, ids in enumerate(completion_ids):
            # Padding behind a stop that is no end of text, which TRL takes for sampled.
            del ids[int(rows.loss_mask[i].sum()) :]
            first = i * rows.loss_mask.shape[1] + prompt
            own_rows = slice(first, first + len(ids))
            log_q = rows.inference_logprobs.flatten()[own_rows].tolist()
            logprobs.append(sampled_logprobs(rows.support[own_rows], log_q))
        return completion_ids, logprobs

    def _generate(self, prompts: Any) -> Any:
        generated = super()._generate(prompts)
        _, completion_ids, tool_mask, _, logprobs, extra_fields, *_ = generated
        supports = extra_fields.pop("supports", None)  # of a rollout_func
        if supports is None:
            supports = [support_of(one) for one in logprobs or completion_ids]
        self._supports = list(supports)
        self._check(self._supports, completion_ids, tool_mask, logprobs)
        return generated

    def _check(self, supports: Any, completion_ids: Any, mask: Any, logprobs: Any) -> None:
        """Refuses supports that are not a row a token, with evidence for what was sampled."""
        widths, lengths = [len(one) for one in supports], [len(ids) for ids in completion_ids]
        if widths != lengths:
            raise ValueError(f"supports must have a row a token of {lengths}, got {widths}")
        rows = Support.cat(supports)
        labels = torch.tensor([*chain(*completion_ids)])
        active = torch.ones_like(labels) if mask is None else torch.tensor([*chain(*mask)])
        unknown = active.bool() & (rows.kind == RowKind.NONE)
        if unknown.any():
            raise ValueError(
                f"supports: sampled token {first_row(unknown)} of the batch has no evidence. A "
                "rollout_func returns 'supports', or log-probabilities as the trainer gave them"
            )
        log_q = None
        if logprobs is not None:
            log_q = torch.tensor([math.nan if q is None else q for q in chain(*logprobs)])
        elif self._loss is not None:
            raise ValueError("rollout_func must return 'logprobs' for a loss of ours, got None")
        vocab_size = self.model.config.get_text_config().vocab_size
        rows.validate(labels, vocab_size, active.bool(), log_q)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        output["supports"] = self._supports  # a list: it is shuffled and cut as one
        return output

    # --- what the trainer makes of it ---

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Any, logits_to_keep: int, **options: Any
    ) -> Any:
        if not isinstance(model, _Replayed):
            model = _Replayed(model, self._supports, self.temperature)
        if len(input_ids) != len(model.supports):
            raise ValueError(
                f"supports must be one a sequence ({len(input_ids)}), got {len(model.supports)}"
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
        prompts, completions = inputs["prompt_ids"], inputs["completion_ids"]
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        names = inspect.signature(super()._get_per_token_logps_and_entropies).parameters
        _, entropies, aux_loss = self._get_per_token_logps_and_entropies(
            replayed,
            torch.cat([prompts, completions], 1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
            completions.shape[1],
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **{name: inputs[name] for name in names if name in inputs},  # images and their like
        )

        def aligned(values: Tensor | None) -> Tensor | None:
            return None if values is None else functional.pad(values, (replayed.before, 1))

        advantages = inputs["advantages"]
        advantages = advantages if advantages.dim() == 2 else advantages[:, None].expand_as(mask)
        out = self._loss(
            LossInputs.from_head(
                replayed.head,
                inference_logprobs=aligned(inputs["sampling_per_token_logps"]),
                advantages=aligned(advantages),
                loss_mask=aligned(mask.bool()),
                ref_logprobs=aligned(inputs.get("ref_per_token_logps")),
            )
        )
        training = self.model.training
        # The tokens that all ranks have of one step; ranks and micro-batches are added up.
        tokens = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
        steps = self.current_gradient_accumulation_steps if training else 1
        if training:
            tokens = tokens * steps / self.args.steps_per_generation
        loss = out.loss / tokens
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux_loss / steps
        self._watch(out, entropies, mask, aux_loss)
        return loss

    def _watch(self, out: LossOutputs, entropies: Tensor, mask: Tensor, aux_loss: Any) -> None:
        """Adds the metrics of one micro-batch to those that `log` will write."""
        tokens = mask.sum()
        metrics = out.metrics | {"entropy": (entropies.detach() * mask).sum() / tokens.clamp(min=1)}
        counts = out.metric_counts | {"entropy": tokens}
        if self.aux_loss_enabled:
            metrics["aux_loss"], counts["aux_loss"] = aux_loss.detach(), torch.ones_like(tokens)
        mode = "train" if self.model.training else "eval"
        before = self._watched.get(mode)
        parts = [(metrics, counts)] + ([] if before is None else [vars(before).values()])
        metrics, counts = combine_metrics(parts)
        self._watched[mode] = SimpleNamespace(metrics=metrics, metric_counts=counts)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        mode = "train" if self.model.training else "eval"
        if mode in self._watched:
            metrics, _ = reduce_metrics(self._watched.pop(mode))
            for name, value in metric_floats(metrics).items():
                self._metrics[mode][name].append(value)
        super().log(logs, *args, **kwargs)


class ReplayGRPOTrainer(ReplayMixin, grpo_trainer.GRPOTrainer):
    """TODO"""


class _Replayed:
    """Stands for a model where TRL asks it for log-probabilities, and gives the replayed ones."""

    def __init__(self, model: Any, supports: Sequence[Support], temperature: float) -> None:
        self.model, self.supports, self.temperature = model, supports, temperature
        self.before = 0  # rows before the first that predicts a token of a completion
        self.entropy: str | None = None
        self.head: Any = None  # what the last call's head gave
        self._done = 0  # sequences

    def __call__(self, *, labels: Tensor, fused_lm_head: bool, **inputs: Any) -> SimpleNamespace:
        batch, length = labels.shape
        rows: list[Support] = []
        for support in self.supports[self._done : self._done + batch]:
            behind = length - self.before - len(support)
            rows += [Support.empty(self.before), support, Support.empty(behind)]
        self._done += batch
        joined = Support.cat(rows).to(labels.device, non_blocking=True)
        labels = functional.pad(labels[:, 1:], (0, 1), value=-100)
        active = (labels != -100) & (joined.kind != RowKind.NONE).view_as(labels)
        output = self.model(
            **inputs,
            use_cache=False,
            aligned_labels=labels,
            support=joined,
            active=active,
            temperature=self.temperature,
            entropy=self.entropy,
        )
        self.head = output.head
        return SimpleNamespace(
            log_probs=self.head.logprobs[:, :-1],
            entropy=None if self.entropy is None else self.head.entropy[:, :-1],
            aux_loss=getattr(output, "aux_loss", None),
        )


def _our_loss(loss: Any, config: Any) -> Callable[..., LossOutputs]:
    """The loss that is meant, with the weight of the reference."""
    chosen = _LOSSES.get(loss, loss) if isinstance(loss, str) else loss
    function, given, options = chosen, (), {}
    if isinstance(chosen, partial):
        function, given, options = chosen.func, chosen.args, chosen.keywords
    if function not in (*_LOSSES.values(), policy_loss) or given:
        raise ValueError(
            'loss must be None, "ipo", "icepop", "reinforce", or a functools.partial of one of our '
            f"losses with keyword options, got {loss!r}"
        )
    if "ref_tau" in options:
        raise ValueError("ref_tau must be given as args.beta, for which TRL makes the reference")
    for name in _OF_TRLS_LOSS:
        value, default = getattr(config, name), getattr(trl.GRPOConfig, name)
        if value != default:
            raise ValueError(
                f"args.{name} must be {default!r} with a loss of ours, which does not read it, got "
                f"{value!r}"
            )
    return partial(function, **options, ref_tau=config.beta)


def _check_sampling(config: Any, recorder: SupportRecorder | None) -> None:
    """Refuses a sampler whose kept sets cannot be had, or that keeps everything."""
    names = ("temperature", "top_p", "top_k", "min_p")
    asked = {name: getattr(config, name) for name in names} | (config.generation_kwargs or {})
    if config.use_transformers_continuous_batching:
        raise ValueError(
            "args.use_transformers_continuous_batching must be False: its loop tells nobody what "
            "it sampled from"
        )
    if asked["temperature"] != config.temperature:
        raise ValueError(
            "args.generation_kwargs must not hold a temperature of its own: the trainer takes "
            f"args.temperature, {config.temperature}, got {asked['temperature']}"
        )
    if config.use_vllm:
        if recorder is not None:
            raise ValueError("recorder must be None with args.use_vllm, whose engine records")
        if not (asked["top_k"] or 0) > 0:
            raise ValueError(
                "args.top_k must be above 0 with args.use_vllm, which returns no sampling mask "
                f"otherwise (the size of the vocabulary keeps all), got {asked['top_k']}"
            )
    elif recorder is None or recorder.kind == RowKind.REPLAY:
        if not any(asked.get(name) not in (None, *off) for name, off in TRUNCATING.items()):
            raise ValueError(
                "args.top_p, top_k or min_p must truncate, or there is nothing to replay: without, "
                "give recorder=SupportRecorder(RowKind.HEAD, top=...)"
            )
