"""Kernels compiled ahead: another process finds them in another folder, by triton's own keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from loadtest.gpu.triton_cache import StaleCache, code_hash, described_items, unpack

ROOT = Path(__file__).resolve().parents[4]
DEADLINE_S = 240.0

# Triton is imported without its interpreter, and the folder is fixed before its first use.
SCRIPT = """
import sys
from pathlib import Path
from triton import knobs
from loadtest.gpu.triton_cache import described_items, fill
hits = []
knobs.compilation.listener = lambda **told: hits.append(told["cache_hit"])
named = [item for item in described_items() if item.name in ("gates", "norms, 4096 wide")]
assert len(named) == 2
count = fill(Path(sys.argv[1]), 90, named)
print(count, sum(hits), len(hits))
"""


def fill(folder: Path) -> tuple[int, int, int]:
    """Kernels in the folder, and of those that were asked for, those that it had, and all."""
    environment = {name: value for name, value in os.environ.items() if "TRITON" not in name}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels, hits, all_ = map(int, done.stdout.split())
    return kernels, hits, all_


@pytest.mark.timeout(500)
def test_kernels_are_found_again_where_they_were_brought_to(tmp_path: Path) -> None:
    kernels, hits, compiled = fill(tmp_path / "one")
    assert (hits, compiled) == (0, kernels)
    assert kernels > 3
    moved = unpack(tmp_path / "one", tmp_path / "other")
    assert not any("ptx" in path.suffix for path in moved.rglob("*"))
    # What was brought must not lead back to where it was made.
    (tmp_path / "one").rename(tmp_path / "gone")
    assert fill(moved) == (kernels, kernels, kernels)


def test_another_triton_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StaleCache, match="fill it with"):
        unpack(tmp_path, tmp_path / "other")
    (tmp_path / "baton.json").write_text(json.dumps({"triton": "1.0", "folder": ""}))
    with pytest.raises(StaleCache, match=f"by triton 1.0 and this is {triton.__version__}"):
        unpack(tmp_path, tmp_path / "other")


def test_the_items_that_can_be_described_are_of_full_size() -> None:
    names = [item.name for item in described_items()]
    assert "decode attention, Llama 70B, KV bfloat16" in names
    assert "warm-up" in names
    assert "decode 63 × 1k and 1 × 128k" in names


def test_the_code_has_one_hash() -> None:
    assert len(code_hash()) == 16
    assert code_hash() == code_hash()
