"""A folder whose modules have the names of Baton's own is a folder like any other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.e2e.cluster import UpProcess


def test_a_cluster_starts_in_a_folder_with_modules_of_the_same_names(
    cluster: UpProcess, hostile_folder: Path
) -> None:
    """Its end, too, imports none of them: the fixture looks again."""
    assert Path(f"/proc/{cluster.process.pid}/cwd").resolve() == hostile_folder
    body = {
        "model": cluster.model,
        "temperature": 0,
        "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
    }
    url = f"{cluster.http}/v1/chat/completions"
    answer = httpx.post(url, json=body, timeout=60.0, trust_env=False).raise_for_status()
    assert "Tokyo" in answer.json()["choices"][0]["message"]["content"]
    assert not (hostile_folder / "imported").exists()


@pytest.mark.parametrize("module", ["worker", "router"])
def test_a_module_of_the_folder_that_is_imported_leaves_its_mark(
    hostile_folder: Path, module: str
) -> None:
    mark = hostile_folder / "imported"
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"],
            cwd=hostile_folder,
            env={},
            capture_output=True,
            text=True,
            timeout=60.0,
            check=False,
        )
        assert "was imported" in done.stderr
        assert mark.exists()
    finally:
        mark.unlink(missing_ok=True)
