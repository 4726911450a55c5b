from __future__ import annotations

import signal

import pytest

from deploy.supervisor.death import Death, DeathCause, Evidence, explain
from deploy.workers.actor_end import ActorEnd, EndKind

SILENT = ActorEnd(EndKind.PROCESS, "its process has ended without a message to Ray")
MONITOR = ActorEnd(EndKind.MEMORY_MONITOR, "killed by Ray's memory monitor")
REPORTED = ActorEnd(EndKind.REPORTED, "worker decode-0: no such model")
LOST = ActorEnd(EndKind.NODE_LOST, "its node is lost: no heartbeat")


@pytest.mark.parametrize(
    ("known", "cause", "text"),
    [
        (
            Evidence(SILENT, exit_code=-signal.SIGKILL, oom_killed=True, words="an old error"),
            DeathCause.OUT_OF_MEMORY,
            "killed by the kernel: out of memory",
        ),
        (
            Evidence(SILENT, exit_code=-signal.SIGKILL, words="an old error", stderr="a warning"),
            DeathCause.SIGKILL,
            "killed by SIGKILL",
        ),
        (
            Evidence(SILENT, exit_code=-signal.SIGSEGV, words="Extension modules", stderr="a | b"),
            DeathCause.CRASH,
            "killed by SIGSEGV; its standard error ends with: a | b",
        ),
        (
            Evidence(SILENT, exit_code=-signal.SIGRTMAX + 1),
            DeathCause.CRASH,
            "killed by signal 63",
        ),
        (
            Evidence(SILENT, exit_code=1, words="worker decode-0 ends: its device is lost"),
            DeathCause.ERROR,
            "worker decode-0 ends: its device is lost",
        ),
        (
            Evidence(SILENT, exit_code=7, stderr="memory allocation of 9 bytes failed"),
            DeathCause.ERROR,
            f"it ended with exit code 7: {SILENT.text}; its standard error ends with: "
            "memory allocation of 9 bytes failed",
        ),
        # An older kernel does not tell how another process has ended.
        (Evidence(SILENT), DeathCause.UNKNOWN, SILENT.text),
        (Evidence(SILENT, words="no memory"), DeathCause.ERROR, f"{SILENT.text} (no memory)"),
        (
            Evidence(SILENT, oom_killed=True),
            DeathCause.OUT_OF_MEMORY,
            "killed by the kernel: out of memory",
        ),
        (
            Evidence(SILENT, exit_code=-signal.SIGBUS, full="/tmp/baton-1"),
            DeathCause.NO_SPACE,
            "no space left in the run directory /tmp/baton-1: killed by SIGBUS",
        ),
        (
            Evidence(REPORTED, full="/tmp/baton-1"),
            DeathCause.NO_SPACE,
            "no space left in the run directory /tmp/baton-1: worker decode-0: no such model",
        ),
        (
            Evidence(SILENT, exit_code=-signal.SIGKILL, full="/tmp/baton-1"),
            DeathCause.SIGKILL,
            "killed by SIGKILL",
        ),
        (Evidence(MONITOR, words="an old error"), DeathCause.RAY_MEMORY_MONITOR, MONITOR.text),
        (Evidence(LOST), DeathCause.NODE_LOST, LOST.text),
        (Evidence(REPORTED), DeathCause.ERROR, REPORTED.text),
    ],
)
def test_the_cause_of_a_death_in_plain_words(known: Evidence, cause: DeathCause, text: str) -> None:
    assert explain(known) == Death(cause, text)
