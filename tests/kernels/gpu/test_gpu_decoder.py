"""Whole steps with the GPU's kernels, interpreted on the CPU by a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
STEPS = "tests/kernels/gpu/steps"


def run_steps(marked: str, deadline: float) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked]
    done = subprocess.run(
        [*command, STEPS],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=deadline,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"


@pytest.mark.timeout(320)
def test_steps_compute_what_torch_does() -> None:
    run_steps("not long", 300.0)


@pytest.mark.long
@pytest.mark.timeout(1900)
def test_steps_of_every_family_and_kind_of_weight() -> None:
    run_steps("long", 1800.0)
