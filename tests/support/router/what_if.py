"""Shared by the tests of what if and by other tests."""

from __future__ import annotations

from router.core.recent_requests import RecentRequest
from tests.support.router.looks import record

WORKERS = [record("prefill-0"), record("decode-0"), record("decode-1")]


def recent(count: int, *, output: int | None = 10) -> list[RecentRequest]:
    return [RecentRequest(100.0 + n, 50, output, 16) for n in range(count)]
