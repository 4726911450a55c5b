"""What a worker's process loads, and what it must not."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch._dynamo", "sympy", "ray", "transformers")


def test_neither_torchs_compiler_nor_ray_is_loaded() -> None:
    """These take longer than all the rest. In a process of its own: this one has them."""
    script = f"import sys, worker.process; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == []
