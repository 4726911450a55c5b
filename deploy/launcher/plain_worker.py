"""`baton worker`: one worker as a process of its own, placed by Kubernetes, systemd or a person.

The process registers itself, and lives as long as what has started it wants. It is the worker that
Ray places elsewhere (``deploy.workers.worker_actor``), without Ray, launcher and supervisor:

    starting ─serves→ ready ─SIGTERM, or a drain by an operator→ leaving ─nothing left→ exit 0
    starting ─fails→ exit 1;  ready ─fails→ exit 1

A second SIGTERM ends what is left. The main thread handles signals, the worker's thread does the
rest.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import re
import signal
import sys

from baton.config.cluster import Config
from baton.config.pools import PoolConfig
from baton.errors import ConfigError
from baton.host.process_end import end_process
from baton.telemetry.logs import Service, log_to_stream
from deploy.launcher.kernels import compile_kernels, kernels_of, missing_kernels
from deploy.launcher.preflight import check_exposure
from deploy.models import model_store
from deploy.processes.process_identity import ProcessIdentity
from deploy.processes.progress import log_progress
from deploy.store.redis_access import store_url
from deploy.store.shared_secret import SharedSecret
from deploy.workers.actor_settings import ActorSettings
from deploy.workers.local_ranks import LocalRanks
from deploy.workers.node import PLACES_VARIABLE, NodeShare
from deploy.workers.probes import ProbeServer
from deploy.workers.worker_actor import START_S, WorkerThread

_ORDINAL = re.compile(r".*-(\d+)")
"""The names of a StatefulSet's pods end in their number."""
_OF_HOST = re.compile(r"[^A-Za-z0-9.]+")

log = logging.getLogger(__name__)


def pool_of(config: Config, role: str | None, name: str | None) -> PoolConfig:
    """Return the pool with a name, or the only one of a role. Raises ConfigError."""
    pools = [
        pool for pool in config.pools if name in (None, pool.name) and role in (None, pool.role)
    ]
    if len(pools) == 1:
        return pools[0]
    known = ", ".join(f"{pool.name} ({pool.role})" for pool in config.pools)
    wanted = " and ".join(
        f"--{option} {value}" for option, value in (("role", role), ("pool", name)) if value
    )
    many = "names several pools" if pools else "names no pool"
    raise ConfigError(f"{wanted or 'no --role or --pool'} {many}; choose one of: {known}")


def slot_here(pool: str, host: str) -> str:
    """Return the name of a pool's worker on the machine or pod named ``host``: with its number in
    its StatefulSet, or with the last part of its name."""
    numbered = _ORDINAL.fullmatch(host)
    last = numbered[1] if numbered else _OF_HOST.sub("-", host).rpartition("-")[2]
    return f"{pool}-{last or 0}"


def run_worker(
    config: Config, pool: PoolConfig, *, slot: str, host: str, workers_here: int, probe_port: int
) -> None:
    """Run a worker of ``pool`` in this process until it has left.

    ``slot`` is the worker's name; empty takes ``slot_here``. ``host`` is the address at which its
    servers listen and others reach it. ``workers_here`` is the number of workers on this machine,
    which share its cores. ``probe_port`` is the port of ``/live`` and ``/ready``; 0 has none.

    Raises BatonError if the worker cannot start.
    """
    _check(config, pool, host)
    slot = slot or slot_here(pool.name, platform.node())
    log_to_stream(sys.stdout, config.log_level, config.log_format, Service.WORKER, slot)
    os.environ.setdefault(PLACES_VARIABLE, str(workers_here * pool.ranks))
    settings = _settings(config, pool, slot)
    # Before torch is loaded: it reads which GPUs are visible, and the number of threads.
    ranks = LocalRanks(host) if pool.ranks > 1 else None
    share = NodeShare.take(settings, host)
    os.environ["OMP_NUM_THREADS"] = str(share.threads)
    if ranks is None:
        worker = WorkerThread(settings, share, "", sys.stdout)
    else:
        worker = WorkerThread(settings, share, "", sys.stdout, start_ranks=ranks.start)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, worker.on_sigterm)
    probes = ProbeServer(host, probe_port, lambda: worker.is_ready) if probe_port else None
    worker.begin()
    record = worker.record(START_S)
    log.info("%s serves at %s", settings.slot, record["address"])
    worker.wait()
    if probes is not None:
        probes.stop()
    end_process(0)


def _check(config: Config, pool: PoolConfig, host: str) -> None:
    if not config.redis_url:
        raise ConfigError("a worker needs --redis-url, the same as its cluster's routers")
    if not config.cluster_id:
        raise ConfigError(
            "a worker needs the cluster_id of its cluster (BATON_CLUSTER_ID, or in the file)"
        )
    if pool.ranks > 1 and pool.rank_placement != "strict_pack":
        raise ConfigError(
            f"pool {pool.name}: `baton worker` runs all ranks of a worker on its machine; only Ray "
            "places ranks on several machines (`baton serve --ray-address`)"
        )
    check_exposure(config.model_copy(update={"routers": 0, "ray_address": ""}), worker_host=host)


def _settings(config: Config, pool: PoolConfig, slot: str) -> ActorSettings:
    try:
        of_pool = config.model_copy(update={"pools": (pool,)})
        compile_kernels(missing_kernels(kernels_of(of_pool)), log_progress)
    except ConfigError as error:
        log.warning("%s\nWithout it steps run in torch, several times slower.", error.message)
    model = model_store.resolve(config.model, log_progress, config.quantization, config.revision)
    drafter, pinned = "", {"revision": model.commit}
    if config.draft_model:
        found = model_store.resolve_drafter(
            config.drafter, config.draft_model, log_progress, config.draft_revision
        )
        drafter, pinned["draft_revision"] = str(found.path), found.commit
    url = store_url(config, "worker")
    shared = SharedSecret.of(config, url)
    # With certificates a worker needs no secret, and the store's user of workers cannot read it.
    if shared is not None and not config.tls.folder:
        pinned["cluster_secret"] = asyncio.run(shared.read())
    # What this process does not use, and must not pass on to its ranks.
    others = {"redis_router_url": "", "redis_worker_url": "", "gcs_store": "", "ray_address": ""}
    own = {"redis_url": url, "leave_workers": False, "routers": 1}
    return ActorSettings(
        config=config.model_copy(update={**others, **own, **pinned}).model_dump(mode="json"),
        pool=pool.name,
        slot=slot,
        model_path=str(model.path),
        model_name=config.served_model_name or model.name,
        draft_model_path=drafter,
        redis_url=url,
        cluster_id=config.cluster_id,
        launcher=ProcessIdentity.own(),
    )
