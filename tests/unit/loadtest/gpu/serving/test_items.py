"""The serving phase from outside: what it needs, and what it imports before it is used."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest

from loadtest.gpu.serving import items
from loadtest.gpu.serving.items import missing, serving_items

pytestmark = pytest.mark.long
DEADLINE_S = 100.0
IMPORTS = """
import ast, json, pathlib, sys
import decode_worker.role, loadtest.gpu.serving.phase, loadtest.gpu.serving.worker
import prefill_worker.role, router.main
ours = {"baton", "engine", "kvtransfer", "worker", "prefill_worker", "decode_worker", "router"}
ours.add("loadtest")
found = set()
for name, module in list(sys.modules.items()):
    if name.partition(".")[0] in ours and getattr(module, "__file__", None):
        for node in ast.parse(pathlib.Path(module.__file__).read_text()).body:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module)
known = ours | sys.stdlib_module_names
print(json.dumps(sorted(name for name in found if name.partition(".")[0] not in known)))
"""
WITH_OTHERS = {"markupsafe", "pydantic_core", "starlette"}
"""What comes along with a distribution that is named: jinja2, pydantic, fastapi."""


def output_of(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_is_missing_where_the_tests_run() -> None:
    assert missing() == []


def test_what_cannot_be_imported_is_named_by_its_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find(module: str) -> ModuleSpec | None:
        if module == "google.protobuf":
            raise ModuleNotFoundError("No module named 'google'")
        return None if module in ("grpc", "pydantic_settings") else find_spec(module)

    monkeypatch.setattr(items, "find_spec", find)
    assert missing() == ["grpcio", "protobuf", "pydantic-settings"]


def test_all_that_the_processes_import_is_looked_for() -> None:
    imported = set(json.loads(output_of(IMPORTS)))
    assert len(imported) > 20
    tops = {module.partition(".")[0] for module in items._NEEDED}
    unknown = {name for name in imported if name.partition(".")[0] not in tops | WITH_OTHERS}
    assert not unknown


def test_it_is_imported_without_the_packages() -> None:
    script = "import sys, loadtest.gpu.serving.items; print(*sys.modules)"
    imported = {name.partition(".")[0] for name in output_of(script).split()}
    assert not imported & {name.partition(".")[0] for name in items._NEEDED}


def test_items_have_their_names_before_the_work_and_none_runs_after_the_end(tmp_path: Path) -> None:
    items = list(serving_items("cpu", small=True, folder=tmp_path))
    assert [item.name for item in items] == [
        "answers",
        "writer killed",
        "poisoned context",
        "load",
    ]
    with pytest.raises(RuntimeError, match="run each item before asking for the next"):
        items[0].work()
    assert list(tmp_path.iterdir()) == []
