"""`baton why`: where the time of one request went."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from deploy.cli.operate.cluster_selection import ClusterId, target
from deploy.cli.operate.worker_commands import ApiKey
from deploy.cli.options.command_line import Http, fail, not_a_router
from deploy.cli.options.exit_codes import ExitCode
from deploy.cli.options.option_group import takes
from deploy.cli.options.output import Output, print_json, print_table
from deploy.cli.options.tls_options import TlsOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_ID = re.compile(r"[A-Za-z0-9._-]{1,160}", re.ASCII)
_MEANINGS = {
    "router": "read, tokenized, admitted and placed by the router",
    "lost": "attempts that failed or migrated",
    "reserve": "waited for room at the decode worker",
    "fetch": "cached blocks came from an offload tier or another worker",
    "prefill_wait": "waited for the first prefill step",
    "compute": "prefill steps",
    "transfer": "KV transfer that prefill did not hide",
    "first_decode": "waited for a decode step, and the step",
    "other": "network and event loops",
}


@takes(TlsOptions)
def why(
    tls: TlsOptions,
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST_ID",
            help="Id of the answer, or the x-request-id of the call.",
        ),
    ],
    cluster: ClusterId = None,
    http: Http = None,
    api_key: ApiKey = "",
    output: Output = "table",
) -> None:
    """Show where the time of a request went that has ended.

    The parts of its time to first token, its workers, why they were chosen, what was predicted, and
    each attempt. Any router of the cluster finds it: the one that is asked asks the others. Each
    router process keeps its last 4096 requests in memory.

        baton why chatcmpl-3f1c
        baton why my-request-7 --output json
    """
    from deploy.cli.operate.operator_client import OperatorClient  # noqa: PLC0415

    if _ID.fullmatch(request_id) is None:
        fail(f"{request_id!r} is not the id of a request", code=ExitCode.USAGE)
    chosen = target(http, cluster, only_reads=True)
    client = OperatorClient(tls, chosen, api_key)
    try:
        answer = client.get(f"requests/{request_id}", {})
        found: list[dict[str, Any]] = answer["data"]
        asked = _asked(answer["answered"], answer["routers"])
        if not found:
            fail(
                f"{chosen} has no ended request {request_id!r}: {asked}",
                "it may still run, be older than the last 4096 requests of its router, or have been"
                " refused before it was read; or its router has ended",
            )
        if answer["answered"] != answer["routers"]:
            typer.echo(f"there may be more requests with this id: {asked}", err=True)
        if output == "json":
            print_json(found)
            return
        for place, request in enumerate(found):
            if place:
                typer.echo()
            show(request)
    except (KeyError, TypeError):
        fail(not_a_router(chosen.address))


def _asked(answered: int, routers: int | None) -> str:
    if routers is None:
        return (
            "only one router was asked, since Redis does not answer it, or its user of Redis lacks"
            " the current deploy/redis/users.acl"
        )
    return f"{answered} of {routers} router processes answered"


def show(request: Mapping[str, Any]) -> None:
    """Print one request, as the endpoint returns it."""
    for line in _head(request):
        typer.echo(line)
    _show_parts("time to first token", request["ttft_ms"], request["ttft_parts_ms"])
    _show_parts("then to the second", request["second_token_ms"], request["second_token_parts_ms"])
    for attempt in request["attempts"]:
        typer.echo()
        _show_attempt(attempt)
    if request["dropped_attempts"]:
        typer.echo(f"\n{request['dropped_attempts']} attempts in between were not kept")


def _head(request: Mapping[str, Any]) -> Sequence[str]:
    ended = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(request["ended_at"]))
    outcome = request["outcome"] + (f" ({request['code']})" if request["code"] else "")
    ids = {"x-request-id": request["request_id"], "trace": request["trace_id"]}
    lines = [
        f"{request['id']}  {outcome} after {_ms(request['took_ms'])}, ended {ended}",
        f"  served by {request['router']}",
        *(f"  {name} {value}" for name, value in ids.items() if value),
        f"  tenant {request['tenant']}, key {request['key'] or '-'}, class {request['class']}",
        f"  {request['prompt_tokens']} prompt tokens, {request['cached_prompt_tokens']} of them"
        f" cached; {request['output_tokens']} output tokens",
    ]
    if request["admission_ms"] is not None:
        lines.append(f"  waited {_ms(request['admission_ms'])} for admission")
    if request["ttft_ms"] is None:
        lines.append("  it had no first token")
    elif request["ttft_ms"] > request["slo_ttft_ms"]:
        lines.append(f"  missed its SLO for the first token, {_ms(request['slo_ttft_ms'])}")
    return lines


def _show_parts(title: str, total: float | None, parts: Mapping[str, float]) -> None:
    if total is None:
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True)
    table.add_row(title, _ms(total), "", "")
    for name, part in parts.items():
        share = f"{part / total:.0%}" if total > 0 else "-"
        table.add_row(f"  {name}", _ms(part), share, _MEANINGS.get(name, ""))
    typer.echo()
    print_table(table)


def _show_attempt(attempt: Mapping[str, Any]) -> None:
    source, target_worker = attempt["prefill_worker"], attempt["decode_worker"]
    way = f"{source} alone" if source == target_worker else f"{source} → {target_worker}"
    cause = f", after {attempt['migration']}" if attempt["migration"] else ""
    end = f"; ended by {attempt['ended_by']}" if attempt["ended_by"] else ""
    typer.echo(
        f"attempt {attempt['number']} after {_ms(attempt['begun_ms'])}{cause}: {way}, chosen by"
        f" {attempt['reason']}{end}"
    )
    table = Table(box=None, pad_edge=False)
    for title in ("", "predicted", "measured"):
        table.add_column(title, no_wrap=True, justify="right" if title else "left")
    rows = (
        ("  tokens to compute", attempt["predicted_computed_tokens"], attempt["computed_tokens"]),
        ("  wait for the first step", attempt["predicted_wait_ms"], attempt["wait_ms"]),
        ("  of it, room at the decode worker", None, attempt["reserve_ms"]),
        ("  of it, fetching cached blocks", None, attempt["fetch_ms"]),
        ("  prefill steps", attempt["predicted_compute_ms"], attempt["compute_ms"]),
        ("  of it, for this prompt", None, attempt["own_compute_ms"]),
        ("  transfer after the last step", None, attempt["transfer_ms"]),
    )
    for title, predicted, measured in rows:
        table.add_row(title, _value(predicted), _value(measured))
    print_table(table)


def _value(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else _ms(value)


def _ms(milliseconds: float) -> str:
    if milliseconds >= 10_000:
        return f"{milliseconds / 1e3:.1f} s"
    return f"{milliseconds:.1f} ms"
