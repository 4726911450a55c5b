"""What refusals cost a real router, before timed workers and a queue that is full."""

from __future__ import annotations

from loadtest.research.timings.refusals import KINDS, measure


async def test_every_kind_of_request_is_refused_as_it_should_be() -> None:
    rows, flood = await measure(turns=1, requests=40, seconds=0.2, clients=1)
    assert [row.name for row in rows] == [kind.name for kind in KINDS]
    assert [row.ratio is not None for row in rows] == [kind.compared for kind in KINDS]
    assert flood.refused_per_s > 0
