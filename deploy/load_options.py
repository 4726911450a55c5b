"""The options of the commands that drive a server: `baton bench serve`, `goodput` and `soak`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from deploy.command_line import fail, local_cluster
from deploy.tls_options import TlsOptions

if TYPE_CHECKING:
    from loadtest.generator.load_bench import Outputs
    from loadtest.generator.load_settings import LoadSettings, ServerSettings, TrafficSettings

_LENGTHS = "128, uniform:64-256, normal:MEAN,DEVIATION[,MOST] or lognormal:MEDIAN,SIGMA[,MOST]."


@dataclass(frozen=True, slots=True)
class LoadOptions(TlsOptions):
    """Who is driven, with what, and what counts."""

    url: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Any server of OpenAI's API. Default: the cluster on this machine.",
        ),
    ] = ""
    grpc: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Drive a Baton router's gRPC front, instead of HTTP."
        ),
    ] = ""
    model: Annotated[str, typer.Option(help="Default: the first that the server lists.")] = ""
    endpoint: Annotated[
        str, typer.Option(help="completions (prompts have exact lengths) or chat.")
    ] = "completions"
    arrivals: Annotated[
        str,
        typer.Option(
            help="poisson, gamma, constant, ramp, or trace: as recorded. Default: that of the trace"
            " where there is one, otherwise poisson."
        ),
    ] = ""
    burstiness: Annotated[
        float, typer.Option(help="Of gamma arrivals: below 1 in bursts, above it evener.")
    ] = 1.0
    ramp_from: Annotated[float, typer.Option(help="The rate at which a ramp begins.")] = 0.0
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0.1, help="In which requests are sent. Default: 60, or as long as the trace."
        ),
    ] = None
    warm_up: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds at first that do not count. Default: 10 %, at most 10."),
    ] = None
    cool_down: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds at last that do not count. Default: 10 %, at most 5."),
    ] = None
    input: Annotated[
        str, typer.Option(metavar="LENGTHS", help=f"Tokens of prompts: {_LENGTHS}")
    ] = "128"
    output: Annotated[
        str, typer.Option(metavar="LENGTHS", help="Tokens of answers, written likewise.")
    ] = "128"
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE|FOLDER", help="Prompts of .jsonl: prompt, turns or messages."),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Replay Mooncake's JSON lines or Azure's CSV, plain or .gz."
        ),
    ] = None
    scale_time: Annotated[float, typer.Option(help="A trace's times are divided by it.")] = 1.0
    scale_length: Annotated[float, typer.Option(help="A trace's lengths are divided by it.")] = 1.0
    most_tokens: Annotated[
        int | None,
        typer.Option(min=2, help="A trace's prompts and answers are cut to fit so many together."),
    ] = None
    slo: Annotated[
        str, typer.Option(help="In seconds, or with a unit: ttft=2,tpot=100ms,e2el=30s.")
    ] = "ttft=2,tpot=0.1"
    buckets: Annotated[
        str, typer.Option(help="Input tokens up to which each bucket of the tables reaches.")
    ] = "512,4096"
    ignore_eos: Annotated[
        bool, typer.Option(help="Answers go on to their planned length; not every server can.")
    ] = True
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest tokens.")] = 0.0
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds until a request is given up: aborted.")
    ] = 300.0
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same lengths and arrivals.")] = 0
    metrics: Annotated[
        str,
        typer.Option(
            metavar="URL", help="Where queues and batches are read. Default: the server's /metrics."
        ),
    ] = ""
    api_key: Annotated[
        str, typer.Option(envvar="BATON_API_KEY", help="Where the server asks for one.")
    ] = ""
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")
    ] = None
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page with plots, complete in itself."),
    ] = None
    records: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the times of every request, as JSON lines."),
    ] = None

    def settings(
        self,
        *,
        rate: float | None = None,
        concurrency: int | None = None,
        requests: int | None = None,
    ) -> LoadSettings:
        """Raises ConfigError; ends the command where a word is none of those that are known."""
        from loadtest.generator.load_settings import (  # noqa: PLC0415
            Arrivals,
            LoadSettings,
            PaceSettings,
        )
        from loadtest.generator.slo import Slo  # noqa: PLC0415
        from loadtest.generator.summary import parse_bounds  # noqa: PLC0415

        kinds = [name for part in get_args(Arrivals) for name in get_args(part) or (part,)]
        if self.arrivals and self.arrivals not in kinds:
            fail(f"--arrivals: {self.arrivals!r} is none of {', '.join(kinds)}")
        pace = PaceSettings(
            rate=rate,
            arrivals=cast(Arrivals, self.arrivals) if self.arrivals else None,
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
        """Where the report goes."""
        from loadtest.generator.load_bench import Outputs  # noqa: PLC0415

        return Outputs(self.json, self.html, self.records)

    def _server(self) -> ServerSettings:
        from loadtest.generator.load_settings import ServerSettings  # noqa: PLC0415
        from loadtest.generator.openai_target import Endpoint  # noqa: PLC0415

        if self.endpoint not in get_args(Endpoint):
            fail(f"--endpoint: {self.endpoint!r} is none of {', '.join(get_args(Endpoint))}")
        cluster = None if self.url else local_cluster()
        url = self.url or self.url_of(None, cluster)
        return ServerSettings(
            # As other clients take it too.
            url=url.rstrip("/").removesuffix("/v1"),
            grpc=self.grpc,
            endpoint=cast(Endpoint, self.endpoint),
            model=self.model,
            api_key=self.api_key,
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
            timeout_s=self.timeout,
            metrics=self.metrics,
            tls=self.files(cluster, url),
        )

    def _traffic(self) -> TrafficSettings:
        from loadtest.generator.lengths import Lengths  # noqa: PLC0415
        from loadtest.generator.load_settings import TrafficSettings  # noqa: PLC0415

        if self.prompts is not None and self.trace is not None:
            fail("give --prompts or --trace, not both")
        return TrafficSettings(
            inputs=Lengths.parse(self.input),
            outputs=Lengths.parse(self.output),
            prompts=self.prompts,
            trace=self.trace,
            scale_time=self.scale_time,
            scale_length=self.scale_length,
            most_tokens=self.most_tokens,
            seed=self.seed,
        )
