"""The numerics of the GPU kernels, interpreted on the CPU by a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NUMERICS = "tests/kernels/gpu/numerics"


def run_numerics(marked: str, deadline: float) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked]
    # Of triton 3.6's interpreter, where a loop's bound is a loaded number.
    command += ["-W", "ignore:Conversion of an array with ndim:DeprecationWarning"]
    done = subprocess.run(
        [*command, NUMERICS],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=deadline,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"


@pytest.mark.timeout(420)
def test_interpreted_kernels_compute_what_their_references_do() -> None:
    run_numerics("not long", 400.0)


@pytest.mark.long
@pytest.mark.timeout(1300)
def test_interpreted_kernels_in_many_more_shapes() -> None:
    run_numerics("long", 1200.0)
