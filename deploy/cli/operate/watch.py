"""`baton status --watch`: a router's console in a terminal.

    connecting ─the first snapshot→ live ─the stream ends→ waiting ─the next one→ live

A router that does not answer at the start ends the command; later it is queried until Ctrl-C.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import httpx
import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from baton.errors import BatonError, Forbidden, Unavailable
from baton.security.tls import TlsFiles, client_context
from deploy.cli.options.command_line import not_a_router
from router.console.rates import Percentiles
from router.console.snapshot import ClassView, Snapshot, WorkerView

SILENCE_S = 5.0
"""Maximum time between two events of the stream, in seconds. Normally there is one event per
second."""
AGAIN_S = 1.0
_JITTER_S = 0.5
"""Maximum time by which an event of the stream may come early, in seconds."""
_SNAPSHOT = TypeAdapter(Snapshot)
WIDE, MIDDLE, NARROW = 110, 72, 56
"""Minimum width of a terminal, in columns of text, for all columns of the tables, for most of them,
and for some."""
_DASH = "-"
_HEALTH = {"ok": "green", "degraded": "yellow", "down": "red"}
_STATES = {"ready": "green", "draining": "yellow"}
_ROLES = {"prefill": "yellow", "decode": "cyan"}
_KV = (("used", "blue"), ("cached", "bright_blue"), ("quarantined", "magenta"))
_UNITS = ("B", "kB", "MB", "GB", "TB")


def watch(
    http: str,
    api_key: str,
    interval_s: float,
    console: Console,
    sleep: Callable[[float], None] = time.sleep,
    tls: TlsFiles | None = None,
) -> None:
    """Draw the router's snapshots until Ctrl-C, at most every ``interval_s`` seconds; on a
    terminal, in place.

    ``http`` is host:port, or a URL without a path; ``tls`` has the CA to trust and the client's
    certificate. Raises Unavailable, Forbidden, KeyboardInterrupt.
    """
    live = Live(console=console, screen=True, auto_refresh=False, transient=True)
    shows: Callable[[RenderableType], None] = (
        (lambda drawn: live.update(drawn, refresh=True)) if console.is_terminal else console.print
    )
    with live if console.is_terminal else nullcontext():
        for snapshot, complaint in _followed(http, api_key, interval_s, sleep, tls):
            shows(draw(snapshot, _screen(console), complaint))


def watch_json(
    http: str,
    api_key: str,
    interval_s: float,
    sleep: Callable[[float], None] = time.sleep,
    tls: TlsFiles | None = None,
) -> None:
    """Print each snapshot as one line of JSON, until Ctrl-C. Raises the same exceptions as
    ``watch``."""
    for snapshot, complaint in _followed(http, api_key, interval_s, sleep, tls):
        if complaint:
            typer.echo(complaint, err=True)
        else:
            typer.echo(_SNAPSHOT.dump_json(snapshot))


def _followed(
    http: str,
    api_key: str,
    interval_s: float,
    sleep: Callable[[float], None],
    tls: TlsFiles | None,
) -> Iterator[tuple[Snapshot, str]]:
    """Yield the router's snapshots without end. Whenever the stream ends, yield the last snapshot
    again, with the error."""
    snapshot: Snapshot | None = None
    shown_at = float("-inf")
    while True:
        try:
            for snapshot in snapshots(http, api_key, tls):
                if time.monotonic() - shown_at >= interval_s - _JITTER_S:
                    shown_at = time.monotonic()
                    yield snapshot, ""
            complaint = f"{http} ended the stream"
        except Unavailable as error:
            if snapshot is None:
                raise
            complaint = error.message
        if snapshot is not None:
            yield snapshot, f"{complaint}; asking again"
        sleep(AGAIN_S)


def snapshots(http: str, api_key: str, tls: TlsFiles | None = None) -> Iterator[Snapshot]:
    """Yield one snapshot of the cluster per second, until the router's stream ends. Raises
    Unavailable, Forbidden."""
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
            f"the router at {http} requires a key with the metrics scope: give it with --api-key "
            "or in BATON_API_KEY"
        )
    if answer.status_code != httpx.codes.OK:
        raise Unavailable(
            f"the router at {http} answers {answer.status_code}: does it have a console?"
        )
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
    """Return the error if ``data`` is an error event of the router's stream. None for any other
    event."""
    try:
        fault = json.loads(data)["error"]
    except (ValueError, KeyError, TypeError):
        return None
    return fault if isinstance(fault, dict) else None


def _screen(console: Console) -> Screen:
    height = console.height if console.is_terminal else None
    return Screen(console.width, height, console.encoding.lower().startswith("utf"))


@dataclass(frozen=True, slots=True)
class Screen:
    """The size of the terminal, and what it can show."""

    width: int
    height: int | None = None
    """Number of text lines of the terminal; None: unlimited."""
    has_blocks: bool = True
    """Whether the terminal can show block elements; otherwise bars are made of ASCII."""


def draw(snapshot: Snapshot, screen: Screen, complaint: str = "") -> RenderableType:
    """Draw a snapshot of the cluster. ``complaint`` is the reason why there is no newer one."""
    texts = [_head(snapshot)]
    if complaint:
        texts.append(Text(complaint, style="red"))
    texts += [*_traffic(snapshot), Text()]
    room = None
    if screen.height is not None:
        # A narrow terminal may fold lines of text.
        folded = sum(max(1, -(-text.cell_len // screen.width)) for text in texts)
        # After them come the latencies and their head, an empty line, and the workers' head.
        room = max(1, screen.height - folded - len(snapshot.classes) - 3)
    latencies, workers = _latencies(snapshot, screen), _workers(snapshot.workers, screen, room)
    return Group(*texts, latencies, Text(), workers)


def _head(snapshot: Snapshot) -> Text:
    style = _HEALTH.get(snapshot.health, "red")
    health = ": ".join(part for part in (snapshot.health, snapshot.reason) if part)
    clock = datetime.fromtimestamp(snapshot.at).astimezone().strftime("%H:%M:%S")
    return Text.assemble(
        (snapshot.model, "bold"), "  ", (health, style), f"  {clock}  ", ("Ctrl-C ends", "dim")
    )


def _traffic(snapshot: Snapshot) -> list[Text]:
    traffic, handoffs = snapshot.traffic, snapshot.handoffs
    return [
        _facts(
            ("requests", f"{_rate(traffic.requests_per_s)}/s"),
            ("good", f"{_rate(traffic.good_per_s)}/s ({_share(traffic.good_share)} in SLO)"),
            ("running", f"{traffic.active}"),
            ("waiting", f"{traffic.waiting}"),
            ("shed", f"{traffic.shed}"),
            ("failed", f"{traffic.failed}"),
        ),
        _facts(
            ("prompt", f"{_rate(traffic.prompt_tokens_per_s)} tokens/s"),
            ("cached", _share(traffic.cached_share)),
            ("output", f"{_rate(traffic.output_tokens_per_s)} tokens/s"),
        ),
        _facts(
            ("handoffs", f"{_rate(handoffs.per_s)}/s"),
            ("KV", f"{_bytes(handoffs.bytes_per_s)}/s"),
            ("p50", _time(handoffs.seconds, "p50")),
            ("p95", _time(handoffs.seconds, "p95")),
            ("failed", f"{handoffs.failed}"),
        ),
    ]


def _facts(*pairs: tuple[str, str]) -> Text:
    found = Text()
    for name, value in pairs:
        found.append(f"{name} ", "dim")
        found.append(f"{value}   ")
    found.rstrip()
    return found


def _latencies(snapshot: Snapshot, screen: Screen) -> Table:
    shown: dict[str, tuple[str, ...]] = {
        "ttft": ("p50", "p95", "p99"),
        "tpot": ("p50", "p95", "p99"),
        "itl": ("p95",),
        "e2el": ("p50", "p95"),
    }
    if screen.width < WIDE:
        shown = {"ttft": ("p50", "p95"), "tpot": ("p50", "p95"), "e2el": ("p95",)}
    if screen.width < MIDDLE:
        shown = {"ttft": ("p95",), "tpot": ("p95",)}
    is_narrow = screen.width < NARROW
    table = _table(f"of {snapshot.window_s:.0f} s", *([] if is_narrow else ["req/s", "in SLO"]))
    for name, percentiles in shown.items():
        for percentile in percentiles:
            table.add_column(f"{name.upper()} {percentile}", justify="right", no_wrap=True)
    for view in snapshot.classes:
        cells = [
            _latency(view, name, percentile)
            for name, percentiles in shown.items()
            for percentile in percentiles
        ]
        rates = [] if is_narrow else [_rate(view.requests_per_s), _share(view.good_share)]
        table.add_row(view.name, *rates, *cells)
    return table


def _latency(view: ClassView, name: str, percentile: str) -> Text:
    lately: Percentiles | None = getattr(view, name).lately
    slo: float | None = getattr(view, f"slo_{name}_s", None)
    missed = lately is not None and slo is not None and getattr(lately, percentile) > slo
    return Text(_time(lately, percentile), "bold red" if missed else "")


def _workers(workers: Sequence[WorkerView], screen: Screen, room: int | None) -> Table:
    is_wide, is_middle = screen.width >= WIDE, screen.width >= MIDDLE
    has_fill = screen.width >= NARROW
    bar = 24 if is_wide else 12 if is_middle else 8
    table = _table("worker", *(["state"] if is_middle else []))
    names = [
        "batch",
        *(["fill"] if has_fill else []),
        "wait",
        *(["step", "sending"] if is_wide else []),
    ]
    for name in names:
        table.add_column(name, justify="left" if name == "fill" else "right", no_wrap=True)
    table.add_column("KV", no_wrap=True, min_width=bar)
    table.add_column("used", justify="right", no_wrap=True)
    if is_middle:
        table.add_column("cached", justify="right", no_wrap=True)
    shown = workers if room is None or len(workers) <= room else workers[: room - 1]
    for worker in shown:
        state = Text(worker.state, _STATES.get(worker.state, "bold red"))
        slot = Text(worker.slot, _ROLES.get(worker.role, "") if worker.state == "ready" else "red")
        fill = _bar([(worker.batch_fill, _ROLES.get(worker.role, ""))], 8, screen)
        step = f"{worker.step_ms:.1f} ms" if worker.step_ms else _DASH
        cells: list[str | Text] = [f"{worker.running}/{worker.max_sequences}"]
        cells += [fill, f"{worker.waiting}"] if has_fill else [f"{worker.waiting}"]
        if is_wide:
            cells += [step, _bytes(worker.in_flight_bytes) if worker.in_flight_bytes else _DASH]
        total = worker.total_blocks or 1
        kinds = [(getattr(worker, f"{kind}_blocks") / total, style) for kind, style in _KV]
        cells += [_bar(kinds, bar, screen), _share(worker.used_blocks / total)]
        if is_middle:
            cells.append(_share(worker.cached_blocks / total))
        table.add_row(slot, *([state] if is_middle else []), *cells)
    if len(shown) < len(workers):
        table.add_row(Text(f"and {len(workers) - len(shown)} more", "dim"))
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, no_wrap=True, justify="left" if name == "state" else "right")
    return table


def _bar(parts: Sequence[tuple[float, str]], width: int, screen: Screen) -> Text:
    """Draw a bar from parts of a whole: pairs of a share and its style. A share above 0 gets at
    least one character."""
    marks = "█▓▒" if screen.has_blocks else "#+x"
    found = Text()
    for (share, style), mark in zip(parts, marks, strict=False):
        cells = max(1, round(min(1.0, share) * width)) if share > 0 else 0
        found.append(mark * min(cells, width - len(found)), style)
    found.append(("░" if screen.has_blocks else ".") * (width - len(found)), "dim")
    return found


def _time(of: Percentiles | None, name: str) -> str:
    if of is None:
        return _DASH
    seconds: float = getattr(of, name)
    if seconds < 0.9995:
        return f"{seconds * 1e3:.{1 if seconds < 0.00995 else 0}f} ms"
    return f"{seconds:.{2 if seconds < 9.995 else 1}f} s"


def _share(value: float | None) -> str:
    return _DASH if value is None else f"{value * 100:.0f} %"


def _rate(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def _bytes(value: float) -> str:
    unit = 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.{1 if unit and value < 9.95 else 0}f} {_UNITS[unit]}"
