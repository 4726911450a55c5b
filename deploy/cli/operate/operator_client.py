"""The operators' endpoints of a router, as `baton drain`, `role` and `scale` use them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from deploy.cli.operate.cluster_selection import Target
from deploy.cli.options.command_line import fail, not_a_router
from deploy.cli.options.exit_codes import ExitCode
from deploy.cli.options.tls_options import TlsOptions

_ANSWER_S = 20.0
"""Time for which to wait for a router's answer after the deadline of a drain or a role change, in
seconds."""
_CONFLICT = 409


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """A router's report on a worker. Requests are counted as sequences."""

    slot: str
    role: str
    state: str
    running: int
    waiting: int
    is_last: bool
    """Whether no other worker of the same role is ready."""

    @property
    def fate(self) -> str:
        """Return a text that says what happens to the worker's requests when it leaves its role."""
        state = "" if self.state == "ready" else f"it is {self.state}; "
        requests = f"{self.running} running and {self.waiting} waiting requests"
        return f"{state}{requests} end there or move to other workers"


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """A router's report on its cluster."""

    id: str
    model: str
    address: str
    """Address of the router, host:port."""
    workers: tuple[WorkerFacts, ...]
    pools: dict[str, int]
    """Number of workers that each pool should have."""

    def __str__(self) -> str:
        return f"cluster {self.id} at {self.address} (model {self.model})"

    def worker(self, slot: str) -> WorkerFacts:
        """Return the report on the worker in ``slot``. Ends the command if there is no such
        worker."""
        found = {one.slot: one for one in self.workers}
        if slot not in found:
            fail(f"{self} has no worker {slot!r}; its workers: {', '.join(found) or 'none'}")
        return found[slot]


class OperatorClient:
    """Calls the operators' endpoints of one router; every failure ends the command with a
    message."""

    def __init__(
        self, tls: TlsOptions, target: Target, api_key: str, *, operators: bool = True
    ) -> None:
        """``operators`` is true to call the endpoints at the cluster's ``admin_http`` address, if
        there is one."""
        self._tls = tls
        self._target = target
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        # The address that the user gave for a cluster here was replaced by that of its operators'
        # endpoints.
        http = target.http if operators or target.cluster is None else None
        self._url = tls.url_of(http, target.cluster, operators=operators)

    def look(self) -> ClusterFacts:
        """Return the router's current report on its cluster. Ends the command if the router belongs
        to another cluster."""
        address = self._target.address
        try:
            facts = _facts(self._ask("GET", "cluster"), address)
        except (KeyError, TypeError):
            fail(not_a_router(address))
        known = self._target.cluster
        if known is not None and facts.id != known.cluster_id:
            fail(
                f"the router at {address} belongs to cluster {facts.id}, not to "
                f"{known.cluster_id}: nothing was changed"
            )
        return facts

    def get(self, path: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Send a GET request to an operators' endpoint. ``path`` is relative to /v1."""
        return self._ask("GET", path, query=query)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a POST request to an operators' endpoint. ``path`` is relative to /v1."""
        return self._ask("POST", path, body)

    def _ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        query: Mapping[str, str] = MappingProxyType({}),
    ) -> dict[str, Any]:
        import httpx  # noqa: PLC0415

        from baton.errors import BatonError  # noqa: PLC0415
        from baton.security.tls import client_context  # noqa: PLC0415

        timeout = float((body or {}).get("deadline_s", 0.0)) + _ANSWER_S
        try:
            files = self._tls.files(self._target.cluster, self._target.http or "")
            answer = httpx.request(
                method,
                f"{self._url}/v1/{path}",
                json=body,
                params=dict(query),
                headers=self._headers,
                timeout=timeout,
                trust_env=False,
                verify=True if files is None else client_context(files),
            )
        except BatonError as error:
            fail(error.message)
        except httpx.HTTPError as error:
            fail(f"no router answers at {self._url} ({error}): is the cluster running?")
        if answer.is_error:
            refused = answer.status_code == _CONFLICT
            text = f"router {self._target.address}: {_message(answer)}"
            fail(text, code=ExitCode.REFUSED if refused else ExitCode.FAILED)
        try:
            answered = answer.json()
        except ValueError:
            answered = None
        if not isinstance(answered, dict):
            fail(not_a_router(self._target.address))
        return answered


def _facts(answered: dict[str, Any], address: str) -> ClusterFacts:
    """Parse a router's report on its cluster. Raises KeyError or TypeError if ``answered`` is not
    such a report."""
    fields = WorkerFacts.__dataclass_fields__
    return ClusterFacts(
        answered["id"],
        answered["model"],
        address,
        tuple(WorkerFacts(**{name: one[name] for name in fields}) for one in answered["workers"]),
        {pool["name"]: pool["count"] for pool in answered["pools"]},
    )


def _message(answer: Any) -> str:
    try:
        error = answer.json()["error"]
        if error["code"] == "unknown_url":
            return (
                "it has another version, or is not a Baton router: it has no operators' endpoints"
            )
        return str(error["message"])
    except (ValueError, KeyError, TypeError):
        return f"it answered {answer.status_code}: {answer.text[:300]}"
