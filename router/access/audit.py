"""The audit log: operators' calls and signals, changes of API keys, and refused requests.

Each line is a JSON object, logged on ``baton.audit`` independent of ``log_level``. Keys appear by
their public names.
"""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from baton.config.access import KeyConfig
from baton.errors import BatonError, Forbidden, Unauthenticated

if TYPE_CHECKING:
    from router.access.access import Access

log = logging.getLogger("baton.audit")
log.setLevel(logging.INFO)

MAX_REFUSALS_PER_S = 5
"""Maximum number of refused requests that are logged per second, so that unknown clients cannot
fill the disk."""
_SHOWN = 200
"""Maximum number of characters of a request's path, and of names of API keys, in a line of the
audit log."""


@contextmanager
def operator_call(
    access: Access,
    headers: Mapping[str, str],
    request_id: str,
    action: str,
    target: str,
    **details: object,
) -> Iterator[None]:
    """Check that the caller is an operator, run the block, and log how the block ended.

    ``target``: the object on which the operator acts. ``details``: the arguments of the call.
    Raises Unauthenticated, Forbidden."""
    caller = access.check(headers, "admin")
    result = "ok"
    try:
        yield
    except BatonError as error:
        result = error.code or type(error).__name__
        raise
    except BaseException as error:
        result = type(error).__name__
        raise
    finally:
        _write(
            action=action,
            object=target,
            **details,
            key=caller.principal.key_id,
            result=result,
            request_id=request_id,
        )


def note_signal(target: str, action: str, number: signal.Signals) -> None:
    """Log that a process of this cluster received a signal to end. The entry names no API key,
    since signals have none."""
    _write(action=action, object=target, signal=number.name, key="", result="ok", request_id="")


def note_keys(file: str, old: Sequence[KeyConfig], new: Sequence[KeyConfig]) -> None:
    """Log which API keys a changed file of keys has added, removed or changed, by their public
    names; nothing if it has the same keys."""
    before, after = ({key.name: key for key in keys} for keys in (old, new))
    changes = {
        "added": sorted(after.keys() - before.keys()),
        "removed": sorted(before.keys() - after.keys()),
        "changed": sorted(n for n in before.keys() & after.keys() if before[n] != after[n]),
    }
    told = {change: names[:_SHOWN] for change, names in changes.items() if names}
    if told:
        _write(action="read keys", object=file, **told, key="", result="ok", request_id="")


class Refusals:
    """Logs requests that were refused because of their API key, their origin or their path."""

    def __init__(self, access: Access, clock: Callable[[], float] = time.monotonic) -> None:
        self._access = access
        self._clock = clock
        self._second = 0
        self._written = 0
        self._left_out = 0

    def add(
        self,
        error: BatonError,
        headers: Mapping[str, str],
        *,
        action: str,
        client: str,
        request_id: str = "",
    ) -> None:
        """Log a request that was refused with status 401 or 403, unless too many were logged in
        this second. Other errors are ignored.

        ``action``: the request's method and path. ``client``: the address of its sender."""
        if not isinstance(error, Unauthenticated | Forbidden):
            return
        second = int(self._clock())
        if second != self._second:
            self._second, self._written = second, 0
        if self._written >= MAX_REFUSALS_PER_S:
            self._left_out += 1
            return
        self._written += 1
        left_out, self._left_out = self._left_out, 0
        _write(
            action=action[:_SHOWN],
            key=self._access.key_name(headers),
            client=client,
            result=error.code,
            request_id=request_id,
            **({"left_out": left_out} if left_out else {}),
        )


def _write(**fields: object) -> None:
    log.info("%s", json.dumps(fields), extra=fields)
