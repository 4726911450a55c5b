"""Runs a folder of tests in a process of its own, with Triton's interpreter in place of a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def run_interpreted(folder: str, marked: str, deadline: float) -> None:
    """``folder`` from the repository's root; ``marked`` chooses as pytest's ``-m`` does."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked]
    # Of triton 3.6's interpreter, where a loop's bound is a loaded number.
    command += ["-W", "ignore:Conversion of an array with ndim:DeprecationWarning"]
    done = subprocess.run(
        [*command, folder],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=deadline,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
