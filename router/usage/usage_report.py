"""Sums of usage, grouped by dimensions such as day, tenant or key. Plain Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict

from baton.config.money import dollars_text

Dimension = Literal["day", "tenant", "key", "class", "agent", "fingerprint"]
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)


@dataclass(frozen=True, slots=True)
class UsageEntry:
    """One sum in the ledger: a measure's amount on one day, for one tenant, key, class, agent and
    fingerprint."""

    place: tuple[str, str, str, str, str, str]
    """Day, tenant, key, class, agent and fingerprint of the sum, in the order of ``DIMENSIONS``."""
    measure: str
    """Name of the measure, one of ``router.billing.ledger_scripts.MEASURES``."""
    amount: int


class UsageRow(BaseModel):
    """Usage of one group. Dimensions that are not grouped by are null."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    day: str | None = None
    tenant: str | None = None
    key: str | None = None
    class_: str | None = None
    agent: str | None = None
    fingerprint: str | None = None
    """Fingerprint of the workers that answered: of their weights, quantization and types."""
    requests: int = 0
    """Number of billed requests."""
    input_tokens: int = 0
    """Prompt tokens, with cached ones."""
    cached_input_tokens: int = 0
    output_tokens: int = 0
    cost: str = "0"
    """Exact cost in dollars."""
    successes: int = 0
    """Number of answers whose feedback reports a success."""
    failures: int = 0
    cost_per_success: str | None = None
    """``cost`` divided by ``successes``, in dollars; null without any."""
    mean_score: float | None = None
    """Mean of the scores in feedback."""


@dataclass(slots=True)
class _Group:
    sums: dict[str, int] = field(default_factory=dict)

    def add(self, entry: UsageEntry) -> None:
        self.sums[entry.measure] = self.sums.get(entry.measure, 0) + entry.amount

    def row(self, names: dict[str, str]) -> UsageRow:
        sums = self.sums
        cost, successes = sums.get("cost", 0), sums.get("successes", 0)
        scored = sums.get("scored", 0)
        shown = {("class_" if name == "class" else name): value for name, value in names.items()}
        return UsageRow(
            **shown,
            requests=sums.get("requests", 0),
            input_tokens=sums.get("input_tokens", 0),
            cached_input_tokens=sums.get("cached_input_tokens", 0),
            output_tokens=sums.get("output_tokens", 0),
            cost=dollars_text(cost),
            successes=successes,
            failures=sums.get("failures", 0),
            cost_per_success=dollars_text(round(cost / successes)) if successes else None,
            mean_score=sums.get("score", 0) / 1000 / scored if scored else None,
        )


def grouped(
    entries: Iterable[UsageEntry], by: Sequence[Dimension]
) -> tuple[list[UsageRow], UsageRow]:
    """Return one row per group, in the order of the groups' names, and one row with the sums over
    all groups."""
    groups: dict[tuple[str, ...], _Group] = {}
    total = _Group()
    places = [DIMENSIONS.index(one) for one in by]
    for entry in entries:
        names = tuple(entry.place[place] for place in places)
        groups.setdefault(names, _Group()).add(entry)
        total.add(entry)
    rows = [group.row(dict(zip(by, names, strict=True))) for names, group in sorted(groups.items())]
    return rows, total.row({})
