"""Checks that a router and its workers serve the same commit of the model.

Commits may differ in the tokenizer or the chat template. The router would then send wrong
tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from baton.errors import ConfigError
from baton.store.registry import WorkerRecord

log = logging.getLogger(__name__)


def commit_of(records: Iterable[WorkerRecord], revision: str) -> str:
    """Return the model's commit that a router with the configured ``revision`` must serve. If there
    are workers, it is their commit.

    Raises ConfigError if the workers serve several commits, or if ``revision`` is the hash of
    another commit."""
    commits = sorted({record.revision for record in records} - {""})
    if not commits:
        return revision
    if len(commits) > 1:
        raise ConfigError(
            f"the workers of this cluster serve several commits of the model "
            f"({', '.join(commits)}): start the router when all of them serve one"
        )
    is_hash = len(revision) == len(commits[0]) and set(revision) <= set("0123456789abcdef")
    if is_hash and revision != commits[0]:
        raise ConfigError(
            f"the workers of this cluster serve commit {commits[0]} of the model, and revision is "
            f"{revision}: leave revision out, and the router takes theirs"
        )
    return commits[0]


class CommitCheck:
    """Excludes workers that serve another commit of the model than the router. Logs each such
    worker once.
    """

    def __init__(self, revision: str) -> None:
        """Create a check. ``revision``: the router's commit of the model; empty if the model is
        local.
        """
        self._revision = revision
        self._refused: set[str] = set()

    def alike(self, records: Mapping[str, WorkerRecord]) -> dict[str, WorkerRecord]:
        """Return those of the workers, by incarnation, that serve the router's commit of the
        model."""
        others = {
            name: record
            for name, record in records.items()
            if self._revision and record.revision and record.revision != self._revision
        }
        for name in others.keys() - self._refused:
            log.error(
                "worker %s gets no requests: it serves commit %s of the model, and this router has"
                " the tokenizer of commit %s. Start the router again: it then takes the workers'",
                name,
                others[name].revision,
                self._revision,
            )
        self._refused = set(others)
        return {name: record for name, record in records.items() if name not in others}
