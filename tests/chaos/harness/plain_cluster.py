"""The cluster under test as Kubernetes runs it: plain workers and a router, without a launcher.

    worker: starting ─serves→ serving ─retired→ gone;  serving ─ends→ starting (its next life)

All are children of this process, which restarts workers that end, and replaces them as a Deployment
does: a new one first, then SIGTERM for an old one.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil
import torch
from safetensors.torch import load_file, save_file

from baton.config.choices import Quantization, Role
from baton.config.cluster import Config
from baton.host.background import end_tasks
from deploy.models.model_store import resolve
from tests.chaos.harness.cluster import COUNT, ROLES, Cluster
from tests.chaos.load.call import Fronts
from tests.support.e2e.cluster import (
    BATON,
    END_S,
    START_S,
    UpProcess,
    processes_of,
    wait_healthy,
    wait_until_gone,
)
from tests.support.mini_cluster import free_port

NAME = "demo"
"""The served name of every model."""
_LOOK_S = 0.1
_NOISE = 0.02
"""By how much the second model's weights differ from the first one's, as a share of each."""


@dataclass(frozen=True, slots=True)
class Served:
    """What workers serve: the model's name in this harness, its folder, and its quantization."""

    name: str
    folder: Path
    quantization: Quantization

    @property
    def config(self) -> Config:
        """The configuration of an engine that answers alike."""
        model = str(self.folder)
        return Config(
            model=model, quantization=self.quantization, served_model_name=NAME, deterministic=True
        )

    @property
    def variables(self) -> dict[str, str]:
        """Of a worker's environment."""
        return {"BATON_MODEL": str(self.folder), "BATON_QUANTIZATION": self.quantization}


FIRST, OTHER, INT8 = "first model", "other model", "int8"


@contextmanager
def all_served(names: Collection[str]) -> Iterator[Sequence[Served]]:
    """The first model, and those of ``OTHER`` and ``INT8`` that are named: what a cluster may
    serve. The other model is in a temporary folder."""
    first = resolve(Config().model, lambda _: None, "none").path
    with tempfile.TemporaryDirectory(prefix="chaos-model-") as name:
        folder = Path(name) / "model"
        if OTHER in names:
            _change_weights(first, folder)
        known = Served(FIRST, first, "none"), Served(OTHER, folder, "none")
        yield [one for one in (*known, Served(INT8, first, "int8")) if one.name in (FIRST, *names)]


def _change_weights(model: Path, folder: Path) -> None:
    """Copy a model to ``folder``, with other weights."""
    shutil.copytree(model, folder)
    generator = torch.Generator().manual_seed(1)
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        for key, one in weights.items():
            noise = 1 + _NOISE * torch.randn(one.shape, generator=generator)
            weights[key] = (one * noise).to(one.dtype)
        save_file(weights, file)


class PlainCluster(Cluster):
    """Use it as a context."""

    routers = 1
    configured = f'routers = 1\nserved_model_name = "{NAME}"'

    def __init__(self, served: Sequence[Served]) -> None:
        """``served``: what its workers may serve; they begin with the first one."""
        super().__init__()
        self.served = {one.name: one for one in served}
        self.first = served[0]
        self._file = Path()
        self._variables: dict[str, str] = {}
        self._router: UpProcess | None = None
        self._alive: dict[str, tuple[UpProcess, Served]] = {}
        """The processes of the workers that are to live, by slot."""
        self._number = 0
        self._keeper: asyncio.Task[None] | None = None

    # The cluster's life

    def _start(self, file: Path, variables: Mapping[str, str]) -> None:
        self._cluster_id = f"chaos-{secrets.token_hex(4)}"
        self._file = file
        self._variables = {
            **variables,
            "BATON_CLUSTER_ID": self._cluster_id,
            "BATON_CLUSTER_SECRET": secrets.token_hex(16),
            "TMPDIR": str(self.folder),
        }
        slots = [self._start_worker(role, self.first) for role in ROLES for _ in range(COUNT)]
        fronts = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        where = ("--config", str(file), "--http", fronts[0], "--grpc", fronts[1])
        told = self._variables | self.first.variables
        self._router = UpProcess(*where, env=told, program=(BATON, "router"))
        self.fronts = Fronts(fronts[0], fronts[1], NAME)
        for slot in slots:
            self._wait_serving(slot)
        wait_healthy(f"http://{fronts[0]}")

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._keeper = asyncio.create_task(self._restart_ended(), name="keeper")
        return self

    async def _restart_ended(self) -> None:
        """Start workers again that have ended."""
        while True:
            for slot, (process, served) in list(self._alive.items()):
                if process.process.poll() is not None:
                    await asyncio.to_thread(self._start_worker, _role(slot), served, slot)
            await asyncio.sleep(_LOOK_S)

    def _start_worker(self, role: Role, served: Served, slot: str = "") -> str:
        if not slot:
            slot = f"{role}-{self._number}"
            self._number += 1
        places = str(COUNT * len(ROLES))
        process = UpProcess(
            *("--role", role, "--slot", slot, "--workers-here", places),
            *("--config", str(self._file)),
            env=self._variables | served.variables,
            program=(BATON, "worker"),
            has_fronts=False,
        )
        self._alive[slot] = process, served
        return slot

    def _wait_serving(self, slot: str) -> None:
        """Wait until a worker serves. Raises AssertionError."""
        process, _ = self._alive[slot]
        until = time.monotonic() + START_S
        while f"{slot} serves at" not in process.text:
            assert process.process.poll() is None, f"{slot} has ended:\n{process.text}"
            assert time.monotonic() < until, f"{slot} does not serve:\n{process.text}"
            time.sleep(_LOOK_S)

    def _end(self) -> None:
        parts = [process for process, _ in self._alive.values()]
        if self._router is not None:
            parts.append(self._router)
        for part in parts:
            part.terminate()
        for part in parts:
            part.__exit__(None, None, None)
        self.left = [f"process {one.pid}" for one in wait_until_gone(self._cluster_id, END_S)]
        for process in processes_of(self._cluster_id):
            with contextlib.suppress(psutil.Error):
                process.kill()

    async def __aexit__(self, *error: object) -> None:
        if self._keeper is not None:
            await end_tasks([self._keeper])
        await super().__aexit__(*error)  # type: ignore[arg-type]

    def save_logs(self, folder: Path) -> None:
        """Write what every process has printed to a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        parts = {slot: process for slot, (process, _) in self._alive.items()}
        if self._router is not None:
            parts["router-0"] = self._router
        for name, part in parts.items():
            (folder / f"{name}.txt").write_text(part.text)

    def _routers(self) -> dict[str, int]:
        return {} if self._router is None else {"router-0": self._router.process.pid}

    # Rollouts

    def slots(self, role: Role) -> list[str]:
        """Return the slots of the pool of a role, the oldest first."""
        return [slot for slot in self._alive if _role(slot) == role]

    async def roll_out(self, served: Served) -> None:
        """Have workers of ``served`` take the place of all, one after the other in each pool. Both
        pools do so at the same time. Raises AssertionError."""
        await asyncio.gather(*(self._roll_out(role, served) for role in ROLES))

    async def _roll_out(self, role: Role, served: Served) -> None:
        for old in self.slots(role):
            fresh = self._start_worker(role, served)
            await asyncio.to_thread(self._wait_serving, fresh)
            process, _ = self._alive.pop(old)
            process.terminate()
            # What it runs may take until its deadline.
            await asyncio.to_thread(process.wait, START_S)
            process.__exit__(None, None, None)
            self._workers.pop(old, None)

    async def serves(self, served: Served) -> bool:
        """Whether the workers that are registered are those of ``served``. Raises
        ``redis.RedisError``."""
        there = {worker.slot for worker in await self.workers()}
        return there == {slot for slot, (_, one) in self._alive.items() if one is served}


def _role(slot: str) -> Role:
    return "prefill" if slot.startswith("prefill") else "decode"
