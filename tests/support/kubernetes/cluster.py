"""Runs what a chart renders, without Kubernetes: each pod's processes in namespaces of one machine.

A small controller keeps the replicas of Deployments and StatefulSets, replaces their pods when a
template changes (maxSurge, maxUnavailable), restarts containers that end or fail their liveness
probe, and gives Services' addresses to pods that are ready. Connections between pods are observed,
and compared with the NetworkPolicies.

What it is not: there is no scheduler, no API server, no DNS (names are in /etc/hosts), one node,
and the containers' image is this machine's own installation.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.support.kubernetes.manifests import Manifest, Objects, Workload, selects, workloads
from tests.support.kubernetes.pod import Pod, Running, make_programs, signal_of
from tests.support.kubernetes.policies import End, allowed
from tests.support.machines import Machine, switch

AGENT = str(Path(__file__).with_name("node_agent.py"))
NODE = 250
_FIRST_SERVICE, _LAST_POD = 200, 199
_LOOK_S = 0.25
_OBSERVE_S = 1.0
_INIT_S = 300.0
_REFRESH_S = 10.0
"""Until a changed Secret is in the files of all pods; the kubelet takes up to two minutes."""
_LETTERS = "bcdfghjklmnpqrstvwxz2456789"


@dataclass(frozen=True, slots=True)
class Connection:
    """An observed connection between two pods."""

    source: str
    target: str
    """Names of the pods' workloads."""
    port: int


class Cluster:
    """A namespace of Kubernetes. Owned by one event loop."""

    def __init__(self, folder: Path, center: Machine) -> None:
        """``center`` is the switch of the pods' network."""
        self._folder, self._center = folder, center
        folder.mkdir(exist_ok=True)
        make_programs(folder / "bin")
        self._numbers = itertools.count(1)
        self._service_numbers = itertools.count(_FIRST_SERVICE)
        self.objects = Objects(())
        self._wanted: dict[str, Workload] = {}
        self.pods: dict[str, Pod] = {}
        self._by_address: dict[str, Pod] = {}
        """All pods that there ever were."""
        self._addresses: dict[str, str] = {}
        """Addresses of Services by name."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._refreshing = asyncio.Lock()
        self._agent: asyncio.subprocess.Process | None = None
        self._answers: dict[int, asyncio.Future[bool]] = {}
        self._questions = itertools.count(1)
        self._services_told: dict[str, list[str]] = {}
        self.node = Machine(NODE, center)
        """The node, from which tests send requests: ``node.command`` runs there."""
        self.connections: dict[tuple[Connection, bool], int] = {}
        """Number of sightings of each connection, and whether the policies allow it."""
        self.events: list[str] = []

    # What a test does

    async def apply(self, manifests: Sequence[Manifest]) -> None:
        """Make these the objects of the namespace; pods follow, and some time later the files of
        their Secrets."""
        self.objects = Objects(tuple(manifests))
        for service in self.objects.of_kind("Service"):
            name = service["metadata"]["name"]
            if name not in self._addresses:
                self._addresses[name] = f"10.77.0.{next(self._service_numbers)}"
        self._wanted = {one.name: one for one in workloads(self.objects)}
        for pod in self.pods.values():
            self._spawn(self._refresh(pod))

    def replace(self, secret: Manifest) -> None:
        """Replace a Secret; some time later pods have its files."""
        name = secret["metadata"]["name"]
        kept = (
            one
            for one in self.objects.all
            if (one["kind"], one["metadata"]["name"]) != ("Secret", name)
        )
        self.objects = Objects((*kept, secret))
        for pod in self.pods.values():
            self._spawn(self._refresh(pod))

    async def _refresh(self, pod: Pod) -> None:
        await asyncio.sleep(random.uniform(0, _REFRESH_S))
        # A pod that has just been created may have the files of before.
        while not pod.running and not pod.ending:
            await asyncio.sleep(_LOOK_S)
        async with self._refreshing:
            if not pod.ending:
                await asyncio.to_thread(pod.refresh, self.objects)

    async def scale(self, name: str, replicas: int) -> None:
        """Do what ``kubectl scale`` does."""
        self._wanted[name] = replace(self._wanted[name], replicas=replicas)

    @property
    def workloads(self) -> list[str]:
        """Names of the workloads."""
        return sorted(self._wanted)

    def address(self, service: str) -> str:
        """Return the address of a Service."""
        return self._addresses[service]

    def pods_of(self, workload: str) -> list[Pod]:
        """Return the pods of a workload that have not begun to end."""
        return [
            pod for pod in self.pods.values() if pod.workload.name == workload and not pod.ending
        ]

    def is_ready(self, workload: str) -> bool:
        """Whether a workload has all of its pods, in its latest revision, and all are ready."""
        wanted, found = self._wanted[workload], self.pods_of(workload)
        return len(found) == wanted.replicas and all(
            pod.is_ready and pod.revision == wanted.revision for pod in found
        )

    async def until(self, holds: Callable[[], bool], what: str, deadline_s: float) -> float:
        """Wait until something holds, and return how long that took, in seconds."""
        began = time.monotonic()
        while not holds():
            for task in self._tasks:
                if task.done() and not task.cancelled():
                    task.result()
            if time.monotonic() - began > deadline_s:
                told = "\n".join(self.events[-40:])
                texts = "\n".join(pod.text()[-3000:] for pod in self.pods.values())
                raise AssertionError(f"{what}: not within {deadline_s:.0f} s\n{told}\n{texts}")
            await asyncio.sleep(0.05)
        return time.monotonic() - began

    async def until_ready(self, deadline_s: float) -> float:
        """Wait until all workloads are ready."""
        return await self.until(
            lambda: all(map(self.is_ready, self._wanted)), "workloads are not ready", deadline_s
        )

    async def kill(self, pod: Pod) -> None:
        """Lose a pod, as with its node. Its workload makes another one."""
        self._say(f"{pod.name} is killed")
        await asyncio.to_thread(pod.kill)
        self.pods.pop(pod.name, None)

    def violations(self) -> list[Connection]:
        """Return the observed connections that no policy allows."""
        return [one for (one, is_allowed), _ in self.connections.items() if not is_allowed]

    # Its life

    async def run(self) -> None:
        """Keep the namespace as its objects want it, until cancelled."""
        self._agent = await asyncio.create_subprocess_exec(
            *self.node.command(sys.executable, AGENT),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 20,
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen(), name="agent")
            group.create_task(self._observe(), name="observer")
            while True:
                for wanted in tuple(self._wanted.values()):
                    self._reconcile(wanted)
                for pod in tuple(self.pods.values()):
                    self._look(pod)
                await self._tell_services()
                await asyncio.sleep(_LOOK_S)

    async def close(self) -> None:
        """End all pods at once."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pod in self.pods.values():
            await asyncio.to_thread(pod.kill)
        await asyncio.to_thread(self.node.power_off)
        if self._agent is not None:
            await self._agent.wait()

    def _say(self, text: str) -> None:
        self.events.append(f"{time.monotonic():.1f} {text}")

    def _spawn(self, work: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(
            lambda done: self._tasks.discard(done) if not _failed(done) else None
        )

    # Workloads

    def _reconcile(self, wanted: Workload) -> None:
        present = self.pods_of(wanted.name)
        current = [pod for pod in present if pod.revision == wanted.revision]
        old = [pod for pod in present if pod.revision != wanted.revision]
        surplus = len(current) - wanted.replicas
        for pod in sorted(current, key=lambda pod: pod.is_ready)[: max(0, surplus)]:
            self._retire(pod)
        missing = wanted.replicas - len(current)
        room = wanted.replicas + wanted.max_surge - len(present)
        for _ in range(max(0, min(missing, room))):
            self._create(wanted)
        available = sum(pod.is_ready for pod in present)
        spare = available - (wanted.replicas - wanted.max_unavailable)
        for pod in sorted(old, key=lambda pod: pod.is_ready):
            if not pod.is_ready:
                self._retire(pod)
            elif spare > 0:
                spare -= 1
                self._retire(pod)

    def _create(self, wanted: Workload) -> None:
        if wanted.kind == "StatefulSet":
            names = (f"{wanted.name}-{number}" for number in range(wanted.replicas))
            free = [name for name in names if name not in self.pods]
            if not free:
                return  # until the one of that name is gone
            name = free[0]
        else:
            tail = "".join(random.choices(_LETTERS, k=5))
            name = f"{wanted.name}-{wanted.revision}-{tail}"
        number = next(self._numbers)
        assert number <= _LAST_POD, "no address is left"
        folder = self._folder / f"life-{number}"
        folder.mkdir()
        pod = self.pods[name] = Pod(name, wanted, number, self._center, folder)
        self._by_address[pod.address] = pod
        self._say(f"{name} is created")
        self._spawn(self._begin(pod))

    async def _begin(self, pod: Pod) -> None:
        objects = self.objects
        await asyncio.to_thread(pod.prepare, objects, self._hosts())
        for container in pod.workload.init_containers:
            status = await asyncio.to_thread(pod.run_init, container, objects, _INIT_S)
            if pod.ending:
                return
            assert status == 0, f"{container.name}: {signal_of(status)}\n{pod.text()}"
        for container in pod.workload.containers:
            if not pod.ending:
                await asyncio.to_thread(pod.start, container, objects)

    def _hosts(self) -> dict[str, str]:
        hosts = {}
        for name, address in self._addresses.items():
            for full in (name, f"{name}.default", f"{name}.default.svc"):
                hosts[full] = address
            hosts[f"{name}.default.svc.cluster.local"] = address
        return hosts

    def _retire(self, pod: Pod) -> None:
        pod.ending = True
        self._say(f"{pod.name} ends")
        self._spawn(self._end(pod))

    async def _end(self, pod: Pod) -> None:
        took_s = await asyncio.to_thread(pod.end)
        self._say(f"{pod.name} has ended after {took_s:.1f} s")
        self.pods.pop(pod.name, None)

    # The kubelet

    def _look(self, pod: Pod) -> None:
        now = time.monotonic()
        for one in tuple(pod.running.values()):
            if pod.ending:
                return
            status = one.process.poll()
            if status is not None and one.container in pod.workload.containers:
                self._say(f"{pod.name}/{one.container.name} has ended: {signal_of(status)}")
                self._restart(pod, one)
                continue
            kinds = ("readiness", "liveness") if one.started else ("startup",)
            for kind in kinds:
                probe = one.container.probe(kind)
                if probe is None:
                    if kind == "startup":
                        one.started = True
                    elif kind == "readiness":
                        one.ready = True
                elif now - one.asked_at.get(kind, 0.0) >= probe.period_s:
                    one.asked_at[kind] = now
                    self._spawn(self._probe(pod, one, kind))

    async def _probe(self, pod: Pod, one: Running, kind: str) -> None:
        probe = one.container.probe(kind)
        assert probe is not None, "it is due"
        holds = await self._ask(pod, one, probe.action)
        if pod.ending or pod.running.get(one.container.name) is not one:
            return
        if kind == "startup":
            one.started = one.started or holds
        elif kind == "readiness":
            one.refusals = 0 if holds else one.refusals + 1
            ready = holds or (one.ready and one.refusals < probe.failures)
            if one.ready is not ready:
                self._say(f"{pod.name} is {'ready' if ready else 'not ready'}")
            one.ready = ready
        else:
            one.failures = 0 if holds else one.failures + 1
            if one.failures >= probe.failures:
                self._say(f"{pod.name}/{one.container.name} fails its liveness probe")
                self._restart(pod, one)

    def _restart(self, pod: Pod, one: Running) -> None:
        one.ready = False
        if one.process.poll() is None:
            one.process.kill()
        self._spawn(asyncio.to_thread(pod.start, one.container, self.objects))
        del pod.running[one.container.name]

    async def _ask(self, pod: Pod, one: Running, action: Mapping[str, Any]) -> bool:
        if "exec" in action:
            try:
                command = action["exec"]["command"]
                return await asyncio.to_thread(pod.run_in, one, command, 10.0) == 0
            except subprocess.TimeoutExpired:
                return False
        number = next(self._questions)
        question: dict[str, Any] = {"id": number}
        if "httpGet" in action:
            told = action["httpGet"]
            scheme = str(told.get("scheme", "HTTP")).lower()
            port = one.container.port(told["port"])
            question["http"] = f"{scheme}://{pod.address}:{port}{told.get('path', '/')}"
        else:
            port = one.container.port(action["tcpSocket"]["port"])
            question["tcp"] = f"{pod.address}:{port}"
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._tell(question)
        return await answer

    # The network

    def _tell(self, told: Mapping[str, Any]) -> None:
        assert self._agent is not None
        assert self._agent.stdin is not None
        self._agent.stdin.write(json.dumps(told).encode() + b"\n")

    async def _listen(self) -> None:
        assert self._agent is not None
        assert self._agent.stdout is not None
        while line := await self._agent.stdout.readline():
            told = json.loads(line)
            if "id" in told:
                self._answers.pop(told["id"]).set_result(bool(told["ok"]))
            else:
                host, _, port = told["to"].rpartition(":")
                self._note(told["from"], host, int(port))

    async def _tell_services(self) -> None:
        services: dict[str, list[str]] = {}
        for service in self.objects.of_kind("Service"):
            spec, name = service["spec"], service["metadata"]["name"]
            ready = [
                pod
                for pod in self.pods.values()
                if pod.is_ready and selects(spec.get("selector"), pod.workload.labels)
            ]
            for port in spec.get("ports", ()):
                target = port.get("targetPort", port["port"])
                services[f"{self._addresses[name]}:{port['port']}"] = sorted(
                    f"{pod.address}:{pod.workload.containers[0].port(target)}" for pod in ready
                )
        if services != self._services_told:
            self._services_told = services
            self._tell({"services": services})

    async def _observe(self) -> None:
        while True:
            await asyncio.sleep(_OBSERVE_S)
            for pod in tuple(self.pods.values()):
                with contextlib.suppress(OSError, subprocess.SubprocessError):
                    await asyncio.to_thread(self._sockets, pod)

    def _sockets(self, pod: Pod) -> None:
        def ask(*flags: str) -> list[list[str]]:
            done = subprocess.run(
                pod.machine.command("ss", "-Htn", *flags),
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            )
            return [line.split() for line in done.stdout.splitlines()]

        listens = {one[3].rpartition(":")[2] for one in ask("-l")}
        for one in ask("state", "established"):
            (here, own_port), (there, port) = (one[at].rpartition(":")[::2] for at in (2, 3))
            if here.strip("[]") == pod.address and own_port not in listens:
                self._note(pod.address, there.strip("[]").removeprefix("::ffff:"), int(port))

    def _note(self, source: str, target: str, port: int) -> None:
        one, other = self._by_address.get(source), self._by_address.get(target)
        if one is None or other is None or one is other:
            return  # of the node, or to a Service, which forwards it
        policies = tuple(self.objects.of_kind("NetworkPolicy"))
        seen = Connection(one.workload.name, other.workload.name, port)
        key = seen, allowed(policies, _end(one), _end(other), port)
        self.connections[key] = self.connections.get(key, 0) + 1


def _end(pod: Pod) -> End:
    ports = {
        one["name"]: int(one["containerPort"])
        for container in pod.workload.containers
        for one in container.spec.get("ports", ())
        if "name" in one
    }
    return End(pod.name, pod.workload.labels, ports=ports)


def _failed(task: asyncio.Task[Any]) -> bool:
    return not task.cancelled() and task.exception() is not None


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    """Run a namespace while the context lasts. Skips the test where namespaces cannot be made."""
    with switch() as center:
        made = Cluster(folder, center)
        running = asyncio.create_task(made.run())
        try:
            yield made
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            await made.close()
