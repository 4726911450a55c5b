"""Decides what becomes of requests whose workers fail, hang, drain or hand them back.

    placed ─worker lost→ (its attempt ends) ─another is found→ placed, as the next attempt
                                            ─none, no budget, poison→ failed
    placed ─worker silent, its engine stands still→ placed ─another is found→ moved, as above
                                  ─none, or it speaks again→ placed, where it is
    placed ─handed back→ (its attempt ends) → placed, as the next attempt
    placed ─worker drained→ placed ─another is found→ moved, by way of its blocks

What was accepted of an answer is input to the next attempt, never drawn again. Admission is not
asked again, and the deadline is that of the beginning. ``router.dispatch.placement`` places.
Owned by the router's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.config.cluster import Config
from baton.errors import (
    BatonError,
    ContextLengthExceeded,
    HandoffError,
    StepFailed,
    Unavailable,
    WorkerFailed,
)
from baton.liveness.listening import listening
from baton.telemetry.metrics import RouterMetrics
from router.dispatch.placement import ANY, Names, Placement, Route
from router.dispatch.retry_limits import Quarantine, RetryBudget, poison_error
from router.dispatch.running_request import Attempt, RunningRequest
from router.workers.worker_link import WorkerLink
from router.workers.worker_links import WorkerLinks

log = logging.getLogger(__name__)

DECODE_FAILED = "decode_failed"
DECODE_SILENT = "decode_silent"
DECODE_STALLED = "decode_stalled"
PREFILL_FAILED = "prefill_failed"
PREFILL_SILENT = "prefill_silent"
PREFILL_STALLED = "prefill_stalled"
HANDOFF_FAILED = "handoff_failed"
PREEMPTED = "preempted"
DRAINED = "drained"
"""The reasons, as the metric calls them."""
COMMIT_GRACE_S = 0.25
"""After a failed prefill: how long the decode worker has to show that it had committed."""
MAX_FAILURES = 8
"""A request that was to be moved more often, because something failed, is given up."""
LOOK_S = 0.1
"""Between two looks whether a lost worker has died."""
RETRY_AFTER_S = 1.0
"""When a client may come back whose request could not be moved."""


@dataclass(frozen=True, slots=True)
class _Loss:
    """Why an attempt ends before its time."""

    reason: str
    failure: BatonError
    tries: tuple[Names, ...]
    """Sets of workers that the next attempt avoids: the first set that leaves a worker counts."""
    culprit: str = ""
    """The worker that has failed under it, where that is known."""
    is_cut_off: bool = False
    """Whether all workers went away together: none has failed, and requests wait for them."""
    proved: bool = False
    """Whether that worker says so itself: a step with the request failed there."""


class Failover:
    """Moves requests, or gives them up."""

    def __init__(
        self,
        config: Config,
        placement: Placement,
        links: WorkerLinks,
        budget: RetryBudget,
        quarantine: Quarantine,
        metrics: RouterMetrics,
    ) -> None:
        """Subscribes to ``placement`` and ``links`` until ``close``."""
        self._placement = placement
        self._links = links
        self._budget = budget
        self._quarantine = quarantine
        self._computes_locally = any(
            (one.local_prefill or config.local_prefill) != "never" for one in config.classes
        )
        self._left_out = metrics.left_out_workers
        self._verdict_s = config.advanced.registry_ttl_s + 2 * config.advanced.heartbeat_s
        """Seconds within which a dead worker has left the registry, and the router knows."""
        self._unsubscribe = (
            links.subscribe(on_broken=self.worker_broken, on_draining=self.worker_drains),
            placement.subscribe(
                on_prefill_failed=self.prefill_failed,
                on_decode_failed=self.decode_failed,
                on_handed_back=self.handed_back,
            ),
        )

    def close(self) -> None:
        """Decide nothing more."""
        for unsubscribe in self._unsubscribe:
            unsubscribe()

    # What becomes of attempts

    def worker_broken(self, name: str, error: BatonError) -> None:
        """Move the requests of a decode worker whose token stream has ended.

        No worker is blamed for an ``error`` that is not WorkerFailed.
        """
        failure = WorkerFailed(error.message, retry_after=RETRY_AFTER_S)
        attempts = self._placement.at(name)
        ran = [attempt.target for attempt in attempts if attempt.touches(attempt.target)]
        is_cut_off = self._links.is_cut_off()
        has_failed = isinstance(error, WorkerFailed)
        if ran and has_failed and not is_cut_off:
            self._blame(ran[0], len(ran))
        for attempt in attempts:
            loss = _broken(DECODE_FAILED, failure, name, is_cut_off=is_cut_off)
            if not has_failed:
                loss = replace(loss, culprit="")
            self._lost(attempt, loss, deadly=attempt.touches(attempt.target))

    def worker_silent(self, link: WorkerLink) -> None:
        """Move what a worker that sends nothing has, where another worker is there."""
        link.suspect(time.monotonic())
        self._leave_all(link, "is silent", DECODE_SILENT, PREFILL_SILENT)

    def worker_stalled(self, link: WorkerLink) -> None:
        """Treat a worker whose engine ends no step as one that sends nothing."""
        link.stall()
        self._leave_all(link, "computes nothing", DECODE_STALLED, PREFILL_STALLED)

    def _leave_all(self, link: WorkerLink, what: str, decoding: str, computing: str) -> None:
        self._blame(link)
        if not self._is_replaceable(link):
            return
        name = link.record.incarnation
        failure = WorkerFailed(f"worker {name} {what}", retry_after=RETRY_AFTER_S)
        placed = [(attempt, decoding) for attempt in self._placement.at(name)]
        for attempt in self._placement.computing_at(name):
            if attempt.source is not attempt.target:
                placed.append((attempt, computing))
        for attempt, reason in placed:
            loss = _Loss(reason, failure, (frozenset({name}),), name)
            attempt.owner.move(self._leave(attempt, link, loss))

    def worker_drains(self, link: WorkerLink) -> None:
        """Move what decodes at a draining worker, where another is there; else it ends where it is.

        What is still on its way there is moved by a later call, once it has come.
        """
        if not self._is_replaceable(link):
            return
        for attempt in self._placement.at(link.record.incarnation):
            if attempt.decode_began.is_set() and not attempt.owner.moves:
                attempt.owner.move(self._hand_over(attempt, link))

    def _is_replaceable(self, link: WorkerLink) -> bool:
        """Whether other workers can do what it does.

        If not, each running request would ask the index and the policy in vain, at a high cost.
        """
        prefill = any(other is not link for other in self._links.up("prefill"))
        decode = any(other is not link for other in self._links.up("decode"))
        if link.record.role == "prefill":
            # Its handoffs go to decode workers that are there already.
            return prefill or (self._computes_locally and decode)
        return decode and (prefill or self._computes_locally)

    async def prefill_failed(self, attempt: Attempt, failure: BatonError, broke: bool) -> None:
        """Judge a prefill that has ended without a handoff. ``broke``: its stream broke."""
        if isinstance(failure, Unavailable):
            with contextlib.suppress(TimeoutError):
                async with listening(COMMIT_GRACE_S):
                    await attempt.decode_began.wait()
        is_cut_off = self._links.is_cut_off()
        if broke and not is_cut_off:
            attempt.source.failed(time.monotonic())
        owner = attempt.owner
        if attempt.decode_began.is_set() and not owner.awaits_prompt:
            return
        if not isinstance(failure, Unavailable):
            owner.fail(failure)
            return
        source, target = attempt.source.record.incarnation, attempt.target.record.incarnation
        if broke:
            if not is_cut_off:
                self._blame(attempt.source)
            loss = _broken(PREFILL_FAILED, failure, source, is_cut_off=is_cut_off)
        elif isinstance(failure, StepFailed):
            self._blame(attempt.source)
            loss = _Loss(PREFILL_FAILED, failure, (frozenset({source}),), source, proved=True)
        else:
            # It lives and says so: either of the two may be at fault.
            down = {
                link.record.incarnation
                for link in (attempt.source, attempt.target)
                if not self._links.is_up(link)
            }
            if isinstance(failure, WorkerFailed | HandoffError):
                self._doubt(attempt)
            # Both are up, as far as is known: where no other worker is there they try once more.
            each = ({source, target}, {target}, {source}, set[str]())
            tries = (frozenset(down), frozenset[str]()) if down else tuple(map(frozenset, each))
            loss = _Loss(HANDOFF_FAILED, failure, tries)
        self._lost(attempt, loss, deadly=attempt.touches(attempt.source))

    def decode_failed(self, attempt: Attempt, failure: BatonError) -> None:
        """Judge an attempt that its decode worker has ended with an error."""
        if not isinstance(failure, Unavailable):
            attempt.owner.fail(failure)
            return
        if isinstance(failure, WorkerFailed):
            self._blame(attempt.target)
        name = attempt.target.record.incarnation
        proved = isinstance(failure, StepFailed)
        loss = _Loss(DECODE_FAILED, failure, (frozenset({name}),), name, proved=proved)
        self._lost(attempt, loss, deadly=proved)

    def handed_back(self, attempt: Attempt, choice: int) -> None:
        """Place a choice that has lost its blocks again at once: it was admitted."""
        owner = attempt.owner
        attempt.choices.discard(choice)
        owner.choices[choice].preemptions += 1
        if not attempt.choices:
            self._placement.end(attempt, PREEMPTED)
        if not owner.choices[choice].ended:
            no_room = Unavailable("no worker has room for the request", retry_after=RETRY_AFTER_S)
            loss = _Loss(PREEMPTED, no_room, ANY)
            owner.move(self._place_all(owner, {choice}, loss))

    # Which workers to trust

    def _blame(self, link: WorkerLink, streams: int = 1, *, doubtful: bool = False) -> None:
        """Note streams of this router that have broken at a worker."""
        breaker = link.breaker
        before = breaker.openings
        breaker.broke(time.monotonic(), streams, doubtful=doubtful)
        if breaker.openings != before:
            log.warning("streams of worker %s break: it is left out", link.record.incarnation)
            self._left_out.labels(worker=link.record.slot).inc()

    def _doubt(self, attempt: Attempt) -> None:
        """Note a failed handoff: the fault of one of two, or of the only worker that took part."""
        links = {attempt.source, attempt.target}
        for link in links:
            self._blame(link, doubtful=len(links) > 1)

    # Moving

    def _lost(self, attempt: Attempt, loss: _Loss, *, deadly: bool = True) -> None:
        owner, left = attempt.owner, attempt.unfinished
        self._placement.end(attempt, loss.reason)
        if not left:
            # All is there, but for what was to be found of the prompt.
            if owner.awaits_prompt:
                owner.fail(_with_retry(loss.failure))
        elif not loss.is_cut_off and self._is_poison(owner, loss, deadly=deadly):
            owner.fail(poison_error())
        elif self._is_given_up(owner, loss):
            log.warning("request %s is not moved any more", owner.request.request_id)
            owner.fail(_with_retry(loss.failure))
        else:
            owner.move(self._place_all(owner, left, loss))

    def _is_given_up(self, owner: RunningRequest, loss: _Loss) -> bool:
        """Whether it has been moved too often. What all workers lost at once costs no budget."""
        owner.failures += loss.is_cut_off
        if owner.failures > MAX_FAILURES:
            return True
        return not loss.is_cut_off and not self._budget.take(time.monotonic())

    def _is_poison(self, owner: RunningRequest, loss: _Loss, *, deadly: bool) -> bool:
        """Count a failure; ``deadly``: the worker ran the request. Returns whether it is poison."""
        owner.failures += 1
        if not loss.culprit:
            return False
        owner.excluded.add(loss.culprit)
        place = sum(len(choice.token_ids) for choice in owner.choices)
        if deadly:
            owner.failed_workers.note(loss.culprit, place, proved=loss.proved)
        return owner.failed_workers.are_proof and self._keep_out(owner)

    def _keep_out(self, owner: RunningRequest) -> bool:
        request = owner.request
        self._quarantine.add(request.prompt_ids, request.cache_salt, time.monotonic())
        return True

    async def _has_proved_poison(self, owner: RunningRequest) -> bool:
        """Wait until it is known of lost workers whether they have died, where that decides."""
        looks = int(self._verdict_s / LOOK_S)
        while owner.failed_workers.may_be_proof and looks:
            # Wait first: the connection to a worker that has just died may still seem to be there.
            await asyncio.sleep(LOOK_S)
            looks -= 1
            owner.failed_workers.learn(self._links.is_dead)
            if owner.failed_workers.are_proof:
                return self._keep_out(owner)
        return False

    async def _place_all(self, owner: RunningRequest, choices: set[int], loss: _Loss) -> None:
        """Place choices again; where no worker is there, the request fails with its loss."""
        if await self._has_proved_poison(owner):
            owner.fail(poison_error())
            return
        try:
            avoid = _avoided(owner, loss.tries)
            await self._placement.place(owner, choices, avoid, moved=loss.reason)
        except (Unavailable, ContextLengthExceeded):
            # Those with so long a context may come back: the request itself is in order.
            owner.fail(_with_retry(loss.failure))

    async def _leave(self, attempt: Attempt, link: WorkerLink, loss: _Loss) -> None:
        """Move from a worker that hangs, unless no other can take it or it goes on in time."""
        owner = attempt.owner
        found = await self._elsewhere(attempt, _avoided(owner, loss.tries))
        if not found or not link.hangs(time.monotonic()):
            return
        if not self._budget.take(time.monotonic()):
            return
        deadly = attempt.touches(link)
        self._placement.end(attempt, loss.reason)
        if self._is_poison(owner, loss, deadly=deadly):
            owner.fail(poison_error())
            return
        for route in found:
            self._placement.begin(owner, route, loss.reason)

    async def _hand_over(self, attempt: Attempt, link: WorkerLink) -> None:
        """Move from a worker that is drained, by way of the blocks that it holds."""
        found = await self._elsewhere(attempt, ANY, link.record.incarnation)
        if found:
            self._placement.end(attempt, DRAINED)
        for route in found:
            self._placement.begin(attempt.owner, route, DRAINED)

    async def _elsewhere(
        self, attempt: Attempt, avoid: Sequence[Names], source_worker: str = ""
    ) -> list[Route]:
        """Find where what runs of an attempt could go; nothing where it cannot, or has gone.

        ``source_worker`` has all of its blocks, whatever the index knows.
        """
        owner = attempt.owner
        groups = owner.groups(attempt.unfinished)
        try:
            found = await self._placement.find(owner, attempt.unfinished, avoid, source_worker)
        except (Unavailable, ContextLengthExceeded):
            # No other worker takes it, or none with so long a context: it may end where it is.
            return []
        has_gone = attempt not in owner.attempts or groups != owner.groups(attempt.unfinished)
        return [] if has_gone else found


def _broken(reason: str, failure: BatonError, name: str, *, is_cut_off: bool) -> _Loss:
    """The loss by a worker's stream that has ended.

    A worker that was cut off with all others is not to blame, and gets the request again where no
    other worker comes back.
    """
    if is_cut_off:
        return _Loss(reason, failure, (frozenset({name}), frozenset()), is_cut_off=True)
    return _Loss(reason, failure, (frozenset({name}),), name)


def _avoided(owner: RunningRequest, tries: tuple[Names, ...]) -> Sequence[Names]:
    """Prefer workers that have not failed this request before; fall back to all."""
    if not owner.excluded:
        return tries
    return [*(names | owner.excluded for names in tries), *tries]


def _with_retry(failure: BatonError) -> BatonError:
    """A failure as a client sees it, with the time to come back."""
    if isinstance(failure, StepFailed):
        failure = WorkerFailed(failure.message, retry_after=failure.retry_after)
    if failure.retry_after is None:
        failure.retry_after = RETRY_AFTER_S
    return failure
