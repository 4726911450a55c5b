"""How an actor has ended, from the text of Ray's errors. Pure.

Ray's errors have no fields for most of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

_USED = re.compile(r"\S+ used / \S+ limit")
_NODE_DIED = "because its node has died"
_DETAIL = "Worker exit detail: "
_SILENT_END = "Worker unexpectedly exits with a connection error"


class EndKind(StrEnum):
    """How an actor has ended, as far as Ray knows."""

    PROCESS = "process"
    """Its process has ended; Ray does not know why."""
    MEMORY_MONITOR = "memory monitor"
    """Ray's memory monitor has ended it."""
    NODE_LOST = "node lost"
    REPORTED = "reported"
    """It has reported an error; its process may run on."""


@dataclass(frozen=True, slots=True)
class ActorEnd:
    """How an actor has ended, and what Ray knows about that."""

    kind: EndKind
    text: str
    """What Ray knows, in plain words."""


def monitored_end(message: str) -> ActorEnd:
    """Return the end of an actor that Ray's memory monitor has ended."""
    # Ray's text goes on for pages, with the command lines of other programs.
    used = _USED.search(message)
    share = f" ({used[0]})" if used else ""
    text = f"killed by Ray's memory monitor: all programs of its node used too much{share}"
    return ActorEnd(EndKind.MEMORY_MONITOR, text)


def process_end(message: str) -> ActorEnd:
    """Return the end of an actor whose process has ended, by Ray's message about its death."""
    last = last_line(message)
    if _NODE_DIED in message:
        return ActorEnd(EndKind.NODE_LOST, f"its node is lost: {last}")
    # Ray appends advice to every death.
    detail = last.rpartition(_DETAIL)[2].partition(" Some common causes")[0]
    if _SILENT_END in detail:
        return ActorEnd(EndKind.PROCESS, "its process has ended without a message to Ray")
    return ActorEnd(EndKind.PROCESS, detail)


def last_line(message: str) -> str:
    """Return the last line of a message that is not empty."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else ""
