"""Private names of Ray and uvicorn stand in one module each."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.private_names import missing

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    *("baton", "engine", "kvtransfer", "worker", "prefill_worker", "decode_worker", "router"),
    *("loadtest", "deploy", "tools", "tests"),
)
USERS = {
    "ray": "deploy/ray_internals.py",
    "uvicorn": "router/http/uvicorn_internals.py",
}
UNDOCUMENTED = ("ray.core", "uvicorn.protocols")
"""Without an underscore, and internal all the same."""


def private_names(tree: ast.AST) -> list[str]:
    """The private names of these packages that a module imports, or reaches as attributes."""
    return sorted({name for name in _names(tree) if _is_private(name)})


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield _dotted(node)


def _dotted(node: ast.Attribute) -> str:
    """``a.b.c``, or nothing if an expression stands in front."""
    parts = [node.attr]
    while isinstance(node.value, ast.Attribute):
        node = node.value
        parts.append(node.attr)
    return ".".join((node.value.id, *reversed(parts))) if isinstance(node.value, ast.Name) else ""


def _is_private(name: str) -> bool:
    package, *rest = name.split(".")
    if package not in USERS:
        return False
    hidden = any(part.startswith("_") and not part.startswith("__") for part in rest)
    return hidden or any(name == one or name.startswith(f"{one}.") for one in UNDOCUMENTED)


def test_one_module_each_uses_them() -> None:
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 1000
    found: dict[str, set[str]] = {package: set() for package in USERS}
    for file in files:
        for name in private_names(ast.parse(file.read_text(encoding="utf-8"))):
            found[name.partition(".")[0]].add(f"{file.relative_to(ROOT)}: {name}")
    for package, user in USERS.items():
        assert found[package], f"nothing is found in {user}"
        elsewhere = sorted(one for one in found[package] if not one.startswith(f"{user}: "))
        assert elsewhere == [], f"private names of {package} belong into {user}"


@pytest.mark.parametrize(
    "source",
    [
        "import ray._private.node",
        "from ray._private.node import Node",
        "from ray import _raylet",
        "import ray\nray._private.worker.global_worker",
        "def f():\n    from ray.core.generated import common_pb2",
        "from uvicorn.protocols.http import flow_control",
    ],
)
def test_private_names_are_seen(source: str) -> None:
    assert private_names(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    ["import ray\nray.__version__", "from ray.util import list_named_actors", "import uvicorn"],
)
def test_public_names_are_not(source: str) -> None:
    assert not private_names(ast.parse(source))


def test_what_an_upgrade_removed_is_named() -> None:
    names = ["uvicorn.gone", "uvicorn.gone.further", "uvicorn.Server(config, left)"]
    texts = missing("router/it.py", ["uvicorn.Server.run", *names])
    assert [text.partition(" has ")[2] for text in texts] == [
        "no uvicorn.gone: see router/it.py",
        "no uvicorn.gone: see router/it.py",
        "no parameter left of uvicorn.Server: see router/it.py",
    ]
