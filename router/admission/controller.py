"""The admission controller: accepts or rejects requests, orders them, and sends them to the
workers.

    offered ─a bound, no place→ refused
    offered → waiting ─its turn, and room→ sent ─first token→ begun → gone
              waiting ─too late, pushed out→ refused
              sent ─no decode worker has room→ waiting, at the place that it had

A request without a deadline of its own waits for its turn. It is rejected if
``max_waiting_requests`` already wait or the predicted wait is over ``max_queue_s``. A request with
a deadline is rejected if its answer is predicted to end later.

With an SLO (``admission = "slo"``), it is also rejected if waiting would make its first token late
while more work arrives than the cluster can do. At a lower load the queue shortens by itself, and a
late answer is better than none.

While requests of a length (by power of two) are rejected as late, one is accepted as a probe every
1 to 10 s: a rejected request corrects no prediction.

Background requests have a queue of their own with the lowest priority. They are sent while no other
request waits and ``router.admission.background`` finds spare capacity.

The prefill workers get just enough work to stay busy. The rest waits here, where its order can
still change. A request for which a decode worker holds room goes at once. While decode workers of a
context-length class have refused requests and the others are full, requests of this class wait, and
those of other classes pass. Requests that migrate come first: they have waited once.

Plain Python; ``now`` is passed in. Owned by one event loop.
"""

from __future__ import annotations

import bisect
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from baton.config.cluster import Config
from baton.errors import BatonError, DeadlineUnreachable, Overloaded
from router.admission.background import BackgroundSlack
from router.admission.capacity import Capacity, DecodeReservations, ExpectedAnswer
from router.admission.fair_queue import Entry, FairQueue
from router.admission.inflight_prefills import InflightPrefills
from router.admission.overload import Overload, PrefillPacer

MAX_LEAD_S = 30.0
"""Maximum effect of a request's priority on its position in the queue, in seconds of waiting."""
PRIORITY_STEP_S = 1.0
"""One level of priority has the same effect on the order as this many seconds of waiting."""
MIN_PACED_TOKENS = 8
"""Minimum tokens of an answer whose time per token is measured. The time of a shorter answer is
mostly spent on the handoff."""
MIN_RETRY_S = 0.1
"""Minimum of the ``Retry-After`` header, in seconds."""
CAUTION = 1.25
"""Factor on a request's predicted wait before it is compared with the SLO, since long predictions
are less certain."""
ASK_S = 0.25
"""Seconds after which a waiting request asks a worker that looks full, if sequences of other
routers run there. A worker grants room only to routers that have asked."""
LOOK_S = 0.04
"""Minimum interval in seconds between two searches for waiting requests that are too late."""


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """The properties of a request that admission needs."""

    request_id: str
    tenant: str
    priority: int
    """Priority of the request: within a tenant, lower values go first."""
    prompt_tokens: int
    max_tokens: int
    """Maximum number of tokens of the request's answer."""
    slo_s: float = math.inf
    """TTFT SLO of the request in seconds; infinite if it has none."""
    deadline_s: float = math.inf
    """Seconds from now by which the answer must have ended."""
    own_deadline: bool = False
    """Whether the client set the deadline. If so, predictions are compared with the deadline."""
    choices: int = 1
    """Number of answers. They are assumed to be equally long, so tokens are counted for the first
    only."""
    background: bool = False
    """Whether this is a background request: it may wait without limit, and uses only spare
    capacity."""
    context_class: str = ""


def slo_of(config: Config, prompt_tokens: int) -> float:
    """Return the TTFT SLO in seconds for a prompt of this length; infinite if none applies."""
    if config.admission == "queue":
        return math.inf
    return config.slo_ttft_of(config.class_of(prompt_tokens))


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting(Entry):
    """A request that waits in a queue of the admission controller."""

    request: AdmissionRequest
    offered_at: float
    answer: ExpectedAnswer
    work_s: float
    """Predicted time in seconds for which the request's prompt occupies one prefill worker."""
    min_blocks: int = 0
    """Number of blocks that must be available at a worker. 0 for a request that no worker has
    refused."""


@dataclass(frozen=True, slots=True)
class _Migrating:
    """Choices of a request that migrates, and that waits for room."""

    order: float
    key: str
    request_id: str
    context_class: str
    blocks: int


class AdmissionController:
    """Queues requests, and admits or rejects them by load, deadline and SLO."""

    def __init__(
        self,
        weights: Mapping[str, float],
        config: Config,
        refuse: Callable[[str, BatonError], None],
    ) -> None:
        """Create a controller. ``weights``: the weight of each tenant, by which they share the
        cluster.

        ``refuse`` is called with the id of each waiting request that is rejected, and the reason.
        In ``slo`` mode, prompts are sent only as fast as the TPOT of running answers allows."""
        self._queue: FairQueue[_Waiting] = FairQueue(weights, config.max_waiting_requests)
        # Not bounded here: the source of background requests bounds their number.
        self._background: FairQueue[_Waiting] = FairQueue(weights, sys.maxsize)
        self._numbers = itertools.count()
        self._entries: dict[str, _Waiting] = {}
        self._sent: dict[str, _Waiting] = {}
        """Requests that were sent, and that have no first token."""
        self._migrating: list[_Migrating] = []
        self._placing: dict[str, str] = {}
        """Classes of the requests that were sent, and for which workers are searched."""
        self._asking: dict[str, str] = {}
        """Classes of the requests that were sent although no worker seemed to have room, and that
        no worker has accepted or refused."""
        self._used: Counter[str] = Counter()
        """Number of requests of each class that were sent, and that ``_room_seen`` does not
        count."""
        self._room_seen: object = None
        self._max_queue_s = config.max_queue_s
        self._slo_tpot_s = config.slo_tpot_s
        self._paces = config.admission == "slo"
        self._refuse = refuse
        self._prefill = InflightPrefills()
        self._decode = DecodeReservations()
        self._slack = BackgroundSlack(
            self._prefill, self._decode, config.slo_tpot_s, config.max_batch_in_flight
        )
        self._overload = Overload()
        self._pacer = PrefillPacer()
        self._looked_at = -math.inf
        self._waits = False
        """Whether requests waited for prefill workers after the last decision."""

    # Observed values

    @property
    def speed(self) -> float | None:
        """Measured speed of all prefill workers together: seconds of work by the cost model that
        they do per second. None if too little was measured."""
        return self._prefill.learned_speed

    @property
    def tpot_s(self) -> float:
        """Mean time per output token in seconds; 0 if it is not known."""
        return self._decode.tpot_s

    def waiting(self, tenant: str) -> int:
        """Return the number of a tenant's waiting requests; background requests are not counted."""
        return self._queue.waiting(tenant)

    @property
    def waiting_requests(self) -> int:
        """Number of all waiting requests; background and migrating ones are counted, too."""
        return len(self._queue) + len(self._background) + len(self._migrating)

    def _see(self, capacity: Capacity, now: float) -> None:
        """Update the learned speeds for the workers' current capacity, and drop outdated ones."""
        if self._room_seen is not capacity.room:
            self._room_seen = capacity.room
            self._used = Counter(self._placing.values())
        self._prefill.look(capacity, now)
        self._pacer.served_by(capacity.prefill_workers)
        self._pacer.look(now)
        if self._decode.look(capacity, now):
            self._pacer.forget()

    # The states of a request

    def check_place(self, tenant: str, priority: int, capacity: Capacity, now: float) -> None:
        """Check whether the queue has a place for a tenant's new request, however short its prompt
        is. Raises Overloaded."""
        request = AdmissionRequest("", tenant, priority, 1, 1)
        entry = self._entry(request, ExpectedAnswer(1, 1, 1), capacity, now)
        if self._queue.has_place(entry):
            return
        self._see(capacity, now)
        # Its prompt is not known: it counts as long as those that wait are on average.
        work_s = sum(waiting.work_s for waiting in self._queue) / len(self._queue)
        self._overload.came(work_s, 1, now)
        raise self._full(self._turn_s(entry, capacity, now))

    def offer(self, request: AdmissionRequest, capacity: Capacity, now: float) -> None:
        """Queue a request. It waits until ``admit`` returns its id or rejects it.

        Raises DeadlineUnreachable if the answer would be late, and Overloaded if the queue is full
        or the wait would be too long. The error's Retry-After is the time that the work ahead of
        the request takes."""
        self._see(capacity, now)
        expected = self._decode.expected_tokens(request.max_tokens)
        answer = ExpectedAnswer(request.prompt_tokens, expected, request.choices)
        entry = self._entry(request, answer, capacity, now)
        if request.background:
            self._entries[request.request_id] = entry
            self._background.push(entry)
            return
        self._overload.came(entry.work_s, request.choices, now)
        turn_s = self._turn_s(entry, capacity, now)
        self._check_time(entry, turn_s, now)
        self._overload.let_in(request.prompt_tokens)
        victim = self._queue.push(entry)
        if victim is not None:
            full = self._full(turn_s)
            if victim is entry:
                raise full
            self._forget(victim)
            self._refuse(victim.request.request_id, full)
        self._entries[request.request_id] = entry

    def _entry(
        self, request: AdmissionRequest, answer: ExpectedAnswer, capacity: Capacity, now: float
    ) -> _Waiting:
        lead = max(-MAX_LEAD_S, min(MAX_LEAD_S, request.priority * PRIORITY_STEP_S))
        return _Waiting(
            request.tenant,
            now + lead,
            max(1, request.prompt_tokens + answer.expected_tokens * request.choices),
            request,
            now,
            answer,
            capacity.work_s(request.prompt_tokens),
            number=next(self._numbers),
        )

    def _full(self, turn_s: float) -> Overloaded:
        return Overloaded(
            f"the queue is full: {len(self._queue)} requests are waiting; try again later",
            retry_after=max(MIN_RETRY_S, turn_s),
        )

    def admit(self, capacity: Capacity | None, now: float) -> list[str]:
        """Admit the requests whose turn it is and return their ids. Reject those that are too late.

        ``capacity`` None means that there are no workers. Then all requests are admitted, and fail
        when they are placed.
        """
        released: list[str] = []
        if capacity is not None:
            self._see(capacity, now)
        self._drop_late(now)
        for moved in list(self._migrating):
            if not self._is_full(moved.context_class, moved.blocks, capacity):
                released.append(self._release(moved, capacity))
        is_blocked = self._blocked_by(capacity)
        while (entry := self._queue.peek(is_blocked)) is not None:
            if self._is_late(entry, self._prefill.free_after_s((), now), now):
                self._drop(entry, now)
                continue
            if capacity is not None and not self._fits(entry, capacity, now):
                break
            released.append(self._send(self._queue, capacity, now, is_blocked))
        released += self._release_background(capacity, now)
        # While requests wait for decode workers, nothing is learned about prefill workers.
        waits = len(self._queue) > 0 and capacity is not None and self._prefill.is_full(capacity)
        self._prefill.saturated(now, waiting=waits)
        self._waits = waits
        return released

    @property
    def is_settled(self) -> bool:
        """Whether ``admit`` would change nothing: no request waits, the last call recorded that,
        and no background request is to be watched."""
        return not (self._waits or self.waiting_requests or self._slack.any_sent)

    def _send(
        self,
        queue: FairQueue[_Waiting],
        capacity: Capacity | None,
        now: float,
        is_blocked: Callable[[_Waiting], bool] | None = None,
    ) -> str:
        """Remove the next request from ``queue`` that is not blocked, count it as sent to the
        workers, and return its id.
        """
        entry = queue.pop(is_blocked)
        self._forget(entry)
        request = entry.request
        self._sent[request.request_id] = entry
        self._searches(request.request_id, request.context_class, capacity)
        request_id = request.request_id
        self._decode.sent(request_id, entry.answer, capacity)
        self._prefill.sent(request_id, request.prompt_tokens, entry.work_s, now)
        self._pacer.sent(self._prefill.own_s(entry.work_s), now)
        if request.background:
            self._slack.sent(request_id)
        return request_id

    def _release_background(self, capacity: Capacity | None, now: float) -> list[str]:
        released: list[str] = []
        others_wait = len(self._queue) > 0
        if capacity is not None:
            self._slack.look(capacity, now, others_wait=others_wait)
        is_blocked = self._blocked_by(capacity)
        while (entry := self._background.peek(is_blocked)) is not None:
            if capacity is not None and (
                others_wait or not self._slack.takes(entry.answer, entry.work_s, capacity, now)
            ):
                break
            released.append(self._send(self._background, capacity, now, is_blocked))
        return released

    # Room at decode workers

    def _blocked_by(self, capacity: Capacity | None) -> Callable[[_Waiting], bool] | None:
        """Return the function that says whether a waiting request has no room by what decode
        workers have told; None if no refused request waits."""
        if capacity is None or not capacity.room:
            return None

        def is_blocked(entry: _Waiting) -> bool:
            return self._is_full(entry.request.context_class, entry.min_blocks, capacity)

        return is_blocked

    def _is_full(self, context_class: str, blocks: int, capacity: Capacity | None) -> bool:
        """Return whether no decode worker has room for a request of a class, as far as is known.

        If none has refused a request lately, one request at a time may ask."""
        room = None if capacity is None else capacity.room.get(context_class)
        if room is None:
            return False
        used = self._used[context_class]
        if room.places > used and room.blocks >= blocks:
            return False
        return room.is_claimed or used > 0 or context_class in self._asking.values()

    def no_room(self, request_id: str, blocks: int, now: float) -> bool:
        """Let a request that was sent wait again at its place: no decode worker has room for its
        ``blocks`` blocks. Return false if the request is not known as sent."""
        entry = self._sent.pop(request_id, None)
        if entry is None:
            return False
        self.accepted(request_id)
        self._prefill.left(request_id, now)
        self._decode.refused(request_id)
        self._slack.left(request_id, now, finished=False)
        entry = replace(entry, min_blocks=blocks)
        self._entries[request_id] = entry
        (self._background if entry.request.background else self._queue).put_back(entry)
        return True

    def migrates(
        self, request_id: str, key: str, context_class: str, blocks: int, order: float
    ) -> None:
        """Let choices of a migrating request wait for room. ``admit`` returns ``key`` at their
        turn. Those with the lowest ``order`` go first."""
        self.accepted(request_id)
        moved = _Migrating(order, key, request_id, context_class, blocks)
        bisect.insort_right(self._migrating, moved, key=lambda each: each.order)

    def _release(self, moved: _Migrating, capacity: Capacity | None) -> str:
        self._migrating.remove(moved)
        self._searches(moved.request_id, moved.context_class, capacity)
        return moved.key

    def _searches(self, request_id: str, context_class: str, capacity: Capacity | None) -> None:
        room = None if capacity is None else capacity.room.get(context_class)
        if room is not None and room.places <= self._used[context_class]:
            self._asking[request_id] = context_class
        self._placing[request_id] = context_class
        self._used[context_class] += 1

    def placed(self, request_id: str) -> None:
        """Record that a request that was sent was placed at workers, so that the next reading of
        the workers' room counts it; idempotent."""
        self._placing.pop(request_id, None)

    def accepted(self, request_id: str) -> None:
        """Record that a worker has room for a request that was sent, or that the request waits
        again; idempotent."""
        self.placed(request_id)
        self._asking.pop(request_id, None)

    def leave(self, key: str) -> None:
        """Forget a request, or migrating choices, that wait no longer; idempotent."""
        self._migrating = [each for each in self._migrating if each.key != key]
        self._unqueue(key)

    def granted(
        self, classes: Collection[str], capacity: Capacity | None, now: float
    ) -> str | None:
        """Return the request, or the key of migrating choices, for which a decode worker that holds
        room is the next one. The worker serves ``classes``. None if no such request waits."""
        for moved in self._migrating:
            if moved.context_class in classes:
                return self._release(moved, capacity)

        def is_blocked(entry: _Waiting) -> bool:
            return entry.request.context_class not in classes

        self._drop_late(now)
        for queue in (self._queue, self._background):
            if queue.peek(is_blocked) is not None:
                return self._send(queue, capacity, now, is_blocked)
        return None

    def first_token(self, request_id: str, now: float) -> bool:
        """Record a request's first token; idempotent. Return whether this was the first call."""
        if not self._decode.begin(request_id, now):
            return False
        self._sent.pop(request_id, None)
        self.accepted(request_id)
        self._overload.begun(request_id)
        self._prefill.finished(request_id, now)
        return True

    def generated(self, request_id: str, tokens: int) -> None:
        """Record that the request's answer has grown by ``tokens`` tokens."""
        self._decode.generated(request_id, tokens)

    def left(
        self, request_id: str, now: float, *, finished: bool = False, held_s: float = 0.0
    ) -> None:
        """Record that a request has ended, in any state; idempotent.

        ``finished``: true if all tokens of its answer were generated. ``held_s``: seconds after the
        first token by which the client delayed the answer."""
        self._unqueue(request_id)
        self._sent.pop(request_id, None)
        self.accepted(request_id)
        self._overload.begun(request_id)
        self._prefill.left(request_id, now)
        answer = self._decode.left(request_id, now)
        if self._slack.left(request_id, now, finished=finished):
            # Background requests teach nothing: the values describe other requests.
            return
        if answer is not None and answer.begun_at is not None and finished:
            self._learn(answer, max(0.0, now - answer.begun_at - held_s), now)

    def _unqueue(self, request_id: str) -> None:
        entry = self._entries.get(request_id)
        if entry is not None:
            queue = self._background if entry.request.background else self._queue
            queue.remove(entry)
            self._forget(entry)

    def _forget(self, entry: _Waiting) -> None:
        del self._entries[entry.request.request_id]

    def _learn(self, answer: ExpectedAnswer, stayed_s: float, now: float) -> None:
        tpot_s = self._decode.learn(answer, stayed_s)
        if self._paces and tpot_s is not None and answer.generated >= MIN_PACED_TOKENS:
            self._pacer.observe(in_time=tpot_s <= self._slo_tpot_s, took_s=stayed_s, now=now)

    # Time

    def _turn_s(self, entry: _Waiting, capacity: Capacity, now: float) -> float:
        """Return the predicted seconds until a prefill worker starts on the prompt of ``entry``.

        The prompts ahead must be computed first, and a decode worker must be able to run one more
        sequence.
        """
        ahead_s = [one.work_s for one in self._queue.ahead(entry)]
        return max(
            self._prefill.free_after_s(ahead_s, now),
            self._decode.place_s(len(ahead_s), capacity),
            self._pacer.wait_s(map(self._prefill.own_s, ahead_s), now),
        )

    def _check_time(self, entry: _Waiting, turn_s: float, now: float) -> None:
        """Check whether a request can be answered in time if its turn comes after ``turn_s``
        seconds.

        Raises DeadlineUnreachable or Overloaded if it would be late, unless it is accepted as a
        probe."""
        request = entry.request
        own_s = self._prefill.own_s(entry.work_s)
        error = self._refusal(entry, turn_s, own_s, now)
        if error is not None and not self._overload.probes(
            request.request_id, request.prompt_tokens, own_s, now
        ):
            raise error

    def _refusal(
        self, entry: _Waiting, turn_s: float, own_s: float, now: float
    ) -> Overloaded | None:
        request = entry.request
        retry_after = max(MIN_RETRY_S, turn_s)
        if request.own_deadline:
            end_s = turn_s + own_s + self.tpot_s * max(0, entry.answer.expected_tokens - 1)
            if end_s <= request.deadline_s:
                return None
            return DeadlineUnreachable(
                f"the request would take about {end_s:.1f} s, and its deadline leaves"
                f" {request.deadline_s:.1f} s",
                retry_after=retry_after,
            )
        if turn_s > self._max_queue_s:
            return Overloaded(
                f"the request would wait about {turn_s:.0f} s for its turn, and max_queue_s is"
                f" {self._max_queue_s:g}; try again later",
                retry_after=retry_after,
            )
        first_s = CAUTION * turn_s + own_s
        # With nothing ahead of it, a rejection would help no other request.
        if first_s <= request.slo_s or turn_s <= 0 or not self._is_overloaded(now):
            return None
        return DeadlineUnreachable(
            f"the first token would come after about {first_s:.1f} s, and the SLO is"
            f" {request.slo_s:.1f} s",
            retry_after=retry_after,
        )

    def _is_overloaded(self, now: float) -> bool:
        speed = self._prefill.speed * self._pacer.share
        return self._overload.lasts(speed, self._decode.answers_per_s, now)

    def _drop_late(self, now: float) -> None:
        """Reject all waiting requests that are too late. Do nothing if the last call was less than
        ``LOOK_S`` seconds ago."""
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        free_s = self._prefill.free_after_s((), now)
        for entry in [one for one in self._queue if self._is_late(one, free_s, now)]:
            self._drop(entry, now)

    def _is_late(self, entry: _Waiting, free_s: float, now: float) -> bool:
        """Return whether a waiting request is too late to be sent. ``free_s``: seconds until a
        worker is free.
        """
        request = entry.request
        if entry.min_blocks:
            # It was admitted: only its own deadline ends it, where it waits.
            return False
        waited_s = now - entry.offered_at
        if waited_s >= request.deadline_s:
            return True
        allowed_s = request.deadline_s if request.own_deadline else request.slo_s
        if waited_s + free_s + self._prefill.own_s(entry.work_s) <= allowed_s:
            return False
        if self._overload.is_probe(request.request_id):
            return False
        if request.own_deadline:
            return True
        # The only waiting request takes no other request's time.
        return len(self._queue) > 1 and self._is_overloaded(now)

    def _drop(self, entry: _Waiting, now: float) -> None:
        self._queue.remove(entry)
        self._forget(entry)
        error = DeadlineUnreachable(
            "the request waited in the queue until it was too late",
            retry_after=max(MIN_RETRY_S, self._prefill.free_after_s((), now)),
        )
        self._refuse(entry.request.request_id, error)

    # Room

    def _fits(self, entry: _Waiting, capacity: Capacity, now: float) -> bool:
        if self._decode.is_empty:
            # Accept any size: no request of ours is left whose end could free more room.
            return True
        if self._pacer.wait_s((), now) > 0:
            return False
        if self._prefill.is_full(capacity):
            return False
        has_place = self._decode.free_places(capacity) >= 1
        if has_place and self._decode.has_blocks(entry.answer, capacity):
            return True
        return self._asks(entry, capacity, now)

    def _asks(self, entry: _Waiting, capacity: Capacity, now: float) -> bool:
        """Return whether a request asks a worker although all look full."""
        if entry.request.context_class in capacity.room or now - entry.offered_at < ASK_S:
            return False
        return capacity.decode_sequences > self._decode.requests
