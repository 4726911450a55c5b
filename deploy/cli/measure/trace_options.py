"""Options of `baton simulate` and `baton plan` for the trace and the model that serves it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """How a trace is read, and which model serves it."""

    model_config: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="Model to simulate on GPUs: a name or a config.json. Default: Llama 3.1 8B.",
        ),
    ] = ""
    scale_time: Annotated[
        float, typer.Option(help="Divide the trace's times by this: 2 doubles the request rate.")
    ] = 1.0
    scale_length: Annotated[float, typer.Option(help="Divide the trace's lengths by this.")] = 1.0
    block_tokens: Annotated[
        int,
        typer.Option(
            min=0, show_default=False, help="Tokens per KV block. Default: the trace's, else 64."
        ),
    ] = 0
    seed: Annotated[int, typer.Option(help="Random seed, for policies that choose at random.")] = 0
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML configuration of the cluster: policy, SLOs, classes, admission, local"
            " prefill.",
        ),
    ] = None
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the results to FILE as JSON."),
    ] = None
