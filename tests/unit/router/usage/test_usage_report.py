"""Sums of usage by what a caller asks for."""

from __future__ import annotations

from router.usage.usage_report import UsageEntry, grouped

PLACE = ("2026-11-23", "acme", "k", "short", "writer", "f")
OTHER = ("2026-11-24", "acme", "k", "long", "critic", "g")


def entries() -> list[UsageEntry]:
    return [
        UsageEntry(PLACE, "requests", 2),
        UsageEntry(PLACE, "input_tokens", 100),
        UsageEntry(PLACE, "cost", 3_000_000),
        UsageEntry(PLACE, "successes", 2),
        UsageEntry(PLACE, "scored", 2),
        UsageEntry(PLACE, "score", 1500),
        UsageEntry(OTHER, "requests", 1),
        UsageEntry(OTHER, "cost", 1),
        UsageEntry(OTHER, "failures", 1),
    ]


def test_a_row_for_each_group_and_a_total() -> None:
    rows, total = grouped(entries(), ("agent",))
    critic, writer = rows
    assert (writer.agent, writer.requests, writer.input_tokens) == ("writer", 2, 100)
    assert (writer.cost, writer.cost_per_success, writer.mean_score) == ("0.003", "0.0015", 0.75)
    assert (critic.agent, critic.cost, critic.cost_per_success) == ("critic", "0.000000001", None)
    assert (critic.failures, critic.mean_score) == (1, None)
    assert (total.requests, total.cost, total.agent) == (3, "0.003000001", None)


def test_groups_of_several_names_are_in_their_order() -> None:
    rows, _ = grouped(entries(), ("day", "class"))
    assert [(row.day, row.class_) for row in rows] == [
        ("2026-11-23", "short"),
        ("2026-11-24", "long"),
    ]
    rows, _ = grouped(entries(), ("fingerprint",))
    assert [(row.fingerprint, row.requests) for row in rows] == [("f", 2), ("g", 1)]
    rows, _ = grouped(entries(), ("tenant",))
    assert [(row.tenant, row.requests) for row in rows] == [("acme", 3)]
