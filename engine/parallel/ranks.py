"""The ranks of a worker in lock step: rank 0 sends each step, and all ranks compute their part.

Rank 0 is the worker: it has the scheduler, the sequences and their tokens, and draws. The others
know only the blocks that a step reads and writes.

    Leader: listening ─form()→ leading ─a rank is lost→ unusable;  ─close()→ closed
    Follower: connected ─form(), ready()→ ready ─run()→ following ─rank 0 closes→ done
              any ─something fails→ raises
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from baton.errors import BatonError, WorkerFailed
from engine.kv.kv_cache import KvCache
from engine.parallel.rank_group import RankGroup, Rendezvous
from engine.parallel.step_channel import (
    FollowerChannel,
    GroupAddress,
    LeaderChannel,
    OnBroken,
)
from engine.parallel.step_codec import (
    Kind,
    StepReader,
    StepWriter,
    copy_frame,
    warm_up_frame,
)
from engine.sampling.step import StepInput, StepModel, StepOutput

FORM_S = 300.0
"""Maximum seconds to wait for the ranks: some may start their processes later than others."""
_STORE_BYTES = 4

CopyBlocks: TypeAlias = Callable[[Sequence[tuple[int, int]]], None]
"""Copies whole blocks, given as (from, to)."""


class Leader:
    """Rank 0, which leads the others. Used by the engine thread, except where stated."""

    def __init__(self, host: str, ranks: int) -> None:
        """Listen at ``host``; the other ranks need ``address``."""
        self._host, self.ranks = host, ranks
        self._channel = LeaderChannel(host, ranks)
        self._writer = StepWriter()

    @property
    def address(self) -> GroupAddress:
        return self._channel.address

    @property
    def lost(self) -> Future[str]:
        """The reason why the group is unusable, once it is. Any thread may use it."""
        return self._channel.lost

    def fail(self, reason: str) -> None:
        """Mark the group as unusable, because one of its processes has ended. Any thread may call
        this."""
        self._channel.fail(reason)

    @property
    def processes(self) -> Sequence[str]:
        """Names of the processes of the ranks that have connected, in order. Any thread may use
        it."""
        return [greeting.process for _, greeting in sorted(self._channel.greetings.items())]

    def form(self, device: torch.device, deadline_s: float = FORM_S) -> FormedGroup:
        """Wait for the ranks, and form their process group. Raises WorkerFailed."""
        self._channel.accept(deadline_s)
        rendezvous = Rendezvous(self._host, self.ranks)
        self._channel.tell(rendezvous.port.to_bytes(_STORE_BYTES, "little"))
        self._channel.watch()
        group = RankGroup(rendezvous.store, 0, self.ranks, device, self._host)
        return FormedGroup(self, group)

    @contextlib.contextmanager
    def computing(self, step: StepInput, *, draws: bool = False) -> Iterator[None]:
        """Let all ranks compute a step, which this rank computes within the context.

        An exception within it ends the group. With ``draws``, the ranks also receive the drawn
        tokens. Raises WorkerFailed.
        """
        self._channel.tell(self._writer.step(step, draws=draws))
        try:
            yield
        except Exception as error:
            # The other ranks compute the step, and are out of step from now on.
            self._channel.fail(f"rank 0: {error}")
            raise

    def addresses(self, deadline_s: float = FORM_S) -> tuple[str, ...]:
        """Addresses at which the ranks from 1 on serve other workers, once all are ready.

        Raises WorkerFailed.
        """
        return self._channel.addresses(deadline_s)

    def copier(self, copy: CopyBlocks) -> CopyBlocks:
        """A function that copies blocks here, by ``copy``, and on all other ranks."""

        def everywhere(copies: Sequence[tuple[int, int]]) -> None:
            if copies:
                self._channel.tell(copy_frame(copies))
                copy(copies)

        return everywhere

    def tell_warm_up(self) -> None:
        """Let all other ranks warm up."""
        self._channel.tell(warm_up_frame())

    def close(self) -> None:
        """End the ranks; idempotent."""
        self._channel.close()


@dataclass(frozen=True, slots=True)
class FormedGroup:
    """The parts of a group on rank 0, once all ranks have joined."""

    leader: Leader
    group: RankGroup


class LeaderModel:
    """Rank 0's ``engine.sampling.step.StepModel``: it also sends each step to the other ranks."""

    def __init__(self, model: StepModel, leader: Leader) -> None:
        self._model = model
        self._leader = leader

    @property
    def layers_done(self) -> int:
        """Layers done on all ranks: the sum of a layer's results follows its KV."""
        return self._model.layers_done

    def clear_progress(self) -> None:
        self._model.clear_progress()

    def run(self, step: StepInput) -> StepOutput:
        """Compute the tokens on all ranks. Raises WorkerFailed if a rank is lost."""
        with self._leader.computing(step):
            return self._model.run(step)

    def use_threads(self, threads: int) -> None:
        self._model.use_threads(threads)


class FollowerModel(Protocol):
    """Computes the steps of a rank other than 0."""

    def follow(self, step: StepInput, *, draws: bool) -> None:
        """Compute this rank's part; with ``draws``, also receive the tokens that rank 0 draws."""

    def warm_up(self) -> None:
        """Warm up, as rank 0 does."""


class Follower:
    """A rank other than 0. Used by one thread."""

    def __init__(
        self, address: GroupAddress, rank: int, ranks: int, deadline_s: float, process: str = ""
    ) -> None:
        """Connect to rank 0, and send it the name of this ``process``. Raises WorkerFailed."""
        self.rank, self.ranks = rank, ranks
        self._address = address
        self._channel = FollowerChannel(address, rank, deadline_s, process)

    def form(self, device: torch.device, on_broken: OnBroken) -> RankGroup:
        """Join the process group. Raises WorkerFailed.

        ``on_broken`` is called once, on any thread, when rank 0 is gone.
        """
        self._channel.live(on_broken)
        frame = self._channel.frame()
        if frame is None or len(frame) != _STORE_BYTES:
            raise WorkerFailed("rank 0 was lost before the group was formed")
        port = int.from_bytes(frame, "little")
        host, own = self._address.host, self._channel.own_host
        return RankGroup.join(host, port, self.rank, self.ranks, device, own)

    def ready(self, address: str) -> None:
        """Report that steps may come, and the address that serves other workers, or ``none``.

        Raises WorkerFailed.
        """
        self._channel.ready(address)

    def run(self, model: FollowerModel, cache: KvCache) -> None:
        """Compute what rank 0 sends, until it closes. Raises the error of a step."""
        reader = StepReader()
        while (frame := self._channel.frame()) is not None:
            try:
                told = reader.read(frame)
            except (ValueError, IndexError) as error:
                raise WorkerFailed(f"rank 0 sent an invalid frame: {error}") from error
            if told.kind is Kind.COPY:
                cache.copy(told.copies)
            elif told.kind is Kind.WARM_UP:
                model.warm_up()
            else:
                assert told.step is not None, "a step frame has a step"
                model.follow(told.step, draws=told.kind is Kind.DRAWING_STEP)

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._channel.close()


class TorchFollower:
    """Steps in plain torch on a rank other than 0."""

    def __init__(self, model: StepModel) -> None:
        self._model = model

    def follow(self, step: StepInput, *, draws: bool) -> None:
        """See ``FollowerModel``; tokens pass through the host."""
        if draws:
            raise BatonError("torch cannot draw tokens on the device")
        self._model.run(step)

    def warm_up(self) -> None:
        """Do nothing."""
