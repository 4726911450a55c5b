"""What a child of the launcher has written, and where."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deploy.processes.child import TAIL_BYTES, Child, last_lines
from deploy.processes.run_directory import ClusterMark

SAYS = "import sys; print('out', flush=True); print('err', file=sys.stderr)"


async def test_the_output_of_a_child_is_in_its_log(tmp_path: Path) -> None:
    mark, log = ClusterMark("c", tmp_path), tmp_path / "log"
    child = await Child.spawn("it", [sys.executable, "-c", SAYS], mark, log)
    assert await child.wait() == "exit code 0"
    assert child.last_lines() == "out\nerr"


async def test_without_a_log_its_output_is_its_parents(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    child = await Child.spawn("it", [sys.executable, "-c", SAYS], ClusterMark("c", tmp_path), None)
    assert await child.wait() == "exit code 0"
    assert capfd.readouterr() == ("out\n", "err\n")
    assert child.last_lines() == "its log has the reason"


def test_of_a_log_of_any_length_only_the_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        # Sparse: nothing could hold it in memory.
        file.truncate(1 << 42)
        file.seek(0, 2)
        file.write("\nwhy\n\n  \nthe end: ü\n".encode())
    assert last_lines(log, 2) == "why\nthe end: ü"
    assert len(last_lines(log, 3)) <= TAIL_BYTES


@pytest.mark.parametrize(("text", "shown"), [("", ""), ("one", "one"), ("1\n2\n3\n", "2\n3")])
def test_the_last_lines_of_a_short_log(tmp_path: Path, text: str, shown: str) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    assert last_lines(log, 2) == shown
    assert last_lines(tmp_path / "none") == ""
