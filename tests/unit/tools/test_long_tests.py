from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.long_tests import (
    Row,
    long_files,
    main,
    page_of,
    read_page,
    run_shard,
    shard_of,
    shards,
)

BOUND_S = 600.0
LIMIT_S = 10.0
SECONDS = st.dictionaries(st.text("abc/_", min_size=1, max_size=8), st.floats(0, 1000), max_size=40)
TESTS = """
import pytest

@pytest.mark.long
@pytest.mark.parametrize("number", [1, 2])
def test_that_passes(number):
    pass

@pytest.mark.long
def test_that_fails():
    assert False

@pytest.mark.long
def test_that_is_skipped():
    pytest.skip("a reason")

def test_that_is_short():
    assert False
"""


@given(SECONDS)
def test_every_file_is_in_one_shard_and_no_shard_is_too_long(seconds: dict[str, float]) -> None:
    groups = shards(seconds, BOUND_S)
    assert sorted(file for group in groups for file in group) == sorted(seconds)
    for group in groups:
        assert group
        assert len(group) == 1 or sum(seconds[file] for file in group) <= BOUND_S


@given(SECONDS)
def test_shards_do_not_depend_on_the_order_of_files(seconds: dict[str, float]) -> None:
    assert shards(dict(reversed(seconds.items())), BOUND_S) == shards(seconds, BOUND_S)


def test_no_shard_could_be_added_to_another() -> None:
    groups = shards({f"file {number}": 90.0 for number in range(20)}, BOUND_S)
    assert [len(group) for group in groups] == [6, 6, 6, 2]


def test_commits_reach_every_shard_evenly() -> None:
    found = [shard_of(f"{number * 7919:040x}", 9) for number in range(900)]
    assert {found.count(shard) for shard in range(9)} == {100}
    assert shard_of("f" * 40, 1) == 0


@given(
    st.lists(
        st.builds(
            Row,
            st.from_regex(r"tests/[a-z_]{1,20}\.py", fullmatch=True),
            st.just("2026-11-23"),
            st.just("0a1b2c3d"),
            st.integers(0, 999),
            st.integers(0, 9),
            st.integers(0, 9),
            st.integers(0, 9999).map(lambda tenths: tenths / 10),
        ),
        unique_by=lambda row: row.file,
    )
)
def test_a_page_has_all_of_its_rows(rows: list[Row]) -> None:
    assert read_page(page_of(rows)) == {row.file: row for row in rows}


def test_a_page_has_the_sums() -> None:
    rows = [
        Row("a.py", "2026-11-23", "c", 3, 1, 0, 90.0),
        Row("b.py", "2026-11-23", "c", 4, 0, 2, 150.0),
    ]
    assert "\n7 passed, 1 failed, 2 skipped, 4 minutes.\n" in page_of(rows)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a file of long tests, and one without; its tests need no plugin."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = long: takes minutes\n")
    (tmp_path / "test_long.py").write_text(TESTS)
    (tmp_path / "test_short.py").write_text("def test_that_is_short():\n    pass\n")
    return tmp_path


def test_what_was_run_is_in_the_report(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = root / "report.md"
    gone = Row("test_gone.py", "2026-11-20", "c", 1, 0, 0, 5.0)
    report.write_text(page_of([gone]))
    assert main(["--report", str(report)], root) == 1
    rows = read_page(report.read_text())
    assert rows.keys() == {"test_long.py"}
    row = rows["test_long.py"]
    assert (row.passed, row.failed, row.skipped) == (2, 1, 1)
    told = capfd.readouterr().out
    assert "shard 1 of 1, about 60 s: test_long.py" in told
    assert "test_that_is_short" not in told


def test_a_shard_is_run_for_a_commit(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (root / "test_other.py").write_text(TESTS.replace("assert False", "pass"))
    assert long_files(root) == ["test_long.py", "test_other.py"]
    # A minute each: two shards.
    assert main(["--commit", "1f", "--minutes", "1", "--report", str(root / "page.md")], root) == 0
    told = capfd.readouterr().out
    assert "shard 2 of 2, about 60 s: test_other.py" in told
    assert "3 passed, 1 skipped" in told


def test_commits_choose_among_files_that_have_run(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (root / "test_other.py").write_text(TESTS.replace("assert False", "pass"))
    page = root / "page.md"
    page.write_text(page_of([Row("test_other.py", "2026-11-20", "c", 1, 0, 0, 5.0)]))
    for commit in ("0", "1"):
        words = ["--commit", commit, "--minutes", "1", "--report", str(page), "--list"]
        assert main(words, root) == 0
        assert "shard 1 of 1, about 5 s: test_other.py" in capfd.readouterr().out


def test_a_file_that_is_named_runs_alone_and_other_rows_stay(root: Path) -> None:
    page = root / "page.md"
    other = Row("test_other.py", "2026-11-20", "c", 1, 0, 0, 5.0)
    page.write_text(page_of([other]))
    assert main(["test_long.py", "--report", str(page)], root) == 1
    rows = read_page(page.read_text())
    assert rows["test_other.py"] == other
    assert rows["test_long.py"].passed == 2


@pytest.mark.long
def test_a_file_in_progress_when_the_time_is_over_has_failed(root: Path) -> None:
    hangs = """
import threading
import pytest

@pytest.mark.long
def test_that_passes():
    pass

@pytest.mark.long
def test_without_end():
    open("begun", "w").close()
    threading.Event().wait()
"""
    (root / "test_long.py").write_text(hangs)
    (root / "test_other.py").write_text(TESTS)
    rows = run_shard(["test_long.py", "test_other.py"], LIMIT_S, root)
    assert (root / "begun").exists(), "the machine is too slow for this test's limit"
    assert (rows["test_long.py"].passed, rows["test_long.py"].failed) == (1, 1)
    assert (rows["test_other.py"].passed, rows["test_other.py"].failed) == (0, 1)
