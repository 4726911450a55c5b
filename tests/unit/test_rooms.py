"""Folders have at most 15 modules, do not depend on each other, and stand in the design page."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = (
    *("baton", "engine", "kvtransfer", "worker", "prefill_worker", "decode_worker", "router"),
    *("planning", "loadtest", "deploy", "tools"),
)
MAX_MODULES = 15
GENERATED = "baton/v1"


def modules() -> dict[str, Path]:
    """The product's modules by name, without generated ones; packages by their folder."""
    found = {}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            inside = path.relative_to(ROOT)
            if inside.parts[:2] != ("baton", "v1"):
                name = ".".join(inside.with_suffix("").parts).removesuffix(".__init__")
                found[name] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The product's modules that a module imports anywhere."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in known else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def folder_graph() -> dict[str, set[str]]:
    known = modules()
    graph: dict[str, set[str]] = defaultdict(set)
    for path in known.values():
        here = str(path.parent.relative_to(ROOT))
        for name in imported(path, known):
            if name in known:
                there = str(known[name].parent.relative_to(ROOT))
                if there != here:
                    graph[here].add(there)
    return graph


def test_no_folder_has_more_modules_than_a_reader_can_hold() -> None:
    sizes: dict[str, int] = defaultdict(int)
    for path in modules().values():
        if path.name != "__init__.py":
            sizes[str(path.parent.relative_to(ROOT))] += 1
    assert {name: size for name, size in sizes.items() if size > MAX_MODULES} == {}


def test_folders_do_not_depend_on_each_other() -> None:
    graph = folder_graph()
    left = {name: set(to) for name, to in graph.items()}
    while free := {name for name in left if not left[name] & left.keys()}:
        left = {name: to for name, to in left.items() if name not in free}
    assert left == {}, "these folders import each other in a circle"


def test_the_design_page_names_every_folder() -> None:
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    (tree,) = re.findall(r"## The tree\n.*?```\n(.*?)```", page, re.DOTALL)
    path: list[str] = []
    named = set()
    for line in tree.splitlines():
        indent, name = re.fullmatch(r"( *)(\w+)/ +\S.*", line).groups()  # type: ignore[union-attr]
        path = [*path[: len(indent) // 2], name]
        named.add("/".join(path))
    existing = {str(path.parent.relative_to(ROOT)) for path in modules().values()}
    assert existing - named == set(), "docs/explanation/architecture.md does not name these folders"
    assert {name for name in named - existing if not (ROOT / name).is_dir()} == set()


def test_tests_share_helpers_by_support_alone() -> None:
    """A test module that runs alone loads no other one."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in (ROOT / "tests").rglob("*.py")
    }
    borrowed = [
        f"{name} imports {other}"
        for name, path in modules.items()
        for other in imported(path, modules)
        if other in modules and modules[other].name.startswith("test_")
    ]
    assert borrowed == []
