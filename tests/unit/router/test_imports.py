"""What a router's process loads, and what it must not."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "triton", "ray", "transformers", "engine", "kvtransfer", "worker")


@pytest.mark.parametrize(
    "module", ["router.main", "loadtest.router.echo_worker", "loadtest.router.stream_client"]
)
def test_neither_torch_nor_an_engine_is_loaded(module: str) -> None:
    """A process of its own: this one has loaded everything long ago."""
    script = f"import sys, {module}; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == []
