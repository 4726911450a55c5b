"""Every GPU kernel compiles for GPUs that are not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kernels.configurations import SHARED_BYTES

ROOT = Path(__file__).resolve().parents[3]
TARGETS = {80: ".target sm_80", 90: ".target sm_90a", 100: ".target sm_100a"}


def check_compiled(which: str, capability: int, cache: Path, deadline: float) -> int:
    """Compile in another process; returns how many kernels."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton_ahead_script", which, str(capability)],
        cwd=ROOT,
        # A cache of its own: what was compiled before proves nothing.
        env=inherited | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=deadline,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    found = json.loads(done.stdout)
    for name, kernel in found.items():
        assert kernel["target"].startswith(TARGETS[capability]), name
        assert kernel["bytes"] > 0, name
        assert kernel["shared"] <= SHARED_BYTES[capability], name
        # What the compiler takes for impossible it may drop, and say nothing.
        assert kernel["reads"], name
        assert kernel["writes"], name
    return len(found)


@pytest.mark.timeout(320)
def test_the_usual_configurations_compile_for_sm_90a(tmp_path: Path) -> None:
    assert check_compiled("few", 90, tmp_path, 300.0) >= 15


@pytest.mark.timeout(320)
@pytest.mark.long
@pytest.mark.parametrize("capability", [80, 100])
def test_those_that_differ_compile_for_others(capability: int, tmp_path: Path) -> None:
    assert check_compiled("edges", capability, tmp_path, 300.0) == 5


@pytest.mark.long
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_whole_matrix_compiles(capability: int, tmp_path: Path) -> None:
    assert check_compiled("matrix", capability, tmp_path, 1200.0) >= 200
