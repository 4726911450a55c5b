"""Evidence of real processes that end in a run directory of the test's."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from deploy.processes.run_directory import RunDirectory
from deploy.supervisor import death_evidence
from deploy.supervisor.death import DeathCause, explain
from deploy.supervisor.death_evidence import DeathEvidence, error_in
from deploy.workers.actor_end import ActorEnd, EndKind

SLOT = "decode-0"
SILENT = ActorEnd(EndKind.PROCESS, "its process has ended without a message to Ray")
WORKER = """
import sys
from pathlib import Path
from deploy.workers.node import NodeWorkers
NodeWorkers(Path(sys.argv[1])).register("decode-0", 0.0)
print("registered", flush=True)
input()
"""


class KernelKills:
    """What the kernel's counter says."""

    def __init__(self) -> None:
        self.left = 0

    def look(self, now: float) -> None:
        """Nothing changes."""

    def take(self, now: float) -> bool:
        self.left -= 1
        return self.left >= 0


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> KernelKills:
    kills = KernelKills()
    monkeypatch.setattr(death_evidence, "OomKills", lambda: kills)
    return kills


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    run.log(SLOT).parent.mkdir(parents=True, exist_ok=True)
    return run


def begun(run: RunDirectory) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WORKER, str(run.workers)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"registered\n"
    return process


async def test_a_worker_that_does_not_serve_yet_is_found_and_its_kill_explained(
    run: RunDirectory, kills: KernelKills, monkeypatch: pytest.MonkeyPatch
) -> None:
    evidence = DeathEvidence(run, one_machine=False)
    told = {}
    for kernel in (False, True):
        assert evidence.find(SLOT) is None
        process = begun(run)
        watched = evidence.find(SLOT)
        assert watched is not None
        assert watched.process.pid == process.pid
        process.kill()
        process.communicate(timeout=60)
        # An older kernel does not tell the signal.
        monkeypatch.setattr(watched, "exit_code", known_as(-signal.SIGKILL))
        kills.left = int(kernel)
        told[kernel] = explain(await evidence.of(SLOT, SILENT, watched))
        watched.close()
    assert told[False].text == "killed by SIGKILL"
    assert told[True].text == "killed by the kernel: out of memory"


def known_as(code: int):  # type: ignore[no-untyped-def]
    async def exit_code() -> int:
        return code

    return exit_code


async def test_a_full_run_directory_is_named(
    run: RunDirectory, kills: KernelKills, monkeypatch: pytest.MonkeyPatch
) -> None:
    evidence = DeathEvidence(run, one_machine=True)
    run.log(SLOT).write_text("OSError: [Errno 28] No space left on device\n")
    known = await evidence.of(SLOT, SILENT, None)
    assert (known.full, explain(known).cause) == ("", DeathCause.ERROR)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    death = explain(await evidence.of(SLOT, SILENT, None))
    assert death.cause is DeathCause.NO_SPACE
    assert death.text.startswith(f"no space left in the run directory {run.path}: ")


async def test_of_a_worker_on_another_node_only_rays_word_is_known(
    run: RunDirectory, kills: KernelKills
) -> None:
    run.log(SLOT).write_text("OSError: of another worker\n")
    kills.left = 1
    known = await DeathEvidence(run, one_machine=False).of(SLOT, SILENT, None)
    assert explain(known).text == SILENT.text
    assert kills.left == 1


async def test_the_last_lines_of_standard_error_are_bounded(
    run: RunDirectory, kills: KernelKills, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    process = begun(run)
    evidence = DeathEvidence(run, one_machine=True)
    watched = evidence.find(SLOT)
    process.communicate(b"\n", timeout=60)
    logs = tmp_path / "session" / "logs"
    logs.mkdir(parents=True)
    lines = [
        ":actor_name:WorkerActor",
        *("one", "two", "x" * 9000, "terminate called"),
        "*** SIGABRT received at time=1795973978 on cpu 1 ***",
        "PC: @     0x7f60336a8eec  (unknown)  (unknown)",
        "    @     0x7f603365a050  129697936  (unknown)",
        "[2026-11-29 17:39:38,681 E 6963 6963] logging.cc:474: *** SIGABRT received",
    ]
    (logs / f"worker-ab-01-{process.pid}.err").write_text("\n".join(lines))
    monkeypatch.setattr(death_evidence, "session_folder", lambda: logs.parent)
    known = await evidence.of(SLOT, SILENT, watched)
    assert known.stderr == f"two | {'x' * 200} | terminate called"
    # Its own file is complete, where Ray's may lack the end.
    run.stderr(SLOT).write_text("\n".join([*lines[1:4], "free(): invalid pointer", *lines[5:]]))
    own = await evidence.of(SLOT, SILENT, watched)
    assert own.stderr == f"two | {'x' * 200} | free(): invalid pointer"
    assert (await evidence.of(SLOT, SILENT, watched)).stderr == known.stderr, "it is read once"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("", ""),
        ("2026-11-28 20:00:00,000 ERROR worker.session: no memory", "no memory"),
        ("2026-11-28 20:00:00,000 INFO worker.session: it serves", ""),
        (
            "torch.OutOfMemoryError: CUDA out of memory",
            "torch.OutOfMemoryError: CUDA out of memory",
        ),
        ('{"level": "ERROR", "message": "no memory"}', "no memory"),
        ('{"level": "INFO", "message": "it serves"}', ""),
        ('{"level": "ERR', '{"level": "ERR'),
    ],
)
def test_the_error_in_the_last_line_of_a_log(line: str, shown: str) -> None:
    assert error_in(line) == shown
