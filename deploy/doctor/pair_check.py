"""Tests whether two processes of this machine can exchange memory over torch.distributed.

    python -m deploy.doctor.pair_check BACKEND RANK DEVICE FOLDER     one of the two processes

Rank 0 sends data to rank 1, which sends back what it received; rank 0 compares. ``nccl`` needs two
GPUs, and has not run on two yet; ``gloo`` runs on any machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from baton.errors import Unavailable

if TYPE_CHECKING:
    from kvtransfer.transports.process_group.transport import Backend

MIBS = (1, 8, 64)
_DEADLINE_S = 90.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class PairStep:
    """One exchange between the two processes that succeeded."""

    what: str
    bytes: int
    """Number of bytes sent in both directions together."""
    seconds: float

    @property
    def gb_per_s(self) -> float:
        """Return the rate of the exchange in 10^9 bytes per second."""
        return self.bytes / self.seconds / 1e9


def check_pair(backend: Backend, devices: tuple[str, str]) -> list[PairStep]:
    """Start two processes, one on each device, and exchange data of each size in ``MIBS`` between
    them.

    Raises Unavailable with the first failure, or after 90 seconds.
    """
    # This keeps other machines from reaching the two processes.
    interfaces = psutil.net_if_addrs().items()
    loopback = next(name for name, has in interfaces if "127.0.0.1" in {one.address for one in has})
    environment = os.environ | {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    ends: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="baton-pair-") as folder:
        logs = [Path(folder) / f"{rank}.log" for rank in range(2)]
        try:
            for rank, device in enumerate(devices):
                command = [
                    *(sys.executable, "-P", "-m", "deploy.doctor.pair_check"),
                    backend,
                    str(rank),
                    device,
                ]
                with logs[rank].open("wb") as log:
                    ends.append(
                        subprocess.Popen(  # noqa: S603 - this Python and this module
                            [*command, folder], stdout=log, stderr=log, env=environment
                        )
                    )
            _wait(ends, devices, logs)
        finally:
            for end in ends:
                end.kill()
                end.wait()
        return [PairStep(**step) for step in json.loads((Path(folder) / "steps").read_text())]


def _wait(ends: list[subprocess.Popen[bytes]], devices: tuple[str, str], logs: list[Path]) -> None:
    until = time.monotonic() + _DEADLINE_S
    while any(end.poll() is None for end in ends):
        if time.monotonic() > until:
            raise Unavailable(f"two processes did not finish within {_DEADLINE_S:.0f} s")
        if any(end.poll() for end in ends):
            break
        time.sleep(_POLL_S)
    for end, device, log in zip(ends, devices, logs, strict=True):
        if end.poll():
            lines = log.read_text(errors="replace").strip().splitlines()
            why = lines[-1] if lines else "no output"
            raise Unavailable(f"the process on {device} ended with {end.returncode}: {why}")


def _run(backend: str, rank: int, device: str, folder: Path) -> None:
    """Run one of the two processes. Rank 0 writes the successful exchanges to a file in
    ``folder``."""
    import torch  # noqa: PLC0415
    from torch import distributed  # noqa: PLC0415

    if device != "cpu":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=_DEADLINE_S),
    )
    steps: list[PairStep] = []
    for mib in (1, *MIBS):  # the first exchange makes the connection
        sent = torch.randint(1 << 62, (mib << 17,), device=device)
        received = torch.empty_like(sent)
        begun = time.perf_counter()
        if rank:
            distributed.recv(received, 0)
            distributed.send(received, 0)
        else:
            distributed.send(sent, 1)
            distributed.recv(received, 1)
        if device != "cpu":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        if rank == 0 and not torch.equal(sent, received):
            raise Unavailable(f"{mib} MiB came back changed: {backend} corrupts data")
        steps.append(PairStep(f"{mib} MiB there and back", mib << 21, seconds))
    if rank == 0:
        (folder / "steps").write_text(json.dumps([asdict(step) for step in steps[1:]]))
    distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        _run(sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
    except Exception as failure:  # torch raises many kinds
        # The parent reports this line.
        sys.exit(f"{type(failure).__name__}: {' '.join(str(failure).split())}")
