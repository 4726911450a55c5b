"""Simulates a request at the workers: reservation, prompt, handoff, decoding.

The rules are the workers' own (``decode_worker.room``, ``decode_worker.room_turns``,
``engine.scheduling.scheduler``). Messages
between workers and to the router take virtual time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from baton.errors import BatonError, ContextLengthExceeded, DeadlineExceeded, NoRoom
from baton.request import AttemptName
from decode_worker.room import Room
from decode_worker.room_turns import GRANT_S, Asker
from engine.scheduling.sequence import Sequence, SequenceUpdate
from planning.simulator.cluster.attempt import RouterSide, SimulatedAttempt
from planning.simulator.cluster.event_queue import EventQueue
from planning.simulator.cluster.simulated_request import SimulatedSequence
from planning.simulator.cluster.simulated_worker import SimulatedWorker

MIN_WIRE_S = 0.02
"""Time to transfer the KV of one chunk, in seconds. If it is longer than this, layers are sent
while the chunk is computed, as in ``prefill_worker.handoff``."""


class _Places:
    """A limited number of places, such as those in a batch, and the attempts that wait for one."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.waiting: deque[SimulatedAttempt] = deque()

    def enter(self, attempt: SimulatedAttempt) -> bool:
        """Give the attempt a place if one is free; otherwise the attempt waits for one. Return
        whether it has a place."""
        if self.places:
            self.places -= 1
            return True
        self.waiting.append(attempt)
        return False

    def leave(self) -> SimulatedAttempt | None:
        """Free a place. Return the waiting attempt that gets it; None if no attempt waits."""
        if self.waiting:
            return self.waiting.popleft()
        self.places += 1
        return None


class _Seat:
    """State of a worker outside its engine: its tickets, and the limits on its attempts."""

    def __init__(self, worker: SimulatedWorker) -> None:
        self.room = Room(worker.scheduler)
        self.tickets = 0
        self.refused: dict[AttemptName, RouterSide] = {}
        """Routers of the attempts that were refused here, and wait for room."""
        self.batch = _Places(worker.profile.max_sequences)
        """Places in the prefill batch. An attempt takes one after the target has reserved
        blocks."""
        self.handoffs: dict[str, _Places] = {}
        """Limit on the handoffs in flight to each receiver, as in ``prefill_worker.role``."""


class WorkersSide:
    """Implements ``planning.simulator.cluster.simulated_worker.WorkerListener``."""

    def __init__(self, events: EventQueue) -> None:
        self._events = events
        self._seats: dict[str, _Seat] = {}
        self._attempts: dict[Sequence, SimulatedAttempt] = {}

    def _seat(self, worker: SimulatedWorker) -> _Seat:
        if worker.name not in self._seats:
            self._seats[worker.name] = _Seat(worker)
        return self._seats[worker.name]

    # Start of a prompt

    def begin(self, attempt: SimulatedAttempt) -> None:
        """Handle the arrival of an attempt at the worker that computes its prompt."""
        if len(attempt.spec.token_ids) + 1 >= attempt.target.context_length:
            longest = attempt.target.context_length
            text = (
                f"the request has {len(attempt.spec.token_ids)} tokens, and the workers' context "
                f"is {longest}"
            )
            self._fail(attempt, ContextLengthExceeded(text))
        elif attempt.is_local:
            self._place(attempt)
        elif not attempt.needs_handoff:
            self._take_place(attempt)
        elif self._handoffs(attempt).enter(attempt):
            self._reserve(attempt)
        else:
            self._events.at(attempt.deadline, lambda: self._give_up(attempt))

    def _handoffs(self, attempt: SimulatedAttempt) -> _Places:
        handoffs, source = self._seat(attempt.source).handoffs, attempt.source
        if attempt.target.name not in handoffs:
            handoffs[attempt.target.name] = _Places(source.profile.max_sequences)
        return handoffs[attempt.target.name]

    def _give_up(self, attempt: SimulatedAttempt) -> None:
        if attempt in self._handoffs(attempt).waiting:
            self._handoffs(attempt).waiting.remove(attempt)
            self._fail(attempt, _expired())

    def _reserve(self, attempt: SimulatedAttempt) -> None:
        """Send the target a message to reserve blocks."""
        self._events.after(attempt.source.profile.call_s, lambda: self._promise(attempt))

    def _leave_handoff(self, attempt: SimulatedAttempt) -> None:
        following = self._handoffs(attempt).leave() if attempt.needs_handoff else None
        if following is not None:
            self._reserve(following)

    def _take_place(self, attempt: SimulatedAttempt) -> None:
        """Give the attempt a place in the prefill batch of its source, or let it wait for one. The
        target has reserved the blocks before."""
        if self._seat(attempt.source).batch.enter(attempt):
            self._compute(attempt)
        else:
            self._events.at(attempt.deadline, lambda: self._give_place_up(attempt))

    def _give_place_up(self, attempt: SimulatedAttempt) -> None:
        waiting = self._seat(attempt.source).batch.waiting
        if attempt in waiting:
            waiting.remove(attempt)
            self._end_ticket(attempt)
            self._leave_handoff(attempt)
            self._fail(attempt, _expired())

    def _leave_place(self, attempt: SimulatedAttempt) -> None:
        """Free the attempt's place at its prefill worker, and start the attempt that gets it."""
        following = self._seat(attempt.source).batch.leave()
        if following is not None:
            self._compute(following)
        self._leave_handoff(attempt)

    def _promise(self, attempt: SimulatedAttempt) -> None:
        """Reserve the attempt's blocks at the target, if there is room."""
        target, call_s = attempt.target, attempt.source.profile.call_s
        target.catch_up()
        pool, seat = target.pool, self._seat(target)
        pinned = pool.match(attempt.hashes)
        count = _blocks(attempt, target) - len(pinned)
        if not self._takes_room(attempt, count, pinned):
            self._leave_handoff(attempt)
            return
        pool.pin(pinned)
        attempt.pinned, attempt.missing = pinned, pool.allocate(count)
        attempt.sent_blocks = len(pinned)
        seat.tickets += 1
        target.settle()
        self._events.after(call_s, lambda: self._take_place(attempt))

    def _takes_room(self, attempt: SimulatedAttempt, count: int, held: list[int]) -> bool:
        """Return whether the target has room for the attempt, which needs ``count`` blocks and the
        cached blocks ``held``. If it has none, tell the router."""
        target, spec = attempt.target, attempt.spec
        seat, name = self._seat(target), (spec.request_id, spec.attempt)
        asker = Asker(spec.router_id, name, is_preempted=spec.preemptions > 0)
        try:
            seat.room.check_ever(count + len(held))
            seat.room.take(asker, count + target.pool.evictable(held), promised=seat.tickets)
        except NoRoom:
            load, seat.refused[name] = target.load(), attempt.router
            self._tell(attempt, lambda: attempt.router.no_room(attempt, load))
            self._grant(target)
            return False
        except BatonError as error:
            self._fail(attempt, error)
            return False
        return True

    def _grant(self, worker: SimulatedWorker) -> None:
        """Grant a worker's free room to the requests whose turn it is, and tell their routers."""
        seat = self._seat(worker)
        if not seat.room.turns:
            return
        granted = seat.room.grant(promised=seat.tickets, now=self._events.now)
        for name in (grant.asker.attempt for grant in granted):
            self._tell_granted(worker, seat.refused.pop(name), name)
        if granted:
            # Unused grants end.
            self._events.after(GRANT_S, lambda: self._grant(worker))

    def _tell_granted(self, worker: SimulatedWorker, router: RouterSide, name: AttemptName) -> None:
        self._events.after(worker.profile.call_s, lambda: router.granted(worker.name, name))

    def give_up(self, worker: SimulatedWorker, name: AttemptName) -> None:
        """Handle the message that a router does not wait any more for room at a worker."""

        def leave() -> None:
            seat = self._seat(worker)
            seat.room.turns.leave(name)
            seat.refused.pop(name, None)
            self._grant(worker)

        self._events.after(worker.profile.call_s, leave)

    def _compute(self, attempt: SimulatedAttempt) -> None:
        """Queue the attempt's prompt at the source."""
        sequence = self._sequence(attempt, prefill_only=True)
        attempt.source.add(sequence)

    def _sequence(
        self, attempt: SimulatedAttempt, *, prefill_only: bool = False
    ) -> SimulatedSequence:
        sequence = SimulatedSequence(
            attempt.spec,
            attempt.request,
            prefill_only=prefill_only,
            queued_at=self._events.now,
            deadline=attempt.deadline,
        )
        sequence.hashes = list(attempt.hashes)
        attempt.sequence = sequence
        self._attempts[sequence] = attempt
        return sequence

    def _place(self, attempt: SimulatedAttempt) -> None:
        """Reserve all of the attempt's blocks at a worker that also computes the prompt, if there
        is room."""
        target = attempt.target
        target.catch_up()
        pool = target.pool
        size = target.scheduler.limits.block_size
        held = pool.match(attempt.hashes[: (len(attempt.spec.token_ids) - 1) // size])
        count = _blocks(attempt, target) - len(held)
        if not self._takes_room(attempt, count, held):
            return
        sequence = self._sequence(attempt)
        sequence.cached_tokens = len(held) * size
        pool.pin(held)
        blocks = held + pool.allocate(count)
        target.add_computed(sequence, blocks, sequence.cached_tokens)

    # Results of steps

    def on_emit(self, worker: SimulatedWorker, updates: list[SequenceUpdate]) -> None:
        """Implement ``WorkerListener``."""
        for update in updates:
            attempt = self._attempts.get(update.sequence)
            if attempt is None:
                continue
            if update.sequence.prefill_only:
                self._prompt_step(attempt, update)
            else:
                self._decode_step(attempt, update)
        for sequence in worker.scheduler.take_handed_back():
            self._hand_back(worker, sequence)
        self._grant(worker)

    def _prompt_step(self, attempt: SimulatedAttempt, update: SequenceUpdate) -> None:
        """Handle a computed chunk at the source; with the first token, the prompt is complete."""
        source, sequence = attempt.source, update.sequence
        if attempt.needs_handoff and sequence.block_table:
            self._send(attempt, sequence, is_last=bool(update.token_ids))
        if not update.token_ids:
            return
        source.changed()
        self._tell_computed(attempt)
        if sequence.finish_reason:
            del self._attempts[sequence]
            self._end_ticket(attempt)
            self._leave_place(attempt)
            self._tell(attempt, lambda: attempt.router.finished(attempt))
            return
        now = self._events.now
        arrived_s = max(now, attempt.arrived_s) + source.profile.handoff_s
        self._events.at(arrived_s, lambda: self._commit(attempt, now))

    def _send(self, attempt: SimulatedAttempt, sequence: Sequence, *, is_last: bool) -> None:
        """Send those of the sequence's blocks that have become full. If ``is_last`` is true, send
        the partial block too."""
        source, target = attempt.source, attempt.target
        size = source.scheduler.limits.block_size
        done = _blocks(attempt, source) if is_last else sequence.computed // size
        count = done - attempt.sent_blocks
        if count <= 0:
            return
        attempt.sent_blocks = done
        amount = count * size * source.profile.kv_token_bytes
        wire_s = amount / min(source.wire.bytes_per_s, target.wire.bytes_per_s)
        now, ready_s, layer_s = self._events.now, self._events.now, wire_s / source.profile.layers
        if wire_s >= MIN_WIRE_S:
            # Its layers were sent one after another while the step ran.
            ready_s = now - source.last_step_s * (1 - 1 / source.profile.layers)
        arrived_s = source.wire.send(target.wire, amount, ready_s)
        attempt.arrived_s = max(attempt.arrived_s, arrived_s, now + layer_s)

    def _tell_computed(self, attempt: SimulatedAttempt) -> None:
        sequence = attempt.sequence
        assert sequence is not None, "no prompt was queued"
        tokens, seconds = sequence.computed_here, sequence.compute_s
        attempt.request.cached_tokens = max(attempt.request.cached_tokens, sequence.cached_tokens)
        self._tell(attempt, lambda: attempt.router.computed(attempt, tokens, seconds))

    def _tell(self, attempt: SimulatedAttempt, say: Callable[[], None]) -> None:
        """Call ``say``, a method of the router, after the virtual time that a message takes."""
        self._events.after(attempt.target.profile.call_s, say)

    def _commit(self, attempt: SimulatedAttempt, computed_at: float) -> None:
        """Start decoding at the target after its last byte has arrived."""
        source, target = attempt.source, attempt.target
        self._seat(target).tickets -= 1
        prompt = attempt.sequence
        assert prompt is not None, "no prompt was computed"
        del self._attempts[prompt]
        sequence = self._sequence(attempt)
        sequence.token_ids.append(attempt.request.token_id)
        blocks = attempt.pinned + attempt.missing
        attempt.missing = []
        target.add_computed(sequence, blocks, len(attempt.spec.token_ids))
        took_s = self._events.now - computed_at

        def answered() -> None:
            source.remove(prompt)
            self._leave_place(attempt)
            self._tell(attempt, lambda: attempt.router.committed(attempt, took_s))

        self._events.after(source.profile.call_s, answered)

    def _decode_step(self, attempt: SimulatedAttempt, update: SequenceUpdate) -> None:
        sequence = update.sequence
        if not update.token_ids:
            return
        if attempt.is_local and sequence.output_length == attempt.first_output + 1:
            attempt.target.changed()
            self._tell_computed(attempt)
        if sequence.finish_reason:
            del self._attempts[sequence]
            attempt.target.changed()
            self._tell(attempt, lambda: attempt.router.finished(attempt))

    def _hand_back(self, worker: SimulatedWorker, sequence: Sequence) -> None:
        attempt = self._attempts.pop(sequence, None)
        if attempt is None:
            return
        worker.changed()
        request = attempt.request
        request.preemptions += 1
        request.token_ids = tuple(sequence.token_ids)
        request.hashes = list(sequence.full_hashes(worker.scheduler.limits.hash_block))
        self._tell(attempt, lambda: attempt.router.handed_back(attempt))

    # Change of a role

    def is_emptied(self, worker: SimulatedWorker) -> bool:
        """Migrate a worker's sequences, as routers do for a drained worker. Return whether the
        worker is empty.

        Prompts are still completed on the worker, and each ticket lasts until its handoff ends.
        """
        worker.catch_up()
        scheduler = worker.scheduler
        for sequence in (*scheduler.running, *scheduler.waiting):
            if not sequence.prefill_only and sequence in self._attempts:
                worker.remove(sequence)
                self._hand_back(worker, sequence)
        seat = self._seat(worker)
        here = (*scheduler.running, *scheduler.waiting, *scheduler.held)
        total = worker.profile.max_sequences
        bounds = (seat.batch, *seat.handoffs.values())
        return not here and not seat.tickets and all(bound.places == total for bound in bounds)

    # Early ends

    def on_expire(self, worker: SimulatedWorker, sequences: list[Sequence]) -> None:
        """Implement ``WorkerListener``."""
        for sequence in sequences:
            attempt = self._attempts.pop(sequence, None)
            if attempt is None:
                continue
            worker.changed()
            if sequence.prefill_only:
                self._leave_place(attempt)
                self._end_ticket(attempt)
            self._fail(attempt, _expired())
        self._grant(worker)

    def _end_ticket(self, attempt: SimulatedAttempt) -> None:
        if not attempt.missing:
            return
        target = attempt.target
        target.catch_up()
        target.pool.release(attempt.pinned)
        target.pool.release(attempt.missing)
        attempt.missing = []
        self._seat(target).tickets -= 1
        target.settle()
        self._grant(target)

    def _fail(self, attempt: SimulatedAttempt, error: BatonError) -> None:
        self._tell(attempt, lambda: attempt.router.failed(attempt, error))


def _blocks(attempt: SimulatedAttempt, worker: SimulatedWorker) -> int:
    """Return the number of blocks that all tokens of the attempt need on ``worker``."""
    return -(-len(attempt.spec.token_ids) // worker.scheduler.limits.block_size)


def _expired() -> DeadlineExceeded:
    return DeadlineExceeded("the request's deadline has passed")
