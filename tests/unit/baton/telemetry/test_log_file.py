"""Log files with a bounded size, on disks that have no room for them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.telemetry import log_file
from baton.telemetry.log_file import BACKUPS, LogFile, log_to_file
from baton.telemetry.logs import Service

BOUND = 1000
FULL = Path("/dev/full")
"""A device whose writes fail as those of a full disk do."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "MAX_BYTES", BOUND)


@pytest.fixture
def root() -> Iterator[None]:
    """The root logger's handlers and level are put back."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


def write(handler: LogFile, text: str) -> None:
    handler.handle(logging.LogRecord("a", logging.INFO, __file__, 1, text, (), None))


def test_a_full_log_makes_room_and_keeps_a_bounded_number_of_files(tmp_path: Path) -> None:
    path = tmp_path / "decode-0.log"
    handler = LogFile(path)
    descriptor = handler.fileno()
    for number in range(200):
        write(handler, f"{number:04} {'x' * 44}")
    assert handler.fileno() == descriptor
    names = ["decode-0.log", *(f"decode-0.log.{number}" for number in range(1, BACKUPS + 1))]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == names
    assert all((tmp_path / name).stat().st_size <= BOUND for name in names)
    kept = "".join((tmp_path / name).read_text() for name in reversed(names)).splitlines()
    assert [int(line[:4]) for line in kept] == list(range(200 - len(kept), 200))
    assert len(kept) > BACKUPS * BOUND / 60
    handler.close()


def test_two_processes_that_write_to_one_file_follow_each_other(tmp_path: Path) -> None:
    one, other = LogFile(tmp_path / "a.log"), LogFile(tmp_path / "a.log")
    for number in range(45):
        write(one if number % 3 else other, f"{number:04} {'x' * 44}")
    kept = [line for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    assert sorted(int(line[:4]) for line in kept) == list(range(45))
    assert max(file.stat().st_size for file in tmp_path.iterdir()) <= BOUND
    one.close()
    other.close()


def test_standard_output_and_error_follow_the_file(tmp_path: Path) -> None:
    """What native code writes at a crash is in the log, too."""
    output = os.open(os.devnull, os.O_WRONLY)
    handler = LogFile(tmp_path / "router.log", output=(output,))
    os.write(output, b"first\n")
    write(handler, "x" * BOUND)
    os.write(output, b"last\n")
    write(handler, "end")
    texts = [(tmp_path / f"router.log{end}").read_text() for end in (".2", ".1", "")]
    assert texts == ["first\n", f"{'x' * BOUND}\nlast\n", "end\n"]
    handler.close()
    os.close(output)


def test_a_full_disk_costs_one_line_and_the_lost_ones_are_counted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.log"
    path.symlink_to(FULL)
    handler = LogFile(path)
    for _ in range(3):
        write(handler, "lost")
    assert handler.lost == 3
    (complaint,) = capfd.readouterr().err.splitlines()
    assert "No space left on device" in complaint
    path.unlink()
    write(handler, "there is space again")
    first, second = path.read_text().splitlines()
    assert first == "there is space again"
    assert second.startswith("3 lines before the last one are missing here")
    assert handler.lost == 0
    handler.close()


def test_a_file_that_cannot_be_opened_stops_no_process(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    handler = LogFile(folder / "a.log")
    write(handler, "lost")
    assert handler.lost == 1
    folder.mkdir()
    write(handler, "written")
    assert (folder / "a.log").read_text().startswith("written\n1 lines before")
    handler.close()


def test_a_process_that_logs_to_a_file_ends_its_log(root: None, tmp_path: Path) -> None:
    handler = log_to_file(tmp_path / "a.log", "info", "json", Service.WORKER, "decode-0")
    logging.getLogger("a").info("it is %d", 3)
    handler.close()
    handler.close()
    assert handler not in logging.getLogger().handlers
    assert '"instance": "decode-0"' in (tmp_path / "a.log").read_text()
