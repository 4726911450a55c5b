"""Kernels that are compiled before a GPU is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]


def _run(*arguments: str) -> str:
    # Interpreted kernels have no launcher that compiles.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.unit.loadtest.gpu.cache_script", *arguments]
    found = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_another_build_of_triton_finds_the_kernels_that_were_unpacked(tmp_path: Path) -> None:
    folder, target = tmp_path / "filled", tmp_path / "unpacked"
    assert _run("fill", str(folder)) == "1"
    # A kernel that is not found is compiled again, beside the other.
    assert _run("unpack", str(folder), str(target)) == "1"
