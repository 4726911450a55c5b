"""`baton drain`, `baton role` and `baton scale`: what operators tell a running cluster."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from deploy.command_line import Http, local_cluster
from deploy.option_group import takes
from deploy.tls_options import TlsOptions

if TYPE_CHECKING:
    from deploy.cluster_state import ClusterState

_ANSWER_S = 20.0
"""How much later than the deadline of a drain its answer may come."""
_DEFAULT_DEADLINE_S = 30.0
Deadline = Annotated[
    float,
    typer.Option(
        min=0, max=3600, help="Seconds; what is left then is ended there and placed elsewhere."
    ),
]
ApiKey = Annotated[
    str, typer.Option(envvar="BATON_API_KEY", help="An admin's, where the cluster asks for one.")
]


@takes(TlsOptions)
def drain(
    tls: TlsOptions,
    worker: Annotated[
        str, typer.Argument(help="As `baton status` calls it, decode-0; or a router, router-0.")
    ],
    deadline: Deadline = _DEFAULT_DEADLINE_S,
    http: Http = None,
    api_key: ApiKey = "",
) -> None:
    """Let a worker or a router leave: no new work, what runs ends or moves, then it exits with 0.

    A cluster that keeps its size starts another one in its place: that is a restart without loss.
    """
    cluster = local_cluster(http)
    if worker.startswith("router"):
        _drain_router(worker, cluster)
        return
    answer = _post(tls, cluster, http, api_key, f"workers/{worker}/drain", {"deadline_s": deadline})
    left = "" if answer["empty"] else "; what was left is placed elsewhere"
    typer.echo(f"{worker} is drained{left}")


@takes(TlsOptions)
def role(
    tls: TlsOptions,
    worker: Annotated[str, typer.Argument(help="As `baton status` calls it, prefill-1.")],
    to: Annotated[str, typer.Argument(metavar="prefill|decode")],
    deadline: Deadline = _DEFAULT_DEADLINE_S,
    http: Http = None,
    api_key: ApiKey = "",
) -> None:
    """Have a worker play the other role, with the weights and the cached blocks that it has."""
    body = {"role": to, "deadline_s": deadline}
    answer = _post(tls, local_cluster(http), http, api_key, f"workers/{worker}/role", body)
    typer.echo(f"{worker} is a {to} worker now; it took {answer['took_s']:.2f} s")


@takes(TlsOptions)
def scale(
    tls: TlsOptions,
    pool: Annotated[str, typer.Argument(help="Its name; `prefill` and `decode` by default.")],
    count: Annotated[int, typer.Argument(min=0, max=1024, help="Workers that it is to have.")],
    http: Http = None,
    api_key: ApiKey = "",
) -> None:
    """Choose how many workers a pool has: others are started, or the newest ones are drained.

    Does not wait until they are there or gone: `baton status` shows each.
    """
    answer = _post(tls, local_cluster(http), http, api_key, f"pools/{pool}/scale", {"count": count})
    typer.echo(f"{pool} is to have {count} workers; until now {answer['previous']}")


def _drain_router(name: str, cluster: ClusterState | None) -> None:
    pid = None if cluster is None else cluster.processes.get(name)
    if pid is None:
        _fail(f"there is no {name} on this machine; elsewhere, send it SIGTERM")
    os.kill(pid, signal.SIGTERM)
    typer.echo(f"{name} drains")


def _post(
    tls: TlsOptions,
    cluster: ClusterState | None,
    http: str | None,
    api_key: str,
    path: str,
    body: dict[str, Any],
) -> dict[str, Any]:
    import httpx  # noqa: PLC0415

    from baton.errors import BatonError  # noqa: PLC0415
    from baton.tls import client_context  # noqa: PLC0415

    front, files = tls.url_of(http, cluster, operators=True), tls.files(cluster, http or "")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    url = f"{front}/v1/{path}"
    try:
        timeout = float(body.get("deadline_s", 0.0)) + _ANSWER_S
        verify = True if files is None else client_context(files)
        answer = httpx.post(
            url, json=body, headers=headers, timeout=timeout, trust_env=False, verify=verify
        )
    except BatonError as error:
        _fail(error.message)
    except httpx.HTTPError as error:
        _fail(f"no router answers at {front} ({error}); is `baton up` running?")
    if answer.is_error:
        _fail(_message(answer))
    return dict(answer.json())


def _message(answer: Any) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the router answered {answer.status_code}: {answer.text[:300]}"


def _fail(message: str) -> NoReturn:
    typer.secho(f"error: {message}", fg=typer.colors.RED, err=True)
    raise typer.Exit(1)
