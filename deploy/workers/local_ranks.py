"""Ranks of a worker that Ray has not placed: child processes on this machine or in this pod.

Rank 0 is the worker's own process; each other rank is a child of its pod's first process.

    python -m deploy.workers.local_ranks RANK

Each child reads its settings from standard input. It ends when rank 0 closes or is lost, as in
``deploy.workers.ranks``. A rank on a GPU sees that GPU alone.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from queue import SimpleQueue
from typing import TYPE_CHECKING

from pydantic import BaseModel

from baton.errors import WorkerFailed
from baton.host.process_end import end_process, fail
from baton.telemetry.logs import Service, log_to_stream
from deploy.processes.process_identity import Whereabouts
from deploy.workers.actor_settings import ActorSettings
from deploy.workers.node import NodeShare
from deploy.workers.ranks import OnEnded
from deploy.workers.worker_process import build_following

if TYPE_CHECKING:
    from engine.parallel.step_channel import GroupAddress

_GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
_END_S = 10.0
"""Time in which ranks end once one of them has ended, in seconds."""

log = logging.getLogger(__name__)


class _RankSettings(BaseModel):
    """What a rank's process reads from its standard input. It holds the store's password."""

    worker: ActorSettings
    host: str
    address: dict[str, str | int]
    """Fields of rank 0's ``GroupAddress``."""


class LocalRanks:
    """Starts the child processes of one worker that are on this machine."""

    def __init__(self, host: str, ranks: range) -> None:
        """``host`` is the address of the servers of ``ranks``. Call this before torch is loaded:
        from now on this process sees the first rank's GPU alone."""
        self._host, self._ranks = host, ranks
        self._gpus = [gpu for gpu in os.environ.get(_GPUS_VARIABLE, "").split(",") if gpu]
        os.environ[_GPUS_VARIABLE] = self._gpu_of(ranks.start)
        self._children: list[subprocess.Popen[bytes]] = []

    def _gpu_of(self, rank: int) -> str:
        number = rank - self._ranks.start
        return self._gpus[number] if number < len(self._gpus) else str(number)

    @property
    def has_started(self) -> bool:
        """Whether the child processes run, or have run. Any thread may read it."""
        return len(self._children) == sum(rank > 0 for rank in self._ranks)

    def start(self, settings: ActorSettings, address: GroupAddress, on_ended: OnEnded) -> None:
        """Start the ranks other than rank 0, without waiting for them. ``on_ended`` is called when
        one has ended. Raises OSError."""
        self._start(settings, asdict(address), on_ended)

    def follow(self, settings: ActorSettings, address: Mapping[str, str | int]) -> None:
        """Start the ranks, and wait until rank 0 has closed. ``address`` has the fields of rank 0's
        ``GroupAddress``.

        Raises WorkerFailed if a rank ends for another reason, and OSError.
        """
        ended: SimpleQueue[str] = SimpleQueue()
        self._start(settings, address, ended.put)
        reason = ended.get()
        # The others end, too: the group is unusable without one of its ranks.
        for child in self._children:
            try:
                child.wait(_END_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        if any(child.returncode for child in self._children):
            raise WorkerFailed(reason)

    def kill(self) -> None:
        """Kill the ranks' processes."""
        for child in self._children:
            child.kill()

    def _start(
        self, settings: ActorSettings, address: Mapping[str, str | int], on_ended: OnEnded
    ) -> None:
        told = _RankSettings(worker=settings, host=self._host, address=dict(address))
        for rank in self._ranks:
            if rank == 0:
                continue
            child = subprocess.Popen(  # noqa: S603 - this Python and this module
                [sys.executable, "-P", "-m", "deploy.workers.local_ranks", str(rank)],
                stdin=subprocess.PIPE,
                env=os.environ | {_GPUS_VARIABLE: self._gpu_of(rank)},
            )
            assert child.stdin is not None, "it is a pipe"
            with child.stdin as pipe:
                pipe.write(told.model_dump_json().encode())
            self._children.append(child)
            watch = threading.Thread(target=_watch, args=(rank, child, on_ended), daemon=True)
            watch.start()


def _watch(rank: int, child: subprocess.Popen[bytes], on_ended: OnEnded) -> None:
    on_ended(f"rank {rank}: its process has ended ({child.wait()})")


def main() -> None:
    """Be the rank that the first argument names, until rank 0 closes."""
    # Rank 0 handles signals for the worker, and ends its ranks.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank = int(sys.argv[1])
    told = _RankSettings.model_validate_json(sys.stdin.buffer.read())
    config = told.worker.config
    name = f"{told.worker.slot}.rank-{rank}"
    level, kind = str(config["log_level"]), str(config["log_format"])
    log_to_stream(sys.stdout, level, kind, Service.WORKER, name)
    share = NodeShare.take(told.worker, told.host, rank=rank)
    os.environ["OMP_NUM_THREADS"] = str(share.threads)
    process = json.dumps(asdict(Whereabouts.own("")))
    try:
        build_following(told.worker, share, rank, told.address, process).run(fail)
    except BaseException:
        log.exception("rank %d of %s has failed", rank, told.worker.slot)
        end_process()
    end_process(0)


if __name__ == "__main__":
    main()
