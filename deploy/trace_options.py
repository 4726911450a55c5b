"""What `baton simulate` and `baton plan` are told of a trace, and of the model that serves it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """How traces are read, and by what they are served."""

    model_config: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE", help="A config.json, for accelerators. Default: Llama 3.1 8B."
        ),
    ] = ""
    scale_time: Annotated[
        float, typer.Option(help="Divides the trace's times: 2 is twice the rate.")
    ] = 1.0
    scale_length: Annotated[float, typer.Option(help="Divides the trace's lengths.")] = 1.0
    block_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of a KV block. Default: the trace's, or 64.")
    ] = 0
    seed: Annotated[int, typer.Option(help="For policies that draw.")] = 0
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML, as for `baton up`: policy, SLOs, classes, admission, local prefill.",
        ),
    ] = None
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the figures there."),
    ] = None
