"""The ledger: the bills of a router process, from the end of their requests to the sums in Redis.

    a request ends ─journal→ it outlives this process ─SETTLE→ added to usage and budgets, once

A bill is written before the client has received the end of its answer. The journals of dead
processes are reported by the next process of the cluster that starts on their machine.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import redis
import redis.asyncio

from baton.config.cluster import Config
from baton.host.background import end_tasks, spawn
from baton.request import Principal
from baton.telemetry.logs import ErrorRow
from baton.telemetry.metrics import RouterMetrics
from router.billing.bill import Bill, HeldBudget, Sums, number_of
from router.billing.budgets import Budget, Budgets, Hold
from router.billing.journal import Journal
from router.billing.ledger_scripts import SETTLE
from router.billing.prices import BillLine, PriceTable
from router.core.script_queue import ScriptCall, call_together

log = logging.getLogger(__name__)

PAUSE_S = 0.2
"""Time for which a router collects bills before it reports them to Redis together, in seconds."""
AWAY_S = 1.0
CLOSE_S = 2.0
"""Maximum time for reporting bills to Redis at the end of a process, in seconds. Bills that are
left stay in the process's journal."""
OTHER_TENANTS = "other"
"""Metric label that stands for tenants that are not in the configuration."""


class Ledger:
    """The ledger of a router process. Owned by its event loop.

    new ─start→ reporting ─close→ closed
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        cluster_id: str,
        config: Config,
        metrics: RouterMetrics,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self.prices = PriceTable(config)
        self.budgets = Budgets(config, metrics, unix_clock=unix_clock)
        self._client = client
        self._script = client.register_script(SETTLE)
        self._cluster_id = cluster_id
        self._prefix = f"baton:{{{cluster_id}}}"
        self._folder: Path = config.data_folder / "bills"
        self._metrics = metrics
        self._tenants = frozenset(config.tenant_weights)
        self._unix_clock = unix_clock
        self._writer = secrets.token_hex(8)
        self._journal: Journal | None = None
        self._written = 0
        """Number of the last bill that was written to the journal."""
        self._settled = 0
        """Number of the last bill that Redis has."""
        self._of_slices: deque[tuple[int, tuple[Budget, ...], int]] = deque()
        """Bills that Redis does not have yet, of requests that held parts of slices: each with its
        number, budgets and nanodollars."""
        self._woken = asyncio.Event()
        self._reporting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start reporting bills; those in the journals of dead processes come first."""
        self._reporting = spawn(self._report(), "bills")

    async def close(self) -> None:
        """Report the remaining bills, for at most ``CLOSE_S`` seconds."""
        if self._reporting is not None:
            await end_tasks([self._reporting])
        if self._journal is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._report_all(self._journal, self._writer)
        except (TimeoutError, redis.RedisError) as error:
            log.warning("some bills stay in %s for the next router: %s", self._folder, error)
        if unwritten := self._journal.unwritten:
            self._metrics.lost_bills.inc(unwritten)
            log.error("%d bills are lost: the disk is full, and Redis does not answer", unwritten)
        remove = not self._journal.has_more
        self._journal.close(remove=remove)
        self._journal = None
        if remove:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self._forget_writer(self._writer)
            except (TimeoutError, redis.RedisError) as error:
                log.debug("the number of the last bill stays in Redis: %s", error)

    def settle(
        self,
        principal: Principal,
        agent: str,
        answer_id: str,
        hold: Hold | None,
        lines: Sequence[BillLine],
        fingerprint: str = "",
    ) -> None:
        """Write the bill of a request that ended, and release its holds. Does not wait.

        ``fingerprint``: that of the workers that answered. ``lines`` is empty for a request that
        is not billed. ``hold`` is None if no budget applies
        to the request.
        """
        held = () if hold is None or not hold.amount else self._held(hold)
        if not lines and not held:
            return
        entry = hold.entry if hold is not None and held else ""
        bill = Bill(
            answer_id,
            principal.tenant,
            principal.key_id,
            agent,
            int(self._unix_clock()),
            entry,
            held,
            tuple(lines),
            fingerprint,
        )
        self._count(bill)
        try:
            if self._journal is None:
                self._journal = Journal.create(self._folder, self._cluster_id, self._writer)
            self._journal.append(bill.to_line(self._written + 1))
        except OSError as error:
            self._metrics.lost_bills.inc()
            log.error("the bill of %s is lost: %s", answer_id, error)
            return
        self._written += 1
        if hold is not None and held:
            self._let_go(hold, bill.cost)
        self._woken.set()

    def _held(self, hold: Hold) -> tuple[HeldBudget, ...]:
        return tuple(
            HeldBudget(budget.kind, budget.name, budget.every, period)
            for budget, period in zip(hold.budgets, hold.periods, strict=True)
        )

    def _let_go(self, hold: Hold, cost: int) -> None:
        if hold.from_slices:
            self.budgets.correct(hold.budgets, cost - hold.amount)
            self._of_slices.append((self._written, hold.budgets, cost))
        hold.amount, hold.from_slices = 0, False

    def _count(self, bill: Bill) -> None:
        tenant = bill.tenant if bill.tenant in self._tenants else OTHER_TENANTS
        for line in bill.lines:
            for kind, cost in zip(("input", "cached_input", "output"), line.costs, strict=True):
                if cost:
                    series = self._metrics.cost_dollars.labels(tenant, line.context_class, kind)
                    series.inc(cost / 1e9)

    async def _report(self) -> None:
        # An error must not stop this loop: no bill would be reported any more.
        errors = ErrorRow(log, "the report of bills failed")
        found = False
        while True:
            pause_s = AWAY_S
            with errors.caught():
                try:
                    if not found:
                        await self._report_left()
                        found = True
                    await self._woken.wait()
                    await asyncio.sleep(PAUSE_S)
                    self._woken.clear()
                    if self._journal is not None:
                        await self._report_all(self._journal, self._writer)
                    pause_s = 0.0
                except (redis.RedisError, OSError) as error:
                    log.warning("bills are reported later: %s", error)
            if pause_s:
                self._woken.set()
            await asyncio.sleep(pause_s)

    async def _report_left(self) -> None:
        """Report the journals of dead processes. Raises ``redis.RedisError``, OSError.

        A journal with a bill that cannot be read stays, and holds back no others.
        """
        for writer, journal in Journal.left(self._folder, self._cluster_id):
            remove = False
            try:
                await self._report_all(journal, writer)
                remove = True
                log.info("reported the bills of a router that died")
            except (ValueError, TypeError, LookupError):
                log.exception(
                    "a journal in %s has a bill that cannot be read: %s.%s.bills stays there",
                    self._folder,
                    self._cluster_id,
                    writer,
                )
            finally:
                journal.close(remove=remove)
            if remove:
                await self._forget_writer(writer)

    async def _forget_writer(self, writer: str) -> None:
        """Delete from Redis the number of a process's last bill, once its journal is gone and no
        more bills can follow."""
        await self._client.delete(*Sums(self._prefix, writer).keys)

    async def _report_all(self, journal: Journal, writer: str) -> None:
        """Report the bills of a journal that Redis does not have. Raises ``redis.RedisError``."""
        settled = self._settled if writer == self._writer else 0
        while lines := journal.lines():
            fresh = [line for line in lines if number_of(line) > settled]
            if fresh:
                settled = await self._send(writer, settled, fresh)
                if writer == self._writer:
                    self._settled = settled
            if number_of(lines[-1]) <= settled:
                journal.read_over(lines)
                self._forget_slices()

    async def _send(self, writer: str, settled: int, lines: Sequence[bytes]) -> int:
        """Send bills of the process ``writer`` to Redis. Return the number of its last bill that
        Redis has."""
        sums = Sums(self._prefix, writer)
        for line in lines:
            sums.add(line)
        args = (settled, number_of(lines[-1]), sums.operations())
        (answer,) = await call_together(self._client, [ScriptCall(self._script, sums.keys, args)])
        if isinstance(answer, Exception):
            raise answer
        return int(answer)

    def _forget_slices(self) -> None:
        while self._of_slices and self._of_slices[0][0] <= self._settled:
            _, budgets, cost = self._of_slices.popleft()
            self.budgets.correct(budgets, -cost)
