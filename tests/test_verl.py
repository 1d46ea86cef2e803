"""verl's batches and its registry, with the lines of docs/trainers.md."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from factory import random_support

from rl_loss import RowKind, Support

pytest.importorskip("verl", reason="needs verl")
from verl import DataProto
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn

PAGE = (Path(__file__).parent.parent / "docs" / "trainers.md").read_text()
ON_PAGE: dict[str, Any] = {}
for block in PAGE.partition("\n## verl\n")[2].partition("\n## ")[0].split("```python\n")[1:]:
    exec(block.split("```")[0], ON_PAGE)
BATCH, LENGTH, V = 6, 5, 17


def make_batch() -> tuple[DataProto, list[Support]]:
    """Responses of 1 to 5 tokens, padded, each with the support of its own tokens."""
    g = torch.Generator().manual_seed(0)
    responses = torch.randint(V, (BATCH, LENGTH), generator=g)
    lengths = [5, 1, 3, 4, 5, 2]
    supports = [
        random_support(row[:length], V, (RowKind.REPLAY,), g)
        for row, length in zip(responses, lengths, strict=True)
    ]
    mask = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    tensors = {"responses": responses, "response_mask": mask.long()}
    return ON_PAGE["with_supports"](DataProto.from_dict(tensors=tensors), supports), supports


def same(one: Support, other: Support) -> bool:
    return all(
        torch.equal(a.nan_to_num() if a.is_floating_point() else a,
                    b.nan_to_num() if b.is_floating_point() else b)
        for a, b in zip(one.to_packed()[:3], other.to_packed()[:3], strict=True)
    )  # fmt: skip


def test_supports_stay_with_their_responses():
    batch, supports = make_batch()
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    moved = DataProto.concat(batch.chunk(3))
    moved.reorder(order)
    moved = pickle.loads(pickle.dumps(moved.repeat(2, interleave=True)))
    expected = [supports[i] for i in order.tolist() for _ in range(2)]
    held = list(moved.non_tensor_batch["support"])
    assert all(same(*pair) for pair in zip(held, expected, strict=True))
    rows = ON_PAGE["support_of"](moved)
    assert same(rows, Support.stack(expected, LENGTH))
    labels = moved.batch["responses"]
    rows.validate(labels, V, active=moved.batch["response_mask"].bool())
    assert isinstance(batch.non_tensor_batch["support"], np.ndarray)


@pytest.mark.parametrize("weights", [None, "given"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_the_registered_loss(mode, weights):
    """Against a plain ratio loss on tokens in range, gathered by verl's own function."""
    g = torch.Generator().manual_seed(2)
    log_q = -torch.rand(BATCH, LENGTH, generator=g, dtype=torch.float64) * 3
    log_p = log_q + 2 * torch.randn(BATCH, LENGTH, generator=g, dtype=torch.float64)
    advantages = torch.randn(BATCH, LENGTH, generator=g, dtype=torch.float64)
    mask = make_batch()[0].batch["response_mask"]
    given = None if weights is None else torch.rand(BATCH, LENGTH, generator=g).double()
    leaf, plain = (log_p.clone().requires_grad_() for _ in range(2))
    scale = {"dp_size": 2, "batch_num_tokens": 40, "global_batch_size": 12}
    config = SimpleNamespace(global_batch_info=scale | {"loss_scale_factor": None})
    loss, metrics = get_policy_loss_fn("icepop_replay")(
        log_q, leaf, advantages, mask, mode, config, rollout_is_weights=given
    )
    loss.backward()
    ratio = (plain - log_q).exp()
    kept = ((ratio >= 0.2) & (ratio <= 5)).detach()
    x = plain - log_q
    at = x.clamp(max=torch.tensor(10.0).log())
    beyond = (x - at.detach()) * at.detach().expm1()
    kl = torch.where(x > at.detach(), at.detach().expm1() - at.detach() + beyond, x.expm1() - x)
    each = 1.0 if given is None else given
    wanted = each * (torch.where(kept, -advantages * ratio, 0.0) + 1e-3 * kl)
    wanted = agg_loss(wanted, mask, mode, **config.global_batch_info)
    wanted.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(leaf.grad, plain.grad, rtol=1e-6, atol=1e-9)
    assert all(type(value) is float for value in metrics.values())
    assert 0 < metrics["actor/is_masked"] < 1
