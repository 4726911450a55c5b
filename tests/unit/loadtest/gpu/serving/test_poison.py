"""The kernel that breaks a CUDA context: it stores at a given address, and compiles for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.long
DEADLINE_S = 100.0
INTERPRETED = """
import torch
from loadtest.gpu.serving.poison import store_kernel
target = torch.zeros(3, dtype=torch.int32)
store_kernel[(1,)](torch.tensor([target[1:].data_ptr()]))
print(target.tolist())
"""
COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from loadtest.gpu.serving.poison import store_kernel
source = ASTSource(store_kernel, signature={"address": "*i64"}, constexprs={})
print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""


def output_of(script: str, **environment: str) -> str:
    """Of another process, since triton looks at its environment when it is imported."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_stores_at_the_address_that_it_reads() -> None:
    assert output_of(INTERPRETED, TRITON_INTERPRET="1") == "[0, 1, 0]\n"


def test_it_compiles_for_a_gpu_that_is_not_here() -> None:
    lines = output_of(COMPILED).splitlines()
    assert any("ld.global.b64" in line for line in lines)
    assert any("st.global.b32" in line for line in lines)
