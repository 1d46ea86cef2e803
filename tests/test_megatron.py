"""A real GPTModel of megatron-core with our output processor, against its own logits."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from factory import random_support
from ranks import run_ranks
from torch import Tensor

from rl_loss import AlignedRows, LossInputs, RowKind, aligned_rows, icepop_loss
from rl_loss.integrations.megatron import OutputContext, output_processor, parallel_head

pytest.importorskip("megatron.core", reason="needs megatron-core")
V, PADDED, H, S = 29, 32, 8, 6
PAGE = (Path(__file__).parent.parent / "docs" / "trainers.md").read_text()
ON_PAGE: dict[str, Any] = {}
exec("from rl_loss" + PAGE.partition("`parallel_head` goes")[2].partition("from rl_loss")[2]
     .partition("```")[0], ON_PAGE)  # fmt: skip


class Case(NamedTuple):
    ranks: int = 1
    batch: int = 2
    tied: bool = False
    kinds: tuple[RowKind, ...] = (RowKind.REPLAY, RowKind.NONE, RowKind.HEAD)
    mup: bool = False


CASES = {
    "one rank": Case(),
    "one rank, tied": Case(tied=True),
    "one rank, packed": Case(batch=1),
    "muP": Case(mup=True),
    "two ranks": Case(2),
    "two ranks, tied": Case(2, tied=True),
    "two ranks, packed": Case(2, batch=1),
    "two ranks, replayed": Case(2, kinds=(RowKind.REPLAY,)),
}


def on_the_cpu() -> None:
    """What of it asks for a GPU even so."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    torch.cuda.current_device = lambda: torch.device("cpu")  # of its buffers
    torch.cuda.current_stream = lambda: None  # that its sums wait for nothing on
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()  # of dropout, which is 0


def gpt_model(case: Case):
    """On the CPU Megatron's initialisers want a CUDA generator: weights are set by the caller."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=H,
        num_attention_heads=2,
        tensor_model_parallel_size=case.ranks,
        use_cpu_initialization=True,
        perform_initialization=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        **({"use_mup": True, "mup_output_mult": 0.5} if case.mup else {}),
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=PADDED,
        max_sequence_length=S,
        parallel_output=True,
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type="learned_absolute",
    )


def fill(model) -> None:
    """The same whole weights whatever the ranks: each takes its part of a split dimension."""
    from megatron.core import parallel_state

    g = torch.Generator().manual_seed(5)
    rank = parallel_state.get_tensor_model_parallel_rank()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    for name, parameter in model.named_parameters():
        shape, cut = list(parameter.shape), getattr(parameter, "partition_dim", -1)
        if getattr(parameter, "tensor_model_parallel", False):
            shape[cut] *= ranks
        whole = torch.randn(shape, generator=g) * 0.4
        if "norm" in name:
            whole = whole + 1
        if getattr(parameter, "tensor_model_parallel", False):
            whole = whole.chunk(ranks, cut)[rank]
        parameter.data.copy_(whole)


class Batch(NamedTuple):
    tokens: Tensor  # [b, s]
    rows: AlignedRows


def make_batch(case: Case) -> Batch:
    g = torch.Generator().manual_seed(1)
    n = case.batch * S
    tokens = torch.randint(V, (case.batch, S), generator=g)
    support = random_support(tokens.flatten(), V, case.kinds, g)
    rows = aligned_rows(
        tokens,
        torch.rand(case.batch, S, generator=g) < 0.8,
        support=support,
        inference_logprobs=-torch.rand(n, generator=g).view(case.batch, S) * 2,
        advantages=torch.randn(n, generator=g).view(case.batch, S),
        temperature=torch.rand(n, generator=g).view(case.batch, S) + 0.5,
    )
    temperature = rows.per_token["temperature"]
    temperature[temperature == 0] = 1.0
    return Batch(tokens, rows)


def loss_of(head, rows: AlignedRows) -> Tensor:
    names = ("inference_logprobs", "advantages")
    given = {name: rows.per_token[name] for name in names}
    return icepop_loss(LossInputs.from_head(head, **given), kl_tau=0.1).loss


def grads_of(model) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check(rank: int, case: Case) -> None:
    from megatron.core import parallel_state

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(case.ranks)
        on_the_cpu()
    model, batch = gpt_model(case), make_batch(case)
    fill(model)
    mask = torch.ones(S, S, dtype=torch.bool).triu(1)[None, None]
    positions = torch.arange(S).expand(case.batch, S)
    rows, inputs = batch.rows, (batch.tokens, positions, mask)
    # Its own logits, brought together from all ranks, in place of a head.
    logits = model(*inputs, runtime_gather_output=True)[..., :V]  # [b, s, V]
    plain = plain_head(logits, rows)
    loss_of(plain, rows).backward()
    wanted = grads_of(model)
    model.zero_grad()
    head = model(
        *inputs,
        output_processor=output_processor,
        output_processor_context=OutputContext(
            rows.labels,
            rows.support,
            temperature=rows.per_token["temperature"],
            active=rows.active,
            entropy="support",
            vocab_size=V,
        ),
    )
    assert head.logprobs.shape == (case.batch, S)
    with torch.no_grad():  # without the hook: as the page does it
        context = OutputContext(rows.labels, rows.support, active=rows.active, vocab_size=V)
        found = ON_PAGE["hybrid_head"](model, context, *inputs)
        hooked = model(*inputs, output_processor=output_processor, output_processor_context=context)
        assert case.mup or torch.equal(found.logprobs, hooked.logprobs)
        assert "forward" not in vars(model.output_layer)
    near = {"rtol": 0, "atol": 1e-5}  # float32 logits of size 5, of two orders of summation
    torch.testing.assert_close(head.logprobs, plain.logprobs, **near)
    torch.testing.assert_close(head.support_logprobs, plain.support_logprobs, **near)
    torch.testing.assert_close(head.entropy, plain.entropy, **near)
    loss_of(head, rows).backward()
    found = grads_of(model)
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        size = float(grad.abs().max())
        torch.testing.assert_close(found[name], grad, rtol=0, atol=2e-5 * size + 1e-6, msg=name)


def plain_head(logits: Tensor, rows: AlignedRows):
    """The head's definition over logits that are there: the identity is its weight."""
    from rl_loss import fused_lm_head

    return fused_lm_head(
        logits,
        torch.eye(V),
        rows.labels,
        rows.support,
        temperature=rows.per_token["temperature"],
        active=rows.active,
        entropy="support",
        impl="reference",
    )


def all_of(rank: int, ranks: int) -> None:
    for case in CASES.values():
        if case.ranks == ranks:
            check(rank, case)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gpt_model_gives_the_head_of_its_logits(ranks):
    run_ranks(all_of, ranks, ranks)


def sequence_parallel(rank: int) -> None:
    """Its output layer alone, whose hidden states each rank has a part of, against its logits."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(2)
    on_the_cpu()
    for batch in (1, 2):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=H,
            num_attention_heads=2,
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
        )
        layer = ColumnParallelLinear(
            H, PADDED, config=config, init_method=torch.nn.init.normal_, bias=False
        )
        g = torch.Generator().manual_seed(4)
        layer.weight.data.copy_(torch.randn(PADDED, H, generator=g).chunk(2)[rank])
        hidden = torch.randn(S, batch, H, generator=g).chunk(2)[rank]
        rows = make_batch(Case(2, batch)).rows
        leaf, plain = (hidden.clone().requires_grad_() for _ in range(2))
        logits, _ = layer(plain, runtime_gather_output=True)
        whole = plain_head(logits.transpose(0, 1)[..., :V], rows)
        loss_of(whole, rows).backward()
        weight_grad, layer.weight.grad = layer.weight.grad, None
        temperature = rows.per_token["temperature"]
        context = OutputContext(
            rows.labels, rows.support, temperature, rows.active, "support", vocab_size=V
        )
        head = parallel_head(leaf, layer, context)
        loss_of(head, rows).backward()
        near = {"rtol": 0, "atol": 2e-5}
        torch.testing.assert_close(head.logprobs, whole.logprobs, **near)
        torch.testing.assert_close(leaf.grad, plain.grad, **near)
        torch.testing.assert_close(layer.weight.grad, weight_grad, **near)


def test_sequence_parallel_hidden_states():
    run_ranks(sequence_parallel, 2)


class Accumulated(NamedTuple):
    tied: bool
    overlapped: bool
    dtype: torch.dtype
    fused: bool = False  # whether the layer says that it adds to `main_grad` itself


def main_grads(case: Accumulated, ranks: int) -> dict[str, Tensor]:
    """Of two micro-batches under Megatron's own DDP."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    model, batch = gpt_model(Case(ranks, tied=case.tied)), make_batch(Case(ranks))
    fill(model)
    model = model.to(case.dtype)
    # Its own product into `main_grad` is a CUDA extension: no other layer is asked for it.
    model.output_layer.gradient_accumulation_fusion = case.fused
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=case.overlapped,
        use_distributed_optimizer=False,
    )
    ddp = DistributedDataParallel(model.config, config, model)
    ddp.zero_grad_buffer()
    weight = model.shared_embedding_or_output_weight() if case.tied else model.output_layer.weight
    seen = []
    weight.register_hook(lambda grad: seen.append((grad.layout, grad.numel())))
    mask = torch.ones(S, S, dtype=torch.bool).triu(1)[None, None]
    positions = torch.arange(S).expand(2, S)
    rows, kept = batch.rows, weight.main_grad.data_ptr()
    for last in (False, True):
        with nullcontext() if last else ddp.no_sync():
            head = ddp(
                batch.tokens,
                positions,
                mask,
                output_processor=output_processor,
                output_processor_context=OutputContext(
                    rows.labels,
                    rows.support,
                    temperature=rows.per_token["temperature"],
                    active=rows.active,
                    vocab_size=V,
                ),
            )
            loss_of(head, rows).backward()
    ddp.finish_grad_sync()  # hangs or fails where a hook did not fire
    assert weight.grad is None
    assert weight.main_grad.data_ptr() == kept
    assert weight.grad_added_to_main_grad == case.fused
    if case.fused and not case.tied:
        assert {layout for layout, _ in seen} == {torch.sparse_coo}
    assert len(seen) >= 2
    return {name: p.main_grad.clone() for name, p in model.named_parameters()}


def added_to_main_grad(rank: int, split: int) -> None:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(split)
    on_the_cpu()
    for dtype in (torch.float32, torch.bfloat16):
        for tied in (False, True):
            for overlapped in (False, True):
                case = Accumulated(tied, overlapped, dtype)
                wanted, found = (
                    main_grads(case._replace(fused=fused), split) for fused in (False, True)
                )
                assert found.keys() == wanted.keys()
                for name, grad in wanted.items():
                    size = float(grad.abs().max())
                    # Autograd rounds each micro-batch's gradient to the weight's dtype.
                    room = 2 * torch.finfo(dtype).eps * size + 1e-7
                    assert (found[name] - grad).abs().max() <= room, (case, name)
                    assert size > 0


@pytest.mark.parametrize(("ranks", "split"), [(1, 1), (2, 1), (2, 2)])
def test_the_gradient_goes_into_main_grad(ranks, split):
    """Where the output layer fuses accumulation, under DDP with its hooks; `split` over a group of
    so many ranks, and the batch over the others."""
    run_ranks(added_to_main_grad, ranks, split)


def test_what_does_not_fit_is_refused():
    layer = type("Layer", (), {"weight": None, "tp_group": None, "sequence_parallel": False})()
    hidden, labels = torch.zeros(S, 1, H), torch.zeros(1, S, dtype=torch.int64)
    with pytest.raises(ValueError, match="context must be an OutputContext, got dict"):
        parallel_head(hidden, layer, {})
    with pytest.raises(ValueError, match="weight must be the embedding's"):
        parallel_head(hidden, layer, OutputContext(labels))
    with pytest.raises(ValueError, match=r"context\.labels must be a tensor, got NoneType"):
        parallel_head(hidden, layer, OutputContext(None), weight=torch.zeros(V, H))
    with pytest.raises(ValueError, match=r"context\.labels must be \[b, s\], got \(6,\)"):
        parallel_head(hidden, layer, OutputContext(labels[0]), weight=torch.zeros(V, H))
