from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from baton.request import Geometry, LoadSnapshot
from baton.store.redis_client import redis_client
from baton.store.registry import WorkerRecord
from baton.version import VERSION
from deploy.cli.operate.status import (
    PairRow,
    RefusedRow,
    SlotRow,
    Status,
    WorkerRow,
    host_line,
    pairs_from_metrics,
    pairs_table,
    refused_table,
    rows_from_metrics,
    rows_from_registry,
    slots_of,
    slots_table,
    supervisor_line,
    table,
)
from deploy.launcher.announcement import announcement
from deploy.processes import cluster_state
from deploy.processes.cluster_state import ClusterState, running_clusters
from deploy.processes.process_identity import ProcessIdentity
from deploy.processes.run_directory import RunDirectory
from deploy.supervisor.reconciler import Phase, SlotState
from deploy.supervisor.status_store import TTL_S, SlotStatus, StatusStore, SupervisionStatus

PAGE = """\
# TYPE baton_sequences gauge
baton_sequences{role="decode",state="running",worker="decode-0"} 3.0
baton_sequences{role="decode",state="waiting",worker="decode-0"} 1.0
# TYPE baton_kv_blocks gauge
baton_kv_blocks{role="decode",state="free",worker="decode-0"} 90.0
baton_kv_blocks{role="decode",state="used",worker="decode-0"} 8.0
baton_kv_blocks{role="decode",state="cached",worker="decode-0"} 2.0
baton_kv_blocks{role="prefill",state="free",worker="prefill-0"} 100.0
# TYPE baton_transfer_pairs gauge
baton_transfer_pairs{peer="decode-0",transport="shm",worker="prefill-0"} 1.0
# TYPE baton_other gauge
baton_other 1.0
"""


def test_workers_are_read_from_a_metrics_page() -> None:
    decode, prefill = rows_from_metrics(PAGE)
    assert decode == WorkerRow("decode-0", "decode", "-", "-", 3, 1, 90, 8, 2)
    assert (prefill.slot, prefill.free_blocks, prefill.running) == ("prefill-0", 100, 0)


def test_tiers_are_shown_where_a_worker_has_some() -> None:
    page = f"""{PAGE}# TYPE baton_kv_tier_blocks gauge
baton_kv_tier_blocks{{role="decode",tier="disk",worker="decode-0"}} 70.0
"""
    rows = rows_from_metrics(page)
    assert [(row.host_blocks, row.disk_blocks) for row in rows] == [(0, 70), (0, 0)]
    drawn = table(Status("127.0.0.1:1", True, "ok", rows))
    assert list(drawn.columns[-1].cells) == ["70", "0"]
    without = table(Status("127.0.0.1:1", True, "ok", rows_from_metrics(PAGE)))
    assert len(without.columns) == len(drawn.columns) - 2


def test_pairs_are_read_from_a_metrics_page() -> None:
    pairs = pairs_from_metrics(PAGE)
    assert pairs == (PairRow("prefill-0", "decode-0", "shm"),)
    drawn = pairs_table(Status("127.0.0.1:1", True, "ok", (), pairs))
    assert [list(column.cells) for column in drawn.columns] == [
        ["prefill-0"],
        ["decode-0"],
        ["shm"],
    ]


def test_workers_are_read_from_the_registry() -> None:
    record = WorkerRecord(
        incarnation="decode-0:1",
        slot="decode-0",
        role="decode",
        address="127.0.0.1:5",
        metrics_address="127.0.0.1:6",
        model="m",
        fingerprint="f",
        geometry=Geometry(16, 1, 1, 1, "float32"),
        context_length=10,
        total_blocks=100,
        max_sequences=4,
        load=LoadSnapshot(running=3, waiting=1, free_blocks=90, used_blocks=8, cached_blocks=2),
    )
    expected = WorkerRow(
        "decode-0", "decode", "ready", "127.0.0.1:5", 3, 1, 90, 8, 2, version=VERSION
    )
    assert rows_from_registry([record]) == (expected,)
    assert "version" not in columns((expected,))
    older = rows_from_registry([record, replace(record, baton_version="", slot="decode-1")])
    assert columns(older)["version"] == [VERSION, "-"]
    assert columns((replace(expected, version="9.9.9"),))["version"] == ["9.9.9"]


def columns(rows: tuple[WorkerRow, ...]) -> dict[str, list[str]]:
    drawn = table(Status("127.0.0.1:1", True, "ok", rows))
    return {str(column.header): [str(cell) for cell in column.cells] for column in drawn.columns}


def test_workers_that_cannot_be_used_are_shown_with_the_reason() -> None:
    row = RefusedRow("decode-1", "9.9.9", "upgrade [this] process")
    drawn = refused_table(Status("127.0.0.1:1", True, "ok", (), refused=(row,)))
    cells = [str(cell) for column in drawn.columns for cell in column.cells]
    assert cells == ["decode-1", "9.9.9", "upgrade [this] process"]


def told(phase: Phase, wait_s: float = 0.0) -> SupervisionStatus:
    state = SlotState(phase, deaths=6, last_error="[no] memory", wait_s=wait_s)
    return SupervisionStatus(7, "127.0.0.1:9", {"decode-0": SlotStatus(state, 8, "here")})


def test_slots_are_shown_as_the_supervisor_tells_of_them() -> None:
    (row,) = slots_of(told(Phase.CRASH_LOOP, 4.0))
    assert row == SlotRow("decode-0", "crash loop for 4 s", 6, "[no] memory")
    assert slots_of(told(Phase.RUNNING))[0].state == "running"
    assert slots_of(None) == ()
    assert "process 7" in supervisor_line(told(Phase.RUNNING))
    assert "not running" in supervisor_line(None)
    drawn = slots_table(Status("127.0.0.1:1", True, "ok", (), slots=(row,)))
    assert [str(cell) for column in drawn.columns for cell in column.cells][-1] == "[no] memory"


async def test_what_the_supervisor_tells_comes_back_from_redis_and_goes(redis_url: str) -> None:
    async with redis_client(redis_url) as client:
        board = StatusStore(client, "board-test")
        assert await board.read() is None
        news = replace(told(Phase.BACKING_OFF, 2.0), autoscaler="prefill has 1 and needs 0.4")
        await board.write(news)
        assert await board.read() == news
        assert 0 < await client.ttl("baton:{board-test}:supervision") <= TTL_S
        await board.clear()
        assert await board.read() is None
        await client.set("baton:{board-test}:supervision", '{"pid": 1}', ex=5)
        assert await board.read() is None, "it has no slots"


async def test_the_status_of_a_supervisor_of_another_version_is_read(redis_url: str) -> None:
    async with redis_client(redis_url) as client:
        board = StatusStore(client, "board-skew")
        await board.write(told(Phase.RUNNING))
        key = "baton:{board-skew}:supervision"
        newer = json.loads(await client.get(key) or "")
        slot = newer["slots"]["decode-0"]
        slot["mood"] = slot["state"]["mood"] = newer["mood"] = "good"
        newer["slots"]["decode-1"] = {**slot, "state": {**slot["state"], "phase": "dreaming"}}
        await client.set(key, json.dumps(newer), ex=5)
        assert await board.read() == told(Phase.RUNNING)


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cluster_state, "parent_directory", lambda: tmp_path)
    return tmp_path


def state(run_directory: Path, launcher: ProcessIdentity) -> ClusterState:
    run_directory.mkdir()
    return ClusterState(
        cluster_id="c",
        run_directory=str(run_directory),
        model="m",
        http="127.0.0.1:1",
        grpc="127.0.0.1:2",
        redis_url="redis://:secret@127.0.0.1:3/0",
        launcher=launcher,
        processes={"router": 1},
    )


def test_a_running_cluster_is_found_and_a_dead_one_is_not(parent: Path) -> None:
    own = ProcessIdentity.own()
    alive = state(parent / "baton-a", own)
    alive.save()
    state(parent / "baton-b", replace(own, start_ticks=1)).save()  # an older process had the pid
    (parent / "baton-c").mkdir()
    (parent / "baton-c" / "cluster.json").write_text("{")
    assert running_clusters() == [alive]
    assert (parent / "baton-a" / "cluster.json").stat().st_mode & 0o777 == 0o600


def test_keeping_the_logs_removes_all_else(run: RunDirectory) -> None:
    run.write_secret("ray-token", "secret")
    run.log("router").write_text("why\n")
    session = run.ray / "session_1"
    (session / "logs").mkdir(parents=True)
    (session / "logs" / "raylet.out").write_text("because\n")
    (session / "sockets").mkdir()
    (run.ray / "session_latest").symlink_to(session)
    assert run.keep_logs()
    assert sorted(entry.name for entry in run.path.iterdir()) == ["logs"]
    assert (run.logs / "router.log").read_text() == "why\n"
    assert (run.logs / "ray" / "raylet.out").read_text() == "because\n"


def test_the_curl_line_survives_a_quote_in_the_models_name() -> None:
    text = announcement(http="h:1", grpc="h:2", model="it's", workers=["a"], logs=Path("/l"))
    assert r"""it'\''s""" in text


def test_the_commit_of_a_hugging_face_model_is_announced() -> None:
    text = announcement(
        http="h:1", grpc="h:2", model="org/m", commit="1f2e", workers=["a"], logs=Path("/l")
    )
    assert "  model    org/m (commit 1f2e)\n" in text
    assert '"model": "org/m"' in text


def test_a_host_that_has_too_few_cores_is_named() -> None:
    assert host_line(3.0, 2) == ""
    assert host_line(25.4, 2) == (
        "load 25 on 2 cores: programs wait for one another, these workers, too"
    )
