"""ReplayGRPOTrainer against the real TRL: what it records, replays, and makes gradients of."""

import copy
import importlib.util
import math
from functools import partial

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("peft")

import trl
from peft import LoraConfig, get_peft_model
from trl_runs import (
    V,
    kept_logprobs,
    our_loss,
    tiny_model,
    trainer,
    trls_loss,
)

FLOOR = 16 * torch.finfo(torch.float32).eps  # of a gradient's largest, beside twice torch's own


def plain(step, make, loss, dtype, *, temperature=1.0, beta=0.0, reference=None, aux=0.0):
    """The gradients of an optimizer step, from the logits of an unpatched model."""
    model = make().to(dtype)
    model.load_state_dict(step.weights)
    model.train()
    total = 0.0
    tokens = sum(int((one["completion_mask"] * one.get("tool_mask", 1)).sum()) for one in step.micro)
    for inputs in step.micro:
        kept = kept_logprobs(model, inputs, temperature)
        ref = None
        if beta:
            with torch.no_grad():
                ref = reference(model.to(dtype), inputs).token
        name = (trls_loss, partial(our_loss, loss))[loss is not None]
        total = total + name(kept, inputs, ref, beta) / tokens
        if aux:
            total = total + aux * kept.aux_loss / len(step.micro)
    total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def assert_plain(step, make, loss, **options):
    wide, narrow = (plain(step, make, loss, t, **options) for t in (torch.float64, torch.float32))
    largest = max(float(grad.abs().max()) for grad in wide.values())
    assert step.grads.keys() == wide.keys()
    assert largest > 1e-4
    for name, exact in wide.items():
        allowed = 2 * float((narrow[name] - exact).abs().max()) + FLOOR * largest
        assert float((step.grads[name] - exact).abs().max()) <= allowed, name
