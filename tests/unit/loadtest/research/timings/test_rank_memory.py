"""A rank takes the memory of its shard, and not that of the model."""

from __future__ import annotations

from pathlib import Path

from loadtest.research.timings.rank_memory import Shape, load_shard, write_checkpoint

SMALL = Shape(hidden=2048, inner=8192, layers=2, heads=16, kv_heads=4, vocabulary=32000)


def test_loading_takes_the_memory_of_the_shard(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL)
    whole = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    found = load_shard(tmp_path, 3, 8)
    assert found.shard < whole / 6
    # A tensor is read at a time, and its pages do not stay.
    assert found.peak < found.shard + whole / 10
    assert sum(path.stat().st_blocks for path in tmp_path.iterdir()) * 512 < 1 << 20
