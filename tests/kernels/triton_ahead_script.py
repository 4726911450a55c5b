"""Run in a process of its own: ``python -m tests.kernels.triton_ahead_script few|edges|matrix 90``.

Compiles the GPU kernels for one compute capability, without a GPU. Prints one JSON object: for each
configuration and kernel, what came of it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from engine.gpu.compile_ahead import compile_launch
from tests.support.kernels.configurations import few, matrix

EDGES = ("decode torch.bfloat16 torch.float8_e4m3fn", "chunk torch.bfloat16", "linear")
"""The beginnings of what is compiled for every capability."""


def compile_all(which: str, capability: int) -> dict[str, Any]:
    """Configurations of ``which``: "few", "edges" (those of them that GPUs differ in), "matrix"."""
    found = {}
    for configuration in matrix() if which == "matrix" else few():
        if which == "edges" and not configuration.name.startswith(EDGES):
            continue
        for launch in configuration.launches(capability):
            compiled = compile_launch(launch, capability)
            found[f"{configuration.name}: {compiled.kernel}"] = {
                "target": next(x for x in compiled.ptx.splitlines() if ".target" in x),
                "bytes": compiled.machine_code_bytes,
                "shared": compiled.shared_bytes,
                "reads": "ld.global" in compiled.ptx or "cp.async" in compiled.ptx,
                "writes": "st.global" in compiled.ptx,
            }
    return found


if __name__ == "__main__":
    print(json.dumps(compile_all(sys.argv[1], int(sys.argv[2]))))  # noqa: T201
