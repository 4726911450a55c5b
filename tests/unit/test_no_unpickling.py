"""Nothing in Baton turns bytes into objects of any class: pickles run what their author wrote."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    *("baton", "engine", "kvtransfer", "worker", "prefill_worker", "decode_worker", "router"),
    *("loadtest", "deploy"),
)
MODULES = frozenset({"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal"})
MODULES |= {"shelve", "ray.cloudpickle", "jsonpickle"}
CALLS = frozenset({"eval", "exec"})
TENSORS = frozenset({"torch.load", "numpy.load", "np.load", "pandas.read_pickle", "yaml.load"})
SAFE = {"torch.load": ("weights_only", True), "numpy.load": ("allow_pickle", False)}
SAFE["np.load"] = SAFE["numpy.load"]
ALLOWED: frozenset[tuple[str, str]] = frozenset()
"""Files and what they may do all the same."""


def faults_of(tree: ast.AST) -> list[str]:
    """What a module does that it must not."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if _is_pickle(name.name)]
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
            found += [name for name in whole if _is_pickle(name)]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {word.arg: word.value for word in node.keywords}
            if name in CALLS:
                found.append(name)
            if name in TENSORS and not _is_safe(name, given):
                found.append(name)
            allows = given.get("allow_pickle")
            if isinstance(allows, ast.Constant) and allows.value:
                found.append(f"{name} with pickles")
    return found


def _is_pickle(name: str) -> bool:
    return name in MODULES or name.partition(".")[0] in MODULES


def _is_safe(name: str, given: dict[str | None, ast.expr]) -> bool:
    if name not in SAFE:
        return False
    argument, wanted = SAFE[name]
    value = given.get(argument)
    return isinstance(value, ast.Constant) and value.value is wanted


def test_no_room_unpickles() -> None:
    files = [file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py"))]
    assert len(files) > 300
    faults = [
        (str(file.relative_to(ROOT)), fault)
        for file in files
        for fault in faults_of(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert [fault for fault in faults if fault not in ALLOWED] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "from ray import cloudpickle",
        "import torch\ntorch.load(f)",
        "torch.load(f, weights_only=False)",
        "np.load(f)",
        "np.load(f, allow_pickle=True)",
        "eval(text)",
        "yaml.load(text)",
    ],
)
def test_the_check_finds_them(source: str) -> None:
    assert faults_of(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    ["np.load(f, allow_pickle=False)", "torch.load(f, weights_only=True)", "model.eval()"],
)
def test_the_check_lets_others_be(source: str) -> None:
    assert not faults_of(ast.parse(source))
