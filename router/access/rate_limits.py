"""Rate limits and budgets of API keys, kept in Redis so that all routers share them.

Requests and tokens per minute follow the generic cell rate algorithm (virtual scheduling: ITU-T
Recommendation I.371, annex A): a key's limit refills steadily, and a whole minute's worth may be
used at once. Redis stores one theoretical arrival time for each limit. Concurrency is a set of
requests. An entry expires at its request's deadline, in case its router dies.
``router/access/limit_scripts.py`` has the scripts that Redis runs.

    arriving ─a limit is used up→ refused
    arriving ─counted as a request→ there ─its prompt is known→ charged what it may cost
    there, charged ─it ends, however that is→ left: charged what it took, the rest is given back
    there ─its prompt is known→ holds what it may cost of its budgets ─its bill is kept→ released

A request that is refused after its arrival, for any reason, counts as a request. The answers of a
request may cost ``max_tokens`` each, but are charged the length of the key's longest recent answer
if that is less. Otherwise clients that leave the limit at its maximum would be served one at a
time.

    reachable ─a call has no answer in time→ unreachable ─after AWAY_S→ reachable

While Redis is unreachable, each router process enforces the limits by its own count
(``router.access.own_limits``). The requests are counted in a metric, and charged when Redis is
reachable again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

import redis
import redis.asyncio

from baton.autoscaling.traffic import RunningMean
from baton.config.access import KeyConfig
from baton.config.money import dollars_text
from baton.errors import BudgetExceeded, RateLimitExceeded, RequestTooLarge
from baton.host.background import end_tasks, spawn
from baton.telemetry.metrics import RouterMetrics
from router.access.limit_scripts import ENTER, LEAVE
from router.access.own_limits import OwnLimits
from router.access.visit import Allowance, Visit
from router.billing.budgets import SLICE_S, Budget, Budgets, Hold
from router.core.script_queue import MAX_TOGETHER, ScriptCall, ScriptQueue, call_together

log = logging.getLogger(__name__)

ANSWER_S = 0.25
"""Maximum time in seconds that a request waits for Redis, including the wait for a connection.
After this time, the router's own count decides."""
AWAY_S = 1.0
"""Seconds without calls to Redis after a call has failed. So a dead Redis delays one request per
pause, not every request."""
MAX_CONNECTIONS = 4
MAX_WAITING = 1024
"""Maximum number of requests that wait for a connection to Redis. The router's own count decides
about further ones."""
MAX_REPORTS = 16384
"""Maximum number of ended requests that are reported one by one, about 10 MB. Further ones that
Redis may not have counted are reported together, by key."""
LEASE_S = 180.0
"""Seconds for which a request without a deadline still counts as running after its router has died.
An example is a request of a batch."""
_RENEW_S = LEASE_S / 3
_RECENT = 64
"""Number of latest answers of an API key whose lengths are remembered."""
_MIN_EXPECTED_TOKENS = 512
"""Minimum advance charge of an answer, in tokens, unless its ``max_tokens`` is less. It applies
however short the key's answers were, so that short answers do not make long ones cheap."""
_FIRST_STAY_S = 1.0
_WEIGHT = 0.1
_MICROSECONDS = 1_000_000
_CONCURRENCY, _BUDGET = 3, 4
"""Numbers by which the script's answer names a limit: the number of the concurrency limit, and the
number of the first budget."""
_LIMIT_FIELDS = 6
"""Number of fields in the script's answer before the fields of the budgets."""


@dataclass(slots=True)
class _Use:
    """Statistics of one API key's recent requests at this router. They predict the key's next
    requests."""

    stay: RunningMean = field(default_factory=lambda: RunningMean(_WEIGHT))
    """Mean duration of the API key's requests, in seconds."""
    answers: deque[int] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Lengths in tokens of the API key's latest answers."""

    def answer_tokens(self) -> int:
        """Return the number of tokens that the next answer for the API key is expected not to
        exceed."""
        return max(_MIN_EXPECTED_TOKENS, max(self.answers, default=0))


@dataclass(slots=True)
class _Report:
    """A pending report to Redis about one ended request, or about several that Redis may not have
    counted.
    """

    key: KeyConfig
    entry: str
    requests: int
    tokens: int
    unsure: bool
    sent: bool = False


class RateLimits:
    """Counts requests against the limits of a cluster's API keys. Owned by the router's event
    loop."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        cluster_id: str,
        metrics: RouterMetrics,
        clock: Callable[[], float] = time.monotonic,
        budgets: Budgets | None = None,
    ) -> None:
        """Create the limits of a cluster's API keys. ``budgets`` None means that no key has a
        budget."""
        self._client = client
        self._budgets = budgets
        self._enter_script = client.register_script(ENTER)
        self._leave = client.register_script(LEAVE)
        self._prefix = f"baton:{{{cluster_id}}}"
        self._metrics = metrics
        self._clock = clock
        self._away_until = float("-inf")
        self._own = OwnLimits()
        self._uses: dict[str, _Use] = {}
        # Clients may give two requests the same id, so entries have names of their own.
        self._entries = map(f"{secrets.token_hex(6)}-{{}}".format, count())
        self._queue = ScriptQueue(client, connections=MAX_CONNECTIONS, max_waiting=MAX_WAITING)
        self._reports: dict[str, _Report] = {}
        """Pending reports about one ended request each, by the name of the request's entry in
        Redis, the oldest first."""
        self._owed: dict[str, _Report] = {}
        """Reports that sum up several ended requests of an API key, by key. More requests can be
        added to a report until it is sent."""
        self._reporting: asyncio.Task[None] | None = None
        self._renewed: dict[str, Visit] = {}
        self._renewing: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Wait until the pending reports have been sent to Redis, at most ``2 * ANSWER_S``
        seconds.
        """
        await self._queue.close()
        if self._renewing is not None:
            await end_tasks([self._renewing])
        if self._reporting is not None:
            await asyncio.wait([self._reporting], timeout=2 * ANSWER_S)
            await end_tasks([self._reporting])

    async def arrive(self, key: KeyConfig, deadline_s: float | None) -> Visit | None:
        """Count a request against its API key's limits. The caller must call ``leave`` when the
        request ends. Return None if no limit applies.

        ``deadline_s``: seconds within which the request ends; None if it has no deadline. Raises
        RateLimitExceeded with the remaining limits and the time to retry; then ``leave`` must not
        be called."""
        budgets = self._budgets.of(key) if self._budgets is not None else ()
        if not key.limited and not budgets:
            return None
        lease_s = LEASE_S if deadline_s is None else deadline_s
        hold = Hold(next(self._entries), budgets)
        visit = Visit(key, hold, lease_s, self._clock())
        if key.limited:
            await self._enter(visit)
        if deadline_s is None:
            self._renewed[visit.hold.entry] = visit
            if self._renewing is None:
                self._renewing = spawn(self._renew(), "leases of requests")
        return visit

    async def _enter(self, visit: Visit) -> None:
        try:
            answer = await self._ask(visit, requests=1, tokens=0)
        except BaseException:
            self.leave(visit)
            raise
        if answer is not None:
            visit.unsure = False
            self._take(visit, answer)
            self._count_own(visit, 0, enforced=False)
            return
        self._metrics.rate_limit_failures.inc()
        try:
            self._take(visit, self._count_own(visit, 0, enforced=True))
        except RateLimitExceeded:
            if visit.sent:
                # Redis may have counted it.
                self.leave(visit)
            raise

    def _count_own(self, visit: Visit, tokens: int, *, enforced: bool) -> list[int]:
        now, entry = self._clock(), visit.hold.entry
        return self._own.charge(visit.key, entry, tokens, now, enforced=enforced)

    async def charge(
        self, visit: Visit, prompt_tokens: int, answers: Sequence[int], cost: int = 0
    ) -> None:
        """Charge a request the maximum that it can cost. The charge replaces an earlier one of the
        same request.

        ``answers``: the maximum number of tokens of each answer. ``cost``: the maximum cost in
        nanodollars. Raises RateLimitExceeded, RequestTooLarge if the prompt has more tokens than
        the key's limit per minute, and Unavailable if no budget can be checked."""
        wanted = self._tokens_to_charge(visit, prompt_tokens, answers)
        # An unsure request is charged at its end.
        more = 0 if visit.unsure else max(0, wanted - visit.reserved)
        cost = cost if visit.hold.budgets else 0
        if visit.unsure and wanted:
            self._take(visit, self._count_own(visit, wanted, enforced=True))
        if not more and not cost:
            return
        # An unsure request stays unsure: its end charges what Redis did not count.
        sure = not visit.unsure
        visit.unsure = visit.unsure or more > 0
        answer = await self._ask(visit, requests=0, tokens=more, cost=cost)
        if answer is None:
            self._metrics.rate_limit_failures.inc()
            if more:
                self._take(visit, self._count_own(visit, wanted, enforced=True))
            if cost and self._budgets is not None:
                self._budgets.hold_of_slices(visit.hold, cost)
            return
        visit.unsure = not sure
        self._take(visit, answer, cost)
        visit.reserved += more
        if more:
            self._count_own(visit, wanted, enforced=False)
        if cost and self._budgets is not None:
            self._budgets.hold(visit.hold, cost)

    def _tokens_to_charge(self, visit: Visit, prompt_tokens: int, answers: Sequence[int]) -> int:
        """Return the tokens that a request is to be charged in all. Raises RequestTooLarge."""
        limit = visit.key.tokens_per_minute
        if not limit:
            return 0
        if limit < prompt_tokens:
            raise RequestTooLarge(
                f"the prompt has {prompt_tokens} tokens; the API key allows {limit} per minute"
            )
        expected = self._use(visit.key).answer_tokens()
        return min(limit, prompt_tokens + sum(min(one, expected) for one in answers))

    def answered(self, visit: Visit, prompt_tokens: int, answers: Sequence[int]) -> None:
        """Record how many tokens a request used for its prompt and answers. They are charged when
        the request ends."""
        visit.tokens += prompt_tokens + sum(answers)
        self._use(visit.key).answers.append(max(answers, default=0))

    def leave(self, visit: Visit) -> None:
        """Record the end of a request that ``arrive`` has counted. A task reports it to Redis
        later."""
        self._renewed.pop(visit.hold.entry, None)
        if not visit.key.limited:
            return
        now = self._clock()
        self._use(visit.key).stay.add(now - visit.entered_at)
        self._own.leave(visit.key, visit.hold.entry, visit.tokens, now)
        report = _Report(visit.key, visit.hold.entry, 1, visit.tokens, visit.unsure)
        if visit.unsure and (not visit.sent or len(self._reports) >= MAX_REPORTS):
            owed = self._owed.get(visit.key.name)
            if owed is not None and not owed.sent and owed.key == visit.key:
                owed.requests += 1
                owed.tokens += visit.tokens
                return
            self._owed[visit.key.name] = report
        self._reports[visit.hold.entry] = report
        if self._reporting is None or self._reporting.done():
            self._reporting = asyncio.create_task(self._report_all(), name="ended requests")

    def _use(self, key: KeyConfig) -> _Use:
        return self._uses.setdefault(key.name, _Use())

    def _take(self, visit: Visit, answer: Sequence[int], cost: int = 0) -> None:
        """Process the answer of Redis, or of the own count, after a charge of ``cost`` nanodollars
        for a request. Raises RateLimitExceeded."""
        key = visit.key
        numbers = list(map(int, answer))
        refused, wait, requests, requests_reset, left, left_reset = numbers[:_LIMIT_FIELDS]
        limits = (
            Allowance("requests", key.requests_per_minute, requests, requests_reset / 1e6),
            Allowance("tokens", key.tokens_per_minute, left, left_reset / 1e6),
        )
        visit.allowances = tuple(limit for limit in limits if limit.limit)
        used = self._learn_budgets(visit, numbers[_LIMIT_FIELDS:])
        if refused >= _BUDGET:
            place = refused - _BUDGET
            raise self._budget_refusal(visit, visit.hold.budgets[place], used[place], cost)
        if refused:
            raise self._refusal(visit, refused, wait / 1e6)

    def _learn_budgets(self, visit: Visit, numbers: Sequence[int]) -> Sequence[int]:
        """Process the part of an answer of Redis that describes the budgets. Return the used amount
        of each budget, in nanodollars."""
        if self._budgets is None or not numbers:
            return ()
        used = numbers[::2]
        for budget, spent, held in zip(visit.hold.budgets, used, numbers[1::2], strict=True):
            self._budgets.learn(budget, spent, held, self._clock() - ANSWER_S)
            slows = budget.slow_at < budget.limit
            visit.hold.slow = visit.hold.slow or (slows and spent >= budget.slow_at)
        return used

    def _budget_refusal(self, visit: Visit, budget: Budget, used: int, cost: int) -> BudgetExceeded:
        assert self._budgets is not None
        return BudgetExceeded(
            f"the request may cost ${dollars_text(cost)}, and {budget} for"
            f" {self._budgets.period(budget)} has ${dollars_text(max(0, budget.limit - used))} left"
            f" of ${dollars_text(budget.limit)}: lower max_tokens, or wait for the next period",
            retry_after=self._budgets.seconds_left(budget),
            facts=visit.headers(),
        )

    def _refusal(self, visit: Visit, refused: int, wait_s: float) -> RateLimitExceeded:
        key = visit.key
        limit = (
            f"{key.requests_per_minute} requests a minute",
            f"{key.tokens_per_minute} tokens a minute",
            f"{key.concurrency} requests at a time",
        )[refused - 1]
        if refused == _CONCURRENCY:
            # On average, one of the running requests ends in this time.
            mean = self._use(key).stay.value
            wait_s = (_FIRST_STAY_S if mean is None else mean) / max(1, key.concurrency)
        return RateLimitExceeded(
            f"the API key's limit of {limit} is used up",
            retry_after=wait_s,
            facts=visit.headers(),
        )

    async def _ask(
        self, visit: Visit, *, requests: int, tokens: int, cost: int | None = None
    ) -> Any:
        """Send a charge to Redis and return its answer; None if Redis is unreachable."""
        if self._clock() < self._away_until:
            return None
        asked = self._queue.put(self._call(visit, requests, tokens, cost))
        if asked is None:
            return None
        answer = asked.answer
        try:
            # ``wait`` does not cancel the command, neither at a disconnect nor at this deadline.
            await asyncio.wait([answer], timeout=ANSWER_S)
        finally:
            if asked.sent:
                # Retrieve an error that arrives after the wait.
                answer.add_done_callback(lambda late: late.cancelled() or late.exception())
            else:
                answer.cancel()
            error = answer.exception() if answer.done() and not answer.cancelled() else None
            never = error is not None and isinstance(error.__context__, ConnectionRefusedError)
            visit.sent = visit.sent or (asked.sent and not never)
        if answer.done() and not answer.cancelled() and error is None:
            return answer.result()
        log.warning(
            "Redis is unreachable, this router enforces limits by its own count: %s",
            error or f"no answer within {ANSWER_S} s",
        )
        self._away_until = self._clock() + AWAY_S
        return None

    def _call(
        self, visit: Visit, requests: int, tokens: int, cost: int | None = None
    ) -> ScriptCall:
        """Build the script call that charges a request. ``cost``: nanodollars to hold of the
        budgets; None: the budgets are not checked."""
        key = visit.key
        limits = (key.requests_per_minute, key.tokens_per_minute, key.concurrency)
        left_us = int(visit.lease_s * _MICROSECONDS)
        args: list[int | str] = [*limits, requests, tokens, visit.hold.entry, left_us]
        if self._budgets is None or cost is None:
            return ScriptCall(self._enter_script, self._keys(key), (*args, 0, 0, "", 0))
        slice_us = int(SLICE_S * _MICROSECONDS)
        args += [len(visit.hold.budgets), cost, self._budgets.holder, slice_us]
        keys = self._keys(key)
        for budget in visit.hold.budgets:
            args += self._budgets.arguments(budget)
            keys += budget.keys(self._prefix)
        return ScriptCall(self._enter_script, keys, args)

    async def _report_all(self) -> None:
        """Send all pending reports to Redis. A report that arrives twice is counted once."""
        while self._reports:
            reports = list(islice(self._reports.values(), MAX_TOGETHER))
            for report in reports:
                # Add no more requests to a report that was sent: Redis counts an entry once.
                report.sent = True
            errors = await self._report(reports)
            if errors:
                log.warning("rate limits: ended requests are reported later: %s", errors[0])
                await asyncio.sleep(AWAY_S)

    async def _report(self, reports: Sequence[_Report]) -> list[Exception]:
        calls = [
            ScriptCall(
                self._leave,
                self._keys(report.key),
                (
                    report.key.requests_per_minute,
                    report.key.tokens_per_minute,
                    report.requests,
                    report.tokens,
                    report.entry,
                    int(report.unsure),
                ),
            )
            for report in reports
        ]
        try:
            answers = await call_together(self._client, calls)
        except redis.RedisError as error:
            return [error]
        for report, answer in zip(reports, answers, strict=True):
            if not isinstance(answer, Exception):
                del self._reports[report.entry]
        return [answer for answer in answers if isinstance(answer, Exception)]

    async def _renew(self) -> None:
        """Renew the leases of requests without a deadline, so that these requests still count as
        running."""
        while True:
            await asyncio.sleep(_RENEW_S)
            visits = iter(list(self._renewed.values()))
            while together := list(islice(visits, MAX_TOGETHER)):
                calls = [self._call(visit, 0, 0, visit.hold.amount or None) for visit in together]
                try:
                    await call_together(self._client, calls)
                except Exception as error:
                    # No error may stop the renewals: limits would count too few requests.
                    log.warning("rate limits: running requests are renewed later: %r", error)
                    break

    def _keys(self, key: KeyConfig) -> list[str]:
        kinds = ("requests", "tokens", "running", "clock", "charged", "ended")
        return [f"{self._prefix}:limit:{key.name}:{kind}" for kind in kinds]
