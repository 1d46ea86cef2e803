"""What the documents show runs, and what they link to is there."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rl_loss import LossInputs, Support, fused_lm_head, icepop_loss

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
H, V = 6, 11
(HEAD_PAGE,) = [
    block
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "head.md").read_text(), re.S)
    if "kept_mass" in block
]
(LOOP,) = [
    block
    for block in re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "trainers.md").read_text(), re.S
    )
    if "grad_into=buffer" in block
]
FIRST_SCREEN, PATCHED, TRL, ENGINE = re.findall(
    r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S
)


def test_the_ten_lines_of_the_readme():
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, H, generator=g, requires_grad=True)
    lm_head = torch.nn.Linear(H, V, bias=False)
    names = {
        "rollout": [([4, 2], [-0.2231, -1.6094]), ([7], [0.0]), ([1, 9, 3], [-1.0986] * 3)],
        "hidden": hidden,
        "lm_head": lm_head,
        "labels": torch.tensor([2, 7, 9]),
        "inference_logprobs": torch.tensor([-1.6094, 0.0, -1.0986]),
        "advantages": torch.tensor([1.0, -0.5, 2.0]),
        "global_token_count": 3,
    }
    exec(FIRST_SCREEN, names)
    rows = names["support"].offsets.diff().tolist()
    assert [bool(row.abs().sum() > 0) for row in hidden.grad] == [width > 1 for width in rows]
    # The gradient stays within the ids that were kept.
    touched = lm_head.weight.grad.abs().sum(1).nonzero().flatten().tolist()
    assert touched == [1, 2, 3, 4, 9]


def test_the_trainers_of_the_readme_compile():
    """What they do is tested with their packages."""
    for code in (PATCHED, TRL):
        compile(code, "README.md", "exec")


def test_the_engine_of_the_readme():
    def top(*pairs):
        return {token: SimpleNamespace(logprob=logprob) for token, logprob in pairs}

    completion = SimpleNamespace(
        token_ids=[5, 8],
        sampling_mask=SimpleNamespace(token_ids=[[5, 6], [8, 9, 2]]),
        logprobs=[top((5, -0.6931), (6, -0.6931)), top((8, -0.5))],
    )
    names = {"request_output": SimpleNamespace(prompt_token_ids=[1, 3], outputs=[completion])}
    exec(ENGINE, names)
    rows = names["rows"]
    assert rows.active.tolist() == [False, True, True, False]
    assert rows.labels.tolist() == [0, 5, 8, 0]
    torch.testing.assert_close(
        rows.per_token["inference_logprobs"][1:3], torch.tensor([-0.6931, -0.5])
    )
    assert rows.support.ids.tolist() == [5, 6, 8, 9, 2]
    assert rows.support.offsets.tolist() == [0, 0, 2, 5, 5]
    rows.support.validate(
        rows.labels, V, active=rows.active, inference_logprobs=rows.per_token["inference_logprobs"]
    )


def test_supports_on_the_way_to_the_trainer():
    text = (ROOT / "docs" / "sampler.md").read_text()
    stacks, flat = (
        code
        for code in re.findall(r"```python\n(.*?)```", text, re.S)
        if "(supports, C" in code or "from_bytes" in code
    )
    one = Support.from_rows([([5, 6], [-0.6931, -0.6931]), ([8], [0.0])])
    names = {"Support": Support, "supports": [one, None], "P": 1, "C": 3}
    first, second = stacks.split("# Of all", 1)
    exec(first, names)
    assert names["support"].kind.tolist() == [1, 1, 0, 0, 0, 0]
    exec("#" + second, names)
    assert names["support"].kind.tolist() == [0, 1, 1, 0, 0, 0, 0, 0]
    ids, counts, logprobs, kind, tail_mass = names["support"].to_bytes()
    names["mask"] = SimpleNamespace(ids=ids, counts=counts, logprobs=logprobs)
    exec(flat, names)
    assert (names["ids"], names["counts"], names["logprobs"]) == (ids, counts, logprobs)
    assert torch.equal(names["kind"], kind)
    assert torch.equal(names["tail_mass"], tail_mass)


def test_the_divergence_of_two_heads_in_the_page_of_the_head():
    """Against two softmaxes over the vocabulary whose ids outside the kept set are merged."""
    g = torch.Generator().manual_seed(0)
    kept = [[4, 2], [7], [1, 9, 3], list(range(V))]
    hidden, teacher_hidden = (torch.randn(4, H, generator=g) for _ in range(2))
    heads = [torch.nn.Linear(H, V, bias=False) for _ in range(2)]
    for head in heads:
        torch.nn.init.normal_(head.weight, generator=g)
    names = {
        "torch": torch,
        "fused_lm_head": fused_lm_head,
        "hidden": hidden.clone().requires_grad_(),
        "teacher_hidden": teacher_hidden,
        "lm_head": heads[0],
        "teacher_head": heads[1],
        "labels": torch.tensor([2, 7, 9, 5]),
        "support": Support.from_rows([(ids, None) for ids in kept]),
    }
    exec(HEAD_PAGE, names)
    exact = hidden.double().requires_grad_()
    weights = [head.weight.detach().double() for head in heads]
    teacher = (teacher_hidden.double() @ weights[1].T).softmax(1)
    student = (exact @ weights[0].T).softmax(1)
    wanted = []
    for t, s, ids in zip(teacher, student, kept, strict=True):
        t, s = (torch.cat([p[ids], 1 - p[ids].sum(0, keepdim=True)]) for p in (t, s))
        some = t > 1e-12
        wanted.append((t[some] * (t[some] / s[some]).log()).sum())
    wanted = torch.stack(wanted)
    assert (wanted[:3] > 0.01).all()
    whole = (teacher * (teacher / student).log()).sum(1)
    assert (wanted <= whole + 1e-12).all()
    torch.testing.assert_close(names["kl"].double(), wanted, rtol=1e-4, atol=1e-5)
    names["kl"].sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(names["hidden"].grad.double(), exact.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_loop_over_micro_batches(dtype):
    """Against one batch, whose gradient autograd gives."""
    g = torch.Generator().manual_seed(0)
    table = torch.nn.Embedding(V, H, dtype=dtype)
    lm_head = torch.nn.Linear(H, V, bias=False, dtype=dtype)
    supports = [
        Support.from_rows([([2, 5], [-0.6931] * 2), ([7, 1, 4], [-1.0986] * 3)]),
        Support.from_rows([([9, 3], [-0.6931] * 2), None]),
    ]
    values = {"inference_logprobs": -torch.rand(4, generator=g), "advantages": torch.ones(4)}
    tokens, labels = torch.tensor([1, 2, 3, 4]), torch.tensor([2, 7, 9, 8])
    halves = slice(0, 2), slice(2, 4)
    weights = [table.weight, lm_head.weight]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    out = fused_lm_head(table(tokens), lm_head.weight, labels, Support.cat(supports))
    (icepop_loss(LossInputs.from_head(out, **values)).loss / 4).backward()
    wanted = [(weight - 0.1 * weight.grad).detach() for weight in weights]
    moved = [weight.detach().clone() for weight in weights]
    optimizer.zero_grad()
    names = {
        "torch": torch,
        "fused_lm_head": fused_lm_head,
        "icepop_loss": icepop_loss,
        "LossInputs": LossInputs,
        "model": table,
        "lm_head": lm_head,
        "optimizer": optimizer,
        "global_token_count": 4,
        "micro_batches": [
            SimpleNamespace(
                tokens=tokens[half],
                labels=labels[half],
                support=support,
                per_token={name: value[half] for name, value in values.items()},
            )
            for half, support in zip(halves, supports, strict=True)
        ],
    }
    exec(LOOP, names)
    assert not names["buffer"].any()
    for weight, before, after in zip(weights, moved, wanted, strict=True):
        assert not torch.equal(weight, before)
        room = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(weight.detach(), after, rtol=room, atol=room)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_link_within_the_project_leads_somewhere(path):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
    missing = [link for link in links if ":" not in link and not (path.parent / link).exists()]
    assert missing == []
