"""Follows the registry: which workers exist, and which have died.

    listed → a link ─listed as dead for COLLECT_AFTER_S→ forgotten by registry and prefix index

While the registry cannot be read, the last view stays valid, and broken streams reveal dead
workers. Owned by the router's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time

import redis

from baton.config.cluster import Config
from baton.liveness.silence import SilenceWatch
from baton.store.prefix_index import PrefixIndex
from baton.store.registry import Registry
from baton.store.supervision import PoolSizes
from baton.telemetry.logs import ErrorRow
from baton.telemetry.metrics import RouterMetrics
from router.workers.model_check import ModelCheck
from router.workers.worker_link import WorkerLink
from router.workers.worker_links import WorkerLinks

log = logging.getLogger(__name__)

REGISTRY_POLL_S = 0.25
"""Minimum interval at which the registry is read, in seconds."""
POLL_S_PER_WORKER = 1e-4
"""The same for each worker in the registry: a read takes the store about 0.5 us per worker, for
every router. With 10,000 workers a router reads once a second, as often as workers write."""
COLLECT_AFTER_S = 10.0
"""Seconds for which a worker must be listed as dead before the prefix index drops it. After an
outage of Redis, all workers are listed as dead until their next heartbeat. Dead workers get no
requests in that time."""


class WorkerDiscovery:
    """Keeps the links to workers in sync with the registry."""

    def __init__(
        self,
        config: Config,
        registry: Registry,
        index: PrefixIndex,
        links: WorkerLinks,
        metrics: RouterMetrics,
        sizes: PoolSizes | None = None,
        model_check: ModelCheck | None = None,
    ) -> None:
        """``sizes`` has the pool sizes that operators choose; None: pools keep those of ``config``.
        ``model_check`` says which workers serve the router's model; None: all do."""
        self._computes_locally = config.computes_locally
        self._needs_prefill = config.needs_prefill
        self._prefill_sizes = {
            pool.name: pool.count for pool in config.pools if pool.role == "prefill"
        }
        """Wanted number of workers of each prefill pool, as last read."""
        self._sizes = sizes
        self._registry = registry
        self._index = index
        self._links = links
        self._metrics = metrics
        self._registry_calls = metrics.redis_calls("registry_read")
        self._model_check = model_check
        self._logged_health = ("down", "")
        self._dead = SilenceWatch[str](COLLECT_AFTER_S)
        """Incarnations of workers that the registry lists as dead, with the time for which it has
        done so."""
        self._read_at = time.monotonic()
        """Time of the latest read of the registry; initially the time of creation."""
        self._has_view = False
        self._can_read = True
        """Whether the last read of the registry succeeded."""

    @property
    def has_view(self) -> bool:
        """Whether the registry was ever read successfully."""
        return self._has_view

    @property
    def poll_s(self) -> float:
        """Interval at which the registry is read, in seconds."""
        return max(REGISTRY_POLL_S, POLL_S_PER_WORKER * len(self._links.all()))

    async def run(self) -> None:
        """Read the registry periodically, until cancelled."""
        # An error must not stop this loop: the router's view would become outdated.
        errors = ErrorRow(log, "an update from the registry failed")
        while True:
            with errors.caught():
                try:
                    await self.read()
                except (redis.RedisError, OSError) as error:
                    if self._can_read:
                        log.warning("the registry cannot be read: %s", error)
                    self._can_read = False
                    # During an outage no worker could renew its record, so the time of each dead
                    # one starts again.
                    self._dead.tick({}, time.monotonic())
            self._metrics.registry_age_seconds.set(time.monotonic() - self._read_at)
            for role in ("prefill", "decode"):
                self._metrics.routable_workers.labels(role=role).set(len(self._links.up(role)))
            self._metrics.prefill_missing.set(self._lacks_prefill())
            self._log_health()
            await asyncio.sleep(self.poll_s)

    async def read(self) -> None:
        """Read the registry once, and update the links to workers. Raises redis.RedisError,
        OSError.
        """
        with self._registry_calls.one():
            listed, dead = await self._registry.read()
        records = listed if self._model_check is None else self._model_check.alike(listed)
        self._read_at = time.monotonic()
        if not self._can_read:
            log.info("the registry can be read again")
        self._can_read = True
        self._links.update(records)
        self._has_view = True
        # Only without a prefill worker does it matter whether there should be one.
        if self._sizes is not None and not self._prefill_workers():
            chosen = await self._sizes.read()
            for pool in self._prefill_sizes.keys() & chosen.keys():
                self._prefill_sizes[pool] = chosen[pool]
        for incarnation in self._dead.tick(dict.fromkeys(dead), time.monotonic()):
            await self._index.collect(incarnation)
            await self._registry.forget(incarnation)

    def health(self) -> tuple[str, str]:
        """Return the cluster's health as ``ok``, ``degraded`` or ``down``, and the reason in words.

        A cluster in which no prefill worker is wanted is not degraded."""
        if not self._links.up("decode"):
            refused = 0 if self._model_check is None else len(self._model_check.refused)
            others = f"; {refused} workers serve another model than this router" if refused else ""
            return "down", f"no decode worker is ready{others}"
        if self._lacks_prefill():
            status = "degraded" if self._computes_locally else "down"
            return status, "no prefill worker is ready"
        return "ok", ""

    def _prefill_workers(self) -> list[WorkerLink]:
        """Return the prefill workers that are up, and can work with a decode worker that is up:
        both have one ``kv_group``."""
        served = {link.record.kv_group for link in self._links.up("decode")}
        every = self._links.up("prefill")
        return [link for link in every if not served or link.record.kv_group in served]

    def _lacks_prefill(self) -> bool:
        """Whether no prefill worker is up although there should be one: a class needs it, or a slot
        of a prefill pool has no worker. A slot whose worker has become a decode worker counts as
        filled."""
        if self._prefill_workers():
            return False
        decoding = {link.record.slot for link in self._links.all() if link.record.role == "decode"}
        return self._needs_prefill or any(
            f"{pool}-{number}" not in decoding
            for pool, count in self._prefill_sizes.items()
            for number in range(count)
        )

    def _log_health(self) -> None:
        """Log the cluster's health if it has changed."""
        health = self.health()
        if health == self._logged_health:
            return
        self._logged_health = health
        status, reason = health
        if status == "ok":
            log.info("the workers are ready: the cluster is healthy")
        elif status == "degraded":
            log.warning("%s: decode workers compute the prompts", reason)
        else:
            log.warning("no request can be served: %s", reason)
