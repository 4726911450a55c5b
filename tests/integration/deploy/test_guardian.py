from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from deploy.launcher.guardian import Guardian, sweep
from deploy.processes.child import Child
from deploy.processes.run_directory import ClusterMark, RunDirectory

HERE = Path(__file__).parent
TREE = str(HERE / "stubborn_tree.py")
DEADLINE_S = 60.0


async def count(mark: ClusterMark, wanted: int) -> list[psutil.Process]:
    """The marked processes, once there are ``wanted``."""
    async with asyncio.timeout(DEADLINE_S):
        while len(found := mark.processes()) != wanted:
            await asyncio.sleep(0.05)
    return found


def tree(mark: ClusterMark, depth: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, TREE, str(depth)]
    process = subprocess.Popen(command, env=mark.environment(), stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.stdout.close()
    return process


async def test_sigkill_of_the_launcher_ends_a_tree_that_ignores_sigterm(
    mark: ClusterMark, run: RunDirectory
) -> None:
    run.write_secret("ray-token", "secret")
    run.log("launcher").write_text("begun\n")
    launcher = await asyncio.create_subprocess_exec(
        sys.executable, HERE / "small_launcher.py", mark.cluster_id, run.path
    )
    await count(mark, 4)  # the guardian, and a tree of three
    launcher.send_signal(signal.SIGKILL)
    await launcher.wait()
    await count(mark, 0)
    assert [entry.name for entry in run.path.iterdir()] == ["logs"]


def test_a_sweep_kills_processes_that_ignore_sigterm_and_spares_the_named_ones(
    mark: ClusterMark,
) -> None:
    spared, ended = tree(mark, 0), tree(mark, 1)
    assert len(mark.processes()) == 3
    assert sweep(mark, {spared.pid}, grace_s=0.2) == []
    assert ended.wait(DEADLINE_S) == -signal.SIGKILL
    assert [process.pid for process in mark.processes()] == [spared.pid]
    assert sweep(mark, grace_s=0.0) == []
    assert spared.wait(DEADLINE_S) == -signal.SIGKILL


def test_a_sweep_lets_a_willing_process_end_by_itself(mark: ClusterMark) -> None:
    process = subprocess.Popen(["sleep", "60"], env=mark.environment())
    assert sweep(mark, grace_s=DEADLINE_S) == []
    assert process.wait(DEADLINE_S) == -signal.SIGTERM


def test_a_sweep_ends_a_stopped_process(mark: ClusterMark) -> None:
    process = subprocess.Popen(["sleep", "60"], env=mark.environment())
    process.send_signal(signal.SIGSTOP)
    assert sweep(mark, grace_s=0.1) == []
    assert process.wait(DEADLINE_S) < 0


def test_the_cluster_id_alone_is_no_mark(mark: ClusterMark) -> None:
    """It is a setting too, and may be exported in the operator's shell."""
    process = subprocess.Popen(
        ["sleep", "60"], env={**os.environ, "BATON_CLUSTER_ID": mark.cluster_id}
    )
    try:
        assert mark.processes() == []
        assert sweep(mark, grace_s=0.0) == []
        assert process.poll() is None
    finally:
        process.kill()
        process.wait(DEADLINE_S)


async def test_a_released_guardian_touches_nothing(mark: ClusterMark, run: RunDirectory) -> None:
    guardian = Guardian(mark, run)
    await guardian.start()
    bystander = await Child.spawn("sleep", ["sleep", "60"], mark, run.log("sleep"))
    async with asyncio.timeout(DEADLINE_S):
        await guardian.release()
    assert bystander.running
    assert run.path.exists()
    await bystander.end(DEADLINE_S)


async def test_a_guardian_ignores_sigterm_and_its_death_is_noticed(
    mark: ClusterMark, run: RunDirectory
) -> None:
    guardian = Guardian(mark, run)
    await guardian.start()
    async with asyncio.timeout(DEADLINE_S):
        while not _ignores_sigterm(guardian.pid):
            await asyncio.sleep(0.02)
        os.kill(guardian.pid, signal.SIGTERM)
        os.kill(guardian.pid, signal.SIGKILL)
        assert await guardian.wait() == "SIGKILL"
        await guardian.start()
        # A process that has just begun has no environment yet.
        while [process.pid for process in mark.processes()] != [guardian.pid]:
            await asyncio.sleep(0.02)
    await guardian.release()


def _ignores_sigterm(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    ignored = next(line.split()[1] for line in lines if line.startswith("SigIgn:"))
    return bool(int(ignored, 16) & (1 << (signal.SIGTERM - 1)))
