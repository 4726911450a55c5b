"""The last requests of a router process that have ended, for questions about one of them.

Records hold no text of prompts and answers. Owned by the router's event loop.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from router.core.timeline import Timeline

MAX_RECORDS = 4096
"""Maximum number of records, about 2 KiB each."""
MAX_FOUND = 64
"""Maximum number of records that one lookup returns."""


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that has ended, and where its time went."""

    request_id: str
    """Id of the answer."""
    call_id: str
    """Id of the HTTP or gRPC call, ``x-request-id``; empty if it has none."""
    trace_id: str
    tenant: str
    key_id: str
    """Public name of the API key."""
    context_class: str
    outcome: str
    code: str
    """Code of the error; empty if there was none."""
    ended_at: float
    """Time of the end, in Unix seconds."""
    took_s: float
    """Time from receipt to the end."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    choices: int
    slo_ttft_s: float
    timeline: Timeline

    def is_named(self, name: str) -> bool:
        """Return whether ``name`` is an id of the request, or of the answer that it is a part of.

        A prompt of an answer to several has the answer's id and its own number."""
        if name in (self.request_id, self.call_id):
            return True
        answer, _, number = self.request_id.rpartition("-")
        return answer == name and number.isdecimal()


class RequestHistory:
    """The last ``MAX_RECORDS`` requests that have ended."""

    def __init__(self, max_records: int = MAX_RECORDS) -> None:
        self._records: deque[EndedRequest] = deque(maxlen=max_records)

    def add(self, record: EndedRequest) -> None:
        """Add a request that has ended."""
        self._records.append(record)

    def find(self, name: str) -> list[EndedRequest]:
        """Return the requests that ``name`` names, the last one first: at most ``MAX_FOUND``."""
        found = (record for record in reversed(self._records) if record.is_named(name))
        return [record for record, _ in zip(found, range(MAX_FOUND), strict=False)]
