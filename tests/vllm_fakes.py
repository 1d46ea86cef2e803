"""An engine of vLLM's shapes on a Hugging Face model, in the process or behind HTTP.

The shapes are those of vLLM 0.31: `vllm/outputs.py`, `vllm/logprobs.py`, the requests and answers
of `vllm/entrypoints/scale_out/token_in_token_out/protocol.py`. The sampler is written out here,
for it is what the trainer's side is held to.
"""

import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class SamplingMask:
    token_ids: list[list[int]]


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    sampling_mask: SamplingMask | None = None


@dataclass
class SamplingParams:
    n: int = 1
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 16
    logprobs: int | None = None
    output_kind: int = 0


@dataclass
class Engine:
    """What both forms share: a model that samples, and what it was asked for."""

    model: Any
    ends: list[int]
    returns_mask: bool = True
    logprobs_mode: str = "processed_logprobs"
    told: dict[str, Any] | None = None  # what a server says of its model; None: what it does
    asked: list[SamplingParams] = field(default_factory=list)
    synced: int = 0

    @torch.no_grad()
    def sample(self, prompt: list[int], params: SamplingParams, index: int) -> CompletionOutput:
        assert params.top_k > 0  # else there is no mask
        tokens: list[int] = []
        logprobs, kept = [], []
        while len(tokens) < params.max_tokens and not (tokens and tokens[-1] in self.ends):
            raw = self.model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1].float()
            logits = raw / params.temperature
            below = logits < logits.topk(params.top_k).values[-1]
            probs, order = logits.masked_fill(below, -torch.inf).softmax(-1).sort(descending=True)
            below[order[probs.cumsum(-1) - probs >= params.top_p]] = True
            processed = logits.masked_fill(below, -torch.inf).log_softmax(-1)
            token = int(processed.exp().multinomial(1))
            told = processed if self.logprobs_mode == "processed_logprobs" else raw.log_softmax(-1)
            ranks = told.argsort(descending=True).argsort() + 1
            ids = [token, *told.topk(params.logprobs or 0).indices.tolist()]
            logprobs.append({i: Logprob(float(told[i]), int(ranks[i])) for i in ids})
            kept.append((~below).nonzero()[:, 0].tolist())
            tokens.append(token)
        mask = SamplingMask(kept) if self.returns_mask else None
        finish = "stop" if tokens[-1] in self.ends else "length"
        return CompletionOutput(index, "", tokens, None, logprobs, finish, mask)

    def load_weights(self, named: list[tuple[str, torch.Tensor]]) -> None:
        state = self.model.state_dict()
        for name, weight in named:
            state[name].copy_(weight)
        self.synced += len(named)


class LLM:
    """Of `vllm.LLM` what TRL's generation uses."""

    made: ClassVar[list[Any]] = []
    ends: ClassVar[list[int]] = []
    logprobs_mode = "processed_logprobs"

    def __init__(self, model: str, return_sampling_mask: bool = False, **options: Any) -> None:
        self.options = options | {"return_sampling_mask": return_sampling_mask}
        loaded = AutoModelForCausalLM.from_pretrained(model).eval()
        self.engine = Engine(loaded, self.ends, return_sampling_mask, self.logprobs_mode)
        runner = SimpleNamespace(model=self.engine)
        worker = SimpleNamespace(model_runner=runner)
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=worker),
            model_config=SimpleNamespace(max_model_len=256),
        )
        LLM.made.append(self)

    def generate(self, prompts: Any, sampling_params: SamplingParams, use_tqdm: bool) -> list[Any]:
        self.engine.asked.append(sampling_params)
        requests = []
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            outputs = [
                self.engine.sample(ids, sampling_params, i) for i in range(sampling_params.n)
            ]
            requests.append(SimpleNamespace(prompt_token_ids=ids, outputs=outputs))
        return requests

    def reset_prefix_cache(self) -> None:
        pass


@contextmanager
def server(engine: Engine):
    """The engine behind HTTP, with the endpoints that TRL's client asks; gives its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            config = {
                "model_config": engine.told or {"logprobs_mode": engine.logprobs_mode},
                "weight_transfer_config": {"backend": "nccl"},
            }
            answers = {
                "/health": {},
                "/v1/models": {"data": [{"id": "tiny"}]},
                "/server_info": {"vllm_config": config},
            }
            self._answer(answers.get(self.path.partition("?")[0]))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.path == "/reset_prefix_cache":
                self._answer({})
            elif self.path == "/inference/v1/generate":
                self._answer(_generated(engine, json.loads(body)))
            else:
                self._answer(None)

        def _answer(self, answer: Any) -> None:
            body = json.dumps(answer).encode()
            self.send_response(404 if answer is None else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}"
    finally:
        running.shutdown()
        running.server_close()


_one_at_a_time = threading.Lock()


def _generated(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    params = SamplingParams(**request["sampling_params"])
    assert request["features"] is None
    assert params.output_kind == 2  # or a server returns the last of n alone
    choices = []
    with _one_at_a_time:
        engine.asked.append(params)
        outputs = [engine.sample(request["token_ids"], params, i) for i in range(params.n)]
    for output in outputs:
        content = []
        for token, known in zip(output.token_ids, output.logprobs or [], strict=True):
            top = list(known.items())[: max(params.logprobs or 0, 1)]
            content.append(
                {
                    "token": f"token_id:{token}",
                    "logprob": max(known[token].logprob, -9999.0),
                    "top_logprobs": [
                        {"token": f"token_id:{i}", "logprob": max(one.logprob, -9999.0)}
                        for i, one in top
                    ],
                }
            )
        mask = output.sampling_mask
        choices.append(
            {
                "index": output.index,
                "logprobs": {"content": content},
                "finish_reason": output.finish_reason,
                "token_ids": output.token_ids,
                "sampling_mask": None if mask is None else mask.token_ids,
            }
        )
    return {"request_id": request["request_id"], "choices": choices}
