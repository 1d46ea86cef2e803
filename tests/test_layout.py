"""The package as a whole: what it loads, what it shows, and how much a function asks for."""

import ast
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import rl_loss

PACKAGE = Path(rl_loss.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Their arguments are options that a user sets one by one. Nothing else takes more than eight.
WIDE = {"fused_lm_head", "fused_lm_head_loss", "icepop_loss", "ipo_loss", "policy_loss"}

LOADED = """
import sys
import torch, einops
before = set(sys.modules)
import rl_loss
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(loaded - sys.stdlib_module_names))
print(*sorted({"triton", "transformers", "liger_kernel"} & set(sys.modules)))
"""


def test_importing_loads_nothing_but_what_it_depends_on():
    run = subprocess.run(
        [sys.executable, "-c", LOADED],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded, heavy = run.stdout.split("\n")[:2]
    assert loaded == "rl_loss"
    assert heavy == ""


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_what_its_wing_may(path):
    """Late imports too: triton in kernels/ alone, what bridges bridge to in integrations/ alone."""
    wing = path.relative_to(PACKAGE).parts[0]
    if wing == "integrations":
        return
    allowed = sys.stdlib_module_names | {"rl_loss", "torch", "einops"}
    if wing == "kernels":
        allowed |= {"triton"}
    assert _imported(path) <= allowed


def test_every_public_name_is_there_and_says_what_it_is():
    for name in rl_loss.__all__:
        assert getattr(rl_loss, name).__doc__


def test_the_version_is_the_one_that_is_installed():
    try:
        installed = metadata.version("rl-loss")
    except metadata.PackageNotFoundError:
        pytest.skip("rl_loss is not installed")
    assert rl_loss.__version__ == installed


def test_old_addresses_lead_to_the_same():
    from rl_loss.loss import losses
    from rl_loss.metrics import combine_metrics

    assert combine_metrics is rl_loss.combine_metrics
    for name in losses.__all__:
        assert getattr(losses, name) is getattr(rl_loss, name)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_function_takes_more_than_eight_arguments(path):
    functions = [node for node in _nodes(path) if isinstance(node, ast.FunctionDef)]
    wide = {f.name: _width(f) for f in functions if f.name not in WIDE and not _is_kernel(f)}
    assert {name: width for name, width in wide.items() if width > 8} == {}


def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def _imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written in full"
            names.add(str(node.module))
    return {name.partition(".")[0] for name in names}


def _width(function: ast.FunctionDef) -> int:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    starred = [one for one in (arguments.vararg, arguments.kwarg) if one]
    return len([one for one in named if one.arg not in {"self", "cls", "ctx"}]) + len(starred)


def _is_kernel(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(one).startswith("triton.") for one in function.decorator_list)
