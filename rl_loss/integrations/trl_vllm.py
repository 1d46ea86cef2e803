"""TRL's vLLM generation, colocated or over HTTP, asked for what the sampler kept.

TRL's generation gives tokens and log-probabilities and no mask. Here the sampled tokens' are
`SampledLogprob`s: through TRL's slices, broadcasts and tool loops they take their rows along.

Source: vLLM, pull request 49577 (0.28 and later).
"""

from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any

from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.import_utils import is_vllm_available
from trl.trainer import grpo_trainer

from rl_loss.integrations.replaced import replaced
from rl_loss.integrations.sampled_logprobs import SampledLogprob, sampled_logprobs
from rl_loss.support import Support

_GENERATE = "/inference/v1/generate"  # the only endpoint that returns a mask


def generation_with_masks() -> AbstractContextManager[None]:
    """Inside, a GRPO trainer that is made with `use_vllm` takes a `ReplayVLLMGeneration`."""
    return replaced(grpo_trainer, "VLLMGeneration", ReplayVLLMGeneration)


class ReplayVLLMGeneration(VLLMGeneration):
    """A `VLLMGeneration` whose log-probabilities know the rows of their evidence.

    A colocated engine is started with `return_sampling_mask=True`; a server is asked through its
    generate endpoint, and must have been started with `--return-sampling-mask` and
    `--logprobs-mode processed_logprobs`.

    Raises:
        ValueError: a vLLM without sampling masks, a server that was started without these options;
            when it generates, an answer without a mask, or with a sampled token whose
            log-probability is not known.
    """

    def _init_vllm(self) -> None:
        if self.mode == "colocate" and is_vllm_available():
            if not is_vllm_available(min_version="0.28.0"):
                raise ValueError("vllm must be 0.28 or later: earlier ones return no sampling mask")
            engine = partial(vllm_generation.LLM, return_sampling_mask=True)
            with replaced(vllm_generation, "LLM", engine):
                super()._init_vllm()
            self.llm.generate = partial(_generate, self.llm.generate)
        else:
            with replaced(vllm_generation, "VLLMClient", ReplayVLLMClient):
                super()._init_vllm()
            if self.accelerator.is_main_process:
                _check_server(self.vllm_client.get_server_info()["model_config"])


class ReplayVLLMClient(VLLMClient):
    """A `VLLMClient` that generates from token ids through the endpoint that returns a mask."""

    def generate(self, prompts: Any, features: Any = None, *args: Any, **options: Any) -> Any:
        features = [None] * len(prompts) if features is None else features
        return super().generate(prompts, features, *args, **options)

    def _post(self, url: str, **kwargs: Any) -> Any:
        answer = super()._post(url, **kwargs)
        if url.endswith(_GENERATE):
            for choice in answer["choices"]:
                sampled = _sampled(choice)
                choice["logprobs"] = {
                    "content": [
                        {"token": f"token_id:{token}", "logprob": logprob, "top_logprobs": []}
                        for token, logprob in sampled
                    ]
                }
        return answer


def _check_server(config: dict[str, Any]) -> None:
    asked = {"return_sampling_mask": True, "logprobs_mode": "processed_logprobs"}
    for name, value in asked.items():
        if config.get(name, value) != value:
            raise ValueError(
                "vllm serve must be started with --return-sampling-mask and --logprobs-mode "
                f"processed_logprobs, got a server whose {name} is {config[name]!r}"
            )


def _generate(generate: Any, *args: Any, **kwargs: Any) -> Any:
    """What an engine's `generate` gives, the log-probabilities of the sampled tokens alone."""
    requests = generate(*args, **kwargs)
    for request in requests:
        for output in request.outputs:
            output.logprobs = [
                {token: SimpleNamespace(logprob=logprob, rank=1)}
                for token, logprob in _sampled(output)
            ]
    return requests


def _sampled(answer: Any) -> list[tuple[int, SampledLogprob]]:
    """The sampled tokens of one completion of either form, with their log-probabilities."""
    rows = Support.read_answer(answer)
    logprobs = sampled_logprobs(rows.support, rows.inference_logprobs.tolist())
    return list(zip(rows.token_ids.tolist(), logprobs, strict=True))
