"""Checks that a router and its workers serve the same model.

Workers may serve other weights than their neighbors: routing keeps them apart by their
fingerprints. But a router has one name for its model, and one tokenizer with its chat template. A
worker that needs another one gets no requests of this router.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping

from baton.store.registry import WorkerRecord

log = logging.getLogger(__name__)

_HASH_DIGITS = 40
"""Number of hexadecimal digits of a commit's hash."""


def commit_of(records: Iterable[WorkerRecord], revision: str) -> str:
    """Return the commit of the model that a router with the configured ``revision`` serves: the
    hash of a commit itself; for a branch or tag, the commit that most workers serve."""
    if len(revision) == _HASH_DIGITS and set(revision) <= set("0123456789abcdef"):
        return revision
    commits = Counter(record.revision for record in records if record.revision)
    return commits.most_common(1)[0][0] if commits else revision


class ModelCheck:
    """Excludes workers that serve a model under another name than the router, or with another
    tokenizer. Logs each such worker once."""

    def __init__(self, model: str, tokenizer: str) -> None:
        """``model`` is the served name, and ``tokenizer`` the hash of the router's tokenizer
        (``baton.hashing.text_hash``)."""
        self._model, self._tokenizer = model, tokenizer
        self.refused: set[str] = set()
        """Incarnations of the workers that were excluded last."""

    def alike(self, records: Mapping[str, WorkerRecord]) -> dict[str, WorkerRecord]:
        """Return those of the workers, by incarnation, that serve the router's model."""
        refused: set[str] = set()
        for name, record in records.items():
            difference = self._difference(record)
            if difference and name not in self.refused:
                log.error(
                    "worker %s gets no requests of this router: %s. Start routers with the model"
                    " and revision of their workers",
                    name,
                    difference,
                )
            if difference:
                refused.add(name)
        self.refused = refused
        return {name: record for name, record in records.items() if name not in refused}

    def _difference(self, record: WorkerRecord) -> str:
        """Return what differs between a worker and this router; empty if nothing does."""
        if record.model != self._model:
            return f"it serves {record.model!r}, and the router serves {self._model!r}"
        # Workers of Baton 0.1.0 do not report it.
        if record.tokenizer and record.tokenizer != self._tokenizer:
            return (
                f"its tokenizer or chat template is {record.tokenizer}, and the router has"
                f" {self._tokenizer}"
            )
        return ""
