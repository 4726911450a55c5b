"""`baton status --watch`: what a router's console shows, in a terminal.

    connecting ─the first snapshot→ live ─the stream ends→ waiting ─the next one→ live

A router that does not answer at the start ends it; later it is asked again until Ctrl-C.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import httpx
import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console, RenderableType
from rich.live import Live

from baton.errors import BatonError, Forbidden, Unavailable
from baton.security.tls import TlsFiles, client_context
from deploy.cli.operate.watch_view import Screen, draw
from deploy.cli.options.command_line import not_a_router
from router.console.snapshot import Snapshot

SILENCE_S = 5.0
"""A stream has an event a second."""
AGAIN_S = 1.0
_JITTER_S = 0.5
"""How much earlier than a second after the last one an event may come."""
_SNAPSHOT = TypeAdapter(Snapshot)


def watch(
    http: str,
    api_key: str,
    interval_s: float,
    console: Console,
    sleep: Callable[[float], None] = time.sleep,
    tls: TlsFiles | None = None,
) -> None:
    """Draw until Ctrl-C, at most every ``interval_s``: in place on a terminal, one below the other

    elsewhere. ``http``: host:port, or a URL without a path; ``tls``: which CA to trust, and what to
    show the router. Raises Unavailable, Forbidden, KeyboardInterrupt.
    """
    live = Live(console=console, screen=True, auto_refresh=False, transient=True)
    shows: Callable[[RenderableType], None] = (
        (lambda drawn: live.update(drawn, refresh=True)) if console.is_terminal else console.print
    )
    with live if console.is_terminal else nullcontext():
        for told, complaint in _followed(http, api_key, interval_s, sleep, tls):
            shows(draw(told, _screen(console), complaint))


def watch_json(
    http: str,
    api_key: str,
    interval_s: float,
    sleep: Callable[[float], None] = time.sleep,
    tls: TlsFiles | None = None,
) -> None:
    """Print each snapshot as one line of JSON, until Ctrl-C. Raises as ``watch`` does."""
    for told, complaint in _followed(http, api_key, interval_s, sleep, tls):
        if complaint:
            typer.echo(complaint, err=True)
        else:
            typer.echo(_SNAPSHOT.dump_json(told))


def _followed(
    http: str,
    api_key: str,
    interval_s: float,
    sleep: Callable[[float], None],
    tls: TlsFiles | None,
) -> Iterator[tuple[Snapshot, str]]:
    """Snapshots without end. When the stream ends: the last one, and what is wrong."""
    told: Snapshot | None = None
    shown_at = float("-inf")
    while True:
        try:
            for told in snapshots(http, api_key, tls):
                if time.monotonic() - shown_at >= interval_s - _JITTER_S:
                    shown_at = time.monotonic()
                    yield told, ""
            complaint = f"{http} has ended the stream"
        except Unavailable as error:
            if told is None:
                raise
            complaint = error.message
        if told is not None:
            yield told, f"{complaint}; asking again"
        sleep(AGAIN_S)


def snapshots(http: str, api_key: str, tls: TlsFiles | None = None) -> Iterator[Snapshot]:
    """One a second, until the stream ends. Raises Unavailable, Forbidden."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    url = http if "://" in http else f"http://{http}"
    verify = True if tls is None else client_context(tls)
    try:
        with (
            httpx.Client(
                trust_env=False, timeout=SILENCE_S, headers=headers, verify=verify
            ) as client,
            client.stream("GET", f"{url}/console/events") as answer,
        ):
            _check(http, answer)
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    yield _parsed(http, line.removeprefix("data: "))
    except httpx.HTTPError as error:
        why = str(error) or type(error).__name__
        raise Unavailable(
            f"no router answers at {http} ({why}); is `baton serve` running?"
        ) from None


def _check(http: str, answer: httpx.Response) -> None:
    if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise Forbidden(
            f"the router at {http} shows this to a key that allows metrics: give it with --api-key"
            " or in BATON_API_KEY"
        )
    if answer.status_code != httpx.codes.OK:
        raise Unavailable(f"the router at {http} answers {answer.status_code}: has it a console?")
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        raise Unavailable(not_a_router(http))


def _parsed(http: str, data: str) -> Snapshot:
    try:
        return _SNAPSHOT.validate_json(data)
    except ValidationError as error:
        fault = _fault(data)
        if fault is None:
            raise BatonError(not_a_router(http)) from error
        kind = Forbidden if fault.get("code") in ("invalid_api_key", "forbidden") else Unavailable
        raise kind(str(fault.get("message"))) from None


def _fault(data: str) -> dict[str, Any] | None:
    """The error that an event of a router tells of; None where it is another thing."""
    try:
        fault = json.loads(data)["error"]
    except (ValueError, KeyError, TypeError):
        return None
    return fault if isinstance(fault, dict) else None


def _screen(console: Console) -> Screen:
    height = console.height if console.is_terminal else None
    return Screen(console.width, height, console.encoding.lower().startswith("utf"))
