"""What a figure was measured on."""

from __future__ import annotations

from pathlib import Path

from planning.common import report
from planning.common.report import Machine, this_machine


def test_this_machine_knows_itself() -> None:
    found = this_machine()
    assert found.cores > 0
    assert found.memory_bytes > 0
    assert all((found.cpu, found.kernel, found.commit, found.date))


def test_the_line_says_everything() -> None:
    line = Machine("a CPU", 2, 24 << 30, "Linux 6.1", "abc", "2026-11-20").line()
    assert line == "a CPU, 2 cores, 24 GiB, Linux 6.1; Baton abc; 2026-11-20"


def test_the_first_core_names_the_processor(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(
        "processor\t: 0\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: EPYC\n\n"
        "processor\t: 1\nmodel name\t: other\n"
    )
    assert report._cpu(path) == "EPYC (family 26, model 2)"
    path.write_text("processor\t: 0\n")
    assert report._cpu(path)
    assert report._cpu(tmp_path / "absent")


def test_without_a_repository_the_version_is_reported(tmp_path: Path) -> None:
    assert report._commit(tmp_path)
