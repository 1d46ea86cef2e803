"""Hugging Face models: what the head has to know of one, and what one that samples kept."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rl_loss.arguments import active_module, class_path
from rl_loss.capture import capture_support
from rl_loss.csr import RowKind
from rl_loss.logits import LogitTransform
from rl_loss.support import Support

_PROBED_IDS = 8192  # rows of a weight that are taken to float64 at once


@torch.no_grad()
def logit_options(model: Any) -> dict[str, Any]:
    """The `bias`, `softcap` and `logit_scale` of a model's head, proved on the model itself.

    They are read off the model and its config (Gemma 2's `final_logit_softcapping`, Cohere's
    `logit_scale`, Granite's `logits_scaling`, which divides); then the model's own logits of a
    few tokens are compared with those that the options give.

    A head that PEFT trains whole (`modules_to_save`) is its active copy, the original where
    adapters are off; `get_output_embeddings().weight` is that one's weight. Ask again after
    another adapter was set.

    Args:
        model: any causal language model whose `base_model` gives the hidden states that its
            output embeddings read, or a `PeftModel` of one (`get_base_model()` is the model).

    Returns:
        keyword arguments for `fused_lm_head`, beside `weight = get_output_embeddings().weight`.

    Raises:
        ValueError: a model whose logits come out otherwise: a transform that is not one of
            these, or adapters on its head (LoRA, even where it still adds nothing: it would get
            no gradient); no output embeddings.

    Source: `ModulesToSaveWrapper` of PEFT 0.19 and later.

    Example:
        >>> options = logit_options(model)  # doctest: +SKIP
        >>> hidden = model.base_model(input_ids).last_hidden_state  # doctest: +SKIP
    """
    if hasattr(model, "get_base_model"):  # of PEFT, whose own base_model is another thing
        model = model.get_base_model()
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    if head is None:
        raise ValueError(f"model: {type(model).__name__} has no output embeddings")
    running = active_module(head)
    more = {name for name, _ in running.named_parameters()} - {"weight", "bias"}
    if more:
        raise ValueError(
            f"model: its head, a {class_path(running)}, has parameters beside weight and bias: "
            f"{sorted(more)}. Merge an adapter into the weight (merge_and_unload), or train the "
            "whole head (modules_to_save)"
        )
    bias = getattr(head, "bias", None)
    softcap = getattr(config, "final_logit_softcapping", None)
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    tokens = torch.arange(8, device=head.weight.device)[None] % len(head.weight)
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        expected = model(input_ids=tokens, use_cache=False).logits.double()
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    finally:
        for module, mode in training.items():
            module.training = mode
    weight = _whole(head.weight)
    parts = weight.split(_PROBED_IDS)  # in float64 all of them would take four times the weight
    raw = torch.cat([hidden.double() @ part.double().T for part in parts], -1)
    got = LogitTransform(softcap, scale)(raw, _whole(bias), raw.new_ones(()))
    # The model rounds its products as this one is rounded (to bfloat16 under autocast, to fewer
    # bits where float32 products may be), and each of five steps of its transform to their dtype.
    product = functional.linear(hidden.to(weight.dtype), weight)
    rounding = 2 * abs(scale) * float((product - raw).abs().max())
    rounding += 4 * torch.finfo(product.dtype).eps * float(got.abs().max())
    worst = float((got - expected).abs().max()) if got.shape == expected.shape else torch.inf
    if not worst <= rounding:
        raise ValueError(
            f"model: {type(model).__name__} transforms its logits in a way that is not known here "
            f"(they differ by {worst:.3g} with softcap {softcap} and logit_scale {scale:.3g})"
        )
    return {"bias": bias, "softcap": softcap, "logit_scale": scale}


def _whole(parameter: Any) -> Any:
    """All of a parameter that FSDP2 has sharded: every rank calls."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


class RecordedRows(NamedTuple):
    """What `SupportRecorder` recorded of B sequences of T tokens, on the host; row `b * T + t` of
    the support is the evidence about token `sequences[b, t]`, as `aligned_rows` takes it."""

    support: Support  # B * T rows, NONE in the prompt and behind a sequence's end
    inference_logprobs: Tensor  # [B, T] float32, log q of each sampled token, 0 elsewhere
    loss_mask: Tensor  # [B, T] bool, the tokens that were sampled, the end-of-sequence included


class Completion(NamedTuple):
    """The T tokens that were sampled of one sequence, the end-of-sequence included, and what
    `SupportRecorder` recorded of them, on the host."""

    token_ids: Tensor  # [T] int64
    support: Support  # T rows
    inference_logprobs: Tensor  # [T] float32, log q of each token


# Options of `generate` that exclude ids, and their values that do not.
_TRUNCATING: dict[str, tuple[float, ...]] = {
    "top_k": (0,),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
}
# Options that `generate` hands to another loop than the sampling one.
_OTHER_LOOPS = (
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "use_mtp",
    "dola_layers",
)


class SupportRecorder:
    """Records what `model.generate` sampled each token from, while it samples.

    `generate` puts its own temperature, top-k, top-p and their like *behind* the logits
    processors that it is given, where none of these can see what they do. The recorder is
    therefore given as the decoding loop, `custom_generate=recorder.sample`: the usual one, with
    the recorder as the very last processor. All other arguments of `generate` and the model's own
    generation config stay as they are, and what they do to the logits is recorded.

    Each step costs `capture_support` and a device-to-host sync; the evidence is kept on the host.

    Args:
        kind: REPLAY for truncated samplers (top-k, top-p, min-p); HEAD or DRAWS for full ones.
        **options: of `capture_support`: `capacity` (entries of one step), `top`, `draws`,
            `generator`.

    Raises:
        ValueError: a kind that records nothing; at sampling time a greedy or beam search or
            another decoding loop, a recorder among the logits processors, or HEAD or DRAWS of a
            distribution that is truncated (by an option of `generate`, or by a processor to less
            than half of the vocabulary).

    Example:
        >>> recorder = SupportRecorder()
        >>> sequences = model.generate(  # doctest: +SKIP
        ...     prompts, custom_generate=recorder.sample, do_sample=True, temperature=0.8, top_p=0.9
        ... )
        >>> recorded = recorder.finish(sequences)  # doctest: +SKIP
        >>> rows = aligned_rows(  # doctest: +SKIP
        ...     sequences, recorded.loss_mask, support=recorded.support,
        ...     inference_logprobs=recorded.inference_logprobs,
        ... )

    Source: `generate` of transformers 4.56 and later, which take a decoding loop.
    """

    def __init__(self, kind: RowKind = RowKind.REPLAY, **options: Any) -> None:
        if kind not in (RowKind.REPLAY, RowKind.HEAD, RowKind.DRAWS):
            raise ValueError(f"kind must be REPLAY, HEAD or DRAWS, got {kind!r}")
        unknown = options.keys() - {"capacity", "top", "draws", "generator"}
        if unknown:
            raise ValueError(f"options of capture_support, got {sorted(unknown)}")
        self.kind, self.options = RowKind(kind), options
        self._scores: Tensor | None = None  # [B, V] of the token that is being sampled
        self._sampling = False
        self._start(torch.empty(0, 0, dtype=torch.int64))

    def _start(self, prompts: Tensor) -> None:
        self._prompts = prompts  # [B, P]
        self._ended = torch.zeros(len(prompts), dtype=torch.bool, device=prompts.device)
        self._supports: list[Support] = []  # of each step the rows not ended
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []  # token, log q, was sampled: [B]

    def sample(
        self,
        model: Any,
        input_ids: Tensor,  # [B, P]
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """The decoding loop for `generate(custom_generate=...)`; each call starts a record anew."""
        if not generation_config.do_sample:
            raise ValueError("do_sample must be True: a greedy search has no distribution")
        if (generation_config.num_beams or 1) > 1:
            raise ValueError(f"num_beams must be 1, got {generation_config.num_beams}")
        for option in _OTHER_LOOPS:
            if getattr(generation_config, option, None):
                raise ValueError(f"{option} must be left out: it asks for another decoding loop")
        if self.kind != RowKind.REPLAY:
            for option, off in _TRUNCATING.items():
                value = getattr(generation_config, option, None)
                if value is not None and value not in off:
                    raise ValueError(
                        f"{option} must be {off[0] if off else 'unset'} with {self.kind.name} "
                        f"rows, which are normalised over V, got {value}: record REPLAY"
                    )
        self._start(input_ids)
        self._sampling = True
        try:
            return model._sample(
                input_ids,
                logits_processor=type(logits_processor)([*logits_processor, self]),
                stopping_criteria=_Watched(stopping_criteria, self),
                generation_config=generation_config,
                **model_kwargs,
            )
        finally:
            self._sampling, self._scores = False, None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """As the last logits processor: keeps the logits until their token is known."""
        if not self._sampling or self._scores is not None:
            raise ValueError(
                "logits_processor must not hold the SupportRecorder: generate truncates behind it; "
                "give it as custom_generate=recorder.sample"
            )
        self._scores = scores
        return scores

    def record(self, input_ids: Tensor, ended: Tensor) -> None:
        """Takes the token that was just sampled, `input_ids[:, -1]`, and which rows it ends."""
        scores, sampled, self._scores = self._scores, input_ids[:, -1], None
        assert scores is not None
        alive = ~self._ended
        if self.kind != RowKind.REPLAY:
            kept = int(scores.isfinite().sum(1).amin())
            if kept < scores.shape[1] / 2:
                raise ValueError(
                    f"kind must be REPLAY where the sampler truncates, got {self.kind.name}, whose "
                    f"rows are normalised over V: step {len(self._steps)} keeps {kept} of "
                    f"{scores.shape[1]} ids"
                )
        rows = capture_support(scores[alive], sampled[alive], kind=self.kind, **self.options)
        self._supports.append(rows.to_support().to("cpu"))
        logprobs = torch.zeros(len(alive), dtype=torch.float32, device=scores.device)
        self._steps.append((sampled, logprobs.masked_scatter(alive, rows.sampled_logprobs), alive))
        self._ended = self._ended | ended

    def finish(self, sequences: Tensor) -> RecordedRows:
        """The rows of the sequences that `generate` returned, aligned to their tokens.

        A row that could not be recorded (see `capture_support`) is of kind FAILED, which a loss
        that reads it refuses.

        Args:
            sequences: `[B, T]`, prompts included (`.sequences` of an output object).

        Raises:
            ValueError: sequences that are not those that were recorded.
        """
        support, _, logprobs, sampled = self._by_sequence(sequences)
        batch, prompt = self._prompts.shape
        none = torch.zeros(batch, prompt, dtype=torch.float32)
        parts = support.split(sampled.sum(1))
        return RecordedRows(
            Support.stack(parts, prompt + sampled.shape[1], start=prompt),
            torch.cat([none, logprobs], 1),
            torch.cat([none.bool(), sampled], 1),
        )

    def completions(self, sequences: Tensor | None = None) -> list[Completion]:
        """What was sampled of each sequence by the last `generate`, without prompt and padding.

        For trainers that carry a list with an item a sequence, to be shuffled and cut: of those
        that are left `Support.stack` makes the rows of a batch.

        Args:
            sequences: as in `finish`, to be checked; None: nothing is checked.

        Raises:
            ValueError: as `finish`.

        Example:
            >>> completions = recorder.completions()  # doctest: +SKIP
            >>> support = Support.stack(  # doctest: +SKIP
            ...     [one.support for one in completions], completion_ids.shape[1]
            ... )
        """
        support, tokens, logprobs, sampled = self._by_sequence(sequences)
        lengths = sampled.sum(1).tolist()
        token_ids, inference = (x[sampled].split(lengths) for x in (tokens, logprobs))
        return [
            Completion(ids.clone(), rows, q.clone())  # one that is sent takes no other along
            for ids, rows, q in zip(token_ids, support.split(lengths), inference, strict=True)
        ]

    def _by_sequence(self, sequences: Tensor | None) -> tuple[Support, Tensor, Tensor, Tensor]:
        """The rows of the sampled tokens, sequence by sequence; tokens, their log q and whether
        they were sampled, `[B, steps]` on the host."""
        if not self._steps:
            raise ValueError(
                "sequences: nothing was recorded; was generate called with "
                "custom_generate=recorder.sample?"
            )
        (batch, prompt), steps = self._prompts.shape, len(self._steps)
        if sequences is not None:
            shape = tuple(getattr(sequences, "shape", ()))
            if len(shape) != 2 or shape[0] != batch or not 0 < shape[1] - prompt <= steps:
                raise ValueError(
                    f"sequences must be [{batch}, {prompt + steps}], as recorded, got "
                    f"{shape or type(sequences).__name__}"
                )
            steps = shape[1] - prompt  # generate may look for the end late, and take a step back
        columns = zip(*self._steps[:steps], strict=True)
        tokens, logprobs, sampled = (torch.stack(column, 1).cpu() for column in columns)
        if sequences is not None:
            wrong = (sequences.cpu() != torch.cat([self._prompts.cpu(), tokens], 1)).any(1)
            if wrong.any():
                row = int(wrong.int().argmax())
                raise ValueError(f"sequences[{row}] is not the sequence that was recorded")
        # Recorded step by step, of each the rows not ended; wanted sequence by sequence.
        recorded = torch.zeros_like(tokens.T, dtype=torch.int64)
        recorded[sampled.T] = torch.arange(int(sampled.sum()))
        support = Support.cat(self._supports[:steps]).select(recorded.T[sampled])
        return support, tokens, logprobs, sampled


class _Watched:
    """The stopping criteria of `generate`, which see each token right after it was sampled."""

    def __init__(self, criteria: Any, recorder: SupportRecorder) -> None:
        self._criteria, self._recorder = criteria, recorder

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        ended = self._criteria(input_ids, scores, **kwargs)
        self._recorder.record(input_ids, ended)
        return ended

    def __iter__(self) -> Iterator[Any]:
        return iter(self._criteria)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._criteria, name)
