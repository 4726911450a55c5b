"""The ranks of a worker in lock step: rank 0 sends each step, and all ranks compute their part.

Rank 0 is the worker: it has the scheduler and the sequences with their tokens, and samples. The
others know only the blocks that a step reads and writes.

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
"""Maximum seconds for which a rank waits for the other ranks at the start. Processes of some ranks
may start later than those of others."""
_STORE_BYTES = 4

CopyBlocks: TypeAlias = Callable[[Sequence[tuple[int, int]]], None]
"""Copies whole KV blocks, given as pairs (from, to)."""


class Leader:
    """Rank 0's connection to the other ranks: sends them each step. Used by the engine thread,
    except where stated."""

    def __init__(self, host: str, ranks: int) -> None:
        """Start to listen on ``host``. The other ranks connect to ``address``."""
        self._host, self.ranks = host, ranks
        self._channel = LeaderChannel(host, ranks)
        self._writer = StepWriter()

    @property
    def address(self) -> GroupAddress:
        return self._channel.address

    @property
    def lost(self) -> Future[str]:
        """Future whose result is the reason why the group of ranks has become unusable. Any thread
        may use it."""
        return self._channel.lost

    def fail(self, reason: str) -> None:
        """Mark the group of ranks as unusable, because one of its processes has ended. Any thread
        may call this."""
        self._channel.fail(reason)

    @property
    def processes(self) -> Sequence[str]:
        """Names of the processes of the ranks that have connected, in order of rank. Any thread may
        use it."""
        return [greeting.process for _, greeting in sorted(self._channel.greetings.items())]

    def form(self, device: torch.device, deadline_s: float = FORM_S) -> FormedGroup:
        """Wait until all ranks have connected, and form their process group. Raises
        WorkerFailed."""
        self._channel.accept(deadline_s)
        rendezvous = Rendezvous(self._host, self.ranks)
        self._channel.tell(rendezvous.port.to_bytes(_STORE_BYTES, "little"))
        self._channel.watch()
        group = RankGroup(rendezvous.store, 0, self.ranks, device, self._host)
        return FormedGroup(self, group)

    @contextlib.contextmanager
    def computing(self, step: StepInput, *, draws: bool = False) -> Iterator[None]:
        """Send a step to the other ranks; this rank computes its part within the context.

        An exception within the context makes the group of ranks unusable. With ``draws``, the other
        ranks also receive the sampled tokens. Raises WorkerFailed.
        """
        self._channel.tell(self._writer.step(step, draws=draws))
        try:
            yield
        except Exception as error:
            # The other ranks compute the step, and are out of step from now on.
            self._channel.fail(f"rank 0: {error}")
            raise

    def addresses(self, deadline_s: float = FORM_S) -> tuple[str, ...]:
        """Wait until all ranks are ready. Return the addresses at which ranks 1 and up serve other
        workers.

        Raises WorkerFailed.
        """
        return self._channel.addresses(deadline_s)

    def copier(self, copy: CopyBlocks) -> CopyBlocks:
        """Make a function that copies blocks on all ranks; on this rank it uses ``copy``."""

        def everywhere(copies: Sequence[tuple[int, int]]) -> None:
            if copies:
                self._channel.tell(copy_frame(copies))
                copy(copies)

        return everywhere

    def tell_warm_up(self) -> None:
        """Send the order to warm up to all other ranks."""
        self._channel.tell(warm_up_frame())

    def close(self) -> None:
        """Close the connections, which ends the other ranks; idempotent."""
        self._channel.close()


@dataclass(frozen=True, slots=True)
class FormedGroup:
    """The connection and the process group of rank 0, once all ranks have joined."""

    leader: Leader
    group: RankGroup


class LeaderModel:
    """Rank 0's model: sends each step to the other ranks, and computes rank 0's part. Implements
    ``engine.sampling.step.StepModel``."""

    def __init__(self, model: StepModel, leader: Leader) -> None:
        self._model = model
        self._leader = leader

    @property
    def layers_done(self) -> int:
        """Number of layers whose KV is complete on all ranks. A layer's results are summed over the
        ranks after its KV is stored."""
        return self._model.layers_done

    def clear_progress(self) -> None:
        self._model.clear_progress()

    def run(self, step: StepInput) -> StepOutput:
        """Compute a step's tokens on all ranks, and store their KV. Raises WorkerFailed if a rank
        is lost."""
        with self._leader.computing(step):
            return self._model.run(step)

    def use_threads(self, threads: int) -> None:
        self._model.use_threads(threads)


class FollowerModel(Protocol):
    """Computes the part of each step that belongs to a rank other than 0."""

    def follow(self, step: StepInput, *, draws: bool) -> None:
        """Compute this rank's part of a step. With ``draws``, also receive the tokens that rank 0
        samples."""

    def warm_up(self) -> None:
        """Compile kernels and capture decode steps before requests arrive, as rank 0 does."""


class Follower:
    """Connection of a rank other than 0 to rank 0. It receives steps and passes them to a
    ``FollowerModel``. Used by one thread."""

    def __init__(
        self, address: GroupAddress, rank: int, ranks: int, deadline_s: float, process: str = ""
    ) -> None:
        """Connect to rank 0 at ``address``, and send it the name of this ``process``. Raises
        WorkerFailed."""
        self.rank, self.ranks = rank, ranks
        self._address = address
        self._channel = FollowerChannel(address, rank, deadline_s, process)

    def form(self, device: torch.device, on_broken: OnBroken) -> RankGroup:
        """Join the process group of the ranks. Raises WorkerFailed.

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
        """Report to rank 0 that this rank can compute steps, and the address at which it serves
        other workers (or ``none``).

        Raises WorkerFailed.
        """
        self._channel.ready(address)

    def run(self, model: FollowerModel, cache: KvCache) -> None:
        """Compute the steps that rank 0 sends, until it closes the connection. Raises the error of
        a step."""
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
        """Close the connection to rank 0; idempotent."""
        self._channel.close()


class TorchFollower:
    """Computes steps in plain torch on a rank other than 0. Implements ``FollowerModel``."""

    def __init__(self, model: StepModel) -> None:
        self._model = model

    def follow(self, step: StepInput, *, draws: bool) -> None:
        """Compute this rank's part of a step. ``draws`` must be false, because plain torch sends
        sampled tokens through the host."""
        if draws:
            raise BatonError("torch cannot draw tokens on the device")
        self._model.run(step)

    def warm_up(self) -> None:
        """Do nothing: plain torch needs no warm-up."""
