"""Request migration: what becomes of requests whose workers fail, hang, drain or hand them back.

    placed ─worker lost→ (its attempt ends) ─another is found→ placed, as the next attempt
                                            ─none, no budget, poison→ failed

    placed ─worker silent, its engine stands still→ placed ─another is found→ moved, as above
                                  ─none, or it speaks again→ placed, where it is

    placed ─handed back→ (its attempt ends) → placed, as the next attempt
    placed ─worker drained→ placed ─another is found→ moved, by way of its blocks

Accepted tokens of an answer are input to the next attempt, and are never drawn again. A migration
needs no new admission, and the original deadline holds. ``router.dispatch.placement`` places the
attempts. Owned by the router's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakSet

from baton.config.cluster import Config
from baton.errors import (
    BatonError,
    ContextLengthExceeded,
    FingerprintGone,
    HandoffError,
    StepFailed,
    Unavailable,
    WorkerFailed,
)
from baton.liveness.listening import listening
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
"""Values of the label ``reason`` of the metric of migrations."""
COMMIT_GRACE_S = 0.25
"""Seconds to wait after a failed prefill before the request migrates. Meanwhile the decode worker
may show that the handoff was committed."""
MAX_FAILURES = 8
"""Maximum number of failures of a request, after which it is not migrated again."""
LOOK_S = 0.1
"""Seconds between two checks whether an unreachable worker has died."""
RETRY_AFTER_S = 1.0
"""Value of ``Retry-After``, in seconds, in the error of a request that could not be migrated."""


@dataclass(frozen=True, slots=True)
class _Loss:
    """The reason why an attempt ends early, and how the next attempt must be placed."""

    reason: str
    failure: BatonError
    tries: tuple[Names, ...]
    """Sets of workers that the next attempt must avoid. They are tried in order until one leaves a
    worker."""
    culprit: str = ""
    """Incarnation of the worker that failed during the attempt; empty if the worker is not
    known."""
    is_cut_off: bool = False
    """Whether all workers became unreachable together. In that case no worker is blamed, and
    requests wait."""
    proved: bool = False
    """Whether the worker itself reported that a step of this request alone failed."""


class Failover:
    """Migrates requests whose attempts have failed, or ends them with an error."""

    def __init__(
        self,
        config: Config,
        placement: Placement,
        links: WorkerLinks,
        budget: RetryBudget,
        quarantine: Quarantine,
    ) -> None:
        """Create a failover. It subscribes to events of ``placement`` and ``links`` until
        ``close``.
        """
        self._placement = placement
        self._links = links
        self._budget = budget
        self._quarantine = quarantine
        self._computes_locally = config.computes_locally
        self._finishing: WeakSet[WorkerLink] = WeakSet()
        """Draining workers whose requests cannot go on elsewhere, as logged."""
        self._verdict_s = config.advanced.registry_ttl_s + 2 * config.advanced.heartbeat_s
        """Seconds after a worker's death by which it has left the registry and the router has
        noticed that."""
        self._unsubscribe = (
            links.subscribe(on_broken=self.worker_broken, on_draining=self.worker_drains),
            placement.subscribe(
                on_prefill_failed=self.prefill_failed,
                on_decode_failed=self.decode_failed,
                on_handed_back=self.handed_back,
            ),
        )

    def close(self) -> None:
        """Unsubscribe from events: no further request is migrated."""
        for unsubscribe in self._unsubscribe:
            unsubscribe()

    # Events of attempts and workers

    def worker_broken(self, name: str, error: BatonError) -> None:
        """Migrate the requests of a decode worker whose token stream has ended with ``error``.

        Unless ``error`` is WorkerFailed, no worker is blamed.
        """
        failure = WorkerFailed(error.message, retry_after=RETRY_AFTER_S)
        attempts = self._placement.at(name)
        ran = [attempt.target for attempt in attempts if attempt.touches(attempt.target)]
        is_cut_off = bool(attempts) and self._links.is_cut_off(attempts[0].fingerprint)
        has_failed = isinstance(error, WorkerFailed)
        if ran and has_failed and not is_cut_off:
            self._blame(ran[0], len(ran))
        for attempt in attempts:
            loss = _broken(DECODE_FAILED, failure, name, is_cut_off=is_cut_off)
            if not has_failed:
                loss = replace(loss, culprit="")
            self._lost(attempt, loss, deadly=attempt.touches(attempt.target))

    def worker_silent(self, link: WorkerLink) -> None:
        """Migrate the requests of a worker that sends nothing, if another worker is available."""
        link.suspect(time.monotonic())
        self._leave_all(link, "is silent", DECODE_SILENT, PREFILL_SILENT)

    def worker_stalled(self, link: WorkerLink) -> None:
        """Migrate the requests of a worker whose engine finishes no step, if another worker is
        available."""
        link.stall()
        self._leave_all(link, "computes nothing", DECODE_STALLED, PREFILL_STALLED)

    def _leave_all(self, link: WorkerLink, what: str, decoding: str, computing: str) -> None:
        self._blame(link)
        replaceable = {
            fingerprint: self._is_replaceable(link, fingerprint)
            for fingerprint in ("", link.record.fingerprint)
        }
        name = link.record.incarnation
        failure = WorkerFailed(f"worker {name} {what}", retry_after=RETRY_AFTER_S)
        placed = [(attempt, decoding) for attempt in self._placement.at(name)]
        for attempt in self._placement.computing_at(name):
            if attempt.source is not attempt.target:
                placed.append((attempt, computing))
        for attempt, reason in placed:
            if not replaceable[attempt.owner.request.binding.required(leaving=1)]:
                continue
            loss = _Loss(reason, failure, (frozenset({name}),), name)
            attempt.owner.move(self._leave(attempt, link, loss))

    def worker_drains(self, link: WorkerLink) -> None:
        """Migrate the requests that decode at a draining worker, if another worker is available.

        A request whose handoff to the draining worker is not complete is migrated by a later
        call. The last worker of its fingerprint finishes its requests."""
        name, fingerprint = link.record.incarnation, link.record.fingerprint
        running = [one for one in self._placement.at(name) if one.decode_began.is_set()]
        if not self._is_replaceable(link, fingerprint):
            if running and link not in self._finishing:
                self._finishing.add(link)
                log.warning(
                    "worker %s drains, and no other worker can go on with its answers: the %d that"
                    " run end there (fingerprint %s)",
                    *(name, len(running), fingerprint),
                )
            return
        for attempt in running:
            if not attempt.owner.moves:
                attempt.owner.move(self._hand_over(attempt, link))

    def _is_replaceable(self, link: WorkerLink, fingerprint: str) -> bool:
        """Return whether other workers of ``fingerprint`` (empty: of any) can do the work of this
        worker.

        This check is cheap. Without it, each running request would search for another worker, even
        if there is none."""
        prefill = any(other is not link for other in self._links.up("prefill", fingerprint))
        decode = any(other is not link for other in self._links.up("decode", fingerprint))
        if link.record.role == "prefill":
            # The decode workers still exist: only the prefill worker must be replaced.
            return prefill or (self._computes_locally and decode)
        return decode and (prefill or self._computes_locally)

    async def prefill_failed(self, attempt: Attempt, failure: BatonError, broke: bool) -> None:
        """Handle a prefill that ended without a handoff. ``broke``: true if the prefill worker's
        stream broke.
        """
        if isinstance(failure, Unavailable):
            with contextlib.suppress(TimeoutError):
                async with listening(COMMIT_GRACE_S):
                    await attempt.decode_began.wait()
        is_cut_off = self._links.is_cut_off(attempt.fingerprint)
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
            # The request had that step to itself, so either may be at fault.
            self._blame(attempt.source, doubtful=True)
            loss = _Loss(PREFILL_FAILED, failure, (frozenset({source}),), source, proved=True)
        else:
            # The source answered, so it is alive. Either worker may be at fault.
            down = {
                link.record.incarnation
                for link in (attempt.source, attempt.target)
                if not self._links.is_up(link)
            }
            if isinstance(failure, WorkerFailed | HandoffError):
                self._doubt(attempt)
            # If both seem to be up and no other worker exists, the pair tries once more.
            each = ({source, target}, {target}, {source}, set[str]())
            tries = (frozenset(down), frozenset[str]()) if down else tuple(map(frozenset, each))
            loss = _Loss(HANDOFF_FAILED, failure, tries)
        self._lost(attempt, loss, deadly=attempt.touches(attempt.source))

    def decode_failed(self, attempt: Attempt, failure: BatonError) -> None:
        """Handle an attempt that its decode worker ended with an error."""
        if not isinstance(failure, Unavailable):
            attempt.owner.fail(failure)
            return
        proved = isinstance(failure, StepFailed)
        if isinstance(failure, WorkerFailed):
            # The request had a failed step to itself, so either may be at fault.
            self._blame(attempt.target, doubtful=proved)
        name = attempt.target.record.incarnation
        loss = _Loss(DECODE_FAILED, failure, (frozenset({name}),), name, proved=proved)
        self._lost(attempt, loss, deadly=proved)

    def handed_back(self, attempt: Attempt, choice: int) -> None:
        """Place a choice at workers again after its decode worker has handed it back. The choice
        needs no new admission."""
        owner = attempt.owner
        attempt.choices.discard(choice)
        owner.choices[choice].preemptions += 1
        if not attempt.choices:
            self._placement.end(attempt, PREEMPTED)
        if not owner.choices[choice].ended:
            no_room = Unavailable("no worker has room for the request", retry_after=RETRY_AFTER_S)
            loss = _Loss(PREEMPTED, no_room, ANY)
            owner.move(self._place_all(owner, {choice}, loss))

    # Circuit breakers

    def _blame(self, link: WorkerLink, streams: int = 1, *, doubtful: bool = False) -> None:
        """Report to a worker's circuit breaker that ``streams`` streams of this router broke
        there."""
        link.breaker.broke(time.monotonic(), streams, doubtful=doubtful)

    def _doubt(self, attempt: Attempt) -> None:
        """Report a failed handoff to the circuit breakers of its workers. If there are two workers,
        either may be at fault, so the failure has less weight."""
        links = {attempt.source, attempt.target}
        for link in links:
            self._blame(link, doubtful=len(links) > 1)

    # Migration

    def _lost(self, attempt: Attempt, loss: _Loss, *, deadly: bool = True) -> None:
        owner, left = attempt.owner, attempt.unfinished
        self._placement.end(attempt, loss.reason)
        if not left and attempt.is_scored and owner.awaits_prompt:
            # All tokens are here, but not the prompt's log probabilities or embedding.
            choice = min(attempt.choices)
            owner.begin_again(choice)
            left = {choice}
        if not left:
            return
        if not loss.is_cut_off and self._is_poison(owner, loss, deadly=deadly):
            owner.fail(poison_error())
        elif self._is_given_up(owner, loss):
            log.warning(
                "request %s is not migrated again: too many failures, or the retry budget is empty",
                owner.request.request_id,
            )
            owner.fail(_with_retry(loss.failure))
        else:
            owner.move(self._place_all(owner, left, loss))

    def _is_given_up(self, owner: RunningRequest, loss: _Loss) -> bool:
        """Return whether the request must fail instead of getting another attempt.

        Each migration uses the retry budget, except after a loss of all workers at once."""
        owner.failures += loss.is_cut_off
        if owner.failures > MAX_FAILURES:
            return True
        return not loss.is_cut_off and not self._budget.take(time.monotonic())

    def _is_poison(self, owner: RunningRequest, loss: _Loss, *, deadly: bool) -> bool:
        """Record that a worker failed during a request, and return whether this makes it a poison
        request.

        ``deadly``: true if the failed worker was running the request."""
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
        """Return whether a request is a poison request. If that depends on unreachable workers,
        first wait until it is known whether they are dead."""
        looks = int(self._verdict_s / LOOK_S)
        while owner.failed_workers.may_be_proof and looks:
            # Wait first: the connection to a worker that has just died may still look alive.
            await asyncio.sleep(LOOK_S)
            looks -= 1
            owner.failed_workers.learn(self._links.is_dead)
            if owner.failed_workers.are_proof:
                return self._keep_out(owner)
        return False

    async def _place_all(self, owner: RunningRequest, choices: set[int], loss: _Loss) -> None:
        """Place choices of a request again. If no worker is available, fail the request with the
        error in ``loss``.
        """
        if await self._has_proved_poison(owner):
            owner.fail(poison_error())
            return
        try:
            avoid = _avoided(owner, loss.tries)
            await self._placement.place(owner, choices, avoid, moved=loss.reason)
        except (Unavailable, ContextLengthExceeded):
            # Retryable: workers with a long enough context may come back.
            owner.fail(self._failure_of(owner, loss))

    def _failure_of(self, owner: RunningRequest, loss: _Loss) -> BatonError:
        """Return the error of a request that no worker can take."""
        fingerprint = owner.request.binding.required()
        if self._links.usable("decode", fingerprint) or not self._links.usable("decode"):
            return _with_retry(loss.failure)
        return FingerprintGone(
            "the last worker of the model version that began the answer has left: send the request"
            " again, and the version that is served now answers it",
            retry_after=RETRY_AFTER_S,
        )

    async def _leave(self, attempt: Attempt, link: WorkerLink, loss: _Loss) -> None:
        """Migrate an attempt away from a worker that hangs. Nothing changes if no other worker can
        take the request, or if the worker recovers during the search.
        """
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
        """Migrate an attempt away from a draining worker. The next worker fetches the blocks that
        the draining one holds.
        """
        found = await self._elsewhere(attempt, ANY, link.record.incarnation)
        if found:
            self._placement.end(attempt, DRAINED)
        for route in found:
            self._placement.begin(attempt.owner, route, DRAINED)

    async def _elsewhere(
        self, attempt: Attempt, avoid: Sequence[Names], source_worker: str = ""
    ) -> list[Route]:
        """Find other workers with room for the unfinished choices of an attempt. Return an empty
        list if no workers are found or if the attempt has changed meanwhile.

        ``source_worker``: a worker that has all blocks of the choices, even if the prefix index
        does not list them."""
        owner = attempt.owner
        groups = owner.groups(attempt.unfinished)
        required = owner.request.binding.required(leaving=1)
        try:
            found = await self._placement.find(
                owner, attempt.unfinished, avoid, required, source_worker
            )
        except (Unavailable, ContextLengthExceeded):
            # No other worker can take it, so it may end at its current one.
            return []
        if not all(route.decision.has_room for route in found):
            return []
        has_gone = attempt not in owner.attempts or groups != owner.groups(attempt.unfinished)
        is_bound = owner.request.binding.required(leaving=1) != required
        return [] if has_gone or is_bound else found


def _broken(reason: str, failure: BatonError, name: str, *, is_cut_off: bool) -> _Loss:
    """Build the description of a loss: the stream of the attempt's worker has ended.

    A stream may break although its worker lives: if the worker is there again, and no other one
    is, it gets the request again. A worker that was cut off together with all others is not blamed.
    """
    tries = frozenset({name}), frozenset[str]()
    return _Loss(reason, failure, tries, "" if is_cut_off else name, is_cut_off=is_cut_off)


def _avoided(owner: RunningRequest, tries: tuple[Names, ...]) -> Sequence[Names]:
    """Return the sets of workers to avoid: first those in ``tries`` together with all workers that
    have failed the request before, then ``tries`` alone.
    """
    if not owner.excluded:
        return tries
    return [*(names | owner.excluded for names in tries), *tries]


def _with_retry(failure: BatonError) -> BatonError:
    """Return the failure as the client receives it, with a Retry-After."""
    if isinstance(failure, StepFailed):
        failure = WorkerFailed(failure.message, retry_after=failure.retry_after)
    if failure.retry_after is None:
        failure.retry_after = RETRY_AFTER_S
    return failure
