"""Several machines on one: each has its own network and its own processes, by Linux namespaces.

They share a switch, the files and the user's rights, and nothing else: what is sent from one to
another crosses a network device, and a process id of one means nothing on another.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

_NET = "10.77.0"
_SWITCH = "switch"
_OWN = ("--net", "--pid", "--mount", "--mount-proc")
_STEP_S = 20.0


class Machine:
    """One of them. Its processes end with it."""

    def __init__(self, number: int, switch: Machine | None) -> None:
        """``number`` from 1 names it and its address; the ``switch`` itself has none."""
        self.address = f"{_NET}.{number}"
        # It ends with this process, however that ends: then its input ends.
        self._holder = subprocess.Popen(
            ["unshare", *_OWN, "--fork", "--kill-child", "cat"], stdin=subprocess.PIPE
        )
        self._started: list[subprocess.Popen[bytes]] = []
        self._init = self._first_process()
        self._do("ip", "link", "set", "lo", "up")
        if switch is not None:
            self._connect(number, switch)

    def _first_process(self) -> psutil.Process:
        end = time.monotonic() + _STEP_S
        while time.monotonic() < end and self._holder.poll() is None:
            for child in psutil.Process(self._holder.pid).children():
                if child.name() == "cat":
                    return child
            time.sleep(0.01)
        raise AssertionError("no namespaces")

    def _connect(self, number: int, switch: Machine) -> None:
        port = f"port{number}"
        peer = ("type", "veth", "peer", "name", "eth0", "netns", str(self._init.pid))
        switch._do("ip", "link", "add", port, *peer)
        switch._do("ip", "link", "set", port, "master", _SWITCH, "up")
        self._do("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self._do("ip", "link", "set", "eth0", "up")

    def become_switch(self) -> None:
        self._do("ip", "link", "add", _SWITCH, "type", "bridge")
        self._do("ip", "link", "set", _SWITCH, "up")

    def _do(self, *command: str) -> None:
        # Of the network alone: its processes cannot be seen from within yet.
        subprocess.run(
            ["nsenter", "-t", str(self._init.pid), "-n", *command], check=True, timeout=_STEP_S
        )

    def command(self, *command: str) -> list[str]:
        """What runs ``command`` there."""
        return ["nsenter", "-t", str(self._init.pid), "-n", "-p", "-m", "--", *command]

    def start(
        self, command: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """A process there, its output in ``log``; it ends with the machine."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                self.command(*command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def terminate(self, process: subprocess.Popen[bytes]) -> None:
        """SIGTERM for what ``start`` has started."""
        self._signal(process, signal.SIGTERM)

    def interrupt(self, process: subprocess.Popen[bytes]) -> None:
        """Ctrl-C for what ``start`` has started."""
        self._signal(process, signal.SIGINT)

    def suspend(self, process: subprocess.Popen[bytes]) -> None:
        """SIGSTOP for what ``start`` has started."""
        self._signal(process, signal.SIGSTOP)

    def resume(self, process: subprocess.Popen[bytes]) -> None:
        """SIGCONT for what was suspended."""
        self._signal(process, signal.SIGCONT)
        # nsenter stops together with its child.
        process.send_signal(signal.SIGCONT)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """SIGKILL for what ``start`` has started."""
        self._signal(process, signal.SIGKILL)

    def _signal(self, process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        # nsenter is the parent.
        for child in psutil.Process(process.pid).children():
            child.send_signal(number)

    def processes(self) -> list[psutil.Process]:
        """All of its processes, as this machine sees them."""
        own = Path(f"/proc/{self._init.pid}/ns/pid").readlink()
        found = []
        for process in psutil.process_iter():
            try:
                if Path(f"/proc/{process.pid}/ns/pid").readlink() == own:
                    found.append(process)
            except OSError:
                continue
        return found

    def power_off(self) -> None:
        """At once, with all that runs there, and its network; idempotent."""
        self._holder.kill()
        self._holder.communicate()
        self._init.wait(_STEP_S)
        for process in self._started:
            process.wait(_STEP_S)


@contextmanager
def switch() -> Iterator[Machine]:
    """What machines are connected to. Skips the test without namespaces."""
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("namespaces need util-linux and iproute2")
    probe = ["unshare", *_OWN, "--fork", "true"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("this user may not make namespaces")
    made = Machine(254, None)
    try:
        made.become_switch()
        yield made
    finally:
        made.power_off()


@contextmanager
def machines(count: int) -> Iterator[list[Machine]]:
    """This number of machines, which reach one another. Skips the test without namespaces."""
    with switch() as center, ExitStack() as stack:
        made = []
        for number in range(1, count + 1):
            made.append(Machine(number, center))
            stack.callback(made[-1].power_off)
        yield made
