"""The router as the launcher's child.

States: new → starting → healthy → (died → starting) → stopped.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import NoReturn

import httpx

from baton.config import Config
from baton.errors import BatonError
from deploy.child import Child
from deploy.cluster_mark import ClusterMark
from deploy.ports import reachable
from deploy.run_directory import RunDirectory

_HEALTHY_S = 60.0
_PROBE_S = 2.0
_POLL_S = 0.1
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
    ) -> None:
        self._mark = mark
        self._run = run
        self._http = reachable(config.http)
        self._settings = {
            "config": config.model_dump(mode="json"),
            "redis_url": redis_url,
            "cluster_id": mark.cluster_id,
            "model_path": model_path,
            "model_name": model_name,
        }
        self._child: Child | None = None

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    async def start(self) -> None:
        """Start it, or the next one after one has died. Raises OSError."""
        arguments = [sys.executable, "-P", "-m", "router.main"]
        self._child = await Child.spawn("router", arguments, self._mark, self._run.log("router"))
        await self._child.say(json.dumps(self._settings).encode() + b"\n")

    async def wait(self) -> str:
        """Wait for its death; says how it ended."""
        assert self._child is not None
        return await self._child.wait()

    async def fail_on_death(self) -> NoReturn:
        """Raises BatonError with the end of its log when it ends."""
        assert self._child is not None
        how = await self._child.wait()
        raise BatonError(f"the router ended ({how}):\n{self._child.last_lines()}")

    async def healthy(self) -> None:
        """Wait until /health says 200; raises BatonError with its last answer after 60 seconds."""
        last = ["no answer"]
        try:
            async with asyncio.timeout(_HEALTHY_S):
                await self._healthy(last)
        except TimeoutError:
            raise BatonError(
                f"the router is not healthy after {_HEALTHY_S:.0f} s: {last[0]}"
            ) from None

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL after 8 seconds."""
        if self._child is not None:
            await self._child.end(_STOP_S)

    async def _healthy(self, last: list[str]) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=_PROBE_S) as client:
            while True:
                try:
                    answer = await client.get(f"http://{self._http}/health")
                except httpx.HTTPError as error:
                    last[0] = str(error) or type(error).__name__
                else:
                    if answer.status_code == httpx.codes.OK:
                        return
                    last[0] = f"{answer.status_code} {answer.text[:500]}"
                await asyncio.sleep(_POLL_S)
