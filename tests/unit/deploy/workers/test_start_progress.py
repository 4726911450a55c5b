"""What counts as progress of a start, and when a start has failed."""

from __future__ import annotations

import mmap
from pathlib import Path

from deploy.workers.start_progress import STEP_BYTES, StartProgress, StartWatch


def test_reading_a_file_is_progress_and_rest_is_not(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    with file.open("wb") as made:
        made.truncate(2 * STEP_BYTES)
    progress = StartProgress()
    before = progress.count()
    assert progress.count() == before
    with file.open("rb") as weights:
        while weights.read(1 << 20):
            pass
    assert progress.count() >= before + 2


def test_mapping_a_cached_file_is_progress_and_its_end_takes_none_back(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    with file.open("wb") as made:
        made.truncate(4 * STEP_BYTES)
    progress = StartProgress()
    before = progress.count()
    with (
        file.open("rb") as weights,
        mmap.mmap(weights.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        assert sum(mapped[:: mmap.PAGESIZE]) == 0
        read = progress.count()
    assert read >= before + 3
    assert progress.count() >= read


def test_a_start_fails_only_after_a_time_without_progress() -> None:
    watch = StartWatch(10.0)
    assert not watch.look(0.0, None), "it waits for a node"
    assert not watch.look(100.0, None)
    assert not watch.look(101.0, 0)
    assert not watch.look(110.9, 0)
    assert not watch.look(110.95, 1)
    assert not watch.look(120.9, 1)
    assert "10 s" in watch.look(120.95, 1)
