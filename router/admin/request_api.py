"""``GET /v1/requests/{request_id}``: where the time of one ended request went, for operators.

Each router process has its own requests, so the one that is asked asks the others.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Literal

from fastapi import FastAPI, Request
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from baton.errors import InvalidRequest
from router.access.access import Access
from router.admin.router_questions import RouterQuestions
from router.core.request_history import MAX_FOUND, EndedRequest, RequestHistory
from router.core.timeline import AttemptRecord, Timeline

log = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 256 * 1024
"""Maximum size of an answer to another router, which has about 200 requests of one attempt."""
_ID = re.compile(r"[A-Za-z0-9._-]{1,160}", re.ASCII)


class AttemptObject(BaseModel):
    """One attempt. What its worker did not report is null."""

    number: int
    begun_ms: float
    """Time from receipt to the attempt's begin."""
    prefill_worker: str
    """Worker that computed the prompt; for a local prefill, the decode worker."""
    decode_worker: str
    reason: str
    """The routing policy's reason for these workers."""
    migration: str
    """Why the request migrated to these workers; empty for the first attempt."""
    ended_by: str
    """Why the attempt ended early; empty if it did not."""
    prompt_tokens: int
    cached_tokens: int | None
    computed_tokens: int | None
    predicted_computed_tokens: int
    wait_ms: float | None
    """Time at the worker until the first step."""
    predicted_wait_ms: float
    reserve_ms: float | None
    """Part of ``wait_ms``: until the decode worker had room."""
    fetch_ms: float | None
    """Part of ``wait_ms``: until cached blocks had come from elsewhere."""
    compute_ms: float | None
    """Time from the first step to the first token."""
    own_compute_ms: float | None
    """The prompt's share of the steps in ``compute_ms``."""
    predicted_compute_ms: float
    predicted_ttft_ms: float
    """Predicted time from the attempt's begin to the first token."""
    transfer_ms: float | None
    """Time from the prompt's last step until the decode worker had all blocks."""
    transferred_bytes: int | None


class RequestObject(BaseModel):
    """A request that has ended. Times are in milliseconds."""

    router: str
    """The router process that served it, and its host."""
    id: str
    """Id of the answer; an answer to several prompts adds the prompt's number."""
    request_id: str
    """The ``x-request-id`` of the call; empty if it had none."""
    trace_id: str
    tenant: str
    key: str
    """Public name of the API key."""
    context_class: str = Field(serialization_alias="class")
    outcome: str
    code: str
    """Code of the error; empty if there was none."""
    ended_at: float
    """Time of the end, in Unix seconds."""
    took_ms: float
    """Time from receipt to the end."""
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    choices: int
    admission_ms: float | None
    """Wait for admission; null if the request did not get that far."""
    slo_ttft_ms: float
    ttft_ms: float | None
    """Time from receipt to the first token; null if there was none."""
    ttft_parts_ms: dict[str, float]
    """The parts of ``ttft_ms``, as in ``baton_ttft_part_seconds``. They add up to it."""
    second_token_ms: float | None
    """Time from the first to the second token."""
    second_token_parts_ms: dict[str, float]
    """The parts of ``second_token_ms``, as in ``baton_second_token_part_seconds``."""
    attempts: list[AttemptObject]
    """The attempts of the first choice."""
    dropped_attempts: int
    """Number of attempts in the middle that were not kept."""


class RequestList(BaseModel):
    object: Literal["list"] = "list"
    data: list[RequestObject]
    """The requests with this id, the last one first. Empty if no router that answered has one."""
    answered: int
    """Number of router processes that answered."""
    routers: int | None
    """Number of router processes of the cluster; null if Redis failed, and only one was asked."""


_Objects = TypeAdapter(list[RequestObject])


class RequestApi:
    """The operators' endpoint for ended requests."""

    def __init__(
        self, history: RequestHistory, access: Access, questions: RouterQuestions, router: str
    ) -> None:
        """``router`` is the name of this process."""
        self._history = history
        self._access = access
        self._questions = questions
        self._router = router

    def mount(self, app: FastAPI) -> None:
        """Add the endpoint to the app."""
        app.add_api_route("/v1/requests/{request_id}", self.show, tags=["operations"])

    async def show(self, request_id: str, request: Request) -> RequestList:
        """Show where the time of a request went that has ended.

        `request_id` is the id of the answer or the `x-request-id` of the call. Any router process
        of the cluster finds it: the one that is asked asks the others. Each keeps its last 4096
        requests. Requires a key with scope admin.
        """
        self._access.check(request.headers, "admin")
        if _ID.fullmatch(request_id) is None:
            raise InvalidRequest(
                "the id of a request has 1 to 160 characters of A-Z, a-z, 0-9, '.', '_' and '-'",
                param="request_id",
            )
        answers = await self._questions.ask(request_id)
        told = [one for one in map(_parse, answers.texts) if one is not None]
        found = [
            *_find(self._history, self._router, request_id),
            *(one for some in told for one in some),
        ]
        found.sort(key=lambda one: one.ended_at, reverse=True)
        routers = None if answers.others is None else max(answers.others, len(told)) + 1
        return RequestList(data=found[:MAX_FOUND], answered=len(told) + 1, routers=routers)


def answer_router(history: RequestHistory, router: str, request_id: str) -> bytes:
    """Return what the process ``router`` tells another one of the requests with this id: the last
    ones, in at most ``MAX_ANSWER_BYTES``."""
    texts: list[bytes] = []
    size = 1
    for one in _find(history, router, request_id):
        # The field names of Python, which can be parsed again.
        texts.append(one.model_dump_json().encode())
        size += len(texts[-1]) + 1
        if size > MAX_ANSWER_BYTES:
            texts.pop()
            break
    return b"[%b]" % b",".join(texts)


def _parse(text: bytes) -> list[RequestObject] | None:
    """Parse another router's answer; None if it has another version that tells less."""
    try:
        return _Objects.validate_json(text)
    except ValidationError as error:
        log.info("the answer of another router cannot be read: %d errors", error.error_count())
        return None


def _find(history: RequestHistory, router: str, request_id: str) -> Iterator[RequestObject]:
    return (_shown(record, router) for record in history.find(request_id))


def _shown(record: EndedRequest, router: str) -> RequestObject:
    timeline = record.timeline
    queued, dequeued = timeline.queued_at, timeline.dequeued_at
    return RequestObject(
        router=router,
        id=record.request_id,
        request_id=record.call_id,
        trace_id=record.trace_id,
        tenant=record.tenant,
        key=record.key_id,
        context_class=record.context_class,
        outcome=record.outcome,
        code=record.code,
        ended_at=round(record.ended_at, 3),
        took_ms=record.took_s * 1e3,
        prompt_tokens=record.prompt_tokens,
        cached_prompt_tokens=record.cached_tokens,
        output_tokens=record.output_tokens,
        choices=record.choices,
        admission_ms=_between(queued, dequeued),
        slo_ttft_ms=record.slo_ttft_s * 1e3,
        ttft_ms=_between(timeline.received_at, timeline.first_at),
        ttft_parts_ms={name: part * 1e3 for name, part in timeline.ttft_parts().items()},
        second_token_ms=_between(timeline.first_at, timeline.second_at),
        second_token_parts_ms={
            name: part * 1e3 for name, part in timeline.second_token_parts().items()
        },
        attempts=[_attempt(timeline, one) for one in timeline.attempts],
        dropped_attempts=timeline.dropped,
    )


def _attempt(timeline: Timeline, one: AttemptRecord) -> AttemptObject:
    told, handed_off = one.is_told, one.is_handed_off
    return AttemptObject(
        number=one.number,
        begun_ms=(one.begun_at - timeline.received_at) * 1e3,
        prefill_worker=one.prefill_worker,
        decode_worker=one.decode_worker,
        reason=one.reason,
        migration=one.migration,
        ended_by=one.ended_by,
        prompt_tokens=one.prompt_tokens,
        cached_tokens=one.cached_tokens if told else None,
        computed_tokens=one.computed_tokens if told else None,
        predicted_computed_tokens=one.predicted_uncached_tokens,
        wait_ms=one.queue_s * 1e3 if told else None,
        predicted_wait_ms=one.predicted_wait_s * 1e3,
        reserve_ms=one.reserve_s * 1e3 if told else None,
        fetch_ms=one.fetch_s * 1e3 if told else None,
        compute_ms=one.steps_s * 1e3 if told else None,
        own_compute_ms=one.own_steps_s * 1e3 if told else None,
        predicted_compute_ms=one.predicted_compute_s * 1e3,
        predicted_ttft_ms=one.predicted_ttft_s * 1e3,
        transfer_ms=one.transfer_s * 1e3 if handed_off else None,
        transferred_bytes=one.transferred_bytes if handed_off else None,
    )


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else (end - start) * 1e3
