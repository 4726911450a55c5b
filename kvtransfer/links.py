"""What the links of several transports share: transfers that end when their link does."""

from __future__ import annotations

import threading

from baton.errors import BatonError, ChecksumMismatch
from kvtransfer.transfer import Transfer
from kvtransfer.transport import Batch


class OpenTransfers:
    """The transfers of one link. Safe among threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Transfer] = set()
        self._error: BatonError | None = None

    @property
    def error(self) -> BatonError | None:
        """What has ended the link, if anything has."""
        return self._error

    def new(self) -> Transfer:
        """A transfer; on a link that has ended it has failed already."""
        transfer = Transfer()
        with self._lock:
            if self._error is None:
                self._open.add(transfer)
        if self._error is not None:
            transfer.fail(self._error)
        transfer.when_over(self._forget)
        return transfer

    def _forget(self, transfer: Transfer) -> None:
        with self._lock:
            self._open.discard(transfer)

    def end(self, error: BatonError) -> None:
        """Fail all, and every one to come; the first error counts."""
        with self._lock:
            if self._error is None:
                self._error = error
            rest, self._open = self._open, set()
        for transfer in rest:
            transfer.give_up(error)


def check_part(found: int, expected: int, batch: Batch) -> None:
    """Compare a part's checksum with the announced one. Raises ChecksumMismatch."""
    if found != expected:
        raise ChecksumMismatch(f"a part of batch {batch.number} arrived damaged")
