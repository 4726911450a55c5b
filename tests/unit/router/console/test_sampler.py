"""Samples of the router's counters and decode batches, which all who ask share."""

from __future__ import annotations

from typing import cast

from baton.request import LoadSnapshot
from router.console.sampler import YOUNG_S, RouterSampler, Samples, batch_fill
from router.console.snapshot import WINDOW_S
from router.workers.worker_link import WorkerLink
from tests.support.router.front_fakes import make_front
from tests.support.router.looks import record


class FakeLink:
    """A worker's record and load."""

    def __init__(self, slot: str, running: int, max_sequences: int = 8) -> None:
        self.record = record(slot, max_sequences=max_sequences)
        self.engine_load = LoadSnapshot(running=running)


def links(*fakes: FakeLink) -> list[WorkerLink]:
    return [cast(WorkerLink, fake) for fake in fakes]


def test_batches_are_those_of_decode_workers() -> None:
    assert batch_fill(links(FakeLink("prefill-0", 8))) is None
    both = links(FakeLink("decode-0", 8), FakeLink("decode-1", 0, 24), FakeLink("prefill-0", 8))
    assert batch_fill(both) == 0.25


def test_batches_older_than_the_window_are_forgotten() -> None:
    samples = Samples()
    for now, fill in ((0.0, 1.0), (1.0, None), (WINDOW_S - 0.5, 0.5), (WINDOW_S, 0.25)):
        samples.add(now, {}, {}, fill)
    assert samples.fills == [(WINDOW_S - 0.5, 0.5), (WINDOW_S, 0.25)]


async def test_a_young_sample_is_shared() -> None:
    front = make_front()
    now = 0.0
    workers = links(FakeLink("decode-0", 4))
    sampler = RouterSampler(front.metrics, lambda: workers, lambda: now)
    ended = "requests", "short", "ok", ""
    front.metrics.requests.labels(*ended[1:]).inc()
    front.metrics.active_requests.set(3)
    first = await sampler.sample(YOUNG_S)
    assert (first.counts[ended], first.gauges["active",], first.fills) == (1, 3, [(0.0, 0.5)])
    front.metrics.requests.labels(*ended[1:]).inc()
    now = YOUNG_S / 2
    assert (await sampler.sample(YOUNG_S)).counts[ended] == 1
    assert (await sampler.sample()).counts[ended] == 2, "the console wants its own"
    now = 2 * YOUNG_S
    workers = []
    last = await sampler.sample(YOUNG_S)
    assert last.window.growth(WINDOW_S)[0] == 2 * YOUNG_S
    assert len(last.fills) == 2, "without decode workers there is no batch"
