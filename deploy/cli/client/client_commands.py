"""`baton batch`: runs a file of requests on a running cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deploy.cli.operate.cluster_selection import ClusterId, target
from deploy.cli.options.command_line import (
    INTERRUPTED,
    ApiKey,
    Http,
    clear_errors,
    fail,
    say,
)
from deploy.cli.options.exit_codes import ExitCode
from deploy.cli.options.option_group import takes
from deploy.cli.options.tls_options import TlsOptions


@takes(TlsOptions)
def batch(
    tls: TlsOptions,
    file: Annotated[
        Path | None,
        typer.Argument(
            exists=True,
            dir_okay=False,
            help="JSON lines in the format of OpenAI's batches: one request per line.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write answers to FILE, and lines without an answer to FILE with .errors in its"
            " name. Default: the input's name with .results.jsonl.",
        ),
    ] = None,
    batch_id: Annotated[
        str,
        typer.Option(
            "--id", metavar="ID", help="Wait for the batch with this id, instead of starting one."
        ),
    ] = "",
    window: Annotated[
        str,
        typer.Option(
            metavar="30d|24h|45m",
            help="Time after which the batch expires; finished lines are kept.",
        ),
    ] = "24h",
    http: Http = None,
    cluster: ClusterId = None,
    api_key: ApiKey = "",
) -> None:
    """Run a file of requests at the lowest priority.

    The command waits for the results. Ctrl-C leaves the batch running: --id waits for it again.
    Exit code 3: some lines have no answer.

        baton batch requests.jsonl --output answers.jsonl
    """
    from baton.client.http_api import open_api  # noqa: PLC0415
    from baton.errors import BatonError  # noqa: PLC0415
    from deploy.cli.client.batch_command import BatchCommand, run_batch  # noqa: PLC0415

    if (file is None) == (not batch_id):
        fail("give either a file or --id", code=ExitCode.USAGE)
    # Prompts and a key go only to a listener that the user has named, or to the user's own cluster.
    state = target(http, cluster).cluster
    url, files = tls.url_of(http, state), tls.files(state)
    with clear_errors(), open_api(url, api_key, files) as client:
        command = BatchCommand(client, say, Console(stderr=True))
        try:
            code = run_batch(command, file, batch_id, window, output)
        except (BatonError, OSError) as error:
            fail(str(error))
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(code)
