"""The file of bills: what survives, and what of it is read."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from router.billing import journal
from router.billing.journal import Journal


def test_bills_are_read_in_order_and_read_over(tmp_path: Path) -> None:
    bills = Journal.create(tmp_path / "bills", "c", "w")
    for number in range(3):
        bills.append(b"[%d]" % number)
    lines = bills.lines()
    assert lines == [b"[0]\n", b"[1]\n", b"[2]\n"]
    bills.read_over(lines[:2])
    assert bills.lines() == [b"[2]\n"]
    bills.read_over(bills.lines())
    assert not bills.has_more
    (file,) = (tmp_path / "bills").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    bills.close(remove=True)
    assert not list((tmp_path / "bills").iterdir())


def test_a_file_is_found_once_its_process_is_dead(tmp_path: Path) -> None:
    alive = Journal.create(tmp_path, "c", "w1")
    alive.append(b"[1]")
    assert list(Journal.left(tmp_path, "c")) == []
    alive.close(remove=False)
    assert list(Journal.left(tmp_path, "other")) == []
    ((writer, found),) = Journal.left(tmp_path, "c")
    assert (writer, found.lines()) == ("w1", [b"[1]\n"])
    found.close(remove=True)


def test_a_part_of_a_line_that_a_killed_process_left_is_no_bill(tmp_path: Path) -> None:
    bills = Journal.create(tmp_path, "c", "w")
    bills.append(b"[1]")
    bills.close(remove=False)
    with (tmp_path / "c.w.bills2").open("ab") as file:
        file.write(b"[2")
    ((_, found),) = Journal.left(tmp_path, "c")
    lines = found.lines()
    assert lines == [b"[1]\n"]
    found.read_over(lines)
    assert found.lines() == []
    found.close(remove=True)


def test_a_large_file_is_emptied_when_all_of_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_LARGE_BYTES", 8)
    bills = Journal.create(tmp_path, "c", "w")
    for _ in range(4):
        bills.append(b"[1]")
    bills.read_over(bills.lines())
    assert (tmp_path / "c.w.bills2").stat().st_size == 0
    bills.append(b"[2]")
    assert bills.lines() == [b"[2]\n"]
    bills.close(remove=True)


def test_a_folder_that_cannot_be_written_leaves_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        bills = Journal.create(tmp_path / "file" / "bills", "c", "w")
    assert "set data_dir" in caplog.text
    bills.append(b"[1]")
    assert bills.lines() == [b"[1]\n"]
    bills.close(remove=True)


def test_bills_that_find_no_space_wait_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bills = Journal.create(tmp_path, "c", "w")
    bills.append(b"[1]")
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, place: write(file, data[:2], place))
    bills.append(b"[22]")
    monkeypatch.undo()
    # There is space again, but the one before still waits.
    bills.append(b"[3]")
    assert bills.unwritten == 2
    told = []
    while lines := bills.lines():
        told += lines
        assert bills.has_more
        bills.read_over(lines)
    assert told == [b"[1]\n", b"[22]\n", b"[3]\n"]
    assert not bills.has_more
    bills.append(b"[4]")
    assert (bills.unwritten, bills.lines()) == (0, [b"[4]\n"])
    bills.close(remove=True)


def test_bills_beyond_what_memory_takes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_MAX_WAITING", 1)
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    bills = Journal.create(tmp_path, "c", "w")
    bills.append(b"[1]")
    with pytest.raises(OSError, match="too many bills wait"):
        bills.append(b"[2]")
    bills.close(remove=True)
