"""Defines the settings of a load: its requests, the server, and which requests count."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from baton.errors import ConfigError
from baton.security.tls import TlsFiles
from loadtest.generator.results.summary import DEFAULT_BOUNDS, Window
from loadtest.generator.targets.openai_target import Endpoint
from loadtest.generator.workload.arrival_process import ArrivalProcess, Kind
from loadtest.generator.workload.lengths import Lengths
from loadtest.generator.workload.prompts import Form, read_prompts
from loadtest.generator.workload.traffic import DrawnLengths, PromptList, Source, TraceRows
from planning.common.slo import Slo
from planning.common.traces import Trace, read_trace

Arrivals = Kind | Literal["trace"]

_ARRIVALS = 5
_WARM_UP_SHARE, _MAX_WARM_UP_S = 0.1, 10.0
_COOL_DOWN_SHARE, _MAX_COOL_DOWN_S = 0.1, 5.0
_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of the server under load, and of its API."""

    url: str = "http://127.0.0.1:8000"
    """URL of a server with OpenAI's API, with or without a path in front of /v1."""
    grpc: str = ""
    """Address of a Baton router's gRPC listener, host:port. If it is given, requests go there, and
    not to ``url``."""
    endpoint: Endpoint = "completions"
    model: str = ""
    """Id of the model in the server's API. If empty, the first model that the server lists is
    used."""
    api_key: str = field(default="", repr=False)
    temperature: float = 0.0
    ignore_eos: bool = True
    timeout_s: float = 300.0
    metrics: str = ""
    """URL of the server or of the metrics page from which metrics are read. If empty, it is
    ``url``."""
    tls: TlsFiles | None = None
    """CA and client certificate for an https ``url``, or for ``grpc``. If None, https trusts the
    system's CAs, and gRPC does not use TLS."""

    @property
    def form(self) -> Form:
        """Return the form of random prompts: text or token ids. Token ids give exact lengths, but
        the chat endpoint accepts only text."""
        return "text" if self.endpoint == "chat" and not self.grpc else "tokens"


@dataclass(frozen=True, slots=True)
class TrafficSettings:
    """Settings of the requests' content and lengths."""

    inputs: Lengths = field(default_factory=lambda: Lengths("fixed", 128))
    outputs: Lengths = field(default_factory=lambda: Lengths("fixed", 128))
    prompts: Path | None = None
    """File or folder of prompts, used instead of random prompts with lengths from ``inputs``."""
    trace: Path | None = None
    """File of recorded traffic, used instead of random lengths."""
    scale_time: float = 1.0
    scale_length: float = 1.0
    max_tokens: int | None = None
    """Maximum number of tokens of a prompt and its answer together. It applies when a trace is
    replayed; longer requests are shortened."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PaceSettings:
    """Settings that determine when requests are sent, and which requests count."""

    rate: float | None = None
    """Rate of an open loop, in requests per second. If None, it is the rate of the trace."""
    arrivals: Arrivals | None = None
    """Arrival process of an open loop. If None, the arrival times are those of the trace, or a
    Poisson process if there is no trace."""
    burstiness: float = 1.0
    first_rate: float = 0.0
    concurrency: int | None = None
    """Number of requests in flight in a closed loop. None means an open loop."""
    seconds: float | None = None
    """Duration of sending, in seconds. If None, it is a minute, or until the trace ends or
    ``requests`` are sent."""
    requests: int | None = None
    """Maximum number of requests that the run sends."""
    warm_up_s: float | None = None
    """Seconds at the beginning of the run whose requests do not count; If None, they are a tenth of
    the duration of sending, at most 10 seconds."""
    cool_down_s: float | None = None
    """Seconds at the end of sending whose requests do not count; If None, they are a tenth of the
    duration of sending, at most 5 seconds."""


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """All settings of a run."""

    server: ServerSettings
    traffic: TrafficSettings
    pace: PaceSettings
    slo: Slo = field(default_factory=Slo)
    bounds: tuple[int, ...] = DEFAULT_BOUNDS
    """Upper bounds of the buckets of input lengths, in tokens. Results are shown by bucket."""

    def fields(self) -> dict[str, Any]:
        """Return the settings' fields for JSON, without credentials and with paths as text."""
        secret = ("api_key", "tls")
        server = {name: value for name, value in asdict(self.server).items() if name not in secret}
        traffic = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(self.traffic).items()
        }
        return {"server": server, "traffic": traffic, "pace": asdict(self.pace)}


@dataclass(frozen=True, slots=True)
class RunTraffic:
    """The requests of a run. In an open loop, each request has a time in ``times_s``; in a closed
    loop, that is empty."""

    source: Source
    times_s: tuple[float, ...]
    seconds: float
    """Duration of sending, in seconds; infinite if the run ends by its number of requests."""


def open_trace(settings: TrafficSettings) -> Trace | None:
    """Return the trace to replay. Raises ConfigError."""
    if settings.trace is None:
        return None
    trace = read_trace(settings.trace, settings.scale_time, settings.scale_length)
    return trace if settings.max_tokens is None else trace.within(settings.max_tokens)


def make_traffic(settings: LoadSettings, trace: Trace | None, run: int = 0) -> RunTraffic:
    """Return a run's requests. ``trace`` is the result of ``open_trace``. Raises ConfigError.

    A different ``run`` number gives prompts with different text, unless the prompts come from a
    file.
    """
    source = _source(settings, trace, run)
    pace = settings.pace
    if pace.concurrency is not None:
        if pace.requests is not None:
            return RunTraffic(source, (), pace.seconds or math.inf)
        return RunTraffic(source, (), pace.seconds or _SECONDS)
    times, seconds = _times(pace, trace, settings.traffic.seed)
    if pace.requests is not None and pace.requests < len(times):
        times, seconds = times[: pace.requests], times[pace.requests]
    return RunTraffic(source, tuple(times), seconds)


def _source(settings: LoadSettings, trace: Trace | None, run: int) -> Source:
    traffic, form = settings.traffic, settings.server.form
    if trace is not None:
        return TraceRows(trace, form, seed=traffic.seed, run=run)
    if traffic.prompts is not None:
        return PromptList(read_prompts(traffic.prompts), traffic.outputs, seed=traffic.seed)
    return DrawnLengths(traffic.inputs, traffic.outputs, form, seed=traffic.seed, run=run)


def _times(pace: PaceSettings, trace: Trace | None, seed: int) -> tuple[list[float], float]:
    """Return the times at which requests are due, and the duration of sending in seconds."""
    arrivals = pace.arrivals or ("poisson" if trace is None else "trace")
    if arrivals != "trace":
        if pace.rate is None:
            raise ConfigError(f"arrivals of the kind {arrivals} need a rate")
        seconds = pace.seconds or _SECONDS
        process = ArrivalProcess(arrivals, pace.rate, pace.burstiness, pace.first_rate)
        generator = np.random.default_rng((seed, _ARRIVALS))
        return process.times(seconds, generator).tolist(), seconds
    if trace is None:
        raise ConfigError("arrivals of the kind trace need a trace")
    if pace.rate is not None:
        seconds = pace.seconds or _SECONDS
        return [row.arrival_s for row in trace.at_rate(pace.rate, seconds)], seconds
    count = len(trace.requests)
    whole_s = trace.span_s * count / max(1, count - 1)
    seconds = pace.seconds or whole_s
    times = [row.arrival_s for row in trace.requests if row.arrival_s < max(seconds, 1e-9)]
    return times, min(seconds, whole_s)


def counted(pace: PaceSettings, sending_s: float) -> Window:
    """Return the part of a run whose requests count, if requests are sent for ``sending_s``
    seconds.

    Raises ConfigError if it is empty.
    """
    warm_up_s, cool_down_s = pace.warm_up_s, pace.cool_down_s
    if warm_up_s is None:
        warm_up_s = min(_WARM_UP_SHARE * sending_s, _MAX_WARM_UP_S)
    if cool_down_s is None:
        cool_down_s = min(_COOL_DOWN_SHARE * sending_s, _MAX_COOL_DOWN_S)
    if warm_up_s + cool_down_s >= sending_s > 0:
        raise ConfigError(
            f"a warm-up of {warm_up_s:g} s and a cool-down of {cool_down_s:g} s leave nothing of"
            f" {sending_s:.1f} s"
        )
    return Window(warm_up_s, sending_s - cool_down_s)
