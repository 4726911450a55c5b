"""Does one run of a load against one server: shows its progress, and returns its results."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from baton.errors import ConfigError, Unavailable
from baton.security.tls import client_context
from loadtest.generator.load_driver import LiveCounts, LoadDriver
from loadtest.generator.load_settings import LoadSettings, RunTraffic, ServerSettings, counted
from loadtest.generator.metrics_timeline import MetricsReader, Timeline
from loadtest.generator.results.request_record import RequestRecord
from loadtest.generator.results.summary import Distribution, Summary, Window, summarize
from loadtest.generator.targets.grpc_target import GrpcTarget
from loadtest.generator.targets.openai_target import OpenAiTarget
from loadtest.generator.targets.target import AskOptions, RunClock, Target
from loadtest.generator.workload.traffic import planned

_DRAW_S = 0.5
_SAY_S = 10.0

Say = Callable[[str], None]


class LiveProgress:
    """Shows the counts of a running load. Owned by the run's event loop; cancelled when the run has
    ended.
    """

    def __init__(
        self, counts: LiveCounts, clock: RunClock, seconds: float, console: Console, say: Say
    ) -> None:
        """``seconds`` is the planned duration of sending. Progress is drawn if ``console`` is a
        terminal.
        """
        self._counts, self._clock, self._seconds = counts, clock, seconds
        self._console, self._say = console, say
        self._before = (time.monotonic(), 0, 0, 0)
        self._rates = (0.0, 0.0, 0.0)

    async def run(self) -> None:
        """Show the run's progress until cancelled."""
        if not self._console.is_terminal:
            while True:
                await asyncio.sleep(_SAY_S)
                self._say(self.line())
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            while True:
                live.update(self._drawn(), refresh=True)
                await asyncio.sleep(_DRAW_S)

    def line(self) -> str:
        """Return a line with the counts until now, and the rates since the last call."""
        counts = self._counts
        now = (time.monotonic(), counts.sent, counts.ended, counts.output_tokens)
        past_s = now[0] - self._before[0]
        if past_s > _DRAW_S / 2:
            changes = zip(now[1:], self._before[1:], strict=True)
            sent, ended, tokens = (new - old for new, old in changes)
            self._rates = (sent / past_s, ended / past_s, tokens / past_s)
            self._before = now
        of_all = "" if counts.planned is None else f" of {counts.planned}"
        bad = ", ".join(
            f"{count} {outcome}" for outcome, count in counts.outcomes.items() if outcome != "ok"
        )
        return (
            f"{self._clock.now():.0f} s: {counts.sent}{of_all} sent, {self._rates[0]:.1f}/s; "
            f"{counts.ended} ended, {self._rates[1]:.1f}/s, {self._rates[2]:.0f} tokens/s; "
            f"{counts.under_way} in flight{'; ' + bad if bad else ''}"
        )

    def _drawn(self) -> Table:
        counts = self._counts
        done = min(1.0, self._clock.now() / self._seconds) if self._seconds else 0.0
        if counts.planned:
            done = counts.ended / counts.planned
        grid = Table.grid(padding=(0, 1))
        grid.add_row(ProgressBar(total=1.0, completed=done, width=20), self.line())
        return grid


HONEST_LAG_MS = 10.0
"""Limit of the p99 of the client's event-loop lag, in milliseconds. Above it, the latencies that
the client measures are unreliable."""
_HONEST_CORE = 0.9
_MODELS_S = 10.0


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Results of one run of a load."""

    rate: float | None
    """Configured number of requests per second. None in a closed loop, and when a trace gives the
    arrival times."""
    concurrency: int | None
    summary: Summary
    loop_lag: Distribution
    """Event-loop lag of the client. The times of requests may be wrong by as much."""
    client_core: float
    """Share of a CPU core that the client used while it sent requests."""
    timeline: Timeline
    records: tuple[RequestRecord, ...]
    """Records of all requests, including those outside the counted window."""
    stopped: bool = False
    """Whether Ctrl-C ended the run early. If so, the results cover the requests until then."""

    @property
    def title(self) -> str:
        """Return a heading for this run."""
        if self.concurrency is not None:
            return f"{self.concurrency} at a time"
        return "as recorded" if self.rate is None else f"{self.rate:g} requests/s"

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return the reasons why the run's figures are unreliable; empty if they are reliable."""
        found = []
        for what, lag in (("sent requests", self.summary.lag), ("read answers", self.loop_lag)):
            if lag.p99_ms > HONEST_LAG_MS:
                found.append(
                    f"the client {what} late: {lag.p99_ms:.0f} ms at p99, {lag.max_ms:.0f} ms at"
                    " most; it measures itself. Give it a core of its own, or a lower rate"
                )
        if self.client_core > _HONEST_CORE:
            found.append(f"the client used {self.client_core:.0%} of a core, which is its limit")
        if not self.summary.all.requests:
            found.append("no request was due between warm-up and cool-down")
        return tuple(found)


async def run_load(
    settings: LoadSettings, traffic: RunTraffic, console: Console, say: Say
) -> LoadRun:
    """Send a run's requests to the server, and return the results. ``console`` shows the progress.
    Raises ConfigError.
    """
    if traffic.seconds < math.inf:
        # Check before the run that some requests count.
        counted(settings.pace, traffic.seconds)
    target = make_target(settings.server)
    driver: LoadDriver[Any] = LoadDriver(target)
    driver.counts.planned = len(traffic.times_s) or settings.pace.requests
    seconds = traffic.seconds if traffic.seconds < math.inf else 0.0
    progress = LiveProgress(driver.counts, driver.clock, seconds, console, say)
    server = settings.server
    reader = MetricsReader(server.metrics or server.url, driver.clock, server.tls)
    used, began = time.process_time(), time.perf_counter()
    try:
        async with _beside(progress.run()), _beside(reader.run()), _stopping(driver, say):
            records = await _drive(driver, settings, traffic)
    finally:
        await target.close()
    core = (time.process_time() - used) / (time.perf_counter() - began)
    records.sort(key=lambda record: record.number)
    window = _window(settings, traffic, driver, records)
    return LoadRun(
        rate=settings.pace.rate,
        concurrency=settings.pace.concurrency,
        summary=summarize(records, window, settings.slo, settings.bounds),
        loop_lag=Distribution.of(driver.loop_lag_s),
        client_core=core,
        timeline=reader.timeline(),
        records=tuple(records),
        stopped=driver.stopped_s is not None,
    )


async def _drive(
    driver: LoadDriver[Any], settings: LoadSettings, traffic: RunTraffic
) -> list[RequestRecord]:
    pace = settings.pace
    if pace.concurrency is None:
        return await driver.open_loop(planned(traffic.source, traffic.times_s))
    return await driver.closed_loop(
        traffic.source, pace.concurrency, traffic.seconds, pace.requests
    )


def _window(
    settings: LoadSettings,
    traffic: RunTraffic,
    driver: LoadDriver[Any],
    records: list[RequestRecord],
) -> Window:
    """Return the window of a run whose requests count.

    A closed loop that ends by its number of requests lasts until the last request has ended.
    """
    if driver.stopped_s is not None:
        warm_up_s = (
            0.0 if traffic.seconds == math.inf else counted(settings.pace, traffic.seconds).start_s
        )
        return Window(min(warm_up_s, driver.stopped_s), driver.stopped_s)
    if settings.pace.concurrency is None or not records:
        return counted(settings.pace, traffic.seconds)
    last_s = max(record.ended_s for record in records)
    return counted(settings.pace, min(traffic.seconds, last_s))


@contextlib.asynccontextmanager
async def _stopping(driver: LoadDriver[Any], say: Say) -> AsyncIterator[None]:
    """Stop sending at the first Ctrl-C and keep the measurements. A second Ctrl-C ends the run."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        say("stopping: waiting for requests in flight; press Ctrl-C again to abort them")
        driver.stop()

    # Only the main thread may handle signals.
    with contextlib.suppress(ValueError, RuntimeError):
        loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError, RuntimeError):
            loop.remove_signal_handler(signal.SIGINT)


@contextlib.asynccontextmanager
async def _beside(work: Any) -> AsyncIterator[None]:
    """Run ``work`` in a task during the block, and cancel the task at the end of the block. If the
    task has failed, raise its error there."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def make_target(server: ServerSettings) -> Target[Any]:
    """Return the object that sends requests to the server of these settings. It belongs to the
    running event loop. Raises ConfigError.
    """
    options = AskOptions(server.model, server.temperature, server.ignore_eos, server.timeout_s)
    if server.grpc:
        return GrpcTarget(server.grpc, options, server.api_key, server.tls)
    return OpenAiTarget(server.url, server.endpoint, options, server.api_key, server.tls)


def first_model(server: ServerSettings) -> str:
    """Return the id of the first model that the server lists. Raises Unavailable on failure."""
    if server.grpc:
        return ""
    headers = {"authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    url = f"{server.url.rstrip('/')}/v1/models"
    verify = True if server.tls is None else client_context(server.tls)
    try:
        with httpx.Client(
            trust_env=False, timeout=_MODELS_S, headers=headers, verify=verify
        ) as client:
            return str(client.get(url).raise_for_status().json()["data"][0]["id"])
    except httpx.InvalidURL as error:
        raise ConfigError(f"{server.url!r} is not a URL: {error}") from None
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise Unavailable(
            f"{url} lists no model ({type(error).__name__}); is the server up?"
        ) from None
