"""Attempts at their workers: started, followed, taken off.

    begun ─first token from the prefill worker, token from the decode worker→ … ─end()→ ended
    begun ─the prefill fails before the handoff is committed→ (``on_prefill_failed``)

What becomes of the request then is for others to say. Owned by the router's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from opentelemetry.trace import Span

from baton.errors import BatonError, NoRoom
from baton.host.background import spawn
from baton.request import SequenceSpec, TokenOutput
from baton.rpc import convert
from baton.rpc.grpc_errors import as_baton_error
from baton.telemetry.tracing import begin_span, context_of
from baton.v1 import prefill_pb2
from router.dispatch.running_request import Attempt, RunningRequest
from router.routing.ledger import Ledger
from router.routing.policy import Decision
from router.routing.route_finder import Route
from router.workers.worker_links import WorkerLink, WorkerLinks, error_from_gone

log = logging.getLogger(__name__)

NO_ROOM_RETRY_S = 0.1
"""When a decode worker without room is asked again, if it does not say."""

PrefillFailed = Callable[[Attempt, BatonError, bool], Coroutine[Any, Any, None]]
"""Hears of an attempt, of what its prefill has failed with, and whether the stream to its source
broke."""


class Attempts:
    """See the module's text."""

    def __init__(
        self, links: WorkerLinks, ledger: Ledger, on_prefill_failed: PrefillFailed
    ) -> None:
        self._links = links
        self._ledger = ledger
        self._on_prefill_failed = on_prefill_failed
        self._by_name: dict[tuple[str, int], Attempt] = {}
        self._by_target: defaultdict[str, set[Attempt]] = defaultdict(set)
        self._background: set[asyncio.Task[None]] = set()

    def begin(self, owner: RunningRequest, spec: SequenceSpec, route: Route) -> Attempt:
        """Place what ``spec`` says. Raises WorkerFailed where a worker is gone."""
        decision = route.decision
        source, target = self._links.get(decision.prefill), self._links.get(decision.decode)
        if source is None or target is None:
            raise error_from_gone(decision.prefill if source is None else decision.decode)
        promise = self._ledger.promise(decision, route.request, route.hashes, time.monotonic())
        span = _span(owner, spec, source, target)
        spec = replace(spec, trace=context_of(span, owner.request.trace))
        choices = set(range(spec.choice, spec.choice + spec.choices))
        attempt = Attempt(owner, spec, source, target, promise, choices, span=span)
        attempt.heard_before = source.prefills.messages
        for link in {source, target}:
            link.breaker.began(attempt.begun_at)
        self._by_name[spec.request_id, spec.attempt] = attempt
        self._by_target[decision.decode].add(attempt)
        owner.attempts.add(attempt)
        for number in choices:
            owner.life.choices[number].place(spec.attempt, source.record.slot, target.record.slot)
        message = prefill_pb2.PrefillRequest(
            sequence=convert.sequence_to_proto(spec),
            decode_address=target.record.address,
            decode_incarnation=target.record.incarnation,
            source=self._prefix_source(decision),
        )
        attempt.prefill = spawn(self._prefill(attempt, message), f"prefill {spec.request_id}")
        return attempt

    def end(self, attempt: Attempt, moved: str = "") -> None:
        """Take it off its workers; idempotent. ``moved``: why what is left goes on elsewhere."""
        spec = attempt.spec
        if self._by_name.pop((spec.request_id, spec.attempt), None) is None:
            return
        decode = attempt.target.record.incarnation
        self._by_target[decode].discard(attempt)
        if not self._by_target[decode]:
            del self._by_target[decode]
        attempt.owner.attempts.discard(attempt)
        now = time.monotonic()
        if moved:
            attempt.span.set_attribute("baton.moved", moved)
        attempt.span.end()
        attempt.promise.ended(now)
        if attempt.is_whole:
            attempt.target.breaker.ended_well(attempt.begun_at, now)
        if attempt.prefill is not None and attempt.prefill is not asyncio.current_task():
            attempt.prefill.cancel()
        if attempt.runs_at_worker:
            self._abort(attempt, stop=attempt.owner.life.stopped)

    def end_choice(self, attempt: Attempt, choice: int) -> None:
        """End one of its choices at the decode worker: it has ended well."""
        self._abort(attempt, stop=True, choice=choice)

    def _abort(self, attempt: Attempt, *, stop: bool, choice: int | None = None) -> None:
        spec, decode = attempt.spec, attempt.target.record.incarnation
        work = self._links.abort(decode, spec.request_id, spec.attempt, stop=stop, choice=choice)
        task = spawn(work, f"abort {spec.request_id}")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self, timeout_s: float) -> None:
        """Wait for what workers are still to be told."""
        if self._background:
            await asyncio.wait(self._background, timeout=timeout_s)

    def is_dead(self, worker: str) -> bool | None:
        """Whether a lost worker has died. None: it is not known yet.

        A death is known once the registry does not list the worker and it cannot be reached.
        """
        link = self._links.get(worker)
        if link is None:
            return True
        return None if not link.connected or link.hangs(time.monotonic()) else False

    # What there is

    def find(self, output: TokenOutput) -> Attempt | None:
        """The attempt that an output is of; None where it has ended."""
        return self.of(output.request_id, output.attempt)

    def of(self, request_id: str, number: int) -> Attempt | None:
        """The attempt ``number`` of a request; None where it has ended."""
        return self._by_name.get((request_id, number))

    def at(self, decode: str) -> list[Attempt]:
        """Those that decode at a worker, or will."""
        return list(self._by_target.get(decode, ()))

    def computing_at(self, source: str) -> list[Attempt]:
        """Those whose prompts a worker computes, or hands over."""
        every = self._by_name.values()
        return [a for a in every if a.computes and a.source.record.incarnation == source]

    def expected_to_speak(self) -> dict[str, int]:
        """Of each worker that has something of ours to do: how many messages have come of it."""
        return {link.record.incarnation: link.messages for link in self._busy()}

    def expected_to_step(self) -> dict[str, int]:
        """Of each of these that computes a step: how many its engine has ended."""
        loads = {link.record.incarnation: link.engine_load for link in self._busy()}
        return {name: load.engine_steps for name, load in loads.items() if load.steps_in_flight}

    def _busy(self) -> set[WorkerLink]:
        links = set()
        for attempt in self._by_name.values():
            if attempt.is_computed or attempt.decode_began.is_set():
                links.add(attempt.target)
            if attempt.computes:
                links.add(attempt.source)
        return links

    # The prompt

    def _prefix_source(self, decision: Decision) -> prefill_pb2.PrefixSource | None:
        """From whom the prefill worker may pull blocks."""
        holder = self._links.get(decision.holder)
        if holder is None or not holder.lends(time.monotonic()):
            return None
        return prefill_pb2.PrefixSource(
            address=holder.record.address,
            incarnation=decision.holder,
            blocks=decision.holder_blocks,
            tensor_parallel=holder.record.geometry.tensor_parallel,
        )

    async def _prefill(self, attempt: Attempt, message: prefill_pb2.PrefillRequest) -> None:
        """Follow the prefill to its end, whatever that is."""
        stream = attempt.source.prefills
        breaks = stream.breaks
        try:
            await self._follow(message, attempt)
            if attempt.source is not attempt.target:
                attempt.source.breaker.ended_well(attempt.begun_at, time.monotonic())
        except Exception as error:
            failure = as_baton_error(error)
            try:
                await self._on_prefill_failed(attempt, failure, stream.breaks != breaks)
            except Exception:
                log.exception("request %s could not be moved", attempt.spec.request_id)
                attempt.owner.life.fail(failure)

    async def _follow(self, message: prefill_pb2.PrefillRequest, attempt: Attempt) -> None:
        """Raises BatonError where there is no first token, or no handoff after it.

        A prefill worker waits for room itself. A decode worker that would compute the prompt says
        when to ask again, as it says to those.
        """
        deadline = time.monotonic() + message.sequence.deadline_ms / 1e3
        while True:
            try:
                async with aclosing(attempt.source.prefills.run(message)) as responses:
                    async for response in responses:
                        self._heard(response, attempt)
                return
            except NoRoom as full:
                left = deadline - time.monotonic()
                wait = full.retry_after or NO_ROOM_RETRY_S
                if wait >= left:
                    raise
            await asyncio.sleep(wait)
            message.sequence.deadline_ms = max(1, int((deadline - time.monotonic()) * 1e3))

    def _heard(self, response: prefill_pb2.PrefillResponse, attempt: Attempt) -> None:
        """What a worker says of a prefill."""
        owner, promise = attempt.owner, attempt.promise
        if response.HasField("first_token"):
            attempt.is_computed = True
            attempt.span.add_event("first token")
            promise.computed(
                time.monotonic(),
                computed_tokens=response.computed_tokens,
                compute_ms=response.compute_ms,
            )
            # What was found when an answer went on elsewhere is no affair of the client's.
            has_moved = len(attempt.spec.token_ids) > attempt.spec.prompt_length
            cached = 0 if owner.cache_told or has_moved else response.cached_prompt_tokens
            owner.cache_told = True
            owner.life.accept(
                convert.output_from_proto(response.first_token), cached_prompt_tokens=cached
            )
        if response.HasField("handoff"):
            promise.committed(
                pinned_blocks=response.handoff.pinned_blocks,
                transfer_ms=response.handoff.transfer_ms,
            )


def _span(
    owner: RunningRequest, spec: SequenceSpec, source: WorkerLink, target: WorkerLink
) -> Span:
    return begin_span(
        "attempt",
        owner.request.trace,
        attributes={
            "baton.attempt": spec.attempt,
            "baton.choices": spec.choices,
            "baton.prefill_worker": source.record.slot,
            "baton.decode_worker": target.record.slot,
            "baton.decision": "local" if source is target else "remote",
        },
    )
