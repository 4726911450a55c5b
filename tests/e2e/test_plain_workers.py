"""`baton worker`: workers without Ray and launcher, each a process of its own."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from baton.config.cluster import MAX_METRICS_PORTS
from deploy.processes.ports import free_port
from tests.support.e2e.answers import streamed_from
from tests.support.e2e.cluster import BATON, END_S, START_S
from tests.support.mini_cluster import valkey
from tests.support.models import make_tiny_model

TOKENS, LONG = 24, 600
CONFIG = """
model = "{model}"
dtype = "float32"
redis_url = "{redis}"
cluster_id = "plain-{id}"
cluster_secret = "{secret}"
local_prefill = "never"
drain_deadline_s = 20
metrics_port = {metrics}
http = "127.0.0.1:{http}"
grpc = "127.0.0.1:0"
[[pools]]
name = "prefill"
role = "prefill"
threads = 1
kv_pool_mib = 16
[[pools]]
name = "decode"
role = "decode"
tp = 2
threads = 1
kv_pool_mib = 16
"""


class Plain:
    """A cluster whose processes the test starts, as Kubernetes would."""

    def __init__(self, folder: Path, redis_url: str, ends: ExitStack) -> None:
        self.folder, self._ends = folder, ends
        self.http, self.metrics = free_port(), free_port()
        self.config = folder / "baton.toml"
        self.config.write_text(
            CONFIG.format(
                model=make_tiny_model(folder / "model", context=2048, head_dim=16),
                redis=redis_url,
                id=secrets.token_hex(4),
                secret=secrets.token_hex(16),
                metrics=self.metrics,
                http=self.http,
            )
        )
        self.url = f"http://127.0.0.1:{self.http}"

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with self.log(name).open("wb") as output:
            process = subprocess.Popen(
                [BATON, *command, "--config", str(self.config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"TMPDIR": str(self.folder)},
            )
        self._ends.callback(end, process)
        return process

    def worker(self, role: str, slot: str) -> tuple[subprocess.Popen[bytes], int]:
        """A worker that starts, and the port of its probes."""
        port = free_port()
        told = ("--role", role, "--slot", slot, "--workers-here", "3", "--probe-port", str(port))
        return self.start(slot, "worker", *told), port

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_S
        while not holds():
            if time.monotonic() > deadline:
                logs = sorted(self.folder.glob("*.log"))
                told = "\n".join(f"{log.name}:\n{log.read_text()}" for log in logs)
                raise AssertionError(f"{what}\n{told}")
            time.sleep(0.05)

    def until_ready(self, port: int) -> None:
        """Until the worker whose probes are at ``port`` serves."""
        self.until(lambda: status(f"http://127.0.0.1:{port}/ready") == 200, "not ready")

    def pages(self) -> list[str]:
        """Addresses of the workers' metrics pages."""
        found = httpx.get(f"{self.url}/metrics/targets", trust_env=False).json()
        return [where for group in found for where in group["targets"]]

    def answer(self, tokens: int, begun: threading.Event | None = None) -> str:
        asked = {
            "model": "model",
            "prompt": "Once upon a time there was " * 6,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        return streamed_from(self.url, asked, begun or threading.Event())


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(END_S)


def status(url: str) -> int:
    """The status of an answer; 0 without one."""
    try:
        return httpx.get(url, trust_env=False, timeout=5).status_code
    except httpx.TransportError:
        return 0


@contextmanager
def plain(folder: Path) -> Iterator[Plain]:
    with valkey(folder=folder) as url, ExitStack() as ends:
        yield Plain(folder, url, ends)


@pytest.mark.timeout(600)
def test_workers_register_themselves_drain_on_sigterm_and_end_with_their_ranks(
    tmp_path: Path,
) -> None:
    with plain(tmp_path) as cluster, ThreadPoolExecutor() as threads:
        _, prefill = cluster.worker("prefill", "prefill-0")
        first, decode = cluster.worker("decode", "decode-0")
        cluster.start("router", "router")
        for port in (prefill, decode):
            cluster.until_ready(port)
            assert status(f"http://127.0.0.1:{port}/live") == 200
            assert status(f"http://127.0.0.1:{port}/metrics") == 404
        cluster.until(lambda: status(f"{cluster.url}/health") == 200, "no health")
        whole = cluster.answer(TOKENS)
        # Pages are at known ports, from the one after the supervisor's.
        for where in cluster.pages():
            assert 0 < int(where.rpartition(":")[2]) - cluster.metrics <= MAX_METRICS_PORTS
            page = httpx.get(f"http://{where}/metrics", trust_env=False).text
            assert "baton_step_seconds" in page
        # Another one comes, and the first one leaves amid answers: they go on.
        second, joined = cluster.worker("decode", "decode-1")
        cluster.until_ready(joined)
        begun = [threading.Event() for _ in range(4)]
        running = [threads.submit(cluster.answer, LONG, one) for one in begun]
        assert all(one.wait(START_S) for one in begun)
        first.send_signal(signal.SIGTERM)
        cluster.until(lambda: status(f"http://127.0.0.1:{decode}/ready") != 200, "still ready")
        assert len({one.result(START_S) for one in running}) == 1
        assert first.wait(END_S) == 0, cluster.log("decode-0").read_text()
        assert cluster.answer(TOKENS) == whole
        # A worker ends when one of its ranks does, so that what has started it starts it again.
        (rank,) = psutil.Process(second.pid).children()
        rank.kill()
        assert second.wait(END_S) == 1
        assert "rank 1" in cluster.log("decode-1").read_text()


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (("--role", "decode", "--host", "10.0.0.7"), "without mutual TLS of the workers"),
        ((), "no --role or --pool names several pools; choose one of: prefill (prefill), decode"),
        (("--role", "prefill", "--pool", "decode"), "--role prefill and --pool decode names no"),
    ],
)
def test_a_worker_that_cannot_start_says_why(
    tmp_path: Path, told: tuple[str, ...], message: str
) -> None:
    with ExitStack() as ends:
        cluster = Plain(tmp_path, "redis://127.0.0.1:1/0", ends)
        assert cluster.start("worker", "worker", *told).wait(END_S) == 1
        assert message in cluster.log("worker").read_text()
