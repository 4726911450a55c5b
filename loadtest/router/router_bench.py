"""Measures a router's latency per request, and its maximum token rate.

    python -m loadtest.router.router_bench --model FOLDER

The router is a real one: a process pinned to one core, its HTTP listener, and a real Valkey for its
registry and prefix index. Behind it is an echo worker (``loadtest.router.echo_worker``), which
answers at once and then sends a token per step. The echo worker, Valkey and the client run on
another core.

*Added* milliseconds are the difference between two runs with the same requests at the same moments.
One goes over HTTP through the router (chat completions, streamed): its time is from sending a
request to the first event. The other sends tokenized prompts over gRPC directly to the echo worker:
its time is from sending a prompt to the first token. The difference is between the same quantiles
of both. So it contains HTTP, JSON, the chat template, tokenizing, hashing, the lookup in Valkey,
routing, and the router's two gRPC hops. The time to open a connection is not counted: clients keep
theirs. ``end_added_ms`` is the same for the last event.

*Tokens per second* is the highest tried rate with which the router keeps up: many answers are open,
the echo worker sends each of them one token per step, and the client must have received all of them
within ``KEPT_UP`` of the steps' own time.

With ``peer`` another router is measured in the same way: see ``loadtest.router.router_process``.
``--sglang-router`` names one. It forwards HTTP: unlike Baton's router it neither applies a chat
template nor tokenizes or detokenizes.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import psutil
import typer
from rich.console import Console
from rich.table import Table

from baton.config.cluster import Config
from baton.errors import ConfigError
from loadtest.common.bench_app import Figures, ModelFolder, bench_app, counts_in, say
from loadtest.common.child_processes import LOOPBACK, bench_store, cores, pinned
from loadtest.common.json_worker import Fields, Helper, helper
from loadtest.common.peer_servers import SERVED_NAME
from loadtest.router.router_process import check_command, peer_router, router_child
from planning.common.report import Machine, print_whole, this_machine, write_json

KEPT_UP = 1.03
"""Limit of the time in which answers arrived, divided by the time of the echo worker's steps. Up to
this ratio, the router keeps up with a token rate."""
SGLANG_ROUTER = (
    "{python} -m sglang_router.launch_router --worker-urls {{backend}} --host 127.0.0.1"
    " --port {{port}} --policy cache_aware --log-level warn"
)
"""Command of SGLang's router, as a ``peer``."""
_CLUSTER_ID = "bench"
_READY_S = 60.0
_RUN_S = 120.0
_CONTEXT_TOKENS = 8192

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RouterBenchSettings:
    """Settings of a measurement of a router."""

    model: Path
    """Folder of a model in Hugging Face format. Only its tokenizer is used."""
    rate: float = 200.0
    """Requests per second in the latency test."""
    requests: int = 2000
    warm_up_requests: int = 200
    prompt_words: int = 100
    """Number of words in a prompt; a word is about a token."""
    answer_tokens: int = 16
    step_s: float = 0.01
    """Duration of the echo worker's steps in the latency test, in seconds."""
    streams: int = 128
    """Number of concurrent answers in the throughput test."""
    tokens_per_s: tuple[int, ...] = (
        10_000,
        20_000,
        30_000,
        40_000,
        50_000,
        60_000,
        80_000,
        100_000,
    )
    """Token rates to try in the throughput test. They rise; the test ends at the first rate at
    which the router falls behind."""
    rate_s: float = 3.0
    """Duration of each token rate in the throughput test, in seconds."""
    first_token_id: int = 1000
    """Lowest token id in the echo worker's answers."""
    peer: str = ""
    """Command that starts another router, to be measured too; see
    ``loadtest.router.router_process``. If empty, only Baton's router is measured."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies in milliseconds of requests on one path, such as through the router, and the CPU
    time that the router used."""

    first_ms_p50: float
    first_ms_p99: float
    end_ms_p50: float
    end_ms_p99: float
    core_used: float
    """Share of a CPU core that the router used."""
    cpu_ms: float
    """CPU milliseconds of the router for each request."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Results of the throughput test at one token rate."""

    offered: float
    """Tokens per second that the echo worker was set to send."""
    passed: float
    """Tokens per second that the client received through the router."""
    events_per_token: float
    """Number of events that the client received, divided by the number of tokens. It is below 1 if
    tokens that arrive together share an event."""
    core_used: float
    cpu_us: float
    """CPU microseconds of the router for each token."""
    kept_up: bool


@dataclass(frozen=True, slots=True)
class RouterFigures:
    """All results of one router."""

    through: Latencies
    direct: Latencies
    rates: tuple[Rate, ...]

    @property
    def added_ms(self) -> tuple[float, float]:
        """Return p50 and p99 of the time that the router adds to the first event, in
        milliseconds."""
        through, direct = self.through, self.direct
        return (
            through.first_ms_p50 - direct.first_ms_p50,
            through.first_ms_p99 - direct.first_ms_p99,
        )

    @property
    def end_added_ms(self) -> tuple[float, float]:
        """Return p50 and p99 of the time that the router adds to the last event, in
        milliseconds."""
        through, direct = self.through, self.direct
        return through.end_ms_p50 - direct.end_ms_p50, through.end_ms_p99 - direct.end_ms_p99

    @property
    def tokens_per_s(self) -> float:
        """Return the highest token rate with which the router kept up; 0 if there is none."""
        return max((rate.passed for rate in self.rates if rate.kept_up), default=0.0)


def bench_router(
    settings: RouterBenchSettings, say: Say, console: Console, output: Path | None
) -> None:
    """Measure Baton's router and the peer, print tables, and write all results to ``output`` as
    JSON. Raises BatonError.

    Raises ConfigError before the measurement if ``output`` cannot be written.
    """
    if output is not None:
        write_json(output, "{}\n")
    if settings.peer:
        check_command(settings.peer)
    figures = asyncio.run(measure_router(settings, say))
    peer = asyncio.run(measure_peer(settings, say)) if settings.peer else None
    machine = this_machine()
    for title, measured in (("Baton", figures), ("the peer", peer)):
        if measured is not None:
            print_whole(console, draw(measured, title))
            print_whole(console, draw_rates(measured.rates, title))
    console.print(f"{machine.line()}.", markup=False, highlight=False, soft_wrap=True)
    if output is not None:
        write_json(output, as_json(machine, settings, figures, peer))


def as_json(
    machine: Machine,
    settings: RouterBenchSettings,
    figures: RouterFigures,
    peer: RouterFigures | None = None,
) -> str:
    """Return the figures of Baton's router and of the peer, and the machine, as JSON."""
    fields = _fields(figures)
    if peer is not None:
        fields["peer"] = _fields(peer)
    fields["settings"] = {**asdict(settings), "model": settings.model.name}
    fields["machine"] = asdict(machine)
    return json.dumps(fields, indent=1) + "\n"


def _fields(figures: RouterFigures) -> dict[str, object]:
    added, end_added = figures.added_ms, figures.end_added_ms
    return {
        "added_ms_p50": added[0],
        "added_ms_p99": added[1],
        "tokens_per_s": figures.tokens_per_s,
        "end_added_ms_p50": end_added[0],
        "end_added_ms_p99": end_added[1],
        "through": asdict(figures.through),
        "direct": asdict(figures.direct),
        "rates": [asdict(rate) for rate in figures.rates],
    }


def draw(figures: RouterFigures, title: str = "") -> Table:
    """Return a table of the latencies that were measured with one router."""
    columns = (
        "",
        "first event p50, ms",
        "p99",
        "end p50, ms",
        "p99",
        "router's core",
        "ms/request",
    )
    table = Table(*columns, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    through, direct = figures.through, figures.direct
    for name, row in (("through the router", through), ("direct", direct)):
        table.add_row(
            name,
            f"{row.first_ms_p50:.2f}",
            f"{row.first_ms_p99:.2f}",
            f"{row.end_ms_p50:.2f}",
            f"{row.end_ms_p99:.2f}",
            f"{row.core_used:.0%}",
            f"{row.cpu_ms:.2f}",
        )
    added = (*figures.added_ms, *figures.end_added_ms)
    table.add_row("added", *(f"{milliseconds:.2f}" for milliseconds in added))
    return table


def draw_rates(rates: Sequence[Rate], title: str = "") -> Table:
    """Return a table of the throughput test, with a row for each token rate."""
    columns = (
        "tokens/s offered",
        "passed on",
        "events per token",
        "router's core",
        "us/token",
        "kept up",
    )
    table = Table(*columns, title=title)
    for column in table.columns:
        column.justify = "right"
    for rate in rates:
        table.add_row(
            f"{rate.offered:.0f}",
            f"{rate.passed:.0f}",
            f"{rate.events_per_token:.2f}",
            f"{rate.core_used:.0%}",
            f"{rate.cpu_us:.1f}",
            "yes" if rate.kept_up else "no",
        )
    return table


async def measure_router(settings: RouterBenchSettings, say: Say) -> RouterFigures:
    """Start and measure Baton's router.

    Raises ConfigError on a machine with one core, and BatonError on failure.
    """
    router_core, load_core = _two_cores()
    # The path is short, since a socket's path is limited.
    with tempfile.TemporaryDirectory(prefix="baton-") as name, pinned(load_core):
        folder = Path(name)
        with bench_store(folder) as url:
            fields = {
                "redis_url": url,
                "cluster_id": _CLUSTER_ID,
                "context_length": _CONTEXT_TOKENS,
                "first_token_id": settings.first_token_id,
            }
            log = folder / "echo.log"
            async with (
                helper("loadtest.router.echo_worker", fields, log, ready_s=_READY_S) as echo,
                router_child(
                    Config(),
                    url,
                    _CLUSTER_ID,
                    settings.model,
                    folder / "router.log",
                    core=router_core,
                ) as router,
            ):
                direct = echo.hello | {"model_path": str(settings.model)}
                through = router.http, router.process
                return await _measure(settings, echo, direct, through, folder, say)


async def measure_peer(settings: RouterBenchSettings, say: Say) -> RouterFigures:
    """Start and measure the router of ``settings.peer``. Raises the errors of
    ``measure_router``."""
    router_core, load_core = _two_cores()
    with tempfile.TemporaryDirectory(prefix="baton-") as name, pinned(load_core):
        folder = Path(name)
        log = folder / "echo.log"
        async with helper("loadtest.router.echo_http", {}, log, ready_s=_READY_S) as echo:
            backend = f"{LOOPBACK}:{echo.hello['port']}"
            url = f"http://{backend}"
            async with peer_router(settings.peer, url, router_core, folder) as router:
                direct = {"http": backend, "model": SERVED_NAME}
                return await _measure(settings, echo, direct, router, folder, say)


def _two_cores() -> tuple[int, int]:
    usable = cores()
    if len(usable) < 2:
        raise ConfigError("two cores are needed: one for the router, one for the load")
    return usable[0], usable[1]


async def _measure(
    settings: RouterBenchSettings,
    echo: Helper,
    direct_start: Fields,
    router: tuple[str, psutil.Process],
    folder: Path,
    say: Say,
) -> RouterFigures:
    """Measure latency and token rates through a router.

    ``direct_start`` has the settings of a client process that sends requests directly to the echo
    worker. ``router`` is the router's host:port and its process.
    """
    http, process = router
    common: Fields = {"prompt_words": settings.prompt_words, "seed": 1}
    direct_start = common | direct_start
    http_start = common | {"http": http, "model": SERVED_NAME}
    log = folder / "client.log"
    module = "loadtest.router.stream_client"
    async with helper(module, direct_start, log, ready_s=_READY_S) as client:
        direct = await _latencies(settings, echo, client, process)
        say(f"direct: first token after {direct.first_ms_p50:.2f} ms")
    async with helper(module, http_start, log, ready_s=_READY_S) as client:
        through = await _latencies(settings, echo, client, process)
        say(f"through the router: first event after {through.first_ms_p50:.2f} ms")
        rates = []
        for offered in settings.tokens_per_s:
            rates.append(await _rate(settings, offered, echo, client, process))
            say(f"{offered} tokens/s offered: {rates[-1].passed:.0f} forwarded")
            if not rates[-1].kept_up:
                break
    return RouterFigures(through, direct, tuple(rates))


async def _latencies(
    settings: RouterBenchSettings, echo: Helper, client: Helper, process: psutil.Process
) -> Latencies:
    await echo.ask({"step_s": settings.step_s}, _RUN_S)
    question = {"do": "at_rate", "rate": settings.rate, "tokens": settings.answer_tokens}
    await client.ask(question | {"requests": settings.warm_up_requests}, _RUN_S)
    used = _CoreUse(process)
    answer = await client.ask(question | {"requests": settings.requests}, _RUN_S)
    share, cpu_ms = used.share(), used.seconds() * 1e3 / settings.requests
    (first_p50, first_p99), (end_p50, end_p99) = (
        np.percentile(answer[name], (50, 99)) for name in ("first_ms", "end_ms")
    )
    return Latencies(
        float(first_p50), float(first_p99), float(end_p50), float(end_p99), share, cpu_ms
    )


async def _rate(
    settings: RouterBenchSettings,
    offered: int,
    echo: Helper,
    client: Helper,
    process: psutil.Process,
) -> Rate:
    step_s = settings.streams / offered
    tokens = max(2, round(settings.rate_s / step_s)) + 1
    await echo.ask({"step_s": None}, _RUN_S)
    await client.ask({"do": "open", "streams": settings.streams, "tokens": tokens}, _RUN_S)
    used = _CoreUse(process)
    finish = asyncio.create_task(client.ask({"do": "finish", "tokens": tokens}, _RUN_S))
    await echo.ask({"step_s": step_s}, _RUN_S)
    answer = await finish
    return Rate(
        offered=offered,
        passed=answer["tokens"] / answer["seconds"],
        events_per_token=answer["events"] / answer["tokens"],
        core_used=used.share(),
        cpu_us=used.seconds() * 1e6 / answer["tokens"],
        kept_up=answer["seconds"] <= (tokens - 1) * step_s * KEPT_UP,
    )


class _CoreUse:
    """Measures the CPU time that a process has used since this object was made."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._began = time.perf_counter()
        self._before = self._total()

    def _total(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def seconds(self) -> float:
        """Return the CPU seconds that the process has used."""
        return self._total() - self._before

    def share(self) -> float:
        """Return the share of a CPU core that the process has used; 1 is one whole core."""
        return self.seconds() / (time.perf_counter() - self._began)


def main(
    model: ModelFolder,
    rate: Annotated[
        float, typer.Option(min=1, help="Requests per second during the latency test.")
    ] = 200.0,
    requests: Annotated[int, typer.Option(min=100, help="Requests of the latency test.")] = 2000,
    prompt_words: Annotated[int, typer.Option(min=1, help="Words per prompt.")] = 100,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 16,
    step_ms: Annotated[
        float,
        typer.Option(min=0, help="Milliseconds between an answer's tokens; 0 sends all at once."),
    ] = 10.0,
    streams: Annotated[
        int, typer.Option(min=1, help="Concurrent answers during the throughput test.")
    ] = 128,
    tokens_per_s: Annotated[
        str, typer.Option(help="Rates to try, until the router falls behind.")
    ] = "10000,20000,30000,40000,50000,60000,80000,100000",
    peer: Annotated[
        str,
        typer.Option(
            metavar="COMMAND",
            help="Also measure another HTTP router, started by this command with {backend} (a URL)"
            " and {port} in it.",
        ),
    ] = "",
    sglang_router: Annotated[
        Path | None,
        typer.Option(
            metavar="PYTHON",
            help="Also measure sglang-router, as --peer does: the Python of an environment that has"
            " it.",
        ),
    ] = None,
    output: Figures = None,
) -> None:
    """Measure the latency and the token rate of one router.

    The worker behind it echoes: no model runs, and the first token comes at once.
    """
    settings = RouterBenchSettings(
        model,
        rate=rate,
        requests=requests,
        prompt_words=prompt_words,
        answer_tokens=answer_tokens,
        step_s=step_ms / 1e3,
        streams=streams,
        tokens_per_s=counts_in(tokens_per_s),
        peer=SGLANG_ROUTER.format(python=sglang_router) if sglang_router else peer,
    )
    bench_router(settings, say, Console(), output)


app = bench_app(main)

if __name__ == "__main__":
    app()
