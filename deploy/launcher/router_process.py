"""A router process as the launcher's child; several of them may share the ports.

States: new → starting → healthy → (died → starting) → stopped.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from typing import NoReturn

import httpx
from prometheus_client.multiprocess import mark_process_dead

from baton.config.cluster import Config
from baton.errors import BatonError
from baton.security.tls import TlsFiles, pinned_context
from baton.telemetry.metrics import SHARED_FOLDER_VARIABLE
from deploy.launcher.what_if import WHAT_IF
from deploy.processes.child import Child
from deploy.processes.cluster_mark import ClusterMark
from deploy.processes.ports import reachable
from deploy.processes.run_directory import RunDirectory
from router.process_number import ROUTER_HEADER

_HEALTHY_S = 60.0
_PROBE_S = 2.0
_POLL_S = 0.1
_OTHER_S = 0.01
"""Until the next try where another process answered."""
_STOP_S = 8.0


class RouterProcess:
    """It is told its settings over standard input: a command line would show the password."""

    def __init__(
        self,
        config: Config,
        mark: ClusterMark,
        run: RunDirectory,
        *,
        redis_url: str,
        model_path: str,
        model_name: str,
        number: int = 0,
    ) -> None:
        """``number`` counts from 0 to ``config.routers``."""
        self.name = "router" if config.routers == 1 else f"router-{number}"
        self._number = number
        self._shares_port = config.routers > 1
        self._mark = mark
        self._run = run
        self._http = reachable(config.http)
        self._fronts = config.tls.fronts
        self._shown = config.tls.front_client or TlsFiles()
        self._settings = {
            "config": config.model_dump(mode="json"),
            "redis_url": redis_url,
            "cluster_id": mark.cluster_id,
            "model_path": model_path,
            "model_name": model_name,
            "number": number,
            "what_if": WHAT_IF,
        }
        self._child: Child | None = None

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    async def start(self) -> None:
        """Start it, or the next one after one has died. Raises OSError."""
        arguments = [sys.executable, "-P", "-m", "router.main"]
        variables = {}
        if self._shares_port:
            self._run.router_metrics.mkdir(exist_ok=True)
            variables[SHARED_FOLDER_VARIABLE] = str(self._run.router_metrics)
        log = self._run.log(self.name)
        self._child = await Child.spawn(self.name, arguments, self._mark, log, variables)
        await self._child.say(json.dumps(self._settings).encode() + b"\n")

    async def wait(self) -> str:
        """Wait for its death; says how it ended."""
        assert self._child is not None
        how = await self._child.wait()
        if self._shares_port:
            # Its gauges go with it; what it has counted stays.
            mark_process_dead(  # type: ignore[no-untyped-call]
                self.pid, str(self._run.router_metrics)
            )
        return how

    async def fail_on_death(self) -> NoReturn:
        """Raises BatonError with the end of its log when it ends."""
        assert self._child is not None
        how = await self._child.wait()
        raise BatonError(f"{self.name} ended ({how}):\n{self._child.last_lines()}")

    async def healthy(self) -> None:
        """Wait until its /health says 200; raises BatonError with the last answer after 60 s."""
        last = ["no answer"]
        try:
            async with asyncio.timeout(_HEALTHY_S):
                await self._healthy(last)
        except TimeoutError:
            raise BatonError(
                f"{self.name} is not healthy after {_HEALTHY_S:.0f} s: {last[0]}"
            ) from None

    async def stop(self, drain_s: float | None = None) -> None:
        """End it, with time for its requests where ``drain_s`` says how much; SIGKILL 8 s later."""
        if self._child is None:
            return
        if drain_s is None:
            await self._child.end(_STOP_S, signal.SIGINT)
        else:
            await self._child.end(drain_s + _STOP_S)

    async def _healthy(self, last: list[str]) -> None:
        # Each try a new connection: the kernel may pick another process for it.
        limits = httpx.Limits(max_keepalive_connections=0)
        # Of a server that is known there is no name to check: it may have any.
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
