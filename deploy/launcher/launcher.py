"""`baton serve`: brings a cluster up on this machine, watches it, and takes all of it down again.

States: new → starting → ready → ending → ended. A signal or a failure leads to ending from
anywhere; a second signal shortens it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import redis

from baton.config.cluster import Config
from baton.config.keys_file import read_keys
from baton.config.pools import PoolConfig
from baton.errors import BatonError, ConfigError
from baton.security.tls import TlsFiles
from baton.store.redis_client import redis_client
from baton.telemetry.logs import formatter
from deploy.launcher.announcement import announcement
from deploy.launcher.cluster_keys import forget_cluster
from deploy.launcher.guardian import GRACE_S, Guardian, sweep
from deploy.launcher.kernels import compile_kernels, kernels_of, missing_kernels
from deploy.launcher.part_watch import GCS, SUPERVISOR, PartWatch
from deploy.launcher.preflight import check_exposure
from deploy.launcher.router_process import RouterProcess
from deploy.models import model_store
from deploy.models.hub_download import DownloadWatch
from deploy.models.model_store import ResolvedModel, resolve_drafter
from deploy.processes.child import last_lines
from deploy.processes.cluster_state import ClusterState
from deploy.processes.daemon_thread import DaemonThread
from deploy.processes.launcher_lease import LauncherClaim
from deploy.processes.ports import choose_ports, reachable
from deploy.processes.process_identity import ProcessIdentity
from deploy.processes.progress import Progress
from deploy.processes.run_directory import ClusterMark, RunDirectory
from deploy.ray.gcs_process import GcsWatch, RemoteGcsWatch
from deploy.ray.gcs_store import EMBEDDED, GcsStore, check_gcs_store
from deploy.ray.joined_ray import JoinedRay
from deploy.ray.ray_cluster import RayCluster
from deploy.store.redis_access import STORE_USERS, StoreUser, check_redis, store_url
from deploy.store.valkey import EmbeddedValkey
from deploy.supervisor.reconciler import split
from deploy.supervisor.status_store import StatusStore
from deploy.supervisor.supervisor_actor import RaySupervisor, SupervisorActor, SupervisorSettings
from deploy.workers.actor_process import reason
from deploy.workers.actor_settings import ActorSettings
from deploy.workers.ray_worker import RayWorker, find, find_all, is_known, place
from engine.checkpoint.model_config import load_model_config

_WORKER_STOP_S = 5.0
_SUPERVISOR_START_S = 60.0
_SUPERVISOR_AGAIN_S = 10.0
_FIND_S = 3.0
_WORKER_GONE_S = 30.0
_POLL_S = 0.1

Result = TypeVar("Result")

log = logging.getLogger(__name__)


def run_cluster(
    config: Config,
    progress: Progress,
    supervisor_class: type[SupervisorActor] = SupervisorActor,
) -> int:
    """Serve until SIGINT, SIGTERM or SIGHUP, or a failure. Returns the exit code: 0, or 1.

    ``supervisor_class`` says what keeps the workers, and what these are.
    """
    launcher = Launcher(config, progress, supervisor_class)
    code = asyncio.run(launcher.run())
    if launcher.hanging:
        # Ray's own exit handler would wait for daemons that are gone.
        sys.stdout.flush()
        os._exit(code)
    return code


@dataclass(slots=True)
class _Parts:
    """What has been started so far."""

    guardian: Guardian
    ray: RayCluster | JoinedRay
    valkey: EmbeddedValkey | None = None
    gcs_valkey: EmbeddedValkey | None = None
    routers: tuple[RouterProcess, ...] = ()
    workers: tuple[RayWorker, ...] = ()
    supervisor: RaySupervisor | None = None


class Launcher:
    """One run of one cluster."""

    def __init__(
        self,
        config: Config,
        progress: Progress,
        supervisor_class: type[SupervisorActor] = SupervisorActor,
    ) -> None:
        self._config = config
        self._supervisor_class = supervisor_class
        self._progress = progress
        self._signals = 0
        self._drains = False
        """Whether requests may end first."""
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._pids: dict[str, int] = {}
        """Of processes on this machine."""
        self._worker_pids: dict[str, int] = {}
        """Of the first workers, each on its machine."""
        self._calls = DaemonThread("ray calls")
        """Makes those that block while Ray's control store is away."""
        self._redis_urls: dict[StoreUser, str] = {}
        """Of the store, by whose they are."""
        self._draft_model_path = ""
        self._ready = False
        self._gcs_store: GcsStore | None = None
        self._claim: LauncherClaim | None = None
        """On a cluster that has workers elsewhere."""
        self.hanging = False
        """Whether a thread of this process may never end."""

    async def run(self) -> int:
        """The whole life; returns the exit code."""
        self._take_signals()
        try:
            check_exposure(self._config)
            _check_certificates(self._config)
            if self._config.routers:
                self._config = choose_ports(self._config)
            if self._config.keys_file:
                read_keys(Path(self._config.keys_file))
            if self._config.redis_url:
                self._redis_urls = {user: store_url(self._config, user) for user in STORE_USERS}
                advice = {url: await check_redis(url) for url in set(self._redis_urls.values())}
                self._advise(advice[self._redis_urls["supervisor"]])
            check_gcs_store(self._config.gcs_store, self._config.redis_url)
            if self._config.gcs_store not in ("", EMBEDDED):
                self._advise(await check_redis(self._config.gcs_store, "--gcs-store"))
        except BatonError as error:
            self._progress.line(f"error: {error.message}", "red")
            return 1
        return await self._run_in(RunDirectory.create())

    def _advise(self, advice: str) -> None:
        if advice:
            self._progress.line(advice, "yellow")

    def _take_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        self._signals += 1
        # Whoever sits before the terminal does not want to wait; whoever stops a service does.
        self._drains = self._drains or number == signal.SIGTERM
        (self._stop if self._signals == 1 else self._hurry).set()

    async def _run_in(self, run: RunDirectory) -> int:
        self._run = run
        self._mark = ClusterMark(self._config.cluster_id or secrets.token_hex(6), run.path)
        # Whatever this process starts from here on, by whatever library, is found again.
        os.environ.update(self._mark.variables)
        handler = log_to_file(run, kind=self._config.log_format)
        self._parts = _Parts(Guardian(self._mark, run), self._make_ray(run))
        failure = await self._serve_until_told()
        if failure is not None:
            self._tell(failure)
        await self._end()
        handler.close()
        logging.getLogger().removeHandler(handler)
        if failure is not None:
            self._progress.line(f"logs are kept in {run.keep_logs()}")
            return 1
        run.remove()
        return 0

    def _make_ray(self, run: RunDirectory) -> RayCluster | JoinedRay:
        if self._config.ray_address:
            return JoinedRay(self._config, self._mark)
        return RayCluster(self._config, self._mark, run)

    async def _serve_until_told(self) -> BaseException | None:
        """Bring the cluster up and watch it; None when a signal ended that, or what failed."""
        serving = asyncio.create_task(self._serve())
        told = asyncio.create_task(self._stop.wait())
        await asyncio.wait({serving, told}, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if serving.done():
            return _leaf(serving.exception())
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
            await self._start(group)
            self._watch(group, watch)
            self._announce()

    async def _start(self, lasting: asyncio.TaskGroup) -> None:
        """``lasting`` is for what goes on once all has started."""
        async with asyncio.TaskGroup() as group:
            store = group.create_task(self._start_store())
            model = group.create_task(self._resolve_model())
            ray = group.create_task(self._start_ray())
            group.create_task(self._compile_kernels())
            await store
            self._model = await model
            routers = await self._start_routers()
            # Until they are watched for good, their death is a failure to start.
            alive = [group.create_task(router.fail_on_death()) for router in routers]
            await ray
            await self._claim_cluster(lasting)
            with self._progress.step("loading the model into the workers"):
                self._parts.workers = await self._place_workers()
                for record in await _together(worker.ready() for worker in self._parts.workers):
                    self._worker_pids[record["slot"]] = record["process"]["pid"]
                if not self._config.ray_address:
                    self._pids.update(self._worker_pids)
            with self._progress.step("waiting for the router"):
                await _together(router.healthy() for router in routers)
            for task in alive:
                task.cancel()

    async def _claim_cluster(self, group: asyncio.TaskGroup) -> None:
        """Where workers live elsewhere: be the one launcher that they have."""
        if not self._config.ray_address:
            return
        with self._progress.step("taking the cluster"):
            self._claim = LauncherClaim(
                self._config, self._redis_urls["supervisor"], self._mark.cluster_id
            )
            changed = await self._claim.take()
            group.create_task(self._claim.keep())
            if changed:
                await self._end_workers_of_others()

    async def _end_workers_of_others(self) -> None:
        """A launcher before this one has told them something else."""
        supervisor = await self._calls.call(RaySupervisor.find)
        if supervisor is not None:
            await self._calls.call(supervisor.kill)
        workers = await self._calls.call(find_all)
        if workers:
            self._report(f"{len(workers)} workers of another configuration are ended first")
        await asyncio.gather(*map(self._end_worker, workers))

    async def _end_worker(self, worker: RayWorker) -> None:
        with contextlib.suppress(Exception):
            await worker.stop(_WORKER_STOP_S)
        await self._calls.call(worker.kill)
        async with asyncio.timeout(_WORKER_GONE_S):
            while await self._calls.call(lambda: is_known(worker.slot)):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)

    async def _start_store(self) -> None:
        if self._config.redis_url:
            return
        with self._progress.step("starting Valkey"):
            valkey = EmbeddedValkey(self._mark, self._run, self._config.advanced.index_mib)
            self._parts.valkey = valkey
            await valkey.start()
        self._pids["valkey"] = valkey.pid
        self._redis_urls = {user: valkey.url_of(user) for user in STORE_USERS}

    async def _resolve_model(self) -> ResolvedModel:
        name = f"getting the model {self._config.model}"
        watch = DownloadWatch(self._progress.detail_every_s)
        with self._progress.step(name):
            tell, thread = self._teller(name), DaemonThread("model")
            config = self._config
            try:
                model = await thread.call(
                    lambda: model_store.resolve(
                        config.model, tell, config.quantization, config.revision, watch
                    )
                )
                # Here too: a model that cannot be served need not wait for Ray and the workers.
                load_model_config(model.path, config.max_model_len)
                pinned = {"revision": model.commit}
                if config.draft_model:
                    draft = await thread.call(
                        lambda: resolve_drafter(
                            config.drafter, config.draft_model, tell, config.draft_revision, watch
                        )
                    )
                    self._draft_model_path = str(draft.path)
                    pinned["draft_revision"] = draft.commit
            except asyncio.CancelledError:
                watch.cancelled.set()
                raise
        # All nodes, and the workers of a later start, have the same commit of a branch.
        self._config = config.model_copy(update=pinned)
        served = config.served_model_name or model.name
        return ResolvedModel(served, model.path, model.commit)

    async def _compile_kernels(self) -> None:
        """Before the workers need them; each of these would wait for it, or do it itself."""
        if self._config.ray_address:
            return
        thread, name = DaemonThread("kernels"), "compiling kernels for this CPU (first start only)"
        try:
            missing = await thread.call(lambda: missing_kernels(kernels_of(self._config)))
            if missing:
                with self._progress.step(name):
                    tell = self._teller(name)
                    await thread.call(lambda: compile_kernels(missing, tell))
        except ConfigError as error:
            self._report(f"{error.message}\nWithout it torch computes, several times slower.")

    def _teller(self, name: str) -> Callable[[str], None]:
        """Tells, from any thread, what a step is doing."""
        loop = asyncio.get_running_loop()

        def tell(text: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens
                loop.call_soon_threadsafe(self._progress.detail, name, text)

        return tell

    async def _start_ray(self) -> None:
        with self._progress.step("starting Ray"):
            self._gcs_store = await self._start_gcs_store()
            await self._parts.ray.start(self._gcs_store)
        # Ray has put a handler in front of ours, which prints a stack trace on SIGTERM.
        self._take_signals()

    async def _start_gcs_store(self) -> GcsStore | None:
        url = self._config.gcs_store
        if url == EMBEDDED:
            valkey = EmbeddedValkey(self._mark, self._run, name="gcs-store", keeps=True)
            self._parts.gcs_valkey = valkey
            await valkey.start()
            self._pids[valkey.name] = valkey.pid
            url = valkey.url
        return GcsStore(url, self._mark.cluster_id) if url else None

    async def _start_routers(self) -> tuple[RouterProcess, ...]:
        routers = self._parts.routers = tuple(
            RouterProcess(
                self._told("router"),
                self._mark,
                self._run,
                redis_url=self._redis_urls["router"],
                model_path=str(self._model.path),
                model_name=self._model.name,
                number=number,
            )
            for number in range(self._config.routers)
        )
        for router in routers:
            await router.start()
            self._pids[router.name] = router.pid
        return routers

    def _told(self, user: StoreUser) -> Config:
        """What a part is told: the store's address by its own user, and nobody else's."""
        addresses = {"redis_url": "", "redis_router_url": "", "redis_worker_url": ""}
        if self._config.redis_url:
            addresses["redis_url"] = self._redis_urls[user]
        return self._config.model_copy(update=addresses | {"gcs_store": ""})

    async def _place_workers(self) -> tuple[RayWorker, ...]:
        """The first lives. Of later ones the supervisor takes care, once all of them serve."""
        self._slots = self._all_settings()
        actor = self._supervisor_class.worker_class
        takes_over = bool(self._config.ray_address)

        def worker(settings: ActorSettings) -> RayWorker:
            found = find(settings.slot) if takes_over else None
            return found or place(settings, actor)

        return await self._calls.call(lambda: tuple(map(worker, self._slots)))

    def _all_settings(self) -> tuple[ActorSettings, ...]:
        pools = self._config.pools
        return tuple(
            self._settings(pool, f"{pool.name}-{n}") for pool in pools for n in range(pool.count)
        )

    def _settings(self, pool: PoolConfig, slot: str) -> ActorSettings:
        return ActorSettings(
            config=self._told("worker").model_dump(mode="json"),
            pool=pool.name,
            slot=slot,
            model_path=str(self._model.path),
            model_name=self._model.name,
            draft_model_path=self._draft_model_path,
            redis_url=self._redis_urls["worker"],
            cluster_id=self._mark.cluster_id,
            launcher=ProcessIdentity.own(),
        )

    def _watch(self, group: asyncio.TaskGroup, watch: PartWatch) -> None:
        parts = self._parts
        group.create_task(watch.ray(parts.ray))
        for router in parts.routers:
            group.create_task(watch.keep(router.name, router))
        for valkey in (parts.valkey, parts.gcs_valkey):
            if valkey is not None:
                group.create_task(watch.keep(valkey.name, valkey))
        if parts.ray.gcs is not None:
            self._pids[GCS] = parts.ray.gcs.pid
            group.create_task(watch.keep_at_it(GCS, parts.ray.gcs))
            group.create_task(GcsWatch(parts.ray.gcs, parts.ray.ask_gcs, self._report).run())
        elif self._config.ray_address:
            group.create_task(RemoteGcsWatch(parts.ray.ask_gcs, self._report).run())
        group.create_task(self._supervise(watch))

    async def _supervise(self, watch: PartWatch) -> None:
        """Place the supervisor, and pass on what it says.

        Nobody waits for it: the cluster is ready, and serves without it.
        """
        settings = SupervisorSettings(
            workers=self._slots,
            drain_s=self._config.drain_deadline_s,
            redis_url=self._redis_urls["supervisor"],
            cluster_id=self._mark.cluster_id,
            log_level=self._config.log_level,
            log_format=self._config.log_format,
            launcher=ProcessIdentity.own(),
        )
        self._note_pid(SUPERVISOR, await self._start_supervisor(settings))
        async with redis_client(self._redis_urls["supervisor"]) as client:
            board = StatusStore(client, self._mark.cluster_id)
            await watch.supervision(board, self._worker_pids | self._pids)

    async def _start_supervisor(self, settings: SupervisorSettings) -> int:
        """Its process id, once it keeps the workers, however long that takes."""
        while True:
            try:
                supervisor = await self._calls.call(
                    lambda: RaySupervisor.place(settings, self._supervisor_class)
                )
                self._parts.supervisor = supervisor
                async with asyncio.timeout(_SUPERVISOR_START_S):
                    return await supervisor.ready()
            except Exception as error:
                self._report(f"the supervisor does not start yet: {reason(error)}")
                await asyncio.sleep(_SUPERVISOR_AGAIN_S)
            if self._parts.supervisor is not None:
                # A control store that died may have lost track of it, and it would never come; its
                # name would be in the way of the next one.
                await self._calls.call(self._parts.supervisor.kill)

    def _report(self, text: str) -> None:
        log.warning("%s", text)
        self._progress.line(text, "yellow")

    def _note_pid(self, name: str, pid: int) -> None:
        if self._config.ray_address and split(name)[0] in {one.name for one in self._config.pools}:
            return  # on whichever machine that is
        if pid:
            self._pids[name] = pid
        else:
            self._pids.pop(name, None)
        if self._ready:
            self._save_state()

    def _save_state(self) -> None:
        tls = self._config.tls.front_client
        shown = tls or TlsFiles()
        ClusterState(
            cluster_id=self._mark.cluster_id,
            run_directory=str(self._run.path),
            model=self._model.name,
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

    def _announce(self) -> None:
        self._ready = True
        self._save_state()
        text = announcement(
            http=reachable(self._config.http) if self._config.routers else "",
            grpc=reachable(self._config.grpc) if self._config.routers else "",
            model=self._model.name,
            commit=self._model.commit,
            workers=[worker.slot for worker in self._parts.workers],
            logs=self._run.logs,
            admin_http=self._admin_http,
            needs_key=self._config.require_key,
            tls=self._config.tls.front_client,
        )
        longest = self._progress.longest()
        about = f" ({longest})" if longest else ""
        self._progress.line(f"ready in {ProcessIdentity.own().age_s:.1f} s{about}", "bold green")
        self._progress.line(text)

    def _tell(self, failure: BaseException) -> None:
        known = isinstance(failure, BatonError)
        message = str(failure) if known else f"{type(failure).__name__}: {failure}"
        self._progress.line(f"error: {message}", "red")
        log.error("the cluster ends", exc_info=failure)
        for worker in self._parts.workers:
            if tail := last_lines(self._run.log(worker.slot), 3):
                log.error("last lines of %s:\n%s", worker.slot, tail)

    async def _end(self) -> None:
        """In order if there is time, and then whatever is left. A second signal cuts it short."""
        in_order = asyncio.create_task(self._end_in_order())
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({in_order, hurry}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        self.hanging |= not in_order.done()
        in_order.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await in_order
        guardian = self._parts.guardian
        spare = {os.getpid(), guardian.pid} if guardian.started else {os.getpid()}
        grace_s = 0.0 if self._hurry.is_set() else GRACE_S
        left = await asyncio.to_thread(sweep, self._mark, spare, grace_s=grace_s)
        for process in left:
            self._progress.line(f"process {process.pid} could not be ended", "red")
        await guardian.release()

    async def _end_in_order(self) -> None:
        parts = self._parts
        drain_s = self._config.drain_deadline_s if self._drains and self._ready else None
        stops = [router.stop(drain_s) for router in parts.routers]
        leaves_workers = self._config.leave_workers and self._drains and self._ready
        if parts.supervisor is not None and not leaves_workers:
            # Before the workers leave: it would start others.
            stops.append(parts.supervisor.stop(_WORKER_STOP_S))
        await asyncio.gather(*stops, return_exceptions=True)
        if not leaves_workers:
            await self._end_workers()
        if self._claim is not None:
            with contextlib.suppress(redis.RedisError):
                await self._claim.give_up()
            await self._claim.close()
        if not await parts.ray.stop():
            self.hanging = True
        if self._config.gcs_store not in ("", EMBEDDED) and self._gcs_store is not None:
            await self._gcs_store.forget()
        for valkey in (parts.valkey, parts.gcs_valkey):
            if valkey is not None:
                await valkey.stop()

    async def _end_workers(self) -> None:
        workers = await self._living_workers()
        await asyncio.gather(
            *(worker.stop(_WORKER_STOP_S) for worker in workers), return_exceptions=True
        )
        if self._config.ray_address:
            # Ray goes on, and would keep their processes.
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_WORKER_STOP_S):
                    await self._calls.call(lambda: self._kill(workers))
        if self._config.redis_url:
            await forget_cluster(self._redis_urls["supervisor"], self._mark.cluster_id)

    def _kill(self, workers: Sequence[RayWorker]) -> None:
        if self._parts.supervisor is not None:
            self._parts.supervisor.kill()
        for worker in workers:
            worker.kill()

    async def _living_workers(self) -> Sequence[RayWorker]:
        """Those that the supervisor has started, too; the first ones where Ray does not tell."""
        if not self._ready:
            return self._parts.workers
        try:
            async with asyncio.timeout(_FIND_S):
                return await self._calls.call(find_all)
        except Exception as error:
            log.warning("the workers cannot be found: %s", reason(error))
            return self._parts.workers


async def _together(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Their results; the first failure ends the others."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for work in works]
    return [task.result() for task in tasks]


def _check_certificates(config: Config) -> None:
    """Raises ConfigError where a file is missing, or is none."""
    tls = config.tls
    for files in (tls.fronts, tls.of("router"), tls.of("worker"), tls.of("supervisor")):
        if files is not None:
            files.check()


def _text(path: Path | None) -> str:
    return "" if path is None else str(path)


def _leaf(error: BaseException | None) -> BaseException | None:
    """The first of the errors that a task group has gathered."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def log_to_file(run: RunDirectory, name: str = "launcher", kind: str = "text") -> logging.Handler:
    """Have this process's log written to its file in the run directory, as text or json."""
    handler = logging.FileHandler(run.log(name))
    handler.setFormatter(formatter(kind))
    logging.getLogger().addHandler(handler)
    return handler
