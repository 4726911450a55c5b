"""A bill: the tokens and the cost of one API request, for the journal and for the sums in Redis."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.config.choices import BudgetPeriod
from router.billing.budget_scripts import KEYS_OF_A_BUDGET
from router.billing.prices import BillLine

_MEASURES = ("r", "i", "c", "o", "n")
"""Letters of the measures in a bill: requests, prompt tokens, cached tokens, output tokens,
nanodollars; see ``ledger_scripts``."""


@dataclass(frozen=True, slots=True)
class HeldBudget:
    """A budget on which a request has held its own maximum cost."""

    kind: str
    name: str
    every: BudgetPeriod
    period: str
    """The budget's period in which the request was admitted, and to which its cost counts."""


@dataclass(frozen=True, slots=True)
class Bill:
    """The bill of one API request, possibly of several prompts. A failed request has no lines."""

    answer_id: str
    tenant: str
    key: str
    agent: str
    at: int
    """End of the request, in Unix seconds."""
    entry: str
    """Name under which Redis keeps the amounts of budgets that the request holds; empty: the
    request holds none."""
    budgets: tuple[HeldBudget, ...]
    lines: tuple[BillLine, ...]
    fingerprint: str = ""
    """Fingerprint of the workers that answered; empty if none did."""

    @property
    def cost(self) -> int:
        """Cost of the request in nanodollars."""
        return sum(line.cost for line in self.lines)

    def to_line(self, number: int) -> bytes:
        """Encode the bill, with this number, as a line of the journal."""
        held = [[one.kind, one.name, one.every, one.period] for one in self.budgets]
        sums = [
            [one.context_class, 1, one.input_tokens, one.cached_tokens, one.output_tokens, one.cost]
            for one in self.lines
        ]
        own = [self.answer_id, self.tenant, self.key, self.agent, self.at, self.entry]
        fields = [number, *own, held, sums, self.fingerprint]
        return json.dumps(fields, separators=(",", ":")).encode()


def number_of(line: bytes) -> int:
    """Return the number of a bill from its line in the journal."""
    return int(line[1 : line.index(b",")])


def day_of(at: float) -> str:
    """Return the UTC day of a Unix time: ``2026-11-23``."""
    return f"{datetime.datetime.fromtimestamp(at, datetime.UTC):%Y-%m-%d}"


def hour_of(at: float) -> str:
    """Return the UTC hour of a Unix time: ``2026-11-23T14``."""
    return f"{datetime.datetime.fromtimestamp(at, datetime.UTC):%Y-%m-%dT%H}"


def answers_key(prefix: str, tenant: str, at: float) -> str:
    """Return the Redis key of the answers of a tenant in the hour of a Unix time."""
    return f"{prefix}:usage:answers:{tenant}:{hour_of(at)}"


def usage_key(prefix: str, day: str) -> str:
    """Return the Redis key of the usage sums of a day."""
    return f"{prefix}:usage:{day}"


class Sums:
    """Sums up bills as operations of the script ``SETTLE``, with the Redis keys that they name."""

    def __init__(self, prefix: str, writer: str) -> None:
        """Create empty sums. ``prefix`` is that of all Redis keys; ``writer`` is the process that
        wrote the bills."""
        self._prefix = prefix
        self.keys = [f"{prefix}:usage:writer:{writer}"]
        self._places: dict[str, int] = {}
        self._usage: list[dict[str, Any]] = []
        self._numbers: dict[tuple[str, ...], int] = {}
        """Number, from 1, of the operation in ``_usage`` for each day, tenant, key, class, agent
        and fingerprint."""
        self._answers: list[dict[str, Any]] = []
        self._budgets: dict[tuple[str, ...], dict[str, Any]] = {}

    def add(self, line: bytes) -> None:
        """Add the bill in a line of a journal."""
        # Bills of older routers have no fingerprint.
        _, answer_id, tenant, key, agent, at, entry, held, sums, *more = json.loads(line)
        fingerprint = more[0] if more else ""
        place = 0
        for context_class, *amounts in sums:
            whose = (tenant, key, context_class, agent, fingerprint)
            place = self._add_usage(whose, at, amounts)
        if place:
            answers = self._place([answers_key(self._prefix, tenant, at)])
            day = day_of(at)
            self._answers.append({"answers": answers, "day": day, "id": answer_id, "usage": place})
        cost = sum(amounts[-1] for _, *amounts in sums)
        for kind, name, every, period in held:
            self._add_budget((kind, name, every), period, entry, cost)

    def operations(self) -> str:
        """Encode all operations as JSON for the script ``SETTLE``."""
        told = {
            "usage": self._usage,
            "answers": self._answers,
            "budgets": list(self._budgets.values()),
        }
        # Lua reads an empty list as well as an empty table.
        return json.dumps(told, separators=(",", ":"))

    def _add_usage(self, whose: tuple[str, ...], at: float, amounts: Sequence[int]) -> int:
        """Add ``amounts`` to the usage sums of ``whose`` (tenant, key, class, agent and
        fingerprint) on the day of ``at``. Return the number, from 1, of the operation that adds
        them."""
        day = day_of(at)
        number = self._numbers.get((day, *whose))
        if number is None:
            own = usage_key(self._prefix, day)
            tenant, key, context_class, agent, fingerprint = whose
            self._usage.append(
                {
                    "day": self._place([own]),
                    "agents": self._place([f"{own}:agents"]),
                    "tenant": tenant,
                    "key": key,
                    "class": context_class,
                    "agent": agent,
                    "fingerprint": fingerprint,
                    "sums": dict.fromkeys(_MEASURES, 0),
                }
            )
            number = self._numbers[(day, *whose)] = len(self._usage)
        sums = self._usage[number - 1]["sums"]
        for measure, amount in zip(_MEASURES, amounts, strict=True):
            sums[measure] += amount
        return number

    def _add_budget(self, whose: tuple[str, str, str], period: str, entry: str, cost: int) -> None:
        known = self._budgets.get((*whose, period))
        if known is None:
            name = ":".join((f"{self._prefix}:budget", *whose))
            first = self._place([f"{name}:{part}" for part in KEYS_OF_A_BUDGET])
            known = {"first": first, "period": period, "cost": 0, "holds": []}
            self._budgets[(*whose, period)] = known
        known["cost"] += cost
        known["holds"].append(entry)

    def _place(self, keys: list[str]) -> int:
        """Add Redis keys that follow each other to the keys of the script, unless they are there.
        Return the position of the first one among all keys, from 1 as in Lua."""
        place = self._places.get(keys[0])
        if place is None:
            place = self._places[keys[0]] = len(self.keys) + 1
            self.keys += keys
        return place
