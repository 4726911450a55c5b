"""A worker process as a child of the tests, that can be halted, stopped and killed."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.chaos.harness.worker_script import Job

ROOT = Path(__file__).resolve().parents[3]
START_S = 200.0
"""Until a worker that was just started serves."""
ANSWER_S = 60.0
"""Until the running one has executed its order."""
_ENVIRONMENT = {"UCX_TLS": "tcp,sm,self", "UCX_NET_DEVICES": "lo"}
"""For nixl: no network device but the loopback interface."""


class WorkerChild:
    """One life of a worker process. ``record`` is there once it is ready."""

    def __init__(self, job: Job, log: Path) -> None:
        """Start it; what it logs goes to ``log``."""
        self.job = job
        self.log = log
        self.record: dict[str, Any] = {}
        self._said: dict[str, queue.SimpleQueue[Any]] = {
            key: queue.SimpleQueue() for key in ("record", "armed", "halted", "report")
        }
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.chaos.harness.worker_script",
                    json.dumps(asdict(job)),
                ],
                cwd=ROOT,
                env=os.environ | _ENVIRONMENT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            for key, value in json.loads(line).items():
                self._said[key].put(value)

    async def _heard(self, key: str, within_s: float = ANSWER_S) -> Any:
        try:
            return await asyncio.to_thread(self._said[key].get, timeout=within_s)
        except queue.Empty:
            raise AssertionError(
                f"{self.job.slot} has not said {key} (exit {self._process.poll()}):\n{self.tail()}"
            ) from None

    def _tell(self, words: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{words}\n")
        self._process.stdin.flush()

    def tail(self) -> str:
        """The end of its log, for a message."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])

    @property
    def address(self) -> str:
        return str(self.record["address"])

    @property
    def incarnation(self) -> str:
        return str(self.record["incarnation"])

    async def ready(self) -> None:
        """Wait until it serves."""
        if not self.record:
            self.record = await self._heard("record", START_S)

    async def arm(self, point: str) -> None:
        """Have it halt when it comes to ``point``."""
        self._tell(f"arm {point}")
        assert await self._heard("armed") == point

    async def stand(self, steps: int) -> None:
        """Have its engine stop after this number of steps: it halts at ``stand``."""
        self._tell(f"stand {steps}")
        assert await self._heard("armed") == "stand"

    async def fail(self, error: str, steps: int) -> None:
        """Have its engine's next steps raise that one of ``worker_script.ERRORS``."""
        self._tell(f"fail {error} {steps}")
        assert await self._heard("armed") == "fail"

    async def halted(self, point: str) -> None:
        """Wait until it has come there."""
        assert await self._heard("halted") == point

    def go(self) -> None:
        """Let it go on; a stopped one will when it is continued."""
        self._tell("go")

    @property
    def has_ended(self) -> bool:
        """Whether its process is gone."""
        return self._process.poll() is not None

    @property
    def exit_code(self) -> int | None:
        """Of its process; None while that runs."""
        return self._process.poll()

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def report(self) -> dict[str, Any]:
        """What it holds, by its own account."""
        self._tell("report")
        report: dict[str, Any] = await self._heard("report")
        return report

    async def blocks(self) -> dict[str, int]:
        """How many of its blocks are in which state, from its /metrics page."""
        page = await asyncio.to_thread(_get, f"http://{self.record['metrics_address']}/metrics")
        return {
            sample.labels["state"]: int(sample.value)
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == "baton_kv_blocks"
        }

    def end(self) -> None:
        """Kill it, whatever state it is in; idempotent."""
        self._process.kill()
        self._process.wait(ANSWER_S)
        self._reader.join(ANSWER_S)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdout.close()
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            return


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=ANSWER_S) as response:
        return str(response.read().decode())
