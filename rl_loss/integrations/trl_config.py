"""What a `ReplayGRPOTrainer` is asked for, checked; and the TRL that it is asked of."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import trl
from packaging.version import Version

from rl_loss.csr import RowKind
from rl_loss.integrations.huggingface import TRUNCATING, SupportRecorder
from rl_loss.loss.inputs import LossInputs, LossOutputs
from rl_loss.loss.losses import icepop_loss, ipo_loss, policy_loss, reinforce_loss

# The trainer's methods that are built on are private: what they take and give changes.
if not Version("1.16") <= Version(trl.__version__) < Version("1.17"):
    raise ImportError(f"rl_loss.integrations.trl is written for TRL 1.16, got {trl.__version__}")

_LOSSES = {"ipo": ipo_loss, "icepop": icepop_loss, "reinforce": reinforce_loss}

_OF_TRLS_LOSS = (  # options that no loss of ours reads
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


def our_loss(loss: Any, config: Any) -> Callable[..., LossOutputs]:
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
    none = torch.zeros(0)
    empty = LossInputs(none, none, none, none.bool(), ref_logprobs=none)
    try:  # what is wrong with an option shows here, and not behind the first generation
        function(empty, **options)
    except TypeError as error:
        raise ValueError(f"loss: {error}") from error
    for name in _OF_TRLS_LOSS:
        value, default = getattr(config, name), getattr(trl.GRPOConfig, name)
        if value != default:
            raise ValueError(
                f"args.{name} must be {default!r} with a loss of ours, which does not read it, got "
                f"{value!r}"
            )
    return partial(function, **options, ref_tau=config.beta)


def check_sampling(config: Any, recorder: SupportRecorder | None) -> None:
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
    own = config.generation_kwargs or {}
    if not config.use_vllm:
        for name, off in (("num_return_sequences", 1), ("return_dict_in_generate", False)):
            if own.get(name, off) != off:
                raise ValueError(
                    f"args.generation_kwargs must leave {name} out: TRL asks for one sequence a "
                    f"prompt, as ids, got {own[name]}"
                )
    truncates = any(asked.get(name) not in (None, *off) for name, off in TRUNCATING.items())
    if config.use_vllm:
        if recorder is not None:
            raise ValueError("recorder must be None with args.use_vllm, whose engine records")
        if not (asked["top_k"] or 0) > 0:
            raise ValueError(
                "args.top_k must be above 0 with args.use_vllm, which returns no sampling mask "
                f"otherwise (the size of the vocabulary keeps all), got {asked['top_k']}"
            )
    elif not truncates and (recorder is None or recorder.kind == RowKind.REPLAY):
        raise ValueError(
            "args.top_p, top_k or min_p must truncate, or there is nothing to replay. A sampler of "
            "all is recorded with recorder=SupportRecorder(RowKind.HEAD, top=...), say"
        )


def check_model(trainer: Any) -> None:
    """Refuses a model whose head cannot be called for its log-probabilities."""
    if trainer._dist.is_zero3:
        raise ValueError("args.deepspeed must be ZeRO stage 2 or less: 3 shards the head")
    for name, config in getattr(trainer.model, "peft_config", {}).items():
        if config.is_prompt_learning:
            raise ValueError(
                f"peft_config must not be of prompt learning, whose tokens are none of the "
                f"sampler's, got {type(config).__name__} for adapter {name!r}"
            )
