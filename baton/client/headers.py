"""HTTP headers that Baton adds to OpenAI's API. No I/O.

They go with any HTTP client, for example the `openai` package:

    client.chat.completions.create(..., extra_headers=request_headers(deadline_s=20))

The gRPC API reads the same names as metadata. docs/reference/python-client.md has examples.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from baton.request import NO_TRACE, TraceContext

DEADLINE_HEADER = "x-baton-deadline-ms"
"""Request: milliseconds that the client allows for the whole request, counted from its arrival."""
SESSION_HEADER = "x-baton-session"
"""Request: the client's name of its conversation; the routing policy ``session`` uses it."""
AGENT_HEADER = "x-baton-agent"
"""Request: the client's name of the agent that sends it, by which usage can be listed."""
RUN_HEADER = "x-baton-run-id"
"""Request: the client's name of the run that the request belongs to. The request log shows it."""
ROUTER_HEADER = "x-baton-router"
"""Response header of ``/health``: the number of the router process that answered."""
REQUEST_ID_HEADER = "x-request-id"
"""Request: an id that the client chooses. Response: that id, or one that the router made."""
RETRY_AFTER_HEADER, RETRY_AFTER_MS_HEADER = "retry-after", "retry-after-ms"
"""Response: when to try again, in whole seconds and in milliseconds."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)


def request_headers(
    *,
    api_key: str = "",
    deadline_s: float | None = None,
    session: str = "",
    request_id: str = "",
    agent: str = "",
    run_id: str = "",
    trace: TraceContext = NO_TRACE,
) -> dict[str, str]:
    """Return the headers of a request. An argument that is not given adds no header.

    ``api_key``: only for clients that do not send it themselves; the `openai` package does.
    ``deadline_s``: seconds for the whole request. ``trace``: the W3C trace context of the caller.

    Raises ValueError if ``deadline_s`` is not above 0, if the router would replace ``request_id``
    by one of its own, or if a text does not fit into a header.
    """
    headers = dict(trace.headers)
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    if deadline_s is not None:
        if not 0 < deadline_s < math.inf:
            raise ValueError(f"deadline_s must be a number of seconds above 0, not {deadline_s}")
        headers[DEADLINE_HEADER] = str(math.ceil(deadline_s * 1000))
    if session:
        headers[SESSION_HEADER] = session
    if agent:
        headers[AGENT_HEADER] = agent
    if run_id:
        headers[RUN_HEADER] = run_id
    if request_id:
        if not is_request_id(request_id):
            raise ValueError(
                "request_id must have 1 to 128 characters of A-Z, a-z, 0-9, '.', '_' and '-'"
            )
        headers[REQUEST_ID_HEADER] = request_id
    for name, value in headers.items():
        if not (value.isascii() and value.isprintable()):
            raise ValueError(f"the header {name} may have only printable ASCII characters")
    return headers


def is_request_id(text: str) -> bool:
    """Whether a router accepts ``text`` as the id of a request."""
    return _REQUEST_ID.fullmatch(text) is not None


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return how long to wait before a retry, in seconds; None if the response has no such header.

    ``headers`` are a response's, with names in lower case or in a mapping that ignores case.
    """
    for name, unit_s in ((RETRY_AFTER_MS_HEADER, 1e-3), (RETRY_AFTER_HEADER, 1.0)):
        value = headers.get(name, "")
        if value.isascii() and value.isdecimal():
            return int(value) * unit_s
    return None
