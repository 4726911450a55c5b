"""Why a worker's process has ended, in plain words, from what is known about its end.

What is known: Ray's error, the exit code, whether the kernel has just ended a process for memory,
whether the run directory is full, and the last lines of its log and standard error. Pure.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum

from deploy.workers.actor_end import ActorEnd, EndKind


class DeathCause(StrEnum):
    """The kinds of causes; the values of a metric's label."""

    OUT_OF_MEMORY = "out_of_memory"
    """The kernel has ended it, because no memory was left."""
    RAY_MEMORY_MONITOR = "ray_memory_monitor"
    """Ray has ended it, because the programs of its node used much of the memory."""
    NO_SPACE = "no_space"
    """The run directory is full."""
    SIGKILL = "sigkill"
    CRASH = "crash"
    """Another signal has ended it, such as SIGSEGV."""
    NODE_LOST = "node_lost"
    HUNG = "hung"
    """The supervisor has ended it: it was silent, or did not serve in time."""
    ERROR = "error"
    """It has ended by itself, or reported an error."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known about a worker's end."""

    end: ActorEnd
    """The end as Ray reports it."""
    exit_code: int | None = None
    """Exit code, or minus the signal that has ended the process; None if it is unknown."""
    oom_killed: bool = False
    """Whether the kernel has just ended a process of this cgroup for lack of memory, and the
    worker may have been that process."""
    full: str = ""
    """Path of the run directory if it has no space left; otherwise empty."""
    words: str = ""
    """The error in the last line of its log; empty if there is none."""
    stderr: str = ""
    """The last lines of its standard error, as one line; empty if there are none."""


@dataclass(frozen=True, slots=True)
class Death:
    """Why a worker has ended."""

    cause: DeathCause
    text: str


def explain(known: Evidence) -> Death:
    """Return the cause of a worker's end. It says nothing that is not known."""
    cause, text = _cause(known)
    if cause not in _SPEAKING:
        return Death(cause, text)
    if known.words and known.words not in text and cause is not DeathCause.CRASH:
        text = f"{text} ({known.words})"
    if known.stderr:
        text = f"{text}; its standard error ends with: {known.stderr}"
    if known.full:
        text, cause = (
            f"no space left in the run directory {known.full}: {text}",
            DeathCause.NO_SPACE,
        )
    return Death(cause, text)


_SPEAKING = (DeathCause.ERROR, DeathCause.CRASH, DeathCause.UNKNOWN)
"""Causes for which a process may have written why. What others have written explains nothing: they
end at any instruction. The log of a crash ends with a list of modules."""


def _cause(known: Evidence) -> tuple[DeathCause, str]:
    text, code = known.end.text, known.exit_code
    if known.end.kind is not EndKind.PROCESS:
        return _KNOWN_BY_RAY[known.end.kind], text
    if known.oom_killed:
        return DeathCause.OUT_OF_MEMORY, "killed by the kernel: out of memory"
    if code is None:
        return (DeathCause.ERROR if known.words else DeathCause.UNKNOWN), text
    if code >= 0:
        return DeathCause.ERROR, known.words or f"it ended with exit code {code}: {text}"
    cause = DeathCause.SIGKILL if code == -signal.SIGKILL else DeathCause.CRASH
    return cause, f"killed by {_name(-code)}"


_KNOWN_BY_RAY = {
    EndKind.MEMORY_MONITOR: DeathCause.RAY_MEMORY_MONITOR,
    EndKind.NODE_LOST: DeathCause.NODE_LOST,
    EndKind.REPORTED: DeathCause.ERROR,
}


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
