"""What the documents show runs, and what they link to is there."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rl_loss import Support

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
H, V = 6, 11
FIRST_SCREEN, ENGINE = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


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


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_link_within_the_project_leads_somewhere(path):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
    missing = [link for link in links if ":" not in link and not (path.parent / link).exists()]
    assert missing == []
