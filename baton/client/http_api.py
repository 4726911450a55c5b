"""Calls of a router's HTTP API with httpx: connections, errors and events. The caller reads and
writes the bodies.

with api_errors(), open_api("http://127.0.0.1:8000", api_key) as client:
    model = client.get("/v1/models").json()["data"][0]["id"]
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from baton.client.headers import request_headers, retry_after_s
from baton.errors import (
    BatonError,
    ConfigError,
    DeadlineExceeded,
    Unavailable,
    WorkerFailed,
    classes_by_code,
)
from baton.security.tls import TlsFiles, client_context

_CONNECT_S = 5.0
_SILENCE_S = 330.0
"""Time without a byte after which a router counts as lost, in seconds. It exceeds the router's own
default deadline of 300 s."""
_DATA, _DONE = "data: ", "[DONE]"
_CLASSES = classes_by_code()


def open_api(url: str, api_key: str = "", tls: TlsFiles | None = None) -> httpx.Client:
    """Open a client that raises a BatonError for each response that is not a success.

    ``url`` is the router's, without a path. ``tls``: the CA that the client trusts and the
    certificate that it shows; None: the system's CAs. Proxies of the environment are not used.
    Raises ConfigError if ``url`` is not a URL or a file of ``tls`` cannot be used.
    """

    def check(response: httpx.Response) -> None:
        if not response.is_success:
            response.read()
            raise error_of(response)

    with api_errors():
        return httpx.Client(**_settings(url, api_key, tls), event_hooks={"response": [check]})


def open_async_api(url: str, api_key: str = "", tls: TlsFiles | None = None) -> httpx.AsyncClient:
    """Open an asyncio client as ``open_api`` does for threads: same arguments, same errors."""

    async def check(response: httpx.Response) -> None:
        if not response.is_success:
            await response.aread()
            raise error_of(response)

    with api_errors():
        return httpx.AsyncClient(**_settings(url, api_key, tls), event_hooks={"response": [check]})


def _settings(url: str, api_key: str, tls: TlsFiles | None) -> dict[str, Any]:
    try:
        headers = request_headers(api_key=api_key)
    except ValueError as error:
        raise ConfigError(f"the API key cannot be sent: {error}") from None
    return {
        "base_url": url,
        "headers": headers,
        "verify": _context(url, tls),
        "timeout": httpx.Timeout(_SILENCE_S, connect=_CONNECT_S),
        "trust_env": False,
    }


def _context(url: str, tls: TlsFiles | None) -> ssl.SSLContext | bool:
    if tls is not None:
        return client_context(tls)
    # Reading the system's CAs takes tens of milliseconds, and a plain connection needs none. A
    # context without CAs trusts no certificate.
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if url.startswith("http://") else True


@contextmanager
def api_errors() -> Iterator[None]:
    """Convert httpx errors in the context's body to BatonErrors: no connection, no answer in time,
    not a URL."""
    try:
        yield
    except httpx.InvalidURL as error:
        raise ConfigError(f"not a URL such as http://127.0.0.1:8000: {error}") from error
    except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
        raise DeadlineExceeded(f"{_origin(error)} did not answer in time") from error
    except httpx.RequestError as error:
        why = str(error) or type(error).__name__
        raise Unavailable(
            f"no router answers at {_origin(error)} ({why}): is the cluster running?"
        ) from error


def error_of(response: httpx.Response) -> BatonError:
    """Return the error that a response reports. Its message ends with the HTTP status and the API's
    error code.

    The error code selects the class of the error. If the code is unknown, the HTTP status does.
    """
    try:
        body = response.json()
    except (ValueError, RecursionError):
        body = None
    return _error(body, response.status_code, retry_after_s(response.headers))


def event_of(line: str) -> dict[str, Any] | None:
    """Parse one line of an event stream. Return the fields of its event; None if the line has no
    event.

    Raises the BatonError that an event reports, and WorkerFailed if the line cannot be read.
    """
    if not line.startswith(_DATA) or line == _DATA + _DONE:
        return None
    try:
        event = json.loads(line[len(_DATA) :])
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict):
        raise WorkerFailed("the router sent an event that cannot be read")
    if "error" in event:
        raise _error(event, None, None)
    return event


def _error(body: Any, status: int | None, retry_after: float | None) -> BatonError:
    """Build the error that ``body`` reports. ``body`` is that of a response, or of an event in a
    stream; ``status`` is None for an event."""
    error = body.get("error") if isinstance(body, dict) else None
    fields: dict[str, Any] = error if isinstance(error, dict) else {}
    code, param = fields.get("code"), fields.get("param")
    kind = _CLASSES.get(code) if isinstance(code, str) else None
    if kind is None:
        kind = WorkerFailed if status is None else _of_status(status)
    message = str(fields.get("message") or "the router refused the request")
    if shown := " ".join(str(one) for one in (status, code) if one is not None):
        message += f" ({shown})"
    return kind(message, param=None if param is None else str(param), retry_after=retry_after)


def _of_status(status: int) -> type[BatonError]:
    same = [kind for kind in _CLASSES.values() if kind.http_status == status]
    return min(same, key=lambda kind: len(kind.__mro__), default=BatonError)


def _origin(error: httpx.RequestError) -> str:
    url = error.request.url
    return f"{url.scheme}://{url.netloc.decode('ascii')}"
