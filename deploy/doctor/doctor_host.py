"""The checks of `baton doctor` on this machine, and on what a configuration names.

Every check returns what it found, or raises ``Missing`` with what is wrong and what to do.
"""

from __future__ import annotations

import asyncio
import ctypes
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import redis

from baton.config.cluster import Config
from baton.config.fields import split_host_port
from baton.errors import BatonError, ConfigError
from baton.store.redis_client import redis_client
from deploy.doctor.doctor import Check, Missing, imported, nccl_devices
from deploy.processes.data_dir import check_data_dir
from deploy.processes.ports import choose_ports, reachable
from deploy.processes.ray_memory_monitor import describe_memory_monitor
from deploy.processes.run_directory import parent_directory
from deploy.processes.run_history import check_run_space
from deploy.store.redis_access import eviction_advice, eviction_policy, store_url

GIB = 1 << 30
MIN_SHARED_MEMORY = GIB // 4
"""Minimum size of /dev/shm in bytes. Ray keeps its objects there, and process groups keep their
buffers there."""
MIN_FILES = 4096
"""Minimum value of a process's limit on open files. A router has an open file for each connection
and for each worker."""
MIN_PROCESSES = 2048
MAX_SKEW_S = 0.5
MIN_GB_PER_S = 0.25
"""Minimum rate of copies between two workers, in GB/s. A lower rate delays the second token of a
long prompt too much."""
_REDIS_S = 3.0
_RAY_S = 3.0
_TOOL_S = 10.0
_UNSYNCHRONIZED = 5
"""The result of ``ntp_gettime`` for a clock that is not synchronized."""
_TIME_BYTES = 256
_DRIVER = Path("/proc/driver/nvidia/version")
_DEVICE = Path("/dev/nvidiactl")
_SHARED = Path("/dev/shm")  # noqa: S108 - the memory that the kernel shares under this name


def host_checks(config: Config) -> tuple[Check, ...]:
    """Return the checks for ``baton serve`` with this configuration, in the order in which a start
    would need their results."""
    store = store_url(config, "supervisor")
    return (
        Check("ports", partial(_ports, config)),
        Check("Redis", partial(_redis, store), needed=bool(config.redis_url)),
        Check("Ray cluster", partial(_ray, config.ray_address), needed=bool(config.ray_address)),
        Check("model files", partial(_model, config.model, config.revision), needed=True),
        Check("data_dir", partial(_data_dir, config)),
        Check("run directory", _run_directory),
        Check("memory", _memory),
        Check("GPU driver", _driver),
        Check("GPUs", _gpus),
        Check("shared memory", _shared_memory),
        Check("open files", partial(_limit, resource.RLIMIT_NOFILE, MIN_FILES, "ulimit -n 65536")),
        Check(
            "processes", partial(_limit, resource.RLIMIT_NPROC, MIN_PROCESSES, "ulimit -u 16384")
        ),
        Check("clock", partial(_clock, store)),
        Check("interconnect", _interconnect),
    )


def _ports(config: Config) -> str:
    from deploy.processes.cluster_state import running_clusters  # noqa: PLC0415

    addresses = [one for one in (config.http, config.grpc, config.admin_http) if one]
    known = {one for state in running_clusters() for one in (state.http, state.grpc)}
    if known & {reachable(one) for one in addresses}:
        return f"{', '.join(addresses)}: one of your clusters listens there"
    try:
        choose_ports(config)
    except ConfigError as error:
        raise Missing(f"{error.message}; or let `baton serve --http 127.0.0.1:0` choose") from None
    return f"{', '.join(addresses)}: free"


def _data_dir(config: Config) -> str:
    try:
        wrong = check_data_dir(config)
    except ConfigError as error:
        wrong = error.message
    if wrong:
        raise Missing(wrong)
    return f"{config.data_folder} can be written"


def _run_directory() -> str:
    try:
        free = check_run_space()
    except ConfigError as error:
        raise Missing(error.message) from None
    return f"{free >> 20} MiB are free in {parent_directory()}"


def _redis(url: str) -> str:
    if not url:
        return "not configured: `baton serve` starts its own"
    try:
        version, policy, took_s = asyncio.run(_ask_redis(url))
    except (redis.RedisError, OSError, TimeoutError, ValueError) as error:
        why = str(error) or f"no answer within {_REDIS_S:.0f} s"
        raise Missing(
            f"{_shown(url)}: {why}; start it, or correct redis_url (host, port, password, TLS)"
        ) from None
    advice = eviction_advice(policy)
    if advice and policy is not None:
        raise Missing(f"{_shown(url)} {advice}")
    text = f"{_shown(url)}: version {version}, answers in {took_s * 1e3:.1f} ms"
    return f"{text}; it {advice}" if advice else text


async def _ask_redis(url: str) -> tuple[str, str | None, float]:
    async with asyncio.timeout(_REDIS_S), redis_client(url) as client:
        await client.ping()
        begun = time.perf_counter()
        await client.ping()
        took_s = time.perf_counter() - begun
        version = "?"
        with suppress(redis.exceptions.NoPermissionError):
            version = (await client.info("server")).get("redis_version", "?")
        policy = await eviction_policy(client)
    return str(version), policy, took_s


def _ray(address: str) -> str:
    if not address:
        return "not configured: `baton serve` starts its own"
    if address == "auto":
        running = [one for one in psutil.process_iter(["name"]) if one.info["name"] == "raylet"]
        if not running:
            raise Missing("ray_address is auto, and no Ray node runs here: ray start --address=…")
        return _with_monitor("a node of it runs here", here=True)
    try:
        socket.create_connection(split_host_port(address), _RAY_S).close()
    except OSError as error:
        raise Missing(
            f"{address}: {error}; start the head there (ray start --head), or open its port"
        ) from None
    return _with_monitor(f"{address} takes connections", here=False)


def _with_monitor(found: str, *, here: bool) -> str:
    return "; ".join(one for one in (found, describe_memory_monitor(here=here)) if one)


def _model(name: str, revision: str) -> str:
    from deploy.models import model_store  # noqa: PLC0415

    try:
        found = model_store.look(name, revision)
    except BatonError as error:
        raise Missing(error.message) from None
    if found.cached:
        return f"{found.path}: {found.size / 1e9:.2f} GB"
    folder = _existing(model_store.download_folder(name))
    free = shutil.disk_usage(folder).free
    if free < 2 * GIB:
        raise Missing(
            f"{name} is not downloaded, and the disk of {folder} has {free / GIB:.1f} GiB left: "
            "free some space, or set HF_HOME and BATON_CACHE_DIR to folders elsewhere"
        )
    return f"{name} is not downloaded: the first start downloads it, or `baton model pull {name}`"


def _existing(path: Path) -> Path:
    return next(one for one in (path, *path.parents) if one.exists())


def _memory() -> str:
    memory = psutil.virtual_memory()
    text = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    if memory.available < 2 * GIB:
        raise Missing(
            f"{text}: two workers of the demo model need 3; stop other programs, or add memory"
        )
    return text


def _driver() -> str:
    if _DRIVER.exists():
        return _DRIVER.read_text().splitlines()[0].removeprefix("NVRM version: ").strip()
    if _DEVICE.exists():
        return "installed, of an unknown version"
    raise Missing("no NVIDIA driver, so the CPU computes; start a container with --gpus all")


def _gpus() -> str:
    torch = imported("torch")
    if not torch.cuda.is_available():
        if not _DEVICE.exists():
            raise Missing("none: the CPU computes")
        build = torch.version.cuda or "none: it is a build for CPUs"
        raise Missing(
            f"the driver is installed, but torch cannot use it (its CUDA: {build}): install a "
            "torch whose CUDA is no newer than what nvidia-smi shows"
        )
    lines = _nvidia_smi() or [
        torch.cuda.get_device_name(one) for one in range(torch.cuda.device_count())
    ]
    return "; ".join(lines)


def _nvidia_smi() -> list[str]:
    """Return one line of the output of ``nvidia-smi`` for each GPU. Empty if the program is not
    installed."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    fields = "--query-gpu=name,memory.free,memory.total,utilization.gpu"
    command = [tool, fields, "--format=csv,noheader"]
    try:
        done = subprocess.run(  # noqa: S603 - no argument comes from elsewhere
            command, capture_output=True, text=True, timeout=_TOOL_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [_gpu_line(line.split(", ")) for line in done.stdout.splitlines() if line]


def _gpu_line(fields: Sequence[str]) -> str:
    if len(fields) != 4:
        return ", ".join(fields)
    name, free, total, used = fields
    return f"{name}, {free} of {total} free, {used} busy"


def _shared_memory() -> str:
    if not _SHARED.is_dir():
        raise Missing("there is no /dev/shm: Ray and process groups need it; mount a tmpfs there")
    usage = shutil.disk_usage(_SHARED)
    text = f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB of /dev/shm free"
    if usage.free < MIN_SHARED_MEMORY:
        raise Missing(
            f"{text}: at least {MIN_SHARED_MEMORY / GIB:.2f} are needed; docker run"
            " --shm-size=2g, in Kubernetes an emptyDir with medium: Memory, else mount -o"
            " remount,size=2g /dev/shm"
        )
    return text


def _limit(which: int, least: int, remedy: str) -> str:
    soft, hard = resource.getrlimit(which)
    if soft != resource.RLIM_INFINITY and soft < least:
        raise Missing(
            f"at most {soft}, and {least} are needed: {remedy}, or LimitNOFILE= and the"
            " like of the service"
        )
    return (
        "no limit"
        if soft == resource.RLIM_INFINITY
        else f"at most {soft} (hard limit {_hard(hard)})"
    )


def _hard(limit: int) -> str:
    return "none" if limit == resource.RLIM_INFINITY else str(limit)


def _clock(url: str) -> str:
    """Check whether NTP synchronizes this machine's clock. If there is a ``url``, also compare the
    clock with that of Redis."""
    kept = "synchronized by NTP" if _is_synchronized() else "not synchronized"
    if url:
        try:
            skew_s, error_s = asyncio.run(_skew(url))
        except (redis.RedisError, OSError, TimeoutError, ValueError):
            return f"{kept}; Redis does not return its time"
        text = f"{skew_s * 1e3:+.0f} ms (± {error_s * 1e3:.0f}) against Redis, {kept}"
        if abs(skew_s) - error_s > MAX_SKEW_S:
            raise Missing(
                f"{text}: times in logs, traces and batches of several machines do not match; run "
                "chrony or systemd-timesyncd on all of them"
            )
        return text
    return f"{kept}, which matters with several machines"


async def _skew(url: str) -> tuple[float, float]:
    """Return how far this machine's clock is ahead of the clock of Redis, and the maximum error of
    that value. Both are in seconds."""
    async with asyncio.timeout(_REDIS_S), redis_client(url) as client:
        await client.ping()
        before = time.time()
        seconds, micros = await client.time()
        after = time.time()
    return (before + after) / 2 - (int(seconds) + int(micros) / 1e6), (after - before) / 2


def _is_synchronized() -> bool:
    try:
        library = ctypes.CDLL(None)
        # The buffer is larger than struct ntptimeval on any platform; only the return value counts.
        found = library.ntp_gettime(ctypes.create_string_buffer(_TIME_BYTES))
    except (OSError, AttributeError):
        return False
    return 0 <= int(found) < _UNSYNCHRONIZED


def _interconnect() -> str:
    """Measure the rate of copies between two processes on this machine, as between two workers."""
    imported("torch")
    from deploy.doctor.pair_check import check_pair  # noqa: PLC0415
    from kvtransfer.transports.process_group.transport import Backend  # noqa: PLC0415

    backend: Backend = "gloo"
    devices = "cpu", "cpu"
    try:
        devices = nccl_devices()
        backend = "nccl"
    except ConfigError:
        pass
    try:
        steps = check_pair(backend, devices)
    except BatonError as error:
        raise Missing(
            f"two processes cannot exchange data over {backend} ({error.message}): set transport"
            ' = "grpc", and see whether a firewall stops loopback'
        ) from None
    rate = max(step.gb_per_s for step in steps)
    text = f"{rate:.2f} GB/s between two processes of this machine, over {backend}"
    if rate < MIN_GB_PER_S:
        raise Missing(
            f"{text}: handoffs will wait for the network; stop what else uses the cores, or use "
            'transport = "shm" or an 8-bit kv_dtype. Between machines: `baton bench transfer`'
        )
    return text


def _shown(url: str) -> str:
    """Return the URL without its password."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or 6379}"
