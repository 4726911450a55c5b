"""The Triton version of the checksum: interpreted it equals that of the CPU, and it compiles for
GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtransfer.memory.checksum import checksum

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 100.0


def run_script(task: str, **environment: str) -> dict[str, Any]:
    """Another process, since triton looks at its environment when it is imported."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton_script", task],
        cwd=ROOT,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_interpreted_it_equals_numpy() -> None:
    answer = run_script("interpret", TRITON_INTERPRET="1")
    wrong = {name: pair for name, pair in answer["found"].items() if pair[0] != pair[1]}
    assert not wrong
    assert len(answer["found"]) >= 15
    assert answer["refused"] == [True] * 4
    assert [name for name, right in answer["copies"].items() if not right] == []
    assert len(answer["copies"]) >= 15
    assert answer["copies_refused"] == [True] * 3


def test_it_compiles_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    # A cache of its own: what was compiled before proves nothing.
    compiled = run_script("compile", TRITON_CACHE_DIR=str(tmp_path))
    # Whatever the addresses are, they call for no other kernel, and its accesses are wide.
    assert compiled.pop("unspecialized") == ["target", "source"]
    assert all(min(kernel["wide"]) > 0 == kernel["narrow"] for kernel in compiled["copy"].values())
    assert compiled.keys() == {"checksum", "copy"}
    for kernels in compiled.values():
        targets = {capability: kernel["target"] for capability, kernel in kernels.items()}
        assert targets == {
            "80": ".target sm_80",
            "90": ".target sm_90a",
            "100": ".target sm_100a",
        }
        assert all(kernel["bytes"] > 0 for kernel in kernels.values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("size", [8, 8 * 1024, 8 * 1025, 1 << 20, 16 << 20])
def test_on_a_gpu_it_equals_numpy(size: int) -> None:
    from kvtransfer.memory.checksum_triton import checksum_tensor  # noqa: PLC0415 - compiles on a GPU

    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    assert checksum_tensor(data.cuda()) == checksum(data.numpy().tobytes())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("size", [8, 8 * 1024, 8 * 1025, 1 << 20, 16 << 20])
def test_on_a_gpu_it_copies(size: int) -> None:
    from kvtransfer.memory.checksum_triton import copy_words  # noqa: PLC0415 - compiles on a GPU

    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    source, to = data.cuda(), torch.empty(size, dtype=torch.uint8, device="cuda")
    found = copy_words(to.data_ptr(), source.data_ptr(), size, to.device)
    assert found == checksum(data.numpy().tobytes())
    assert torch.equal(to.cpu(), data)
