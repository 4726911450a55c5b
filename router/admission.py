"""Who gets in, in what order, and when it is passed on to the workers.

    offered ─no hope, no place→ refused
    offered → waiting ─its turn, and room→ sent ─first token→ begun → gone
              waiting ─too late, pushed out→ refused

Background requests stand in a queue of their own, behind everybody: they are sent while nobody else
waits, while there is slack, and at most as many as ``router.background_share`` allows.

Only so much work lies at the prefill workers as keeps them busy; the rest waits here, where its
order can still be chosen. Plain Python; ``now`` is passed in. Owned by one event loop.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.errors import BatonError, DeadlineUnreachable, Overloaded
from router.background_share import BackgroundShare
from router.drain_rate import IDLE_S, DrainRate, Stay
from router.fair_queue import Entry, FairQueue
from router.pace import Pace
from router.running_mean import RunningMean
from router.under_way import UnderWay

WINDOW_S = 0.25
"""Work that lies at each prefill worker, in seconds: one step runs, the next one is ready."""
LEAST_WINDOW_TOKENS = 1024
"""The same before the drain rate is known, and at least: two chunks of a CPU's prefill."""
MOST_LEAD_S = 30.0
"""No priority, however low its number, is worth more than so many seconds of waiting."""
FIRST_GUESS_S = 1.0
"""What a refused client is told before anything was learned."""
SLACK_S = 0.1
"""A turn that was taken late, for want of anything that told of it, is made up for this far."""
LEAST_PACED_TOKENS = 8
"""The time per token of a shorter answer is that of its handoff more than that of decoding."""
LEAST_RETRY_S = 0.1
"""Nobody is told to come back earlier."""
FIRST_ANSWER_TOKENS = 256
"""The expected length of an answer before one was seen."""
RESERVE_SHARE = 0.25
"""Of the decode workers' places and blocks, background requests leave so much to others."""
BACKGROUND_TPOT_SHARE = 0.7
"""Background requests are let in while a decode step takes no more of the SLO's time than this."""
BACKGROUND_WINDOW_S = 0.01
"""Of background prompts more than one a worker lies at the prefill workers only where all of them
take no longer than this. Measured (docs/batches.md): more of them hurt others, and gain little."""
MOST_BACKGROUND = 64
"""Background requests of one router that are with the workers at a time."""
GRACE = 1.1
"""Who waits alone may be late by so much, as far as is known: nobody else wants the time."""
LOOK_S = 0.04
"""How often all that wait are looked through for those that are too late."""
_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class Applicant:
    """What admission has to know of a request."""

    request_id: str
    tenant: str
    priority: int
    """Lower comes earlier."""
    prompt_tokens: int
    max_tokens: int
    """Most tokens of the answer."""
    first_token_s: float
    """It is refused when its first token is predicted later than this many seconds from now, where

    as much waits before it."""
    give_up_s: float
    """The same where nothing waits; and it is refused when it has waited until its first token
    would come later than this. No less than ``first_token_s``."""
    deadline_s: float
    """Seconds from now by which the answer must have ended."""
    choices: int = 1
    """Answers that are drawn, each as long; how much was generated is told of the first."""
    background: bool = False
    """It waits for as long as it takes, and is sent in the slack that others leave."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The workers as their snapshots show them. Blocks are those of the prefix index."""

    block_size: int
    prefill_workers: int
    decode_sequences: int
    """Sequences that run or wait at decode workers."""
    most_sequences: int
    available_blocks: tuple[int, ...]
    """Free or merely cached, of each decode worker."""
    total_blocks: tuple[int, ...]
    """Of each decode worker."""
    step_s: float = 0.0
    """A decode step of the slowest decode worker, as last measured, in seconds; 0: not known."""


@dataclass(slots=True)
class _Request:
    applicant: Applicant
    offered_at: float
    answer_tokens: int
    """How long the answer is expected to be."""
    blocks: int = 0
    """Promised to it, beyond what snapshots show."""
    stay: Stay | None = None
    """With the workers, until its first token."""
    begun_at: float | None = None
    generated: int = 0

    def late(self, now: float, own_s: float, free_s: float, grace: float) -> bool:
        """Whether its first token would come too late.

        A worker is free for it after ``free_s``, and computes its prompt in ``own_s``.
        """
        limit = min(grace * self.applicant.give_up_s, self.applicant.deadline_s)
        return now + free_s + own_s > self.offered_at + limit


class Admission:
    """See the module's text."""

    def __init__(
        self,
        weights: Mapping[str, float],
        limit: int,
        priority_step_s: float,
        slo_tpot_s: float,
        refuse: Callable[[str, BatonError], None],
        most_background: int = MOST_BACKGROUND,
    ) -> None:
        """``weights`` of the tenants; at most ``limit`` requests wait. Prompts are passed on only

        as fast as the times per token allow, in seconds; infinite where nothing is asked of them.

        ``refuse`` hears the id of each request that was waiting and gets no turn, and why.
        At most ``most_background`` background requests are with the workers at a time.
        """
        self._queue: FairQueue[_Request] = FairQueue(weights, limit)
        # Not bounded: whoever offers background requests bounds their number.
        self._behind: FairQueue[_Request] = FairQueue(weights, sys.maxsize)
        self._share = BackgroundShare(most_background)
        self._background: set[str] = set()
        self._entries: dict[str, Entry[_Request]] = {}
        self._sent: dict[str, _Request] = {}
        self._begun: dict[str, _Request] = {}
        self._step_s = priority_step_s
        self._refuse = refuse
        self._drain = DrainRate()
        self._pace = Pace()
        self._slo_tpot_s = slo_tpot_s
        self._not_before = -math.inf
        self._looked_at = -math.inf
        self._decoded_at = -math.inf
        """When an answer last ended."""
        self._under_way = UnderWay()
        self._waiting_tokens = 0
        self._answer_tokens = RunningMean(_WEIGHT)
        self._stay_s = RunningMean(_WEIGHT)
        self._tpot_s = RunningMean(_WEIGHT)

    # What is known

    @property
    def in_flight_tokens(self) -> int:
        """Prompt tokens that were sent and have no first token yet."""
        return self._under_way.tokens

    def ahead_tokens(self, now: float) -> float:
        """Of ``in_flight_tokens``, what is still to be computed, as far as is known."""
        return self._under_way.left_tokens(self._drain.tokens_per_s or 0.0, now)

    @property
    def tokens_per_s(self) -> float | None:
        """The learned drain rate of all prefill workers, as far as it is made use of."""
        rate = self._drain.tokens_per_s
        return None if rate is None else rate * self._pace.share

    @property
    def tpot_s(self) -> float | None:
        """The mean time of a further token."""
        return self._tpot_s.value

    def waiting(self, tenant: str) -> int:
        """How many of a tenant's requests wait here, without those in the background."""
        return self._queue.waiting(tenant)

    @property
    def waiting_requests(self) -> int:
        """All that wait, those in the background too."""
        return len(self._queue) + len(self._behind)

    def _see(self, capacity: Capacity, now: float) -> None:
        """What there is now, and what is no longer true of what was learned."""
        self._drain.look(now)
        self._pace.look(now)
        if not self._begun and now - self._decoded_at >= IDLE_S:
            # As with the drain rate: who is turned away by it teaches nothing better.
            self._pace.forget()
            self._tpot_s = RunningMean(_WEIGHT)
        self._under_way.served_by(capacity.prefill_workers, now)
        self._drain.served_by(capacity.prefill_workers)

    # A request's way

    def offer(self, applicant: Applicant, capacity: Capacity, now: float) -> None:
        """Let a request wait for its turn; ``release`` tells of it.

        Raises DeadlineUnreachable where it would be late, Overloaded where there is no place, with
        the time that the work ahead takes.
        """
        self._see(capacity, now)
        answer = self._expected_answer(applicant.max_tokens)
        lead = max(-MOST_LEAD_S, min(MOST_LEAD_S, applicant.priority * self._step_s))
        request = _Request(applicant, now, answer)
        entry = Entry(
            applicant.tenant,
            now + lead,
            max(1, applicant.prompt_tokens + answer * applicant.choices),
            request,
        )
        if applicant.background:
            self._entries[applicant.request_id] = entry
            self._behind.push(entry)
            return
        ahead = self._ahead(entry)
        wait_s = self._wait_s(ahead, capacity)
        self._check_time(request, self._turn_s(ahead, capacity, now), wait_s, now)
        victim = self._queue.push(entry)
        if victim is not None:
            error = Overloaded(
                f"{len(self._queue)} requests wait already; try again later",
                retry_after=self._retry_after(wait_s, now),
            )
            if victim is entry:
                raise error
            self._forget(victim)
            self._refuse(victim.item.applicant.request_id, error)
        self._entries[applicant.request_id] = entry
        self._waiting_tokens += applicant.prompt_tokens

    def release(self, capacity: Capacity | None, now: float) -> list[str]:
        """The ids of those whose turn it is; they count as sent. Refuses those that are too late.

        ``capacity`` None: there are no workers, and all go, to be told so.
        """
        released: list[str] = []
        if capacity is not None:
            self._see(capacity, now)
        self._drop_late(now)
        while (entry := self._queue.peek()) is not None:
            if self._is_late(entry.item, self._free_after_s(0, now), now):
                self._drop(entry, now)
                continue
            if capacity is not None and not self._fits(entry.item, capacity, now):
                break
            released.append(self._send(self._queue, capacity, now))
        released += self._release_background(capacity, now)
        # Not where decode workers are what is waited for.
        waiting = len(self._queue) > 0
        busy = capacity is not None and self._prefill_full(capacity)
        self._drain.saturated(now, waiting=waiting and busy, elsewhere=waiting and not busy)
        return released

    def _send(self, queue: FairQueue[_Request], capacity: Capacity | None, now: float) -> str:
        """Take out whose turn it is, and count it as sent."""
        entry = queue.pop()
        self._forget(entry)
        applicant = entry.item.applicant
        if capacity is not None:
            entry.item.blocks = self._need(entry.item, capacity)
        self._sent[applicant.request_id] = entry.item
        entry.item.stay = self._drain.sent(applicant.prompt_tokens, now)
        self._under_way.sent(applicant.request_id, applicant.prompt_tokens, now)
        self._space(applicant.prompt_tokens, now)
        if applicant.background:
            self._background.add(applicant.request_id)
        return applicant.request_id

    def _release_background(self, capacity: Capacity | None, now: float) -> list[str]:
        released: list[str] = []
        if self._is_hurt(capacity):
            self._share.hurt(now)
        while (entry := self._behind.peek()) is not None:
            if capacity is not None and not self._has_slack(entry.item, capacity, now):
                break
            released.append(self._send(self._behind, capacity, now))
        return released

    def first_token(self, request_id: str, now: float) -> bool:
        """A request has its first token; idempotent. Whether this was it."""
        request = self._sent.pop(request_id, None)
        if request is None:
            return False
        self._under_way.gone(request_id, now)
        if request.stay is not None:
            self._drain.finished(request.stay, now)
        request.begun_at = now
        self._begun[request_id] = request
        return True

    def generated(self, request_id: str, tokens: int) -> None:
        """So many more tokens of its answer came."""
        request = self._begun.get(request_id)
        if request is not None:
            request.generated += tokens

    def left(
        self, request_id: str, now: float, *, finished: bool = False, held_s: float = 0.0
    ) -> None:
        """A request has gone, wherever it stood; idempotent. ``finished``: with all its tokens.

        ``held_s`` of the seconds since its first token its client held it up.
        """
        entry = self._entries.get(request_id)
        if entry is not None:
            queue = self._behind if entry.item.applicant.background else self._queue
            queue.remove(entry)
            self._forget(entry)
        sent = self._sent.pop(request_id, None)
        if sent is not None:
            self._under_way.gone(request_id, now)
            if sent.stay is not None:
                self._drain.left(sent.stay)
        begun = self._begun.pop(request_id, None)
        if begun is not None:
            self._decoded_at = now
        if request_id in self._background:
            # What is learned is how the others fare.
            self._background.remove(request_id)
            if finished:
                self._share.finished(now)
        elif begun is not None and begun.begun_at is not None and finished:
            self._learn(begun, max(0.0, now - begun.begun_at - held_s), now)

    def _forget(self, entry: Entry[_Request]) -> None:
        """What is no longer in the queue."""
        del self._entries[entry.item.applicant.request_id]
        if not entry.item.applicant.background:
            self._waiting_tokens -= entry.item.applicant.prompt_tokens

    def _learn(self, request: _Request, stayed_s: float, now: float) -> None:
        self._stay_s.add(stayed_s)
        self._answer_tokens.add(float(request.generated))
        if request.generated > 1:
            tpot_s = stayed_s / (request.generated - 1)
            self._tpot_s.add(tpot_s)
            if request.generated >= LEAST_PACED_TOKENS:
                self._pace.heard(in_time=tpot_s <= self._slo_tpot_s, now=now)

    # Predictions

    def _expected_answer(self, most: int) -> int:
        mean = self._answer_tokens.value
        return min(most, FIRST_ANSWER_TOKENS if mean is None else math.ceil(mean))

    def _own_s(self, applicant: Applicant) -> float:
        """What a worker takes for its prompt; 0 where that is not known."""
        rate = self._drain.tokens_per_s
        return 0.0 if rate is None else applicant.prompt_tokens * self._under_way.workers / rate

    def _free_after_s(self, ahead_tokens: float, now: float) -> float:
        """When a worker is free for who comes behind so many tokens that wait; 0: not known."""
        rate = self._drain.tokens_per_s
        return 0.0 if rate is None else self._under_way.free_after_s(ahead_tokens, rate, now)

    def _ahead(self, entry: Entry[_Request]) -> float:
        """The share of what waits that goes before it."""
        queued = self._queue.tokens
        ahead = self._queue.tokens_ahead(entry.tenant, entry.order, entry.tokens)
        return ahead / queued if queued else 0.0

    def _wait_s(self, share: float, capacity: Capacity) -> float:
        """What those take that go before it, ``share`` of all that wait: of the prefill workers'

        time, and until there is a place at a decode worker.
        """
        # Costs in the queue count answers too, of which prefill workers know nothing.
        rate = self.tokens_per_s
        prompts_s = share * self._waiting_tokens / rate if rate is not None else 0.0
        return max(prompts_s, self._place_s(share, capacity))

    def _place_s(self, share: float, capacity: Capacity) -> float:
        """Until there is a place at a decode worker."""
        places = self._free_places(capacity) - share * len(self._queue)
        if self._stay_s.value is None or not self._begun or places >= 1:
            return 0.0
        # Little's law: so many end in a second.
        return (1 - places) * self._stay_s.value / len(self._begun)

    def _turn_s(self, share: float, capacity: Capacity, now: float) -> float:
        """Until a worker takes its prompt up."""
        free_s = self._free_after_s(share * self._waiting_tokens, now)
        waits = [free_s, self._wait_s(share, capacity)]
        if self.tokens_per_s is not None and self._pace.share < 1.0:
            waits[1] += max(0.0, self._not_before - now)
        return max(waits)

    def _check_time(self, request: _Request, turn_s: float, wait_s: float, now: float) -> None:
        applicant = request.applicant
        first_s = turn_s + self._own_s(applicant)
        end_s = first_s + (self.tpot_s or 0.0) * max(0, request.answer_tokens - 1)
        most_s = self._most_s(applicant, wait_s)
        if first_s <= most_s and end_s <= applicant.deadline_s:
            return
        late = first_s if first_s > most_s else end_s
        allowed = min(most_s, applicant.deadline_s)
        raise DeadlineUnreachable(
            f"the request would take about {late:.1f} s, and has {allowed:.1f} s",
            retry_after=self._retry_after(wait_s, now),
        )

    def _most_s(self, applicant: Applicant, wait_s: float) -> float:
        """How late its first token may be predicted.

        The longer the wait, the more may come otherwise, and the more others want the time.
        """
        cautious_s, give_up_s = applicant.first_token_s, applicant.give_up_s
        if math.isinf(give_up_s):
            return cautious_s
        if not len(self._queue):
            return GRACE * give_up_s
        caution = min(1.0, wait_s / cautious_s)
        return give_up_s - caution * (give_up_s - cautious_s)

    def _retry_after(self, wait_s: float, now: float) -> float:
        """When what is ahead now, here and at the workers, will have been served."""
        rate = self.tokens_per_s
        if rate is None:
            return max(FIRST_GUESS_S, wait_s)
        return max(LEAST_RETRY_S, wait_s + self.ahead_tokens(now) / rate)

    # Room

    def _drop_late(self, now: float) -> None:
        """Of all that wait, at times."""
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        free_s = self._free_after_s(0, now)
        for entry in [one for one in self._queue if self._is_late(one.item, free_s, now)]:
            self._drop(entry, now)

    def _is_late(self, request: _Request, free_s: float, now: float) -> bool:
        grace = GRACE if len(self._queue) == 1 else 1.0
        return request.late(now, self._own_s(request.applicant), free_s, grace)

    def _drop(self, entry: Entry[_Request], now: float) -> None:
        self._queue.remove(entry)
        self._forget(entry)
        error = DeadlineUnreachable(
            "the request waited for its turn until it was too late",
            retry_after=self._retry_after(0.0, now),
        )
        self._refuse(entry.item.applicant.request_id, error)

    def _space(self, tokens: int, now: float) -> None:
        """Let the time pass that these tokens take at the present pace."""
        rate = self.tokens_per_s
        if rate is None or self._pace.share == 1.0:
            self._not_before = -math.inf
        else:
            self._not_before = max(now - SLACK_S, self._not_before) + tokens / rate

    def _fits(self, request: _Request, capacity: Capacity, now: float) -> bool:
        if not self._sent and not self._begun:
            # Whatever it takes: nothing of ours would ever make more room.
            return True
        if now < self._not_before:
            return False
        if self._prefill_full(capacity) or self._free_places(capacity) < 1:
            return False
        need = self._need(request, capacity)
        free = sum(capacity.available_blocks) - self._promised_blocks(capacity)
        return need <= min(free, max(capacity.available_blocks, default=0))

    def _is_hurt(self, capacity: Capacity | None) -> bool:
        """Whether background requests are in somebody's way."""
        if not self._background or capacity is None:
            return False
        too_slow = capacity.step_s > BACKGROUND_TPOT_SHARE * self._slo_tpot_s
        return too_slow or len(self._queue) > 0

    def _has_slack(self, request: _Request, capacity: Capacity, now: float) -> bool:
        """Whether a background request may go now: nobody who comes next may feel much of it."""
        if len(self._queue) or not self._share.allows(len(self._background), now):
            return False
        if not self._sent and not self._begun and not capacity.decode_sequences:
            return True
        return self._prefill_has_slack(request, capacity) and self._decode_has_slack(
            request, capacity
        )

    def _prefill_has_slack(self, request: _Request, capacity: Capacity) -> bool:
        # What lies at the prefill workers is what the next request waits for.
        if self._sent.keys() - self._background:
            return False
        tokens = self._under_way.tokens + request.applicant.prompt_tokens
        brief = tokens <= BACKGROUND_WINDOW_S * (self.tokens_per_s or 0.0)
        return brief or len(self._sent) < capacity.prefill_workers

    def _decode_has_slack(self, request: _Request, capacity: Capacity) -> bool:
        if capacity.step_s > BACKGROUND_TPOT_SHARE * self._slo_tpot_s:
            return False
        if self._free_places(capacity) <= RESERVE_SHARE * capacity.most_sequences:
            return False
        reserve = RESERVE_SHARE * sum(capacity.total_blocks)
        free = sum(capacity.available_blocks) - self._promised_blocks(capacity) - reserve
        need = self._need(request, capacity)
        return need <= min(free, max(capacity.available_blocks, default=0))

    def _prefill_full(self, capacity: Capacity) -> bool:
        """Whether the prefill workers have enough to do: each a prompt, and the window's tokens.

        By tokens alone one long prompt, which a single worker computes, would keep the others idle.
        """
        if len(self._sent) < capacity.prefill_workers:
            return False
        least = LEAST_WINDOW_TOKENS * capacity.prefill_workers
        return self._under_way.tokens >= max(least, WINDOW_S * (self.tokens_per_s or 0.0))

    def _free_places(self, capacity: Capacity) -> int:
        # Snapshots of other routers' sequences and of ours; ours are known earlier.
        taken = max(capacity.decode_sequences, len(self._begun)) + len(self._sent)
        return capacity.most_sequences - taken

    def _need(self, request: _Request, capacity: Capacity) -> int:
        applicant = request.applicant
        tokens = applicant.prompt_tokens + request.answer_tokens * applicant.choices
        return min(-(-tokens // capacity.block_size), max(capacity.total_blocks, default=0))

    def _promised_blocks(self, capacity: Capacity) -> int:
        """What ours will take beyond what snapshots show: all of those that were sent, and the

        rest of the answers of those that have begun.
        """
        sent = sum(request.blocks for request in self._sent.values())
        growth = sum(
            max(0, request.answer_tokens - request.generated) * request.applicant.choices
            for request in self._begun.values()
        )
        return sent + -(-growth // capacity.block_size)
