"""Sample with Hugging Face `generate`, record what each token was sampled from, train once on it.

    python examples/generate.py
    python examples/generate.py --model DIR --top-k 50 --temperature 1.0

With equal weights in the sampler and the trainer the importance ratio is 1 on every token.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rl_loss import LossInputs, aligned_rows, fused_lm_head, icepop_loss
from rl_loss.integrations.huggingface import SupportRecorder, logit_options

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 512}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="DIR", help="a causal LM on disk; else a tiny Qwen3")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--top-k", type=int, default=0, help="0: none")
    parser.add_argument("--tokens", type=int, default=16, help="to sample after each prompt")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**TINY, initializer_range=0.2, eos_token_id=None))
    model = model.to(args.device)

    # The sampler: the recorder sees the logits after everything that `generate` does to them.
    prompts = torch.randint(model.config.vocab_size, (8, 4)).to(args.device)
    recorder = SupportRecorder()
    sequences = model.generate(
        prompts,
        custom_generate=recorder.sample,
        do_sample=True,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        max_new_tokens=args.tokens,
        pad_token_id=0,
    )
    recorded = recorder.finish(sequences)

    # The trainer: row t is the hidden state that predicts token t + 1, and the evidence about it.
    rows = aligned_rows(
        sequences.cpu(),
        recorded.loss_mask,
        support=recorded.support,
        inference_logprobs=recorded.inference_logprobs,
    ).to(sequences.device)
    hidden = model.base_model(sequences, use_cache=False).last_hidden_state
    weight, options = model.get_output_embeddings().weight, logit_options(model)
    options |= {"active": rows.active, "temperature": args.temperature}
    output = fused_lm_head(hidden, weight, rows.labels, rows.support, **options)
    advantages = torch.randn(len(sequences), 1).to(args.device).expand(sequences.shape)
    inputs = LossInputs.from_head(output, advantages=advantages, **rows.per_token)
    loss = icepop_loss(inputs)
    (loss.loss / rows.active.sum()).backward()
    torch.optim.AdamW(model.parameters(), lr=1e-4).step()
    for name, value in loss.metrics.items():
        print(f"{name:32} {value.item():.6g}")


if __name__ == "__main__":
    main()
