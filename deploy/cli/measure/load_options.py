"""The options of the commands that drive a server: `baton bench serve`, `goodput` and `soak`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.operate.cluster_selection import ClusterId, cluster_of_client
from deploy.cli.options.choices import Arrivals, Endpoint
from deploy.cli.options.command_line import CONNECTION, fail
from deploy.cli.options.exit_codes import ExitCode
from deploy.cli.options.tls_options import TlsOptions

if TYPE_CHECKING:
    from loadtest.generator.load_bench import Outputs
    from loadtest.generator.load_settings import LoadSettings, ServerSettings, TrafficSettings

LOAD = "Load"
_REQUESTS = "Requests"
_RESULTS = "Results"
"""Name of the help panel with the options on results."""
_LENGTHS = "128, uniform:64-256, normal:MEAN,DEVIATION[,MAX] or lognormal:MEDIAN,SIGMA[,MAX]."


@dataclass(frozen=True, slots=True)
class LoadOptions(TlsOptions):
    """Options that describe the server under load, the load, and which requests meet the SLOs."""

    url: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="URL of a server with OpenAI's API. Default: your cluster on this machine.",
            rich_help_panel=CONNECTION,
        ),
    ] = ""
    cluster: ClusterId = None
    grpc: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Send gRPC to this Baton router, instead of HTTP.",
            rich_help_panel=CONNECTION,
        ),
    ] = ""
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="Model to ask for. Default: the first one that the server lists.",
            rich_help_panel=_REQUESTS,
        ),
    ] = ""
    endpoint: Annotated[
        Endpoint,
        typer.Option(
            help="API to use. With completions, prompts have exact lengths.",
            rich_help_panel=_REQUESTS,
        ),
    ] = "completions"
    arrivals: Annotated[
        Arrivals | None,
        typer.Option(
            help="When requests are sent. Default: trace with --trace, else poisson.",
            rich_help_panel=LOAD,
        ),
    ] = None
    burstiness: Annotated[
        float,
        typer.Option(
            help="Shape of --arrivals gamma: below 1 burstier than poisson, above 1 smoother.",
            rich_help_panel=LOAD,
        ),
    ] = 1.0
    ramp_from: Annotated[
        float,
        typer.Option(
            help="Requests per second at the start of --arrivals ramp, which ends at --rate.",
            rich_help_panel=LOAD,
        ),
    ] = 0.0
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="SECONDS",
            help="Duration of the load. Default: that of the trace, else 60.",
            rich_help_panel=LOAD,
        ),
    ] = None
    warm_up: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Time at the start that does not count. Default: 10 % of the load, at most 10 s.",
            rich_help_panel=LOAD,
        ),
    ] = None
    cool_down: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Time at the end that does not count. Default: 10 % of the load, at most 5 s.",
            rich_help_panel=LOAD,
        ),
    ] = None
    input: Annotated[
        str,
        typer.Option(
            metavar="LENGTHS",
            help=f"Prompt length in tokens: {_LENGTHS}",
            rich_help_panel=_REQUESTS,
        ),
    ] = "128"
    output: Annotated[
        str,
        typer.Option(
            metavar="LENGTHS",
            help="Answer length in tokens, as --input.",
            rich_help_panel=_REQUESTS,
        ),
    ] = "128"
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|FOLDER",
            help="Prompts from .jsonl files, with `prompt`, `turns` or `messages` in each row.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Replay this trace: Mooncake's JSON lines or Azure's CSV, plain or .gz.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None
    scale_time: Annotated[
        float,
        typer.Option(
            help="Divide the trace's times by this: 2 doubles the request rate.",
            rich_help_panel=_REQUESTS,
        ),
    ] = 1.0
    scale_length: Annotated[
        float, typer.Option(help="Divide the trace's lengths by this.", rich_help_panel=_REQUESTS)
    ] = 1.0
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Maximum tokens of a prompt and its answer in a trace; longer ones are cut.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None
    slo: Annotated[
        str,
        typer.Option(
            metavar="TARGETS",
            help="Latency targets, in seconds or with a unit: ttft=2,tpot=100ms,e2el=30s.",
            rich_help_panel=_RESULTS,
        ),
    ] = "ttft=2,tpot=0.1"
    buckets: Annotated[
        str,
        typer.Option(
            metavar="N,…",
            help="Prompt lengths that divide the results into groups.",
            rich_help_panel=_RESULTS,
        ),
    ] = "512,4096"
    ignore_eos: Annotated[
        bool,
        typer.Option(
            help="Generate answers of the exact length; not every server can.",
            rich_help_panel=_REQUESTS,
        ),
    ] = True
    temperature: Annotated[
        float,
        typer.Option(
            min=0,
            help="Sampling temperature; 0 takes the most likely token.",
            rich_help_panel=_REQUESTS,
        ),
    ] = 0.0
    timeout: Annotated[
        float,
        typer.Option(
            min=0.1,
            metavar="SECONDS",
            help="Time after which a request is aborted.",
            rich_help_panel=LOAD,
        ),
    ] = 300.0
    seed: Annotated[
        int,
        typer.Option(min=0, help="Random seed of lengths and arrivals.", rich_help_panel=_REQUESTS),
    ] = 0
    metrics: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Prometheus page with queues and batches. Default: the server's /metrics.",
            rich_help_panel=_RESULTS,
        ),
    ] = ""
    api_key: Annotated[
        str,
        typer.Option(
            envvar="BATON_API_KEY",
            help="API key, if the server requires one.",
            rich_help_panel=CONNECTION,
        ),
    ] = ""
    json: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Write the results to FILE as JSON.",
            rich_help_panel=_RESULTS,
        ),
    ] = None
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Write a self-contained HTML report with plots.",
            rich_help_panel=_RESULTS,
        ),
    ] = None
    records: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the times of every request as JSON lines.",
            rich_help_panel=_RESULTS,
        ),
    ] = None

    def settings(
        self,
        *,
        rate: float | None = None,
        concurrency: int | None = None,
        requests: int | None = None,
    ) -> LoadSettings:
        """Make the settings of a load from the options. Raises ConfigError."""
        from loadtest.generator.load_settings import LoadSettings, PaceSettings  # noqa: PLC0415
        from loadtest.generator.results.summary import parse_bounds  # noqa: PLC0415
        from planning.common.slo import Slo  # noqa: PLC0415

        pace = PaceSettings(
            rate=rate,
            arrivals=self.arrivals,
            burstiness=self.burstiness,
            first_rate=self.ramp_from,
            concurrency=concurrency,
            seconds=self.seconds,
            requests=requests,
            warm_up_s=self.warm_up,
            cool_down_s=self.cool_down,
        )
        return LoadSettings(
            self._server(), self._traffic(), pace, Slo.parse(self.slo), parse_bounds(self.buckets)
        )

    def outputs(self) -> Outputs:
        """Return the files to which the command writes its report and its records."""
        from loadtest.generator.load_bench import Outputs  # noqa: PLC0415

        return Outputs(self.json, self.html, self.records)

    def _server(self) -> ServerSettings:
        from loadtest.generator.load_settings import ServerSettings  # noqa: PLC0415

        cluster = None if self.url else cluster_of_client(self.cluster)
        url = self.url or self.url_of(None, cluster)
        return ServerSettings(
            # Other clients accept a URL with /v1 too.
            url=url.rstrip("/").removesuffix("/v1"),
            grpc=self.grpc,
            endpoint=self.endpoint,
            model=self.model,
            api_key=self.api_key,
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
            timeout_s=self.timeout,
            metrics=self.metrics,
            tls=self.files(cluster, url),
        )

    def _traffic(self) -> TrafficSettings:
        from loadtest.generator.load_settings import TrafficSettings  # noqa: PLC0415
        from loadtest.generator.workload.lengths import Lengths  # noqa: PLC0415

        if self.prompts is not None and self.trace is not None:
            fail("give --prompts or --trace, not both", code=ExitCode.USAGE)
        return TrafficSettings(
            inputs=Lengths.parse(self.input),
            outputs=Lengths.parse(self.output),
            prompts=self.prompts,
            trace=self.trace,
            scale_time=self.scale_time,
            scale_length=self.scale_length,
            max_tokens=self.max_tokens,
            seed=self.seed,
        )
