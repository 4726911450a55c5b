"""The launcher's handle of a cluster's workers: places, supervises and ends them.

The launcher places the first incarnation of each worker. The supervisor, which it places next,
replaces workers from then on. On a Ray cluster that the launcher did not start, workers outlive the
launcher. Another launcher takes over the cluster's lease and its workers; it may have waited.

Workers end by an operator's word: a signal, or a launcher that is started with another
configuration. A start that fails ends what it has placed. No error of Ray or Redis ends a worker:
it is logged, and what failed is tried again while this launcher leads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import redis.asyncio

from baton.autoscaling.traffic_store import TrafficStore
from baton.config.cluster import Config
from baton.config.worker_fields import shared_hash
from baton.errors import ConfigError, Unavailable, WorkerFailed
from baton.host.background import end_tasks
from baton.store.pin_store import PinStore
from baton.store.prefix_index import PrefixIndex
from baton.store.redis_client import redis_client
from baton.store.registry import Registry
from baton.store.supervision import PoolSizes
from deploy.processes.daemon_thread import DaemonThread
from deploy.processes.leadership import LauncherLease, StaleOrderError, forget_leaders
from deploy.processes.process_identity import ProcessIdentity
from deploy.supervisor.reconciler import UNPLACED
from deploy.supervisor.status_store import StatusStore
from deploy.supervisor.supervisor_actor import RaySupervisor, SupervisorActor, SupervisorSettings
from deploy.workers.actor_process import reason
from deploy.workers.actor_settings import ActorSettings
from deploy.workers.ray_worker import (
    SUPERVISOR_NAME,
    RayWorker,
    find,
    find_all,
    is_known,
    place,
)
from deploy.workers.start_progress import StartWatch

_STOP_S = 5.0
_SUPERVISOR_START_S = 60.0
_SUPERVISOR_AGAIN_S = 10.0
_FIND_S = 3.0
_ASK_S = 10.0
"""Time that a running worker has to say with which configuration it was started, in seconds."""
_GONE_S = 30.0
_LEAD_AGAIN_S = 3.0
"""Pause after a takeover that failed, in seconds. It is shorter than the lease."""
_POLL_S = 0.1
_FORGET_S = 5.0

Result = TypeVar("Result")

log = logging.getLogger(__name__)


class ClusterWorkers:
    """The workers of one cluster. Owned by the launcher's event loop."""

    def __init__(
        self,
        config: Config,
        slots: Sequence[ActorSettings],
        redis_url: str,
        cluster_id: str,
        supervisor_class: type[SupervisorActor],
        report: Callable[[str], None],
    ) -> None:
        """``slots`` has the settings of the worker of each slot, at least one. ``redis_url`` is the
        store's address.

        ``supervisor_class`` is the class of the supervisor. It also determines the class of the
        workers. ``report`` prints one line of text.
        """
        self._config = config
        self._slots = tuple(slots)
        self._redis_url = redis_url
        self._cluster_id = cluster_id
        self._supervisor_class = supervisor_class
        self._report = report
        self._calls = DaemonThread("ray calls")
        """Makes calls that block while Ray's control store is unreachable."""
        self._client = redis_client(redis_url)
        self._lease: LauncherLease | None = None
        """The lease of a cluster whose workers may run on several machines; otherwise None."""
        if config.ray_address:
            self._lease = LauncherLease(self._client, cluster_id, secrets.token_hex(8))
        self._leads = False
        """Whether this launcher has the lease, and has ended what it had to."""
        self._has_led = False
        self._placing = asyncio.Lock()
        """Held by what places the supervisor."""
        self._first: tuple[RayWorker, ...] = ()
        self._placed: list[RayWorker] = []
        """The workers that this launcher has placed. The thread of ``_calls`` writes it."""
        self._supervisor: RaySupervisor | None = None

    @property
    def names(self) -> list[str]:
        """Return the slots of the workers that the launcher starts first."""
        return [settings.slot for settings in self._slots]

    async def lead(self) -> None:
        """Become the launcher that leads the cluster; while another one does, wait.

        Workers of an earlier launcher that cannot work together with those of this one are ended.
        The supervisor replaces others that have another configuration or version, one by one.

        Raises ``redis.RedisError`` if Redis does not answer, what Ray raises, and Unavailable if
        Ray does not end an actor. Then this launcher does not lead. The next takeover does all of
        it again. Raises ConfigError if this launcher has led before, and running workers have got
        another configuration since.
        """
        if self._lease is None:
            return
        while not self._leads:
            await self._lease.take(self._tell_standby)
            # The rest may take longer than the lease lasts.
            keeping = asyncio.create_task(self._lease.keep())
            try:
                self._leads = await self._take_over(self._lease)
            finally:
                await end_tasks([keeping])
        self._has_led = True

    async def _take_over(self, lease: LauncherLease) -> bool:
        """End what cannot work together with this launcher, and record after that what all workers
        agree in. Returns False if another launcher has taken the lease meanwhile."""
        epoch = await lease.order_epoch()
        if epoch is None:
            return False
        agreed = shared_hash(self._config)
        is_same = await lease.agreed_hash() == agreed
        if self._has_led and not is_same:
            await self._check_own(agreed)
        # The supervisor of an earlier launcher has that launcher's settings.
        await self._end_supervisor()
        if not is_same:
            hashes = await self._hashes()
            others = [worker for worker, told in hashes if told != agreed]
            if others:
                self._report(f"stopping {len(others)} workers of another configuration first")
            await asyncio.gather(*(self._end_worker(worker, epoch) for worker in others))
        # A takeover that has failed above is not recorded: the next launcher repeats it.
        return await lease.record_agreed(agreed)

    async def _check_own(self, agreed: str) -> None:
        """Raise ConfigError if workers run that another launcher gave another configuration. This
        launcher's own configuration is older, so they must not end for it."""
        others = [
            worker.slot for worker, told in await self._hashes() if told not in (None, agreed)
        ]
        if others:
            raise ConfigError(
                f"another launcher has given cluster {self._cluster_id} another configuration, with"
                f" which {', '.join(sorted(others))} run: start this launcher again with that"
                " configuration, or with its own one to replace those workers"
            )

    async def _hashes(self) -> list[tuple[RayWorker, str | None]]:
        """Return all running workers, each with the hash of what it must agree in with others.

        The hash is None if the worker does not say: it has not started yet, it hangs, or it is of
        Baton 0.1.0. Raises what Ray raises if it does not list the workers.
        """
        workers = await self._calls.call(find_all)
        return list(zip(workers, await asyncio.gather(*map(_hash_of, workers)), strict=True))

    async def keep_leading(self) -> None:
        """Keep the lease until cancelled. If another launcher has taken it, wait, and lead
        again when that one is gone.

        Raises ConfigError as ``lead`` does. Other errors are reported, and the takeover is tried
        again.
        """
        placing: asyncio.Task[int] | None = None
        try:
            while self._lease is not None:
                await self._lease.keep()
                self._leads = False
                if placing is not None:
                    placing.cancel()
                await self._lead_again()
                # It finds the supervisor that runs. The lease is kept meanwhile.
                placing = asyncio.create_task(self.start_supervisor())
        finally:
            if placing is not None:
                placing.cancel()

    async def _lead_again(self) -> None:
        told = ""
        while True:
            try:
                await self.lead()
            except ConfigError:
                raise
            except Exception as error:
                if told != (told := reason(error)):
                    self._report(
                        f"this launcher does not lead yet, and tries again ({told}); workers keep "
                        "serving"
                    )
                await asyncio.sleep(_LEAD_AGAIN_S)
            else:
                self._report("this launcher leads the cluster again")
                return

    def _tell_standby(self) -> None:
        self._report(
            f"another launcher leads the cluster {self._cluster_id}; this one waits, and takes "
            "over when that one ends"
        )

    async def _end_supervisor(self) -> None:
        supervisor = await self._calls.call(RaySupervisor.find)
        if supervisor is not None:
            await self._calls.call(supervisor.kill)
            await self._until_unknown(SUPERVISOR_NAME)

    async def start(self) -> dict[str, int]:
        """Place the first workers and wait until they serve. Returns their process ids by slot.

        If workers may run on several machines, those that already run are kept. Raises BatonError.
        """
        actor = self._supervisor_class.worker_class

        def worker(settings: ActorSettings) -> RayWorker:
            found = None if self._lease is None else find(settings.slot)
            if found is None:
                found = place(settings, actor)
                self._placed.append(found)
            return found

        self._first = await self._calls.call(lambda: tuple(map(worker, self._slots)))
        records = await together(map(self._until_ready, self._first))
        return {record["slot"]: record["process"]["pid"] for record in records}

    async def _until_ready(self, worker: RayWorker) -> dict[str, Any]:
        """Wait until a worker serves, and return its record. Raises BatonError."""
        watch, placed, progress = StartWatch(self._config.start_deadline_s), False, 0
        told = False
        asking = asyncio.create_task(worker.ready())
        try:
            while True:
                done, _ = await asyncio.wait({asking}, timeout=_ASK_S)
                if done:
                    answer = asking.result()
                    if isinstance(answer, dict):
                        return answer
                    placed, progress = True, answer
                    asking = asyncio.create_task(worker.ready())
                elif not placed:
                    # The call has no answer while the control store is unreachable.
                    placed = not await self._calls.call(worker.waits_for_node)
                    if not (placed or told):
                        self._report(f"{worker.slot} waits: {UNPLACED}")
                        told = True
                if failed := watch.look(time.monotonic(), progress if placed else None):
                    raise WorkerFailed(f"worker {worker.slot} did not start: {failed}")
        finally:
            asking.cancel()

    async def start_supervisor(self) -> int:
        """Place the supervisor, wait until it manages the workers, and return its process id.

        While another launcher leads, this one waits: the supervisor is that one's.
        """
        settings = SupervisorSettings(
            worker=self._slots[0],
            drain_s=self._config.drain_deadline_s,
            redis_url=self._redis_url,
            cluster_id=self._cluster_id,
            launcher=ProcessIdentity.own(),
        )

        def place_it() -> RaySupervisor:
            # The call goes on if its caller is cancelled, and `end` must know of the supervisor.
            self._supervisor = RaySupervisor.place(settings, self._supervisor_class)
            return self._supervisor

        async with self._placing:
            while True:
                if self._lease is not None and not self._leads:
                    await asyncio.sleep(_SUPERVISOR_AGAIN_S)
                    continue
                try:
                    supervisor = await self._calls.call(place_it)
                    async with asyncio.timeout(_SUPERVISOR_START_S):
                        return await supervisor.ready()
                except Exception as error:
                    self._report(f"the supervisor does not start yet: {reason(error)}")
                    await asyncio.sleep(_SUPERVISOR_AGAIN_S)
                if self._supervisor is not None and (self._lease is None or self._leads):
                    # A control store that died may have lost the actor, which would then never
                    # start. Its name would block the next one.
                    with contextlib.suppress(Exception):
                        await self._calls.call(self._supervisor.kill)

    async def end(self, *, serves: bool) -> None:
        """Make workers exit in order, and the supervisor before them, which would replace them. If
        they may run on several machines, then kill those that have not exited.

        ``serves`` is whether the start has succeeded. Then all workers end; otherwise those that
        this launcher has placed. This does nothing if another launcher leads the cluster, or if
        Redis does not tell who does.
        """
        epoch = None
        if self._lease is not None:
            try:
                epoch = await self._lease.order_epoch()
            except redis.RedisError as error:
                self._report(
                    f"the workers stay, because Redis does not tell who leads ({error}); "
                    "`baton leave` ends them on each machine"
                )
                return
            if epoch is None:
                return
        await self._stop_supervisor(epoch)
        placed, running = await self._running()
        workers = placed
        if serves:
            workers = self._first if running is None else running
        stops = (worker.stop(_STOP_S, epoch) for worker in workers)
        ends = await asyncio.gather(*stops, return_exceptions=True)
        if self._lease is not None:
            # Ray keeps running, and would keep the workers' processes. A worker that refuses the
            # order belongs to another launcher.
            left = [
                worker
                for worker, end in zip(workers, ends, strict=True)
                if not isinstance(end, StaleOrderError)
            ]
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_STOP_S):
                    await self._calls.call(lambda: self._kill(left))
        found = len(running) > len(placed) if running is not None else self._lease is not None
        if self._config.redis_url and (serves or not found):
            await forget_cluster(self._client, self._cluster_id)

    async def close(self) -> None:
        """Release the lease, so that another launcher can take over the cluster, and close the
        connections to Redis. Never raises Redis errors."""
        if self._lease is not None:
            with contextlib.suppress(redis.RedisError):
                await self._lease.give_up()
        await self._client.aclose()

    async def _stop_supervisor(self, epoch: int | None) -> None:
        """Stop the supervisor that this launcher has placed, or is placing at this moment."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_STOP_S):
                # The thread makes one call after the other: a placement that has begun ends first.
                supervisor = await self._calls.call(lambda: self._supervisor)
            if supervisor is None:
                return
            with contextlib.suppress(Exception):
                await supervisor.stop(_STOP_S, epoch)
            if self._lease is not None:
                # One that was still starting has ignored the order, and would replace workers.
                async with asyncio.timeout(_STOP_S):
                    await self._calls.call(supervisor.kill)

    async def _running(self) -> tuple[Sequence[RayWorker], Sequence[RayWorker] | None]:
        """Return the workers that this launcher has placed, and all running workers, including
        those that the supervisor placed. The latter is None if Ray does not list them."""
        try:
            async with asyncio.timeout(_FIND_S):
                # The thread makes one call after the other: a placement that has begun ends first.
                return await self._calls.call(lambda: (tuple(self._placed), find_all()))
        except Exception as error:
            log.warning("cannot list the workers: %s", reason(error))
            return tuple(self._placed), None

    def _kill(self, workers: Sequence[RayWorker]) -> None:
        for worker in workers:
            worker.kill()

    async def _end_worker(self, worker: RayWorker, epoch: int) -> None:
        """End a worker. Raises StaleOrderError if it belongs to another launcher by now."""
        try:
            await worker.stop(_STOP_S, epoch)
        except StaleOrderError:
            raise
        except Exception as error:
            log.info("%s does not stop in order: %s", worker.slot, reason(error))
        await self._calls.call(worker.kill)
        await self._until_unknown(worker.slot)

    async def _until_unknown(self, name: str) -> None:
        """Wait until Ray knows no actor of this name. Raises Unavailable."""
        try:
            async with asyncio.timeout(_GONE_S):
                while await self._calls.call(lambda: is_known(name)):  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise Unavailable(
                f"Ray still lists {name} {_GONE_S:.0f} s after it was ended: its control store may "
                "be slow"
            ) from None


async def _hash_of(worker: RayWorker) -> str | None:
    try:
        return await worker.shared_hash(_ASK_S)
    except Exception as error:
        log.info("%s does not say its configuration: %s", worker.slot, reason(error))
        return None


async def forget_cluster(client: redis.asyncio.Redis, cluster_id: str) -> None:
    """Delete what an ending cluster has left in an operator's own Redis. Never raises.

    While a cluster runs, its routers delete the prefix index entries of dead workers. Nothing else
    would delete the entries of the workers that end with the cluster, since entries have no TTL.
    """
    try:
        async with asyncio.timeout(_FORGET_S):
            registry, index = Registry(client, cluster_id), PrefixIndex(client, cluster_id)
            await forget_leaders(client, cluster_id)
            await StatusStore(client, cluster_id).clear()
            await PoolSizes(client, cluster_id).clear()
            await PinStore(client, cluster_id).clear()
            await TrafficStore(client, cluster_id).clear()
            for incarnation in await registry.dead():
                await index.collect(incarnation)
                await registry.forget(incarnation)
            if not await registry.all():
                await index.forget_generation()
    except (redis.RedisError, OSError, TimeoutError) as error:
        log.warning("cannot delete index entries in Redis: %s", error)


async def together(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run coroutines together and return their results; the first failure ends the others."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for work in works]
    return [task.result() for task in tasks]
