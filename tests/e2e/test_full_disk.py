"""A cluster whose run directory and ``data_dir`` have no space left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deploy.processes.run_directory import RunDirectory
from loadtest.common.peer_servers import SERVED_NAME
from tests.support.e2e.cluster import BATON, END_S, START_S, UpProcess, wait_until_gone
from tests.support.e2e.timed_up import PROGRAM
from tests.support.small_disk import SmallDisk, small_disk_or_skip

pytestmark = pytest.mark.timeout(400)

LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n'


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallDisk]:
    with small_disk_or_skip(64) as made:
        monkeypatch.setenv("TMPDIR", str(made.path))
        yield made


def answers(up: UpProcess) -> bool:
    body = {"model": SERVED_NAME, "prompt": "a" * 50, "max_tokens": 4, "ignore_eos": True}
    response = httpx.post(f"{up.http}/v1/completions", json=body, timeout=START_S)
    return response.status_code == httpx.codes.OK


def upload(up: UpProcess) -> httpx.Response:
    files = {"file": ("in.jsonl", LINE)}
    return httpx.post(
        f"{up.http}/v1/files", data={"purpose": "batch"}, files=files, timeout=START_S
    )


def test_full_disks_stop_no_worker_and_heal_by_themselves(disk: SmallDisk, tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text(f'data_dir = "{disk.path}/data"\n')
    arguments = ("--prefill", "1", "--decode", "1", "--config", str(file))
    with UpProcess(*arguments, program=PROGRAM) as up:
        up.wait_ready()
        run = Path(up.state.run_directory)
        assert run.is_relative_to(disk.path)
        deadline = time.monotonic() + START_S
        while "supervisor" not in up.state.processes:
            assert time.monotonic() < deadline, up.text
            time.sleep(0.05)
        assert upload(up).status_code == httpx.codes.OK
        disk.fill()
        assert disk.free_bytes == 0
        full = upload(up)
        assert (full.status_code, full.json()["error"]["code"]) == (507, "storage_full")
        os.kill(up.state.processes["decode-0"], signal.SIGKILL)
        up.wait_for("decode-0 is back")
        assert disk.free_bytes == 0
        assert answers(up)
        # Commands still find the cluster.
        status = subprocess.run(
            [BATON, "status"], check=True, capture_output=True, text=True, timeout=START_S
        )
        assert up.cluster_id in status.stdout, status.stderr
        disk.free()
        assert upload(up).status_code == httpx.codes.OK
        cluster_id = up.cluster_id
        up.kill()
        up.wait()
        assert wait_until_gone(cluster_id) == []
    deadline = time.monotonic() + END_S
    while RunDirectory(run).ray.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    shown = subprocess.run(
        [BATON, "logs"], check=True, capture_output=True, text=True, timeout=START_S
    ).stdout
    assert f"==> {run}/logs/supervisor.log <==" in shown
    assert "are missing here" in shown


def test_a_full_temporary_folder_stops_the_start(disk: SmallDisk) -> None:
    disk.fill()
    with UpProcess() as up:
        said = up.wait_for(f"error: no run directory can be made in {disk.path} (0 MiB are free")
        assert "TMPDIR" in said
        assert up.wait() == 1
    assert [entry.name for entry in disk.path.iterdir()] == ["ballast"]
