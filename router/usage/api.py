"""``GET /v1/usage``, ``POST /v1/feedback`` and ``GET /v1/feedback/{id}``."""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from baton.config.cluster import Config
from baton.config.money import dollars_text
from baton.errors import BatonError, InvalidRequest, NotFound
from baton.host.background import end_tasks, spawn
from baton.telemetry.logs import ErrorRow
from router.access.access import Access
from router.access.api_keys import Caller
from router.billing.bill import day_of
from router.billing.budgets import Budget, Budgets
from router.http.client import SMALL_BYTES, caller_of, read_object
from router.http.fields import validate
from router.http.openapi import ERRORS, json_body, made_of_its_id
from router.usage.usage_report import DIMENSIONS, Dimension, UsageRow, grouped
from router.usage.usage_store import Feedback, UsageStore
from router.workers.worker_links import WorkerLinks

log = logging.getLogger(__name__)

MAX_DAYS = 92
"""Maximum number of days in one usage report."""
USUAL_DAYS = 30
MAX_COMMENT_CHARACTERS = 1000
MAX_ID_CHARACTERS = 128
DEVICES_S = 5.0
"""Interval at which a router adds up the time of the cluster's devices, in seconds."""
_USAGE, _FEEDBACK, _RATING = "/v1/usage", "/v1/feedback", "/v1/feedback/{answer_id}"


class FeedbackRequest(BaseModel):
    """The body of `POST /v1/feedback`."""

    model_config = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True)

    id: str = Field(min_length=1, max_length=MAX_ID_CHARACTERS)
    """The id of an answer, such as `chatcmpl-…`. If a task has several answers, the last one's."""
    success: bool
    """Whether the task succeeded."""
    score: float | None = Field(default=None, ge=0, le=1)
    """The quality of the result, 0 … 1."""
    comment: str = Field(default="", max_length=MAX_COMMENT_CHARACTERS)
    """A comment, which is kept for a day and only shown by `GET /v1/feedback/{id}`."""


class FeedbackObject(FeedbackRequest):
    """Stored feedback."""

    object: str = "feedback"


class BudgetObject(BaseModel):
    """A budget and its use, in dollars."""

    kind: str
    """``key`` or ``tenant``."""
    name: str
    period: str
    """``2026-11-23``, ``2026-11`` or ``total``."""
    limit: str
    used: str
    """Dollars spent, or held by running requests."""
    state: str
    """``ok``, ``warned``, ``slowed`` or ``stopped``."""


class UsageReport(BaseModel):
    """The answer of `GET /v1/usage`."""

    object: str = "usage"
    start: str
    end: str
    """The last day, in UTC."""
    by: list[str]
    data: list[dict[str, Any]]
    total: dict[str, Any]
    budgets: list[BudgetObject]
    device_hours: dict[str, float] | None = None
    """Hours of devices (GPUs, or worker processes on CPUs) by pool; only for operators."""


class UsageApi:
    """The handlers of usage and feedback. They raise BatonError, which ``router.http.errors``
    converts to a response."""

    def __init__(
        self,
        store: UsageStore,
        budgets: Budgets,
        workers: WorkerLinks,
        access: Access,
        config: Config,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._budgets = budgets
        self._workers = workers
        self._access = access
        self._config = config
        self._unix_clock = unix_clock
        self._counting: asyncio.Task[None] | None = None

    def mount(self, app: FastAPI) -> None:
        """Add the endpoints to the app."""
        app.add_api_route(
            _USAGE,
            self.usage,
            tags=["usage"],
            response_model=None,
            responses={200: {"model": UsageReport}, **ERRORS},
        )
        app.add_api_route(
            _FEEDBACK,
            self.rate,
            methods=["POST"],
            tags=["usage"],
            response_model=FeedbackObject,
            responses={200: made_of_its_id("answer_id", ("get", _RATING)), **ERRORS},
            openapi_extra=json_body(FeedbackRequest),
        )
        app.add_api_route(
            _RATING,
            self.rating,
            tags=["usage"],
            response_model=FeedbackObject,
            responses=ERRORS,
        )

    def start(self) -> None:
        """Start counting the time of devices."""
        self._counting = spawn(self._count_devices(), "device hours")

    async def close(self) -> None:
        """Stop counting the time of devices."""
        if self._counting is not None:
            await end_tasks([self._counting])

    async def usage(
        self,
        request: Request,
        by: str = Query(default="day", max_length=64),
        start: str = Query(default="", max_length=10),
        end: str = Query(default="", max_length=10),
    ) -> Response:
        """Report requests, tokens, cost and feedback, grouped `by` day, tenant, key, class and
        agent.

        A tenant sees its own usage; operators see all. `start` and `end` are days in UTC.
        """
        caller = caller_of(request)
        is_operator = self._access.is_operator(request.headers)
        dimensions = _dimensions(by)
        days = _days(start, end, self._unix_clock())
        tenant = None if is_operator else caller.principal.tenant
        rows, total = grouped(await self._store.entries(days, tenant), dimensions)
        hours = None
        if is_operator:
            seconds = await self._store.device_seconds(days)
            hours = {pool: round(one / 3600, 4) for pool, one in sorted(seconds.items())}
        report = UsageReport(
            start=days[0],
            end=days[-1],
            by=list(dimensions),
            data=[_shown(row, dimensions) for row in rows],
            total=_shown(total, ()),
            budgets=[await self._shown_budget(one) for one in self._visible(caller, is_operator)],
            device_hours=hours,
        )
        return JSONResponse(report.model_dump(exclude_none=not is_operator))

    async def rate(self, request: Request) -> FeedbackObject:
        """Set whether the task of an answer succeeded. This replaces earlier feedback."""
        caller = caller_of(request)
        raw = await read_object(request, SMALL_BYTES, self._config.request_deadline_s)
        told = validate(FeedbackRequest, raw)
        feedback = Feedback(told.success, told.score, told.comment)
        await self._store.rate(caller.principal.tenant, told.id, feedback)
        return FeedbackObject(**told.model_dump())

    async def rating(self, request: Request, answer_id: str) -> FeedbackObject:
        """Return the feedback on an answer."""
        if len(answer_id) > MAX_ID_CHARACTERS:
            raise InvalidRequest(f"id has at most {MAX_ID_CHARACTERS} characters", param="id")
        found = await self._store.rating(caller_of(request).principal.tenant, answer_id)
        if found is None:
            raise NotFound("there is no feedback on this answer yet", param="id")
        return FeedbackObject(
            id=answer_id, success=found.success, score=found.score, comment=found.comment
        )

    def _visible(self, caller: Caller, is_operator: bool) -> Sequence[Budget]:
        keys = self._access.keys() if is_operator else [caller.key] if caller.key else []
        own = [one for key in keys if (one := Budget.of("key", key)) is not None]
        tenants = [
            one
            for one in self._budgets.of_tenants()
            if is_operator or one.name == caller.principal.tenant
        ]
        return [*tenants, *own]

    async def _shown_budget(self, budget: Budget) -> BudgetObject:
        used = await self._store.used(budget)
        return BudgetObject(
            kind=budget.kind,
            name=budget.name,
            period=self._budgets.period(budget),
            limit=dollars_text(budget.limit),
            used=dollars_text(used),
            state=budget.state(used),
        )

    async def _count_devices(self) -> None:
        errors = ErrorRow(log, "the count of the time of devices failed")
        while True:
            pools: Counter[str] = Counter()
            for link in self._workers.all():
                pools[link.record.pool or link.record.role] += link.record.ranks
            with errors.caught():
                try:
                    if pools:
                        await self._store.count_devices(pools)
                except BatonError as error:
                    log.debug("the time of devices cannot be counted: %s", error.message)
            await asyncio.sleep(DEVICES_S)


def _shown(row: UsageRow, by: Sequence[Dimension]) -> dict[str, Any]:
    values = row.model_dump()
    values["class"] = values.pop("class_")
    names = {name: values.pop(name) for name in DIMENSIONS}
    return {name: names[name] for name in by} | values


def _dimensions(text: str) -> tuple[Dimension, ...]:
    """Parse a list, separated by commas, of the dimensions by which a report is grouped. Raises
    InvalidRequest."""
    names = [name.strip() for name in text.split(",")]
    known = [one for one in DIMENSIONS if one in names]
    if len(set(names)) != len(names) or len(known) != len(names):
        raise InvalidRequest(f"by must list some of {', '.join(DIMENSIONS)}, each once", param="by")
    return tuple(known)


def _days(start: str, end: str, now: float) -> list[str]:
    """Return the days that a report covers, by default the last ``USUAL_DAYS``. Raises
    InvalidRequest."""
    last = _day(end, "end") or datetime.date.fromisoformat(day_of(now))
    first = _day(start, "start") or last - datetime.timedelta(days=USUAL_DAYS - 1)
    if first > last:
        raise InvalidRequest("start must not be after end", param="start")
    count = (last - first).days + 1
    if count > MAX_DAYS:
        raise InvalidRequest(f"start and end may be at most {MAX_DAYS} days apart", param="start")
    return [f"{first + datetime.timedelta(days=n):%Y-%m-%d}" for n in range(count)]


def _day(text: str, param: str) -> datetime.date | None:
    try:
        return datetime.date.fromisoformat(text) if text else None
    except ValueError:
        raise InvalidRequest(f"{param} must be a day such as 2026-11-23", param=param) from None
