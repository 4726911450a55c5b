"""`baton serve`: starts a cluster on this machine, watches it, and stops all of it.

    new → starting → ready → ending → ended

A signal or a failure leads to ending from anywhere; a second signal shortens it. ``Ending`` says
what becomes of the workers: on a Ray cluster that the launcher did not start, they outlive a
launcher that fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sys
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from pathlib import Path

from baton.config.cluster import Config
from baton.config.worker_fields import shared_hash, workers_hash
from baton.errors import BatonError, ConfigError
from baton.security.cluster_secret import new_secret
from baton.security.tls import TlsFiles
from baton.store.redis_client import redis_client
from baton.telemetry.logs import Service
from deploy.launcher.announcement import announcement
from deploy.launcher.cluster_workers import ClusterWorkers, together
from deploy.launcher.guardian import GRACE_S, Guardian, sweep
from deploy.launcher.part_watch import GCS, SUPERVISOR, PartWatch
from deploy.launcher.preflight import Checked, preflight
from deploy.launcher.preparation import PreparedModel, prepare_kernels, prepare_model
from deploy.launcher.router_process import RouterProcess
from deploy.processes.child import last_lines
from deploy.processes.cluster_state import ClusterState
from deploy.processes.foreground import StopSignals, first_leaf, own_log_file
from deploy.processes.ports import reachable
from deploy.processes.process_identity import ProcessIdentity
from deploy.processes.progress import Progress
from deploy.processes.ray_memory_monitor import describe_memory_monitor
from deploy.processes.run_directory import ClusterMark, RunDirectory
from deploy.processes.run_history import start_run
from deploy.ray.gcs_process import GcsWatch, RemoteGcsWatch
from deploy.ray.gcs_store import EMBEDDED, GcsStore
from deploy.ray.joined_ray import AUTO, JoinedRay
from deploy.ray.ray_cluster import RayCluster
from deploy.store.redis_access import STORE_USERS, StoreUser
from deploy.store.shared_secret import SharedSecret
from deploy.store.valkey import EmbeddedValkey
from deploy.supervisor.reconciler import split
from deploy.supervisor.status_store import StatusStore
from deploy.supervisor.supervisor_actor import SupervisorActor
from deploy.workers.actor_settings import ActorSettings

log = logging.getLogger(__name__)


def run_cluster(
    config: Config,
    progress: Progress,
    supervisor_class: type[SupervisorActor] = SupervisorActor,
) -> int:
    """Run a cluster until SIGINT, SIGTERM or SIGHUP, or a failure. Returns the exit code: 0, or 1.

    ``supervisor_class`` is the class of the supervisor. It also determines the class of the
    workers.
    """
    code, hangs = asyncio.run(_run(config, progress, supervisor_class))
    if hangs:
        # Ray's own exit handler would wait for daemons that no longer exist.
        sys.stdout.flush()
        os._exit(code)
    return code


async def _run(
    config: Config, progress: Progress, supervisor_class: type[SupervisorActor]
) -> tuple[int, bool]:
    """Run the cluster.

    Returns the exit code, and whether a thread of this process may never end.
    """
    signals = StopSignals()
    try:
        checked = await preflight(config)
        for advice in checked.advice:
            progress.line(advice, "yellow")
        cluster_id = checked.config.cluster_id or secrets.token_hex(6)
        run = start_run(cluster_id, checked.config.model)
    except BatonError as error:
        progress.line(f"error: {error.message}", "red")
        return 1, False
    mark = ClusterMark(cluster_id, run.path)
    launcher = Launcher(checked, run, mark, signals, progress, supervisor_class)
    return await launcher.run(), launcher.hangs


class Ending(Enum):
    """Why a launcher ends. On one machine all workers end with it, whatever the reason."""

    SIGNAL = auto()
    """An operator's signal. Workers end, unless it is SIGTERM and ``leave_workers`` is set."""
    FAILED_START = auto()
    """The cluster did not start. Workers that this launcher has placed end."""
    FAILURE = auto()
    """The launcher failed after its start. Workers serve on, and another launcher takes over."""


@dataclass(slots=True)
class _Parts:
    """The parts of the cluster that were started."""

    guardian: Guardian
    ray: RayCluster | JoinedRay
    valkey: EmbeddedValkey | None = None
    gcs_valkey: EmbeddedValkey | None = None
    gcs_store: GcsStore | None = None
    routers: tuple[RouterProcess, ...] = ()
    workers: ClusterWorkers | None = None


class Launcher:
    """One run of one cluster. Owned by one event loop."""

    def __init__(
        self,
        checked: Checked,
        run: RunDirectory,
        mark: ClusterMark,
        signals: StopSignals,
        progress: Progress,
        supervisor_class: type[SupervisorActor] = SupervisorActor,
    ) -> None:
        """``supervisor_class`` is the class of the supervisor. It also determines the class of the
        workers."""
        self._config = checked.config
        self._redis_urls = dict(checked.redis_urls)
        """Addresses of the store by store user. Each user has its own permissions."""
        self._shared_secret = SharedSecret.of(self._config, self._redis_urls.get("supervisor", ""))
        self._run = run
        self._mark = mark
        self._signals = signals
        self._progress = progress
        self._supervisor_class = supervisor_class
        ray: RayCluster | JoinedRay = RayCluster(self._config, self._mark, run)
        if self._config.ray_address:
            ray = JoinedRay(self._config, self._mark)
        self._parts = _Parts(Guardian(self._mark, run), ray)
        self._model: PreparedModel | None = None
        self._pids: dict[str, int] = {}
        """Process ids of the cluster's parts on this machine, by name."""
        self._ready = False
        self.hangs = False
        """Whether a thread of this process may never end, because a call to Ray hangs."""

    async def run(self) -> int:
        """Start the cluster, serve until it must stop, end all of its parts, and return the exit
        code."""
        # Every process that this one starts from here on can be found by its mark.
        os.environ.update(self._mark.variables)
        log_file = None
        if not self._progress.is_logged:
            kind = self._config.log_format
            log_file = own_log_file(self._run, "launcher", kind, Service.LAUNCHER, "launcher")
        failure = await self._serve_until_stopped()
        ending = Ending.SIGNAL
        if failure is not None:
            self._show_failure(failure)
            ending = Ending.FAILURE if self._ready else Ending.FAILED_START
        await self._end(ending)
        if log_file is not None:
            log_file.close()
        if self._model is None and isinstance(failure, ConfigError):
            # The message says all: the model's name is wrong, for example.
            self._run.remove()
        elif self._run.keep_logs() and failure is not None:
            self._progress.line(f"logs are kept in {self._run.logs}")
        return 0 if failure is None else 1

    async def _serve_until_stopped(self) -> BaseException | None:
        """Start the cluster and watch it until it must stop. Returns None after a signal, or the
        error that ended the cluster."""
        serving = asyncio.create_task(self._serve())
        stopped = asyncio.create_task(self._signals.stop.wait())
        await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if serving.done():
            return first_leaf(serving.exception())
        self._progress.line("ending ...")
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await serving
        return None

    async def _serve(self) -> None:
        watch = PartWatch(self._report, self._note_pid)
        await self._parts.guardian.start()
        async with asyncio.TaskGroup() as group:
            group.create_task(watch.keep("guardian", self._parts.guardian))
            workers, pids = await self._start(group)
            self._watch(group, watch)
            supervise = partial(self._supervise, workers, watch, pids)
            group.create_task(watch.again("the supervisor's watch", supervise))
            self._announce(workers)

    async def _start(self, lasting: asyncio.TaskGroup) -> tuple[ClusterWorkers, dict[str, int]]:
        """Start all parts of the cluster. Returns the workers, and their process ids by slot.

        Tasks that must continue after the start are added to ``lasting``.
        """
        async with asyncio.TaskGroup() as group:
            store = group.create_task(self._start_store())
            preparing = group.create_task(prepare_model(self._config, self._progress))
            ray = group.create_task(self._start_ray())
            if not self._config.ray_address:
                group.create_task(prepare_kernels(self._config, self._progress, self._report))
            await store
            self._model = model = await preparing
            secret = model.config.cluster_secret
            if self._shared_secret is not None:
                secret = await self._shared_secret.read()
            told = {"cluster_secret": secret or new_secret()}
            self._config = model.config.model_copy(update=told)
            routers = await self._start_routers(model)
            # Until the routers are watched permanently, their death is a failure to start.
            alive = [group.create_task(router.fail_on_death()) for router in routers]
            await ray
            self._parts.workers = workers = self._workers(model)
            if self._config.ray_address:
                with self._progress.step("claiming the cluster"):
                    await workers.lead()
                lasting.create_task(workers.keep_leading())
            with self._progress.step("loading the model into the workers"):
                pids = await workers.start()
                if not self._config.ray_address:
                    self._pids.update(pids)
            with self._progress.step("waiting for the router"):
                await together(router.healthy() for router in routers)
            for task in alive:
                task.cancel()
        return workers, pids

    async def _start_store(self) -> None:
        if self._config.redis_url:
            return
        with self._progress.step("starting Valkey"):
            valkey = EmbeddedValkey(self._mark, self._run, self._config.advanced.index_mib)
            self._parts.valkey = valkey
            await valkey.start()
        self._pids["valkey"] = valkey.pid
        self._redis_urls = {user: valkey.url_of(user) for user in STORE_USERS}

    async def _start_ray(self) -> None:
        with self._progress.step("starting Ray"):
            self._parts.gcs_store = store = await self._start_gcs_store()
            address = self._config.ray_address
            if address and (monitor := describe_memory_monitor(here=address == AUTO)):
                self._report(monitor)
            await self._parts.ray.start(store)
        # Ray has replaced our handler by one that prints a stack trace on SIGTERM.
        self._signals.take()

    async def _start_gcs_store(self) -> GcsStore | None:
        url = self._config.gcs_store
        if url == EMBEDDED:
            valkey = EmbeddedValkey(self._mark, self._run, name="gcs-store", keeps=True)
            self._parts.gcs_valkey = valkey
            await valkey.start()
            self._pids[valkey.name] = valkey.pid
            url = valkey.url
        return GcsStore(url, self._mark.cluster_id) if url else None

    async def _start_routers(self, model: PreparedModel) -> tuple[RouterProcess, ...]:
        routers = self._parts.routers = tuple(
            RouterProcess(
                self._config_for("router"),
                self._mark,
                self._run,
                redis_url=self._redis_urls["router"],
                model_path=str(model.model.path),
                model_name=model.model.name,
                sampling=model.model.sampling,
                number=number,
            )
            for number in range(self._config.routers)
        )
        for router in routers:
            await router.start()
            self._pids[router.name] = router.pid
        return routers

    def _workers(self, model: PreparedModel) -> ClusterWorkers:
        config = self._config_for("worker").model_dump(mode="json")
        config_hash = workers_hash(self._config)
        launcher = ProcessIdentity.own()
        slots = [
            ActorSettings(
                config=config,
                config_hash=config_hash,
                shared_hash=shared_hash(self._config),
                pool=pool.name,
                slot=f"{pool.name}-{number}",
                model_path=str(model.model.path),
                model_name=model.model.name,
                draft_model_path=model.draft_path,
                redis_url=self._redis_urls["worker"],
                cluster_id=self._mark.cluster_id,
                launcher=launcher,
            )
            for pool in self._config.pools
            for number in range(pool.count)
        ]
        return ClusterWorkers(
            self._config,
            slots,
            self._redis_urls["supervisor"],
            self._mark.cluster_id,
            self._supervisor_class,
            self._report,
        )

    def _config_for(self, user: StoreUser) -> Config:
        """Return the configuration for a part of the cluster. The only store address in it is the
        one for the store user ``user``."""
        addresses = {"redis_url": "", "redis_router_url": "", "redis_worker_url": ""}
        if self._config.redis_url:
            addresses["redis_url"] = self._redis_urls[user]
        return self._config.model_copy(update=addresses | {"gcs_store": ""})

    def _watch(self, group: asyncio.TaskGroup, watch: PartWatch) -> None:
        parts = self._parts
        if self._shared_secret is not None:
            keep = partial(self._shared_secret.keep, self._config.cluster_secret)
            group.create_task(watch.again("the cluster's secret", keep))
        group.create_task(watch.ray(parts.ray))
        for router in parts.routers:
            group.create_task(watch.keep(router.name, router))
        for valkey in (parts.valkey, parts.gcs_valkey):
            if valkey is not None:
                group.create_task(watch.keep(valkey.name, valkey))
        if parts.gcs_valkey is not None:
            writable = partial(parts.gcs_valkey.keep_writable, self._report)
            group.create_task(watch.again("the watch of the control store's disk", writable))
        if parts.ray.gcs is not None:
            self._pids[GCS] = parts.ray.gcs.pid
            group.create_task(watch.keep(GCS, parts.ray.gcs))
            asked = GcsWatch(parts.ray.gcs, parts.ray.ask_gcs, self._report)
            group.create_task(watch.again("the control store's watch", asked.run))
        elif self._config.ray_address:
            remote = RemoteGcsWatch(parts.ray.ask_gcs, self._report)
            group.create_task(watch.again("the control store's watch", remote.run))

    async def _supervise(
        self, workers: ClusterWorkers, watch: PartWatch, pids: dict[str, int]
    ) -> None:
        """Place the supervisor, and show what it reports.

        The cluster is ready and serves without the supervisor. ``pids`` has the process ids of the
        workers by slot.
        """
        self._note_pid(SUPERVISOR, await workers.start_supervisor())
        async with redis_client(self._redis_urls["supervisor"]) as client:
            status = StatusStore(client, self._mark.cluster_id)
            one_machine = not self._config.ray_address
            await watch.supervision(status, pids | self._pids, one_machine=one_machine)

    def _report(self, text: str) -> None:
        if not self._progress.is_logged:
            log.warning("%s", text)
        self._progress.line(text, "yellow")

    def _note_pid(self, name: str, pid: int) -> None:
        if self._config.ray_address and split(name)[0] in {one.name for one in self._config.pools}:
            return  # it may run on any machine
        if pid:
            self._pids[name] = pid
        else:
            self._pids.pop(name, None)
        if self._ready:
            try:
                self._save_state()
            except OSError as error:
                # A full disk, for example.
                log.warning("cannot write the cluster's state for other commands: %s", error)

    def _save_state(self) -> None:
        assert self._model is not None, "it is ready"
        tls = self._config.tls.front_client
        shown = tls or TlsFiles()
        ClusterState(
            cluster_id=self._mark.cluster_id,
            run_directory=str(self._run.path),
            model=self._model.model.name,
            http=reachable(self._config.http),
            grpc=reachable(self._config.grpc),
            redis_url=self._redis_urls["supervisor"],
            launcher=ProcessIdentity.own(),
            processes=dict(self._pids),
            admin_http=self._admin_http,
            tls=tls is not None,
            authority=_text(shown.authority),
            certificate=_text(shown.certificate),
            certificate_key=_text(shown.key),
        ).save()

    @property
    def _admin_http(self) -> str:
        return reachable(self._config.admin_http) if self._config.admin_http else ""

    def _announce(self, workers: ClusterWorkers) -> None:
        assert self._model is not None, "it is ready"
        self._save_state()
        self._ready = True
        text = announcement(
            http=reachable(self._config.http) if self._config.routers else "",
            grpc=reachable(self._config.grpc) if self._config.routers else "",
            model=self._model.model.name,
            commit=self._model.model.commit,
            workers=workers.names,
            logs=None if self._progress.is_logged else self._run.logs,
            admin_http=self._admin_http,
            needs_key=self._config.require_key,
            tls=self._config.tls.front_client,
        )
        longest = self._progress.longest()
        about = f" ({longest})" if longest else ""
        self._progress.line(f"ready in {ProcessIdentity.own().age_s:.1f} s{about}", "bold green")
        self._progress.line(text)

    def _show_failure(self, failure: BaseException) -> None:
        known = isinstance(failure, BatonError)
        message = str(failure) if known else f"{type(failure).__name__}: {failure}"
        self._progress.line(f"error: {message}", "red")
        log.error("stopping the cluster", exc_info=failure)
        workers = self._parts.workers
        for slot in workers.names if workers is not None else ():
            if tail := last_lines(self._run.log(slot), 3):
                log.error("last lines of %s:\n%s", slot, tail)

    async def _end(self, ending: Ending) -> None:
        """End the parts of the cluster in order, then kill those of this launcher that remain. A
        second signal skips the orderly end."""
        in_order = asyncio.create_task(self._end_in_order(ending))
        hurry = asyncio.create_task(self._signals.hurry.wait())
        await asyncio.wait({in_order, hurry}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        self.hangs |= not in_order.done()
        in_order.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await in_order
        guardian = self._parts.guardian
        spare = {os.getpid(), guardian.pid} if guardian.started else {os.getpid()}
        grace_s = 0.0 if self._signals.hurry.is_set() else GRACE_S
        left = await asyncio.to_thread(sweep, self._mark, spare, grace_s=grace_s)
        for process in left:
            self._progress.line(f"process {process.pid} could not be ended", "red")
        await guardian.release()

    async def _end_in_order(self, ending: Ending) -> None:
        parts = self._parts
        drains = self._signals.drains and self._ready
        drain_s = self._config.drain_deadline_s if drains else None
        stops = [router.stop(drain_s) for router in parts.routers]
        await asyncio.gather(*stops, return_exceptions=True)
        if parts.workers is not None:
            if self._ends_workers(ending):
                await parts.workers.end(serves=self._ready)
            elif ending is Ending.FAILURE:
                self._progress.line(
                    "the workers serve on: start a launcher with the cluster_id "
                    f"{self._mark.cluster_id}, which takes them over, or end them with `baton "
                    "leave` on each machine",
                    "yellow",
                )
            await parts.workers.close()
        if not await parts.ray.stop():
            self.hangs = True
        if self._config.gcs_store not in ("", EMBEDDED) and parts.gcs_store is not None:
            await parts.gcs_store.forget()
        for valkey in (parts.valkey, parts.gcs_valkey):
            if valkey is not None:
                await valkey.stop()

    def _ends_workers(self, ending: Ending) -> bool:
        if not self._config.ray_address:
            return True  # they end with their Ray
        if ending is Ending.SIGNAL:
            return self._signals.interrupted or not self._config.leave_workers
        return ending is Ending.FAILED_START


def _text(path: Path | None) -> str:
    return "" if path is None else str(path)
