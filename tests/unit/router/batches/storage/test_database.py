"""The state of files and batches, of both kinds, and what several owners make of one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.errors import ConfigError, InvalidRequest, NotFound, Overloaded, RequestTooLarge
from router.batches.schedule.plan import BatchWork
from router.batches.schedule.throughput import Progress
from router.batches.storage.batch import Batch, BatchStatus, Fault, LineResult, StoredFile
from router.batches.storage.contents import FolderContents
from router.batches.storage.database import Database, Free, LeaseLost, NoSpace, StatusChanged
from router.batches.storage.quota import Quota
from router.batches.storage.redis_database import RedisDatabase
from router.batches.storage.sqlite_database import SqliteDatabase

QUOTA = Quota(1000, 2000)
FREE = Free(("", "me"))


def file(name: str = "file-1", tenant: str = "acme", size: int = 10) -> StoredFile:
    return StoredFile(name, tenant, "in.jsonl", "batch", size, 100, 10_000)


def batch(name: str = "batch_1", tenant: str = "acme") -> Batch:
    return Batch(
        name, tenant, "key", "tiny", "/v1/completions", "file-1", "24h", 100, 200, {"a": "b"}
    )


@pytest.fixture(params=["sqlite", "redis"])
def make(request: pytest.FixtureRequest) -> Callable[[Path], Database]:
    """Makes a database in a folder: a file there, or keys in Redis that are named like it."""
    if request.param == "sqlite":
        return lambda folder: SqliteDatabase(folder / "table")
    url: str = request.getfixturevalue("redis_url")

    def in_redis(folder: Path) -> Database:
        contents = FolderContents(folder)
        contents.prepare()
        return RedisDatabase(url, str(folder), contents)

    return in_redis


@pytest.fixture
def opened(make: Callable[[Path], Database], tmp_path: Path) -> Iterator[Callable[[], Database]]:
    made: list[Database] = []

    def open_one() -> Database:
        made.append(make(tmp_path))
        return made[-1]

    yield open_one
    for database in made:
        database.close()


@pytest.fixture
def database(opened: Callable[[], Database]) -> Database:
    database = opened()
    database.add_file(file(), "upload", QUOTA)
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


def test_only_its_owner_may_read_the_table(tmp_path: Path) -> None:
    SqliteDatabase(tmp_path / "table").close()
    assert (tmp_path / "table").stat().st_mode & 0o077 == 0


def test_pages(database: Database) -> None:
    for number in range(2, 6):
        database.add_file(file(f"file-{number}"), "upload", QUOTA)
        database.add_file(file(f"other-{number}", "other"), "upload", QUOTA)

    def names(after: str, limit: int, *, ascending: bool) -> list[str]:
        found = database.files("acme", "batch", after, limit, ascending=ascending)
        return [one.id for one in found]

    assert names("", 2, ascending=False) == ["file-5", "file-4"]
    assert names("file-4", 10, ascending=False) == ["file-3", "file-2", "file-1"]
    assert names("file-4", 10, ascending=True) == ["file-5"]
    assert names("other-3", 10, ascending=True) == []
    assert database.files("acme", "batch_output", "", 10, ascending=True) == []


def test_a_tenant_has_a_quota_of_bytes_and_so_have_all_together(database: Database) -> None:
    def reserve(tenant: str, size: int, ahead: int = 0, upload: str = "u") -> int:
        return database.reserve(f"{tenant}-{upload}", tenant, size, ahead, QUOTA)

    assert reserve("acme", 10, 5000) == 10 + 980 // 4
    assert reserve("acme", 10, 20) == 30
    assert reserve("acme", 990, 20) == 990
    with pytest.raises(RequestTooLarge, match="0 bytes more"):
        reserve("acme", 1, upload="v")
    with pytest.raises(RequestTooLarge, match="990 bytes more"):
        reserve("acme", 991)
    assert reserve("acme", 100) == 100
    assert reserve("acme", 890, upload="v") == 890
    assert reserve("other", 1000) == 1000
    # What is left is the total's.
    assert set(database.uploads()) == {"acme-u", "acme-v", "other-u"}
    with pytest.raises(RequestTooLarge, match="the storage quota has room"):
        reserve("third", 1)
    database.release_uploads(["acme-v", "other-u"])
    assert reserve("third", 1) == 1
    database.add_file(file("file-2", size=100), "acme-u", QUOTA)
    assert set(database.uploads()) == {"third-u"}
    assert reserve("acme", 890) == 890


def test_a_tenant_has_a_quota_of_files(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.batches.storage.quota.MAX_FILES_OF_TENANT", 3)
    database.reserve("u", "acme", 1, 0, QUOTA)
    database.reserve("v", "acme", 1, 0, QUOTA)
    database.reserve("v", "acme", 2, 0, QUOTA)
    with pytest.raises(RequestTooLarge, match="3 files"):
        database.reserve("w", "acme", 1, 0, QUOTA)
    database.reserve("w", "other", 1, 0, QUOTA)


def test_results_count_against_the_quota(database: Database) -> None:
    database.add_batch(batch())
    mine = database.claim(batch(), "me")
    assert mine is not None
    database.add_results(mine, [LineResult(1, True, "x" * 899)], QUOTA)
    assert database.batch("batch_1").result_bytes == 900
    for _ in range(2):
        with pytest.raises(NoSpace):
            database.add_results(mine, [LineResult(2, True, "x" * 90)], QUOTA)
    database.add_results(mine, [LineResult(3, True, "x" * 89)], QUOTA)
    # A line that has a result takes no room again.
    database.add_results(mine, [LineResult(1, True, "x" * 899)], QUOTA)
    assert database.done_lines("batch_1") == {1, 3}
    with pytest.raises(RequestTooLarge):
        database.reserve("u", "acme", 1, 0, QUOTA)
    output = replace(file("file-2", size=990), purpose="batch_output")
    ended = database.finish(mine, [output], status=BatchStatus.COMPLETED)
    assert ended == database.batch("batch_1")
    assert ended.result_bytes == 0
    database.delete_file("file-2", "acme")
    assert database.reserve("u", "acme", 990, 0, QUOTA) == 990


def test_batches_of_a_tenant_are_bounded(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MAX_UNFINISHED_OF_TENANT", "MAX_ENDED_OF_TENANT"):
        monkeypatch.setattr(f"router.batches.storage.database.{name}", 2)
    database.add_file(file("file-2", "other"), "upload", QUOTA)
    for number in range(4):
        made = batch(f"batch_{number}")
        database.add_batch(made)
        owned = database.claim(made, "me")
        assert owned is not None
        database.finish(owned, [], status=BatchStatus.CANCELLED)
    kept = [one.id for one in database.batches("acme", "", 10)]
    assert kept == ["batch_3", "batch_2"]
    for number in range(4, 6):
        database.add_batch(batch(f"batch_{number}"))
    with pytest.raises(Overloaded, match="2 unfinished batches"):
        database.add_batch(batch("batch_6"))
    database.add_batch(replace(batch("batch_7", "other"), input_file_id="file-2"))


def test_a_process_reads_what_it_may_run_and_no_more(database: Database) -> None:
    for tenant in ("other", "third"):
        database.add_file(file(f"file-{tenant}", tenant), "upload", QUOTA)
    for number in range(1, 5):
        database.add_batch(batch(f"acme_{number}"))
    for tenant in ("other", "third"):
        made = replace(batch(f"{tenant}_1", tenant), input_file_id=f"file-{tenant}")
        database.add_batch(made)
    database.claim(database.batch("acme_1"), "dead")
    database.claim(database.batch("acme_2"), "alive")
    database.beat("alive")
    assert database.beats() == {"dead": 0, "alive": 1}

    def names(free: Free, limit: int = 8, of_tenant: int = 2) -> list[str]:
        found = database.to_be_run(free, "tiny", of_tenant=of_tenant, limit=limit)
        return [one.id for one in found]

    assert names(FREE) == ["acme_3", "other_1", "third_1", "acme_4"]
    assert names(FREE, limit=2) == ["acme_3", "other_1"]
    assert names(FREE, of_tenant=1) == ["acme_3", "other_1", "third_1"]
    assert names(Free(("", "me", "dead"), ["acme_3"]), of_tenant=1)[0] == "acme_1"
    assert database.to_be_run(FREE, "large", of_tenant=2, limit=8) == []
    assert database.to_be_ended(FREE, 199, 8) == []
    database.cancel("acme_4", "acme", 1)
    assert [one.id for one in database.to_be_ended(FREE, 199, 8)] == ["acme_4"]
    assert [one.id for one in database.to_be_ended(FREE, 200, 2)] == ["acme_3", "acme_4"]
    assert [one.id for one in database.of_ids(("third_1", "acme_2", "none"))] == [
        "acme_2",
        "third_1",
    ]


def test_batches_whose_windows_end_first_come_first(database: Database) -> None:
    for number, expires_at in enumerate((900, 500, 700)):
        database.add_batch(replace(batch(f"batch_{number}"), expires_at=expires_at))
    found = database.to_be_run(FREE, "tiny", of_tenant=2, limit=8)
    assert [one.id for one in found] == ["batch_1", "batch_2"]


def test_what_is_left_and_how_fast_it_went_is_known(database: Database) -> None:
    database.add_batch(batch())
    assert database.works("tiny") == []
    assert database.progress("tiny") == Progress()
    mine = database.claim(batch(), "me")
    assert mine is not None
    mine = database.move(mine, status=BatchStatus.IN_PROGRESS, in_progress_at=1, total=9)
    results = [LineResult(1, True, "{}", 3, 1, 2), LineResult(2, False, "{}")]
    database.add_results(mine, results, QUOTA)
    # A result that comes again counts once.
    database.add_results(mine, results, QUOTA)
    assert database.works("tiny") == [BatchWork(mine.id, "acme", mine.expires_at, 9, 2, 5)]
    assert database.works("large") == []
    # The line that was refused took no time.
    assert database.progress("tiny") == Progress(1, 5, None)
    database.learn_speed("tiny", 12.5)
    database.add_results(mine, [LineResult(3, True, "{}", 1, 0, 1)], QUOTA)
    assert database.progress("tiny") == Progress(2, 7, 12.5)
    assert database.progress("large") == Progress()


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
    database.add_file(replace(file("file-2"), purpose="batch_output"), "upload", QUOTA)
    with pytest.raises(InvalidRequest):
        database.add_batch(replace(batch(), input_file_id="file-2"))


def test_one_of_two_gets_a_batch(database: Database, opened: Callable[[], Database]) -> None:
    database.add_batch(batch())
    (seen,) = opened().to_be_run(FREE, "tiny", of_tenant=1, limit=1)
    mine = database.claim(seen, "me")
    assert mine is not None
    assert opened().claim(seen, "you") is None
    assert database.batch("batch_1").owner == "me"


def test_a_former_owner_writes_nothing(database: Database) -> None:
    database.add_batch(batch())
    mine = database.claim(batch(), "me")
    assert mine is not None
    database.beat("me")
    yours = database.claim(database.batch("batch_1"), "you")
    assert yours is not None
    result = LineResult(1, True, "{}")
    for act in (
        lambda: database.add_results(mine, [result], QUOTA),
        lambda: database.move(mine, total=5),
        lambda: database.finish(mine, [file("file-9")], status=BatchStatus.COMPLETED),
    ):
        with pytest.raises(LeaseLost):
            act()
    assert database.batch("batch_1") == yours
    assert database.content_ids() - {"batch_1"} == {"file-1"}
    database.add_results(yours, [result], QUOTA)
    # The same process again, later, is another owner too.
    database.release("you")
    again = database.claim(database.batch("batch_1"), "you")
    assert again is not None
    with pytest.raises(LeaseLost):
        database.add_results(yours, [result], QUOTA)


def test_a_cancelled_batch_does_not_move_on(database: Database) -> None:
    database.add_batch(batch())
    mine = database.claim(batch(), "me")
    assert mine is not None
    mine = database.move(mine, status=BatchStatus.IN_PROGRESS, in_progress_at=1, total=2)
    database.cancel("batch_1", "acme", 7)
    with pytest.raises(StatusChanged):
        database.move(mine, status=BatchStatus.FINALIZING)
    # What has ended meanwhile still counts.
    database.add_results(mine, [LineResult(1, True, "{}")], QUOTA)
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
    assert database.to_be_run(FREE, "tiny", of_tenant=1, limit=1) == []


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
def test_each_line_has_one_result_with_several_writers(
    make: Callable[[Path], Database],
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, int, int, bool]],
) -> None:
    """Three processes claim, beat and write as they like: counts are those of distinct lines."""
    with closing(make(tmp_path_factory.mktemp("table"))) as database:
        database.add_file(file(), "upload", QUOTA)
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
                    database.add_results(held[who], [LineResult(number, ok, record)], QUOTA)
                    expected.setdefault(number, ok)
                else:
                    with pytest.raises(LeaseLost):
                        database.add_results(held[who], [LineResult(number, ok, record)], QUOTA)
        now = database.batch("batch_1")
        assert now.completed == sum(expected.values())
        assert now.failed == len(expected) - now.completed
        assert database.done_lines("batch_1") == set(expected)
        kept = [int(r.split(":")[1]) for r in database.records("batch_1", ok=True)]
        assert kept == sorted(number for number, ok in expected.items() if ok)


def test_tables_of_another_version_are_refused(tmp_path: Path) -> None:
    with closing(SqliteDatabase(tmp_path / "table")) as database:
        database._connection.execute("PRAGMA user_version = 99")
    with pytest.raises(ConfigError):
        SqliteDatabase(tmp_path / "table")
