"""The ranks of a worker in lock step: rank 0 says what is computed, and all compute their part.

Rank 0 is the worker: it has the scheduler, the sequences and their tokens, and draws. The others
know nothing but the blocks that a step reads and writes.

    Leader: listening ─form()→ leading ─a rank is lost→ of no more use;  ─close()→ closed
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
"""For the ranks to come: some may start their processes later than others."""
_STORE_BYTES = 4

CopyBlocks: TypeAlias = Callable[[Sequence[tuple[int, int]]], None]
"""Copies whole blocks: (from, to) each."""


class Leader:
    """Rank 0, which leads the others. Used by the engine thread, but for what says otherwise."""

    def __init__(self, host: str, ranks: int) -> None:
        """Listens at ``host``; the ranks are to be told ``address``."""
        self._host, self.ranks = host, ranks
        self._channel = LeaderChannel(host, ranks)
        self._writer = StepWriter()

    @property
    def address(self) -> GroupAddress:
        return self._channel.address

    @property
    def lost(self) -> Future[str]:
        """Why the group is of no more use, once it is. From any thread."""
        return self._channel.lost

    def fail(self, reason: str) -> None:
        """The group is of no more use: a process of it has ended. From any thread."""
        self._channel.fail(reason)

    @property
    def processes(self) -> Sequence[str]:
        """What names those of the ranks that have come, in their order. From any thread."""
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
        """Have all compute a step, which this rank does within; what it raises ends the group.

        With ``draws`` they take the tokens drawn of it as well. Raises WorkerFailed.
        """
        self._channel.tell(self._writer.step(step, draws=draws))
        try:
            yield
        except Exception as error:
            # The others compute it, and are out of step from now on.
            self._channel.fail(f"rank 0: {error}")
            raise

    def addresses(self, deadline_s: float = FORM_S) -> tuple[str, ...]:
        """Where the ranks from 1 on serve other workers, once all are ready to compute.

        Raises WorkerFailed.
        """
        return self._channel.addresses(deadline_s)

    def copier(self, copy: CopyBlocks) -> CopyBlocks:
        """What copies blocks here, by ``copy``, and on all other ranks."""

        def everywhere(copies: Sequence[tuple[int, int]]) -> None:
            if copies:
                self._channel.tell(copy_frame(copies))
                copy(copies)

        return everywhere

    def tell_warm_up(self) -> None:
        """Have all warm up."""
        self._channel.tell(warm_up_frame())

    def close(self) -> None:
        """The ranks end; idempotent."""
        self._channel.close()


@dataclass(frozen=True, slots=True)
class FormedGroup:
    """What rank 0 has once all ranks have come."""

    leader: Leader
    group: RankGroup


class LeaderModel:
    """Rank 0's ``engine.sampling.step.StepModel``: has the others compute what it computes."""

    def __init__(self, model: StepModel, leader: Leader) -> None:
        self._model = model
        self._leader = leader

    @property
    def layers_done(self) -> int:
        """Of all ranks: a layer's results are added up behind its KV."""
        return self._model.layers_done

    def clear_progress(self) -> None:
        self._model.clear_progress()

    def run(self, step: StepInput) -> StepOutput:
        """Compute the tokens, on all ranks. Raises WorkerFailed where one of them is lost."""
        with self._leader.computing(step):
            return self._model.run(step)

    def use_threads(self, threads: int) -> None:
        self._model.use_threads(threads)


class FollowerModel(Protocol):
    """What computes steps on another rank than 0."""

    def follow(self, step: StepInput, *, draws: bool) -> None:
        """Compute this rank's part; with ``draws`` take the tokens that rank 0 draws of it."""

    def warm_up(self) -> None:
        """As rank 0 does."""


class Follower:
    """Any other rank. Used by one thread."""

    def __init__(
        self, address: GroupAddress, rank: int, ranks: int, deadline_s: float, process: str = ""
    ) -> None:
        """Connects to rank 0, and says what names this ``process``. Raises WorkerFailed."""
        self.rank, self.ranks = rank, ranks
        self._address = address
        self._channel = FollowerChannel(address, rank, deadline_s, process)

    def form(self, device: torch.device, on_broken: OnBroken) -> RankGroup:
        """Join the process group. Raises WorkerFailed.

        ``on_broken`` is called once, from any thread, when rank 0 has gone.
        """
        self._channel.live(on_broken)
        frame = self._channel.frame()
        if frame is None or len(frame) != _STORE_BYTES:
            raise WorkerFailed("rank 0 has gone before the group was formed")
        port = int.from_bytes(frame, "little")
        host, own = self._address.host, self._channel.own_host
        return RankGroup.join(host, port, self.rank, self.ranks, device, own)

    def ready(self, address: str) -> None:
        """Steps may come; ``address`` is where this rank serves other workers, or ``none``.

        Raises WorkerFailed.
        """
        self._channel.ready(address)

    def run(self, model: FollowerModel, cache: KvCache) -> None:
        """Compute what rank 0 says, until it closes. Raises what a step raises."""
        reader = StepReader()
        while (frame := self._channel.frame()) is not None:
            try:
                told = reader.read(frame)
            except (ValueError, IndexError) as error:
                raise WorkerFailed(f"rank 0 said what cannot be read: {error}") from error
            if told.kind is Kind.COPY:
                cache.copy(told.copies)
            elif told.kind is Kind.WARM_UP:
                model.warm_up()
            else:
                assert told.step is not None, "of a step there is one"
                model.follow(told.step, draws=told.kind is Kind.DRAWING_STEP)

    def close(self) -> None:
        """Idempotent."""
        self._channel.close()


class TorchFollower:
    """Steps in plain torch, followed."""

    def __init__(self, model: StepModel) -> None:
        self._model = model

    def follow(self, step: StepInput, *, draws: bool) -> None:
        """See ``FollowerModel``; tokens go by way of the host."""
        if draws:
            raise BatonError("torch draws no tokens on the device")
        self._model.run(step)

    def warm_up(self) -> None:
        """Nothing to do."""
