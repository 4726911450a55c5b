"""The table of files and batches, and what several owners make of one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.errors import ConfigError, InvalidRequest, NotFound, RequestTooLarge
from router.batches.batch import Batch, BatchStatus, LineResult, StoredFile
from router.batches.database import Database, LeaseLost, StatusChanged
from router.batches.line import Fault

ROOM = 1000


def file(name: str = "file-1", tenant: str = "acme", size: int = 10) -> StoredFile:
    return StoredFile(name, tenant, "in.jsonl", "batch", size, 100)


def batch(name: str = "batch_1", tenant: str = "acme") -> Batch:
    return Batch(
        name, tenant, "key", "tiny", "/v1/completions", "file-1", "24h", 100, 200, {"a": "b"}
    )


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[], Database]]:
    made: list[Database] = []

    def open_one() -> Database:
        made.append(Database(tmp_path / "table"))
        return made[-1]

    yield open_one
    for database in made:
        database.close()


@pytest.fixture
def database(opened: Callable[[], Database]) -> Database:
    database = opened()
    database.add_file(file(), ROOM)
    return database


def test_what_was_added_is_found_by_its_tenant_alone(database: Database) -> None:
    database.add_batch(batch())
    assert database.file("file-1", "acme") == file()
    assert database.batch("batch_1", "acme") == batch()
    for look in (database.file, database.batch):
        with pytest.raises(NotFound):
            look("file-1" if look == database.file else "batch_1", "other")
    assert database.files("other", "", "", 10, ascending=True) == []
    assert database.batches("other", "", 10) == []
    with pytest.raises(NotFound):
        database.add_batch(batch("batch_2", "other"))
    with pytest.raises(NotFound):
        database.cancel("batch_1", "other", 0)
    with pytest.raises(NotFound):
        database.delete_file("file-1", "other")


def test_only_its_owner_may_read_the_table(database: Database, tmp_path: Path) -> None:
    assert (tmp_path / "table").stat().st_mode & 0o077 == 0


def test_pages(database: Database) -> None:
    for number in range(2, 6):
        database.add_file(file(f"file-{number}"), ROOM)
        database.add_file(file(f"other-{number}", "other"), ROOM)

    def names(after: str, limit: int, *, ascending: bool) -> list[str]:
        found = database.files("acme", "batch", after, limit, ascending=ascending)
        return [one.id for one in found]

    assert names("", 2, ascending=False) == ["file-5", "file-4"]
    assert names("file-4", 10, ascending=False) == ["file-3", "file-2", "file-1"]
    assert names("file-4", 10, ascending=True) == ["file-5"]
    assert names("other-3", 10, ascending=True) == []
    assert database.files("acme", "batch_output", "", 10, ascending=True) == []


def test_all_files_together_are_bounded(database: Database) -> None:
    database.add_file(file("file-2", size=ROOM - 10), ROOM)
    with pytest.raises(RequestTooLarge):
        database.add_file(file("file-3", size=1), ROOM)
    database.delete_file("file-2", "acme")
    database.add_file(file("file-3", size=1), ROOM)


def test_a_file_that_is_needed_stays(database: Database) -> None:
    database.add_batch(batch())
    with pytest.raises(InvalidRequest):
        database.delete_file("file-1", "acme")
    owned = database.claim(batch(), "me")
    assert owned is not None
    database.finish(owned, [], status=BatchStatus.CANCELLED, cancelled_at=5)
    database.delete_file("file-1", "acme")
    with pytest.raises(NotFound):
        database.file("file-1", "acme")


def test_results_are_no_input(database: Database) -> None:
    database.add_file(replace(file("file-2"), purpose="batch_output"), ROOM)
    with pytest.raises(InvalidRequest):
        database.add_batch(replace(batch(), input_file_id="file-2"))


def test_one_of_two_gets_a_batch(database: Database, opened: Callable[[], Database]) -> None:
    database.add_batch(batch())
    seen = opened().unfinished()[0]
    mine = database.claim(seen, "me")
    assert mine is not None
    assert opened().claim(seen, "you") is None
    assert database.unfinished()[0].owner == "me"


def test_a_former_owner_writes_nothing(database: Database) -> None:
    database.add_batch(batch())
    mine = database.claim(batch(), "me")
    assert mine is not None
    database.beat("me")
    yours = database.claim(database.batch("batch_1"), "you")
    assert yours is not None
    result = LineResult(1, True, "{}")
    for act in (
        lambda: database.add_results(mine, [result]),
        lambda: database.move(mine, total=5),
        lambda: database.finish(mine, [file("file-9")], status=BatchStatus.COMPLETED),
    ):
        with pytest.raises(LeaseLost):
            act()
    assert database.batch("batch_1") == yours
    assert database.file_ids() == {"file-1"}
    database.add_results(yours, [result])
    # The same process again, later, is another owner too.
    database.release("you")
    again = database.claim(database.batch("batch_1"), "you")
    assert again is not None
    with pytest.raises(LeaseLost):
        database.add_results(yours, [result])


def test_a_cancelled_batch_does_not_move_on(database: Database) -> None:
    database.add_batch(batch())
    mine = database.claim(batch(), "me")
    assert mine is not None
    mine = database.move(mine, status=BatchStatus.IN_PROGRESS, in_progress_at=1, total=2)
    database.cancel("batch_1", "acme", 7)
    with pytest.raises(StatusChanged):
        database.move(mine, status=BatchStatus.FINALIZING)
    # What has ended meanwhile still counts.
    database.add_results(mine, [LineResult(1, True, "{}")])
    assert database.cancel("batch_1", "acme", 9).cancelling_at == 7
    now = database.batch("batch_1")
    assert (now.status, now.completed) == (BatchStatus.CANCELLING, 1)
    database.finish(now, [], status=BatchStatus.CANCELLED, cancelled_at=8)
    with pytest.raises(InvalidRequest):
        database.cancel("batch_1", "acme", 9)


def test_faults_are_kept(database: Database) -> None:
    database.add_batch(batch())
    mine = database.claim(batch(), "me")
    assert mine is not None
    faults = (Fault("bad", "very", 3, "url"), Fault("worse", "text"))
    database.move(mine, status=BatchStatus.FAILED, faults=faults)
    assert database.batch("batch_1").faults == faults
    assert database.unfinished() == []


@settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.integers(0, 2), st.integers(1, 4), st.booleans()),
            st.tuples(st.just("claim"), st.integers(0, 2), st.just(0), st.just(True)),
            st.tuples(st.just("beat"), st.integers(0, 2), st.just(0), st.just(True)),
        ),
        max_size=30,
    )
)
def test_each_line_has_one_result_whoever_writes(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int, bool]]
) -> None:
    """Three processes claim, beat and write as they like: counts are those of distinct lines."""
    path = tmp_path_factory.mktemp("table") / "table"
    with closing(Database(path)) as database:
        database.add_file(file(), ROOM)
        database.add_batch(batch())
        held: dict[int, Batch] = {}
        expected: dict[int, bool] = {}
        owner = -1
        for act, who, number, ok in steps:
            if act == "claim":
                claimed = database.claim(database.batch("batch_1"), str(who))
                assert claimed is not None
                held[who], owner = claimed, who
            elif act == "beat":
                database.beat(str(who))
            elif who in held:
                record = f"{who}:{number}"
                if who == owner:
                    database.add_results(held[who], [LineResult(number, ok, record)])
                    expected.setdefault(number, ok)
                else:
                    with pytest.raises(LeaseLost):
                        database.add_results(held[who], [LineResult(number, ok, record)])
        now = database.batch("batch_1")
        assert now.completed == sum(expected.values())
        assert now.failed == len(expected) - now.completed
        assert database.done_lines("batch_1") == set(expected)
        kept = [int(r.split(":")[1]) for r in database.records("batch_1", ok=True)]
        assert kept == sorted(number for number, ok in expected.items() if ok)


def test_tables_of_another_version_are_refused(opened: Callable[[], Database]) -> None:
    database = opened()
    database._connection.execute("PRAGMA user_version = 99")
    with pytest.raises(ConfigError):
        opened()
