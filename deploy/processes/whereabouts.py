"""Which process something of a cluster is, for whoever may have to end it."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.processes.process_identity import ProcessIdentity


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Of one process; it travels as JSON."""

    process: ProcessIdentity
    node: str
    """Ray's id of its node."""

    @classmethod
    def own(cls, node: str) -> Whereabouts:
        """Of this process, which runs on ``node``."""
        return cls(ProcessIdentity.own(), node)
