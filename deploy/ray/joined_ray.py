"""The launcher's hold on a Ray cluster that others have started.

A driver needs a node of Ray's beside it. With ``auto`` there is one; else one joins, which has no
place for anybody.

    new → connected → (lost: its own node died) → stopped
"""

from __future__ import annotations

import asyncio
import logging
import os

from baton.config.cluster import Config
from baton.errors import BatonError
from deploy.processes.cluster_mark import ClusterMark
from deploy.processes.daemon_thread import DaemonThread
from deploy.ray.gcs_store import GcsStore
from deploy.ray.ray_cluster import GcsQuestions, disconnect
from deploy.ray.ray_node import RayNode, check_token, joined_environment
from deploy.workers.ray_worker import namespace

AUTO = "auto"
_CONNECT_S = 60.0
_STOP_S = 10.0


class JoinedRay:
    """Takes the place of ``deploy.ray.ray_cluster.RayCluster``."""

    gcs = None
    """Ray's control store is for others to start again."""

    def __init__(self, config: Config, mark: ClusterMark) -> None:
        self._mark = mark
        self._node = None
        if config.ray_address != AUTO:
            self._node = RayNode(config.ray_address, mark)
        self._thread = DaemonThread("ray")
        self._questions = GcsQuestions()
        self._started = False

    async def start(self, gcs_store: GcsStore | None = None) -> None:
        """Connect. Raises BatonError. A store would be for whoever starts Ray."""
        check_token()
        if self._node is not None:
            await self._node.start({}, cpus=0, gpus=0)
        self._started = True
        try:
            async with asyncio.timeout(_CONNECT_S):
                await self._thread.call(self._connect)
        except TimeoutError:
            raise BatonError(f"Ray did not answer within {_CONNECT_S:.0f} s") from None
        except (Exception, SystemExit) as error:  # Ray raises whatever it likes
            raise BatonError(f"Ray cannot be used: {error}") from error

    def _connect(self) -> None:
        os.environ.update(joined_environment() | self._mark.variables)
        import ray  # noqa: PLC0415

        logging.getLogger("ray").setLevel(logging.ERROR)
        ray.init(
            address=AUTO if self._node is None else self._node.address,
            namespace=namespace(self._mark.cluster_id),
            configure_logging=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            _node_ip_address=None if self._node is None else self._node.host,
        )

    async def lost(self) -> str:
        """Wait for the death of this launcher's own node; for ever, where it is not its own."""
        if self._node is None:
            await asyncio.Event().wait()
        assert self._node is not None
        return await self._node.lost()

    async def ask_gcs(self, timeout_s: float) -> None:
        """As ``deploy.ray.ray_cluster.RayCluster.ask_gcs``."""
        await self._questions.ask(timeout_s)

    async def stop(self) -> bool:
        """Disconnect, and end the own node; False if that took too long and may hang for ever."""
        if not self._started:
            return True
        try:
            async with asyncio.timeout(_STOP_S):
                await self._thread.call(disconnect)
        except TimeoutError:
            return False
        finally:
            if self._node is not None:
                await self._node.stop()
        return True
