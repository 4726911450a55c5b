"""A router process: a child of the launcher, or a separate router (`baton router`).

A child is one of several that may share the ports:

    new → starting → healthy → (died → starting) → stopped
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NoReturn

import httpx
import redis
from prometheus_client.multiprocess import mark_process_dead

from baton.client.headers import ROUTER_HEADER
from baton.config.cluster import Config
from baton.errors import BatonError, ConfigError
from baton.security.tls import TlsFiles, pinned_context
from baton.store.redis_client import redis_client
from baton.store.registry import Registry
from baton.telemetry.logs import Service
from baton.telemetry.metrics import SHARED_FOLDER_VARIABLE
from deploy.launcher.preflight import check_exposure
from deploy.models import model_store
from deploy.processes.child import Child
from deploy.processes.data_dir import check_data_dir
from deploy.processes.foreground import own_progress
from deploy.processes.ports import choose_ports, reachable
from deploy.processes.run_directory import ClusterMark, RunDirectory
from deploy.store.redis_access import store_url
from deploy.store.shared_secret import SharedSecret
from router.workers.model_check import commit_of

_HEALTHY_S = 60.0
_PROBE_S = 2.0
_POLL_S = 0.1
_OTHER_S = 0.01
"""Pause in seconds before /health is queried again, because another router process on the same port
answered the last query."""
_STOP_S = 8.0
WHAT_IF = (sys.executable, "-P", "-m", "planning.what_if")
"""The simulator that answers the console's what-if questions: a program and its arguments."""

log = logging.getLogger(__name__)


class RouterProcess:
    """A router as a child process. It reads its settings from standard input.

    They are not on its command line, where other users could read the store's password.
    """

    def __init__(
        self,
        config: Config,
        mark: ClusterMark,
        run: RunDirectory,
        *,
        redis_url: str,
        model_path: str,
        model_name: str,
        sampling: Mapping[str, float] = MappingProxyType({}),
        number: int = 0,
    ) -> None:
        """``number`` identifies this router process; it is below ``config.routers``."""
        self.name = "router" if config.routers == 1 else f"router-{number}"
        self._number = number
        self._shares_port = config.routers > 1
        self._mark = mark
        self._run = run
        self._log = None if config.log_to == "stdout" else run.log(self.name)
        self._http = reachable(config.http)
        self._fronts = config.tls.fronts
        self._shown = config.tls.front_client or TlsFiles()
        self._settings = {
            "config": config.model_dump(mode="json"),
            "redis_url": redis_url,
            "cluster_id": mark.cluster_id,
            "model_path": model_path,
            "model_name": model_name,
            "sampling": dict(sampling),
            "number": number,
            "log_file": "" if self._log is None else str(self._log),
            "what_if": WHAT_IF,
        }
        self._child: Child | None = None

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    async def start(self) -> None:
        """Start the router process. If the last one died, this starts another one. Raises
        OSError."""
        arguments = [sys.executable, "-P", "-m", "router.main"]
        variables = {}
        if self._shares_port:
            self._run.router_metrics.mkdir(mode=0o700, exist_ok=True)
            variables[SHARED_FOLDER_VARIABLE] = str(self._run.router_metrics)
        self._child = await Child.spawn(self.name, arguments, self._mark, self._log, variables)
        await self._child.say(json.dumps(self._settings).encode() + b"\n")

    async def wait(self) -> str:
        """Wait for the death of the router process. Returns how it ended."""
        assert self._child is not None
        how = await self._child.wait()
        if self._shares_port:
            # This removes the dead process's gauges from the shared metrics; its counters stay.
            mark_process_dead(  # type: ignore[no-untyped-call]
                self.pid, str(self._run.router_metrics)
            )
        return how

    async def fail_on_death(self) -> NoReturn:
        """Wait for the end of the router process. Then raise BatonError with the last lines of its
        log."""
        assert self._child is not None
        how = await self._child.wait()
        raise BatonError(f"{self.name} ended ({how}):\n{self._child.last_lines()}")

    async def healthy(self) -> None:
        """Wait until the router's /health answers 200. After 60 s, raises BatonError with the last
        answer."""
        last = ["no answer"]
        try:
            async with asyncio.timeout(_HEALTHY_S):
                await self._healthy(last)
        except TimeoutError:
            raise BatonError(
                f"{self.name} is not healthy after {_HEALTHY_S:.0f} s: {last[0]}"
            ) from None

    async def stop(self, drain_s: float | None = None) -> None:
        """Stop the router process. Its requests have ``drain_s`` seconds to end. SIGKILL follows 8
        s after that."""
        if self._child is None:
            return
        if drain_s is None:
            await self._child.end(_STOP_S, signal.SIGINT)
        else:
            await self._child.end(drain_s + _STOP_S)

    async def _healthy(self, last: list[str]) -> None:
        # Each try makes a new connection, since the kernel may pick another process for it.
        limits = httpx.Limits(max_keepalive_connections=0)
        # The certificate itself is known, so its names need no check.
        known = None if self._fronts is None else self._fronts.certificate
        verify = False if known is None else pinned_context(known, self._shown)
        url = f"{'http' if known is None else 'https'}://{self._http}/health"
        async with httpx.AsyncClient(
            trust_env=False, timeout=_PROBE_S, limits=limits, verify=verify
        ) as client:
            while True:
                try:
                    answer = await client.get(url)
                except httpx.HTTPError as error:
                    last[0] = str(error) or type(error).__name__
                else:
                    if answer.headers.get(ROUTER_HEADER) != str(self._number):
                        await asyncio.sleep(_OTHER_S)
                        continue
                    if answer.status_code == httpx.codes.OK:
                        return
                    last[0] = f"{answer.status_code} {answer.text[:500]}"
                await asyncio.sleep(_POLL_S)


def serve_router(config: Config) -> None:
    """Run a router in this process until SIGINT or SIGTERM. Raises BatonError if the router cannot
    start."""
    instance = f"router-0@{socket.gethostname()}"
    progress = own_progress(
        config.log_to, config.log_level, config.log_format, Service.ROUTER, instance
    )
    tell = progress.line if progress.is_logged else _tell
    if not config.redis_url:
        raise ConfigError("a router needs --redis-url, the same as its cluster's workers")
    if not config.cluster_id:
        raise ConfigError(
            "a router needs the cluster_id of its cluster (BATON_CLUSTER_ID, or in the file)"
        )
    check_exposure(config)
    config = choose_ports(config.model_copy(update={"routers": 1}))
    if advice := check_data_dir(config):
        tell(advice)
    # The import is slow, and not needed for the errors above.
    from router.main import RouterSettings, run  # noqa: PLC0415

    url = store_url(config, "router")
    if (shared := SharedSecret.of(config, url)) is not None:
        secret = asyncio.run(shared.read())
        shared.keep_in_thread(secret)
        config = config.model_copy(update={"cluster_secret": secret})
    revision = asyncio.run(_revision(config, url, tell))
    model = model_store.resolve(config.model, tell, config.quantization, revision, weights=False)
    config = config.model_copy(update={"revision": model.commit})
    scheme = "http" if config.tls.fronts is None else "https"
    progress.line(f"HTTP {scheme}://{config.http}/v1, gRPC {config.grpc}")
    run(
        RouterSettings(
            config=config.model_dump(mode="json"),
            redis_url=url,
            cluster_id=config.cluster_id,
            model_path=str(model.path),
            model_name=config.served_model_name or model.name,
            sampling=dict(model.sampling),
            ends_with_parent=False,
            replicated=True,
            what_if=WHAT_IF,
        )
    )


async def _revision(config: Config, redis_url: str, tell: Callable[[str], None]) -> str:
    """Return the commit of the model that the workers serve, or the configured revision if that
    commit is unknown."""
    async with redis_client(redis_url) as client:
        try:
            records = await Registry(client, config.cluster_id).all()
        except (redis.RedisError, OSError) as error:
            tell(f"cannot read the workers' commit of the model from Redis: {error}")
            return config.revision
    return commit_of(records.values(), config.revision)


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
